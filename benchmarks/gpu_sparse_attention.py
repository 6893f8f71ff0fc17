"""Attention to chosen tokens (DSA) and their selection, beside dense latent attention: python benchmarks/gpu_sparse_attention.py

Decode steps launched like captured ones, over paged latents of every format and an index in fp8, with 16 and 128 query heads:
index scores, selection, and attention to the 2,048 chosen tokens, each timed alone, and dense attention to the same contexts. The
roof of a case is the larger of bytes / 4.37 TB/s and FLOPs / 790 TFLOPS. Correctness comes first: the selection of a mixed step
equals the reference's and its attention is close; then the share of tokens on which fp8 and float32 indexes agree.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_sparse_attention.py --tiny --device cpu
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gpu_attention import READ_BYTES_PER_SECOND, ROTATED_BYTES, seconds_per_call
from gpu_latent_attention import FLOPS_PER_SECOND, num_sms
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast.attention.backend import SequenceRows
from holdfast.attention.declarations import score_columns
from holdfast.attention.tile_scheduler import ListRoom, Machine, StepRows, TileScheduler
from holdfast.kernels.latent.index_scores import index_scores, index_scores_reference
from holdfast.kernels.latent.latent_attention import latent_attention, sparse_attention, sparse_attention_reference
from holdfast.kernels.latent.latent_geometry import head_blocks, latent_geometry, sparse_partials
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentCall, LatentPlanes, SparseRows, store_latents
from holdfast.kernels.latent.top_k_geometry import top_k_specs
from holdfast.kernels.latent.top_k_tokens import top_k_tokens, top_k_tokens_reference
from holdfast.kernels.latent.write_index import quantize_index_queries
from holdfast.quant.formats import formats_of

PAGE = 64
MAX_ERROR = 0.02
MAX_LAYERS = 12


class Shape(NamedTuple):
    """Cases of the run."""

    latent_dim: int = 512
    rope_dim: int = 64
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048
    dtype: str = "bfloat16"
    formats: tuple[str, ...] = ("bfloat16", "fp8_ds_mla", "turboquant_mla_4bit")
    heads: tuple[int, ...] = (16, 128)
    decode: tuple[tuple[int, int], ...] = ((1, 131072), (8, 131072), (32, 8192), (32, 131072), (64, 8192), (64, 32768))
    """Sequences, tokens."""
    mixed: tuple[int, ...] = (2049, 3000, 5000, 2100)
    """Visible tokens of the rows in the check."""


FULL = Shape()
TINY = Shape(32, 16, 4, 16, 5, "float16", ("float16",), (3,), ((2, 70),), (6, 40))


class Rig:
    """Pages of some layers and a step of one row a sequence, with equal or separate lengths."""

    def __init__(
        self, shape: Shape, name: str, num_heads: int, lengths: Sequence[int], layers: int, device: torch.device
    ) -> None:
        self.shape, self.lengths, self.device = shape, lengths, device
        dtype, row_dim = getattr(torch, shape.dtype), shape.latent_dim + shape.rope_dim
        pages = [-(-length // PAGE) for length in lengths]
        num_slots = sum(pages) * PAGE
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        self.table_NP = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        first = 0
        for row, count in enumerate(pages):
            self.table_NP[row, :count] = order[first : first + count]
            first += count
        self.table_NP = self.table_NP.to(device)
        kv_format = formats_of(is_latent=True)[name]
        self.planes, self.index = [], []
        for _ in range(layers):
            planes = {
                plane.name: torch.empty(num_slots, *plane.token_shape, dtype=getattr(torch, plane.dtype), device=device)
                for plane in kv_format.planes(1, row_dim, shape.rope_dim)
            }
            self.planes.append(LatentPlanes.of(planes, kv_format, shape.latent_dim, shape.rope_dim, PAGE))
            fill(self.planes[-1], num_slots, row_dim, dtype, device)
            keys_SD = torch.randn(num_slots, shape.index_dim, device=device)
            scales_S1 = torch.exp2(torch.ceil(torch.log2(keys_SD.abs().amax(1, keepdim=True) / 448)))
            self.index.append(IndexPlanes(PAGE, (keys_SD / scales_S1).to(torch.float8_e4m3fn), scales_S1))
        rows = len(lengths)
        self.rows = SparseRows(
            torch.arange(rows, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
        )
        self.q_TNX = (torch.randn(rows, num_heads, row_dim, device=device) * 0.3).to(dtype)
        self.index_q_TID = torch.randn(rows, shape.index_heads, shape.index_dim, device=device).to(dtype)
        weights_TI = torch.randn(rows, shape.index_heads, device=device)
        self.codes_TID = torch.empty(self.index_q_TID.shape, dtype=torch.float8_e4m3fn, device=device)
        self.factors_TI = torch.empty_like(weights_TI)
        quantize_index_queries(self.index_q_TID, weights_TI, self.codes_TID, self.factors_TI)
        self.columns = score_columns(max(lengths))
        self.scores_TC = torch.full((rows, self.columns), torch.nan, device=device)
        self.tokens_TK = torch.full((rows, shape.top_k), -7, dtype=torch.int32, device=device)
        self.scratch = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in top_k_specs(rows, self.columns, shape.top_k)
        }
        partials = max(sparse_partials(rows, num_heads), 1024)
        self.partials = (
            torch.empty(partials, num_heads * shape.latent_dim, device=device),
            torch.empty(partials, num_heads, device=device),
        )
        self.out_TNL = torch.zeros(rows, num_heads, shape.latent_dim, dtype=dtype, device=device)

    def score(self, layer: int) -> torch.Tensor:
        return index_scores(
            self.codes_TID, self.factors_TI, self.index[layer], self.table_NP, self.rows, self.scores_TC
        )

    def choose(self) -> torch.Tensor:
        return top_k_tokens(self.scores_TC, self.rows, self.tokens_TK, self.scratch)

    def attend(self, layer: int) -> torch.Tensor:
        return sparse_attention(self.call(self.planes[layer]), self.rows, self.tokens_TK)

    def call(self, planes: LatentPlanes) -> LatentCall:
        """Return the call of a layer."""
        return LatentCall(self.q_TNX, planes, self.table_NP, 0.07, *self.partials, self.out_TNL, num_sms(self.q_TNX))

    def dense_calls(self) -> list[Callable[[], torch.Tensor]]:
        """Return calls of attention to all tokens, with the tiles of a captured step."""
        num_heads, rows = self.q_TNX.shape[1], len(self.lengths)
        geometry = latent_geometry(num_heads, self.planes[0].kind != "plain")
        room = ListRoom(1024 + rows, rows, rows, 1024 if num_heads <= 32 else 264)
        scheduler = TileScheduler(
            geometry, head_blocks(num_heads)[0], None, room, Machine(num_sms(self.q_TNX), False, self.device)
        )
        sequences = [SequenceRows(row, 1, length - 1, ([],), row) for row, length in enumerate(self.lengths)]
        work = scheduler.fill(StepRows.of(sequences, rows), captured=True)
        return [lambda planes=planes: latent_attention(self.call(planes), work) for planes in self.planes]


def fill(planes: LatentPlanes, num_slots: int, row_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Fill pages with random latents: some are distinct, the rest are copies."""
    count = min(4096, num_slots)
    rows_LX = torch.randn(count, row_dim, device=device)
    store_latents(
        planes, torch.arange(count, device=device), *rows_LX.split((planes.latent_dim, planes.rope_dim), dim=1)
    )
    for plane in (planes.rows_SX, planes.scales_SC, planes.rope_SR):
        if plane is None:
            continue
        for first in range(count, num_slots, count):
            part = plane[first : first + count]
            part.view(torch.uint8).copy_(plane[: len(part)].view(torch.uint8))


@torch.inference_mode()
def check(shape: Shape, name: str, num_heads: int, device: torch.device) -> dict[str, float]:
    """Return errors of a small mixed step, and how many tokens of the exact selection an fp8 index selects."""
    rig = Rig(shape, name, num_heads, shape.mixed, 1, device)
    found_TC = rig.score(0).clone()
    exact_TC = torch.full_like(found_TC, torch.nan)
    index_scores_reference(rig.codes_TID, rig.factors_TI, rig.index[0], rig.table_NP, rig.rows, exact_TC)
    seen_TC = torch.arange(rig.columns, device=device) < rig.rows.num_tokens_T.unsqueeze(1)
    score_error = float((found_TC - exact_TC)[seen_TC].abs().max() / exact_TC[seen_TC].abs().max())
    tokens_TK = rig.choose().clone()
    expected_TK = top_k_tokens_reference(found_TC, rig.rows, torch.empty_like(tokens_TK))
    rig.attend(0)
    found_TNL = rig.out_TNL.float().clone()
    sparse_attention_reference(rig.call(rig.planes[0]), rig.rows, rig.tokens_TK)
    error = (found_TNL - rig.out_TNL.float()).norm(dim=-1) / rig.out_TNL.float().norm(dim=-1)
    return {
        "score_error": score_error,
        "is_same_choice": float(torch.equal(tokens_TK, expected_TK)),
        "attention_error": float(error.max()),
    }


@torch.inference_mode()
def rows_of(
    shape: Shape, name: str, num_heads: int, num_seqs: int, length: int, device: torch.device
) -> list[dict[str, Any]]:
    """Time every kernel of a step alone, and dense attention to the same contexts."""
    row_dim = shape.latent_dim + shape.rope_dim
    token_bytes = formats_of(is_latent=True)[name].bytes_per_token(1, row_dim, shape.rope_dim)
    dense_bytes = float(num_seqs * length * token_bytes)
    layers = min(MAX_LAYERS, max(2, round(ROTATED_BYTES / dense_bytes))) if device.type == "cuda" else 1
    rig = Rig(shape, name, num_heads, [length] * num_seqs, layers, device)
    score = seconds_per_call([lambda layer=layer: rig.score(layer) for layer in range(layers)], device)
    choose = seconds_per_call([rig.choose] * 4, device)
    attend = seconds_per_call([lambda layer=layer: rig.attend(layer) for layer in range(layers)], device)
    dense = seconds_per_call(rig.dense_calls(), device)
    index_bytes = float(num_seqs * length * (shape.index_dim + 4))
    index_flops = 2.0 * num_seqs * length * shape.index_heads * shape.index_dim
    sparse_bytes, taken = float(num_seqs * shape.top_k * token_bytes), num_seqs * shape.top_k
    sparse_flops = 2.0 * (row_dim + shape.latent_dim) * num_heads * taken
    score_roof = max(index_bytes / READ_BYTES_PER_SECOND, index_flops / FLOPS_PER_SECOND)
    sparse_roof = max(sparse_bytes / READ_BYTES_PER_SECOND, sparse_flops / FLOPS_PER_SECOND)
    label = f"{num_heads} heads, {num_seqs} x {length}, {name}"
    values = {"scores": score, "top-k": choose, "sparse": attend, "dense": dense}
    return [
        {
            "measure": label,
            "unit": "us",
            "values": {key: round(seconds * 1e6, 2) for key, seconds in values.items()},
            "scores_percent_of_roof": round(100 * score_roof / score, 1),
            "sparse_percent_of_memory": round(100 * sparse_bytes / attend / READ_BYTES_PER_SECOND, 1),
            "sparse_tflops": round(sparse_flops / attend / 1e12, 1),
            "sparse_percent_of_roof": round(100 * sparse_roof / attend, 1),
            "top_k_share": round(choose / (score + choose + attend), 3),
            "speed_against_dense": round(dense / (score + choose + attend), 2),
        }
    ]


def main() -> None:
    """Check, measure, print."""
    arguments = options("Attention to chosen tokens and what chooses them").parse_args()
    shape, device = TINY if arguments.tiny else FULL, torch.device(arguments.device)
    budget = Budget(arguments.budget_seconds)
    torch.manual_seed(0)
    checks = {
        f"{name}, {heads} heads": check(shape, name, heads, device) for name in shape.formats for heads in shape.heads
    }
    print(f"checks: {checks}", flush=True)
    results: list[dict[str, Any]] = []
    for heads in shape.heads:
        for num_seqs, length in shape.decode:
            for name in shape.formats:
                if budget.left_seconds < 8:
                    print("left out: no time")
                    break
                results += rows_of(shape, name, heads, num_seqs, length, device)
                print(results[-1], flush=True)
    is_right = all(
        one["is_same_choice"] == 1 and max(one["score_error"], one["attention_error"]) <= MAX_ERROR
        for one in checks.values()
    )
    facts = {"check": {"errors": checks, "is_right": is_right}, "flops_per_second": FLOPS_PER_SECOND}
    facts["read_bytes_per_second"] = READ_BYTES_PER_SECOND
    record = make_record("gpu-sparse-attention", results, "sparse attention", "random latents", arguments, facts)
    lines = [(row["measure"], str(row["values"]), row["sparse_percent_of_roof"]) for row in results]
    print_table("Sparse attention", ("", "us", "% of the roof"), lines)
    write_record(record, "sparse-attention", arguments)


if __name__ == "__main__":
    main()
