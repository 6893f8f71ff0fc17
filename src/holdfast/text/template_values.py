"""What the values in a chat template weigh: sizes before they are made, and loops that are counted; no torch."""

from collections.abc import Iterable, Iterator, Sized
from itertools import chain
from types import NoneType
from typing import Any, TypeAlias

from jinja2.runtime import Undefined
from markupsafe import Markup

from holdfast.text.template_meter import MAX_INTEGER_BITS, MAX_NESTING, BudgetError, Meter

Value: TypeAlias = Any
"""Whatever a template computes with."""
MAX_ESCAPED_CHARS = 12
"""Characters that repr or JSON may write for one."""
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
DATA = (str, int, float, list, tuple, dict, range, Undefined, NoneType, *_VIEWS)
"""What can be printed; functions and the like would only show where they are in memory."""
MAX_HTML_CHARS = 5
"""Characters that escaping for HTML may write for one."""
_SURVEY_STEP = 64


class MeteredLoop:
    """What a for loop goes over: a step for each round, and as many more as the body is long."""

    def __init__(self, meter: Meter, iterable: Iterable[Value], round_steps: int) -> None:
        self._meter = meter
        self._iterable = iterable
        self._round_steps = round_steps
        self._iterator = iter(iterable)

    def __iter__(self) -> Iterator[Value]:
        for item in self._iterator:
            self._meter.step(self._round_steps)
            yield item

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            raise TypeError("the length is not known before the end")
        return len(self._iterable)


class MeteredIterator:
    """A lazy result, such as that of `map`, which costs as it is consumed."""

    def __init__(self, meter: Meter, iterator: Iterator[Value]) -> None:
        self._meter = meter
        self._iterator = iterator

    def __iter__(self) -> Iterator[Value]:
        return self

    def __next__(self) -> Value:
        self._meter.step()
        return admit(self._meter, next(self._iterator))


def admit(meter: Meter, value: Value) -> Value:
    """Charge what an operation has made, and make lazy results count."""
    if isinstance(value, str):
        meter.make_text(len(value), value.isascii())
    elif isinstance(value, list | tuple):
        meter.make(64 + 8 * len(value))
    elif isinstance(value, dict):
        meter.make(64 + 64 * len(value))
    elif isinstance(value, int):
        check_integer(value.bit_length())
        meter.make(32 + value.bit_length() // 8)
    elif isinstance(value, Iterator) and not isinstance(value, MeteredIterator):
        meter.make(512)
        return MeteredIterator(meter, value)
    return value


def settled(meter: Meter, value: Value) -> Value:
    """A lazy value as a list, so that its size is known; others as they are."""
    if not isinstance(value, Iterator):
        return value
    items: list[Value] = []
    for item in value:
        meter.make(16)
        items.append(item)
    return items


def check_integer(num_bits: int) -> None:
    """Refuse numbers that cost more than an operation should."""
    if num_bits > MAX_INTEGER_BITS:
        raise BudgetError(f"it computes a number of more than {MAX_INTEGER_BITS} bits")


def escaping(value: object) -> int:
    """How much longer text may become that is joined to this one: what is safe for HTML escapes it."""
    return MAX_HTML_CHARS if isinstance(value, Markup) else 1


def scan_shallow(meter: Meter, value: object) -> None:
    """Time to go once over a value, without what its items hold."""
    if isinstance(value, str):
        meter.scan(len(value))
    elif isinstance(value, Sized) and isinstance(value, Iterable):
        meter.step(1 + len(value))
    else:
        meter.step()


def survey(meter: Meter, value: object) -> int:
    """Go through a value and all that it holds, as often as it is held; the most characters that writing it takes.

    Comparing, hashing and printing do the same in native code, without an end for lists that hold each other twice.
    """
    return _survey(meter, value, (object,))


def _survey(meter: Meter, value: object, kinds: tuple[type, ...]) -> int:
    if isinstance(value, str):
        meter.scan(len(value))
        return len(value)
    num_chars, num_seen = 0, 0
    open_iterators: list[Iterator[object]] = [iter((value,))]
    while open_iterators:
        for item in open_iterators[-1]:
            num_seen += 1
            if num_seen % _SURVEY_STEP == 0:
                meter.step(_SURVEY_STEP)
            if isinstance(item, str):
                meter.scan(len(item))
                num_chars += 2 + len(item) * (MAX_ESCAPED_CHARS // 2 if item.isascii() else MAX_ESCAPED_CHARS)
                continue
            if not isinstance(item, kinds):
                raise TypeError(f"a {type(item).__name__} has no text")
            num_chars += 32 if not isinstance(item, int) else 2 + item.bit_length() // 3
            if isinstance(item, range):
                meter.step(len(item))
            inner = _items_of(item)
            if inner is not None:
                if len(open_iterators) > MAX_NESTING:
                    raise BudgetError(f"it nests lists more than {MAX_NESTING} deep")
                open_iterators.append(inner)
                break
        else:
            open_iterators.pop()
    meter.step(1 + num_seen % _SURVEY_STEP)
    return num_chars


def written_bytes(meter: Meter, value: object) -> int:
    """The most bytes that a value takes as text; what is no data has none."""
    num_chars = _survey(meter, value, DATA)
    return num_chars if isinstance(value, str) and value.isascii() else 4 * num_chars


def _items_of(value: object) -> Iterator[object] | None:
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    return iter(value) if isinstance(value, (list, tuple, *_VIEWS)) else None
