"""Random schedules of requests over an engine of a tiny model, and what must be the same however steps are run.

A schedule says which request comes before which turn, and when it is aborted. A turn is one call of `step`. Requests are
submitted in the order of the schedule by everybody, so that seeds which are drawn from an engine's own are the same.

    whole     what the plain engine answers where nothing is aborted
    others    a completion that ended by itself is the same to the bit: tokens, text, log-probabilities, reasons;
              one that was aborted is a beginning of it, and no shorter than what had been delivered when it was aborted
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams

EOS = 2
MAX_TURNS = 3000
HELD_CHARS = 8
"""Most characters of an aborted text that were held back: half a stop string, half a character."""


@dataclass(frozen=True)
class Planned:
    """One request of a schedule."""

    name: str
    turn: int
    """Before which it comes."""
    prompt: list[int]
    params: SamplingParams
    abort_after_tokens: int | None = None
    """Aborted when so many tokens of all its completions were delivered ..."""
    abort_after_turns: int | None = None
    """... or so many turns after it came, whatever it is doing then."""


@dataclass
class Answer:
    """All that was delivered of one completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, delta: CompletionDelta) -> None:
        assert self.finish_reason is None, f"{delta} came after the end"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, f"prompt log-probabilities came twice: {delta}"
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


Answers = dict[tuple[str, int], Answer]


def make_schedule(number: int, vocab_size: int, longest: int) -> list[Planned]:
    """The schedule of this number: 3 to 12 requests for an engine with contexts of up to `longest` tokens."""
    chance = random.Random(number)
    shared = [_tokens(chance, vocab_size, chance.randint(6, 30)) for _ in range(2)]
    requested, turn = [], 0
    for place in range(chance.randint(3, 12)):
        turn += chance.choice((0, 0, 0, 1, 2, 5))
        params = make_params(chance, vocab_size)
        prompt = _prompt(chance, shared, vocab_size)[: longest - 8]
        aborts: dict[str, int] = {}
        if chance.random() < 0.15:
            aborts["abort_after_tokens"] = chance.randint(1, 12)
        elif chance.random() < 0.15:
            aborts["abort_after_turns"] = chance.randint(0, 15)
        requested.append(Planned(f"{number}.{place}", turn, prompt, params, **aborts))
    return requested


def _tokens(chance: random.Random, vocab_size: int, length: int) -> list[int]:
    return [chance.randrange(3, vocab_size) for _ in range(length)]


def _prompt(chance: random.Random, shared: list[list[int]], vocab_size: int) -> list[int]:
    kind = chance.random()
    if kind < 0.4:
        return chance.choice(shared) + _tokens(chance, vocab_size, chance.randint(0, 8))
    if kind < 0.7:
        return (_tokens(chance, vocab_size, chance.randint(1, 6)) * 12)[: chance.randint(2, 40)]
    return _tokens(chance, vocab_size, chance.randint(1, 40))


def make_params(chance: random.Random, vocab_size: int) -> SamplingParams:
    """Greedy or not, with anything else in any company."""
    options: dict[str, Any] = {"max_tokens": chance.randint(1, 26), "temperature": 0.0, "n": 1}
    if chance.random() < 0.45:
        options |= {"temperature": chance.choice((0.3, 0.8, 1.5)), "n": chance.choice((1, 1, 2, 3))}
        options |= chance.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9}))
        if chance.random() < 0.5:
            options["seed"] = chance.randrange(2**64)
    if chance.random() < 0.2:  # rows that wait for the last token
        options |= chance.choice(
            (
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.7},
                {"frequency_penalty": 0.5, "presence_penalty": -0.2},
            )
        )
    if chance.random() < 0.12:
        options["bad_words"] = [bytes(chance.randint(97, 122) for _ in range(chance.randint(1, 2))).decode()]
    if chance.random() < 0.25:
        options["logprobs"] = chance.randint(0, 4)
    if chance.random() < 0.12:
        options["prompt_logprobs"] = chance.randint(0, 3)
    if chance.random() < 0.3:
        options["stop"] = [chance.choice("abcdefghijklmnopqrstuvwxyz0123456789 ") for _ in range(6)]
        options["include_stop_str_in_output"] = chance.random() < 0.5
    if chance.random() < 0.2:
        options["stop_token_ids"] = _tokens(chance, vocab_size, 8)
    if chance.random() < 0.25:
        options["min_tokens"] = chance.randint(0, options["max_tokens"])
    if chance.random() < 0.25:
        options["logit_bias"] = {EOS: chance.choice((2.0, 4.0, 100.0))}
    if chance.random() < 0.1:
        options["ignore_eos"] = True
    if chance.random() < 0.12:  # few tokens, which repeat
        options["allowed_token_ids"] = [EOS, *_tokens(chance, vocab_size, chance.randint(2, 5))]
    return SamplingParams(**options)


def run_schedule(engine: Any, requested: list[Planned], aborts: bool = True) -> Answers:
    """All requests to their ends; `engine` has add_request, step, abort and has_unfinished."""
    answers: Answers = {}
    to_come, alive, turn = list(requested), {}, 0
    while to_come or engine.has_unfinished():
        if not engine.has_unfinished():
            turn = max(turn, to_come[0].turn)
        while to_come and to_come[0].turn <= turn:
            one = to_come.pop(0)
            engine.add_request(one.name, {"prompt_token_ids": one.prompt}, one.params)
            alive[one.name] = one, turn
            answers |= {(one.name, index): Answer() for index in range(one.params.n)}
        for delta in engine.step():
            answers[delta.request_id, delta.index].add(delta)
        turn += 1
        for one, since in list(alive.values()) if aborts else ():
            own = [answers[one.name, index] for index in range(one.params.n)]
            delivered = sum(len(answer.token_ids) for answer in own)
            if all(answer.finish_reason for answer in own):
                del alive[one.name]
            elif delivered >= (one.abort_after_tokens or MAX_TURNS) or turn - since > (
                MAX_TURNS if one.abort_after_turns is None else one.abort_after_turns
            ):
                for delta in engine.abort(one.name):
                    answers[delta.request_id, delta.index].add(delta)
                assert all(answer.finish_reason for answer in own), f"{one} goes on after its abort"
                del alive[one.name]
        assert turn < MAX_TURNS, f"no end after {turn} turns; {len(alive)} requests live"
    return answers


def compare(requested: list[Planned], whole: Answers, found: Answers) -> Counter[str]:
    """What was seen, by kind; AssertionError at the first difference."""
    assert found.keys() == whole.keys(), "other completions were answered"
    seen: Counter[str] = Counter()
    for one in requested:
        own = [found[one.name, index] for index in range(one.params.n)]
        for index, answer in enumerate(own):
            expected = whole[one.name, index]
            assert answer.finish_reason is not None, f"{one.name}.{index} has no end"
            seen[answer.finish_reason] += 1
            seen["tokens"] += len(answer.token_ids)
            if answer.finish_reason != "abort":
                assert answer == expected, f"{one}, completion {index}: {answer} in place of {expected}"
                seen["stop string"] += isinstance(answer.stop_reason, str)
                continue
            count = len(answer.token_ids)
            assert answer.token_ids == expected.token_ids[:count], f"{one}, completion {index}: {answer}, {expected}"
            assert answer.logprobs == expected.logprobs[: len(answer.logprobs)], f"{one}, completion {index}: {answer}"
            assert len(answer.logprobs) == (count if one.params.logprobs is not None else 0), f"{one}: {answer}"
            assert expected.text.startswith(answer.text[: max(len(answer.text) - HELD_CHARS, 0)]), f"{one}: {answer}"
            assert answer.prompt_logprobs in (None, expected.prompt_logprobs), f"{one}, completion {index}: {answer}"
        if one.abort_after_tokens is not None and any(answer.finish_reason == "abort" for answer in own):
            assert sum(len(answer.token_ids) for answer in own) >= one.abort_after_tokens, f"{one} was aborted early"
        seen["requests"] += 1
        seen["n > 1"] += one.params.n > 1
        seen["rows that wait"] += one.params.has_penalties or bool(one.params.bad_words)
    return seen
