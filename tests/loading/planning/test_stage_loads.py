"""Loads of pipeline stages: together they read every tensor, each only its own, and what is wrong is refused by all."""

import pytest

from cli.cli_models import CONFIG
from error_codes import raises_code
from holdfast.distributed.mesh import meshes
from holdfast.errors import ModelFormatError
from holdfast.loading.planning.plan import LoadPlan, plan_load
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.sharding import shard_parameters
from loading.header_source import HeaderSource, entries_for, entry

CUTS = [(0, 1), (1, 3), (3, 4)]


def stage_loads(is_tied: bool, entries: list[TensorEntry] | None = None, add: tuple[TensorEntry, ...] = ()):
    """The plan of each stage."""
    spec = read_spec(CONFIG | {"num_hidden_layers": 4, "tie_word_embeddings": is_tied})
    whole = parameters(spec)
    source = HeaderSource([*(entries_for(whole) if entries is None else entries), *add])
    plans: list[LoadPlan] = []
    for mesh in meshes(1, CUTS):
        own = shard_parameters(whole, mesh, spec.num_heads, spec.num_kv_heads)
        plans.append(plan_load(own, source, "float32", whole=whole))
    return whole, plans


def test_stage_loads_read_each_tensor_once_in_total() -> None:
    whole, plans = stage_loads(is_tied=False)
    read = [{move.tensor for move in plan.moves} for plan in plans]
    assert sum(map(len, read)) == len(set().union(*read)) == len({part.tensor for one in whole for part in one.parts})
    assert (
        sum(plan.final_bytes for plan in plans)
        == plan_load(whole, HeaderSource(entries_for(whole)), "float32").final_bytes
    )
    assert "model.embed_tokens.weight" in read[0]
    assert {"lm_head.weight", "model.norm.weight"} < read[2]
    assert not any(plan.tied for plan in plans), "another stage's head is no copy of the embedding"
    names = {weight.name for weight in plans[1].weights}
    assert {name.split(".")[1] for name in names} == {"0", "1"}, "layers of a stage count from 0"


def test_stage_loads_both_ends_have_the_tied_embedding() -> None:
    _, plans = stage_loads(is_tied=True)
    assert ["embed.weight" in {weight.name for weight in plan.weights} for plan in plans] == [True, False, True]
    _, plans = stage_loads(is_tied=True, add=(entry("lm_head.weight", (259, 64)),))
    assert [len(plan.tied) for plan in plans] == [1, 0, 1]


@pytest.mark.parametrize("is_tied", [False, True])
def test_stage_loads_tensor_of_no_stage_is_unexpected(is_tied: bool) -> None:
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        stage_loads(is_tied, add=(entry("model.layers.4.mlp.up_proj.weight", (112, 64)),))
