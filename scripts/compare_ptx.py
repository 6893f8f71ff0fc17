"""Compare the PTX of two trees, kernel by kernel: python scripts/compare_ptx.py OLD NEW [--cases WORD] [--jobs 2]

OLD and NEW are commits, or "." for the working tree; --trees takes two folders instead. Every case of the tests that compile
without a GPU (tests/kernels/gpu_compiler.py of each tree) is compiled for sm_90 by the Triton of this environment. Names,
line marks, comments and the order of parameters do not count. Results are cached by content in .triton-cache/ptx.

    python scripts/compare_ptx.py HEAD~5 .                      all cases: minutes on two cores
    python scripts/compare_ptx.py HEAD~5 . --cases latents      the cases whose names contain a word
    python scripts/compare_ptx.py --caches OLD NEW              two Triton cache folders, such as engines leave on a GPU

For engines on a GPU: run both trees with a TRITON_CACHE_DIR of their own, then compare these folders. Exits with 1 if a
specialization differs or has no partner.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ptx_text import normal_form

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".triton-cache" / "ptx"
PROGRAM = Path("tests") / "kernels" / "gpu_compiler.py"
COMPILED_FOLDERS = (Path("src") / "holdfast", Path("tests") / "kernels")
BATCH = 6
"""Cases of one process: importing torch costs more than compiling most of them."""


class Compiled(NamedTuple):
    """One specialization: where it comes from, and a digest of its PTX in normal form."""

    case: str
    kernel: str
    digest: str
    num_instructions: int
    shared_bytes: int


# --- one tree, in a process of its own


class _Cases(list[str]):
    """Arguments of gpu_compiler.py that remember which case it has reached."""

    current = ""

    def __getitem__(self, key):  # type: ignore[override]  # noqa: ANN001, ANN204
        return _Reached(self) if isinstance(key, slice) else super().__getitem__(key)


class _Reached:
    def __init__(self, cases: _Cases) -> None:
        self._cases = cases

    def __iter__(self) -> Iterator[str]:
        for case in list.__iter__(self._cases):
            if case != str(PROGRAM):
                self._cases.current = case
                yield case


def compile_cases(tree: Path, cases: Sequence[str]) -> list[Compiled]:
    """Run the tree's gpu_compiler.py over cases and collect what `triton.compile` returns."""
    import runpy

    import triton

    found: list[Compiled] = []
    arguments = _Cases([str(PROGRAM), *cases])
    compile_source = triton.compile

    def recording(source, *positional, **keywords):  # noqa: ANN001, ANN002, ANN003, ANN202
        compiled = compile_source(source, *positional, **keywords)
        text = normal_form(compiled.asm["ptx"])
        found.append(
            Compiled(
                arguments.current,
                source.fn.__name__,
                hashlib.sha256(f"{compiled.metadata.num_warps}\n{text}".encode()).hexdigest()[:16],
                text.count(";"),
                compiled.metadata.shared,
            )
        )
        return compiled

    triton.compile = recording
    sys.argv = arguments  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(tree / PROGRAM), run_name="__main__")
    failed = {case: text for case, text in json.loads(printed.getvalue()).items() if isinstance(text, str)}
    found += [Compiled(case, "failed", text[-300:], 0, 0) for case, text in failed.items()]
    return found


def list_cases(tree: Path) -> list[str]:
    """Names of the cases of a tree."""
    code = f"import runpy; print('\\n'.join(runpy.run_path({str(tree / PROGRAM)!r})['CASES']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tree), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"error: {tree}: {PROGRAM} does not run: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.splitlines()


def environment(tree: Path) -> dict[str, str]:
    """Environment of a process that imports a tree's package and compiles instead of interpreting."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(tree / "src"), str(tree / "tests"), str(Path(__file__).parent), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


# --- both trees


def content_digest(tree: Path) -> str:
    """Digest of the files that decide the PTX, and of Triton's version."""
    import triton

    digest = hashlib.sha256(
        f"{triton.__version__} {Path(__file__).read_text()} {normal_form.__code__.co_code!r}".encode()
    )
    for folder in COMPILED_FOLDERS:
        for path in sorted((tree / folder).rglob("*.py")):
            digest.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_tree(tree: Path, cases: Sequence[str], num_jobs: int) -> list[Compiled]:
    """Compile the cases of a tree, those from the cache first."""
    folder = CACHE / content_digest(tree)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [case for case in cases if not _cached(folder, case).is_file()]
    batches = [missing[start : start + BATCH] for start in range(0, len(missing), BATCH)]

    def run(batch: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--compile", str(tree), *batch]
        done = subprocess.run(command, env=environment(tree), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"error: {tree}: compiling failed: {done.stderr.strip()[-2000:]}")
        compiled = [Compiled(*entry) for entry in json.loads(done.stdout)]
        for case in batch:
            _cached(folder, case).write_text(json.dumps([entry for entry in compiled if entry.case == case]))
        print(f"compiled {len(batch)} cases of {tree}", file=sys.stderr, flush=True)

    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        list(pool.map(run, batches))
    return [Compiled(*entry) for case in cases for entry in json.loads(_cached(folder, case).read_text())]


def _cached(folder: Path, case: str) -> Path:
    return folder / f"{hashlib.sha256(case.encode()).hexdigest()[:16]}.json"


def read_triton_cache(folder: Path) -> list[Compiled]:
    """Read the PTX files that Triton left in a cache folder."""
    found = []
    for path in sorted(folder.rglob("*.ptx")):
        metadata = json.loads(path.with_suffix(".json").read_text())
        text = normal_form(path.read_text())
        digest = hashlib.sha256(f"{metadata['num_warps']}\n{text}".encode()).hexdigest()[:16]
        found.append(Compiled("engine", path.stem, digest, text.count(";"), metadata["shared"]))
    return found


def unmatched(old: Sequence[Compiled], new: Sequence[Compiled]) -> list[tuple[str, Compiled]]:
    """List the specializations of one side, case by case, that have no equal on the other side."""
    found = []
    for case in dict.fromkeys(entry.case for entry in (*old, *new)):
        sides = {"old": [e for e in old if e.case == case], "new": [e for e in new if e.case == case]}
        counts = {side: Counter(entry.digest for entry in entries) for side, entries in sides.items()}
        for side, other in (("old", "new"), ("new", "old")):
            lonely = (
                counts[side] - counts[other] if case != "engine" else Counter(set(counts[side]) - set(counts[other]))
            )
            for entry in sides[side]:
                if lonely[entry.digest] > 0:
                    lonely[entry.digest] -= 1
                    found.append((side, entry))
    return found


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a folder with the sources and kernel tests of a commit; the working tree for "."."""
    if commit == ".":
        yield ROOT
        return
    command = ["git", "archive", commit, "src", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: git has no commit {commit}: {done.stderr.decode(errors='replace').strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def report(old: Sequence[Compiled], new: Sequence[Compiled]) -> int:
    """Print what differs; return the exit code."""
    found = unmatched(old, new)
    for side, entry in found:
        print(
            f"{side} only: {entry.case}: {entry.kernel}: {entry.num_instructions} instructions, {entry.shared_bytes} bytes"
        )
    print(f"{len(old)} specializations before, {len(new)} after, {len(found)} without an equal partner")
    return 1 if found else 0


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "places", nargs="+", help='two commits, or "." for the working tree; folders with --trees or --caches'
    )
    parser.add_argument("--trees", action="store_true", help="the places are folders with src/ and tests/ in them")
    parser.add_argument("--caches", action="store_true", help="the places are Triton cache folders")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", action="append", help="only cases whose names contain this; repeats")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default 2)")
    arguments = parser.parse_args()
    if arguments.compile:
        json.dump(compile_cases(Path(arguments.places[0]), arguments.places[1:]), sys.stdout)
        return
    if len(arguments.places) != 2:
        parser.error("name two places: OLD NEW")
    if arguments.caches:
        sys.exit(report(*(read_triton_cache(Path(place)) for place in arguments.places)))
    with contextlib.ExitStack() as stack:
        old, new = (
            Path(place).resolve() if arguments.trees else stack.enter_context(checked_out(place))
            for place in arguments.places
        )
        results = []
        for tree in (old, new):
            wanted = arguments.cases or [""]
            cases = [case for case in list_cases(tree) if any(word in case for word in wanted)]
            results.append(compile_tree(tree, cases, arguments.jobs))
        sys.exit(report(*results))


if __name__ == "__main__":
    main()
