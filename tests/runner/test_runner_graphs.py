"""Steps from graphs: which one a step takes, and that padded, captured steps compute what eager ones do, to the bit.

Graphs are fakes (fake_graphs.py), and the kernels run in Triton's interpreter, so nothing here needs a GPU.
"""

import random
from itertools import count
from pathlib import Path

import pytest
import torch

from holdfast.config import Limits
from holdfast.kernels.triton_compat import triton
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.graphs import StepGraphs
from kernels.exactness import same_bits
from loading.tiny_models import VOCAB, save_tiny
from runner.drive import Drive, LoadedModel, Request, Rig, load_model
from runner.fake_graphs import pretend_to_have_a_stream, use_fake_graphs

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=300, page_tokens=4)
"""Contexts beyond 256 tokens can be split, and from 64 on they are."""
NUM_PAGES = 120
DECODE, MIXED = (1, 2, 4), (8, 16)
IDS = count()


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    loaded: dict[str, LoadedModel] = {}

    def load_family(family: str) -> LoadedModel:
        if family not in loaded:
            folder: Path = tmp_path_factory.mktemp(family)
            save_tiny(family, folder)
            loaded[family] = load_model(folder)
        return loaded[family]

    return load_family


class WatchedGraphs(StepGraphs):
    """The graphs, and which of them ran."""

    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.replayed: list[tuple[int, bool]] = []

    def replay(self, size: int, is_decode: bool) -> torch.Tensor:
        self.replayed.append((size, is_decode))
        return super().replay(size, is_decode)


def captured_rig(
    model: LoadedModel, monkeypatch, num_logit_rows: int = 4, kv_dtype: str = "float32"
) -> tuple[Rig, WatchedGraphs]:
    if triton is None:
        pytest.skip("Triton is not installed")
    use_fake_graphs(monkeypatch)
    rig = Rig(model, "triton_paged", LIMITS, NUM_PAGES, kv_dtype)
    pretend_to_have_a_stream(rig)
    graphs = WatchedGraphs(DECODE, MIXED, num_logit_rows)
    seen: list[tuple[int, int]] = []
    warmed: list[tuple[int, int]] = []
    rig.runner.warm((1, 2), graphs, lambda *counts: seen.append(counts), lambda *counts: warmed.append(counts))
    assert seen == [(done, 5) for done in range(1, 6)]
    assert warmed == [(1, 3), (2, 3)], "steps that are done before each number of rows, the largest step among them"
    rig.poison_pages(range(NUM_PAGES))  # what capturing wrote into pages must not matter
    return rig, graphs


@pytest.fixture(scope="module")
def captured(load):
    """One for the tests that have sequences of their own; its mixed graphs give the logits of two rows."""
    with pytest.MonkeyPatch.context() as patch:
        return captured_rig(load("llama"), patch, num_logit_rows=2)


def make_requests() -> list[Request]:
    """One long enough to be split, others that come later; chunks, decoding, and both in one step."""
    dice, params = random.Random(3), SamplingParams(temperature=1.0, logprobs=2)
    plans = ((66, 4, 0), (1, 4, 3), (9, 5, 3), (3, 5, 4))
    return [
        Request([dice.randrange(8, VOCAB) for _ in range(length)], max_tokens, arrival, params)
        for length, max_tokens, arrival in plans
    ]


def test_padded_steps_from_graphs_equal_eager_ones(load, monkeypatch):
    """With windows in some layers, and none in the first."""
    family = "qwen2_window"
    rig, graphs = captured_rig(load(family), monkeypatch)
    rigs = {
        "graphs": rig,
        "eager": Rig(load(family), "triton_paged", LIMITS, NUM_PAGES),
        "torch": Rig(load(family), "torch_paged", LIMITS, NUM_PAGES),
    }
    ran: dict[str, tuple[Drive, list[Request]]] = {}
    for name, one in rigs.items():
        drive, requests = Drive(one, NUM_PAGES), make_requests()
        drive.run(requests)
        ran[name] = drive, requests
    for index in range(4):
        outputs = {name: requests[index].output for name, (_, requests) in ran.items()}
        assert outputs["graphs"] == outputs["eager"] == outputs["torch"]
        logits = {name: drive.logits(requests[index]) for name, (drive, requests) in ran.items()}
        assert logits["graphs"].keys() == logits["eager"].keys() == logits["torch"].keys()
        for position, row in logits["graphs"].items():
            assert same_bits(row, logits["eager"][position])
            assert float((row - logits["torch"][position]).abs().max()) <= 1e-4
    assert {(8, False), (16, False), (2, True), (4, True)} <= set(graphs.replayed)
    assert len(graphs) == 5
    for _ in range(2):
        rig.runner.close()
        assert rig.runner.graphs is None
        assert len(graphs) == 0, "a runner that is closed lets go of them"


def make_sequence(number: int, num_tokens: int) -> Sequence:
    """Tokens and pages follow from the number; no two have the same id."""
    dice = random.Random(number)
    token_ids = [dice.randrange(8, VOCAB) for _ in range(num_tokens)]
    pages = list(range(20 * number, 20 * number + -(-num_tokens // 4) + 2))
    params = SamplingParams(temperature=0.0)
    return Sequence(next(IDS), token_ids, num_tokens, params, 0, max_tokens=9, tables=[pages])


def step(*parts: tuple[Sequence, int, int]) -> LiveStep:
    return LiveStep(tuple(ScheduledSequence.of(sequence, start, end - start) for sequence, start, end in parts))


def test_which_graph_a_step_takes(captured):
    rig, graphs = captured
    graphs.replayed.clear()
    a, b, c = make_sequence(0, 30), make_sequence(1, 12), make_sequence(2, 2)

    def taken(*parts: tuple[Sequence, int, int]) -> list[tuple[int, bool]]:
        graphs.replayed.clear()
        rig.execute(step(*parts))
        return graphs.replayed

    assert taken((a, 0, 7)) == [(8, False)], "a chunk in which no one chooses"
    assert taken((a, 7, 8)) == [(8, False)], "one row that wants no logits is not decoding"
    assert taken((a, 8, 28)) == [], "beyond the largest size a step runs without"
    assert taken((a, 28, 29), (b, 0, 12), (c, 0, 1)) == [(16, False)]
    assert taken((c, 1, 2)) == [(1, True)]
    assert taken((a, 29, 30), (b, 11, 12), (c, 1, 2)) == [(4, True)]
    assert taken((b, 10, 12), (c, 1, 2)) == [(8, False)]


def test_prompt_logprobs_run_without_a_graph(captured):
    rig, graphs = captured
    graphs.replayed.clear()
    sequence = make_sequence(5, 6)
    sequence.params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    result = rig.execute(step((sequence, 0, 6)))
    assert len(result.results[0].prompt_logprobs) == 5
    assert graphs.replayed == []


def test_runner_more_logits_than_graph_gives_runs_eager(captured):
    rig, graphs = captured
    sequences = [make_sequence(number, 2) for number in range(3)]
    expected = [rig.execute(step((sequence, 0, 2))).results[0] for sequence in sequences]
    graphs.replayed.clear()
    together = rig.execute(step(*((sequence, 0, 2) for sequence in sequences)))
    assert list(together.results) == expected
    assert graphs.replayed == []


def test_runner_graphs_ignore_padding_and_freed_pages(captured):
    """A graph of four rows runs for one: the rest of its buffers, and pages that no one has, hold NaN or what was there."""
    check_freed_pages(*captured)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, over padded rows
@pytest.mark.parametrize(
    "kv_format",
    [
        *("turboquant_k8v4", "turboquant_3bit_nc"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("turboquant_4bit_nc", "turboquant_k3v4_nc")),
    ],
)
def test_replays_over_coded_pages_ignore_freed_ones(load, monkeypatch, kv_format):
    check_freed_pages(*captured_rig(load("qwen3"), monkeypatch, 2, kv_format))


def check_freed_pages(rig: Rig, graphs: WatchedGraphs) -> None:
    """A sequence that was alone, then in company, gives the same logits with NaN in all pages that are not its own.

    Its last token comes in a chunk first, then alone. Chunks and decode take different kernels, so each checks the other.
    """
    longer, shorter = make_sequence(0, 40), make_sequence(1, 3)
    rig.execute(step((longer, 0, 16)))
    rig.execute(step((longer, 16, 32)))
    rig.execute(step((longer, 32, 40)))
    chunk = rig.logits[longer.sequence_id][39]
    graphs.replayed.clear()
    rig.execute(step((longer, 39, 40)))
    assert graphs.replayed == [(1, True)]
    first = rig.logits[longer.sequence_id][39]
    # Over quantized pages the two kernels round differently: by 6e-4 of logits up to 3.3.
    torch.testing.assert_close(first, chunk, rtol=0, atol=5e-3)
    rig.execute(step((shorter, 0, 3)))
    rig.execute(step((longer, 39, 40), (shorter, 2, 3), (make_sequence(2, 1), 0, 1)))
    rig.poison_pages(set(range(NUM_PAGES)) - set(longer.tables[0][:10]))
    graphs.replayed.clear()
    rig.execute(step((longer, 39, 40)))
    assert graphs.replayed == [(1, True)]
    assert same_bits(rig.logits[longer.sequence_id][39], first)
