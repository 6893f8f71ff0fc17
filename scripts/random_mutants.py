"""Make random one-place changes of a Python or C source: shifted bounds, swapped operators, dropped statements."""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
COMBINED: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//"}
RENAMED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
IN_C = (
    (r"(?<![<>=!-])<(?![<=])", "<="),
    (r"<=", "<"),
    (r"(?<![<>=!-])>(?![>=])", ">="),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r"\+=", "="),
    (r"\b1\b", "2"),
    (r"\b0\b", "1"),
)


@dataclass(frozen=True)
class Change:
    """One place of a source, before and after the change."""

    name: str
    old: str
    """With enough lines around it to be unique in the source."""
    new: str


@dataclass(frozen=True)
class Edit:
    """Characters of a source and what replaces them."""

    begin: int
    end: int
    new: str


def random_changes(text: str, count: int, seed: int) -> list[Change]:
    """Return at most this many different changes of the source; the seed determines them."""
    edits = sorted(set(edits_of(text)), key=lambda edit: (edit.begin, edit.end, edit.new))
    chosen = random.Random(seed).sample(edits, min(count, len(edits)))
    return [_with_context(text, edit) for edit in sorted(chosen, key=lambda edit: edit.begin)]


def edits_of(text: str) -> Iterator[Edit]:
    """Find every possible edit of the source."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        yield from _edits_of_c(text)
        return
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    yield from _Finder(text.encode(), starts).find(tree)


def _edits_of_c(text: str) -> Iterator[Edit]:
    begin = 0
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith(("#", "//", "*", "/*")):
            for pattern, new in IN_C:
                for match in re.finditer(pattern, line.split("//")[0]):
                    yield Edit(begin + match.start(), begin + match.end(), new)
        begin += len(line)


class _Finder:
    """Walks the functions of a module; annotations, messages, asserts and docstrings stay as they are."""

    def __init__(self, source: bytes, starts: list[int]) -> None:
        self._source = source
        self._starts = starts

    def find(self, tree: ast.AST) -> Iterator[Edit]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in node.body:
                    yield from self._visit(statement)

    def _visit(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(
            node, ast.Assert | ast.Raise | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr
        ):
            return
        yield from self._edits(node)
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._visit(child)

    def _edits(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
                yield self._between(left, right, f" {COMPARED[type(op)]} ")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMBINED:
                yield self._between(left, right, f" {COMBINED[type(op)]} ")
            case ast.BoolOp(op=op, values=[left, right, *_]):
                yield self._between(left, right, " or " if isinstance(op, ast.And) else " and ")
            case ast.Constant(value=bool() as value):
                yield self._replace(node, str(not value))
            case ast.Constant(value=int() as value):
                yield self._replace(node, str(value + 1))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replace(node, self._text(operand))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in RENAMED:
                end = self._end(node)
                yield Edit(end - len(name), end, RENAMED[name])
            case ast.Expr(value=ast.Call()):
                yield self._replace(node, "pass")
            case ast.AugAssign(target=target, value=value):
                yield self._replace(node, f"{self._text(target)} = {self._text(value)}")
            case ast.Assign(targets=[ast.Attribute()]):
                yield self._replace(node, "pass")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield self._replace(test, f"not ({self._text(test)})")
            case _:
                return

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._begin(node) : self._end(node)].decode()

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> Edit:
        return Edit(self._begin(node), self._end(node), new)

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> Edit:
        """Replace the operator between two operands; brackets around either stay."""
        begin, end = self._end(left), self._begin(right)
        between = self._source[begin:end].decode()
        operator = re.search(r"[^\s()\\]+(?: not| in)?", between)
        assert operator is not None
        return Edit(begin + operator.start(), begin + operator.end(), new.strip())


def _with_context(text: str, edit: Edit) -> Change:
    """Take the whole lines of the edit, and more above them until they are unique."""
    source = text.encode()
    first = source.rfind(b"\n", 0, edit.begin) + 1
    last = source.find(b"\n", edit.end)
    last = len(source) if last < 0 else last
    while source.count(source[first:last]) != 1 and first > 0:
        first = source.rfind(b"\n", 0, first - 1) + 1
    old = source[first:last].decode()
    new = (source[first : edit.begin] + edit.new.encode() + source[edit.end : last]).decode()
    line = text.encode()[: edit.begin].count(b"\n") + 1
    was = source[edit.begin : edit.end].decode().split("\n")[0]
    return Change(f"line {line}: {was} becomes {edit.new.splitlines()[0]}", old, new)
