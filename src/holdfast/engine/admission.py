"""Admission: what can be wrong with a request is found before it costs anything; prompts, salts, seeds; no torch.

Nothing is changed: a request that passes is a `PreparedRequest`, which the engine can take at once. May be called from
any thread.

A completion depends on its request's seed and its index, and on nothing else:

    request seed   params.seed, or derive_seed(engine seed, number of the request)
    sequence seed  derive_seed(request seed, index of the completion)

The first completion is thus the same for n = 1 and n = 4, and unseeded requests repeat when an engine is made again with
the same seed and is given the same requests in the same order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NotRequired, TypedDict

from holdfast.errors import HoldfastError, PromptError, RequestError, TemplateError, shown
from holdfast.observability.log import get_logger
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.chat_template import ChatTemplate, RenderedChat
from holdfast.text.grammar import FormCheck
from holdfast.text.tokenizer import Tokenizer

MAX_CACHE_SALT_CHARS = 256
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MASK = 2**64 - 1
_log = get_logger(__name__)
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


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


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was found sound."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    cache_salt: bytes
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """params.bad_words in tokens."""
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text, because they mark the parts of an answer."""
    is_pooled: bool = False
    """The hidden state of its last token is wanted, and no answer."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is read, beside what its template is told."""

    chat_template: str | None = None
    """A template for this request, in place of the model's own."""
    allow_special_tokens: bool = False
    """Read control tokens that are written out in messages as control tokens, and not as text."""


class Admission:
    """The rules of one engine: its context (tokens of the longest sequence that it can hold), its vocabulary, its queue."""

    def __init__(
        self,
        max_tokens: int,
        vocab_size: int,
        max_queue: int,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        forms: FormCheck | None = None,
        takes_priorities: bool = True,
    ) -> None:
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._max_queue = max_queue
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._forms = forms
        self._takes_priorities = takes_priorities
        self._has_told_cut = False

    def prepare(self, prompt: object, params: object, cache_salt: str | None = None) -> PreparedRequest:
        """Check a prompt and its params, and tokenize it."""
        sound_params = self._check_params(params)
        parsed = parse_prompt(prompt)
        salt = salt_bytes(cache_salt if cache_salt is not None else parsed.cache_salt)
        token_ids = parsed.token_ids
        if token_ids is None:
            assert parsed.text is not None, "a parsed prompt has text or token ids"
            text = parsed.text
            self._check_text(text, sound_params)
            token_ids = self._encoded(partial(_encode_whole, text))
        return self._prepare(parsed.text, token_ids, sound_params, salt)

    def prepare_pooled(
        self, prompt: object, cache_salt: str | None = None, *, truncate: bool = False, priority: int = 0
    ) -> PreparedRequest:
        """Check a prompt whose hidden state is wanted; it may fill the whole context, because nothing follows it.

        With `truncate` a text that is too long is cut at its end; the special tokens around it stay.
        """
        params = self._check_params(SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, priority=priority))
        parsed = parse_prompt(prompt)
        salt = salt_bytes(cache_salt if cache_salt is not None else parsed.cache_salt)
        token_ids, text = parsed.token_ids, parsed.text
        if token_ids is None:
            assert text is not None, "a parsed prompt has text or token ids"
            if not truncate or self._tokenizer is None or not is_utf8(text):
                self._check_text(text, params)
            else:
                text = text[: self._max_tokens * self._tokenizer.longest_token_chars]
            token_ids = self._encoded(partial(_encode_whole, text))
        if len(token_ids) > self._max_tokens and truncate:
            token_ids = self._cut(text if parsed.token_ids is None else None, token_ids)
        if len(token_ids) > self._max_tokens:
            raise PromptError(
                f"an input of {len(token_ids)} tokens was given",
                f"the context holds {self._max_tokens}",
                "shorten it, or raise max_model_len",
            )
        self._check_ids(token_ids, "prompt", PromptError)
        return PreparedRequest(parsed.text, token_ids, params, 1, salt, is_pooled=True)

    def _cut(self, text: str | None, token_ids: list[int]) -> list[int]:
        """As many tokens as fit; of a text the last of its own are left out, and not what the tokenizer adds."""
        if text is None:
            return token_ids[: self._max_tokens]
        bare = self._encoded(lambda tokenizer: tokenizer.encode(text, add_special_tokens=False))
        num_added = len(token_ids) - len(bare)
        firsts = (first for first in range(num_added + 1) if token_ids[first : first + len(bare)] == bare)
        first = next(firsts, None)
        if first is None or num_added >= self._max_tokens:
            return token_ids[: self._max_tokens]
        num_kept = self._max_tokens - num_added
        return [*token_ids[: first + num_kept], *token_ids[first + len(bare) :]]

    def prepare_chat(
        self,
        messages: object,
        params: object,
        cache_salt: str | None = None,
        template_options: Mapping[str, object] | None = None,
        options: ChatOptions | None = None,
    ) -> PreparedRequest:
        """The same for a conversation, which the chat template turns into a prompt."""
        sound_params = self._check_params(params)
        salt = salt_bytes(cache_salt)
        text, own = self._render(messages, template_options or {}, options or ChatOptions())
        self._check_text(text, sound_params)
        if own:
            token_ids = self._encoded(lambda tokenizer: tokenizer.encode_chat(text, own))
        else:
            token_ids = self._encoded(lambda tokenizer: tokenizer.encode(text, add_special_tokens=False))
        return self._prepare(text, token_ids, sound_params, salt)

    def check_form(self, params: object) -> None:
        """Find out whether the form of an answer can be met, where one is asked; compiling it may take seconds."""
        form = params.structured_outputs if isinstance(params, SamplingParams) else None
        if form is None:
            return
        if self._forms is None:
            raise RequestError(
                f"structured_outputs.{form.kind} was asked", "the engine has no tokenizer", "leave tokenizer out"
            )
        self._forms.check(form)

    def _render(self, messages: object, values: Mapping[str, object], options: ChatOptions) -> RenderedChat:
        template = self._chat_template if options.chat_template is None else self._template_of(options.chat_template)
        if template is None:
            raise TemplateError("a chat was asked", "the model has no chat template", "pass chat_template, or a prompt")
        is_open = options.allow_special_tokens or self._tokenizer is None
        control = None if is_open or self._tokenizer is None else self._tokenizer.control_tokens
        try:
            # What a conversation may hold is checked there, and only there.
            rendered = template.render_chat(messages, control, tools_in_words=True, **values)  # type: ignore[arg-type]
        except HoldfastError:
            raise
        except Exception as error:
            raise TemplateError(
                "a chat was asked", f"the template failed: {describe(error)}", "change the messages or the template"
            ) from error
        if not rendered.text:
            raise PromptError("a chat was asked", "the template made an empty prompt of it", "change the messages")
        return rendered

    def _template_of(self, source: object) -> ChatTemplate:
        """A template that came with the request."""
        if not isinstance(source, str) or not source:
            raise PromptError(f"chat_template={shown(source)} was asked", "the text of a template works", "pass it")
        tokens = {} if self._tokenizer is None else self._tokenizer.special_tokens
        return ChatTemplate(source, "chat_template", tokens)

    def _prepare(self, text: str | None, token_ids: list[int], params: SamplingParams, salt: bytes) -> PreparedRequest:
        if params.truncate_prompt_tokens is not None:
            room = max(self._max_tokens - (params.max_tokens or 1), 1)
            most = room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            token_ids = token_ids[-most:]
        num_left = self._max_tokens - len(token_ids)
        if num_left < 1:
            raise PromptError(
                f"a prompt of {len(token_ids)} tokens was given",
                f"the context holds {self._max_tokens}, the answer included",
                f"shorten it to {self._max_tokens - 1}, or raise max_model_len",
            )
        self._check_ids(token_ids, "prompt", PromptError)
        self._tell_cut(params, len(token_ids), num_left)
        max_tokens = min(params.max_tokens or num_left, num_left)
        return PreparedRequest(text, token_ids, params, max_tokens, salt, self._bad_word_ids(params))

    def _tell_cut(self, params: SamplingParams, num_prompt_tokens: int, num_left: int) -> None:
        """An answer that cannot be as long as asked ends by length; told once, since thousands may follow."""
        name = "max_tokens" if params.max_tokens else "min_tokens"
        if (getattr(params, name) or 0) > num_left and not self._has_told_cut:
            self._has_told_cut = True
            _log.warning(
                "%s=%s was asked after a prompt of %s tokens; the context holds %s, so the answer ends after %s at the "
                "latest, with finish_reason length (told once; raise max_model_len for more)",
                *(name, getattr(params, name), num_prompt_tokens, self._max_tokens, num_left),
            )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word in tokens, as it begins a text and as it follows a space, where that is another first token."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bare = word.lstrip() or word
            alone = self._word_ids(bare)
            spaced = self._word_ids(f" {bare}")
            if not alone:
                raise RequestError(
                    f"bad_words holds {shown(word)}", "the tokenizer makes no token of it", "leave it out"
                )
            found.append(alone)
            if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
                found.append(spaced)
        for ids in found:
            self._check_ids(ids, "bad_words", RequestError)
        return tuple(dict.fromkeys(found))

    def _word_ids(self, text: str) -> tuple[int, ...]:
        assert self._tokenizer is not None, "bad words are refused without a tokenizer"
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _check_text(self, text: str, params: SamplingParams) -> None:
        if self._tokenizer is None:
            raise PromptError(
                "a text prompt was given", "the engine has no tokenizer", 'pass {"prompt_token_ids": [...]}'
            )
        most = self._max_tokens * self._tokenizer.longest_token_chars
        # Known before tokenizing, which costs time in proportion to the text.
        if len(text) > most and params.truncate_prompt_tokens is None:
            raise PromptError(
                f"a prompt of {len(text)} characters was given",
                f"the context holds {self._max_tokens} tokens, at best {most} characters",
                "shorten it, or raise max_model_len",
            )
        if not is_utf8(text):
            raise PromptError(
                "a prompt with a lone surrogate was given", "no text encoding can carry it", "remove it or pair it"
            )

    def _encoded(self, encode: Callable[[Tokenizer], list[int]]) -> list[int]:
        assert self._tokenizer is not None, "texts are refused without a tokenizer"
        try:
            token_ids = encode(self._tokenizer)
        except RequestError:
            raise
        except Exception as error:
            raise PromptError(
                "a prompt was given", f"the tokenizer failed on it: {describe(error)}", "change the prompt"
            ) from error
        if not token_ids:
            raise PromptError("a prompt was given", "the tokenizer made no token of it", "change the prompt")
        return token_ids

    def _check_params(self, params: object) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params of type {type(params).__name__} were given",
                "SamplingParams work",
                "write SamplingParams(temperature=0.0, max_tokens=100)",
            )
        if params.n > self._max_queue:
            raise RequestError(
                f"n={params.n} was asked", f"the queue holds {self._max_queue}", "ask for fewer, or raise max_queue"
            )
        if params.priority and not self._takes_priorities:
            raise RequestError(
                f"priority={params.priority} was asked",
                "this engine serves requests in the order in which they come (scheduling_policy=fcfs)",
                "leave priority out, or start the engine with scheduling_policy=priority",
            )
        if (params.stop or params.bad_words) and self._tokenizer is None:
            name, other = ("stop strings", "stop_token_ids") if params.stop else ("bad_words", "logit_bias")
            raise RequestError(f"{name} were asked", "the engine has no tokenizer", f"use {other}")
        if not all(map(is_utf8, (*params.stop, *params.bad_words))):
            raise RequestError(
                "a stop string or bad word with a lone surrogate was asked",
                "no generated text can hold it",
                "remove it",
            )
        self.check_form(params)
        self._check_ids(params.stop_token_ids, "stop_token_ids", RequestError)
        self._check_ids(tuple(params.logit_bias or ()), "logit_bias", RequestError)
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids", RequestError)
        # The caller may set fields of its own later, while the request runs.
        return params.clone()

    def _check_ids(self, token_ids: list[int] | tuple[int, ...], name: str, error: type[RequestError]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise error(
                f"{name} holds token id {shown(wrong)}",
                f"the vocabulary has {self._vocab_size} tokens",
                f"use ids from 0 to {self._vocab_size - 1}",
            )


def _encode_whole(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=True)


def describe(error: BaseException) -> str:
    """An exception in one bounded line."""
    text = " ".join(str(error).split())
    named = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {text}"
    return named if len(named) <= 300 else f"{named[:297]}..."


def derive_seed(seed: int, index: int) -> int:
    """The seed of stream `index` under `seed`: the SplitMix64 finalizer over two rounds, one for each number."""
    return _mix((_mix((seed + _GOLDEN_GAMMA) & _MASK) + (index + 1) * _GOLDEN_GAMMA) & _MASK)


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
