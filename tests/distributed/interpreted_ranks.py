"""Ranks over symmetric memory as threads of one process, with the real kernels in Triton's interpreter and the signals that they wait by.

One thread runs at a time. A kernel that reads a signal lets the others run first, as a rank on another GPU would. The few
instructions for signals are carried out here on addresses of host memory.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from holdfast.distributed import symmetric
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh
from holdfast.distributed.symmetric import SymmetricExchange
from holdfast.kernels.exchange import links, signals
from holdfast.kernels.exchange.gather_rows import _rendezvous_kernel
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import TensorSpec, arena_bytes
from pointer_bounds import BOUNDS

Result = TypeVar("Result")
MAX_POLLS = 2000
"""After which a wait is an error: some seconds."""


class InterpretedRanks:
    """As many threads as ranks; `run` may be called once."""

    def __init__(self, ranks: Sequence[Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
        import triton.runtime.interpreter as interpreter

        self._meshes = tuple(ranks)
        self._baton = threading.Lock()
        self._interpreter: Any = interpreter
        self._failures: list[BaseException] = []
        self._memory: dict[int, torch.Tensor] = {}
        self._store: dict[str, bytes] = {}
        # The language and its core, which functions of the language see.
        self._languages = [interpreter._patch_lang(one.fn) for one in (_rendezvous_kernel, interpreter.tl.zeros)]
        # Launches overlap: none may take the language away from another.
        monkeypatch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
        monkeypatch.setattr(interpreter.interpreter_builder, "create_inline_asm", self._assemble)
        for module in (signals, links):
            monkeypatch.setattr(module, "MAX_POLLS", interpreter.tl.constexpr(MAX_POLLS))
        monkeypatch.setattr(symmetric, "SymmetricMemory", self._take_memory)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: threading.RLock())
        properties = SimpleNamespace(uuid="one", multi_processor_count=24)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def run(
        self,
        needs: ExchangeNeeds,
        function: Callable[[Mesh, SymmetricExchange], Result],
        ledgers: Sequence[Ledger] | None = None,
    ) -> list[Result]:
        """function(mesh, exchange) on every rank; the first failure is raised."""
        results: dict[int, Result] = {}

        def work(mesh: Mesh) -> None:
            with self._baton:
                try:
                    ledger = Ledger() if ledgers is None else ledgers[mesh.rank]
                    exchange = SymmetricExchange(mesh, needs, self, torch.device("cpu"), ledger)
                    results[mesh.rank] = function(mesh, exchange)
                    exchange.close()
                except BaseException as error:
                    self._failures.append(error)

        threads = [threading.Thread(target=work, args=(mesh,), daemon=True) for mesh in self._meshes]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for language in reversed(self._languages):
                language.restore()
        if self._failures:
            raise self._failures[0]
        return [results[mesh.rank] for mesh in self._meshes]

    def set(self, key: str, value: str) -> None:
        """Read from the store."""
        self._store[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Read from the store; waits."""
        while key not in self._store:
            self._let_others_run()
        return self._store[key]

    def _take_memory(
        self, specs: dict[str, TensorSpec], store: object, mesh: Mesh, device: torch.device
    ) -> SimpleNamespace:
        """In the place of SymmetricMemory: returns when all ranks have theirs; what is no signal is NaN."""
        own = torch.full((arena_bytes(specs.values()),), 0xFF, dtype=torch.uint8)
        symmetric.named_views(own, specs)["exchange/signals"].zero_()
        self._memory[mesh.rank] = own
        while len(self._memory) < len(self._meshes):
            self._let_others_run()
        all_ranks = [self._memory[rank] for rank in range(len(self._meshes))]
        return SimpleNamespace(own=own, all_ranks=all_ranks, name="ranks", close=lambda: None)

    def _let_others_run(self) -> None:
        if self._failures:
            raise RuntimeError("another rank has failed")
        builder = self._interpreter.interpreter_builder
        kept, bounds = (getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)), vars(BOUNDS).copy()
        self._baton.release()
        time.sleep(0.0001)
        self._baton.acquire()
        builder.grid_dim, builder.grid_idx = kept
        vars(BOUNDS).update(bounds)

    def _assemble(self, text: str, constraints: str, values: list[Any], *more: object) -> SimpleNamespace:
        """A load, a store of the elements under a mask, or a trap."""
        handle, int32 = self._interpreter.TensorHandle, self._interpreter.tl.int32
        if "trap" in text:
            raise TimeoutError("a rank waits for a signal that does not come")
        addresses = values[0].data.astype("uint64")
        read = [ctypes.c_int32.from_address(int(address)) for address in addresses.ravel()]
        if "ld.acquire" in text:
            self._let_others_run()
            found = addresses.astype("int32")
            found.ravel()[:] = [word.value for word in read]
        else:
            assert "st.release" in text, f"{text} is not known here"
            masks = values[2].data.ravel() if len(values) > 2 else [1] * len(read)
            for address, value, is_set in zip(addresses.ravel(), values[1].data.ravel(), masks, strict=True):
                if is_set:
                    ctypes.c_int32.from_address(int(address)).value = int(value)
            found = addresses.astype("int32")
        return SimpleNamespace(get_result=lambda place: handle(found, int32))
