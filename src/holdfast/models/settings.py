"""Typed, bounded reading of a config.json that may be wrong or hostile; every refusal names the file and the key; no torch."""

from collections.abc import Mapping, Sequence

from holdfast.errors import ModelFormatError, shown

MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""
MAX_LISTED = 5
"""Names that a message lists."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Numbers are bounded so that arithmetic with them stays finite."""
_ABSENT = object()


def plain(text: str) -> str:
    """A name from a file without quotes around it, escaped and short."""
    return repr(text[:MAX_SHOWN])[1:-1] + ("..." if len(text) > MAX_SHOWN else "")


def listed(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(plain(name) for name in names[:MAX_LISTED]) + more


class Settings:
    """One JSON object of a config file. An absent key takes the default; null counts only where it has a meaning."""

    def __init__(self, values: Mapping[str, object], file: str, section: str = "") -> None:
        self.values = values
        self.file = file
        self.section = section

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def refuse(self, key: str, value: object, wanted: str) -> ModelFormatError:
        """The error for a value of the wrong type or out of bounds."""
        return ModelFormatError(
            f"{self.file} says {self.section}{key} = {shown(value)}",
            f"{wanted} is needed there",
            "correct the file or download the model again",
        )

    def missing(self, key: str, why: str) -> ModelFormatError:
        """The error for a key without which nothing can be computed."""
        return ModelFormatError(
            f"{self.file} has no {self.section}{key}", why, "add the key or download the model again"
        )

    def count(self, key: str, default: int, high: int, low: int = 1) -> int:
        """A whole number from `low` to `high`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, value, f"a whole number from {low} to {high}")
        return value

    def required_count(self, key: str, high: int) -> int:
        """A whole number from 1 to `high` that has to be there."""
        if key not in self:
            raise self.missing(key, "a whole number is needed")
        return self.count(key, 0, high)

    def optional_count(self, key: str, default: int | None, high: int) -> int | None:
        """A whole number from 1 to `high`, or null for none."""
        return None if self.values.get(key, default) is None else self.count(key, default or 1, high)

    def number(self, key: str, default: float | None = None, low: float = SMALLEST) -> float:
        """A finite number, at least `low`; without a default the key must be there."""
        value = self.values.get(key, _ABSENT if default is None else default)
        if value is _ABSENT:
            raise self.missing(key, "a number is needed")
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= LARGEST:
            raise self.refuse(key, value, "a number above 0" if low == SMALLEST else f"a number from {low:g} up")
        return float(value)

    def optional_number(self, key: str, low: float = SMALLEST) -> float | None:
        """A finite number, at least `low`, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.number(key, low=low)

    def numbers(self, key: str, num_values: int) -> tuple[float, ...]:
        """A list of exactly `num_values` finite numbers above zero."""
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            raise self.missing(key, f"a list of {num_values} numbers is needed")
        if not isinstance(value, list) or len(value) != num_values or not all(_is_positive(item) for item in value):
            raise self.refuse(key, value, f"a list of {num_values} numbers above 0")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, value, "a list of strings")
        return tuple(value)

    def part(self, key: str) -> "Settings | None":
        """A nested object, or None where the key is absent, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, value, "an object")
        return Settings(value, self.file, f"{self.section}{key}.")

    def token_ids(self, key: str, default: Sequence[int]) -> tuple[int, ...]:
        """Token ids from a number or a list; null and negative ids mean none."""
        value = self.values.get(key, list(default))
        token_ids: list[int] = []
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(item, bool) or not isinstance(item, int) or item >= 2**31:
                raise self.refuse(key, value, "a token id or a list of them")
            if item >= 0:
                token_ids.append(item)
        return tuple(token_ids)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST
