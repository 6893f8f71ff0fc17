"""Faults: each is found from headers, before anything is read, and names the file, the tensor, what is needed and what is there."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelError
from holdfast.loading.planning.coverage import Filled, check_coverage, check_sources, uncovered
from holdfast.loading.planning.moves import Move, PlannedWeight
from holdfast.loading.planning.plan import plan_load
from holdfast.models.parameters import Parameter, Part
from holdfast.models.sharding import shard_parameters
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, MXFP4, WeightRecipe
from loading.header_source import HeaderSource, entries_for, entry, experts, stacked


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.randoms())
def test_uncovered_accepts_tiling_pieces_in_any_order(heights, random):
    bounds = [sum(heights[:index]) for index in range(len(heights) + 1)]
    pieces = [Filled(start, end, f"t{start}") for start, end in pairwise(bounds)]
    random.shuffle(pieces)
    assert uncovered(pieces, bounds[-1]) is None
    assert uncovered(pieces, bounds[-1] + 1) is not None
    assert uncovered(pieces, bounds[-1] - 1) is not None
    assert uncovered(pieces[1:], bounds[-1]) is not None
    assert uncovered([*pieces[1:], pieces[-1]], bounds[-1]) is not None, (
        "counting rows could miss a hole beside a double"
    )
    assert uncovered([*pieces, pieces[0]], bounds[-1]) is not None


@for_each(
    "filled, words",
    [
        ([], "rows 0 to 9 are filled by nothing"),
        ([Filled(0, 4, "a"), Filled(6, 10, "b")], "rows 4 to 5 are filled by nothing"),
        ([Filled(0, 6, "a"), Filled(4, 10, "b")], "rows 4 to 5 are filled by a and by b"),
        ([Filled(0, 10, "a"), Filled(2, 4, "b")], "rows 2 to 3 are filled by a and by b"),
        ([Filled(0, 8, "a")], "rows 8 to 9 are filled by nothing"),
        ([Filled(0, 12, "a")], "a fills rows up to 11 of 10"),
        ([Filled(0, 10, "a"), Filled(10, 10, "b")], "b fills rows 10 to 10, which are none"),
    ],
)
def test_uncovered_reports_gaps_and_overlaps(filled, words):
    assert uncovered(filled, 10) == words


def move(part, target="w", scheme=None):
    return Move(part.tensor, "bfloat16", target, part, scheme, 0)


@for_each("scheme", [None, FP8, FP8_BLOCK, MXFP4])
def test_check_coverage_proves_codes_and_scales(scheme):
    weight = PlannedWeight("w", (384, 256), "bfloat16", scheme)
    first, second = Part("a", 0, (128, 256)), Part("b", 128, (256, 256))
    check_coverage([weight], [move(first, scheme=scheme), move(second, scheme=scheme)])
    with pytest.raises(AssertionError, match="are filled by nothing"):
        check_coverage([weight], [move(first, scheme=scheme)])
    with pytest.raises(AssertionError, match="are filled by a and by b"):
        check_coverage([weight], [move(Part("a", 0, (256, 256)), scheme=scheme), move(second, scheme=scheme)])
    with pytest.raises(AssertionError, match="rows of"):
        check_coverage([weight], [move(first, scheme=scheme), move(Part("b", 128, (256, 128)), scheme=scheme)])
    with pytest.raises(AssertionError, match="what is no weight: other"):
        check_coverage([weight], [move(first, scheme=scheme), move(second, scheme=scheme), move(first, "other")])


def test_check_coverage_part_within_a_block_is_an_assertion():
    weight = PlannedWeight("w", (256, 128), "bfloat16", FP8_BLOCK)
    with pytest.raises(AssertionError, match="begins at row 64, within 128 that share a scale"):
        check_coverage(
            [weight],
            [move(Part("a", 0, (64, 128)), scheme=FP8_BLOCK), move(Part("b", 64, (192, 128)), scheme=FP8_BLOCK)],
        )


def test_check_coverage_rows_of_wrong_width_are_an_assertion():
    with pytest.raises(AssertionError, match="filled by rows of 2 elements"):
        check_coverage([PlannedWeight("w", (4, 4), "float32")], [move(Part("a", 0, (8, 2)))])


def test_check_sources_each_element_is_taken_once():
    left, right = Part("t", 0, (8, 4), columns=(0, 2)), Part("t", 0, (8, 4), columns=(2, 4))
    check_sources([move(left, "a"), move(right, "b"), move(Part("u", 0, (8, 4)), "a")], frozenset())
    top, low = Part("t", 0, (8, 4), rows=(0, 4)), Part("t", 0, (8, 4), rows=(4, 8))
    check_sources([move(low, "a"), move(top, "b")], frozenset())
    for other in (left, top, Part("t", 0, (8, 4), rows=(7, 8), columns=(1, 2))):
        with pytest.raises(AssertionError, match=r"t is a part of . and of ."):
            check_sources([move(left, "a"), move(right, "b"), move(other, "c")], frozenset())
    check_sources([move(left, "a"), move(left, "b.scale")], frozenset({"b.scale"}))


EMBED = Parameter("embed.weight", (10, 4), (Part("model.embed_tokens.weight", 0, (10, 4)),), "embedding")
QKV = Parameter("layers.0.qkv.weight", (8, 4), (Part("q", 0, (4, 4)), Part("k", 4, (2, 4)), Part("v", 6, (2, 4))))
HEAD = Parameter("lm_head.weight", (10, 4), (Part("lm_head.weight", 0, (10, 4)),), "head")
UNTIED, TIED = (EMBED, QKV, HEAD), (EMBED, QKV)


def refusal(code, parameters, entries, recipe=None):
    with raises_code(code, ModelError) as caught:
        plan_load(parameters, HeaderSource(entries), "float32", recipe or WeightRecipe())
    assert str(caught.value).isprintable()
    return str(caught.value)


def missing(parameters, entries):
    return refusal("weights.missing_tensors", parameters, entries)


def unexpected(parameters, entries):
    return refusal("weights.unexpected_tensors", parameters, entries)


def test_coverage_missing_tensors_are_counted_and_named():
    entries = entries_for(UNTIED)
    one_less = [item for item in entries if item.name != "k"]
    assert "m.safetensors lacks 1 of the 5 tensors of the model: k." in missing(UNTIED, one_less)
    assert "lacks 5 of the 5 tensors of the model: model.embed_tokens.weight, q, k, v, lm_head" in missing(UNTIED, [])


def test_coverage_error_counts_the_files():
    entries = [entry("q", (4, 4), file="a.safetensors"), entry("k", (2, 4), file="b.safetensors")]
    assert "a.safetensors (with 1 more files) lacks 1 of" in missing([QKV], entries)


def test_coverage_missing_experts_are_named():
    whole = experts(60, 2, 3)
    entries = entries_for([whole])
    message = missing([whole], entries[:26])
    assert "lacks 94 of the 120 tensors of the model: experts.13.gate.weight, experts.13.up.weight," in message
    assert "experts.7.up.weight" in missing([whole], entries[:15] + entries[16:])


@pytest.mark.parametrize("rank", [0, 1])
def test_coverage_each_expert_rank_reports_the_same_faults(rank):
    whole = experts(8, 2, 3)
    share = shard_parameters([whole], Mesh(expert_rank=rank, expert_size=2), 1, 1)
    assert "experts.0.gate.weight" in missing(share, entries_for([whole])[1:])
    more = [*entries_for([whole]), entry("experts.8.up.weight", (2, 3))]
    assert "too many: experts.8.up.weight." in unexpected(share, more)


def test_coverage_unexpected_tensors_are_counted_and_named():
    more = [entry(f"extra.{index}", (1,), file="b.safetensors") for index in range(7)]
    message = unexpected(UNTIED, entries_for(UNTIED) + more)
    assert "b.safetensors has 7 tensors too many: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more." in message
    assert "a\\nb" in unexpected(UNTIED, [*entries_for(UNTIED), entry("a\nb", (1,))])
    empty = entry("shared_experts.up.weight", (0, 3), file="b.safetensors")
    assert "has 7 tensors too many" in unexpected(UNTIED, [*entries_for(UNTIED), *more, empty])


def test_coverage_experts_stored_twice_are_unexpected():
    whole = experts(2, 3, 5)
    message = unexpected([whole], [*entries_for([whole]), entry("experts.gate_up", (2, 6, 5))])
    assert "too many: experts.gate_up." in message


def test_coverage_undeclared_bias_is_unexpected():
    assert "too many: q.bias." in unexpected([QKV], [*entries_for([QKV]), entry("q.bias", (4,))])


def test_plan_load_skips_ignorable_tensors():
    more = entry("rotary.inv_freq", (4,), dtype="int64")
    plan = plan_load(UNTIED, HeaderSource([*entries_for(UNTIED), more], ignorable={"rotary.inv_freq"}), "float32")
    assert "rotary.inv_freq" not in {move.tensor for move in plan.moves}


@for_each("shape", [(4, 2), (2, 4, 1), (8,), (2, 5), ()])
def test_coverage_wrong_shape_names_file_and_tensor(shape):
    entries = [entry("k", shape) if item.name == "k" else item for item in entries_for(UNTIED)]
    message = refusal("weights.wrong_shape", UNTIED, entries)
    assert f"m.safetensors: 'k' has the shape {list(shape)}, and [2, 4] is needed." in message


def test_coverage_wrong_shape_names_each_valid_layout():
    message = refusal("weights.wrong_shape", [experts(4, 3, 5)], [entry("experts.gate_up", (4, 7, 5))])
    assert "'experts.gate_up' has the shape [4, 7, 5], and [4, 6, 5] or [4, 5, 6] is needed." in message


def test_coverage_expert_of_another_shape_is_named():
    whole = experts(4, 3, 5)
    entries = [
        entry(item.name, (6, 5)) if item.name == "experts.2.up.weight" else item for item in entries_for([whole])
    ]
    assert "'experts.2.up.weight' has the shape [6, 5]" in refusal("weights.wrong_shape", [whole], entries)


@for_each("dtype", ["int8", "F8_E5M2", "bool", "uint8", "float8_e4m3fn"])
def test_coverage_non_float_type_is_refused(dtype):
    entries = [dataclasses.replace(item, dtype=dtype) if item.name == "v" else item for item in entries_for(UNTIED)]
    assert f"m.safetensors: 'v' is stored as {dtype}" in refusal("weights.unsupported_dtype", UNTIED, entries)


def test_coverage_tied_head_of_wrong_shape_or_type_is_refused():
    entries = [*entries_for(TIED), entry("lm_head.weight", (11, 4))]
    assert "'lm_head.weight' has the shape [11, 4]" in refusal("weights.wrong_shape", TIED, entries)
    entries = [*entries_for(TIED), entry("lm_head.weight", (10, 4), "int8")]
    assert "'lm_head.weight' is stored as int8" in refusal("weights.unsupported_dtype", TIED, entries)


def test_plan_load_tensor_in_two_parameters_is_an_assertion():
    other = Parameter("other", (4, 4), (Part("q", 0, (4, 4)),))
    with pytest.raises(AssertionError, match=r"q is a part of layers.0.qkv.weight and of other"):
        plan_load([QKV, other], HeaderSource(entries_for([QKV])), "float32")


def test_plan_refuses_columns_that_do_not_divide():
    odd = stacked("layers.3.down.weight", [64], 100)
    message = refusal("weights.unsupported_scheme", [odd], entries_for([odd]), WeightRecipe(MXFP4))
    assert "layers.3.down.weight [64, 100] cannot be stored as mxfp4: " in message
    assert "quantization=fp8, or quantization_ignore=layers.3.down.weight" in message
    plan = plan_load(
        [odd], HeaderSource(entries_for([odd])), "float32", WeightRecipe(MXFP4, ignore=("layers.3.down.weight",))
    )
    assert plan.num_quantized == 0


@pytest.mark.parametrize(
    ("scheme", "split", "words"),
    [
        (FP8_BLOCK, "columns", "a rank's share of it is the columns 0 to 95, and 128 columns share a scale"),
        (FP8_BLOCK, "rows", "a rank's share of 't0' is the rows 0 to 95, and 64 rows share a scale"),
        (MXFP4, "columns", None),
    ],
)
def test_coverage_share_that_cuts_a_block_is_refused(scheme, split, words):
    whole = stacked("layers.0.w.weight", [192, 192], 192, split=split)
    recipe = WeightRecipe(scheme)
    for rank in (0, 1):
        share = shard_parameters([whole], Mesh(rank, 2), 1, 1)
        if words is None:
            plan_load(share, HeaderSource(entries_for([whole])), "float32", recipe)
            continue
        message = refusal("weights.unsupported_scheme", share, entries_for([whole]), recipe)
        assert "Take fewer ranks, quantization=fp8" in message
        assert rank == 1 or words in message


def test_coverage_share_of_half_an_mxfp4_block_is_refused():
    whole = stacked("layers.0.w.weight", [4], 96, split="columns")
    share = shard_parameters([whole], Mesh(1, 2), 1, 1)
    message = refusal("weights.unsupported_scheme", share, entries_for([whole]), WeightRecipe(MXFP4))
    assert "layers.0.w.weight [4, 48] cannot be stored as mxfp4: " in message
