"""A device that is as late as can be: work runs in order, and only when a thread of the host waits for it.

So what the host writes before a copy or a kernel has read it changes what comes out. Copies compare bytes, too. A copy from
pinned memory must find what stood there when it was enqueued. A copy to pinned memory must find its poison untouched.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.attention import tile_scheduler
from holdfast.attention.backend import Batch
from holdfast.families.compressed import triton_backend as triton_compressed
from holdfast.families.sparse import triton_backend as triton_sparse
from holdfast.memory.arena import MirroredTensor
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.runner import step_inputs
from holdfast.runner.pooled_rows import PooledRows
from holdfast.runner.sampling import device_sampler, logit_edits
from runner.drive import Rig, recording_sampler

POISON = 0xA5
GPU: Any = SimpleNamespace(type="cuda")
"""In the place of a torch.device, for code that looks at its type and passes it on."""
KERNELS = {
    step_inputs: ("scatter_pages",),
    device_sampler: (
        *("argmax", "argmax_share", "copy_rows", "keep_tokens", "logprob_rows", "mask_logits"),
        *("resolve_tokens", "sample_tokens"),
    ),
    logit_edits: ("edit_logits", "restore_logits"),
}
"""Launchers that run outside of the model, by the module that calls them."""


class LateStream:
    """Work in order, each at the latest when it is waited for."""

    def __init__(self, device: "DeferredDevice") -> None:
        self._device = device
        self._queue: deque[Callable[[], Any]] = deque()
        self._turn = threading.RLock()
        self.num_put = self.num_done = 0

    def put(self, work: Callable[[], Any]) -> int:
        """Enqueue; the number of the work."""
        self._queue.append(work)
        self.num_put += 1
        self._device.most_queued = max(self._device.most_queued, len(self._queue))
        if not self._device.is_late:
            self.run_until()
        return self.num_put

    def run_until(self, number: int | None = None) -> None:
        """Run up to that work, or all of it."""
        with self._turn:
            while self.num_done < (self.num_put if number is None else number):
                work, self.num_done = self._queue.popleft(), self.num_done + 1
                with self._device.running():
                    work()

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self.run_until()

    def wait_stream(self, other: "LateStream") -> None:
        mark = other.num_put
        self.put(lambda: other.run_until(mark))


class LateEvent:
    """A place in a stream; one that was never recorded is waited for by nothing, as in CUDA."""

    def __init__(self, device: "DeferredDevice") -> None:
        self._device = device
        self._stream: LateStream | None = None
        self._mark = 0

    def record(self, stream: LateStream | None = None) -> None:
        self._stream = self._device.current if stream is None else stream
        self._mark = self._stream.num_put

    def query(self) -> bool:
        return self._stream is None or self._stream.num_done >= self._mark

    def synchronize(self) -> None:
        self._device.num_waits += 1
        if self._stream is not None:
            self._stream.run_until(self._mark)

    def elapsed_time(self, later: "LateEvent") -> float:
        return 1.0


class DeferredDevice:
    """Streams of late work. Everything happens at once before `begin`, and always if `is_deferred` is False."""

    def __init__(self, is_deferred: bool) -> None:
        self._is_deferred = is_deferred
        self.is_late = False
        self.most_queued = self.num_waits = 0
        self.current = self._first = LateStream(self)
        self._own = threading.local()
        self._home = 0
        self._pinned: dict[int, torch.Tensor] = {}
        self._unread: list[tuple[int, int]] = []
        """Pinned memory that copies are to read."""

    def begin(self) -> None:
        """From here on work is late, and copies of this thread are the device's."""
        self.is_late = self._is_deferred
        self._home = threading.get_ident()

    def put(self, work: Callable[[], Any]) -> int:
        """On the current stream."""
        return self.current.put(work)

    def run_until(self) -> None:
        """All work of the first stream."""
        self._first.run_until()

    @property
    def _is_running(self) -> bool:
        """Whether this thread does work of the device."""
        return getattr(self._own, "is_running", False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is called inside runs on the device, and now."""
        before, self._own.is_running = self._is_running, True
        try:
            with torch.inference_mode():
                yield
        finally:
            self._own.is_running = before

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        """For torch.cuda.stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """Memory of the host that copies read and write."""
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def deferred(self, function: Callable[..., Any]) -> Callable[..., None]:
        """The function as a launch; inside of other work it runs at once."""

        def launch(*arguments: Any, **named: Any) -> None:
            if self._is_running:
                function(*arguments, **named)
            else:
                self.put(lambda: function(*arguments, **named))

        return launch

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From here on doubles, copies, events, streams and the kernels of KERNELS are of this device."""
        device = self

        class DeferredTensor(MirroredTensor):
            def __init__(
                self, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device, is_shared: bool
            ) -> None:
                super().__init__(shape, dtype, where, is_shared=False)
                device.pin(self._flat_host)
                self._sent: Any = LateEvent(device)

        for module in (step_inputs, tile_scheduler, triton_sparse, triton_compressed):
            monkeypatch.setattr(module, "MirroredTensor", DeferredTensor)
        for module, names in KERNELS.items():
            for name in names:
                monkeypatch.setattr(module, name, self.deferred(getattr(module, name)))
        copy = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source, *_, **__: self._copy(copy, to, source))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: LateEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    def _copy(self, copy: Callable[..., torch.Tensor], to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if self._is_running or not self.is_late or threading.get_ident() != self._home:
            return copy(to, source)
        sent = source.clone() if self._is_pinned(source) else None
        begin, end = to.data_ptr(), to.data_ptr() + to.nbytes
        # A copy that is enqueued and reads the same place comes first: the host may not poison it.
        is_read = any(begin < other_end and other < end for other, other_end in self._unread)
        is_poisoned = self._is_pinned(to) and not is_read
        unread = source.data_ptr(), source.data_ptr() + source.nbytes
        if sent is not None:
            self._unread.append(unread)
        if is_poisoned:
            to.view(torch.uint8).fill_(POISON)

        def run() -> None:
            assert sent is None or torch.equal(sent, source), "the host wrote what a copy had not read"
            assert not is_poisoned or (to.view(torch.uint8) == POISON).all(), "the host wrote where a copy was to come"
            if sent is not None:
                self._unread.remove(unread)
            copy(to, source)

        self.put(run)
        return to

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    @contextmanager
    def pinning(self) -> Iterator[None]:
        """Tensors say that they lie on a GPU, and pinned ones are this device's."""
        zeros = torch.zeros

        def make(*shape: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
            made = zeros(*shape, **named)
            return self.pin(made) if pin_memory else made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
            patch.setattr(torch, "zeros", make)
            yield

    def take_runner(self, rig: Rig) -> None:
        """From here on the rig's model, choices and pooled rows are late; `take_over` comes first.

        As in a workspace, the logits of every step lie in one place, and so do the hidden states.
        """
        runner: Any = rig.runner
        hidden_size = rig.model.spec.hidden_size
        with self.pinning():
            rig.sampler = recording_sampler(runner.vocab_size, rig.limits.sampled_rows, like_gpu=True)
            runner.sampler = rig.sampler
            runner.pooled_rows = PooledRows(hidden_size, "float32", GPU, Ledger())
        num_rows = max(rig.limits.max_num_batched_tokens, rig.limits.sampled_rows, PROMPT_ROWS)
        logits_RV = torch.full((num_rows, runner.vocab_size), torch.nan)
        hidden_RH = torch.full((num_rows, hidden_size), torch.nan)

        def run(compute: Callable[..., torch.Tensor], out: torch.Tensor, *given: Any) -> torch.Tensor:
            self.put(lambda: out.copy_(compute(*given)[: len(out)]))
            return out

        def wanted(batch: Batch) -> int:
            return batch.num_rows if batch.logits is None else len(batch.logits.rows_R)

        decoder = rig.decoder
        runner.model = SimpleNamespace(
            step_logits=lambda batch, plan: run(decoder.step_logits, logits_RV[: wanted(batch)], batch, plan),
            hidden=lambda batch, plan: run(decoder.hidden, hidden_RH[: wanted(batch)], batch, plan),
            logits=lambda rows_RH: run(decoder.logits, logits_RV[: len(rows_RH)], rows_RH),
        )
