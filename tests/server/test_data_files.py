"""Data files of the server: errors, refused fields, other paths, reply schemas, metrics and documents."""

import json
import re
import tomllib
from http import HTTPStatus
from pathlib import Path

from error_codes import PACKAGE, message_table
from holdfast import errors
from holdfast.server import anthropic_schemas, embedding_schemas, fields, ollama_schemas, schemas
from holdfast.server.logs import RequestRecord

DATA = Path(PACKAGE) / "data"


def read(name: str) -> dict:
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def test_http_errors_table_has_known_codes_and_statuses():
    table = read("http_errors.toml")
    assert set(table) == {"answers", "openai_types", "anthropic_types"}
    statuses = {*map(int, HTTPStatus), 499}  # nginx' status for a client that has gone
    for code, (status, *public) in table["answers"].items():
        assert code in message_table() or hasattr(errors, code), code
        assert status in statuses, code
        assert len(public) <= 1, code
        assert all(re.fullmatch(r"[a-z_]+", one) for one in public), code
    for types in (table["openai_types"], table["anthropic_types"]):
        assert {int(status) for status in types} <= statuses


def test_refused_fields_table_matches_request_models():
    modules = (fields, schemas, anthropic_schemas, ollama_schemas, embedding_schemas)
    for model, rows in read("refused_fields.toml").items():
        [made] = {getattr(module, model) for module in modules if hasattr(module, model)}
        for name, (sentence, *_) in rows.items():
            assert name in made.model_fields, (model, name)
            assert isinstance(sentence, str)


def test_other_paths_table_has_patterns_and_sentences():
    for pattern, answer in read("other_paths.toml").items():
        re.compile(pattern)
        assert answer.endswith("."), pattern


def test_reply_schemas_refer_to_existing_schemas():
    text = (DATA / "reply_schemas.json").read_text(encoding="utf-8")
    made = json.loads(text)
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(made)
    assert all(schema["type"] == "object" and schema["description"] for schema in made.values())


def test_metrics_have_one_row_each():
    table = read("metrics.toml")
    histograms = table.pop("histograms")
    assert {unit for _, _, unit in histograms.values()} == {"seconds", "tokens"}
    rows = [(name, *row) for section in table.values() for name, row in section.items()]
    names = [name for name, *_ in rows] + [name for name, _, _ in histograms.values()]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("vllm:", "holdfast:")) for name in names)
    assert {kind for _, kind, *_ in rows} == {"gauge", "counter"}
    assert all(len(row) in (4, 5) for row in rows)


def test_openapi_table_has_known_statuses_and_schemas():
    table = read("openapi.toml")
    assert {int(status) for status in table["errors"]} <= set(map(int, HTTPStatus))
    replies = json.loads((DATA / "reply_schemas.json").read_text(encoding="utf-8"))
    assert set(table["error_schemas"].values()) <= set(replies)


def test_span_attributes_table_matches_request_record():
    record = RequestRecord("id", "GET", "/", "client", status=200, error="x", finish_reason="stop")
    record.num_prompt_tokens = record.num_cached_tokens = record.num_output_tokens = 1
    record.first_token_seconds = 0.5
    assert set(read("span_attributes.toml")) <= set(record.values(1.0))


def test_other_names_table_matches_request_models():
    modules = (fields, schemas, anthropic_schemas, ollama_schemas, embedding_schemas)
    models = [kind for module in modules for kind in vars(module).values() if hasattr(kind, "model_fields")]
    known = {name for model in models for name in model.model_fields}
    assert all(set(names) <= known for names in read("other_names.toml").values())
