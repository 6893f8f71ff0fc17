"""/v1/completions: prompts continued, as text or token ids, one or many, whole or as they are written."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.engine.admission import PreparedRequest, Prompt
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import PromptError, QueueFullError, RequestError
from holdfast.request.outputs import CompletionDelta, PositionLogprobs, RequestOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.server.bodies import read_model
from holdfast.server.conversations import cache_salt
from holdfast.server.errors import ApiError
from holdfast.server.logprobs import CompletionLogprobWriter
from holdfast.server.logs import record_of
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model, prompt_error, sampling_params
from holdfast.server.schemas import Completion, CompletionRequest
from holdfast.server.service import Service, service_of
from holdfast.server.streams import (
    DONE,
    Answer,
    Counted,
    EventStream,
    first_of,
    gathered,
    merged,
    new_id,
    while_connected,
)
from holdfast.server.structured import Rule, asked_rule
from holdfast.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's; clients of this endpoint know it."""
router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    responses=responses(Completion, 429, streams=True),
    openapi_extra=body_of(CompletionRequest),
    operation_id="create_completion",
)
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    asked = await read_model(request, CompletionRequest, service_of(request).limits)
    if asked.stream:
        return EventStream(request, await while_connected(request, _begun(request, asked)))
    return await while_connected(request, _answered(request, asked))


@dataclass(frozen=True, slots=True)
class _Opened:
    """Prompts that the engine can take, and what their continuations are to be like."""

    id: str
    created: int
    model: str
    answers: list[Answer]
    counted: Counted
    echo: bool
    drops_answer: bool
    """max_tokens = 0: the prompt is scored; the one token that a request must have is not told."""
    num_top: int | None
    tokenizer: Tokenizer | None
    returns_ids: bool

    def prompt_text(self, prepared: PreparedRequest) -> str:
        """What echo repeats."""
        if prepared.prompt is not None:
            return prepared.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(prepared.prompt_token_ids, False)

    def logprob_writer(self, prepared: PreparedRequest) -> CompletionLogprobWriter | None:
        """For one continuation of a prompt."""
        if self.num_top is None or self.tokenizer is None:
            return None
        if self.echo:
            return CompletionLogprobWriter(self.tokenizer, self.num_top)
        skips = prepared.params.skip_special_tokens
        return CompletionLogprobWriter(self.tokenizer, self.num_top, prepared.prompt_token_ids, skips)


def listed_prompts(prompt: object) -> list[Prompt]:
    """One prompt for each that was asked: a text or token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list), f"{prompt=} passed the schema"
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


async def _opened(request: Request, asked: CompletionRequest) -> _Opened:
    service = service_of(request)
    check_model(service, asked.model)
    drops = asked.max_tokens == 0
    if drops and not asked.echo:
        raise ApiError(
            400, "max_tokens=0 was asked; nothing would be answered; set echo, or ask for 1", param="max_tokens"
        )
    prompts = listed_prompts(asked.prompt)
    _check_count(service, len(prompts), asked.n or 1)
    rule = asked_rule(asked, asked.response_format)
    prompt_logprobs = asked.logprobs if asked.echo else None
    params = sampling_params(
        service,
        asked,
        max_tokens=DEFAULT_MAX_TOKENS if asked.max_tokens is None else max(asked.max_tokens, 1),
        logprobs=asked.logprobs,
        prompt_logprobs=prompt_logprobs,
        **({} if rule is None else {"structured_outputs": rule.made()}),
    )
    prepared = await _prepared(request, asked, prompts, params, rule)
    answer_id = new_id("cmpl")
    counted = Counted()
    answers = [
        Answer(request, one, answer_id if len(prepared) == 1 else f"{answer_id}-{place}", counted)
        for place, one in enumerate(prepared)
    ]
    created, model = int(time.time()), asked.model or service.name
    return _Opened(
        *(answer_id, created, model, answers, counted, bool(asked.echo), drops, asked.logprobs),
        service.llm.tokenizer,
        bool(asked.return_token_ids),
    )


def _check_count(service: Service, num_prompts: int, n: int) -> None:
    """More than could ever be queued at once is no matter of trying again."""
    if num_prompts > service.limits.max_prompts:
        raise ApiError(
            400,
            f"{num_prompts} prompts were given; at most {service.limits.max_prompts} work; send fewer",
            param="prompt",
        )
    if num_prompts * n > service.llm.max_queue:
        words = f"{num_prompts} prompts with n={n} were asked; the queue holds {service.llm.max_queue}; ask for fewer"
        raise ApiError(400, words, param="prompt" if num_prompts > 1 else "n")


async def _prepared(
    request: Request, asked: CompletionRequest, prompts: Sequence[Prompt], params: SamplingParams, rule: Rule | None
) -> list[PreparedRequest]:
    llm, salt = service_of(request).llm, cache_salt(request, asked)
    prepared: list[PreparedRequest] = []
    for place, prompt in enumerate(prompts):
        try:
            prepared.append(await llm.prepare(prompt, params, cache_salt=salt))
        except PromptError as error:
            raise prompt_error(error, "prompt" if len(prompts) == 1 else f"prompt[{place}]") from error
        except RequestError as error:
            if rule is None or isinstance(error, QueueFullError):
                raise
            raise rule.refused(error) from error
    record = record_of(request)
    if record.wants_text:
        record.prompt = prepared[0].prompt
    return prepared


async def _answered(request: Request, asked: CompletionRequest) -> Response:
    """Whole continuations."""
    opened = await _opened(request, asked)
    outputs = await gathered([_whole(answer) for answer in opened.answers])
    choices = [choice for place, output in enumerate(outputs) for choice in _choices(opened, place, output)]
    value = {
        "id": opened.id,
        "object": "text_completion",
        "created": opened.created,
        "model": opened.model,
        "choices": choices,
        "usage": _usage(opened),
        "system_fingerprint": None,
    }
    opened.answers[0].log_text(choices[0]["text"])
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


async def _whole(answer: Answer) -> RequestOutput:
    prepared = answer.prepared
    assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
    async with aclosing(answer.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                assembler.add(delta)
    return assembler.output()


def _usage(opened: _Opened) -> dict[str, Any]:
    if opened.drops_answer:
        opened.counted.num_output_tokens = 0
    return opened.counted.usage()


def _choices(opened: _Opened, place: int, output: RequestOutput) -> list[dict[str, Any]]:
    prepared = opened.answers[place].prepared
    choices = []
    for completion in output.outputs:
        text, token_ids = ("", []) if opened.drops_answer else (completion.text, completion.token_ids)
        positions: list[PositionLogprobs | None] = [] if opened.drops_answer else [*(completion.logprobs or ())]
        if opened.echo:
            text = opened.prompt_text(prepared) + text
            token_ids = [*prepared.prompt_token_ids, *token_ids]
            positions = [*(output.prompt_logprobs or ()), *positions]
        writer = opened.logprob_writer(prepared)
        choice: dict[str, Any] = {
            "index": place * prepared.params.n + completion.index,
            "text": text,
            "logprobs": None if writer is None else writer.entries(token_ids, positions),
            "finish_reason": "length" if opened.drops_answer else completion.finish_reason,
        }
        if completion.stop_reason is not None and not opened.drops_answer:
            choice["stop_reason"] = completion.stop_reason
        if opened.returns_ids:
            choice["prompt_token_ids"] = [*prepared.prompt_token_ids]
            choice["token_ids"] = [] if opened.drops_answer else [*completion.token_ids]
        choices.append(choice)
    return choices


async def _begun(request: Request, asked: CompletionRequest) -> AsyncGenerator[bytes, None]:
    """A stream whose requests the engine has taken."""
    return await first_of(_events(await _opened(request, asked), asked))


async def _events(opened: _Opened, asked: CompletionRequest) -> AsyncGenerator[bytes, None]:
    options = asked.stream_options
    includes_usage = options is not None and bool(options.include_usage)
    is_continuous = includes_usage and options is not None and bool(options.continuous_usage_stats)
    names = {"id": opened.id, "object": "text_completion", "created": opened.created, "model": opened.model}
    head = f'data: {json.dumps(names, separators=(",", ":"))[:-1]},"choices":['
    tail = '],"usage":null}\n\n' if includes_usage else "]}\n\n"
    n = opened.answers[0].prepared.params.n
    streams = [
        _ChoiceStream(index, opened, opened.answers[index // n].prepared) for index in range(len(opened.answers) * n)
    ]
    async with aclosing(merged([answer.deltas() for answer in opened.answers])) as batches:
        async for place, deltas in batches:
            choices: list[str] = []
            for delta in deltas:
                choices += streams[place * n + delta.index].choices(delta)
                if delta.prompt_logprobs is not None:
                    for other in streams[place * n + 1 : (place + 1) * n]:
                        choices += other.take_prompt(delta.prompt_logprobs)
            if choices and is_continuous:
                tail = f'],"usage":{json.dumps(_usage(opened))}}}\n\n'
            # Empty only at the beginning, when the engine has taken the requests.
            if choices or not deltas:
                yield "".join([f"{head}{choice}{tail}" for choice in choices]).encode("ascii")
    if includes_usage:
        yield f'{head}],"usage":{json.dumps(_usage(opened))}}}\n\n'.encode("ascii")
    yield DONE


class _ChoiceStream:
    """One continuation as choices of chunks, in JSON; what echo repeats comes with its first."""

    def __init__(self, index: int, opened: _Opened, prepared: PreparedRequest) -> None:
        self._index = index
        self._logprobs = opened.logprob_writer(prepared)
        self._waiting: tuple[list[int], list[PositionLogprobs | None]] = ([], [])
        self._echo = opened.prompt_text(prepared) if opened.echo else None
        self._drops = opened.drops_answer
        self._prompt_ids = prepared.prompt_token_ids
        self._ids_once = f',"prompt_token_ids":{[*prepared.prompt_token_ids]}' if opened.returns_ids else ""
        """For the first chunk."""
        self._token_ids: list[int] | None = [] if opened.returns_ids else None
        """Of tokens that no chunk had yet; None if the request does not want them."""
        self._prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
        is_later = index % prepared.params.n > 0
        self._early: list[CompletionDelta] | None = [] if opened.echo and self._logprobs and is_later else None
        """Deltas before the prompt's log-probabilities, which the first completion of a prompt computes for all."""

    def take_prompt(self, positions: Sequence[PositionLogprobs | None]) -> list[str]:
        """What was waiting for the log-probabilities of the prompt."""
        self._prompt_logprobs = positions
        early, self._early = self._early or [], None
        return [choice for delta in early for choice in self.choices(delta)]

    def choices(self, delta: CompletionDelta) -> list[str]:
        """What one delta adds."""
        if self._early is not None:
            self._early.append(delta)
            return []
        text = "" if self._drops else delta.text
        if self._echo is not None:
            text, self._echo = self._echo + text, None
            positions = self._prompt_logprobs if delta.prompt_logprobs is None else delta.prompt_logprobs
            if positions is not None:
                self._keep(self._prompt_ids, positions)
        if delta.logprobs and not self._drops:
            self._keep(delta.token_ids, delta.logprobs)
        if self._token_ids is not None and not self._drops:
            self._token_ids += delta.token_ids
        if delta.finish_reason is not None:
            reason = "length" if self._drops else delta.finish_reason
            stop = "" if delta.stop_reason is None or self._drops else f',"stop_reason":{json.dumps(delta.stop_reason)}'
            return [self._choice(text, f'"{reason}"{stop}')]
        return [self._choice(text, "null")] if text else []

    def _keep(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> None:
        self._waiting[0].extend(token_ids)
        self._waiting[1].extend(positions)

    def _choice(self, text: str, reason: str) -> str:
        logprobs = "null"
        if self._logprobs is not None and self._waiting[0]:
            entries = self._logprobs.entries(*self._waiting)
            logprobs = json.dumps(entries, separators=(",", ":"))
            self._waiting = ([], [])
        ids = ""
        if self._token_ids is not None:
            ids, self._ids_once = f'{self._ids_once},"token_ids":{self._token_ids}', ""
            self._token_ids = []
        return f'{{"index":{self._index},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
