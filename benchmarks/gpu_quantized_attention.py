"""Attention over quantized pages, against torch SDPA in bfloat16 in the same run: python benchmarks/gpu_quantized_attention.py

Decode at several batch sizes and contexts, and chunks of a long prompt over what is stored already, for every format, with
pages of 64 tokens in shuffled order and tiles from the backend's own plan. SDPA gets plain bfloat16 keys and values, as in
gpu_attention.py. Correctness comes first: a mixed step of each format against plain torch over the decoded pages.
`--key-bias` instead measures the cost of key biases added to scores: calls with and without, in turn; `--near` that of
near pages.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_quantized_attention.py --tiny --device cpu
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gpu_attention import FLOPS_PER_PAIR, READ_BYTES_PER_SECOND, ROTATED_BYTES, Rig, seconds_per_call
from gpu_records import make_record, options, print_table, write_record
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.attention.backend import Batch, SequenceRows
from holdfast.attention.declarations import StepBounds
from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.near import FIRST_TOKENS, NEAR_PLANES
from holdfast.cache.spec import CacheSpec, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.quantized_attention import quantized_attention_reference
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import arena_bytes
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS

MAX_LAYERS = 24
MAX_ERROR = 0.02
LONG_CONTEXT = 2**20
NEAR_TOKENS = 64
MODEL_LAYERS = 64
"""Layers of a model with these heads, Qwen3-32B."""
FORMATS = tuple(name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized)


class Shape(NamedTuple):
    """Cases of the run."""

    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    decode: tuple[tuple[int, int], ...] = (
        (1, 131072),
        (8, 8192),
        (32, 8192),
        (64, 2048),
        (8, 32768),
        (4, 262144),
    )
    prefill: tuple[tuple[int, int], ...] = ((30720, 2048), (129024, 2048))
    """Stored tokens, and rows after them."""
    max_model_len: int = 262144
    bounds: StepBounds = StepBounds(256, 8192, 64)
    mixed: tuple[tuple[int, int], ...] = ((0, 1), (63, 1), (64, 1), (999, 1), (4096, 1), (300, 200), (60, 5), (0, 130))


FULL = Shape()
TINY = Shape(
    8, 1, 64, "float16", ((1, 300), (3, 70)), ((60, 40),), 512, StepBounds(8, 64, 64), ((0, 1), (299, 1), (20, 30))
)


def fill(name: str, plane: torch.Tensor, bits: int | None) -> None:
    """Fill pages with any codes, finite e4m3 numbers and scales near one twentieth."""
    if plane.dtype == torch.float16:
        plane.uniform_(0.02, 0.08)
    elif bits == 8:
        plane.random_(0, 120).bitwise_or_(torch.randint_like(plane, 0, 2) << 7)
    else:
        plane.random_(0, 256)


def make_rig(
    shape: Shape,
    format_name: str,
    rows: Sequence[tuple[int, int]],
    num_layers: int,
    device: torch.device,
    num_padding: int = 0,
    near_tokens: int = 0,
    has_lane: bool = False,
) -> Rig:
    """Build a rig. `rows` are start and number of rows of each sequence; `near_tokens`: those of a near block, if any.

    With `has_lane` all rows are of prompts, which may read the lane.
    """
    page_tokens, kv_format = shape.bounds.page_tokens, KV_FORMATS[format_name]
    num_pages = [-(-(start + count) // page_tokens) for start, count in rows]
    cache = uniform_cache(num_layers, kv_format, shape.num_kv_heads, shape.head_dim, page_tokens)
    near = None
    if near_tokens:
        with_near = cache.with_near(range(num_layers), near_tokens, FIRST_TOKENS, shape.dtype)
        assert with_near is not None, f"{format_name} has no room for a near token"
        cache, near_chunk = with_near, with_near.cache_groups()[-1]
        near = NearSpec(near_tokens, 1, near_chunk.page_tokens, FIRST_TOKENS)
    scale, dtype = shape.head_dim**-0.5, getattr(torch, shape.dtype)
    specs = tuple(
        GroupedAttentionSpec(
            layer, shape.num_heads, scale, None, shape.max_model_len, shape.dtype, "cuda", near=near, has_lane=has_lane
        )
        for layer in cache.layers
    )
    near_places = [near_chunk_places(cache, start, count) for start, count in rows] if near_tokens else []
    num_all_pages = sum(num_pages) + sum(map(len, near_places))
    storage = PageStorage(cache, num_all_pages, device, Ledger())
    for layer in range(num_layers):
        for plane in cache.layers[layer].planes:
            fill(
                plane.name,
                storage.plane(layer, plane.name),
                kv_format.key_bits if plane.name[0] == "k" else kv_format.value_bits,
            )
    places = torch.randperm(num_all_pages, generator=torch.Generator().manual_seed(0)).tolist()
    shapes = chunk_shapes(cache, num_all_pages)
    tables = [
        torch.zeros(len(rows), -(-shape.max_model_len // group.page_tokens), dtype=torch.int32)
        for group in cache.cache_groups()
    ]
    sequences, row = [], 0
    for index, ((start, count), needed) in enumerate(zip(rows, num_pages, strict=True)):
        pages, places = places[:needed], places[needed:]
        tables[0][index, :needed] = torch.tensor(pages, dtype=torch.int32)
        by_group = [pages]
        if near is not None:
            own = near_places[index]
            chunks = shapes[1].numbers(places[: len(own)])
            places = places[len(own) :]
            tables[1][index, own] = torch.from_numpy(chunks).int()
            by_group.append(tables[1][index].tolist())
            slots = (chunks[:, None] * near.page_tokens + np.arange(near.page_tokens)).reshape(-1)
            for layer, name in product(range(num_layers), NEAR_PLANES):
                plane = storage.plane(layer, name)
                plane[torch.from_numpy(slots).to(device)] = torch.randn(len(slots), *plane.shape[1:], device=device).to(
                    plane.dtype
                )
        sequences.append(SequenceRows(row, count, start, tuple(by_group), index, has_lane))
        row += count
    rows_T = torch.zeros(row + num_padding, dtype=torch.int64, device=device)
    slots_GT = rows_T.expand(len(tables), -1).contiguous()
    batch = Batch(rows_T, rows_T, slots_GT, tuple(sequences), None, tuple(table_NP.to(device) for table_NP in tables))
    q_THD = torch.randn(len(rows_T), shape.num_heads, shape.head_dim, device=device).to(dtype)
    out_TX = torch.full((len(rows_T), shape.num_heads * shape.head_dim), float("nan"), dtype=dtype, device=device)
    scratch = {
        spec.name: torch.full(spec.shape, float("nan"), dtype=getattr(torch, spec.dtype), device=device)
        for spec in TritonPagedDeclaration().scratch(specs, shape.bounds)
    }
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return Rig(storage, specs, batch, q_THD, out_TX, scratch, shape.bounds, num_sms)


def near_chunk_places(cache: CacheSpec, start: int, count: int) -> list[int]:
    """Return the places in the near table of a sequence that a step of rows [start, start + count) uses."""
    group = cache.cache_groups()[-1]
    end = group.pages_for(start + count)
    return [place for place in range(end) if place not in group.passed(start)]


def check(shape: Shape, format_name: str, device: torch.device, has_bias: bool = False) -> float:
    """Return the largest relative error of a row in a mixed step with padding; NaN if one is not finite."""
    rig = make_rig(shape, format_name, shape.mixed, 1, device, num_padding=3)
    rig = with_key_bias(rig, shape, device) if has_bias else rig
    found_TX = rig.calls(batch_invariant=False, captured=True)[0]().float()
    backend = TritonPagedAttention(rig.specs, rig.storage, rig.bounds, rig.num_sms, key_biases=rig.key_biases)
    plan = backend.plan(rig.batch, captured=True)
    exact_TX = torch.zeros_like(rig.out_TX, dtype=torch.float32)
    assert rig.batch.page_tables is not None, "the batch has no page table"
    planes = backend.pages[0].planes
    assert isinstance(planes, QuantizedPlanes), f"{format_name} is not quantized"
    work, scoring = next(iter(plan.work.values())), Scoring(rig.specs[0].scale)
    call = TileCall(rig.q_THD, rig.batch.page_tables[0], work, scoring, exact_TX, exact_TX, exact_TX, rig.num_sms)
    quantized_attention_reference(call, planes)
    error_T = (found_TX - exact_TX).norm(dim=1) / exact_TX.norm(dim=1).clamp(min=1e-6)
    return float(error_T.max()) if bool(torch.isfinite(error_T).all()) else float("nan")


def with_key_bias(rig: Rig, shape: Shape, device: torch.device) -> Rig:
    """Run a step like `check`, over keys stored without their bias."""
    frequency_C = 1e6 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    turns = make_key_turns(frequency_C, 1.0, shape.max_model_len, getattr(torch, shape.dtype), device)
    biases = tuple(KeyBias(torch.randn(shape.num_kv_heads, shape.head_dim, device=device), turns) for _ in rig.specs)
    return replace(rig, key_biases=biases)


@torch.inference_mode()
def key_bias_row(shape: Shape, name: str, rows: Sequence[tuple[int, int]], device: torch.device) -> dict[str, Any]:
    """Return milliseconds of one step of these rows: without a bias, with one, and again without."""
    token_bytes = sum(plane.bytes_per_token for plane in KV_FORMATS[name].planes(shape.num_kv_heads, shape.head_dim))
    num_layers = layers_for(float(sum(start + count for start, count in rows) * token_bytes), device)
    rig, captured = make_rig(shape, name, rows, num_layers, device), rows[0][1] == 1
    plain, biased = (one.calls(False, captured) for one in (rig, with_key_bias(rig, shape, device)))
    before, with_bias, after = (seconds_per_call(calls, device) * 1e3 for calls in (plain, biased, plain))
    return {
        "measure": f"{len(rows)} x {rows[0][1]} behind {rows[0][0]}, {name}",
        "without": round(before, 5),
        "with": round(with_bias, 5),
        "without, again": round(after, 5),
        "ratio": round(2 * with_bias / (before + after), 3),
    }


@torch.inference_mode()
def near_row(shape: Shape, name: str, rows: Sequence[tuple[int, int]], device: torch.device) -> dict[str, Any]:
    """Return milliseconds of one step of these rows: without near pages, with them, and again without."""
    token_bytes = sum(plane.bytes_per_token for plane in KV_FORMATS[name].planes(shape.num_kv_heads, shape.head_dim))
    num_layers = layers_for(float(sum(start + count for start, count in rows) * token_bytes), device)
    plain, near = (
        make_rig(shape, name, rows, num_layers, device, near_tokens=tokens).calls(False, rows[0][1] == 1)
        for tokens in (0, NEAR_TOKENS)
    )
    before, with_near, after = (seconds_per_call(calls, device) * 1e3 for calls in (plain, near, plain))
    kind = "decode" if rows[0][1] == 1 else "prefill"
    return {
        "measure": f"{kind}, {len(rows)} x {rows[0][1]} behind {rows[0][0]}, {name}",
        "format": name,
        "unit": "ms",
        "values": {"without": round((before + after) / 2, 5), "near": round(with_near, 5)},
        "spread": round(abs(before - after) / (before + after), 4),
        "ratio": round(2 * with_near / (before + after), 4),
    }


def layers_for(num_bytes: float, device: torch.device) -> int:
    return min(MAX_LAYERS, max(2, round(ROTATED_BYTES / num_bytes))) if device.type == "cuda" else 1


@torch.inference_mode()
def plain_decode(shape: Shape, num_seqs: int, length: int, device: torch.device) -> float:
    """Return seconds of SDPA with the query heads of a key head folded into rows."""
    dtype = getattr(torch, shape.dtype)
    num_bytes = num_seqs * length * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    q_NKGD = torch.randn(
        num_seqs, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim, device=device
    ).to(dtype)
    kv = [
        tuple(
            torch.empty(num_seqs, shape.num_kv_heads, length, shape.head_dim, dtype=dtype, device=device).normal_()
            for _ in "kv"
        )
        for _ in range(layers_for(num_bytes, device))
    ]
    return seconds_per_call([lambda k=k, v=v: F.scaled_dot_product_attention(q_NKGD, k, v) for k, v in kv], device)


@torch.inference_mode()
def quantized_decode(
    shape: Shape, format_name: str, num_seqs: int, length: int, device: torch.device
) -> tuple[float, float]:
    """Return seconds, and bytes of keys and values."""
    kv_format = KV_FORMATS[format_name]
    token_bytes = sum(plane.bytes_per_token for plane in kv_format.planes(shape.num_kv_heads, shape.head_dim))
    kv_bytes = float(num_seqs * length * token_bytes)
    rig = make_rig(shape, format_name, [(length - 1, 1)] * num_seqs, layers_for(kv_bytes, device), device)
    return seconds_per_call(rig.calls(batch_invariant=False, captured=True), device), kv_bytes


def decode_rows(shape: Shape, num_seqs: int, length: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each format."""
    plain = plain_decode(shape, num_seqs, length, device)
    rows = []
    for name in FORMATS:
        seconds, kv_bytes = quantized_decode(shape, name, num_seqs, length, device)
        rows.append(
            {
                "measure": f"decode, {num_seqs} x {length}, {name}",
                "format": name,
                "shape": [num_seqs, length],
                "unit": "ms",
                "values": {"holdfast": round(seconds * 1e3, 5), "torch SDPA bf16": round(plain * 1e3, 5)},
                "percent_of_roof": round(100 * kv_bytes / seconds / READ_BYTES_PER_SECOND, 2),
                "speed_against_sdpa": round(plain / seconds, 3),
            }
        )
    return rows


@torch.inference_mode()
def prefill_rows(shape: Shape, stored: int, count: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure `count` rows after `stored` tokens. SDPA's flash kernel sees all keys, so its TFLOPS are compared."""
    dtype, total = getattr(torch, shape.dtype), stored + count
    q_1HLD = torch.randn(1, shape.num_heads, count, shape.head_dim, device=device).to(dtype)
    k_1HLD = torch.empty(1, shape.num_heads, total, shape.head_dim, dtype=dtype, device=device).normal_()
    v_1HLD = torch.empty_like(k_1HLD).normal_()
    backends = [SDPBackend.FLASH_ATTENTION] if device.type == "cuda" else [SDPBackend.MATH]

    def flash() -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q_1HLD, k_1HLD, v_1HLD)

    plain = seconds_per_call([flash] * 2, device)
    flops = FLOPS_PER_PAIR * shape.num_heads * shape.head_dim * count
    plain_rate = flops * total / plain / 1e12
    rows = []
    for name in FORMATS:
        rig = make_rig(shape, name, [(stored, count)], 1, device)
        seconds = seconds_per_call(rig.calls(batch_invariant=False, captured=False) * 2, device)
        rate = flops * (stored + (count + 1) / 2) / seconds / 1e12
        rows.append(
            {
                "measure": f"prefill, {count} behind {stored}, {name}",
                "format": name,
                "unit": "TFLOPS",
                "values": {"holdfast": round(rate, 1), "torch SDPA bf16": round(plain_rate, 1)},
                "milliseconds": {
                    "holdfast": round(seconds * 1e3, 4),
                    "torch SDPA bf16, no mask": round(plain * 1e3, 4),
                },
                "speed_against_sdpa": round(rate / plain_rate, 3),
            }
        )
    return rows


def scratch_bytes(shape: Shape, max_model_len: int) -> int:
    """Return scratch bytes of all layers at this context, work lists and rotation included."""
    cache = uniform_cache(
        1, KV_FORMATS["turboquant_k8v4"], shape.num_kv_heads, shape.head_dim, shape.bounds.page_tokens
    )
    specs = (GroupedAttentionSpec(cache.layers[0], shape.num_heads, 1.0, None, max_model_len, shape.dtype, "cuda"),)
    declaration = TritonPagedDeclaration()
    held = sum(term.num_bytes for term in declaration.terms(specs, shape.bounds))
    return arena_bytes(declaration.scratch(specs, shape.bounds)) + held


def verdicts(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the goals and whether they are met."""
    ms = {(row["format"], *row.get("shape", ())): row for row in results}
    main = {"turboquant_k8v4": 0.137, "turboquant_4bit_nc": 0.11, "turboquant_3bit_nc": 0.10}
    least = {"turboquant_k8v4": 45, "turboquant_4bit_nc": 40, "turboquant_3bit_nc": 30}
    decode = [row for row in results if "percent_of_roof" in row]
    found = {
        f"{name} at 32 x 8192 in at most {limit} ms": ms[name, 32, 8192]["values"]["holdfast"] <= limit
        for name, limit in main.items()
        if (name, 32, 8192) in ms
    }
    for name, percent in least.items():
        rows = [row for row in decode if row["format"] == name]
        found[f"{name} everywhere at least {percent} % of the roof"] = all(
            row["percent_of_roof"] >= percent for row in rows
        )
    found["decode always faster than SDPA in bfloat16"] = all(row["speed_against_sdpa"] > 1 for row in decode)
    prefill = [row for row in results if row["unit"] == "TFLOPS"]
    found["prefill at least 60 % of SDPA's flash kernel"] = all(row["speed_against_sdpa"] >= 0.6 for row in prefill)
    return found


def measure_near(shape: Shape, device: torch.device, arguments: argparse.Namespace) -> None:
    """Measure steps with and without near pages, print them, and write a record."""
    # A row in the middle of its own block, which is the mean over a decode.
    middle = NEAR_TOKENS // 2
    decode = [[(length // NEAR_TOKENS * NEAR_TOKENS - middle, 1)] * num_seqs for num_seqs, length in shape.decode]
    prefill = [*([pair] for pair in shape.prefill), [(0, shape.prefill[0][1])]]
    steps = [*decode[1:3], prefill[-1], *prefill[:-1], *decode[:1], *decode[3:]]
    words = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, near blocks of {NEAR_TOKENS} tokens"
    results: list[dict[str, Any]] = []
    for rows in steps:
        found = {name: near_row(shape, name, rows, device) for name in FORMATS}
        for name, row in found.items():
            row["model_ratio"] = model_ratio(name, {other: one["values"] for other, one in found.items()})
            print(row, flush=True)
        results += found.values()
        record = make_record("gpu-near-attention", results, "Attention with near pages", words, arguments, {})
        write_record(record, "near-attention", arguments)  # after each step, so that a run that is cut off leaves one


def model_ratio(name: str, found: Mapping[str, Mapping[str, float]]) -> float:
    """Return the attention of MODEL_LAYERS layers with near tokens over that without, where some layers are in fp8."""
    num_wider = DEFAULT_PROTECTED_LAYERS.get(name, 0)
    without = (MODEL_LAYERS - num_wider) * found[name]["without"] + num_wider * found["fp8"]["without"]
    return round(MODEL_LAYERS * found[name]["near"] / without, 4)


def main() -> None:
    """Check, measure, print."""
    parser = options("Attention over quantized pages against torch SDPA in bfloat16")
    parser.add_argument("--key-bias", action="store_true", help="what key biases cost; leaves no record")
    parser.add_argument(
        "--near", action="store_true", help="what exact tokens of the newest block cost; its own record"
    )
    arguments = parser.parse_args()
    shape, device = TINY if arguments.tiny else FULL, torch.device(arguments.device)
    torch.manual_seed(0)
    if arguments.near:
        measure_near(shape, device, arguments)
        return
    if arguments.key_bias:
        print(
            f"errors against plain torch: { ({name: check(shape, name, device, True) for name in FORMATS}) }",
            flush=True,
        )
        steps = [
            *([(length - 1, 1)] * num_seqs for num_seqs, length in shape.decode),
            *([pair] for pair in shape.prefill),
        ]
        for rows in steps:
            for name in FORMATS:
                print(key_bias_row(shape, name, rows, device), flush=True)
        return
    errors = {name: check(shape, name, device) for name in FORMATS}
    print(f"errors against plain torch: {errors}", flush=True)
    results: list[dict[str, Any]] = []
    parts: list[Callable[[], list[dict[str, Any]]]] = [
        *(lambda pair=pair: decode_rows(shape, *pair, device) for pair in shape.decode),
        *(lambda pair=pair: prefill_rows(shape, *pair, device) for pair in shape.prefill),
    ]
    for part in parts:
        results += part()
        for row in results[-len(FORMATS) :]:
            print(row["measure"], row["values"], row.get("percent_of_roof"), row["speed_against_sdpa"], flush=True)
    facts = {
        "check": {"errors": errors, "is_right": all(error <= MAX_ERROR for error in errors.values())},
        "verdicts": verdicts(results),
        "scratch_bytes": {str(length): scratch_bytes(shape, length) for length in (shape.max_model_len, LONG_CONTEXT)},
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
    }
    words = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, pages of {shape.bounds.page_tokens}, shuffled"
    record = make_record("gpu-quantized-attention", results, "Attention over quantized pages", words, arguments, facts)
    columns = ("", "ours", "SDPA bf16", "unit", "% of roof", "speed against SDPA")
    print_table(
        "Attention over quantized pages",
        columns,
        [
            (
                row["measure"],
                *row["values"].values(),
                row["unit"],
                row.get("percent_of_roof"),
                row["speed_against_sdpa"],
            )
            for row in results
        ],
    )
    print(f"\n{facts['verdicts']}; scratch {facts['scratch_bytes']}")
    write_record(record, "quantized-attention", arguments)


if __name__ == "__main__":
    main()
