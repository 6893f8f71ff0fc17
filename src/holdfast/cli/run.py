"""`holdfast run`: one prompt and its streamed answer, then memory by owner and speed; no torch."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass

from holdfast.cli.layout import Line
from holdfast.cli.opened_model import (
    OpenedModel,
    open_quietly,
    open_visibly,
    prepare,
    read_prompt,
    refuse_bare_ids,
    report_file,
    sampling_params,
    speed_of,
    stream,
)
from holdfast.cli.options import Given
from holdfast.cli.start_line import StartLine
from holdfast.cli.tables import memory_lines, show_beside
from holdfast.cli.terminal import dumps, write_answer, write_line
from holdfast.config import EngineConfig
from holdfast.engine.admission import ChatOptions, PreparedRequest
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import ConfigError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.outputs import CompletionOutput, PositionLogprobs, RequestOutput

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `holdfast run` itself."""

    model: str | None
    prompt: str | None
    system: str | None
    raw: bool
    quiet: bool
    as_json: bool
    memory_report: str | None = None
    allow_special_tokens: bool = False


def run(options: RunOptions, engine: Given, sampling: Given, start: StartLine | None = None) -> None:
    """Answer once. All options are checked before the model is opened."""
    checked = sampling_params(sampling, GenerationDefaults())
    if options.raw and options.system is not None:
        raise ConfigError("cli.exclusive", first="--system", second="--raw", reason="bare text has no system message")
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not options.as_json:
            raise ConfigError("cli.needs_json", option=f"--{name.replace('_', '-')}")
    # One request: plan memory for one.
    config = EngineConfig.from_options(model=options.model, **({"max_num_seqs": checked.n} | engine))
    refuse_bare_ids(config)
    report = report_file(options.memory_report)
    text = read_prompt(options.prompt)
    is_quiet = options.quiet or options.as_json
    opened = open_quietly(config, report) if is_quiet else open_visibly(config, report, start)
    params = sampling_params(sampling, opened.engine.generation)
    reading = ChatOptions(allow_special_tokens=options.allow_special_tokens)
    prepared = prepare(opened.engine, _prompt(options, text, opened), params, DEFAULT_MAX_TOKENS, reading)
    output = _answer(opened, prepared, streams=not options.as_json)
    if options.as_json:
        write_answer(dumps(_record(opened, output)) + "\n")
    elif not options.quiet:
        write_line("")
        show_beside(memory_lines(opened.memory))
        show_beside([Line(""), Line(speed_of(output).line)])
        stats = opened.engine.stats()
        if stats.num_proposed_tokens:
            share = 100 * stats.num_accepted_tokens / stats.num_proposed_tokens
            accepted = f"{stats.num_accepted_tokens:,} of {stats.num_proposed_tokens:,}"
            show_beside([Line(f"{accepted} draft tokens accepted ({share:.0f}%)")])
        if params.max_tokens is None and output.outputs[0].finish_reason == "length":
            write_line(f"cut at {prepared.max_tokens} tokens; --max-tokens N allows more, within the context")


def _prompt(options: RunOptions, text: str, opened: OpenedModel) -> str | list[Mapping[str, object]]:
    """Make a conversation if the model has a chat template, else return the bare text."""
    if options.raw:
        return text
    if not opened.engine.has_chat_template:
        if options.system is not None:
            raise ConfigError("cli.no_chat_template", model=opened.name)
        return text
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def _answer(opened: OpenedModel, prepared: PreparedRequest, streams: bool) -> RequestOutput:
    """Run a request; print several answers in sequence."""
    params = prepared.params
    assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, params.n)
    last = "\n"
    with closing(stream(opened.llm, prepared)) as deltas:
        for delta in deltas:
            assembler.add(delta)
            if streams and params.n == 1:
                write_answer(delta.text)
                last = delta.text[-1:] or last
    output = assembler.output()
    if streams and params.n > 1:
        for completion in output.outputs:
            write_answer(f"--- {completion.index + 1} of {params.n} ---\n{completion.text}\n")
    elif streams and (last != "\n" or not output.outputs[0].text):
        write_answer("\n")
    return output


def _record(opened: OpenedModel, output: RequestOutput) -> dict[str, object]:
    """Return the JSON object: the first answer at the top level, plus a list if there are several."""
    speed = speed_of(output)
    record: dict[str, object] = {"model": opened.name, **_completion(output.outputs[0])}
    if len(output.outputs) > 1:
        record["outputs"] = [_completion(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprobs(position) for position in output.prompt_logprobs]
    return record | {
        "usage": {
            "prompt_tokens": speed.num_prompt_tokens,
            "cached_tokens": speed.num_cached_tokens,
            "completion_tokens": speed.num_output_tokens,
            "total_tokens": speed.num_prompt_tokens + speed.num_output_tokens,
        },
        "timings": {
            "load_seconds": opened.load_seconds,
            "queue_seconds": speed.queue_seconds,
            "first_token_seconds": speed.first_token_seconds,
            "total_seconds": speed.total_seconds,
            "prefill_tokens_per_second": speed.prefill_rate,
            "decode_tokens_per_second": speed.decode_rate,
        },
        "memory": opened.memory.as_dict(),
    }


def _completion(completion: CompletionOutput) -> dict[str, object]:
    record: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = [_logprobs(position) for position in completion.logprobs]
    return record


def _logprobs(position: PositionLogprobs | None) -> dict[int, dict[str, object]] | None:
    return None if position is None else {token_id: asdict(logprob) for token_id, logprob in position.items()}
