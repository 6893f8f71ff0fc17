"""What latent attention takes, before it is built: one scratch for all layers, capped partials, reasons as text."""

from dataclasses import replace

import pytest

from holdfast.attention.declarations import AttentionSpec, StepBounds
from holdfast.cache.spec import LayerCache
from holdfast.errors import UnsupportedModelError
from holdfast.families.choose import choose_declaration
from holdfast.families.latent.declarations import (
    TorchLatentDeclaration,
    TritonLatentDeclaration,
    latent_head_rows,
    latent_heads_at_once,
    latent_partials,
    latent_parts,
    up_projection_specs,
)
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.sparse.declarations import TorchSparseDeclaration
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.kernels.up_projection import UP_PROJECTED_BYTES
from holdfast.memory.workspace_plan import TensorSpec, arena_bytes
from holdfast.quant.formats import ALL_KV_FORMATS, MLA_FORMATS, formats_of

MB = 10**6
TRITON, TORCH, SPARSE = TritonLatentDeclaration(), TorchLatentDeclaration(), TorchSparseDeclaration()


def layer(
    kv_format: str = "bfloat16",
    num_heads: int = 16,
    latent_dim: int = 512,
    rope_dim: int = 64,
    max_model_len: int = 163840,
    dtype: str = "bfloat16",
    device_kind: str = "cuda",
) -> AttentionSpec:
    """One layer of DeepSeek-V2-Lite, unless it is said otherwise."""
    cache = LayerCache(0, "latent", ALL_KV_FORMATS[kv_format], 1, latent_dim + rope_dim, rope_dim)
    scale = 192**-0.5
    return LatentAttentionSpec(
        cache, num_heads, scale, None, max_model_len, dtype, device_kind, nope_dim=128, value_dim=128
    )


def decode_scratch(specs: list[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
    """All but the room of prompts, which no decode step touches."""
    prompts = up_projection_specs(specs[0], bounds)
    assert arena_bytes(prompts) <= UP_PROJECTED_BYTES
    return tuple(spec for spec in TRITON.scratch(specs, bounds) if spec not in prompts)


def test_latent_scratch_of_v2_lite_at_160k_is_below_100_mb():
    bounds = StepBounds(max_num_seqs=256, max_num_rows=8192, page_tokens=64)
    specs = [layer()] * 27
    partials = 1024 * 16 * (512 + 1) * 4
    latents = 1024 * 16 * (576 + 512) * 2
    assert arena_bytes(decode_scratch(specs, bounds)) == partials + latents == 69_271_552
    held = sum(term.num_bytes for term in TRITON.terms(specs, bounds))
    assert partials + latents + held < 100 * MB


@pytest.mark.parametrize("num_layers", [1, 61])
@pytest.mark.parametrize("max_model_len", [4096, 163840])
def test_latent_scratch_of_r1_ignores_layers_and_context(num_layers, max_model_len):
    bounds = StepBounds(max_num_seqs=2048, max_num_rows=2048, page_tokens=64)
    specs = [layer(num_heads=128, max_model_len=max_model_len)] * num_layers
    # 65,536 rows times heads of queries and outputs in the latent space, 264 partials of 128 heads.
    assert arena_bytes(decode_scratch(specs, bounds)) == 65536 * (576 + 512) * 2 + 264 * 128 * 513 * 4


@pytest.mark.parametrize("num_heads", [1, 3, 16, 20, 64, 65, 100, 128])
@pytest.mark.parametrize("max_num_rows", [1, 16, 511, 1024, 1025, 8192])
def test_parts_and_groups_of_heads_fit_what_is_declared(num_heads, max_num_rows):
    bounds = StepBounds(min(256, max_num_rows), max_num_rows, 64)
    parts = latent_parts(bounds)
    assert sum(part.max_num_rows for part in parts) == max_num_rows
    for part in parts:
        for num_rows in {1, part.max_num_rows, -(-part.max_num_rows // 2)}:
            heads = latent_heads_at_once(num_heads, num_rows)
            assert 1 <= heads <= num_heads
            assert num_rows * heads <= latent_head_rows(num_heads, bounds)
        assert latent_partials(layer(num_heads=num_heads), part) <= latent_partials(layer(num_heads=num_heads), bounds)


@pytest.mark.parametrize("name", formats_of(is_latent=True))
def test_plain_torch_takes_every_format_of_latents(name):
    assert TORCH.unsupported(layer(name, dtype="float32", device_kind="cpu")) is None


@pytest.mark.parametrize("name", ["bfloat16", *MLA_FORMATS])
def test_triton_takes_them_in_half_precision(name):
    assert choose_declaration([layer(name)]) is not TORCH
    assert choose_declaration([layer(name)]).name == "triton_latent"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (layer(device_kind="cpu"), "it runs on GPUs, not on cpu"),
        (layer(dtype="float32"), "it computes in half precision, not in float32"),
        (layer("float16"), "pages must be bfloat16, the type of the queries"),
        (layer("fp8"), "the format fp8 keeps keys and values by head"),
        (layer(latent_dim=520), "latents have 520 elements, and a multiple of 16 up to 512 is computed"),
        (layer(latent_dim=768), "latents have 768 elements, and a multiple of 16 up to 512 is computed"),
        (layer(rope_dim=48), "48 elements are rotated, and 16, 32, 64 can be"),
        (replace(layer(), window=5), "it has no sliding windows"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_triton_says_what_it_does_not_take(spec, words):
    assert TRITON.unsupported(spec) == words


def test_choose_declaration_without_backend_lists_every_reason():
    with pytest.raises(UnsupportedModelError) as caught:
        choose_declaration([layer(latent_dim=768)])
    assert caught.value.code == "attention.no_backend"
    assert all(f"{declaration.name}: latents have 768 elements" in str(caught.value) for declaration in (TRITON, TORCH))


def test_torch_latent_terms_do_not_grow_with_context():
    short, long = (
        TORCH.terms([layer(max_model_len=length, device_kind="cpu")], StepBounds(64, 8192, 64))
        for length in (64, 10**6)
    )
    assert short == long
    assert sum(term.num_bytes for term in long) < 32 * MB


def sparse(max_model_len: int = 163840) -> AttentionSpec:
    """One layer of DeepSeek V3.2 in plain torch."""
    plain = layer("float32", 128, max_model_len=max_model_len, dtype="float32", device_kind="cpu")
    cache = replace(plain.cache, index_dim=128)
    base = cache, plain.num_heads, plain.scale, None, max_model_len, "float32", "cpu"
    return SparseAttentionSpec(*base, nope_dim=128, value_dim=128, index_heads=64, index_top_k=2048)


def test_choose_declaration_index_selects_torch_sparse():
    plain = layer("float32", dtype="float32", device_kind="cpu")
    assert choose_declaration([sparse()]).name == "torch_sparse"
    assert choose_declaration([plain]).name == "torch_latent"
    assert SPARSE.unsupported(replace(sparse(), window=5)) == "it has no sliding windows"


def test_plain_torch_keeps_what_rows_chose_and_no_more():
    bounds = StepBounds(16, 512, 16)
    (selected,) = SPARSE.scratch([sparse()] * 61, bounds)
    assert (selected.name, selected.shape, selected.dtype) == ("selected", (512 * 2048,), "int32")
    assert SPARSE.scratch([sparse(max_model_len=2048)], bounds) == ()
    blocks, index = SPARSE.terms([sparse()] * 61, bounds)
    assert (blocks.owner, index.owner) == ("attention/blocks", "attention/index")
    assert TORCH.terms([layer("float32", 128, dtype="float32", device_kind="cpu")], bounds) == (blocks,)
    assert index.num_bytes < 48 * MB
    assert SPARSE.terms([sparse(max_model_len=2**20)], bounds)[1] == index, (
        "a row of scores is not longer than they are together"
    )
