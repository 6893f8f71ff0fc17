"""Latent attention inside graphs: captured at length 1, replayed at any, over poisoned memory, in every format of pages."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.quant.formats import MLA_FORMATS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep
from holdfast.runner.build import BuiltRunner
from kernels.exactness import same_bits
from runner.gpu_traffic import CheckedReplays, Known, build_dummy, in_a_row, recorded, traffic
from runner.tiny_runners import held_storages

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
PAGES = 130
"""For a sequence of the longest context, and a few more."""
MODES = [
    pytest.param(name, kv_format, id=f"{name}, {kv_format}")
    for name in ("latent", "latent_q", "sparse")
    for kv_format in ("auto", *MLA_FORMATS)
]
MODES += [
    pytest.param("sparse_shared", kv_format, id=f"sparse_shared, {kv_format}") for kv_format in ("auto", "fp8_ds_mla")
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


class Stage:
    """Sequences of fixed lengths on pages of their own; only the last token of each is computed again and again."""

    def __init__(self, built: BuiltRunner) -> None:
        assert built.storage.num_pages >= 6 * PAGES, "sequences have more pages than the pool"
        self.built = built
        self._made: dict[tuple[int, int], Known] = {}

    def decode(self, lengths: list[int]) -> torch.Tensor:
        """One step that decodes the last token of sequences of these lengths, over poison: its logits."""
        items, held = [], set()
        for place, length in enumerate(lengths):
            one = self._ready(place, length)
            one.position = length - 1
            items.append(one.schedule(1, lambda sequence, start, end: None))
            held |= set(range(place * PAGES, place * PAGES + -(-length // 16)))
        self._poison(held)
        with recorded(self.built) as kept:
            self.built.runner.execute(LiveStep(tuple(items)))
        is_bad = ~kept[0].isfinite().all(dim=1)
        assert not bool(is_bad.any()), f"rows {is_bad.nonzero().flatten().tolist()} of {lengths}: {self._blame(held)}"
        return kept[0]

    def _blame(self, held: set[int]) -> str:
        """Name the planes of pages that are not finite: if there are none, the step itself read poison."""
        slots = (
            torch.tensor(sorted(held), device="cuda").unsqueeze(1) * 16 + torch.arange(16, device="cuda")
        ).flatten()
        bad = []
        for layer in range(len(self.built.storage.spec.layers)):
            for name, plane in self.built.storage.planes(layer).items():
                rows = plane[slots].flatten(1)
                is_bad = ~rows.float().isfinite() if plane.is_floating_point() else rows.view(torch.uint8) == 0xFF
                whole = is_bad.all(dim=1) if not plane.is_floating_point() else is_bad.any(dim=1)
                bad += [f"layer {layer} {name} slots {slots[whole][:8].tolist()}"] if bool(whole.any()) else []
        return "; ".join(bad) or "all pages are finite"

    def _ready(self, place: int, length: int) -> Known:
        """A sequence whose context is on its pages, in place of whatever was there."""
        self._made = {key: one for key, one in self._made.items() if key[0] != place or key[1] == length}
        if (place, length) not in self._made:
            one = Known(place, length, length, 1000, GREEDY)
            while one.position < length - 1:
                count = min(256, length - 1 - one.position)
                item = one.schedule(count, in_a_row(self.built.runner.groups, place * PAGES))
                self.built.runner.execute(LiveStep((item,)))
            in_a_row(self.built.runner.groups, place * PAGES)(one.sequence, length - 1, length)
            self._made[place, length] = one
        return self._made[place, length]

    def _poison(self, held: set[int]) -> None:
        """NaN in all pages but these, and in the unused slots of nothing else: steps write their own."""
        torch.cuda.synchronize()
        runner: Any = self.built.runner
        used = set(held)
        for (place, length), _ in self._made.items():
            used |= set(range(place * PAGES, place * PAGES + -(-length // 16)))
        free = torch.tensor([page for page in range(self.built.storage.num_pages) if page not in used], device="cuda")
        slots = (free.unsqueeze(1) * 16 + torch.arange(16, device="cuda")).flatten()
        for layer in range(len(self.built.storage.spec.layers)):
            for plane in self.built.storage.planes(layer).values():
                plane.view(torch.uint8)[slots] = 0xFF
        for lane, memory in runner.model.workspace.lanes.items():
            if lane != "fused_decode":  # small-batch GEMMs count in it, and leave it at zero
                memory.fill_(0xFF)
        torch.cuda.synchronize()


@pytest.mark.parametrize(("name", "kv_format"), MODES)
def test_captured_at_length_one_and_replayed_at_any(build, name, kv_format):
    built = build(name, kv_cache_dtype=kv_format)
    stage, checked = Stage(built), CheckedReplays(built)
    longest = built.runner.limits.max_model_len
    places = held_storages(built.runner)
    first = stage.decode([3, 2])
    again = stage.decode([3, 2])
    assert same_bits(first, again)
    assert held_storages(built.runner) == places
    stage.decode([4, 1])
    stage.decode([longest, longest])
    assert same_bits(stage.decode([3, 2]), first), "what was replayed in between shows"
    wide = stage.decode([17, 64, 65, 300, 1, 2])  # on both sides of what rows of a sparse model attend to
    assert bool(wide.isfinite().all())
    alone = stage.decode([3])
    assert same_bits(stage.decode([3]), alone)
    assert {size for size, is_decode in checked.sizes if is_decode} == {1, 2, 8}


@pytest.mark.parametrize(("name", "kv_format"), MODES[1:4] + MODES[5:6] + MODES[9:11] + MODES[12:13])
def test_graph_replay_equals_eager_kernels_to_the_bit(build, name, kv_format):
    built = build(name, kv_cache_dtype=kv_format)
    checked = CheckedReplays(built)
    for step in traffic(built).steps(150):
        built.runner.execute(step)
    assert {(size, True) for size in (1, 2, 4, 8)} <= set(checked.sizes)
    assert {(size, False) for size in (64, 128)} & set(checked.sizes)
