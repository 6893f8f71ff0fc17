"""Absorbed latent attention (MLA) alone, over paged latents of every format: python benchmarks/gpu_latent_attention.py

Decode at several batch sizes and contexts with 16, 20 and 128 query heads, pages of 64 tokens in shuffled order, tiles from the
backend's own scheduler, launched like a captured step. The roof of a case is the larger of bytes / 4.37 TB/s and
FLOPs / 790 TFLOPS. Correctness comes first: a mixed step of each format against plain torch. Then the parts around the
kernel: writing a step, the projections by kv_b, and a prompt in both forms.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_latent_attention.py --tiny --device cpu
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from gpu_attention import READ_BYTES_PER_SECOND, ROTATED_BYTES, seconds_per_call
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast.attention.backend import Batch, LayerStep, SequenceRows
from holdfast.attention.declarations import AttentionSpec, StepBounds
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.declarations import TritonLatentDeclaration
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.latent.triton_backend import TritonLatentAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_attention import latent_attention, latent_attention_reference
from holdfast.kernels.latent.latent_planes import LatentCall
from holdfast.kernels.latent.latent_projection import absorb_queries, project_values
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.memory.device_rates import H200_FLOPS_PER_SECOND as FLOPS_PER_SECOND
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import formats_of

MAX_ERROR = 0.02
MAX_LAYERS = 24
ROW_TOKENS = 64
"""Tokens of a page."""


class Shape(NamedTuple):
    """Cases of the run."""

    latent_dim: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    formats: tuple[str, ...] = ("bfloat16", "fp8_ds_mla", "turboquant_mla_4bit", "turboquant_mla_4bit_r8")
    decode: tuple[tuple[int, int, int], ...] = (
        (16, 1, 131072),
        (16, 32, 4096),
        (16, 64, 4096),
        (16, 128, 4096),
        (16, 128, 8192),
        (20, 64, 8192),
        (128, 1, 131072),
        (128, 16, 8192),
        (128, 64, 8192),
    )
    """Heads, sequences, tokens."""
    projections: tuple[tuple[int, int], ...] = ((16, 1), (16, 64), (128, 1), (128, 64))
    """Heads, rows."""
    prompts: tuple[tuple[int, int, int], ...] = ((16, 0, 2048), (16, 0, 8192), (16, 30720, 2048))
    """Heads, stored tokens, rows after them."""
    mixed: tuple[tuple[int, int], ...] = ((0, 1), (63, 1), (64, 1), (999, 1), (4096, 1), (300, 100), (60, 5), (0, 130))
    max_model_len: int = 163840


FULL = Shape()
TINY = Shape(
    32,
    16,
    16,
    16,
    "float16",
    ("float16",),
    ((3, 2, 70),),
    ((3, 5),),
    ((3, 20, 30),),
    ((0, 1), (130, 1), (20, 9)),
    256,
)


@dataclass(frozen=True)
class Rig:
    """Pages of some layers, and a step over them."""

    shape: Shape
    backend: TritonLatentAttention
    specs: tuple[AttentionSpec, ...]
    batch: Batch
    q_TND: torch.Tensor
    kv_b_NXL: torch.Tensor
    scratch: dict[str, torch.Tensor]

    def kernel_calls(self) -> list[Callable[[], torch.Tensor]]:
        """Return calls of the kernel alone, one a layer, launched like a captured decode step."""
        plan = self.backend.plan(self.batch, captured=True)
        (part,) = plan.parts
        q_TNX = torch.randn(part.num_rows, self.specs[0].num_heads, self.specs[0].cache.head_dim).to(self.q_TND) * 0.3
        out_TNL = torch.empty(*q_TNX.shape[:2], self.shape.latent_dim, dtype=q_TNX.dtype, device=q_TNX.device)
        partials = self.scratch["partial_out"], self.scratch["partial_lse"]
        return [
            lambda planes=planes: latent_attention(
                LatentCall(q_TNX, planes, plan.page_table_NP, self.specs[0].scale, *partials, out_TNL, num_sms(q_TNX)),
                part.work,
            )
            for planes in self.backend.planes
        ]

    def whole_calls(self, captured: bool) -> list[Callable[[], torch.Tensor]]:
        """Return calls with the projections, in the backend's own form."""
        plan = self.backend.plan(self.batch, captured)
        out_TX = torch.empty(len(self.q_TND), self.specs[0].num_heads * self.shape.value_dim).to(self.q_TND)
        return [
            lambda layer=layer: self.backend.attend(
                self.q_TND, self.kv_b_NXL, LayerStep(layer, plan, self.scratch), out_TX, wanted_only=False
            )
            for layer in range(len(self.specs))
        ]


def num_sms(tensor: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 2


def make_rig(
    shape: Shape, name: str, num_heads: int, rows: Sequence[tuple[int, int]], num_layers: int, device: torch.device
) -> Rig:
    """Build a rig. `rows` are start and number of rows of each sequence; the backend wrote every latent."""
    row_dim, dtype = shape.latent_dim + shape.rope_dim, getattr(torch, shape.dtype)
    bounds = StepBounds(max(len(rows), 1), max(sum(count for _, count in rows), 64), ROW_TOKENS)
    cache = uniform_cache(num_layers, formats_of(is_latent=True)[name], 1, row_dim, ROW_TOKENS, shape.rope_dim)
    scale = (shape.nope_dim + shape.rope_dim) ** -0.5
    specs = tuple(
        LatentAttentionSpec(
            layer,
            num_heads,
            scale,
            None,
            shape.max_model_len,
            shape.dtype,
            "cuda",
            nope_dim=shape.nope_dim,
            value_dim=shape.value_dim,
        )
        for layer in cache.layers
    )
    num_pages = [-(-(start + count) // ROW_TOKENS) for start, count in rows]
    storage = PageStorage(cache, sum(num_pages), device, Ledger())
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    backend = TritonLatentAttention(specs, storage, bounds, sms)
    fill_pages(backend, shape, sum(num_pages) * ROW_TOKENS, dtype, device)
    places = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(0)).tolist()
    table_NP = torch.zeros(len(rows), -(-shape.max_model_len // ROW_TOKENS), dtype=torch.int32)
    sequences, row = [], 0
    for index, ((start, count), needed) in enumerate(zip(rows, num_pages, strict=True)):
        pages, places = places[:needed], places[needed:]
        table_NP[index, :needed] = torch.tensor(pages, dtype=torch.int32)
        sequences.append(SequenceRows(row, count, start, (pages,), index))
        row += count
    rows_T = torch.zeros(row, dtype=torch.int64, device=device)
    batch = Batch(rows_T, rows_T, rows_T.unsqueeze(0), tuple(sequences), None, (table_NP.to(device),))
    q_TND = torch.randn(row, num_heads, shape.nope_dim + shape.rope_dim, device=device).to(dtype)
    kv_b_NXL = torch.randn(num_heads, shape.nope_dim + shape.value_dim, shape.latent_dim, device=device).to(dtype)
    kv_b_NXL *= shape.latent_dim**-0.5
    scratch = {
        spec.name: torch.full(spec.shape, float("nan"), dtype=getattr(torch, spec.dtype), device=device)
        for spec in TritonLatentDeclaration().scratch(specs, bounds)
    }
    return Rig(shape, backend, specs, batch, q_TND, kv_b_NXL, scratch)


def fill_pages(
    backend: TritonLatentAttention, shape: Shape, num_slots: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill every slot of every layer with random latents: some are written, the rest are copies."""
    count = min(4096, num_slots)
    width = shape.latent_dim + shape.rope_dim
    norm = LatentNorm(torch.ones(shape.latent_dim, dtype=dtype, device=device), 1e-6)
    rotary = Rotary(*(torch.ones(count, shape.rope_dim // 2, dtype=dtype, device=device) for _ in range(2)))
    slots_T = torch.arange(count, device=device)
    zeros_T = torch.zeros(count, dtype=torch.int64, device=device)
    batch = Batch(zeros_T, zeros_T, slots_T.unsqueeze(0), (), None)
    for layer, planes in enumerate(backend.planes):
        q_TND = torch.zeros(count, 1, shape.nope_dim + shape.rope_dim, dtype=dtype, device=device)
        latent_TX = torch.randn(count, width, device=device).to(dtype)
        backend.write(latent_TX, q_TND, batch, norm, rotary, layer)
        for plane in (planes.rows_SX, planes.scales_SC, planes.rope_SR):
            if plane is None:
                continue
            for first in range(count, num_slots, count):
                part = plane[first : first + count]
                part.view(torch.uint8).copy_(plane[: len(part)].view(torch.uint8))


def check(shape: Shape, name: str, num_heads: int, device: torch.device) -> float:
    """Return the largest relative error of a head in a mixed step; NaN if one is not finite."""
    rig = make_rig(shape, name, num_heads, shape.mixed, 1, device)
    plan = rig.backend.plan(rig.batch, captured=True)
    (part,) = plan.parts
    q_TNX = torch.randn(part.num_rows, num_heads, shape.latent_dim + shape.rope_dim, device=device).to(rig.q_TND.dtype)
    outs = []
    for function in (latent_attention, latent_attention_reference):
        out_TNL = torch.full((*q_TNX.shape[:2], shape.latent_dim), float("nan"), device=device).to(q_TNX.dtype)
        partials = rig.scratch["partial_out"], rig.scratch["partial_lse"]
        pages = rig.backend.planes[0], plan.page_table_NP
        function(LatentCall(q_TNX, *pages, rig.specs[0].scale, *partials, out_TNL, num_sms(q_TNX)), part.work)
        outs.append(out_TNL.float())
    found, exact = outs
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-6)
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("nan")


def layers_for(num_bytes: float, device: torch.device) -> int:
    """Return enough layers that a call's data has left the device's caches when it repeats."""
    return min(MAX_LAYERS, max(2, round(ROTATED_BYTES / num_bytes))) if device.type == "cuda" else 1


@torch.inference_mode()
def decode_rows(shape: Shape, num_heads: int, num_seqs: int, length: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each format."""
    rows: list[dict[str, Any]] = []
    row_dim, plain = shape.latent_dim + shape.rope_dim, None
    flops = 2.0 * (row_dim + shape.latent_dim) * num_heads * num_seqs * length
    for name in shape.formats:
        token_bytes = formats_of(is_latent=True)[name].bytes_per_token(1, row_dim, shape.rope_dim)
        num_bytes = float(num_seqs * length * token_bytes)
        rig = make_rig(shape, name, num_heads, [(length - 1, 1)] * num_seqs, layers_for(num_bytes, device), device)
        seconds = seconds_per_call(rig.kernel_calls(), device)
        plain = plain or seconds
        roof = max(num_bytes / READ_BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
        rows.append(
            {
                "measure": f"{num_heads} heads, {num_seqs} x {length}, {name}",
                "shape": [num_heads, num_seqs, length],
                "format": name,
                "unit": "ms",
                "values": {"holdfast": round(seconds * 1e3, 5)},
                "percent_of_memory": round(100 * num_bytes / seconds / READ_BYTES_PER_SECOND, 1),
                "tflops": round(flops / seconds / 1e12, 1),
                "percent_of_roof": round(100 * roof / seconds, 1),
                "gigabytes": round(num_bytes / 1e9, 3),
                "speed_against_plain": round(plain / seconds, 2),
            }
        )
        del rig
    return rows


@torch.inference_mode()
def projection_rows(shape: Shape, num_heads: int, num_rows: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure both sides of kv_b in microseconds, with the share of their memory roof."""
    dtype, expanded = getattr(torch, shape.dtype), shape.nope_dim + shape.value_dim
    side_bytes = num_heads * shape.nope_dim * shape.latent_dim * dtype.itemsize
    copies = min(64, max(2, round(ROTATED_BYTES / (2 * side_bytes)))) if device.type == "cuda" else 1
    kv_bs = [
        torch.randn(num_heads, expanded, shape.latent_dim, device=device).to(dtype) for _ in range(min(copies, 24))
    ]
    q_TND = torch.randn(num_rows, num_heads, shape.nope_dim + shape.rope_dim, device=device).to(dtype)
    absorbed_TNX = torch.empty(num_rows, num_heads, shape.latent_dim + shape.rope_dim, dtype=dtype, device=device)
    latent_TNL = torch.randn(num_rows, num_heads, shape.latent_dim, device=device).to(dtype)
    out_TNV = torch.empty(num_rows, num_heads, shape.value_dim, dtype=dtype, device=device)
    absorb = seconds_per_call([lambda w=w: absorb_queries(q_TND, w, absorbed_TNX) for w in kv_bs], device)
    project = seconds_per_call([lambda w=w: project_values(latent_TNL, w, out_TNV) for w in kv_bs], device)
    return [
        {
            "measure": f"kv_b of {num_heads} heads, {num_rows} rows",
            "format": "kv_b",
            "unit": "us",
            "values": {"absorb": round(absorb * 1e6, 2), "project": round(project * 1e6, 2)},
            "percent_of_memory": round(100 * 2 * side_bytes / (absorb + project) / READ_BYTES_PER_SECOND, 1),
        }
    ]


@torch.inference_mode()
def prompt_rows(shape: Shape, num_heads: int, stored: int, count: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure a part of a prompt after stored tokens: in the backend's own form, and absorbed like a captured step."""
    name = shape.formats[0]
    rig = make_rig(shape, name, num_heads, [(stored, count)], 1, device)
    chosen = seconds_per_call(rig.whole_calls(captured=False) * 2, device)
    absorbed = seconds_per_call(rig.whole_calls(captured=True) * 2, device)
    return [
        {
            "measure": f"prompt of {num_heads} heads, {count} rows behind {stored}",
            "format": "prompt",
            "unit": "ms",
            "values": {"chosen": round(chosen * 1e3, 3), "absorbed": round(absorbed * 1e3, 3)},
        }
    ]


def main() -> None:
    """Check, measure, print."""
    arguments = options("Absorbed latent attention over paged latents").parse_args()
    shape, device = TINY if arguments.tiny else FULL, torch.device(arguments.device)
    budget = Budget(arguments.budget_seconds)
    torch.manual_seed(0)
    heads = sorted({num_heads for num_heads, _, _ in shape.decode})
    errors = {f"{name}, {count} heads": check(shape, name, count, device) for name in shape.formats for count in heads}
    print(f"errors against plain torch: {errors}", flush=True)
    results: list[dict[str, Any]] = []
    parts: list[Callable[[], list[dict[str, Any]]]] = [
        *(lambda case=case: decode_rows(shape, *case, device) for case in shape.decode),
        *(lambda case=case: projection_rows(shape, *case, device) for case in shape.projections),
        *(lambda case=case: prompt_rows(shape, *case, device) for case in shape.prompts),
    ]
    for part in parts:
        if budget.left_seconds < 10:
            print("left out: no time")
            break
        found = part()
        results += found
        for row in found:
            print({key: value for key, value in row.items() if key != "shape"}, flush=True)
    facts = {
        "check": {"errors": errors, "is_right": all(error <= MAX_ERROR for error in errors.values())},
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
        "flops_per_second": FLOPS_PER_SECOND,
    }
    record = make_record("gpu-latent-attention", results, "latent attention", "random latents", arguments, facts)
    lines = [
        (row["measure"], str(row["values"]), row.get("percent_of_roof", row.get("percent_of_memory", "")))
        for row in results
    ]
    print_table("Latent attention", ("", "", "% of the roof"), lines)
    write_record(record, "latent-attention", arguments)


if __name__ == "__main__":
    main()
