"""Isolation: no request finds what another key or another salt has cached, and no key reads another's responses."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.testclient import TestClient

from for_each import for_each
from holdfast.api.async_llm import AsyncLLM
from holdfast.server.app import make_app
from holdfast.server.keys import Keys
from holdfast.server.service import Service
from server.families import ALL, Chat, Completions, Responses, ask
from server.served import NAMES, make_served_engine, said

KEYS = ("one", "other", "third")
LONG = "s" * 255


class Guarded(NamedTuple):
    """A server with several keys."""

    client: httpx.Client
    service: Service
    keys: Keys

    def num_hit(self, key: str, path: str, body: dict[str, Any]) -> int:
        """Tokens of a request that were found in the cache."""
        before = self.service.llm.stats().num_prefix_hit_tokens
        answer = self.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return self.service.llm.stats().num_prefix_hit_tokens - before


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    service = Service(AsyncLLM.from_engine(make_served_engine()), NAMES)
    try:
        keys = Keys(KEYS)
        with TestClient(make_app(service, keys), base_url="http://localhost") as client:
            yield Guarded(client, service, keys)
    finally:
        service.llm.shutdown()


def long_text(name: str) -> str:
    return f"{name} {'of more than a page' * 3} {said('ok')}"


BODIES: dict[str, dict[str, Any]] = {
    **{family.path: family.body([("user", long_text(type(family).__name__))]) for family in ALL},
    "/api/generate": {"prompt": long_text("generate"), "stream": False},
    "/v1/embeddings": {"input": [long_text("embeddings")]},
    "/v1/rerank": {"query": long_text("rerank"), "documents": [long_text("document")]},
    "/v1/score": {"text_1": long_text("score"), "text_2": long_text("second")},
    "/api/embed": {"input": long_text("embed")},
    "/api/embeddings": {"prompt": long_text("old embed")},
}


@for_each("path", BODIES)
def test_prefix_cache_hits_only_prompts_of_the_same_key(guarded: Guarded, path):
    found = {(place, key): guarded.num_hit(key, path, BODIES[path]) for place, key in itertools.product((0, 1), KEYS)}
    assert {key: found[0, key] for key in KEYS} == dict.fromkeys(KEYS, 0)
    assert all(found[1, key] > 0 for key in KEYS)


def test_prefix_cache_hits_only_raw_prompts_of_the_same_key(guarded: Guarded):
    body = {"prompt": long_text("raw"), "raw": True, "stream": False}
    assert [guarded.num_hit(key, "/api/generate", body) > 0 for key in ("one", "other", "one")] == [False, False, True]


def test_prefix_cache_constrained_request_keeps_its_salt(guarded: Guarded, held):
    """Such a request is prepared twice."""
    body = {"messages": [{"role": "user", "content": long_text("form")}], "guided_choice": ["ok"]}
    hits = [guarded.num_hit(key, "/v1/chat/completions", body) > 0 for key in ("one", "other", "one")]
    assert hits == [False, False, True]


SALTS = (None, "a", "b", "a:b", f"{LONG}1", f"{LONG}2")


@for_each("family", [Chat(), Completions(), Responses()])
def test_prefix_cache_is_split_by_key_and_request_salt(guarded: Guarded, family):
    """Each pair has its own cache, long salts to their last character."""
    body = family.body([("user", long_text(f"S{type(family).__name__}"))])
    pairs = list(itertools.product(KEYS[:2], SALTS))

    def hits() -> list[int]:
        return [
            guarded.num_hit(key, family.path, body if salt is None else {**body, "cache_salt": salt})
            for key, salt in pairs
        ]

    assert hits() == [0] * len(pairs)
    assert all(hits())


def test_prefix_cache_request_salt_cannot_name_another_key(guarded: Guarded):
    """Not even if the salt of that key were known."""
    body = Completions().body([("user", long_text("named"))])
    guarded.num_hit("one", Completions.path, body)
    guarded.num_hit("one", Completions.path, {**body, "cache_salt": "b"})
    own = guarded.keys.cache_salt(0)
    assert own is not None
    for salt in (own, f"{own}:b", f":{own}", "one", "0"):
        assert guarded.num_hit("other", Completions.path, {**body, "cache_salt": salt}) == 0, salt


def test_usage_cached_tokens_count_only_the_own_key(guarded: Guarded):
    reported = {}
    body = Chat().body([("user", long_text("reported"))])
    for place, key in itertools.product((0, 1), KEYS[:2]):
        headers = {"x-api-key": key}
        reported[place, key] = ask(guarded.client, Chat(), body, stream=False, headers=headers).usage[1]
    assert [reported[0, key] for key in KEYS[:2]] == [0, 0]
    assert min(reported[1, key] for key in KEYS[:2]) > 0


def test_cache_salts_of_two_servers_differ():
    """A key says nothing about its salt."""
    first, second = Keys(KEYS), Keys(KEYS)
    salts = [keys.cache_salt(place) for keys in (first, second) for place in range(3)]
    assert len(set(salts)) == 6
    assert first.cache_salt(1) == first.cache_salt(1)


def test_prefix_cache_of_a_single_key_is_split_by_salt_alone():
    service = Service(AsyncLLM.from_engine(make_served_engine()), NAMES)
    try:
        keys = Keys(["one"])
        with TestClient(make_app(service, keys), base_url="http://localhost") as client:
            guarded = Guarded(client, service, keys)
            body = Completions().body([("user", long_text("alone"))])
            salted = [{**body, "cache_salt": salt} for salt in ("a", "b", "a")]
            hits = [guarded.num_hit("one", Completions.path, one) > 0 for one in (body, body, *salted)]
            assert hits == [False, True, False, False, True]
    finally:
        service.llm.shutdown()


def test_response_chain_of_another_key_is_refused(guarded: Guarded):
    """Each key has its own; one that continues another's is refused, at every link."""
    made: dict[str, list[str]] = {key: [] for key in KEYS[:2]}
    for key in made:
        headers = {"Authorization": f"Bearer {key}"}
        for place in range(3):
            body = {"input": f"{key} {said(str(place))}", "previous_response_id": made[key][-1] if made[key] else None}
            made[key].append(guarded.client.post("/v1/responses", json=body, headers=headers).json()["id"])
    assert len({*made["one"], *made["other"]}) == 6
    for own, other in itertools.permutations(made):
        headers = {"Authorization": f"Bearer {own}"}
        for response_id in made[other]:
            path = f"/v1/responses/{response_id}"
            body = {"input": "x", "previous_response_id": response_id}
            answers = [
                guarded.client.get(path, headers=headers),
                guarded.client.get(f"{path}/input_items", headers=headers),
                guarded.client.delete(path, headers=headers),
                guarded.client.post("/v1/responses", json=body, headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [404] * 4
    items = guarded.client.get(
        f"/v1/responses/{made['other'][2]}/input_items?order=asc", headers={"Authorization": "Bearer other"}
    ).json()["data"]
    texts = [item["content"][0]["text"] for item in items]
    assert texts == [f"other {said('0')}", "0", f"other {said('1')}", "1", f"other {said('2')}"]


def test_metrics_and_memory_tell_no_prompt_and_no_key(guarded: Guarded):
    guarded.num_hit("one", Chat.path, Chat().body([("user", f"secret-words {said('ok')}")]))
    for path in ("/metrics", "/memory"):
        text = guarded.client.get(path, headers={"Authorization": "Bearer other"}).text
        salts = [guarded.keys.cache_salt(place) or "" for place in range(3)]
        assert not any(word in text for word in ("secret-words", "Bearer", "third", *salts))
