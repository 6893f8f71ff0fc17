"""What a caller may pass as a prompt, read and checked before it costs anything; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from holdfast.errors import PromptError, RequestError, shown

MAX_CACHE_SALT_CHARS = 256
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; the text, if given, is only carried along."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, object]
Conversation = list[Message]


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt of sound types: text, token ids, or both."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Sort out which kind of prompt this is; neither length nor vocabulary is looked at yet."""
    if isinstance(prompt, str):
        return ParsedPrompt(_text(prompt), None)
    if not isinstance(prompt, Mapping):
        raise PromptError(
            f"a prompt of type {type(prompt).__name__} was given",
            "a string works, and so do token ids",
            'pass "text" or {"prompt_token_ids": [1, 2, 3]}',
        )
    if not prompt.keys() <= set(_KEYS) or not prompt.keys() & {"prompt", "prompt_token_ids"}:
        raise PromptError(
            f"a prompt with the keys {shown(list(prompt))} was given",
            f"the keys are {', '.join(_KEYS)}",
            "pass prompt or prompt_token_ids",
        )
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"a prompt text of type {type(text).__name__} was given", "a string works", "pass a string")
    ids = prompt.get("prompt_token_ids")
    if ids is None:
        return ParsedPrompt(_text(text or ""), None, _salt(prompt.get("cache_salt")))
    return ParsedPrompt(text, _token_ids(ids), _salt(prompt.get("cache_salt")))


def salt_bytes(cache_salt: object) -> bytes:
    """The salt as the prefix cache takes it; the empty one is shared by all requests without a salt."""
    salt = _salt(cache_salt)
    return b"" if salt is None else salt.encode()


def _salt(salt: object) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or not is_utf8(salt):
        raise RequestError(
            f"cache_salt={shown(salt)} was asked",
            f"a string of 1 to {MAX_CACHE_SALT_CHARS} characters works",
            "change it or leave it out",
        )
    return salt


def _text(text: str) -> str:
    if not text:
        raise PromptError("an empty prompt was given", "there is nothing to continue", "pass at least one character")
    return text


def _token_ids(ids: object) -> list[int]:
    if not isinstance(ids, list | tuple):
        raise PromptError(
            f"prompt_token_ids of type {type(ids).__name__} were given", "a list of integers works", "try .tolist()"
        )
    if not ids:
        raise PromptError("an empty prompt was given", "there is nothing to continue", "pass at least one token id")
    # The exact type: a bool is an int to isinstance, and numpy's integers are not.
    wrong = set(map(type, ids)) - {int}
    if wrong:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise PromptError(f"prompt_token_ids hold {names}", "integers work", "convert them with int()")
    return list(ids)


def is_utf8(text: str) -> bool:
    """False where the text holds half of a surrogate pair, which no encoding can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
