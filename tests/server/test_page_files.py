"""The page as files: small, whole, from nowhere else, behind a policy; everything that a browser is not needed for."""

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from for_each import for_each
from holdfast.server import page

FOLDER = Path(page.__file__).parent / page.FOLDER
MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page.router)
    return TestClient(app, base_url="http://localhost")


def test_page_files_are_all_listed_and_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(page.MEDIA_TYPES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES


@for_each("path", sorted(page.PATHS))
def test_page_file_has_its_media_type_etag_and_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / page.PATHS[path]).read_bytes()
    assert answer.headers["content-type"] == page.MEDIA_TYPES[page.PATHS[path]]
    for name, value in page.HEADERS.items():
        assert answer.headers[name] == value
    again = client.get(path, headers={"If-None-Match": f'"other", W/{answer.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_page_policy_allows_no_other_origin_or_inline_script() -> None:
    assert "default-src 'none'" in page.POLICY
    assert "unsafe" not in page.POLICY
    assert "*" not in page.POLICY
    assert "http" not in page.POLICY


def test_page_files_contain_no_outside_addresses() -> None:
    allowed = {"http://www.w3.org/2000/svg"}
    for path in FOLDER.iterdir():
        addresses = set(re.findall(r"\b(?:https?|wss?|data|blob):/?/?[\w.]+[\w./]*", path.read_text(encoding="utf-8")))
        assert addresses <= allowed, f"{path.name}: {addresses}"


def test_page_has_no_inline_script_or_style_and_writes_no_markup() -> None:
    markup = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", markup) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", markup) == []
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        words = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
        assert words == [], f"{path.name}: {words}"


def test_page_script_ids_are_in_the_markup_once() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', (FOLDER / "index.html").read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids))
    for path in FOLDER.glob("*.js"):
        body = set(re.findall(r'\bby\("([\w-]+)"\)', path.read_text(encoding="utf-8")))
        assert body <= set(ids), f"{path.name}: {body - set(ids)}"


def test_page_form_fields_have_labels() -> None:
    markup = (FOLDER / "index.html").read_text(encoding="utf-8")
    inside = "".join(re.findall(r"<label[^>]*>.*?</label>", markup, re.DOTALL))
    for kind, attributes in re.findall(r"<(input|textarea|progress)\b([^>]*)>", markup):
        name = re.search(r'\bid="([\w-]+)"', attributes)
        assert name, f"<{kind}{attributes}> has no id"
        has_label = f'id="{name[1]}"' in inside or f'for="{name[1]}"' in markup
        assert has_label, f"{name[1]} has no label"


@for_each("known", ["{}", "W/{}", '"other", {}', '"other",W/{}'])
def test_page_that_the_browser_has_is_not_sent_again(client: TestClient, known: str) -> None:
    etag = client.get("/").headers["etag"]
    answer = client.get("/", headers={"If-None-Match": known.format(etag)})
    assert (answer.status_code, answer.content) == (304, b"")
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
