"""Steps for backends over latents: sequences on shuffled pages with a history, written by the backend itself, over poison."""

from dataclasses import dataclass

import torch

from attention.steps import BEYOND
from holdfast.attention.backend import Batch, LayerStep, LogitRows, SequenceRows
from holdfast.attention.declarations import AttentionSpec, StepBounds
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.declarations import TritonLatentDeclaration
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.latent.torch_backend import TorchLatentAttention
from holdfast.families.latent.triton_backend import TritonLatentAttention
from holdfast.families.sparse.declarations import TritonSparseDeclaration
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.families.sparse.torch_backend import TorchSparseLatentAttention
from holdfast.families.sparse.triton_backend import TritonSparseLatentAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.write_index import IndexNorm
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import formats_of

PAGE, MAX_LEN, INDEX_DIM = 16, 512, 32
NUM_LAYERS, LAYER = 2, 1
"""Steps run in the last layer; the pages of the other one hold NaN."""
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
    index_heads: int = 0
    """For an index of 32 elements a head; 0: none."""
    top_k: int = 0

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(8, 128, PAGE)

    def storage(self, num_pages: int) -> PageStorage:
        row_dim, kv_format = self.latent_dim + self.rope_dim, formats_of(is_latent=True)[self.name]
        index_dim = INDEX_DIM if self.index_heads else 0
        cache = uniform_cache(NUM_LAYERS, kv_format, 1, row_dim, PAGE, self.rope_dim, index_dim)
        storage = PageStorage(cache, num_pages, torch.device(self.device), Ledger())
        for layer in range(NUM_LAYERS):
            for plane in storage.planes(layer).values():
                plane.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing is written
        return storage

    def specs(self, storage: PageStorage) -> tuple[AttentionSpec, ...]:
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = {"nope_dim": self.nope_dim, "value_dim": self.value_dim}
        kind = SparseAttentionSpec if self.index_heads else LatentAttentionSpec
        if self.index_heads:
            sizes |= {"index_heads": self.index_heads, "index_top_k": self.top_k}
        return tuple(
            kind(cache, self.num_heads, scale, None, MAX_LEN, dtype, self.device, **sizes)
            for cache in storage.spec.layers
        )


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

    def run(
        self,
        backend: TorchLatentAttention | TritonLatentAttention,
        captured: bool = False,
        scratch: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write the history and the step, and attend; scratch is poisoned, or what an earlier step left."""
        shape, dtype, device = self.shape, self.shape.dtype, self.shape.device
        torch.manual_seed(11)
        row_dim, num_rows = shape.latent_dim + shape.rope_dim, self.batch.num_rows
        norm = LatentNorm((torch.rand(shape.latent_dim) + 0.5).to(device, dtype), 1e-6)
        angle_LP = torch.outer(torch.arange(MAX_LEN).float(), 50.0 ** (-torch.arange(shape.rope_dim // 2) / 8))
        table = Rotary(angle_LP.cos().to(device, dtype), angle_LP.sin().to(device, dtype))
        heads, width = shape.num_heads, shape.nope_dim + shape.rope_dim
        for slots, count in self.history:
            if count:
                rows_T = torch.arange(count, device=device)
                past = Batch(rows_T, rows_T, torch.tensor([slots], device=device), (), None)
                latents = torch.randn(count, row_dim).to(device, dtype)
                backend.write(
                    latents, torch.zeros(count, heads, width).to(device, dtype), past, norm, table.at(rows_T), LAYER
                )
                self._index(backend, past, table.at(rows_T))
        latent_TX = torch.randn(num_rows, row_dim).to(device, dtype)
        q_TND = torch.randn(num_rows, heads, width).to(device, dtype)
        kv_b_NXL = (torch.randn(heads, shape.nope_dim + shape.value_dim, shape.latent_dim) * 0.2).to(device, dtype)
        latent_TX[self.num_rows :], q_TND[self.num_rows :] = torch.nan, torch.nan
        plan = backend.plan(self.batch, captured)
        rotary = table.at(self.batch.positions_T)
        backend.write(latent_TX, q_TND, self.batch, norm, rotary, LAYER)
        chosen = self._index(backend, self.batch, rotary)
        scratch = self.scratch() if scratch is None else scratch
        if chosen is not None and isinstance(backend, TorchSparseLatentAttention | TritonSparseLatentAttention):
            backend.select(*chosen, LayerStep(LAYER, plan, scratch))
        out_TX = torch.full((num_rows, heads * shape.value_dim), torch.nan, dtype=dtype, device=device)
        step = LayerStep(LAYER, plan, scratch)
        return backend.attend(q_TND, kv_b_NXL, step, out_TX, self.batch.logits is not None)

    def _index(
        self, backend: TorchLatentAttention | TritonLatentAttention, batch: Batch, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index keys of these rows written; index queries and weights."""
        shape, dtype, device = self.shape, self.shape.dtype, self.shape.device
        if not isinstance(backend, TorchSparseLatentAttention | TritonSparseLatentAttention):
            return None
        norm = IndexNorm(
            (torch.linspace(0.5, 1.5, INDEX_DIM)).to(device, dtype),
            torch.linspace(-0.3, 0.3, INDEX_DIM).to(device, dtype),
            1e-6,
        )
        k_TD = torch.randn(batch.num_rows, INDEX_DIM).to(device, dtype)
        q_TID = torch.randn(batch.num_rows, shape.index_heads, INDEX_DIM).to(device, dtype)
        weights_TI = torch.randn(batch.num_rows, shape.index_heads).to(device)
        if batch is self.batch:
            k_TD[self.num_rows :], q_TID[self.num_rows :], weights_TI[self.num_rows :] = (torch.nan,) * 3
        backend.write_index(k_TD, q_TID, batch, norm, rotary, LAYER)
        return q_TID, weights_TI

    def scratch(self) -> dict[str, torch.Tensor]:
        """The workspace of a step, poisoned."""
        declaration = TritonSparseDeclaration() if self.shape.index_heads else TritonLatentDeclaration()
        specs = declaration.scratch(self.specs, self.shape.bounds)
        return {spec.name: poisoned(spec, self.shape.device) for spec in specs}

    def backend(self) -> TritonLatentAttention:
        """The backend of a GPU, wherever it runs."""
        kind = TritonSparseLatentAttention if self.shape.index_heads else TritonLatentAttention
        return kind(self.specs, self.storage, self.shape.bounds, 2)

    def triton(self, captured: bool = False) -> torch.Tensor:
        """What the backend of a GPU says, wherever it runs."""
        return self.run(self.backend(), captured)

    def torch(self) -> torch.Tensor:
        """What plain torch says."""
        kind = TorchSparseLatentAttention if self.shape.index_heads else TorchLatentAttention
        return self.run(kind(self.specs, self.storage))


def poisoned(spec: TensorSpec, device: str) -> torch.Tensor:
    """Memory in which every number is NaN, or far from any that is right."""
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
    tensor.view(torch.uint8).fill_(0x7F if spec.dtype == "int32" else 0xFF)
    return tensor
