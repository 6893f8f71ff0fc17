"""Seconds of one step of an engine: bytes and FLOPs of products and attention, launches, exchange; no torch.

    step = fixed + layers * launches + products + attention + exchange, or the host's time if that is longer

A product reads its weights or multiplies them, whichever takes longer; near the crossing it takes more than either, hence
the Euclidean norm of both. On a CPU a core either loads or multiplies, so both add up. Shares are of the device's rates
(`Rates`). Every constant names the record under benchmarks/records that it comes from; docs/log.md has the errors.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, hypot, prod
from typing import NamedTuple

from holdfast.cache.near import FIRST_TOKENS
from holdfast.distributed.mesh import Mesh
from holdfast.memory.device_rates import Rates
from holdfast.models.activations import fits_fused_decode, takes_fused_decode
from holdfast.models.declaration import HeadGeometry
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.declared_weights import WeightGroup
from holdfast.models.spec import ExpertsSpec, ModelSpec, uniform_experts
from holdfast.planning.exchange_time import exchange_seconds
from holdfast.planning.resolve import Resolved
from holdfast.planning.terms import MAX_GRAPH_ROWS, TOKEN_BUCKETS
from holdfast.quant.formats import DTYPE_BYTES, KVFormat, bytes_for, index_dtype_beside, index_planes
from holdfast.quant.weight_schemes import MXFP4, WEIGHT_SCHEMES

STEP_SECONDS = 60e-6
"""Inputs, rope rows, final norm, argmax: what is left of Qwen3-0.6B at batch 1 (h200-2026-11-18-before-after)."""


class LayerSeconds(NamedTuple):
    """Launches of one layer: a step's seconds beyond its bytes, divided by its layers."""

    fused: float
    """Steps of up to 16 rows on the fused decode path."""
    plain: float


GROUPED = LayerSeconds(16e-6, 42e-6)
"""Qwen3-0.6B and 32B at batch 1 and 64, gemma-3-1b-it (h200-2026-11-18-before-after)."""
GROUPED_EXPERTS = LayerSeconds(26e-6, 45e-6)
"""Qwen3-30B-A3B (h200-2026-11-17-overlap), gpt-oss-20b (h200-2026-11-17-groups)."""
LATENT = LayerSeconds(42e-6, 55e-6)
"""DeepSeek-V2-Lite with the fused decode path and without it (h200-2026-11-17-latent, -latent-v2-lite)."""
SPARSE = LayerSeconds(100e-6, 100e-6)
"""DeepSeek-V3.2: index scores and the choice of tokens beside it (h200-2026-11-17-latent-v32)."""
COMPRESSED = LayerSeconds(45e-6, 45e-6)
"""DeepSeek-V4-Flash: entries, streams and tables outside of the fused decode path (h200-2026-11-19-latent-v4-flash-8193)."""
QUERY_LATENT_SECONDS = 8e-6
"""Queries with a latent of their own have one more product and norm: GLM-4.7-Flash (h200-2026-11-17-latent), R1 (-latent-r1)."""
FEW_ROWS_SECONDS = 15e-6
"""A fused layer of 2 to 16 rows above one of a single row: Qwen3-32B at batch 8 (h200-2026-11-16-quantized, its graph)."""
HOST_SECONDS, HOST_SEQUENCE_SECONDS = 300e-6, 20e-6
"""Host time of a step, and of each of its sequences, which runs beside the device: what steps that wait take longer than
steps that run ahead, 0.3 ms at batch 1 and 2.6 ms at 128 (h200-2026-11-17-overlap)."""
EAGER_LAYER_SECONDS = 150e-6
"""Host time of one layer that no graph holds; the device waits if it is faster. Assumed: no record is without graphs."""
CPU_LAYER_SECONDS = 60e-6
"""Calls of one layer on a CPU, which no record tells apart; 2 ms of 28 in neoverse-n1-2026-11-15-latency."""

CODES_SHARE = 0.9
"""Share of the read rate for weights in codes: Qwen3-32B and 30B-A3B in fp8 (h200-2026-11-17-overlap)."""
MXFP4_BYTES_PER_SECOND = 2.6e12
"""Upper bound: decoding e2m1 takes arithmetic too. gpt-oss-20b and DeepSeek-V4-Flash on an H200 (h200-2026-11-19-groups-gpt-oss-20b,
-latent-v4-flash-8193), taken for every GPU."""
GEMV_SHARE, GEMM_SHARE = 1.0, 0.93
"""Shares for plain weights: one row by GEMV, more rows by small-batch GEMM or cuBLAS (Qwen3-32B at 1, 32 and 64)."""
PRODUCT_SHARE = 0.9
"""Share of the FLOP/s of one large product: 1,000 rows of Qwen3-8B through all layers (h200-2026-11-18-shared-prompts)."""
KV_SHARES = {
    "fp8": 0.92,
    "turboquant_k8v4": 0.84,
    "turboquant_k5v4": 0.58,
    "turboquant_4bit_nc": 0.58,
    "turboquant_k3v4_nc": 0.56,
    "turboquant_3bit_nc": 0.42,
}
"""Shares of the read rate, 32 x 8192 and 8 x 32768 (h200-2026-11-18-quantized-attention); turboquant_k5v4: 32 x 8160
(h200-2026-11-19-near-attention)."""
KV_SHARE, INDEX_SHARE, ONE_SEQUENCE_SHARE, WHOLE_BATCH = 0.95, 0.8, 0.6, 8
"""Shares for plain pages, and for one sequence, which has fewer splits than the device has multiprocessors (-attention)."""
PROMPT_ATTENTION_SHARES = {"cuda": 0.43, "cpu": 1.0}
"""Shares of the FLOP/s: 344 of 790 TFLOP/s at 8,192 rows (h200-2026-11-18-attention); 2,048 rows (neoverse-n1-2026-11-15-latency)."""
CPU_CODES_SHARE = 0.3
"""Share of a CPU's FLOP/s: weights in codes or half precision are widened first (2026-11-18, int8 and mxfp4 at 128 rows)."""
LATENT_SHARE, CODED_LATENT_SHARE, CHOSEN_SHARE = 0.52, 0.18, 0.4
"""Shares of the FLOP/s, absorbed decode over latents: plain, quantized, and lists of chosen tokens (h200-2026-11-17-latent-attention)."""


class StepLoad(NamedTuple):
    """The work of a step."""

    num_sequences: int
    """Sequences that decode one token each."""
    context: float
    """Stored tokens that each decoding sequence attends to, its own included."""
    prompt_rows: int = 0
    """Rows of prompts, from other sequences."""
    num_prompts: int = 1
    prompt_context: int = 0
    """Tokens of each prompt that were computed before."""
    distinct_experts: float | None = None
    """Distinct experts that a layer's rows choose; None: as in uniform routing."""

    @property
    def rows(self) -> int:
        return self.num_sequences + self.prompt_rows

    @property
    def logit_rows(self) -> int:
        return self.num_sequences + (self.num_prompts if self.prompt_rows else 0)


class _Sizes(NamedTuple):
    """Elements of the weights of one rank that a step multiplies by."""

    dense: int
    experts: int
    """All experts of the rank, in all layers."""
    head: int
    num_expert_layers: int


def step_seconds(resolved: Resolved, rates: Rates, load: StepLoad) -> float:
    """Predict one step of one rank; ranks of other stages take as long."""
    spec, num_layers = rank_spec(resolved.declared, resolved.mesh), len(resolved.layers)
    is_fused = _is_fused(resolved, spec, load)
    seconds = STEP_SECONDS + num_layers * _layer_seconds(spec, rates, is_fused, load.rows)
    seconds += _product_seconds(resolved, rates, load, spec)
    seconds += _attention_seconds(resolved, rates, load)
    declared = resolved.declared
    row_bytes, num_streams = declared.hidden_size * DTYPE_BYTES[resolved.dtype], declared.num_streams
    seconds += exchange_seconds(resolved.mesh, num_layers, load.rows, row_bytes, rates.link, num_streams)
    has_graph = not resolved.enforce_eager and load.rows <= (TOKEN_BUCKETS[-1] if load.prompt_rows else MAX_GRAPH_ROWS)
    if rates.kind == "cpu":
        return seconds
    host = (
        HOST_SECONDS
        + load.logit_rows * HOST_SEQUENCE_SECONDS
        + (0.0 if has_graph else num_layers * EAGER_LAYER_SECONDS)
    )
    return max(seconds, host)


def rank_spec(declared: DeclaredModel, mesh: Mesh) -> ModelSpec | None:
    """Return one rank's decoder; None if the declaration has none."""
    declaration = getattr(declared.declaration, "grouped", declared.declaration)
    rank = getattr(declaration, "rank", None)
    return None if rank is None else declared.remembered(("rank spec", mesh), lambda: rank(mesh))


def _is_fused(resolved: Resolved, spec: ModelSpec | None, load: StepLoad) -> bool:
    if spec is None or resolved.is_invariant or load.prompt_rows:
        return False
    takes = takes_fused_decode(spec, resolved.dtype, resolved.target.kind, resolved.recipe)
    return takes and fits_fused_decode(load.rows, spec, resolved.recipe)


def _layer_seconds(spec: ModelSpec | None, rates: Rates, is_fused: bool, rows: int) -> float:
    if rates.kind == "cpu":
        return CPU_LAYER_SECONDS
    kind, more = GROUPED, 0.0
    if spec is not None and spec.compressed is not None:
        kind = COMPRESSED
    elif spec is not None and spec.latent is not None:
        kind = LATENT if spec.latent.index is None else SPARSE
        more = QUERY_LATENT_SECONDS if spec.latent.q_rank is not None and kind is LATENT else 0.0
    elif spec is not None and spec.experts is not None:
        kind = GROUPED_EXPERTS
    if not is_fused:
        return kind.plain + more
    return min(kind.plain, kind.fused + (FEW_ROWS_SECONDS if rows > 1 else 0.0)) + more


# --- products


def _sizes(resolved: Resolved) -> _Sizes:
    def count() -> _Sizes:
        dense = experts = head = layers = 0
        for weight in resolved.declared.parameters(resolved.mesh):
            size = prod(weight.shape)
            if weight.group == "experts":
                experts += size
                layers += weight.name.endswith("down.weight")
            elif weight.kind == "head":
                head += size
            elif weight.kind in ("linear", "router"):
                dense += size
        return _Sizes(dense, experts, head, layers)

    return resolved.declared.remembered(("step sizes", resolved.mesh), count)


def _product_seconds(resolved: Resolved, rates: Rates, load: StepLoad, spec: ModelSpec | None) -> float:
    """Return the seconds of all products of a step, experts and head included."""
    groups = resolved.declared.group_bytes(resolved.dtype, resolved.recipe, resolved.mesh)
    sizes = _sizes(resolved)
    seconds = 0.0
    for name, group in groups.items():
        rows, elements, read = float(load.rows), sizes.dense, 1.0
        if name == "experts":
            read, rows = _expert_shares(spec, load)
            elements = sizes.experts
        elif sizes.head and (name == "lm_head" or (name == "embed" and "lm_head" not in groups)):
            rows, elements = load.logit_rows, sizes.head
        elif name in ("embed", "positions"):
            continue  # rows are looked up
        elif name != "layers":
            elements = 0
        seconds += _group_seconds(
            group, read * elements, read * group.num_bytes, 2.0 * rows * elements, rates, load.rows
        )
    return seconds


def _expert_shares(spec: ModelSpec | None, load: StepLoad) -> tuple[float, float]:
    """Return the share of a rank's experts that rows choose, and the mean rows of each expert."""
    experts: ExpertsSpec | None = None if spec is None else spec.experts
    if experts is None:
        return 1.0, float(load.rows)
    distinct = load.distinct_experts or uniform_experts(experts.num_experts, experts.top_k, load.rows)
    return distinct / experts.num_experts, load.rows * experts.top_k / experts.num_experts


def _group_seconds(
    group: WeightGroup, elements: float, num_bytes: float, flops: float, rates: Rates, rows: int
) -> float:
    """Return the seconds of products with weights stored alike; `elements` and `num_bytes` count what is read."""
    stored_as = group.stored_as[0]
    if rates.kind == "cpu":
        share = PRODUCT_SHARE if stored_as == "float32" else CPU_CODES_SHARE
        reading = elements * DTYPE_BYTES["float32"] / rates.read_bytes_per_second
        return reading + flops / (share * rates.flops_per_second)
    flops_per_second = rates.flops_per_second
    if stored_as.startswith("fp8") and rates.fp8_flops_per_second:
        flops_per_second = rates.fp8_flops_per_second
    plain = GEMV_SHARE if rows == 1 else GEMM_SHARE
    share = CODES_SHARE if stored_as in WEIGHT_SCHEMES else plain
    bytes_per_second = share * rates.read_bytes_per_second
    if stored_as == MXFP4.name:
        bytes_per_second = min(bytes_per_second, MXFP4_BYTES_PER_SECOND)
    return hypot(num_bytes / bytes_per_second, flops / (PRODUCT_SHARE * flops_per_second))


# --- attention


class KvRead(NamedTuple):
    """Reads of rows from the caches of like layers."""

    num_layers: int
    row_bytes: int
    share: float
    """Share of the read rate."""
    ratio: int = 1
    """Tokens that a stored row stands for."""
    most_rows: int | None = None
    """Most stored rows that a row attends to: a window, or the index's choice; None: all."""
    flops: float = 0.0
    """FLOPs of a decode row per stored row; 0: reading always takes longer."""
    flops_share: float = 1.0
    prompt_flops: float = 0.0
    """FLOPs of a prompt row per stored row."""
    in_waves: bool = False
    """True if only small batches split a tile of a sequence and KV head, so the last wave may be half empty."""

    def attended(self, context: float) -> float:
        """Return the stored rows that a row at this context attends to."""
        rows = context / self.ratio
        return rows if self.most_rows is None else min(rows, self.most_rows)

    def attended_by_prompt(self, length: float) -> float:
        """Like `attended`, summed over all rows of a prompt."""
        most = self.most_rows
        if most is None or length <= most * self.ratio:
            return length * length / (2 * self.ratio)
        return most * (length - most * self.ratio / 2)


def kv_reads(resolved: Resolved) -> tuple[KvRead, ...]:
    """List every kind of stored row that a step reads."""
    return resolved.declared.remembered(("kv reads", *resolved.stored_key()), lambda: _list_reads(resolved))


def _list_reads(resolved: Resolved) -> tuple[KvRead, ...]:
    heads, declared = resolved.heads(), resolved.declared
    sequence_bytes = declared.kv_bytes_per_sequence(resolved.kv_format, resolved.mesh)
    fixed = (KvRead(1, sequence_bytes, KV_SHARE, most_rows=1),) if sequence_bytes else ()
    if heads is None:
        rows = declared.declaration.cache_rows(resolved.kv_format, resolved.mesh)
        flops = 4.0 * declared.num_heads * declared.head_dim / resolved.mesh.tensor_size
        share = _kv_share(resolved.kv_format)
        return (*(KvRead(row.num_layers, row.row_bytes, share, row.ratio, prompt_flops=flops) for row in rows), *fixed)
    formats = resolved.formats()
    if heads.is_compressed:
        return (*_compressed_reads(heads, formats), *fixed)
    if heads.rope_dim:
        return _latent_reads(heads, formats)
    flops = 4.0 * heads.num_heads * heads.head_dim
    windows = [heads.windows[layer] for layer in heads.paged_layers]
    counts = Counter(zip(formats, windows, strict=True))
    reads = tuple(
        KvRead(
            *(count, kv_format.bytes_per_token(heads.num_kv_heads, heads.head_dim), _kv_share(kv_format)),
            most_rows=window,
            prompt_flops=flops,
            in_waves=not kv_format.is_quantized,
        )
        for (kv_format, window), count in counts.items()
    )
    near = _near_reads(resolved, heads, counts) if resolved.near_tokens else ()
    return (*reads, *near, *fixed)


def _near_reads(
    resolved: Resolved, heads: HeadGeometry, counts: Mapping[tuple[KVFormat, int | None], int]
) -> Iterator[KvRead]:
    """Yield what near tokens take beyond codes: the first tokens and, on average, half of a row's own block."""
    for (kv_format, window), count in counts.items():
        if kv_format.is_quantized:
            most = resolved.near_tokens // 2 + (FIRST_TOKENS if window is None else 0)
            near_bytes = 2 * bytes_for(resolved.dtype, (heads.num_kv_heads, heads.head_dim))
            more_bytes = near_bytes - kv_format.bytes_per_token(heads.num_kv_heads, heads.head_dim)
            yield KvRead(count, more_bytes, KV_SHARE, most_rows=most)


def _latent_reads(heads: HeadGeometry, formats: Sequence[KVFormat]) -> tuple[KvRead, ...]:
    """List reads of latents, and of the index that chooses among them."""
    absorbed = 2.0 * heads.num_heads * (2 * heads.head_dim - heads.rope_dim)
    prompt = 2.0 * heads.num_heads * (heads.nope_dim + heads.rope_dim + heads.value_dim)
    reads = []
    for kv_format, count in Counter(formats).items():
        share = CODED_LATENT_SHARE if kv_format.is_quantized else LATENT_SHARE
        most = heads.index_top_k or None
        row_bytes = kv_format.bytes_per_token(1, heads.head_dim, heads.rope_dim)
        flops = CHOSEN_SHARE if most else share
        reads.append(KvRead(count, row_bytes, KV_SHARE, 1, most, absorbed, flops, absorbed if most else prompt))
    if heads.index_dim:
        num_indexed = len(formats) - len(heads.shared_layers)
        reads.append(_index_read(heads, formats[0], num_indexed, 1))
    return tuple(reads)


def _compressed_reads(heads: HeadGeometry, formats: Sequence[KVFormat]) -> tuple[KvRead, ...]:
    """List reads of windows, of entries that stand for several tokens, and of the index that chooses entries."""
    row_bytes = formats[0].bytes_per_token(1, heads.head_dim, heads.rope_dim)
    flops = 4.0 * heads.num_heads * heads.head_dim
    own = KvRead(0, row_bytes, KV_SHARE, flops=flops, flops_share=CHOSEN_SHARE, prompt_flops=flops)
    reads = [own._replace(num_layers=len(formats), most_rows=heads.windows[0])]
    kinds = Counter((ratio, layer in heads.overlapped_layers) for layer, ratio in enumerate(heads.ratios) if ratio)
    for (ratio, is_chosen), count in kinds.items():
        most = heads.index_top_k if is_chosen else None
        reads.append(own._replace(num_layers=count, ratio=ratio, most_rows=most))
        if is_chosen:
            reads.append(_index_read(heads, formats[0], count, ratio))
    return tuple(reads)


def _index_read(heads: HeadGeometry, kv_format: KVFormat, num_layers: int, ratio: int) -> KvRead:
    planes = index_planes(index_dtype_beside(kv_format), heads.index_dim)
    flops = 2.0 * heads.index_heads * heads.index_dim
    return KvRead(num_layers, sum(plane.bytes_per_token for plane in planes), INDEX_SHARE, ratio, prompt_flops=flops)


def _kv_share(kv_format: KVFormat) -> float:
    return KV_SHARES.get(kv_format.name, KV_SHARE)


def _attention_seconds(resolved: Resolved, rates: Rates, load: StepLoad) -> float:
    """Return the seconds of decode rows plus those of prompt rows."""
    seconds, before, rows = 0.0, load.prompt_context, load.prompt_rows / load.num_prompts
    alone, waves = (1.0, 1.0) if rates.kind == "cpu" else _occupied(resolved, rates, load.num_sequences)
    prompt_share = PROMPT_ATTENTION_SHARES[rates.kind]
    for read in kv_reads(resolved):
        if load.num_sequences:
            attended = load.num_sequences * read.num_layers * read.attended(load.context)
            share = read.share * alone * (waves if read.in_waves else 1.0)
            reading = attended * read.row_bytes / (share * rates.read_bytes_per_second)
            seconds += max(reading, attended * read.flops / (read.flops_share * rates.flops_per_second))
        if rows:
            attended = read.attended_by_prompt(before + rows) - read.attended_by_prompt(before)
            flops = load.num_prompts * read.num_layers * attended * read.prompt_flops
            seconds += flops / (prompt_share * rates.flops_per_second)
    return seconds


def _occupied(resolved: Resolved, rates: Rates, num_sequences: int) -> tuple[float, float]:
    """Return two shares of the read rate: for few sequences with splits, and for a partly empty last wave.

    36 sequences of 8 KV heads are 2.2 waves on 132 multiprocessors, and take 3 (h200-2026-11-15-quantized-kv).
    """
    spread = min(1.0, (num_sequences - 1) / (WHOLE_BATCH - 1))
    alone, heads = ONE_SEQUENCE_SHARE + (1 - ONE_SEQUENCE_SHARE) * spread, resolved.heads()
    if not rates.num_multiprocessors or heads is None:
        return alone, 1.0
    waves = num_sequences * heads.num_kv_heads / rates.num_multiprocessors
    return alone, waves / ceil(waves) if waves > 1 else 1.0
