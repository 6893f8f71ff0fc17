"""A core over the ranks of a pipeline in lock-step threads: answers of one process, every stage with a step, nothing moves."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.config import Limits
from holdfast.distributed.mesh import ALONE, meshes
from holdfast.engine.core import EngineCore
from holdfast.engine.messages import CoreRequest
from holdfast.engine.ngram import NgramProposer
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import StepResult
from holdfast.request.step import Step
from holdfast.runner.runner import Runner
from models.staged_runners import StagedRanks, cuts_of, find_model
from request.frames import decode_step, encode_step
from runner.rank_runs import Built, assert_pages_are_slices, pages_of, share_of
from runner.tiny_runners import held_storages


class FramedRunner:
    """Rank 0's runner; every other rank gets each step and the results before it."""

    def __init__(self, runner: Runner, others: list["queue.Queue[tuple[list[StepResult], bytes] | None]"]) -> None:
        self.limits: Limits = runner.limits
        self.num_pages = runner.num_pages
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.eos_token_ids
        self.most_in_flight = self._num_in_flight = 0
        self._runner = runner
        self._others = others
        self._unsent: list[StepResult] = []
        self.frames: list[bytes] = []
        self.results: list[StepResult] = []

    def launch(self, step: Step) -> None:
        self.frames.append(encode_step(step))
        for other in self._others:
            other.put((self._unsent, self.frames[-1]))
        self._unsent = []
        self._runner.launch(step)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self._unsent.append(result)
        self.results.append(result)
        self._num_in_flight -= 1
        return result

    def cancel(self) -> bool:
        return False


def follow(runner: Runner, steps: "queue.Queue[tuple[list[StepResult], bytes] | None]") -> None:
    """What another rank does until there are no more steps."""
    while (reported := steps.get(timeout=60)) is not None:
        for result in reported[0]:
            runner.take_result(result)
        runner.run(decode_step(reported[1]))


GREEDY = SamplingParams(temperature=0.0, logprobs=2)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, prompt_logprobs=1),
    SamplingParams(temperature=0.0, bad_words=("x",)),
]
Answers = dict[int, tuple[list[int], list[float], list[float]]]


LENGTHS = (3, 40, 11, 7, 21, 5)
BY_COMPANY = ("deepseek_v3", "v4_flash", "v4_pro")
"""Models whose sums depend on the rows of a step on a CPU."""


def requests(first_id: int, lengths: tuple[int, ...] = LENGTHS, num_tokens: int = 7) -> list[CoreRequest]:
    """Some of all lengths, greedy and not; more than run at once."""
    found = []
    for number, length in enumerate(lengths):
        prompt = tuple((7 * number + 5 * place) % 120 + 3 for place in range(length))
        params = PARAMS[number % len(PARAMS)]
        bad_words = ((11, 12),) if params.bad_words else ()
        request = CoreRequest(first_id + number, prompt, params, 17 + number, num_tokens, bad_word_ids=bad_words)
        # As admission does it: log-probabilities of a prompt need every position.
        found.append(request._replace(use_prefix_cache=params.prompt_logprobs is None))
    return found


def make_core(runner: FramedRunner | Runner, built: Built, num_stages: int, num_pages: int | None = None) -> EngineCore:
    """`num_pages`: fewer than the runner has."""
    groups, num_proposals = built.runner.groups, built.build.plan.resolved.num_proposals
    scheduler = Scheduler(runner.limits, num_pages or runner.num_pages, True, 64, groups=groups, num_stages=num_stages)
    proposer = NgramProposer(num_proposals) if num_proposals else None
    return EngineCore(runner, scheduler, run_ahead=num_stages - 1, proposer=proposer)


def run_core(core: EngineCore, lengths: tuple[int, ...] = LENGTHS, num_tokens: int = 7) -> Answers:
    """All requests to their ends: tokens, and log-probabilities to the bit."""
    answers: Answers = {}
    first_id = core.stats().num_submitted
    for request in requests(first_id, lengths, num_tokens):
        core.submit([request])
        answers[request.sequence_id - first_id] = ([], [], [])
    while core.has_unfinished:
        for output in core.step().outputs:
            tokens, logprobs, prompt = answers[output.sequence_id - first_id]
            tokens += output.token_ids
            logprobs += [one.logprob for one in output.logprobs]
            prompt += [one.logprob for one in output.prompt_logprobs]
        core.scheduler.check()
    assert core.scheduler.kv_usage == 0.0
    return answers


class Pipeline:
    """A core over all ranks of a model."""

    def __init__(
        self,
        path: Path,
        cuts: list[tuple[int, int]],
        tensor_size: int = 1,
        *,
        exact: bool = True,
        whole_experts: bool = False,
        **options: Any,
    ) -> None:
        if tensor_size > 1:
            options |= {"tensor_parallel_size": tensor_size}
        is_exact = exact and tensor_size > 1
        ranks = meshes(tensor_size, cuts, is_exact=is_exact, has_expert_parallelism=whole_experts)
        self.ranks = StagedRanks(path, ranks, **options)
        self._queues: list[queue.Queue] = [queue.Queue() for _ in self.ranks.meshes[1:]]
        built = self.ranks.built[0]
        self.framed = FramedRunner(built.runner, self._queues)
        self.core = make_core(self.framed, built, len(cuts))

    def run(self, drive: Callable[[EngineCore], Any] = run_core) -> Any:
        """What `drive` makes of the core; all requests to their ends."""
        return self.ranks.run(lambda built: self._work(built, drive))[0]

    def _work(self, built: Built, drive: Callable[[EngineCore], Any]) -> Any:
        if built.mesh.rank:
            follow(built.runner, self._queues[built.mesh.rank - 1])
            return None
        try:
            return drive(self.core)
        finally:
            for one in self._queues:
                one.put(None)

    def memory(self) -> list[dict[int, int]]:
        """What each rank's runner holds, rooms of the exchange left out: threads reach all of them."""
        rooms = held_storages(self.ranks.steps)
        return [
            {address: size for address, size in held_storages(one.runner).items() if address not in rooms}
            for one in self.ranks.built
        ]


@contextmanager
def pipeline(*arguments: Any, **options: Any) -> Iterator[Pipeline]:
    made = Pipeline(*arguments, **options)
    try:
        yield made
    finally:
        made.ranks.release()


def run_alone(path: Path, num_tokens: int = 7, **options: Any) -> Answers:
    alone = StagedRanks(path, [ALONE], **options)
    try:
        (found,) = alone.run(lambda built: run_core(make_core(built.runner, built, 1), num_tokens=num_tokens))
        return found
    finally:
        alone.release()


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3", "opt", "v4_flash", "v4_pro"]
)
def test_answers_of_stages_are_those_of_one_process(tmp_path: Path, family: str, num_stages: int) -> None:
    """Greedy and random, penalties, log-probabilities of prompts; six requests, of which four run at once."""
    path, num_tokens = find_model(tmp_path, family), 3 if family in V4_LOADS else 7
    expected = run_alone(path, num_tokens)
    with pipeline(path, cuts_of(family, num_stages)) as found:
        answers = found.run(partial(run_core, num_tokens=num_tokens))
        assert found.framed.most_in_flight == num_stages
    if family in BY_COMPANY:
        # Torch multiplies latents by other sums in steps of other rows, and steps of a pipeline have fewer of them.
        for number, (tokens, *numbers) in expected.items():
            assert answers[number][0] == tokens
            assert answers[number][1:] == tuple(pytest.approx(own, abs=1e-5) for own in numbers)
    else:
        assert answers == expected


@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", pytest.param("turboquant_3bit_nc", marks=pytest.mark.slow)])
def test_pipeline_turboquant_stages_share_no_scratch(tmp_path: Path, kv_dtype: str) -> None:
    """What went wrong elsewhere: a scratch of one stage that the other resized. Run twice: addresses and answers stay."""
    path, options = find_model(tmp_path, "llama"), {"kv_cache_dtype": kv_dtype, "enable_prefix_caching": False}
    expected = run_alone(path, **options)
    with pipeline(path, cuts_of("llama", 2), **options) as found:
        held = found.memory()
        assert not held[0].keys() & held[1].keys(), "both stages hold the same memory"
        for _ in range(2):
            assert found.run() == expected
            assert found.memory() == held


def test_pipelines_in_one_process_share_no_memory(tmp_path: Path) -> None:
    """Two engines of two stages each, whose steps go on at the same time."""
    path, cuts = find_model(tmp_path, "llama"), cuts_of("llama", 2)
    expected = run_alone(path)
    with pipeline(path, cuts) as first, pipeline(path, cuts) as second, ThreadPoolExecutor(2) as pool:
        held = [*first.memory(), *second.memory()]
        addresses = [address for own in held for address in own]
        assert len(set(addresses)) == len(addresses), "some memory is held by two"
        assert list(pool.map(Pipeline.run, (first, second))) == [expected, expected]
        assert second.run() == expected
        assert [*first.memory(), *second.memory()] == held


def test_proposals_are_accepted_over_stages(tmp_path: Path) -> None:
    expected = run_alone(find_model(tmp_path, "llama"))
    with pipeline(find_model(tmp_path, "llama"), cuts_of("llama", 2), speculative="ngram:3") as found:
        answers = found.run()
    assert {number: own[0] for number, own in answers.items()} == {number: own[0] for number, own in expected.items()}


def test_pipeline_of_two_stages_by_two_ranks_equals_one_process(tmp_path: Path) -> None:
    """Whose shares of the logits rank 0 gathers from the last stage."""
    path = find_model(tmp_path, "llama_tied")
    expected = run_alone(path)
    with pipeline(path, cuts_of("llama_tied", 2), 2) as found:
        assert found.run() == expected


def replayed(
    path: Path, frames: list[bytes], compare: Callable[[Built], None] = lambda built: None, **options: Any
) -> list[StepResult]:
    """What one process makes of the same steps, one after the other; `compare` what it then holds."""
    alone = StagedRanks(path, [ALONE], **options)

    def run(built: Built) -> list[StepResult]:
        results = []
        for frame in frames:
            built.runner.launch(decode_step(frame))
            results.append(built.runner.collect())
        return results

    try:
        (found,) = alone.run(run)
        compare(alone.built[0])
        return found
    finally:
        alone.release()


class Load(NamedTuple):
    """So many tokens that sequences are preempted."""

    num_pages: int
    num_prompt: int = 93
    num_tokens: int = 60


def run_with_hits(found: Pipeline, load: Load) -> None:
    """Chunks, hits of prefixes that end inside pages, preemption: prompts that share their beginnings, and too few pages."""
    found.core = make_core(found.framed, found.ranks.built[0], found.ranks.meshes[0].num_stages, load.num_pages)
    for _ in range(2):
        found.run(partial(run_core, lengths=(load.num_prompt,)))
    found.run(partial(run_core, lengths=(3, 1, 6, 5), num_tokens=load.num_tokens))
    scheduler = found.core.scheduler
    assert scheduler.num_prefix_hit_tokens > 0
    assert scheduler.num_preemptions > 0
    frames = map(decode_step, found.framed.frames)
    assert any(one.copies for step in frames for one in step.admitted), "no rows were copied"


V4_OPTIONS: dict[str, Any] = {"page_tokens": 2, "max_num_batched_tokens": 16}
V4_LOADS = {"v4_flash": Load(40), "v4_pro": Load(26)}


@pytest.mark.parametrize(
    ("family", "num_ranks", "whole_experts", "sums", "load"),
    [
        pytest.param("v4_pro", 2, True, "exact", Load(13, num_prompt=37, num_tokens=12), id="short"),
        *(
            pytest.param(family, *case, V4_LOADS[family], marks=pytest.mark.slow)
            for family, *case in product(V4_LOADS, (2, 4), (False, True), ("exact", "reduce"))
        ),
    ],
)
def test_ranks_of_v4_have_results_and_pages_of_one_process(
    tmp_path: Path, family: str, num_ranks: int, whole_experts: bool, sums: str, load: Load
) -> None:
    """Step by step: exact ones to the bit, and every page and state after the last step."""
    path, exact = find_model(tmp_path, family), sums == "exact"
    options: dict[str, Any] = V4_OPTIONS | {"max_model_len": load.num_prompt + 17}
    ways = {"exact": exact, "whole_experts": whole_experts}
    with pipeline(path, cuts_of(family, 1), num_ranks, **ways, **options) as found:
        run_with_hits(found, load)
        results, frames, ranks = found.framed.results, found.framed.frames, found.ranks.built
        if exact:
            expected = replayed(path, frames, lambda alone: assert_pages_are_slices(alone, ranks), **options)
            assert results == expected
            return
        expected = replayed(path, frames, lambda alone: assert_pages_are_near(alone, ranks), **options)
        for step, right in zip(results, expected, strict=True):
            assert [own.token_ids for own in step.results] == [own.token_ids for own in right.results]
            assert logprobs_of(step) == pytest.approx(logprobs_of(right), abs=1e-4)


def logprobs_of(step: StepResult) -> list[float]:
    return [one.logprob for own in step.results for one in (*own.logprobs, *own.prompt_logprobs)]


def assert_pages_are_near(alone: Built, ranks: list[Built]) -> None:
    for built in ranks:
        for whole, own in zip(pages_of(alone), pages_of(built), strict=True):
            torch.testing.assert_close(own, share_of(whole, own, built.mesh), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "num_stages", "num_ranks"),
    [
        pytest.param("v4_flash", 2, 1, marks=pytest.mark.slow),
        pytest.param("v4_pro", 2, 2, marks=pytest.mark.slow),
        pytest.param("v4_flash", 3, 1, marks=pytest.mark.slow),
        pytest.param("v4_flash", 2, 2, marks=pytest.mark.slow),
        pytest.param("v4_pro", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_stages_of_v4_give_results_of_one_process(tmp_path: Path, family: str, num_stages: int, num_ranks: int) -> None:
    """Step by step to the bit: chunks, hits of prefixes, preemption, a step in every stage."""
    path = find_model(tmp_path, family)
    options: dict[str, Any] = V4_OPTIONS | {"max_model_len": 110}
    with pipeline(path, cuts_of(family, num_stages), num_ranks, **options) as found:
        run_with_hits(found, V4_LOADS[family])
        assert found.framed.results == replayed(path, found.framed.frames, **options)
        assert found.framed.most_in_flight == num_stages
