"""LockStep: ranks as threads of one process, each with an exchange of its own, for tests without processes.

    LockStep(2).run(lambda mesh, exchange: ...)  # one result a rank, in order

What would be wrong among processes is an error here that names both ranks: other calls, other shapes, a part that is not the
last room, an output that lies in a room. Rooms are handed out full of NaN, and again as soon as the protocol allows it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows

Result = TypeVar("Result")
POISON = 0xFF
"""NaN in every float."""
FIRST_ROOM_BYTES = 2**12


class LockStepError(Exception):
    """Ranks did not do the same."""


class LeftError(LockStepError):
    """A peer failed or has ended."""


class Call(NamedTuple):
    """What ranks must agree on."""

    verb: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"{self.verb} of {list(self.shape)} {' -> '.join(str(dtype).removeprefix('torch.') for dtype in self.dtypes)}"


class LockStep:
    """As many threads as ranks. Exchanges stay the same over several runs, so that what was built in one may be used in the next."""

    def __init__(
        self,
        ranks: int | Sequence[Mesh],
        needs: ExchangeNeeds | None = None,
        *,
        device: str = "cpu",
        is_serial: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        """`needs` bound what rooms hold, else they grow; with `is_serial` one thread computes at a time."""
        self.meshes = meshes(ranks) if isinstance(ranks, int) else tuple(ranks)
        self.timeout_s = timeout_s
        self._baton = threading.Lock() if is_serial else None
        self._turn = threading.Condition()
        self._posts: dict[tuple[str, int], dict[int, tuple[Call, Any]]] = {}
        self._num_read: dict[tuple[str, int], int] = {}
        self._links: dict[int, deque[torch.Tensor]] = {mesh.rank: deque() for mesh in self.meshes}
        self._failed: tuple[int, BaseException] | None = None
        self._ended: set[int] = set()
        self.exchanges = tuple(ThreadExchange(self, mesh, needs, torch.device(device)) for mesh in self.meshes)

    def run(self, function: Callable[[Mesh, "ThreadExchange"], Result]) -> list[Result]:
        """function(mesh, exchange) on every rank; the first failure is raised, with its rank in a note."""
        self._forget_failure()
        results: dict[int, Result] = {}
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def work(mesh: Mesh, exchange: "ThreadExchange") -> None:
            try:
                with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]), self._computing():
                    results[mesh.rank] = function(mesh, exchange)
            except BaseException as error:  # whatever it is, the others must not wait for this rank
                with self._turn:
                    if self._failed is None:
                        self._failed = (mesh.rank, error)
            finally:
                with self._turn:
                    self._ended.add(mesh.rank)
                    self._turn.notify_all()

        threads = [
            threading.Thread(target=work, args=both, name=f"rank {both[0].rank}", daemon=True)
            for both in zip(self.meshes, self.exchanges, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            rank, error = self._failed
            error.add_note(f"on rank {rank} of {len(self.meshes)}")
            raise error
        return [results[mesh.rank] for mesh in self.meshes]

    def _forget_failure(self) -> None:
        self._ended.clear()
        if self._failed is not None:
            self._failed = None
            self._posts.clear()
            self._num_read.clear()
            for exchange in self.exchanges:
                exchange.forget_calls()
                self._links[exchange.mesh.rank].clear()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        if self._baton is None:
            yield
            return
        with self._baton:
            yield

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Others compute meanwhile."""
        if self._baton is None:
            yield
            return
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()

    def _wait_for(self, is_there: Callable[[], bool], missing: Callable[[], set[int]], what: str) -> None:
        """With the condition held."""
        end = time.monotonic() + self.timeout_s
        while not is_there():
            if self._failed is not None:
                raise LeftError(f"{what}; rank {self._failed[0]} failed: {self._failed[1]!r}")
            if gone := missing() & self._ended:
                raise LeftError(f"{what}; rank {min(gone)} has ended without")
            if not self._turn.wait(end - time.monotonic()):
                raise LockStepError(f"{what}; ranks {sorted(missing())} did not come within {self.timeout_s} s")

    def meet(self, group: str, ranks: Sequence[int], rank: int, index: int, call: Call, value: object) -> list[Any]:
        """The values that all of `ranks` bring to their call number `index`, in the order of ranks."""
        place = (group, index)
        with self._waiting(), self._turn:
            posts = self._posts.setdefault(place, {})
            for other, (others_call, _) in posts.items():
                if others_call != call:
                    raise LockStepError(
                        f"call {index} of {group}: rank {rank} calls {call}, rank {other} calls {others_call}"
                    )
            posts[rank] = (call, value)
            self._turn.notify_all()
            self._wait_for(
                lambda: len(posts) == len(ranks),
                lambda: set(ranks) - posts.keys(),
                f"call {index} of {group}: rank {rank} waits in {call}",
            )
            self._num_read[place] = self._num_read.get(place, 0) + 1
            if self._num_read[place] == len(ranks):
                del self._posts[place], self._num_read[place]
            return [posts[other][1] for other in ranks]

    def send(self, to_rank: int, x_TH: torch.Tensor) -> None:
        """As many as one likes are on their way."""
        with self._turn:
            self._links[to_rank].append(x_TH.clone())
            self._turn.notify_all()

    def receive(self, rank: int, from_rank: int, call: Call) -> torch.Tensor:
        """In the order of sending."""
        link = self._links[rank]
        with self._waiting(), self._turn:
            self._wait_for(lambda: bool(link), lambda: {from_rank}, f"rank {rank} waits in {call} for rank {from_rank}")
            return link.popleft()


class ThreadExchange:
    """The exchange of one rank; see distributed/exchange.py."""

    def __init__(self, steps: LockStep, mesh: Mesh, needs: ExchangeNeeds | None, device: torch.device) -> None:
        self.mesh = mesh
        self.num_calls = 0
        """Within the stage."""
        self._steps = steps
        self._needs = needs
        self._num_head_calls = 0
        self._turn = 0
        room_bytes = FIRST_ROOM_BYTES if needs is None else needs.room_bytes
        self._rooms = [torch.empty(room_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        first = mesh.stage * mesh.tensor_size
        self._stage = range(first, first + mesh.tensor_size)
        last = range((mesh.num_stages - 1) * mesh.tensor_size, mesh.num_ranks)
        self._head = [*last] if mesh.num_stages == 1 else [0, *last]

    @property
    def rank(self) -> int:
        return self.mesh.tensor_rank

    @property
    def size(self) -> int:
        return self.mesh.tensor_size

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = num_rows * width * dtype.itemsize
        room = self._rooms[self._turn]
        if num_bytes > room.nbytes:
            assert self._needs is None, f"a room of {num_bytes} bytes exceeds the planned {room.nbytes}"
            room = self._rooms[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, device=room.device)
        room.fill_(POISON)
        return room[:num_bytes].view(dtype).view(num_rows, width)

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        assert part_TH.shape == out_TH.shape, f"{part_TH.shape=} {out_TH.shape=}"
        parts = self._exchange_part("sum_rows", part_TH, out_TH)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return out_TH.copy_(total)

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        shapes = part_TH.shape, onto.x_TH.shape, onto.scaled_TH.shape
        assert len(set(shapes)) == 1, f"{shapes} of a part, x, and x with its norm's weight"
        return add_rows(self._exchange_part("add_rows", part_TH, onto.x_TH), onto)

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        assert out_TY.shape == (part_TX.shape[0], self.size * part_TX.shape[1]), f"{part_TX.shape=} {out_TY.shape=}"
        assert part_TX.dtype == out_TY.dtype, f"{part_TX.dtype=} {out_TY.dtype=}"
        parts = self._exchange_part("gather_columns", part_TX, out_TY)
        return torch.cat(parts, dim=1, out=out_TY) if out_TY.is_contiguous() else out_TY.copy_(torch.cat(parts, dim=1))

    def whole_logits(self, num_rows: int) -> torch.Tensor:
        assert self.mesh.rank == 0, f"whole logits are rank 0's; this is {self.mesh.rank}"
        assert self._needs is not None, "say ExchangeNeeds to have whole logits"
        return torch.full((num_rows, self._needs.vocab_size), float("nan"), device=self._rooms[0].device)

    def gather_logits(self, part_RV: torch.Tensor | None, out_RW: torch.Tensor | None) -> None:
        assert (out_RW is not None) == (self.mesh.rank == 0), f"rank {self.mesh.rank} passes {out_RW=}"
        given = part_RV if part_RV is not None else out_RW
        assert given is not None, "neither a part nor an output"
        assert given.dtype == torch.float32, f"{given.dtype=}"
        found = self._meet_head("gather_logits", part_RV, (given.shape[0],), (torch.float32,))
        if out_RW is not None:
            width = sum(part.shape[1] for part in found)
            assert out_RW.shape[1] == width, f"shares are {width} wide together, the output {out_RW.shape[1]}"
            out_RW.copy_(torch.cat(found, dim=1))

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        assert out_SRX.shape[0] == self.size, f"{out_SRX.shape=}"
        assert part_RX is None or part_RX.shape == out_SRX.shape[1:], f"{out_SRX.shape=}"
        found = self._meet_head("gather_small", part_RX, tuple(out_SRX.shape[1:]), (out_SRX.dtype,))
        return out_SRX.copy_(torch.stack(found))

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        assert ids_T.dtype == torch.int64, f"{ids_T.dtype=}"
        given = self._meet_stage(Call("share_tokens", tuple(ids_T.shape), (ids_T.dtype,)), ids_T.clone())[0]
        if self.rank:
            ids_T.copy_(given)

    def send_rows(self, x_TH: torch.Tensor) -> None:
        assert not self.mesh.is_last_stage, "the last stage has none behind it"
        self._steps.send(self.mesh.rank + self.size, x_TH)

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        assert not self.mesh.is_first_stage, "the first stage has none before it"
        from_rank = self.mesh.rank - self.size
        call = Call("receive_rows", tuple(out_TH.shape), (out_TH.dtype,))
        x_TH = self._steps.receive(self.mesh.rank, from_rank, call)
        sent = Call("send_rows", tuple(x_TH.shape), (x_TH.dtype,))
        if sent[1:] != call[1:]:
            raise LockStepError(f"rank {self.mesh.rank} calls {call}, rank {from_rank} called {sent}")
        return out_TH.copy_(x_TH)

    def end_step(self) -> None:
        self._meet_stage(Call("end_step", (), ()), None)
        self._turn = 0

    def abandon(self) -> None:
        """Nothing: a thread that fails ends every wait for it."""

    def close(self) -> None:
        self._rooms = []

    def forget_calls(self) -> None:
        """After a failure, when ranks stand at different calls."""
        self.num_calls = self._num_head_calls = self._turn = 0

    def _exchange_part(self, verb: str, part: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        assert self._rooms, f"{verb} after close"
        room = self._rooms[self._turn]
        if part.numel() and (part.data_ptr() != room.data_ptr() or not part.is_contiguous()):
            raise LockStepError(f"rank {self.mesh.rank}: what it gives to {verb} is not the last room")
        if out.numel() and any(
            out.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in self._rooms
        ):
            raise LockStepError(f"rank {self.mesh.rank}: the output of {verb} lies in a room")
        self._turn = 1 - self._turn
        return self._meet_stage(Call(verb, tuple(part.shape), (part.dtype, out.dtype)), part)

    def _meet_stage(self, call: Call, value: object) -> list[Any]:
        self.num_calls += 1
        group = f"stage {self.mesh.stage}"
        return self._steps.meet(group, self._stage, self.mesh.rank, self.num_calls, call, value)

    def _meet_head(
        self, verb: str, part: torch.Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> list[torch.Tensor]:
        assert (part is None) != self.mesh.is_last_stage, f"rank {self.mesh.rank} passes {part=} to {verb}"
        self._num_head_calls += 1
        value = None if part is None else part.clone()
        found = self._steps.meet(
            "head", self._head, self.mesh.rank, self._num_head_calls, Call(verb, shape, dtypes), value
        )
        return [part for part in found if part is not None]
