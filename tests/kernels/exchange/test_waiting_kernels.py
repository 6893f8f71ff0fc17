"""Kernels that wait for a peer that will never come, on a GPU: they go on when they are let go, and trap otherwise."""

import time
from collections.abc import Callable

import pytest
import torch

from holdfast.distributed.exchange_plan import SIGNAL_BYTES
from holdfast.kernels.exchange import links, signals
from holdfast.kernels.exchange.gather_rows import rendezvous_triton
from holdfast.kernels.exchange.links import fetch_end, fetch_rows, offer_end, offer_rows, release_links
from holdfast.kernels.exchange.signals import release_waits
from holdfast.kernels.exchange.sum_rows import Ranks
from holdfast.kernels.triton_compat import kernel_constant

NUM_POLLS = 2**18
"""In place of minutes: some tenths of a second."""
WAIT_SECONDS = 5.0


def words(device: torch.device) -> torch.Tensor:
    return torch.zeros(SIGNAL_BYTES // 4, dtype=torch.int32, device=device)


def first_of_two(own: torch.Tensor, other: torch.Tensor) -> Ranks:
    """Rank 0, whose peer is nothing but memory."""
    peers = torch.tensor([own.data_ptr(), other.data_ptr()], dtype=torch.int64, device=own.device)
    return Ranks(0, 2, own, peers, max_blocks=2)


def waiting_calls(own: torch.Tensor, other: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A call of each kind that waits for the peer."""
    ranks, rows_TH, slots_LN = first_of_two(own, other), own.new_zeros(2, 8), own.new_zeros(1, 16)

    def offer_twice() -> None:
        for _ in range(2):  # the first finds a free slot
            offer_rows(rows_TH, slots_LN, offer_end(own, other, 0, 0))

    return {
        "meet": lambda: rendezvous_triton(ranks),
        "fetch": lambda: fetch_rows(slots_LN, rows_TH, fetch_end(own, other, 0, 0)),
        "offer": offer_twice,
    }


def is_done_within(event: torch.cuda.Event, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.gpu
@pytest.mark.own_process
@pytest.mark.parametrize("name", ["meet", "fetch", "offer"])
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graph"])
def test_waiting_kernel_continues_after_release(device: torch.device, name: str, is_captured: bool) -> None:
    """And so does whatever comes behind it in the stream, which would wait too."""
    own, other = words(device), words(device)
    call, stream, rescue = waiting_calls(own, other)[name], torch.cuda.Stream(device), torch.cuda.Stream(device)
    # Everything is loaded before: nothing can be while a kernel waits.
    release_waits(own)
    release_links(own)
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if is_captured:
        with torch.cuda.graph(graph, stream=stream):
            call()
    own.zero_()
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay() if is_captured else call()
        ended.record(stream)
    assert not is_done_within(ended, 0.2), "no peer has arrived"
    with torch.cuda.stream(rescue):
        release_waits(own)
        release_links(own)
    assert is_done_within(ended, WAIT_SECONDS)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.own_process
@pytest.mark.parametrize("name", ["meet", "fetch"])
def test_waiting_kernel_past_its_limit_traps(device: torch.device, name: str, monkeypatch) -> None:
    for module in (signals, links):
        monkeypatch.setattr(module, "MAX_POLLS", kernel_constant(NUM_POLLS))
    call = waiting_calls(words(device), words(device))[name]
    torch.cuda.synchronize()
    call()  # which compiles it first
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    most_seconds = seconds * 2**29 / NUM_POLLS
    print(f"\n{name}: {NUM_POLLS} polls took {seconds:.3f} s, so {most_seconds:.0f} s until a trap")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.ones(1, device=device).sum().item()
    assert 20 < most_seconds < 3600
