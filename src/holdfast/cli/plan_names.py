"""`holdfast plan --list`: models and GPUs that are known by name, with what a plan would say of each; no torch."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from holdfast.cli.layout import Line, Table, table_lines
from holdfast.cli.tables import show
from holdfast.cli.terminal import dumps, write_answer
from holdfast.memory.devices import GPUS, LEAST_CAPABILITY
from holdfast.memory.sizes import format_bytes
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE, SAME, SOURCES
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.decoder_declaration import DecoderDeclaration

PLANNED = " *"
"""Behind the name of a model that this version does not run."""
HEADING = ("dim",)
"""The style of the first row."""
KV_FORMAT = "bfloat16"
"""In which bytes of a token are told."""


class ModelRow(NamedTuple):
    """One model of the catalogue."""

    name: str
    runs: bool
    parameters: int
    """Of the model itself, without layers that draft tokens."""
    weight_bytes: int
    """As its makers store it."""
    kv_bytes_per_token: float
    kv_bytes_per_sequence: int
    """What windows take of a sequence, whatever its length."""
    max_position: int
    source: str


def model_rows() -> tuple[ModelRow, ...]:
    """Every model, in the catalogue's order."""
    return tuple(_row(declare_config(config, name)) for name, config in CATALOGUE.items())


def _row(declared: DeclaredModel) -> ModelRow:
    parameters, weight_bytes = _sizes(declared)
    return ModelRow(
        declared.name,
        declared.not_runnable is None,
        parameters,
        weight_bytes,
        float(declared.kv_bytes_per_token(KV_FORMAT)),
        declared.kv_bytes_per_sequence(KV_FORMAT),
        declared.max_position,
        SOURCES[declared.name],
    )


def _sizes(declared: DeclaredModel) -> tuple[int, int]:
    """Parameters and bytes. Of layers that are alike, behind the first dense ones, two are listed: large models have tens of thousands of tensors."""
    declaration = declared.declaration
    if not isinstance(declaration, DecoderDeclaration):
        return _listed(declared)
    experts, num_layers = declaration.decoder.experts, declaration.decoder.num_layers
    dense_layers = frozenset[int]() if experts is None else experts.dense_layers
    first = len(dense_layers) + 1
    if dense_layers != frozenset(range(first - 1)) or first >= num_layers:
        return _listed(declared)
    one, two = (_listed(replace(declared, declaration=_first_layers(declaration, first + more))) for more in (0, 1))
    more = num_layers - first
    return one[0] + more * (two[0] - one[0]), one[1] + more * (two[1] - one[1])


def _first_layers(declaration: DecoderDeclaration, num_layers: int) -> DecoderDeclaration:
    spec = declaration.decoder
    windows = spec.sliding_windows[:num_layers]
    return declaration._replace(decoder=replace(spec, num_layers=num_layers, sliding_windows=windows))


def _listed(declared: DeclaredModel) -> tuple[int, int]:
    weights = declared.parameters()
    parameters = sum(prod(weight.shape) for weight in weights if weight.group != "mtp")
    return parameters, declared.weight_bytes(declared.checkpoint_dtype)


def show_names(*, as_json: bool) -> None:
    """Two tables, or one JSON object with the same."""
    if as_json:
        gpus = [gpu._asdict() | {"runs": not gpu.is_too_old} for gpu in GPUS.values()]
        models = [row._asdict() for row in model_rows()]
        write_answer(f"{dumps({'models': models, 'same': dict(SAME), 'gpus': gpus}, indent=1)}\n")
        return
    show([*model_lines(model_rows()), Line(""), *gpu_lines()])


def model_lines(rows: tuple[ModelRow, ...]) -> list[Line]:
    """A table that 80 columns hold."""
    cells = [("model", "size", "weights", "KV/token", "context")]
    for row in rows:
        cells.append(
            (
                f"{row.name}{'' if row.runs else PLANNED}",
                billions(row.parameters),
                format_bytes(row.weight_bytes),
                f"{row.kv_bytes_per_token:,.0f}",
                f"{row.max_position:,}",
            )
        )
    return [
        Line(f"{len(rows)} models by name, and {len(SAME)} names of others with the same figures:"),
        *table_lines(Table(tuple(cells), right=(1, 2, 3, 4)), HEADING),
        Line(f"{PLANNED.strip()} planned only: this version does not run it. KV is counted in {KV_FORMAT}."),
    ]


def gpu_lines() -> list[Line]:
    """A table that 80 columns hold."""
    cells = [("gpu", "memory", "its driver gives", "capability", "")]
    for gpu in GPUS.values():
        mark = "too old to run" if gpu.is_too_old else ""
        capability = ".".join(map(str, gpu.capability))
        cells.append((gpu.key, f"{gpu.nominal_gb} GB", format_bytes(gpu.total_bytes), capability, mark))
    least = ".".join(map(str, LEAST_CAPABILITY))
    return [
        Line(f"{len(GPUS)} GPUs by name; kernels need compute capability {least}:"),
        *table_lines(Table(tuple(cells), right=(1, 2, 3), wraps=(4,)), HEADING),
    ]


def billions(count: int) -> str:
    """A number of parameters as people say it."""
    return f"{count / 1e9:,.1f}B" if count >= 999_500_000 else f"{count / 1e6:,.0f}M"
