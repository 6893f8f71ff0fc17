"""Sparse latent attention in plain torch against scores and masks written out: any chunking, any company, formats, ties."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

import pytest
import torch

from holdfast.attention import declarations
from holdfast.attention.backend import Batch, LayerStep, LogitRows, SequenceRows
from holdfast.attention.declarations import StepBounds
from holdfast.cache.spec import mixed_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.latent import torch_backend as torch_latent
from holdfast.families.latent.torch_backend import TorchLatentAttention
from holdfast.families.sparse import torch_backend as torch_sparse
from holdfast.families.sparse.declarations import TorchSparseDeclaration
from holdfast.families.sparse.pages import SparseBackend
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.families.sparse.torch_backend import TorchSparseLatentAttention, index_keys, largest_tokens
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import read_latents
from holdfast.kernels.latent.write_index import IndexNorm, quantize_index_queries
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import formats_of

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, VALUE, HEADS, PAGE = 32, 16, 24, 8, 3, 4
INDEX_HEADS, INDEX_DIM, TOP_K = 8, 32, 5
MAX_LEN, NUM_PAGES, MAX_ROWS = 64, 40, 64
FACTOR = INDEX_HEADS**-0.5 * INDEX_DIM**-0.5


@dataclass
class Tokens:
    """What a layer makes of a sequence, before anything is rotated, and its pages."""

    latent_LX: torch.Tensor
    q_LND: torch.Tensor
    index_k_LD: torch.Tensor
    index_q_LID: torch.Tensor
    weights_LI: torch.Tensor
    pages: list[int]

    def __len__(self) -> int:
        return len(self.latent_LX)


Part = tuple[Tokens, int, int]
"""Rows [start, end) of a sequence."""


class House:
    """One layer's pages and weights, and the backend over them."""

    def __init__(self, seed: int = 0, name: str = "float32", index_dtype: str = "float32", top_k: int = TOP_K) -> None:
        torch.manual_seed(seed)
        kv_format = replace(formats_of(is_latent=True)[name], index_dtype=index_dtype)
        cache = mixed_cache((kv_format,), 1, LATENT + ROPE, PAGE, rope_dim=ROPE, index_dim=INDEX_DIM)
        self.spec = SparseAttentionSpec(
            cache.layers[0],
            HEADS,
            1 / sqrt(NOPE + ROPE),
            None,
            MAX_LEN,
            "float32",
            "cpu",
            nope_dim=NOPE,
            value_dim=VALUE,
            index_heads=INDEX_HEADS,
            index_top_k=top_k,
        )
        self.storage = PageStorage(cache, NUM_PAGES, CPU, Ledger())
        for plane in self.storage.planes(0).values():
            plane.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing is written
        self.backend: TorchSparseLatentAttention = TorchSparseLatentAttention((self.spec,), self.storage)
        scratch = TorchSparseDeclaration().scratch((self.spec,), StepBounds(4, MAX_ROWS, PAGE))
        self.scratch = {one.name: torch.full(one.shape, -1, dtype=torch.int32) for one in scratch}
        self.norm = LatentNorm(torch.rand(LATENT) + 0.5, 1e-6)
        self.index_norm = IndexNorm(torch.rand(INDEX_DIM) + 0.5, torch.randn(INDEX_DIM), 1e-6)
        angle_LP = torch.outer(torch.arange(MAX_LEN).float(), 100.0 ** (-torch.arange(ROPE // 2) / ROPE * 2))
        self.table = Rotary(angle_LP.cos(), angle_LP.sin())
        self.kv_b_NXL = torch.randn(HEADS, NOPE + VALUE, LATENT) / LATENT**0.5

    def tokens(self, num_tokens: int, pages: list[int] | None = None) -> Tokens:
        return Tokens(
            torch.randn(num_tokens, LATENT + ROPE),
            torch.randn(num_tokens, HEADS, NOPE + ROPE),
            torch.randn(num_tokens, INDEX_DIM),
            torch.randn(num_tokens, INDEX_HEADS, INDEX_DIM),
            torch.randn(num_tokens, INDEX_HEADS) * FACTOR,
            pages or torch.randperm(NUM_PAGES)[: -(-num_tokens // PAGE)].tolist(),
        )

    def step(
        self,
        *parts: Part,
        padding: int = 0,
        wanted: list[int] | None = None,
        scratch: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The backend's word on these rows, and on some of padding, in which all is NaN."""

        def rows_of(name: str) -> torch.Tensor:
            rows = torch.cat([getattr(tokens, name)[start:end] for tokens, start, end in parts])
            return torch.cat((rows, torch.full((padding, *rows.shape[1:]), torch.nan)))

        sequences, slots, positions = [], [], []
        for tokens, start, end in parts:
            sequences.append(SequenceRows(len(slots), end - start, start, (tokens.pages,)))
            slots += [tokens.pages[place // PAGE] * PAGE + place % PAGE for place in range(start, end)]
            positions += range(start, end)
        logits = None
        if wanted is not None:
            owners = [next(s for s in sequences if s.row_start <= one < s.row_start + s.num_rows) for one in wanted]
            found = (
                SequenceRows(place, 1, owner.start + one - owner.row_start, owner.tables)
                for place, (one, owner) in enumerate(zip(wanted, owners, strict=True))
            )
            logits = LogitRows(torch.tensor(wanted), tuple(found))
        num_rows = len(slots) + padding
        slots_GT = torch.tensor(slots + [-1] * padding).unsqueeze(0)
        positions_T = torch.tensor(positions + [0] * padding)
        batch = Batch(torch.zeros(num_rows, dtype=torch.int64), positions_T, slots_GT, tuple(sequences), logits)
        plan, backend = self.backend.plan(batch), self.backend
        q_TND, index_q_TID = rows_of("q_LND"), rows_of("index_q_LID")
        scratch = self.scratch if scratch is None else scratch
        rotary = self.table.at(positions_T)
        backend.write(rows_of("latent_LX"), q_TND, batch, self.norm, rotary, 0)
        backend.write_index(rows_of("index_k_LD"), index_q_TID, batch, self.index_norm, rotary, 0)
        backend.select(index_q_TID, rows_of("weights_LI"), LayerStep(0, plan, scratch))
        out_TX = torch.full((num_rows, HEADS * VALUE), torch.nan)
        return backend.attend(q_TND, self.kv_b_NXL, LayerStep(0, plan, scratch), out_TX, wanted is not None)

    def expected(self, tokens: Tokens) -> torch.Tensor:
        """For a whole sequence whose rows are in their pages: a mask of all tokens, and a softmax by head."""
        num_tokens = len(tokens)
        place_L = torch.arange(num_tokens)
        slots_L = torch.tensor(tokens.pages)[place_L // PAGE] * PAGE + place_L % PAGE
        is_taken_LL = self.taken(tokens, slots_L)
        rows_LX = read_latents(self.backend.planes[0], slots_L, torch.float32)
        c_LC, rope_LR = rows_LX[:, :LATENT], rows_LX[:, LATENT:]
        expanded = torch.einsum("lc,nxc->nlx", c_LC, self.kv_b_NXL)
        k_NLD = torch.cat((expanded[..., :NOPE], rope_LR.expand(HEADS, -1, -1)), dim=-1)
        pairs = tokens.q_LND[..., NOPE:].unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs) * self.turns(num_tokens)[:, None]).flatten(-2)
        q_LND = torch.cat((tokens.q_LND[..., :NOPE], turned), dim=-1)
        scores_NLL = q_LND.transpose(0, 1) @ k_NLD.transpose(1, 2) * self.spec.scale
        p_NLL = scores_NLL.masked_fill(~is_taken_LL, -torch.inf).softmax(-1)
        return (p_NLL @ expanded[..., NOPE:]).transpose(0, 1).flatten(1)

    def turns(self, num_tokens: int) -> torch.Tensor:
        return torch.complex(self.table.cos_TP[:num_tokens], self.table.sin_TP[:num_tokens])

    def taken(self, tokens: Tokens, slots_L: torch.Tensor) -> torch.Tensor:
        """[L, L]: the tokens that each row attends to, by the keys that lie in these slots."""
        half, num_tokens = ROPE // 2, len(tokens)
        halves = torch.complex(tokens.index_q_LID[..., :half], tokens.index_q_LID[..., half:ROPE])
        turned = halves * self.turns(num_tokens)[:, None]
        q_LID = torch.cat((turned.real, turned.imag, tokens.index_q_LID[..., ROPE:]), dim=-1)
        weights_LI, planes = tokens.weights_LI, self.backend.indexes[0]
        if planes.is_quantized:
            codes, weights_LI = torch.empty(q_LID.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weights_LI)
            quantize_index_queries(q_LID, tokens.weights_LI, codes, weights_LI)
            q_LID = codes.float()
        scores_LL = torch.einsum("li,lis->ls", weights_LI, (q_LID @ index_keys(planes, slots_L).T).relu())
        scores_LL.masked_fill_(torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1), -torch.inf)
        chosen_LK = scores_LL.topk(min(self.spec.index_top_k, num_tokens), dim=1).indices
        is_chosen_LL = torch.zeros_like(scores_LL, dtype=torch.bool).scatter_(1, chosen_LK, value=True)
        return is_chosen_LL & (scores_LL > -torch.inf)


def test_torch_sparse_is_a_sparse_backend_and_latent_is_not() -> None:
    assert isinstance(House().backend, SparseBackend)
    assert not isinstance(TorchLatentAttention((House().spec,), House().storage), SparseBackend)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 30])
def test_torch_sparse_any_chunking_matches_mask_and_selection(chunk: int) -> None:
    house = House()
    tokens = house.tokens(30)
    outs, chosen = [], []
    for start in range(0, 30, chunk):
        end = min(start + chunk, 30)
        outs.append(house.step((tokens, start, end)))
        chosen.append(house.scratch["selected"].view(MAX_ROWS, TOP_K)[: end - start].clone())
    torch.testing.assert_close(torch.cat(outs), house.expected(tokens), rtol=1e-5, atol=1e-5)
    whole = House()
    whole.step((tokens, 0, 30))
    chosen_LK = torch.cat(chosen)[TOP_K:]
    assert chosen_LK.equal(whole.scratch["selected"].view(MAX_ROWS, TOP_K)[TOP_K:30])
    assert (chosen_LK.diff(dim=1) > 0).all(), "positions rise"
    assert (chosen_LK[:, -1] <= torch.arange(TOP_K, 30)).all()


@pytest.mark.parametrize("index_dtype", ["float16", "fp8"])
@pytest.mark.parametrize("name", ["float32", "fp8_ds_mla", "turboquant_mla_4bit"])
def test_formats_of_latents_and_of_the_index(name: str, index_dtype: str) -> None:
    """Rows that were chosen are what is read, and keys are what the index keeps, rounded as it keeps them."""
    house = House(4, name, index_dtype)
    tokens = house.tokens(23)
    outs = torch.cat([house.step((tokens, 0, 12)), house.step((tokens, 12, 23))])
    torch.testing.assert_close(outs, house.expected(tokens), rtol=1e-5, atol=1e-5)


def test_torch_sparse_fp8_index_selects_nearly_same_tokens() -> None:
    """For 20 tokens out of 64, in random keys whose scores lie close; the least row and all rows together."""
    taken = []
    for index_dtype in ("float32", "fp8"):
        house = House(5, index_dtype=index_dtype, top_k=20)
        tokens = house.tokens(64)
        house.step((tokens, 0, 64))
        taken.append(house.scratch["selected"].view(MAX_ROWS, 20)[20:].clone())
    both = [
        len(set(exact) & set(coded)) / 20 for exact, coded in zip(taken[0].tolist(), taken[1].tolist(), strict=True)
    ]
    assert min(both) >= 0.8
    assert sum(both) / len(both) > 0.95


def test_attend_batch_and_padding_change_no_row() -> None:
    house = House(1)
    first, second = house.tokens(13), house.tokens(7)
    alone = house.step((first, 0, 13))
    places = torch.randperm(NUM_PAGES).tolist()
    first.pages, second.pages = places[:4], places[4:6]
    both = house.step((second, 0, 7), (first, 0, 13), padding=3)
    assert both[7:20].equal(alone)
    assert (both[20:] == 0).all()


def test_attend_returns_only_wanted_rows() -> None:
    house = House(2)
    first, second = house.tokens(9, [3, 1, 2]), house.tokens(6, [7, 5])
    found = house.step((first, 0, 9), (second, 0, 6), wanted=[2, 8, 14])
    expected = torch.stack((*house.expected(first)[[2, 8]], house.expected(second)[5]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_contexts_longer_than_a_block_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = House(3)
    tokens = whole.tokens(41)
    at_once = whole.step((tokens, 0, 41))
    monkeypatch.setattr(torch_latent, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(torch_sparse, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(declarations, "INDEX_SCORES", 100)
    house = House(3)
    torch.testing.assert_close(house.step((tokens, 0, 41)), at_once, rtol=1e-5, atol=1e-5)
    assert house.scratch["selected"].equal(whole.scratch["selected"])


def test_torch_sparse_short_context_is_dense_without_scratch() -> None:
    house = House(6, top_k=MAX_LEN)
    assert house.scratch == {}
    tokens = house.tokens(17)
    torch.testing.assert_close(house.step((tokens, 0, 17)), house.expected(tokens), rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lower_position() -> None:
    least = -torch.inf
    scores_nC = torch.tensor(
        [
            [1.0, 2.0, 1.0, 2.0, 1.0, 1.0],
            [0.0, -0.0, 0.0, -1.0, -0.0, 0.0],
            [3.0, least, least, least, least, least],
            [-2.0, -1.0, -3.0, 5.0, 5.0, 5.0],
        ]
    )
    assert largest_tokens(scores_nC, 3).tolist() == [[0, 1, 3], [0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert largest_tokens(scores_nC, 6).tolist() == [list(range(6))] * 4


def test_torch_sparse_nan_index_key_is_selected_last() -> None:
    house = House(7)
    tokens = house.tokens(12)
    tokens.index_k_LD[3] = torch.nan
    house.step((tokens, 0, 12))
    chosen_LK = house.scratch["selected"].view(MAX_ROWS, TOP_K)[TOP_K:12]
    assert not (chosen_LK == 3).any()
