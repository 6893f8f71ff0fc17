"""`holdfast plan --list`: the known models and GPUs, with their sizes; no torch."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import NamedTuple

from holdfast.cli.layout import Line, Table, table_lines
from holdfast.cli.tables import show
from holdfast.cli.terminal import dumps, write_answer
from holdfast.memory.devices import LEAST_CAPABILITY, PLANNED_GPUS
from holdfast.memory.sizes import format_bytes
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE, SAME, SOURCES
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.spec import LayerKind

PLANNED = " *"
"""Marks a model that this version does not run."""
HEADING = ("dim",)
"""Style of the first row."""
KV_FORMAT = "bfloat16"
"""KV format for the column of bytes per token."""


class ModelRow(NamedTuple):
    """One model of the catalogue."""

    name: str
    runs: bool
    parameters: int
    """Parameters without layers that draft tokens."""
    weight_bytes: int
    """Weight bytes as published."""
    kv_bytes_per_token: float
    kv_bytes_per_sequence: int
    """Bytes of windows or states, independent of length."""
    max_position: int
    source: str


def model_rows() -> tuple[ModelRow, ...]:
    """List every model of the catalogue."""
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
    """Count parameters and bytes from one layer per kind, because large models have tens of thousands of tensors."""
    declaration = declared.declaration
    if not isinstance(declaration, DecoderDeclaration) or declared.stored:
        return _listed(declared)
    counts = Counter(map(declaration.decoder.layer_kind, range(declaration.decoder.num_layers)))
    alone = {kind: _listed(replace(declared, declaration=_layers(declaration, kind, 1))) for kind in counts}
    kind, one = next(iter(alone.items()))
    two = _listed(replace(declared, declaration=_layers(declaration, kind, 2)))
    parameters, num_bytes = (
        2 * own - both + sum(count * (alone[kind][i] - 2 * own + both) for kind, count in counts.items())
        for i, (own, both) in enumerate(zip(one, two, strict=True))
    )
    return parameters, num_bytes


def _layers(declaration: DecoderDeclaration, kind: LayerKind, num_layers: int) -> DecoderDeclaration:
    """Return a declaration with this many layers of one kind."""
    spec, every, none = declaration.decoder, frozenset(range(num_layers)), frozenset[int]()
    made = replace(spec, num_layers=num_layers, sliding_windows=spec.sliding_windows[:num_layers])
    if spec.experts is not None:
        dense, tables = none if kind.experts else every, every if kind.has_table else none
        made = replace(made, experts=replace(spec.experts, dense_layers=dense, table_layers=tables))
    if spec.latent is not None and spec.latent.index is not None:
        index = replace(spec.latent.index, shared_layers=none if kind.index else every)
        made = replace(made, latent=replace(spec.latent, index=index))
    if spec.state is not None:
        made = replace(made, state=replace(spec.state, layers=every) if kind.has_state else None)
    if spec.compressed is not None:
        made = replace(made, compressed=replace(spec.compressed, compressors=(kind.compressor,) * num_layers))
    return declaration._replace(decoder=made)


def _listed(declared: DeclaredModel) -> tuple[int, int]:
    parameters = sum(prod(weight.shape) for weight in declared.parameters())
    return parameters, declared.weight_bytes(declared.checkpoint_dtype)


def show_names(*, as_json: bool) -> None:
    """Print two tables, or one JSON object."""
    if as_json:
        gpus = [gpu._asdict() | {"runs": not gpu.is_too_old} for gpu in PLANNED_GPUS.values()]
        models = [row._asdict() for row in model_rows()]
        write_answer(f"{dumps({'models': models, 'same': dict(SAME), 'gpus': gpus}, indent=1)}\n")
        return
    show([*model_lines(model_rows()), Line(""), *gpu_lines()])


def model_lines(rows: tuple[ModelRow, ...]) -> list[Line]:
    """Print the models in 80 columns."""
    cells = [("model", "size", "weights", "KV", "context")]
    for row in rows:
        cells.append(
            (
                f"{row.name}{'' if row.runs else PLANNED}",
                billions(row.parameters),
                format_bytes(row.weight_bytes),
                f"{row.kv_bytes_per_token:,.0f}",
                (f"{row.max_position:,}" if row.max_position < 10**7 else f"{row.max_position // 2**20}M"),
            )
        )
    return [
        Line(f"{len(rows)} models by name, and {len(SAME)} names of others with the same figures:"),
        *table_lines(Table(tuple(cells), right=(1, 2, 3, 4)), HEADING),
        Line(f"{PLANNED.strip()} planned only: this version does not run it. KV: bytes of a token in {KV_FORMAT}."),
    ]


def gpu_lines() -> list[Line]:
    """Print the GPUs in 80 columns."""
    cells = [("gpu", "memory", "its driver gives", "capability", "")]
    for gpu in PLANNED_GPUS.values():
        mark = "too old to run" if gpu.is_too_old else "never tried" if gpu.key == "gb10" else ""
        capability = ".".join(map(str, gpu.capability))
        cells.append((gpu.key, f"{gpu.nominal_gb} GB", format_bytes(gpu.total_bytes), capability, mark))
    least = ".".join(map(str, LEAST_CAPABILITY))
    return [
        Line(f"{len(PLANNED_GPUS)} GPUs by name; kernels need compute capability {least}:"),
        *table_lines(Table(tuple(cells), right=(1, 2, 3), wraps=(4,)), HEADING),
        Line("AMD, Apple, Intel, Jetson, TPU: --gpu NAME says what to do instead."),
    ]


def billions(count: int) -> str:
    """Format a number of parameters, such as 7.6B."""
    return f"{count / 1e9:,.1f}B" if count >= 999_500_000 else f"{count / 1e6:,.0f}M"
