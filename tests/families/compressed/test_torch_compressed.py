"""Compressed attention in plain torch against a dense softmax in float64, row by row; blocks of rows and vectors, wanted rows; what it declares."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.compressed_steps import MAX_LEN, Rows, Shape, Step
from holdfast.attention.backend import LayerStep, SequenceRows
from holdfast.attention.declarations import SELECTED, StepBounds
from holdfast.families.compressed import torch_backend as torch_compressed
from holdfast.families.compressed.declarations import TorchCompressedDeclaration
from holdfast.families.compressed.torch_backend import TorchCompressedAttention
from holdfast.families.sparse.torch_backend import index_keys
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents

SHAPE = Shape()
MIXED: Rows = [(0, 1), (9, 1), (10, 1), (26, 1), (27, 1), (28, 1), (61, 1), (20, 11), (0, 13)]
"""Around the window of 10, and around 6 chosen entries of 4 tokens: from position 27 on a row chooses."""
TORCH = TorchCompressedDeclaration()


class Judged(TorchCompressedAttention):
    """Compares every result with that of a dense softmax."""

    def plan(self, batch: Any, captured: bool = False) -> Any:
        self.batch = batch
        return super().plan(batch, captured)

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        self._index_queries = q_TID, weights_TI
        super().select(q_TID, weights_TI, step)

    def attend(
        self,
        q_TND: torch.Tensor,
        sinks_N: torch.Tensor,
        rotary: Rotary,
        step: LayerStep,
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        batch = self.batch
        out_RX = super().attend(q_TND, sinks_N, rotary, step, out_TX, wanted_only)
        rows_R = batch.logits.rows_R.tolist() if wanted_only else None
        sequences, num_done = batch.logits.sequences if wanted_only else batch.sequences, 0
        for rows in sequences:
            for row in range(rows.num_rows):
                place = rows.row_start + row
                own = place if rows_R is None else rows_R[place]
                expected = self._dense(q_TND[own], sinks_N, rotary, step.layer, rows, rows.start + row, own)
                found = out_RX[place].double().unflatten(0, expected.shape)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                num_done = place + 1
        assert not out_RX[num_done:].any(), "padded rows are zeros"
        return out_RX

    def _dense(
        self,
        q_ND: torch.Tensor,
        sinks_N: torch.Tensor,
        rotary: Rotary,
        layer: int,
        rows: SequenceRows,
        position: int,
        own: int,
    ) -> torch.Tensor:
        spec = self._specs[layer]
        seen = range(max(0, position - (spec.window or 0) + 1), position + 1)
        vectors = [self._vectors(self.windows[layer], rows, spec.group, list(seen))]
        if spec.entries is not None:
            entries = list(range((position + 1) // spec.ratio))
            if 0 < spec.index_top_k < len(entries):
                entries = self._best(layer, rows, entries, own)
            vectors.append(self._vectors(self.entries[layer], rows, spec.entries_group, entries))
        x_CD = torch.cat(vectors)
        scores_NC = torch.cat((q_ND.double() @ x_CD.T * spec.scale, sinks_N.double().unsqueeze(1)), dim=1)
        out_ND = scores_NC.softmax(dim=1)[:, :-1] @ x_CD
        start = x_CD.shape[1] - rotary.dim
        angle_d = torch.atan2(rotary.sin_TP[own], rotary.cos_TP[own]).double()
        turned = torch.view_as_complex(out_ND[:, start:].unflatten(1, (-1, 2)).contiguous())
        back = turned * torch.polar(torch.ones_like(angle_d), -angle_d)
        return torch.cat((out_ND[:, :start], torch.view_as_real(back).flatten(1)), dim=1)

    def _best(self, layer: int, rows: SequenceRows, entries: list[int], own: int) -> list[int]:
        """Those with the largest sum of weighted relus."""
        spec, (q_TID, weights_TI) = self._specs[layer], self._index_queries
        slots = self._slot_list(rows, spec.entries_group, entries)
        keys_CD = index_keys(self.indexes[layer], slots).double()
        scores_C = weights_TI[own].double() @ (q_TID[own].double() @ keys_CD.T).relu()
        return sorted(scores_C.topk(spec.index_top_k).indices.tolist())

    def _vectors(self, planes: LatentPlanes, rows: SequenceRows, group: int, places: list[int]) -> torch.Tensor:
        return read_latents(planes, self._slot_list(rows, group, places), torch.float32).double()

    def _slot_list(self, rows: SequenceRows, group: int, places: list[int]) -> torch.Tensor:
        size, table = self._page_rows, rows.tables[group]
        slots = [table[place // size] * size + place % size for place in places]
        return torch.tensor(slots, dtype=torch.int64)


def judge(step: Step) -> list[torch.Tensor]:
    return step.run(Judged(step.specs, step.storage, step.states))


@pytest.mark.parametrize("name", ["float32", "fp8_ds_v4"])
@pytest.mark.parametrize("padding", [0, 3])
def test_torch_compressed_mixed_step_matches_float64_softmax(name, padding):
    judge(Step(replace(SHAPE, name=name), MIXED, padding=padding))


def test_rows_and_vectors_in_blocks_of_any_size(monkeypatch):
    for block in (1, 3, 7):
        monkeypatch.setattr(torch_compressed, "BLOCK_TOKENS", block)
        monkeypatch.setattr(torch_compressed, "BLOCK_ROWS", block)
        monkeypatch.setattr(torch_compressed, "index_block_rows", lambda *_, rows=block: rows)
        judge(Step(SHAPE, [(5, 9), (40, 6), (0, 20)], padding=1))


def test_attend_returns_only_wanted_rows():
    wanted = [0, 6, 11, 20]
    found, whole = judge(Step(SHAPE, MIXED, wanted=wanted)), judge(Step(SHAPE, MIXED))
    for own, every in zip(found, whole, strict=True):
        torch.testing.assert_close(own, every[wanted], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratios", [(0, 0), (8,), (4, 4)], ids=str)
def test_layers_of_one_kind(ratios):
    judge(Step(replace(SHAPE, ratios=ratios), MIXED))


def test_torch_compressed_window_longer_than_context_is_exact():
    judge(Step(replace(SHAPE, window=MAX_LEN), MIXED))


def test_torch_compressed_skips_table_holes_before_window():
    step = Step(SHAPE, [(61, 2)])
    (rows,) = step.batch.sequences
    tables = list(rows.tables)
    tables[0] = [-1 if place < 52 // 4 else chunk for place, chunk in enumerate(tables[0])]
    holed = replace(step.batch, sequences=(rows._replace(tables=tuple(tables)),))
    whole = judge(step)
    step.batch = holed
    for own, other in zip(judge(step), whole, strict=True):
        assert torch.equal(own, other)


def test_torch_compressed_declares_scratch_and_terms():
    specs, bounds = SHAPE.specs(SHAPE.cache()), StepBounds(4, 32, 4)
    assert [TORCH.unsupported(spec) for spec in specs] == [None] * 3
    assert specs[0].most_entries == 0
    assert specs[2].most_entries == MAX_LEN // 4
    (selected,) = TORCH.scratch(specs, bounds)
    assert (selected.name, selected.shape) == (SELECTED, (32 * 6,))
    assert TORCH.scratch(specs[:2], bounds) == ()
    assert TORCH.scratch(SHAPE.specs(SHAPE.cache(), max_model_len=24), bounds) == ()
    assert [term.owner for term in TORCH.terms(specs, bounds)] == ["attention/blocks", "attention/index"]
    assert [term.owner for term in TORCH.terms(specs[:2], bounds)] == ["attention/blocks"]
    longer = tuple(replace(spec, max_model_len=2**20) for spec in specs)
    assert TORCH.terms(longer, bounds) == TORCH.terms(specs, bounds), "nothing grows with the context"
