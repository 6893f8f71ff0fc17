"""Refuse CUDA packages on a machine without an NVIDIA GPU, before the download and again after it."""

import argparse
import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

GPU_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
CUDA_PACKAGE = re.compile(r"nvidia[-_].*|cuda[-_].*|.*[-_]cu1\d|triton|pytorch[-_]triton.*")
CUDA_VERSION = re.compile(r".*\+cu\d+")


def cuda_packages(packages: dict[str, str], allowed: set[str]) -> list[str]:
    """Return the packages that only a GPU can use, without the allowed names."""
    return sorted(
        f"{name} {version}".strip()
        for name, version in packages.items()
        if name.lower() not in allowed and (CUDA_PACKAGE.fullmatch(name.lower()) or CUDA_VERSION.fullmatch(version))
    )


def planned_packages(report: Path) -> dict[str, str]:
    """Return the packages that pip's dry run would install, and their requirements."""
    packages = {}
    for item in json.loads(report.read_text())["install"]:
        packages[item["metadata"]["name"]] = item["metadata"]["version"]
        for requirement in item["metadata"].get("requires_dist", []):
            name, _, condition = requirement.partition(";")
            is_elsewhere = "Linux" in condition and sys.platform != "linux"
            if "extra" not in condition and not is_elsewhere:
                packages.setdefault(re.split(r"[^\w.-]", name.strip())[0], "")
    return packages


def installed_packages() -> dict[str, str]:
    """Return the packages installed for this Python."""
    return {item.metadata["Name"]: item.version for item in distributions()}


def main() -> None:
    """Exit 1 with one line that names the packages and the fix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planned", type=Path, help="pip's JSON report of a dry run, in place of what is installed")
    parser.add_argument("--allow", action="append", default=[], help="a package that is meant to be there")
    options = parser.parse_args()
    packages = planned_packages(options.planned) if options.planned else installed_packages()
    found = cuda_packages(packages, set(options.allow))
    where = "would be installed" if options.planned else "installed"
    if not found:
        print(f"no CUDA package {where}")
    elif any(Path(sign).exists() for sign in GPU_SIGNS):
        print(f"{len(found)} CUDA packages {where} for the GPU of this machine")
    else:
        sys.exit(
            f"error: the set-up is for a machine without a GPU; {len(found)} CUDA packages {where} "
            f"({', '.join(found[:4])}{', ...' if len(found) > 4 else ''}); give pip the index of torch's CPU wheels that "
            "pytorch.org names, as PIP_EXTRA_INDEX_URL=... make clean demo"
        )


if __name__ == "__main__":
    main()
