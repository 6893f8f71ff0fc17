"""/v1/completions: continue one or many prompts (text or token ids), whole or as a stream of chunks."""

import json
import time
from collections.abc import Sequence
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
from holdfast.server.answers import ChunkWriter, respond, to_json
from holdfast.server.conversations import cache_salt
from holdfast.server.errors import ApiError
from holdfast.server.logprobs import CompletionLogprobWriter
from holdfast.server.logs import record_of
from holdfast.server.openapi import post
from holdfast.server.sampling import Rule, check_model, prompt_error, rule_of, sampling_params
from holdfast.server.schemas import CompletionRequest
from holdfast.server.service import Service, service_of
from holdfast.server.streams import Answer, Counted, new_id
from holdfast.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default; clients rely on it."""
router = APIRouter(tags=["completions"])


@post(router, "/v1/completions", CompletionRequest, "Completion", streams=True)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts."""
    return await respond(request, _opened(request, body), is_streamed=bool(body.stream))


@dataclass(frozen=True, slots=True)
class _Format:
    """Output options of one request."""

    echo: bool
    drops_answer: bool
    """True for max_tokens = 0: the engine generates one token, and the answer omits it."""
    num_top: int | None
    tokenizer: Tokenizer | None
    returns_ids: bool

    def prompt_text(self, prepared: PreparedRequest) -> str:
        """Return the text that echo repeats."""
        if prepared.prompt is not None:
            return prepared.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(prepared.prompt_token_ids, False)

    def logprob_writer(self, prepared: PreparedRequest) -> CompletionLogprobWriter | None:
        """Make the writer for one continuation of a prompt."""
        if self.num_top is None or self.tokenizer is None:
            return None
        if self.echo:
            return CompletionLogprobWriter(self.tokenizer, self.num_top)
        skips = prepared.params.skip_special_tokens
        return CompletionLogprobWriter(self.tokenizer, self.num_top, prepared.prompt_token_ids, skips)


def listed_prompts(prompt: object) -> list[Prompt]:
    """Return one prompt for each text or list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list), f"{prompt=} passed the schema"
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


async def _opened(request: Request, body: CompletionRequest) -> "CompletionWriter":
    service = service_of(request)
    check_model(service, body.model)
    drops = body.max_tokens == 0
    if drops and not body.echo:
        raise ApiError("http.max_tokens_zero", param="max_tokens")
    prompts = listed_prompts(body.prompt)
    _check_count(service, len(prompts), body.n or 1)
    rule = rule_of(body, body.response_format)
    params = sampling_params(
        service,
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        **({} if rule is None else {"structured_outputs": rule.made()}),
    )
    prepared = await prepare_prompts(request, body.cache_salt, prompts, params, rule)
    name, counted = new_id("cmpl"), Counted()
    names = [name] if len(prepared) == 1 else [f"{name}-{place}" for place in range(len(prepared))]
    answers = [Answer(request, one, own, counted) for own, one in zip(names, prepared, strict=True)]
    form = _Format(bool(body.echo), drops, body.logprobs, service.llm.tokenizer, bool(body.return_token_ids))
    frame = {"id": name, "object": "text_completion", "created": int(time.time()), "model": body.model or service.name}
    return CompletionWriter(answers, form, frame, body)


def _check_count(service: Service, num_prompts: int, n: int) -> None:
    """Refuse more sequences than the queue can hold; a retry would fail too."""
    limit = service.limits.max_prompts
    if num_prompts > limit:
        raise ApiError("http.too_many_prompts", param="prompt", maximum=limit, num_prompts=num_prompts)
    if num_prompts * n > service.llm.max_queue:
        param, maximum = "prompt" if num_prompts > 1 else "n", service.llm.max_queue
        raise ApiError("http.queue_too_small", param=param, maximum=maximum, num_prompts=num_prompts, n=n)


async def prepare_prompts(
    request: Request, salt: str | None, prompts: Sequence[Prompt], params: SamplingParams, rule: Rule | None
) -> list[PreparedRequest]:
    """Validate all prompts before any is queued; an error names its prompt."""
    llm, own_salt = service_of(request).llm, cache_salt(request, salt)
    prepared: list[PreparedRequest] = []
    for place, prompt in enumerate(prompts):
        try:
            prepared.append(await llm.prepare(prompt, params, cache_salt=own_salt))
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


class CompletionWriter(ChunkWriter):
    """Writes the continuations of all prompts, `n` choices for each."""

    def __init__(
        self, answers: Sequence[Answer], form: _Format, names: dict[str, Any], body: CompletionRequest
    ) -> None:
        super().__init__(answers, names, body)
        self._form, self._names = form, names
        self._n = n = answers[0].prepared.params.n
        self._streams: list[_ChoiceStream] = []
        self._assemblers = [OutputAssembler(one.prepared.prompt, one.prepared.prompt_token_ids, n) for one in answers]

    def usage(self) -> dict[str, Any]:
        if self._form.drops_answer:
            self.answers[0].counted.num_output_tokens = 0
        return super().usage()

    def begin(self) -> None:
        prompts = [answer.prepared for answer in self.answers for _ in range(self._n)]
        self._streams = [_ChoiceStream(at, self._form, prepared) for at, prepared in enumerate(prompts)]

    def add(self, place: int, delta: CompletionDelta) -> None:
        n, streams = self._n, self._streams
        self._choices += streams[place * n + delta.index].choices(delta)
        if delta.prompt_logprobs is not None:
            for other in streams[place * n + 1 : (place + 1) * n]:
                self._choices += other.take_prompt(delta.prompt_logprobs)

    def collect(self, place: int, delta: CompletionDelta) -> None:
        self._assemblers[place].add(delta)

    def whole(self) -> tuple[dict[str, Any], str | None]:
        outputs = [assembler.output() for assembler in self._assemblers]
        choices = [choice for place, output in enumerate(outputs) for choice in self._whole_choices(place, output)]
        value = {**self._names, "choices": choices, "usage": self.usage(), "system_fingerprint": None}
        return value, choices[0]["text"]

    def _whole_choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        prepared, form = self.answers[place].prepared, self._form
        choices = []
        for completion in output.outputs:
            text, token_ids = ("", []) if form.drops_answer else (completion.text, completion.token_ids)
            positions: list[PositionLogprobs | None] = [] if form.drops_answer else [*(completion.logprobs or ())]
            if form.echo:
                text = form.prompt_text(prepared) + text
                token_ids = [*prepared.prompt_token_ids, *token_ids]
                positions = [*(output.prompt_logprobs or ()), *positions]
            writer = form.logprob_writer(prepared)
            choice: dict[str, Any] = {
                "index": place * self._n + completion.index,
                "text": text,
                "logprobs": None if writer is None else writer.entries(token_ids, positions),
                "finish_reason": "length" if form.drops_answer else completion.finish_reason,
            }
            if completion.stop_reason is not None and not form.drops_answer:
                choice["stop_reason"] = completion.stop_reason
            if form.returns_ids:
                choice["prompt_token_ids"] = [*prepared.prompt_token_ids]
                choice["token_ids"] = [] if form.drops_answer else [*completion.token_ids]
            choices.append(choice)
        return choices


class _ChoiceStream:
    """Writes one continuation as choices of chunks, in ASCII JSON; the first includes the echo."""

    def __init__(self, index: int, form: _Format, prepared: PreparedRequest) -> None:
        self._index = index
        self._logprobs = form.logprob_writer(prepared)
        self._waiting: tuple[list[int], list[PositionLogprobs | None]] = ([], [])
        self._echo = form.prompt_text(prepared) if form.echo else None
        self._drops = form.drops_answer
        self._prompt_ids = prepared.prompt_token_ids
        self._ids_once = f',"prompt_token_ids":{[*prepared.prompt_token_ids]}' if form.returns_ids else ""
        """Prompt token ids, sent in the first chunk only."""
        self._token_ids: list[int] | None = [] if form.returns_ids else None
        """Token ids not sent yet; None if the request does not want them."""
        self._prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
        is_later = index % prepared.params.n > 0
        self._early: list[CompletionDelta] | None = [] if form.echo and self._logprobs and is_later else None
        """Deltas that wait for the prompt's log-probabilities, which only its first completion computes."""

    def take_prompt(self, positions: Sequence[PositionLogprobs | None]) -> list[str]:
        """Store the prompt's log-probabilities and return the choices that waited for them."""
        self._prompt_logprobs = positions
        early, self._early = self._early or [], None
        return [choice for delta in early for choice in self.choices(delta)]

    def choices(self, delta: CompletionDelta) -> list[str]:
        """Return the choices that one delta adds."""
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
            logprobs = to_json(self._logprobs.entries(*self._waiting))
            self._waiting = ([], [])
        ids = ""
        if self._token_ids is not None:
            ids, self._ids_once = f'{self._ids_once},"token_ids":{self._token_ids}', ""
            self._token_ids = []
        return f'{{"index":{self._index},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
