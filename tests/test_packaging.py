"""What is shipped: the wheel holds the package and its licence and nothing else, and the pins are plain and whole."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from for_each import for_each

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        "out",
        ".",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "out").glob("*.whl")
    return path


def test_wheel_holds_package_and_licence_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = [path for path in (ROOT / "src" / "holdfast").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert "holdfast/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_imports_without_torch(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; import holdfast; holdfast.SamplingParams(); print(holdfast.__file__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_wheel_declares_core_dependencies(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = archive.read(name).decode()
    needs = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert {normal(need) for need in needs} == {
        "torch",
        "safetensors",
        "tokenizers",
        "jinja2",
        "msgspec",
        "numpy",
        "rich",
    }
    assert "Requires-Dist: torch<2.14,>=2.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata


@for_each("pin", PINS)
def test_pins_are_plain_versions(pin: str) -> None:
    """No local suffix, marker, address or path: pip is free to take the wheel that fits the machine."""
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9]+(\.[0-9a-z]+)*", pin)


def test_pins_are_sorted_and_unique() -> None:
    names = [normal(pin.partition("==")[0]) for pin in PINS]
    assert len(set(names)) == len(names)
    assert sorted(names) == names


def test_pins_cover_everything_that_is_required() -> None:
    """Walks the requirements of what is installed: each package that the project brings in has a pin."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    pinned = {normal(pin.partition("==")[0]) for pin in PINS}
    waiting = [Requirement(text) for text in PROJECT["dependencies"]]
    waiting += [Requirement(text) for text in PROJECT["optional-dependencies"]["dev"]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            if (normal(requirement.name), extra) in seen:
                continue
            seen.add((normal(requirement.name), extra))
            try:
                needs = requires(requirement.name) or []
            except PackageNotFoundError:
                continue
            inner = [Requirement(text) for text in needs]
            waiting += [need for need in inner if need.marker is None or need.marker.evaluate({"extra": extra})]
    missing = {name for name, _ in seen} - pinned - {name for name, _ in seen if name.startswith(("nvidia-", "cuda-"))}
    assert not missing, f"constraints.txt has no pin for {sorted(missing)}"


def test_pins_satisfy_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    versions = {normal(name): version for name, _, version in (pin.partition("==") for pin in PINS)}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert versions[normal(requirement.name)] in requirement.specifier, text
    assert versions["torch"] == "2.13.0"
