"""Importing costs little: no torch until it is needed, and none at all for the parts that promise to do without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import architecture_rules as rules
from counted_work import num_lines_of_a_process

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "tokenizers", "jinja2", "numpy", "rich")
PLAN = (
    "import sys; sys.argv = ['holdfast', 'plan', 'Qwen3-32B', '--gpu', 'h200', '--json']; "
    "from holdfast.cli.app import main; main()"
)
HELP = "import sys; sys.argv = ['holdfast', '--help']; from holdfast.cli.app import main; main()"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def modules_after(code: str) -> set[str]:
    """First-level names in sys.modules once the code has run, however it ended."""
    ended = f"import json, sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
    done = run(f"{ended}print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_holdfast_loads_nothing_heavy() -> None:
    assert modules_after("import holdfast").isdisjoint(HEAVY)


def test_values_import_nothing_heavy() -> None:
    code = "from holdfast import SamplingParams, EngineConfig, HoldfastError; SamplingParams(); EngineConfig()"
    assert modules_after(code).isdisjoint(HEAVY)


def test_help_imports_nothing_heavy() -> None:
    assert modules_after(HELP).isdisjoint(HEAVY)


def test_plan_loads_no_torch() -> None:
    assert modules_after(PLAN).isdisjoint({"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"})


@pytest.mark.parametrize(("code", "most"), [(PLAN, 1_700_000), (HELP, 300_000)], ids=["plan", "help"])
def test_plan_and_help_run_few_lines(code: str, most: int) -> None:
    """A quiet core of 2024 runs some four million lines a second, so that a plan takes about 0.4 s, and help 0.1 s."""
    assert num_lines_of_a_process(code) < most


def test_torch_free_modules_import_where_there_is_no_torch() -> None:
    sources = rules.read_sources(ROOT / "src" / rules.PACKAGE)
    torch_free = [source.module for source in sources if source.is_torch_free]
    assert len(torch_free) > 10, torch_free
    code = f"""
import sys, importlib, traceback
for name in ("torch", "triton", "transformers"):
    sys.modules[name] = None
failed = 0
for name in {torch_free!r}:
    try:
        importlib.import_module("holdfast." + name)
    except Exception:
        failed = 1
        print(name, traceback.format_exc().splitlines()[-1], file=sys.stderr)
sys.exit(failed)
"""
    done = run(code)
    assert done.returncode == 0, f"need torch:\n{done.stderr}"


def test_import_of_blocked_torch_fails() -> None:
    assert run("import sys; sys.modules['torch'] = None; import torch").returncode == 1


def test_public_names_resolve_and_others_raise() -> None:
    import holdfast

    assert set(holdfast.HOMES) | {"__version__"} == set(holdfast.__all__) == set(dir(holdfast))
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    with pytest.raises(AttributeError, match="LLMM"):
        _ = holdfast.LLMM


WRONG = "/no/such/path"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", WRONG, "-p", "x"),
        ("chat", WRONG),
        ("plan", WRONG),
        ("bench", "latency", WRONG),
        ("bench", "throughput", WRONG),
        ("eval", "kv", WRONG, "--text", "x"),
        ("eval", "weights", WRONG),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_wrong_path_is_refused_before_heavy_imports(arguments: tuple[str, ...]) -> None:
    code = f"import sys; from holdfast.cli.app import run; assert run({list(arguments)!r}) == 1"
    assert modules_after(code).isdisjoint((*HEAVY, "safetensors", "huggingface_hub"))


def test_llm_wrong_path_loads_nothing_heavy() -> None:
    code = (
        f"import holdfast\n    try:\n        holdfast.LLM(model={WRONG!r})\n        raise SystemError\n"
        "    except holdfast.HoldfastError:\n        pass"
    )
    assert modules_after(code).isdisjoint((*HEAVY, "safetensors", "huggingface_hub"))


def test_headers_are_open_before_torch_is_imported(tmp_path: Path) -> None:
    """An unsupported family is refused without importing torch, too."""
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    code = f"import sys; from holdfast.cli.app import run; assert run(['run', {str(tmp_path)!r}, '-p', 'x']) == 1"
    assert modules_after(code).isdisjoint(HEAVY)
