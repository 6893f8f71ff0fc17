"""Refuses CUDA packages on a machine without an NVIDIA GPU: before they are downloaded, and once more after."""

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
    """Those of name -> version that only a GPU can use, less the allowed names."""
    return sorted(
        f"{name} {version}".strip()
        for name, version in packages.items()
        if name.lower() not in allowed and (CUDA_PACKAGE.fullmatch(name.lower()) or CUDA_VERSION.fullmatch(version))
    )


def planned_packages(report: Path) -> dict[str, str]:
    """What pip's report of a dry run would install, and what those packages require in their turn."""
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
    """What lies beside the Python that runs this."""
    return {item.metadata["Name"]: item.version for item in distributions()}


def main() -> None:
    """Exit 1 with one line that says what was found and what to do."""
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
