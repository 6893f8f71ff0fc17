"""Which methods a chat template may call on strings, lists and dicts, and what each may cost; no torch."""

import re
from collections.abc import Callable, Mapping
from string import Formatter

from holdfast.text.template_meter import BudgetError, Meter
from holdfast.text.template_values import Value, escaping, scan_shallow, settled, survey, written_bytes

MAX_FORMAT_WIDTH = 1000
_LONG_NUMBER = re.compile(r"\d{4,}")
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?P<width>\*|[0-9]+)?(?:\.(?P<precision>\*|[0-9]+))?")
MAX_CASE_CHARS = 3
"""Characters that one may become in upper or lower case."""
LIST_ITEM_BYTES = 80
"""A short string in a list."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Arguments = tuple[Value, ...]
Charge = Callable[[Meter, Value, Arguments, Mapping[str, Value]], Arguments]
"""Charges a call in advance; gives back the arguments, lazy ones settled."""


def _free(meter: Meter, value: Value, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, str | int | float | None):
            survey(meter, argument)
    return args


def _copied(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    meter.expect(4 * MAX_CASE_CHARS * len(value))
    meter.scan(len(value))
    return _free(meter, value, args, kwargs)


def _padded(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    width = args[0] if args and isinstance(args[0], int) else 0
    meter.expect(4 * max(width, len(value)))
    meter.scan(len(value))
    return args


def _tabs_expanded(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    width = args[0] if args else kwargs.get("tabsize", 8)
    meter.scan(len(value))
    meter.expect(4 * (len(value) + value.count("\t") * (width if isinstance(width, int) else 8)))
    return args


def _searched(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    """Forward searches go over the text once, or a few times where the text and what is sought repeat themselves."""
    meter.scan(2 * len(value))
    return _free(meter, value, args, kwargs)


def _searched_backwards(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    """Backward ones compare at every place, in the worst case all of it."""
    sought = args[0] if args else kwargs.get("sep")
    meter.scan(len(value) * (1 + (len(sought) // 8 if isinstance(sought, str) else 0)))
    return _free(meter, value, args, kwargs)


def _split(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    separator = args[0] if args else kwargs.get("sep")
    _searched_backwards(meter, value, args, kwargs)
    num_parts = value.count(separator) if isinstance(separator, str) and separator else len(value) // 2
    meter.expect(4 * len(value) + LIST_ITEM_BYTES * (num_parts + 1))
    return args


def _lines_split(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    meter.scan(len(_LINE_ENDS) * len(value))
    num_parts = 1 + sum(map(value.count, _LINE_ENDS))
    meter.expect(4 * len(value) + LIST_ITEM_BYTES * num_parts)
    return args


def _stripped(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    check_strip(meter, value, args[0] if args else None)
    return args


def check_strip(meter: Meter, text: str, characters: object) -> None:
    """Time to look up each character of a text among those to be stripped."""
    meter.scan(len(text) * (1 + (len(characters) // 8 if isinstance(characters, str) else 0)))
    meter.expect(4 * len(text))


def _replaced(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        check_replace(meter, value, *args[:3])
    return args


def check_replace(meter: Meter, text: str, old: str, new: str, most: object = None) -> None:
    """Room for a text in which every `old` has become `new`, or the first few."""
    meter.scan(2 * len(text))
    num_found = text.count(old)
    if isinstance(most, int) and most >= 0:
        num_found = min(num_found, most)
    meter.expect(4 * (len(text) + num_found * max(0, escaping(text) * len(new) - len(old))))


def _joined(meter: Meter, value: str, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    if not args:
        return args
    items = settled(meter, args[0])
    check_join(meter, value, items)
    return (items, *args[1:])


def check_join(meter: Meter, separator: str, items: Value) -> None:
    """Room for all items with a separator between them."""
    scan_shallow(meter, items)
    num_items = len(items) if hasattr(items, "__len__") else 0
    meter.expect(4 * len(separator) * num_items)
    num_bytes = survey(meter, items) if isinstance(items, str) else sum(written_bytes(meter, item) for item in items)
    meter.expect(escaping(separator) * num_bytes + 4 * len(separator) * num_items)


def check_percent(meter: Meter, template: str, values: object) -> None:
    """Room for `template % values`."""
    places = list(_PERCENT.finditer(template))
    for place in places:
        for number in (place["width"], place["precision"]):
            if number == "*" or (number is not None and (len(number) > 4 or int(number) > MAX_FORMAT_WIDTH)):
                raise BudgetError(f"it formats to a width of more than {MAX_FORMAT_WIDTH}")
    meter.make(LIST_ITEM_BYTES * len(places))
    most = escaping(template) * written_bytes(meter, values)
    meter.expect(4 * len(template) + len(places) * (most + 4 * MAX_FORMAT_WIDTH))


def check_format(meter: Meter, template: str, args: Arguments, kwargs: Mapping[str, Value]) -> None:
    """Room for `template.format(*args, **kwargs)`."""
    num_places = template.count("{")
    meter.scan(len(template))
    meter.step(4 * num_places)
    meter.expect(LIST_ITEM_BYTES * num_places)
    for _, _, spec, _ in Formatter().parse(template):
        if spec and ("{" in spec or _LONG_NUMBER.search(spec)):
            raise BudgetError(f"it formats to a width of {MAX_FORMAT_WIDTH} or more, or one that it computes")
    most = max((written_bytes(meter, value) for value in (*args, *kwargs.values())), default=0)
    meter.expect(4 * len(template) + num_places * (escaping(template) * most + 4 * MAX_FORMAT_WIDTH))


def _compared(meter: Meter, value: Value, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    survey(meter, value)
    return _free(meter, value, args, kwargs)


def _shallow(meter: Meter, value: Value, args: Arguments, kwargs: Mapping[str, Value]) -> Arguments:
    scan_shallow(meter, value)
    return _free(meter, value, args, kwargs)


_TESTS = [
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
]
STRING_METHODS: dict[str, Charge] = {
    **dict.fromkeys(_TESTS, _searched),
    **dict.fromkeys(["capitalize", "casefold", "lower", "swapcase", "title", "upper"], _copied),
    **dict.fromkeys(["removeprefix", "removesuffix"], _copied),
    **dict.fromkeys(["strip", "lstrip", "rstrip"], _stripped),
    **dict.fromkeys(["count", "find", "index", "startswith", "endswith"], _searched),
    **dict.fromkeys(["rfind", "rindex"], _searched_backwards),
    **dict.fromkeys(["center", "ljust", "rjust", "zfill"], _padded),
    **dict.fromkeys(["split", "rsplit", "partition", "rpartition"], _split),
    "splitlines": _lines_split,
    "expandtabs": _tabs_expanded,
    "replace": _replaced,
    "join": _joined,
}
METHODS: tuple[tuple[type, Mapping[str, Charge]], ...] = (
    (str, STRING_METHODS),
    (dict, {"get": _free, "items": _free, "keys": _free, "values": _free, "copy": _shallow}),
    (list, {"index": _compared, "count": _compared, "copy": _shallow}),
    (tuple, {"index": _compared, "count": _compared}),
)


def method_charge(value: object, name: str) -> Charge | None:
    """What a method costs; None when templates may not call it."""
    for kind, charges in METHODS:
        if isinstance(value, kind):
            return charges.get(name)
    return None
