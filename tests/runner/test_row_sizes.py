"""Numbers of rows that products are alike in: which are requested, which are left, and sentences where too few are."""

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from error_codes import raises_code
from holdfast.distributed.mesh import meshes
from holdfast.errors import ConfigError
from holdfast.kernels.gemm.linear import linear, linear_float32
from holdfast.planning.exactness import INVARIANT_ROWS, row_sizes
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.terms import graph_sizes, mixed_sizes
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8_BLOCK
from holdfast.runner import invariance
from holdfast.runner.invariance import (
    Product,
    common_sizes,
    invariant_sizes,
    multiply_like_whole,
    products,
    refuse_unequal_shares,
)
from kernels.exactness import require_native
from runner.rank_runs import plan_rank, write_model

SHAPES = {
    "embed.weight": (50, 24),
    "positions.weight": (70, 24),
    "layers.0.qkv.weight": (40, 24),
    "layers.0.qkv.bias": (40,),
    "layers.0.o.weight": (24, 24),
    "layers.0.down.weight": (7, 64),
    "layers.0.experts.down.weight": (4, 24, 16),
    "layers.0.experts.down.bias": (4, 24),
    "layers.1.qkv.weight": (40, 24),
    "layers.1.qkv.bias": (40,),
    "lm_head.weight": (50, 24),
}
SIZES = (16, 24, 40, 64, 96)
MOST_LOGITS = 64
ON_CPU = "float32", torch.device("cpu")


def requested(**others: object) -> tuple[Product, ...]:
    return products(SHAPES, SHAPES, is_exact=False, **others)  # type: ignore[arg-type]


def change(monkeypatch: pytest.MonkeyPatch, name: str, size_n: int, *rows: int) -> None:
    """As a library that multiplies so many rows by weights with `size_n` outputs in another order."""
    multiply = {"linear": linear, "linear_float32": linear_float32}[name]

    def changing(x_TK, weight_NK, *others):
        y_TN = multiply(x_TK, weight_NK, *others)
        y_TN[-1, -1] += 1e-3 * (len(weight_NK) == size_n and len(x_TK) in rows)
        return y_TN

    monkeypatch.setattr(invariance, name, changing)


@pytest.mark.parametrize("most_logits", [64, 70, 1024])
@pytest.mark.parametrize("most_rows", [1, 15, 16, 17, 64, 100, 512, 2048, 8192, 8200])
def test_sizes_are_few_and_those_of_graphs_are_among_them(most_rows, most_logits):
    sizes = row_sizes(most_rows, most_logits)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (min(INVARIANT_ROWS, most_rows), most_rows)
    assert min(most_logits, most_rows) in sizes
    assert len(sizes) <= 80
    captured = *graph_sizes(min(most_rows, most_logits)), *mixed_sizes(most_rows)
    assert {size for size in captured if size >= INVARIANT_ROWS} <= set(sizes)
    assert all(after <= before * 1.5 for before, after in pairwise(sizes)), "rows of padding"


def test_products_lists_each_multiplied_shape_once():
    assert requested() == (
        Product("layers.0.qkv.weight", 40, 40, 24, has_bias=True, is_head=False),
        Product("layers.0.o.weight", 24, 24, 24, has_bias=False, is_head=False),
        Product("layers.0.down.weight", 7, 7, 64, has_bias=False, is_head=False),
        Product("lm_head.weight", 50, 50, 24, has_bias=False, is_head=True),
    )


def test_products_tied_embedding_counts_as_head():
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert [product.name for product in products(tied, tied, is_exact=False) if product.is_head] == ["embed.weight"]


def test_products_exact_shares_are_compared_with_whole():
    shares = SHAPES | {"layers.0.qkv.weight": (20, 24), "layers.1.qkv.weight": (20, 24), "lm_head.weight": (25, 24)}
    exact = {product.name: product for product in products(shares, SHAPES, is_exact=True)}
    assert (exact["layers.0.qkv.weight"].size_n, exact["layers.0.qkv.weight"].all_n) == (20, 40)
    assert str(exact["lm_head.weight"]) == "25 of the 50 rows of lm_head.weight"
    by_sums = products(shares | {"layers.0.down.weight": (7, 32)}, SHAPES, is_exact=False)
    assert all(product.all_n == product.size_n for product in by_sums)
    assert [product.size_k for product in by_sums if product.name == "layers.0.down.weight"] == [32]


def test_invariant_sizes_on_cpu_keeps_every_size():
    require_native()
    reported: list[tuple[int, int]] = []
    found = invariant_sizes(requested(), SIZES, MOST_LOGITS, *ON_CPU, lambda *counts: reported.append(counts))
    assert found == SIZES
    assert reported == [(number, 4) for number in range(5)]


@pytest.mark.parametrize("rows", [(16,), (24, 40), (16, 24, 40)], ids=str)
def test_numbers_of_rows_that_differ_are_left_out(monkeypatch, caplog, rows):
    require_native()
    caplog.set_level(logging.INFO)
    change(monkeypatch, "linear", 7, *rows)
    found = invariant_sizes(requested(), SIZES, MOST_LOGITS, *ON_CPU)
    assert found == tuple(size for size in SIZES if size not in rows)
    skipped = ", ".join(map(str, rows))
    assert f"skipping step sizes {skipped}: cuBLAS rounds 7 rows of layers.0.down.weight differently" in caplog.text


def test_invariant_sizes_compares_logits_in_float32_up_to_most(monkeypatch):
    """In float32, whose kernels are others."""
    require_native()
    change(monkeypatch, "linear_float32", 50, 24, 96)
    assert invariant_sizes(requested(), SIZES, MOST_LOGITS, *ON_CPU) == (16, 40, 64, 96)


def test_biases_are_added_as_steps_add_them(monkeypatch):
    seen: set[tuple[int, bool]] = set()

    def watched(x_TK, weight_NK, bias_N):
        seen.add((len(weight_NK), bias_N is not None))
        return linear(x_TK, weight_NK, bias_N)

    monkeypatch.setattr(invariance, "linear", watched)
    invariant_sizes(requested(), SIZES, MOST_LOGITS, *ON_CPU)
    assert seen == {(40, True), (24, False), (7, False)}


def test_invariant_sizes_differing_logit_rows_refused(monkeypatch):
    require_native()
    change(monkeypatch, "linear", 7, 24, 64)
    with raises_code("runner.rows_round_differently", ConfigError, num_rows=64):
        invariant_sizes(requested(), SIZES, MOST_LOGITS, *ON_CPU)


@pytest.mark.parametrize("bias", [{}, {"a.bias": (12,)}], ids=["plain", "bias"])
def test_invariant_sizes_differing_shares_left_out_or_refused(monkeypatch, bias):
    require_native()
    shared = products({"a.weight": (12, 40), **bias}, {"a.weight": (48, 40)}, is_exact=True)
    assert invariant_sizes(shared, SIZES, MOST_LOGITS, *ON_CPU) == SIZES
    change(monkeypatch, "linear", 12, 16, 24)
    assert invariant_sizes(shared, SIZES, MOST_LOGITS, *ON_CPU) == (40, 64, 96), "as the whole among 96"
    change(monkeypatch, "linear", 12, *SIZES)
    with raises_code("runner.shares_round_differently", ConfigError, num_rows=96):
        invariant_sizes(shared, SIZES, MOST_LOGITS, *ON_CPU)


def test_ranks_take_what_all_have_left():
    assert common_sizes([(16, 24, 64), (24, 64), (16, 24, 64)]) == (24, 64)
    assert common_sizes([(), ()]) == ()
    assert common_sizes([(16, 64)]) == (16, 64)


def entry_rank(folder: Path) -> tuple[RunnerPlan, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The plan of one of two exact ranks of DeepSeek-V4, the shapes of its weights and of the whole ones."""
    _, model, load, plan = plan_rank(write_model(folder, "v4_flash"), {}, meshes(2, is_exact=True)[1])
    whole = {parameter.name: parameter.shape for parameter in model.parameters}
    return plan, {weight.name: weight.shape for weight in load.plan.weights}, whole


def test_shares_of_entries_are_compared_at_every_number_of_rows(tmp_path):
    require_native()
    plan, shares, whole = entry_rank(tmp_path)
    reported: list[tuple[int, int]] = []
    refuse_unequal_shares(plan, shares, whole, torch.device("cpu"), lambda *counts: reported.append(counts))
    assert reported[-1][0] == reported[-1][1] >= 4
    (groups,) = [one for one in products(shares, whole, is_exact=True, group_rows=12) if one.group_rows]
    assert (groups.size_n, groups.all_n, groups.size_k) == (24, 48, 96)
    x_TX, weight_NK = torch.randn(3, 4 * 96), torch.randn(48, 96)
    expected = torch.cat([x_TX[:, 96 * g : 96 * (g + 1)] @ weight_NK[12 * g : 12 * (g + 1)].T for g in range(4)], dim=1)
    torch.testing.assert_close(groups.multiply(x_TX, weight_NK, None), expected)


@pytest.mark.parametrize(("name", "size_n"), [("linear_float32", 65), ("grouped_linear", 2)])
def test_shares_of_entries_that_round_differently_are_refused(tmp_path, monkeypatch, name, size_n):
    """`size_n` is that of a share: rows of the head, or groups of heads."""
    plan, shares, whole = entry_rank(tmp_path)
    multiply = getattr(invariance, name)

    def changing(x_TK, weight, *others):
        y_TN = multiply(x_TK, weight, *others)
        y_TN[-1, -1] += 1e-3 * (len(weight) == size_n and len(x_TK) == 7)
        return y_TN

    monkeypatch.setattr(invariance, name, changing)
    with raises_code("runner.shares_round_differently", ConfigError, num_rows=7):
        refuse_unequal_shares(plan, shares, whole, torch.device("cpu"), lambda *counts: None)


def test_quantized_shares_take_the_form_of_the_whole_weight():
    whole = QuantizedWeight(FP8_BLOCK, (256, 128), torch.zeros(256, 128).to(torch.float8_e4m3fn), torch.ones(2, 1))
    share = QuantizedWeight(FP8_BLOCK, (128, 128), whole.codes[:128], whole.scales[:1])
    weights = {"q": share, "qkv_a": whole, "norm": torch.ones(3)}
    multiply_like_whole(weights, {"q": (256, 128), "qkv_a": (256, 128), "norm": (3,)})
    assert [weights[name].form_rows for name in ("q", "qkv_a")] == [256, 256]  # type: ignore[union-attr]
    assert share.form_rows == 128
    assert weights["qkv_a"] is whole
