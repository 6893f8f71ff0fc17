"""What a C compiler makes of the kernels for tests, kept in build/ until sources, command, compiler or processor change."""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.kernels.native_library import SOURCES

FOLDER = Path(__file__).parents[2] / "build" / "test-kernels"
PROCESSOR = Path("/proc/cpuinfo")


def kept_build(command: Sequence[str], sources: Sequence[Path], libraries: Sequence[str] = (), text: str = "") -> Path:
    """The path of `command -o PATH sources libraries`. `text` is the source of a main program.

    To compile takes seconds, and each process of a test run asks for the same.
    """
    digest = hashlib.sha256(repr((list(command), list(map(str, libraries)), text)).encode())
    digest.update(subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout)
    digest.update(_instructions())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + path.read_bytes())
    kept = FOLDER / digest.hexdigest()[:32]
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=FOLDER) as folder:
            made, main = Path(folder) / "made", Path(folder) / "main.c"
            main.write_text(text)
            files = [str(path) for path in (*([main] if text else []), *sources)]
            subprocess.run([*command, "-o", str(made), *files, *libraries], check=True, capture_output=True)
            os.replace(made, kept)
    return kept


def _instructions() -> bytes:
    """What -march=native depends on."""
    lines = PROCESSOR.read_bytes().splitlines() if PROCESSOR.exists() else []
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
