"""Jinja for chat templates: an immutable sandbox with an allow-list and a budget of work, text and time; no torch.

A template is a program that comes with the model. Jinja's sandbox hides Python's internals and bounds neither time nor memory,
so here every operation spends from a budget: a step, and more for what it reads and makes. Operations that can make much of
little (repetition, formatting, joining) are charged before they run; all others by their result. Operations that Jinja compiles
to plain Python (loops, `~`, slices, comparisons) go through filters that no template can name, and the body of each loop and
macro begins with a charge for its length. data/jinja_sandbox.json has the lists of what a template may name.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from importlib import resources
from itertools import chain, islice
from string import Formatter
from types import BuiltinMethodType, MethodType, NoneType
from typing import Any, TypeAlias

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

Value: TypeAlias = Any

STEP_BYTES = 64
"""Bytes that one step may read or make, so steps also bound memory."""
MAX_ITEMS = 100_000
MAX_NESTING = 64
MAX_INTEGER_BITS = 8192
MAX_FORMAT_CHARS = 4096
MAX_INDENT = 64
MAX_TEMPLATE_TOKENS = 16_000
"""Most names, literals, operators and brackets, to bound compile time; long templates have a few thousand."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TABLES = json.loads(resources.files("holdfast").joinpath("data", "jinja_sandbox.json").read_text(encoding="utf-8"))
METHODS: Mapping[type, frozenset[str]] = {
    kind: _names(_TABLES["methods"][kind.__name__]) for kind in (str, dict, list, tuple)
}
"""Methods that templates may call; `str.format` is checked at its lookup."""
_OPEN = (Namespace, Undefined, LoopContext, Macro, BlockReference)
"""Types whose attributes without an underscore are open to templates."""
_LAZY, _SHALLOW, _LISTING, _TEXTUAL = (
    _names(_TABLES["filters"][kind]) for kind in ("lazy", "shallow", "listing", "textual")
)
_SHALLOW |= _LAZY
"""Filters that do not read their value's items. Listing ones make a list of it, such as a string's characters."""
FILTERS_ALLOWED = _SHALLOW | _LISTING | _TEXTUAL
_WEIGHED: Mapping[str, list[str]] = _TABLES["weighed_filters"]
"""Filters that are charged before they run, and their arguments."""
_COMPARING_TESTS, _NUMBER_TESTS = (_names(_TABLES["tests"][kind]) for kind in ("comparing", "numbers"))
_SLOW_SEARCHES = _names(_TABLES["slow_searches"])
"""Methods that compare with the whole argument at every character."""
_LOOP, _SPEND, _WEIGH, _CONCAT, _SLICE = "|loop", "|spend", "|weigh", "|concat", "|slice"
"""Names of routes, which no template source can write."""
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +.\d]*(?:\*|\d{4})")
_WIDE_SPEC = re.compile(r"\{|\d{4}")
_DATE_FORMAT = re.compile(r"(?:[^%]|%-?[a-zA-Z%]){0,100}")
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_PRINTABLE = (str, int, float, list, tuple, dict, range, Undefined, NoneType, *_VIEWS)
"""Types that templates may print; others would only print their address."""


class BudgetError(Exception):
    """A template exceeded its budget; the message says which."""


class TemplateRefusalError(TemplateRuntimeError):
    """The template itself refuses its input."""


class Budget:
    """Budget of one rendering, proportional to the length of the conversation."""

    def __init__(self, num_chars: int = 0, num_messages: int = 0) -> None:
        self.max_steps = 250_000 + 4 * num_chars + 8000 * num_messages
        self.max_chars = 2**20 + 16 * num_chars
        """Most characters of the output, and of any intermediate string."""
        self.max_items = MAX_ITEMS + num_chars
        self.max_seconds = 3.0 + 4e-6 * num_chars + 8e-3 * num_messages
        """CPU time limit of this thread. Only a backstop: steps run out first."""
        self._steps_left = self._next_check = self.max_steps
        self._deadline = time.thread_time() + self.max_seconds

    def spend(self, num_steps: int) -> None:
        # A negative number must not refund: a template could reach this by the name of the route.
        self._steps_left -= abs(num_steps)
        if self._steps_left < self._next_check:
            self._next_check = max(self._steps_left - 1024, 0)
            if self._steps_left < 0:
                raise BudgetError(f"it takes more than {self.max_steps} steps")
            if time.thread_time() > self._deadline:
                raise BudgetError(f"it takes longer than {self.max_seconds:.0f} s")

    def expect(self, num_chars: int) -> None:
        """Refuse a text before it is made."""
        if num_chars > self.max_chars:
            raise BudgetError(f"it builds more than {self.max_chars} characters of text")

    def expect_items(self, num_items: int) -> None:
        """Refuse a list before it is made."""
        if num_items > self.max_items:
            raise BudgetError(f"it builds a list of more than {self.max_items} items")

    def admit(self, value: Value) -> Value:
        """Charge for a result; a lazy one is charged as it is consumed."""
        if isinstance(value, str):
            self.expect(len(value))
            self.spend(1 + sys.getsizeof(value) // STEP_BYTES)
        elif isinstance(value, list | tuple | dict):
            self.expect_items(len(value))
            self.spend(1 + sys.getsizeof(value) // STEP_BYTES)
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise BudgetError(f"it computes a number of more than {MAX_INTEGER_BITS} bits")
        elif isinstance(value, Iterator):
            self.spend(16)
            return self.counted(value, 1)
        return value

    def counted(self, items: Iterable[Value], steps_each: int) -> Iterator[Value]:
        for item in items:
            self.spend(steps_each)
            yield item

    def settled(self, value: Value) -> Value:
        """Return a lazy value as a list, so that its size is known."""
        return self.admit(list(islice(value, self.max_items + 1))) if isinstance(value, Iterator) else value

    def weigh(self, value: Value, printed: bool = False, indent: int = 0) -> int:
        """Charge for traversing a value, repeated items included; return an upper bound of its text length.

        Native code traverses values to compare, hash and print: without end if nested lists each hold the next twice.
        """
        if isinstance(value, str):
            self.spend(1 + len(value) // STEP_BYTES)
            return len(value)
        num_chars = 0
        stack: list[Iterator[Value]] = [iter((value,))]
        while stack:
            for item in stack[-1]:
                self.spend(1)
                num_chars += 48 + indent * len(stack)
                if isinstance(item, str):
                    # An unprintable character, or a non-ASCII one in JSON, becomes up to 12 characters.
                    self.spend(len(item) // STEP_BYTES)
                    num_chars += len(item) * (6 if item.isascii() else 12)
                elif isinstance(item, int):
                    num_chars += item.bit_length() // 3
                elif isinstance(item, range):
                    self.spend(len(item))
                elif isinstance(item, (dict, list, tuple, *_VIEWS)):
                    if len(stack) > MAX_NESTING:
                        raise BudgetError(f"it nests lists more than {MAX_NESTING} deep")
                    stack.append(chain.from_iterable(item.items()) if isinstance(item, dict) else iter(item))
                    break
                elif printed and not isinstance(item, _PRINTABLE):
                    raise TypeError(f"a {type(item).__name__} has no text")
            else:
                stack.pop()
        return num_chars

    def expect_product(self, items: Value, times: Value) -> None:
        if isinstance(items, str) and isinstance(times, int):
            self.expect(len(items) * times)
        elif isinstance(items, list | tuple) and isinstance(times, int):
            self.expect_items(len(items) * times)

    def expect_replaced(self, text: str, old: str, new: str, count: Value = None) -> None:
        most = count if isinstance(count, int) and count >= 0 else len(text) + 1
        self.expect(len(text) + min(text.count(old), most) * max(0, _growth(text) * len(new) - len(old)))

    def expect_joined(self, separator: str, items: Value) -> None:
        num_chars = sum(self.weigh(item, printed=True) for item in items)
        self.expect(_growth(separator) * num_chars + len(separator) * len(items))

    def expect_formatted(self, template: str, mark: str, values: Iterable[Value]) -> None:
        """Reserve the longest value, and a width of three digits, for every placeholder."""
        if len(template) > MAX_FORMAT_CHARS:
            raise BudgetError(f"it formats a text of more than {MAX_FORMAT_CHARS} characters")
        specs = [spec for _, _, spec, _ in Formatter().parse(template) if spec] if mark == "{" else []
        if any(map(_WIDE_SPEC.search, specs)) or (mark == "%" and _WIDE_PERCENT.search(template)):
            raise BudgetError("it formats to a width of 1000 or more, or one that it computes")
        longest = max((self.weigh(value, printed=True) for value in values), default=0)
        self.expect(len(template) + template.count(mark) * (_growth(template) * longest + 1000))


def _growth(text: str) -> int:
    """Return the growth factor of text joined to this one: Markup escapes it for HTML."""
    return 5 if isinstance(text, Markup) else 1


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training; only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(self, /, *args: Value, **kwargs: Value) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Value) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"it names {name!r:.40} in a namespace")
        super().__setitem__(name, value)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. Renders one chat at a time, each with its own budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        tags = [GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=self._printed, optimized=False)
        self.budget = Budget()
        functions: dict[str, Callable[..., Value]] = {**FILTERS, "tojson": _to_json}
        self.filters = {name: self._filter(name, functions[name]) for name in FILTERS_ALLOWED}
        self.filters |= {_LOOP: self._loop, _SPEND: self._spend, _WEIGH: self._weigh}
        self.filters |= {_CONCAT: self._concat, _SLICE: self._slice}
        self.tests = {name: self._test(name, function) for name, function in TESTS.items()}
        self.globals = {"range": _range, "dict": dict, "namespace": ChatNamespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> Template:
        """Compile a template; raises the errors of Jinja or Python."""
        tokens = (kind for _, kind, _ in self.lex(source) if kind != "whitespace")
        if next(islice(tokens, MAX_TEMPLATE_TOKENS, None), None) is not None:
            raise BudgetError(f"it has more than {MAX_TEMPLATE_TOKENS} tokens of Jinja")
        tree = _Routing().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.globals)

    def render(self, template: Template, variables: Mapping[str, Value], num_chars: int, num_messages: int) -> str:
        """Render messages of so many characters; raises BudgetError, TemplateRefusalError, or errors of Jinja."""
        self.budget = Budget(num_chars, num_messages)
        pieces: list[str] = []
        num_written = 0
        for piece in template.generate(variables):
            num_written += len(piece)
            if num_written > self.budget.max_chars:
                raise BudgetError(f"it writes more than {self.budget.max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)

    def is_safe_attribute(self, obj: Value, attr: str, value: Value) -> bool:
        if attr.startswith("_"):
            return False
        return isinstance(obj, _OPEN) or any(isinstance(obj, kind) and attr in METHODS[kind] for kind in METHODS)

    def unsafe_undefined(self, obj: Value, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for {attribute!r:.40} of a {type(obj).__name__}")

    def getitem(self, obj: Value, argument: Value) -> Value:
        self.budget.weigh(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Value) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        if value.__name__ != "format":
            self.unsafe_undefined(value.__self__, value.__name__)
        self.budget.spend(16)

        def checked(*args: Value, **kwargs: Value) -> str:
            self.budget.expect_formatted(value.__self__, "{", (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Value, right: Value) -> Value:
        if operator == "*":
            self.budget.expect_product(left, right)
            self.budget.expect_product(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_INTEGER_BITS:
                raise BudgetError(f"it computes a number of more than {MAX_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self.budget.expect_formatted(left, "%", right if isinstance(right, tuple) else (right,))
        return self.budget.admit(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Value, *args: Value, **kwargs: Value) -> Value:  # noqa: N805
        self, function = __self, __obj
        self.budget.spend(8 + len(args))
        # Macros and recursive loops only pass their arguments on.
        if not isinstance(function, Macro | LoopContext):
            args = tuple(map(self.budget.settled, args))
            for argument in (*args, *kwargs.values()):
                self.budget.weigh(argument)
        if isinstance(function, MethodType | BuiltinMethodType):
            self._expect_method(function.__self__, function.__name__, args, kwargs)
        result = self.budget.admit(super().call(__context, function, *args, **kwargs))
        if isinstance(result, list):
            self.budget.spend(len(result))
        return result

    def _expect_method(self, owner: Value, name: str, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> None:
        if isinstance(owner, list | tuple):
            self.budget.weigh(owner)
        if not isinstance(owner, str):
            return
        first = args[0] if args else kwargs.get("sep")
        num_sought = len(first) if isinstance(first, str) else 1
        self.budget.spend(len(owner) * (num_sought if name in _SLOW_SEARCHES else 1) // STEP_BYTES)
        if name in ("split", "rsplit", "splitlines"):
            self.budget.expect_items(len(owner) // max(num_sought, 1))
        elif name == "replace" and len(args) > 1 and all(isinstance(part, str) for part in args[:2]):
            self.budget.expect_replaced(owner, *args[:3])
        elif name == "join" and args:
            self.budget.expect_joined(owner, first)

    def _filter(self, name: str, function: Callable[..., Value]) -> Callable[..., Value]:
        wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

        # Filters with a context never run while a template is compiled.
        @pass_context
        def call(context: Context, value: Value, *args: Value, **kwargs: Value) -> Value:
            self.budget.spend(8)
            for argument in (*args, *kwargs.values()):
                self.budget.weigh(argument)
            if name in _LISTING:
                value = self.budget.settled(value)
                if isinstance(value, str):
                    self.budget.expect_items(len(value))
                    self.budget.spend(len(value))
            elif name in _LAZY and hasattr(value, "__len__"):
                self.budget.spend(len(value))
            if name in _WEIGHED:
                self._expect_filter(name, value, args, dict(zip(_WEIGHED[name], args, strict=False)) | kwargs)
            elif name not in _SHALLOW:
                self.budget.weigh(value, printed=name in _TEXTUAL)
            first = {"context": context, "eval_context": context.eval_ctx, "environment": self}
            leading = () if wanted is None else (first[wanted],)
            return self.budget.admit(function(*leading, value, *args, **kwargs))

        return call

    def _expect_filter(self, name: str, value: Value, args: tuple[Value, ...], options: Mapping[str, Value]) -> None:
        budget = self.budget
        indent = options.get("indent") or options.get("width") or 0
        indent = len(indent) if isinstance(indent, str) else indent
        if indent > MAX_INDENT or len("".join(options.get("separators") or ())) > MAX_INDENT // 4:
            raise BudgetError(f"it indents by more than {MAX_INDENT} characters, or separates by more than a quarter")
        if name == "join":
            budget.expect_joined(str(options.get("d", "")), value)
            return
        budget.expect(budget.weigh(value, printed=True, indent=indent))
        text = "" if name == "tojson" else str(value)
        if name == "replace":
            budget.expect_replaced(text, str(options.get("old", "")), str(options.get("new", "")), options.get("count"))
        elif name == "format":
            budget.expect_formatted(text, "%", (*args, *options.values()))
        elif name == "indent":
            budget.expect(len(text) * (1 + (indent or 4)))
        elif name == "trim":
            budget.spend(len(text) * len(options.get("chars") or "") // STEP_BYTES)

    def _test(self, name: str, function: Callable[..., Value]) -> Callable[..., Value]:
        if name not in _COMPARING_TESTS | _NUMBER_TESTS:
            return function

        def call(value: Value, *args: Value) -> Value:
            for operand in (value, *args):
                self.budget.weigh(operand)
                # The remainder would format a string.
                if name in _NUMBER_TESTS and not isinstance(operand, int | float):
                    raise TypeError(f"a number is needed, not a {type(operand).__name__}")
            return function(value, *args)

        return call

    @pass_context
    def _printed(self, context: Context, value: Value) -> str:
        self.budget.expect(self.budget.weigh(value, printed=True))
        return self.budget.admit(str(value))

    @pass_context
    def _loop(self, context: Context, items: Iterable[Value], steps_each: int) -> Iterator[Value]:
        return self.budget.counted(items, steps_each)

    @pass_context
    def _spend(self, context: Context, num_steps: int) -> None:
        self.budget.spend(num_steps)

    @pass_context
    def _weigh(self, context: Context, value: Value) -> Value:
        self.budget.weigh(value)
        return value

    @pass_context
    def _concat(self, context: Context, *values: Value) -> str:
        self.budget.expect(sum(self.budget.weigh(value, printed=True) for value in values))
        return self.budget.admit("".join(map(str, values)))

    @pass_context
    def _slice(self, context: Context, value: Value, start: Value, stop: Value, step: Value) -> Value:
        return self.budget.admit(value[start:stop:step])


class _Routing(NodeTransformer):
    """Rewrites operations that Jinja would compile to plain Python into calls of the sandbox's routes.

    for x in items       ->  for x in items | loop(steps of one round)
    a ~ b    x[1:]       ->  a | concat(b)        x | slice(1, none, none)
    a == b   {k: v}      ->  (a | weigh) == (b | weigh)        {(k | weigh): v}
    """

    def generic_visit(self, node: nodes.Node, *args: Value, **kwargs: Value) -> nodes.Node:
        length = _length(node) if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) else 0
        super().generic_visit(node)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            node.body.insert(0, nodes.ExprStmt(_routed(nodes.Const(length), _SPEND)).set_lineno(node.lineno))
        if isinstance(node, nodes.For):
            node.iter = _routed(node.iter, _LOOP, nodes.Const(1 if node.test is None else length))
        elif isinstance(node, nodes.Concat):
            return _routed(node.nodes[0], _CONCAT, *node.nodes[1:])
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            ends = (node.arg.start, node.arg.stop, node.arg.step)
            return _routed(node.node, _SLICE, *(nodes.Const(None) if end is None else end for end in ends))
        elif isinstance(node, nodes.Compare | nodes.Operand):
            node.expr = _routed(node.expr, _WEIGH)
        elif isinstance(node, nodes.Pair):
            node.key = _routed(node.key, _WEIGH)
        elif isinstance(node, nodes.ScopedEvalContextModifier):
            raise TemplateSyntaxError("autoescape is for web pages", node.lineno)
        return node


def _routed(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    routed = nodes.Filter(node, name, list(args), [], None, None)
    routed.set_lineno(node.lineno)
    return routed


def _length(node: nodes.Node) -> int:
    """Return the steps of one pass through a loop or macro, from its nodes and its text."""
    num_chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) + num_chars // STEP_BYTES


def _to_json(
    value: Value,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON like transformers' tojson: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*args: int) -> range:
    numbers = range(*args)
    # Not len(), which fails on numbers beyond a machine word.
    if numbers[MAX_ITEMS:]:
        raise BudgetError(f"it counts over a range of more than {MAX_ITEMS}")
    return numbers


def _strftime_now(format: object) -> str:
    if not isinstance(format, str) or not _DATE_FORMAT.fullmatch(format):
        raise BudgetError("it writes the date in a format that is too long or unknown")
    return datetime.now().strftime(format)


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusalError(message if isinstance(message, str) else type(message).__name__)
