"""GLM-5 against transformers: layers that choose tokens and layers that take their choice; chunks, company, prefixes, forks, preemption, wrong readings."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from holdfast.attention.backend import LayerStep
from holdfast.attention.declarations import SELECTED
from holdfast.cache.spec import CacheSpec
from holdfast.config import Limits
from holdfast.families.latent.layer import LatentAttentionLayer
from holdfast.families.sparse import torch_backend as torch_sparse
from holdfast.families.sparse.layer import SparseLatentAttentionLayer
from holdfast.families.sparse.torch_backend import TorchSparseLatentAttention, largest_tokens
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models import activations
from holdfast.models.activations import CHOSEN, LAYERS
from holdfast.models.activations import Request as WorkspaceRequest
from holdfast.models.layer_stack import LayerStack
from models.test_decoder_workspace import WatchedWorkspace
from models.tiny_experts import save_tiny_experts
from models.tiny_latents import (
    LATENT_MODELS,
    TOLERANCE,
    alone,
    fork,
    judge,
    make_drive,
    make_request,
    moved,
    preempt_after,
    tiny,
)
from runner.drive import Drive, LoadedModel, Request, Rig, load_model, workspace_plan

CASES = [case for case, (prefix, _) in LATENT_MODELS.items() if prefix == "GlmMoeDsa"]
GLM5, SHARED_LAST = CASES
PAGE = 4


@pytest.mark.parametrize("case", CASES)
def test_logits_of_single_sequence_match_transformers(case):
    """Up to as many tokens as are chosen, one more, and many more."""
    for length in (1, 3, 4, 5, 6, 33):
        alone(case, length, 8)


@pytest.mark.parametrize("case", CASES)
def test_logits_batched_and_chunked_match_transformers(case):
    theirs, ours = tiny(case)
    requests = [make_request(length, 12, 3 * index) for index, length in enumerate((1, 2, 17, 33, 61))]
    drive = make_drive(ours, max_rows=11, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_triton_sparse_keeps_selection_for_shared_layers():
    """Over the references of its kernels."""
    theirs, ours = tiny(SHARED_LAST)
    requests = [make_request(length, 6, index) for index, length in enumerate((2, 17))]
    drive = Drive(Rig(ours, "triton_sparse", Limits(4, 11, 96, page_tokens=8), 100), 100)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize(
    "chunks", [(1, 3, 4, 5, 12), pytest.param(range(1, 13), marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_logits_match_at_every_chunk_size(chunks):
    answer = alone(GLM5, 12, 3)
    for max_rows in chunks:
        drive = make_drive(tiny(GLM5)[1], max_rows)
        request = make_request(12, 3)
        drive.run([request])
        answer.check(drive, request)
        assert len(drive.logits(request)) == 14, f"{max_rows=}"


@pytest.mark.parametrize("case", CASES)
def test_decoder_finishes_only_rows_whose_logits_are_read(case):
    """For a layer that takes a choice, too."""
    answer = alone(case, 22, 4)
    drive = make_drive(tiny(case)[1], 9)
    request = Request(list(answer.prompt), 4)
    drive.run([request])
    answer.check(drive, request)
    assert len(drive.logits(request)) == 4


@pytest.mark.parametrize(
    "places", [(2, 4, 6, 8), pytest.param(range(1, 9), marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_preempted_at_every_position(places):
    answer = alone(GLM5, 9, 7)
    for place in places:
        drive = make_drive(tiny(GLM5)[1], 4)
        request = Request(list(answer.prompt), 7)
        preempt_after(drive, place)
        drive.run([request])
        drive.scheduler.check()
        assert request.sequence is not None
        assert request.sequence.num_preemptions == 1
        answer.check(drive, request)


def test_preempted_by_neighbours_where_pages_are_few():
    answers = [alone(GLM5, length, 14) for length in (18, 19, 17)]
    drive = make_drive(tiny(GLM5)[1], 16, num_pages=18)
    requests = [Request(list(answer.prompt), 14) for answer in answers]
    drive.run(requests)
    assert drive.scheduler.num_preemptions > 0
    for answer, request in zip(answers, requests, strict=True):
        answer.check(drive, request)


def test_prefixes_are_hit_at_every_block_boundary():
    theirs, ours = tiny(GLM5)
    answer = alone(GLM5, 25, 4)
    drive = make_drive(ours, 16)
    drive.run([Request(list(answer.prompt), 4)])
    for place in range(PAGE, 25, PAGE):
        request = Request(fork(answer, place), 4)
        drive.run([request])
        drive.scheduler.check()
        judge(theirs, drive, request)
        assert request.sequence is not None
        assert request.sequence.num_cached_tokens == place


def test_forks_at_every_position_side_by_side():
    theirs, ours = tiny(SHARED_LAST)
    answer = alone(SHARED_LAST, 25, 4)
    drive = make_drive(ours, 16)
    first = Request(list(answer.prompt), 4)
    forks = [Request(fork(answer, place), 4, arrival=2 + place // 3) for place in range(1, 24)]
    drive.run([first, *forks])
    drive.scheduler.check()
    answer.check(drive, first)
    for place, request in enumerate(forks, 1):
        judge(theirs, drive, request)
        assert request.sequence is not None
        assert request.sequence.num_cached_tokens == place // PAGE * PAGE


def test_top_k_choice_margin_exceeds_rounding(monkeypatch):
    gaps = []

    def measured(scores_nC: torch.Tensor, top_k: int) -> torch.Tensor:
        inside, outside = scores_nC.topk(top_k + 1, dim=1).values[:, -2:].unbind(1)
        gaps.append(float((inside - outside).min()))
        return largest_tokens(scores_nC, top_k)

    monkeypatch.setattr(torch_sparse, "largest_tokens", measured)
    for case in CASES:
        for length in (17, 25, 33, 61):
            make_drive(tiny(case)[1], 61).run([make_request(length, 1)])
    assert min(gaps) > 2e-5


def test_load_model_glm_dsa_shared_layers_have_no_index(tmp_path):
    """Layers that take a choice have no tensors of an index, and none are looked for."""
    theirs, ours = tiny(GLM5)
    save_tiny_experts(theirs, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.spec == ours.spec
    assert loaded.weights.keys() == ours.weights.keys()
    indexed = {name.split(".")[1] for name in loaded.weights if ".index_" in name}
    assert indexed == {"0", "1", "4"}


def test_shared_layer_keeps_no_index_plane():
    rig = make_drive(tiny(GLM5)[1], 9).rig
    kinds = [type(layer.attention) for layer in rig.decoder.layers]
    full, shared = SparseLatentAttentionLayer, LatentAttentionLayer
    assert kinds == [full, full, shared, shared, full]
    cache: CacheSpec = rig.storage.spec
    assert [set(rig.storage.planes(layer)) for layer in (1, 2)] == [{"latent", "index"}, {"latent"}]
    # Of a token in float32: 48 elements of a latent in every layer, 32 of an index in three.
    assert cache.bytes_per_token == 4 * (5 * 48 + 3 * 32)
    assert cache.bytes_per_page == PAGE * cache.bytes_per_token


def test_selection_stays_in_its_lane_until_next_index_layer(monkeypatch):
    """In bytes of its own, in every layer and every step."""
    drive, seen = make_drive(tiny(GLM5)[1], 9), []
    attend = TorchSparseLatentAttention.attend

    def watched(own: Any, q: Any, kv_b: Any, step: LayerStep, *rest: Any) -> torch.Tensor:
        selected = step.scratch[SELECTED]
        seen.append((step.layer, selected.data_ptr(), selected.clone()))
        return attend(own, q, kv_b, step, *rest)

    monkeypatch.setattr(TorchSparseLatentAttention, "attend", watched)
    drive.run([make_request(22, 3)])
    lane = drive.rig.workspace.lanes[CHOSEN]
    assert lane.numel() == -(-9 * 5 * 4 // 256) * 256
    assert {address for _, address, _ in seen} == {lane.data_ptr()}
    for (_, _, before), (layer, _, chosen) in pairwise(seen):
        assert layer not in (2, 3) or chosen.equal(before), f"{layer=}"


@pytest.mark.parametrize("case", CASES)
def test_workspace_largest_step_uses_all_reserved_bytes(case, monkeypatch):
    limits, model = Limits(4, 90, 96, page_tokens=4), tiny(case)[1]
    drive = make_drive(model, 90)
    watched = WatchedWorkspace(drive.rig.workspace, monkeypatch)
    drive.run([make_request(90, 1)])
    top_k = model.spec.latent.index.top_k
    plan = workspace_plan(model.spec, limits, "float32", (TensorSpec(SELECTED, (90 * top_k,), "int32"),))
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes.keys() == reserved.keys()
    assert all(watched.most_bytes[place] == size for place, size in reserved.items() if place != (LAYERS, "head"))
    assert reserved[CHOSEN, "chosen"] == -(-90 * top_k * 4 // 256) * 256


def test_workspace_without_shared_layers_has_no_chosen_lane():
    rig = make_drive(tiny("sparse like V3.2")[1], 9).rig
    assert CHOSEN not in rig.workspace.lanes


Mutation = Callable[[LoadedModel, pytest.MonkeyPatch], LoadedModel]


def index_made(**changes: Any) -> Mutation:
    def mutate(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
        latent = model.spec.latent
        assert latent is not None
        assert latent.index is not None
        return replace(model, spec=replace(model.spec, latent=replace(latent, index=replace(latent.index, **changes))))

    return mutate


def choice_of(layers: dict[int, int | None]) -> Mutation:
    """These layers attend to what another one chose, or to what is left where none has."""

    def mutate(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
        attend, kept = TorchSparseLatentAttention.attend, {}

        def attend_other(own: Any, q: Any, kv_b: Any, step: LayerStep, *rest: Any) -> torch.Tensor:
            kept[step.layer] = step.scratch[SELECTED].clone()
            if step.layer in layers:
                step = step._replace(scratch={**step.scratch, SELECTED: kept[layers[step.layer]]})
            return attend(own, q, kv_b, step, *rest)

        monkeypatch.setattr(TorchSparseLatentAttention, "attend", attend_other)
        return model

    return mutate


def chosen_anew(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Layer 2 has the index of layer 1, over its own x."""
    weights = dict(model.weights)
    for name in [name for name in weights if name.startswith("layers.1.index_")]:
        weights[name.replace("layers.1.", "layers.2.")] = weights[name]
    return index_made(shared_layers=frozenset({3}))(replace(model, weights=weights), monkeypatch)


def all_tokens(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    attend = TorchSparseLatentAttention.attend

    def attend_all(own: Any, q: Any, kv_b: Any, step: LayerStep, *rest: Any) -> torch.Tensor:
        top_k = own.top_k
        own.top_k = 90 if step.layer in (2, 3) else top_k
        found = attend(own, q, kv_b, step, *rest)
        own.top_k = top_k
        return found

    monkeypatch.setattr(TorchSparseLatentAttention, "attend", attend_all)
    return model


def over_lost_tensors(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """What is left of a layer's tensors may be anything; a position that is none becomes the first."""
    feed, attend = LayerStack.feed_forward, TorchSparseLatentAttention.attend

    def feed_and_lose(own: Any, *rest: Any) -> None:
        feed(own, *rest)
        own.workspace.lanes[LAYERS].fill_(0xFF)

    def within(own: Any, q: Any, kv_b: Any, step: LayerStep, *rest: Any) -> torch.Tensor:
        step.scratch[SELECTED].masked_fill_(step.scratch[SELECTED] < 0, 0)
        return attend(own, q, kv_b, step, *rest)

    monkeypatch.setattr(LayerStack, "feed_forward", feed_and_lose)
    monkeypatch.setattr(TorchSparseLatentAttention, "attend", within)
    return model


def among_the_tensors_of_a_layer(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(activations, "chosen_request", lambda spec, scratch: WorkspaceRequest(CHOSEN, "chosen", ()))
    return over_lost_tensors(model, monkeypatch)


MUTATIONS: dict[str, Mutation] = {
    "halves rotated in the index": index_made(turns_neighbours=False),
    "the choice of the first layer": choice_of({2: 0, 3: 0}),
    "the choice of the first layer in the second of two": choice_of({3: 0}),
    "the choice before, in a layer that chooses": choice_of({4: 3}),
    "a choice made anew": chosen_anew,
    "all tokens": all_tokens,
    "a choice among the tensors of a layer": among_the_tensors_of_a_layer,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_logits_planted_fault_exceeds_tolerance(mutation, monkeypatch):
    answer = alone(GLM5, 33, 8)
    drive = make_drive(MUTATIONS[mutation](tiny(GLM5)[1], monkeypatch), max_rows=33)
    request = make_request(33, 1)
    drive.run([request])
    assert moved(drive, request, answer) > 200 * TOLERANCE


def test_shared_layer_reads_only_selection_of_layer_before(monkeypatch):
    answer = alone(GLM5, 33, 8)
    drive = make_drive(over_lost_tensors(tiny(GLM5)[1], monkeypatch), max_rows=33)
    request = make_request(33, 1)
    drive.run([request])
    assert moved(drive, request, answer) <= TOLERANCE
