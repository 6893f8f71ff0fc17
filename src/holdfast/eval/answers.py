"""Greedy answers over a KV format: where they leave the reference's, and whether JSON and tool calls stay valid.

An engine over a contender's runner generates them in batches. The reference's answers come first; those of a contender are
compared token by token.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.engine.admission import PreparedRequest
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.engine.outputs import OutputAssembler
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import RequestError
from holdfast.eval.quality import Contender
from holdfast.eval.tasks import JsonTask, Tasks, is_valid, same_tokens
from holdfast.request.outputs import CompletionOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.tokenizer import Tokenizer

MAX_OBJECT_TOKENS = 64
"""Maximum tokens of an answer in JSON."""
MAX_QUEUE = 64


@dataclass(frozen=True, slots=True)
class Valid:
    """Answers in JSON, or tool calls."""

    num_tasks: int
    num_valid: int
    num_lost: int
    """Answers that were valid over the reference and are not any more."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Figures of greedy answers."""

    num_tokens: int
    """Tokens of each continuation."""
    same_tokens: tuple[int, ...]
    """For each continuation, the tokens before the first that differs from the reference's."""
    json: Valid | None
    """None without a chat template."""
    tools: Valid | None

    @property
    def median_same(self) -> float:
        """Median of the tokens before the first difference."""
        return statistics.median(self.same_tokens)

    @property
    def num_equal(self) -> int:
        """Continuations that never differ."""
        return sum(count == self.num_tokens for count in self.same_tokens)


@dataclass(frozen=True, slots=True)
class Generated:
    """All answers of one contender."""

    continuations: tuple[tuple[int, ...], ...]
    json: tuple[bool, ...]
    """Whether each answer is valid."""
    tools: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Questions:
    """Tasks with the text of a model, for every contender."""

    tasks: Tasks
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    num_tokens: int
    """Tokens of each continuation."""

    @property
    def num_rows(self) -> int:
        """Tokens of all answers, at most."""
        num_objects = len(self.tasks.json) + len(self.tasks.tools) if self.chat_template is not None else 0
        return len(self.tasks.continuations) * self.num_tokens + num_objects * MAX_OBJECT_TOKENS

    def generate(self, contender: Contender, on_halves: Callable[[int], None] = lambda num_halves: None) -> Generated:
        """Answer all tasks greedily. `on_halves` gets half tokens. Chats that do not fit into the context are left out."""
        engine = open_engine(contender, self.tokenizer, self.chat_template)
        try:
            open_ended = SamplingParams(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)
            objects = SamplingParams(temperature=0.0, max_tokens=MAX_OBJECT_TOKENS)
            prepared = [engine.prepare(prompt, open_ended) for prompt in self.tasks.continuations]
            chats = (*self.tasks.json, *self.tasks.tools) if self.chat_template is not None else ()
            try:
                prepared += [engine.prepare_chat(list(task.conversation), objects) for task in chats]
            except RequestError:
                chats = ()
            outputs = run_all(engine, prepared[: len(self.tasks.continuations) + len(chats)], on_halves)
        finally:
            engine.close()
        count, num_json = len(self.tasks.continuations), len(self.tasks.json)
        valid = [is_valid(task, output.text) for task, output in zip(chats, outputs[count:], strict=True)]
        continuations = tuple(tuple(output.token_ids) for output in outputs[:count])
        return Generated(continuations, tuple(valid[:num_json]), tuple(valid[num_json:]))

    def compare(self, reference: Generated, own: Generated) -> Answers:
        """Compute the figures of a contender's answers."""
        pairs = zip(reference.continuations, own.continuations, strict=True)
        return Answers(
            self.num_tokens,
            tuple(same_tokens(*pair) for pair in pairs),
            _valid(self.tasks.json, reference.json, own.json),
            _valid(self.tasks.tools, reference.tools, own.tools),
        )


def _valid(tasks: Sequence[JsonTask], reference: Sequence[bool], own: Sequence[bool]) -> Valid | None:
    if not own:
        return None
    num_lost = sum(was and not is_so for was, is_so in zip(reference, own, strict=True))
    return Valid(len(tasks), sum(own), num_lost)


def open_engine(contender: Contender, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> Engine:
    """Make an engine over a contender's runner; closing it leaves the runner open."""
    runner = contender.runner
    scheduler = Scheduler(
        *(runner.limits, runner.num_pages, True, MAX_QUEUE), groups=runner.groups, state_rule=runner.state_rule
    )
    return Engine(EngineCore(runner, scheduler), tokenizer, chat_template, seed=0)


def run_all(
    engine: Engine, prepared: Sequence[PreparedRequest], on_halves: Callable[[int], None]
) -> list[CompletionOutput]:
    """Run requests to their end; return the one output of each."""
    assert len(prepared) <= MAX_QUEUE, f"{len(prepared)} requests"
    assemblers = {}
    for request in prepared:
        assemblers[engine.submit(request)] = OutputAssembler(request.prompt, request.prompt_token_ids, 1)
    while engine.has_unfinished():
        for delta in engine.step():
            assemblers[delta.request_id].add(delta)
            on_halves(2 * len(delta.token_ids))
    engine.settle()
    engine.raise_if_dead()
    return [assembler.output().outputs[0] for assembler in assemblers.values()]
