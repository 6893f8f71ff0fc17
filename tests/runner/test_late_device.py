"""Steps on a device that is as late as can be: every kind of step gives what a prompt device gives, to the bit."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from holdfast.kernels.triton_compat import triton
from holdfast.memory.ledger import Ledger
from holdfast.planning import terms
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.request.step import Step
from holdfast.runner.graphs import StepGraphs
from holdfast.runner.pooled_rows import PooledRows
from holdfast.runner.sampling.batch import Choice
from holdfast.runner.sampling.device_sampler import MAX_UNDER_WAY, DeviceChoosing, DeviceSampler
from holdfast.runner.sampling.logit_edits import EditStaging
from holdfast.runner.sampling.sampler import HostSampler
from holdfast.runner.slots import Slots
from holdfast.runner.step_inputs import PageTable
from loading.tiny_models import VOCAB
from runner.deferred_device import GPU, DeferredDevice, LateStream
from runner.drive import LoadedModel, Rig, load_model
from runner.fake_graphs import pretend_to_have_a_stream, use_fake_graphs
from runner.gpu_traffic import write_model as write_traffic_model
from runner.rank_runs import write_model
from runner.sampling_rows import EOS, FakeForms
from runner.stepping import Ran, Stepper, Wish, drive, make_wishes, with_guesses
from runner.test_launch import GREEDY, LIMITS, NUM_PAGES, PatientCollect, assert_same, make_rig, prompt_step

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FORMS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 8, "logprobs": 2},
    {"temperature": 1.2, "repetition_penalty": 1.3},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    """Dummy weights: nothing here needs transformers, whose import takes seconds."""
    folder = write_model(
        tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB, hidden_size=64, head_dim=16, **HEADS
    )
    return load_model(folder, load_format="dummy")


@pytest.fixture
def small_buffers(monkeypatch) -> None:
    """One edited row in a block, a list that a few edits fill, and two pooled rows in a buffer."""
    monkeypatch.setattr(terms, "EDITED_ELEMENTS", VOCAB)
    monkeypatch.setattr(terms, "LISTED_EDITS", 1)
    monkeypatch.setattr(terms, "POOLED_ROWS", 2)


def make_mixed(seed: int, count: int, forms: float) -> list[Wish]:
    """Requests of every kind: a share of them follow a form, some are pooled."""
    dice, wishes = Random(seed), make_wishes(seed, count, VOCAB)
    for wish in wishes:
        if dice.random() < forms:
            wish.params = SamplingParams(**dice.choice(FORMS), structured_outputs={"json_object": True})
        wish.is_pooled = dice.random() < 0.4
    return wishes


def follow_forms(rig: Rig) -> None:
    rig.runner.sampler.follow(FakeForms(VOCAB, eos_token_id=2))


def expect(model: LoadedModel, wishes: list[Wish], seed: int) -> Ran:
    """One step at a time on the host."""
    rig = make_rig(model, like_gpu=False)
    follow_forms(rig)
    return drive(rig.runner, Stepper(LIMITS, rig.groups, NUM_PAGES, wishes, seed), 0)


def run_late(
    monkeypatch: pytest.MonkeyPatch,
    model: LoadedModel,
    wishes: list[Wish],
    seed: int,
    prepare: Callable[[Rig, DeferredDevice], None] = lambda rig, device: None,
    backend: str = "native_paged",
) -> tuple[Ran, DeferredDevice]:
    """All requests, one step ahead. The device poisons its workspace before each step, the host every free page at once."""
    device = DeferredDevice(is_deferred=True)
    with monkeypatch.context() as patch:
        device.take_over(patch)
        rig = make_rig(model, like_gpu=True, backend=backend)
        device.take_runner(rig)
        follow_forms(rig)
        prepare(rig, device)
        device.begin()
        stepper = Stepper(LIMITS, rig.groups, NUM_PAGES, wishes, seed)

        def poison() -> None:
            device.put(rig.poison)
            rig.poison_pages(stepper.free_pages)

        return drive(rig.runner, stepper, 1, poison), device


SEEDS = [
    *((0, 0.2), (1, 0.9)),
    *(pytest.param(seed, (0.2, 0.9)[seed % 2], marks=pytest.mark.slow) for seed in range(2, 30)),
]


@pytest.mark.parametrize(("seed", "forms"), SEEDS)
@pytest.mark.usefixtures("small_buffers")
def test_late_device_any_schedule_gives_the_same_to_the_bit(monkeypatch, model, seed, forms):
    wishes = make_mixed(seed, 16, forms)
    expected = expect(model, wishes, seed)
    guessing = with_guesses(wishes, [person.output for person in expected.people], VOCAB, seed)
    ran, device = run_late(monkeypatch, model, guessing, seed)
    assert_same(ran, expected)
    assert sum(len(person.pooled) for person in ran.people) >= 2
    assert device.most_queued > 20
    assert device.num_waits > len(ran.steps)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(DeviceChoosing, "read"), (DeviceChoosing, "choose_late"), (EditStaging, "apply"), (Slots, "book")],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_late_device_interrupted_collects_give_the_same(monkeypatch, model, owner, name):
    """Late rows whose copies are under way when Ctrl-C comes are chosen anew."""
    params = SamplingParams(temperature=0.9, repetition_penalty=1.5, logprobs=1)
    wishes = [Wish([20 + number, 9], params, 8, seed=number) for number in range(4)]
    patients = []

    def interrupt(rig: Rig, device: DeferredDevice) -> None:
        patients.append(PatientCollect(rig.runner, Random(1)))
        patients[0].interrupt(monkeypatch, owner, name)

    expected = expect(model, wishes, 5)
    ran, _ = run_late(monkeypatch, model, wishes, 5, interrupt)
    assert_same(ran, expected)
    assert patients[0].num_interrupts > 5


@pytest.mark.parametrize("is_first", [False, True], ids=["the caller's stream first", "the runner's stream first"])
def test_late_streams_hand_hidden_rows_over_in_order(monkeypatch, model, is_first):
    """Weights that the caller's stream changes before a call are read, and those after it are not; so are hidden states."""
    weight_VH = model.weights["embed.weight"]
    assert isinstance(weight_VH, torch.Tensor)
    weight_VH = weight_VH.clone()
    mine = LoadedModel(model.spec, {**model.weights, "embed.weight": weight_VH})
    device, found = DeferredDevice(is_deferred=True), []
    with monkeypatch.context() as patch:
        device.take_over(patch)
        rig = make_rig(mine, like_gpu=True)
        device.take_runner(rig)
        runner: Any = rig.runner
        runner.stream = LateStream(device)
        sequence = runner.dummy_sequence(5, 0)
        step = LiveStep((ScheduledSequence.of(sequence, 0, 5),))
        outside = device.current

        def read_twice() -> list[torch.Tensor]:
            seen: list[torch.Tensor] = []
            for factor in (2.0, -0.5):
                device.put(lambda factor=factor: weight_VH.mul_(factor))
                # Powers of two: whichever stream is first, products are the same to the bit.
                runner.stream.put(lambda: weight_VH.mul_(4.0))
                hidden_TH = runner.hidden_rows(step)
                device.put(lambda hidden_TH=hidden_TH: seen.append(hidden_TH.clone()))
                logits_RV = runner.row_logits(hidden_TH[-1:])
                device.put(lambda logits_RV=logits_RV: seen.append(logits_RV.clone()))
            for stream in (runner.stream, outside) if is_first else (outside, runner.stream):
                stream.synchronize()
            return seen

        before = weight_VH.clone()
        found.append(read_twice())
        weight_VH.copy_(before)
        device.begin()
        found.append(read_twice())
    assert len(found[0]) == len(found[1]) == 4
    assert all(torch.equal(prompt, late) for prompt, late in zip(*found, strict=True))


def test_late_stage_begins_a_step_when_all_but_the_last_ended(monkeypatch, model):
    """The host is one step ahead of a stage's device: neither more nor less."""
    device, done = DeferredDevice(is_deferred=True), []
    with monkeypatch.context() as patch:
        device.take_over(patch)
        rig = make_rig(model, like_gpu=True)
        device.begin()
        runner: Any = rig.runner
        runner.stream = device.current
        runner.num_stages = 2
        ended = []
        patch.setattr(runner, "begin", lambda flight: (ended.append(len(done)), device.put(lambda: done.append(0))))
        for number in range(6):
            runner.launch(Step(number + 1))
    assert ended == [0, 0, 1, 2, 3, 4]


def test_late_device_ends_its_work_before_a_runner_closes(monkeypatch, model):
    device = DeferredDevice(is_deferred=True)
    with monkeypatch.context() as patch:
        device.take_over(patch)
        rig = make_rig(model, like_gpu=True)
        device.take_runner(rig)
        runner: Any = rig.runner
        runner.stream = device.current
        device.begin()
        runner.launch(prompt_step(1, 0, 5))
        assert device.current.num_done < device.current.num_put
        runner.close()
        assert device.current.num_done == device.current.num_put


def test_late_device_launch_waits_for_no_step(monkeypatch, model):
    """Plain rows: a launch ends before the step before it has run, so that the host prepares while the device works."""
    wishes = [
        Wish([20 + number, 9], SamplingParams(temperature=0.9, logprobs=1), 9, seed=number) for number in range(4)
    ]
    ran_at: list[int] = []

    def watch(rig: Rig, device: DeferredDevice) -> None:
        runner: Any = rig.runner
        launch, step_logits = runner.launch, rig.decoder.step_logits
        num_run = [0]

        def count(*given: Any) -> torch.Tensor:
            num_run[0] += 1
            return step_logits(*given)

        def launch_watched(step: Step) -> None:
            before = num_run[0]
            launch(step)
            ran_at.append(num_run[0] - before)

        monkeypatch.setattr(rig.decoder, "step_logits", count)
        runner.launch = launch_watched

    run_late(monkeypatch, model, wishes, 3, watch)
    assert len(ran_at) > 8
    assert set(ran_at) == {0}


@pytest.mark.parametrize("num_sequences", [1, 3, 4, 8], ids=lambda count: f"{count} at once")
def test_late_page_table_rows_that_are_taken_over_come_whole(monkeypatch, num_sequences):
    """Single copies and lists: the entries of the next sequences are written when those before were sent."""
    limits = replace(LIMITS, max_num_seqs=num_sequences)
    device, sent = DeferredDevice(is_deferred=True), []
    with monkeypatch.context() as patch:
        device.take_over(patch)
        table = PageTable(limits, torch.device("cpu"), Ledger())
        device.begin()
        for number in range(4):
            sequences = [
                Sequence(number * num_sequences + own, [0], 1, GREEDY, 0, 1, tables=[[10 * number + own, own, number]])
                for own in range(num_sequences)
            ]
            rows = table.rows(sequences)
            device.put(lambda rows=rows: sent.append(table.tables[0][rows, :3].tolist()))
        assert device.most_queued > 2
        device.run_until()
    expected = [[[10 * number + own, own, number] for own in range(num_sequences)] for number in range(4)]
    assert sent == expected


@pytest.mark.parametrize("listed_edits", [1, 700])
def test_late_sampler_with_more_edits_than_the_list_holds(monkeypatch, listed_edits):
    """Two steps under way, each of which fills its list several times."""
    monkeypatch.setattr(terms, "LISTED_EDITS", listed_edits)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 2.0}, min_tokens=3000)
    sequences = [Sequence(row, list(range(1000)) * 2, 1000, params, row, 9) for row in range(3)]
    steps = [torch.randn(3, 1000, generator=torch.Generator().manual_seed(seed)) * 3 for seed in range(3)]
    choices, host = [Choice.of(own) for own in sequences], HostSampler(1000, 3)
    expected = [host.launch(logits_SV, choices, EOS).read() for logits_SV in steps]
    device, found, underway = DeferredDevice(is_deferred=True), [], []
    with monkeypatch.context() as patch:
        device.take_over(patch)
        with device.pinning():
            sampler = DeviceSampler(1000, torch.device("cpu"), 3, Ledger())
        device.begin()
        for logits_SV in steps:
            underway.append(sampler.launch(logits_SV, choices, EOS))
            if len(underway) == MAX_UNDER_WAY:
                found.append(underway.pop(0).read())
        found += [choosing.read() for choosing in underway]
    assert found == expected


@pytest.mark.parametrize("counts", [(1, 2, 2), (3, 5, 4)], ids=str)
@pytest.mark.usefixtures("small_buffers")
def test_late_pooled_rows_of_two_steps_come_in_rounds(monkeypatch, counts):
    """Rows lie in one place of the device, step after step, and in two buffers of the host."""
    hidden_RH, device, found = torch.zeros(9, 8), DeferredDevice(is_deferred=True), []
    steps = [torch.randn(9, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    with monkeypatch.context() as patch:
        device.take_over(patch)
        with device.pinning():
            rows = PooledRows(8, "float32", GPU, Ledger())
        device.begin()
        underway = []
        for step_RH, count in zip(steps, counts, strict=True):
            device.put(lambda step_RH=step_RH: hidden_RH.copy_(step_RH))
            copy, event = rows.send(hidden_RH, range(8 - count, 8)), torch.cuda.Event()
            event.record()
            underway.append((copy, event))
            if len(underway) == MAX_UNDER_WAY or step_RH is steps[-1]:
                copy, event = underway.pop(0)
                event.synchronize()
                found.append(copy.read())
        underway[0][1].synchronize()
        found.append(underway[0][0].read())
    expected = [step_RH[8 - count : 8].numpy() for step_RH, count in zip(steps, counts, strict=True)]
    assert [b"".join(own) for own in found] == [own.tobytes() for own in expected]


PLANNED = {
    "triton_paged": ("llama", write_model),
    "triton_latent": ("deepseek_v3", write_model),
    "triton_sparse": ("deepseek_v32", write_model),
    "triton_compressed": ("compressed_small", write_traffic_model),
}
"""Backends that keep lists on the host, and a model for each."""


@pytest.mark.parametrize("backend", PLANNED)
def test_late_plans_of_several_steps_send_their_own_lists(monkeypatch, tmp_path, backend):
    """Tiles and rows of a step are written when those of the step before were sent."""
    name, write = PLANNED[backend]
    loaded = load_model(write(tmp_path, name), load_format="dummy")
    device = DeferredDevice(is_deferred=True)
    with monkeypatch.context() as patch:
        device.take_over(patch)
        runner: Any = Rig(loaded, backend, LIMITS, NUM_PAGES, keeps_tokens=True).runner
        device.begin()
        for start, num_rows in ((0, 20), (24, 3), (40, 2), (9, 7)):
            runner.backend.plan(runner.fill_batch(runner.eager_step(start, num_rows), [num_rows - 1]))
        assert device.most_queued > 2
        device.run_until()


class WatchedGraphs(StepGraphs):
    """The graphs, and which of them ran."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.replayed: Counter = Counter()

    def replay(self, size: int, is_decode: bool) -> torch.Tensor:
        self.replayed[size, is_decode] += 1
        return super().replay(size, is_decode)


def test_late_device_steps_from_graphs_give_the_same_tokens(monkeypatch, model):
    """Block tables, tiles and coming tokens reach graphs; steps with proposals take the mixed ones."""
    if triton is None:
        pytest.skip("Triton is not installed")
    seed = 1
    wishes = [replace(wish, max_tokens=5, stops=frozenset()) for wish in make_wishes(seed, 5, VOCAB, lengths=(1, 2, 9))]
    expected = expect(model, wishes, seed)
    guessing = with_guesses(wishes, [person.output for person in expected.people], VOCAB, seed)
    graphs = WatchedGraphs((1, 2, 4), (8, 16), LIMITS.sampled_rows)

    def capture(rig: Rig, device: DeferredDevice) -> None:
        pretend_to_have_a_stream(rig)
        rig.runner.warm((1,), graphs, lambda done, total: None)
        rig.poison_pages(range(NUM_PAGES))

    use_fake_graphs(monkeypatch)
    ran, device = run_late(monkeypatch, model, guessing, seed, capture, "triton_paged")
    for own, other in zip(ran.people, expected.people, strict=True):
        assert own.output == other.output, "another backend, whose logits are near"
    only_proposals = [
        step
        for step in ran.steps
        if step.items and all(item.samples and item.num_new_tokens == 1 + len(item.proposals) for item in step.items)
    ]
    assert any(item.proposals for step in only_proposals for item in step.items), "every row is chosen from"
    assert graphs.replayed[1, True] + graphs.replayed[2, True] + graphs.replayed[4, True] > 2
    assert graphs.replayed[8, False] + graphs.replayed[16, False] > 2
    assert device.most_queued > 10
