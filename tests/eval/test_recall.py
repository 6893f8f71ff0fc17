"""Far recall: where facts lie, how an answer is scored, and runners that remember everything or nothing."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.eval.quality import Contender
from holdfast.cache.states import StateRule
from holdfast.eval.recall import FACTS, RecallTest, _score, cannot_recall, longest_test, make_test, measure_recall
from holdfast.eval.tasks import read_tasks

TASK = read_tasks().recall


class Words:
    """A tokenizer with a token for every word; spaces and line ends separate them."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in text.replace(".", " .").split()]


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def test(words: Words) -> RecallTest:
    filler = words.encode("so much for that matter then again perhaps not")
    return make_test(TASK, words, filler, (128, 512), prefix=[words.encode("<s>")[0]])  # type: ignore[arg-type]


class Remembering:
    """Logits are 9 for the word that stood after the question's key in the context, else 0; or `other` for all."""

    def __init__(self, test: RecallTest, words: Words, logit: float = 9.0) -> None:
        self.device, self.vocab_size = torch.device("cpu"), 5000
        self.limits, self.groups = Limits(1, 100, 2000, 16), (CacheGroup("whole context", 16),)
        self._words, self._logit = words, logit
        self.num_rows = 0

    def hidden_rows(self, step) -> torch.Tensor:
        (item,) = step.scheduled
        self.num_rows += item.num_new_tokens
        self._token_ids = list(item.sequence.token_ids)
        return torch.zeros(item.num_new_tokens, 1)

    def row_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        key = self._token_ids[-2]  # "The secret word of Oslo is"
        place = next(at for at, token in enumerate(self._token_ids) if token == key)
        logits_RV = torch.zeros(1, self.vocab_size)
        logits_RV[0, self._token_ids[place + 2]] = self._logit
        return logits_RV


def contender(runner: Remembering) -> Contender:
    return Contender("x", runner, Fraction(1))  # type: ignore[arg-type]


def test_make_test_facts_lie_at_their_distance(test: RecallTest, words: Words) -> None:
    assert [question.distance for question in test.questions] == [512] * FACTS + [128] * FACTS
    of, is_ = words.ids["of"], words.ids["is"]
    found = []
    for question in test.questions:
        key = question.token_ids[-2]
        place = next(at for at, token in enumerate(test.context) if token == key and test.context[at - 1] == of)
        assert test.context[place + 1] == is_
        assert test.context[place + 2] == test.candidates[question.right], "the fact names the right word"
        found.append(len(test.context) - place)
    assert found[0] == 512 - 4
    assert found[FACTS] == 128 - 4
    assert found == sorted(found, reverse=True)
    assert len(set(test.candidates)) == len(test.candidates)
    assert test.num_tokens <= longest_test((128, 512))


def test_measure_recall_of_perfect_memory_is_all_right(test: RecallTest, words: Words) -> None:
    runner = Remembering(test, words)
    near, far = measure_recall(contender(runner), test)
    assert (near.distance, far.distance) == (128, 512)
    count = len(test.candidates)
    for recall in (near, far):
        assert (recall.num_facts, recall.num_right, recall.mean_rank, recall.num_words) == (FACTS, FACTS, 1, count)
        assert recall.probability == pytest.approx(math.exp(9) / (math.exp(9) + count - 1))
    assert runner.num_rows == test.num_rows, "the context is read once"


def test_measure_recall_of_no_memory_is_chance(test: RecallTest, words: Words) -> None:
    for recall in measure_recall(contender(Remembering(test, words, 0.0)), test):
        assert recall.num_right == 0, "ties count against the right word"
        assert recall.probability == pytest.approx(1 / len(test.candidates))


def test_score_counts_words_at_least_as_likely() -> None:
    logits_C = torch.tensor([0.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    assert _score(logits_C, 1)[1] == 2
    logprob, rank = _score(logits_C, 2)
    assert rank == 3
    assert logprob == pytest.approx(1 - math.log(1 + 2 * math.e**2 + math.e))
    assert _score(torch.tensor([0.0, math.nan]), 0) == (-math.inf, 2)


def test_cannot_recall_names_a_group_with_a_state():
    """A question cannot be taken back out of a state, so the next one would follow it too."""

    def reason(*groups: tuple[str, bool]) -> str | None:
        own: Any = [SimpleNamespace(name=name, is_state=is_state, has_state=is_state) for name, is_state in groups]
        runner: Any = SimpleNamespace(groups=own, state_rule=rule)
        return cannot_recall(runner)

    rule: StateRule | None = None

    assert reason(("pages", False)) is None
    assert "kept state" in str(reason(("pages", False), ("kept state", True)))
    rule = StateRule()
    assert "a state of a sequence" in str(reason(("pages", False)))
