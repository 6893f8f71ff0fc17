"""What sampling costs: temporaries within their terms, and never a wait for the device before the end."""

import warnings
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner import logit_edits, sampler, sampling_batch
from holdfast.runner.sampler import Sampler
from holdfast.runner.sampling_batch import SamplingBatch
from holdfast.runner.sampling_terms import sampling_terms
from runner.sampling_rows import DEVICE, EOS, SETTINGS, make_logits, make_sequence


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors on the device held at one time, as far as operations inside gave them out."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE.type:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


CASES = [*SETTINGS, "mixed"]
ONE_BLOCK = [(1, 30_000), (12, 30_000)]
SEVERAL_BLOCKS = (100, 60_000)
MEMORY_CASES = [
    *((name, *shape) for name in CASES for shape in ONE_BLOCK),
    *((name, *SEVERAL_BLOCKS) for name in ("temperature", "top_k", "wide filters", "logprobs", "everything", "mixed")),
]


def make_sequences(name: str, num_rows: int, vocab_size: int) -> list[Sequence]:
    params = list(SETTINGS.values()) if name == "mixed" else [SETTINGS[name]]
    return [make_sequence(row, vocab_size, **params[row % len(params)]) for row in range(num_rows)]


def planned_bytes(num_rows: int, vocab_size: int) -> int:
    terms = {term.owner: term.num_bytes for term in sampling_terms(num_rows, vocab_size)}
    return terms["sampling/block"] + terms["sampling/results"]


@pytest.mark.parametrize(("name", "num_rows", "vocab_size"), MEMORY_CASES)
def test_temporaries_fit_their_terms(name, num_rows, vocab_size):
    logits = make_logits(num_rows, vocab_size, scale=1.0)
    chooser = Sampler(vocab_size, DEVICE)
    with LiveBytes() as measured:
        logits.view(-1)
        chooser.sample(logits, make_sequences(name, num_rows, vocab_size), EOS)
    measured_bytes = measured.peak - logits.untyped_storage().nbytes()
    assert measured_bytes <= planned_bytes(num_rows, vocab_size)
    if name == "wide filters" and num_rows > 1:
        assert measured_bytes > 0.9 * planned_bytes(num_rows, vocab_size)


def test_edited_logits_fit_their_term():
    """Rows that hold every token of the vocabulary, so that all logits are edited."""
    vocab_size = 40_000
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.5)
    sequences = [Sequence(row, list(range(vocab_size)) * 2, vocab_size, params, row, 9) for row in range(4)]
    logits = make_logits(4, vocab_size)
    with LiveBytes() as measured:
        logits.view(-1)
        Sampler(vocab_size, DEVICE).sample(logits, sequences, EOS)
    copy_bytes = logits.untyped_storage().nbytes()
    terms = {term.owner: term.num_bytes for term in sampling_terms(4, vocab_size)}
    allowed_bytes = terms["sampling/edits"] + terms["sampling/results"] + copy_bytes
    assert 0.8 * allowed_bytes < measured.peak - logits.untyped_storage().nbytes() <= allowed_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_device_is_never_waited_for(name, monkeypatch):
    """On the meta device tensors have shapes and no numbers: whoever looks at one, or needs it for a shape, fails."""
    meta = torch.device("meta")
    for module in (sampler, logit_edits, sampling_batch):
        monkeypatch.setattr(module, "to_device", lambda array, device: torch.from_numpy(array).to(device))
    sequences = make_sequences(name, 40, 1000)
    batch = SamplingBatch.of(sequences, 1000)
    logits = torch.empty(40, 1000, device=meta)
    chooser = Sampler(1000, meta)
    chosen = chooser.choose(logits, sequences, EOS, batch)
    assert (chosen.shape, chosen.dtype) == ((40,), torch.int64)
    assert chooser.measure(logits, chosen, batch).shape == (40, 5 + 2 * batch.num_top)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_no_synchronisation_on_a_gpu(name):
    sequences = make_sequences(name, 20, 30_000)
    batch = SamplingBatch.of(sequences, 30_000)
    logits = make_logits(20, 30_000)
    chooser = Sampler(30_000, DEVICE)
    expected = [sample.token_id for sample in chooser.sample(logits, sequences, EOS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns of itself
        torch.cuda.set_sync_debug_mode("error")
        try:
            chosen = chooser.choose(logits, sequences, EOS, batch)
            chooser.measure(logits, chosen, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert chosen.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151_936), (40, 151_936)])
def test_a_gpu_allocates_no_more_than_the_terms(name, num_rows, vocab_size):
    sequences = make_sequences(name, num_rows, vocab_size)
    logits = make_logits(num_rows, vocab_size)
    chooser = Sampler(vocab_size, DEVICE)
    chooser.sample(logits, sequences, EOS)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chooser.sample(logits, sequences, EOS)
    measured_bytes = torch.cuda.max_memory_allocated() - before_bytes
    allowed_bytes = planned_bytes(num_rows, vocab_size)
    assert measured_bytes <= allowed_bytes, f"{measured_bytes / allowed_bytes:.3f} of the plan"
