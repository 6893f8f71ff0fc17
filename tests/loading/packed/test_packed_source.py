"""PackedSource: each layout against its publisher's formula, bit by bit, in any range of rows and columns."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from for_each import for_each
from holdfast.loading.packed import bands as packed_bands
from holdfast.loading.packed import repack
from holdfast.loading.packed import tiles as packed_tiles
from holdfast.loading.packed.settings import read_packed
from holdfast.loading.packed.source import PackedSource, expand_packed
from holdfast.loading.sources.source import RowRead, read_rows
from holdfast.models.parameters import Parameter, Part
from loading.packed import packed_settings, packers
from loading.packed.packers import Packed
from loading.tensor_source import TensorSource, entry

Case = tuple[dict[str, Any], Callable[[np.random.Generator, int, int], Packed]]


def gptq_case(**settings: Any) -> Case:
    said = {key: value for key, value in settings.items() if key != "written"}
    return packed_settings.gptq(**said), lambda rng, rows, columns: packers.gptq(rng, rows, columns, **settings)


def int_case(**settings: Any) -> Case:
    known = {key: value for key, value in settings.items() if key != "dtype"}
    said = packed_settings.integers(**(known | {"order": "group" if settings.get("order") else None}))
    return (
        packed_settings.compressed("pack-quantized", said),
        lambda rng, rows, columns: packers.packed_int(rng, rows, columns, **settings),
    )


def byte_case(sym: bool = True, shape: Callable[[int, int], tuple[int, ...]] | None = None) -> Case:
    said = packed_settings.integers(-1, 8, sym)
    return (
        packed_settings.compressed("int-quantized", said),
        lambda rng, rows, columns: packers.int8(
            rng, rows, columns, sym=sym, shape=None if shape is None else shape(rows, columns)
        ),
    )


CASES: dict[str, Case] = {
    "awq": (packed_settings.awq(32), lambda rng, rows, columns: packers.awq(rng, rows, columns, 32)),
    "awq-channel": (packed_settings.awq(-1), lambda rng, rows, columns: packers.awq(rng, rows, columns, -1)),
    "auto-round-awq": (
        packed_settings.auto_round("auto_round:auto_awq", 64),
        lambda rng, rows, columns: packers.awq(rng, rows, columns, 64),
    ),
    "gptq-v1": gptq_case(group=32),
    "gptq-v2": gptq_case(group=64, version=2),
    "gptq-v1-8bit": gptq_case(group=32, bits=8),
    "gptq-v2-8bit": gptq_case(group=-1, bits=8, version=2),
    "gptq-sym": gptq_case(group=64, sym=True),
    "gptq-sym-8bit": gptq_case(group=64, sym=True, bits=8),
    "gptq-sym-mislabelled": gptq_case(group=32, sym=True, written=2),
    "gptq-order": gptq_case(group=32, order=True),
    "gptq-order-channel": gptq_case(group=-1, order=True, version=2),
    "auto-round-gptq": (
        packed_settings.auto_round("auto_round:auto_gptq", 32, sym=False),
        lambda rng, rows, columns: packers.gptq(rng, rows, columns, 32),
    ),
    "auto-round": (
        packed_settings.auto_round("auto_round", 32, sym=False),
        lambda rng, rows, columns: packers.gptq(rng, rows, columns, 32, version=2),
    ),
    "int4": int_case(group=32),
    "int4-asym": int_case(group=64, sym=False),
    "int4-channel": int_case(group=-1),
    "int4-channel-asym": int_case(group=-1, sym=False, dtype=torch.float16),
    "int4-order": int_case(group=32, sym=False, order=True),
    "int8-packed": int_case(group=32, bits=8, sym=False),
    "int8-rows": byte_case(),
    "int8-rows-asym": byte_case(sym=False),
    "int8-vector": byte_case(shape=lambda rows, columns: (rows,)),
    "int8-one": byte_case(sym=False, shape=lambda rows, columns: (1,)),
    "nvfp4": (packed_settings.compressed("nvfp4-pack-quantized", packed_settings.floats(16)), packers.nvfp4),
    "nvfp4-modelopt": (packed_settings.modelopt(), packers.modelopt_nvfp4),
    "mxfp4": (packed_settings.compressed("mxfp4-pack-quantized", packed_settings.floats(32)), packers.mxfp4),
    "fp8-tensor": (packed_settings.modelopt("FP8"), packers.fp8),
    "fp8-row": (packed_settings.modelopt("FP8"), lambda rng, rows, columns: packers.fp8(rng, rows, columns, "row")),
    "fp8-block": (
        packed_settings.modelopt("FP8"),
        lambda rng, rows, columns: packers.fp8(rng, rows, columns, "block"),
    ),
}
MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"


def parameter(num_rows: int, num_columns: int, module: str = MODULE) -> Parameter:
    shape = (num_rows, num_columns)
    return Parameter("layers.0.down.weight", shape, (Part(f"{module}.weight", 0, shape),))


def packed(
    case: str, num_rows: int, num_columns: int, seed: int = 0, known: bool = True
) -> tuple[PackedSource, Packed]:
    """A module of this layout; with `known`, a parameter says its shape."""
    said, make = CASES[case]
    made = make(np.random.default_rng(seed), num_rows, num_columns)
    tensors = {MODULE + suffix: values for suffix, values in made.tensors.items()}
    settings = read_packed(said)
    assert settings is not None
    parameters = [parameter(num_rows, num_columns)] if known else []
    return expand_packed(TensorSource(tensors=tensors), settings, parameters), made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, but for the sign of zeros."""
    return one.shape == other.shape and bool((one == other).all())


@for_each("case", CASES)
def test_packed_source_every_layout_equals_its_formula(case: str) -> None:
    source, made = packed(case, 40, 576)
    assert source.entries[NAME].dtype == "float32"
    assert source.entries[NAME].shape == (40, 576)
    assert same(read_rows(source, NAME, 0, 40), made.weight), case


@for_each("case", CASES)
def test_packed_source_reads_any_rows_and_columns(case: str) -> None:
    source, made = packed(case, 40, 576)
    for rows, columns in (((3, 29), (0, 576)), ((0, 40), (288, 576)), ((8, 16), (31, 33)), ((39, 40), (100, 575)),
                          ((5, 6), (575, 576)), ((16, 40), (64, 192)), ((0, 1), (0, 1))):  # fmt: skip
        found = read_rows(source, NAME, *rows, columns)
        assert same(found, made.weight[slice(*rows), slice(*columns)]), f"{case}: {rows}, {columns}"


@for_each("case", [case for case in CASES if "awq" not in case])
def test_packed_source_odd_rows_do_not_fill_the_last_words(case: str) -> None:
    source, made = packed(case, 37, 192)
    assert same(read_rows(source, NAME, 0, 37), made.weight), case
    assert same(read_rows(source, NAME, 33, 37, (64, 128)), made.weight[33:, 64:128]), case


def test_packed_source_fp8_blocks_of_rows_count_from_the_first_row() -> None:
    source, made = packed("fp8-block", 300, 200)
    for rows, columns in (((0, 300), (0, 200)), ((100, 290), (3, 150)), ((128, 130), (127, 129))):
        found = read_rows(source, NAME, *rows, columns)
        assert same(found, made.weight[slice(*rows), slice(*columns)]), f"{rows}, {columns}"


@pytest.mark.parametrize(("step", "tile"), [(32, 8), (96, 20), (700, 36)])
def test_packed_source_small_steps_give_equal_values(monkeypatch: pytest.MonkeyPatch, step: int, tile: int) -> None:
    monkeypatch.setattr(packed_tiles, "STEP_ELEMENTS", step)
    monkeypatch.setattr(packed_tiles, "SCALES_PER_TILE", tile)
    for case in ("awq", "gptq-v1", "gptq-order", "int4-asym", "int4-order", "nvfp4", "fp8-block"):
        source, made = packed(case, 24, 192)
        assert same(read_rows(source, NAME, 0, 24), made.weight), case
        assert same(read_rows(source, NAME, 3, 21, (17, 161)), made.weight[3:21, 17:161]), case


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_packed_source_hostile_shapes_equal_the_formula(data: st.DataObject) -> None:
    """Odd rows where a layout allows them, groups that end short, words that end short."""
    case = data.draw(st.sampled_from([*CASES]))
    said, _ = CASES[case]
    whole_rows = 8 if "awq" in case else 1
    num_rows = data.draw(st.integers(1, 9 if whole_rows == 8 else 45)) * whole_rows
    unit = 8 if said["quant_method"] in ("gptq", "auto-round") and "awq" not in case else 64
    unit = 1 if case in ("int4-channel", "int4-channel-asym", "int8-rows", "fp8-tensor", "fp8-block") else unit
    num_columns = data.draw(st.integers(1, 300 if unit == 1 else 40 if unit == 8 else 9)) * unit
    source, made = packed(case, num_rows, num_columns, data.draw(st.integers(0, 99)))
    first, low = data.draw(st.integers(0, num_rows - 1)), data.draw(st.integers(0, num_columns - 1))
    last, high = data.draw(st.integers(first + 1, num_rows)), data.draw(st.integers(low + 1, num_columns))
    assert same(read_rows(source, NAME, first, last, (low, high)), made.weight[first:last, low:high]), case


def test_packed_source_shape_without_a_parameter_follows_from_the_codes() -> None:
    for case in CASES:
        source, made = packed(case, 40, 576, known=False)
        assert same(read_rows(source, NAME, 0, 40), made.weight), case


@for_each("case", ["awq", "gptq-v1", "gptq-order", "gptq-v1-8bit"])
@for_each("kept", [False, True])
def test_packed_source_chunks_of_rows_read_every_word_once(
    case: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are rows of the file, so a chunk of outputs lies in every row: bands serve many chunks."""
    band_bytes = 48 * 40
    monkeypatch.setattr(packed_bands, "BAND_BYTES", band_bytes)
    monkeypatch.setattr(packed_bands, "KEPT_BYTES", 8 * band_bytes)
    source, made = packed(case, 200, 96)
    inner, scheme = source._source, source.entries[NAME].packed
    assert isinstance(inner, TensorSource)
    assert scheme is not None
    for start in range(0, 200, 7):
        end = min(start + 7, 200)
        if kept:
            source.read_packed(NAME, scheme, (start, end), memoryview(bytearray((end - start) * scheme.row_bytes(96))))
        else:
            assert same(read_rows(source, NAME, start, end), made.weight[start:end])
        assert source._bands.held_bytes <= 8 * band_bytes
    for suffix in (".qweight", ".qzeros", ".scales"):
        stored = inner.tensors[MODULE + suffix]
        reads = [(columns, rows) for name, *rows, columns in inner.reads if name == MODULE + suffix]
        num_read = sum((end - start) * (columns or (0, stored.shape[1]))[1] for columns, (start, end) in reads)
        num_read -= sum((end - start) * (columns or (0, 0))[0] for columns, (start, end) in reads)
        assert num_read == stored.numel(), f"{case} {suffix}: {num_read} elements of {stored.numel()}"
        assert len(reads) > 1 or stored.nbytes <= band_bytes, f"{case} {suffix} was read whole"
    source.close()
    assert source._bands.held_bytes == 0


def test_packed_source_bands_that_were_dropped_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many readers at once, with room for one band."""
    monkeypatch.setattr(packed_bands, "BAND_BYTES", 640)
    monkeypatch.setattr(packed_bands, "KEPT_BYTES", 640)
    source, made = packed("gptq-v1", 96, 96)
    starts = [place * 31 % 90 for place in range(90)]
    with ThreadPoolExecutor(4) as readers:
        found = list(readers.map(lambda start: read_rows(source, NAME, start, start + 6, (40, 96)), starts))
    for start, values in zip(starts, found, strict=True):
        assert same(values, made.weight[start : start + 6, 40:])


def test_packed_source_read_together_matches_single_reads() -> None:
    source, made = packed("gptq-v1", 16, 64)
    inner = source._source
    assert isinstance(inner, TensorSource)
    inner._entries["other"] = TensorSource(tensors={"other": torch.arange(6.0).view(2, 3)}).entries["other"]
    inner.tensors["other"] = torch.arange(6.0).view(2, 3)
    outs = torch.empty(5, 64), torch.empty(2, 3)
    views = [memoryview(out.view(-1).view(torch.uint8).numpy()) for out in outs]
    source.read_together([RowRead(NAME, 3, 8, views[0], None), RowRead("other", 0, 2, views[1], None)])
    assert same(outs[0], made.weight[3:8])
    assert same(outs[1], torch.arange(6.0).view(2, 3))


def test_packed_source_keeps_files_and_marks_leftovers_ignorable() -> None:
    for case in CASES:
        source, made = packed(case, 40, 576)
        beside = {MODULE + suffix for suffix in made.tensors} - {NAME, f"{MODULE}.qweight", f"{MODULE}.weight_packed"}
        assert set(source.entries) == {NAME, *beside}, case
        assert source.ignorable == beside, case
        total = sum(values.nbytes for values in made.tensors.values())
        used = total - sum(values.nbytes for name, values in made.tensors.items() if "input" in name)
        assert source.entries[NAME].num_bytes == used, case
        assert source.on_disk.num_bytes == total


class Held(TorchDispatchMode):
    """Measures the most bytes of tensors that live at once, without views of `others`."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self.most_bytes = 0
        self._others = {other.untyped_storage().data_ptr() for other in others}
        self._held: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self._others:
                storage = result.untyped_storage()
                self._held.setdefault(storage.data_ptr(), [storage.nbytes(), 0])[1] += 1
                weakref.finalize(result, self._release, storage.data_ptr())
        self.most_bytes = max(self.most_bytes, sum(num_bytes for num_bytes, _ in self._held.values()))
        return results

    def _release(self, place: int) -> None:
        self._held[place][1] -= 1
        if not self._held[place][1]:
            del self._held[place]


@pytest.mark.parametrize("case", ["awq", "gptq-v1", "gptq-order", "int4-order", "nvfp4", "int8-rows-asym", "fp8-block"])
def test_packed_source_scratch_is_at_most_the_stated_bytes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tiles, "STEP_ELEMENTS", 2**12)
    monkeypatch.setattr(packed_tiles, "SCALES_PER_TILE", 2**10)
    monkeypatch.setattr(packed_tiles, "WHOLE_BYTES", 2**12)
    monkeypatch.setattr(packed_bands, "BAND_BYTES", 2**13)
    monkeypatch.setattr(packed_bands, "KEPT_BYTES", 2**14)
    monkeypatch.setattr(repack, "STEP_BYTES", 2**10)
    source, _ = packed(case, 96, 1536)
    inner = source._source
    assert isinstance(inner, TensorSource)
    for rows, columns in (((0, 96), (0, 1536)), ((5, 90), (40, 1500))):
        out = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
        view = memoryview(out.view(-1).view(torch.uint8).numpy())
        with Held(out, *inner.tensors.values()) as held:
            source.read_into(NAME, *rows, view, columns)
        own_bytes = source.scratch_bytes_per_reader + source.shared_bytes
        assert held.most_bytes <= own_bytes, f"{case}: {held.most_bytes} of {own_bytes}"
    scheme = source.entries[NAME].packed
    assert scheme is not None
    planes = torch.empty(96 * scheme.row_bytes(1536), dtype=torch.uint8)
    with Held(planes, *inner.tensors.values()) as held:
        source.read_packed(NAME, scheme, (0, 96), memoryview(planes.numpy()))
    assert held.most_bytes <= source.scratch_bytes_per_reader + source.shared_bytes, f"{case}: repacked"


@pytest.mark.parametrize("case", ["awq", "gptq-v1", "gptq-order", "gptq-v2-8bit", "int4", "nvfp4", "fp8-tensor"])
def test_tiles_cover_a_read_once_within_their_bounds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tiles, "STEP_ELEMENTS", 2**11)
    monkeypatch.setattr(packed_tiles, "SCALES_PER_TILE", 2**9)
    source, _ = packed(case, 96, 576)
    matrix = source._matrices[NAME]
    for rows, columns in (((0, 96), (0, 576)), ((5, 90), (40, 500))):
        covered = torch.zeros(96, 576, dtype=torch.int32)
        for tile_rows, steps in packed_tiles.tiles(matrix, rows, columns, matrix.num_groups):
            assert (tile_rows[1] - tile_rows[0]) * matrix.num_groups <= 2**9, case
            for step in steps:
                covered[slice(*tile_rows), slice(*step)] += 1
                assert (tile_rows[1] - tile_rows[0]) * (step[1] - step[0]) <= 2**11, case
        wanted = torch.zeros_like(covered)
        wanted[slice(*rows), slice(*columns)] = 1
        assert torch.equal(covered, wanted), case


def test_packed_source_scratch_of_large_matrices_is_small() -> None:
    """An embedding, the widest inputs, and act-order in small groups."""
    for said, make in ((packed_settings.awq(32), packers.awq), (packed_settings.gptq(32, order=True), packers.gptq)):
        settings = read_packed(said)
        assert settings is not None
        for num_rows, num_columns in ((151_936, 8192), (8192, 53_248), (576, 29_568)):
            shapes = make(np.random.default_rng(0), 8, 32, 32).tensors
            entries = []
            for suffix, values in shapes.items():
                layout = settings.layouts[0]
                shape = {
                    ".qweight": layout.code_shape(num_rows, num_columns),
                    ".g_idx": (num_columns,),
                    ".scales": (num_columns // 32, num_rows),
                    ".qzeros": (num_columns // 32, num_rows // 8),
                }[suffix]
                entries.append(entry(MODULE + suffix, shape, str(values.dtype).removeprefix("torch.")))
            source = expand_packed(TensorSource(entries), settings, [parameter(num_rows, num_columns)])
            assert source.scratch_bytes_per_reader <= 5 * 2**20
