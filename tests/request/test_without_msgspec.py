"""msgspec is imported only when a message crosses a process border: everything else works without it."""

import ast
import subprocess
import sys
from pathlib import Path

import holdfast

PACKAGE = Path(holdfast.__file__).parent
BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "msgspec":
            raise ImportError("msgspec is not installed", name="msgspec")

sys.meta_path.insert(0, Refuse())
"""
ENGINE = """
import holdfast, holdfast.api.llm, holdfast.cli.commands, holdfast.engine.core_process, holdfast.engine.rank_process
import holdfast.engine.ranks, holdfast.planning.plan
from engine.fakes import make_engine
from holdfast.request.sampling_params import SamplingParams

engine = make_engine()
engine.add_request("a", "hello", SamplingParams(max_tokens=3, ignore_eos=True))
tokens = 0
while engine.has_unfinished():
    tokens += sum(len(delta.token_ids) for delta in engine.step())
assert tokens == 3, tokens
assert "msgspec" not in sys.modules
from holdfast.request.step import Step
from request.frames import encode_step
try:
    encode_step(Step(1))
except ImportError as error:
    print(error.name)
"""


def test_msgspec_is_imported_inside_one_function() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "msgspec" not in text:
            continue
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "msgspec" for name in names):
                found.append((str(path.relative_to(PACKAGE)), id(node) in inside))
    assert found == [("request/wire.py", True)]


def test_engine_in_one_process_runs_without_msgspec() -> None:
    code = BLOCKED + f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n" + ENGINE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "msgspec\n"), done.stderr
