"""The GPU of this machine, as a stand-in for its driver names it."""

from pathlib import Path

import pytest

from holdfast.cli import present_gpu as module
from holdfast.cli.present_gpu import PresentGpu, no_device_note, present_gpu


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(script: str) -> None:
        path = tmp_path / module.DRIVER
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setattr(
        module.shutil, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None
    )
    return make


def test_present_gpu_without_a_driver_is_none(driver) -> None:
    assert present_gpu() is None
    assert "--gpu h200" in no_device_note()


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("NVIDIA GeForce RTX 4090, 24564", "--gpu rtx4090"),
        ("NVIDIA GeForce RTX 4060 Ti, 16380", "--gpu rtx4060ti-16g"),
        ("NVIDIA GeForce RTX 4060 Ti, 8188", "--gpu rtx4060ti-8g"),
        ("NVIDIA Something, New, 49152", "--memory 49152MiB"),
    ],
)
def test_present_gpu_is_found_by_name_and_memory(driver, line: str, option: str) -> None:
    driver(f"echo '{line}'; echo 'NVIDIA GeForce RTX 3060, 12288'")
    found = present_gpu()
    assert found is not None
    assert found.option == option
    assert f"{option} plans for its {found.name}" in no_device_note()


@pytest.mark.parametrize("script", ["exit 9", "echo", "echo 'a GPU, [N/A]'", "true", "sleep 5"])
def test_present_gpu_of_a_broken_driver_is_none(driver, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.2)
    driver(script)
    assert present_gpu() is None


def test_option_of_an_unknown_size_is_its_memory() -> None:
    assert PresentGpu("NVIDIA GeForce RTX 4090", 48 * 2**30).option == "--memory 49152MiB"
