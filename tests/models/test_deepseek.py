"""DeepSeek V2 and V3 against transformers: whole, in chunks, in company, prefixes, preemption; and what a wrong reading would change."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from holdfast.kernels.latent import write_latent
from holdfast.kernels.latent.write_latent import rotate_neighbours
from holdfast.kernels.moe.routing import Routing, route_tokens
from holdfast.layers import moe
from holdfast.models.spec import LatentSpec
from models.tiny_latents import LATENT_MODELS, TOLERANCE, alone, judge, make_drive, make_request, tiny
from runner.drive import Drive, LoadedModel, Request

CASES = [case for case in LATENT_MODELS if case.startswith("v")]
V3 = "v3 like R1"
Mutation = Callable[[LoadedModel, pytest.MonkeyPatch], LoadedModel]
"""A wrong reading of a model: what it makes of a right one."""


@pytest.mark.parametrize("case", CASES)
def test_logits_of_single_sequence_match_transformers(case):
    for length in (1, 33):
        alone(case, length, 8)


@pytest.mark.parametrize("case", CASES)
def test_logits_batched_and_chunked_match_transformers(case):
    theirs, ours = tiny(case)
    requests = [make_request(length, 12, 3 * index) for index, length in enumerate((1, 2, 17, 33, 61))]
    drive = make_drive(ours, max_rows=11, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_logits_match_at_every_chunk_size():
    answer = alone(V3, 17, 3)
    for max_rows in range(1, 18):
        drive = make_drive(tiny(V3)[1], max_rows)
        request = make_request(17, 3)
        drive.run([request])
        answer.check(drive, request)
        assert len(drive.logits(request)) == 19, f"{max_rows=}"


def test_decoder_finishes_only_rows_whose_logits_are_read():
    answer = alone(V3, 22, 4)
    drive = make_drive(tiny(V3)[1], 9)
    request = Request(list(answer.prompt), 4)
    drive.run([request])
    answer.check(drive, request)
    assert len(drive.logits(request)) == 4


def test_preempted_at_every_position():
    answer = alone(V3, 9, 7)
    for place in range(1, 9):
        drive = make_drive(tiny(V3)[1], 4)
        request = Request(list(answer.prompt), 7)
        preempt_after(drive, place)
        drive.run([request])
        drive.scheduler.check()
        assert request.sequence is not None
        assert request.sequence.num_preemptions == 1
        answer.check(drive, request)


def preempt_after(drive: Drive, num_steps: int) -> None:
    """Take a sequence's pages after so many steps, as a neighbour would."""
    complete, steps = drive.scheduler.complete, count(1)

    def then_preempt(step: Any, token_ids: Any) -> None:
        complete(step, token_ids)
        if next(steps) == num_steps:
            drive.scheduler.preempt_last()

    drive.scheduler.complete = then_preempt


def test_preempted_by_neighbours_where_pages_are_few():
    answers = [alone(V3, length, 20) for length in (30, 31, 29)]
    drive = make_drive(tiny(V3)[1], 16, num_pages=28)
    requests = [Request(list(answer.prompt), 20) for answer in answers]
    drive.run(requests)
    assert drive.scheduler.num_preemptions > 0
    for answer, request in zip(answers, requests, strict=True):
        answer.check(drive, request)


def test_prefix_hit_and_miss_keep_logits():
    first, other = alone(V3, 40, 6), alone(V3, 37, 6)
    drive = make_drive(tiny(V3)[1], 16)
    num_cached = []
    for answer in (first, first, other, first):
        request = Request(list(answer.prompt), 6)
        drive.run([request])
        drive.scheduler.check()
        answer.check(drive, request)
        assert request.sequence is not None
        num_cached.append(request.sequence.num_cached_tokens)
    assert num_cached == [0, 36, 0, 36]


def scaled_by_the_row(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    return replace(model, spec=replace(model.spec, attention_scale=model.spec.head_dim**-0.5))


def scaled_without_mscale(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    return replace(model, spec=replace(model.spec, attention_scale=latent_of(model).query_dim ** -0.5))


def rotated_at_full_size(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    assert model.spec.rope is not None
    return replace(model, spec=replace(model.spec, rope=replace(model.spec.rope, attention_factor=1.0)))


def norms_of_latents_with_the_eps_of_layers(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    latent = replace(latent_of(model), norm_eps=model.spec.norm_eps)
    return replace(model, spec=replace(model.spec, latent=latent))


def rotated_by_halves(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    def by_halves(x: torch.Tensor, rotary: Any) -> torch.Tensor:
        half = x.shape[-1] // 2
        paired = torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)
        return rotate_neighbours(paired, rotary)

    monkeypatch.setattr(write_latent, "rotate_neighbours", by_halves)
    return model


def bias_in_the_shares(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    def biased(
        logits_TE: torch.Tensor, routing: Routing, ids_TS: torch.Tensor, shares_TS: torch.Tensor, *biases: Any
    ) -> None:
        route_tokens(logits_TE, routing, ids_TS, shares_TS, *biases)
        chosen_TS = (logits_TE.sigmoid() + biases[1]).gather(1, ids_TS.long())
        shares_TS.copy_(chosen_TS / chosen_TS.sum(1, keepdim=True) * routing.share_scale)

    monkeypatch.setattr(moe, "route_tokens", biased)
    return model


def routed(**changes: Any) -> Mutation:
    def change(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
        assert model.spec.experts is not None
        return replace(model, spec=replace(model.spec, experts=replace(model.spec.experts, **changes)))

    return change


def weights_filled(ending: str, value: float) -> Mutation:
    def fill(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
        weights = dict(model.weights)
        for name in [name for name in weights if name.endswith(ending)]:
            weights[name] = torch.full_like(plain(weights[name]), value)
        assert any(name.endswith(ending) for name in weights), ending
        return replace(model, weights=weights)

    return fill


def values_before_keys(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    weights, latent = dict(model.weights), latent_of(model)
    for name in [name for name in weights if name.endswith("kv_b.weight")]:
        by_head = plain(weights[name]).unflatten(0, (-1, latent.expanded_dim))
        weights[name] = by_head.roll(latent.value_dim, dims=1).flatten(0, 1)
    return replace(model, weights=weights)


def latent_of(model: LoadedModel) -> LatentSpec:
    assert model.spec.latent is not None
    return model.spec.latent


def plain(weight: Any) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


MUTATIONS: dict[str, Mutation] = {
    "scores scaled by all that is kept": scaled_by_the_row,
    "scores without mscale": scaled_without_mscale,
    "cos and sin without mscale": rotated_at_full_size,
    "halves rotated": rotated_by_halves,
    "experts of all groups": routed(num_groups=1, groups_taken=1),
    "groups by their largest score": routed(group_score="largest"),
    "bias in the shares": bias_in_the_shares,
    "no bias on scores": weights_filled("router.score_bias", 0.0),
    "shares as they are": routed(normalizes=False),
    "shares unscaled": routed(share_scale=1.0),
    "no shared experts": weights_filled("shared.down.weight", 0.0),
    "latents without gamma": weights_filled("kv_a_norm.weight", 1.0),
    "latents of queries without gamma": weights_filled("q_a_norm.weight", 1.0),
    "latent norms with the eps of layers": norms_of_latents_with_the_eps_of_layers,
    "values before keys in kv_b": values_before_keys,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_logits_planted_fault_exceeds_tolerance(mutation, monkeypatch):
    """The tolerance of this file tells each of them from what is right, by far."""
    answer = alone(V3, 33, 8)
    drive = make_drive(MUTATIONS[mutation](tiny(V3)[1], monkeypatch), max_rows=33)
    request = make_request(33, 1)
    drive.run([request])
    moved = max(float((row - answer.logits[place]).abs().max()) for place, row in drive.logits(request).items())
    assert moved > 200 * TOLERANCE
