import os

import pytest

from holdfast.errors import ModelFormatError
from holdfast.loading.sources import files as json_file
from holdfast.loading.sources.files import parse_json, read_json_object


def test_an_object_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, 2.5, null, "é"]}', encoding="utf-8")
    assert read_json_object(tmp_path / "config.json") == {"a": [1, 2.5, None, "é"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not sound JSON"),
        (b"{", "not sound JSON"),
        (b"[1]", "JSON list"),
        (b"3", "JSON int"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": Infinity}', "Infinity is no number"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not sound JSON"),
        (b'{"a\nb": 1}', "not sound JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_json_is_one_line_with_the_name_of_the_file(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFormatError) as caught:
        read_json_object(tmp_path / "config.json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json")
    assert str(caught.value).isprintable()


def test_size_is_bounded_before_anything_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 100)
    (tmp_path / "big.json").write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(ModelFormatError, match=r"big\.json has 109 bytes"):
        read_json_object(tmp_path / "big.json")


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_json_object(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_json_object(tmp_path / "pipe.json")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        read_json_object(tmp_path / "absent.json")


def test_numbers_can_be_vetted_as_text():
    def positive(digits: str) -> int:
        if digits.startswith("-"):
            raise ValueError("negative")
        return int(digits)

    assert parse_json(b"[1]", "x", parse_int=positive) == [1]
    with pytest.raises(ModelFormatError, match="negative"):
        parse_json(b"[-0]", "x", parse_int=positive)
