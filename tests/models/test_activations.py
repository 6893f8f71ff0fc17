"""What a step passes through, as requests; and scratch that is enough for every product of few rows that can occur."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels import skinny_linear
from holdfast.kernels.begin_rows import NormedRows, SkinnyScratch
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models import activations
from holdfast.models.activations import (
    FEW,
    FEW_BLOCK,
    FEW_LEAST_COLUMNS,
    FEW_PART_COLUMNS,
    FEW_ROWS,
    LAYERS,
    STREAM,
    Request,
    few_request,
    takes_few,
)
from holdfast.models.spec import ModelSpec, RopeSpec

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


def test_the_stream_is_three_tensors_as_wide_as_the_model():
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


def test_an_mlp_is_as_wide_as_its_products():
    gated, plain = (activations.mlp_request(spec, 7, "float16") for spec in (QWEN, OPT_350M))
    assert (gated.lane, gated.owner) == (plain.lane, plain.owner) == (LAYERS, "mlp")
    assert shapes(gated) == {"wide": ((7, 2 * 25600), "float16"), "active": ((7, 25600), "float16")}
    assert shapes(plain) == {"wide": ((7, 4096), "float16"), "active": ((7, 4096), "float16")}


def test_logits_are_float32():
    for spec, width in ((QWEN, 5120), (OPT_350M, 512)):
        request = activations.head_request(spec, 3, "bfloat16")
        assert (request.lane, request.owner) == (LAYERS, "head")
        assert shapes(request) == {"embedded": ((3, width), "bfloat16"), "logits": ((3, spec.vocab_size), "float32")}


def test_only_embeddings_that_are_projected_or_placed_take_room():
    assert activations.embed_request(QWEN, 7, "bfloat16").specs == ()
    request = activations.embed_request(OPT_350M, 7, "float32")
    assert (request.lane, request.owner) == (LAYERS, "embed")
    assert shapes(request) == {
        "tokens": ((7, 512), "float32"),
        "position_ids": ((7,), "int64"),
        "positions": ((7, 1024), "float32"),
    }
    assert list(shapes(activations.embed_request(replace(OPT_350M, rope=RopeSpec(1e4)), 7, "float32"))) == ["tokens"]


def test_the_numbers_of_the_kernels_are_known_without_them():
    assert FEW_ROWS == skinny_linear.MAX_ROWS
    assert FEW_BLOCK == skinny_linear.BLOCK_N
    assert FEW_LEAST_COLUMNS == skinny_linear.MIN_SQUARE_COLUMNS
    assert FEW_PART_COLUMNS == 2 * skinny_linear.PROGRAMS * skinny_linear.BLOCK_N


def test_scratch_of_qwen3_32b():
    request = few_request(QWEN)
    assert (request.lane, request.owner) == (FEW, "few")
    assert shapes(request) == {
        "squares": ((max(FEW_ROWS * 80, 2560),), "float32"),
        "parts": ((FEW_ROWS * 16384,), "float32"),
        "arrived": ((-(-151936 // 64),), "int32"),
    }


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
    ],
    ids=str,
)
def test_who_does_not_take_the_kernels_for_few_rows(change):
    where = {"dtype": "bfloat16", "device_kind": "cuda"} | change
    dtype, device_kind = where.pop("dtype"), where.pop("device_kind")
    assert takes_few(QWEN, "bfloat16", "cuda")
    assert not takes_few(replace(QWEN, **where), dtype, device_kind)


class Launches:
    """In a kernel's place: keeps the grids that it was launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **keywords: None


blocks = st.one_of(st.integers(1, 40), st.integers(1, 512)).map(lambda count: count * FEW_BLOCK)


@st.composite
def specs(draw) -> ModelSpec:
    """Any decoder that takes the kernels for few rows."""
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
    assume(takes_few(spec, "bfloat16", "cuda"))
    return spec


@hypothesis_settings(max_examples=300)
@given(spec=specs(), num_rows=st.one_of(st.just(1), st.integers(1, FEW_ROWS), st.just(FEW_ROWS)))
def test_scratch_is_enough_for_every_product_that_can_occur(spec, num_rows):
    squares, parts, arrived = (spec.shape[0] for spec in few_request(spec).specs)
    assert squares >= num_rows, "the first norm leaves one sum a row"

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def needs(launch, size_n: int, size_k: int) -> None:
        row, rows = Launches(), Launches()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(skinny_linear, "_row_kernel", row)
            patch.setattr(skinny_linear, "_rows_kernel", rows)
            left = launch(empty(num_rows, size_k), size_n)
        ((num_blocks, *more),) = row.grids + rows.grids
        num_parts = more[0] if more else 1
        if num_parts > 1:
            assert num_parts * num_rows * size_n <= parts, f"{size_n=} {size_k=} {num_parts=}"
            assert num_blocks <= arrived, f"{size_n=} {size_k=}"
        if isinstance(left, NormedRows):
            assert left.num_squares == num_blocks
            assert num_rows * left.num_squares <= squares, f"{size_n=} {size_k=} {left.num_squares=}"

    scratch = SkinnyScratch(*(empty(0) for _ in range(3)))

    def normed(x: torch.Tensor, size_n: int, gated: bool = False) -> torch.Tensor:
        weight = empty(size_n * (2 if gated else 1), x.shape[1])
        rows = NormedRows(x, 1, 1e-6)
        return skinny_linear.normed_linear(rows, weight, None, gated, empty(num_rows, size_n), scratch)

    def added(x: torch.Tensor, size_n: int) -> NormedRows:
        stream, scaled = empty(num_rows, size_n), empty(num_rows, size_n)
        weight = empty(size_n, x.shape[1])
        return skinny_linear.linear_add(x, weight, None, stream, empty(size_n), 1e-6, scaled, scratch)

    needs(normed, spec.qkv_size, spec.hidden_size)
    needs(added, spec.hidden_size, spec.query_size)
    needs(lambda x, size_n: normed(x, size_n, gated=True), spec.intermediate_size, spec.hidden_size)
    needs(added, spec.hidden_size, spec.intermediate_size)
    needs(normed, spec.vocab_size, spec.hidden_size)
