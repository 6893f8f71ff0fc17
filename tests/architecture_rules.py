"""The rules of docs/architecture.md as functions over source text: each returns its violations as sentences."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "holdfast"
OLDEST_PYTHON = (3, 11)
LAYERS = (
    ("errors",),
    ("forks",),
    ("observability", "request"),
    ("quant",),
    ("memory",),
    ("cache", "kernels"),
    ("attention", "distributed"),
    ("layers",),
    ("families",),
    ("models",),
    ("loading", "planning"),
    ("text", "runner"),
    ("engine", "integrations"),
    ("api", "eval"),
    ("server",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A package imports from rows before its own, and from itself."""
ROOMS = {
    "kernels": (("",), ("attention", "exchange", "gemm", "load", "sampling", "state"), ("latent", "moe")),
    "families": (("grouped", "latent", "state"), ("sparse",), ("compressed",), ("",)),
    "models": (("",), ("blueprints",)),
    "loading": (("sources",), ("gguf", "packed"), ("hub", "planning"), ("execution", "quantized"), ("writing",), ("",)),
    "runner": (("sampling",), ("",)),
}
"""Packages with rooms, lowest first; "" are the files beside the rooms. The same rule holds inside."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CONFIG_READERS = {"planning", "text", "runner", "engine", "api", "eval", "server", "cli", "__main__"}
CONFIG_RANK = RANK["memory"] + 1
"""config.py itself imports from the rows up to memory and quant."""

TORCH_FREE = (
    "errors",
    "forks",
    "config",
    "observability.*",
    "request.*",
    "quant.entry_state",
    "quant.formats",
    "quant.packed_schemes",
    "quant.weight_schemes",
    "distributed.exchange_plan",
    "distributed.mesh",
    "memory.sizes",
    "memory.ledger",
    "memory.planner",
    "memory.report",
    "memory.devices",
    "memory.workspace_plan",
    "cache.groups",
    "cache.spec",
    "cache.pages",
    "cache.prefix",
    "kernels.latent.latent_geometry",
    "kernels.latent.top_k_geometry",
    "kernels.geometry",
    "kernels.packed_kernels",
    "kernels.stream_geometry",
    "kernels.up_projection",
    "families.*.declarations",
    "families.choose",
    "models.spec",
    "models.parameters",
    "models.grouped_readers",
    "models.latent_readers",
    "models.settings",
    "models.activations",
    "models.compressed_activations",
    "models.compressed_declaration",
    "models.compressed_readers",
    "models.declaration",
    "models.declared_model",
    "models.declared_weights",
    "models.decoder_declaration",
    "models.latent_declaration",
    "models.blueprints.*",
    "models.catalogue",
    "loading.declared",
    "loading.locate",
    "loading.hub.*",
    "loading.gguf.file",
    "planning.resolve",
    "planning.terms",
    "planning.fit",
    "planning.plan",
    "planning.alternatives",
    "engine.scheduler",
    "engine.core",
    "engine.front",
    "engine.messages",
    "engine.channel",
    "text.*",
    "cli.plan*",
)
"""Modules, as patterns, that do without torch altogether. Others may say "no torch" in their first line: they import without it."""
TORCH_BOUND = {"torch", "triton", "transformers", "accelerate"}

VAGUE_NAMES = {"util", "utils", "common", "core", "misc", "helper", "helpers", "stuff"}
MEANT_NAMES = {"engine.core"}
"""Where such a word is the noun: the field calls scheduler and runner, without the text, the core of an engine."""
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60

BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "imp", "pty"}
BANNED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "builtins.eval",
    "builtins.exec",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.hub.load",
    "yaml.load",
    "tempfile.mktemp",
}
BANNED_ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}
DETERMINISTIC = ("cache.*", "engine.scheduler*")
"""Patterns of modules whose decisions follow from their arguments alone: no clock, no random numbers."""
CHANCE_IMPORTS = {"random", "secrets", "uuid", "time", "datetime"}
CHANCE_CALLS = {"os.urandom", "torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.manual_seed"}


@dataclass(frozen=True)
class Import:
    """One imported module, written in full; `name` is what a from-import took out of it."""

    line: int
    module: str
    name: str | None
    level: int
    at_import: bool
    """True when it runs as the file is imported: neither inside a function nor under TYPE_CHECKING."""

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: its dotted name inside the package ("" for the package's own __init__), and its text."""

    module: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text, feature_version=OLDEST_PYTHON)
        except SyntaxError:
            return ast.Module([], [])

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree: every rule looks through it, and walking it takes longer than looking."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def typing_lines(self) -> frozenset[int]:
        """Under TYPE_CHECKING: nothing there is ever imported."""
        blocks = [node for node in self.nodes if isinstance(node, ast.If) and _is_type_checking(node)]
        return frozenset(line for node in blocks for line in range(node.lineno, (node.end_lineno or 0) + 1))

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return (*_imports(self.tree.body, at_import=True), *_named_imports(self.nodes))

    @property
    def is_torch_free(self) -> bool:
        """By the list, or by its own word."""
        first_line = (ast.get_docstring(self.tree) or "").partition("\n")[0]
        return not self.is_package and (self.matches(TORCH_FREE) or "no torch" in first_line)

    def matches(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(self.module, pattern) for pattern in patterns)


@cache
def read_sources(folder: Path) -> tuple[Source, ...]:
    """Every Python file of the package, read and parsed once for all tests of a process."""
    sources = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        sources.append(Source(module, path.read_text(encoding="utf-8"), is_package))
    return tuple(sources)


def _imports(body: list[ast.stmt], at_import: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None, 0, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                Import(node.lineno, node.module or "", alias.name, node.level, at_import) for alias in node.names
            )
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
            for inner in (getattr(node, field, []) for field in ("body", "orelse", "finalbody", "handlers", "cases")):
                for item in inner:
                    nested = item.body if isinstance(item, ast.ExceptHandler | ast.match_case) else [item]
                    yield from _imports(nested, at_import and not lazy)


def _named_imports(nodes: tuple[ast.AST, ...]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "import_module" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(node.lineno, name.value, None, 0, at_import=False)


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING"


def dotted(node: ast.expr) -> str:
    """`a.b.c` for names and attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def own_imports(source: Source) -> Iterator[tuple[Import, str]]:
    """Imports of the package itself, each with the module inside it that is meant."""
    for item in source.imports:
        if item.root != PACKAGE:
            continue
        inner = item.module.removeprefix(PACKAGE).removeprefix(".")
        if not inner and item.name in {*RANK, "config"}:
            inner = item.name or ""
        yield item, inner


def syntax(source: Source) -> list[str]:
    """R0: the file is Python, in the oldest version that is promised."""
    if source.tree.body:
        return []
    try:
        ast.parse(source.text, feature_version=OLDEST_PYTHON)
    except SyntaxError as error:
        return [f"{source.module}:{error.lineno} is not Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]}: {error.msg}"]
    return []


def upward_imports(source: Source) -> list[str]:
    """R1: imports point down the layers, lazy and typing-only ones too."""
    if source.module == "":
        return []  # the public names, imported on first use
    found = []
    own_rank = CONFIG_RANK - 0.5 if source.package == "config" else RANK.get(source.package)
    if own_rank is None:
        return [f"{source.module}: {source.package!r} is in no layer; name one of {', '.join(RANK)}"]
    for item, inner in own_imports(source):
        target = inner.partition(".")[0]
        if not target:
            if item.name != "__version__":
                found.append(f"{source.module}:{item.line} takes {item.name} from the package; import it from its home")
        elif target in ("config", source.package):
            continue
        elif target not in RANK:
            found.append(f"{source.module}:{item.line} imports {inner}, which is in no layer")
        elif RANK[target] >= own_rank:
            found.append(f"{source.module}:{item.line} imports {inner}, which is not below {source.package}")
    return found


def room_imports(source: Source) -> list[str]:
    """R1 once more: inside a package with rooms, imports point down its rooms."""
    rows = ROOMS.get(source.package)
    if rows is None or source.is_package:
        return []
    ranks = {room: rank for rank, rooms in enumerate(rows) for room in rooms}
    own = source.module.split(".")[1] if source.module.count(".") > 1 else ""
    if own not in ranks:
        rooms = ", ".join(room for room in ranks if room)
        return [f"{source.module}: {own!r} is no room of {source.package}; take one of {rooms}"]
    found = []
    for item, inner in own_imports(source):
        package, _, rest = f"{inner}.{item.name}".partition(".")
        room = rest.partition(".")[0]
        target = room if room in ranks else ""
        if package == source.package and target != own and ranks[target] >= ranks[own]:
            found.append(f"{source.module}:{item.line} imports {inner}, which is not below {own or package}")
    return found


def config_imports(source: Source) -> list[str]:
    """R2: no module below the runner imports the config."""
    if source.module == "" or source.package in CONFIG_READERS:
        return []
    return [
        f"{source.module}:{item.line} imports config; pass the values that it needs"
        for item, inner in own_imports(source)
        if inner == "config"
    ]


def torch_imports(sources: Sequence[Source]) -> list[str]:
    """R3: the listed modules never touch torch; what says "no torch" imports without it, and so does all it brings in."""
    by_name = {source.module: source for source in sources}
    found = [
        f"TORCH_FREE lists {pattern}, and no file matches"
        for pattern in TORCH_FREE
        if not any(fnmatchcase(name, pattern) for name in by_name)
    ]
    for source in sources:
        if not source.is_torch_free:
            continue
        if source.matches(TORCH_FREE):
            found += [
                f"{source.module}:{item.line} imports {item.root} and has to do without"
                for item in source.imports
                if item.root in TORCH_BOUND
            ]
        for path in import_paths(source, by_name):
            heavy = {item.root for item in by_name[path[-1]].imports if item.at_import} & TORCH_BOUND
            found += [f"importing {' -> '.join(path)} imports {name}" for name in sorted(heavy)]
    return found


def import_paths(source: Source, by_name: dict[str, Source]) -> Iterator[tuple[str, ...]]:
    """One path to each module that importing the source brings in, itself first."""
    seen = {source.module}
    waiting = [(source.module,)]
    while waiting:
        path = waiting.pop(0)
        yield path
        for item, inner in own_imports(by_name[path[-1]]):
            taken = f"{inner}.{item.name}" if f"{inner}.{item.name}" in by_name else inner
            if item.at_import and taken in by_name and taken not in seen:
                seen.add(taken)
                waiting.append((*path, taken))


def import_circles(sources: Sequence[Source]) -> list[str]:
    """No file imports one that imports it, on any way, inside of functions too (types alone do not count); the first circle that is found."""
    by_name = {source.module for source in sources}
    graph = {
        source.module: [
            f"{inner}.{item.name}" if f"{inner}.{item.name}" in by_name else inner
            for item, inner in own_imports(source)
            if inner in by_name and item.line not in source.typing_lines
        ]
        for source in sources
        if not source.is_package
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"{' -> '.join(reversed(error.args[1]))} is a circle of imports"]
    return []


def triton_imports(source: Source) -> list[str]:
    """R4: one door for triton."""
    if source.module == "kernels.triton_compat":
        return []
    return [
        f"{source.module}:{item.line} imports triton; take it from kernels/triton_compat.py"
        for item in source.imports
        if item.root == "triton"
    ]


def shape_of_modules(source: Source) -> list[str]:
    """R5: absolute imports, empty __init__ files, names that say what is inside."""
    found = [
        f"{source.module}:{item.line} imports relatively; write the whole name" for item in source.imports if item.level
    ]
    if source.is_package and source.module and source.text.strip():
        found.append(f"{source.module}/__init__.py is not empty")
    vague = VAGUE_NAMES.intersection(source.module.split(".")) if source.module not in MEANT_NAMES else set()
    found.extend(f"{source.module}: {name!r} says nothing; name the noun" for name in sorted(vague))
    return found


def sizes(source: Source) -> list[str]:
    """R6: files of at most 800 lines, and functions of at most 60 outside the kernels."""
    num_lines = len(source.text.splitlines())
    found = (
        [f"{source.module} has {num_lines} lines; {MAX_FILE_LINES} are the most"] if num_lines > MAX_FILE_LINES else []
    )
    if source.package == "kernels":
        return found
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(
                    f"{source.module}:{node.lineno} {node.name} has {length} lines; {MAX_FUNCTION_LINES} are the most"
                )
    return found


def first_line(path: Path) -> str:
    """The first line of a file's docstring, or of the comment that opens a C file, or nothing."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        line = text.partition("\n")[0]
        return line.removeprefix("//").strip() if line.startswith("//") else ""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    return (ast.get_docstring(tree) or "").partition("\n")[0].strip()


def listed_files(folder: Path) -> list[Path]:
    """Every file that has something in it: all but the empty __init__ files of packages."""
    sources = (path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))
    return sorted(path for path in sources if path.name != "__init__.py" or path.parent == folder)


def places(folder: Path) -> set[str]:
    """What the architecture page has to name: packages, rooms as package/room, and files beside the packages."""
    found = set()
    for path in listed_files(folder):
        inner = path.relative_to(folder)
        if len(inner.parts) > 1:
            found |= {parent.as_posix() for parent in inner.parents if parent.name}
        elif not inner.name.startswith("__"):
            found.add(inner.name)
    return found


def misplaced(named: set[str], page: str) -> list[str]:
    """R7: the page has a row for every package and file beside them, a paragraph for every room, and nothing for what is gone."""
    rows = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    paragraphs = re.findall(r"\*\*`(\w+/[\w/]+)`\*\*:", page)
    counts = Counter([*rows, *paragraphs])
    found = [f"{name} has no {'paragraph' if '/' in name else 'row'}" for name in sorted(named - counts.keys())]
    found += [f"{name} is named and not there" for name in sorted(counts.keys() - named)]
    return [*found, *(f"{name} stands there {count} times" for name, count in counts.items() if count > 1)]


def untested_folders(sources: Sequence[Source], test_files: set[str]) -> list[str]:
    """R8: every package and room has a folder of the same name under tests/, with tests in it."""
    folders = {source.module.rpartition(".")[0].replace(".", "/") for source in sources if not source.is_package} - {""}
    tested = {name.rpartition("/")[0] for name in test_files}
    return [f"{name} has no test in tests/{name}/" for name in sorted(folders - tested)]


def dangers(source: Source) -> list[str]:
    """Nothing that runs code out of data, or a shell."""
    found = [
        f"{source.module}:{item.line} imports {item.root}" for item in source.imports if item.root in BANNED_IMPORTS
    ]
    from_names = {f"{item.module}.{item.name}": item.line for item in source.imports if item.name}
    found += [f"{source.module}:{line} imports {name}" for name, line in from_names.items() if name in BANNED_CALLS]
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in BANNED_CALLS:
            found.append(f"{source.module}:{node.lineno} calls {dotted(node.func)}")
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in BANNED_ARGUMENTS and not is_off:
                found.append(f"{source.module}:{node.lineno} passes {keyword.arg}")
    return found


def chance(source: Source) -> list[str]:
    """The scheduler and the cache: no clock, no random numbers."""
    if not source.matches(DETERMINISTIC):
        return []
    found = [
        f"{source.module}:{item.line} imports {item.module}; what it decides must follow from its input"
        for item in source.imports
        if item.root in CHANCE_IMPORTS or item.module in ("numpy.random", "torch.random")
    ]
    for node in source.nodes:
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CHANCE_CALLS or ".random." in name:
                found.append(f"{source.module}:{node.lineno} calls {name}; what it decides must follow from its input")
    return found


def habits(source: Source) -> list[str]:
    """Asserts carry a message, no global statements, nothing swallowed."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Assert) and node.msg is None:
            found.append(f"{source.module}:{node.lineno} asserts without a message")
        elif isinstance(node, ast.Global):
            found.append(f"{source.module}:{node.lineno} rebinds the global {', '.join(node.names)}")
        elif isinstance(node, ast.ExceptHandler) and _swallows(node):
            found.append(f"{source.module}:{node.lineno} catches everything and says nothing")
    return found


def _swallows(handler: ast.ExceptHandler) -> bool:
    catches_all = handler.type is None or dotted(handler.type) in ("Exception", "BaseException")
    return catches_all and all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body)
