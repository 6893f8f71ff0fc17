"""Ranks and stages of models with gated delta nets: logits and states of one process, and sizes that do not divide."""

from pathlib import Path

import pytest
import torch

from error_codes import raises_code
from holdfast.cache.places import CONV, RECURRENT
from holdfast.cache.storage import StateStorage
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.errors import ConfigError
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from kernels.exactness import same_bits
from models.staged_runners import StagedRanks, stage_logits
from runner.rank_runs import BASE, MODELS, Built, write_model

OPTIONS = {"max_num_batched_tokens": 64}
CUTS = [(0, 2), (2, 4)]


def states_of(built: Built) -> StateStorage:
    return built.runner.backend.states._states


def heads_of(rank: int, size: int, num_heads: int) -> slice:
    return slice(rank * num_heads // size, (rank + 1) * num_heads // size)


def compare_states(alone: Built, built: Built) -> None:
    """A rank's own heads of its stage's layers: the convolution's channels are cut in their three parts."""
    mesh, whole, own = built.mesh, states_of(alone), states_of(built)
    first = 0 if mesh.layers is None else mesh.layers[0]
    for kind in built.build.plan.states:
        for layer in kind.layers:
            mine, theirs = own.state(layer, kind.name), whole.state(first + layer, kind.name)
            if kind.name == RECURRENT:
                expected = theirs[:, heads_of(mesh.tensor_rank, mesh.tensor_size, 8)]
            else:
                assert kind.name == CONV
                parts = theirs.split((64, 64, 192), dim=1)
                expected = torch.cat(
                    [part[:, heads_of(mesh.tensor_rank, mesh.tensor_size, part.shape[1])] for part in parts], dim=1
                )
            assert theirs.any(), "nothing was added up"
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize(
    "ranks",
    [
        meshes(2, is_exact=True),
        meshes(4),
        meshes(1, CUTS),
        pytest.param(meshes(2, CUTS, is_exact=True), marks=pytest.mark.slow),
    ],
    ids=["2 exact", "4", "2 stages", "2 stages of 2"],
)
def test_ranks_compute_what_one_process_computes(tmp_path: Path, name: str, ranks: tuple[Mesh, ...]) -> None:
    path, size = write_model(tmp_path, name), ranks[0].tensor_size
    alone = StagedRanks(path, [ALONE], **OPTIONS)
    sums = "exact" if ranks[0].is_exact else "auto"
    shared = StagedRanks(path, ranks, **OPTIONS, tensor_parallel_size=size, tensor_parallel_sums=sums)
    try:
        (expected,) = alone.run(stage_logits)
        found = shared.run(stage_logits)
        last = [own for own, mesh in zip(found, ranks, strict=True) if mesh.is_last_stage]
        for number, right_RV in enumerate(expected):
            whole_RV = torch.cat([own[number] for own in last], dim=1)
            if size == 1 or ranks[0].is_exact:
                assert same_bits(whole_RV, right_RV), f"step {number}: {(whole_RV - right_RV).abs().max()}"
            torch.testing.assert_close(whole_RV, right_RV, atol=1e-4, rtol=1e-4)
        for built in shared.built:
            compare_states(alone.built[0], built)
    finally:
        alone.release()
        shared.release()


def test_key_heads_that_do_not_divide_are_refused() -> None:
    declared = declare_config(CATALOGUE["Qwen3.5-27B"], "x")
    assert declared.indivisible(Mesh(tensor_size=32)) is not None
    odd = declare_config(BASE | MODELS["qwen3_5"] | {"linear_num_key_heads": 2}, "x")
    assert odd.indivisible(Mesh(tensor_size=4)) == (
        "2 key heads of layers with a state do not divide into 4 equal parts"
    )
    with raises_code("families.indivisible", ConfigError):
        odd.check_ranks(Mesh(tensor_size=4))


def test_stage_of_one_kind_of_layers_is_refused() -> None:
    layers = {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}
    declared = declare_config(BASE | MODELS["qwen3_5"] | layers, "x")
    with raises_code("families.indivisible_stages", ConfigError) as caught:
        declared.check_ranks(meshes(1, CUTS)[0])
    assert "layers 0 to 1 all keep a state" in str(caught.value)
    with raises_code("families.indivisible_stages", ConfigError) as caught:
        declared.check_ranks(meshes(1, CUTS)[1])
    assert "layers 2 to 3 all attend to tokens" in str(caught.value)
