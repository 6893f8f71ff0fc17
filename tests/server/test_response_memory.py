"""Kept responses: bytes counted and bounded whatever is kept, continued and deleted; found by their own key alone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from holdfast.api.async_llm import AsyncLLM
from holdfast.server.app import make_app
from holdfast.server.keys import Keys
from holdfast.server.response_memory import OVERHEAD_BYTES, KeptResponse, ResponseMemory
from holdfast.server.service import ServerLimits, Service
from server.served import NAMES, app_client, make_served_engine, said


def response(number: int, size: int = 10) -> dict[str, Any]:
    return {"id": f"resp-{number}", "output": [{"id": f"out-{number}", "text": "x" * size}]}


def query(number: int) -> list[dict[str, Any]]:
    return [{"id": f"in-{number}"}]


OPERATIONS = st.tuples(
    st.sampled_from(["keep", "continue", "late", "delete"]), st.integers(0, 30), st.integers(0, 4000)
)


@given(st.lists(OPERATIONS, max_size=40), st.integers(1, 20_000), st.integers(1, 8))
def test_memory_with_any_operations_stays_bounded(operations, limit_bytes, max_responses):
    memory = ResponseMemory(limit_bytes, max_responses)
    links: list[tuple[str, KeptResponse, list[str]]] = []
    for number, (kind, pick, size) in enumerate(operations):
        if kind == "delete":
            memory.delete(f"resp-{pick}", None)
            memory.check()
            continue
        previous, items = None, []
        if kind != "keep" and links:
            # "late": the response that is continued may have been dropped while the answer ran.
            name, found, items = links[pick % len(links)]
            previous = found if kind == "late" or memory.find(name, None) is found else None
            items = items if previous is not None else []
        memory.keep(response(number, size), query(number), None, previous)
        memory.check()
        kept = memory.find(f"resp-{number}", None)
        if kept is not None:
            assert [item["id"] for item in kept.input_items()] == [*items, f"in-{number}"]
            links.append((f"resp-{number}", kept, [*items, f"in-{number}", f"out-{number}"]))
            assert kept.response() == response(number, size)


def test_memory_drops_the_oldest_and_keeps_what_goes_on():
    memory = ResponseMemory(4 * (OVERHEAD_BYTES + 200), 100)
    memory.keep(response(0), query(0), None, None)
    for number in range(1, 4):
        memory.keep(response(number), query(number), None, memory.find(f"resp-{number - 1}", None))
    memory.keep(response(9), query(9), None, None)
    memory.keep(response(10, 300), query(10), None, None)
    memory.check()
    assert memory.find("resp-0", None) is None
    assert memory.find("resp-10", None) is not None
    memory.keep(response(11, 10_000), query(11), None, None)
    assert memory.find("resp-11", None) is None
    assert memory.find("resp-10", None) is not None


def test_memory_with_a_late_answer_counts_dropped_ones_again():
    memory = ResponseMemory(20_000, 8)
    memory.keep(response(0), query(0), None, None)
    first = memory.find("resp-0", None)
    assert first is not None
    memory.keep(response(1), query(1), None, first)
    second = memory.find("resp-1", None)
    assert second is not None
    assert memory.delete("resp-0", None)
    assert memory.delete("resp-1", None)
    assert memory.num_bytes == 0
    memory.keep(response(2), query(2), None, second)
    memory.check()
    assert memory.num_bytes > first.num_bytes + second.num_bytes


def test_response_stored_is_found_only_by_its_own_key():
    llm = AsyncLLM.from_engine(make_served_engine())
    one, other = {"Authorization": "Bearer one"}, {"Authorization": "Bearer other"}
    try:
        with TestClient(make_app(Service(llm, NAMES), Keys(["one", "other"])), base_url="http://localhost") as client:
            made = client.post("/v1/responses", json={"input": said("Yes.")}, headers=one).json()
            path = f"/v1/responses/{made['id']}"
            body = {"input": "x", "previous_response_id": made["id"]}
            assert client.get(path, headers=other).status_code == 404
            assert client.get(f"{path}/input_items", headers=other).status_code == 404
            assert client.delete(path, headers=other).status_code == 404
            assert client.post("/v1/responses", json=body, headers=other).status_code == 404
            assert client.get(path, headers=one).json() == made
    finally:
        llm.shutdown()


def test_response_memory_of_zero_bytes_keeps_nothing():
    service = Service(AsyncLLM.from_engine(make_served_engine()), NAMES, ServerLimits(max_response_bytes=0))
    try:
        with TestClient(make_app(service), base_url="http://localhost") as client:
            made = client.post("/v1/responses", json={"input": said("Yes.")}).json()
            assert (made["store"], len(service.responses)) == (False, 0)
            reported = client.get(f"/v1/responses/{made['id']}")
            assert (reported.status_code, "stores no responses" in reported.text) == (404, True)
            refused = client.post("/v1/responses", json={"input": "x", "store": True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
    finally:
        service.llm.shutdown()


def test_response_continued_beyond_max_body_is_refused():
    with app_client() as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        made = client.post("/v1/responses", json={"input": said("Yes.")}).json()
        service.responses.find(made["id"], None).chain_bytes = service.limits.max_body_bytes + 1
        reported = client.post("/v1/responses", json={"input": "x", "previous_response_id": made["id"]})
        assert (reported.status_code, reported.json()["error"]["param"]) == (413, "previous_response_id")
