"""Attention to windows and entries (DeepSeek-V4) alone: python benchmarks/gpu_compressed_attention.py

Decode steps launched like captured ones, one row a sequence, with 64 query heads and top-k 512 (V4-Flash) and 128 heads and
top-k 1,024 (V4-Pro): layers whose entries of 4 tokens are chosen, and layers that attend to all entries of 128 tokens. Plain rows
and rows of 584 bytes. Then all kernels of a layer with an index, each alone: the write of the window, the compressors of
entries and of the index (every row ends an entry), index scores, selection, attention. The roof of a case is the larger of bytes / 4.37 TB/s and FLOPs / 790 TFLOPS. Correctness comes first: rows
around every boundary against plain torch.

Pages of chosen entries are drawn from a pool that is several times the L2 cache, not as large as the contexts.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_compressed_attention.py --tiny --device cpu
"""

from typing import Any, NamedTuple

import torch
from gpu_attention import READ_BYTES_PER_SECOND, seconds_per_call
from gpu_latent_attention import FLOPS_PER_SECOND, num_sms
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast.attention.declarations import score_columns
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compress import Compressor, PooledRows, compress_entries, compress_index
from holdfast.kernels.latent.compressed_attention import compressed_attention, compressed_attention_reference
from holdfast.kernels.latent.compressed_scopes import CompressedCall, CompressedRows, Scopes
from holdfast.kernels.latent.index_scores import index_scores
from holdfast.kernels.latent.latent_geometry import compressed_partials
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes, SparseRows, store_latents
from holdfast.kernels.latent.top_k_geometry import top_k_specs
from holdfast.kernels.latent.top_k_tokens import top_k_tokens
from holdfast.kernels.latent.write_index import quantize_index_queries
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.kernels.latent.write_window import write_window
from holdfast.quant.formats import ALL_KV_FORMATS

PAGE = 64
MAX_ERROR = 0.02
POOL_SLOTS = 2**19
"""Entries to choose from: a pool of 306 MB at 584 bytes."""


class Shape(NamedTuple):
    """Cases of the run."""

    head_dim: int = 512
    rope_dim: int = 64
    window: int = 128
    dtype: str = "bfloat16"
    formats: tuple[str, ...] = ("fp8_ds_v4", "bfloat16")
    models: tuple[tuple[int, int], ...] = ((64, 512), (128, 1024))
    """Query heads, and chosen entries per row."""
    rows: tuple[int, ...] = (1, 16, 64, 128)
    contexts: tuple[int, ...] = (8192, 131072, 2**20)
    index_heads: int = 64
    index_dim: int = 128
    layers: tuple[tuple[int, int], ...] = ((1, 8192), (1, 131072), (1, 2**20), (16, 131072), (64, 8192), (64, 131072))
    """Rows and contexts of the layers whose kernels are timed one by one, in the first format and model."""
    checked: tuple[int, ...] = (-1, 0, 126, 127, 128, 511, 512, 2047, 2051, 4099, 4100, 9000)
    """Positions of the rows of the check."""


FULL = Shape()
TINY = Shape(72, 8, 20, "float16", ("fp8_ds_v4",), ((3, 5),), (2,), (72,), 4, 16, ((2, 72),), (-1, 0, 21, 40))


class Kind(NamedTuple):
    """Kind of a layer."""

    ratio: int
    top_k: int
    """0: rows attend to all entries."""


class Rig:
    """Pages of some layers of one kind and a step of one row a sequence."""

    def __init__(
        self,
        shape: Shape,
        name: str,
        num_heads: int,
        kind: Kind,
        positions: list[int],
        layers: int,
        device: torch.device,
    ) -> None:
        dtype, count = getattr(torch, shape.dtype), len(positions)
        self.scopes = [
            self._scopes(shape, name, kind, positions, torch.Generator().manual_seed(layer), device)
            for layer in range(layers)
        ]
        self.rows = CompressedRows(
            torch.arange(count, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
        )
        self.q_TND = torch.randn(count, num_heads, shape.head_dim, device=device).to(dtype)
        self.sinks_N = torch.randn(num_heads, device=device)
        frequency_P = 1e4 ** -torch.linspace(0, 1, shape.rope_dim // 2, device=device)
        angle_TP = self.rows.positions_T.float().unsqueeze(1) * frequency_P
        self.rotary = Rotary(angle_TP.cos(), angle_TP.sin())
        partials = compressed_partials(count, num_heads)
        self.partials = (
            torch.full((partials, num_heads * shape.head_dim), torch.nan, dtype=torch.float16, device=device),
            torch.full((partials, num_heads), torch.nan, device=device),
        )
        self.out_TND = torch.full_like(self.q_TND, torch.nan)
        self.scale = shape.head_dim**-0.5

    @staticmethod
    def _scopes(
        shape: Shape,
        name: str,
        kind: Kind,
        positions: list[int],
        generator: torch.Generator,
        device: torch.device,
    ) -> Scopes:
        num_rows, longest = len(positions), max(positions) + 1
        per_row = shape.window // PAGE + 2
        window = make_planes(shape, name, num_rows * per_row, device)
        order_NP = torch.randperm(num_rows * per_row, generator=generator).to(torch.int32).view(num_rows, per_row)
        # Pages of a window are the last of a row: others are never read.
        columns_P = torch.arange(-(-longest // PAGE))
        window_table_NP = order_NP[:, columns_P % per_row].contiguous().to(device)
        entries = max(1, longest // kind.ratio)
        num_columns = -(-entries // PAGE)
        num_pages = num_rows * num_columns
        if kind.top_k:
            num_pages = min(num_pages, POOL_SLOTS // PAGE)
        planes = make_planes(shape, name, num_pages, device)
        drawn = torch.randperm(num_rows * num_columns, generator=generator) % num_pages
        table_NP = drawn.to(torch.int32).view(num_rows, num_columns).to(device)
        selected_TK = None
        if kind.top_k:
            selected_TK = torch.full((num_rows, kind.top_k), -7, dtype=torch.int32)
            for row, position in enumerate(positions):
                seen = (position + 1) // kind.ratio
                if seen > kind.top_k:
                    drawn_K = torch.randperm(seen, generator=generator)[: kind.top_k].sort().values
                    selected_TK[row] = drawn_K.to(torch.int32)
            selected_TK = selected_TK.to(device)
        return Scopes(shape.window, window, window_table_NP, kind.ratio, planes, table_NP, selected_TK)

    def attend(self, layer: int) -> torch.Tensor:
        return compressed_attention(self.call(layer))

    def call(self, layer: int) -> CompressedCall:
        return CompressedCall(
            self.q_TND,
            self.scopes[layer],
            self.rows,
            self.sinks_N,
            self.rotary,
            self.scale,
            *self.partials,
            self.out_TND,
            num_sms(self.q_TND),
        )


def make_planes(shape: Shape, name: str, num_pages: int, device: torch.device) -> LatentPlanes:
    """Return planes of random vectors: some are distinct, the rest are copies."""
    kv_format, num_slots, nope_dim = ALL_KV_FORMATS[name], num_pages * PAGE, shape.head_dim - shape.rope_dim
    planes = LatentPlanes.of(
        {
            plane.name: torch.empty(num_slots, *plane.token_shape, dtype=getattr(torch, plane.dtype), device=device)
            for plane in kv_format.planes(1, shape.head_dim, shape.rope_dim)
        },
        kv_format,
        nope_dim,
        shape.rope_dim,
        PAGE,
    )
    count = min(4096, num_slots)
    rows_SD = torch.randn(count, shape.head_dim, device=device)
    store_latents(planes, torch.arange(count, device=device), rows_SD[:, :nope_dim], rows_SD[:, nope_dim:])
    for plane in (planes.rows_SX, planes.scales_SC):
        if plane is None:
            continue
        for first in range(count, num_slots, count):
            part = plane[first : first + count]
            part.view(torch.uint8).copy_(plane[: len(part)].view(torch.uint8))
    return planes


@torch.inference_mode()
def check(shape: Shape, name: str, num_heads: int, kind: Kind, device: torch.device) -> float:
    """Return the largest relative error of a row and head in a small mixed step; padding must be zeros."""
    rig = Rig(shape, name, num_heads, kind, list(shape.checked), 1, device)
    found_TND = rig.attend(0).float().clone()
    compressed_attention_reference(rig.call(0))
    exact_TND = rig.out_TND.float()
    there_T = rig.rows.positions_T >= 0
    assert not found_TND[~there_T].any(), "padded rows are zeros"
    found_TND, exact_TND = found_TND[there_T], exact_TND[there_T]
    return float(((found_TND - exact_TND).norm(dim=-1) / exact_TND.norm(dim=-1)).max())


@torch.inference_mode()
def row_of(
    shape: Shape, name: str, num_heads: int, kind: Kind, num_rows: int, context: int, device: torch.device
) -> dict[str, Any]:
    """Measure one decode step."""
    layers = 4 if device.type == "cuda" else 1
    rig = Rig(shape, name, num_heads, kind, [context - 1] * num_rows, layers, device)
    seconds = seconds_per_call([lambda layer=layer: rig.attend(layer) for layer in range(layers)], device)
    entries = context // kind.ratio
    places = num_rows * (shape.window + (min(entries, kind.top_k) if kind.top_k else entries))
    row_bytes = ALL_KV_FORMATS[name].bytes_per_token(1, shape.head_dim, shape.rope_dim)
    num_bytes, flops = float(places * row_bytes), 4.0 * shape.head_dim * num_heads * places
    roof = max(num_bytes / READ_BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
    what = f"entries of {kind.ratio}" + (f", {kind.top_k} chosen" if kind.top_k else "")
    return {
        "measure": f"{num_heads} heads, {num_rows} x {context}, {what}, {name}",
        "unit": "us",
        "values": {"attend": round(seconds * 1e6, 2)},
        "tflops": round(flops / seconds / 1e12, 1),
        "roof_us": round(roof * 1e6, 2),
        "percent_of_roof": round(100 * roof / seconds, 1),
    }


class Layer:
    """All kernels of a layer with an index, for a step whose rows all end an entry."""

    def __init__(
        self, shape: Shape, name: str, num_heads: int, top_k: int, num_rows: int, context: int, device: torch.device
    ) -> None:
        self.rig = rig = Rig(shape, name, num_heads, Kind(4, top_k), [context - 1] * num_rows, 1, device)
        dtype, heads, dim = getattr(torch, shape.dtype), shape.index_heads, shape.index_dim
        self.num_seen = context // 4
        columns, num_columns = score_columns(self.num_seen), -(-self.num_seen // PAGE)
        num_slots = num_rows * num_columns * PAGE
        self.index = IndexPlanes(
            PAGE,
            torch.randn(1, dim, device=device).to(torch.float8_e4m3fn).expand(num_slots, dim).contiguous(),
            torch.rand(num_slots, 1, device=device),
        )
        order = torch.randperm(num_rows * num_columns).to(torch.int32)
        self.index_table_NP = order.view(num_rows, num_columns).to(device)
        self.rows = SparseRows(rig.rows.table_rows_T, torch.full_like(rig.rows.table_rows_T, self.num_seen))
        self.q_TID = torch.randn(num_rows, heads, dim, device=device).to(dtype)
        self.weights_TI = torch.randn(num_rows, heads, device=device)
        self.codes_TID = torch.empty(self.q_TID.shape, dtype=torch.float8_e4m3fn, device=device)
        self.factors_TI = torch.empty_like(self.weights_TI)
        self.scores_TC = torch.zeros(num_rows, columns, device=device)
        self.selected_TK = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
        self.scratch = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in top_k_specs(num_rows, columns, top_k)
        }
        self.positions_T = torch.full((num_rows,), context - 1, device=device)
        self.slots_T = torch.arange(num_rows, device=device) * 7
        self.states_T = torch.arange(num_rows, device=device)
        self.kv_TD = torch.randn(num_rows, shape.head_dim, device=device).to(dtype)
        self.norm = LatentNorm(torch.ones(shape.head_dim, device=device, dtype=dtype), 1e-6)
        self.pools = [
            (
                Compressor(
                    4, True, torch.zeros(4, 2 * own, device=device), torch.ones(own, device=device, dtype=dtype), 1e-6
                ),
                torch.randn(num_rows, 4 * own, device=device),
                torch.zeros(num_rows, 2, 3, own, device=device),
            )
            for own in (shape.head_dim, dim)
        ]

    def write(self) -> None:
        arguments = self.slots_T, self.states_T, self.norm, 1e-6, self.rig.rotary
        write_window(self.kv_TD, self.rig.q_TND, *arguments, self.rig.scopes[0].window)

    def compress(self) -> None:
        compressor, pooled_TX, state_PK3D = self.pools[0]
        entries = self.rig.scopes[0].entries
        assert entries is not None, "a layer that chooses has entries"
        step = PooledRows(pooled_TX, self.positions_T, self.slots_T, self.states_T, state_PK3D)
        compress_entries(step, compressor, self.rig.rotary, entries)

    def compress_index(self) -> None:
        compressor, pooled_TX, state_PK3D = self.pools[1]
        step = PooledRows(pooled_TX, self.positions_T, self.slots_T, self.states_T, state_PK3D)
        rotaries = self.rig.rotary, self.rig.rotary
        compress_index(step, self.q_TID, compressor, *rotaries, self.index)

    def score(self) -> None:
        quantize_index_queries(self.q_TID, self.weights_TI, self.codes_TID, self.factors_TI)
        index_scores(self.codes_TID, self.factors_TI, self.index, self.index_table_NP, self.rows, self.scores_TC)

    def choose(self) -> None:
        top_k_tokens(self.scores_TC, self.rows, self.selected_TK, self.scratch)


@torch.inference_mode()
def layer_of(shape: Shape, num_rows: int, context: int, device: torch.device) -> dict[str, Any]:
    """Time every kernel alone, and the compressors' share of the total."""
    (heads, top_k), name = shape.models[0], shape.formats[0]
    layer = Layer(shape, name, heads, top_k, num_rows, context, device)
    calls = {
        "write": layer.write,
        "compress": layer.compress,
        "compress index": layer.compress_index,
        "scores": layer.score,
        "top-k": layer.choose,
        "attend": lambda: layer.rig.attend(0),
    }
    seconds = {key: seconds_per_call([call] * 4, device) for key, call in calls.items()}
    compressors = seconds["compress"] + seconds["compress index"]
    return {
        "measure": f"layer, {heads} heads, {num_rows} x {context}, {top_k} entries of 4 chosen, {name}",
        "unit": "us",
        "values": {key: round(own * 1e6, 2) for key, own in seconds.items()},
        "compressors_percent": round(100 * compressors / sum(seconds.values()), 1),
    }


def main() -> None:
    """Check, measure, print."""
    arguments = options("Attention to windows and entries").parse_args()
    shape, device = TINY if arguments.tiny else FULL, torch.device(arguments.device)
    budget = Budget(arguments.budget_seconds)
    torch.manual_seed(0)
    checks = {
        f"{name}, {heads} heads, entries of {kind.ratio}": check(shape, name, heads, kind, device)
        for name in shape.formats
        for heads, top_k in shape.models
        for kind in (Kind(4, top_k), Kind(128, 0))
    }
    print(f"checks: {checks}", flush=True)
    results: list[dict[str, Any]] = []
    for heads, top_k in shape.models:
        for name in shape.formats:
            for num_rows in shape.rows:
                for context in shape.contexts:
                    for kind in (Kind(4, top_k), Kind(128, 0)):
                        if budget.left_seconds < 8:
                            print("left out: no time")
                            break
                        results.append(row_of(shape, name, heads, kind, num_rows, context, device))
                        print(results[-1], flush=True)
    for num_rows, context in shape.layers:
        if budget.left_seconds < 8:
            print("left out: no time")
            break
        results.append(layer_of(shape, num_rows, context, device))
        print(results[-1], flush=True)
    facts: dict[str, Any] = {"check": {"errors": checks, "is_right": max(checks.values()) <= MAX_ERROR}}
    facts |= {"flops_per_second": FLOPS_PER_SECOND, "read_bytes_per_second": READ_BYTES_PER_SECOND}
    record = make_record("gpu-compressed-attention", results, "compressed attention", "random rows", arguments, facts)
    lines = [(row["measure"], f"{sum(row['values'].values()):.2f}", row.get("percent_of_roof", "")) for row in results]
    print_table("Compressed attention", ("", "us", "% of the roof"), lines)
    write_record(record, "compressed-attention", arguments)


if __name__ == "__main__":
    main()
