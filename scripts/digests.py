"""Name what records measured: python scripts/digests.py [--stamp] [--jobs 2]

A digest of a kernel is that of its PTX for sm_90 in normal form (scripts/ptx_text.py): names, line marks and debug info do
not count. The Triton of this environment compiles it, whichever one the measured machine had. A digest of a plan is that of
its bytes by owner on an H200. benchmarks/kernel_groups.json says which kernels a record measured, by cases of
tests/kernels/gpu_compiler.py.

benchmarks/digests.json has the digests of this tree. Beside each is the key of its sources: the kernel's definition, those of
all functions that it calls, and the values that it is compiled for. A case is compiled only if its key has changed, so a
file that moves costs nothing. `make docs` computes keys and plans, but compiles nothing.

    python scripts/digests.py             compile what has changed, and write the table
    python scripts/digests.py --stamp     also add `digests` to the records without it, from the trees of their commits
"""

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import importlib.util
import inspect
import io
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import compare_ptx
import ptx_text

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
TABLE = ROOT / "benchmarks" / "digests.json"
GROUPS: Mapping[str, Any] = json.loads((ROOT / "benchmarks" / "kernel_groups.json").read_text(encoding="utf-8"))
OWN_PACKAGE = "holdfast"
PLANNED_GPU = "h200"
Table = dict[str, Any]
Record = Mapping[str, Any]


def digest_of(value: object) -> str:
    """Return 16 digits that change with a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Definitions:
    """Definitions and constants that a kernel reaches; neither names of modules nor lines, comments and docstrings count."""

    def __init__(self, kernel: object) -> None:
        self._seen: set[int] = set()
        self.parts: set[str] = set()
        self._add(kernel)

    def _add(self, thing: Any) -> None:  # noqa: ANN401 a kernel, a function or a class
        thing = getattr(thing, "fn", thing)
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
        self.parts.add(plain_text(node))
        scope = vars(sys.modules[thing.__module__])
        if inspect.isfunction(thing):
            scope = {**scope, **inspect.getclosurevars(thing).nonlocals}
        for name, value in used_values(node, scope):
            if value is None or isinstance(value, int | float | str | tuple):
                self.parts.add(f"{name} = {value!r}")
            elif type(value).__name__ == "constexpr":
                self.parts.add(f"{name} = {value.value!r}")
            elif is_own(value):
                self._add(value)


def plain_text(node: ast.stmt) -> str:
    """Return a definition without docstrings, comments and decorators."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            inner.decorator_list = []
            inner.body = [line for line in inner.body if not is_docstring(line)] or [ast.Pass()]
    return ast.unparse(node)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def used_values(node: ast.AST, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the global names of a definition and those that it reads from modules of the package."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in scope:
            yield inner.id, scope[inner.id]
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            module = scope.get(inner.value.id)
            if isinstance(module, ModuleType) and module.__name__.startswith(OWN_PACKAGE):
                yield inner.attr, getattr(module, inner.attr)


def is_own(value: Any) -> bool:  # noqa: ANN401 any global
    """True for a kernel, a function or a class of the package."""
    inner = getattr(value, "fn", value)
    is_definition = inspect.isfunction(inner) or inspect.isclass(inner)
    return is_definition and inner.__module__.startswith(OWN_PACKAGE)


def specialization_key(source: Any, options: object) -> str:  # noqa: ANN401 triton's ASTSource
    """Return a digest of all that decides the PTX of one specialization, but for Triton itself."""
    constants = {
        str(name): sorted(Definitions(value).parts) if is_own(value) else repr(value)
        for name, value in source.constants.items()
    }
    values = [
        sorted(Definitions(source.fn).parts),
        repr(source.signature),
        constants,
        repr(source.attrs),
        repr(options),
    ]
    text = json.dumps([type(source).__name__, *values], sort_keys=True)
    assert " at 0x" not in text, f"{source.fn} is compiled for an object that has no text: {text[-400:]}"
    return digest_of(text)


def collect_keys(tree: Path, cases: Sequence[str]) -> dict[str, str]:
    """Run the cases of a tree without compiling; return a key of each."""
    import triton

    spec = importlib.util.spec_from_file_location("gpu_compiler", tree / compare_ptx.PROGRAM)
    assert spec is not None, tree
    assert spec.loader is not None, tree
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    for name in [name for name in vars(program) if name.startswith("_check_")]:
        setattr(program, name, lambda *_: None)
    found: dict[str, list[str]] = {case: [] for case in cases}
    arguments = compare_ptx._Cases([str(compare_ptx.PROGRAM), *cases])

    def look(source: Any, target: object, options: Mapping[str, object]) -> SimpleNamespace:  # noqa: ANN401
        found[arguments.current].append(specialization_key(source, sorted(options.items())))
        return SimpleNamespace(asm={"ttgir": "", "ptx": ""}, metadata=SimpleNamespace(shared=0))

    triton.compile = look
    sys.argv = arguments  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        program.main()
    failed = {case: text for case, text in json.loads(printed.getvalue()).items() if isinstance(text, str)}
    if failed:
        sys.exit(f"error: cases do not run: {failed}")
    forms = [triton.__version__, inspect.getsource(ptx_text)]
    return {case: digest_of([forms, sorted(keys)]) for case, keys in found.items()}


def collect_plans(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """Return a digest of each engine's planned bytes by owner; None if it is refused."""
    from holdfast.config import EngineConfig
    from holdfast.errors import HoldfastError
    from holdfast.memory.devices import GPUS
    from holdfast.models.blueprints.read import declare_config
    from holdfast.models.catalogue import CATALOGUE
    from holdfast.planning.fit import fit_runner
    from holdfast.planning.resolve import PlanRequest
    from holdfast.planning.target import gpu_target

    found: dict[str, str | None] = {}
    for label, engine in engines.items():
        model = declare_config({**CATALOGUE[engine["model"]], **engine.get("shapes", {})}, engine["model"])
        config = EngineConfig.from_options(**engine["options"])
        try:
            plan = fit_runner(PlanRequest(config, model, gpu_target(GPUS[PLANNED_GPU])))
        except HoldfastError:
            found[label] = None
            continue
        found[label] = digest_of(sorted((term.owner, term.num_bytes) for term in plan.memory.terms))
    return found


def query(tree: Path, part: str, question: object) -> Any:  # noqa: ANN401 the JSON of an answer
    """Answer in a process that imports this tree."""
    command = [sys.executable, __file__, "--part", part, "--tree", str(tree)]
    done = subprocess.run(
        command,
        env=compare_ptx.environment(tree),
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"error: {tree}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def grouped_cases(names: Sequence[str] | None = None) -> list[str]:
    """Return the cases of these groups, or of all."""
    groups = GROUPS["groups"]
    return sorted({case for name in (groups if names is None else names) for case in groups[name]})


def case_digests(tree: Path, cases: Sequence[str], known: Mapping[str, Any], num_jobs: int) -> dict[str, Any]:
    """Return key and digest of each case; compile those with a key that is not known, or none with 0 jobs."""
    keys = query(tree, "keys", list(cases)) if cases else {}
    found = {
        case: {"key": key, "ptx": known[case]["ptx"] if known.get(case, {}).get("key") == key else None}
        for case, key in keys.items()
    }
    missing = [case for case, entry in found.items() if entry["ptx"] is None]
    compiled = compare_ptx.compile_tree(tree, missing, num_jobs) if num_jobs and missing else []
    for case in missing if num_jobs else ():
        own = [entry for entry in compiled if entry.case == case]
        failed = [entry for entry in own if entry.kernel == "failed"]
        if failed or not own:
            sys.exit(f"error: {case} does not compile: {failed[0].digest if failed else 'no kernel'}")
        found[case]["ptx"] = digest_of(sorted(entry.digest for entry in own))
    return found


def record_plans(tree: Path, records: Mapping[str, Record]) -> dict[str, dict[str, str | None]]:
    """Return the digests of the plans of every engine, by record."""
    engines = {
        json.dumps([name, label]): engine
        for name, record in records.items()
        for label, engine in record.get("engine_settings", {}).items()
    }
    plans: dict[str, dict[str, str | None]] = {}
    for key, found in query(tree, "plans", engines).items() if engines else ():
        name, label = json.loads(key)
        plans.setdefault(name, {})[label] = found
    return plans


def refresh(num_jobs: int = 0) -> Table:
    """Write the table of this tree; without jobs, cases that have changed stay without a digest."""
    from importlib.metadata import version

    known = read_table() or {"cases": {}}
    table = {
        "triton": version("triton"),
        "cases": case_digests(ROOT, grouped_cases(), known["cases"], num_jobs),
        "plans": record_plans(ROOT, read_records()),
    }
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return table


def read_table(path: Path = TABLE) -> Table | None:
    """Read the table; None without one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_records(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Return the records whose section measures kernels or plans, by name."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: record for name, record in found.items() if is_kept(record)}


def is_kept(record: Record) -> bool:
    """True if the section of a record measures kernels or plans."""
    return record.get("section") in (*GROUPS["sections"], *GROUPS["engine_sections"])


def groups_of(record: Record) -> list[str]:
    """Return the groups of kernels that a record measured."""
    section, engines = record.get("section"), record.get("engine_settings", {}).values()
    names = list(GROUPS["sections"].get(section, ()))
    for engine in engines if section in GROUPS["engine_sections"] else ():
        names += [name for rule in GROUPS["engines"] if does_match(rule, engine) for name in rule["groups"]]
    return list(dict.fromkeys(names))


def does_match(rule: Mapping[str, str], engine: Mapping[str, Any]) -> bool:
    """True if an engine has the model, and the value of the option, of a rule."""
    has_option = "option" not in rule or engine["options"].get(rule["option"]) == rule["value"]
    return has_option and fnmatch.fnmatch(engine["model"], rule["model"])


def group_digest(name: str, cases: Mapping[str, Any]) -> str | None:
    """Return a digest of a group's kernels; None if one is not compiled."""
    digests = [cases.get(case, {}).get("ptx") for case in GROUPS["groups"].get(name, ())]
    return digest_of(sorted(digests)) if digests and all(digests) else None


class State(NamedTuple):
    """How the measured kernels and plans compare with this tree."""

    mark: str
    words: str


SAME = State("", "")
OLD = State("†", "† measured before the kernels or the plan changed")
WITHOUT = State("‡", "‡ measured without a digest")
UNKNOWN = State("‡", "‡ not compared (run `make digests`)")


def state_of(name: str, record: Record, table: Table | None) -> State:
    """Compare a record with the table of this tree."""
    if table is None or not is_kept(record):
        return SAME
    measured = record.get("digests")
    if measured is None:
        return WITHOUT
    kernels = [(found, group_digest(group, table["cases"])) for group, found in measured["kernels"].items()]
    plans = table["plans"].get(name, {})
    if any(new is not None and old != new for old, new in kernels) or any(
        found != plans.get(label) for label, found in measured["plans"].items()
    ):
        return OLD
    return UNKNOWN if any(new is None for _, new in kernels) else SAME


def stamp(num_jobs: int) -> None:
    """Add `digests` to the records without them, from the tree of the commit of each."""
    table, new = read_table(), {}
    assert table is not None, "refresh writes it"
    for name, record in read_records().items():
        if "digests" not in record and name not in GROUPS["before_digests"]:
            new.setdefault(record["commit"], {})[name] = record
    for commit, records in new.items():
        cases = grouped_cases([group for record in records.values() for group in groups_of(record)])
        with compare_ptx.checked_out(commit) as tree:
            found = case_digests(tree, cases, table["cases"], num_jobs)
            plans = record_plans(tree, records)
        for name, record in records.items():
            kernels = {group: group_digest(group, found) for group in groups_of(record)}
            record["digests"] = {"triton": table["triton"], "kernels": kernels, "plans": plans.get(name, {})}
            (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {len(kernels)} groups of kernels and {len(plans.get(name, {}))} plans of {commit}")


def main() -> None:
    """Write the table, and stamp records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stamp", action="store_true", help="add `digests` to records without it")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (default 2)")
    parser.add_argument("--part", choices=("keys", "plans"), help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        question = json.load(sys.stdin)
        found = collect_plans(question) if arguments.part == "plans" else collect_keys(arguments.tree, question)
        json.dump(found, sys.stdout)
        return
    table = refresh(arguments.jobs)
    print(f"{TABLE.relative_to(ROOT)}: {len(table['cases'])} cases, compiled with Triton {table['triton']}")
    if arguments.stamp:
        stamp(arguments.jobs)
        refresh(arguments.jobs)


if __name__ == "__main__":
    main()
