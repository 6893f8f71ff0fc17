"""benchmarks/gpu_peers.py without a GPU: arithmetic, records, failures, and vLLM's side with a small module in its place."""

import fcntl
import io
import json
import lzma
import os
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import digests
import doc_tables
from holdfast.config import EngineConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_peers = import_module("gpu_peers")
gpu_records = import_module("gpu_records")
peer_case = import_module("peer_case")
OURS, PEER = gpu_peers.OURS, gpu_peers.PEER
GIB = 2**30
FAKE = """
import os, subprocess, sys
from pathlib import Path
__version__ = "9.9"
assert sys.path[0] == str(Path(__file__).parent.parent), sys.path
assert "holdfast" not in sys.modules
assert os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens
class Answer:
    def __init__(self, num_tokens):
        self.outputs = [type("Output", (), {{"token_ids": [0] * num_tokens}})()]
class LLM:
    def __init__(self, *, model, load_format, skip_tokenizer_init, dtype, max_model_len, max_num_seqs, **settings):
        assert (Path(model) / "config.json").is_file()
        self.most = max_model_len
    def generate(self, prompts, params, *, use_tqdm):
        assert all(len(prompt["prompt_token_ids"]) + params.max_tokens <= self.most for prompt in prompts)
        {work}
        return [Answer(params.max_tokens) for _ in prompts]
"""


def fake_site(folder: Path, work: str = "pass") -> Path:
    """Write a folder with a module that imitates vLLM."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(FAKE.format(work=work))
    return folder


def findings(**changes: Any) -> dict[str, Any]:
    """Findings of a complete engine: 80 and 160 tokens/s, 4,000 tokens/s of prefill, 500 ms to a first token."""
    decode = [
        {"batch": batch, "seconds": {"17": [1.5, 1.2], "81": [2.4, 2.0]}, "prompts": f"d{batch}"} for batch in (1, 2)
    ]
    prefill = [{"tokens": tokens, "seconds": [3.0, 2.0], "prompts": f"p{tokens}"} for tokens in (8000, 7000)]
    memory = {"before_bytes": GIB, "ready_bytes": 3 * GIB, "traffic_bytes": 4 * GIB}
    found = {"start_seconds": 12.34, "versions": {"torch": "2"}, "decode": decode, "prefill": prefill}
    return {**found, **memory, **changes}


CASE = gpu_peers.PeerCase(
    "Qwen3-32B", "fp8", {OURS: 1, PEER: 2}, {"max_model_len": 9000, "max_num_seqs": 2}, prefill_tokens=8000
)


def settings(out: Path, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"device": "cpu", "commit": "abc", "out": out, "tiny": True, "together": False, **changes})


def make_run(out: Path, engines: tuple[str, ...] = (OURS, PEER), site: Path | None = None, **changes: Any) -> Any:
    return gpu_peers.Run(settings(out, **changes), site, engines, gpu_peers.TINY, {}, {"32b-fp8": CASE})


# --- options and cases


@pytest.mark.parametrize("argv", [["--cases", "32b-bf16,none"], ["--only", "other"]])
def test_parse_unknown_name_exits(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_peers.parse(argv)


@pytest.mark.parametrize(
    ("only", "has_peer", "engines"),
    [(None, True, [OURS, PEER]), (None, False, [OURS]), (OURS, True, [OURS]), (PEER, True, [PEER]), (PEER, False, [])],
)
def test_engines_of_options_are_those_that_are_there(only: str | None, has_peer: bool, engines: list[str]) -> None:
    assert [*gpu_peers.engines_of(SimpleNamespace(only=only), Path() if has_peer else None)] == engines


@pytest.mark.parametrize("key", gpu_peers.CASES)
def test_peer_case_has_valid_settings_and_equal_limits(key: str, tmp_path: Path) -> None:
    case = gpu_peers.CASES[key]
    EngineConfig.from_options(**case.settings(OURS))
    tasks = [gpu_peers.task_of(case, engine, tmp_path, gpu_peers.FULL, "cpu") for engine in (OURS, PEER)]
    ours, theirs = (task.pop("options") for task in tasks)
    assert tasks[0] | {"engine": PEER} == tasks[1]
    assert {"max_model_len", "max_num_seqs"} <= ours.keys() & theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    assert json.loads(json.dumps(tasks)) == tasks


def test_prefills_beyond_context_are_left_out() -> None:
    case = CASE._replace(first_token_lengths=(2000, 8999, 9000))
    assert case.prefills == [8000, 2000, 8999]


def test_first_token_cases_reach_longest_context() -> None:
    case = gpu_peers.CASES["32b-k8v4-ttft"]
    assert case.prefills == [2_000, 15_000, 64_000, 128_000]
    assert case.shapes["rope_scaling"]["rope_type"] == "yarn"


# --- figures


def test_rows_of_both_engines_have_ratio() -> None:
    slower = [{"batch": 1, "seconds": {"17": [1.0], "81": [2.6]}, "prompts": "d1"}]
    rows = gpu_peers.rows_of(CASE, {OURS: findings(), PEER: findings(decode=slower, ready_bytes=5 * GIB)})
    assert {row["measure"].removeprefix("Qwen3-32B, fp8, "): (row["values"], row.get("ratio")) for row in rows} == {
        "start": ({OURS: 12.3, PEER: 12.3}, 1.0),
        "decode, batch 1": ({OURS: 80.0, PEER: 40.0}, 2.0),
        "decode, batch 2": ({OURS: 160.0}, None),
        "prefill of 8000 tokens": ({OURS: 4000.0, PEER: 4000.0}, 1.0),
        "first token after 7000 tokens": ({OURS: 2000.0, PEER: 2000.0}, 1.0),
        "memory after ready": ({OURS: 2.0, PEER: 4.0}, 0.5),
        "memory after traffic": ({OURS: 3.0, PEER: 3.0}, 1.0),
    }
    assert {row["unit"] for row in rows} == {"s", "tokens/s", "ms", "GiB"}


def test_figures_have_plan_and_allocations_of_holdfast() -> None:
    found = {"planned_bytes": 3 * GIB, "after_ready": {"allocations": 7, "reserved_bytes": 0}}
    figures = gpu_peers.figures_of(CASE, found)
    assert figures == {"planned memory": (3.0, "GiB"), "allocations after ready": (7, "allocations")}
    assert gpu_peers.figures_of(CASE, {"after_ready": {}}) == {}


def test_decode_without_difference_has_no_figure() -> None:
    equal = [{"batch": 1, "seconds": {"17": [1.0], "81": [1.0]}, "prompts": "d1"}]
    assert gpu_peers.figures_of(CASE, {"decode": equal}) == {}


def test_rows_of_failed_engine_keep_other_side() -> None:
    rows = gpu_peers.rows_of(CASE, {OURS: findings(), PEER: {"error": "no room", "start_seconds": 9.0}})
    assert [row["values"].keys() for row in rows] == [{OURS, PEER}] + [{OURS}] * 6


def test_rows_of_different_prompts_raise() -> None:
    other = [{"tokens": 8000, "seconds": [1.0], "prompts": "other"}]
    with pytest.raises(AssertionError, match="different prompts"):
        gpu_peers.rows_of(CASE, {OURS: findings(), PEER: findings(prefill=other)})


def test_printer_prints_each_measure_once(capsys) -> None:
    show = gpu_peers.printer("32b-fp8", OURS, CASE)
    show({"start_seconds": 1.0})
    show(findings(prefill=[], before_bytes=None))
    assert capsys.readouterr().out.splitlines() == [
        "32b-fp8, holdfast: start: 1 s",
        "32b-fp8, holdfast: decode, batch 1: 80 tokens/s",
        "32b-fp8, holdfast: decode, batch 2: 160 tokens/s",
    ]


def test_prompt_ids_depend_on_purpose_and_index() -> None:
    first = peer_case.prompt_ids("decode", 0, 30, 512)
    assert first == peer_case.prompt_ids("decode", 0, 30, 512)
    assert first != peer_case.prompt_ids("decode", 1, 30, 512)
    assert first != peer_case.prompt_ids("prefill 30", 0, 30, 512)
    assert all(0 <= token < 512 for token in first)


# --- the folder of vLLM


def write_parts(folder: Path, num_parts: int = 3) -> None:
    """Write two tar.xz archives, cut into parts that do not end where an archive ends."""
    archives = []
    for path, text in (("vllm/__init__.py", ""), ("vllm/more/kernel.so", "binary" * 100)):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
        archives.append(lzma.compress(out.getvalue()))
    joined = b"".join(archives)
    size = -(-len(joined) // num_parts)
    folder.mkdir()
    for index in range(num_parts):
        (folder / f"part-a{'abc'[index]}").write_bytes(joined[index * size : (index + 1) * size])
    (folder / "first_bytes").write_text(f"{len(archives[0])}\n")


def test_find_site_unpacks_parts_once(tmp_path: Path) -> None:
    write_parts(tmp_path / "bundle")
    site = gpu_peers.find_site(tmp_path / "bundle")
    assert site == tmp_path / "bundle-site"
    assert (site / "vllm" / "more" / "kernel.so").read_text() == "binary" * 100
    (tmp_path / "bundle" / "part-aa").write_bytes(b"broken")
    assert gpu_peers.find_site(tmp_path / "bundle") == site
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "bundle-site"]


def test_unpack_cut_off_leaves_no_folder(tmp_path: Path) -> None:
    write_parts(tmp_path / "bundle")
    (tmp_path / "bundle" / "part-ac").unlink()
    with pytest.raises((EOFError, lzma.LZMAError, tarfile.TarError)):
        gpu_peers.unpack(tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_find_site_without_vllm_returns_none(tmp_path: Path) -> None:
    assert gpu_peers.find_site(None) is None
    assert gpu_peers.find_site(tmp_path) is None
    assert gpu_peers.find_site(fake_site(tmp_path)) == tmp_path


# --- processes


def test_run_child_failed_keeps_findings(tmp_path: Path, capsys) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from pathlib import Path; from child_report import keep\n"
        "keep({'a': 1}, Path(sys.argv[-1])); time.sleep(0.2); raise ValueError('no room')\n"
    )
    seen: list[object] = []
    found = gpu_records.run_child([str(script)], 60, on_keep=seen.append)
    assert found == {"a": 1, "error": "ValueError: no room"}
    assert seen == [{"a": 1}]


def test_peer_process_runs_imitation_to_the_end(tmp_path: Path, capsys) -> None:
    case = gpu_peers.tiny_case(gpu_peers.CASES["32b-bf16"]._replace(first_token_lengths=(2000,)))
    run = make_run(tmp_path, site=fake_site(tmp_path / "site"))._replace(cases={"32b-bf16": case})
    found = gpu_peers.measure(run, "32b-bf16", PEER, gpu_records.Budget(60.0), None)
    assert "error" not in found
    assert found["versions"]["vllm"] == "9.9"
    assert [entry["batch"] for entry in found["decode"]] == [1, 3]
    assert [(entry["tokens"], len(entry["seconds"])) for entry in found["prefill"]] == [(40, 1), (16, 1), (100, 1)]
    assert "32b-bf16, vllm: prefill of 40 tokens: " in capsys.readouterr().out


def test_peers_together_measure_in_turn(tmp_path: Path, capsys) -> None:
    """Two imitations append their name to a log before and after each work; the log shows that they do not overlap."""
    log = tmp_path / "log"
    work = (
        "import time; name = str(os.getpid()); out = open('LOG', 'a'); print('in', name, file=out, flush=True); "
        "time.sleep(0.02); print('out', name, file=out, flush=True)"
    )
    site = fake_site(tmp_path / "site", work.replace("LOG", str(log)))
    case = gpu_peers.tiny_case(CASE)
    run = make_run(tmp_path, (PEER,), site, together=True)._replace(cases={"a": case, "b": case, "c": case})
    found = gpu_peers.measure_peers_together(run, gpu_records.Budget(100))
    assert all("error" not in findings and findings["decode"] for findings in found.values()), found
    names = [line.split() for line in log.read_text().splitlines()]
    assert [word for word, _ in names] == ["in", "out"] * (len(names) // 2)
    turns = [name for index, (_, name) in enumerate(names) if index == 0 or names[index - 1][1] != name]
    assert len(turns) == len(set(turns)) == 3


def test_turns_failed_engine_does_not_hold_others(tmp_path: Path) -> None:
    turns = gpu_peers.Turns({name: tmp_path / name for name in "abc"})
    turns.ready("b")
    turns.ready("a")
    assert not any((tmp_path / name).exists() for name in "abc")
    turns.done("c")
    assert [name for name in "abc" if (tmp_path / name).exists()] == ["b"]
    turns.ready("b")
    turns.done("b")
    assert [name for name in "abc" if (tmp_path / name).exists()] == ["a", "b"]


def test_peer_process_that_fails_leaves_one_line(tmp_path: Path, capsys) -> None:
    work = "assert len(prompts) < 3, 'no room\\nfor three'"
    case = gpu_peers.tiny_case(gpu_peers.CASES["32b-bf16"])
    run = make_run(tmp_path, site=fake_site(tmp_path / "site", work))._replace(cases={"32b-bf16": case})
    found = gpu_peers.measure(run, "32b-bf16", PEER, gpu_records.Budget(60.0), None)
    assert found["error"] == "AssertionError: no room"
    assert [entry["batch"] for entry in found["decode"]] == [1]


def test_peer_process_past_limit_ends_with_its_children(tmp_path: Path, monkeypatch, capsys) -> None:
    lock = tmp_path / "lock"
    sleeper = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, 2); time.sleep(60)"
    work = f"subprocess.run([sys.executable, '-c', {sleeper!r}])"
    task = gpu_peers.task_of(gpu_peers.tiny_case(CASE), PEER, tmp_path, gpu_peers.TINY, "cpu")
    # The limit is over as soon as the engine's own child runs.
    monkeypatch.setattr(gpu_records.time, "monotonic", lambda clock=time.monotonic: clock() + 1e6 * lock.exists())
    found = gpu_peers.run_engine(task, fake_site(tmp_path / "site", work), 1e5, lambda found: None)
    assert "it took more than" in found["error"]
    assert "start_seconds" in found
    with lock.open("w") as file:
        for _ in range(200):  # a killed process gives its lock up soon after
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)
    pytest.fail("a process of the engine still runs")


def test_measure_without_time_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny=False)
    found = gpu_peers.measure(run, "32b-fp8", PEER, gpu_records.Budget(1.5, lambda: 0.0), None)
    assert found == {"error": "left out: it takes 2 s, and 2 s are left"}


def test_case_that_does_not_fit_runs_no_engine(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path, tiny=False)
    gpu_peers.measure_all(run, gpu_records.Budget(2.5, lambda: 0.0))
    error = "left out: it takes 3 s, and 2 s are left"
    assert run.findings == {"32b-fp8": {OURS: {"error": error}, PEER: {"error": error}}}
    assert capsys.readouterr().out.splitlines() == [f"32b-fp8, {engine}: {error}" for engine in (OURS, PEER)]


def test_measure_on_occupied_gpu_is_left_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_peers, "used_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(gpu_peers, "wait_until_free", lambda empty, wait=gpu_peers.wait_until_free: wait(empty, 0.0))
    found = gpu_peers.measure(make_run(tmp_path), "32b-fp8", PEER, gpu_records.Budget(60.0), GIB)
    assert found == {"error": "the GPU still holds 2.00 GiB of an earlier process"}
    assert gpu_peers.wait_until_free(3 * GIB) is None


def test_holdfast_tiny_engine_has_prompts_of_imitation(tmp_path: Path) -> None:
    case = gpu_peers.tiny_case(gpu_peers.CASES["a3b-bf16"])
    task = gpu_peers.task_of(case, OURS, tmp_path / "model", gpu_peers.TINY, "cpu")
    found = json.loads(json.dumps(peer_case.run_task(task)))
    assert found["planned_bytes"] > 0
    assert [counts["batch"] for counts in found["distinct_experts"]] == [1, 3]
    assert found["versions"].keys() >= {OURS, "torch"}
    run = make_run(tmp_path, site=fake_site(tmp_path / "site"))._replace(cases={"a3b-bf16": case})
    theirs = gpu_peers.measure(run, "a3b-bf16", PEER, gpu_records.Budget(60.0), None)
    assert gpu_peers.prompts_of(found) == gpu_peers.prompts_of(theirs)
    assert len(gpu_peers.prompts_of(found)) == 3
    values = {
        row["measure"].rpartition("bfloat16, ")[2]: row["values"].keys()
        for row in gpu_peers.rows_of(case, {OURS: found, PEER: theirs})
    }
    assert values["start"] == values["prefill of 40 tokens"] == {OURS, PEER}
    assert values["planned memory"] == {OURS}


# --- the record


@pytest.fixture
def answers(monkeypatch) -> dict[str, dict[str, Any]]:
    """Findings of each engine, which replace its process."""
    found = {OURS: findings(), PEER: findings()}

    def run_child(command: list[str], timeout_seconds: float, **others: Any) -> dict[str, Any]:
        return found[json.loads(command[-1])["engine"]]

    monkeypatch.setattr(gpu_peers, "run_child", run_child)
    return found


def read(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return doc_tables.read_record(path)


def test_main_without_vllm_records_holdfast_alone(tmp_path: Path, answers, capsys) -> None:
    argv = ["--tiny", "--device", "cpu", "--cases", "32b-bf16", "--out", str(tmp_path), "--peer", str(tmp_path)]
    gpu_peers.main(argv)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("vLLM is not there")
    assert "pip install --target" in printed[0]
    assert {engine for row in read(tmp_path)["results"] for engine in row["values"]} == {OURS}


def test_main_with_only_peer_and_no_vllm_exits(tmp_path: Path, answers) -> None:
    with pytest.raises(SystemExit, match="no engine ran"):
        gpu_peers.main(["--tiny", "--device", "cpu", "--cases", "32b-bf16", "--out", str(tmp_path), "--only", PEER])
    assert not any(tmp_path.iterdir())


def test_main_records_both_engines_and_errors(tmp_path: Path, answers, capsys) -> None:
    answers[PEER] = {"start_seconds": 5.0, "error": "out of\n  memory"}
    site, out = fake_site(tmp_path / "site"), tmp_path / "out"
    gpu_peers.main(["--tiny", "--device", "cpu", "--cases", "32b-fp8", "--out", str(out), "--peer", str(site)])
    record = read(out)
    assert record["section"] == "gpu-peers"
    assert record["errors"] == {"32b-fp8, vllm": "out of memory"}
    assert record["results"][0]["values"] == {OURS: 12.3, PEER: 5.0}
    assert record["routing"].keys() == {OURS, PEER}
    assert record["engine_versions"] == {OURS: {"torch": "2"}}
    assert record["findings"]["32b-fp8"][OURS]["ready_bytes"] == 3 * GIB
    assert record["settings_of_peer"]["32b-fp8"]["quantization"] == "fp8"
    assert record["engine_settings"]["32b-fp8"]["model"] == "Qwen3-32B"
    printed = capsys.readouterr().out
    assert "32b-fp8, vllm: out of memory" in printed
    assert "Holdfast beside vLLM" in printed
    table = doc_tables.section_tables(out, "gpu-peers")
    assert "| Qwen3-32B, fp8, start | s | 12.3 | 5 | 2.46 |" in table


def test_peer_record_names_kernels_and_plan(tmp_path: Path) -> None:
    run = gpu_peers.Run(settings(tmp_path), None, (OURS,), gpu_peers.FULL, {}, dict(gpu_peers.CASES))
    run.findings.update({key: {OURS: findings()} for key in ("32b-fp8", "32b-k8v4-ttft")})
    record = run.record()
    assert {"rows", "attention", "fp8 weights", "k8v4 pages"} <= set(digests.groups_of(record))
    plans = digests.collect_plans(record["engine_settings"])
    assert len(set(plans.values()) - {None}) == 2


def test_record_label_names_some_cases_only() -> None:
    assert gpu_peers.record_label(gpu_peers.CASES) == "peers"
    assert gpu_peers.record_label(["32b-bf16", "v2lite"]) == "peers-32b-bf16-v2lite"


def test_command_of_peers_has_no_folder() -> None:
    argv = ["benchmarks/gpu_peers.py", "--peer", "/somewhere", "--cases", "v2lite"]
    assert gpu_records.command(argv) == "python benchmarks/gpu_peers.py --cases v2lite"


def test_environment_of_peer_has_folder_first(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "there")
    paths = gpu_peers.environment_of(PEER, Path("site"))["PYTHONPATH"].split(os.pathsep)
    assert paths == ["site", "there", str(ROOT / "benchmarks")]
    assert gpu_peers.environment_of(OURS, Path("site")).keys() == {"PYTHONPATH"}
