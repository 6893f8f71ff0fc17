"""Who takes which layer, in which words the others decline, and bytes that follow from shapes alone."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.attention import declarations
from holdfast.attention.declarations import (
    DECLARATIONS,
    MASK_ELEMENTS,
    MAX_MASK_ROWS,
    MIN_SPLIT_TOKENS,
    QUERY_ROWS,
    SPLIT_ROWS,
    TILE_FIELDS,
    NativePagedDeclaration,
    TorchPagedDeclaration,
    TritonPagedDeclaration,
    choose_declaration,
    mask_rows,
    max_tiles,
    split_rows,
)
from holdfast.attention.spec import AttentionSpec, StepBounds
from holdfast.cache.spec import LayerCache
from holdfast.errors import UnsupportedModelError
from holdfast.kernels import tiled_attention
from holdfast.memory.planner import PHASES
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES, KV_FORMATS, PLANNED_KV_FORMATS

NATIVE, TRITON, TORCH = NativePagedDeclaration(), TritonPagedDeclaration(), TorchPagedDeclaration()
BOUNDS = StepBounds(max_num_seqs=256, max_num_rows=8192, page_tokens=16)
EVERY_BOUNDS = st.builds(StepBounds, st.integers(1, 1024), st.integers(1, 65536), st.just(16))
LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 2**20))


def layer(
    kv_format: str = "bfloat16",
    num_heads: int = 64,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    **changes: Any,
) -> AttentionSpec:
    found = {**KV_FORMATS, **PLANNED_KV_FORMATS}[kv_format]
    cache = LayerCache(0, "attention", found, num_kv_heads, head_dim)
    dtype = kv_format if kv_format in DTYPE_BYTES else "bfloat16"
    return replace(AttentionSpec(cache, num_heads, head_dim**-0.5, None, 40960, dtype, "cuda"), **changes)


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(declarations, "_has_native", lambda: True)


def test_names_are_unique():
    assert len({declaration.name for declaration in DECLARATIONS}) == len(DECLARATIONS)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (layer("float32", device_kind="cpu"), "native_paged"),
        (layer("float16", device_kind="cpu"), "torch_paged"),
        (layer("bfloat16", device_kind="cpu"), "torch_paged"),
        (layer("float32", device_kind="cpu", dtype="bfloat16"), "torch_paged"),
        (layer("bfloat16"), "triton_paged"),
        (layer("float16"), "triton_paged"),
        (layer("float16", dtype="bfloat16"), "torch_paged"),
        (layer("bfloat16", head_dim=512), "torch_paged"),
        (layer("bfloat16", head_dim=100), "torch_paged"),
        (layer("bfloat16", num_heads=129, num_kv_heads=1), "torch_paged"),
        (layer("bfloat16", num_heads=128, num_kv_heads=1), "triton_paged"),
    ],
)
def test_the_first_that_takes_every_layer(compiler, spec, name):
    assert choose_declaration([spec, replace(spec, window=5)]).name == name


def test_one_layer_is_enough_to_decline(compiler):
    assert choose_declaration([layer(), layer("float16", dtype="bfloat16")]) is DECLARATIONS[2]
    assert choose_declaration([layer("float32", device_kind="cpu"), layer("float16", device_kind="cpu")]).name == (
        "torch_paged"
    )


@pytest.mark.parametrize(
    ("declaration", "spec", "words"),
    [
        (NATIVE, layer("float32"), "it runs on CPU only, not on cuda"),
        (
            NATIVE,
            layer("float32", device_kind="cpu", dtype="float16"),
            "it computes in float32 over float32 pages only",
        ),
        (NATIVE, layer("float16", device_kind="cpu"), "it computes in float32 over float32 pages only"),
        (NATIVE, layer("fp8", device_kind="cpu"), "it computes in float32 over float32 pages only"),
        (
            NATIVE,
            layer("turboquant_k8v4", device_kind="cpu", dtype="float32"),
            "the format turboquant_k8v4 is not plain keys and values",
        ),
        (TRITON, layer(device_kind="cpu"), "it runs on GPUs, not on cpu"),
        (TRITON, layer("turboquant_k8v4"), "the format turboquant_k8v4 is not plain keys and values"),
        (TRITON, layer("turboquant_4bit_nc"), "the format turboquant_4bit_nc is not plain keys and values"),
        (TRITON, layer("fp8"), "pages must be bfloat16, the type of the queries"),
        (TRITON, layer("float16", dtype="bfloat16"), "pages must be bfloat16, the type of the queries"),
        (TRITON, layer(head_dim=264), "head_dim is 264, and a multiple of 8 up to 256 is computed"),
        (TRITON, layer(head_dim=100), "head_dim is 100, and a multiple of 8 up to 256 is computed"),
        (TRITON, layer(num_heads=7, num_kv_heads=2), "7 query heads do not divide into 2 key heads"),
        (TRITON, layer(num_heads=129, num_kv_heads=1), "129 query heads share a key head, 128 may"),
        (TORCH, layer(num_heads=7, num_kv_heads=2), "7 query heads do not divide into 2 key heads"),
        (TORCH, layer("turboquant_k8v4"), "the format turboquant_k8v4 keeps no plain v"),
        (TORCH, layer("turboquant_3bit_nc"), "the format turboquant_3bit_nc keeps no plain k or v"),
    ],
)
def test_declines_in_words(compiler, declaration, spec, words):
    assert declaration.unsupported(spec) == words


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(64, 8, 128), (12, 12, 64), (32, 32, 80), (32, 8, 96), (14, 2, 112), (8, 1, 256), (16, 8, 256), (128, 1, 128)],
)
@pytest.mark.parametrize("kv_format", ["bfloat16", "float16"])
def test_triton_takes_every_geometry_of_ordinary_models(kv_format, num_heads, num_kv_heads, head_dim):
    assert TRITON.unsupported(layer(kv_format, num_heads, num_kv_heads, head_dim)) is None


def test_every_reason_is_listed_once(compiler):
    spec = layer("float16", num_heads=7, num_kv_heads=2, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError) as caught:
        choose_declaration([spec, replace(spec, window=5), replace(spec, dtype="float16")])
    assert str(caught.value) == (
        "attention for this model was asked; no backend fits ("
        "native_paged: it runs on CPU only, not on cuda; "
        "triton_paged: pages must be bfloat16, the type of the queries, 7 query heads do not divide into 2 key heads; "
        "torch_paged: 7 query heads do not divide into 2 key heads); choose another kv_cache_dtype"
    )


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_format", [name for name in PLANNED_KV_FORMATS if name.startswith("turboquant")])
def test_everybody_declines_a_format_that_nothing_attends_to(compiler, device_kind, kv_format):
    with pytest.raises(UnsupportedModelError) as caught:
        choose_declaration([layer(kv_format, device_kind=device_kind)])
    assert all(f"{declaration.name}: " in str(caught.value) for declaration in DECLARATIONS)


def test_without_a_compiler_plain_torch_takes_over(monkeypatch):
    monkeypatch.setattr(declarations, "_has_native", lambda: False)
    spec = layer("float32", device_kind="cpu")
    assert NATIVE.unsupported(spec) == "it needs a C compiler"
    assert choose_declaration([spec]).name == "torch_paged"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PATH": "{bin}"}, "True"),
        ({"PATH": "/nowhere"}, "False"),
        ({"PATH": "{bin}", "HOLDFAST_NATIVE": "0"}, "False"),
        ({"PATH": "{bin}", "CC": "no-such-compiler"}, "True"),
    ],
    ids=["a compiler", "none", "switched off", "another name"],
)
def test_a_plan_without_torch_looks_for_a_compiler(tmp_path, environment, expected):
    compiler = tmp_path / "clang"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    code = "import sys; from holdfast.attention.declarations import _has_native; print(_has_native(), 'torch' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "HOLDFAST_NATIVE")}
    kept |= {name: value.format(bin=tmp_path) for name, value in environment.items()}
    ran = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [expected, "False"]


def test_the_numbers_of_the_kernel_are_known_without_it():
    assert len(tiled_attention.TILE_FIELDS) == TILE_FIELDS
    assert tiled_attention.LARGE_TILE == QUERY_ROWS


def test_native_holds_nothing():
    spec = layer("float32", device_kind="cpu")
    assert NATIVE.scratch([spec], BOUNDS) == NATIVE.terms([spec], BOUNDS) == ()


@pytest.mark.parametrize("max_model_len", [1, 64, 2048, 32768, 131072, 10**7])
@pytest.mark.parametrize("windows", [(None,), (None, 4096), (5, 5, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_of_plain_torch_are_bounded(max_model_len, windows, dtype):
    specs = [layer(dtype, window=window, max_model_len=max_model_len) for window in windows]
    assert TORCH.scratch(specs, BOUNDS) == ()
    (term,) = TORCH.terms(specs, BOUNDS)
    rows, num_windows = mask_rows(max_model_len), len(set(windows))
    assert 16 <= rows <= MAX_MASK_ROWS
    assert (term.owner, term.phases) == ("attention/masks", PHASES)
    assert term.num_bytes == DTYPE_BYTES[dtype] * num_windows * rows * (max_model_len + rows)
    if max_model_len <= MASK_ELEMENTS // 16:
        assert term.num_bytes <= DTYPE_BYTES[dtype] * num_windows * (MASK_ELEMENTS + rows * rows)


def test_partial_results_of_qwen3_32b():
    """64 heads of 128, 40960 tokens: 32 MiB and a little, in one set for 64 layers."""
    specs = 64 * [layer()]
    assert TRITON.scratch(specs, BOUNDS) == (
        TensorSpec("partial_out", (1024, 64 * 128), "float32"),
        TensorSpec("partial_lse", (1024, 64), "float32"),
    )
    assert sum(spec.num_bytes for spec in TRITON.scratch(specs, BOUNDS)) == 1024 * 64 * (128 + 1) * 4


def test_the_largest_layer_decides():
    specs = [layer(num_heads=64, head_dim=64), layer(num_heads=32, head_dim=256)]
    assert [spec.shape for spec in TRITON.scratch(specs, BOUNDS)] == [(1024, 32 * 256), (1024, 64)]


def test_where_no_context_is_split_nothing_is_kept():
    assert TRITON.scratch([layer(max_model_len=MIN_SPLIT_TOKENS)], BOUNDS) == ()
    assert TRITON.scratch([layer(max_model_len=MIN_SPLIT_TOKENS + 1)], BOUNDS) != ()


@given(max_model_len=LENGTHS, bounds=EVERY_BOUNDS)
def test_partial_results_have_a_cap(max_model_len, bounds):
    """Neither by the context nor by the number of sequences, and never more than could be used."""
    rows = split_rows(max_model_len, bounds)
    assert 0 <= rows <= SPLIT_ROWS
    assert rows <= bounds.max_num_rows * -(-max_model_len // MIN_SPLIT_TOKENS)
    assert (rows == 0) == (max_model_len <= MIN_SPLIT_TOKENS)
    assert split_rows(2**20, StepBounds(1024, 65536, 16)) == SPLIT_ROWS


@given(
    max_model_len=LENGTHS, bounds=EVERY_BOUNDS, group=st.integers(1, 128), windows=st.sampled_from([(None,), (5, 5)])
)
def test_tiles_and_rows_are_counted_to_the_byte(max_model_len, bounds, group, windows):
    specs = [layer(num_heads=group, num_kv_heads=1, window=window, max_model_len=max_model_len) for window in windows]
    tiles, rows = TRITON.terms(specs, bounds)
    num_tiles = max_tiles(specs, bounds)
    assert (tiles.owner, tiles.phases) == ("attention/tiles", PHASES)
    assert (rows.owner, rows.phases) == ("attention/rows", PHASES)
    assert tiles.num_bytes == len(set(windows)) * (1 + num_tiles) * TILE_FIELDS * 4
    assert rows.num_bytes == len(set(windows)) * bounds.max_num_rows * 2 * 4
    rows_per_tile = tiled_attention.tile_rows(group, 1, large=True)
    whole = -(-bounds.max_num_rows // rows_per_tile)
    assert num_tiles == whole + min(bounds.max_num_seqs, bounds.max_num_rows) + split_rows(max_model_len, bounds)
