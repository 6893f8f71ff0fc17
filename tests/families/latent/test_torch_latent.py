"""Latent attention in plain torch against keys and values of every head, written out: any chunking, any company, padding."""

from collections.abc import Sequence
from math import sqrt

import pytest
import torch

from holdfast.attention.backend import Batch, LayerStep, LogitRows, SequenceRows
from holdfast.cache.spec import LayerCache, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.latent import torch_backend as torch_latent
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.latent.torch_backend import TorchLatentAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.write_latent import LatentNorm, rotate_neighbours
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import formats_of

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, VALUE, HEADS, PAGE = 32, 16, 24, 8, 3, 4
MAX_LEN, NUM_PAGES = 64, 40


class House:
    """One layer's pages, weights and a history of latents by sequence."""

    def __init__(self, seed: int = 0, name: str = "float32") -> None:
        torch.manual_seed(seed)
        kv_format = formats_of(is_latent=True)[name]
        cache = LayerCache(0, "latent", kv_format, 1, LATENT + ROPE, ROPE)
        self.spec = LatentAttentionSpec(
            cache, HEADS, 1 / sqrt(NOPE + ROPE), None, MAX_LEN, "float32", "cpu", nope_dim=NOPE, value_dim=VALUE
        )
        storage = PageStorage(
            uniform_cache(1, kv_format, 1, LATENT + ROPE, PAGE, rope_dim=ROPE), NUM_PAGES, CPU, Ledger()
        )
        for plane in storage.planes(0).values():
            plane.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing is written
        self.backend = TorchLatentAttention((self.spec,), storage)
        self.norm = LatentNorm(torch.rand(LATENT) + 0.5, 1e-6)
        angle_LP = torch.outer(torch.arange(MAX_LEN).float(), 100.0 ** (-torch.arange(ROPE // 2) / ROPE * 2))
        self.table = Rotary(angle_LP.cos(), angle_LP.sin())
        self.kv_b_NXL = torch.randn(HEADS, NOPE + VALUE, LATENT) / LATENT**0.5

    def tokens(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(num_tokens, LATENT + ROPE), torch.randn(num_tokens, HEADS, NOPE + ROPE)

    def expected(self, latent_LX: torch.Tensor, q_LND: torch.Tensor) -> torch.Tensor:
        """For a whole sequence: keys and values by head, a causal softmax."""
        x_LC = latent_LX[:, :LATENT]
        c_LC = x_LC / (x_LC.square().mean(-1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight_L
        rope_LR = rotate_neighbours(latent_LX[:, LATENT:], self.table)
        expanded = torch.einsum("lc,nxc->nlx", c_LC, self.kv_b_NXL)
        k_NLD = torch.cat((expanded[..., :NOPE], rope_LR.expand(HEADS, -1, -1)), dim=-1)
        q_LND = torch.cat((q_LND[..., :NOPE], rotate_neighbours(q_LND[..., NOPE:], self.table)), dim=-1)
        scores_NLL = q_LND.transpose(0, 1) @ k_NLD.transpose(1, 2) * self.spec.scale
        mask_LL = torch.ones(len(latent_LX), len(latent_LX), dtype=torch.bool).triu(1)
        p_NLL = scores_NLL.masked_fill(mask_LL, -torch.inf).softmax(-1)
        return (p_NLL @ expanded[..., NOPE:]).transpose(0, 1).flatten(1)

    def step(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor, int, int, list[int]]],
        padding: int = 0,
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Rows [start, end) of each sequence (latents, queries, start, end, pages), and the backend's word on them."""
        rows, slots, positions, sequences, row = [], [], [], [], 0
        for _, _, start, end, pages in parts:
            sequences.append(SequenceRows(row, end - start, start, (pages,)))
            slots += [pages[position // PAGE] * PAGE + position % PAGE for position in range(start, end)]
            positions += range(start, end)
            row += end - start
        slots += [-1] * padding
        positions += [0] * padding
        latent_TX = torch.cat([part[0][part[2] : part[3]] for part in parts] + [torch.full((padding, 48), torch.nan)])
        q_TND = torch.cat(
            [part[1][part[2] : part[3]] for part in parts] + [torch.full((padding, HEADS, NOPE + ROPE), torch.nan)]
        )
        logits = None
        if wanted is not None:
            owners = [next(s for s in sequences if s.row_start <= one < s.row_start + s.num_rows) for one in wanted]
            rows = [
                SequenceRows(place, 1, owner.start + one - owner.row_start, owner.tables)
                for place, (one, owner) in enumerate(zip(wanted, owners, strict=True))
            ]
            logits = LogitRows(torch.tensor(wanted), tuple(rows))
        batch = Batch(
            torch.zeros(row + padding, dtype=torch.int64),
            torch.tensor(positions),
            torch.tensor(slots).unsqueeze(0),
            tuple(sequences),
            logits,
        )
        plan = self.backend.plan(batch)
        self.backend.write(latent_TX, q_TND, batch, self.norm, self.table.at(batch.positions_T), 0)
        out_TX = torch.full((row + padding, HEADS * VALUE), torch.nan)
        return self.backend.attend(q_TND, self.kv_b_NXL, LayerStep(0, plan, {}), out_TX, wanted is not None)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 30])
def test_torch_latent_any_chunking_matches_keys_by_head(chunk: int) -> None:
    house = House()
    latents, queries = house.tokens(30)
    pages = torch.randperm(NUM_PAGES)[:8].tolist()
    outs = [house.step([(latents, queries, start, min(start + chunk, 30), pages)]) for start in range(0, 30, chunk)]
    torch.testing.assert_close(torch.cat(outs), house.expected(latents, queries), rtol=1e-5, atol=1e-5)


def test_attend_batch_and_padding_change_no_row() -> None:
    house = House(1)
    first, second = house.tokens(13), house.tokens(6)
    pages = torch.randperm(NUM_PAGES).tolist()
    alone = house.step([(*first, 0, 13, pages[:4])])
    both = house.step([(*second, 0, 6, pages[4:6]), (*first, 0, 13, pages[6:10])], padding=3)
    torch.testing.assert_close(both[6:19], alone, rtol=0, atol=0)
    assert (both[19:] == 0).all()


def test_attend_returns_only_wanted_rows() -> None:
    house = House(2)
    first, second = house.tokens(9), house.tokens(5)
    expected = torch.stack((house.expected(*first)[8], house.expected(*second)[4]))
    found = house.step([(*first, 0, 9, [3, 1, 2]), (*second, 0, 5, [7, 5])], wanted=[8, 13])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_contexts_longer_than_a_block_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_latent, "BLOCK_TOKENS", 8)
    house = House(3)
    latents, queries = house.tokens(41)
    pages = torch.randperm(NUM_PAGES)[:11].tolist()
    found = house.step([(latents, queries, 0, 41, pages)])
    torch.testing.assert_close(found, house.expected(latents, queries), rtol=1e-5, atol=1e-5)
