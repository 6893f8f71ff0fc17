"""Dummy weights of a well-known model by name, packed if the name says so: blocks of normal numbers, repeated; no torch until a read.

    Qwen/Qwen3.6-27B:Q4_K_M with load_format="dummy"

opens the shapes of the catalogue, with matrices in the types that llama.cpp mixes. Nothing is read from a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.loading.locate import locate_config
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.stored_schemes import dummy_source, quantization_of, read_stored_schemes
from holdfast.loading.release import as_named
from holdfast.loading.release_names import bare_name, find_release
from holdfast.loading.sources.dummy import DummySource
from holdfast.loading.sources.source import Columns, PackedWriter
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.blueprints.read import declare_config, refuse_planned_only
from holdfast.models.catalogue import find_model, is_known
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.grouped_readers import FAMILIES, model_settings, parameters
from holdfast.models.parameters import Parameter
from holdfast.models.settings import Settings
from holdfast.quant.packed_schemes import PackedScheme

if TYPE_CHECKING:
    import torch

SAMPLES = "samples"
SAMPLE_ROWS = 31
"""Rows of each sample. A prime, so neighbouring heads and experts differ."""


class SampleKey(NamedTuple):
    """What a sample depends on: all rows of such matrices repeat one."""

    scheme: PackedScheme
    num_columns: int


def open_named_dummy(model: str, revision: str | None = None) -> OpenModel | None:
    """Open a model of the catalogue with dummy weights; None if there is a path or a cached config.json of that name."""
    name = bare_name(model)
    if not is_known(name) or locate_config(model, revision) is not None:
        return None
    label, config = find_model(name)
    refuse_planned_only(config, label)
    declared = as_named(declare_config(config, label), model)
    assert declared.spec is not None, f"{label}: {declared.not_runnable}"
    spec, release = declared.spec, find_release(model) if declared.release else None
    wanted, family, settings = parameters(spec), FAMILIES[spec.architecture], model_settings(Settings(config, label))
    stored = None
    if release is not None and release.mix:
        source: DummySource = PackedDummySource(wanted, spec.checkpoint_dtype, part_schemes(declared))
    else:
        stored = read_stored_schemes(quantization_of(settings), label)
        source = dummy_source(wanted, spec.checkpoint_dtype, stored)
        stored = None if stored is None else stored.used_by(source.entries)
    ends = settings.token_ids("eos_token_id", family.eos_token_ids)
    shown = f"{label}:{declared.release}" if declared.release else label
    return OpenModel(
        Path(label), "directory", spec, wanted, source, GenerationDefaults(ends), stored=stored, label=shown
    )


def part_schemes(declared: DeclaredModel) -> dict[str, PackedScheme]:
    """Return the scheme of every packed tensor of a checkpoint, by its name there."""
    found: dict[str, PackedScheme] = {}
    for weight in declared.parameters():
        schemes = declared.packed.get(weight.name, ())
        if isinstance(schemes, str):  # why it cannot stay packed
            continue
        for place, tensor in enumerate(weight.tensors if schemes else ()):
            scheme = schemes[place % len(schemes)]
            if scheme is not None:
                found[tensor] = scheme
    return found


class PackedDummySource(DummySource):
    """Dummy weights, some of them in GGUF blocks: a quantized sample of normal numbers, repeated."""

    def __init__(self, wanted: Iterable[Parameter], dtype: str, packed: Mapping[str, PackedScheme]) -> None:
        super().__init__(wanted, dtype)
        keys: dict[SampleKey, None] = {}
        for name, scheme in packed.items():
            entry = self.entries[name]
            *leading, num_columns = entry.shape
            num_bytes = scheme.row_bytes(num_columns)
            for size in leading:
                num_bytes *= size
            self.entries[name] = replace(entry, packed=scheme, num_bytes=num_bytes)
            keys[SampleKey(scheme, num_columns)] = None
        self._starts: dict[SampleKey, int] = {}
        self._sample_bytes = 0
        for key in keys:
            self._starts[key] = self._sample_bytes
            self._sample_bytes += SAMPLE_ROWS * key.scheme.row_bytes(key.num_columns)

    @property
    def writer_specs(self) -> tuple[TensorSpec, ...]:
        """Those of plain weights, and the samples of all kinds of matrices."""
        return (*super().writer_specs, TensorSpec(SAMPLES, (self._sample_bytes,), "uint8"))

    def packed_writer(self, tensors: Mapping[str, torch.Tensor]) -> PackedWriter:
        """Return a writer that repeats rows of the samples, which it quantizes on the host."""
        import torch

        samples = tensors[SAMPLES]
        for key, start in self._starts.items():
            sample = torch.cat([plane.flatten() for plane in _sample(key)])
            samples[start : start + len(sample)].copy_(sample)
        return _SampleWriter(samples, self._starts).write

    def read_tiles(
        self, name: str, scheme: PackedScheme, rows: tuple[int, int], tiles_GX: torch.Tensor, columns: Columns = None
    ) -> int | None:
        """Interleave rows of a sample; all scales are finite."""
        import torch

        from holdfast.quant.packed_tiles import stored_scheme
        from holdfast.quant.tile_values import arrange_reference

        num_columns, stored = self.entries[name].shape[-1], stored_scheme(scheme)
        first, last = columns or (0, num_columns)
        planes = []
        for plane, sample in zip(stored.planes, _sample(SampleKey(stored, num_columns)), strict=True):
            sample_SB = sample.view(SAMPLE_ROWS, -1)[:, plane.row_bytes(first) : plane.row_bytes(last)]
            own_RB = torch.empty(rows[1] - rows[0], sample_SB.shape[1], dtype=torch.uint8)
            _repeat_rows(sample_SB, rows[0], own_RB)
            planes.append(own_RB.view(getattr(torch, plane.dtype)))
        arrange_reference(scheme, planes, tiles_GX)
        return None


class _SampleWriter:
    """Copies rows of samples into planes."""

    def __init__(self, samples: torch.Tensor, starts: Mapping[SampleKey, int]) -> None:
        self._samples, self._starts = samples, starts

    def write(
        self, num_columns: int, scheme: PackedScheme, rows: tuple[int, int], out: torch.Tensor, columns: Columns = None
    ) -> None:
        from holdfast.quant.packed_weight import plane_bytes

        start, (first, last) = self._starts[SampleKey(scheme, num_columns)], columns or (0, num_columns)
        size = SAMPLE_ROWS * scheme.row_bytes(num_columns)
        held = plane_bytes(scheme, SAMPLE_ROWS, num_columns, self._samples[start : start + size])
        views = plane_bytes(scheme, rows[1] - rows[0], last - first, out.view(-1))
        for plane, sample_SB, own_RB in zip(scheme.planes, held, views, strict=True):
            _repeat_rows(sample_SB[:, plane.row_bytes(first) : plane.row_bytes(last)], rows[0], own_RB)


@cache
def _sample(key: SampleKey) -> tuple[torch.Tensor, ...]:
    """Return the planes of some rows of normal numbers, as bytes: a product keeps the length of its inputs."""
    import torch

    from holdfast.kernels.load.quantize_blocks import quantize_blocks
    from holdfast.quant.stored_blocks import split

    generator = torch.Generator().manual_seed(key.num_columns)
    values = torch.randn(SAMPLE_ROWS, key.num_columns, generator=generator) / sqrt(key.num_columns)
    planes = split(quantize_blocks(values, key.scheme.title), key.scheme.title)
    return tuple(plane.contiguous().view(torch.uint8) for plane in planes)


def _repeat_rows(sample_SB: torch.Tensor, start: int, out_RB: torch.Tensor) -> None:
    """Fill rows with those of a sample from `start`, cyclically, in at most three copies."""
    place, num_rows = start % SAMPLE_ROWS, out_RB.shape[0]
    head = min(num_rows, SAMPLE_ROWS - place)
    out_RB[:head].copy_(sample_SB[place : place + head])
    rounds = (num_rows - head) // SAMPLE_ROWS
    whole = out_RB[head : head + rounds * SAMPLE_ROWS]
    whole.view(rounds, *sample_SB.shape).copy_(sample_SB.expand(rounds, *sample_SB.shape))
    tail = out_RB[head + rounds * SAMPLE_ROWS :]
    tail.copy_(sample_SB[: len(tail)])
