"""The one place where Jinja environments are made: sandboxed, immutable, and every operation metered; no torch.

Jinja's sandbox keeps templates away from Python's insides, and this one goes further: only listed methods, functions
and attributes exist, and using any other is an error at once. It bounds neither time nor memory, so each operation here
charges a Meter first; `template_rewrite` routes those through it that Jinja compiles to plain Python.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import islice
from types import BuiltinMethodType, MethodType

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import loopcontrols
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from holdfast.text.template_filters import metered_filters, metered_tests
from holdfast.text.template_meter import BudgetError, Meter, TemplateLimits
from holdfast.text.template_methods import LIST_ITEM_BYTES, check_format, check_percent, method_charge
from holdfast.text.template_rewrite import HOOK_MARK, GenerationTag, hook_filters, rewrite
from holdfast.text.template_values import MeteredLoop, Value, admit, check_integer, escaping, settled, survey

MAX_RANGE = 100_000
MAX_TEMPLATE_WORDS = 16_000
"""Names, literals, operators and brackets, which is what compiling costs; long templates have a few thousand."""
MAX_DATE_FORMAT_CHARS = 200
_DATE_FORMAT = re.compile(r"(?:[^%]|%-?[a-zA-Z%])*")
_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (
        LoopContext,
        frozenset(
            [
                "index",
                "index0",
                "revindex",
                "revindex0",
                "first",
                "last",
                "length",
                "previtem",
                "nextitem",
                "depth",
                "depth0",
                "cycle",
                "changed",
            ]
        ),
    ),
    (Cycler, frozenset(("next", "current", "reset"))),
    (Macro, frozenset(("name", "arguments", "catch_kwargs", "catch_varargs", "caller"))),
    (BlockReference, frozenset(("super",))),
)


class TemplateRefusalError(TemplateRuntimeError):
    """The template itself refuses its input."""


class TemplateNamespace(Namespace):
    """Jinja's namespace, without names that Python gives a meaning to."""

    def __init__(self, /, *args: Value, **kwargs: Value) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Value) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"it names {name!r:.40} in a namespace")


class MeteredFormat:
    """`"...".format`, which looks attributes up through the sandbox."""

    def __init__(self, environment: "TemplateEnvironment", text: str) -> None:
        self._environment = environment
        self._text = text

    def __call__(self, *args: Value, **kwargs: Value) -> str:
        check_format(self._environment.meter, self._text, args, kwargs)
        if isinstance(self._text, Markup):
            formatter: SandboxedFormatter = SandboxedEscapeFormatter(self._environment, escape=self._text.escape)
        else:
            formatter = SandboxedFormatter(self._environment)
        return type(self._text)(formatter.vformat(self._text, args, kwargs))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one template at a time; `meter` is set for each rendering."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    intercepted_unops = frozenset(("+", "-"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], optimized=False
        )
        self.meter = Meter(TemplateLimits())
        self.filters = {**metered_filters(self), **hook_filters(self)}
        self.tests = metered_tests(self)
        self.globals = {
            "range": self._range,
            "dict": self._dict,
            "cycler": Cycler,
            "joiner": Joiner,
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = frozenset(self.globals.values())

    def call_filter(self, name: str, *args: Value, **kwargs: Value) -> Value:
        # By name, as `map` does: the hooks are for what the rewriting puts in.
        if str(name).startswith(HOOK_MARK):
            raise SecurityError(f"it calls the filter {name!r:.40}")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Value, right: Value) -> Value:
        self.meter.step()
        _CHECKS[operator](self.meter, left, right)
        return admit(self.meter, self.binop_table[operator](left, right))

    def call_unop(self, context: Context, operator: str, arg: Value) -> Value:
        self.meter.step()
        return super().call_unop(context, operator, arg)

    def getattr(self, obj: Value, attribute: str) -> Value:
        self.meter.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Value, argument: Value) -> Value:
        self.meter.step()
        if isinstance(argument, tuple):
            survey(self.meter, argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Value, attr: str, value: Value) -> bool:
        if attr.startswith("_") or not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, Namespace | Undefined):
            return True
        if isinstance(obj, tuple) and attr in getattr(type(obj), "_fields", ()):
            return True
        if method_charge(obj, attr) is not None:
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

    def unsafe_undefined(self, obj: Value, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for {attribute!r:.40} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Value) -> Callable[..., str] | None:
        if isinstance(value, MethodType | BuiltinMethodType) and isinstance(value.__self__, str):
            if value.__name__ == "format":
                return MeteredFormat(self, value.__self__)
            if value.__name__ == "format_map":
                return self.unsafe_undefined(value.__self__, "format_map")  # pyright: ignore[reportReturnType]
        return None

    def call(__self, __context: Context, __obj: Value, *args: Value, **kwargs: Value) -> Value:  # noqa: N805
        self, context, function = __self, __context, __obj
        self.meter.step(4 + len(args) + len(kwargs))
        args = self._charged_arguments(function, args, kwargs)
        self.meter.enter()
        try:
            result = super().call(context, function, *args, **kwargs)
        finally:
            self.meter.leave()
        if isinstance(result, list) and isinstance(getattr(function, "__self__", None), str):
            self.meter.make(LIST_ITEM_BYTES * len(result))
        return admit(self.meter, result)

    def _charged_arguments(
        self, function: Value, args: tuple[Value, ...], kwargs: Mapping[str, Value]
    ) -> tuple[Value, ...]:
        """Refuse what templates may not call, and charge the rest in advance."""
        if isinstance(function, Macro | BlockReference | TemplateReference | Joiner | MeteredFormat | Undefined):
            return args
        if isinstance(function, LoopContext):
            return (MeteredLoop(self.meter, args[0], 1), *args[1:]) if args else args
        if isinstance(function, MethodType | BuiltinMethodType):
            owner = function.__self__
            charge = method_charge(owner, function.__name__)
            if charge is not None:
                return charge(self.meter, owner, args, kwargs)
            if isinstance(owner, LoopContext | Cycler) and self.is_safe_attribute(owner, function.__name__, function):
                for argument in (*args, *kwargs.values()):
                    survey(self.meter, argument)
                return args
        if isinstance(function, Callable) and function in self._functions:
            return args
        raise SecurityError(f"it calls a {type(function).__name__}")

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        # Not len(), which fails where the number does not fit a machine word.
        if numbers[MAX_RANGE:]:
            raise BudgetError(f"it counts over a range of more than {MAX_RANGE}")
        return numbers

    def _dict(self, pairs: Value = (), **kwargs: Value) -> dict[Value, Value]:
        pairs = settled(self.meter, pairs)
        survey(self.meter, pairs)
        return dict(pairs, **kwargs)


def compile_template(environment: TemplateEnvironment, source: str) -> Template:
    """A template, metered; raises whatever Jinja or Python raise for a broken one."""
    environment.meter = Meter(TemplateLimits())
    words = (kind for _, kind, _ in environment.lex(source) if kind != "whitespace")
    if next(islice(words, MAX_TEMPLATE_WORDS, None), None) is not None:
        raise BudgetError(f"it has more than {MAX_TEMPLATE_WORDS} words of Jinja")
    code = environment.compile(rewrite(environment.parse(source), environment))
    return environment.template_class.from_code(environment, code, environment.globals)


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusalError(message if isinstance(message, str) else type(message).__name__)


def _strftime_now(format: object) -> str:
    if not isinstance(format, str) or len(format) > MAX_DATE_FORMAT_CHARS or not _DATE_FORMAT.fullmatch(format):
        raise BudgetError("it writes the date in a form that is too long or unknown")
    return datetime.now().strftime(format)


def _check_sum(meter: Meter, left: Value, right: Value) -> None:
    if isinstance(left, str) and isinstance(right, str):
        num_chars = len(left) * escaping(right) + len(right) * escaping(left)
        meter.expect(num_chars * (1 if left.isascii() and right.isascii() else 4))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        meter.expect(8 * (len(left) + len(right)))


def _check_product(meter: Meter, left: Value, right: Value) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_integer(left.bit_length() + right.bit_length())
        return
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(times, int):
            meter.expect(len(items) * max(times, 0) * (1 if isinstance(items, str) and items.isascii() else 8))


def _check_power(meter: Meter, left: Value, right: Value) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_integer(left.bit_length() * max(right, 0))


def _check_remainder(meter: Meter, left: Value, right: Value) -> None:
    if isinstance(left, str):
        check_percent(meter, left, right)


def _check_nothing(meter: Meter, left: Value, right: Value) -> None:
    """Differences and quotients of bounded numbers are bounded."""


_CHECKS: dict[str, Callable[[Meter, Value, Value], None]] = {
    "+": _check_sum,
    "-": _check_nothing,
    "*": _check_product,
    "/": _check_nothing,
    "//": _check_nothing,
    "%": _check_remainder,
    "**": _check_power,
}
assert _CHECKS.keys() == TemplateEnvironment.intercepted_binops, f"{_CHECKS.keys()=}"
