"""A decoder works in the workspace that models/activations.py asks for: all of it, no more, and whatever lies in it."""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from error_codes import raises_code
from holdfast.attention.declarations import StepBounds
from holdfast.cache.groups import CacheGroup
from holdfast.cache.spec import uniform_cache
from holdfast.config import EngineConfig, Limits
from holdfast.errors import WorkspaceError
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.memory.devices import GPUS
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec, WorkspacePlan, arena_bytes
from holdfast.models import layer_stack
from holdfast.models.activations import StepRequests, row_scaled_request
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.layer_stack import StepWorkspace
from holdfast.models.spec import ModelSpec
from holdfast.planning.plan import PlanRequest, plan_runner
from holdfast.planning.target import gpu_target
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.weight_schemes import FP8, WeightRecipe
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from kernels.exactness import require_native, same_bits
from loading.tiny_models import FAMILIES, VOCAB, save_tiny
from models import tiny_latents
from models.test_family_fields import CASES
from models.tiny_compressed import make_compressed_drive, tiny_compressed
from runner.drive import CPU, Drive, LoadedModel, Request, Rig, declaration_named, lanes, load_model, workspace_plan

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=90, max_model_len=100, page_tokens=4)
ONE_GROUP = (CacheGroup("whole context", LIMITS.page_tokens),)
EVERY_ROW = SamplingParams(temperature=0.0, prompt_logprobs=0)


@cache
def tiny(family: str) -> LoadedModel:
    with TemporaryDirectory() as folder:
        save_tiny(family, folder)
        return load_model(Path(folder))


def make_rig(family: str) -> Rig:
    require_native()
    return Rig(tiny(family), "native_paged", LIMITS, 100)


def make_step(
    *lengths: int, params: SamplingParams = EVERY_ROW, groups: tuple[CacheGroup, ...] = ONE_GROUP
) -> LiveStep:
    """Prompts of these lengths on pages of their own."""
    items, dice, first = [], random.Random(sum(lengths)), 0
    for number, length in enumerate(lengths):
        token_ids = [dice.randrange(8, VOCAB) for _ in range(length)]
        tables: list[list[int]] = []
        for group in groups:
            tables.append(list(range(first, first + group.pages_for(length) + 1)))
            first += len(tables[-1])
        items.append(ScheduledSequence.of(Sequence(number, token_ids, length, params, 0, 9, tables=tables), 0, length))
    return LiveStep(tuple(items))


class WatchedWorkspace:
    """Stands before a workspace: hands out what that does, and knows the most that each owner took."""

    def __init__(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        self._acquire = workspace.acquire
        monkeypatch.setattr(workspace, "acquire", self.acquire)
        self.most_bytes: Counter[tuple[str, str]] = Counter()

    def acquire(self, owner: str, specs: tuple[TensorSpec, ...], lane: str) -> tuple[torch.Tensor, ...]:
        self.most_bytes[lane, owner] = max(self.most_bytes[lane, owner], arena_bytes(specs))
        return self._acquire(owner, specs, lane)


@pytest.mark.parametrize("family", FAMILIES)
def test_workspace_largest_step_uses_all_reserved_bytes(family, monkeypatch):
    rig = make_rig(family)
    watched = WatchedWorkspace(rig.workspace, monkeypatch)
    rig.execute(make_step(90, groups=rig.groups))
    plan = workspace_plan(tiny(family).spec, LIMITS, "float32", ())
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes == reserved


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["native_paged", "torch_paged"])
def test_decoder_ignores_stale_workspace_contents(family, backend, monkeypatch):
    if backend == "native_paged":
        require_native()

    def make_drive() -> Drive:
        return Drive(Rig(tiny(family), backend, LIMITS, 100), 100)

    check_fillings(make_drive, ((40, 0), (3, 1), (70, 4)), monkeypatch)


@pytest.mark.parametrize("case", ["v3 like R1", "sparse like GLM-5", "both entries"])
def test_latent_decoder_ignores_stale_workspace_contents(case, monkeypatch):
    def make_drive() -> Drive:
        if case == "both entries":
            return make_compressed_drive(tiny_compressed(case)[1], 16)
        return tiny_latents.make_drive(tiny_latents.tiny(case)[1], 16)

    check_fillings(make_drive, ((17, 0), (3, 1)), monkeypatch)


def check_fillings(
    make_drive: Callable[[], Drive], arrivals: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, zeros, other steps' leftovers and noise before each step: every logit is the same to the bit."""
    noise = torch.Generator().manual_seed(0)
    fillings = {
        "as it was left": lambda lane: lane,
        "zeros": lambda lane: lane.zero_(),
        "NaN": lambda lane: lane.fill_(0xFF),
        "noise": lambda lane: lane.random_(0, 256, generator=noise),
    }
    found = {}
    for name, fill in fillings.items():
        drive = make_drive()

        def fill_all(rig=drive.rig, fill=fill) -> None:
            for lane in lanes(rig.workspace).values():
                fill(lane)

        monkeypatch.setattr(drive.rig, "poison", fill_all)
        requests = [Request(list(range(10, 10 + n)), 5, arrival, EVERY_ROW) for n, arrival in arrivals]
        drive.run(requests)
        found[name] = [drive.logits(request) for request in requests]
    expected = found.pop("as it was left")
    for rows in found.values():
        for own, wanted in zip(rows, expected, strict=True):
            assert own.keys() == wanted.keys()
            assert all(same_bits(own[position], wanted[position]) for position in wanted)


@pytest.mark.parametrize("family", ["llama", "opt_350m_like"])
def test_workspace_step_larger_than_reserved_is_refused(family, monkeypatch):
    """By any caller that asks first, with both sizes; and what was reserved still runs."""
    rig, spec = make_rig(family), tiny(family).spec
    small = replace(LIMITS, max_num_batched_tokens=20)
    smaller = Workspace(workspace_plan(spec, small, "float32", ()), CPU, Ledger())
    monkeypatch.setattr(rig.workspace, "acquire", smaller.acquire)
    rig.workspace = smaller
    with raises_code("memory.scratch_too_small", WorkspaceError) as caught:
        rig.execute(make_step(21, groups=rig.groups))
    requested, held = 3 * _aligned(21 * spec.hidden_size * 4), 3 * _aligned(20 * spec.hidden_size * 4)
    assert f"workspace for 'stream' on lane 'stream' (x float32 (21, {spec.hidden_size})" in str(caught.value)
    values = caught.value.values
    assert "layer_stack.py:" in str(values["caller"])
    assert (values["num_bytes"], values["held"]) == (requested, held)
    whole = make_rig(family)
    step = make_step(13, 7, groups=rig.groups)
    assert rig.execute(step) == whole.execute(step)
    assert all(same_bits(row, whole.logits[0][i]) for i, row in rig.logits[0].items())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


def test_steps_of_many_sizes_keep_requests_of_the_latest(monkeypatch):
    """A server meets a new number of rows again and again, for hours."""
    monkeypatch.setattr(layer_stack, "MAX_CACHED_SIZES", 3)
    others = [one for one in gc.get_objects() if isinstance(one, StepRequests)]
    rig = make_rig("llama")
    for num_rows in range(1, 12):
        rig.execute(make_step(num_rows, groups=rig.groups))
    found = [one for one in gc.get_objects() if isinstance(one, StepRequests)]
    kept = [one for one in found if all(one is not other for other in others)]
    assert sorted(one.stream.specs[0].shape[0] for one in kept) == [9, 10, 11]


def test_workspace_more_logits_than_reserved_are_refused():
    rig = make_rig("llama")
    with pytest.raises(WorkspaceError, match="workspace for 'head'"):
        rig.decoder.logits(torch.zeros(65, tiny("llama").spec.hidden_size))


def reserved_bytes(spec: ModelSpec, backend: str, limits: Limits) -> dict[str, int]:
    layers = uniform_cache(spec.num_layers, KV_FORMATS["bfloat16"], spec.num_kv_heads, spec.head_dim, 16).layers
    specs = [
        GroupedAttentionSpec(layer, spec.num_heads, spec.head_dim**-0.5, None, limits.max_model_len, "bfloat16", "cuda")
        for layer in layers
    ]
    bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
    declaration = declaration_named(backend)
    return workspace_plan(spec, limits, "bfloat16", declaration.scratch(specs, bounds)).lane_bytes


@pytest.mark.parametrize("backend", ["native_paged", "torch_paged", "triton_paged"])
def test_scratch_is_the_same_for_any_depth_and_any_context(backend):
    spec = declare_config(CATALOGUE["Qwen3-32B"], "Qwen3-32B").spec
    assert spec is not None
    limits = Limits(256, 8192, 4096, 16)
    found = reserved_bytes(spec, backend, limits)
    stream = 3 * 8192 * 5120 * 2
    mlp = 8192 * 3 * 25600 * 2
    partials = 1024 * (64 * 128 + 64) * 4 if backend == "triton_paged" else 0
    attention = 8192 * (10240 + 2 * 8192) * 2 + partials
    assert found == {"stream": stream, "layers": max(mlp, attention)}
    assert found == reserved_bytes(replace(spec, num_layers=1), backend, limits)
    assert found == reserved_bytes(spec, backend, replace(limits, max_model_len=2**20))


def test_plan_runner_scratch_ignores_depth_and_context():
    declared = declare_config(CATALOGUE["Qwen3-8B"], "Qwen3-8B")
    target = gpu_target(GPUS["h200"])

    def workspace_bytes(max_model_len: int, num_layers: int = 36) -> int:
        decoder = replace(declared.declaration.decoder, num_layers=num_layers)  # type: ignore[attr-defined]
        model = replace(declared, declaration=declared.declaration._replace(decoder=decoder), num_layers=num_layers)  # type: ignore[attr-defined]
        config = EngineConfig(max_model_len=max_model_len, max_num_seqs=64)
        return plan_runner(PlanRequest(config, model, target)).workspace.total_bytes

    assert workspace_bytes(4096) == workspace_bytes(2**17) == workspace_bytes(4096, num_layers=9)


def test_decoder_is_freed_without_garbage_collector():
    """Without the garbage collector: what waits for that still holds the weights."""
    rig = make_rig("llama")
    rig.execute(make_step(20, groups=rig.groups))
    held = weakref.ref(rig.decoder)
    gc.collect()
    gc.disable()
    try:
        del rig
        assert held() is None
    finally:
        gc.enable()


def test_counters_of_middle_batches_begin_at_zero():
    """Products count splits that have arrived from there, whatever lay in the workspace."""
    spec = replace(CASES["llama"][1], intermediate_size=4096)
    recipe, plan = WeightRecipe(FP8), WorkspacePlan()
    request = row_scaled_request(spec, recipe)
    plan.reserve(request.owner, request.specs, request.lane)
    plan.lock()
    workspace = Workspace(plan, CPU, Ledger())
    for lane in workspace.lanes.values():
        lane.fill_(0xFF)
    scratch = StepWorkspace(spec, workspace, "float32", recipe).tile_scratch
    assert scratch is not None
    assert len(scratch.arrived) > 0
    assert not scratch.arrived.any()
    workspace.release()


@pytest.mark.parametrize("kind", ["keys and values", "latents", "streams"])
def test_decoder_calls_before_layer_for_every_layer(kind):
    """A host that waits for a hang-up looks there, in every layer of every step."""
    drives = {
        "keys and values": lambda: Drive(make_rig("qwen3"), 100),
        "latents": lambda: tiny_latents.make_drive(tiny_latents.tiny("v3 like R1")[1], 9),
        "streams": lambda: make_compressed_drive(tiny_compressed("both entries")[1], 9),
    }
    drive, calls = drives[kind](), []
    decoder = drive.rig.decoder
    decoder.before_layer = lambda: calls.append(len(calls))
    drive.run([Request([5, 6, 7], 3)])
    assert len(calls) == 3 * decoder.num_layers
