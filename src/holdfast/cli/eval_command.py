"""`holdfast eval kv`: what each KV format costs in quality, on a text of one's own, as a table, a record and a page; no torch."""

import difflib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.answers import write_answer
from holdfast.cli.eval_progress import EvalBar
from holdfast.cli.eval_record import quality_record
from holdfast.cli.eval_table import EvalView, quality_lines
from holdfast.cli.failures import log_plainly
from holdfast.cli.opening import import_torch, model_name
from holdfast.cli.options import Given
from holdfast.cli.page import eval_page, page_file, write_page
from holdfast.cli.plan_command import show
from holdfast.cli.side_lines import MAX_PATH, write_line
from holdfast.cli.strict_json import dumps
from holdfast.cli.values import read_count
from holdfast.config import EngineConfig
from holdfast.engine.progress import LoadingBar, is_watched
from holdfast.engine.text_windows import MIN_WINDOW, cut_windows
from holdfast.errors import ConfigError, PromptError, shown
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.quant.formats import KV_FORMATS

if TYPE_CHECKING:
    from holdfast.engine.kv_contenders import Entry

STDOUT = "-"
ALL = "all"
MAX_TEXT_BYTES = 64 * 2**20
MAX_WINDOW = 2**24
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EvalOptions(NamedTuple):
    """What is asked of this command alone."""

    model: str | None = None
    text: str | None = None
    formats: str = ALL
    window: str = "1024"
    tokens: str | None = None
    json_file: str | None = None
    html: str | None = None


def eval_kv(options: EvalOptions, engine: Given) -> None:
    """Measure, and tell. Everything that was typed is checked before a model is touched."""
    names = read_formats(options.formats)
    window, max_tokens = read_window(options.window), read_tokens(options.tokens)
    json_file, html = record_file(options.json_file), None
    if options.html is not None:
        html = page_file(options.html, "--html")
    config = EngineConfig.from_options(model=options.model, **engine)
    text = read_text(options.text)
    log_plainly()
    tell_rounding(window, max_tokens)
    model = open_model(config.model, config.load_format)
    try:
        import_torch()
        view = _measure(config, model, names, text, Path(str(options.text)).name, window, max_tokens)
    finally:
        model.source.close()
    tell(view, text, json_file, html)


def _measure(
    config: EngineConfig,
    model: OpenModel,
    names: tuple[str, ...] | None,
    text: str,
    text_name: str,
    window: int,
    max_tokens: int | None,
) -> EvalView:
    from holdfast.engine.build import open_tokenizer
    from holdfast.engine.kv_contenders import open_contenders, settle_config
    from holdfast.engine.kv_quality import measure

    name = model_name(config)
    windows = cut_windows(open_tokenizer(config, model), text, window, max_tokens, model.spec.vocab_size)
    config = settle_config(config, model, window)
    entries = _entries(config, model, names)
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


def _entries(config: EngineConfig, model: OpenModel, names: tuple[str, ...] | None) -> "list[Entry]":
    """The reference, and whoever was asked for; all that can run where nobody was."""
    from holdfast.engine.kv_contenders import format_entry, narrower_formats, reference_entry

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
        write_line("\n".join(line.text for line in lines))
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
        if name not in KV_FORMATS:
            near = difflib.get_close_matches(name, KV_FORMATS, n=1, cutoff=0.3)
            do = f"did you mean {near[0]}?" if near else f"write --formats {ALL}"
            raise ConfigError(f"--formats {shown(name)} was asked", f"the formats are {', '.join(KV_FORMATS)}", do)
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
