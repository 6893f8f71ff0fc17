"""The exception tree; every message says what was asked, what is there, and what to do.

HoldfastError
├── ConfigError (ValueError)         an option of the engine is wrong or unknown
├── ModelError                       something about the model on disk
│   ├── ModelNotFoundError           no such path, or a folder that holds no model
│   ├── ModelFormatError             a file is broken, hostile, incomplete or does not match the others
│   └── UnsupportedModelError        sound files that describe something we do not run
├── MemoryPlanError                  the plan does not fit; the message is the table
├── WorkspaceError                   scratch was asked that nobody reserved, or more than is held
├── RequestError (ValueError)        one request is wrong; the engine and its neighbours go on
│   ├── PromptError                  prompt text, token ids, messages
│   ├── KeywordError (TypeError)     a call has no argument of that name, or not in this version
│   ├── TemplateError                the chat template failed, escaped or ran too long
│   └── QueueFullError               more requests wait than the queue holds; try again later
├── TransferError (TypeError)        a model was to be pickled or copied
├── NameAbsentError (AttributeError) a model has no method of that name, or not in this version
├── ImportAbsentError (ImportError)  a program imports a name of vLLM that is not in this version
├── ForkError (RuntimeError)         a forked child asked a model of its parent
├── MessageError                     a message between front, core and runner is broken, late or names what is not there
└── EngineDeadError                  the engine stopped and cannot answer any more
"""

from dataclasses import dataclass
from typing import NamedTuple, NoReturn


class HoldfastError(Exception):
    """Base of every error a caller may want to catch: three short clauses on one line."""

    def __init__(self, asked: str, has: str, do: str) -> None:
        super().__init__(asked, has, do)
        self.asked = asked
        self.has = has
        self.do = do

    def __str__(self) -> str:
        return "; ".join(clause for clause in (self.asked, self.has, self.do) if clause)


class ConfigError(HoldfastError, ValueError):
    """An option of the engine is wrong or unknown."""


class ModelError(HoldfastError):
    """Something about the model on disk."""


class ModelNotFoundError(ModelError):
    """No such path, or a folder that holds no model."""


class ModelFormatError(ModelError):
    """A file is broken, hostile, incomplete, or does not match the others."""


class UnsupportedModelError(ModelError):
    """Sound files that describe something that is not run here."""


class PlanRow(NamedTuple):
    """What one group of owners would take."""

    owner: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlanTable:
    """One phase of a plan, for whoever draws it: its rows, the largest first, and how much the budget is short."""

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
    """In words."""
    typed: str
    """As options of a command; empty where it is another device."""
    kv_tokens: int
    max_model_len: int


class MemoryPlanError(HoldfastError):
    """The plan does not fit its budget; table and changes are there where a whole plan was refused."""

    def __init__(self, asked: str, has: str, do: str, table: PlanTable | None = None) -> None:
        super().__init__(asked, has, do)
        self.table = table
        self.changes: tuple[PlanChange, ...] = ()
        """The smallest that fit, the one that costs least first."""


class WorkspaceError(HoldfastError):
    """Scratch was asked that nobody reserved, or more than is held."""


class RequestError(HoldfastError, ValueError):
    """One request is wrong; the engine and the other requests go on."""


class PromptError(RequestError):
    """The prompt itself: text, token ids or messages."""


class KeywordError(RequestError, TypeError):
    """A call has no argument of that name, or not in this version."""


class TemplateError(RequestError):
    """The chat template failed, tried to escape its sandbox, or ran too long."""


class QueueFullError(RequestError):
    """More requests wait than the queue holds."""

    retry_after_seconds: float | None = None
    """When it may be worth another try, where anybody can tell."""


class TransferError(HoldfastError, TypeError):
    """A model was to be pickled or copied: its memory, threads and kernels belong to one process."""


class NameAbsentError(HoldfastError, AttributeError):
    """A model has no method or attribute of that name, or not in this version; hasattr is False, as for any other."""


class ImportAbsentError(HoldfastError, ImportError):
    """A program imports a name or a module of vLLM that is not in this version."""


class ForkError(HoldfastError, RuntimeError):
    """A forked child asked a model of its parent: the threads that would answer did not come along."""


class MessageError(HoldfastError):
    """A message between front, core and runner is broken, late, or names what is not there; nothing has changed."""


class EngineDeadError(HoldfastError):
    """The engine stopped and cannot answer any more."""


def refuse_transfer(what: str) -> NoReturn:
    """For whatever pickles, copies or sends a model to another process."""
    raise TransferError(
        f"{what} was to be pickled or copied",
        "its memory, threads and kernels belong to this process",
        "send prompts and outputs instead, and open the model in the process that needs it",
    )


def shown(value: object, max_chars: int = 80) -> str:
    """A value as a message may repeat it: short, on one line, and never an error of its own."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > max_chars:
        value = value[:max_chars]
    try:
        text = ascii(value)
    except Exception:  # an integer too long to print, nesting too deep, a caller's own __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) < max_chars else f"{text[: max_chars - 3]}..."


def install_words(extra: str) -> str:
    """Say how to install an optional part. No package index has Holdfast, so it comes from its tree."""
    return f"run pip install '.[{extra}]' in the tree of Holdfast"
