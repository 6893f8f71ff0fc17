"""The sampler of devices: on the host, where its kernels are their references, it is the host's sampler to the bit."""

import random
from dataclasses import replace

import pytest
import torch

from holdfast.kernels import operation
from holdfast.memory.ledger import Ledger
from holdfast.planning import terms
from holdfast.request.sampling_params import MAX_LOGPROBS, SamplingParams
from holdfast.request.sequence import NO_TOKEN, Sequence
from holdfast.runner.sampling.batch import Choice, SequenceSample
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.logit_edits import EditStaging
from holdfast.runner.sampling.sampler import HostSampler
from runner.sampling_rows import EOS, SETTINGS, FakeForms, divide_rows

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def make_rows(vocab_size: int, num_rows: int) -> tuple[torch.Tensor, list[Sequence]]:
    rng = random.Random(num_rows)
    settings = list(SETTINGS.values())
    sequences = [
        Sequence(
            row, rng.choices(range(vocab_size), k=30), 20, SamplingParams(**settings[row % len(settings)]), row, 99
        )
        for row in range(num_rows)
    ]
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(num_rows)) * 3, sequences


def samplers(vocab_size: int, max_rows: int) -> tuple[DeviceSampler, HostSampler]:
    on_device, on_host = DeviceSampler(vocab_size, CPU, max_rows, Ledger()), HostSampler(vocab_size, max_rows)
    on_device.mask_source = on_host.mask_source = FakeForms(vocab_size)
    return on_device, on_host


def choose(chooser: DeviceSampler | HostSampler, logits, sequences, chosen_by_graph=None) -> list[SequenceSample]:
    return chooser.launch(logits, list(map(Choice.of, sequences)), EOS, chosen_by_graph).read()


@pytest.mark.parametrize("vocab_size", [2, 100, 9001])
def test_device_sampler_every_setting_matches_host_sampler(vocab_size):
    logits, sequences = make_rows(vocab_size, len(SETTINGS))
    on_device, on_host = samplers(vocab_size, len(SETTINGS))
    raw = logits.clone()
    for _ in range(2):
        assert choose(on_device, logits, sequences) == choose(on_host, logits, sequences)
    assert torch.equal(logits, raw)


@pytest.mark.parametrize("rows_at_once", [1, 3, 7])
def test_rows_in_several_blocks(monkeypatch, rows_at_once):
    logits, sequences = make_rows(100, 2 * len(SETTINGS))
    _, on_host = samplers(100, len(sequences))
    divide_rows(monkeypatch, 100, rows_at_once)
    on_device, _ = samplers(100, len(sequences))
    assert choose(on_device, logits, sequences) == choose(on_host, logits, sequences)


@pytest.mark.parametrize("most", [1, 700])
def test_device_sampler_edits_beyond_list_match_host_sampler(monkeypatch, most):
    monkeypatch.setattr(terms, "LISTED_EDITS", most)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 2.0}, min_tokens=3000)
    sequences = [Sequence(row, list(range(1000)) * 2, 1000, params, row, 9) for row in range(5)]
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)) * 3
    on_device, on_host = samplers(1000, 5)
    (num_listed,) = (spec.shape[0] for spec in terms.host_specs(5, 1000) if spec.name == "edits")
    assert num_listed <= 1792
    assert choose(on_device, logits, sequences) == choose(on_host, logits, sequences)


@pytest.mark.parametrize("most", [1, 700, 4096])
def test_allowed_tokens_and_bad_words_as_on_the_host(monkeypatch, most):
    monkeypatch.setattr(terms, "LISTED_EDITS", most)
    allowed = SamplingParams(allowed_token_ids=tuple(range(0, 1000, 3)), logit_bias={3: 9.0, 4: 99.0}, logprobs=2)
    greedy = SamplingParams(temperature=0.0, allowed_token_ids=(998, 17), repetition_penalty=1.5)
    plain = SamplingParams(temperature=0.0)
    sequences = [
        Sequence(row, [5, 6, 7, 8], 2, (allowed, greedy, plain)[row % 3], row, 9, bad_word_ids=((998,), (7, 8, row)))
        for row in range(9)
    ]
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, 998] = logits[2].max() + 1
    logits[5, 5] = logits[5].max() + 1
    on_device, on_host = samplers(1000, 9)
    found = choose(on_device, logits, sequences)
    assert found == choose(on_host, logits, sequences)
    assert [own.token_id for own in found[1::3]] == [17, 17, 17]
    assert all(own.token_id % 3 == 0 for own in found[::3])
    assert (found[2].token_id, found[5].token_id) == (logits[2].topk(2).indices[1], logits[5].topk(2).indices[1])


def test_prompts_as_on_the_host():
    logits, _ = make_rows(300, 150)
    targets = [(row * 7) % 300 for row in range(150)]
    for max_rows in (1, 100):
        on_device, on_host = samplers(300, max_rows)
        for num_top in (0, 3, MAX_LOGPROBS):
            expected = on_host.prompt_logprobs(logits, targets, num_top)
            assert on_device.prompt_logprobs(logits, targets, num_top) == expected


def test_poison_stays_in_its_row():
    logits, sequences = make_rows(100, len(SETTINGS))
    on_device, on_host = samplers(100, len(SETTINGS))
    logits[::3, 7] = torch.nan
    logits[1::3] = -torch.inf
    samples = choose(on_device, logits, sequences)
    assert samples == choose(on_host, logits, sequences)
    assert [own.token_id for own in samples].count(NO_TOKEN) == 17


def test_device_sampler_takes_argmax_found_by_graph():
    logits, sequences = make_rows(100, 3)
    on_device, on_host = samplers(100, 3)
    plain = [Sequence(0, [1], 1, SamplingParams(temperature=0.0), 0, 9) for _ in range(3)]
    found = torch.tensor([7, NO_TOKEN, 9, 55, 55])
    for chooser in (on_device, on_host):
        assert [own.token_id for own in choose(chooser, logits, plain, found)] == [7, NO_TOKEN, 9]
    on_device.find_argmax(logits)
    on_host.find_argmax(logits)
    assert on_device.argmax_S[:3].tolist() == on_host.argmax_S.tolist() == logits.argmax(1).tolist()
    found = on_device.argmax_S.clone()
    assert choose(on_device, logits, sequences, found) == choose(on_host, logits, sequences)


def test_device_sampler_interrupted_step_leaves_no_trace(monkeypatch):
    logits, sequences = make_rows(100, len(SETTINGS))
    on_device, on_host = samplers(100, len(SETTINGS))

    def interrupt(self, block):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EditStaging, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            choose(on_device, logits, sequences)
    logits, sequences = logits.flip(0), sequences[::-1]
    assert choose(on_device, logits, sequences) == choose(on_host, logits, sequences)


def test_device_sampler_two_steps_in_flight_keep_own_results():
    """Read in order, each after the next was launched; whose tokens are not there yet is chosen when they are."""
    on_device, on_host = samplers(100, len(SETTINGS))
    steps = [make_rows(100, len(SETTINGS) - number)[0] for number in range(4)]
    _, sequences = make_rows(100, len(SETTINGS))
    num_late = 0
    choosing = on_device.launch(steps[0], [Choice.of(own) for own in sequences], EOS)
    for number, logits in enumerate([*steps[1:], None]):
        count = len(steps[number])
        expected = choose(on_host, steps[number], grown_by(sequences, number)[:count])
        later = None
        if logits is not None:
            choices = [Choice(own, own.num_tokens + 1) for own in sequences[: len(logits)]]
            later = on_device.launch(logits, choices, EOS)
            assert later.waits
            with pytest.raises(AssertionError, match="were not chosen"):
                later.read()
            num_late += sum(choice.is_late for choice in choices)
        for _ in range(2):
            assert choosing.read() == expected, "what was read stays until the step after the next"
        for own in sequences:
            own.token_ids.append(number + own.sequence_id)
        if later is not None:
            later.choose_late()
            later.choose_late()
            choosing = later
    assert num_late > 6


def grown_by(sequences: list[Sequence], count: int) -> list[Sequence]:
    """As they are, on lists of their own, so that no one else counts in them."""
    assert all(own.num_tokens == 30 + count for own in sequences), "each step adds a token"
    return [replace(own, token_ids=list(own.token_ids)) for own in sequences]


def test_device_sampler_keeps_chosen_token_by_slot():
    """The argmax at first, then what was chosen in its place; nothing for rows without a slot or without a token."""
    on_device, _ = samplers(100, 9)
    logits, _ = make_rows(100, 4)
    logits[3, 5] = torch.nan
    greedy, random_choice = SamplingParams(temperature=0.0), SamplingParams(temperature=5.0)
    sequences = [Sequence(row, [1, 2], 2, params, row, 9) for row, params in enumerate((greedy, random_choice) * 2)]
    slots = torch.tensor([5, 2, -1, 0])
    on_device.find_argmax(logits, slots)
    expected = logits.argmax(1).tolist()
    assert resolved(on_device, [5, 2, 0, 1]) == [expected[0], expected[1], 0, 0]
    chosen = on_device.launch(logits, list(map(Choice.of, sequences)), EOS, on_device.argmax_S, slots).read()
    assert chosen[3].token_id == NO_TOKEN
    assert chosen[1].token_id != expected[1], "hot enough to choose another"
    assert resolved(on_device, [5, 2, 0, 1]) == [chosen[0].token_id, chosen[1].token_id, 0, 0]


def resolved(sampler: DeviceSampler, slots: list[int]) -> list[int]:
    ids = torch.tensor([-1 - slot for slot in slots])
    sampler.resolve(ids)
    return ids.tolist()


def test_device_sampler_step_without_choices_reads_empty():
    on_device, on_host = samplers(100, 4)
    assert on_device.launch(None, [], EOS).read() == on_host.launch(None, [], EOS).read() == []


def test_device_sampler_ledger_equals_sampling_terms():
    ledger = Ledger()
    DeviceSampler(1000, CPU, 5, ledger)
    planned = {term.owner: term.num_bytes for term in terms.sampling_terms(5, 1000, "cuda")}
    assert {entry.owner: entry.num_bytes for entry in ledger} == planned


def test_device_sampler_by_kernels_matches_host_sampler(monkeypatch, device):
    """Every setting through the kernels; the last place of an exponential is too little to change a token here."""
    monkeypatch.setattr(operation, "can_run", lambda tensor: True)
    logits, sequences = make_rows(100, len(SETTINGS))
    on_device, on_host = DeviceSampler(100, device, len(SETTINGS), Ledger()), HostSampler(100, len(SETTINGS))
    on_device.mask_source = on_host.mask_source = FakeForms(100)
    found = choose(on_device, logits.to(device), sequences)
    expected = choose(on_host, logits, sequences)
    assert [own.token_id for own in found] == [other.token_id for other in expected]
    for own, other in zip(found, expected, strict=True):
        if other.logprobs is not None:
            assert own.logprobs is not None
            assert own.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-6)
            assert own.logprobs.rank == other.logprobs.rank
            assert [token_id for token_id, _ in own.logprobs.top] == [token_id for token_id, _ in other.logprobs.top]
    (prompt,) = on_device.prompt_logprobs(logits[:1].to(device), [3], 4)
    assert prompt.logprob == pytest.approx(on_host.prompt_logprobs(logits[:1], [3], 4)[0].logprob, abs=1e-6)
