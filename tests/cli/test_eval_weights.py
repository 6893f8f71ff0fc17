"""`holdfast eval weights`: a table, a record and a page; and whatever can be typed wrong, told in one line."""

import json
from pathlib import Path

import pytest

from cli.cli_models import Here
from cli.page_reader import read_page
from holdfast.cli.eval_weights import TOPICS, read_schemes, topics_or_text
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from loading.stored_models import make_stored

SMALL = ("--window", "48", "--tokens", "96", "--max-num-batched-tokens", "32", "--device", "cpu")


def rows(out: str) -> dict[str, list[str]]:
    """The table's cells by scheme."""
    lines = out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("scheme "))
    return {line.split()[0]: line.split()[1:] for line in lines[start + 1 : lines.index("", start)]}


def test_every_scheme_that_can_run_has_a_row(here: Here, tiny: Path) -> None:
    ended = here("eval", "weights", tiny, *SMALL)
    assert ended.code == 0, ended
    found = rows(ended.out)
    assert list(found) == ["float32", "fp8", "fp8_tensor", "fp8_block", "int8"]
    assert "mxfp4 is left out: quantization=mxfp4 was asked; layers.0.down.weight" in ended.err
    assert len(found["float32"]) == 4, "nothing is compared with itself"
    assert all(len(cells) == 8 for name, cells in found.items() if name != "float32")
    assert f"2 windows of 48 tokens of {TOPICS}, 94 predictions" in ended.out
    assert "from that of weights in float32, in nats" in ended.out
    assert [line for line in ended.err.splitlines() if line.startswith("Loading ")] == [
        f"Loading {tiny.name} in {name}" for name in found
    ]


def test_less_than_a_window_is_one_window_and_says_so(here: Here, tiny: Path) -> None:
    ended = here("eval", "weights", tiny, *SMALL, "--tokens", "20", "--schemes", "int8")
    assert ended.code == 0, ended
    assert "48 tokens are read, not 20: one whole window is the least" in ended.err


def test_record_and_page_say_what_the_table_says(here: Here, tiny: Path, tmp_path: Path) -> None:
    text, record, html = tmp_path / "book.txt", tmp_path / "record.json", tmp_path / "page.html"
    text.write_text("It is not known who first thought of it, but there it was. " * 20)
    options = ("--schemes", "int8", "--text", text, "--json", record, "--html", html, "--dtype", "bfloat16")
    ended = here("eval", "weights", tiny, *SMALL, *options, "--quantization-ignore", "*q_proj*")
    assert ended.code == 0, ended
    made = json.loads(record.read_text())
    assert made["section"] == "weight-quality"
    assert [result["measure"] for result in made["results"]] == ["float32", "bfloat16", "int8"]
    full, half, int8 = made["results"]
    assert full["weight_bytes"] == pytest.approx(2 * half["weight_bytes"], rel=0.01)
    assert int8["weight_bytes"] < half["weight_bytes"] == made["plain_weight_bytes"]
    assert full["mean_kl"] == 0 < half["mean_kl"]
    assert "bytes_per_token" not in int8
    document = read_page(html.read_text(encoding="utf-8"))
    cells = [row.all("td") for row in document.all("tbody")[0].all("tr")]
    assert [cell.text for cell in cells[2]][1:] == rows(ended.out)["int8"]
    assert "bytes of all weights" in html.read_text(encoding="utf-8")


def test_the_reference_of_a_quantized_checkpoint_is_not_called_float32(here: Here, tmp_path: Path) -> None:
    stored, record, html = (tmp_path / name for name in ("stored", "record.json", "page.html"))
    make_stored(stored, "fp8_block", ("o_proj",))
    ended = here("eval", "weights", stored, *SMALL, "--json", record, "--html", html)
    assert ended.code == 0, ended
    label = "fp8_block as stored (float32)"
    assert f"\n{label} " in ended.out
    assert f"from that of weights in {label}, in nats" in ended.out
    made = json.loads(record.read_text())
    assert (made["reference"], made["results"][0]["measure"]) == (label, label)
    table = read_page(html.read_text(encoding="utf-8")).all("tbody")[0]
    assert [row.all("td")[0].text for row in table.all("tr")] == [label, "fp8_block"]
    ended = here("eval", "weights", stored, *SMALL, "--schemes", "mxfp4")
    assert ended.code == 2, ended
    assert "stored has its weights in fp8_block already; leave --schemes out" in ended.err


REFUSED = [
    (("--schemes", "fp9"), "--schemes 'fp9' was asked; the choices are none, fp8"),
    (("--schemes", "int8,mxfp"), "try mxfp4"),
    (("--schemes", ","), "the choices are none"),
    (("--schemes", "mxfp4"), "112 columns"),
    (("--schemes", "fp8", "--quantization-ignore", "*down_porj*"), "did you mean *down_proj*?"),
    (("--quantization-ignore", "re:("), "no regular expression"),
    (("--quantized-embeddings", "heads"), "try head"),
    (("--window", "1"), "--window '1' was asked"),
    (("--tokens", "none"), "write --tokens 16K"),
    (("--json", "no/such/folder/record.json"), "its folder does not exist"),
    (("--html", "no/such/folder/page.html"), "its folder does not exist"),
    (("--text", "nothing.txt"), "name a file of plain text"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_what_is_refused(here: Here, tiny: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("eval", "weights", tiny, *SMALL, *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert words in ended.err.splitlines()[-1]


def test_names_are_taken_once_and_all_is_none() -> None:
    assert read_schemes("ALL") is None
    assert read_schemes(" fp8, mxfp4,fp8") == ("fp8", "mxfp4")
    assert read_schemes(",".join(WEIGHT_SCHEMES)) == tuple(WEIGHT_SCHEMES)


def test_a_text_is_always_at_hand(tmp_path: Path) -> None:
    text, name = topics_or_text(None)
    assert name == TOPICS
    assert len(text) > 100_000
    (tmp_path / "own.txt").write_text("abc")
    assert topics_or_text(str(tmp_path / "own.txt")) == ("abc", "own.txt")
