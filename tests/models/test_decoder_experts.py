"""Mixtures of experts against transformers: logits at every position and greedy tokens, alone and in company."""

from functools import cache
from typing import Any

import pytest
import torch

from holdfast.config import Limits
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.families import parameters, read_spec
from kernels.exactness import require_native, same_bits
from models.test_decoder import EVERY_POSITION, judge, make_drive, make_requests
from models.test_decoder_workspace import WatchedWorkspace, make_step
from models.tiny_experts import EXPERT_MODELS, LAYOUTS, assembled, config_of, make_tiny, save_tiny_experts, tensors_of
from runner.drive import Drive, LoadedModel, Request, Rig, workspace_plan


def choose(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything in C, or everything in torch."""
    if backend == "native_paged":
        require_native()
    else:
        monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    return backend


@cache
def tiny(name: str) -> tuple[Any, LoadedModel]:
    """transformers' model, and ours over the same weights."""
    theirs = make_tiny(name)
    spec = read_spec(config_of(theirs))
    return theirs, LoadedModel(spec, assembled(parameters(spec), tensors_of(theirs, "separate")))


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_alone_and_whole(name, monkeypatch):
    theirs, ours = tiny(name)
    (request,) = make_requests((33,))
    drive = make_drive(ours, choose("torch_paged", monkeypatch), max_num_batched_tokens=128)
    drive.run([request])
    judge(theirs, drive, request)


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_in_company_of_other_lengths_and_in_chunks(name, monkeypatch):
    backend = choose("native_paged", monkeypatch)
    theirs, ours = tiny(name)
    requests = make_requests((1, 17, 64))
    drive = make_drive(ours, backend, max_num_batched_tokens=24, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_neighbours_change_no_bit_of_a_row(name):
    """Alone or beside others, whole or in chunks: the experts of a row do not hear of the other rows."""
    require_native()
    _, ours = tiny(name)
    alone = Request(list(range(3, 40)), 6, params=EVERY_POSITION)
    beside = Request(list(range(3, 40)), 6, params=EVERY_POSITION)
    others = [Request(list(range(50 + n, 90)), 9, params=EVERY_POSITION) for n in (0, 20)]
    found = []
    for own, requests, max_rows in ((alone, [alone], 128), (beside, [others[0], beside, others[1]], 16)):
        drive = make_drive(ours, "native_paged", max_num_batched_tokens=max_rows)
        drive.run(requests)
        found.append(drive.logits(own))
    assert found[0].keys() == found[1].keys()
    assert all(same_bits(found[0][position], found[1][position]) for position in found[0])


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_the_largest_step_takes_what_was_reserved_and_nobody_reserved_in_vain(name):
    require_native()
    limits = Limits(4, 90, 100, 4)
    rig = Rig(tiny(name)[1], "native_paged", limits, 100)
    watched = WatchedWorkspace(rig.workspace)
    rig.decoder._workspace = watched  # type: ignore[assignment]
    rig.execute(make_step(90))
    plan = workspace_plan(tiny(name)[1].spec, limits, "float32", ())
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes == reserved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(layout, tmp_path):
    """By the engine's own loader, and by what the parts say."""
    name = "qwen2_moe normalized, every second layer"
    theirs, ours = tiny(name)
    listed = parameters(ours.spec)
    for parameter in listed:
        parameter.check()
    straight = assembled(listed, tensors_of(theirs, layout))
    save_tiny_experts(theirs, tmp_path, layout)
    model = open_model(str(tmp_path), "auto")
    plan = plan_load(model.parameters, model.source, "float32")
    loaded = load_weights(plan, model.source, "cpu", Ledger(), lambda done, total: None).weights
    model.source.close()
    assert model.spec == ours.spec
    assert straight.keys() == ours.weights.keys() == loaded.keys()
    for weight in ours.weights:
        assert torch.equal(straight[weight], ours.weights[weight]), weight
        assert torch.equal(loaded[weight], ours.weights[weight]), weight


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_stay_near(dtype):
    theirs, ours = tiny("qwen2_moe")
    halves = {name: weight.to(getattr(torch, dtype)) for name, weight in ours.weights.items()}
    rig = Rig(LoadedModel(ours.spec, halves), "torch_paged", Limits(4, 24, 100, 4), 100, dtype, dtype)
    drive, (request,) = Drive(rig, 100), make_requests((33,))
    request.max_tokens = 4
    drive.run([request])
    with torch.no_grad():
        expected = theirs(torch.tensor([[*request.prompt, *request.output]])).logits[0]
    errors = [float((row - expected[position]).abs().max()) for position, row in drive.logits(request).items()]
    # A row whose experts are nearly tied may take others in half precision, so most rows are near, and all are finite.
    near = sorted(errors)[: -(-len(errors) * 9 // 10)]
    assert near[-1] < (0.05 if dtype == "float16" else 0.4)
    assert all(row.isfinite().all() for row in drive.logits(request).values())
