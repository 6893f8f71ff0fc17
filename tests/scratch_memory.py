"""Scratch memory that stays from call to call, in three states: NaN, zeros, and what an earlier call left.

A test of a kernel takes its outputs and scratch from a Memory; `check_calls` runs it in each state. The fixture `poison`
does the same for memory that code under test gets from torch.empty.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from red_zones import RedZones

if TYPE_CHECKING:
    import torch

Call = TypeVar("Call")
ROOM = 4
"""Times the first call's need: later calls may be longer."""


class Poison(StrEnum):
    """What memory holds before a call."""

    NAN = "nan"
    """Every byte is 0xFF: NaN in each float type, -1 in each signed integer."""
    ZEROS = "zeros"
    LEFTOVERS = "leftovers"
    """Plausible numbers: another call with other inputs wrote them."""


class Memory:
    """Tensors by name. A second call gets the same addresses, with the first call's results in them."""

    def __init__(self, device: "torch.device", poison: Poison = Poison.NAN) -> None:
        """LEFTOVERS begins with NaN: the test makes an earlier call."""
        self.device = device
        self._byte = 0 if poison is Poison.ZEROS else 0xFF
        self._zones = RedZones(device)
        self._bodies: dict[str, torch.Tensor] = {}
        self._tails: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(
        self, name: str, *shape: int, dtype: "torch.dtype | None" = None, is_counter: bool = False
    ) -> "torch.Tensor":
        """Return the tensor of this name. A counter begins with zeros, as the engine hands it out; calls have to reset it."""
        import torch

        dtype = dtype or torch.float32
        num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if name not in self._bodies:
            body = self._zones.allocate(-(-ROOM * num_bytes // 1024) * 1024 + 1024, dtype=torch.uint8)
            self._bodies[name] = body if is_counter else body.fill_(self._byte)
        body = self._bodies[name]
        assert num_bytes <= len(body), f"{name}: {shape} is more than {ROOM} times the first call's need"
        self._tails[name] = body[num_bytes:], body[num_bytes:].clone()
        return body[:num_bytes].view(dtype).view(shape)

    def check(self) -> None:
        """Check that calls wrote inside their tensors."""
        self._zones.check()
        for name, (tail, before) in self._tails.items():
            assert bool((tail == before).all()), f"{name} was written after its end"


def check_calls(
    device: "torch.device", run: "Callable[[Call, Memory], Sequence[torch.Tensor]]", calls: Sequence[Call]
) -> None:
    """Check that no call sees what its memory held before: NaN, zeros, or what the other calls left.

    `run` takes scratch and outputs from the memory and returns all that the call has to write. Calls should differ in
    their inputs and their sizes: they run in their order and then in reverse, on the same memory.
    """
    alone = [_copied(run(call, Memory(device))) for call in calls]
    for poison in (Poison.ZEROS, Poison.LEFTOVERS):
        memory = Memory(device, poison)
        orders = (range(len(calls)), range(len(calls) - 2, -1, -1)) if poison is Poison.LEFTOVERS else (range(1),)
        for place in chain.from_iterable(orders):
            for result, expected in zip(_copied(run(calls[place], memory)), alone[place], strict=True):
                assert result.shape == expected.shape, f"{poison}: {result.shape=} {expected.shape=}"
                assert bool((result.view(-1) == expected.view(-1)).all()), f"call {place} sees memory with {poison}"
            memory.check()


def _copied(results: "Sequence[torch.Tensor]") -> "list[torch.Tensor]":
    """The bytes of each."""
    import torch

    return [result.detach().cpu().contiguous().clone().view(torch.uint8) for result in results]


@contextmanager
def filled_empty(poison: Poison) -> Iterator[None]:
    """Make torch.empty and its relatives return memory in this state."""
    import torch

    if poison is Poison.NAN:
        was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        deterministic: Any = torch.utils.deterministic
        filled = deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        yield
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        return
    value = 0 if poison is Poison.ZEROS else 3
    places: list[tuple[Any, str]] = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, _filling(original, value))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _filling(make: "Callable[..., torch.Tensor]", value: int) -> "Callable[..., torch.Tensor]":
    def make_and_fill(*args: Any, **kwargs: Any) -> "torch.Tensor":
        made = make(*args, **kwargs)
        return made if made.is_meta else made.fill_(value)

    return make_and_fill
