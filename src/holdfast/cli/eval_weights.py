"""`holdfast eval weights`: what each weight scheme costs in quality, as a table, a record and a page; no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.eval_command import ALL, read_text, read_tokens, read_window, record_file, tell, tell_rounding
from holdfast.cli.eval_progress import EvalBar
from holdfast.cli.eval_table import WEIGHTS, EvalView
from holdfast.cli.failures import log_plainly
from holdfast.cli.opening import import_torch, model_name
from holdfast.cli.options import Given
from holdfast.cli.page import page_file
from holdfast.cli.side_lines import write_line
from holdfast.config import EngineConfig
from holdfast.engine.text_windows import cut_windows
from holdfast.errors import ConfigError
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.models.blueprints.blueprint_recipe import BEFORE
from holdfast.quant.weight_schemes import UNQUANTIZED, find_scheme

if TYPE_CHECKING:
    from holdfast.engine.kv_quality import Quality
    from holdfast.engine.weight_quality_entries import Listener, SchemeEntry

TOPICS = "the topics of Python's help"
"""A text that every installation has."""


class WeightEvalOptions(NamedTuple):
    """What is asked of this command alone."""

    model: str | None = None
    text: str | None = None
    schemes: str = ALL
    window: str = "512"
    tokens: str = "1024"
    json_file: str | None = None
    html: str | None = None


def eval_weights(options: WeightEvalOptions, engine: Given) -> None:
    """Measure, and tell. Everything that was typed is checked before a model is touched."""
    names = read_schemes(options.schemes)
    window, max_tokens = read_window(options.window), read_tokens(options.tokens)
    json_file = record_file(options.json_file)
    html = None if options.html is None else page_file(options.html, "--html")
    ignore = engine.pop("quantization_ignore", ())
    # Patterns are for the schemes, of which any may be the one that shows what is wrong with them.
    EngineConfig.from_options(quantization="fp8", quantization_ignore=ignore)
    config = EngineConfig.from_options(model=options.model, **engine)
    text, text_name = topics_or_text(options.text)
    log_plainly()
    tell_rounding(window, max_tokens)
    import_torch()
    tell(measure(config, ignore, names, text, text_name, window, max_tokens), text, json_file, html)


def topics_or_text(file: str | None) -> tuple[str, str]:
    """The text of a file, or the one that is always there; and what it is called."""
    if file is not None:
        return read_text(file), Path(file).name
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()), TOPICS


def measure(
    config: EngineConfig,
    ignore: tuple[str, ...],
    names: tuple[str, ...] | None,
    text: str,
    text_name: str,
    window: int,
    max_tokens: int | None,
) -> EvalView:
    """Every scheme's figures; those that cannot run are left out with a line each where nobody named them."""
    from holdfast.engine.build import open_tokenizer
    from holdfast.engine.weight_quality_entries import (
        as_stored_entry,
        compare_schemes,
        plain_bytes,
        settle_entries,
        stored_scheme,
    )

    model = open_model(config.model, config.load_format)
    try:
        windows = cut_windows(open_tokenizer(config, model), text, window, max_tokens, model.spec.vocab_size)
        reference, settled = settle_entries(config, model, window)
        stored = stored_scheme(reference, model)
        entries = _entries(settled, model, names, ignore, stored)
        half_bytes = float(plain_bytes(model))
    finally:
        model.source.close()
    name = model_name(config)
    with _listening(name) as listener:
        qualities: list[Quality] = compare_schemes(as_stored_entry(reference, stored), entries, windows, listener)
    settings = f"{settled.dtype} on {settled.device}"
    return EvalView(name, settings, text_name, window, len(windows), half_bytes, qualities, WEIGHTS)


def read_schemes(typed: str) -> tuple[str, ...] | None:
    """The names that were typed, each once; None for all."""
    if typed.strip().lower() == ALL:
        return None
    names = tuple(dict.fromkeys(part.strip() for part in typed.split(",") if part.strip()))
    for name in names or (typed,):
        try:
            find_scheme(name)
        except ConfigError as error:
            asked = error.asked.replace("quantization=", "--schemes ", 1)
            raise ConfigError(asked, error.has, error.do) from error
    return names


def _entries(
    settled: EngineConfig,
    model: OpenModel,
    names: tuple[str, ...] | None,
    ignore: tuple[str, ...],
    stored: str | None,
) -> "list[SchemeEntry]":
    """Whoever was asked for, all that can run where nobody was; before them the dtype alone where it is not float32."""
    from holdfast.engine.weight_quality_entries import (
        REFERENCE_DTYPE,
        as_stored_entry,
        possible_schemes,
        scheme_entry,
    )

    if names is None:
        choice = possible_schemes(settled, model, ignore, stored)
        for name, reason in choice.left_out.items():
            write_line(f"{name} is left out: {reason}")
        names = choice.names
    wanted = [name for name in names if name != UNQUANTIZED]
    other = next((name for name in wanted if stored not in (None, name)), None)
    if other is not None:
        raise ConfigError(
            f"--schemes {other} was asked",
            f"{model.path.name} has its weights in {stored} already",
            f"leave --schemes out, or {BEFORE}",
        )
    plain = [] if settled.dtype == REFERENCE_DTYPE else [as_stored_entry(settled, stored)]
    return [*plain, *(scheme_entry(settled, name, ignore) for name in wanted)]


@contextmanager
def _listening(name: str) -> "Iterator[Listener]":
    """A bar of tokens over everything, and a line for each load: two bars at once would fight for the terminal."""
    from holdfast.engine.weight_quality_entries import Listener

    with EvalBar() as bar:
        yield Listener(lambda scheme: write_line(f"Loading {name} in {scheme}"), lambda done, total: None, bar)
