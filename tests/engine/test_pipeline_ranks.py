"""A core over the ranks of a pipeline in lock-step threads: answers of one process, every stage with a step, nothing moves."""

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config import Limits
from holdfast.distributed.mesh import ALONE, meshes
from holdfast.engine.core import EngineCore
from holdfast.engine.messages import CoreRequest
from holdfast.engine.ngram import NgramProposer
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import StepResult
from holdfast.request.step import Step, decode_step, encode_step
from holdfast.runner.build import BuiltRunner
from holdfast.runner.runner import Runner
from models.staged_runners import LAYERS, Ranks, save_model
from runner.tiny_runners import held_storages


class FramedRunner:
    """Rank 0's runner; every other rank is told each step, and before it the results that it does not have yet."""

    def __init__(self, runner: Runner, others: list["queue.Queue[tuple[list[StepResult], bytes] | None]"]) -> None:
        self.limits: Limits = runner.limits
        self.num_pages = runner.num_pages
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.eos_token_ids
        self.most_in_flight = self._num_in_flight = 0
        self._runner = runner
        self._others = others
        self._told: list[StepResult] = []

    def launch(self, step: Step) -> None:
        for other in self._others:
            other.put((self._told, encode_step(step)))
        self._told = []
        self._runner.launch(step)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self._told.append(result)
        self._num_in_flight -= 1
        return result

    def cancel(self) -> bool:
        return False


def follow(runner: Runner, steps: "queue.Queue[tuple[list[StepResult], bytes] | None]") -> None:
    """What another rank does until there are no more steps."""
    while (told := steps.get(timeout=60)) is not None:
        for result in told[0]:
            runner.take_result(result)
        runner.run(decode_step(told[1]))


GREEDY = SamplingParams(temperature=0.0, logprobs=2)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, prompt_logprobs=1),
    SamplingParams(temperature=0.0, bad_words=("x",)),
]
Answers = dict[int, tuple[list[int], list[float], list[float]]]


def requests(num_tokens: int = 12) -> list[CoreRequest]:
    """Six, of all lengths, greedy and not; more than run at once."""
    found = []
    for number, length in enumerate((3, 40, 11, 7, 21, 5)):
        prompt = tuple((7 * number + 5 * place) % 120 + 3 for place in range(length))
        bad_words = ((11, 12),) if PARAMS[number % 5].bad_words else ()
        found.append(CoreRequest(number, prompt, PARAMS[number % 5], 17 + number, num_tokens, bad_word_ids=bad_words))
    return found


def run_core(
    built: BuiltRunner, runner: FramedRunner | Runner, num_stages: int, num_proposals: int = 0
) -> tuple[Answers, EngineCore]:
    """All requests to their ends: tokens, and log-probabilities to the bit."""
    assert built.plan.cache is not None
    scheduler = Scheduler(runner.limits, runner.num_pages, True, 64, groups=built.runner.groups, num_stages=num_stages)
    proposer = NgramProposer(num_proposals) if num_proposals else None
    core = EngineCore(runner, scheduler, run_ahead=num_stages - 1, proposer=proposer)
    answers: Answers = {}
    for request in requests():
        core.submit([request])
        answers[request.sequence_id] = ([], [], [])
    while core.has_unfinished:
        for output in core.step().outputs:
            tokens, logprobs, prompt = answers[output.sequence_id]
            tokens += output.token_ids
            logprobs += [one.logprob for one in output.logprobs]
            prompt += [one.logprob for one in output.prompt_logprobs]
        scheduler.check()
    assert scheduler.pool.num_available == runner.num_pages
    return answers, core


def run_ranks(ranks: Ranks, num_proposals: int = 0) -> tuple[Answers, int]:
    """The same over all ranks, and the most steps that were in flight."""
    mesh = ranks.meshes[0]
    queues: list[queue.Queue] = [queue.Queue() for _ in range(mesh.num_ranks - 1)]

    def work(built: BuiltRunner, mesh, exchange) -> tuple[Answers, int] | None:
        if mesh.rank:
            follow(built.runner, queues[mesh.rank - 1])
            return None
        try:
            framed = FramedRunner(built.runner, queues)
            answers, _ = run_core(built, framed, mesh.num_stages, num_proposals)
            return answers, framed.most_in_flight
        finally:
            for one in queues:
                one.put(None)

    found = ranks.run(work)[0]
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a family's model lies; made once."""
    base = tmp_path_factory.mktemp("pipelines")

    def find(family: str) -> Path:
        path = base / family
        if not path.exists():
            path.mkdir()
            save_model(family, path)
        return path

    return find


def run_alone(path: Path, num_proposals: int = 0, **options: object) -> Answers:
    alone = Ranks(path, [ALONE], **options)
    try:
        (found,) = alone.run(lambda built, mesh, exchange: run_core(built, built.runner, 1, num_proposals)[0])
        return found
    finally:
        alone.release()


def cuts_of(family: str, num_stages: int) -> list[tuple[int, int]]:
    ends = [LAYERS[family] * (stage + 1) // num_stages for stage in range(num_stages)]
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "deepseek_v3", "opt"])
def test_answers_of_stages_are_those_of_one_process(folder, family: str, num_stages: int) -> None:
    """Greedy and random, penalties, log-probabilities of prompts; six requests, of which four run at once."""
    expected = run_alone(folder(family))
    ranks = Ranks(folder(family), meshes(1, cuts_of(family, num_stages)))
    try:
        found, most_in_flight = run_ranks(ranks)
    finally:
        ranks.release()
    assert found == expected
    assert most_in_flight == num_stages


@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", pytest.param("turboquant_3bit_nc", marks=pytest.mark.slow)])
def test_two_stages_of_turboquant_share_no_scratch_and_nothing_moves(folder, kv_dtype: str) -> None:
    """What went wrong elsewhere: a scratch of one stage that the other resized. Run twice: addresses and answers stay."""
    options = {"kv_cache_dtype": kv_dtype, "page_tokens": 4}
    path = folder("llama")
    expected = run_alone(path, **options)
    ranks = Ranks(path, meshes(1, cuts_of("llama", 2)), **options)
    try:
        held = [held_storages(one.runner) for one in ranks.built]
        assert not held[0].keys() & held[1].keys(), "both stages hold the same memory"
        for _ in range(2):
            assert run_ranks(ranks)[0] == expected
            assert [held_storages(one.runner) for one in ranks.built] == held
    finally:
        ranks.release()


def test_two_pipelines_beside_one_another_do_not_meet(folder) -> None:
    """Two engines of two stages each in one process, run in turns."""
    path, mesh = folder("llama"), meshes(1, cuts_of("llama", 2))
    expected = run_alone(path)
    first, second = Ranks(path, mesh), Ranks(path, mesh)
    try:
        held = [held_storages(one.runner) for one in (*first.built, *second.built)]
        addresses = [address for own in held for address in own]
        assert len(set(addresses)) == len(addresses)
        for ranks in (first, second, first):
            assert run_ranks(ranks)[0] == expected
        assert [held_storages(one.runner) for one in (*first.built, *second.built)] == held
    finally:
        first.release()
        second.release()


def test_proposals_are_accepted_over_stages(folder) -> None:
    expected = run_alone(folder("llama"))
    ranks = Ranks(folder("llama"), meshes(1, cuts_of("llama", 2)), speculative="ngram:3")
    try:
        found, _ = run_ranks(ranks, num_proposals=3)
    finally:
        ranks.release()
    assert {number: own[0] for number, own in found.items()} == {number: own[0] for number, own in expected.items()}
