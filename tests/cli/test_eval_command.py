"""`holdfast eval`: a table, a record and a page of a text; progress; and whatever can be typed wrong, reported in one line."""

import errno
import io
import json
import re
import signal
from contextlib import redirect_stderr
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open

import doc_tables
from cli.cli_models import Ended, Here, make_model, run_apart
from cli.eval_qualities import BROKEN, FEW, FP8, view
from cli.page_reader import Element, read_page
from holdfast.cli import eval as eval_command
from holdfast.cli.eval import TOPICS, EvalBar, quality_record, read_schemes, topics_or_text
from holdfast.cli.tables import KV_PAGES
from holdfast.cli.terminal import INTERRUPTED, dumps
from holdfast.eval import kv_quality, quality
from holdfast.eval.quality import Quality
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from loading.packed.packed_models import MODELS, make_packed, plain_of
from loading.stored_models import make_stored

WORDS = "It is not known who first thought of it, but there it was. "


SMALL = ("--window", "48", "--tokens", "96", "--max-num-batched-tokens", "32", "--device", "cpu")
SMALL_KV = (*SMALL, "--kv-near-tokens", "0", "--recall", "none", "--answer-tokens", "0")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(WORDS * 20, encoding="utf-8")
    return path


def rows(out: str) -> dict[str, list[str]]:
    """The table's cells by format or scheme."""
    lines = out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(("format ", "scheme ")))
    split = [re.split(r"\s{2,}", line) for line in lines[start + 1 : lines.index("", start)]]
    return {name: cells for name, *cells in split}


class Run(NamedTuple):
    """One evaluation of every format: what it wrote, and where."""

    ended: Ended
    record: dict[str, Any]
    page: Element


@pytest.fixture(scope="module")
def reported(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("reported")
    record, html = folder / "record.json", folder / "page.html"
    ended = run_apart("eval", "kv", tiny, "--text", text, *SMALL_KV, "--json", record, "--html", html)
    assert ended.code == 0, ended
    return Run(ended, json.loads(record.read_text()), read_page(html.read_text(encoding="utf-8")))


def test_eval_kv_has_row_per_format_reference_first(reported: Run) -> None:
    found = rows(reported.ended.out)
    assert list(found) == list(KV_FORMATS)
    assert len(found["float32"]) == 4, "nothing is compared with itself"
    assert all(len(cells) == 10 for name, cells in found.items() if name != "float32")
    assert "2 windows of 48 tokens of book.txt, 94 predictions" in reported.ended.out
    assert "tokens/s" in reported.ended.err
    assert "\x1b" not in reported.ended.out


def test_eval_kv_record_and_page_match_table(reported: Run) -> None:
    made, found = reported.record, rows(reported.ended.out)
    assert [result["measure"] for result in made["results"]] == list(found)
    fp8 = next(result for result in made["results"] if result["measure"] == "fp8")
    assert fp8["num_predictions"] == 94
    assert made["results"][0]["mean_kl"] == 0 < fp8["mean_kl"]
    assert (made["window"], made["num_windows"], made["text"]) == (48, 2, "book.txt")
    assert re.fullmatch(r"[0-9a-f]{64}", made["text_sha256"])
    assert f"{fp8['perplexity']:.4f} ±{fp8['perplexity_error']:.2g}" in found["fp8"]
    cells = [[cell.text for cell in row.all("td")] for row in reported.page.all("tbody")[0].all("tr")]
    assert {name: own for name, *own in cells}["fp8"] == found["fp8"]
    assert "page written to" in reported.ended.err
    assert "record written to" in reported.ended.err


def test_eval_kv_formats_deduplicates_and_writes_json_to_stdout(
    here: Here, tiny: Path, text: Path, reported: Run
) -> None:
    requested = " bfloat16,turboquant_3bit_nc, bfloat16,float32"
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, "--formats", requested, "--json", "-")
    assert "turboquant_3bit_nc" in ended.err, "the table gives way to the record"
    made = json.loads(ended.out)
    assert made["command"].startswith("holdfast eval kv ")
    assert [result["measure"] for result in made["results"]] == ["float32", "bfloat16", "turboquant_3bit_nc"]
    before = {result["measure"]: result for result in reported.record["results"]}
    for result in made["results"]:
        assert {**result, "seconds": 0} == {**before[result["measure"]], "seconds": 0}, "in other company"


def test_eval_kv_fewer_tokens_than_window_reads_one_window(here: Here, tiny: Path, text: Path, reported: Run) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, "--tokens", "20", "--formats", "float16")
    assert "one window of 48 tokens" in ended.out
    assert "reading 48 tokens, not 20: one window is the minimum" in ended.err
    assert "tokens are read, not" not in reported.ended.err


def test_eval_kv_near_tokens_make_a_window_of_one_block_exact(
    here: Here, tiny: Path, text: Path, reported: Run
) -> None:
    """The bytes of a token stay; what else a sequence holds does not grow with it."""
    requested = ("--formats", "fp8,turboquant_3bit_nc", "--kv-near-tokens", "64")
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, *requested, "--json", "-")
    assert ended.code == 0, ended
    record = json.loads(ended.out)
    assert "near blocks of 64 tokens" in record["settings"]
    assert "no near tokens" in reported.record["settings"]
    before = {result["measure"]: result for result in reported.record["results"]}
    found = {result["measure"]: result for result in record["results"]}
    assert found["float32"]["perplexity"] == before["float32"]["perplexity"]
    assert found["fp8"]["bytes_per_token"] == before["fp8"]["bytes_per_token"]
    for name in ("fp8", "turboquant_3bit_nc"):
        assert found[name]["mean_kl"] < 1e-6 < before[name]["mean_kl"]
    exact = "the first 16 tokens and the newest block of 64 tokens in float32"
    assert [line.partition(", up to ")[::2] for line in ended.err.splitlines()[-2:]] == [
        (exact, "45.00 KiB a sequence: fp8"),
        (exact, "80.00 KiB a sequence: turboquant_3bit_nc"),
    ]


def test_eval_kv_key_scale_keeps_bytes_and_names_scaled_formats(
    here: Here, tiny: Path, text: Path, reported: Run
) -> None:
    """Windows of 64 tokens hold the shortest text that scales are measured on; fp8 has none."""
    requested = ("--formats", "fp8,turboquant_3bit_nc", "--kv-key-scale", "--window", "64")
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, *requested, "--json", "-")
    assert ended.code == 0, ended
    record = json.loads(ended.out)
    assert "keys not scaled" not in record["settings"]
    before = {result["measure"]: result for result in reported.record["results"]}
    found = {result["measure"]: result for result in record["results"]}
    assert found["fp8"]["bytes_per_token"] == before["fp8"]["bytes_per_token"]
    assert "keys scaled by pair: turboquant_3bit_nc" in ended.err
    assert "scales no key" not in ended.err


def test_eval_kv_protected_layers_count_in_bytes_per_token(here: Here, tiny: Path, text: Path) -> None:
    def bytes_with(layers: str) -> list[str]:
        requested = ("--formats", "float16,fp8,turboquant_4bit_nc", "--kv-protected-layers", layers, "--tokens", "48")
        ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, *requested)
        assert ended.code == 0, ended
        notes.append(ended.out.splitlines()[-1])
        return [cells[0] for cells in rows(ended.out).values()]

    notes: list[str] = []
    assert bytes_with("0") == ["512", "256", "144", "80"]
    assert bytes_with("1,") == ["512", "256", "144", "112"]
    assert notes[0].startswith("KL: ")
    assert notes[1] == "layers 1 in fp8: turboquant_4bit_nc"


def test_eval_kv_unquantizable_model_keeps_plain_formats(here: Here, tmp_path: Path, text: Path) -> None:
    odd = make_model(tmp_path / "odd", head_dim=24)
    ended = here("eval", "kv", odd, "--text", text, *SMALL_KV)
    assert list(rows(ended.out)) == ["float32", "float16", "bfloat16"]
    assert ended.err.count("skipping ") == len(KV_FORMATS) - 3
    refused = here("eval", "kv", odd, "--text", text, *SMALL_KV, "--formats", "fp8")
    assert refused.code in (1, 2)
    assert refused.out == ""
    assert re.match("error: .* 24", refused.err.splitlines()[-1]), refused


REFUSED = [
    (("--formats", "turboquant_4bit"), "Did you mean turboquant_4bit_nc?"),
    (("--formats", "fp8,int7"), "value.not_one_of"),
    (("--formats", ","), "value.not_one_of"),
    (("--window", "1"), "--window"),
    (("--window", "long"), "value.out_of_range"),
    (("--window", "auto"), "value.out_of_range"),
    (("--window", "1200"), "1180"),
    (("--tokens", "0"), "--tokens"),
    (("--tokens", "many"), "value.too_small"),
    (("--json", "no/such/folder/record.json"), "its folder does not exist"),
    (("--html", "no/such/folder/page.html"), "its folder does not exist"),
    (("--recall", "64"), "eval.bad_recall"),
    (("--recall", "many"), "cli.bad_counts"),
    (("--recall", "200,300,400,500,600,700,800,900,1000"), "eval.bad_recall"),
    (("--answer-tokens", "-1"), "--answer-tokens"),
    (("--answer-tokens", "1M"), "value.out_of_range"),
    (("--kv-protected-layers", "0,0"), "layers"),
    (("--dtype", "int3"), "dtype"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_eval_kv_refuses_bad_options(here: Here, tiny: Path, text: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *options, "--device", "cpu")
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert ended.refuses(words), ended


def test_eval_kv_without_text_reads_python_topics(here: Here, tiny: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    ended = here("eval", "kv", tiny, "--quick", "--device", "cpu", *SMALL[:4], "--answer-tokens", "3", "--html", html)
    assert ended.code == 0, ended
    assert f"2 windows of 48 tokens of {TOPICS}, 94 predictions" in ended.out
    assert list(rows(ended.out)) == ["float32", "fp8", "turboquant_4bit_nc"], "two formats"
    assert rows(ended.out)["fp8"][-1].endswith(" of 3"), "chats do not fit, continuations do"
    assert "turboquant_4bit_nc: perplexity " in ended.err, "each format is reported when it is done"
    assert "never different" in html.read_text(encoding="utf-8")


def test_eval_kv_recall_needs_context_for_distance(here: Here, tiny: Path, text: Path) -> None:
    options = ("--text", text, *SMALL, "--answer-tokens", "0", "--formats", "fp8", "--recall", "128,4K")
    ended = here("eval", "kv", tiny, *options)
    assert ended.code == 0, ended
    assert "recall 4K" not in ended.out, "the context has 256 tokens"


def test_eval_kv_interrupt_keeps_complete_formats(
    here: Here, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: Run
) -> None:
    record, html = tmp_path / "record.json", tmp_path / "page.html"
    real, measured = kv_quality.measure_against, []

    def interrupted(reading, contender, on_halves):
        measured.append(contender.name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(reading, contender, on_halves)

    monkeypatch.setattr(kv_quality, "measure_against", interrupted)
    formats = ("--formats", "fp8,turboquant_k8v4,bfloat16")
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, *formats, "--json", record, "--html", html)
    assert ended.code == INTERRUPTED
    assert list(rows(ended.out)) == ["float32", "fp8"]
    assert rows(ended.out)["fp8"][:-1] == rows(reported.ended.out)["fp8"][:-1]
    assert "interrupted: turboquant_k8v4, bfloat16 not measured" in ended.err.splitlines()
    made = json.loads(record.read_text())
    assert made["missing"] == ["turboquant_k8v4", "bfloat16"]
    assert [result["measure"] for result in made["results"]] == ["float32", "fp8"]
    assert "Interrupted; not measured: turboquant_k8v4, bfloat16" in html.read_text(encoding="utf-8")


def test_eval_kv_second_interrupt_waits_for_table_and_record(
    here: Here, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the weights are released."""
    record = tmp_path / "record.json"
    real_measure, real_table = kv_quality.measure_against, eval_command.quality_lines

    def interrupted(reading, contender, on_halves):
        if contender.name == "turboquant_k8v4":
            signal.raise_signal(signal.SIGINT)
        return real_measure(reading, contender, on_halves)

    def interrupted_again(view):
        signal.raise_signal(signal.SIGINT)
        return real_table(view)

    monkeypatch.setattr(kv_quality, "measure_against", interrupted)
    monkeypatch.setattr(eval_command, "quality_lines", interrupted_again)
    formats = ("--formats", "fp8,turboquant_k8v4")
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, *formats, "--json", record)
    assert ended.code == INTERRUPTED
    assert list(rows(ended.out)) == ["float32", "fp8"]
    assert json.loads(record.read_text())["missing"] == ["turboquant_k8v4"]
    assert "stopping: results that are complete are written" in ended.err.splitlines()


def test_eval_kv_full_disk_costs_the_page_alone(
    here: Here, tiny: Path, text: Path, tmp_path: Path, monkeypatch
) -> None:
    def full(file, page):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(eval_command, "write_page", full)
    record, html = tmp_path / "record.json", tmp_path / "page.html"
    outputs = ("--json", record, "--html", html)
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, "--formats", "fp8", *outputs)
    assert ended.code == 0
    assert list(rows(ended.out)) == ["float32", "fp8"]
    assert [result["measure"] for result in json.loads(record.read_text())["results"]] == ["float32", "fp8"]
    assert f"page not written to {html}: No space left on device" in ended.err


def test_eval_kv_window_within_near_tokens_is_reported(here: Here, tiny: Path, text: Path) -> None:
    requested = ("--formats", "turboquant_3bit_nc", "--kv-near-tokens", "64")
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, *requested)
    assert "windows of 48 tokens lie within the newest block of 64 tokens" in ended.err


def test_eval_kv_interrupt_before_reference_has_no_table(
    here: Here, tiny: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self, on_halves):
        raise KeyboardInterrupt

    monkeypatch.setattr(kv_quality.ReferenceReading, "read", interrupted)
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, "--formats", "fp8")
    assert (ended.code, ended.out) == (INTERRUPTED, "")
    assert ended.err.splitlines()[-1] == "interrupted"


def test_eval_kv_reports_bound_on_kept_states(
    here: Here, tiny: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "MAX_HIDDEN_BYTES", 48 * 64 * 4)
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, "--formats", "float16")
    assert "one window of 48 tokens" in ended.out
    assert "reading 1 of 2 windows: " in ended.err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"caf\xe9 " * 100, "byte 3, 0xe9, is not UTF-8"),
        (b"", "eval.short_text"),
        (b"ab", "eval.short_text"),
    ],
    ids=["latin", "empty", "short"],
)
def test_eval_kv_invalid_text_is_refused(here: Here, tiny: Path, tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    ended = here("eval", "kv", tiny, "--text", path, "--device", "cpu")
    assert (ended.code, ended.out) == (2, "")
    assert ended.refuses(words), ended
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", ["nothing.txt", "", "a\0b", "x" * 5000, "~nobody_at_all/t.txt", "."])
def test_eval_kv_unreadable_text_file_is_refused(
    here: Here, tiny: Path, tmp_path: Path, name: str, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = here("eval", "kv", tiny, "--text", name)
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1
    assert ended.refuses("eval.bad_text")


def test_eval_kv_oversized_text_is_refused(here: Here, tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr(eval_command, "MAX_TEXT_BYTES", 2**20)
    ended = here("eval", "kv", tiny, "--text", "/dev/zero")
    assert ended.code == 2
    assert "it is larger than 1 MiB" in ended.err


def test_read_text_strips_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert eval_command.read_text(str(path)) == "abc"


def test_eval_kv_missing_model_prints_one_line(here: Here, tmp_path: Path, text: Path) -> None:
    ended = here("eval", "kv", tmp_path / "nothing", "--text", text)
    assert ended.code == 1
    assert ended.err.count("\n") == 1


def test_eval_kv_over_memory_limit_is_refused(here: Here, tiny: Path, text: Path) -> None:
    ended = here("eval", "kv", tiny, "--text", text, *SMALL_KV, "--memory-limit", "600KiB")
    assert ended.code == 1, ended
    assert ended.out == ""
    assert "budget" in ended.err


def test_eval_weights_has_row_per_runnable_scheme(here: Here, tiny: Path) -> None:
    ended = here("eval", "weights", tiny, *SMALL)
    assert ended.code == 0, ended
    found = rows(ended.out)
    assert list(found) == ["float32", "fp8", "fp8_tensor", "fp8_block", "int8"]
    assert "skipping mxfp4: " in ended.err
    assert len(found["float32"]) == 4, "nothing is compared with itself"
    assert all(len(cells) == 10 for name, cells in found.items() if name != "float32")
    assert f"2 windows of 48 tokens of {TOPICS}, 94 predictions" in ended.out
    assert "from that of weights in float32, in nats" in ended.out
    assert [line for line in ended.err.splitlines() if line.startswith("Loading ")] == [
        f"Loading {tiny.name} in {name}" for name in found
    ]


def test_eval_weights_record_and_page_match_table(here: Here, tiny: Path, tmp_path: Path) -> None:
    text, record, html = tmp_path / "book.txt", tmp_path / "record.json", tmp_path / "page.html"
    text.write_text("It is not known who first thought of it, but there it was. " * 20)
    options = ("--schemes", "int8", "--text", text, "--json", record, "--html", html, "--dtype", "bfloat16")
    ended = here("eval", "weights", tiny, *SMALL, *options, "--quantization-ignore", "*q_proj*", "--tokens", "20")
    assert ended.code == 0, ended
    assert "reading 48 tokens, not 20: one window is the minimum" in ended.err
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


def test_eval_weights_names_stored_scheme_as_reference(here: Here, tmp_path: Path) -> None:
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
    assert "stored stores its weights in fp8_block. Leave --schemes out" in ended.err


def test_eval_weights_files_compare_versions_of_one_model(here: Here, tmp_path: Path) -> None:
    """A packed file equals the model with its dequantized weights, at a fraction of the bytes."""
    packed = make_packed(tmp_path / "awq", *MODELS["awq"])
    plain = plain_of(packed)
    ended = here("eval", "weights", plain, *SMALL, "--files", packed, "--json", "-")
    assert ended.code == 0, ended
    reference, found = json.loads(ended.out)["results"]
    assert (reference["measure"], found["measure"]) == ("float32", "awq")
    assert abs(found["mean_kl"]) < 1e-9
    with safe_open(packed / "model.safetensors", "pt") as tensors:
        num_bytes = sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    assert found["weight_bytes"] == num_bytes < reference["weight_bytes"]
    both = here("eval", "weights", packed, *SMALL, "--files", plain, "--schemes", "int8")
    assert list(rows(both.out)) == ["float32", "int8", plain.name]


def test_eval_weights_files_of_another_model_are_refused(here: Here, tiny: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", num_hidden_layers=4)
    ended = here("eval", "weights", tiny, *SMALL, "--files", other)
    assert ended.code == 2
    assert "is not the same model as model: its num_layers is 4, not" in ended.err
    assert "Loading" not in ended.err, "headers are enough"
    for files in (",", "nothing"):
        assert here("eval", "weights", tiny, *SMALL, "--files", files).code != 0


REFUSED_SCHEMES = [
    (("--schemes", "fp9"), "fp9"),
    (("--schemes", "int8,mxfp"), "mxfp4"),
    (("--schemes", ","), "--schemes"),
    (("--schemes", "mxfp4"), "112 columns"),
    (("--schemes", "fp8", "--quantization-ignore", "*down_porj*"), "*down_proj*"),
    (("--quantization-ignore", "re:("), "re:("),
    (("--quantized-embeddings", "heads"), "head"),
    (("--window", "1"), "--window"),
    (("--tokens", "none"), "value.too_small"),
    (("--json", "no/such/folder/record.json"), "its folder does not exist"),
    (("--html", "no/such/folder/page.html"), "its folder does not exist"),
    (("--text", "nothing.txt"), "eval.bad_text"),
]


@pytest.mark.parametrize(
    ("options", "words"), REFUSED_SCHEMES, ids=[" ".join(options) for options, _ in REFUSED_SCHEMES]
)
def test_eval_weights_refuses_bad_options(here: Here, tiny: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("eval", "weights", tiny, *SMALL, *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.refuses(words), ended


def test_read_schemes_deduplicates_and_all_is_none() -> None:
    assert read_schemes("ALL") is None
    assert read_schemes(" fp8, mxfp4,fp8") == ("fp8", "mxfp4")
    assert read_schemes(",".join(WEIGHT_SCHEMES)) == tuple(WEIGHT_SCHEMES)


def test_topics_or_text_defaults_to_bundled_text(tmp_path: Path) -> None:
    text, name = topics_or_text(None)
    assert name == TOPICS
    assert len(text) > 100_000
    (tmp_path / "own.txt").write_text("abc")
    assert topics_or_text(str(tmp_path / "own.txt")) == ("abc", "own.txt")


def test_eval_bar_prints_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with EvalBar() as bar:
        for done in range(0, 2001, 5):
            bar(done, 2000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("read 200 of 2,000 tokens, ")
    assert lines[-1].startswith("read 2,000 of 2,000 tokens, ")
    assert lines[-1].endswith(" 0 s left")
    assert all(" tokens/s, " in line for line in lines)


def test_eval_bar_few_steps_print_no_line_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with EvalBar() as bar:
        for done in (0, 3, 4, 4, 10, 10):
            bar(done, 10)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_eval_bar_accepts_zero_tokens() -> None:
    with EvalBar() as bar:
        bar(0, 0)


class Watched(io.StringIO):
    """A stderr that a caller watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("_terminal")
def test_eval_bar_at_terminal_shows_speed_and_time_left() -> None:
    with redirect_stderr(Watched()) as stderr, EvalBar() as bar:
        bar(0, 100)
        bar(100, 100)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stderr.getvalue())
    assert re.search(r"Reading .*100/100 tokens, [1-9][0-9]* tokens/s, 0:00:00 left", shown), shown
    assert "read " not in shown, "the lines are for those who do not watch"


@pytest.mark.usefixtures("_terminal")
def test_eval_bar_restores_cursor_on_interrupt() -> None:
    with redirect_stderr(Watched()) as stderr, pytest.raises(KeyboardInterrupt), EvalBar():
        raise KeyboardInterrupt
    shown = stderr.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden and comes back"


def written(*qualities: Quality) -> dict:
    made = quality_record(view(*qualities), ["holdfast", "eval", "kv", "--text", "a b.txt"], {"more": 1})
    return json.loads(dumps(made, indent=1))


def test_eval_record_keeps_every_figure() -> None:
    record = written(FP8, FEW)
    assert [result["measure"] for result in record["results"]] == ["float32", "fp8", "turboquant_3bit_nc"]
    names = {field.name for field in fields(Quality)} - {"name", "size_bytes"} | {"bytes_per_token"}
    for result in record["results"]:
        assert names <= result.keys()
    fp8 = record["results"][1]
    assert fp8["values"] == {"mean_kl": 0.000512}
    assert fp8["kl_by_place"] == [0.0004, 0.0006]
    assert fp8["perplexity_change"] == pytest.approx(0.01)
    assert record["results"][2]["ratio_to_16_bit"] == 5.12
    assert (record["window"], record["num_windows"], record["reference"], record["more"]) == (1024, 2, "float32", 1)
    assert record["command"] == "holdfast eval kv --text 'a b.txt'"
    assert {"date", "machine", "versions", "commit", "cpu", "num_cores", "text"} <= record.keys()


def test_eval_record_is_readable_by_doc_tables(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(written(FP8)))
    assert doc_tables.read_record(path)["section"] == KV_PAGES.section
    assert doc_tables.records(tmp_path, None) == [], "it would be taken for a race of engines"


def test_eval_record_non_finite_values_are_null() -> None:
    result = written(BROKEN)["results"][1]
    assert result["mean_kl"] is result["perplexity"] is result["kl_by_place"][1] is None
    assert result["num_broken"] == 1023
