"""The compiled library is kept and shared; tests that need other kernels run in processes of their own."""

import ctypes
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.kernels import native_library
from holdfast.kernels.native_library import SIGNATURES, native_for

ONE = """
import json, logging, os, sys
logging.basicConfig(stream=sys.stderr, format="%(message)s")
import torch
from holdfast.kernels.gemm.linear import linear, plain_linear_reference
from holdfast.kernels.native_library import native_library
def load():
    library = native_library()
    x, weight = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(5, 4)
    assert torch.equal(linear(x, weight, None), plain_linear_reference(x, weight, None)), "wrong"
    return None if library is None else library._name
"""
LOAD = ONE + "print(json.dumps(load()))"
LOAD_IN_TURN = (
    ONE
    + """
import io, pwd
named = pwd.getpwuid
def unnamed(uid): raise KeyError(uid)
results = {}
for name, changes in json.load(sys.stdin).items():
    os.environ.update({key: value for key, value in changes.items() if value is not None})
    for key in [key for key, value in changes.items() if value is None]: os.environ.pop(key, None)
    pwd.getpwuid = named if "HOME" in os.environ else unnamed
    log = io.StringIO()
    logging.basicConfig(stream=log, format="%(message)s", force=True)
    native_library.cache_clear()
    results[name] = (load(), log.getvalue())
print(json.dumps(results))
"""
)

RUNS_TO_COMPILE = len(list(native_library.SOURCES.glob("*.c"))) + 1
"""Runs of the compiler: once a file, and once to make a library of them."""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is there")


def start(script: str, **changes: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | changes
    environment.pop("HOLDFAST_NATIVE", None)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[Path | None, str]:
    """The path of the library that was loaded, if any, and the log."""
    output, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    path = json.loads(output)
    return None if path is None else Path(path), log


def make_compiler(folder: Path, body: str) -> Path:
    """A folder with a cc that writes a line for each time it is run, and then does what the body says."""
    folder.mkdir(parents=True)
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\necho run >> "{folder}/runs"\n{body}\n')
    compiler.chmod(0o755)
    return folder


def path_with(compiler: Path) -> str:
    return f"{compiler}{os.pathsep}{os.environ['PATH']}"


def num_runs(compiler: Path) -> int:
    runs = compiler / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


COMPILE_ONCE = """
is_object=; output=
for word in "$@"; do
    [ "$last" = -o ] && output=$word
    [ "$word" = -c ] && is_object=yes
    last=$word
done
[ "$is_object" ] || exec {cc} "$@" -O0
kept="{folder}/$(basename "$last").o"
until mkdir "$kept.lock" 2> /dev/null; do sleep 0.05; done
trap 'rmdir "$kept.lock"' EXIT
[ -f "$kept" ] || {cc} "$@" -O0 -o "$kept" || exit 1
cp "$kept" "$output"
"""


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a real compiler keeps what it made of a source, for later requests of all processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def real_compiler(tmp_path: Path, objects: Path) -> Path:
    """Without its optimizations, which take most of its time, and once for all tests."""
    return make_compiler(tmp_path / "bin", COMPILE_ONCE.format(cc=shutil.which("cc"), folder=objects))


@pytest.fixture
def loaded_anew() -> Iterator[None]:
    """Load the library in this test, and again after it."""
    native_library.native_library.cache_clear()
    yield
    native_library.native_library.cache_clear()


@pytest.mark.slow
def test_native_library_concurrent_processes_compile_once(tmp_path, real_compiler, monkeypatch, caplog, loaded_anew):
    environment = {"PATH": path_with(real_compiler), "HOLDFAST_CACHE": str(tmp_path / "cache")}
    (path, first_log), (same_path, second_log) = map(finish, [start(LOAD, **environment), start(LOAD, **environment)])
    assert path is not None, first_log
    assert same_path == path, second_log
    assert path.parent == tmp_path / "cache"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "something was left behind"
    compiled, written = num_runs(real_compiler), path.stat().st_mtime_ns
    assert compiled in (RUNS_TO_COMPILE, 2 * RUNS_TO_COMPILE)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert native_library.native_library() is not None
    assert (native_library.find_native_build().path, caplog.text) == (path, "")
    assert num_runs(real_compiler) == compiled, "the third process compiled again"
    assert path.stat().st_mtime_ns == written


def test_compile_native_counts_compiles_and_skips_loaded_library(tmp_path, real_compiler, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", path_with(real_compiler))
    native_library.native_library.cache_clear()
    seen: list[tuple[Path, int, int]] = []
    native_library.compile_native(lambda *facts: seen.append(facts))
    build, total = native_library.find_native_build(), RUNS_TO_COMPILE - 1
    assert build.compiler == str(real_compiler / "cc")
    assert build.path.exists()
    assert seen == [(build.path, num_done, total) for num_done in range(total + 1)]
    native_library.compile_native(lambda *facts: pytest.fail("it is compiled already"))
    monkeypatch.setenv("PATH", path_with(make_compiler(tmp_path / "broken", "exit 1")))
    native_library.compile_native(lambda path, num_done, num_total: None)
    assert not native_library.find_native_build().path.exists()
    monkeypatch.undo()
    assert native_library.native_library() is not None
    native_library.compile_native(lambda *facts: pytest.fail("this process has them"))


def test_native_library_damaged_file_is_recompiled(tmp_path, real_compiler, monkeypatch, caplog, loaded_anew):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", path_with(real_compiler))
    native_library.find_native_build().path.write_bytes(b"no library at all")
    assert native_library.native_library() is not None, caplog.text
    assert "is damaged and is compiled again" in caplog.text
    assert num_runs(real_compiler) == RUNS_TO_COMPILE


def test_native_library_path_changes_with_any_source(tmp_path, monkeypatch):
    """Headers too: what was compiled before one changed is never loaded again."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_library, "SOURCES", shutil.copytree(native_library.SOURCES, tmp_path / "sources"))
    sources = [path for path in native_library.SOURCES.iterdir() if path.suffix in (".c", ".h")]
    assert {path.suffix for path in sources} == {".c", ".h"}
    seen = [native_library.find_native_build().path]
    assert native_library.find_native_build().path == seen[0]
    for path in sources:
        path.write_text(path.read_text() + "\n")
        seen.append(native_library.find_native_build().path)
    assert len(set(seen)) == len(sources) + 1


FAILING_COMPILERS = {
    "fails": ('echo "cannot do it: $@" >&2; exit 1', "compiling them failed: cannot do it"),
    "writes nothing": ("exit 0", "compiling them failed: [Errno 2] No such file"),
    "is killed": ("kill -9 $$", "compiling them failed: the compiler ended with -9"),
}
OPEN_MODES = {"anybody": 0o777, "the group": 0o720}


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, tuple[str | None, str]]:
    """What each case loaded, and what it logged; all cases one after the other in one process."""
    root = tmp_path_factory.mktemp("native")
    home = {"HOME": os.environ.get("HOME", "/"), "XDG_CACHE_HOME": None, "HOLDFAST_NATIVE": None}
    fails = path_with(make_compiler(root / "compilers" / "plain", FAILING_COMPILERS["fails"][0]))
    cases: dict[str, dict[str, str | None]] = {}
    for name, (body, _) in FAILING_COMPILERS.items():
        compiler = make_compiler(root / "compilers" / name, body)
        cases[name] = {"PATH": path_with(compiler), "HOLDFAST_CACHE": str(root / "cache" / name)}
    for name, mode in OPEN_MODES.items():
        (root / "open" / name).mkdir(parents=True)
        (root / "open" / name).chmod(mode)
        cases[name] = {"PATH": os.environ["PATH"], "HOLDFAST_CACHE": str(root / "open" / name)}
    (root / "file").write_text("")
    cases["no compiler"] = {"PATH": "", "HOLDFAST_CACHE": str(root / "unused")}
    cases["switched off"] = {"PATH": fails, "HOLDFAST_NATIVE": "0", "HOLDFAST_CACHE": str(root / "unused")}
    cases["a file"] = {"PATH": os.environ["PATH"], "HOLDFAST_CACHE": str(root / "file")}
    cases["a user's own"] = {"PATH": fails, "HOLDFAST_CACHE": None, "XDG_CACHE_HOME": str(root / "own")}
    cases["no home"] = {"PATH": os.environ["PATH"], "HOLDFAST_CACHE": None, "HOME": None}
    process = start(LOAD_IN_TURN)
    output, log = process.communicate(json.dumps({name: home | case for name, case in cases.items()}), timeout=120)
    assert process.returncode == 0, log
    assert not (root / "unused").exists(), "a folder was made where nothing was to be kept"
    for name in FAILING_COMPILERS:
        assert list((root / "cache" / name).iterdir()) == [], "something was left behind"
    return json.loads(output)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        *((name, reason) for name, (_, reason) in FAILING_COMPILERS.items()),
        *((name, "can be written by others; set HOLDFAST_CACHE to a folder of your own") for name in OPEN_MODES),
        ("no compiler", "no C compiler is found"),
        ("switched off", "HOLDFAST_NATIVE=0"),
        ("a file", "File exists"),
        ("a user's own", f"{os.sep}own{os.sep}holdfast{os.sep}"),
        ("no home", "names no folder here; set HOLDFAST_CACHE to a folder of your own"),
    ],
)
def test_native_library_failure_uses_torch_and_logs_once(failures, case, reason):
    """Results were right in each case. A folder that others may write to is refused, since what lies there is run."""
    path, log = failures[case]
    assert path is None
    assert log.count("\n") == log.count("CPU kernels run in plain torch because ") == 1, log
    assert reason in log


@pytest.mark.usefixtures("native")
def test_native_for_accepts_contiguous_float32_on_cpu():
    good = torch.ones(4, 4)
    assert native_for(good, None, good) is not None
    for bad in (good.half(), good.double(), good.T[:2], good[:, ::2], torch.ones(4, 4, device="meta")):
        assert native_for(good, bad) is None
    assert native_for(good[1:3]) is not None


def test_native_library_has_every_signature(native):
    for name, arguments in SIGNATURES.items():
        assert getattr(native, name).argtypes == arguments


def test_native_signatures_match_the_c_functions():
    """What C takes for a pointer, a long or a float is given as one, and nothing in C is out of reach."""
    found = {}
    for source in native_library.SOURCES.glob("*.c"):
        for name, arguments in re.findall(r"^void (holdfast_\w+)\(([^)]*)\)", source.read_text(), re.MULTILINE):
            kinds = ["*" if "*" in argument else argument.split()[0] for argument in arguments.split(",")]
            found[name] = [
                {"*": ctypes.c_void_p, "long": ctypes.c_long, "float": ctypes.c_float}[kind] for kind in kinds
            ]
    assert found == SIGNATURES
