"""Layouts: the one that is there is taken, and where none is whole, the errors are about the nearest."""

from dataclasses import replace

import pytest

from holdfast.loading.planning.moves import choose, choose_all
from holdfast.models.parameters import EXPERT_NAMES, Parameter, Part, list_experts
from holdfast.models.spec import ExpertsSpec
from loading.header_source import entries_for, entry, experts

EXPERTS = experts(4, 3, 5)
APART = entries_for([EXPERTS])
FUSED, ACROSS = entry("experts.gate_up", (4, 6, 5)), entry("experts.gate_up", (4, 5, 6))
EMBED = Parameter("embed.weight", (10, 4), (Part("model.embed_tokens.weight", 0, (10, 4)),), "head", "rows")


def by_name(entries):
    return {item.name: item for item in entries}


@pytest.mark.parametrize(
    ("entries", "layout"),
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
    ids=["apart", "fused", "transposed", "both", "some", "some and transposed", "another shape", "none"],
)
def test_the_first_that_is_there_is_taken(entries, layout):
    choice = choose(EXPERTS, by_name(entries))
    assert choice.parts == choice.whole_parts == (EXPERTS.parts, *EXPERTS.layouts)[layout]


def test_a_share_takes_the_layout_of_the_whole():
    share = replace(
        EXPERTS, parts=EXPERTS.parts[:2], layouts=tuple(parts[:2] for parts in EXPERTS.layouts), whole=EXPERTS
    )
    choice = choose(share, by_name([ACROSS]))
    assert choice.parts == EXPERTS.layouts[1][:2]
    assert choice.whole_parts == EXPERTS.layouts[1]
    assert choose(share, by_name(APART[:4])).whole_parts == EXPERTS.parts, "ranks agree, whatever each has of it"


HEAD_ENTRY, EMBED_ENTRY = entry("lm_head.weight", (10, 4)), entry("model.embed_tokens.weight", (10, 4))


@pytest.mark.parametrize(
    ("entries", "fills", "twins"),
    [
        ([EMBED_ENTRY], ["model.embed_tokens.weight"], []),
        ([HEAD_ENTRY], ["lm_head.weight"], []),
        ([EMBED_ENTRY, HEAD_ENTRY], ["model.embed_tokens.weight"], ["lm_head.weight"]),
        ([], ["model.embed_tokens.weight"], []),
    ],
    ids=["embedding", "head", "both", "neither"],
)
def test_tied_embeddings_go_by_either_name(entries, fills, twins):
    choices = choose_all([EMBED], by_name(entries))
    assert [choice.parts[0].tensor for choice in choices.fills] == fills
    assert [choice.parts[0].tensor for choice in choices.twins] == twins
    assert all(choice.whole_parts == choice.parts for choice in (*choices.fills, *choices.twins))


def test_a_head_of_its_own_is_nobodys_twin():
    head = Parameter("lm_head.weight", (10, 4), (Part("lm_head.weight", 0, (10, 4)),), "head", "rows")
    choices = choose_all([EMBED, head], by_name([EMBED_ENTRY, HEAD_ENTRY]))
    assert choices.twins == ()
    assert [choice.parts[0].tensor for choice in choices.fills] == ["model.embed_tokens.weight", "lm_head.weight"]


def moe_parameters(hidden, inner):
    spec = ExpertsSpec(num_experts=3, top_k=1, intermediate_size=inner)
    return [p for p in list_experts(spec, EXPERT_NAMES, hidden, "layers.0.", "") if p.kind == "expert"]


@pytest.mark.parametrize("is_share", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(8, 4), (4, 4), (4, 6)], ids=["square gate_up", "square down", "neither"]
)
def test_square_matrices_lie_as_the_others_of_the_same_experts(hidden, inner, is_transposed, is_share):
    shapes = {"gate_up_proj": (3, 2 * inner, hidden), "down_proj": (3, hidden, inner)}
    stored = {name: (shape[0], shape[2], shape[1]) if is_transposed else shape for name, shape in shapes.items()}
    entries = by_name(entry(f"mlp.experts.{name}", shape) for name, shape in stored.items())
    parameters = moe_parameters(hidden, inner)
    if is_share:
        parameters = [replace(parameter, whole=parameter) for parameter in parameters]
    for choice in choose_all(parameters, entries).fills:
        assert {part.is_transposed for part in (*choice.parts, *choice.whole_parts)} == {is_transposed}
        assert {part.shape for part in choice.parts} == {entries[choice.parts[0].tensor].shape}
