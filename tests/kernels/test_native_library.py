"""Each case in a process of its own: the library is loaded once in a process."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.kernels import native_library
from holdfast.kernels.native_library import SIGNATURES, native_for

SCRIPT = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr, format="%(message)s")
import torch
from holdfast.kernels.linear import linear, linear_reference
from holdfast.kernels.native_library import native_library
x, weight = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(5, 4)
assert torch.equal(linear(x, weight, None), linear_reference(x, weight, None)), "wrong"
library = native_library()
print(json.dumps({"path": None if library is None else library._name}))
"""
NO_HOME = """
import pwd
def getpwuid(uid): raise KeyError(uid)
pwd.getpwuid = getpwuid
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is there")


def start(script: str = SCRIPT, **changes: str | None) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("HOLDFAST_NATIVE", None)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> tuple[Path | None, str]:
    """The path of the library that was loaded, if any, and the log."""
    output, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    path = json.loads(output)["path"]
    return None if path is None else Path(path), log


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A folder with a cc that writes a line for each time it is run, and then is the real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_script(folder / "cc", f'echo run >> "{folder}/runs"\nexec {shutil.which("cc")} "$@"\n')
    return folder


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)


def path_with(compiler: Path) -> str:
    return f"{compiler}{os.pathsep}{os.environ['PATH']}"


def num_runs(compiler: Path) -> int:
    runs = compiler / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def test_compiled_once_and_kept_by_processes_that_start_together_too(tmp_path, compiler):
    environment = {"PATH": path_with(compiler), "HOLDFAST_CACHE": str(tmp_path / "cache")}
    (path, first_log), (same_path, second_log) = map(finish, [start(**environment), start(**environment)])
    assert path is not None, first_log
    assert same_path == path, second_log
    assert path.parent == tmp_path / "cache"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "something was left behind"
    compiled, written = num_runs(compiler), path.stat().st_mtime_ns
    assert 1 <= compiled <= 2
    assert finish(start(**environment)) == (path, "")
    assert num_runs(compiler) == compiled, "the third process compiled again"
    assert path.stat().st_mtime_ns == written


def test_a_damaged_library_is_compiled_again(tmp_path, compiler, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    damaged = native_library._library_path(str(compiler / "cc"))
    damaged.write_bytes(b"no library at all")
    path, log = finish(start(PATH=path_with(compiler)))
    assert path == damaged, log
    assert "is damaged and is compiled again" in log
    assert num_runs(compiler) == 1


def test_without_a_compiler_torch_runs_and_the_log_says_so(tmp_path):
    path, log = finish(start(PATH="", HOLDFAST_CACHE=str(tmp_path)))
    assert path is None
    assert "plain torch because no C compiler is found" in log


def test_switched_off(tmp_path, compiler):
    path, log = finish(start(HOLDFAST_NATIVE="0", PATH=path_with(compiler), HOLDFAST_CACHE=str(tmp_path / "cache")))
    assert path is None
    assert "HOLDFAST_NATIVE=0" in log
    assert num_runs(compiler) == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [('echo "cannot do it" >&2; exit 1', "cannot do it"), ("exit 0", "No such file"), ("kill -9 $$", "ended with -9")],
    ids=["fails", "writes nothing", "is killed"],
)
def test_a_broken_compiler_costs_speed_only(tmp_path, compiler, body, reason):
    write_script(compiler / "cc", body + "\n")
    path, log = finish(start(PATH=path_with(compiler), HOLDFAST_CACHE=str(tmp_path / "cache")))
    assert path is None
    assert "compiling them failed" in log
    assert reason in log
    assert list((tmp_path / "cache").iterdir()) == [], "something was left behind"


@pytest.mark.parametrize("mode", [0o777, 0o720], ids=oct)
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, compiler, mode):
    """What lies in the folder is executed: a stranger's file there would be run."""
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    path, log = finish(start(PATH=path_with(compiler), HOLDFAST_CACHE=str(cache)))
    assert path is None
    assert "can be written by others" in log
    assert "HOLDFAST_CACHE" in log
    assert num_runs(compiler) == 0


def test_a_cache_that_is_no_folder(tmp_path):
    (tmp_path / "cache").write_text("a file")
    path, log = finish(start(HOLDFAST_CACHE=str(tmp_path / "cache")))
    assert path is None
    assert "File exists" in log


def test_a_user_without_a_home(tmp_path):
    """As in containers that run under a number nobody has a name for."""
    path, log = finish(start(NO_HOME + SCRIPT, HOME=None, HOLDFAST_CACHE=None, XDG_CACHE_HOME=None))
    assert path is None
    assert "set HOLDFAST_CACHE to a folder of your own" in log


def test_the_user_s_cache_folder_is_taken(tmp_path, compiler):
    write_script(compiler / "cc", 'echo "$@" >&2; exit 1\n')
    _, log = finish(start(PATH=path_with(compiler), HOLDFAST_CACHE=None, XDG_CACHE_HOME=str(tmp_path)))
    assert f"-o {tmp_path / 'holdfast'}" in log


@pytest.mark.usefixtures("native")
def test_kernels_take_float32_on_the_cpu_laid_out_in_order():
    good = torch.ones(4, 4)
    assert native_for(good, None, good) is not None
    for bad in (good.half(), good.double(), good.T[:2], good[:, ::2], torch.ones(4, 4, device="meta")):
        assert native_for(good, bad) is None
    assert native_for(good[1:3]) is not None


def test_every_signature_is_in_the_library(native):
    for name, arguments in SIGNATURES.items():
        assert getattr(native, name).argtypes == arguments
