"""The layout holds: every rule over the whole tree, and every rule over a small broken example that it must refuse."""

from collections import Counter
from pathlib import Path

import pytest

import architecture_rules as rules
from architecture_rules import Source

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / rules.PACKAGE
SOURCES = rules.read_sources(PACKAGE)
TEST_FILES = sorted(path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
ONE_FILE_RULES = (
    rules.syntax,
    rules.upward_imports,
    rules.room_imports,
    rules.config_imports,
    rules.triton_imports,
    rules.shape_of_modules,
    rules.sizes,
    rules.dangers,
    rules.chance,
    rules.habits,
)


def refuse(violations: list[str]) -> None:
    """One readable list of everything that is wrong."""
    if violations:
        pytest.fail(f"{len(violations)} violations:\n  " + "\n  ".join(violations), pytrace=False)


@pytest.mark.parametrize("rule", ONE_FILE_RULES, ids=lambda rule: rule.__name__)
def test_source_files_keep_every_rule(rule) -> None:
    refuse([violation for source in SOURCES for violation in rule(source)])


def test_torch_free_modules_import_no_torch() -> None:
    refuse(rules.torch_imports(SOURCES))


def test_import_circles_are_absent_and_found() -> None:
    refuse(rules.import_circles(SOURCES))
    lower = Source("engine.a", "def f():\n    from holdfast.engine.c import x")
    upper = [Source("engine.b", "from holdfast.engine import a"), Source("engine.c", "import holdfast.engine.b")]
    assert rules.import_circles([Source("engine", "", is_package=True), Source("engine.a", ""), *upper]) == []
    (found,) = rules.import_circles([Source("engine", "", is_package=True), lower, *upper])
    assert {"engine.a", "engine.b", "engine.c"} <= set(found.split())


def test_tests_mirror_packages() -> None:
    refuse(rules.untested_folders(SOURCES, set(TEST_FILES)))


def test_names_of_test_files_are_unique() -> None:
    counts = Counter(Path(name).name for name in TEST_FILES)
    refuse([f"{name} exists {count} times under tests/" for name, count in counts.items() if count > 1])


def test_architecture_page_has_every_package_and_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    refuse([f"docs/architecture.md: {violation}" for violation in rules.misplaced(rules.places(PACKAGE), page)])


def test_source_files_have_first_line() -> None:
    lines = {path.relative_to(ROOT).as_posix(): rules.first_line(path) for path in rules.listed_files(PACKAGE)}
    refuse([f"{name}: the docstring's first line is {line!r}" for name, line in lines.items() if len(line) < 10])


BROKEN = [
    (rules.syntax, "cache.pages", "def f(:", "cache.pages:1 is not Python 3.11"),
    (
        rules.upward_imports,
        "cache.pages",
        "from holdfast.api.llm import LLM",
        "api.llm, which is not below cache",
    ),
    (rules.upward_imports, "cache.pages", "def f():\n    import holdfast.runner.batch", "runner.batch"),
    (rules.upward_imports, "memory.ledger", "if TYPE_CHECKING:\n    from holdfast.cache import spec", "cache"),
    (rules.upward_imports, "quant.formats", "from holdfast.memory.sizes import format_bytes", "not below quant"),
    (rules.upward_imports, "kernels.gemm.linear", "from holdfast.cache.spec import CacheSpec", "not below kernels"),
    (rules.upward_imports, "text.chat", "from holdfast.runner.sampling.batch import StepResult", "not below text"),
    (rules.upward_imports, "layers.norm", "from holdfast import LLM", "import it from its home"),
    (rules.upward_imports, "layers.norm", "from holdfast import engine", "imports engine"),
    (rules.upward_imports, "layers.norm", "try:\n    x()\nexcept E:\n    import holdfast.models.spec", "models.spec"),
    (rules.upward_imports, "layers.norm", "import_module('holdfast.models.spec')", "models.spec"),
    (rules.upward_imports, "config", "from holdfast.cache.spec import CacheSpec", "not below config"),
    (rules.upward_imports, "plugins.thing", "", "is in no layer"),
    (rules.upward_imports, "cli.app", "from holdfast.plugins import thing", "is in no layer"),
    (rules.room_imports, "kernels.gemm.bits", "from holdfast.kernels.moe.routing import route", "not below gemm"),
    (rules.room_imports, "kernels.gemm.bits", "from holdfast.kernels.moe import routing", "not below gemm"),
    (rules.room_imports, "kernels.attention.write", "from holdfast.kernels import gemm", "not below attention"),
    (rules.room_imports, "kernels.norm", "import holdfast.kernels.gemm.bits", "not below kernels"),
    (rules.room_imports, "loading.gguf.names", "from holdfast.loading.model_files import x", "not below gguf"),
    (rules.room_imports, "loading.attic.chest", "", "is no room of loading"),
    (rules.config_imports, "models.decoder", "from holdfast.config import Limits", "imports config"),
    (rules.config_imports, "attention.select", "from holdfast import config", "imports config"),
    (rules.triton_imports, "kernels.rotate", "import triton.language as tl", "imports triton"),
    (rules.triton_imports, "kernels.rotate", "def f():\n    from triton import jit", "imports triton"),
    (rules.shape_of_modules, "cache.pages", "from .spec import CacheSpec", "imports relatively"),
    (rules.shape_of_modules, "cache.utils", "", "name the noun"),
    (rules.shape_of_modules, "core", "", "name the noun"),
    (rules.shape_of_modules, "cache.core", "", "name the noun"),
    (rules.sizes, "cache.pages", "x = 1\n" * 801, "has 801 lines"),
    (rules.sizes, "cache.pages", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    (rules.sizes, "cache.pages", "class A:\n    async def g(self):\n" + "        x = 1\n" * 60, "g has 61 lines"),
    (rules.sizes, "kernels.paged", "x = 1\n" * 801, "has 801 lines"),
    (rules.dangers, "loading.sources.source", "import pickle", "imports pickle"),
    (rules.dangers, "loading.sources.source", "from marshal import loads", "imports marshal"),
    (rules.dangers, "loading.sources.source", "from torch import load", "imports torch.load"),
    (rules.dangers, "loading.sources.source", "weights = torch.load(path)", "calls torch.load"),
    (rules.dangers, "text.chat", "eval(source)", "calls eval"),
    (rules.dangers, "text.chat", "import os\nos.system(command)", "calls os.system"),
    (rules.dangers, "text.chat", "load(x, trust_remote_code=True)", "passes trust_remote_code"),
    (rules.dangers, "text.chat", "subprocess.run(x, shell=flag)", "passes shell"),
    (rules.chance, "engine.scheduler", "import time", "imports time"),
    (rules.chance, "cache.prefix", "from random import choice", "imports random"),
    (rules.chance, "cache.storage", "np.random.rand(3)", "calls np.random.rand"),
    (rules.chance, "cache.storage", "torch.rand(3)", "calls torch.rand"),
    (rules.habits, "cache.pages", "assert x == 1", "asserts without a message"),
    (rules.habits, "cache.pages", "def f():\n    global x\n    x = 1", "rebinds the global x"),
    (rules.habits, "cache.pages", "try:\n    f()\nexcept Exception:\n    pass", "says nothing"),
]


@pytest.mark.parametrize(
    ("rule", "module", "text", "words"), BROKEN, ids=[f"{rule.__name__}: {words}" for rule, _, _, words in BROKEN]
)
def test_rule_finds_its_violation(rule, module: str, text: str, words: str) -> None:
    violations = rule(Source(module, text))
    assert any(words in violation for violation in violations), violations


SOUND = [
    (rules.upward_imports, "memory.tensor_spec", "from holdfast.quant.formats import bytes_for"),
    (rules.upward_imports, "cache.pages", "from holdfast.cache.spec import X\nfrom holdfast.errors import Y"),
    (rules.upward_imports, "cli.app", "from holdfast import __version__"),
    (rules.upward_imports, "", "from holdfast.api.llm import LLM"),
    (rules.room_imports, "kernels.moe.rows", "from holdfast.kernels.gemm import linear"),
    (
        rules.room_imports,
        "kernels.attention.write",
        "from holdfast.kernels import norm\nimport holdfast.kernels.attention.x",
    ),
    (rules.room_imports, "loading.directory", "from holdfast.loading.quantized.manifest import x"),
    (rules.room_imports, "engine.attic.chest", "from holdfast.engine.plan import x"),
    (rules.config_imports, "engine.scheduler", "from holdfast.config import Limits"),
    (rules.triton_imports, "kernels.triton_compat", "import triton"),
    (rules.shape_of_modules, "engine.core", ""),
    (rules.sizes, "kernels.paged", "def f():\n" + "    x = 1\n" * 60),
    (rules.sizes, "cache.pages", "def f():\n" + "    x = 1\n" * 59),
    (rules.dangers, "models.decoder", "model.eval()\nre.compile('x')\nnp.load(f, allow_pickle=False)"),
    (rules.chance, "runner.sampling.sampler", "import random"),
    (rules.habits, "cache.pages", "assert x == 1, f'{x=}'\ntry:\n    f()\nexcept OSError:\n    pass"),
]


@pytest.mark.parametrize(
    ("rule", "module", "text"), SOUND, ids=[f"{rule.__name__}: {module}" for rule, module, _ in SOUND]
)
def test_sound_code_is_left_alone(rule, module: str, text: str) -> None:
    assert rule(Source(module, text)) == []


def torch_free_tree(**texts: str) -> list[Source]:
    """One file for every pattern of the list, with some of the texts replaced."""
    names = {pattern.replace("*", "x") for pattern in rules.TORCH_FREE} | {name.replace("__", ".") for name in texts}
    return [Source(name, texts.get(name.replace(".", "__"), "")) for name in sorted(names)]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (torch_free_tree(engine__scheduler="import torch"), "engine.scheduler:1 imports torch"),
        (torch_free_tree(cache__new='"""Things; no torch."""\nimport torch'), "importing cache.new imports torch"),
        (torch_free_tree(text__chat="def f():\n    import transformers"), "imports transformers"),
        (
            torch_free_tree(cache__prefix="from holdfast.cache.storage import S", cache__storage="import torch"),
            "importing cache.prefix -> cache.storage imports torch",
        ),
        (torch_free_tree()[1:], "and no file matches"),
    ],
    ids=["torch", "against its own word", "lazily", "through another file", "a name that is gone"],
)
def test_torch_in_a_torch_free_module_is_found(tree: list[Source], words: str) -> None:
    sound = torch_free_tree(cache__new='"""Things; no torch until a read."""\ndef f():\n    import torch')
    assert rules.torch_imports(sound) == []
    assert any(words in violation for violation in rules.torch_imports(tree)), rules.torch_imports(tree)


def test_untested_folders_finds_folder_without_tests() -> None:
    tree = [Source("errors", ""), Source("cache.pages", ""), Source("cache", "", is_package=True)]
    tree += [Source("kernels.gemm.linear", "")]
    assert rules.untested_folders(tree, {"cache/test_anything.py", "kernels/gemm/test_products.py"}) == []
    assert rules.untested_folders(tree, {"test_errors.py", "kernels/test_gemm.py"}) == [
        "cache has no test in tests/cache/",
        "kernels/gemm has no test in tests/kernels/gemm/",
    ]


@pytest.mark.parametrize(
    ("page", "violations"),
    [
        ("| `cache` | x |\n| `config.py` | x |\n- **`cache/deep`**: x", []),
        ("| `cache` | x |\n| `config.py` | x |\n`cache/deep`: x", ["cache/deep has no paragraph"]),
        ("| `config.py` | x |\n**`cache/deep`**: x", ["cache has no row"]),
        ("| `cache` |\n| `config.py` |\n| `gone` | x |\n**`cache/deep`**: x", ["gone is named and not there"]),
        ("| `cache` |\n| `cache` |\n| `config.py` |\n**`cache/deep`**: x", ["cache stands there 2 times"]),
    ],
)
def test_misplaced_finds_places_missing_on_page(tmp_path: Path, page: str, violations: list[str]) -> None:
    for name in (
        "__init__.py",
        "config.py",
        "cache/__init__.py",
        "cache/pages.py",
        "cache/deep/copy.c",
        "text/__init__.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert rules.places(tmp_path) == {"config.py", "cache", "cache/deep"}, "an empty folder is no place"
    assert rules.misplaced(rules.places(tmp_path), page) == violations


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", '"""Page ids.\n\nMore words."""\n', "Page ids."),
        ("a.py", "x = 1\n", ""),
        ("a.py", "def f(:\n", ""),
        ("a.c", "// Copies pages.\n//\n// More words.\n", "Copies pages."),
        ("a.h", "#pragma once\n", ""),
    ],
)
def test_first_line_reads_docstring_or_comment(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    assert rules.first_line(tmp_path / name) == line


def test_shape_of_modules_finds_full_init_file() -> None:
    assert rules.shape_of_modules(Source("cache", "import os", is_package=True)) == ["cache/__init__.py is not empty"]
