"""Prompts and answers of a command: defaults of sampling, room in the context, text for a terminal, speed; no torch."""

import math
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from holdfast.cli.options import Given
from holdfast.engine.admission import PreparedRequest
from holdfast.engine.engine import Engine
from holdfast.engine.llm import LLM
from holdfast.errors import HoldfastError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import SamplingParams

ADVISED = ("temperature", "top_p", "top_k", "repetition_penalty")
CHOOSING = ("top_p", "top_k", "min_p", "n")
"""Options that mean nothing unless tokens are drawn at random."""
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def sampling_params(given: Given, generation: GenerationDefaults) -> SamplingParams:
    """What was asked; else what the model's makers advise; else greedy, unless something was asked that needs chance."""
    advised: Given = {name: getattr(generation, name) for name in ADVISED if getattr(generation, name) is not None}
    greedy: Given = {} if any(name in given for name in CHOOSING) else {"temperature": 0.0}
    return SamplingParams(**(greedy | advised | given))


def prepare(
    engine: Engine, prompt: str | list[Mapping[str, object]], params: SamplingParams, max_tokens: int
) -> PreparedRequest:
    """A request whose answer has at most `max_tokens`, or as many as its context leaves, unless the params say."""
    prepare = engine.prepare if isinstance(prompt, str) else engine.prepare_chat
    prepared = prepare(prompt, params)
    if params.max_tokens is not None:
        return prepared
    bounded = min(prepared.max_tokens, max(max_tokens, params.min_tokens))
    return replace(prepared, params=replace(params, max_tokens=bounded), max_tokens=bounded)


def for_terminal(text: str) -> str:
    """Text that cannot move the cursor or recolour the screen: control characters become pictures of themselves."""
    return text.translate(_CONTROLS)


def write_answer(text: str) -> None:
    """Text to stdout at once, made harmless where a terminal shows it."""
    if text and sys.stdout is not None:
        sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def stream(llm: LLM, prepared: PreparedRequest) -> Generator[CompletionDelta, None, None]:
    """The answer as it comes; an answer that the engine gave up raises. Closing it ends the request."""
    deltas = llm.stream({"prompt_token_ids": prepared.prompt_token_ids}, prepared.params)
    assert isinstance(deltas, Generator), f"a stream that cannot be closed: {deltas=}"
    with closing(deltas):
        for delta in deltas:
            if delta.error is not None:
                raise HoldfastError("an answer was asked", delta.error, "try another prompt, and report this")
            yield delta


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens and seconds of one request; a rate is None where nothing was measured."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float | None
    prefill_rate: float | None
    decode_rate: float | None

    @property
    def line(self) -> str:
        """All of it on one line."""
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [f"prompt {self.num_prompt_tokens} tokens{cached}", f"generated {self.num_output_tokens} tokens"]
        if self.first_token_seconds is not None:
            parts.append(f"first token {self.first_token_seconds:.3f} s")
        rates = (("prefill", self.prefill_rate), ("decode", self.decode_rate))
        return ", ".join([*parts, *(f"{name} {rate:.1f} tokens/s" for name, rate in rates if rate is not None)])


def speed_of(output: RequestOutput) -> Speed:
    """How fast a finished request was."""
    num_output = sum(len(completion.token_ids) for completion in output.outputs)
    num_prompt, metrics = len(output.prompt_token_ids), output.metrics
    if metrics is None:
        return Speed(num_prompt, output.num_cached_tokens, num_output, None, None, None, None, None)
    num_computed = num_prompt - metrics.num_cached_tokens
    return Speed(
        num_prompt,
        metrics.num_cached_tokens,
        num_output,
        metrics.queue_seconds,
        metrics.first_token_seconds,
        metrics.total_seconds,
        _rate(num_computed, metrics.first_token_seconds - metrics.queue_seconds),
        _rate(num_output - len(output.outputs), metrics.total_seconds - metrics.first_token_seconds),
    )


def _rate(num_tokens: int, seconds: float) -> float | None:
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 and math.isfinite(seconds) else None
