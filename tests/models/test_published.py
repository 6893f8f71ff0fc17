"""The catalogue's file: its schema, and models that say what differs from another."""

import json
from pathlib import Path

import pytest

from holdfast.models.catalogue import FILE, PUBLISHED, read_published

ROWS = json.loads(FILE.read_text(encoding="utf-8"))
KEYS = {"repository", "name", "same", "like", "config"}


def test_rows_have_known_keys_and_earlier_bases() -> None:
    names: list[str] = []
    for row in ROWS:
        assert {"repository"} <= row.keys() <= KEYS, row["repository"]
        assert row["repository"].count("/") == 1
        assert "like" in row or "architectures" in row["config"]
        assert row.get("like", names[-1] if names else "") in (*names, ""), row["like"]
        assert isinstance(row.get("config", {}), dict)
        assert all(isinstance(name, str) for name in row.get("same", []))
        names.append(row.get("name") or row["repository"].partition("/")[2])
    every = [*names, *(name for row in ROWS for name in row.get("same", ()))]
    assert len(set(every)) == len(every), "a name stands for one model"


def test_rows_are_one_line_each() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[1:-1]] == ROWS


def test_rows_repeat_nothing_of_their_base() -> None:
    by_name = {model.name: model for model in PUBLISHED}
    for row in ROWS:
        for key, value in row.get("config", {}).items():
            assert "like" not in row or by_name[row["like"]].config.get(key) != value, (row["repository"], key)


def test_read_published_merges_nested_settings(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    rows = [
        {"repository": "a/One", "config": {"x": 1, "text_config": {"y": 2, "z": 3}}},
        {"repository": "a/Two", "like": "One", "same": ["Deux"], "config": {"text_config": {"y": 4}}},
    ]
    file.write_text(json.dumps(rows))
    one, two = read_published(file)
    assert one.config == {"x": 1, "text_config": {"y": 2, "z": 3}}
    assert (two.name, two.same, two.config) == ("Two", ("Deux",), {"x": 1, "text_config": {"y": 4, "z": 3}})
    file.write_text(json.dumps([{"repository": "a/Two", "like": "One"}]))
    with pytest.raises(KeyError, match="One"):
        read_published(file)
