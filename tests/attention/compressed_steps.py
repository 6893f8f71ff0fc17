"""Steps for backends over windows and entries: sequences on shuffled pages of every group, each layer with vectors of its own, over poison."""

from dataclasses import dataclass, replace

import torch

from attention.latent_steps import poisoned
from attention.steps import BEYOND
from holdfast.attention.backend import Batch, LayerStep, LogitRows, SequenceRows
from holdfast.attention.declarations import StepBounds
from holdfast.cache.compressed import compressed_cache, list_states
from holdfast.cache.spec import CacheSpec
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.families.compressed.declarations import TritonCompressedDeclaration
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.compressed.torch_backend import TorchCompressedAttention
from holdfast.families.compressed.triton_backend import TritonCompressedAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import IndexPlanes, store_latents
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import ALL_KV_FORMATS

PAGE, MAX_LEN, INDEX_DIM, MAX_ROWS = 4, 256, 32, 64
Rows = list[tuple[int, int]]
"""Start and number of rows of each sequence."""


@dataclass(frozen=True)
class Shape:
    """A small model: a layer with its window alone, one that attends to all entries, one that chooses."""

    num_heads: int = 3
    head_dim: int = 72
    rope_dim: int = 8
    window: int = 10
    ratios: tuple[int, ...] = (0, 8, 4)
    index_heads: int = 5
    top_k: int = 6
    name: str = "float32"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(8, MAX_ROWS, PAGE)

    @property
    def overlapped(self) -> frozenset[int]:
        return frozenset(layer for layer, ratio in enumerate(self.ratios) if ratio == 4)

    def cache(self) -> CacheSpec:
        formats = (ALL_KV_FORMATS[self.name],) * len(self.ratios)
        sizes = self.head_dim, self.rope_dim, self.window
        return compressed_cache(formats, *sizes, self.ratios, self.overlapped, INDEX_DIM, PAGE)

    def specs(self, cache: CacheSpec, max_model_len: int = MAX_LEN) -> tuple[CompressedAttentionSpec, ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        specs = []
        for layer, ratio in enumerate(self.ratios):
            spec = CompressedAttentionSpec(
                cache.layers[layer], self.num_heads, self.head_dim**-0.5, self.window, max_model_len, dtype, self.device
            )
            spec = replace(spec, ratio=ratio)
            if ratio:
                place = next(i for i, own in enumerate(cache.layers) if own.layer == layer and i >= len(self.ratios))
                group = cache.group_of(place)
                spec = replace(spec, entries=cache.layers[place], entries_group=group, entries_index=place)
            if layer in self.overlapped:
                spec = replace(spec, is_overlapped=True, index_heads=self.index_heads, index_top_k=self.top_k)
            specs.append(spec)
        return tuple(specs)


class Step:
    """Rows of a step behind a history."""

    def __init__(self, shape: Shape, rows: Rows, padding: int = 0, wanted: list[int] | None = None) -> None:
        torch.manual_seed(3)
        self.shape, self.rows = shape, rows
        cache = shape.cache()
        self.specs = shape.specs(cache)
        needed = [self._num_chunks(cache, end) for end in (start + count for start, count in rows)]
        pages_of = [[-(-n // g.chunks_per_page) for n, g in zip(own, cache.groups, strict=True)] for own in needed]
        num_pages = 2 + sum(map(sum, pages_of))
        self.storage = PageStorage(cache, num_pages, torch.device(shape.device), Ledger())
        states = list_states(shape.ratios, shape.overlapped, shape.head_dim, INDEX_DIM)
        self.states = StateStorage(states, 8, torch.device(shape.device), Ledger())
        for place in range(len(cache.layers)):
            for plane in self.storage.planes(place).values():
                plane.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing is written
        places = (1 + torch.randperm(num_pages - 1)).tolist()
        tables_GNP = torch.full((len(cache.groups), len(rows), MAX_LEN // PAGE + 1), BEYOND, dtype=torch.int32)
        sequences, self.num_rows = [], 0
        for index, (start, count) in enumerate(rows):
            tables = []
            for number, group in enumerate(cache.groups):
                own = [places.pop() for _ in range(pages_of[index][number])]
                size = group.chunks_per_page
                chunks = [j % size * num_pages + own[j // size] for j in range(needed[index][number])]
                tables_GNP[number, index, : len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
                tables.append(chunks)
            sequences.append(SequenceRows(self.num_rows, count, start, tuple(tables), index))
            self.num_rows += count
        self.batch = self._batch(sequences, tables_GNP, padding, wanted)
        self._fill(cache)

    @staticmethod
    def _num_chunks(cache: CacheSpec, end: int) -> list[int]:
        return [-(-(end // group.tokens_per_row) // PAGE) for group in cache.groups]

    def _batch(
        self, sequences: list[SequenceRows], tables_GNP: torch.Tensor, padding: int, wanted: list[int] | None
    ) -> Batch:
        device, num_rows = self.shape.device, self.num_rows + padding
        positions = [p for rows in sequences for p in range(rows.start, rows.end)] + padding * [0]
        states = [rows.table_row for rows in sequences for _ in range(rows.num_rows)] + padding * [-1]
        logits = None
        if wanted is not None:
            own = tuple(self._row(sequences, row)._replace(row_start=i) for i, row in enumerate(wanted))
            logits = LogitRows(torch.tensor(wanted, device=device), own)
        return Batch(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.tensor(positions, device=device),
            torch.full((len(tables_GNP), num_rows), -1, device=device),
            tuple(sequences),
            logits,
            tuple(tables_GNP.to(device)),
            torch.tensor(states, device=device),
        )

    @staticmethod
    def _row(sequences: list[SequenceRows], row: int) -> SequenceRows:
        owner = next(one for one in sequences if one.row_start <= row < one.row_start + one.num_rows)
        return SequenceRows(row, 1, owner.start + row - owner.row_start, owner.tables, owner.table_row)

    def _fill(self, cache: CacheSpec) -> None:
        """Vectors of all tokens and entries that there are, straight into their slots."""
        shape, nope_dim = self.shape, self.shape.head_dim - self.shape.rope_dim
        backend = TorchCompressedAttention(self.specs, self.storage, self.states)
        for layer, spec in enumerate(self.specs):
            for rows in self.batch.sequences:
                for planes, group, per_row in (
                    (backend.windows[layer], spec.group, 1),
                    *(((backend.entries[layer], spec.entries_group, spec.ratio),) if spec.ratio else ()),
                ):
                    slots = self._slots(rows, group, rows.end // per_row)
                    values = torch.randn(len(slots), shape.head_dim, device=shape.device)
                    store_latents(planes, slots, values[:, :nope_dim], values[:, nope_dim:])
                if layer in backend.indexes:
                    self._fill_index(
                        backend.indexes[layer], self._slots(rows, spec.entries_group, rows.end // spec.ratio)
                    )

    def _slots(self, rows: SequenceRows, group: int, count: int) -> torch.Tensor:
        slots = [rows.tables[group][i // PAGE] * PAGE + i % PAGE for i in range(count)]
        return torch.tensor(slots, dtype=torch.long, device=self.shape.device)

    def _fill_index(self, planes: IndexPlanes, slots_L: torch.Tensor) -> None:
        keys_LD = torch.randn(len(slots_L), INDEX_DIM, device=self.shape.device)
        if planes.scales_S1 is not None:
            planes.scales_S1[slots_L] = 2.0**-6
            planes.rows_SD.view(torch.uint8)[slots_L] = (keys_LD * 2**6).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            planes.rows_SD[slots_L] = keys_LD.to(planes.rows_SD.dtype)

    def run(
        self,
        backend: TorchCompressedAttention | TritonCompressedAttention,
        captured: bool = False,
        scratch: dict[str, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Choose and attend in every layer; scratch is poisoned, or what an earlier step left."""
        shape, device, num_rows = self.shape, self.shape.device, self.batch.num_rows
        torch.manual_seed(5)
        frequency_P = 50.0 ** (-torch.arange(shape.rope_dim // 2) / 4)
        angle_TP = torch.outer(self.batch.positions_T.cpu().float(), frequency_P)
        rotary = Rotary(angle_TP.cos().to(device), angle_TP.sin().to(device))
        sinks_N = torch.randn(shape.num_heads).to(device)
        plan: object = backend.plan(self.batch, captured)
        outs = []
        for layer, spec in enumerate(self.specs):
            q_TND = torch.randn(num_rows, shape.num_heads, shape.head_dim).to(device, shape.dtype)
            index_q_TID = torch.randn(num_rows, shape.index_heads, INDEX_DIM).to(device, shape.dtype)
            weights_TI = torch.randn(num_rows, shape.index_heads).to(device)
            for tensor in (q_TND, index_q_TID, weights_TI):
                tensor[self.num_rows :] = torch.nan
            own = self.scratch() if scratch is None else scratch
            if spec.is_overlapped:
                backend.select(index_q_TID, weights_TI, LayerStep(layer, plan, own))
            out_TX = torch.full((num_rows, shape.num_heads * shape.head_dim), torch.nan, device=device).to(shape.dtype)
            wanted_only = self.batch.logits is not None
            outs.append(backend.attend(q_TND, sinks_N, rotary, LayerStep(layer, plan, own), out_TX, wanted_only))
        return outs

    def scratch(self) -> dict[str, torch.Tensor]:
        """The workspace of a step, poisoned."""
        specs = TritonCompressedDeclaration().scratch(self.specs, self.shape.bounds)
        return {spec.name: poisoned(spec, self.shape.device) for spec in specs}

    def backend(self, num_sms: int = 2) -> TritonCompressedAttention:
        """The backend of a GPU, wherever it runs."""
        return TritonCompressedAttention(self.specs, self.storage, self.states, self.shape.bounds, num_sms)

    def triton(self, captured: bool = False, num_sms: int = 2) -> list[torch.Tensor]:
        """What the backend of a GPU says, wherever it runs."""
        return self.run(self.backend(num_sms), captured)

    def torch(self) -> list[torch.Tensor]:
        """What plain torch says."""
        return self.run(TorchCompressedAttention(self.specs, self.storage, self.states))
