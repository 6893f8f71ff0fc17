"""Latent attention over tiles, in the interpreter or on a GPU, against plain torch: parts of a step, groups of heads, padding, captured plans."""

from dataclasses import dataclass

import pytest
import torch

from attention.steps import BEYOND, QUIET
from holdfast.attention import declarations, triton_latent
from holdfast.attention.backend import Batch, LogitRows, SequenceRows
from holdfast.attention.declarations import AttentionSpec, StepBounds, TritonLatentDeclaration
from holdfast.attention.torch_latent import TorchLatentAttention
from holdfast.attention.triton_latent import TritonLatentAttention, rows_between
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.kernels import up_projection
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.attention.write_latent import LatentNorm
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import MLA_FORMATS, formats_of

PAGE, MAX_LEN = 16, 512
Rows = list[tuple[int, int]]
"""Start and number of rows of each sequence."""
MIXED: Rows = [(0, 1), (15, 1), (16, 1), (299, 1), (40, 5), (0, 33), (20, 30)]


@dataclass(frozen=True)
class Shape:
    """A small model."""

    num_heads: int = 3
    latent_dim: int = 32
    rope_dim: int = 16
    nope_dim: int = 16
    value_dim: int = 16
    name: str = "float32"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(8, 128, PAGE)

    def storage(self, num_pages: int) -> PageStorage:
        row_dim, kv_format = self.latent_dim + self.rope_dim, formats_of(is_latent=True)[self.name]
        cache = uniform_cache(1, kv_format, 1, row_dim, PAGE, self.rope_dim)
        storage = PageStorage(cache, num_pages, torch.device(self.device), Ledger())
        for plane in storage.planes(0).values():
            plane.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing is written
        return storage

    def specs(self, storage: PageStorage) -> tuple[AttentionSpec, ...]:
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = {"nope_dim": self.nope_dim, "value_dim": self.value_dim}
        (cache,) = storage.spec.layers
        return (AttentionSpec(cache, self.num_heads, scale, None, MAX_LEN, dtype, self.device, **sizes),)


class Step:
    """Sequences on shuffled pages with a history, and rows of each that attend."""

    def __init__(self, shape: Shape, rows: Rows, padding: int = 0, wanted: list[int] | None = None) -> None:
        torch.manual_seed(7)
        self.shape, device = shape, shape.device
        pages = [-(-(start + count) // PAGE) for start, count in rows]
        self.storage = shape.storage(sum(pages) + 2)
        self.specs = shape.specs(self.storage)
        places = (1 + torch.randperm(sum(pages))).tolist()
        table_NP = torch.full((len(rows), -(-MAX_LEN // PAGE)), BEYOND, dtype=torch.int32)
        sequences, slots, positions, self.num_rows = [], [], [], 0
        self.history: list[tuple[list[int], int]] = []
        for index, ((start, count), needed) in enumerate(zip(rows, pages, strict=True)):
            own, places = places[:needed], places[needed:]
            table_NP[index, :needed] = torch.tensor(own, dtype=torch.int32)
            sequences.append(SequenceRows(self.num_rows, count, start, (own,), index))
            slot = [own[position // PAGE] * PAGE + position % PAGE for position in range(start + count)]
            self.history.append((slot[:start], start))
            slots += slot[start:]
            positions += range(start, start + count)
            self.num_rows += count
        slots, positions = slots + [-1] * padding, positions + [0] * padding
        logits = None
        if wanted is not None:
            logits = LogitRows(torch.tensor(wanted, device=device), tuple(self._row(sequences, row) for row in wanted))
        self.batch = Batch(
            torch.zeros(self.num_rows + padding, dtype=torch.int64, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device).unsqueeze(0),
            tuple(sequences),
            logits,
            (table_NP.to(device),),
        )

    @staticmethod
    def _row(sequences: list[SequenceRows], row: int) -> SequenceRows:
        owner = next(one for one in sequences if one.row_start <= row < one.row_start + one.num_rows)
        return SequenceRows(row, 1, owner.start + row - owner.row_start, owner.tables, owner.table_row)

    def run(self, backend: TorchLatentAttention | TritonLatentAttention, captured: bool = False) -> torch.Tensor:
        """Write the history and the step, and attend; scratch is poisoned."""
        shape, dtype, device = self.shape, self.shape.dtype, self.shape.device
        torch.manual_seed(11)
        row_dim, num_rows = shape.latent_dim + shape.rope_dim, self.batch.num_rows
        norm = LatentNorm((torch.rand(shape.latent_dim) + 0.5).to(device, dtype), 1e-6)
        angle_LR = torch.outer(torch.arange(MAX_LEN).float(), 50.0 ** (-torch.arange(shape.rope_dim // 2) / 8))
        cos_LR, sin_LR = angle_LR.cos().repeat(1, 2), torch.cat((-angle_LR.sin(), angle_LR.sin()), dim=1)
        rotary = Rotary(cos_LR.to(device, dtype), sin_LR.to(device, dtype))
        heads, width = shape.num_heads, shape.nope_dim + shape.rope_dim
        for slots, count in self.history:
            if count:
                rows_T = torch.arange(count, device=device)
                past = Batch(rows_T, rows_T, torch.tensor([slots], device=device), (), None)
                latents = torch.randn(count, row_dim).to(device, dtype)
                backend.write(latents, torch.zeros(count, heads, width).to(device, dtype), past, norm, rotary, 0)
        latent_TX = torch.randn(num_rows, row_dim).to(device, dtype)
        q_TND = torch.randn(num_rows, heads, width).to(device, dtype)
        kv_b_NXL = (torch.randn(heads, shape.nope_dim + shape.value_dim, shape.latent_dim) * 0.2).to(device, dtype)
        latent_TX[self.num_rows :], q_TND[self.num_rows :] = torch.nan, torch.nan
        plan = backend.plan(self.batch, captured)
        backend.write(latent_TX, q_TND, self.batch, norm, rotary, 0)
        scratch = {
            spec.name: torch.full(spec.shape, torch.nan, dtype=getattr(torch, spec.dtype), device=device)
            for spec in TritonLatentDeclaration().scratch(self.specs, shape.bounds)
        }
        out_TX = torch.full((num_rows, heads * shape.value_dim), torch.nan, dtype=dtype, device=device)
        return backend.attend(q_TND, kv_b_NXL, 0, plan, scratch, out_TX, self.batch.logits is not None)

    def triton(self, captured: bool = False) -> torch.Tensor:
        return self.run(TritonLatentAttention(self.specs, self.storage, self.shape.bounds, 2), captured)

    def torch(self) -> torch.Tensor:
        return self.run(TorchLatentAttention(self.specs, self.storage))


def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@QUIET
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_mixed_step_with_padding(captured):
    step = Step(Shape(), MIXED, padding=5)
    found = step.triton(captured)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


@QUIET
@pytest.mark.parametrize("name", MLA_FORMATS)
def test_quantized_latents(name):
    step = Step(Shape(name=name, latent_dim=64), MIXED, padding=5)
    found = step.triton(captured=True)
    check(found[: step.num_rows], step.torch()[: step.num_rows], 2e-3)
    assert (found[step.num_rows :] == 0).all()


@QUIET
@pytest.mark.parametrize("padding", [0, 3])
def test_long_prompts_are_up_projected_beside_absorbed_rows(monkeypatch, padding):
    monkeypatch.setattr(up_projection, "LEAST_ROWS", 20)
    monkeypatch.setattr(up_projection, "LAUNCHES_COST", 0)
    monkeypatch.setattr(declarations, "LEAST_ROWS", 20)
    step = Step(Shape(), MIXED, padding)
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    plan = backend.plan(step.batch)
    assert [rows.num_rows for rows in plan.up_projected] == [33, 30]
    assert backend.plan(step.batch, captured=True).up_projected == ()
    found = step.run(backend)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


@QUIET
def test_parts_that_are_all_up_projected_are_left_out(monkeypatch):
    monkeypatch.setattr(up_projection, "LEAST_ROWS", 20)
    monkeypatch.setattr(up_projection, "LAUNCHES_COST", 0)
    for module in (declarations, triton_latent):
        monkeypatch.setattr(module, "LATENT_ROWS", 16)
    step = Step(Shape(), [(3, 1), (0, 60)])
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    assert [part.first_row for part in backend.plan(step.batch).parts] == [0]
    check(step.run(backend), step.torch())


@QUIET
def test_wanted_rows_alone():
    wanted = [0, 3, 8, 71]
    found = Step(Shape(), MIXED, wanted=wanted).triton()
    check(found, Step(Shape(), MIXED).torch()[wanted])


@QUIET
def test_a_large_step_goes_in_parts_and_in_groups_of_heads(monkeypatch):
    for module in (declarations, triton_latent):
        monkeypatch.setattr(module, "LATENT_ROWS", 32)
    monkeypatch.setattr(declarations, "LATENT_HEAD_ROWS", 64)
    monkeypatch.setattr(declarations, "LATENT_HEADS", 2)
    step = Step(Shape(num_heads=5), MIXED, padding=3)
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    assert [part.num_rows for part in backend.plan(step.batch).parts] == [32, 32, 11]
    found = step.run(backend)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


def test_rows_of_a_part():
    first, second = SequenceRows(0, 5, 10, ([],), 0), SequenceRows(5, 7, 0, ([],), 1)
    assert rows_between((first, second), 0, 4) == (first._replace(num_rows=4),)
    assert rows_between((first, second), 4, 8) == (
        first._replace(row_start=0, num_rows=1, start=14),
        second._replace(row_start=1, num_rows=3),
    )
    assert rows_between((first, second), 8, 12) == (second._replace(row_start=0, num_rows=4, start=3),)


def test_what_it_holds_is_what_it_said():
    shape = Shape(num_heads=16)
    storage = shape.storage(1)
    specs = shape.specs(storage)
    for bounds in (StepBounds(4, 64, PAGE), StepBounds(256, 8192, PAGE)):
        backend = TritonLatentAttention(specs, storage, bounds, 132)
        terms = TritonLatentDeclaration().terms(specs, bounds)
        assert backend.held_bytes() == {term.owner: term.num_bytes for term in terms}


def test_plans_lie_where_the_first_one_lay():
    step = Step(Shape(), [(40, 1)])
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    pointers = {backend.plan(step.batch).parts[0].work.tiles_X8.data_ptr() for _ in range(3)}
    assert len(pointers) == 1
