"""Pages: well formed, harmless whatever the names in them, and in one file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.page_reader import read_page
from holdfast.cli.web_page import Html, page, page_file, table, tag
from holdfast.errors import ConfigError

HOSTILE = "</title><script>alert(1)</script>\"'&<!--\x00\x1b[31m\udc80\u2028"


def test_markup_is_kept_and_text_is_escaped() -> None:
    assert tag("p", "a < b", tag("b", "&"), class_="x y", data_bytes=3) == (
        '<p class="x y" data-bytes="3">a &lt; b<b>&amp;</b></p>'
    )
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert isinstance(tag("p"), Html)


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_comes_back_as_it_was_or_with_a_sign_for_what_cannot_be_shown(text: str) -> None:
    document = read_page(page(text, tag("p", text, title=text)))
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    assert document.all("title")[0].text == shown
    assert document.all("p")[0].text == shown
    assert document.all("p")[0].attributes["title"] == shown
    page(text).encode("utf-8")


def test_a_hostile_name_makes_no_element() -> None:
    document = read_page(page(HOSTILE, table((HOSTILE,), [(HOSTILE, (HOSTILE,))], 0)))
    assert len(document.all("script")) == 1
    assert "alert" not in document.all("script")[0].text
    assert len(document.all("td")) == 1


def test_numbers_are_aligned_and_rows_have_classes() -> None:
    made = read_page(
        page("t", table(("owner", "bytes", "why"), [("total", ("a", "1", "b")), ("", ("c", "2", "d"))], 1))
    )
    assert [cell.attributes.get("class") for cell in made.all("td")] == [None, "number", None] * 2
    assert [row.attributes.get("class") for row in made.all("tr")] == [None, "total", None]


@pytest.mark.parametrize(
    "name", ["", " ", "a\0b", "folder", "no/such/folder/page.html", "x" * 5000, "~nobody_at_all/p"]
)
def test_what_cannot_be_a_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"--html .* was asked"):
        page_file(name, "--html")


def test_a_new_file_and_an_old_one_are_fine(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("<!DOCTYPE html>old")
    for name in ("old.html", "new.html"):
        assert page_file(str(tmp_path / name), "--html") == tmp_path / name


def test_only_pages_are_replaced(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="a file that is no page lies there"):
        page_file(str(file), "--html")
    for text in ("", "<!DOCTYPE html>\n<html></html>"):
        file.write_text(text)
        assert page_file(str(file), "--html") == file


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="it may not be written"):
        page_file(str(tmp_path / "page.html"), "--html")
