"""Admission: everything that can be wrong with a request is found here, before it costs anything; no torch.

Nothing is changed: a request that passes is a `PreparedRequest`, which the engine can take at once. May be called from
any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config import Limits
from holdfast.engine.prompt import ParsedPrompt, is_utf8, parse_prompt, salt_bytes
from holdfast.errors import HoldfastError, PromptError, RequestError, TemplateError, shown
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was found sound."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    cache_salt: bytes


class Admission:
    """The rules of one engine: its context, its vocabulary, its queue."""

    def __init__(
        self,
        limits: Limits,
        num_pages: int,
        vocab_size: int,
        max_queue: int,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._max_tokens = min(limits.max_model_len, num_pages * limits.page_tokens)
        self._vocab_size = vocab_size
        self._max_queue = max_queue
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def prepare(self, prompt: object, params: object, cache_salt: str | None = None) -> PreparedRequest:
        """Check a prompt and its params, and tokenize it."""
        sound_params = self._check_params(params)
        parsed = parse_prompt(prompt)
        salt = salt_bytes(cache_salt if cache_salt is not None else parsed.cache_salt)
        return self._prepare(parsed, sound_params, salt, adds_special_tokens=True)

    def prepare_chat(
        self,
        messages: object,
        params: object,
        cache_salt: str | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> PreparedRequest:
        """The same for a conversation, which the chat template turns into a prompt."""
        sound_params = self._check_params(params)
        salt = salt_bytes(cache_salt)
        text = self._render(messages, template_options or {})
        return self._prepare(ParsedPrompt(text, None), sound_params, salt, adds_special_tokens=False)

    def _render(self, messages: object, options: Mapping[str, object]) -> str:
        if self._chat_template is None:
            raise TemplateError("a chat was asked", "the model has no chat template", "pass chat_template, or a prompt")
        try:
            # What a conversation may hold is checked there, and only there.
            text = self._chat_template.render(messages, **options)  # type: ignore[arg-type]
        except HoldfastError:
            raise
        except Exception as error:
            raise TemplateError(
                "a chat was asked", f"the template failed: {describe(error)}", "change the messages or the template"
            ) from error
        if not text:
            raise PromptError("a chat was asked", "the template made an empty prompt of it", "change the messages")
        return text

    def _prepare(
        self, parsed: ParsedPrompt, params: SamplingParams, salt: bytes, adds_special_tokens: bool
    ) -> PreparedRequest:
        token_ids = parsed.token_ids
        if token_ids is None:
            assert parsed.text is not None, "a parsed prompt has text or token ids"
            self._check_text(parsed.text)
            token_ids = self._encode(parsed.text, adds_special_tokens)
        num_left = self._max_tokens - len(token_ids)
        if num_left < 1:
            raise PromptError(
                f"a prompt of {len(token_ids)} tokens was given",
                f"the context holds {self._max_tokens}, the answer included",
                f"shorten it to {self._max_tokens - 1}, or raise max_model_len",
            )
        self._check_ids(token_ids, "prompt", PromptError)
        if (params.max_tokens or params.min_tokens) > num_left:
            name = "max_tokens" if params.max_tokens else "min_tokens"
            raise RequestError(
                f"{name}={getattr(params, name)} was asked after a prompt of {len(token_ids)} tokens",
                f"the context holds {self._max_tokens}, which leaves {num_left}",
                f"ask for at most {num_left}, or leave it out",
            )
        return PreparedRequest(parsed.text, token_ids, params, params.max_tokens or num_left, salt)

    def _check_text(self, text: str) -> None:
        if self._tokenizer is None:
            raise PromptError(
                "a text prompt was given", "the engine has no tokenizer", 'pass {"prompt_token_ids": [...]}'
            )
        most = self._max_tokens * self._tokenizer.longest_token_chars
        # Known before tokenizing, which costs time in proportion to the text.
        if len(text) > most:
            raise PromptError(
                f"a prompt of {len(text)} characters was given",
                f"the context holds {self._max_tokens} tokens, at best {most} characters",
                "shorten it, or raise max_model_len",
            )
        if not is_utf8(text):
            raise PromptError(
                "a prompt with a lone surrogate was given", "no text encoding can carry it", "remove it or pair it"
            )

    def _encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None, "texts are refused without a tokenizer"
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
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
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings were asked", "the engine has no tokenizer", "use stop_token_ids")
        if not all(map(is_utf8, params.stop)):
            raise RequestError(
                "a stop string with a lone surrogate was asked", "no generated text can hold it", "remove it"
            )
        self._check_ids(params.stop_token_ids, "stop_token_ids", RequestError)
        self._check_ids(tuple(params.logit_bias or ()), "logit_bias", RequestError)
        return params

    def _check_ids(self, token_ids: list[int] | tuple[int, ...], name: str, error: type[RequestError]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise error(
                f"{name} holds token id {shown(wrong)}",
                f"the vocabulary has {self._vocab_size} tokens",
                f"use ids from 0 to {self._vocab_size - 1}",
            )


def describe(error: BaseException) -> str:
    """An exception in one bounded line."""
    text = " ".join(str(error).split())
    named = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {text}"
    return named if len(named) <= 300 else f"{named[:297]}..."
