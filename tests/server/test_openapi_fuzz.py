"""The OpenAPI document against the server: data that it allows and data that it does not, made by schemathesis.

Left out: /memory/stream, which has no end; and the check that all allowed data is accepted, since no schema can say that a
prompt fits the context, that a token is in the vocabulary, or that two fields go together.
"""

import re
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from engine.fakes import assert_at_rest
from holdfast.server.errors import INTERNAL_TEXT
from server.served import Served, served, until, user

NUM_QUICK, NUM_SLOW = 4, 1500
OPERATIONS = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/memory"),
)
SLOW_ONLY = ("/v1/messages", "/v1/messages/count_tokens", "/api/generate", "/api/ps", "/api/version")
"""Examples of the first two take seconds to make; the others have the fields of another path."""
STREAMED = {
    "/v1/chat/completions": {"messages": user("a")},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": user("a"), "max_tokens": 4},
    "/api/chat": {"messages": user("a")},
    "/api/generate": {"prompt": "a"},
}
statuses: Counter[str] = Counter()


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A context so short that whatever is allowed is soon answered."""
    with served(max_model_len=160, max_queue=16, num_pages=256) as running:
        yield running
        until(lambda: not running.engine.has_unfinished(), "the engine goes on")
    assert_at_rest(running.engine)  # not before its thread has ended, which is a moment behind what clients have read


@pytest.fixture(scope="module")
def document(small: Served) -> BaseSchema:
    """Read once: its references take seconds to resolve."""
    document = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    document.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return document


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "path"), [one for one in OPERATIONS if one[1] not in SLOW_ONLY])
def test_openapi_fuzz_sample_of_each_operation(small: Served, document: BaseSchema, method: str, path: str) -> None:
    fuzz(small, document, method, path, NUM_QUICK if method == "POST" else 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_openapi_fuzz_many_cases_of_each_operation(small: Served, document: BaseSchema, method: str, path: str) -> None:
    fuzz(small, document, method, path, NUM_SLOW if method == "POST" else 50)


def fuzz(running: Served, document: BaseSchema, method: str, path: str, num_examples: int) -> None:
    operation = document[path][method]
    num_cases: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],  # an example that is smaller costs minutes and says no more
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    )
    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        num_cases[response.status_code] += 1
        assert response.status_code < 500, f"{response.status_code}: {response.text[:500]}"
        assert not INTERNAL_TEXT.search(response.text.replace(str(case.body), "")) or response.status_code < 400
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    check()
    statuses.update({f"{method} {path} {status}": number for status, number in num_cases.items()})
    assert running.service.llm.health().is_alive
    print(f"{method} {path}: {num_cases.total()} cases, {dict(sorted(num_cases.items()))}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", STREAMED)
def test_openapi_document_describes_the_streams(document: BaseSchema, path: str) -> None:
    query = STREAMED[path]
    operation = document[path]["POST"]
    case = operation.Case(body={**query, "stream": True}, media_type="application/json")
    case.validate_response(case.call(timeout=60), excluded_checks=[positive_data_acceptance])


def test_openapi_document_lists_each_operation_and_status(document: BaseSchema) -> None:
    paths = document.raw_schema["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found == {*OPERATIONS, ("GET", "/memory/stream")}
    for path, methods in paths.items():
        for operation in methods.values():
            assert {"200", "400", "401", "500", "503"} <= operation["responses"].keys()
            if "requestBody" in operation:
                assert {"404", "408", "413", "415"} <= operation["responses"].keys(), path
                assert not re.search(r'"\$ref": "#/\$defs', str(operation))
