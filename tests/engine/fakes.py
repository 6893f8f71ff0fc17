"""A whole engine without a model: real scheduler and tokenizer, and a runner whose next token is a hash of the prefix.

The runner keeps a shadow of the KV pages: each slot holds the hash of the prefix that it should, and is compared
whenever attention would read it. A token that comes out right proves that every page was.
"""

import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from itertools import count

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from holdfast.config import Limits
from holdfast.engine.core import CoreResources, EngineCore
from holdfast.engine.engine import Engine
from holdfast.engine.pulse import Pulse, open_pulse_file
from holdfast.engine.scheduler import Scheduler
from holdfast.memory.report import MemoryReport
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sequence import (
    LiveStep,
    ScheduledSequence,
    Sequence,
    SequenceResult,
    StepResult,
    TokenLogprobs,
)
from holdfast.request.step import Step, StepItem
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.detokenizer import byte_alphabet
from holdfast.text.tokenizer import Tokenizer

BOS, EOS, OTHER_EOS, PAD = 256, 257, 258, 259
HIDDEN_SIZE = 16
VOCAB_SIZE = 264
"""More rows than the tokenizer has tokens, as models do."""
usual_run_ahead = 0
"""Default of run_ahead; tests/engine/conftest.py sets it."""


def byte_tokenizer(kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    """Token ids 0 to 255 are bytes; a few special tokens follow."""
    backend = Backend(BPE(byte_alphabet(), []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<bos>", "<eos>", "<end>", "<pad>"])
    return kind(backend, "fake", {"bos_token": "<bos>", "eos_token": "<eos>"})


@cache
def shared_tokenizer() -> Tokenizer:
    return byte_tokenizer()


@cache
def extended(prefix: bytes, token: int) -> bytes:
    """The hash of a prefix and one more token."""
    return blake2b(prefix + token.to_bytes(4, "little"), digest_size=8).digest()


TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}{{ mood }}"""


@cache
def shared_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, "fake", {})


class HashRunner:
    """Next token: a lower-case letter, from the hash of the prefix (and of seed and position, when sampling).

    Keeps its own sequences, made of what steps tell. A launched step waits and runs when it is collected, by when later
    ones may have been launched; `can_cancel=False` leaves them there after an interrupt, as a GPU does.
    """

    def __init__(self, limits: Limits, num_pages: int, can_cancel: bool = True) -> None:
        self.limits = limits
        self.num_pages = num_pages
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = frozenset((EOS, OTHER_EOS))
        self.can_cancel = can_cancel
        self.script: dict[str, list[int]] = {}
        """Prompt text -> tokens to say, in place of hashes; the last one repeats."""
        self.on_step: Callable[[LiveStep], None] = lambda step: None
        self.answer: Callable[[ScheduledSequence, SequenceResult], SequenceResult] = lambda item, result: result
        """What becomes of a result before anybody knows it."""
        self.steps: list[tuple[tuple[int, int, int], ...]] = []
        """(sequence id, start, number of tokens) of everything that ran."""
        self.shadow: dict[tuple[int, int], bytes] = {}
        self.most_in_flight = 0
        self._by_slot: dict[int, Sequence] = {}
        self._sources: dict[int, Sequence] = {}
        """By the id of a fork that is not scheduled yet: the sequence that it forks from."""
        self._launched: deque[LiveStep] = deque()
        self._last_number = 0

    def launch(self, step: Step) -> None:
        assert step.number == self._last_number + 1, f"step {step.number} after {self._last_number}"
        assert step.items, "an empty step is never launched"
        self._last_number = step.number
        for slot in step.released:
            del self._by_slot[slot]
        for one in step.admitted:
            assert one.slot not in self._by_slot, f"slot {one.slot} is taken"
            assert 0 <= one.slot < self.limits.max_num_seqs
            tokens, params = list(one.token_ids), one.params
            sequence = Sequence(one.sequence_id, tokens, one.num_prompt_tokens, params, one.seed, max_tokens=1)
            sequence.is_pooled = one.is_pooled
            sequence.num_computed = sequence.num_scheduled = -1
            self._by_slot[one.slot] = sequence
            self._sources.pop(one.sequence_id, None)
            if one.fork_of >= 0:
                self._sources[one.sequence_id] = self._by_slot[one.fork_of]
        self._launched.append(LiveStep(tuple(map(self._scheduled, step.items)), step))
        self.most_in_flight = max(self.most_in_flight, len(self._launched))

    def collect(self) -> StepResult:
        return self.execute(self._launched[0])

    def cancel(self) -> bool:
        if self.can_cancel:
            self._launched.clear()
        return self.can_cancel

    def execute(self, step: LiveStep) -> StepResult:
        """Run the oldest launched step. What it chooses is known to later ones."""
        assert len(step.scheduled) <= self.limits.max_num_seqs
        assert step.num_tokens <= self.limits.max_num_batched_tokens
        self.on_step(step)
        self.steps.append(tuple((i.sequence.sequence_id, i.start, i.num_new_tokens) for i in step.scheduled))
        results = tuple(self.answer(item, self._run(item)) for item in step.scheduled)
        for item, result in zip(step.scheduled, results, strict=True):
            item.sequence.token_ids += result.token_ids
        assert self._launched.popleft() is step
        return StepResult(results)

    def _scheduled(self, item: StepItem) -> ScheduledSequence:
        sequence = self._by_slot[item.slot]
        for table, pages in zip(sequence.tables, item.pages, strict=False):
            assert all(0 <= page < self.num_pages for page in pages)
            table += pages
        places = len(sequence.tables[0]) * self.limits.page_tokens
        assert item.start + item.num_new_tokens <= places, f"{item} has {places} places"
        source = self._sources.pop(sequence.sequence_id, None)
        return ScheduledSequence(sequence, item.start, item.num_new_tokens, item.samples, item.proposals, source=source)

    def _run(self, item: ScheduledSequence) -> SequenceResult:
        sequence, page_tokens = item.sequence, self.limits.page_tokens
        end, prefix = item.start + item.num_new_tokens, b""
        assert end <= sequence.num_tokens, f"{item} has no such tokens"
        assert item.samples == (end == sequence.num_tokens), f"{item} has {sequence.num_tokens} tokens"
        if item.source is not None:
            self._copy_fork(sequence, item.source, end)
        for position, token in enumerate(sequence.token_ids[:end]):
            prefix = extended(prefix, token % 2**32)
            slot = sequence.tables[0][position // page_tokens], position % page_tokens
            if position < item.start:
                assert self.shadow.get(slot) == prefix, f"{slot=} holds something else than position {position}"
            self.shadow[slot] = prefix
        params = sequence.params
        prompt_logprobs = ()
        if params.prompt_logprobs is not None:
            places = range(item.start + 1, min(end, sequence.num_prompt_tokens - 1) + 1)
            prompt_logprobs = tuple(logprobs_at(sequence.token_ids[p], p, params.prompt_logprobs) for p in places)
        if not item.samples:
            return SequenceResult.of(None, None, prompt_logprobs)
        token = self.choose(item, prefix)
        logprobs = None if params.logprobs is None else logprobs_at(token, end, params.logprobs)
        pooled = hidden_of(sequence.token_ids) if sequence.is_pooled else b""
        return SequenceResult.of(token, logprobs, prompt_logprobs)._replace(pooled=pooled)

    def _copy_fork(self, fork: Sequence, source: Sequence, num_tokens: int) -> None:
        """Copy what a fork does not share from its source, which ran before it in the same step."""
        for position in range(num_tokens):
            page, place = divmod(position, self.limits.page_tokens)
            own, other = fork.tables[0][page], source.tables[0][page]
            self.shadow[own, place] = self.shadow[other, place]

    def choose(self, item: ScheduledSequence, prefix: bytes) -> int:
        sequence = item.sequence
        prompt = bytes(token % 256 for token in sequence.token_ids[: sequence.num_prompt_tokens]).decode("latin-1")
        if prompt in self.script:
            said = self.script[prompt]
            return said[min(sequence.num_output_tokens, len(said) - 1)]
        if not sequence.params.is_greedy:
            prefix += sequence.seed.to_bytes(8, "little") + sequence.num_tokens.to_bytes(4, "little")
        return ord("a") + int.from_bytes(blake2b(prefix, digest_size=8).digest()) % 26


def hidden_of(token_ids: list[int]) -> bytes:
    """A hidden state that is made up: how often tokens come, by their remainder; texts of the same letters have the same."""
    counts = [0.0] * HIDDEN_SIZE
    for token_id in token_ids:
        counts[token_id % HIDDEN_SIZE] += 1.0
    return struct.pack(f"<{HIDDEN_SIZE}f", *counts)


def logprobs_at(token: int, position: int, num_top: int) -> TokenLogprobs:
    """Made up, but a function of token and position."""
    top = tuple(((token + 2 - place) % VOCAB_SIZE, -0.25 * (place + 1) - position) for place in range(num_top))
    return TokenLogprobs(token, -0.75 - position, 3, top)


def make_engine(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    page_tokens: int = 4,
    num_pages: int = 96,
    enable_prefix_caching: bool = True,
    max_queue: int = 64,
    seed: int = 0,
    tokenizer: Tokenizer | str | None = "bytes",
    chat_template: object = None,
    run_ahead: int | None = None,
    can_cancel: bool = True,
    memory: MemoryReport | None = None,
    clock: Callable[[], float] | None = None,
    **others: object,
) -> Engine:
    """An engine of fakes; its `runner` is an attribute for tests to look at."""
    limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len, page_tokens)
    runner = HashRunner(limits, num_pages, can_cancel)
    scheduler = Scheduler(limits, num_pages, enable_prefix_caching, max_queue)
    chosen = shared_tokenizer() if tokenizer == "bytes" else tokenizer
    ticks = count()
    clock = clock or (lambda: float(next(ticks)))
    core = EngineCore(
        runner, scheduler, clock, usual_run_ahead if run_ahead is None else run_ahead, resources=CoreResources(memory)
    )
    engine = Engine(core, chosen, chat_template or shared_template(), seed, clock, **others)  # type: ignore[arg-type]
    engine.runner = runner  # type: ignore[attr-defined]
    return engine


def assert_at_rest(engine: Engine) -> None:
    """Nothing lives, and every page can be had again."""
    assert not engine.has_unfinished()
    engine.settle()
    scheduler = engine.scheduler
    assert scheduler.num_in_flight == 0
    scheduler.check()
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert scheduler.pool.num_available == engine.runner.num_pages  # type: ignore[attr-defined]


def run_all(engine: Engine, max_steps: int = 2000) -> dict[tuple[str, int], list[CompletionDelta]]:
    """Step until nothing is left; deltas by request and completion."""
    found: dict[tuple[str, int], list[CompletionDelta]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return found
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).append(delta)
        engine.scheduler.check()
    raise AssertionError(f"not finished after {max_steps} steps")


def tokens_of(deltas: list[CompletionDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[CompletionDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def solo(prompt: object, params: object, **options: object) -> tuple[list[int], str]:
    """Tokens and text of a request that has an engine of its own, one step after the other."""
    engine = make_engine(run_ahead=0, **options)  # type: ignore[arg-type]
    engine.add_request("solo", prompt, params)  # type: ignore[arg-type]
    deltas = run_all(engine)["solo", 0]
    return tokens_of(deltas), text_of(deltas)


def answer_of(output: RequestOutput, index: int = 0) -> tuple[list[int], str]:
    return output.outputs[index].token_ids, output.outputs[index].text


class Gate:
    """Holds the model between steps until a test releases some."""

    def __init__(self, engine) -> None:
        self.allowed = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        engine.runner.on_step = self.wait

    def wait(self, step) -> None:
        self.started.release()
        assert self.allowed.acquire(timeout=20)

    def open(self, num_steps: int = 10**4) -> None:
        self.allowed.release(num_steps)

    def close(self) -> None:
        """Hold it again, where no step runs."""
        self.allowed, self.started = threading.Semaphore(0), threading.Semaphore(0)


def own_pulse() -> Pulse:
    """One that no other process sees."""
    number = open_pulse_file()
    try:
        return Pulse(number)
    finally:
        os.close(number)
