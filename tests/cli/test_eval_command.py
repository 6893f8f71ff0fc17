"""`holdfast eval kv`: a table, a record and a page of a text; and whatever can be typed wrong, told in one line."""

import json
import re
from pathlib import Path

import pytest

from cli.cli_models import Here, make_model
from cli.page_reader import read_page
from holdfast.cli import eval_command
from holdfast.quant.formats import KV_FORMATS

WORDS = "It is not known who first thought of it, but there it was. "
SMALL = ("--window", "48", "--tokens", "96", "--max-num-batched-tokens", "32")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(WORDS * 20, encoding="utf-8")
    return path


def rows(out: str) -> dict[str, list[str]]:
    """The table's cells by format."""
    lines = out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("format "))
    return {line.split()[0]: line.split()[1:] for line in lines[start + 1 : lines.index("", start)]}


def test_every_format_has_a_row_the_reference_first(here: Here, tiny: Path, text: Path) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *SMALL, "--device", "cpu")
    assert ended.code == 0, ended
    found = rows(ended.out)
    assert list(found) == list(KV_FORMATS)
    assert len(found["float32"]) == 4, "nothing is compared with itself"
    assert all(len(cells) == 8 for name, cells in found.items() if name != "float32")
    assert "2 windows of 48 tokens of book.txt, 94 predictions" in ended.out
    assert "tokens/s" in ended.err
    assert "\x1b" not in ended.out


def test_less_than_a_window_is_one_window_and_says_so(here: Here, tiny: Path, text: Path) -> None:
    asked = ("--window", "48", "--tokens", "20", "--formats", "float16", "--device", "cpu")
    ended = here("eval", "kv", tiny, "--text", text, *asked)
    assert "one window of 48 tokens" in ended.out
    assert "48 tokens are read, not 20: one whole window is the least" in ended.err
    assert "tokens are read, not" not in here("eval", "kv", tiny, "--text", text, *asked, "--tokens", "48").err


def test_formats_are_those_that_were_asked_each_once(here: Here, tiny: Path, text: Path) -> None:
    asked = " bfloat16,turboquant_4bit_nc, bfloat16,float32"
    ended = here("eval", "kv", tiny, "--text", text, *SMALL, "--formats", asked, "--device", "cpu")
    assert list(rows(ended.out)) == ["float32", "bfloat16", "turboquant_4bit_nc"]


def test_record_and_page_say_what_the_table_says(here: Here, bare: Path, text: Path, tmp_path: Path) -> None:
    record, html = tmp_path / "record.json", tmp_path / "page.html"
    options = ("--formats", "fp8", "--json", record, "--html", html, "--device", "cpu")
    ended = here("eval", "kv", bare, "--text", text, *SMALL, *options)
    assert ended.code == 0, ended
    made = json.loads(record.read_text())
    assert [result["measure"] for result in made["results"]] == ["float32", "fp8"]
    assert made["results"][1]["num_predictions"] == 94
    assert made["results"][0]["mean_kl"] == 0 < made["results"][1]["mean_kl"]
    assert (made["window"], made["num_windows"], made["text"]) == (48, 2, "book.txt")
    assert re.fullmatch(r"[0-9a-f]{64}", made["text_sha256"])
    assert made["command"].startswith("holdfast eval kv ")
    shown = rows(ended.out)["fp8"]
    document = read_page(html.read_text(encoding="utf-8"))
    cells = [row.all("td") for row in document.all("tbody")[0].all("tr")]
    assert [cell.text for cell in cells[1]][1:] == shown
    assert f"{made['results'][1]['perplexity']:.4f}" in shown
    assert "page written to" in ended.err
    assert "record written to" in ended.err


def test_a_record_alone_on_stdout(here: Here, tiny: Path, text: Path) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *SMALL, "--formats", "float16", "--json", "-", "--device", "cpu")
    assert json.loads(ended.out)["results"][1]["measure"] == "float16"
    assert "float16" in ended.err


def test_the_same_text_gives_the_same_figures(here: Here, tiny: Path, text: Path) -> None:
    options = (*SMALL, "--formats", "turboquant_3bit_nc", "--json", "-", "--device", "cpu")
    first, second = (json.loads(here("eval", "kv", tiny, "--text", text, *options).out) for _ in range(2))
    for one, other in zip(first["results"], second["results"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_protected_layers_are_for_coded_formats_and_count_in_their_bytes(here: Here, tiny: Path, text: Path) -> None:
    def bytes_with(*options: str) -> list[str]:
        asked = ("--formats", "float16,fp8,turboquant_4bit_nc", *options, "--device", "cpu")
        ended = here("eval", "kv", tiny, "--text", text, *SMALL, *asked)
        assert ended.code == 0, ended
        notes.append(ended.out.splitlines()[-1])
        return [cells[0] for cells in rows(ended.out).values()]

    notes: list[str] = []
    assert bytes_with("--kv-protected-layers", "0") == ["512", "256", "144", "80"]
    assert bytes_with("--kv-protected-layers", "1,") == ["512", "256", "144", "112"]
    assert notes[0].startswith("KL: ")
    assert notes[1] == "layers 1, in fp8: turboquant_4bit_nc"


def test_a_model_that_cannot_be_coded_keeps_its_plain_formats(here: Here, tmp_path: Path, text: Path) -> None:
    odd = make_model(tmp_path / "odd", head_dim=24)
    ended = here("eval", "kv", odd, "--text", text, *SMALL, "--device", "cpu")
    assert list(rows(ended.out)) == ["float32", "float16", "bfloat16"]
    assert ended.err.count(" is left out: ") == len(KV_FORMATS) - 3
    refused = here("eval", "kv", odd, "--text", text, *SMALL, "--formats", "fp8", "--device", "cpu")
    assert refused.code in (1, 2)
    assert refused.out == ""
    assert re.match("error: .* 24", refused.err.splitlines()[-1]), refused


REFUSED = [
    (("--formats", "turboquant_4bit"), "did you mean turboquant_4bit_nc?"),
    (("--formats", "fp8,int7"), "the formats are float32, float16"),
    (("--formats", ","), "the formats are"),
    (("--window", "1"), "--window '1' was asked"),
    (("--window", "long"), "write --window 1024"),
    (("--window", "auto"), "write --window 1024"),
    (("--window", "1200"), "ask for windows of 1180"),
    (("--tokens", "0"), "--tokens '0' was asked"),
    (("--tokens", "many"), "write --tokens 16K"),
    (("--json", "no/such/folder/record.json"), "its folder does not exist"),
    (("--html", "no/such/folder/page.html"), "its folder does not exist"),
    (("--kv-protected-layers", "0,0"), "a count or a list of different layers works"),
    (("--dtype", "int3"), "the choices are"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_what_is_refused(here: Here, tiny: Path, text: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *options, "--device", "cpu")
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert words in ended.err


def test_a_text_must_be_named(here: Here, tiny: Path) -> None:
    ended = here("eval", "kv", tiny)
    assert (ended.code, ended.out) == (2, "")
    assert "add --text and a file of plain text" in ended.err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"caf\xe9 " * 100, "byte 3 of it, 0xe9, is not UTF-8"),
        (b"", "the whole text has 0"),
        (b"ab", "the whole text has 2"),
    ],
    ids=["latin", "empty", "short"],
)
def test_texts_that_cannot_be_read(here: Here, tiny: Path, tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    ended = here("eval", "kv", tiny, "--text", path, "--device", "cpu")
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", ["nothing.txt", "", "a\0b", "x" * 5000, "~nobody_at_all/t.txt", "."])
def test_files_that_are_none(here: Here, tiny: Path, tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = here("eval", "kv", tiny, "--text", name)
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1
    assert "name a file of plain text" in ended.err


def test_a_file_without_end_is_refused(here: Here, tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr(eval_command, "MAX_TEXT_BYTES", 2**20)
    ended = here("eval", "kv", tiny, "--text", "/dev/zero")
    assert ended.code == 2
    assert "it has more than 1 MiB" in ended.err


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert eval_command.read_text(str(path)) == "abc"


def test_a_model_that_is_not_there(here: Here, tmp_path: Path, text: Path) -> None:
    ended = here("eval", "kv", tmp_path / "nothing", "--text", text)
    assert ended.code == 1
    assert ended.err.count("\n") == 1


def test_memory_that_does_not_suffice_is_refused_in_words(here: Here, tiny: Path, text: Path) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *SMALL, "--memory-limit", "600KiB", "--device", "cpu")
    assert ended.code == 1, ended
    assert ended.out == ""
    assert "budget" in ended.err


def test_eval_alone_shows_its_help(here: Here) -> None:
    ended = here("eval")
    assert ended.code == 0
    assert re.search(r"│ kv +\S", ended.out)
