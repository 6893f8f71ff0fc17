"""What programs and people depend on, as values: python tests/public_surface.py prints it as JSON.

Names importable from `holdfast`, exception classes, options with defaults, commands and flags, HTTP fields, metrics,
environment variables, keys and owner paths of `plan --json`, exit codes, make targets, command lines of scripts.
"""

import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "",
    *("run", "chat", "serve", "plan", "ps", "cache", "doctor", "completion", "bench", "eval"),
    *("bench latency", "bench throughput", "bench serve", "eval kv", "eval weights"),
)
PLANS = (
    ("Qwen/Qwen3-32B", "--gpu", "h200", "--json"),
    ("deepseek-ai/DeepSeek-V2-Lite", "--gpu", "h200", "--json"),
    ("openai/gpt-oss-20b", "--gpu", "h200", "--kv-cache-dtype", "turboquant_k8v4", "--json"),
)
EXITS = (("plan", "--no-such-flag"), ("plan", "no/such-model", "--gpu", "h200"), ("plan", *PLANS[0]), ("--version",))


def collect() -> dict[str, Any]:
    """Return the whole surface, part by part."""
    return {
        "imports": imports(),
        "exceptions": exceptions(),
        "options": options(),
        "flags": {command or "holdfast": flags(*command.split()) for command in COMMANDS},
        "http": http(),
        "metrics": names_in("src/holdfast", r'"((?:holdfast|vllm):[a-z_]+)"'),
        "environment": sorted(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/env_vars.md").read_text(), re.MULTILINE)),
        "plan_keys": {" ".join(plan): sorted(set(key_paths(json.loads(run("plan", *plan)[1])))) for plan in PLANS},
        "plan_owners": {" ".join(plan): sorted(set(owners(json.loads(run("plan", *plan)[1])))) for plan in PLANS},
        "exit_codes": {" ".join(command): run(*command)[0] for command in EXITS},
        "make_targets": sorted(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)),
        "scripts": {
            str(path.relative_to(ROOT)): sorted(set(re.findall(r'add_argument\(\s*"(-?-?[\w-]+)"', path.read_text())))
            for folder in ("scripts", "benchmarks")
            for path in sorted((ROOT / folder).glob("*.py"))
            if "add_argument(" in path.read_text()
        },
    }


def imports() -> list[str]:
    """Names of `from holdfast import ...`."""
    import holdfast

    return sorted(name for name in holdfast.__all__ if hasattr(holdfast, name))


def exceptions() -> dict[str, list[str]]:
    """Exception classes with their bases."""
    from holdfast import errors

    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    return {kind.__name__: [base.__name__ for base in kind.__mro__] for kind in kinds}


def options() -> dict[str, dict[str, str]]:
    """Fields of the settings with their defaults."""
    import holdfast

    kinds = (holdfast.EngineConfig, holdfast.SamplingParams, holdfast.PoolingParams)
    found = {}
    for kind in kinds:
        fields = {
            field.name: "a factory" if field.default_factory is not dataclasses.MISSING else repr(field.default)
            for field in dataclasses.fields(kind)
            if field.init and not field.name.startswith("_")
        }
        found[kind.__name__] = {name: "required" if "MISSING" in text else text for name, text in fields.items()}
    return found


def run(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    from holdfast.cli import app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = app.run(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, printed.getvalue()


def flags(*command: str) -> list[str]:
    """Flags that a help page lists."""
    page = run(*command, "--help")[1]
    return sorted(set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", page, re.MULTILINE)))


def http() -> dict[str, list[str]]:
    """Fields of every body, by method and path."""
    from holdfast.server.app import make_app
    from holdfast.server.service import Service
    from server.raw_server import StubLLM

    document = make_app(Service(StubLLM(), ("tiny",))).openapi()  # type: ignore[arg-type]
    return {
        f"{method.upper()} {path}": sorted(set(field_names(item, document, frozenset())))
        for path, methods in document["paths"].items()
        for method, item in methods.items()
    }


def field_names(schema: object, document: dict[str, Any], seen: frozenset[str]) -> Iterator[str]:
    """Yield the names of properties and parameters below a schema, through references."""
    if isinstance(schema, list):
        for item in schema:
            yield from field_names(item, document, seen)
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            name = reference.rpartition("/")[2]
            yield from field_names(document["components"]["schemas"][name], document, seen | {reference})
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from field_names(value, document, seen)


def names_in(folder: str, pattern: str) -> list[str]:
    """Every match of a pattern in the files of a folder."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".json", ".toml")]
    return sorted({name for path in paths for name in re.findall(pattern, path.read_text(encoding="utf-8"))})


def key_paths(value: object, place: str = "") -> Iterator[str]:
    """Yield the path of every key; all elements of a list count as one."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{place}.{key}"
            yield from key_paths(item, f"{place}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from key_paths(item, f"{place}[]")


def owners(value: object) -> Iterator[str]:
    """Yield every owner path."""
    if isinstance(value, dict):
        if isinstance(value.get("owner"), str):
            yield value["owner"]
        for item in value.values():
            yield from owners(item)
    elif isinstance(value, list):
        for item in value:
            yield from owners(item)


if __name__ == "__main__":
    json.dump(collect(), sys.stdout, indent=1, sort_keys=True)
