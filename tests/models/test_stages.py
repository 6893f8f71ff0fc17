"""Pipeline stages: logits of the last are those of one process to the bit, and each has the pages of its own layers."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from distributed.lock_step import LockStepError
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.errors import ConfigError
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from kernels.exactness import same_bits
from models.staged_runners import (
    STAGED,
    StagedRanks,
    cuts_of,
    find_model,
    num_layers,
    pages_by_group,
    stage_logits,
)
from runner.rank_runs import Built, share_of, states_of

BOTH_AT_ONCE = ("llama_tied", "gpt_oss", "deepseek_v3")
"""Models of which `make test` shares stages among ranks: a tied head, experts with windows and sinks, latents. It has stages and ranks
alone of all of them."""


class Alone(NamedTuple):
    """One process that has run all steps."""

    path: Path
    ranks: StagedRanks
    logits: list[torch.Tensor]


AloneRuns = Callable[..., Alone]


@pytest.fixture(scope="module")
def alone_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AloneRuns]:
    """alone_runs(family, **options): the run by one process, made once."""
    made: dict[tuple[object, ...], Alone] = {}

    def run(family: str, **options: object) -> Alone:
        key = family, *options.items()
        if key not in made:
            path = find_model(tmp_path_factory.mktemp("alone"), family)
            ranks = StagedRanks(path, [ALONE], **options)
            made[key] = Alone(path, ranks, *ranks.run(stage_logits))
        return made[key]

    yield run
    for one in made.values():
        one.ranks.release()


def compare(runs: AloneRuns, family: str, ranks: tuple[Mesh, ...], num_ranks: int = 1, **options: object) -> None:
    """Ranks against one process: every logit that is wanted, and every page that was written."""
    path, alone, expected = runs(family, **options)
    layers, shared = num_layers(family), StagedRanks(path, ranks, **options, tensor_parallel_size=num_ranks)
    try:
        found = shared.run(stage_logits)
        last = [own for own, mesh in zip(found, ranks, strict=True) if mesh.is_last_stage]
        for number, right_RV in enumerate(expected):
            whole_RV = torch.cat([own[number] for own in last], dim=1)
            assert same_bits(whole_RV, right_RV), f"step {number}: {(whole_RV - right_RV).abs().max()}"
        seen = set()
        for built in shared.built:
            seen |= compare_pages(alone.built[0], built, built.mesh.layer_range(layers))
        assert seen == set(range(layers))
    finally:
        shared.release()


def compare_pages(alone: Built, built: Built, layers: range) -> set[int]:
    """For each layer the pages that its group has taken: in columns that groups share, others hold other layers."""
    spec, num_pages = alone.build.storage.spec, alone.build.storage.num_pages
    taken = pages_by_group(alone)
    assert built.runner.groups == alone.runner.groups
    compare_states(alone, built, layers)
    places = [place for place, own in enumerate(spec.layers) if own.layer in layers]
    assert len(built.build.storage.spec.layers) == len(places)
    for place, whole_place in enumerate(places):
        group = spec.group_of(whole_place)
        shape = spec.groups[group].chunks_per_page, num_pages, spec.page_tokens
        whole = alone.build.storage.planes(whole_place)
        for name, plane in built.build.storage.planes(place).items():
            right = share_of(whole[name], plane, built.mesh)
            found, right = (tensor.unflatten(0, shape)[:, taken[group]].contiguous() for tensor in (plane, right))
            assert right.view(torch.uint8).any(), "nothing was written"
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8)), (whole_place, name)
    return {spec.layers[place].layer for place in places}


def compare_states(alone: Built, built: Built, layers: range) -> None:
    """Those of unfinished entries: of a rank's own layers, to the bit."""
    found = [] if not built.build.plan.states else states_of(built.runner)
    for kind, states in zip(built.build.plan.states, found, strict=True):
        kinds = [(one.name, one.ratio) for one in alone.build.plan.states]
        place = kinds.index((kind.name, kind.ratio))
        own = [layer + layers.start for layer in kind.layers]
        whole_layers = alone.build.plan.states[place].layers
        assert own == [layer for layer in whole_layers if layer in layers]
        right = states_of(alone.runner)[place][[whole_layers.index(layer) for layer in own]]
        assert right.any(), "nothing was added up"
        assert torch.equal(states, right), kind


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("family", STAGED)
def test_stages_compute_what_one_process_computes(alone_runs: AloneRuns, family: str, num_stages: int) -> None:
    """Rows that are wanted are none, some and all."""
    compare(alone_runs, family, meshes(1, cuts_of(family, num_stages)))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in BOTH_AT_ONCE else pytest.mark.slow)
        for name in STAGED
        if name != "opt, norms last"
    ],
)
def test_stages_of_two_ranks_match_one_process(alone_runs: AloneRuns, family: str) -> None:
    compare(alone_runs, family, meshes(2, cuts_of(family, 2), is_exact=True), num_ranks=2)


@pytest.mark.parametrize(
    ("family", "num_ranks", "num_stages"),
    [
        pytest.param(*case, marks=() if case in (("v4_flash", 2, 3), ("v4_pro", 1, 2)) else pytest.mark.slow)
        for case in product(("v4_flash", "v4_pro"), (1, 2, 4), (1, 2, 3))
        if case[1:] != (1, 1)
    ],
)
def test_ledger_of_every_rank_equals_its_plan(tmp_path: Path, family: str, num_ranks: int, num_stages: int) -> None:
    """Owner by owner, of engines that hold weights, pages and states."""
    cuts, options = cuts_of(family, num_stages), {"tensor_parallel_size": num_ranks}
    ranks = StagedRanks(find_model(tmp_path, family), meshes(num_ranks, cuts), **options)
    try:
        for built in ranks.built:
            plan, held = built.build.plan, Counter[str]()
            for entry in built.build.ledger:
                held[line_of(entry.owner)] += entry.num_bytes
            planned = Counter({"kv pages": plan.memory.kv_bytes})
            for term in plan.memory.terms:
                planned[line_of(term.owner)] += term.num_bytes
            assert held == {owner: planned[owner] for owner in held}, built.mesh
            states = {f"kv state/{kind.tensor(1).name}" for kind in plan.states}
            assert held.keys() >= {"weights", "kv pages", "inputs/states", "workspace/layers", *states}
    finally:
        ranks.release()


def line_of(owner: str) -> str:
    """One line where plan and ledger cut it otherwise: weights by tensor, pages by plane."""
    group = owner.partition("/")[0]
    return group if group in ("weights", "kv pages") else owner


@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", pytest.param("turboquant_3bit_nc", marks=pytest.mark.slow)])
def test_quantized_pages_are_those_of_one_process(alone_runs: AloneRuns, kv_dtype: str) -> None:
    """Keys are centred by a prompt that goes through all stages; the first and last layers may be protected."""
    for family in ("llama", "gemma3"):
        compare(alone_runs, family, meshes(1, cuts_of(family, 2)), kv_cache_dtype=kv_dtype)


def test_stage_without_its_neighbour_raises_lock_step_error(tmp_path: Path) -> None:
    """The first ends, and the second waits for its rows."""
    ranks = StagedRanks(find_model(tmp_path, "llama"), meshes(1, cuts_of("llama", 2)))
    try:
        with pytest.raises(LockStepError, match="rank 1 waits in receive_rows"):
            ranks.run(lambda built: None if built.mesh.is_first_stage else stage_logits(built))
    finally:
        ranks.release()


def test_check_ranks_declines_stages_sharing_more_than_rows() -> None:
    declared = declare_config(CATALOGUE["GLM-5.2"], "GLM")
    heads = declared.declaration.heads(ALONE)
    assert heads is not None and heads.shared_layers, "no layer shares what another chose"  # noqa: PT018
    cuts = [meshes(1, [(0, layer), (layer, declared.num_layers)])[1] for layer in range(1, declared.num_layers)]
    assert {layer for layer, mesh in enumerate(cuts, 1) if not declared.is_divisible(mesh)} == heads.shared_layers
    with pytest.raises(ConfigError, match="layer 3 attends to tokens that a layer of the stage before"):
        declared.check_ranks(cuts[2])
