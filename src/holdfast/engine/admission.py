"""Admission: check a request before it costs anything; prompts, salts, seeds; no torch.

It changes no state: a request that passes is a `PreparedRequest`. Any thread may call it.

A completion depends on its request's seed and its index, and on nothing else:

    request seed   params.seed, or derive_seed(engine seed, number of the request)
    sequence seed  derive_seed(request seed, index of the completion)

So the first completion is equal for n = 1 and n = 4, and unseeded requests repeat in a new engine with the same seed
and the same requests in the same order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NotRequired, TypedDict

from holdfast.engine.pooling import Pooling
from holdfast.errors import HoldfastError, PromptError, RequestError, TemplateError
from holdfast.observability.log import get_logger
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.chat_template import ChatTemplate, RenderedChat
from holdfast.text.grammar import GrammarCheck
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
    """A prompt as token ids; the text, if given, is only passed through."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, object]
Conversation = list[Message]


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt of valid types: text, token ids, or both."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Check the types of a prompt, not yet its length or vocabulary."""
    if isinstance(prompt, str):
        return ParsedPrompt(_text(prompt), None)
    if not isinstance(prompt, Mapping):
        raise PromptError("request.prompt_type", kind=type(prompt).__name__)
    if not prompt.keys() <= set(_KEYS) or not prompt.keys() & {"prompt", "prompt_token_ids"}:
        raise PromptError("request.prompt_keys", accepted=_KEYS, value=list(prompt))
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise PromptError("request.prompt_text_type", kind=type(text).__name__)
    ids = prompt.get("prompt_token_ids")
    if ids is None:
        return ParsedPrompt(_text(text or ""), None, _salt(prompt.get("cache_salt")))
    return ParsedPrompt(text, _token_ids(ids), _salt(prompt.get("cache_salt")))


def salt_bytes(cache_salt: object) -> bytes:
    """Encode a salt for the prefix cache; requests without one share the empty salt."""
    salt = _salt(cache_salt)
    return b"" if salt is None else salt.encode()


def _salt(salt: object) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or not is_utf8(salt):
        raise RequestError("request.cache_salt", name="cache_salt", value=salt, maximum=MAX_CACHE_SALT_CHARS)
    return salt


def _text(text: str) -> str:
    if not text:
        raise PromptError("request.prompt_empty")
    return text


def _token_ids(ids: object) -> list[int]:
    if not isinstance(ids, list | tuple):
        raise PromptError("request.prompt_ids_type", kind=type(ids).__name__)
    if not ids:
        raise PromptError("request.prompt_empty")
    # The exact type: a bool is an int to isinstance, and numpy's integers are not.
    wrong = set(map(type, ids)) - {int}
    if wrong:
        kinds = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise PromptError("request.prompt_ids_items", kinds=kinds)
    return list(ids)


def is_utf8(text: str) -> bool:
    """False if the text contains half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that passed admission."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    cache_salt: bytes
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of params.bad_words."""
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text: they delimit parts of an answer."""
    is_pooled: bool = False
    """Returns the hidden state of its last token, not an answer."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to render a conversation, besides the template's values."""

    chat_template: str | None = None
    """A template for this request, instead of the model's."""
    allow_special_tokens: bool = False
    """Read control tokens in messages as control tokens, not as text."""


class Admission:
    """Checks requests of one engine. `max_tokens`: the longest sequence that it can hold."""

    def __init__(
        self,
        max_tokens: int,
        vocab_size: int,
        max_queue: int,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        forms: GrammarCheck | None = None,
        takes_priorities: bool = True,
        pooling: Pooling | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._max_queue = max_queue
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._forms = forms
        self._takes_priorities = takes_priorities
        self.pooling = pooling or Pooling()
        self._has_warned = False

    def prepare(self, prompt: object, params: object, *, cache_salt: str | None = None) -> PreparedRequest:
        """Check a prompt and its params, and tokenize it."""
        self.pooling.check_answers()
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
        self, prompt: object, *, cache_salt: str | None = None, truncate: bool = False, priority: int = 0
    ) -> PreparedRequest:
        """Like `prepare`, for a hidden state: the prompt may fill the whole context.

        `truncate` cuts a text that is too long at its end and keeps the special tokens around it.
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
            raise PromptError("request.input_too_long", count=len(token_ids), maximum=self._max_tokens)
        self._check_ids(token_ids, "prompt", PromptError)
        return PreparedRequest(parsed.text, token_ids, params, 1, salt, is_pooled=True)

    def _cut(self, text: str | None, token_ids: list[int]) -> list[int]:
        """Cut tokens to the context; from a text cut its own last tokens, not those that the tokenizer adds."""
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
        *,
        cache_salt: str | None = None,
        template_options: Mapping[str, object] | None = None,
        options: ChatOptions | None = None,
    ) -> PreparedRequest:
        """Like `prepare`, for a conversation that the chat template renders."""
        self.pooling.check_answers()
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
        """Check that the grammar of an answer compiles, which may take seconds."""
        grammar = params.structured_outputs if isinstance(params, SamplingParams) else None
        if grammar is None:
            return
        if self._forms is None:
            what = f"structured_outputs.{grammar.kind}"
            raise RequestError("request.no_tokenizer", what=what, fix="Leave tokenizer out of its options")
        self._forms.check(grammar)

    def _render(self, messages: object, values: Mapping[str, object], options: ChatOptions) -> RenderedChat:
        template = self._chat_template if options.chat_template is None else self._template_of(options.chat_template)
        if template is None:
            raise TemplateError("request.no_chat_template")
        is_open = options.allow_special_tokens or self._tokenizer is None
        control = None if is_open or self._tokenizer is None else self._tokenizer.control_tokens
        try:
            # render_chat checks the messages.
            rendered = template.render_chat(messages, control, tools_as_text=True, **values)  # type: ignore[arg-type]
        except HoldfastError:
            raise
        except Exception as error:
            raise TemplateError("request.template_failed", reason=describe(error)) from error
        if not rendered.text:
            raise PromptError("request.chat_empty")
        return rendered

    def _template_of(self, source: object) -> ChatTemplate:
        """Parse a template of the request."""
        if not isinstance(source, str) or not source:
            raise PromptError("request.chat_template_type", name="chat_template", value=source)
        tokens = {} if self._tokenizer is None else self._tokenizer.special_tokens
        return ChatTemplate(source, "chat_template", tokens)

    def _prepare(self, text: str | None, token_ids: list[int], params: SamplingParams, salt: bytes) -> PreparedRequest:
        if params.truncate_prompt_tokens is not None:
            room = max(self._max_tokens - (params.max_tokens or 1), 1)
            most = room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            token_ids = token_ids[-most:]
        num_left = self._max_tokens - len(token_ids)
        if num_left < 1:
            longest = self._max_tokens - 1
            raise PromptError(
                "request.prompt_too_long", count=len(token_ids), maximum=self._max_tokens, longest=longest
            )
        self._check_ids(token_ids, "prompt", PromptError)
        self._warn_if_cut(params, len(token_ids), num_left)
        max_tokens = min(params.max_tokens or num_left, num_left)
        return PreparedRequest(text, token_ids, params, max_tokens, salt, self._bad_word_ids(params))

    def _warn_if_cut(self, params: SamplingParams, num_prompt_tokens: int, num_left: int) -> None:
        """Warn once that an answer will end by length: thousands may follow."""
        name = "max_tokens" if params.max_tokens else "min_tokens"
        if (getattr(params, name) or 0) > num_left and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s=%s after a prompt of %s tokens exceeds the context of %s: the answer ends after at most %s tokens "
                "with finish_reason length (logged once; raise max_model_len for more)",
                *(name, getattr(params, name), num_prompt_tokens, self._max_tokens, num_left),
            )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Encode each bad word, alone and after a space if the first token differs."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bare = word.lstrip() or word
            alone = self._word_ids(bare)
            spaced = self._word_ids(f" {bare}")
            if not alone:
                raise RequestError("request.bad_word_without_token", name="bad_words", value=word)
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
            raise PromptError("request.no_tokenizer", what="A text prompt", fix='Pass {"prompt_token_ids": [...]}')
        most = self._max_tokens * self._tokenizer.longest_token_chars
        # Before tokenizing, which takes time proportional to the text.
        if len(text) > most and params.truncate_prompt_tokens is None:
            raise PromptError("request.prompt_too_many_chars", count=len(text), maximum=self._max_tokens, chars=most)
        if not is_utf8(text):
            raise PromptError("request.lone_surrogate", what="prompt")

    def _encoded(self, encode: Callable[[Tokenizer], list[int]]) -> list[int]:
        assert self._tokenizer is not None, "texts are refused without a tokenizer"
        try:
            token_ids = encode(self._tokenizer)
        except RequestError:
            raise
        except Exception as error:
            raise PromptError("request.tokenizer_failed", reason=describe(error)) from error
        if not token_ids:
            raise PromptError("request.no_tokens")
        return token_ids

    def _check_params(self, params: object) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError("request.params_type", kind=type(params).__name__)
        if params.n > self._max_queue:
            raise RequestError("request.n_above_queue", name="n", count=params.n, maximum=self._max_queue)
        if params.priority and not self._takes_priorities:
            raise RequestError("request.no_priorities", name="priority", priority=params.priority)
        if (params.stop or params.bad_words) and self._tokenizer is None:
            name, other = ("stop", "stop_token_ids") if params.stop else ("bad_words", "logit_bias")
            raise RequestError("request.no_tokenizer", name=name, what=name, fix=f"Use {other}")
        if not all(map(is_utf8, (*params.stop, *params.bad_words))):
            raise RequestError("request.lone_surrogate", what="stop string or bad word")
        self.check_form(params)
        self._check_ids(params.stop_token_ids, "stop_token_ids", RequestError)
        self._check_ids(tuple(params.logit_bias or ()), "logit_bias", RequestError)
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids", RequestError)
        # The caller may change its params while the request runs.
        return params.clone()

    def _check_ids(self, token_ids: list[int] | tuple[int, ...], name: str, error: type[RequestError]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise error("request.token_outside_vocabulary", name=name, value=wrong, largest=self._vocab_size - 1)


def _encode_whole(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=True)


def describe(error: BaseException) -> str:
    """Describe an exception in one bounded line."""
    text = " ".join(str(error).split())
    named = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {text}"
    return named if len(named) <= 300 else f"{named[:297]}..."


def derive_seed(seed: int, index: int) -> int:
    """Derive the seed of stream `index`: two rounds of the SplitMix64 finalizer."""
    return _mix((_mix((seed + _GOLDEN_GAMMA) & _MASK) + (index + 1) * _GOLDEN_GAMMA) & _MASK)


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
