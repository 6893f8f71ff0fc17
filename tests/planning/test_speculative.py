"""Proposals in a plan: how many rows are chosen from, which terms grow by it, and what is declined."""

import re
from dataclasses import replace

import pytest

from error_codes import raises_code
from holdfast.cache.groups import CacheGroup, unrewindable
from holdfast.errors import ConfigError
from holdfast.models.declaration import CacheRows
from holdfast.planning.plan import plan_runner
from holdfast.planning.resolve import resolve
from holdfast.planning.terms import graph_term, list_needs, sampling_terms
from planning.plan_cases import H200, HOST, declared, plan_request

DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


@pytest.mark.parametrize(
    ("speculative", "max_num_seqs", "max_num_batched_tokens", "rows"),
    [
        (None, 64, 2048, 0),
        ("ngram", 1, 2048, 5),
        ("ngram:16", 1, 2048, 17),
        ("ngram:4", 20, 2048, 100),
        ("ngram:4", 64, 2048, 128),
        ("ngram:1", 64, 2048, 128),
        ("ngram:4", 256, 2048, 256),
        ("ngram:4", 64, 40, 40),
        ("ngram:4", 1, 5, 5),
    ],
)
def test_rows_that_are_chosen_from(speculative, max_num_seqs, max_num_batched_tokens, rows) -> None:
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    resolved = resolve(plan_request(speculative=speculative, **options))
    assert resolved.limits.max_sampled_rows == rows
    assert resolved.limits.sampled_rows == (rows or max_num_seqs)
    assert resolved.limits.max_num_seqs == max_num_seqs
    noted = {choice.name: (choice.value, choice.reason) for choice in resolved.choices}
    if speculative is None:
        assert "speculative" not in noted
        assert resolved.num_proposals == 0
    else:
        assert noted["speculative"][0] == f"ngram:{resolved.num_proposals}"
        assert f"{rows} rows" in noted["speculative"][1]


@pytest.mark.parametrize("target", [H200, HOST], ids=["gpu", "cpu"])
def test_speculative_grows_only_sampling_and_graph_terms(target) -> None:
    plain, guessing = (
        list_needs(resolve(plan_request("Qwen3-8B", target, max_num_seqs=20, speculative=option)))
        for option in (None, "ngram:4")
    )
    before, after = ({term.owner: term.num_bytes for term in found.terms} for found in (plain, guessing))
    assert before.keys() == after.keys()
    grown = {owner for owner in before if before[owner] != after[owner]}
    expected = {term.owner: term.num_bytes for term in sampling_terms(100, 151936, target.kind)}
    assert {owner: after[owner] for owner in expected} == expected
    allowed = {*expected, "cuda graphs", "workspace/layers"}
    assert grown <= allowed, grown - allowed
    assert "sampling/results" in grown or "sampling/rows" in grown
    if target.kind == "cuda":
        assert after["cuda graphs"] == graph_term(36, 20, 8192, has_proposals=True).num_bytes > before["cuda graphs"]
    logits = [
        next(spec.shape for request in found.requests for spec in request.specs if spec.name == "logits")
        for found in (plain, guessing)
    ]
    assert logits == [(64, 151936), (100, 151936)]


def test_steps_that_are_too_short_are_refused_with_what_works() -> None:
    for number in (4, 1):
        with raises_code("plan.few_batched_tokens", ConfigError, needed=number + 1, maximum=number):
            resolve(plan_request(speculative=f"ngram:{number}", max_num_batched_tokens=number))


def test_models_that_are_only_planned_are_declined() -> None:
    with raises_code("plan.no_draft_tokens", ConfigError, value="ngram:4"):
        resolve(plan_request("gemma-2-9b", speculative="ngram"))


class Kept:
    """A declaration that keeps something else."""

    def __init__(self, declaration, rows: tuple[CacheRows, ...] = (), sequence_bytes: int = 0) -> None:
        self._declaration, self._rows, self._sequence_bytes = declaration, rows, sequence_bytes

    def __getattr__(self, name: str):
        return getattr(self._declaration, name)

    def cache_rows(self, kv_format, mesh):
        return self._rows or self._declaration.cache_rows(kv_format, mesh)

    def sequence_bytes(self, kv_format, mesh):
        return self._sequence_bytes


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"rows": (CacheRows("compressed", 2, 64, 4),)}, "keeps one row for 4 tokens (compressed)"),
        ({"sequence_bytes": 4096}, "keeps sums of a sequence's tokens"),
    ],
)
def test_speculative_states_that_cannot_go_back_refused(kept, words: str) -> None:
    model = declared("Qwen3-8B")
    request = plan_request(speculative="ngram", max_num_seqs=4)
    resolve(request)
    other = replace(request, declared=replace(model, declaration=Kept(model.declaration, **kept)))
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve(other)
    resolve(replace(other, config=replace(request.config, speculative=None)))


def test_groups_with_a_state_do_not_go_back() -> None:
    whole, window = CacheGroup("all", 16), CacheGroup("window", 16, 64)
    assert unrewindable((whole, window)) is None
    assert "cache group memory keeps one state" in str(unrewindable((whole, CacheGroup("memory", 0, state_pages=2))))


@pytest.mark.parametrize("target", [H200, HOST], ids=["gpu", "cpu"])
def test_guesses_change_how_rows_round_on_a_gpu(target) -> None:
    request = plan_request("Qwen3-0.6B", target, speculative="ngram:4", batch_invariant=True, dtype=DTYPES[target.kind])
    if target.kind == "cpu":
        assert plan_runner(request).resolved.num_proposals == 4
        return
    with raises_code("plan.variant_draft_tokens", ConfigError, value="ngram:4"):
        plan_runner(request)
