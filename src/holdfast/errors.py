"""The exceptions: a class says who is at fault, a code says what happened, and a table holds the messages; no torch.

HoldfastError
├── ConfigError (ValueError)         an option of the engine is wrong or unknown
├── ModelError                       something about the model on disk
│   ├── ModelNotFoundError           no such path, or a folder without a model
│   ├── ModelFormatError             a file is broken, hostile, incomplete or does not match the others
│   └── UnsupportedModelError        sound files that describe an unsupported model
├── MemoryPlanError                  the plan does not fit; the message is the table
├── WorkspaceError                   a scratch buffer was not reserved, or is too small
├── RequestError (ValueError)        one request is wrong; the engine and the other requests go on
│   ├── PromptError                  prompt text, token ids, messages
│   ├── KeywordError (TypeError)     a call has no argument of that name, or not in this version
│   ├── TemplateError                the chat template failed, escaped its sandbox or ran too long
│   └── QueueFullError               the queue is full; retry later
├── TransferError (TypeError)        an attempt to pickle or copy a model
├── NameAbsentError (AttributeError) a model has no method of that name, or not in this version
├── ImportAbsentError (ImportError)  a vLLM name that this version does not have
├── ForkError (RuntimeError)         a forked child used a model of its parent
├── MessageError                     a message between processes is corrupt, late or names an unknown object
└── EngineDeadError                  the engine stopped and cannot answer any more

A code is lower-case words with dots: `config.unknown_option`. Its first word names the file in `messages/` that holds the
text. A code never changes its meaning; the text may.
"""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, NoReturn, Self


class HoldfastError(Exception):
    """Base class of every error: a stable code, the values it is about, and a message of one to three sentences."""

    def __init__(self, code: str, /, **values: object) -> None:
        super().__init__(code)
        self.code = code
        self.values = values
        self.contexts: tuple[str, ...] = ()
        """Where it happened, outermost first: `prompt 3`, `rank 1 of 4`."""
        self.hints: tuple[str, ...] = ()
        """Whole sentences after the message."""
        self._text: str | None = None

    @property
    def message(self) -> str:
        """The sentences of the table, without contexts and hints."""
        return message_of(self.code, self.values) if self._text is None else self._text

    def __str__(self) -> str:
        return " ".join((": ".join((*self.contexts, self.message)), *self.hints))

    def within(self, context: str) -> Self:
        """Put one more context before the message: `prompt 3: ...`. Idempotent."""
        if self.contexts[:1] != (context,):
            self.contexts = (context, *self.contexts)
        return self

    def hinting(self, *sentences: str) -> Self:
        """Append sentences to the message."""
        self.hints += tuple(sentence for sentence in sentences if sentence)
        return self

    def to_plain(self) -> dict[str, object]:
        """Return class, code, text and plain values, as another process can receive them."""
        plain = {name: value for name, value in self.values.items() if isinstance(value, str | int | float | None)}
        contexts, hints = list(self.contexts), list(self.hints)
        return {
            "kind": type(self).__name__,
            "code": self.code,
            "text": self.message,
            "values": plain,
            "contexts": contexts,
            "hints": hints,
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "HoldfastError":
        """Restore an error that `to_plain` described; an unknown class becomes HoldfastError."""
        kind = globals().get(str(plain["kind"]))
        if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
            kind = HoldfastError
        error = kind(str(plain["code"]), **{str(name): value for name, value in plain["values"].items()})
        error._text = str(plain["text"])
        error.contexts = tuple(str(context) for context in plain["contexts"])
        error.hints = tuple(str(hint) for hint in plain["hints"])
        return error


class _Template(string.Formatter):
    """`str.format` with two conversions: `{x!r}` is `shown(x)`, `{xs!l}` joins a sequence with commas."""

    def convert_field(self, value: object, conversion: str | None) -> object:
        if conversion == "r":
            return shown(value)
        if conversion == "l":
            return ", ".join(str(item) for item in value) if isinstance(value, Sequence) else str(value)
        return super().convert_field(value, conversion)  # type: ignore[arg-type]


@cache
def messages_of(area: str) -> Mapping[str, str]:
    """Read the messages whose codes begin with `area`, by the rest of the code."""
    import tomllib  # when an error is printed, not in every start

    text = resources.files("holdfast").joinpath("messages", f"{area}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def message_of(code: str, values: Mapping[str, object]) -> str:
    """Render the message of a code. A missing value or code is a defect, so the text says which."""
    area, _, name = code.partition(".")
    try:
        text = _Template().vformat(messages_of(area)[name], (), values).strip()
        return re.sub(r"(?<!\.)\.\.(?!\.)", ".", text)  # a value may end a sentence, too
    except (KeyError, OSError) as error:
        return f"{code} ({', '.join(f'{key}={shown(value)}' for key, value in values.items())}; no message: {error!r})"


class ConfigError(HoldfastError, ValueError):
    """An option of the engine is wrong or unknown."""


class ModelError(HoldfastError):
    """Something about the model on disk."""


class ModelNotFoundError(ModelError):
    """No such path, or a folder that holds no model."""


class ModelFormatError(ModelError):
    """A file is broken, hostile, incomplete, or does not match the others."""


class UnsupportedModelError(ModelError):
    """Sound files that describe an unsupported model."""


class PlanRow(NamedTuple):
    """What one group of owners would take."""

    owner: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlanTable:
    """One phase of a plan: its rows, the largest first, and how much the budget is short."""

    phase: str
    rows: tuple[PlanRow, ...]
    needed_bytes: int
    budget_bytes: int
    budget_reason: str

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes - self.budget_bytes


class PlanChange(NamedTuple):
    """One change with which a plan would fit."""

    change: str
    """A sentence."""
    typed: str
    """Options of a command; empty for another device."""
    kv_tokens: int
    max_model_len: int


class MemoryPlanError(HoldfastError):
    """The plan does not fit its budget. A refusal of a whole plan has a table and changes."""

    def __init__(self, code: str, /, *, table: PlanTable | None = None, **values: object) -> None:
        super().__init__(code, **values)
        self.table = table
        self.changes: tuple[PlanChange, ...] = ()
        """The smallest that fit, the one that costs least first."""


class WorkspaceError(HoldfastError):
    """A scratch buffer was not reserved, or is too small."""


class RequestError(HoldfastError, ValueError):
    """One request is wrong; the engine and the other requests go on."""


class PromptError(RequestError):
    """The prompt itself: text, token ids or messages."""


class KeywordError(RequestError, TypeError):
    """A call has no argument of that name, or not in this version."""


class TemplateError(RequestError):
    """The chat template failed, tried to escape its sandbox, or ran too long."""


class QueueFullError(RequestError):
    """The queue is full."""

    retry_after_seconds: float | None = None
    """Seconds until a retry may succeed; None if unknown."""


class TransferError(HoldfastError, TypeError):
    """An attempt to pickle or copy a model. Its memory, threads and kernels belong to one process."""


class NameAbsentError(HoldfastError, AttributeError):
    """A model has no such method or attribute, or not in this version. `hasattr` is False."""


class ImportAbsentError(HoldfastError, ImportError):
    """This version does not have an imported vLLM name or module."""


class ForkError(HoldfastError, RuntimeError):
    """A forked child used a model of its parent. A fork does not copy the engine's threads."""


class MessageError(HoldfastError):
    """A message between front, core and runner is corrupt, late, or names an unknown object; no state has changed."""


class EngineDeadError(HoldfastError):
    """The engine stopped and cannot answer any more."""


def refuse_transfer(what: str) -> NoReturn:
    """Raise TransferError from `__reduce__`, `__copy__` and their like."""
    raise TransferError("transfer.not_allowed", what=what)


def shown(value: object, max_chars: int = 80) -> str:
    """Return a printable form of a value: ASCII, one line, at most `max_chars`. Never raises."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > max_chars:
        value = value[:max_chars]
    try:
        text = ascii(value)
    except Exception:  # an integer too long to print, nesting too deep, a caller's own __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) < max_chars else f"{text[: max_chars - 3]}..."


def did_you_mean(value: object, choices: Iterable[str], cutoff: float = 0.6, form: str = "{}") -> str:
    """Return "Did you mean x?" for the nearest choice; empty if none is near."""
    import difflib  # only when an error is printed

    known = list(dict.fromkeys(choices))
    near = difflib.get_close_matches(value, known, n=1, cutoff=cutoff) if isinstance(value, str) else []
    return f"Did you mean {form.format(near[0])}?" if near else ""


def install_words(extra: str) -> str:
    """Return the command that installs an optional part. Holdfast is not on PyPI, so pip needs the source tree."""
    return f"run pip install '.[{extra}]' in the tree of Holdfast"
