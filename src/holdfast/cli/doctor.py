"""`holdfast doctor`: installed software, and missing parts of each feature; no torch.

`gather` collects facts; `abilities` is a function of the facts alone.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import requires, version
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast import __version__
from holdfast.cli.layout import aligned, wrapped
from holdfast.cli.measure import measure, probe_command, rate_rows
from holdfast.cli.options import Given
from holdfast.cli.terminal import dumps, write_answer
from holdfast.errors import HoldfastError
from holdfast.loading.model_files import INSTALL, find_default_model
from holdfast.loading.quantized.cache import cache_entries, cache_folder
from holdfast.memory.devices import LEAST_CAPABILITY, available_host_bytes
from holdfast.memory.sizes import format_bytes

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "rich")
"""Packages that every model needs."""
SERVER = ("fastapi", "uvicorn", "httptools", "prometheus-client")
GRAMMARS = ("llguidance",)
EXTRAS = ("huggingface_hub", *SERVER, *GRAMMARS, "transformers", "gguf")
PROBE_SECONDS = 120
DRIVER_FILE = Path("/proc/driver/nvidia/version")
COMPILERS = ("cc", "gcc", "clang")
MAX_MODELS = 12
"""Models of the Hub cache that are listed."""
T = TypeVar("T")


class GpuFacts(NamedTuple):
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Facts that torch reports in another process."""

    version: str
    cuda: str | None = None
    """CUDA version of the build."""
    hip: str | None = None
    triton: str | None = None
    num_threads: int = 1
    gpus: tuple[GpuFacts, ...] = ()
    cuda_problem: str | None = None
    kernel_file: str | None = None
    are_kernels_compiled: bool = False
    kernel_problem: str | None = None


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A cache folder."""

    what: str
    path: str
    num_bytes: int | None = None
    free_bytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Installed software, devices and folders."""

    python: str = ""
    system: str = ""
    num_processors: int = 1
    host_bytes: int | None = None
    holdfast: str = __version__
    place: str = ""
    tree: str | None = None
    """The source tree, if it runs from one."""
    pip: str = "pip"
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Versions by name; None if not installed."""
    torch: TorchFacts | None = None
    torch_problem: str | None = None
    torch_range: str | None = None
    """Versions of torch that holdfast supports."""
    driver: str | None = None
    compiler: str | None = None
    folders: tuple[FolderFacts, ...] = ()
    hub_models: tuple[str, ...] = ()
    hub_problem: str | None = None
    default_model: str | None = None


class Ability(NamedTuple):
    """A feature, with its support or what is missing."""

    what: str
    is_possible: bool
    words: str
    extra: str | None = None
    """This package's extra that adds the feature."""


class DoctorOptions(NamedTuple):
    """Options of this command."""

    as_json: bool
    measure: bool = False


def doctor(options: DoctorOptions, engine: Given) -> int:
    """Print facts, abilities and optional rates; return 0 if a model can run."""
    facts = gather()
    can = abilities(facts)
    found = measure() if options.measure else None
    if options.as_json:
        record: dict[str, object] = {"facts": asdict(facts), "abilities": [ability._asdict() for ability in can]}
        record["install"] = install_line(facts, can)
        if found is not None:
            record["measured"] = {**found._asdict(), "devices": [device._asdict() for device in found.devices]}
        write_answer(dumps(record) + "\n")
    else:
        columns = shutil.get_terminal_size().columns
        lines = report_lines(facts, can, columns)
        if found is not None:
            lines = ["measured", *_table(rate_rows(found), columns), "", *lines]
        write_answer("\n".join((*lines, "")))
    return 0 if can_run(can) else 1


def can_run(can: tuple[Ability, ...]) -> bool:
    """Return True if a model can run on some device."""
    return any(ability.is_possible for ability in can if ability.what in (RUN_GPU, RUN_CPU))


PLAN, RUN_GPU, RUN_CPU, COMPILE = "plan memory", "run on a GPU", "run on a CPU", "compiled CPU kernels"
DEFAULT_MODEL, DOWNLOAD, KEEP, COMPARE = (
    "default model",
    "download models",
    "keep quantized weights",
    "compare with transformers",
)
SERVE, STRUCTURE = "serve over HTTP", "structured output"
TESTED = "-c constraints.txt takes the versions of our tests"


def abilities(facts: Facts) -> tuple[Ability, ...]:
    """List the features, with missing parts and how to install them."""
    return (
        Ability(PLAN, True, "needs only holdfast itself"),
        _run_on_gpu(facts),
        _run_on_cpu(facts),
        _compile(facts),
        _default_model(facts),
        _with_extra(facts, SERVE, SERVER, "server", "plan, run, chat and LLM work without it"),
        _with_extra(
            facts, STRUCTURE, GRAMMARS, "server", "answers without a grammar, and optional tools, work without it"
        ),
        _with_extra(facts, DOWNLOAD, ("huggingface_hub",), "hub", "Hub ids in the local cache work without it"),
        _keep_weights(facts),
        _with_extra(
            facts, COMPARE, ("transformers",), "transformers", "only bench --against and TurboQuantCache use it"
        ),
    )


def _missing(facts: Facts) -> str | None:
    """Say why no model can run; None if one can."""
    absent = [name for name in PACKAGES if facts.packages.get(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed; pip install {' '.join(absent)}"
    if facts.torch is None:
        return f"torch does not start ({facts.torch_problem}); reinstall it"
    return None


def _run_on_cpu(facts: Facts) -> Ability:
    problem = _missing(facts)
    if problem is not None or facts.torch is None:
        return Ability(RUN_CPU, False, problem or "")
    free = "" if facts.host_bytes is None else f", {format_bytes(facts.host_bytes)} of memory free"
    return Ability(RUN_CPU, True, f"{facts.torch.num_threads} threads{free}{_outside(facts)}")


def _run_on_gpu(facts: Facts) -> Ability:
    problem, torch = _missing(facts), facts.torch
    if problem is not None or torch is None:
        return Ability(RUN_GPU, False, problem or "")
    least, versions = ".".join(map(str, LEAST_CAPABILITY)), f" ({facts.torch_range})" if facts.torch_range else ""
    able = [gpu for gpu in torch.gpus if gpu.capability >= LEAST_CAPABILITY]
    if torch.hip is not None:
        problem = "torch is built for ROCm, and AMD GPUs are not supported; install a CUDA build for an NVIDIA GPU"
    elif torch.cuda is None and facts.driver is None:
        problem = "no NVIDIA driver, and torch has no CUDA"
    elif torch.cuda is None:
        problem = f"torch {torch.version} has no CUDA; install a CUDA build of torch{versions}"
    elif torch.cuda_problem is not None:
        problem = (
            f"{torch.cuda_problem}; torch is built for CUDA {torch.cuda}, the driver is {facts.driver or 'missing'}"
        )
    elif not torch.gpus:
        problem = "torch sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    elif not able:
        problem = f"{_gpu_words(torch.gpus[0])}: below {least}, the minimum"
    elif torch.triton is None:
        problem = "Triton is not installed; pip install triton"
    if problem is not None:
        return Ability(RUN_GPU, False, problem)
    older = [f"{_gpu_words(gpu)} is below {least} and not supported" for gpu in torch.gpus if gpu not in able]
    return Ability(RUN_GPU, True, "; ".join((*map(_gpu_words, able), *older)) + _outside(facts))


def _gpu_words(gpu: GpuFacts) -> str:
    free = "" if gpu.free_bytes is None else f", {format_bytes(gpu.free_bytes)} free"
    problem = "" if gpu.problem is None else f", {gpu.problem}"
    capability = ".".join(map(str, gpu.capability))
    return f"{gpu.name}, {format_bytes(gpu.total_bytes)}{free}, compute capability {capability}{problem}"


def _compile(facts: Facts) -> Ability:
    torch = facts.torch
    slow = "plain torch runs the same operations at about half the speed"
    if torch is None:
        words = "torch is needed first" if facts.compiler else f"no C compiler (cc, gcc, clang): {slow}; install gcc"
        return Ability(COMPILE, False, words)
    if torch.are_kernels_compiled:
        return Ability(COMPILE, True, f"in {torch.kernel_file}")
    if torch.kernel_problem is not None:
        return Ability(COMPILE, False, f"{torch.kernel_problem}; {slow}")
    return Ability(COMPILE, True, f"the first start on a CPU makes them with {facts.compiler}, in a few seconds")


def _default_model(facts: Facts) -> Ability:
    if facts.default_model is None:
        return Ability(DEFAULT_MODEL, False, f"not installed; {INSTALL}, or name a model")
    return Ability(DEFAULT_MODEL, True, facts.default_model)


def _with_extra(facts: Facts, what: str, packages: tuple[str, ...], extra: str, without: str) -> Ability:
    """Describe a feature that needs the packages of an extra."""
    absent = [name for name in packages if facts.packages.get(name) is None]
    if absent:
        return Ability(what, False, f"{', '.join(absent)} not installed, part of [{extra}]; {without}", extra)
    return Ability(what, True, ", ".join(f"{name} {facts.packages[name]}" for name in packages))


def install_line(facts: Facts, can: tuple[Ability, ...]) -> str | None:
    """Return the command that installs the missing extras; None if none is missing."""
    extras = ",".join(dict.fromkeys(ability.extra for ability in can if ability.extra))
    if not extras:
        return None
    if facts.tree is None:
        return f"pip install '.[{extras}]', in a clone of Holdfast: it is not on PyPI"
    return f"cd {facts.tree} && {facts.pip} install -e '.[{extras}]'"


def _keep_weights(facts: Facts) -> Ability:
    folder = next((folder for folder in facts.folders if folder.what == WEIGHTS), None)
    if folder is None or folder.problem is not None:
        return Ability(KEEP, False, "no folder for them" if folder is None else str(folder.problem))
    free = "" if folder.free_bytes is None else f", {format_bytes(folder.free_bytes)} free"
    return Ability(KEEP, True, f"in {folder.path}{free}")


def _outside(facts: Facts) -> str:
    """Warn about an unsupported version of torch."""
    if facts.torch is None or not facts.torch_range or is_within(facts.torch.version, facts.torch_range):
        return ""
    return f"; torch {facts.torch.version} is not {facts.torch_range}, which holdfast supports"


def is_within(found: str, range_words: str) -> bool:
    """Return True if a version is in a range such as >=2.11,<2.14."""
    release = _release(found)
    for part in range_words.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([0-9.]+)\s*", part)
        if match is None:
            continue
        bound = _release(match[2])
        if (release < bound) if match[1] == ">=" else (release >= bound):
            return False
    return True


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def report_lines(facts: Facts, can: tuple[Ability, ...], columns: int) -> list[str]:
    """Print facts, then abilities."""
    here = [(name, words) for name, words in _fact_rows(facts) if words]
    mark = {True: "ok", False: "no"}
    able = [(ability.what, f"{mark[ability.is_possible]}: {ability.words}") for ability in can]
    lines = ["here", *_table(here, columns), "", "can", *_table(able, columns), ""]
    install = install_line(facts, can)
    if install is not None:
        # One line, easy to copy.
        lines += [f"to install what is missing ({TESTED}):", f"  {install}", ""]
    first = "holdfast run -p 'Hello'" if facts.default_model else "holdfast run path/to/model -p 'Hello'"
    return [*lines, f"ready: {first}" if can_run(can) else "no model can run here yet: see the lines with no"]


def _fact_rows(facts: Facts) -> list[tuple[str, str]]:
    torch = facts.torch
    build = "" if torch is None else f", built for CUDA {torch.cuda}" if torch.cuda else ", built without CUDA"
    found = {name: version for name, version in facts.packages.items() if name != "torch"}
    memory = "" if facts.host_bytes is None else f", {format_bytes(facts.host_bytes)} of memory free"
    models = ", ".join(facts.hub_models[:MAX_MODELS])
    more = len(facts.hub_models) - MAX_MODELS
    return [
        ("holdfast", f"{facts.holdfast}, in {facts.place}"),
        ("python", facts.python),
        ("machine", f"{facts.system}, {facts.num_processors} processors{memory}"),
        ("torch", f"{torch.version}{build}" if torch else f"none: {facts.torch_problem}"),
        ("triton", (torch.triton or "none") if torch else ""),
        ("nvidia driver", facts.driver or "none"),
        *((f"GPU {index}", _gpu_words(gpu)) for index, gpu in enumerate(torch.gpus if torch else ())),
        ("C compiler", facts.compiler or "none"),
        ("packages", ", ".join(f"{name} {version or 'none'}" for name, version in found.items())),
        *((folder.what, _folder_words(folder)) for folder in facts.folders),
        ("Hub models", f"{models}{f' and {more} more' if more > 0 else ''}" if models else facts.hub_problem or "none"),
    ]


def _folder_words(folder: FolderFacts) -> str:
    if folder.problem is not None:
        return f"{folder.path}: {folder.problem}" if folder.path else folder.problem
    sizes = [
        "" if folder.num_bytes is None else f"{format_bytes(folder.num_bytes)} in it",
        "" if folder.free_bytes is None else f"{format_bytes(folder.free_bytes)} free",
    ]
    return ", ".join((folder.path, *(size for size in sizes if size)))


def _table(rows: list[tuple[str, str]], columns: int) -> list[str]:
    """Print two columns; wrap the second."""
    width = max(len(name) for name, _ in rows) + 2
    text_columns = max(columns - width - 4, 40)
    cells = []
    for name, words in rows:
        parts = wrapped(words, text_columns)
        cells += [(f"  {name if index == 0 else ''}", part) for index, part in enumerate(parts)]
    return aligned(cells, right=())


WEIGHTS, HUB = "weight cache", "Hub cache"


def gather() -> Facts:
    """Collect all facts; a failed part becomes an error text."""
    torch, torch_problem = None, "it is not installed"
    packages = {name: _guarded(lambda name=name: version(name))[0] for name in (*PACKAGES, *EXTRAS)}
    if packages["torch"] is not None:
        torch, torch_problem = _probe_torch()
    hub_models, hub_problem = _guarded(_hub_models)
    driver, _ = _guarded(_driver)
    model, _ = _guarded(lambda: str(find_default_model()))
    host_bytes, _ = _guarded(available_host_bytes)
    tree, _ = _guarded(_source_tree)
    return Facts(
        python=f"{platform.python_version()}, {sys.executable}",
        system=f"{platform.system()} {platform.machine()}",
        num_processors=os.cpu_count() or 1,
        host_bytes=host_bytes,
        place=str(Path(__file__).parents[1]),
        tree=str(tree) if tree is not None else None,
        pip=f"{sys.executable} -m pip",
        packages=packages,
        torch=torch,
        torch_problem=torch_problem if torch is None else None,
        torch_range=_torch_range(),
        driver=driver,
        compiler=next((path for path in map(shutil.which, COMPILERS) if path), None),
        folders=(
            _folder("CPU kernels", lambda: _kernel_folder(torch), lambda own: _file_bytes(own, "kernels-*.so")),
            _folder(WEIGHTS, cache_folder, lambda own: sum(entry.num_bytes for entry in cache_entries(own))),
            # The Hub stores each file of a repository once, as a blob.
            _folder(HUB, _hub_folder, lambda own: _file_bytes(own, "models--*/blobs/*")),
        ),
        hub_models=hub_models or (),
        hub_problem=hub_problem,
        default_model=model,
    )


def _guarded(find: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (result, None), or (None, the reason)."""
    try:
        return find(), None
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError, HoldfastError) as error:
        return None, " ".join(str(error).split())[:200] or type(error).__name__


def _source_tree() -> Path | None:
    """Return the source tree of this file; None if it is installed elsewhere."""
    tree = Path(__file__).parents[3]
    is_ours = 'name = "holdfast"' in (tree / "pyproject.toml").read_text(encoding="utf-8")
    return tree if is_ours and (tree / "src" / "holdfast") == Path(__file__).parents[1] else None


def _torch_range() -> str | None:
    """Return the versions of torch that the package declares; None if it is not installed."""
    needs = _guarded(lambda: requires("holdfast"))[0] or []
    found = next((match for match in (re.match(r"torch\b\s*([<>=0-9.,\s]+)", need) for need in needs) if match), None)
    return ",".join(sorted(found[1].strip().split(","), reverse=True)) if found else None


def _probe_torch() -> tuple[TorchFacts | None, str]:
    """Run torch_probe.py in another process, because a broken library may abort and a broken driver hang."""
    command = probe_command("torch_probe")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {PROBE_SECONDS} seconds"
    except OSError as error:
        return None, str(error)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"its process ended with {done.returncode}"]
        return None, last[0][:300]
    return read_probe(done.stdout)


def read_probe(text: str) -> tuple[TorchFacts | None, str]:
    """Parse the last line of the probe; libraries print lines too."""
    try:
        facts = json.loads(text.strip().splitlines()[-1])
        gpus = tuple(GpuFacts(**(gpu | {"capability": tuple(gpu["capability"])})) for gpu in facts.pop("gpus"))
        return TorchFacts(**facts, gpus=gpus), ""
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return None, f"its answer cannot be read ({type(error).__name__})"


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel module."""
    match = re.search(r"Kernel Module.*?\s([0-9]+\.[0-9.]+)\s", DRIVER_FILE.read_text())
    return match[1] if match else None


def _kernel_folder(torch: TorchFacts | None) -> Path:
    if torch is None or torch.kernel_file is None:
        raise OSError("not known without torch" if torch is None else torch.kernel_problem)
    return Path(torch.kernel_file).parent


def _hub_folder() -> Path:
    from holdfast.loading.hub.cache import cache_folder

    return cache_folder()


def _folder(what: str, find: Callable[[], Path], measure: Callable[[Path], int]) -> FolderFacts:
    """Describe a cache folder; `measure` sums its files."""
    folder, problem = _guarded(find)
    if folder is None:
        return FolderFacts(what, "", problem=problem)
    num_bytes, problem = _guarded(lambda: measure(folder))
    return FolderFacts(what, str(folder), num_bytes, _free_bytes(folder), problem)


def _file_bytes(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern) if file.is_file())


def _hub_models() -> tuple[str, ...]:
    from holdfast.loading.hub.cache import cached_repos

    return tuple(sorted(cached_repos()))


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes of a folder's disk."""
    for place in (folder, *folder.parents):
        free, _ = _guarded(lambda place=place: shutil.disk_usage(place).free)
        if free is not None:
            return free
    return None
