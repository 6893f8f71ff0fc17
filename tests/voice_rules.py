"""Rules of the project's prose, and the places that break them: python tests/voice_rules.py [PATH ...]

They cover docstrings, comments, strings, headings and the names that a file defines. `torch.where` is a use, so it passes.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs")
RECORDS = ("docs/log.md", "benchmarks/records", "tests/voice_rules.py", "tests/test_voice.py")
"""Dated records, this list itself, and its test."""
BANNED = {
    "at the most": "at most",
    "at the least": "at least",
    "asked": "a concrete verb: requested, given, queried",
    "told": "a concrete verb: sent, reported, printed",
    "nobody": "no caller, no sequence, none",
    "somebody": "a caller, a sequence, one",
    "whoever": "callers, the reader",
    "again is nothing": "idempotent",
    "in words": "as text, or drop it",
}
"""Phrases that no prose has, with what to write instead."""
BANNED_STARTS = ("The same", "Of ")
"""How no docstring begins: name the function that it resembles."""
GAP = r"[\s#]+"
PHRASES = re.compile("|".join(rf"\b{GAP.join(phrase.split())}\b" for phrase in BANNED), re.IGNORECASE)
NAME_PARTS = {phrase for phrase in BANNED if " " not in phrase}
TEXT_SUFFIXES = (".md", ".c", ".h", ".js", ".css", ".html", ".toml")


class Fault(NamedTuple):
    """A place with a banned phrase."""

    path: Path
    line: int
    phrase: str

    def __str__(self) -> str:
        instead = BANNED.get(self.phrase, "a verb, or the name of what it resembles")
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.phrase!r}: write {instead}"


def files(*places: str) -> list[Path]:
    """List the files below the places that the rules cover."""
    found: list[Path] = []
    for place in places or (*FOLDERS, *PAGES):
        path = ROOT / place
        found += [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    records = [ROOT / record for record in RECORDS]
    return [
        path
        for path in found
        if path.suffix in (".py", *TEXT_SUFFIXES) and not any(path.is_relative_to(record) for record in records)
    ]


def faults_of(path: Path) -> list[Fault]:
    """Find the faults of one file."""
    text = path.read_text(encoding="utf-8")
    found = _python_faults(path, text) if path.suffix == ".py" else _text_faults(path, text, 1)
    return sorted(set(found))


def _text_faults(path: Path, text: str, first_line: int) -> Iterator[Fault]:
    for match in PHRASES.finditer(text):
        phrase = " ".join(match[0].lower().replace("#", " ").split())
        yield Fault(path, first_line + text.count("\n", 0, match.start()), phrase)


def _python_faults(path: Path, text: str) -> Iterator[Fault]:
    tree = ast.parse(text)
    yield from _comment_faults(path, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _text_faults(path, node.value, node.lineno)
        yield from _docstring_faults(path, node)
        for name, line in _names(node):
            parts = set(re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name.strip("_")))
            yield from (Fault(path, line, part) for part in {part.lower() for part in parts} & NAME_PARTS)


def _comment_faults(path: Path, text: str) -> Iterator[Fault]:
    comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    for comment in comments:
        yield from _text_faults(path, comment.string, comment.start[0])


def _docstring_faults(path: Path, node: ast.AST) -> Iterator[Fault]:
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield from (
                Fault(path, statement.lineno, start.strip()) for start in BANNED_STARTS if value.value.startswith(start)
            )


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno


if __name__ == "__main__":
    listed = [fault for path in files(*sys.argv[1:]) for fault in faults_of(path)]
    print("\n".join(map(str, listed)))
    print(f"{len(listed)} faults")
    sys.exit(1 if listed else 0)
