"""Far recall: facts far before a question, scored by the log-probability of the right answer among wrong ones.

The context has facts such as "The secret word of Oslo is chair." at several distances from its end, in a filler text. It is
read once. Then each question follows it in turn, on the same pages, and the next token is compared with the first tokens
of a fixed set of words. Nothing is generated, so a small model has a score too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import NamedTuple

import torch

from holdfast.cache.chunks import ring_tables
from holdfast.cache.groups import unrewindable
from holdfast.eval.quality import Contender
from holdfast.eval.tasks import RecallTask
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.request.sequence import Sequence as TokenSequence
from holdfast.runner.runner import Runner
from holdfast.text.tokenizer import Tokenizer

FACTS = 4
"""Facts at one distance."""
QUESTION_TOKENS = 32
"""Maximum tokens of a question."""
EDGE = "\n\n"


@dataclass(frozen=True, slots=True)
class Recall:
    """Scores of the facts at one distance."""

    distance: int
    """Tokens between a fact and the question, about."""
    num_facts: int
    num_words: int
    """Words that are compared, the right one among them."""
    num_right: int
    """Facts whose word is the most likely one."""
    mean_logprob: float
    """Mean log-probability of the right word among all words."""
    mean_rank: float
    """Mean rank of the right word; 1 is the most likely one."""

    @property
    def probability(self) -> float:
        """Geometric mean of the right word's probability among all words."""
        return math.exp(self.mean_logprob)


class Question(NamedTuple):
    """A question after the context."""

    distance: int
    token_ids: list[int]
    right: int
    """Place of the right word among the candidates."""


class RecallTest(NamedTuple):
    """A context with facts, its questions, and the first tokens of all words."""

    context: list[int]
    questions: list[Question]
    candidates: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the context with its longest question."""
        return len(self.context) + max(len(question.token_ids) for question in self.questions)

    @property
    def num_rows(self) -> int:
        """Tokens of the context and of all questions."""
        return len(self.context) + sum(len(question.token_ids) for question in self.questions)


def longest_test(distances: Sequence[int]) -> int:
    """Return the tokens that a test of these distances may need, before it is made; 0 without any."""
    return max(distances) + 2 * QUESTION_TOKENS if distances else 0


def make_test(
    task: RecallTask, tokenizer: Tokenizer, filler: Sequence[int], distances: Sequence[int], prefix: Sequence[int] = ()
) -> RecallTest:
    """Place FACTS facts at each distance in one context of filler tokens, repeated as needed; `prefix` begins it."""
    words = _words(task, tokenizer)
    most = min(len(task.keys), len(words)) // len(distances)
    num_facts = min(FACTS, most)
    assert num_facts >= 1, f"{len(distances)} distances, and {len(task.keys)} keys with {len(words)} words"
    # Facts of one distance stand in a row, the first one at the distance, so they lie up to a few hundred tokens nearer.
    blocks, questions, place = {}, [], 0
    for distance in sorted(set(distances), reverse=True):
        lines = []
        for _ in range(num_facts):
            key, word = task.keys[place], words[place]
            lines.append(task.fact.format(key=key, word=word[0]))
            ask = tokenizer.encode(EDGE + task.question.format(key=key), add_special_tokens=False)
            questions.append(Question(distance, ask, place))
            place += 1
        blocks[distance] = tokenizer.encode(EDGE + "\n".join(lines) + EDGE, add_special_tokens=False)
    context, between = list(prefix), cycle(filler)
    for distance, nearer in pairwise([*blocks, 0]):
        context += blocks[distance]
        context += islice(between, max(0, distance - nearer - len(blocks[distance])))
    return RecallTest(context, questions, [token_id for _, token_id in words])


def _words(task: RecallTask, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Return words with the first token of each as an answer; words that share one are left out."""
    question = EDGE + task.question.format(key=task.keys[0])
    before = tokenizer.encode(question, add_special_tokens=False)
    found: dict[int, str] = {}
    for word in task.words:
        whole = tokenizer.encode(f"{question} {word}", add_special_tokens=False)
        if whole[: len(before)] == before and len(whole) > len(before):
            found.setdefault(whole[len(before)], word)
    return [(word, token_id) for token_id, word in found.items()]


def cannot_recall(runner: Runner) -> str | None:
    """Return why several questions cannot follow one context; None if they can."""
    if runner.state_rule is not None:
        return "its layers keep a state of a sequence, which holds every token that was read"
    return unrewindable(runner.groups)


@torch.inference_mode()
def measure_recall(
    contender: Contender, test: RecallTest, on_halves: Callable[[int], None] = lambda num_halves: None
) -> tuple[Recall, ...]:
    """Read the context, then score every question after it, by distance. `on_halves` gets half tokens."""
    runner = contender.runner
    for step in _steps(runner, test.context, 0):
        runner.hidden_rows(step)
        on_halves(2 * step.num_tokens)
    scores: dict[int, list[tuple[float, int]]] = {}
    for question in test.questions:
        *_, last = (
            runner.hidden_rows(step)[-1:].clone()
            for step in _steps(runner, test.context + question.token_ids, len(test.context))
        )
        logits_C = runner.row_logits(last)[0, test.candidates].double().cpu()
        scores.setdefault(question.distance, []).append(_score(logits_C, question.right))
        on_halves(2 * len(question.token_ids))
    return tuple(_recall(distance, own, len(test.candidates)) for distance, own in sorted(scores.items()))


def _score(logits_C: torch.Tensor, right: int) -> tuple[float, int]:
    """Return log-probability and rank of the right candidate; ties count against it, and so do numbers that are not finite."""
    if not bool(logits_C.isfinite().all()):
        return float("-inf"), len(logits_C)
    rank = int((logits_C >= logits_C[right]).sum())
    return float(logits_C.log_softmax(-1)[right]), rank


def _recall(distance: int, scores: Sequence[tuple[float, int]], num_words: int) -> Recall:
    count = len(scores)
    return Recall(
        distance,
        count,
        num_words,
        sum(rank == 1 for _, rank in scores),
        sum(logprob for logprob, _ in scores) / count,
        sum(rank for _, rank in scores) / count,
    )


def _steps(runner: Runner, token_ids: Sequence[int], start: int) -> list[LiveStep]:
    """Return the steps of a sequence on the first pages, from `start` on."""
    limits, num_tokens = runner.limits, len(token_ids)
    chunk = limits.max_num_batched_tokens
    assert num_tokens <= limits.max_model_len, f"{num_tokens=} is more than {limits}"
    # Pages for a whole context: tables do not depend on the length of a question.
    tables = ring_tables(runner.groups, limits.max_model_len, chunk)
    sequence = TokenSequence(0, list(token_ids), num_tokens, SamplingParams(), seed=0, max_tokens=1, tables=tables)
    sequence.slot = 0
    starts = range(start, num_tokens, chunk)
    return [LiveStep((ScheduledSequence.of(sequence, place, min(chunk, num_tokens - place)),)) for place in starts]
