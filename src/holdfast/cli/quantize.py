"""`holdfast quantize`: write a model as a GGUF file, or as a compressed-tensors folder; no torch until then."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from holdfast.api.progress import Bar, is_watched
from holdfast.cli.layout import Table, table_lines
from holdfast.cli.opened_model import shown_download
from holdfast.cli.options import Given, read_choice
from holdfast.cli.tables import show
from holdfast.cli.terminal import log_plainly, raising_interrupts, write_line
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.loading.convert import (
    TARGETS,
    Conversion,
    TokenizerForms,
    plan_conversion,
    refuse_output,
    write_conversion,
)
from holdfast.loading.locate import refuse_wrong_path
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.writing.gguf_header import GGUFValue
from holdfast.loading.writing.written import WritePlan
from holdfast.memory.sizes import format_bytes
from holdfast.text.gguf_vocabulary import gguf_vocabulary, tokenizer_files

HEADING = ("tensors", "before", "", "after", "", "why")


class QuantizeOptions(NamedTuple):
    """Options of this command."""

    model: str | None
    out: str | None
    to: str | None


class QuantizeBar(Bar):
    """`bar(done, total)` in elements."""

    def __init__(self, name: str) -> None:
        if not is_watched():
            return
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

        times = TaskProgressColumn(), TimeRemainingColumn(compact=True)
        self.open((TextColumn(f"Writing {name}", markup=False), BarColumn(), *times, TextColumn("left")))

    def __call__(self, num_done: int, num_total: int) -> None:
        if self._progress is not None:
            self._progress.start()
            self.update(completed=num_done, total=num_total)


def quantize(options: QuantizeOptions, engine: Given) -> None:
    """Plan, write, and print what was written. All options are checked before the model is opened."""
    typed_model, typed_out = (options.model, options.out) if options.out is not None else (None, options.model)
    if typed_out is None:
        raise ConfigError("cli.usage", program="holdfast quantize", reason="it needs OUT, a new file or folder")
    if options.to is None:
        raise ConfigError("cli.usage", program="holdfast quantize", reason=f"it needs --to {' or '.join(TARGETS)}")
    target = read_choice("--to", options.to, TARGETS)
    out = Path(typed_out).expanduser()
    refuse_output(out, None if typed_model is None else Path(typed_model).expanduser())
    config = EngineConfig.from_options(model=typed_model, **engine)
    log_plainly()
    if config.model is not None:
        refuse_wrong_path(config.model)
    model = open_model(config.model, config.load_format, config.revision, shown_download)
    with closing(model.source):
        conversion = plan_conversion(model, target, _forms(model))
        write_line(f"Writing {format_bytes(conversion.num_bytes)} to {out}, rounded to nearest")
        for note in conversion.plan.notes:
            write_line(note)
        _write(conversion, out)
    show(table_lines(Table(tuple(summary(conversion.plan)), right=(0, 2, 4), wraps=(5,)), styles=("bold",)))


def _forms(model: OpenModel) -> TokenizerForms:
    def metadata() -> dict[str, GGUFValue]:
        return gguf_vocabulary(model.path, model.name, model.spec.vocab_size, model.generation.eos_token_ids)

    def files() -> dict[str, str]:
        assert model.gguf is not None, f"{model.name} is no GGUF file"
        return tokenizer_files(model.gguf.metadata, model.name)

    return TokenizerForms(metadata, files)


def _write(conversion: Conversion, out: Path) -> None:
    import torch  # noqa: F401 - before Ctrl-C raises, which this import does not survive

    # Ctrl-C must not leave the partial file.
    with raising_interrupts(), QuantizeBar(out.name) as bar:
        write_conversion(conversion, out, bar)


def summary(plan: WritePlan) -> list[tuple[str, ...]]:
    """Return the rows of the table: weights by type before and after, and the sums."""
    rows = [
        (
            str(row.num_tensors),
            row.before_type,
            format_bytes(row.before_bytes),
            row.stored_as,
            format_bytes(row.num_bytes),
            row.reason,
        )
        for row in plan.rows
    ]
    sums = str(len(plan.tensors)), "in all", format_bytes(plan.before_bytes), "", format_bytes(plan.num_bytes), ""
    return [HEADING, *rows, sums]
