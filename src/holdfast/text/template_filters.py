"""The filters and tests of chat templates, each charged before it runs; no torch."""

import json
import math
from collections.abc import Callable, Mapping

from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import pass_context

from holdfast.text.template_meter import BudgetError, Meter, Metered
from holdfast.text.template_methods import (
    MAX_CASE_CHARS,
    check_join,
    check_percent,
    check_replace,
    check_strip,
)
from holdfast.text.template_values import Value, admit, scan_shallow, settled, survey, written_bytes

MAX_GROUPS = 10_000
"""Of batch and slice."""
MAX_INDENT = 256
MAX_DIGITS = 300
"""Of round."""

Arguments = tuple[Value, ...]
Options = Mapping[str, Value]
FilterCharge = Callable[[Meter, Value, Arguments, Options], Value]
"""Charges a filter in advance; gives back the value to filter, settled where it was lazy."""


def _free(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    meter.step()
    return value


def _once(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    scan_shallow(meter, value)
    return value


def _listed(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    scan_shallow(meter, value)
    if isinstance(value, str):
        meter.make(len(value) * (8 if value.isascii() else 88))
    elif hasattr(value, "__len__"):
        meter.make(40 * len(value))
    return value


def _text(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    """A text, or what is made one of: read and copied about once, slower than a search since words are told apart."""
    num_bytes = written_bytes(meter, value)
    meter.scan(4 * num_bytes)
    meter.expect(MAX_CASE_CHARS * num_bytes)
    for argument in (*args, *kwargs.values()):
        survey(meter, argument)
    return value


def _escaped(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    num_bytes = written_bytes(meter, value)
    meter.scan(num_bytes)
    meter.expect(12 * num_bytes)
    return value


def _words(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    meter.expect(48 * written_bytes(meter, value))
    return _text(meter, value, args, kwargs)


def _trimmed(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    if isinstance(value, str):
        check_strip(meter, value, args[0] if args else kwargs.get("chars"))
        return value
    return _text(meter, value, args, kwargs)


def _ordered(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    """Items that are compared or hashed, each with several others."""
    value = settled(meter, value)
    num_chars = survey(meter, value)
    num_items = len(value) if hasattr(value, "__len__") else 1
    rounds = max(1, int(math.log2(num_items + 1)))
    meter.scan(num_chars * rounds)
    meter.step(num_items * rounds)
    meter.expect(64 * num_items)
    return value


def _summed(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    value = settled(meter, value)
    start = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if not isinstance(start, int | float):
        raise BudgetError("it sums up what are not numbers")
    scan_shallow(meter, value)
    return value


def _joined(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    value = settled(meter, value)
    separator = args[0] if args else kwargs.get("d", "")
    survey(meter, separator)
    check_join(meter, str(separator), value)
    return value


def _replaced(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    old = args[0] if args else kwargs.get("old", "")
    new = args[1] if len(args) > 1 else kwargs.get("new", "")
    most = args[2] if len(args) > 2 else kwargs.get("count")
    for part in (value, old, new):
        meter.expect(written_bytes(meter, part))
    check_replace(meter, str(value), str(old), str(new), most)
    return value


def _centered(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    width = args[0] if args else kwargs.get("width", 80)
    meter.expect(written_bytes(meter, value) + 4 * (width if isinstance(width, int) else 0))
    return value


def _indented(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    width = args[0] if args else kwargs.get("width", 4)
    size = len(width) if isinstance(width, str) else width
    if not isinstance(size, int) or size > MAX_INDENT:
        raise BudgetError(f"it indents by more than {MAX_INDENT} characters")
    num_bytes = written_bytes(meter, value)
    meter.expect(num_bytes)
    num_lines = len(str(value).splitlines()) if num_bytes else 0
    meter.scan(num_bytes + 8 * num_lines)
    meter.expect(2 * num_bytes + (4 * size + 80) * num_lines)
    return value


def _formatted(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    meter.expect(written_bytes(meter, value))
    check_percent(meter, str(value), kwargs or args)
    return value


def _grouped(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    size = args[0] if args else kwargs.get("linecount", kwargs.get("slices", 0))
    if not isinstance(size, int) or not 0 < size <= MAX_GROUPS:
        raise BudgetError(f"it groups by {size!r:.20}, and 1 to {MAX_GROUPS} work")
    meter.make(16 * size)
    return _listed(meter, settled(meter, value), args, kwargs)


def _rounded(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    precision = args[0] if args else kwargs.get("precision", 0)
    if isinstance(precision, int) and abs(precision) > MAX_DIGITS:
        raise BudgetError(f"it rounds to more than {MAX_DIGITS} digits")
    meter.step()
    return _number(value)


def _number(value: Value) -> Value:
    """Numbers pass; strings would be multiplied or formatted in their stead."""
    if not isinstance(value, int | float):
        raise TypeError(f"a number is needed, not a {type(value).__name__}")
    return value


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_json(meter: Meter, value: Value, args: Arguments, kwargs: Options) -> Value:
    indent = args[1] if len(args) > 1 else kwargs.get("indent")
    separators = args[2] if len(args) > 2 else kwargs.get("separators")
    size = len(indent) if isinstance(indent, str) else indent or 0
    if not isinstance(size, int) or size > MAX_INDENT or survey(meter, separators) > MAX_INDENT:
        raise BudgetError(f"it writes JSON with more than {MAX_INDENT} characters between the values")
    num_bytes = written_bytes(meter, value)
    meter.scan(num_bytes)
    # Every value takes at least 32 bytes above, so this is room for the white space before each, however deep.
    meter.expect(num_bytes * (2 if not size else 2 + size * 4))
    return value


_LAZY = ["map", "select", "reject", "selectattr", "rejectattr", "items"]
FILTER_CHARGES: dict[str, FilterCharge] = {
    **dict.fromkeys(["abs", "attr", "count", "d", "default", "first", "last", "length", "random"], _free),
    **dict.fromkeys([*_LAZY, "reverse"], _once),
    **dict.fromkeys(
        ["capitalize", "filesizeformat", "float", "int", "lower", "safe", "string", "truncate", "upper"], _text
    ),
    **dict.fromkeys(["e", "escape", "forceescape", "urlencode"], _escaped),
    **dict.fromkeys(["dictsort", "groupby", "max", "min", "sort", "unique"], _ordered),
    "batch": _grouped,
    "center": _centered,
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "list": _listed,
    "replace": _replaced,
    "round": _rounded,
    "slice": _grouped,
    "sum": _summed,
    "tojson": _as_json,
    "title": _words,
    "trim": _trimmed,
    "wordcount": _words,
}
"""All but pprint, striptags, urlize, wordwrap and xmlattr, whose cost has no simple bound and which no chat needs."""
_FREE_TESTS = frozenset(
    [
        "boolean",
        "callable",
        "defined",
        "escaped",
        "false",
        "float",
        "integer",
        "iterable",
        "mapping",
        "none",
        "number",
        "sameas",
        "sequence",
        "string",
        "true",
        "undefined",
        "filter",
        "test",
    ]
)
_NUMBER_TESTS = frozenset(("odd", "even", "divisibleby"))


def metered_filters(environment: Metered) -> dict[str, Callable[..., Value]]:
    """Every filter that templates may use."""
    functions: dict[str, Callable[..., Value]] = {**FILTERS, "tojson": to_json}
    return {name: _metered(environment, functions[name], charge) for name, charge in FILTER_CHARGES.items()}


def _metered(environment: Metered, function: Callable[..., Value], charge: FilterCharge) -> Callable[..., Value]:
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    # Filters that ask for the context are never run while a template is compiled.
    @pass_context
    def call(context: Context, value: Value, *args: Value, **kwargs: Value) -> Value:
        meter = environment.meter
        meter.step(len(args) + len(kwargs))
        value = charge(meter, value, args, kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": environment}
        leading = () if wanted is None else (first[wanted],)
        return admit(meter, function(*leading, value, *args, **kwargs))

    return call


def metered_tests(environment: Metered) -> dict[str, Callable[..., Value]]:
    """Every test; those that compare go through both sides first."""

    def metered(name: str, function: Callable[..., Value]) -> Callable[..., Value]:
        wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
        if wanted is not None or name in _FREE_TESTS:
            return function

        def call(value: Value, *args: Value, **kwargs: Value) -> Value:
            environment.meter.step(len(args) + len(kwargs))
            for operand in (value, *args, *kwargs.values()):
                environment.meter.expect(written_bytes(environment.meter, operand))
                if name in _NUMBER_TESTS:
                    _number(operand)
            return function(value, *args, **kwargs)

        return call

    return {name: metered(name, function) for name, function in TESTS.items()}
