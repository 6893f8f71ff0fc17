"""What sampling costs: temporaries within their terms on a CPU; nothing after construction on a GPU, and no wait but one."""

import gc
import random
import warnings
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.kernels.triton_compat import counting_compiles, jit, tl
from holdfast.planning.terms import ROUNDING_BYTES, sampling_terms
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from runner.sampling_rows import EOS, SETTINGS, make_logits, make_sampler, make_sequence

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors held at one time, as far as operations inside gave them out."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


CASES = [*SETTINGS, "mixed"]
ONE_ROW, ONE_BLOCK, SEVERAL_BLOCKS = (1, 30_000), (12, 30_000), (100, 60_000)
MEMORY_CASES = [
    *((name, *ONE_ROW) for name in ("greedy", "wide filters", "everything")),
    *((name, *ONE_BLOCK) for name in CASES),
    *((name, *SEVERAL_BLOCKS) for name in ("wide filters", "everything")),
    *(
        pytest.param(name, *SEVERAL_BLOCKS, marks=pytest.mark.slow)
        for name in ("temperature", "top_k", "logprobs", "mixed")
    ),
]


def make_sequences(name: str, num_rows: int, vocab_size: int) -> list[Sequence]:
    params = list(SETTINGS.values()) if name == "mixed" else [SETTINGS[name]]
    return [make_sequence(row, vocab_size, **params[row % len(params)]) for row in range(num_rows)]


def planned_bytes(num_rows: int, vocab_size: int) -> int:
    terms = {term.owner: term.num_bytes for term in sampling_terms(num_rows, vocab_size, "cpu")}
    return terms["sampling/block"] + terms["sampling/results"]


@pytest.mark.parametrize(("name", "num_rows", "vocab_size"), MEMORY_CASES)
def test_temporaries_fit_their_terms(name, num_rows, vocab_size):
    logits = make_logits(num_rows, vocab_size, scale=1.0).cpu()
    chooser = make_sampler(vocab_size, num_rows, CPU)
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
    logits = make_logits(4, vocab_size).cpu()
    chooser = make_sampler(vocab_size, 4, CPU)
    with LiveBytes() as measured:
        logits.view(-1)
        chooser.sample(logits, sequences, EOS)
    copy_bytes = logits.untyped_storage().nbytes()
    terms = {term.owner: term.num_bytes for term in sampling_terms(4, vocab_size, "cpu")}
    allowed_bytes = terms["sampling/edits"] + terms["sampling/results"] + copy_bytes
    assert 0.8 * allowed_bytes < measured.peak - logits.untyped_storage().nbytes() <= allowed_bytes


def allocator_counters() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    names = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries", "num_device_alloc")
    return {name: stats[name] for name in names if name in stats}


def memory_in_use(when: str = "current") -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: stats[f"{name}.all.{when}"] for name in ("requested_bytes", "allocated_bytes")}


def pinned_counters() -> dict[str, int]:
    return {name: number for name, number in torch.cuda.host_memory_stats().items() if name.endswith("allocated")}


@pytest.mark.gpu
def test_device_sampler_thousand_steps_allocate_nothing():
    """Every kind of row, batches of every size, and prompts in between."""
    vocab_size, max_rows = 30_000, 40
    chooser = make_sampler(vocab_size, max_rows)
    logits = make_logits(max_rows, vocab_size)
    sequences = make_sequences("mixed", max_rows, vocab_size)
    chooser.warm(logits)
    place = chooser.argmax_S.data_ptr()
    torch.cuda.synchronize()
    rng = random.Random(0)
    before, pinned_before = allocator_counters(), pinned_counters()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns of itself
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1000):
                rows = rng.sample(range(max_rows), rng.randint(1, max_rows))
                chooser.sample(logits[: len(rows)], [sequences[row] for row in rows], EOS)
                for row in rows:
                    sequences[row].token_ids.append(step)
                if step % 10 == 0:
                    chooser.prompt_logprobs(logits[: len(rows)], rows, rng.randint(0, 20))
                    chooser.find_argmax(logits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert allocator_counters() == before
    assert pinned_counters() == pinned_before
    assert chooser.argmax_S.data_ptr() == place


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151_936), (40, 151_936)])
def test_device_sampler_gpu_bytes_equal_sampling_terms(name, num_rows, vocab_size):
    """In bytes as they are requested for: what the allocator rounds up depends on what it has in store, and is its own line."""
    logits = make_logits(num_rows, vocab_size)
    sequences = make_sequences(name, num_rows, vocab_size)
    gc.collect()  # what earlier tests left must not go while this one measures
    torch.cuda.synchronize()
    before = memory_in_use()
    chooser = make_sampler(vocab_size, num_rows)
    planned_bytes = sum(term.num_bytes for term in sampling_terms(num_rows, vocab_size, "cuda"))
    held = memory_in_use()
    requested_bytes = held["requested_bytes"] - before["requested_bytes"]
    assert requested_bytes == planned_bytes
    rounding_bytes = held["allocated_bytes"] - before["allocated_bytes"] - requested_bytes
    assert 0 <= rounding_bytes <= ROUNDING_BYTES, "rounding is the allocator's line, not sampling's"
    chooser.sample(logits, sequences, EOS)
    torch.cuda.reset_peak_memory_stats()
    chooser.sample(logits, sequences, EOS)
    assert memory_in_use("peak")["requested_bytes"] == held["requested_bytes"]


@pytest.mark.gpu
def test_device_sampler_compiles_no_kernel_after_warming():
    """On an odd vocabulary, where rows begin anywhere."""
    vocab_size = 30_011
    chooser = make_sampler(vocab_size, 40)
    logits = make_logits(64, vocab_size)
    chooser.warm(logits)
    sequences = make_sequences("mixed", 40, vocab_size)
    with counting_compiles(lambda: None) as counted:
        for num_rows in (1, 2, 16, 17, 40):
            chooser.sample(logits[:num_rows], sequences[:num_rows], EOS)
            chooser.prompt_logprobs(logits[:num_rows], [5] * num_rows, 16)
        chooser.prompt_logprobs(logits, [5] * 64, 1)
        assert (counted.num_compiled, counted.num_found) == (0, 0)
        fresh_kernel()[(1,)](logits)
        assert counted.num_compiled + counted.num_found == 1, "a new kernel is counted"


def fresh_kernel():
    """Return a kernel that this process has not launched."""

    @jit
    def store_zero(pointer):
        tl.store(pointer, 0.0)

    return store_zero
