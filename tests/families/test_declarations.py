"""Who takes which layer, in which words the others decline, and bytes that follow from shapes alone."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.steps import Geometry
from attention.work_lists import dummy_batch
from holdfast.attention.declarations import MAX_PARTIALS, MIN_SPLIT_TOKENS, BackendDeclaration, StepBounds, max_partials
from holdfast.cache.spec import LayerCache
from holdfast.errors import UnsupportedModelError
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.choose import DECLARATIONS as BY_FAMILY
from holdfast.families.choose import choose_declaration
from holdfast.families.grouped import declarations as grouped
from holdfast.families.grouped.declarations import (
    DECLARATIONS,
    MASK_ELEMENTS,
    MAX_MASK_ROWS,
    NativePagedDeclaration,
    TorchPagedDeclaration,
    TritonPagedDeclaration,
    key_bias_terms,
    least_tile_rows,
    mask_rows,
    max_tiles,
    tile_kinds,
)
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention import tiled_attention
from holdfast.kernels.attention.key_bias import make_key_turns
from holdfast.memory.planner import PHASES
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES, KV_FORMATS, KVFormat
from kernels.exactness import require_native

LAYER = LayerCache(0, "attention", KV_FORMATS["bfloat16"], 8, 128)
SPEC = GroupedAttentionSpec(LAYER, 64, 128**-0.5, None, 4096, "bfloat16", "cuda")


@pytest.mark.parametrize(
    ("value", "field"), [(SPEC, "window"), (StepBounds(8, 512, 16), "max_num_rows")], ids=["spec", "bounds"]
)
def test_attention_values_are_frozen(value, field):
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, 1)


def test_layers_that_are_alike_are_equal():
    assert len({SPEC, replace(SPEC), replace(SPEC, window=5)}) == 2


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_declaration_of_grouped_layer_answers_everything(declaration: BackendDeclaration):
    bounds = StepBounds(8, 512, 16)
    assert declaration.unsupported(SPEC) is None or isinstance(declaration.unsupported(SPEC), str)
    assert isinstance(declaration.scratch([SPEC], bounds), tuple)
    assert isinstance(declaration.terms([SPEC], bounds), tuple)


def test_planning_imports_no_torch():
    code = "import sys, holdfast.families.choose; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


BOUNDS = StepBounds(max_num_seqs=4, max_num_rows=64, page_tokens=4)
BACKENDS = {backend.name: backend for backend in (NativePagedAttention, TritonPagedAttention, TorchPagedAttention)}


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_build_backend_type_matches_declaration_name(declaration):
    geometry = Geometry(windows=(None, 5))
    backend = build_backend(declaration, geometry.specs, geometry.storage(4), BackendInputs(BOUNDS, 2))
    assert type(backend) is BACKENDS[declaration.name]
    assert backend.name == declaration.name


def test_build_backend_builds_chosen_declaration():
    require_native()
    geometry = Geometry()
    declaration = choose_declaration(geometry.specs)
    assert (
        type(build_backend(declaration, geometry.specs, geometry.storage(4), BackendInputs(BOUNDS, 1, True)))
        is NativePagedAttention
    )


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_build_backend_passes_num_sms_and_batch_invariance(batch_invariant):
    """A lone long row is split for the machine, or by its own length."""
    geometry = Geometry(max_model_len=40000, num_heads=1, num_kv_heads=1, page_tokens=4)
    bounds = StepBounds(max_num_seqs=1, max_num_rows=64, page_tokens=4)
    backend = build_backend(
        DECLARATIONS[1], geometry.specs, geometry.storage(4), BackendInputs(bounds, 77, batch_invariant)
    )
    (work,) = backend.plan(dummy_batch([(39999, 1)])).work.values()
    assert work.rows_T2[0, 1] == (63 if batch_invariant else 125), "of whole blocks"


@pytest.mark.parametrize("declaration", DECLARATIONS[1:], ids=lambda declaration: declaration.name)
def test_means_reach_the_pages_of_their_layer(declaration):
    geometry = Geometry(windows=(None, None), kv_dtype="float32 turboquant_4bit_nc", page_tokens=16)
    mean = torch.ones(2, 16)
    backend = build_backend(
        declaration, geometry.specs, geometry.storage(4), BackendInputs(BOUNDS, k_means=[None, mean])
    )
    assert backend.pages[1].planes.k_mean_KD is mean


NATIVE, TRITON, TORCH = NativePagedDeclaration(), TritonPagedDeclaration(), TorchPagedDeclaration()
LARGE_BOUNDS = StepBounds(max_num_seqs=256, max_num_rows=8192, page_tokens=16)
EVERY_BOUNDS = st.builds(StepBounds, st.integers(1, 1024), st.integers(1, 65536), st.just(16))
LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 2**20))


def layer(
    kv_format: str = "bfloat16",
    num_heads: int = 64,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    **changes: Any,
) -> GroupedAttentionSpec:
    cache = LayerCache(0, "attention", KV_FORMATS[kv_format], num_kv_heads, head_dim)
    dtype = kv_format if kv_format in DTYPE_BYTES else "bfloat16"
    return replace(GroupedAttentionSpec(cache, num_heads, head_dim**-0.5, None, 40960, dtype, "cuda"), **changes)


QUANTIZED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized]
HALF_QUANTIZED = replace(
    layer(), cache=LayerCache(0, "attention", KVFormat("mine", "uint8", "bfloat16", key_bits=4), 8, 128)
)


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(grouped, "has_native", lambda: True)


def test_names_are_unique():
    every = [declaration.name for family in BY_FAMILY.values() for declaration in family]
    assert len(set(every)) == len(every)


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
        *((layer(name), "triton_paged") for name in QUANTIZED),
        *((layer(name, dtype="float16"), "triton_paged") for name in QUANTIZED),
        *((layer(name, dtype="float32"), "torch_paged") for name in QUANTIZED),
        *((layer(name, device_kind="cpu", dtype="float32"), "torch_paged") for name in QUANTIZED),
        (layer("fp8", head_dim=272), "torch_paged"),
        (layer("fp8", num_heads=129, num_kv_heads=1), "torch_paged"),
    ],
)
def test_choose_declaration_takes_first_that_fits_every_layer(compiler, spec, name):
    assert choose_declaration([spec, replace(spec, window=5)]).name == name


def test_formats_may_be_mixed(compiler):
    assert choose_declaration([layer(), layer("fp8"), layer("turboquant_3bit_nc")]) is DECLARATIONS[1]
    assert choose_declaration([layer("float16", dtype="bfloat16"), layer("fp8")]) is DECLARATIONS[2]
    on_cpu = [layer("float32", device_kind="cpu"), layer("fp8", device_kind="cpu", dtype="float32")]
    assert choose_declaration(on_cpu) is DECLARATIONS[2]


def test_choose_declaration_one_unsupported_layer_declines(compiler):
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
        *(
            (NATIVE, layer(name, device_kind="cpu"), f"the format {name} is not plain keys and values")
            for name in QUANTIZED
        ),
        (TRITON, layer(device_kind="cpu"), "it runs on GPUs, not on cpu"),
        (TRITON, layer("fp8", device_kind="cpu"), "it runs on GPUs, not on cpu"),
        (TRITON, layer("fp8", dtype="float32"), "it computes in half precision, not in float32"),
        (TRITON, layer("float32"), "it computes in half precision, not in float32"),
        (TRITON, layer("float16", dtype="bfloat16"), "pages must be bfloat16, the type of the queries"),
        (TRITON, layer(head_dim=264), "head_dim is 264, and a multiple of 8 up to 256 is computed"),
        (TRITON, layer(head_dim=100), "head_dim is 100, and a multiple of 8 up to 256 is computed"),
        (TRITON, layer("fp8", head_dim=72), "head_dim is 72, and a multiple of 16 up to 256 is computed"),
        (TRITON, layer("fp8", head_dim=272), "head_dim is 272, and a multiple of 16 up to 256 is computed"),
        (TRITON, layer(num_heads=7, num_kv_heads=2), "7 query heads do not divide into 2 key heads"),
        (TRITON, layer("fp8", num_heads=7, num_kv_heads=2), "7 query heads do not divide into 2 key heads"),
        (TRITON, layer(num_heads=129, num_kv_heads=1), "129 query heads share a key head, 128 may"),
        (TRITON, layer("fp8", num_heads=129, num_kv_heads=1), "129 query heads share a key head, 128 may"),
        (TORCH, layer(num_heads=7, num_kv_heads=2), "7 query heads do not divide into 2 key heads"),
        (TORCH, layer("fp8", head_dim=72), "head_dim is 72, and quantized heads are multiples of 16"),
        (TRITON, HALF_QUANTIZED, "the format mine codes only one of keys and values"),
        (TORCH, HALF_QUANTIZED, "the format mine codes only one of keys and values"),
    ],
)
def test_declaration_unsupported_gives_reason(compiler, declaration, spec, words):
    assert declaration.unsupported(spec) == words


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(64, 8, 128), (12, 12, 64), (32, 32, 80), (32, 8, 96), (14, 2, 112), (8, 1, 256), (16, 8, 256), (128, 1, 128)],
)
@pytest.mark.parametrize("kv_format", ["bfloat16", "float16", *QUANTIZED])
def test_triton_takes_every_geometry_of_ordinary_models(kv_format, num_heads, num_kv_heads, head_dim):
    assert TRITON.unsupported(layer(kv_format, num_heads, num_kv_heads, head_dim)) is None


def test_choose_declaration_lists_every_reason_once(compiler):
    spec = layer("float16", num_heads=7, num_kv_heads=2, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError) as caught:
        choose_declaration([spec, replace(spec, window=5), replace(spec, dtype="float16")])
    assert caught.value.code == "attention.no_backend"
    assert caught.value.values["reasons"] == (
        "native_paged: it runs on CPU only, not on cuda; "
        "triton_paged: pages must be bfloat16, the type of the queries, 7 query heads do not divide into 2 key heads; "
        "torch_paged: 7 query heads do not divide into 2 key heads"
    )


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_format_without_backend_is_declined_by_all(compiler, device_kind):
    with pytest.raises(UnsupportedModelError) as caught:
        choose_declaration([replace(HALF_QUANTIZED, device_kind=device_kind)])
    assert all(f"{declaration.name}: " in str(caught.value) for declaration in DECLARATIONS)


def test_choose_declaration_without_compiler_takes_torch_paged(monkeypatch):
    monkeypatch.setattr(grouped, "has_native", lambda: False)
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
def test_has_native_finds_compiler_without_torch(tmp_path, environment, expected):
    compiler = tmp_path / "clang"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    code = "import sys; from holdfast.families.grouped.declarations import has_native; print(has_native(), 'torch' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "HOLDFAST_NATIVE")}
    kept |= {name: value.format(bin=tmp_path) for name, value in environment.items()}
    ran = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [expected, "False"]


def test_native_holds_nothing():
    spec = layer("float32", device_kind="cpu")
    assert NATIVE.scratch([spec], LARGE_BOUNDS) == NATIVE.terms([spec], LARGE_BOUNDS) == ()


@pytest.mark.parametrize("max_model_len", [1, 64, 2048, 32768, 131072, 10**7])
@pytest.mark.parametrize("windows", [(None,), (None, 4096), (5, 5, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_of_plain_torch_are_bounded(max_model_len, windows, dtype):
    specs = [layer(dtype, window=window, max_model_len=max_model_len) for window in windows]
    assert TORCH.scratch(specs, LARGE_BOUNDS) == ()
    (term,) = TORCH.terms(specs, LARGE_BOUNDS)
    rows, num_windows = mask_rows(max_model_len), len(set(windows))
    assert 16 <= rows <= MAX_MASK_ROWS
    assert (term.owner, term.phases) == ("attention/masks", PHASES)
    assert term.num_bytes == DTYPE_BYTES[dtype] * num_windows * rows * (max_model_len + rows)
    if max_model_len <= MASK_ELEMENTS // 16:
        assert term.num_bytes <= DTYPE_BYTES[dtype] * num_windows * (MASK_ELEMENTS + rows * rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_key_biases_take_the_bytes_of_their_tables(dtype):
    """A bias for each layer that has one, and one set of turns for each head dim among them."""
    sizes = [(8, 128), (2, 64), (4, 128)]
    specs = [layer(num_kv_heads=heads, head_dim=dim, has_key_bias=True, dtype=dtype) for heads, dim in sizes]
    bias_bytes = sum(4 * heads * dim for heads, dim in sizes)
    turn_bytes = sum(
        make_key_turns(torch.ones(dim // 2), 1.0, 40960, getattr(torch, dtype), "cpu").num_bytes for dim in (128, 64)
    )
    (term,) = key_bias_terms([*specs, layer(head_dim=256)])
    assert (term.owner, term.num_bytes) == ("attention/key_bias", bias_bytes + turn_bytes)
    assert key_bias_terms([layer()]) == ()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_partial_results_have_room_for_every_layer(is_reversed):
    """One layer has the most heads, and another the widest rows."""
    specs = [layer(num_heads=8, head_dim=256), layer(num_heads=16, head_dim=64), layer(num_heads=4, num_kv_heads=4)]
    assert TRITON.scratch(specs[::-1] if is_reversed else specs, LARGE_BOUNDS) == (
        TensorSpec("partial_out", (1024, 8 * 256), "float32"),
        TensorSpec("partial_lse", (1024, 16), "float32"),
    )


def test_partial_results_of_qwen3_32b():
    """64 heads of 128, 40960 tokens: 32 MiB and a little, in one set for 64 layers."""
    specs = 64 * [layer()]
    assert TRITON.scratch(specs, LARGE_BOUNDS) == (
        TensorSpec("partial_out", (1024, 64 * 128), "float32"),
        TensorSpec("partial_lse", (1024, 64), "float32"),
    )
    assert sum(spec.num_bytes for spec in TRITON.scratch(specs, LARGE_BOUNDS)) == 1024 * 64 * (128 + 1) * 4


def test_triton_paged_scratch_is_of_largest_layer():
    specs = [layer(num_heads=64, head_dim=64), layer(num_heads=32, head_dim=256)]
    assert [spec.shape for spec in TRITON.scratch(specs, LARGE_BOUNDS)] == [(1024, 32 * 256), (1024, 64)]


def test_triton_paged_scratch_empty_when_no_context_splits():
    assert TRITON.scratch([layer(max_model_len=MIN_SPLIT_TOKENS)], LARGE_BOUNDS) == ()
    assert TRITON.scratch([layer(max_model_len=MIN_SPLIT_TOKENS + 1)], LARGE_BOUNDS) != ()


@given(max_model_len=LENGTHS, bounds=EVERY_BOUNDS)
def test_partial_results_have_a_cap(max_model_len, bounds):
    """Neither by the context nor by the number of sequences, and never more than could be used."""
    rows = max_partials(max_model_len, bounds)
    assert 0 <= rows <= MAX_PARTIALS
    assert rows <= bounds.max_num_rows * -(-max_model_len // MIN_SPLIT_TOKENS)
    assert (rows == 0) == (max_model_len <= MIN_SPLIT_TOKENS)
    assert max_partials(2**20, StepBounds(1024, 65536, 16)) == MAX_PARTIALS


@given(
    max_model_len=LENGTHS,
    bounds=EVERY_BOUNDS,
    group=st.integers(1, 128),
    windows=st.sampled_from([(None,), (5, 5)]),
    kv_format=st.sampled_from(["bfloat16", *QUANTIZED]),
)
def test_tiles_and_rows_are_counted_to_the_byte(max_model_len, bounds, group, windows, kv_format):
    specs = [
        layer(kv_format, num_heads=group, num_kv_heads=1, window=window, max_model_len=max_model_len)
        for window in windows
    ]
    tiles, rows, *_ = TRITON.terms(specs, bounds)
    (kind,) = tile_kinds(specs)
    num_tiles = max_tiles(kind, max_model_len, bounds)
    assert (tiles.owner, tiles.phases) == ("attention/tiles", PHASES)
    assert (rows.owner, rows.phases) == ("attention/rows", PHASES)
    assert tiles.num_bytes == len(set(windows)) * (1 + num_tiles) * 8 * 4
    assert rows.num_bytes == len(set(windows)) * bounds.max_num_rows * 2 * 4
    rows_per_tile = least_tile_rows(kind)
    if kv_format == "bfloat16":
        assert rows_per_tile == tiled_attention.tile_rows(group, 1, large=True)
    whole = -(-bounds.max_num_rows // rows_per_tile)
    assert num_tiles == whole + min(bounds.max_num_seqs, bounds.max_num_rows) + max_partials(max_model_len, bounds)


def test_triton_paged_terms_ignore_order_of_formats():
    """Whichever layers have which format: the weights may settle that later."""
    names = ("bfloat16", "fp8", "turboquant_4bit_nc", "turboquant_4bit_nc")
    windows = (None, 5, None, 5)
    found = set()
    for order in permutations(names):
        specs = [layer(name, window=window) for name, window in zip(order, windows, strict=True)]
        found.add(tuple(term.num_bytes for term in TRITON.terms(specs, LARGE_BOUNDS)))
    assert len(found) == 1
    tiles, rows, rotation = found.pop()
    kinds = tile_kinds([layer(name) for name in names])
    assert len(kinds) == 3
    assert tiles == 2 * sum(1 + max_tiles(kind, 40960, LARGE_BOUNDS) for kind in kinds) * 8 * 4
    assert rows == 2 * 3 * LARGE_BOUNDS.max_num_rows * 2 * 4
    assert rotation == 129 * 128 * 2


@pytest.mark.parametrize(
    ("names", "head_dims", "expected"),
    [
        (["bfloat16", "fp8"], [128, 64], None),
        (["turboquant_k8v4"], [64], 2 * 65 * 64),
        (["turboquant_k8v4", "turboquant_3bit_nc", "fp8"], [128, 128, 64], 2 * 129 * 128),
        (["turboquant_4bit_nc", "turboquant_4bit_nc"], [128, 80], 2 * (129 * 128 + 81 * 80)),
    ],
)
@pytest.mark.parametrize("declaration", [TRITON, TORCH], ids=lambda declaration: declaration.name)
def test_terms_count_one_rotation_per_rotated_head_dim(declaration, names, head_dims, expected):
    specs = [layer(name, head_dim=head_dim) for name, head_dim in zip(names, head_dims, strict=True)]
    terms = {term.owner: term.num_bytes for term in declaration.terms(specs, LARGE_BOUNDS)}
    assert terms.get("attention/rotation") == expected


@pytest.mark.parametrize(
    ("names", "num_bytes"),
    [
        (["bfloat16"], None),
        (["fp8", "fp8"], 2048),
        (["turboquant_k8v4"], 2048 + 2048),
        (["turboquant_4bit_nc", "bfloat16"], 2048 + 4096),
        (["turboquant_k3v4_nc"], 2048 + 65536 + 2048),
        (["turboquant_3bit_nc", "fp8"], 2048 + 2 * 65536 + 2048),
    ],
)
def test_tables_of_plain_torch(names, num_bytes):
    specs = [layer(name) for name in names]
    terms = {term.owner: term.num_bytes for term in TORCH.terms(specs, LARGE_BOUNDS)}
    assert terms.get("attention/dequantize") == num_bytes


def test_scratch_does_not_depend_on_the_format():
    assert TRITON.scratch([layer("turboquant_3bit_nc")], LARGE_BOUNDS) == TRITON.scratch([layer()], LARGE_BOUNDS)
