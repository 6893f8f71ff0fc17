"""Options of every command, read from data/commands.json; their values stay text until a field reads them; no torch.

An invalid value stays text, so that its field refuses it.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from holdfast.config import ALIASES, DTYPES, LOAD_FORMATS, EngineConfig
from holdfast.errors import ConfigError, RequestError
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, DTYPE_BYTES, INDEX_FORMATS, KV_FORMATS, MLA_FORMATS
from holdfast.quant.weight_schemes import UNQUANTIZED, WEIGHT_SCHEMES
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import MAX_SCHEMA_BYTES, StructuredOutputs

ARGUMENTS, OPTIONS = "Arguments", "Options"
PANELS = (ARGUMENTS, OPTIONS, "Output", "Benchmark", "Server", "Sampling", "Model", "Memory")
"""Sections of a help page, in order."""
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""Unit factors as in vLLM: powers of 1000 in lower case, of 1024 in upper case."""
_COUNT = re.compile(r"(-?[0-9]{1,18})(\.[0-9]{1,9})?([kKmMgG]?)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MAX_GRAMMAR_CHARS = 4 * MAX_SCHEMA_BYTES
Choice = TypeVar("Choice", bound=str)
Given = dict[str, Any]
"""Given options, by field name or by an alias of EngineConfig."""


@cache
def read_data(name: str) -> Any:  # noqa: ANN401 - a JSON value
    """Parse a JSON file of the package's data folder."""
    return json.loads(resources.files("holdfast").joinpath("data", name).read_text(encoding="utf-8"))


def read_count(text: str) -> int | str | None:
    """Read an integer such as 8192, 8k (8000), 8K (8192) or 1M; auto is None."""
    if text.strip().lower() == "auto":
        return None
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return text
    number = float(f"{match[1]}{match[2]}") if match[2] else int(match[1])
    value = number * COUNT_UNITS[match[3]]
    return int(value) if value == int(value) else text


def read_number(text: str) -> float | str:
    """Read a number, finite or not."""
    try:
        return float(text)
    except ValueError:
        return text


def read_share(text: str) -> float | str:
    """Read a share such as 0.8 or 80%."""
    number = read_number(text.strip().removesuffix("%"))
    if isinstance(number, str) or not text.strip().endswith("%"):
        return read_number(text)
    return number / 100 if 0 < number <= 100 else text


def read_patterns(texts: Sequence[str]) -> tuple[str, ...]:
    """Split comma-separated texts."""
    return tuple(part.strip() for text in texts for part in text.split(","))


def read_integers(texts: Sequence[str]) -> list[int | str]:
    """Read comma-separated integers."""
    return [int(part) if re.fullmatch(r"-?[0-9]{1,18}", part) else part for part in read_patterns(texts)]


def read_biases(texts: Sequence[str]) -> dict[int, float]:
    """Read token ids with the number to add to their logits, such as 42=-100."""
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        number = read_number(bias)
        if not re.fullmatch(r"[0-9]{1,18}", token.strip()) or isinstance(number, str):
            raise RequestError("cli.bad_logit_bias", value=text)
        biases[int(token)] = number
    return biases


def read_grammar(text: str) -> StructuredOutputs:
    """Read structured outputs from a JSON object, or from @FILE."""
    try:
        given = text
        if text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                given = file.read(_MAX_GRAMMAR_CHARS + 1)
        if len(given) <= _MAX_GRAMMAR_CHARS:
            return StructuredOutputs.of(json.loads(given))
        reason = f"it is longer than {_MAX_GRAMMAR_CHARS} characters"
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        reason = "it is not JSON"
    raise RequestError("cli.bad_grammar", value=text, reason=reason)


def read_counts(text: str, option: str) -> tuple[int, ...]:
    """Read comma-separated counts, each at least 1."""
    counts = [read_count(part) for part in text.split(",")]
    if not all(isinstance(count, int) and 1 <= count < 2**31 for count in counts):
        raise ConfigError("cli.bad_counts", option=option, value=text)
    return tuple(count for count in counts if isinstance(count, int))


def read_whole(text: str, option: str, least: int, most: int) -> int:
    """Read one count within bounds."""
    number = read_count(text)
    if not isinstance(number, int) or not least <= number <= most:
        raise ConfigError("value.out_of_range", name=option, minimum=least, maximum=most, value=text)
    return number


def read_seconds(text: str, option: str, most: float) -> float:
    """Read a duration of at most `most` seconds."""
    seconds = read_number(text)
    if isinstance(seconds, str) or not 0 <= seconds <= most:
        raise ConfigError("value.out_of_range", name=option, minimum=0, maximum=most, value=text)
    return seconds


def read_choice(option: str, text: str, choices: Sequence[Choice]) -> Choice:
    """Check that a value is one of a few."""
    for choice in choices:
        if choice == text:
            return choice
    raise ConfigError("value.not_one_of", name=option, accepted=choices, value=text)


def read_range(text: str, option: str) -> tuple[int, int]:
    """Read a count, or a range such as 32-512."""
    match = _RANGE.fullmatch(text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError("cli.bad_range", option=option, value=text)
    return low, high


READERS: Mapping[str, Callable[[Any], object]] = {
    "text": lambda value: value,
    "list": list,
    "count": read_count,
    "number": read_number,
    "share": read_share,
    "patterns": read_patterns,
    "integers": read_integers,
    "biases": read_biases,
    "grammar": read_grammar,
}
"""Functions that parse a setting's text, by name in the data file."""


def flag(name: str) -> str:
    """Return the flag of a field, such as --max-model-len."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of one command, which parses its text."""

    name: str
    help: str
    metavar: str = ""
    """Empty for a switch."""
    default: str | None = None
    panel: str = OPTIONS
    flags: tuple[str, ...] = ()
    """Flags, if they differ from the name."""
    is_repeated: bool = False

    @property
    def all_flags(self) -> tuple[str, ...]:
        return self.flags or (flag(self.name),)

    @property
    def arguments(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield the arguments of `ArgumentParser.add_argument`."""
        help = help_text(self.help, self.default)
        if self.panel == ARGUMENTS:
            yield (self.name,), {"metavar": self.metavar, "nargs": "?", "help": help}
        elif self.metavar:
            row = {"dest": self.name, "metavar": self.metavar, "default": self.default, "help": help}
            yield self.all_flags, {**row, "action": "append" if self.is_repeated else "store"}
        else:
            yield self.all_flags, {"dest": self.name, "action": "store_true", "help": help}


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that sets a field of EngineConfig or SamplingParams, with its default."""

    owner: type[EngineConfig | SamplingParams]
    name: str
    panel: str
    help: str
    metavar: str = ""
    read: Callable[[Any], object] = READERS["text"]
    """Parser of the text, or of the list of texts if the option repeats."""
    is_repeated: bool = False
    aliases: tuple[str, ...] = ()
    """Accepted flags that help does not show."""
    tells_default: bool = True

    @property
    def default(self) -> object:
        return next(field.default for field in fields(self.owner) if field.name == self.name)

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def other_names(self) -> tuple[str, ...]:
        """Aliases that EngineConfig itself knows."""
        return tuple(alias for alias, name in ALIASES.items() if name == self.name and self.owner is EngineConfig)

    @property
    def all_flags(self) -> tuple[str, ...]:
        """All spellings; help shows the first. A switch lists the spelling that changes its default first."""
        if self.is_switch:
            on, off = flag(self.name), flag(f"no_{self.name}")
            return (off, on) if self.default else (on, off)
        return tuple(map(flag, (self.name, *self.aliases, *self.other_names)))

    @property
    def arguments(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield the arguments of `ArgumentParser.add_argument`; an option that is not given sets nothing."""
        help = help_text(self.help, self.default if self.tells_default and not self.is_switch else None)
        row: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": help}
        hidden = row | {"help": argparse.SUPPRESS}
        if self.is_switch:
            change, keep = ("store_false", "store_true") if self.default else ("store_true", "store_false")
            yield self.all_flags[:1], row | {"action": change}
            yield self.all_flags[1:], hidden | {"action": keep}
            return
        value = {"metavar": self.metavar, "action": "append" if self.is_repeated else "store"}
        yield (flag(self.name),), row | value
        for name in (*self.aliases, *self.other_names):
            yield (flag(name),), hidden | value | {"dest": self.name if name in self.aliases else name}


def help_text(help: str, default: object) -> str:
    """Append the default to a help text, as argparse takes it."""
    text = help if default is None or default == () else f"{help} Default: {default}."
    return text.replace("%", "%%")


def _kv_formats() -> str:
    """List every KV format, with the bits of quantized ones."""
    heads = (
        f"{each.name} ({each.key_bits}-bit keys, {each.value_bits}-bit values)" if each.is_quantized else each.name
        for each in KV_FORMATS.values()
    )
    latents = (
        f"{each.name} ({each.key_bits}-bit latents, {8 * DTYPE_BYTES[each.rope_dtype or '']}-bit RoPE)"
        for each in MLA_FORMATS.values()
    )
    return f"{', '.join(heads)}; for latents (MLA) {', '.join(latents)}"


def _settings(owner: type[EngineConfig | SamplingParams], key: str) -> tuple[Setting, ...]:
    protected = [f"{count} for {name}" for name, count in DEFAULT_PROTECTED_LAYERS.items() if count]
    schemes = read_data("commands.json")["schemes"]
    lists = {
        "<dtypes>": ", ".join(DTYPES),
        "<load_formats>": ", ".join(LOAD_FORMATS),
        "<index_formats>": ", ".join(INDEX_FORMATS),
        "<schemes>": ", ".join((UNQUANTIZED, *(f"{name} ({schemes[name]})" for name in WEIGHT_SCHEMES))),
        "<kv_formats>": _kv_formats(),
        "<protected_layers>": ", ".join((*protected, "else 0" if protected else "0")),
    }
    found = []
    for row in read_data("commands.json")[key]:
        help = row["help"]
        for mark, text in lists.items():
            help = help.replace(mark, text)
        read, aliases = READERS[row.get("read", "text")], tuple(row.get("aliases", ()))
        found.append(Setting(owner, **(row | {"help": help, "read": read, "aliases": aliases})))
    return tuple(found)


ENGINE_SETTINGS = _settings(EngineConfig, "engine")
"""Every field of EngineConfig except the model, which is an argument."""
SAMPLING_SETTINGS = _settings(SamplingParams, "sampling")
"""The fields of SamplingParams that every command takes; the seed is the engine's."""
SEVERAL_SETTINGS = _settings(SamplingParams, "several")
"""The fields of SamplingParams for a command that answers once."""


def given(settings: Iterable[Setting], values: Mapping[str, Any]) -> Given:
    """Parse the values of these settings; None counts as not given."""
    found: Given = {}
    for setting in settings:
        for name in (setting.name, *setting.other_names):
            read = setting.read(values[name]) if name in values else None
            if read is not None:
                found[name] = read
    return found
