"""Every rank of models of the catalogue, built without memory (on torch's meta device): the ledger is the plan, owner by owner, to the byte."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import (
    NCCL_BYTES,
    ExchangeKind,
    ExchangeNeeds,
    exchange_specs,
    rounding_bytes,
)
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.loading.execution import execute
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.sources.dummy import DummySource
from holdfast.memory.arena import Arena
from holdfast.memory.devices import GPUS
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import KV_OWNER
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.families import parameters
from holdfast.planning.stages import equal_cuts
from holdfast.planning.target import gpu_target
from holdfast.planning.terms import graph_term
from holdfast.runner import build as build_module
from holdfast.runner import step_inputs
from holdfast.runner.build import RunnerBuild, plan_model

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


@cache
def opened(name: str) -> OpenModel:
    spec = declare_config(CATALOGUE[name], name).spec
    assert spec is not None
    listed = parameters(spec)
    source = DummySource(listed, spec.checkpoint_dtype)
    return OpenModel(Path(name), "directory", spec, listed, source, GenerationDefaults(eos_token_ids=(0,)))


def held_and_planned(name: str, mesh: Mesh, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Bytes by owner, as an engine's own build records them and as its plan has them while it serves."""
    config = EngineConfig(
        **OPTIONS | options, tensor_parallel_size=mesh.tensor_size, pipeline_parallel_size=mesh.num_stages
    )
    model, ledger = opened(name), Ledger()
    load, plan = plan_model(config, model, TARGET, mesh=mesh)
    weights = Arena("weights", load.plan.specs, META, ledger, "without memory")
    build = RunnerBuild(config, model, plan, ledger, META)
    build._weights = execute._assemble(load.plan, weights.tensors)
    if plan.exchange_needs is not None:
        build._exchange = NoExchange(mesh)  # type: ignore[assignment]
        for owner, num_bytes in _exchange_bytes(plan.exchange_needs, mesh, plan.exchange_kind).items():
            ledger.record(owner, num_bytes, "as an exchange takes them")
    build.assemble()
    held = Counter({KV_OWNER: 0})
    for entry in ledger:
        held[_line(entry.owner)] += entry.num_bytes
    planned = Counter({KV_OWNER: plan.memory.kv_bytes})
    for term in plan.memory.terms:
        planned[_line(term.owner)] += term.num_bytes if "serve" in term.phases else 0
    return held, planned


def _exchange_bytes(needs: ExchangeNeeds, mesh: Mesh, kind: ExchangeKind) -> dict[str, int]:
    """As the exchanges of distributed/symmetric.py and distributed/collectives.py enter them."""
    held = {owner: spec.aligned_bytes for owner, spec in exchange_specs(needs, mesh, kind).items()}
    if kind == "symmetric":
        held["exchange/rounding"] = rounding_bytes(needs, mesh)
    return held | ({"collectives/nccl": NCCL_BYTES} if kind == "nccl" else {})


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
    monkeypatch.setattr(build_module, "_refuse_ranks", lambda config, plan: None)
    monkeypatch.setattr(build_module, "centre_keys", lambda *arguments: 0)


QUICK = [
    ("OPT-125m", 4, 2, "exact", {}),
    ("SmolLM2-135M", 3, 2, "reduce", {}),
    ("gemma-3-1b-it", 2, 2, "reduce", {}),
]


@pytest.mark.parametrize(("name", "size", "num_stages", "way", "options"), QUICK, ids=[case[0] for case in QUICK])
def test_the_ledger_of_a_rank_is_its_plan(name, size, num_stages, way, options) -> None:
    for mesh in ranks_of(name, size, num_stages, way):
        held, planned = held_and_planned(name, mesh, options)
        assert +held == +planned, mesh
        num_layers = len(mesh.layer_range(declare_config(CATALOGUE[name], name).num_layers))
        assert held["cuda graphs"] == graph_term(num_layers, 16, 512).num_bytes, "stages have graphs of their layers"


def runnable() -> list[str]:
    """Models that run on ranks, one of each shape."""
    found: dict[object, str] = {}
    for name, config in CATALOGUE.items():
        model = declare_config(config, name)
        if model.spec is not None and not model.is_compressed:
            found.setdefault(model.spec, name)
    return list(found.values())


MOST_EXPERTS = 64
"""With more, moves of a load are hundreds of thousands, and two meshes must do."""


@pytest.mark.slow
@pytest.mark.parametrize("name", runnable())
def test_ledgers_of_the_catalogue_are_their_plans(name: str) -> None:
    """Up to 8 ranks to a stage and 2 stages, output projections added up and gathered, experts sliced and whole."""
    model = declare_config(CATALOGUE[name], name)
    experts = None if model.spec is None else model.spec.experts
    ways = ["reduce", "exact", *(["experts"] if experts is not None else [])]
    cases = [(size, stages, way) for size in (1, 2, 4, 8) for stages in (1, 2) for way in ways]
    if experts is not None and experts.num_experts > MOST_EXPERTS:
        cases = [(2, 1, "exact"), (8, 2, "experts")]
    num_tried = 0
    for size, num_stages, way in cases:
        ranks = ranks_of(name, size, num_stages, way)
        if (size == 1 and way != "reduce") or not all(model.is_divisible(mesh) for mesh in ranks):
            continue
        # The first of a stage has logits of all, the last a shorter vocabulary; those in between are as the second.
        edges = {mesh.rank: mesh for mesh in ranks if mesh.tensor_rank in (0, 1, size - 1)}
        for mesh in edges.values():
            held, planned = held_and_planned(name, mesh, {})
            assert +held == +planned, mesh
            num_tried += 1
    assert num_tried
    opened.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["fp8", "turboquant_k3v4_nc"])
@pytest.mark.parametrize("quantization", ["fp8", "mxfp4"])
def test_quantized_ranks_hold_what_was_planned(kv_format: str, quantization: str) -> None:
    options = {"kv_cache_dtype": kv_format, "quantization": quantization}
    for way in ("reduce", "exact"):
        for mesh in ranks_of("Qwen3-0.6B", 2, 1, way):
            held, planned = held_and_planned("Qwen3-0.6B", mesh, options)
            assert +held == +planned, mesh
