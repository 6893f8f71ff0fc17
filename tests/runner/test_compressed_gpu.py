"""Compressed attention inside graphs: captured at length 1, replayed around every window and ratio, over poisoned memory, with states that are put back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.cache.groups import HOLE
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, Sequence
from holdfast.runner.build import BuiltRunner
from kernels.exactness import same_bits
from runner.gpu_traffic import CheckedStates, Known, build_dummy, recorded, traffic
from runner.tiny_runners import held_storages

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
MODES = [
    pytest.param(name, kv_format, id=f"{name}, {kv_format}")
    for name in ("compressed", "compressed_small")
    for kv_format in ("auto", "fp8")
]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., BuiltRunner]]:
    """build(name, **options) -> a runner of a tiny model; all are released in the end."""
    made: list[BuiltRunner] = []

    def build_one(name: str, **options: Any) -> BuiltRunner:
        made.append(build_dummy(tmp_path, name, **options))
        return made[-1]

    yield build_one
    for built in made:
        built.release()


def states_of(built: BuiltRunner) -> list[torch.Tensor]:
    """[layers, places, ...] of every kind of state."""
    backend: Any = built.runner.backend
    return list(backend._states._arena.tensors.values())


def held_pages(one: Known) -> list[int]:
    """For all groups."""
    return [page for table in one.sequence.tables for page in table if page != HOLE]


class Stage:
    """Sequences of fixed lengths on pages of their own; only the last token of each is computed, from the same state again and again."""

    def __init__(self, built: BuiltRunner) -> None:
        self.built, self._states = built, states_of(built)
        self._made: dict[int, tuple[Known, list[torch.Tensor]]] = {}
        self._free = list(range(built.storage.num_pages))

    def decode(self, lengths: list[int]) -> torch.Tensor:
        """One step that decodes the last token of sequences of these lengths, over poison: its logits."""
        items = []
        for place, length in enumerate(lengths):
            one, kept = self._ready(place, length)
            for state, own in zip(self._states, kept, strict=True):
                state[:, place] = own
            one.position = length - 1
            items.append(one.schedule(1, lambda sequence, start, end: None))
        self._poison()
        with recorded(self.built) as logits:
            self.built.runner.execute(LiveStep(tuple(items)))
        return logits[0]

    def _grow(self, sequence: Sequence, start: int, end: int) -> None:
        """Pages for these tokens; what lies behind a window goes back."""
        groups = self.built.runner.groups
        sequence.tables += [[] for _ in range(len(groups) - len(sequence.tables))]
        for group, table in zip(groups, sequence.tables, strict=True):
            for place in range(min(group.first_page(start), len(table))):
                if table[place] != HOLE:
                    self._free.append(table[place])
                    table[place] = HOLE
            table += [self._free.pop() for _ in range(group.pages_for(end) - len(table))]

    def _ready(self, place: int, length: int) -> tuple[Known, list[torch.Tensor]]:
        """A sequence whose context is on its pages, in place of whatever was there, and its states before its last token."""
        if place not in self._made or len(self._made[place][0].tokens) != length:
            if place in self._made:
                self._free += held_pages(self._made.pop(place)[0])
            one = Known(place, length, length, 1000, GREEDY)
            one.sequence.slot = place
            while one.position < length - 1:
                count = min(256, length - 1 - one.position)
                self.built.runner.execute(LiveStep((one.schedule(count, self._grow),)))
            self._grow(one.sequence, length - 1, length)
            self._made[place] = one, [state[:, place].clone() for state in self._states]
        return self._made[place]

    def _poison(self) -> None:
        """NaN in all pages that no sequence has, in the states of slots that none has, and in the workspace."""
        torch.cuda.synchronize()
        storage, runner = self.built.storage, self.built.runner
        held = {page for one, _ in self._made.values() for page in held_pages(one)}
        free = torch.tensor([page for page in range(storage.num_pages) if page not in held], device="cuda")
        for index in range(len(storage.spec.layers)):
            group = storage.spec.groups[storage.spec.group_of(index)]
            for chunk in range(group.chunks_per_page):
                first = (chunk * storage.num_pages + free).unsqueeze(1) * storage.spec.page_tokens
                slots = (first + torch.arange(storage.spec.page_tokens, device="cuda")).flatten()
                for plane in storage.planes(index).values():
                    plane.view(torch.uint8)[slots] = 0xFF
        for place in set(range(self._states[0].shape[1])) - self._made.keys():
            for state in self._states:
                state[:, place] = torch.nan
        model: Any = runner.model
        for lane, memory in model.workspace.lanes.items():
            if lane != "fused_decode":  # small-batch GEMMs count in it, and leave it at zero
                memory.fill_(0xFF)
        torch.cuda.synchronize()


@pytest.mark.parametrize(("name", "kv_format"), MODES)
def test_captured_at_length_one_and_replayed_at_any(build, name, kv_format):
    built = build(name, kv_cache_dtype=kv_format)
    stage, checked = Stage(built), CheckedStates(built, states_of(built))
    longest = built.runner.limits.max_model_len
    places = held_storages(built.runner)
    first = stage.decode([3, 2])
    assert same_bits(stage.decode([3, 2]), first)
    assert held_storages(built.runner) == places
    stage.decode([4, 1])
    stage.decode([longest, longest - 1])
    assert same_bits(stage.decode([3, 2]), first), "what was replayed in between shows"
    # Around windows of 20 and 128, 5 and 16 chosen entries of 4, entries of 128, a page of 16 rows of entries.
    for lengths in ([5, 8, 19, 20, 21, 23], [24, 25, 66, 67, 68, 69], [127, 128, 129, 255, 256, 257], [2047, 513, 1]):
        assert bool(stage.decode(lengths).isfinite().all())
    alone = stage.decode([3])
    assert same_bits(stage.decode([3]), alone)
    assert {1, 2, 8} <= {size for size, is_decode in checked.sizes if is_decode}


@pytest.mark.parametrize(("name", "kv_format"), MODES)
def test_graph_replay_equals_eager_kernels_to_the_bit(build, name, kv_format):
    built = build(name, kv_cache_dtype=kv_format)
    checked = CheckedStates(built, states_of(built))
    for step in traffic(built).steps(100):
        built.runner.execute(step)
    assert {(size, True) for size in (1, 2, 4, 8)} <= set(checked.sizes)
    assert {(size, False) for size in (64, 128)} & set(checked.sizes)
