"""Check that two commits give equal results, byte for byte, and compare their speed: python scripts/compare_commits.py OLD NEW [--speed]

A commit is any git revision; "." is the working tree with its changes. Without git, --trees takes two folders that
contain src/ instead:

    python scripts/compare_commits.py HEAD~5 .                                plans and numbers on the CPU: some five minutes
    python scripts/compare_commits.py --trees old . --device cuda --jobs 8    numbers on a GPU, with graphs and without
    python scripts/compare_commits.py HEAD~5 . --speed                        `holdfast bench latency` of both in turn

scripts/probe_numbers.py defines the comparison and runs on both trees. The exit code is 1 if any case differs or fails.
--speed compares no numbers: it prints the default model's tokens a second, the median over all rounds, and their ratio.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from probe_numbers import FAILED_KEY, PACKAGE_KEY, REFUSED_KEY

ROOT = Path(__file__).parent.parent
PROBE = Path(__file__).parent / "probe_numbers.py"
WORKING_TREE = "."
NUM_SHOWN = 20
"""Most differences printed in full."""
MAX_SHOWN_CHARS = 160
ABSENT = "(nothing)"
ENDINGS = (REFUSED_KEY, FAILED_KEY)
"""Keys instead of numbers: refusals are compared by their text, failures prove nothing."""
BENCH = ("--prefill", "512", "--batch", "1,8", "--input-len", "64", "--output-len", "64", "--repeats", "1")
CALL_MAIN = "from holdfast.cli.app import main; main()"
Dump = Mapping[str, Any]


class Difference(NamedTuple):
    """A case that differs, with the first difference."""

    case: str
    place: str
    old: str
    new: str


# --- trees


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a folder with the sources of a commit; for ".", the working tree itself."""
    if commit == WORKING_TREE:
        yield ROOT
        return
    done = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        sys.exit(f"error: no commit {commit}: {words}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def environment(tree: Path) -> dict[str, str]:
    """Return this process's environment, with the tree's package before an installed one."""
    return {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}


def check_tree(tree: Path) -> None:
    """Raise at once if a folder has no package in it."""
    if not (tree / "src" / "holdfast" / "__init__.py").is_file():
        sys.exit(f"error: the tree {tree} has no src/holdfast; name the root of a checkout")


# --- numbers


def probe(tree: Path, options: Sequence[str], num_jobs: int = 1) -> dict[str, Any]:
    """Dump a tree with this many parallel processes; `options` are the probe's."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{part}.json" for part in range(1, num_jobs + 1)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROBE), str(out), "--part", f"{part}/{num_jobs}", *options],
                cwd=folder,
                env=environment(tree),
            )
            for part, out in enumerate(outs, start=1)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            sys.exit(f"error: the probe of {tree} ended with {codes}; see above")
        return merged([json.loads(out.read_text()) for out in outs], tree)


def merged(parts: Sequence[Dump], tree: Path) -> dict[str, Any]:
    """Merge the dumps of all parts; all must be of this tree."""
    dump: dict[str, Any] = {}
    for part in parts:
        package = Path(part[PACKAGE_KEY])
        assert package.is_relative_to(tree.resolve()), f"{package} was probed in place of {tree}"
        own = {case: found for case, found in part.items() if case != PACKAGE_KEY}
        assert not own.keys() & dump.keys(), f"{own.keys() & dump.keys()} are in two parts"
        dump |= own
    return dump


def without_sentences(value: object) -> object:
    """Return a value with every text that has a space in it replaced: its wording may change, its numbers may not."""
    if isinstance(value, dict):
        return {key: without_sentences(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_sentences(item) for item in value]
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            return without_sentences(json.loads(value))
    return "(a sentence)" if isinstance(value, str) and " " in value else value


def differences(old: Dump, new: Dump) -> list[Difference]:
    """Return every differing case, in the order of the old dump, then of the new one."""
    found = []
    for case in dict.fromkeys([*old, *new]):
        if case not in old or case not in new:
            has_old = case in old
            found.append(Difference(case, "the case", "there" if has_old else ABSENT, ABSENT if has_old else "there"))
        elif (place := first_difference(old[case], new[case])) is not None:
            found.append(Difference(case, *place))
    return found


def first_difference(old: object, new: object, place: str = "") -> tuple[str, str, str] | None:
    """Return the first difference of two values and its path; None if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        pairs = [(f"{place}/{key}", old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{place}[{index}]", *pair) for index, pair in enumerate(zip(old, new, strict=True))]
    elif isinstance(old, str) and isinstance(new, str) and old.count("\n") == new.count("\n") > 0:
        lines = enumerate(zip(old.split("\n"), new.split("\n"), strict=True), start=1)
        pairs = [(f"{place}:{number}", *pair) for number, pair in lines]
    else:
        # Python treats 1 and True as equal; their bytes differ.
        return None if type(old) is type(new) and old == new else (place, _short(old), _short(new))
    return next((found for key, one, other in pairs if (found := first_difference(one, other, key))), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def show(old: Dump, new: Dump, found: Sequence[Difference]) -> None:
    """Print one line for each kind of case, and the differences."""
    every = {**old, **new}
    columns = {
        "compared": Counter(map(_kind, every)),
        "different": Counter(_kind(one.case) for one in found),
        **{key: Counter(_kind(case) for case, values in every.items() if key in values) for key in ENDINGS},
    }
    print("".join([f"{'':10}", *(f"{title:>11}" for title in columns)]))
    for kind in sorted(columns["compared"]):
        print("".join([f"{kind:10}", *(f"{counts[kind]:>11}" for counts in columns.values())]))
    for one in found[:NUM_SHOWN]:
        print(f"\n{one.case}\n  at {one.place}\n  old: {one.old}\n  new: {one.new}")
    if len(found) > NUM_SHOWN:
        print(f"\nand {len(found) - NUM_SHOWN} more")
    for case, values in every.items():
        for key in ENDINGS:
            if key in values:
                print(f"\n{key}: {case}\n  {values[key]}")


def _has_prose(case: str, found: Mapping[str, Any]) -> bool:
    """True for plans and refusals, whose sentences may change; the text of an answer may not."""
    return _kind(case) == "plans" or REFUSED_KEY in found


def _kind(case: str) -> str:
    return case.partition("/")[0]


# --- speed


def bench(tree: Path, options: Sequence[str]) -> dict[str, float]:
    """Return the default model's tokens a second, by measure."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, "-c", CALL_MAIN, "bench", "latency", *options, "--json", str(record)]
        done = subprocess.run(command, cwd=folder, env=environment(tree), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"error: the benchmark of {tree} failed: {done.stderr.strip()}; see above")
        results = json.loads(record.read_text())["results"]
    return {result["measure"]: result["values"]["holdfast"] for result in results}


def compare_speed(old: Path, new: Path, num_rounds: int, options: Sequence[str] = BENCH) -> dict[str, float]:
    """Run both in turn, alternating the first, and print a table of the medians."""
    trees = {"old": old, "new": new}
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(num_rounds):
        for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
            rates[name].append(bench(trees[name], options))
    ratios = {}
    print(f"{'tokens/s':24}{'old':>10}{'new':>10}{'new/old':>10}")
    for measure in rates["old"][0]:
        before, after = (statistics.median(rate[measure] for rate in rates[name]) for name in trees)
        ratios[measure] = after / before
        print(f"{measure:24}{before:>10.1f}{after:>10.1f}{ratios[measure]:>10.3f}")
    return ratios


def compare(old: Path, new: Path, arguments: argparse.Namespace) -> int:
    """Compare two trees, and return the exit code."""
    for tree in (old, new):
        check_tree(tree)
    if arguments.speed:
        compare_speed(old, new, arguments.rounds)
        return 0
    options = ["--what", arguments.what, "--device", arguments.device]
    options += [word for words in arguments.cases for word in ("--cases", words)]
    before, after = (probe(tree, options, arguments.jobs) for tree in (old, new))
    if not arguments.words:
        before, after = (
            {case: without_sentences(found) if _has_prose(case, found) else found for case, found in dump.items()}
            for dump in (before, after)
        )
    if not before:
        sys.exit("error: no case has such a name; see --cases")
    found = differences(before, after)
    show(before, after, found)
    has_failed = any(
        FAILED_KEY in values for values in (*before.values(), *after.values()) if isinstance(values, Mapping)
    )
    print("\nnot the same" if found else "\nnot shown" if has_failed else "\nthe same, byte for byte")
    return 1 if found or has_failed else 0


def main() -> None:
    """Compare the two given trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or a folder with --trees")
    parser.add_argument("new", help=f'the same; "{WORKING_TREE}" is the working tree')
    parser.add_argument("--trees", action="store_true", help="old and new are folders, and git is not used")
    parser.add_argument("--what", default="plans,numbers", help="plans, numbers, or both")
    parser.add_argument(
        "--cases", action="append", default=[], help='those with this in their names, such as "numbers/opt"; repeats'
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the numbers of a tree")
    parser.add_argument("--words", action="store_true", help="compare the sentences of plans and refusals, too")
    parser.add_argument("--speed", action="store_true", help="measure the default model instead")
    parser.add_argument("--rounds", type=int, default=3, help="runs of either tree with --speed")
    arguments = parser.parse_args()
    if arguments.jobs < 1 or arguments.rounds < 1:
        parser.error(f"--jobs and --rounds must be at least 1, got {arguments.jobs} and {arguments.rounds}")
    if arguments.trees:
        sys.exit(compare(Path(arguments.old), Path(arguments.new), arguments))
    with checked_out(arguments.old) as old, checked_out(arguments.new) as new:
        sys.exit(compare(old, new, arguments))


if __name__ == "__main__":
    main()
