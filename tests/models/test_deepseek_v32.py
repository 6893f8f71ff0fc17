"""DeepSeek V3.2 against transformers: an index of float32 chooses; chunks, company, prefixes, forks, preemption; and what a wrong reading would change."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.attention.backend import LayerStep
from holdfast.errors import ModelFormatError
from holdfast.families.sparse import layer as latent_attention
from holdfast.families.sparse import torch_backend as torch_sparse
from holdfast.families.sparse.torch_backend import TorchSparseLatentAttention, largest_tokens, score_keys
from holdfast.kernels.latent import write_index
from holdfast.kernels.latent.write_latent import rotate_neighbours
from holdfast.models.spec import IndexSpec, LatentSpec
from models.tiny_experts import save_tiny_experts, tensors_of
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
from runner.drive import LoadedModel, Request, load_model

CASES = [case for case, (prefix, _) in LATENT_MODELS.items() if prefix == "DeepseekV32"]
V32 = "sparse like V3.2"
PAGE = 4
Mutation = Callable[[LoadedModel, pytest.MonkeyPatch], LoadedModel]
"""A wrong reading of a model: what it makes of a right one."""


@pytest.mark.parametrize("case", CASES)
def test_logits_of_single_sequence_match_transformers(case):
    """Up to as many tokens as are chosen, one more, and many more."""
    for length in (1, 4, 5, 6, 33):
        alone(case, length, 8)


@pytest.mark.parametrize("case", CASES)
def test_logits_batched_and_chunked_match_transformers(case):
    theirs, ours = tiny(case)
    requests = [make_request(length, 12, 3 * index) for index, length in enumerate((1, 2, 17, 33, 61))]
    drive = make_drive(ours, max_rows=11, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize(
    "chunks", [(1, 3, 4, 5, 16, 17), pytest.param(range(1, 18), marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_logits_match_at_every_chunk_size(chunks):
    answer = alone(V32, 17, 3)
    for max_rows in chunks:
        drive = make_drive(tiny(V32)[1], max_rows)
        request = make_request(17, 3)
        drive.run([request])
        answer.check(drive, request)
        assert len(drive.logits(request)) == 19, f"{max_rows=}"


def test_decoder_finishes_only_rows_whose_logits_are_read():
    answer = alone(V32, 22, 4)
    drive = make_drive(tiny(V32)[1], 9)
    request = Request(list(answer.prompt), 4)
    drive.run([request])
    answer.check(drive, request)
    assert len(drive.logits(request)) == 4


@pytest.mark.parametrize(
    "places", [(1, 3, 5, 8), pytest.param(range(1, 9), marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_preempted_at_every_position(places):
    answer = alone(V32, 9, 7)
    for place in places:
        drive = make_drive(tiny(V32)[1], 4)
        request = Request(list(answer.prompt), 7)
        preempt_after(drive, place)
        drive.run([request])
        drive.scheduler.check()
        assert request.sequence is not None
        assert request.sequence.num_preemptions == 1
        answer.check(drive, request)


def test_preempted_by_neighbours_where_pages_are_few():
    answers = [alone(V32, length, 14) for length in (18, 19, 17)]
    drive = make_drive(tiny(V32)[1], 16, num_pages=18)
    requests = [Request(list(answer.prompt), 14) for answer in answers]
    drive.run(requests)
    assert drive.scheduler.num_preemptions > 0
    for answer, request in zip(answers, requests, strict=True):
        answer.check(drive, request)


def test_prefixes_are_hit_at_every_block_boundary():
    """What is found holds latents and index keys: a prompt that goes on from there chooses among all of them."""
    theirs, ours = tiny(V32)
    answer = alone(V32, 25, 4)
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
    theirs, ours = tiny(V32)
    answer = alone(V32, 25, 4)
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
    """Between the last token that is chosen and the first that is not lies far more than two ways to compute in float32 differ by."""
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


def test_load_model_v32_checkpoint_needs_index_tensors(tmp_path):
    theirs, ours = tiny(V32)
    save_tiny_experts(theirs, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.spec == ours.spec
    assert loaded.weights.keys() == ours.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(plain(loaded.weights[name]), plain(weight)), name
    tensors = {
        name: tensor
        for name, tensor in tensors_of(theirs, "separate").items()
        if "layers.1.self_attn.indexer.wk" not in name
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"model\.layers\.1\.self_attn\.indexer\.wk\.weight"):
        load_model(tmp_path)


def plain(weight: Any) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


def latent_of(model: LoadedModel) -> LatentSpec:
    assert model.spec.latent is not None
    return model.spec.latent


def index_of(model: LoadedModel) -> IndexSpec:
    index = latent_of(model).index
    assert index is not None
    return index


def indexed(change: Callable[[LoadedModel], dict[str, Any]]) -> Mutation:
    def mutate(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
        latent = replace(latent_of(model), index=replace(index_of(model), **change(model)))
        return replace(model, spec=replace(model.spec, latent=latent))

    return mutate


def weights_made(ending: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    def mutate(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
        weights = dict(model.weights)
        names = [name for name in weights if name.endswith(ending)]
        assert names, ending
        for name in names:
            weights[name] = make(plain(weights[name]))
        return replace(model, weights=weights)

    return mutate


def rotated_by_neighbours(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(write_index, "rotate_halves", rotate_neighbours)
    return model


def rotated_on_the_last_elements(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The last elements come first, in queries and keys alike: products are the same, and others are rotated."""
    dim, shift = index_of(model).head_dim, latent_of(model).rope_dim
    for ending in ("index_q.weight", "index_k.weight", "index_k_norm.weight", "index_k_norm.bias"):
        rolled = weights_made(ending, lambda weight: weight.unflatten(0, (-1, dim)).roll(shift, 1).flatten(0, 1))
        model = rolled(model, monkeypatch)
    return model


def without_relu(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(torch.Tensor, "relu_", lambda scores: scores)
    return model


def weights_without_their_sign(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    product = latent_attention.linear_float32
    monkeypatch.setattr(latent_attention, "linear_float32", lambda *arguments: product(*arguments).abs_())
    return model


def choice_of_the_first_layer(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """In all layers, as some families share theirs."""
    select, kept = TorchSparseLatentAttention.select, {}

    def select_once(own: Any, q: Any, weights: Any, step: LayerStep) -> None:
        if step.layer == 0:
            select(own, q, weights, step)
            kept["selected"] = step.scratch["selected"].clone()
        else:
            step.scratch["selected"].copy_(kept["selected"])

    monkeypatch.setattr(TorchSparseLatentAttention, "select", select_once)
    return model


def keys_of_another_layer(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    select = TorchSparseLatentAttention.select

    def select_before(own: Any, q: Any, weights: Any, step: LayerStep) -> None:
        select(own, q, weights, step._replace(layer=max(0, step.layer - 1)))

    monkeypatch.setattr(TorchSparseLatentAttention, "select", select_before)
    return model


def seen_to(shift: int) -> Mutation:
    """For the tokens behind a row's own so many are seen; below 0, some before it are not."""

    def mutate(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
        def shifted(q: Any, weights: Any, planes: Any, slots: Any, num_seen: torch.Tensor) -> torch.Tensor:
            return score_keys(q, weights, planes, slots, num_seen + shift)

        monkeypatch.setattr(torch_sparse, "score_keys", shifted)
        return model

    return mutate


def smallest_taken(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    def smallest(scores_nC: torch.Tensor, top_k: int) -> torch.Tensor:
        return largest_tokens(scores_nC.neg().masked_fill(scores_nC.isinf(), -torch.inf), top_k)

    monkeypatch.setattr(torch_sparse, "largest_tokens", smallest)
    return model


MUTATIONS: dict[str, Mutation] = {
    "neighbours rotated in the index": rotated_by_neighbours,
    "the last elements rotated": rotated_on_the_last_elements,
    "keys without the bias of their norm": weights_made("index_k_norm.bias", torch.zeros_like),
    "keys without gamma": weights_made("index_k_norm.weight", torch.ones_like),
    "keys' norm with the eps of layers": indexed(lambda model: {"norm_eps": model.spec.norm_eps}),
    "no relu": without_relu,
    "weights without their sign": weights_without_their_sign,
    "the smallest taken": smallest_taken,
    "one token short": indexed(lambda model: {"top_k": index_of(model).top_k - 1}),
    "one token more": indexed(lambda model: {"top_k": index_of(model).top_k + 1}),
    "all tokens": indexed(lambda _: {"top_k": 90}),
    "the choice of the first layer": choice_of_the_first_layer,
    "keys of the layer before": keys_of_another_layer,
    "the next token seen": seen_to(1),
    "a row's own token hidden": seen_to(-1),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_logits_planted_fault_exceeds_tolerance(mutation, monkeypatch):
    """The tolerance of this file tells each of them from what is right, by far."""
    answer = alone(V32, 33, 8)
    drive = make_drive(MUTATIONS[mutation](tiny(V32)[1], monkeypatch), max_rows=33)
    request = make_request(33, 1)
    drive.run([request])
    assert moved(drive, request, answer) > 200 * TOLERANCE


@pytest.mark.parametrize("keeps", ["latents and index", "latents alone"])
def test_prefix_hit_without_index_changes_logits(keeps):
    answer = alone(V32, 33, 8)
    drive = make_drive(tiny(V32)[1], max_rows=33)
    drive.run([Request(list(answer.prompt), 1)])
    if keeps == "latents alone":
        for layer in range(3):
            drive.rig.storage.plane(layer, "index").zero_()
    request = Request(list(answer.prompt), 1)
    drive.run([request])
    assert request.sequence is not None
    assert request.sequence.num_cached_tokens == 32
    is_right = moved(drive, request, answer) <= TOLERANCE
    assert is_right == (keeps == "latents and index")
