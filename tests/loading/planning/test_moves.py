"""Moves give the same rows in pieces of any size; of the layouts of a parameter the one that is there is taken."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from holdfast.loading.planning.moves import Move, PlannedWeight, choose, choose_all
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.parameters import ExpertNames, Parameter, Part, list_experts
from holdfast.models.spec import ExpertsSpec
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4
from loading.header_source import entries_for, entry, experts


def move(part, scheme=None, dtype="bfloat16"):
    return Move(part.tensor, dtype, "w", part, scheme, 0)


def stored_rows(array, read):
    """What `read_into` would give, as rows of the stored tensor."""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(-1, 1)
    rows = rows[read.row_start : read.row_end]
    return rows if read.columns is None else rows[:, read.columns[0] : read.columns[1]]


def played(own, array, max_bytes, out):
    """Carry out a move without quantizing, in pieces of at most so many bytes."""
    for start, end in own.row_ranges(max_bytes):
        chunk = stored_rows(array, own.read(start, end))
        assert chunk.size * 2 == (end - start) * own.row_bytes, "a chunk holds what it says"
        shape = (end - start, own.num_read_columns)
        rows = chunk.reshape(shape[::-1]).T if own.part.is_transposed else chunk.reshape(shape)
        first, last = own.kept_columns
        place = own.part.row_start + (start - own.part.row_range[0]) * own.part.repeats
        out[place : place + (end - start) * own.part.repeats] = np.repeat(rows[:, first:last], own.part.repeats, axis=0)


@given(st.data())
def test_move_pieces_of_any_size_give_the_same_rows(data):
    lead, num_rows, num_columns = (data.draw(st.integers(1, 4)) for _ in range(3))
    is_transposed = data.draw(st.booleans())
    upright = np.arange(lead * num_rows * num_columns).reshape(lead, num_rows, num_columns)
    array = np.ascontiguousarray(upright.transpose(0, 2, 1)) if is_transposed else upright
    rows = sorted(data.draw(st.lists(st.integers(0, lead * num_rows), min_size=2, max_size=2, unique=True)))
    columns = sorted(data.draw(st.lists(st.integers(0, num_columns), min_size=2, max_size=2, unique=True)))
    repeats = data.draw(st.integers(1, 3))
    part = Part("t", 2, array.shape, tuple(rows), tuple(columns), is_transposed, repeats)
    scheme = data.draw(st.sampled_from([None, FP8, MXFP4]))
    own = move(part, scheme)
    out = np.full((2 + part.num_rows + 1, part.num_columns), -1)
    played(own, array, data.draw(st.integers(1, 40)), out)
    wanted = upright.reshape(-1, num_columns)[rows[0] : rows[1], columns[0] : columns[1]]
    assert (out[2:-1] == np.repeat(wanted, repeats, axis=0)).all()
    assert (out[:2] == -1).all()
    assert (out[-1] == -1).all()


def test_move_with_joined_rows_reads_them_as_stored():
    array = np.arange(2 * 3 * 4 * 16).reshape(2, 3, 4, 16)
    part = Part("t_blocks", 0, array.shape, rows=(1, 5), columns=(16, 48), joined_rows=4)
    out = np.zeros((4, 32), dtype=int)
    played(move(part), array, 130, out)
    assert (out == array.reshape(6, 64)[1:5, 16:48]).all()
    assert move(part).read_columns is None, "stored rows are narrower than ours"


@for_each(
    "scheme, read_columns, kept",
    [(None, (128, 256), (0, 128)), (FP8_BLOCK, (128, 256), (0, 128)), (MXFP4, (128, 256), (0, 128))]
    + [(scheme, None, (128, 256)) for scheme in (FP8, FP8_TENSOR)],
)
def test_move_row_scale_reads_whole_rows_others_only_kept(scheme, read_columns, kept):
    own = move(Part("t", 0, (256, 512), columns=(128, 256)), scheme)
    assert (own.read_columns, own.kept_columns) == (read_columns, kept)
    assert own.row_bytes == 2 * (512 if read_columns is None else 128)


def test_move_never_cuts_a_block_of_rows():
    own = move(Part("t", 128, (300, 64), rows=(0, 300)), FP8_BLOCK)
    assert list(own.row_ranges(1)) == [(0, 128), (128, 256), (256, 300)]
    assert list(own.row_ranges(300 * 128)) == [(0, 256), (256, 300)]
    assert own.least_bytes == 128 * 128
    assert own.chunk_bytes == 300 * 128
    assert move(Part("t", 0, (40, 64)), FP8_BLOCK).least_bytes == 40 * 128


def test_move_row_ranges_of_a_transposed_stack_end_per_matrix():
    own = move(Part("t", 0, (3, 8, 5), is_transposed=True))
    assert list(own.row_ranges(10**6)) == [(0, 5), (5, 10), (10, 15)]
    assert own.read(5, 10) == (8, 16, None)
    assert own.read(6, 8) == (8, 16, (1, 3))
    with pytest.raises(AssertionError, match="two matrices"):
        own.read(4, 6)


def test_move_amax_rows_of_a_share_are_those_of_the_whole():
    assert move(Part("t", 0, (8, 4), rows=(2, 4), whole_rows=(0, 4)), FP8_TENSOR).amax_rows == (0, 4)
    assert move(Part("t", 0, (8, 4)), FP8_TENSOR).amax_rows == (0, 8)
    assert move(Part("t", 0, (8, 4)), FP8).amax_rows is None
    own = move(Part("t", 0, (8, 4), rows=(2, 4), whole_rows=(0, 6)), FP8_TENSOR)
    assert list(own.row_ranges(16, own.amax_rows)) == [(0, 2), (2, 4), (4, 6)]


def test_planned_weight_plain_is_one_tensor():
    weight = PlannedWeight("a.weight", (3, 4), "bfloat16")
    assert weight.specs == (TensorSpec("a.weight", (3, 4), "bfloat16"),)
    assert (weight.num_bytes, weight.stored_as) == (24, "bfloat16")


@for_each(
    "scheme, codes, scales, num_bytes",
    [
        (FP8, ((2, 128, 64), "float8_e4m3fn"), ((2, 128), "float32"), 16384 + 1024),
        (INT8, ((2, 128, 64), "int8"), ((2, 128), "float32"), 16384 + 1024),
        (FP8_BLOCK, ((2, 128, 64), "float8_e4m3fn"), ((2, 1, 1), "float32"), 16384 + 8),
        (MXFP4, ((2, 128, 32), "uint8"), ((2, 128, 2), "uint8"), 8192 + 512),
    ],
)
def test_planned_weight_quantized_is_codes_and_scales(scheme, codes, scales, num_bytes):
    weight = PlannedWeight("a.weight", (2, 128, 64), "bfloat16", scheme)
    assert weight.specs == (TensorSpec("a.weight", *codes), TensorSpec("a.weight.scale", *scales))
    assert (weight.num_bytes, weight.stored_as) == (num_bytes, scheme.name)


EXPERTS = experts(4, 3, 5)
APART = entries_for([EXPERTS])
FUSED, ACROSS = entry("experts.gate_up", (4, 6, 5)), entry("experts.gate_up", (4, 5, 6))
EMBED = Parameter("embed.weight", (10, 4), (Part("model.embed_tokens.weight", 0, (10, 4)),), "head", "rows")


def by_name(entries):
    return {item.name: item for item in entries}


@for_each(
    "entries, layout",
    [
        (APART, 0),
        ([FUSED], 1),
        ([ACROSS], 2),
        ([*APART, FUSED], 0),
        (APART[3:], 0),
        ([*APART[3:], ACROSS], 2),
        ([entry("experts.gate_up", (4, 7, 5))], 1),
        ([], 0),
    ],
)
def test_choose_takes_the_first_layout_present(entries, layout):
    choice = choose(EXPERTS, by_name(entries))
    assert choice.parts == choice.whole_parts == (EXPERTS.parts, *EXPERTS.layouts)[layout]


def test_choose_share_takes_the_layout_of_the_whole():
    share = replace(
        EXPERTS, parts=EXPERTS.parts[:2], layouts=tuple(parts[:2] for parts in EXPERTS.layouts), whole=EXPERTS
    )
    choice = choose(share, by_name([ACROSS]))
    assert choice.parts == EXPERTS.layouts[1][:2]
    assert choice.whole_parts == EXPERTS.layouts[1]
    assert choose(share, by_name(APART[:4])).whole_parts == EXPERTS.parts, "ranks agree, whatever each has of it"


HEAD_ENTRY, EMBED_ENTRY = entry("lm_head.weight", (10, 4)), entry("model.embed_tokens.weight", (10, 4))


@for_each(
    "entries, fills, tied",
    [
        ([EMBED_ENTRY], ["model.embed_tokens.weight"], []),
        ([HEAD_ENTRY], ["lm_head.weight"], []),
        ([EMBED_ENTRY, HEAD_ENTRY], ["model.embed_tokens.weight"], ["lm_head.weight"]),
        ([], ["model.embed_tokens.weight"], []),
    ],
)
def test_choose_all_tied_embedding_goes_by_either_name(entries, fills, tied):
    choices = choose_all([EMBED], by_name(entries))
    assert [choice.parts[0].tensor for choice in choices.fills] == fills
    assert [choice.parts[0].tensor for choice in choices.tied] == tied
    assert all(choice.whole_parts == choice.parts for choice in (*choices.fills, *choices.tied))


def test_choose_all_untied_head_is_a_fill():
    head = Parameter("lm_head.weight", (10, 4), (Part("lm_head.weight", 0, (10, 4)),), "head", "rows")
    choices = choose_all([EMBED, head], by_name([EMBED_ENTRY, HEAD_ENTRY]))
    assert choices.tied == ()
    assert [choice.parts[0].tensor for choice in choices.fills] == ["model.embed_tokens.weight", "lm_head.weight"]


def moe_parameters(hidden, inner):
    spec = ExpertsSpec(num_experts=3, top_k=1, intermediate_size=inner)
    return [p for p in list_experts(spec, ExpertNames(), hidden, "layers.0.", "") if p.kind == "expert"]


@for_each("is_share", [False, True])
@for_each("is_transposed", [False, True])
@for_each("hidden, inner", [(8, 4), (4, 4), (4, 6)])
def test_choose_square_experts_follow_the_layout_of_the_others(hidden, inner, is_transposed, is_share):
    shapes = {"gate_up_proj": (3, 2 * inner, hidden), "down_proj": (3, hidden, inner)}
    stored = {name: (shape[0], shape[2], shape[1]) if is_transposed else shape for name, shape in shapes.items()}
    entries = by_name(entry(f"mlp.experts.{name}", shape) for name, shape in stored.items())
    parameters = moe_parameters(hidden, inner)
    if is_share:
        parameters = [replace(parameter, whole=parameter) for parameter in parameters]
    for choice in choose_all(parameters, entries).fills:
        assert {part.is_transposed for part in (*choice.parts, *choice.whole_parts)} == {is_transposed}
        assert {part.shape for part in choice.parts} == {entries[choice.parts[0].tensor].shape}
