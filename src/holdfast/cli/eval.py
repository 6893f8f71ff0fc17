"""`holdfast eval`: what KV formats and weight schemes cost in quality, as a table, a record and a page; no torch."""

import datetime
import difflib
import hashlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from holdfast.api.llm import open_headers
from holdfast.api.progress import SECONDS_BETWEEN_UPDATES, LoadingBar, is_watched
from holdfast.cli import bench_record
from holdfast.cli.opened_model import BYTE_ORDER_MARK, import_torch, model_name, shown_download
from holdfast.cli.options import Given, read_count
from holdfast.cli.page import eval_page, page_file, write_page
from holdfast.cli.tables import WEIGHTS, EvalView, quality_lines, show, show_beside
from holdfast.cli.terminal import MAX_PATH, STDOUT, dumps, log_plainly, write_answer, write_line
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, PromptError, shown
from holdfast.eval.text_windows import MIN_WINDOW, cut_windows
from holdfast.loading.planning.open_model import OpenModel
from holdfast.models.declared_weights import BEFORE
from holdfast.quant.formats import ALL_KV_FORMATS
from holdfast.quant.weight_schemes import UNQUANTIZED, find_scheme

if TYPE_CHECKING:
    from holdfast.eval.kv_quality import Entry, Quality
    from holdfast.eval.weight_quality import Listener, SchemeEntry

NUM_LINES = 10
ALL = "all"
MAX_TEXT_BYTES = 64 * 2**20
MAX_WINDOW = 2**24
TOPICS = "the topics of Python's help"
"""A text that every installation has."""


class EvalBar:
    """`bar(done, total)` in tokens that some format or scheme has read."""

    def __init__(self) -> None:
        self._started_at = self._shown_at = time.monotonic()
        self._num_told = 0
        self._progress = None
        if not is_watched():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("Reading"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens, {task.fields[speed]:.0f} tokens/s, {task.fields[left]} left"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None, speed=0.0, left="-:--:--")

    def __enter__(self) -> "EvalBar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, num_done: int, num_total: int) -> None:
        now = time.monotonic()
        speed = num_done / max(now - self._started_at, 1e-6)
        how_far = num_done, num_total, speed
        if self._progress is None:
            self._tell(*how_far)
        elif now - self._shown_at >= SECONDS_BETWEEN_UPDATES or num_done == num_total:
            self._shown_at = now
            left = "-:--:--" if num_done == 0 else str(datetime.timedelta(seconds=round(_seconds_left(*how_far))))
            self._progress.update(self._task, completed=num_done, total=num_total, speed=speed, left=left)

    def _tell(self, num_done: int, num_total: int, speed: float) -> None:
        tenth = num_done * NUM_LINES // max(num_total, 1)
        if tenth > self._num_told:
            self._num_told = tenth
            left = _seconds_left(num_done, num_total, speed)
            write_line(f"read {num_done:,} of {num_total:,} tokens, {speed:.0f} tokens/s, {left:.0f} s left")


def _seconds_left(num_done: int, num_total: int, speed: float) -> float:
    """By the speed so far: chunks are read and compared in turns, and a speed of the last seconds is that of one of both."""
    return (num_total - num_done) / max(speed, 1e-6)


def quality_record(view: EvalView, command: Sequence[str], facts: Mapping[str, object]) -> dict[str, object]:
    """One run on this machine, now; the first result is the reference."""
    return {
        "section": view.subject.section,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": bench_record.machine(),
        "model": view.model,
        "settings": f"{view.settings}, {view.num_windows} windows of {view.window} tokens",
        "results": [_result(view, place) for place in range(len(view.qualities))],
        "command": shlex.join(command),
        "commit": bench_record.commit(),
        "versions": bench_record.versions(),
        "cpu": bench_record.cpu_name(),
        "num_cores": bench_record.num_cores(),
        "text": view.text,
        "window": view.window,
        "num_windows": view.num_windows,
        "reference": view.qualities[0].name,
        f"plain_{view.subject.size_key}": view.plain_bytes,
        **facts,
    }


def _result(view: EvalView, place: int) -> dict[str, object]:
    quality = view.qualities[place]
    figures = asdict(quality)
    return {
        "measure": figures.pop("name"),
        "unit": "nats",
        "values": {"mean_kl": quality.mean_kl},
        view.subject.size_key: figures.pop("size_bytes"),
        **figures,
        "ratio_to_16_bit": view.plain_bytes / quality.size_bytes,
        "perplexity_change": quality.perplexity / view.qualities[0].perplexity - 1,
    }


class EvalOptions(NamedTuple):
    """What is asked of this command alone."""

    model: str | None
    text: str | None
    formats: str
    window: str
    tokens: str | None
    json_file: str | None
    html: str | None


def eval_kv(options: EvalOptions, engine: Given) -> None:
    """Measure, and tell. Everything that was typed is checked before a model is touched."""
    names = read_formats(options.formats)
    window, max_tokens = read_window(options.window), read_tokens(options.tokens)
    json_file = record_file(options.json_file)
    html = None if options.html is None else page_file(options.html, "--html")
    config = EngineConfig.from_options(model=options.model, **engine)
    text = read_text(options.text)
    log_plainly()
    tell_rounding(window, max_tokens)
    model = open_headers(config, shown_download)
    try:
        import_torch()
        view = measure_formats(config, model, names, text, Path(str(options.text)).name, window, max_tokens)
    finally:
        model.source.close()
    tell(view, text, json_file, html)


def measure_formats(
    config: EngineConfig,
    model: OpenModel,
    names: tuple[str, ...] | None,
    text: str,
    text_name: str,
    window: int,
    max_tokens: int | None,
) -> EvalView:
    from holdfast.engine.open_text import open_tokenizer
    from holdfast.eval.kv_quality import measure, open_contenders, settle_config

    name = model_name(config)
    windows = cut_windows(open_tokenizer(config, model), text, window, max_tokens, model.spec.vocab_size)
    config = settle_config(config, model, window)
    entries = _format_entries(config, model, names)
    if not is_watched():
        write_line(f"Loading {name}")
    with LoadingBar() as bar:
        opened = open_contenders(entries, model, bar)
    try:
        with EvalBar() as bar:
            qualities = measure(opened.contenders[0], opened.contenders[1:], windows, bar)
    finally:
        opened.release()
    plain = float(opened.plain_bytes_per_token)
    settings = f"{config.dtype} on {config.device}"
    return EvalView(name, settings, text_name, window, len(windows), plain, qualities)


def _format_entries(config: EngineConfig, model: OpenModel, names: tuple[str, ...] | None) -> "list[Entry]":
    """The reference, and whoever was asked for; all that can run where nobody was."""
    from holdfast.eval.kv_quality import format_entry, narrower_formats, reference_entry

    if names is None:
        choice = narrower_formats(config, model)
        for name, reason in choice.left_out.items():
            write_line(f"{name} is left out: {reason}")
        names = choice.names
    return [reference_entry(config), *(format_entry(config, model, name) for name in names if name != config.dtype)]


def tell(view: EvalView, text: str, json_file: str | None, html: Path | None) -> None:
    """The table on stdout, and what else was asked for."""
    if html is not None:
        write_page(html, eval_page(view))
        write_line(f"page written to {shown(str(html), MAX_PATH)[1:-1]}")
    lines = quality_lines(view)
    if json_file is None:
        show(lines)
        return
    facts = {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    record = f"{dumps(quality_record(view, ['holdfast', *sys.argv[1:]], facts), indent=1)}\n"
    if json_file == STDOUT:
        show_beside(lines)
        write_answer(record)
        return
    show(lines)
    Path(json_file).write_text(record, encoding="utf-8")
    write_line(f"record written to {json_file}")


def read_formats(typed: str) -> tuple[str, ...] | None:
    """The names that were typed, each once; None for all."""
    if typed.strip().lower() == ALL:
        return None
    names = tuple(dict.fromkeys(part.strip() for part in typed.split(",") if part.strip()))
    for name in names or (typed,):
        if name not in ALL_KV_FORMATS:
            near = difflib.get_close_matches(name, ALL_KV_FORMATS, n=1, cutoff=0.3)
            do = f"did you mean {near[0]}?" if near else f"write --formats {ALL}"
            raise ConfigError(f"--formats {shown(name)} was asked", f"the formats are {', '.join(ALL_KV_FORMATS)}", do)
    return names


def read_window(typed: str) -> int:
    """Tokens of a window."""
    count = read_count(typed)
    if not isinstance(count, int) or not MIN_WINDOW <= count <= MAX_WINDOW:
        has = f"a whole number from {MIN_WINDOW} to {MAX_WINDOW} works"
        raise ConfigError(f"--window {shown(typed)} was asked", has, "write --window 1024")
    return count


def read_tokens(typed: str | None) -> int | None:
    """Most tokens of the text; None for all of them."""
    count = None if typed is None else read_count(typed)
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ConfigError(f"--tokens {shown(typed)} was asked", "a whole number from 1 up works", "write --tokens 16K")
    return count if isinstance(count, int) else None


def tell_rounding(window: int, max_tokens: int | None) -> None:
    """A line where one whole window is more than was asked for."""
    if max_tokens is not None and max_tokens < window:
        write_line(f"{window} tokens are read, not {max_tokens}: one whole window is the least; --window takes fewer")


def read_text(file: str | None) -> str:
    """The text of a file, which must be UTF-8."""
    if file is None:
        raise PromptError(
            "the quality of KV formats was asked", "it is measured on a text", "add --text and a file of plain text"
        )
    try:
        with Path(file).expanduser().open("rb") as opened:
            data = opened.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        has = getattr(error, "strerror", None) or "it is no path"
        raise PromptError(f"--text {shown(file)} was asked", has, "name a file of plain text") from error
    if len(data) > MAX_TEXT_BYTES:
        has = f"it has more than {MAX_TEXT_BYTES >> 20} MiB"
        raise PromptError(f"--text {shown(file)} was asked", has, "take a part of it, as with head -c 1M")
    data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"--text {shown(file)} was asked",
            f"byte {error.start} of it, 0x{data[error.start]:02x}, is not UTF-8",
            "convert it first, as with iconv -t utf-8",
        ) from error


def record_file(option: str | None) -> str | None:
    """Where --json is to be written, refused before a model is touched."""
    if option not in (None, STDOUT) and not Path(str(option)).absolute().parent.is_dir():
        raise ConfigError(f"--json {shown(option)} was asked", "its folder does not exist", "make it first")
    return option


class WeightEvalOptions(NamedTuple):
    """What is asked of this command alone."""

    model: str | None
    text: str | None
    schemes: str
    window: str
    tokens: str
    json_file: str | None
    html: str | None


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
    tell(measure_schemes(config, ignore, names, text, text_name, window, max_tokens), text, json_file, html)


def topics_or_text(file: str | None) -> tuple[str, str]:
    """The text of a file, or the one that is always there; and what it is called."""
    if file is not None:
        return read_text(file), Path(file).name
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()), TOPICS


def measure_schemes(
    config: EngineConfig,
    ignore: tuple[str, ...],
    names: tuple[str, ...] | None,
    text: str,
    text_name: str,
    window: int,
    max_tokens: int | None,
) -> EvalView:
    """Every scheme's figures; those that cannot run are left out with a line each where nobody named them."""
    from holdfast.engine.open_text import open_tokenizer
    from holdfast.eval.weight_quality import (
        as_stored_entry,
        compare_schemes,
        plain_bytes,
        settle_entries,
        stored_scheme,
    )

    model = open_headers(config, shown_download)
    try:
        windows = cut_windows(open_tokenizer(config, model), text, window, max_tokens, model.spec.vocab_size)
        reference, settled = settle_entries(config, model, window)
        stored = stored_scheme(reference, model)
        entries = _scheme_entries(settled, model, names, ignore, stored)
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


def _scheme_entries(
    settled: EngineConfig,
    model: OpenModel,
    names: tuple[str, ...] | None,
    ignore: tuple[str, ...],
    stored: str | None,
) -> "list[SchemeEntry]":
    """Whoever was asked for, all that can run where nobody was; before them the dtype alone where it is not float32."""
    from holdfast.eval.weight_quality import REFERENCE_DTYPE, as_stored_entry, possible_schemes, scheme_entry

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
    from holdfast.eval.weight_quality import Listener

    with EvalBar() as bar:
        yield Listener(lambda scheme: write_line(f"Loading {name} in {scheme}"), lambda done, total: None, bar)
