"""SamplingParams: how to sample the tokens of one request; validated at once, every field bounded; no torch."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from holdfast.errors import KeywordError, RequestError
from holdfast.request.structured import StructuredOutputs
from holdfast.request.vllm_names import SAMPLING_NAMES, own_structured, settle, with_vllm_names

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_SEED = 2**64
MAX_PRIORITY = 2**31 - 1
_SOUND = "_is_sound"
_SWITCHES = (
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"),
    "skip_reading_prefix_cache",
)


class RequestOutputKind(StrEnum):
    """Content of each output of AsyncLLM.generate and LLMEngine.step."""

    CUMULATIVE = "cumulative"
    """The answer so far."""
    DELTA = "delta"
    """New text and tokens since the last output."""
    FINAL_ONLY = "final_only"
    """The whole answer, once."""


@with_vllm_names(SAMPLING_NAMES, own_structured)
@dataclass(kw_only=True, unsafe_hash=True)
class SamplingParams:
    """Sampling options of one request, in vLLM's names.

    Without max_tokens an answer may fill the context (vLLM: 16 tokens). A field may be set later and is checked then; a
    request keeps the values that it was created with.
    """

    n: int = 1
    """Number of completions of the prompt."""
    temperature: float = 1.0
    """0 takes the most likely token (argmax); otherwise logits are divided by this."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of every token seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtract from the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """Subtract this for each occurrence of the token in the output."""
    logit_bias: dict[int, float] | None = None
    """Values added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be generated; name an end token among them, or the answer ends by length."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated, with and without a space before them. The last token is banned when the answer ends
    in the others."""
    structured_outputs: StructuredOutputs | None = None
    """The grammar that an answer follows; a dict of its fields is accepted too. The answer ends when it is complete, whatever
    min_tokens and ignore_eos are. A stop string or max_tokens may cut it short."""
    seed: int | None = None
    """Fixes the random choices of this request, whatever the batch; None derives one from the engine's seed."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; accepts a string or a list too."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at any of these tokens, which are not part of the text."""
    ignore_eos: bool = False
    """Continue past the model's own end tokens."""
    max_tokens: int | None = None
    """Most tokens to generate. None: as many as the context holds; a larger number is cut to that."""
    min_tokens: int = 0
    """Before this many tokens neither an end token nor a stop string ends the generation."""
    logprobs: int | None = None
    """Report the log-probability of each chosen token and of this many most likely ones."""
    prompt_logprobs: int | None = None
    """Like logprobs, for each token of the prompt."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the generation in the text."""
    detokenize: bool = True
    """Decode tokens to text; if False, outputs have only token ids, and stop strings cannot be used."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1 keeps as many as the context holds."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, even if a prefix of it is cached."""
    priority: int = 0
    """Waiting requests start in this order, the lowest number first, then in order of arrival. When pages run out, the highest
    number is preempted first. While lower numbers keep arriving, higher ones wait."""

    output_kind: RequestOutputKind | str = RequestOutputKind.CUMULATIVE
    """Content of each output of AsyncLLM.generate and LLMEngine.step: cumulative, delta or final_only. LLM.generate always
    returns whole answers, and stream yields deltas."""

    def __post_init__(self) -> None:
        if self.seed == -1 and not isinstance(self.seed, bool):
            _set(self, "seed", None)
        _set(self, "bad_words", _strings(self.bad_words, "bad_words", MAX_BAD_WORDS))
        if self.allowed_token_ids is not None:
            ids = _token_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
            if not ids:
                raise RequestError("request.no_allowed_tokens", name="allowed_token_ids")
            _set(self, "allowed_token_ids", ids)
        if self.structured_outputs is not None:
            _set(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.truncate_prompt_tokens is not None:
            _integer(self, "truncate_prompt_tokens", -1, 2**31 - 1)
            if self.truncate_prompt_tokens == 0:
                raise RequestError("request.truncate_to_nothing", name="truncate_prompt_tokens")
        _set(self, "stop", _strings(self.stop, "stop", MAX_STOP_STRINGS))
        _set(self, "stop_token_ids", _token_ids(self.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS))
        _set(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.top_k == -1:
            _set(self, "top_k", 0)
        _integer(self, "n", 1, MAX_N)
        _number(self, "temperature", 0.0, 100.0)
        _integer(self, "top_k", 0, 2**31 - 1)
        _number(self, "top_p", 0.0, 1.0, low_excluded=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, 100.0, low_excluded=True)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _integer(self, "min_tokens", 0, 2**31 - 1)
        _integer(self, "priority", -MAX_PRIORITY, MAX_PRIORITY)
        if self.seed is not None:
            _integer(self, "seed", 0, MAX_SEED - 1)
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    "request.min_above_max", name="min_tokens", minimum=self.min_tokens, maximum=self.max_tokens
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(self, name, 0, MAX_LOGPROBS)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError("value.not_bool", name=name, value=getattr(self, name))
        _set(self, "output_kind", _output_kind(self.output_kind))
        if self.stop and not self.detokenize:
            raise RequestError("request.stop_without_text", name="stop")
        _set(self, _SOUND, True)

    def __setattr__(self, name: str, value: object) -> None:
        """Check a field that is set later like one of a new SamplingParams."""
        if _SOUND not in self.__dict__:
            _set(self, name, value)
            return
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        settled = settle(own_structured({name: value}), own, SAMPLING_NAMES, KeywordError)
        changed = replace(self, **settled.options)
        for key in own:
            _set(self, key, getattr(changed, key))

    def clone(self) -> "SamplingParams":
        """Return a copy."""
        return copy(self)

    @classmethod
    def from_optional(cls, **options: object) -> "SamplingParams":
        """Like the constructor, with None for a default; logit_bias may have ids as text, and is clamped."""
        given = {name: value for name, value in options.items() if value is not None or name in ("seed", "max_tokens")}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            try:
                given["logit_bias"] = {int(token): min(100.0, max(-100.0, number)) for token, number in bias.items()}
            except (TypeError, ValueError) as error:
                raise RequestError("request.not_mapping", name="logit_bias", value=bias) from error
        return cls(**given)  # type: ignore[arg-type]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _set(params: SamplingParams, name: str, value: object) -> None:
    # Skips the checks of `__setattr__`: this is part of construction.
    object.__setattr__(params, name, value)


def _integer(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("value.not_integer", name=name, value=value)
    if not low <= value <= high:
        raise RequestError("value.out_of_range", name=name, value=value, minimum=low, maximum=high)


def _number(params: SamplingParams, name: str, low: float, high: float, low_excluded: bool = False) -> None:
    value = getattr(params, name)
    sound = isinstance(value, int | float) and not isinstance(value, bool)  # NaN fails every comparison below
    if not sound or not low <= value <= high or (low_excluded and value == low):
        bounds = f"above {low:g} and at most {high:g}" if low_excluded else f"from {low:g} to {high:g}"
        raise RequestError("request.number_range", name=name, value=value, bounds=bounds)
    _set(params, name, float(value))


def _output_kind(kind: object) -> RequestOutputKind:
    if kind not in tuple(RequestOutputKind):
        raise RequestError("value.not_one_of", name="output_kind", value=kind, accepted=list(RequestOutputKind))
    return RequestOutputKind(kind)  # type: ignore[arg-type]


def _strings(strings: object, name: str, most: int) -> tuple[str, ...]:
    listed = (strings,) if isinstance(strings, str) else strings if strings is not None else ()
    if not isinstance(listed, SequenceABC) or not all(isinstance(string, str) and string for string in listed):
        raise RequestError("request.not_strings", name=name, value=strings)
    if len(listed) > most:
        raise RequestError("request.too_many", name=name, count=len(listed), maximum=most)
    longest = max((len(string) for string in listed), default=0)
    if longest > MAX_STOP_STRING_CHARS:
        raise RequestError("request.too_long", name=name, count=longest, maximum=MAX_STOP_STRING_CHARS)
    return tuple(dict.fromkeys(listed))


def _token_ids(token_ids: object, name: str, most: int) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not isinstance(token_ids, SequenceABC) or isinstance(token_ids, str | bytes):
        raise RequestError("request.not_token_ids", name=name, value=token_ids)
    if len(token_ids) > most:
        raise RequestError("request.too_many", name=name, count=len(token_ids), maximum=most)
    if not all(type(token) is int and 0 <= token < 2**31 for token in token_ids):
        raise RequestError("request.not_token_ids", name=name, value=token_ids)
    return tuple(dict.fromkeys(token_ids))


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise RequestError("request.not_mapping", name="logit_bias", value=bias)
    if not all(type(token) is int and 0 <= token < 2**31 for token in bias):
        raise RequestError("request.bias_keys", name="logit_bias", value=list(bias))
    _token_ids(list(bias), "logit_bias", MAX_LOGIT_BIASES)
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            bounds = "from -100 to 100"
            raise RequestError("request.number_range", name=f"logit_bias[{token}]", value=value, bounds=bounds)
    return {token: float(value) for token, value in bias.items()}
