"""The attention contract: the Batch of a step, what every family of attention has, and the verbs of grouped, of latent and of sparse latent attention.

rows        sequence 0: positions [start, start + n)  |  sequence 1: ...  |  ...  |  padding      one row a token, T in all
slot        chunk number * page_tokens + position % page_tokens: where a row's keys and values go; -1 for padding: nowhere

Layers belong to cache groups (cache/spec.py), G in all: each has slots, a page table and page lists of its own. Their entries
are numbers of chunks of `page_tokens` tokens, which kernels call pages.

A layer hands over its fused projection as it is. Norms, rotation, quantization and the write into pages belong to the
backend, because the formats and devices that matter do all of them in one pass. What a backend takes, and what it will
hold, is declared without building it (attention/declarations.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.kernels.latent.compress import Compressor
from holdfast.kernels.latent.write_index import IndexNorm
from holdfast.kernels.latent.write_latent import LatentNorm


class SequenceRows(NamedTuple):
    """One sequence's part of a step, on the host; made for every sequence of every step, so it must be cheap."""

    row_start: int
    num_rows: int
    start: int
    """Position of the first row; positions below it are in the cache already."""
    tables: tuple[Sequence[int], ...]
    """Of each group the sequence's chunks in order, HOLE where one was given back; read, never changed."""
    table_row: int = -1
    """The row of the page tables on the device that holds its chunks; -1 where there are no such tables."""
    is_prompt: bool = False
    """Rows of a prompt, and not behind it; single rows of LogitRows do not say."""

    @property
    def end(self) -> int:
        """Tokens in the cache once this step has written its own."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The rows whose logits are wanted, where they are not all: behind the last layer's keys nothing else is computed."""

    rows_R: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    """The same rows, each a sequence of one, numbered from 0; padding is not among them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs. Tensors are views of buffers that live as long as the runner."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    """A row for each cache group."""
    sequences: tuple[SequenceRows, ...]
    logits: LogitRows | None
    """None: the logits of every row are wanted."""
    page_tables: tuple[torch.Tensor, ...] | None = None
    """Of each group int32 [N, P], a row for each sequence that is on the device; None on a CPU, where kernels read the lists.

    What stands behind the newest chunk, or before the first that a window sees, names some chunk, whoever has it."""
    states_T: torch.Tensor | None = None
    """int64: the place of each row's sequence in the states that its layers keep (cache/storage.py), -1 for padding; None where the
    cache has none."""

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.token_ids_T.shape[0]


class EagerStep(NamedTuple):
    """Some rows of a sequence behind what is stored of it."""

    start: int
    num_rows: int


PlanT = TypeVar("PlanT")
MadePlanT = TypeVar("MadePlanT", covariant=True)


class AttentionFamily(Protocol[MadePlanT]):
    """What every family of attention has: what it takes is declared before it is built, and a step is planned once for all layers.

    A plan is made by the host (ranges of tokens, as `plan` writes them) or on the device (lists of tokens that a layer chose,
    in buffers that `plan` only hands over). Either lies in memory that stays where it is and is a line of the plan of memory.
    """

    name: ClassVar[str]

    def held_bytes(self) -> dict[str, int]:
        """What it holds from start to end, by the owners that its declaration names."""
        ...

    def plan(self, batch: Batch, captured: bool = False) -> MadePlanT:
        """What attending to this step has in common in all layers, in memory that stays where it is.

        `captured`: the launches must not depend on the step's lengths, because a graph repeats them for other steps.
        """
        ...

    def eager_steps(self) -> Sequence[EagerStep]:
        """Steps of one sequence whose kernels no captured plan launches: they are run before a runner is ready, to be compiled."""
        ...


class GroupedAttention(AttentionFamily[PlanT], Protocol[PlanT]):
    """Keys and values by head, query heads in groups over them (MHA, GQA, MQA). Nothing outside it knows what the planes of a page mean.

    Sinks are part of the merge of partial results: one that is merged with nothing gets its own behind its loop.
    """

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        layer: int,
        out_THD: torch.Tensor,
    ) -> None:
        """Write the step's keys and values into their slots, and the queries, in the form that `attend` takes."""
        ...

    def attend(
        self,
        q_THD: torch.Tensor,
        layer: int,
        plan: PlanT,
        scratch: Mapping[str, torch.Tensor],
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        """Attend to all that is stored: [T, H * D]; or only with the rows whose logits are wanted: [R, H * D].

        `scratch` is what its declaration asked for, by name.
        """
        ...


class LatentAttention(AttentionFamily[PlanT], Protocol[PlanT]):
    """One latent a token, shared by all query heads, beside a few rotated elements (MLA).

    N query heads of D = P + R elements: P meet the latent of L elements through kv_b, R are rotated; V elements of a head's
    output. kv_b is [N, P + V, L]: of a head first the rows of keys (W_UK), then those of values (W_UV).

    Attention is computed in the latent space (absorbed: queries go through W_UK, what comes out through W_UV, and a token's
    row is read once for all heads) or with keys and values of every head (up-projected), whichever is less work for the shape of
    a step. Both read kv_b as it lies. Nothing outside a backend knows which it was.
    """

    def write(
        self, latent_TX: torch.Tensor, q_TND: torch.Tensor, batch: Batch, norm: LatentNorm, rotary: Rotary, layer: int
    ) -> None:
        """Norm and rotate the step's latents [T, L + R] and write them into their slots; rotate the last R elements of every
        query head where they are. Rows of `latent_TX` may lie apart."""
        ...

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_b_NXL: torch.Tensor,
        layer: int,
        plan: PlanT,
        scratch: Mapping[str, torch.Tensor],
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        """Attend to all that is stored: [T, N * V]; or only with the rows whose logits are wanted: [R, N * V].

        Padded rows are written as zeros. `scratch` is what its declaration asked for, by name.
        """
        ...


@runtime_checkable
class SparseLatentAttention(LatentAttention[PlanT], Protocol[PlanT]):
    """Latent attention to the tokens that an index chooses (DSA): I index heads of D elements, short keys beside the latents.

    A layer writes its latents and its index, has the tokens of every row chosen, and attends. The choice is made where the
    index lies: on a GPU nothing of it reaches the host. It lies in `scratch` (SELECTED) until another layer's takes its place: a
    layer without an index of its own attends to what is there.
    """

    def write_index(
        self, k_TD: torch.Tensor, q_TID: torch.Tensor, batch: Batch, norm: IndexNorm, rotary: Rotary, layer: int
    ) -> None:
        """Norm and rotate the step's index keys and write them into the slots of their latents; rotate the index queries where they are."""
        ...

    def select(
        self,
        q_TID: torch.Tensor,
        weights_TI: torch.Tensor,
        layer: int,
        plan: PlanT,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """Choose the tokens of every row that sees more than top_k: those with the largest sum over heads of weight * relu(q . k).

        `weights_TI`: float32, with head_dim ** -0.5 * heads ** -0.5 in them. `attend` then attends to what was chosen, and to all
        tokens in the other rows.
        """
        ...


class CompressedAttention(AttentionFamily[PlanT], Protocol[PlanT]):
    """Attention of DeepSeek-V4: every row to a window of tokens and to the entries of its layer, all in one softmax with a sink.

    A layer writes its tokens, adds them to the state from which entries are made, has entries chosen where it has an index,
    and attends. Tokens, entries and state lie in groups of their own (cache/compressed.py): a row's slot in the group of entries is -1
    unless an entry ends with it. A row whose slots are all -1 is computed and not stored: padding is told by `Batch.states_T`.
    """

    def write(
        self,
        kv_TD: torch.Tensor,
        q_TND: torch.Tensor,
        batch: Batch,
        norm: LatentNorm,
        q_eps: float,
        rotary: Rotary,
        layer: int,
    ) -> None:
        """Norm and rotate the step's vectors and write them into their slots; norm every query head by itself, without a weight,
        and rotate it, where it is. Rows of `kv_TD` may lie apart."""
        ...

    def compress(
        self,
        pooled_TX: torch.Tensor,
        batch: Batch,
        compressor: Compressor,
        rotary: Rotary,
        layer: int,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """Add the step's rows to the layer's state, and write the entries that end with one of them into their slots.

        `rotary`: of the first token of each row's entry. `pooled_TX`: float32, what is pooled and then its gates; rows may lie apart."""
        ...

    def compress_index(
        self,
        pooled_TX: torch.Tensor,
        q_TID: torch.Tensor,
        batch: Batch,
        compressor: Compressor,
        rotary: Rotary,
        q_rotary: Rotary,
        layer: int,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """The same of the entries of the layer's index; rotate the last elements of index queries where they are,
        by `q_rotary`."""
        ...

    def select(
        self,
        q_TID: torch.Tensor,
        weights_TI: torch.Tensor,
        layer: int,
        plan: PlanT,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """Choose the entries of every row that sees more than top_k of them, as `SparseLatentAttention.select` does of tokens."""
        ...

    def attend(
        self,
        q_TND: torch.Tensor,
        sinks_N: torch.Tensor,
        batch: Batch,
        rotary: Rotary,
        layer: int,
        plan: PlanT,
        scratch: Mapping[str, torch.Tensor],
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        """Attend to window and entries, and rotate the last elements of every head's output back by the row's own position:
        [T, N * D]; or only with the rows whose logits are wanted: [R, N * D]. Padded rows are written as zeros."""
        ...
