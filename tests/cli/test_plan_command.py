"""`holdfast plan`: exit codes, JSON, pages, and every wrong word reported in one line that says what would work."""

import builtins
import json
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.cli_models import Here, finish, make_model, refuse, start
from cli.page_reader import read_page
from error_codes import raises_code
from holdfast.api.llm import LLM
from holdfast.cli.plan import PlanOptions, read_plan, read_target
from holdfast.errors import ConfigError
from holdfast.loading.declared import open_declared
from holdfast.loading.model_files import find_default_model
from holdfast.memory.devices import GPUS
from holdfast.memory.planner import KV_OWNER
from holdfast.models.catalogue import CATALOGUE
from holdfast.quant.formats import KV_FORMATS


def record(here: Here, *arguments: object, code: int = 0) -> dict:
    ended = here("plan", *arguments, "--json")
    assert (ended.code, ended.err) == (code, ""), ended
    return json.loads(ended.out, parse_constant=refuse)


def test_plan_that_fits_prints_verdict_and_serve_command(here: Here) -> None:
    ended = here("plan", "Qwen3-32B", "--gpu", "h200")
    assert (ended.code, ended.err) == (0, "")
    first, requested, blank, title, command, *_ = ended.out.splitlines()
    assert first.startswith("YES: 25")
    assert requested.startswith("Qwen3-32B on NVIDIA H200: weights in bfloat16")
    assert (blank, title.partition(":")[0], command) == ("", "to serve it", "  holdfast serve Qwen/Qwen3-32B")
    assert "KV cache size: " in ended.out
    assert "\x1b" not in ended.out


def test_plan_over_budget_exits_one_with_shortfall(here: Here) -> None:
    ended = here("plan", "Llama-3.1-70B", "--gpu", "rtx4090")
    assert (ended.code, ended.err) == (1, "")
    assert re.fullmatch(r"NO: [\d.]+ GiB short on rtx4090", ended.out.splitlines()[0])
    assert "what fits best: share it among 2 GPUs with weights in mxfp4, " in ended.out
    found = record(here, "Llama-3.1-70B", "--gpu", "rtx4090", code=1)
    assert found["fits"] is False
    assert found["kv_tokens"] == 0
    assert found["short_bytes"] == max(found["phases"].values()) - found["budget"]["bytes"] > 0
    assert [way["is_smallest"] for way in found["alternatives"]].count(True) == 1


def test_plan_smallest_change_is_longest_context_that_fits(here: Here) -> None:
    requested = ("Qwen3-8B", "--memory", "24GiB", "--max-num-seqs", "8")
    refused = record(here, *requested, "--max-model-len", "100000", code=1)
    smallest = next(way for way in refused["alternatives"] if way["is_smallest"])
    assert smallest["option"] == "max_model_len"
    assert record(here, *requested, "--max-model-len", smallest["value"])["kv_tokens"] == smallest["kv_tokens"]
    assert record(here, *requested, "--max-model-len", int(smallest["value"]) + 16, code=1)["fits"] is False


ADVISED = [
    ("Qwen3-8B", "--gpu", "h200"),
    ("Qwen3-30B-A3B", "--memory", "17.3GiB", "--kv-cache-dtype", "fp8"),
    *(
        pytest.param(requested, marks=pytest.mark.slow)
        for requested in (
            ("Llama-3.1-8B", "--gpu", "rtx3060"),
            ("Qwen3-32B", "--gpu", "rtx4090", "--quantization", "mxfp4"),
            ("Qwen3-32B", "--gpu", "rtx4090", "--max-model-len", "32K"),
        )
    ),
]


@pytest.mark.parametrize("requested", ADVISED, ids=" ".join)
def test_plan_advised_commands_give_promised_tokens(here: Here, requested: tuple[str, ...]) -> None:
    ended = here("plan", *requested, "--json")
    ways = [way for way in json.loads(ended.out)["alternatives"] if way["fits"]]
    assert ways
    for way in ways:
        program, command, *rest = shlex.split(way["command"])
        assert (program, command) == ("holdfast", "plan")
        found = record(here, *rest)
        assert (found["kv_tokens"], found["max_model_len"]) == (way["kv_tokens"], way["max_model_len"]), way["command"]


def test_plan_that_does_not_fit_names_the_best_command_first(here: Here) -> None:
    """The figure of the issue: mxfp4 alone gives 5,088 tokens, with settings that cost no quality 17,456."""
    out = here("plan", "Qwen3-32B", "--gpu", "rtx4090").out
    title, command = out.splitlines()[3:5]
    assert title.startswith("what fits best: keep weights in mxfp4 with 0.98 of the memory")
    assert "17,456 tokens" in title
    options = shlex.split(command)
    assert options[:3] == ["holdfast", "serve", "Qwen/Qwen3-32B"]
    assert here("plan", "Qwen3-32B", "--gpu", "rtx4090", *options[3:]).out.startswith("YES: 17,456 tokens")


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (("Qwen3-8B", "--gpu", "v100-32g"), "this version does not run on v100-32g; it would fit: "),
        (("GLM-4.5", "--gpu", "h200"), "this version does not run GLM-4.5; nor does it fit: "),
    ],
)
def test_plan_that_cannot_start_exits_with_three(here: Here, requested: tuple[str, ...], words: str) -> None:
    ended = here("plan", *requested)
    assert ended.code == 3
    assert ended.out.startswith("CANNOT START: ")
    assert words in ended.out.splitlines()[0]
    assert "holdfast " not in ended.out
    found = record(here, *requested, code=3)
    assert (found["status"], found["best_command"], found["command"]) == ("cannot_start", None, None)
    assert found["not_in_this_version"][0] in ended.out


def test_plan_for_chat_assumes_one_sequence(here: Here) -> None:
    serve, chat, run = (
        record(here, "Qwen3-8B", "--gpu", "rtx4090", "--for", name) for name in ("serve", "chat", "run")
    )
    assert (serve["for"], chat["for"], run["for"]) == ("serve", "chat", "run")
    assert chat["kv_tokens"] == run["kv_tokens"] > serve["kv_tokens"]
    assert chat["best_command"] == "holdfast chat Qwen/Qwen3-8B"
    assert run["best_command"] == "holdfast run Qwen/Qwen3-8B -p Hello"
    assert record(here, "Qwen3-8B", "--gpu", "rtx4090")["for"] == "serve"
    four = record(here, "Qwen3-8B", "--gpu", "rtx4090", "--for", "chat", "--max-num-seqs", "4")
    assert four["best_command"] == "holdfast chat Qwen/Qwen3-8B --max-num-seqs 4"
    assert all("--for chat" in way["command"] for way in chat["alternatives"])


def test_plan_that_fits_one_chat_alone_says_so(here: Here) -> None:
    requested = ("Qwen3-8B", "--memory", "18.76GiB", "--max-model-len", "256")
    assert record(here, *requested, "--for", "serve", code=1)["status"] == "does_not_fit"
    found = record(here, *requested)
    assert (found["status"], found["for"]) == ("fits", "chat")
    assert found["verdict"].startswith(f"YES, for one chat: {found['kv_tokens']:,} tokens")
    assert found["choices"][0] == {
        "name": "for",
        "value": "chat",
        "reason": "one sequence fits, and up to 256 at once do not",
    }
    assert found["best_command"] == "holdfast chat Qwen/Qwen3-8B --max-model-len 256"
    out = here("plan", *requested).out
    assert "to serve it: raise memory_utilization to 0.98" in out
    assert "--max-num-seqs 256" not in out
    assert record(here, *requested, "--max-num-seqs", "256", code=1)["for"] == "serve", "a requested number stays"


def test_plan_folds_small_owners_unless_all_are_requested(here: Here) -> None:
    requested = ("plan", "Qwen3-8B", "--gpu", "rtx4090")
    folded, all_owners = here(*requested).out, here(*requested, "--owners").out
    assert re.search(r"^\d+ small owners +[\d.]+ MiB", folded, re.MULTILINE)
    assert "small owners" not in all_owners
    assert "workspace of cuBLAS" in all_owners
    assert "workspace of cuBLAS" not in folded


def test_plan_for_an_unknown_command_is_refused(here: Here) -> None:
    ended = here("plan", "Qwen3-8B", "--gpu", "h200", "--for", "bench")
    assert (ended.code, ended.out) == (2, "")
    assert ended.refuses("value.not_one_of")


def test_plan_json_has_only_documented_names(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(here, "Qwen3-8B", "--gpu", "h100", "--sweep")
    monkeypatch.setenv("COLUMNS", "400")
    shown = re.sub(r"\W+", " ", here("plan", "--help").out)
    assert all(re.search(rf"\b{name}\b", shown) for name in found), shown
    assert {cell["kv_cache_dtype"] for cell in found["sweep"]} >= {"bfloat16", "fp8"}
    assert "sweep" not in record(here, "Qwen3-8B", "--gpu", "h100")


QUICK = list(CATALOGUE)[::4]


@pytest.mark.parametrize(
    "model", [model if model in QUICK else pytest.param(model, marks=pytest.mark.slow) for model in CATALOGUE]
)
def test_plan_catalogue_model_has_exact_kv_bytes(here: Here, model: str) -> None:
    ended = here("plan", model, "--gpu", "h200", "--json")
    found = json.loads(ended.out)
    assert ended.code == (3 if found["not_in_this_version"] else 0 if found["fits"] else 1)
    assert found["model"] == model
    exact = open_declared(model).kv_bytes_per_token("bfloat16" if model != "OPT-125m" else "float16")
    assert found["kv_bytes_per_token"] == exact


@pytest.mark.parametrize("gpu", GPUS)
def test_read_target_knows_every_gpu(gpu: str) -> None:
    assert read_target(PlanOptions(gpu=gpu)).total_bytes == GPUS[gpu].total_bytes


def test_plan_accepts_folder_file_or_default_model(here: Here, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "A model")
    (folder / "model.safetensors").unlink()
    found = record(here, folder, "--memory", "4GiB")
    assert found["model"] == "A model"
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert f"'{folder}'" in found["command"]
    default = record(here)
    assert default["model"] == find_default_model().stem
    assert record(here, find_default_model())["kv_bytes_per_token"] == default["kv_bytes_per_token"]


def test_plan_without_device_is_for_this_cpu(here: Here) -> None:
    ended = here("plan", "--max-model-len", "128", "--max-num-seqs", "1")
    assert ended.code == 0
    assert "on the CPU of this machine" in ended.out.splitlines()[1]
    assert "this is a plan for the CPU of this machine" in ended.out.splitlines()[-1]
    assert "--device cpu" in ended.out
    assert "this is a plan for the CPU" not in here("plan", "Qwen3-8B", "--memory", "80GiB").out


def test_plan_options_change_plan(here: Here) -> None:
    plain = record(here, "Qwen3-8B", "--gpu", "h100")
    for options in (
        ("--memory-utilization", "80%"),
        ("--dtype", "float32"),
        ("--max-num-batched-tokens", "16K"),
        ("--page-tokens", "256"),
        ("--quantization", "fp8"),
        ("--kv-cache-dtype", "turboquant_k8v4"),
        ("--kv-cache-dtype", "turboquant_k8v4", "--kv-protected-layers", "2", "--kv-protected-dtype", "auto"),
        ("--kv-cache-memory", "2GiB"),
        ("--enforce-eager",),
        ("--tensor-parallel-size", "2"),
        ("--max-num-seqs", "1"),
    ):
        assert record(here, "Qwen3-8B", "--gpu", "h100", *options)["phases"] != plain["phases"], options
    assert record(here, "Qwen3-8B", "--gpu", "h100", "--kv-cache-dtype", "auto") == plain
    for share in ("80%", "0.8"):
        found = record(here, "Qwen3-8B", "--gpu", "h100", "--memory-utilization", share)
        assert found["budget"]["bytes"] == int(GPUS["h100"].total_bytes * 0.8)


def test_plan_of_kv_cache_memory_equals_what_an_engine_holds(here: Here, tiny: Path) -> None:
    """8 KiB a page of 16 tokens: the bound is cut to whole pages, and an open context shrinks to them."""
    size = 5 * 8192 + 100
    found = record(here, tiny, "--kv-cache-memory", f"{size}B")
    with LLM(str(tiny), device="cpu", kv_cache_memory=size) as llm:
        held = next(row for row in llm.memory.rows if row.owner == KV_OWNER)
        assert (held.planned_bytes, held.held_bytes) == (5 * 8192, 5 * 8192)
        assert (
            (llm.memory.kv_tokens, llm.memory.max_model_len) == (found["kv_tokens"], found["max_model_len"]) == (80, 80)
        )
    assert [term["bytes"] for term in found["terms"] if term["owner"] == KV_OWNER] == [held.planned_bytes]
    assert f"--kv-cache-memory {size}B" in found["command"]


def test_plan_of_too_little_kv_cache_memory_does_not_fit(here: Here, tiny: Path) -> None:
    requested = ("plan", tiny, "--kv-cache-memory", "80KiB", "--max-model-len", "161")
    ended = here(*requested)
    assert ended.code == 1
    assert ended.out.startswith("NO: 8.00 KiB short of kv_cache_memory on the CPU of this machine\n")
    assert "what fits best: leave out kv_cache_memory" in ended.out
    found = record(here, *requested[1:], code=1)
    assert (found["fits"], found["short_bytes"], found["kv_tokens"]) == (False, 8192, 0)
    first = next(item for item in found["alternatives"] if item["is_smallest"])
    assert first["change"] == "leave out kv_cache_memory"
    for command in (first["command"], found["command"]):
        assert "--kv-cache-memory" not in command
    assert record(here, *shlex.split(first["command"])[2:])["kv_tokens"] == first["kv_tokens"]


def test_quantized_pages_are_planned_to_be_run(here: Here) -> None:
    requested = ("Qwen3-32B", "--gpu", "h200", "--kv-cache-dtype", "turboquant_4bit_nc")
    found = record(here, *requested)
    assert found["not_in_this_version"] == []
    assert found["kv_bytes_per_token"] == 64 * 8 * 132
    choices = {choice["name"]: choice["value"] for choice in found["choices"]}
    assert (choices["kv_near_tokens"], choices["kv_protected_layers"], choices["page_tokens"]) == ("64", "0", "64")
    assert found["command"] == "holdfast serve Qwen/Qwen3-32B --kv-cache-dtype turboquant_4bit_nc"
    assert "KV pages in turboquant_4bit_nc," in here("plan", *requested).out.splitlines()[1]
    listed = record(here, *requested, "--kv-protected-layers", "0,1,63")
    assert listed["kv_bytes_per_token"] == 61 * 8 * 132 + 3 * 8 * 260
    assert "--kv-protected-layers 0,1,63" in listed["command"]
    bare = record(here, *requested, "--kv-protected-layers", "0")
    assert bare["kv_bytes_per_token"] == 64 * 8 * 132
    assert "--kv-protected-layers 0" in bare["command"]


def test_plan_unquantizable_head_dim_names_alternative(here: Here, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 24}))
    ended = here("plan", folder, "--memory", "4GiB", "--kv-cache-dtype", "fp8")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.refuses("families.format", option="kv_cache_dtype", value="fp8", works="bfloat16"), ended


def test_plan_help_lists_kv_formats(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    shown = here("plan", "--help").out
    assert all(name in shown for name in KV_FORMATS)
    assert "turboquant_k8v4 (8-bit keys, 4-bit values)" in shown
    assert "--kv-protected-layers" in shown
    assert "--kv-protected-dtype" in shown
    assert "--kv-cache-memory SIZE" in shown


def test_plan_memory_takes_decimal_and_binary_units(here: Here) -> None:
    sizes = {size: record(here, "Qwen3-0.6B", "--memory", size) for size in ("20GB", "20GiB", "20480MiB", "0.02TB")}
    assert sizes["20GiB"]["budget"]["bytes"] == int(20 * 2**30 * 0.9)
    assert sizes["20GB"]["budget"]["bytes"] == int(20 * 10**9 * 0.9)
    assert sizes["20480MiB"]["kv_tokens"] == sizes["20GiB"]["kv_tokens"]


BAD = [
    (("--memory", "0.5"), "memory"),
    (("--memory", "24"), "Did you mean 24GiB?"),
    (("--memory", "1.5"), "Did you mean 1.5GiB?"),
    (("--memory", "2KiB"), "cli.little_memory"),
    (("--memory", "110%"), "memory"),
    (("--memory", "-5GiB"), "memory"),
    (("--memory", "0"), "memory"),
    (("--memory", "0GiB"), "memory"),
    (("--memory", "9999999999TiB"), "memory"),
    (("--memory", "lots"), "memory"),
    (("--memory", ""), "memory"),
    (("--memory", "nan"), "memory"),
    (("--memory", "1e30GiB"), "memory"),
    (("--memory", "24GiB", "--gpu", "h200"), "cli.exclusive"),
    (("--gpu", "24GiB"), "cli.gpu_is_size"),
    (("--gpu", "80 GB"), "Use --memory 80 GB"),
    (("--gpu", "24"), "cli.gpu_is_size"),
    (("--gpu", "2x4090", "--tensor-parallel-size", "4"), "cli.exclusive"),
    (("--gpu", "3x4090"), "3"),
    (("--tensor-parallel-size", "auto"), "tensor_parallel_size"),
    (("--gpu", "h2000"), "h200"),
    (("--gpu", "rtx 409"), "rtx4090"),
    (("--gpu", ""), "--list"),
    (("--gpu", "\x1b[31mh"), "--memory"),
    (("--memory-utilization", "110%"), "memory_utilization"),
    (("--memory-utilization", "0"), "memory_utilization"),
    (("--memory-utilization", "-0.5"), "memory_utilization"),
    (("--memory-utilization", "1.5"), "memory_utilization"),
    (("--memory-utilization", "20GiB"), "memory_utilization"),
    (("--max-model-len", "0"), "max_model_len"),
    (("--max-model-len", "-4"), "max_model_len"),
    (("--max-model-len", "many"), "max_model_len"),
    (("--max-model-len", "999999999999999"), "max_model_len"),
    (("--max-num-seqs", "0"), "max_num_seqs"),
    (("--max-num-batched-tokens", "1.5"), "max_num_batched_tokens"),
    (("--page-tokens", "3"), "page_tokens"),
    (("--dtype", "float31"), "float32"),
    *(((f"--kv-cache-memory={size}",), "kv_cache_memory") for size in ("-1GiB", "lots", "", "50%")),
    (("--kv-cache-memory", "0"), "kv_cache_memory"),
    (("--kv-cache-dtype", "fp9"), "fp8"),
    (("--kv-cache-dtype", ""), "kv_cache_dtype"),
    (("--kv-protected-dtype", "fp9"), "fp8"),
    (("--kv-protected-layers", "first"), "kv_protected_layers"),
    (("--kv-protected-layers", "-1"), "kv_protected_layers"),
    (("--kv-protected-layers", "0,1,0"), "kv_protected_layers"),
    (("--kv-protected-layers", "99", "--kv-cache-dtype", "turboquant_k8v4"), "36"),
    (("--kv-protected-layers", "0,36", "--kv-cache-dtype", "turboquant_k8v4"), "35"),
    (("--kv-protected-layers", "4"), "kv_cache_dtype"),
    (
        ("--kv-protected-layers", "4", "--kv-cache-dtype", "fp8"),
        "kv_protected",
    ),
    (("--quantization", "fp88"), "fp8"),
    (("--tensor-parallel-size", "0"), "tensor_parallel_size"),
    (("--tensor-parallel-size", "-2"), "tensor_parallel_size"),
    (("--tensor-parallel-size", "two"), "tensor_parallel_size"),
    (("--tensor-parallel-size", "auto"), "tensor_parallel_size"),
    (("--tensor-parallel-size", "3"), "3"),
    (("--html", "no/such/folder/x.html"), "its folder does not exist"),
    (("--html", ""), "cli.bad_page_file"),
    (("--hmtl", "x"), "Did you mean --html"),
    (("--memory-limit", "20GiB"), "cli.unknown_option"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[" ".join(options)[:40] for options, _ in BAD])
def test_plan_invalid_values_print_one_error_line(here: Here, options: tuple[str, ...], words: str) -> None:
    ended = here("plan", "Qwen3-8B", *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("error: ")
    assert ended.refuses(words), ended
    assert "\x1b" not in ended.err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen3-33B", "Did you mean Qwen3-32B"),
        ("Qwen/Qwen3-31B", "Did you mean Qwen3-32B or Qwen3-30B-A3B"),
        ("xyzzy", "architecture.not_in_catalogue"),
        ("", "architecture.not_in_catalogue"),
        ("no/such/folder", "neither a path nor"),
        ("\x1b[31m", "neither a path nor"),
        ("x" * 5000, "neither a path nor"),
        ("/", "config.json"),
        ("/dev/null", "model.not_a_model"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_unknown_models_are_reported_in_one_line(here: Here, model: str, words: str) -> None:
    ended = here("plan", model, "--gpu", "h200")
    assert ended.code == 1, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1
    assert ended.refuses(words), ended
    assert len(ended.err) < 1500
    assert "\x1b" not in ended.err


def test_plan_unreachable_hub_suggests_catalogue_names(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    ended = here("plan", "Qwen/Qwen3-31B", "--gpu", "h200")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1), ended
    assert "cannot be reached" in ended.err
    assert "Did you mean Qwen3-32B or Qwen3-30B-A3B" in ended.err


def test_plan_malformed_config_prints_one_error_line(here: Here, tmp_path: Path) -> None:
    for name, text in (
        ("json", "{"),
        ("deep", "[" * 100_000),
        ("huge", '{"architectures": ["LlamaForCausalLM"], "vocab_size": 1e99}'),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(text)
        ended = here("plan", folder, "--gpu", "h200")
        assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1), ended


def test_plan_html_writes_valid_page(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    ended = here("plan", "Qwen3-8B", "--gpu", "rtx4090", "--html", file)
    assert ended.code == 0
    assert ended.err == f"page written to {file}\n"
    document = read_page(file.read_text(encoding="utf-8"))
    assert "Qwen3-8B" in document.all("h1")[0].text
    assert len(document.all("svg")) == 4
    quiet = here("plan", "Qwen3-8B", "--gpu", "rtx4090", "--html", file, "--json")
    assert quiet.err == ""
    assert json.loads(quiet.out)["fits"] is True


def test_plan_html_escapes_folder_name(here: Here, tmp_path: Path) -> None:
    folder, file = make_model(tmp_path / "<script>alert(1)<!--"), tmp_path / "plan.html"
    assert here("plan", folder, "--memory", "4GiB", "--html", file).code == 0
    document = read_page(file.read_text(encoding="utf-8"))
    assert len(document.all("script")) == 1


def test_plan_sweep_draws_chart(here: Here) -> None:
    out = here("plan", "Qwen3-8B", "--gpu", "rtx4090", "--sweep").out
    assert "KV tokens on NVIDIA GeForce RTX 4090" in out
    assert out.count("█") > 60


def test_plan_needs_no_torch_and_no_network() -> None:
    words = """
import builtins, socket, sys
real = builtins.__import__
def watched(name, *rest, **more):
    assert name.partition(".")[0] not in ("torch", "triton", "numpy", "transformers", "safetensors", "pydantic"), name
    return real(name, *rest, **more)
builtins.__import__ = watched
socket.socket = None
from holdfast.cli.app import run
codes = [run(["plan", "Qwen3-32B", "--gpu", "h200", "--json", "--sweep"]), run(["plan", "Qwen3-32B", "--gpu", "l4"])]
assert codes == [0, 1], codes
"""
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_plan_in_subprocess_sets_exit_codes() -> None:
    assert finish(start("plan", "Qwen3-8B", "--gpu", "h200", "--json")).code == 0
    refused = finish(start("plan", "Qwen3-32B", "--gpu", "l4"))
    assert (refused.code, refused.err) == (1, "")
    wrong = finish(start("plan", "Qwen3-8B", "--gpu", "h300"))
    assert wrong.code == 2
    assert wrong.err.count("\n") == 1
    assert "Traceback" not in wrong.err


def test_plan_closed_pipe_exits_141_silently() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        ended = finish(start("plan", "Qwen3-8B", "--gpu", "h200", "--sweep", stdout=closed))
    assert (ended.code, ended.err) == (141, "")


def test_plan_full_disk_reports_no_space(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        ended = finish(start("plan", "Qwen3-8B", "--gpu", "h200", stdout=full))
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert "No space left" in ended.err
    page = finish(start("plan", "Qwen3-8B", "--gpu", "h200", "--html", "/dev/full"))
    assert page.code == 1
    assert "No space left" in page.err


def test_plan_sweep_ascii_uses_plain_signs() -> None:
    ended = finish(start("plan", "Qwen3-8B", "--gpu", "rtx4090", "--sweep", env={"PYTHONIOENCODING": "ascii"}))
    assert ended.code == 0, ended
    assert "###" in ended.out
    assert ended.out.isascii()


def on_a_terminal(*arguments: str, **environment: str) -> bytes:
    """What a plan that fits shows there."""
    master, slave = pty.openpty()
    process = start("plan", *arguments, stdout=slave, env={"TERM": "xterm", "NO_COLOR": "", **environment})
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # no caller holds the other end any more
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    ended = finish(process)
    assert (ended.code, ended.err) == (0, ""), ended
    return shown


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_plan_any_terminal_width_shows_numbers(columns: str) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal("Qwen3-8B", "--gpu", "h200", COLUMNS=columns).decode())
    assert re.search(r"kv pages +- +[0-9.]+ GiB", shown), shown
    assert "KV cache size: " in shown


def shown_lines(shown: bytes) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


def test_plan_sweep_ascii_terminal_cuts_nothing() -> None:
    requested = ("Qwen3-8B", "--gpu", "rtx4090", "--sweep")
    shown = on_a_terminal(*requested, COLUMNS="60", PYTHONIOENCODING="ascii")
    assert shown.isascii()
    lines = shown_lines(shown)
    assert max(map(len, lines)) <= 60
    assert not any("~" in line for line in lines)
    # All that a wide terminal has is there; words of a cell may stand on lines of their own.
    signs = r"[#.\\]+"
    wide = shown_lines(on_a_terminal(*requested, COLUMNS="250", PYTHONIOENCODING="ascii"))
    words = {word for line in wide for word in line.split() if not re.fullmatch(signs, word)}
    assert not words - {word for line in lines for word in line.split()}


def test_plan_terminal_lines_fit_and_commands_stay_whole() -> None:
    shown = on_a_terminal("Qwen3-8B", "--gpu", "h200", "--max-model-len", "8192", COLUMNS="60")
    lines = shown_lines(shown)
    assert max(map(len, lines)) <= 60
    assert not any("…" in line for line in lines)
    first = next(place for place, line in enumerate(lines) if "holdfast serve" in line)
    last = next(place for place in range(first, len(lines)) if not lines[place].endswith("\\"))
    command = "\n".join(lines[first : last + 1]).replace("\\\n", "")  # as a shell reads it
    assert shlex.split(command) == shlex.split("holdfast serve Qwen/Qwen3-8B --max-model-len 8192"), (
        "what is continued is one command for a shell"
    )
    assert b"\x1b[" in shown


def test_read_target_reads_gpu_memory_or_cpu() -> None:
    assert read_target(PlanOptions(gpu="H100")).name == GPUS["h100"].name
    assert read_target(PlanOptions(memory="24GiB")).total_bytes == 24 * 2**30
    assert read_target(PlanOptions()).kind == "cpu"
    with pytest.raises(ConfigError, match="exclude each other"):
        read_target(PlanOptions(gpu="h100", memory="1GiB"))


def test_read_plan_checks_options_before_opening_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(builtins, "open", never)
    with raises_code("value.not_one_of", ConfigError, name="kv_cache_dtype", value="fp9"):
        read_plan(PlanOptions(model="no/such/model", gpu="h200"), {"kv_cache_dtype": "fp9"})
