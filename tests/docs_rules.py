"""What documents may be held to: fences, links and paths in Markdown, and environment variables in sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from architecture_rules import Source, dotted

ENVIRON_CALLS = {"os.environ.get", "os.environ.pop", "os.environ.setdefault", "os.getenv", "environ.get", "getenv"}
ENVIRON_NAMES = {"os.environ", "environ"}


def fences(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Command lines in shell fences, without comments."""
    lines = (line.partition("  #")[0].strip() for block in fences(text, "sh") for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def named_files(text: str) -> set[str]:
    """Paths of Python files in backticks; patterns and placeholders are left out."""
    return set(re.findall(r"`([\w./-]+\.py)`", text))


def drawn_files(text: str) -> set[str]:
    """Paths of Python files in pictures: fenced blocks without a language."""
    return {path for block in fences(text, "") for path in re.findall(r"(?<![\w/.-])(?:\w+/)+\w+\.py\b", block)}


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def pointers(line: str) -> list[tuple[str, tuple[str, ...]]]:
    """Files in backticks on a line, each with the names in backticks that follow it."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for word in re.findall(r"`([^`]+)`", line):
        if word.endswith(".py"):
            found.append((word, ()))
        elif found:
            found[-1] = (found[-1][0], (*found[-1][1], word))
    return found


def defined_names(source: Source) -> set[str]:
    """Functions, classes and operations of a file, and methods as Class.method."""
    names = set()
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def links(text: str) -> set[str]:
    """Local targets of Markdown links."""
    return {target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target}


def environment_variables(source: Source) -> Iterator[str]:
    """Names of variables that a file reads or writes; a name that is computed appears as its expression."""
    constants = {
        target.id: node.value.value
        for node in source.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in source.nodes:
        for name in _environment_keys(node):
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value
            elif isinstance(name, ast.Name) and name.id in constants:
                yield constants[name.id]
            else:
                yield f"{source.module}: {ast.unparse(node)}"


def _environment_keys(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call) and dotted(node.func) in ENVIRON_CALLS and node.args:
        yield node.args[0]
    elif isinstance(node, ast.Subscript) and dotted(node.value) in ENVIRON_NAMES:
        yield node.slice
    elif isinstance(node, ast.Compare) and any(dotted(item) in ENVIRON_NAMES for item in node.comparators):
        yield node.left


def table_keys(text: str) -> list[str]:
    """What stands in backticks at the beginning of table rows."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def documents(root: Path) -> dict[str, str]:
    """Every document by its path."""
    paths = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
