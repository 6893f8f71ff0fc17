"""Decode and prefill attention over shuffled pages, against torch SDPA in the same run: python benchmarks/gpu_attention.py

Our kernel gets its tiles from the backend's own plan. SDPA gets the same keys and values, contiguous: for decode with the
query heads of a key head folded into rows, for prefill with its flash kernel and keys repeated for each head. A measurement
is a CUDA graph over several layers, each with its own keys, so that the L2 cache is cold; the median of some replays
counts. Correctness comes first: a small mixed step against float32.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_attention.py --tiny --device cpu

H query heads, K key heads, G = H / K, D head dim, N sequences, P pages of a sequence, L stored tokens, T rows
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_records import make_record, options, print_table, write_record
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.attention.backend import Batch, LayerStep, SequenceRows
from holdfast.attention.declarations import StepBounds
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention.key_bias import KeyBias
from holdfast.memory.device_rates import H200_READ_BYTES_PER_SECOND as READ_BYTES_PER_SECOND
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import arena_bytes
from holdfast.quant.formats import KV_FORMATS

ROTATED_BYTES = 1.2e9
"""Bytes of keys and values over all layers of a measurement: many times the L2 cache."""
MAX_LAYERS = 40
MAX_ERROR = 0.02
"""Tolerance of a row against float32, relative to its length, for half-precision weights and outputs."""
NUM_REPLAYS = 15
LONG_CONTEXT = 2**20
FLOPS_PER_PAIR = 4
"""FLOPs of a query element and a key: two products, each a multiplication and an addition."""


class Shape(NamedTuple):
    """Cases of the run."""

    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    decode: tuple[tuple[int, int], ...] = (
        *((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768)),
        *((32, 8192), (64, 2048), (128, 1024), (32, 1000)),
    )
    """Sequences and their stored tokens."""
    prefill: int = 8192
    max_model_len: int = 131072
    bounds: StepBounds = StepBounds(256, 8192, 16)
    mixed: tuple[tuple[int, int], ...] = ((0, 1), (16, 1), (299, 1), (999, 1), (4096, 1), (300, 200), (60, 5), (0, 513))
    """Starts and rows of the sequences whose results are checked."""


FULL = Shape()
TINY = Shape(4, 2, 16, "float16", ((1, 300), (3, 40)), 40, 512, StepBounds(8, 64, 16), ((0, 1), (299, 1), (20, 30)))


@dataclass(frozen=True, slots=True)
class Rig:
    """One step's attention in several layers that differ only in their keys and values."""

    storage: PageStorage
    specs: tuple[GroupedAttentionSpec, ...]
    batch: Batch
    q_THD: torch.Tensor
    out_TX: torch.Tensor
    scratch: dict[str, torch.Tensor]
    bounds: StepBounds
    num_sms: int
    key_biases: tuple[KeyBias, ...] | None = None
    """Key bias of each layer, if quantized keys are stored without it."""

    def calls(self, batch_invariant: bool, captured: bool) -> list[Callable[[], torch.Tensor]]:
        """Return one call for each layer, planned like a step."""
        backend = TritonPagedAttention(
            self.specs, self.storage, self.bounds, self.num_sms, batch_invariant, key_biases=self.key_biases
        )
        plan = backend.plan(self.batch, captured=captured)

        def attend(layer: int) -> torch.Tensor:
            return backend.attend(self.q_THD, LayerStep(layer, plan, self.scratch), self.out_TX, False)

        return [lambda layer=layer: attend(layer) for layer in range(len(self.specs))]

    def stored(self, layer: int, name: str, sequence: SequenceRows) -> torch.Tensor:
        """Return [L, K, D]: keys or values of a sequence, read from its pages."""
        assert self.batch.page_tables is not None, "the batch has no page table"
        page_tokens = self.bounds.page_tokens
        token_L = torch.arange(sequence.end, device=self.q_THD.device)
        page_L = self.batch.page_tables[0][sequence.table_row, token_L // page_tokens].long()
        return self.storage.plane(layer, name)[page_L * page_tokens + token_L % page_tokens]


def make_rig(
    shape: Shape, rows: Sequence[tuple[int, int]], num_layers: int, device: torch.device, num_padding: int = 0
) -> Rig:
    """Build a rig. `rows` are start and number of rows of each sequence; stored values and page order are random."""
    page_tokens = shape.bounds.page_tokens
    num_pages = [-(-(start + count) // page_tokens) for start, count in rows]
    cache = uniform_cache(num_layers, KV_FORMATS[shape.dtype], shape.num_kv_heads, shape.head_dim, page_tokens)
    scale, dtype = shape.head_dim**-0.5, getattr(torch, shape.dtype)
    specs = tuple(
        GroupedAttentionSpec(layer, shape.num_heads, scale, None, shape.max_model_len, shape.dtype, "cuda")
        for layer in cache.layers
    )
    storage = PageStorage(cache, sum(num_pages), device, Ledger())
    for layer in range(num_layers):
        storage.plane(layer, "k").normal_()
        storage.plane(layer, "v").normal_()
    places = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(0)).tolist()
    table_NP = torch.zeros(len(rows), -(-shape.max_model_len // page_tokens), dtype=torch.int32)
    sequences, row = [], 0
    for index, ((start, count), needed) in enumerate(zip(rows, num_pages, strict=True)):
        pages, places = places[:needed], places[needed:]
        table_NP[index, :needed] = torch.tensor(pages, dtype=torch.int32)
        sequences.append(SequenceRows(row, count, start, (pages,), index))
        row += count
    rows_T = torch.zeros(row + num_padding, dtype=torch.int64, device=device)
    batch = Batch(rows_T, rows_T, rows_T.unsqueeze(0), tuple(sequences), None, (table_NP.to(device),))
    q_THD = torch.randn(len(rows_T), shape.num_heads, shape.head_dim, device=device).to(dtype)
    out_TX = torch.full((len(rows_T), shape.num_heads * shape.head_dim), float("nan"), dtype=dtype, device=device)
    scratch = {
        spec.name: torch.full(spec.shape, float("nan"), dtype=getattr(torch, spec.dtype), device=device)
        for spec in TritonPagedDeclaration().scratch(specs, shape.bounds)
    }
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return Rig(storage, specs, batch, q_THD, out_TX, scratch, shape.bounds, num_sms)


def exact_rows(rig: Rig) -> torch.Tensor:
    """Return [T, H * D]: the attention in float32 torch, one sequence at a time; padding is zeros."""
    group = rig.q_THD.shape[1] // rig.specs[0].cache.num_kv_heads
    exact_TX = torch.zeros(rig.out_TX.shape, device=rig.out_TX.device)
    for sequence in rig.batch.sequences:
        rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
        q_HnD = rig.q_THD[rows].float().transpose(0, 1)
        k_HLD, v_HLD = (
            rig.stored(0, name, sequence).float().repeat_interleave(group, dim=1).transpose(0, 1) for name in "kv"
        )
        position_n1 = torch.arange(sequence.start, sequence.end, device=q_HnD.device).unsqueeze(1)
        seen_nL = torch.arange(sequence.end, device=q_HnD.device) <= position_n1
        scores_HnL = (q_HnD @ k_HLD.transpose(1, 2) * rig.specs[0].scale).masked_fill(~seen_nL, float("-inf"))
        exact_TX[rows] = (scores_HnL.softmax(-1) @ v_HLD).transpose(0, 1).flatten(1)
    return exact_TX


def check(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Compare a mixed step with padding rows to float32; return the largest error of a row, relative to its length."""
    rig = make_rig(shape, shape.mixed, 1, device, num_padding=3)
    exact_TX, errors = exact_rows(rig), {}
    for captured in (False, True):
        for invariant in (False, True):
            rig.out_TX.fill_(float("nan"))
            found_TX = rig.calls(invariant, captured)[0]().float()
            error = (found_TX - exact_TX).norm(dim=1) / exact_TX.norm(dim=1).clamp(min=1e-6)
            name = f"{'captured' if captured else 'eager'}{', invariant' if invariant else ''}"
            errors[name] = float(error.max()) if bool(torch.isfinite(error).all()) else float("nan")
    is_right = all(error <= MAX_ERROR for error in errors.values())  # false for NaN
    return {"errors": errors, "is_right": is_right}


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return seconds per call, with all calls in one graph; without a GPU, of one round."""
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3 + NUM_REPLAYS)]
    with torch.cuda.stream(stream):
        for event in events[:-1]:  # queued without a wait, so that launch latency does not count
            event.record()
            graph.replay()
        events[-1].record()
    stream.synchronize()
    runs = [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]
    return median(runs[2:]) / len(calls)


@torch.inference_mode()
def run_decode(shape: Shape, num_seqs: int, length: int, device: torch.device) -> dict[str, Any]:
    """Measure decode: one row a sequence, all of one length."""
    kv_bytes = num_seqs * length * 2 * shape.num_kv_heads * shape.head_dim * getattr(torch, shape.dtype).itemsize
    num_layers = min(MAX_LAYERS, max(4, round(ROTATED_BYTES / kv_bytes))) if device.type == "cuda" else 2
    rig = make_rig(shape, [(length - 1, 1)] * num_seqs, num_layers, device)
    ours = rig.calls(batch_invariant=False, captured=True)
    q_NKGD = rig.q_THD.view(num_seqs, shape.num_kv_heads, -1, shape.head_dim)
    stored = [
        tuple(
            torch.stack([rig.stored(layer, name, sequence) for sequence in rig.batch.sequences])
            .transpose(1, 2)
            .contiguous()
            for name in "kv"
        )
        for layer in range(num_layers)
    ]
    folded = [
        lambda k_NKLD=k_NKLD, v_NKLD=v_NKLD: F.scaled_dot_product_attention(q_NKGD, k_NKLD, v_NKLD)
        for k_NKLD, v_NKLD in stored
    ]
    found_TX, wanted_TX = ours[0]().float(), folded[0]().reshape(rig.out_TX.shape).float()
    difference = float(((found_TX - wanted_TX).norm(dim=1) / wanted_TX.norm(dim=1)).max())
    seconds = {
        "holdfast": seconds_per_call(ours, device),
        "torch SDPA": seconds_per_call(folded, device),
        "holdfast, batch invariant": seconds_per_call(rig.calls(batch_invariant=True, captured=True), device),
    }
    rates = {name: kv_bytes / value / 1e12 for name, value in seconds.items()}
    return {
        "measure": f"decode, {num_seqs} x {length}",
        "unit": "TB/s",
        "values": {name: round(rate, 4) for name, rate in rates.items()},
        "milliseconds": {name: round(value * 1000, 5) for name, value in seconds.items()},
        "percent_of_roof": round(100 * rates["holdfast"] * 1e12 / READ_BYTES_PER_SECOND, 2),
        "speed_against_sdpa": round(seconds["torch SDPA"] / seconds["holdfast"], 3),
        "num_layers": num_layers,
        "difference": difference,
    }


@torch.inference_mode()
def run_prefill(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Measure prefill: one prompt of many rows."""
    length, num_calls = shape.prefill, 4
    rig = make_rig(shape, [(0, length)], 1, device)
    ours = rig.calls(batch_invariant=False, captured=False)
    q_1HLD = rig.q_THD.transpose(0, 1).unsqueeze(0).contiguous()
    group = shape.num_heads // shape.num_kv_heads
    k_1HLD, v_1HLD = (
        rig.stored(0, name, rig.batch.sequences[0])
        .repeat_interleave(group, dim=1)
        .transpose(0, 1)
        .unsqueeze(0)
        .contiguous()
        for name in "kv"
    )
    backends = [SDPBackend.FLASH_ATTENTION] if device.type == "cuda" else [SDPBackend.MATH]

    def flash() -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q_1HLD, k_1HLD, v_1HLD, is_causal=True)

    found_TX, wanted_TX = ours[0]().float(), flash()[0].transpose(0, 1).flatten(1).float()
    difference = float(((found_TX - wanted_TX).norm(dim=1) / wanted_TX.norm(dim=1)).max())
    num_pairs = length * (length + 1) / 2 * shape.num_heads * shape.head_dim
    seconds = {
        "holdfast": seconds_per_call(ours * num_calls, device),
        "torch SDPA": seconds_per_call([flash] * num_calls, device),
    }
    rates = {name: FLOPS_PER_PAIR * num_pairs / value / 1e12 for name, value in seconds.items()}
    return {
        "measure": f"prefill, {length} tokens",
        "unit": "TFLOPS",
        "values": {name: round(rate, 2) for name, rate in rates.items()},
        "milliseconds": {name: round(value * 1000, 4) for name, value in seconds.items()},
        "speed_against_sdpa": round(seconds["torch SDPA"] / seconds["holdfast"], 3),
        "difference": difference,
    }


def scratch_bytes(shape: Shape, max_model_len: int) -> int:
    """Return scratch bytes of all layers at this context, work lists included."""
    cache = uniform_cache(1, KV_FORMATS[shape.dtype], shape.num_kv_heads, shape.head_dim, shape.bounds.page_tokens)
    specs = (GroupedAttentionSpec(cache.layers[0], shape.num_heads, 1.0, None, max_model_len, shape.dtype, "cuda"),)
    declaration = TritonPagedDeclaration()
    held = sum(term.num_bytes for term in declaration.terms(specs, shape.bounds))
    return arena_bytes(declaration.scratch(specs, shape.bounds)) + held


def verdicts(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the goals and whether they are met."""
    decode = {row["measure"]: row for row in results if "percent_of_roof" in row}
    prefill = [row for row in results if row["unit"] == "TFLOPS"]
    large = [decode[name] for name in ("decode, 32 x 8192", "decode, 8 x 32768") if name in decode]
    return {
        "at least 85 % of the roof at 32 x 8192 and 8 x 32768": bool(large)
        and all(row["percent_of_roof"] >= 85 for row in large),
        "decode never more than 10 % slower than SDPA": all(
            row["speed_against_sdpa"] >= 1 / 1.1 for row in decode.values()
        ),
        "prefill at least 70 % of SDPA's flash kernel": all(row["speed_against_sdpa"] >= 0.7 for row in prefill),
    }


def main() -> None:
    """Check, measure, print."""
    arguments = options("Attention over pages against torch SDPA").parse_args()
    shape, device = TINY if arguments.tiny else FULL, torch.device(arguments.device)
    torch.manual_seed(0)
    checked = check(shape, device)
    print(f"errors against float32: {checked['errors']}", flush=True)
    results = [run_decode(shape, num_seqs, length, device) for num_seqs, length in shape.decode]
    results.append(run_prefill(shape, device))
    facts = {
        "check": checked,
        "verdicts": verdicts(results),
        "scratch_bytes": {str(length): scratch_bytes(shape, length) for length in (shape.max_model_len, LONG_CONTEXT)},
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
    }
    words = f"{shape.dtype}, {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, pages of 16, shuffled"
    record = make_record("gpu-attention", results, "Attention", words, arguments, facts)
    columns = ("", "ms", "rate", "unit", "% of roof", "SDPA ms", "speed against SDPA", "invariant ms", "difference")
    lines = []
    for row in results:
        ms = row["milliseconds"]
        lines.append(
            (
                *(row["measure"], ms["holdfast"], row["values"]["holdfast"], row["unit"], row.get("percent_of_roof")),
                *(ms["torch SDPA"], row["speed_against_sdpa"], ms.get("holdfast, batch invariant"), row["difference"]),
            )
        )
    print_table("Attention", columns, lines)
    print(f"\nright: {checked['is_right']}; {facts['verdicts']}; scratch {facts['scratch_bytes']}")
    write_record(record, "attention", arguments)


if __name__ == "__main__":
    main()
