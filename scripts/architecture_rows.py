"""Writes the file table of docs/architecture.md again: one row a file, its words taken from the file's first line."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "holdfast"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- files: begin (make docs writes this table) -->"
END = "<!-- files: end -->"
ORDER = (
    *("cli", "engine", "runner", "text", "loading", "models", "layers"),
    *("attention", "kernels", "cache", "quant", "memory", "request", "observability"),
)
"""Packages from the top of the picture down; files outside a package come first."""


def first_line(path: Path) -> str:
    """The first line of a file's docstring, or of the comment that opens a C file, or nothing."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        line = text.partition("\n")[0]
        return line.removeprefix("//").strip() if line.startswith("//") else ""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    return (ast.get_docstring(tree) or "").partition("\n")[0].strip()


def listed_files(package: Path) -> list[Path]:
    """Every file that has something in it, in the order of the picture."""
    sources = (path for path in package.rglob("*") if path.suffix in (".py", ".c", ".h"))
    files = [path for path in sources if path.name != "__init__.py" or path.parent == package]
    return sorted(files, key=lambda path: _place(path.relative_to(package)))


def _place(path: Path) -> tuple[int, str]:
    if len(path.parts) == 1:
        return -1, path.as_posix()
    package = path.parts[0]
    return ORDER.index(package) if package in ORDER else len(ORDER), path.as_posix()


def row(path: Path, package: Path) -> str:
    """The row of one file."""
    return f"| `{path.relative_to(package).as_posix()}` | {first_line(path).replace('|', chr(92) + '|')} |"


def table(package: Path) -> str:
    """The whole table."""
    return "\n".join(["| file | for |", "|---|---|", *(row(path, package) for path in listed_files(package))])


def replaced(document: str, content: str, begin: str, end: str) -> str:
    """The document with everything between the two marks replaced."""
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        sys.exit(f"error: one {begin} before one {end} was asked; the document has other marks; put them back")
    before, _, rest = document.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{content}\n{end}{after}"


def main() -> None:
    """Rewrite the document in place."""
    document = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(replaced(document, table(PACKAGE), BEGIN, END), encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)}: {len(listed_files(PACKAGE))} files")


if __name__ == "__main__":
    main()
