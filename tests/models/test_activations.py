"""What a step passes through, as requests; and scratch that is enough for every small batch that can occur."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm import small_batch
from holdfast.kernels.gemm.deferred_rms_norm import AmaxScratch, NormedRows, ResidualStream, RowAmax, SmallBatchScratch
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX, SMALL_BATCH_BLOCK_N, order_specs
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models import activations
from holdfast.models.activations import (
    FUSED_DECODE,
    LAYERS,
    QUANTIZED_ROWS,
    ROW_SCALED,
    STREAM,
    Request,
    fits_fused_decode,
    fused_decode_request,
    takes_fused_decode,
)
from holdfast.models.spec import (
    CompressedSpec,
    ExpertsSpec,
    IndexSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    StreamsSpec,
)
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import (
    AS_STORED,
    EMBEDDING_CHOICES,
    FP8,
    FP8_BLOCK,
    FP8_TENSOR,
    INT8,
    MXFP4,
    WeightRecipe,
    WeightScheme,
)

QWEN = ModelSpec(
    architecture="Qwen3ForCausalLM",
    family="qwen3",
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
    checkpoint_dtype="bfloat16",
    norm_eps=1e-6,
    qk_norm=True,
    rope=RopeSpec(1e6),
)
OPT_350M = replace(
    QWEN,
    vocab_size=50272,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    rope=None,
    embedding_size=512,
    gated_mlp=False,
    has_final_norm=False,
    norm_first=False,
    norm="layer",
    activation="relu",
)


def shapes(request: Request) -> dict[str, tuple[tuple[int, ...], str]]:
    return {spec.name: (spec.shape, spec.dtype) for spec in request.specs}


def test_stream_request_has_three_tensors_of_hidden_size():
    request = activations.stream_request(QWEN, 7, "bfloat16")
    assert (request.lane, request.owner) == (STREAM, "stream")
    assert shapes(request) == dict.fromkeys(("x", "normed", "delta"), ((7, 5120), "bfloat16"))


def test_attention_lives_beside_the_scratch_of_its_backend():
    scratch = (TensorSpec("partial_out", (9, 8192), "float32"),)
    request = activations.attention_request(QWEN, 7, "bfloat16", scratch)
    assert (request.lane, request.owner) == (LAYERS, "attention")
    assert shapes(request) == {
        "qkv": ((7, (64 + 2 * 8) * 128), "bfloat16"),
        "q": ((7, 64, 128), "bfloat16"),
        "attended": ((7, 8192), "bfloat16"),
        "partial_out": ((9, 8192), "float32"),
    }


def test_mlp_request_is_as_wide_as_its_products():
    gated, plain = (activations.mlp_request(spec, 7, "float16") for spec in (QWEN, OPT_350M))
    assert (gated.lane, gated.owner) == (plain.lane, plain.owner) == (LAYERS, "mlp")
    assert shapes(gated) == {"wide": ((7, 2 * 25600), "float16"), "active": ((7, 25600), "float16")}
    assert shapes(plain) == {"wide": ((7, 4096), "float16"), "active": ((7, 4096), "float16")}


EXPERTS = ExpertsSpec(num_experts=60, top_k=4, intermediate_size=1408, shared_size=5632, has_shared_gate=True)


def test_experts_hold_every_pair_of_a_row_and_an_expert():
    request = activations.experts_request(EXPERTS, 2048, 7, "bfloat16")
    assert (request.lane, request.owner) == (LAYERS, "experts")
    order = order_specs(7, 4, 60)
    assert shapes(request) == {
        "router": ((7, 60), "float32"),
        "expert_ids": ((7, 4), "int32"),
        "shares": ((7, 4), "float32"),
        "active": ((28, 1408), "bfloat16"),
        "routed": ((28, 2048), "bfloat16"),
        "shared_wide": ((7, 2 * 5632), "bfloat16"),
        "shared_active": ((7, 5632), "bfloat16"),
        "shared": ((7, 2048), "bfloat16"),
        "shared_logit": ((7, 1), "float32"),
    } | {spec.name: (spec.shape, spec.dtype) for spec in order}
    assert request.specs[-len(order) :] == order
    alone = activations.experts_request(ExpertsSpec(60, 4, 1408), 2048, 7, "bfloat16")
    assert [name for name in shapes(alone) if "shared" in name] == []
    ungated = activations.experts_request(replace(EXPERTS, has_shared_gate=False), 2048, 7, "bfloat16")
    assert [name for name in shapes(ungated) if "shared" in name] == ["shared_wide", "shared_active", "shared"]


MOE = replace(QWEN, hidden_size=2048, num_heads=16, experts=EXPERTS)


@pytest.mark.parametrize(
    ("spec", "recipe", "num_codes", "num_scales"),
    [
        (QWEN, WeightRecipe(FP8), 7 * 25600, 7),
        (QWEN, WeightRecipe(FP8_BLOCK), 7 * 25600, 7 * 200),
        (replace(QWEN, intermediate_size=576), WeightRecipe(FP8_BLOCK), 7 * 8192, 7 * 64),
        (MOE, WeightRecipe(FP8), 7 * 4 * 1408, 28),
        (MOE, WeightRecipe(FP8_BLOCK), 7 * 4 * 1408, 28 * 11),
        (OPT_350M, WeightRecipe(FP8), 7 * 4096, 7),
    ],
)
def test_codes_have_room_for_the_inputs_of_any_product(spec, recipe, num_codes, num_scales):
    request = activations.quantized_rows_request(spec, 7, 3, recipe)
    assert (request.lane, request.owner) == (QUANTIZED_ROWS, "quantized_rows")
    assert shapes(request) == {"codes": ((num_codes,), "float8_e4m3fn"), "scales": ((num_scales,), "float32")}


def test_codes_of_logits_alone():
    """A head takes its inputs as they are; what projects them before it does not."""
    for embeddings in EMBEDDING_CHOICES:
        recipe = WeightRecipe(FP8, embeddings)
        assert shapes(activations.quantized_rows_request(QWEN, 0, 64, recipe))["codes"][0] == (0,)
        assert shapes(activations.quantized_rows_request(OPT_350M, 0, 64, recipe))["codes"][0] == (64 * 1024,)


@pytest.mark.parametrize("recipe", [AS_STORED, WeightRecipe(INT8), WeightRecipe(MXFP4), WeightRecipe(MXFP4, "all")])
def test_quantized_rows_request_weight_only_scheme_is_empty(recipe):
    assert activations.quantized_rows_request(MOE, 7, 3, recipe).specs == ()


def test_row_scaled_request_has_split_buffers_for_fp8_only():
    """o of Qwen3-32B is split in two and down in three; qkv and gate_up have outputs enough."""
    request = activations.row_scaled_request(QWEN, WeightRecipe(FP8))
    assert (request.lane, request.owner) == (ROW_SCALED, "row_scaled")
    assert shapes(request) == {
        "parts": ((128 * 3 * 5120,), "float32"),
        "arrived": ((80,), "int32"),
        "row_amax": ((64 * 400,), "int32"),
    }
    for recipe in (AS_STORED, WeightRecipe(INT8), WeightRecipe(MXFP4)):
        assert activations.row_scaled_request(QWEN, recipe).specs == ()


def test_row_scaled_request_in_blocks_splits_for_few_rows():
    """qkv of Qwen3-32B is split in two, o and down in four; no gate is fused."""
    assert shapes(activations.row_scaled_request(QWEN, WeightRecipe(FP8_BLOCK))) == {
        "parts": ((64 * 2 * 10240,), "float32"),
        "arrived": ((160,), "int32"),
        "row_amax": ((0,), "int32"),
    }


def test_logits_are_float32():
    for spec, width in ((QWEN, 5120), (OPT_350M, 512)):
        request = activations.head_request(spec, 3, "bfloat16")
        assert (request.lane, request.owner) == (LAYERS, "head")
        assert shapes(request) == {"embedded": ((3, width), "bfloat16"), "logits": ((3, spec.vocab_size), "float32")}


def test_embed_request_needs_projection_or_positions():
    assert activations.embed_request(QWEN, 7, "bfloat16").specs == ()
    request = activations.embed_request(OPT_350M, 7, "float32")
    assert (request.lane, request.owner) == (LAYERS, "embed")
    assert shapes(request) == {
        "tokens": ((7, 512), "float32"),
        "position_ids": ((7,), "int64"),
        "positions": ((7, 1024), "float32"),
    }
    assert list(shapes(activations.embed_request(replace(OPT_350M, rope=RopeSpec(1e4)), 7, "float32"))) == ["tokens"]


def test_scratch_of_qwen3_32b():
    request = fused_decode_request(QWEN)
    assert (request.lane, request.owner) == (FUSED_DECODE, "fused_decode")
    assert shapes(request) == {
        "squares": ((max(FUSED_DECODE_ROWS * 80, 2560),), "float32"),
        "parts": ((FUSED_DECODE_ROWS * 16384,), "float32"),
        "arrived": ((-(-151936 // 64),), "int32"),
    }


def test_fits_fused_decode_takes_one_row_of_dense_e4m3():
    """Experts, latents and ranks keep the path: tiles with separate norms were measured for dense layers of one rank."""
    latent = replace(QWEN, latent=LatentSpec(512, 512, 128, 64, 128))
    for recipe in (WeightRecipe(FP8), WeightRecipe(FP8_TENSOR)):
        assert [fits_fused_decode(num_rows, QWEN, recipe) for num_rows in (1, 2, 16)] == [True, False, False]
        for spec in (MOE, latent, replace(QWEN, num_ranks=2)):
            assert [fits_fused_decode(num_rows, spec, recipe) for num_rows in (1, 16, 17)] == [True, True, False]
    for recipe in (AS_STORED, WeightRecipe(INT8)):
        assert [fits_fused_decode(num_rows, QWEN, recipe) for num_rows in (1, 16, 17)] == [True, True, False]


def test_fused_decode_request_of_rank_and_stage_has_own_products():
    """A share of the vocabulary is counted, and none before the last stage."""
    rank = replace(QWEN, num_ranks=4, vocab_size=151936 // 4)
    assert shapes(fused_decode_request(rank))["arrived"] == ((-(-151936 // 4 // 64),), "int32")
    stage = replace(QWEN, is_last_stage=False)
    assert shapes(fused_decode_request(stage))["arrived"] == ((QWEN.attention_products[0][0] // 64,), "int32")


@pytest.mark.parametrize("scheme", [FP8, FP8_TENSOR, INT8], ids=lambda scheme: scheme.name)
def test_scratch_of_qwen3_32b_in_eight_bits_has_amax_too(scheme):
    plain, quantized = fused_decode_request(QWEN), fused_decode_request(QWEN, WeightRecipe(scheme))
    assert (quantized.lane, quantized.owner) == (FUSED_DECODE, "fused_decode")
    assert quantized.specs[:3] == plain.specs
    assert shapes(Request(FUSED_DECODE, "fused_decode", quantized.specs[3:])) == {
        "amax": (plain.specs[0].shape, "float32"),
        "input_amax": ((16,), "float32"),
        "gate_amax": ((16 * 64,), "int32"),
    }


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"recipe": WeightRecipe(FP8)},
        {"recipe": WeightRecipe(FP8, "none")},
        {"recipe": WeightRecipe(FP8, ignore=("*.mlp.gate",))},
        {"recipe": WeightRecipe(FP8_TENSOR, "all")},
        {"recipe": WeightRecipe(INT8)},
        {"experts": ExpertsSpec(128, 8, 768)},
        {"experts": ExpertsSpec(60, 4, 1400, shared_size=5000, has_shared_gate=True), "intermediate_size": 5001},
        {"experts": ExpertsSpec(128, 8, 768), "recipe": WeightRecipe(FP8)},
        {"head_dim": 80, "num_heads": 64},
        {"tied_embeddings": True},
        {"vocab_size": 259},
        {"num_ranks": 4, "num_heads": 16, "intermediate_size": 6400},
        {"num_layers": 3, "is_first_stage": False},
        {"num_layers": 3, "is_last_stage": False, "num_ranks": 2},
    ],
    ids=str,
)
def test_takes_fused_decode_accepts_supported_models(change):
    """The widths of experts are not theirs: experts have kernels of their own. What is ignored shows when weights are there."""
    recipe = change.get("recipe", AS_STORED)
    spec = replace(QWEN, **{name: value for name, value in change.items() if name != "recipe"})
    assert takes_fused_decode(spec, "bfloat16", "cuda", recipe)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"device_kind": "cpu"},
        {"norm": "layer"},
        {"norm_first": False},
        {"gated_mlp": False},
        {"activation": "gelu_tanh"},
        {"has_final_norm": False},
        {"embedding_size": 512},
        {"hidden_size": 5120 + 32},
        {"intermediate_size": 25600 + 32},
        {"head_dim": 63, "num_heads": 1},
        {"experts": ExpertsSpec(128, 8, 768, dense_layers=frozenset({0})), "intermediate_size": 25600 + 32},
        {"has_output_norms": True},
        {"logit_softcap": 30.0},
        {"streams": StreamsSpec(4, 20, 1e-6)},
        {"compressed": CompressedSpec(64, 64, 8, (None,) * 64, 8, 64, None)},
        {"latent": LatentSpec(512, 512, 128, 64, 128, index=IndexSpec(64, 128, 64))},
        {"experts": ExpertsSpec(128, 8, 768, table_layers=frozenset({63}), table_size=9)},
        {"num_ranks": 2, "gathers": True},
        {"num_ranks": 3, "intermediate_size": 25600 // 3},
        {"recipe": WeightRecipe(MXFP4)},
        {"recipe": WeightRecipe(FP8_BLOCK)},
        {"recipe": WeightRecipe(INT8), "dtype": "float16"},
    ],
    ids=str,
)
def test_takes_fused_decode_declines_unsupported_models(change):
    where = {"dtype": "bfloat16", "device_kind": "cuda", "recipe": AS_STORED} | change
    others = [where.pop(name) for name in ("dtype", "device_kind", "recipe")]
    assert takes_fused_decode(QWEN, "bfloat16", "cuda", AS_STORED)
    assert not takes_fused_decode(replace(QWEN, **where), *others)


def test_latents_without_an_index_take_the_fused_path():
    """The index alone is why those above do not."""
    spec = replace(QWEN, latent=LatentSpec(512, 512, 128, 64, 128))
    assert takes_fused_decode(spec, "bfloat16", "cuda", AS_STORED)


class Launches:
    """In a kernel's place: keeps the grids that it was launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **keywords: None


blocks = st.one_of(st.integers(1, 40), st.integers(1, 512)).map(lambda count: count * SMALL_BATCH_BLOCK_N)


@st.composite
def specs(draw) -> ModelSpec:
    """Any decoder that takes the fused decode path."""
    num_kv_heads = draw(st.integers(1, 64))
    spec = replace(
        QWEN,
        vocab_size=draw(st.one_of(st.integers(1, 10_000), st.integers(1, 300_000))),
        hidden_size=draw(blocks),
        intermediate_size=draw(blocks),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from([32, 64, 80, 96, 112, 128, 256])),
    )
    assume(takes_fused_decode(spec, "bfloat16", "cuda"))
    return spec


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dummy_weight(size_n: int, size_k: int, scheme: WeightScheme | None) -> torch.Tensor | QuantizedWeight:
    if scheme is None:
        return empty(size_n, size_k)
    planes = scheme.planes((size_n, size_k))
    codes, scales = (empty(*plane.shape, dtype=getattr(torch, plane.dtype)) for plane in planes)
    return QuantizedWeight(scheme, (size_n, size_k), codes, scales)


@hypothesis_settings(max_examples=300)
@given(
    spec=specs(),
    num_rows=st.one_of(st.just(1), st.integers(1, FUSED_DECODE_ROWS), st.just(FUSED_DECODE_ROWS)),
    scheme=st.sampled_from([None, FP8, FP8_TENSOR, INT8]),
)
def test_scratch_is_enough_for_every_product_that_can_occur(spec, num_rows, scheme):
    squares, partials, arrived, *amax = (one.shape[0] for one in fused_decode_request(spec, WeightRecipe(scheme)).specs)
    assert squares >= num_rows, "the first norm leaves one sum a row"
    scratch = SmallBatchScratch(*(empty(0) for _ in range(3)))
    given_amax = None
    if scheme is not None:
        normed_amax, input_amax, gate_amax = amax
        assert normed_amax >= squares, "a block leaves an amax beside its squares"
        assert input_amax >= num_rows
        assert gate_amax >= num_rows * NUM_GATE_AMAX
        scratch = replace(scratch, amax=AmaxScratch(*(empty(0) for _ in range(3))))
        given_amax = RowAmax(empty(0), 1)

    def needs(launch, size_n: int, size_k: int) -> None:
        launches = Launches()
        with pytest.MonkeyPatch.context() as patch:
            for module, name in (
                (small_batch, "gemv_kernel"),
                (small_batch, "_small_batch_kernel"),
            ):
                patch.setattr(module, name, launches)
            left = launch(empty(num_rows, size_k), size_n)
        ((num_blocks, *more),) = launches.grids
        splits = more[0] if more else 1
        if splits > 1:
            assert splits * num_rows * size_n <= partials, f"{size_n=} {size_k=} {splits=}"
            assert num_blocks <= arrived, f"{size_n=} {size_k=}"
        if isinstance(left, NormedRows):
            assert left.num_squares == num_blocks
            assert num_rows * left.num_squares <= squares, f"{size_n=} {size_k=} {left.num_squares=}"

    def normed(x: torch.Tensor, size_n: int, gated: bool = False) -> torch.Tensor:
        weight = dummy_weight(size_n * (2 if gated else 1), x.shape[1], scheme)
        rows = NormedRows(x, 1, 1e-6)
        return small_batch.normed_linear(rows, weight, None, gated, empty(num_rows, size_n), scratch)

    def added(x: torch.Tensor, size_n: int) -> NormedRows:
        weight, own = dummy_weight(size_n, x.shape[1], scheme), empty(num_rows, size_n)
        return small_batch.linear_add(
            x, weight, None, ResidualStream(own, empty(size_n), 1e-6, own, scratch), given_amax
        )

    needs(normed, *spec.attention_products[0])
    needs(added, spec.hidden_size, spec.query_size)
    needs(lambda x, size_n: normed(x, size_n, gated=True), spec.intermediate_size, spec.hidden_size)
    needs(added, spec.hidden_size, spec.intermediate_size)
    needs(normed, spec.vocab_size, spec.hidden_size)


def test_ranks_that_gather_have_room_for_inputs_of_all():
    """Those of the widest output projection, and of pairs where experts are sliced; codes follow from whole rows."""
    dense = replace(QWEN, num_ranks=4, gathers=True)
    widest = max(dense.attended_size, dense.intermediate_size)
    assert shapes(activations.gathered_request(dense, 7, "bfloat16")) == {"gathered": ((7 * 4 * widest,), "bfloat16")}
    experts = replace(EXPERTS, intermediate_size=16 * EXPERTS.intermediate_size)
    sliced, whole = (
        replace(MOE, num_ranks=2, gathers=True, experts=replace(experts, num_local=num_local))
        for num_local in (None, experts.num_experts // 2)
    )
    assert shapes(activations.gathered_request(sliced, 3, "bfloat16"))["gathered"][0] == (
        3 * 2 * experts.top_k * experts.intermediate_size,
    )
    less, more = (shapes(activations.gathered_request(one, 3, "bfloat16"))["gathered"][0] for one in (whole, sliced))
    assert less < more
    codes = shapes(activations.quantized_rows_request(dense, 7, 1, WeightRecipe(FP8)))["codes"][0]
    assert codes == (7 * max(4 * widest, dense.hidden_size),)
    for spec in (QWEN, MOE, replace(QWEN, num_ranks=4)):
        assert activations.gathered_request(spec, 7, "bfloat16").specs == ()


def test_room_elements_is_largest_part_read_by_peers():
    assert activations.room_elements(QWEN, 9) == 0
    assert activations.room_elements(replace(QWEN, num_ranks=2), 9) == 9 * QWEN.hidden_size
    gathers = replace(QWEN, num_ranks=2, gathers=True)
    assert activations.room_elements(gathers, 9) == 9 * max(
        QWEN.hidden_size, QWEN.intermediate_size, QWEN.attended_size
    )
    assert MOE.experts is not None
    whole = replace(MOE, num_ranks=2, gathers=True, experts=replace(MOE.experts, num_local=4))
    assert activations.room_elements(whole, 9) == 9 * MOE.experts.top_k * MOE.hidden_size


def test_ids_of_local_experts_have_a_place():
    local = replace(EXPERTS, num_local=15)
    names = [spec.name for spec in activations.experts_request(local, 2048, 40, "bfloat16").specs]
    assert "local_ids" in names
    assert names[-3:] == [spec.name for spec in order_specs(40, 4, 60)]
    blocks = activations.experts_request(local, 2048, 40, "bfloat16").specs[-3:]
    assert blocks == order_specs(40, 4, 60, 15)
    assert "local_ids" not in [spec.name for spec in activations.experts_request(EXPERTS, 2048, 40, "bfloat16").specs]
