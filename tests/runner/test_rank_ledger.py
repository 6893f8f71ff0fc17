"""Every rank of models of the catalogue, built without memory (on torch's meta device): the ledger is the plan, owner by owner, to the byte."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import (
    ExchangeKind,
    ExchangeNeeds,
    exchange_specs,
    in_stage,
    nccl_bytes,
    rounding_bytes,
)
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.loading.execution import execute
from holdfast.loading.planning.moves import PlannedWeight
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.plan import LoadPlan
from holdfast.loading.planning.stored_schemes import dummy_source, quantization_of, read_stored_schemes
from holdfast.memory.arena import Arena
from holdfast.memory.devices import GPUS
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import KV_OWNER
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.grouped_readers import parameters
from holdfast.models.parameters import Parameter
from holdfast.models.settings import Settings
from holdfast.planning import resolve
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.target import gpu_target
from holdfast.planning.terms import graph_term
from holdfast.runner import assembly, build, step_inputs
from holdfast.runner.build import RunnerBuild, plan_model
from planning.test_plan_stages import equal_cuts

META = torch.device("meta")
TARGET = gpu_target(GPUS["b200"])._replace(total_bytes=2**42, available_bytes=2**42)
"""So large that one rank may have all of any model."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory": 2**33,
}


class NoExchange:
    """What a rank exchanges with is not there: nothing runs."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.tensor_rank, mesh.tensor_size

    def close(self) -> None: ...


@lru_cache(maxsize=1)
def listed(name: str) -> tuple[Parameter, ...]:
    """All parameters of a model."""
    spec = declare_config(CATALOGUE[name], name).spec
    assert spec is not None
    return tuple(parameters(spec))


@lru_cache(maxsize=4)
def opened(name: str, layers: frozenset[int] | None = None) -> OpenModel:
    """A model as if it lay in files, with the parameters of all layers or of these; DeepSeek-V4 as it is stored."""
    declared = declare_config(CATALOGUE[name], name)
    spec = declared.spec
    assert spec is not None
    own = tuple(one for one in listed(name) if layers is None or layer_of(one.name) in (None, *layers))
    stored = (
        read_stored_schemes(quantization_of(Settings(CATALOGUE[name], "config.json")), "config.json")
        if declared.is_compressed
        else None
    )
    source = dummy_source(own, spec.checkpoint_dtype, stored)
    defaults = GenerationDefaults(eos_token_ids=(0,))
    return OpenModel(Path(name), "directory", spec, own, source, defaults, stored=stored)


def layer_of(name: str) -> int | None:
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None


@lru_cache(maxsize=1)
def layer_kinds(name: str) -> list[int]:
    """For each layer a number that it shares with those whose parameters differ by nothing but the layer's own number."""
    found: dict[int, list[object]] = {}
    for one in listed(name):
        layer = layer_of(one.name)
        if layer is None:
            continue
        layouts = [
            tuple(part._replace(tensor=part.tensor.replace(f".{layer}.", ".#.", 1)) for part in parts)
            for parts in (one.parts, *one.layouts)
        ]
        plain = replace(one, name=one.name.split(".", 2)[2], parts=(), layouts=())
        found.setdefault(layer, []).append((plain, *layouts))
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(tuple(found[layer]), len(numbers)) for layer in range(len(found))]


def plan_thinned(config: EngineConfig, name: str, mesh: Mesh) -> tuple[LoadPlan, RunnerPlan]:
    """The plan of a rank, and its weights: one layer of each kind is shared out part by part, and stands for the others.

    Hundreds of experts are hundreds of thousands of parts; a rank's share of a layer does not depend on the layer's number.
    """
    first, last = mesh.layers or (0, len(layer_kinds(name)))
    own = layer_kinds(name)[first:last]
    chosen = {kind: first + own.index(kind) for kind in own}
    load, plan = plan_model(config, opened(name, frozenset(chosen.values())), TARGET, mesh=mesh)
    by_layer: dict[int | None, list[PlannedWeight]] = {}
    for weight in load.plan.weights:
        by_layer.setdefault(layer_of(weight.name), []).append(weight)
    weights = by_layer.pop(None, [])
    for place, kind in enumerate(own):
        like = chosen[kind] - first
        weights += (_renamed(weight, like, place) for weight in by_layer[like])
    return replace(load.plan, weights=tuple(weights)), plan


def _renamed(weight: PlannedWeight, old: int, new: int) -> PlannedWeight:
    return replace(weight, name=f"layers.{new}." + weight.name.removeprefix(f"layers.{old}."))


def held_and_planned(
    name: str, mesh: Mesh, options: dict[str, Any], is_thinned: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Bytes by owner, as an engine's own build records them and as its plan has them while it serves."""
    config = EngineConfig(
        **OPTIONS | options, tensor_parallel_size=mesh.tensor_size, pipeline_parallel_size=mesh.num_stages
    )
    ledger, load_plan, plan = Ledger(), *planned_load(config, name, mesh, is_thinned)
    weights = Arena("weights", load_plan.specs, META, ledger, "without memory")
    built = RunnerBuild(config, opened(name, frozenset()), plan, ledger, META)
    built.weights = execute._assemble(load_plan, weights.tensors)
    if plan.exchange_needs is not None:
        built.exchange = NoExchange(mesh)  # type: ignore[assignment]
        for owner, num_bytes in _exchange_bytes(plan.exchange_needs, mesh, plan.exchange_kind).items():
            ledger.record(owner, num_bytes, "as an exchange takes them")
    built.assemble()
    held = Counter({KV_OWNER: 0})
    for entry in ledger:
        held[_line(entry.owner)] += entry.num_bytes
    planned = Counter({KV_OWNER: plan.memory.kv_bytes})
    for term in plan.memory.terms:
        planned[_line(term.owner)] += term.num_bytes if "serve" in term.phases else 0
    return held, planned


def planned_load(config: EngineConfig, name: str, mesh: Mesh, is_thinned: bool) -> tuple[LoadPlan, RunnerPlan]:
    if is_thinned:
        return plan_thinned(config, name, mesh)
    load, plan = plan_model(config, opened(name), TARGET, mesh=mesh)
    return load.plan, plan


def _exchange_bytes(needs: ExchangeNeeds, mesh: Mesh, kind: ExchangeKind) -> dict[str, int]:
    """As the exchanges of distributed/symmetric.py and distributed/collectives.py enter them."""
    held = {owner: spec.aligned_bytes for owner, spec in exchange_specs(needs, mesh, kind).items()}
    if kind in ("symmetric", "linked"):
        held["exchange/rounding"] = rounding_bytes(*(in_stage(needs, mesh) if kind == "linked" else (needs, mesh)))
    return held | ({"collectives/nccl": nccl_bytes(mesh)} if kind in ("nccl", "linked") else {})


def _line(owner: str) -> str:
    """One line a group where plan and ledger cut it otherwise: weights by tensor, pages by plane."""
    group = owner.partition("/")[0]
    return group if group in ("weights", KV_OWNER) else owner


def ranks_of(name: str, size: int, num_stages: int, way: str) -> tuple[Mesh, ...]:
    model = declare_config(CATALOGUE[name], name)
    cuts = equal_cuts(model.num_layers, num_stages)
    return meshes(size, cuts, has_expert_parallelism=way == "experts", is_exact=way == "exact")


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of pages compiles its kernel when it is made, which the meta device has no numbers for; bytes are counted also
    of ranks whose sums a GPU could not make exact."""
    monkeypatch.setattr(step_inputs, "scatter_pages", lambda *tensors: None)
    monkeypatch.setattr(resolve, "refuse_inequality", lambda *arguments: None)
    monkeypatch.setattr(assembly, "centre_keys", lambda *arguments: 0)
    # Headers of some layers say nothing of the others. DeepSeek-V4 is planned as stored, by its config alone.
    declare = build.declare_opened
    models = {name: declare_config(CATALOGUE[name], name) for name in CATALOGUE if "V4" in name}
    monkeypatch.setattr(build, "declare_opened", lambda opened, name: models.get(name) or declare(opened, name))


QUICK = [
    ("OPT-125m", 4, 2, "exact", {}),
    ("SmolLM2-135M", 3, 2, "reduce", {}),
    ("gemma-3-1b-it", 2, 2, "reduce", {}),
]


@pytest.mark.parametrize(("name", "size", "num_stages", "way", "options"), QUICK, ids=[case[0] for case in QUICK])
def test_rank_ledger_equals_its_plan(name, size, num_stages, way, options) -> None:
    for mesh in ranks_of(name, size, num_stages, way):
        held, planned = held_and_planned(name, mesh, options)
        assert +held == +planned, mesh
        num_layers = len(mesh.layer_range(declare_config(CATALOGUE[name], name).num_layers))
        assert held["cuda graphs"] == graph_term(num_layers, 16, 512).num_bytes, "stages have graphs of their layers"


V4 = [
    ("DeepSeek-V4-Flash", ((2, 2),), ("reduce",)),
    ("DeepSeek-V4-Pro", ((8, 2),), ("reduce",)),
    *(
        pytest.param(name, sizes, ("reduce", "exact", "experts"), marks=pytest.mark.slow)
        for name, sizes in (
            ("DeepSeek-V4-Flash", ((2, 1), (4, 1), (8, 1), (1, 2), (1, 3), (2, 2), (4, 4), (8, 2))),
            ("DeepSeek-V4-Pro", ((8, 1), (2, 2), (4, 2), (8, 2), (4, 4), (1, 16))),
        )
    ),
]


@pytest.mark.parametrize(("name", "sizes", "ways"), V4)
def test_rank_ledgers_of_v4_equal_their_plans(name: str, sizes, ways) -> None:
    """Weights as they are stored, planned by config.json alone; the first and the last rank of every stage."""
    for (size, num_stages), way in product(sizes, ways):
        for mesh in ranks_of(name, size, num_stages, way):
            if mesh.tensor_rank in (0, size - 1):
                held, planned = held_and_planned(name, mesh, {}, is_thinned=True)
                assert +held == +planned, mesh


def runnable() -> list[str]:
    """Models that run on ranks, one of each shape."""
    found: dict[object, str] = {}
    for name, config in CATALOGUE.items():
        model = declare_config(config, name)
        if model.spec is not None:
            found.setdefault(model.spec, name)
    return list(found.values())


@pytest.mark.parametrize(
    ("name", "size", "way"),
    [
        ("DeepSeek-V4-Flash", 2, "reduce"),
        ("DeepSeek-V4-Flash", 4, "experts"),
        ("DeepSeek-V4-Flash", 8, "exact"),
        ("DeepSeek-V4-Pro", 2, "experts"),
        ("DeepSeek-V4-Pro", 8, "reduce"),
        ("DeepSeek-V4-Pro", 8, "exact"),
    ],
)
def test_rank_ledger_with_entries_equals_its_plan(name, size, way) -> None:
    """The first rank and the last."""
    for mesh in ranks_of(name, size, 1, way)[:: size - 1]:
        held, planned = held_and_planned(name, mesh, {}, is_thinned=True)
        assert +held == +planned, mesh


@pytest.mark.parametrize(
    ("name", "size", "num_stages", "way"),
    [
        ("gemma-3-1b-it", 2, 2, "reduce"),
        pytest.param("DeepSeek-V2-Lite", 2, 2, "exact", marks=pytest.mark.slow),
        pytest.param("GLM-4.7-Flash", 4, 1, "experts", marks=pytest.mark.slow),
        pytest.param("Qwen3-30B-A3B", 4, 2, "experts", marks=pytest.mark.slow),
        pytest.param("gpt-oss-120b", 8, 1, "reduce", marks=pytest.mark.slow),
    ],
)
def test_planned_load_thinned_layers_give_whole_specs(name, size, num_stages, way) -> None:
    """Weights that are shared out layer by layer are those that one layer of each kind gives, by name, shape and type."""
    config = EngineConfig(**OPTIONS, tensor_parallel_size=size, pipeline_parallel_size=num_stages)
    for mesh in ranks_of(name, size, num_stages, way)[:: max(1, size - 1)]:
        thinned, whole = (planned_load(config, name, mesh, is_thinned)[0] for is_thinned in (True, False))
        assert {spec.name: spec for spec in thinned.specs} == {spec.name: spec for spec in whole.specs}
        assert len(thinned.specs) == len(whole.specs)
        assert len(thinned.moves) < len(whole.moves)


@pytest.mark.slow
@pytest.mark.parametrize("name", runnable())
def test_ledgers_of_the_catalogue_are_their_plans(name: str) -> None:
    """Every mesh up to 8 ranks to a stage and 2 stages, output projections added up and gathered, experts sliced and whole: each rank."""
    model = declare_config(CATALOGUE[name], name)
    assert model.spec is not None
    ways = ["reduce", "exact", *(["experts"] if model.spec.experts is not None else [])]
    num_tried = 0
    for size, num_stages, way in product(range(1, 9), (1, 2), ways):
        ranks = ranks_of(name, size, num_stages, way)
        if (size == 1 and way != "reduce") or not all(model.is_divisible(mesh) for mesh in ranks):
            continue
        for mesh in ranks:
            held, planned = held_and_planned(name, mesh, {}, is_thinned=True)
            assert +held == +planned, mesh
            num_tried += 1
    print(f"{name}: {num_tried} ranks")
    assert num_tried > 2


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["fp8", "turboquant_k3v4_nc"])
@pytest.mark.parametrize("quantization", ["fp8", "mxfp4"])
def test_quantized_ranks_hold_what_was_planned(kv_format: str, quantization: str) -> None:
    options = {"kv_cache_dtype": kv_format, "quantization": quantization}
    for way in ("reduce", "exact"):
        for mesh in ranks_of("Qwen3-0.6B", 2, 1, way):
            held, planned = held_and_planned("Qwen3-0.6B", mesh, options)
            assert +held == +planned, mesh
