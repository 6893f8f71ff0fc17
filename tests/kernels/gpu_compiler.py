"""Compiles kernels for a GPU where none is: what the interpreter takes, Triton's compiler may still refuse.

Run as a program with names of cases it prints, as JSON, for each of them an error or the largest shared memory of its
kernels. The functions that launch kernels run as they are, over tensors in host memory; launches become compilations.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

torch.cuda.is_available = lambda: True  # before kernels are imported, because their import asks it

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from holdfast.kernels import activation, hyper_connections, norm, operation, packed_kernels, up_projection  # noqa: E402
from holdfast.kernels.activation import GateForm  # noqa: E402
from holdfast.kernels.attention import (  # noqa: E402
    lane_rows,
    lane_warpgroups,
    output_gate,
    prefill_warpgroups,
    quantized_attention,
    rope_rows,
    split_kv,
    tiled_attention,
    write_kv,
    write_quantized_kv,
)
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns  # noqa: E402
from holdfast.kernels.attention.near_tokens import NearPages  # noqa: E402
from holdfast.kernels.attention.paged_attention import Scoring  # noqa: E402
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes  # noqa: E402
from holdfast.kernels.attention.tile_work import LaneRound, LaneWork, TileCall, TileWork  # noqa: E402
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary  # noqa: E402
from holdfast.kernels.exchange import add_rows, gather_rows, links, sum_rows  # noqa: E402
from holdfast.kernels.gemm import (  # noqa: E402
    block_scaled_gemv,
    block_scaled_tiles,
    deferred_rms_norm,
    embedding,
    joint_row,
    packed_dequantize,
    packed_gemv,
    packed_mma,
    packed_tiles,
    quantize_activations,
    row_scaled_tiles,
    small_batch,
)
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch  # noqa: E402
from holdfast.kernels.geometry import LaneGeometry, order_specs  # noqa: E402
from holdfast.kernels.latent import (  # noqa: E402
    compress,
    compressed_attention,
    compressed_scopes,
    compressed_warpgroups,
    gathered_attention,
    index_scores,
    latent_attention,
    latent_prefill,
    latent_projection,
    latent_tiles,
    latent_warpgroups,
    sparse_low_attention,
    top_k_tokens,
    write_index,
    write_latent,
    write_window,
)
from holdfast.kernels.latent.latent_low_tiles import LOW_HEIGHT  # noqa: E402
from holdfast.kernels.latent.latent_planes import (  # noqa: E402
    IndexPlanes,
    LatentCall,
    LatentPlanes,
    SparseRows,
)
from holdfast.kernels.latent.top_k_geometry import top_k_specs  # noqa: E402
from holdfast.kernels.load import place_kernels  # noqa: E402
from holdfast.kernels.moe import (  # noqa: E402
    deep_gemv,
    expert_gemv,
    expert_linear,
    expert_row,
    expert_sum,
    grouped_gemm,
    hash_routing,
    normed_routing,
    routing,
)
from holdfast.kernels.sampling import edit_logits  # noqa: E402
from holdfast.kernels.state import causal_conv, delta_chunks, delta_drafts, delta_step, gated_norm, scan_warpgroups  # noqa: E402
from holdfast.kernels.state.delta_inputs import DeltaInputs  # noqa: E402
from holdfast.kernels.state.kept_drafts import KeptDrafts  # noqa: E402
from holdfast.kernels.state.state_geometry import delta_chunk_specs, draft_specs, state_list_specs  # noqa: E402
from holdfast.kernels.state.state_rows import StateRows  # noqa: E402
from holdfast.kernels.stream_geometry import stream_parts_spec  # noqa: E402
from holdfast.kernels.triton_compat import TensorDescriptor  # noqa: E402
from holdfast.quant.entry_state import pooled_width, state_shape  # noqa: E402
from holdfast.quant.formats import ALL_KV_FORMATS, KVFormat, index_planes  # noqa: E402
from holdfast.quant.kv_quantize import rotation_table  # noqa: E402
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme, integer_scheme, nvfp4_scheme  # noqa: E402
from holdfast.quant.packed_weight import PackedPart, PackedWeight  # noqa: E402
from holdfast.quant.quantized_weight import QuantizedWeight  # noqa: E402
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
ANSWERS = {"can_run": True, "supports_pdl": True, "shared_bytes": 227 * 1024}
"""What launchers ask about the GPU of a tensor. Memory of a host would answer 256 KiB of shared memory."""
LAUNCH_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NAMES |= {torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
NAMES |= {torch.float8_e4m3fn: "fp8e4nv"}
BF16, FP16 = torch.bfloat16, torch.float16
QUANTIZED_BITS = ((8, 8), (8, 4), (4, 4), (3, 4), (3, 3))


class CompiledOnly:
    """In a kernel's place: a launch becomes a compilation for the types and values that it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.shared_bytes = 0
        self.num_copies = 0
        """Last compilation: copies into shared memory that are under way while the kernel computes."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *arguments: object, **keywords: Any) -> None:
        options = {name: keywords.pop(name) for name in LAUNCH_OPTIONS if name in keywords}
        values = dict(zip(self._kernel.arg_names, arguments, strict=False)) | keywords
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self._kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
            else:
                is_count = parameter.do_not_specialize and isinstance(value, int)
                signature[parameter.name] = "i32" if is_count else _type_of(value)
                if isinstance(value, tuple):
                    attributes |= {(index, place): [["tt.divisibility", 16]] for place in range(len(value))}
            if signature[parameter.name] == "constexpr":
                constants[parameter.name] = value
            elif parameter.do_not_specialize:
                continue
            elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source_of = GluonASTSource if self._kernel.is_gluon() else ASTSource
        source = source_of(self._kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=HOPPER, options=options)
        _check_assembler(compiled.asm["ttgir"])
        _check_words(compiled.asm["ptx"], compiled.metadata.shared)
        _check_polls(compiled.asm["ptx"])
        is_large = self._kernel.__name__ == "_prefill_kernel" or constants.get("LARGE")
        # Latents are declined where batches are to change nothing. With near tokens a row's position alone masks blocks.
        if is_large and "kernels.attention" in self._kernel.__module__ and not constants.get("NEAR_BLOCK"):
            _check_loops(compiled.asm["ptx"])
        self.shared_bytes = max(self.shared_bytes, compiled.metadata.shared)
        self.num_copies = compiled.asm["ttgir"].count("ttg.async_copy_global_to_local")


def _check_assembler(program: str) -> None:
    """Assembler over four bytes a register must get neighbours: with any other layout it would mix columns in silence."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", program, re.MULTILINE))
    for line in program.splitlines():
        if "elementwise_inline_asm" not in line or "packed_element = 4" not in line:
            continue
        found = re.search(r"tensor<\w+, (#ttg\.dot_op<\{.*?\}>|#\w+)>", line)
        assert found is not None, f"no layout in {line}"
        layout = layouts.get(found[1], found[1])
        operand = re.search(r"opIdx = [01], .*kWidth = (\d+)", layout)
        row = re.search(r"sizePerThread = \[(?:1, )+(\d+)\].*order = \[(?:2, )?1, 0\]", layout)
        neighbours = int((operand or row or [0, 1])[1])
        assert neighbours % 4 == 0, f"four bytes of {layout}"


def _check_words(program: str, shared_bytes: int) -> None:
    """Shared memory of a kernel's own lies beside what Triton gives out, which asks for more than 48 KiB only where its part is more."""
    own_bytes = 4 * sum(int(count) for count in re.findall(r"\.shared \.align \d+ \.b32 \w+\[(\d+)\]", program))
    assert own_bytes == 0 or own_bytes + shared_bytes <= 48 * 1024 or shared_bytes > 48 * 1024, (
        f"{own_bytes} + {shared_bytes} bytes of shared memory cannot be launched"
    )


def _check_polls(program: str) -> None:
    """Warps that wait for a peer's signal leave the loop each by itself: a barrier inside would wait for those that have left."""
    for block in re.split(r"^\$L__BB\d+_\d+:", program, flags=re.MULTILINE):
        _, _, behind = block.partition("ld.acquire.sys")
        assert "bar.sync" not in behind, f"a barrier between polls: {block}"


def _check_loops(program: str) -> None:
    """Large tiles round a block of tokens alike whether or not it is masked, which follows from where a prompt is cut.

    A product that becomes one instruction with a sum rounds once, and twice where something stands between them. The loops are those
    with exponentials of many scores.
    """
    blocks = re.split(r"^\$L__BB\S+:", program, flags=re.MULTILINE)
    loops = [block for block in blocks if block.count("ex2.approx") > 16]
    counts = {tuple(len(re.findall(rf"\s{op}\.\S*f32\s", loop)) for op in ("fma", "sub", "add")) for loop in loops}
    assert len(counts) == 1, f"products and sums of clear and masked blocks: {counts}"


def _type_of(value: object) -> Any:
    """As a launch decides it: numbers that are 1, and what is not there, become constants."""
    if isinstance(value, tuple):
        return tuple(_type_of(item) for item in value)
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{NAMES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    if value is None:
        return "constexpr"
    assert isinstance(value, int), f"{value!r} is no argument of a kernel"
    return "constexpr" if value == 1 else "i32"


def rows_of(num_rows: int, dtype: torch.dtype, gated: bool, size_n: int = 192, size_k: int = 1024) -> None:
    """A step's four kinds of products, as `num_rows` rows take them."""
    scratch = deferred_rms_norm.SmallBatchScratch(
        torch.empty(4096), torch.empty(4096), torch.empty(64, dtype=torch.int32)
    )
    x, weight, bias, y, out, norm_weight = (
        torch.empty(shape, dtype=dtype)
        for shape in (
            (num_rows, size_k),
            (2 * size_n, size_k),
            (2 * size_n,),
            (num_rows, size_n),
            (num_rows, size_n),
            (size_k,),
        )
    )
    rows = deferred_rms_norm.defer_rms_norm(deferred_rms_norm.ResidualStream(x, norm_weight, 1e-5, x, scratch))
    small_batch.normed_linear(rows, weight, bias if gated else None, gated, y, scratch)
    stream = deferred_rms_norm.ResidualStream(y, norm_weight, 1e-5, out, scratch)
    small_batch.linear_add(x, weight, None if gated else bias, stream)
    small_batch.small_batch_linear(x, weight, None if gated else bias, out, scratch)


def state_products_of(scheme: str | None, num_rows: int, hidden: int, size_n: int, num_gates: int) -> None:
    """The products of a layer with a state on the fused decode path, gates beside the first, with norms of 1 + w."""
    squares, counts = torch.empty(4096), torch.empty(64, dtype=torch.int32)
    amax = deferred_rms_norm.AmaxScratch(squares, squares, counts) if scheme is not None else None
    scratch = deferred_rms_norm.SmallBatchScratch(squares, squares, counts, amax)
    weight: Any = torch.empty((1, hidden), dtype=BF16).expand(size_n, hidden)
    if scheme is not None:
        planes = (
            torch.empty(1, dtype=getattr(torch, one.dtype)) for one in WEIGHT_SCHEMES[scheme].planes((size_n, hidden))
        )
        weight = QuantizedWeight(WEIGHT_SCHEMES[scheme], (size_n, hidden), *planes)
    x, y = torch.empty(num_rows, hidden, dtype=BF16), torch.empty(num_rows, size_n, dtype=BF16)
    side = small_batch.SideProduct(torch.empty(num_gates, hidden, dtype=BF16), torch.empty(num_rows, num_gates))
    rows = deferred_rms_norm.NormedRows(x, 320, 1e-6)
    small_batch.normed_linear(rows, weight, None, False, y, scratch, side)
    stream = deferred_rms_norm.ResidualStream(y, torch.empty(size_n, dtype=BF16), 1e-6, y, scratch, 1.0)
    small_batch.linear_add(x, weight, None, stream, deferred_rms_norm.RowAmax(squares, 1))
    deferred_rms_norm.defer_rms_norm(stream)


def attention_of(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    window: int | None,
    num_rows: int = 4,
    with_sinks: bool = False,
    softcap: float | None = None,
    page_tokens: int | None = None,
) -> None:
    """Both tiles, and the merge; or large tiles in warpgroups alone, over pages of `page_tokens`."""
    takes_warpgroups = page_tokens is not None
    num_slots, page_tokens = 2 * (page_tokens or 16), page_tokens or 16
    plane = torch.empty(num_slots, 2, head_dim, dtype=dtype)
    q, numbers = torch.empty(num_rows, 2 * group, head_dim, dtype=dtype), torch.empty(4, 16, dtype=torch.int32)
    work = TileWork(numbers, numbers, not takes_warpgroups, has_large=True, has_merge=not takes_warpgroups)
    partial = torch.empty(8, 2 * group * head_dim)
    sinks, out = torch.empty(2 * group) if with_sinks else None, q.view(num_rows, -1)
    scoring = Scoring(0.1, window, sinks, softcap)
    call = TileCall(q, numbers, work, scoring, partial, partial, out, 132)
    large = tiled_attention.LargeKernel("warpgroups" if takes_warpgroups else "triton", "the case says so")
    tiled_attention.tiled_attention(call, plane, plane, page_tokens, large)


def streams_of(num_rows: int, hidden: int) -> None:
    """Compile both launches around a block, the first mix, and the head."""
    x, norm_weight = torch.empty(num_rows, 4, hidden, dtype=BF16), torch.empty(hidden, dtype=BF16)
    mix = hyper_connections.StreamMix(torch.empty(24, 4 * hidden), torch.empty(24), torch.empty(3))
    head = hyper_connections.HeadMix(torch.empty(4, 4 * hidden), torch.empty(4), torch.empty(1))
    numbers, shares = hyper_connections.MixNumbers(1e-6, 1e-6, 20), torch.empty(num_rows, 24)
    y, parts = x[:, 0].contiguous(), torch.empty(stream_parts_spec(num_rows, 4).shape)
    hyper_connections.combine_streams(x, None, None, mix.weight_MX, parts)
    hyper_connections.enter_block(x, parts, mix, numbers, shares, norm_weight, 1e-6, y)
    hyper_connections.combine_streams(x, y, shares, mix.weight_MX, parts)
    hyper_connections.combine_streams(x, y, shares, None, None)
    hyper_connections.enter_block(x, parts, head, numbers, shares[:, :4], norm_weight, 1e-6, y)


def layer_norm_of(dtype: torch.dtype) -> None:
    x = torch.empty(3, 768, dtype=dtype)
    norm.layer_norm(x, x[0], x[1], 1e-5, x)


def mask_of(num_rows: int, vocab_size: int) -> None:
    """Forms of answers over a block of logits."""
    masks = torch.empty(num_rows, -(-vocab_size // 32), dtype=torch.int32)
    edit_logits.mask_logits_triton(torch.empty(num_rows, vocab_size), masks)


def planes_of(
    dtype: torch.dtype, key_bits: int, value_bits: int, head_dim: int, num_kv_heads: int = 2, page_tokens: int = 16
) -> QuantizedPlanes:
    """Quantized planes of two pages."""
    storage = {
        plane.name: torch.empty(2 * page_tokens, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        for plane in KVFormat("any", "uint8", "uint8", key_bits, value_bits).planes(num_kv_heads, head_dim)
    }
    rotation, mean = torch.empty(head_dim, head_dim, dtype=dtype), torch.empty(num_kv_heads, head_dim)
    return QuantizedPlanes.of(storage.__getitem__, key_bits, value_bits, head_dim, page_tokens, rotation, mean)


def rotary_of(num_rows: int, rope_dim: int, dtype: torch.dtype = torch.float32) -> Rotary:
    """Rows of a step."""
    return Rotary(*(torch.empty(num_rows, rope_dim // 2, dtype=dtype) for _ in range(2)))


def rope_rows_of(dtype: torch.dtype, num_pairs: int, magnitudes: tuple[float, ...], ratios: tuple[int, ...]) -> None:
    """cos and sin of a step's rows."""
    shape = len(ratios), 8, num_pairs
    tables = (torch.empty(shape, dtype=dtype) for _ in range(2))
    rows = rope_rows.RopeRows(torch.empty(len(ratios), num_pairs), magnitudes, ratios, *tables)
    rope_rows.fill_rope_rows(torch.empty(3, dtype=torch.int64), rows)


def write_of(dtype: torch.dtype, head_dim: int, rope_dim: int = 0, query_step: int = 1) -> None:
    """The write into plain pages; `rope_dim`: elements of a head that RoPE turns, if not all."""
    norms, planes = torch.empty(2, head_dim, dtype=dtype), torch.empty(2, 64, 8, head_dim, dtype=dtype)
    qkv, slots = torch.empty(3, 48 * head_dim, dtype=dtype), torch.empty(3, dtype=torch.int64)
    head_norm = HeadNorm(norms[0], norms[1], 1e-6)
    rotary = rotary_of(3, rope_dim or head_dim, dtype)
    write_kv.write_kv(qkv, slots, planes[0], planes[1], head_norm, rotary, None, query_step)


def gate_outputs_of(dtype: torch.dtype) -> None:
    """Gates of all rows, and of the wanted ones."""
    attended, gates = (
        torch.empty(3, 24 * 256, dtype=dtype),
        output_gate.gates_of(torch.empty(3, 14336, dtype=dtype), 24, 256),
    )
    for rows in (None, torch.empty(3, dtype=torch.int64)):
        output_gate.gate_outputs(attended, gates, rows)


def write_quantized_of(
    dtype: torch.dtype,
    head_dim: int,
    with_norm: bool = True,
    formats: tuple[tuple[int, int], ...] = QUANTIZED_BITS,
    with_near: bool = False,
    with_scale: bool = False,
    rope_dim: int = 0,
    query_step: int = 1,
) -> None:
    """The write into quantized pages; near rows have a key bias where there is no norm."""
    rotary, slots = rotary_of(3, rope_dim or head_dim, dtype), torch.empty(3, dtype=torch.int64)
    norms = torch.empty(2, head_dim, dtype=dtype)
    head_norm = HeadNorm(norms[0], norms[1], 1e-6) if with_norm else None
    for key_bits, value_bits in formats:
        planes = planes_of(dtype, key_bits, value_bits, head_dim)
        planes = replace(planes, pair_scale_2KD=torch.empty(2, 2, head_dim)) if with_scale else planes
        qkv, near = torch.empty(3, 18 * head_dim, dtype=dtype), None
        if with_near:
            near = write_quantized_kv.NearWrite(slots, slots, *torch.empty(2, 32, 2, head_dim, dtype=dtype))
            turns = make_key_turns(torch.ones(head_dim // 2), 1.0, 128, dtype, "cpu")
            planes = planes if with_norm else replace(planes, key_bias=KeyBias(torch.empty(2, head_dim), turns))
        write_quantized_kv.write_quantized_kv(qkv, slots, planes, head_norm, rotary, None, near, query_step)


def quantized_attention_of(
    dtype: torch.dtype,
    bits: tuple[int, int],
    group: int,
    head_dim: int,
    window: int | None = None,
    small: bool = True,
    large: bool = True,
    page_tokens: int = 64,
    with_sinks: bool = False,
    softcap: float | None = None,
    near: int | None = None,
) -> None:
    """Attention to quantized pages, and the merge. `near`: first tokens beside near blocks of 64."""
    planes = planes_of(dtype, *bits, head_dim, page_tokens=page_tokens)
    planes = replace(planes, rotation_DD=rotation_table(head_dim, dtype, "cpu"))
    q, numbers = torch.empty(16, 2 * group, head_dim, dtype=dtype), torch.empty(4, 16, dtype=torch.int32)
    work = TileWork(numbers, numbers, has_small=small, has_large=large, has_merge=True)
    partial = torch.empty(8, 2 * group * head_dim)
    sinks, out = torch.empty(2 * group) if with_sinks else None, q.view(16, -1)
    scoring = Scoring(0.1, window, sinks, softcap)
    call = TileCall(q, numbers, work, scoring, partial, partial, out, 132)
    near_plane = torch.empty(64, 2, head_dim, dtype=dtype)
    near_pages = None if near is None else NearPages(near_plane, near_plane, numbers, 16, 64, near)
    quantized_attention.quantized_attention(call, planes, near_pages)


def lane_case(
    dtype: torch.dtype,
    bits: tuple[int, int],
    group: int,
    head_dim: int,
    window: int | None = None,
    page_tokens: int = 64,
    with_sinks: bool = False,
    softcap: float | None = None,
    near: int | None = None,
) -> None:
    """Filling the lane, and attention to it. `near`: first tokens beside near blocks of 64."""
    planes = planes_of(dtype, *bits, head_dim, page_tokens=page_tokens)
    planes = replace(planes, rotation_DD=rotation_table(head_dim, dtype, "cpu"))
    q, numbers = torch.empty(16, 2 * group, head_dim, dtype=dtype), torch.empty(4, 16, dtype=torch.int32)
    part, sinks = LaneRound(1, 2, 0, 2, 3), torch.empty(2 * group) if with_sinks else None
    work = TileWork(numbers, numbers, False, False, has_merge=False, lane=LaneWork(numbers, numbers[:2], (part,)))
    scoring, out = Scoring(0.1, window, sinks, softcap), q.view(16, -1)
    call = TileCall(q, numbers, work, scoring, out, out, out, 132)
    near_plane = torch.empty(64, 2, head_dim, dtype=dtype)
    near_pages = None if near is None else NearPages(near_plane, near_plane, numbers, 16, 64, near)
    source, memory = lane_rows.LaneSource(planes, near_pages), torch.empty(2**16 * head_dim, dtype=FP16)
    lane = lane_rows.lane_of(memory, head_dim, LaneGeometry(1, 16, 2))
    lane_rows.fill_lane(call, source, lane, part, 0, 2)
    lane_warpgroups.attend_lane(call, source, lane, part, 0, 2)


def experts_of(
    scheme: str | None, sizes: tuple[int, int], gated: bool, form: GateForm, num_rows: int, has_bias: bool = True
) -> None:
    """GEMVs of few tokens, or the grouped GEMM of many, over four experts."""
    size_n, size_k = sizes
    shape = (4, size_n * (2 if gated else 1), size_k)
    weight: Any = torch.empty(shape, dtype=BF16)
    rows = None
    if scheme is not None:
        chosen = WEIGHT_SCHEMES[scheme].with_parts((shape[1] if form.is_interleaved else size_n,))
        planes = chosen.planes(shape)
        codes, scales = (torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in planes)
        weight = QuantizedWeight(chosen, shape, codes, scales)
        if chosen.quantizes_activations:
            num_blocks = -(-size_k // chosen.block_columns) if chosen.block_columns else 1
            rows = QuantizedRows(
                torch.empty(num_rows, size_k, dtype=torch.float8_e4m3fn), torch.empty(num_rows, num_blocks)
            )
    ids = torch.zeros(num_rows, 2, dtype=torch.int32)
    tensors = [torch.empty(spec.shape, dtype=torch.int32) for spec in order_specs(num_rows, 2, 4)]
    order = ordered(ids, 4, tensors)
    launch = expert_gemv.expert_gemv if order.block_rows == 1 else grouped_gemm.grouped_gemm
    out, bias = torch.empty(2 * num_rows, size_n, dtype=BF16), torch.empty(shape[:2], dtype=BF16)
    x = torch.empty(num_rows, size_k, dtype=BF16)
    launch(routing.ExpertProduct(x, weight, order, out, gated, rows, bias if has_bias else None, form))


def packed_experts_of(form: GateForm, sizes: tuple[int, int], gated: bool, num_rows: int) -> None:
    """Tiles of packed weights, which a tensor in host memory does not take."""
    with patch.object(grouped_gemm, "takes_packed_tiles", lambda x, weight: True):
        experts_of("mxfp4", sizes, gated=gated, form=form, num_rows=num_rows, has_bias=form.is_interleaved)


def ordered(*arguments: Any) -> routing.ExpertOrder:
    """Call `order_experts` without compiling the kernels that sort."""
    launch, routing.fill_order.triton = routing.fill_order.triton, routing.fill_order.reference
    try:
        return routing.order_experts(*arguments)
    finally:
        routing.fill_order.triton = launch


def rank_of(num_rows: int) -> None:
    """What a rank looks up, and how it sorts and sums pairs of which it has some: in plain, e4m3 and int8 rows."""
    ids = torch.zeros(num_rows, 8, dtype=torch.int32)
    own = routing.local_ids_triton(ids, 32, 32, torch.empty_like(ids))
    tensors = [torch.empty(spec.shape, dtype=torch.int32) for spec in order_specs(num_rows, 8, 128, 32)]
    routing.fill_order_triton(ordered(own.zero_(), 128, tensors, 32), tensors[2])
    routed, out = torch.empty(8 * num_rows, 256, dtype=BF16), torch.empty(num_rows, 256, dtype=BF16)
    expert_sum.sum_experts_triton(expert_sum.ExpertOutputs(routed, torch.empty(num_rows, 8)), out, own)
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    embedding.lookup_share_triton(tokens, torch.empty(64, 256, dtype=BF16), 64, out)
    for name in ("fp8", "int8"):
        scheme = WEIGHT_SCHEMES[name]
        codes = torch.empty(64, 256, dtype=getattr(torch, scheme.code_dtype))
        embedding.lookup_share_triton(tokens, QuantizedWeight(scheme, (64, 256), codes, torch.empty(64)), 64, out)


def row_scaled_of(num_rows: int, size_n: int, size_k: int) -> None:
    """A product of e4m3 codes split along K, one with a gate, and the rows of both as codes."""
    scheme = WEIGHT_SCHEMES["fp8"]
    codes, bias = torch.empty(2 * size_n, size_k, dtype=torch.float8_e4m3fn), torch.empty(2 * size_n, dtype=BF16)
    gate_up = QuantizedWeight(scheme, (2 * size_n, size_k), codes, torch.empty(2 * size_n))
    weight = QuantizedWeight(scheme, (size_n, size_k), codes[:size_n], torch.empty(size_n))
    scratch = TileScratch(
        torch.empty(128 * 16384), torch.empty(1024, dtype=torch.int32), torch.empty(2**16, dtype=torch.int32)
    )
    codes = torch.empty(num_rows, size_k, dtype=torch.float8_e4m3fn)
    rows = QuantizedRows(codes, torch.empty(num_rows, 1), scratch)
    x, out = torch.empty(num_rows, size_k, dtype=BF16), torch.empty(num_rows, size_n, dtype=BF16)
    quantize_activations.add_rms_norm_coded(x, x, torch.empty(size_k, dtype=BF16), 1e-6, x, rows)
    row_scaled_tiles.row_scaled_linear(rows, weight, None, out)
    amax = row_scaled_tiles.row_scaled_gate(rows, gate_up, bias, "silu", out)
    coded = QuantizedRows(torch.empty(num_rows, size_n, dtype=torch.float8_e4m3fn), torch.empty(num_rows, 1))
    quantize_activations.quantize_rows_by_amax(out, amax, coded)
    quantize_activations.quantize_rows(x, rows)


def coded_prompts_of(num_columns: int, num_rows: int = 256) -> None:
    """What a prompt in fp8 runs between its products: codes of norms alone, of gated rows, and of rows."""
    codes = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    rows = QuantizedRows(codes, torch.empty(num_rows, 1))
    x, norm = torch.empty(num_rows, num_columns, dtype=BF16), torch.empty(num_columns, dtype=BF16)
    quantize_activations.rms_norm_codes(x, x, norm, 1e-6, x, rows)
    gate_up = torch.empty(num_rows, 2 * num_columns, dtype=BF16)
    assert quantize_activations.takes_gated_row(gate_up, rows)
    quantize_activations.gate_mul_coded(gate_up, "silu", x, None, rows)
    quantize_activations.quantize_rows(x, rows)


def block_scaled_of(size_n: int, size_k: int, dtype: torch.dtype = BF16) -> None:
    """One row by e4m3 in blocks."""
    scheme = WEIGHT_SCHEMES["fp8_block"]
    codes, scales = (
        torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes((size_n, size_k))
    )
    weight = QuantizedWeight(scheme, (size_n, size_k), codes, scales)
    x, bias, out = (torch.empty(shape, dtype=dtype) for shape in ((1, size_k), (size_n,), (1, size_n)))
    block_scaled_gemv.block_scaled_gemv(x, weight, None if size_k % 128 == 0 else bias, out)


def packed_of(size_n: int, size_k: int, dtype: torch.dtype = BF16) -> None:
    """One row by codes of four bits."""
    scheme = WEIGHT_SCHEMES["mxfp4"]
    codes, scales = (torch.empty(plane.shape, dtype=torch.uint8) for plane in scheme.planes((size_n, size_k)))
    weight = QuantizedWeight(scheme, (size_n, size_k), codes, scales)
    x, bias, out = (torch.empty(shape, dtype=dtype) for shape in ((1, size_k), (size_n,), (1, size_n)))
    packed_gemv.packed_gemv(packed_gemv.PackedProduct(x, weight, out, bias))


CODED_SCHEMES: dict[str, PackedScheme] = {
    **{title: BLOCK_SCHEMES[title] for title in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K")},
    **{title: BLOCK_SCHEMES[title] for title in ("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")},
    "AWQ": integer_scheme("AWQ", 4, 128, "float16", "uint8"),
    "GPTQ": integer_scheme("GPTQ", 4, 32, "float16"),
    "int4 by row": integer_scheme("int4", 4, 0, "bfloat16"),
    "nvfp4": nvfp4_scheme("nvfp4", divides=True),
}


def packed_part_of(name: str, shape: tuple[int, ...]) -> PackedPart:
    scheme = CODED_SCHEMES[name]
    planes = tuple(torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.shaped(shape))
    return PackedPart(scheme, 0, shape, planes)


def codes_of(name: str, num_rows: int, sizes: tuple[int, int] = (5120, 5120), dtype: torch.dtype = BF16) -> None:
    """Tiles of a packed weight, with a bias or a gate."""
    part, x = packed_part_of(name, sizes), torch.empty(num_rows, sizes[1], dtype=dtype)
    room = torch.empty(packed_kernels.ARRIVED_BYTES + packed_kernels.PARTIAL_BYTES, dtype=torch.uint8)
    out, bias = torch.empty(num_rows, sizes[0], dtype=dtype), torch.empty(sizes[0], dtype=dtype)
    packed_mma.packed_mma(x, part, bias, out, room)
    packed_mma.packed_mma(x, part, None, out[:, : sizes[0] // 2], room, 0, True)


def coded_experts_of(name: str, num_rows: int, gated: bool) -> None:
    """Tiles of packed experts."""
    part = packed_part_of(name, (4, 1536, 2048))
    ids = torch.zeros(num_rows, 2, dtype=torch.int32)
    order = ordered(ids, 4, [torch.empty(spec.shape, dtype=torch.int32) for spec in order_specs(num_rows, 2, 4)])
    out, weight = torch.empty(2 * num_rows, 768 if gated else 1536, dtype=BF16), PackedWeight(part.shape, (part,))
    x = torch.empty(num_rows, 2048, dtype=BF16)
    expert_linear.packed_expert_linear(routing.ExpertProduct(x, weight, order, out, gated))


def fused_codes_of(name: str, num_rows: int) -> None:
    """Tiles with a deferred RMSNorm, with and without a gate, and with a residual."""
    part, x = packed_part_of(name, (5120, 5120)), torch.empty(num_rows, 5120, dtype=BF16)
    weight = PackedWeight(part.shape, (part,))
    wide, y = torch.empty(num_rows, 5120, dtype=BF16), torch.empty(num_rows, 2560, dtype=BF16)
    scratch = deferred_rms_norm.SmallBatchScratch(*(torch.empty(1024) for _ in range(3)))
    for num_squares in (1, 40):
        rows = deferred_rms_norm.NormedRows(x, num_squares, 1e-6)
        small_batch.normed_linear(rows, weight, None, False, wide, scratch)
        small_batch.normed_linear(rows, weight, None, True, y, scratch)
    stream = deferred_rms_norm.ResidualStream(
        wide, torch.empty(5120, dtype=BF16), 1e-6, torch.empty_like(wide), scratch
    )
    small_batch.linear_add(x, weight, None, stream)


def coded_down_of(name: str, has_bias: bool) -> None:
    """Tiles of the experts of a single token, added to the residual."""
    part, active = packed_part_of(name, (16, 2048, 768)), torch.empty(8, 768, dtype=BF16)
    weight, ids = PackedWeight(part.shape, (part,)), torch.zeros(1, 8, dtype=torch.int32)
    scratch = deferred_rms_norm.SmallBatchScratch(*(torch.empty(64) for _ in range(3)))
    x, scaled, norm = torch.empty(1, 2048, dtype=BF16), torch.empty(1, 2048, dtype=BF16), torch.empty(2048, dtype=BF16)
    bias = torch.empty(16, 2048, dtype=BF16) if has_bias else None
    stream = deferred_rms_norm.ResidualStream(x, norm, 1e-6, scaled, scratch)
    expert_row.down_row_add.triton(active, weight, ids, torch.empty(1, 8), bias, stream)


def dequantized_of(name: str, dtype: torch.dtype = BF16) -> None:
    """A piece of rows, and rows of a share by id."""
    part, out = packed_part_of(name, (64, 512)), torch.empty(16, 512, dtype=dtype)
    packed_dequantize.dequantize_piece(part, 0, (0, 16), out)
    packed_dequantize.dequantize_ids(torch.zeros(16, dtype=torch.int64), part, out, 32)


def block_scaled_tiles_of(num_rows: int, size_n: int, size_k: int) -> None:
    """Some rows by e4m3 in blocks, and what writes their codes: a norm, a gate, the input of a block between streams."""
    scheme = WEIGHT_SCHEMES["fp8_block"]
    codes, scales = (
        torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes((size_n, size_k))
    )
    weight, num_blocks = QuantizedWeight(scheme, (size_n, size_k), codes, scales), -(-size_k // 128)
    counts = torch.empty(1024, dtype=torch.int32)
    scratch = TileScratch(torch.empty(4 * num_rows * size_n), counts, counts)
    codes = torch.empty(num_rows, size_k, dtype=torch.float8_e4m3fn)
    rows = QuantizedRows(codes, torch.empty(num_rows, num_blocks), scratch)
    x, out = torch.empty(num_rows, size_k, dtype=BF16), torch.empty(num_rows, size_n, dtype=BF16)
    norm = torch.empty(size_k, dtype=BF16)
    block_scaled_tiles.block_scaled_linear(rows, weight, None if size_k % 128 == 0 else out[0], out)
    quantize_activations.add_rms_norm_coded(x, None, norm, 1e-6, x, rows)
    quantize_activations.gate_mul_coded(torch.empty(num_rows, 2 * size_k, dtype=BF16), "silu", x, 10.0, rows)
    mix = hyper_connections.StreamMix(torch.empty(24, 4 * size_k), torch.empty(24), torch.empty(3))
    streams, parts = torch.empty(num_rows, 4, size_k, dtype=BF16), torch.empty(stream_parts_spec(num_rows, 4).shape)
    numbers, shares = hyper_connections.MixNumbers(1e-6, 1e-6, 20), torch.empty(num_rows, 24)
    quantize_activations.enter_block_coded(streams, parts, mix, numbers, shares, norm, 1e-6, x, rows)


def joint_row_of(size_n: int, size_p: int, size_k: int) -> None:
    """One row by e4m3 in blocks and by a plain weight."""
    scheme = WEIGHT_SCHEMES["fp8_block"]
    codes, scales = (
        torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes((size_n, size_k))
    )
    x, plain, out = (torch.empty(shape, dtype=BF16) for shape in ((1, size_k), (size_p, size_k), (1, size_n)))
    weight = QuantizedWeight(scheme, (size_n, size_k), codes, scales)
    joint_row.joint_row(x, weight, None, out, plain, torch.empty(1, size_p))


def single_row_of(size_n: int, size_k: int, num_groups: int) -> None:
    """One row by a plain weight, in groups or with a float32 result."""
    x, weight = torch.empty(1, num_groups * size_k, dtype=BF16), torch.empty(size_n, size_k, dtype=BF16)
    out = torch.empty(1, size_n, dtype=BF16 if num_groups > 1 else torch.float32)
    small_batch.single_row_linear(x, weight, out, num_groups)


def expert_layer_of(
    scheme: str | None, num_rows: int, hidden: int, inner: int, top_k: int = 8, has_shared: bool = False
) -> None:
    """What the fused decode path launches for a layer of 128 experts: routing, and one row's products or the sum of many's.

    With `has_shared` one more expert, which is as wide and has a gate; norms are of 1 + w then.
    """
    num_experts, coded = 128, scheme == "fp8"
    weights: list[Any] = []
    for shape in ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner)):
        weight: Any = torch.empty((1, *shape[1:]), dtype=BF16).expand(shape)
        if scheme is not None:
            planes = WEIGHT_SCHEMES[scheme].planes(shape)
            codes, scales = (torch.empty(1, dtype=getattr(torch, plane.dtype)) for plane in planes)
            weight = QuantizedWeight(WEIGHT_SCHEMES[scheme], shape, codes, scales)
        weights.append(weight)
    squares, counts = torch.empty(1024), torch.empty(64, dtype=torch.int32)
    amax = deferred_rms_norm.AmaxScratch(squares, squares, counts) if scheme is not None else None
    scratch = deferred_rms_norm.SmallBatchScratch(squares, squares, counts, amax)
    x, scaled, finished = (torch.empty(num_rows, hidden, dtype=BF16) for _ in range(3))
    ids, shares = torch.zeros(num_rows, top_k, dtype=torch.int32), torch.empty(num_rows, top_k)
    rows = deferred_rms_norm.NormedRows(scaled, 256, 1e-6)
    codes = QuantizedRows(torch.empty(num_rows, hidden, dtype=torch.float8_e4m3fn), torch.empty(num_rows, 1))
    given = codes if coded else finished
    router, logits = torch.empty(num_experts, hidden, dtype=BF16), torch.empty(num_rows, num_experts)
    logit = torch.empty(num_rows, 1)
    gate = normed_routing.SharedGate(torch.empty(1, hidden, dtype=BF16), logit) if has_shared else None
    normed_routing.route_normed(rows, router, None, True, logits, ids, shares, given, scratch, gate)
    norm_weight, offset = torch.empty(hidden, dtype=BF16), 1.0 if has_shared else 0.0
    stream = deferred_rms_norm.ResidualStream(x, norm_weight, 1e-6, scaled, scratch, offset)
    if num_rows == 1:
        active = torch.empty(top_k, inner, dtype=BF16)
        operands = expert_gemv.operands_of(finished, weights[0], codes if coded else None)
        order = routing.ExpertOrder(ids, num_experts, 1, ids, ids)
        product, one, own = routing.ExpertProduct(finished, weights[0], order, active, True), None, None
        if has_shared:
            own_active = torch.empty(1, inner, dtype=BF16)
            shared: list[Any] = [
                weight[0] if scheme is None else replace(weight, shape=weight.shape[1:]) for weight in weights
            ]
            one = deep_gemv.SharedProduct(
                *expert_gemv.operands_of(finished, shared[0], codes if coded else None).tensors[2:], own_active
            )
            own = expert_row.SharedRow(own_active, shared[1], logit)
        deep_gemv.deep_gemv(product, operands, one)
        expert_row.down_row_add(active, weights[1], ids, shares, None, stream, own)
    else:
        routed = torch.empty(num_rows * top_k, hidden, dtype=BF16)
        expert_sum.add_experts(expert_sum.ExpertOutputs(routed, shares), stream)


def routing_of(num_experts: int, top_k: int, way: routing.Routing, has_score_bias: bool = False) -> None:
    logits, bias = torch.empty(7, num_experts), torch.empty(num_experts)
    ids, shares = torch.empty(7, top_k, dtype=torch.int32), torch.empty(7, top_k)
    routing.route_tokens(logits, way, ids, shares, None, bias if has_score_bias else None)


def table_of(num_experts: int, top_k: int, way: routing.Routing) -> None:
    logits, table, tokens = (
        torch.empty(7, num_experts),
        torch.empty(99, top_k, dtype=torch.int32),
        torch.empty(7).long(),
    )
    ids, shares = torch.empty(7, top_k, dtype=torch.int32), torch.empty(7, top_k)
    hash_routing.route_by_table(logits, table, tokens, way, ids, shares)


def projections_of(num_rows: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
    """Both sides of kv_b, of a latent of 512 and 64 rotated elements."""
    kv_b = torch.empty(num_heads, nope_dim + value_dim, 512, dtype=BF16)
    q, latent, queries, values = (
        torch.empty(num_rows, num_heads, size, dtype=BF16) for size in (nope_dim + 64, 512, 576, value_dim)
    )
    latent_projection.absorb_queries(q, kv_b, queries)
    latent_projection.project_values(latent, kv_b, values)


def latents_of(
    num_heads: int, latent_dim: int = 512, rope_dim: int = 64, page_tokens: int = 64, warpgroups: bool = False
) -> None:
    """Absorbed attention in both tiles and all forms of the merge; those of 64 rows in Gluon, or not."""
    latent_attention.takes_warpgroups = lambda planes: warpgroups
    numbers = torch.empty(256, 16, dtype=torch.int32)
    work = TileWork(numbers, numbers, has_small=True, has_large=True, has_merge=True)
    plane = torch.empty(2 * page_tokens, latent_dim + rope_dim, dtype=BF16)
    planes = LatentPlanes("plain", latent_dim, rope_dim, page_tokens, plane)
    partial = torch.empty(8, num_heads * latent_dim)
    for num_rows in (1, 16, 100):
        q, out = (torch.empty(num_rows, num_heads, size, dtype=BF16) for size in (latent_dim + rope_dim, latent_dim))
        latent_attention.latent_attention(LatentCall(q, planes, numbers, 0.1, partial, partial, out, 132), work)


def latent_planes_of(name: str, latent_dim: int, rope_dim: int) -> LatentPlanes:
    kv_format = ALL_KV_FORMATS[name]
    pages = {
        plane.name: torch.empty(64, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        for plane in kv_format.planes(1, latent_dim + rope_dim, rope_dim)
    }
    return LatentPlanes.of(pages, kv_format, latent_dim, rope_dim, 64)


def latents_written_of(name: str, latent_dim: int, rope_dim: int) -> None:
    """Rows of a wider product, and their queries."""
    q = torch.empty(2, 16, 64 + rope_dim, dtype=BF16)
    write_latent.write_latent(
        torch.empty(2, 99 + latent_dim + rope_dim, dtype=BF16)[:, 99:],
        q,
        torch.zeros(2, dtype=torch.int64),
        write_latent.LatentNorm(torch.empty(latent_dim, dtype=BF16), 1e-6),
        rotary_of(2, rope_dim, BF16),
        latent_planes_of(name, latent_dim, rope_dim),
    )


def window_of(name: str, num_heads: int) -> None:
    """Tokens of DeepSeek-V4 and their queries written; outputs rotated back."""
    rotary, numbers = rotary_of(2, 64), torch.zeros(2, dtype=torch.int64)
    kv, q = torch.empty(2, 99 + 512, dtype=BF16)[:, 99:], torch.empty(2, num_heads, 512, dtype=BF16)
    kv_norm = write_latent.LatentNorm(torch.empty(512), 1e-6)
    planes = latent_planes_of(name, 448, 64)
    write_window.write_window(kv, q, numbers, numbers, kv_norm, 1e-6, rotary, planes)
    write_window.rotate_back(q, rotary)


def entries_of(name: str, ratio: int, dim: int = 512) -> None:
    """Entries made and written, or those of an index with its queries."""
    is_overlapped, numbers, rotary = ratio == 4, torch.zeros(2, dtype=torch.int64), rotary_of(2, 64)
    width = pooled_width(dim, is_overlapped)
    pooled = torch.empty(2, 4 * width)[:, width : 3 * width]
    compressor = compress.Compressor(ratio, is_overlapped, torch.empty(ratio, width), torch.empty(dim), 1e-6)
    state = torch.empty(3, *state_shape(dim, is_overlapped))
    step = compress.PooledRows(pooled, numbers, numbers, numbers, state)
    if dim == 512:
        compress.compress_entries(step, compressor, rotary, latent_planes_of(name, 448, 64))
        return
    planes = {
        plane.name: torch.empty(64, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        for plane in index_planes(name, dim)
    }
    q = torch.empty(2, 64, dim, dtype=BF16)
    compress.compress_index(step, q, compressor, rotary, rotary, IndexPlanes.of(planes, 64))


def index_of(name: str, num_heads: int, dim: int, page_tokens: int = 64, operands: str | None = None) -> None:
    """The index written, its queries quantized where keys are, and scored; with operands that another GPU would take, or its own."""
    planes = IndexPlanes.of(
        {
            plane.name: torch.empty(2 * page_tokens, *plane.token_shape, dtype=getattr(torch, plane.dtype))
            for plane in index_planes(name, dim)
        },
        page_tokens,
    )
    k, q = torch.empty(4, 99 + dim, dtype=BF16)[:, 99:], torch.empty(4, num_heads, dim, dtype=BF16)
    slots, rotary, weights = torch.zeros(4, dtype=torch.int64), rotary_of(4, dim // 2), torch.empty(4, num_heads)
    norm_of_keys = write_index.IndexNorm(torch.empty(dim), torch.empty(dim), 1e-6)
    write_index.write_index(k, q, slots, norm_of_keys, rotary, planes, num_heads == 32)
    if planes.is_quantized:
        codes = torch.empty(4, num_heads, dim, dtype=torch.float8_e4m3fn)
        write_index.quantize_index_queries(q, weights, codes, weights)
        q = codes
    pages, rows = torch.zeros(4, 16, dtype=torch.int32), SparseRows(slots.int(), slots.int())
    if operands is None:
        index_scores.index_scores(q, weights, planes, pages, rows, torch.empty(4, 999))
    else:
        with patch.object(index_scores, "choose_operands", lambda *given: operands):
            index_scores.index_scores(q, weights, planes, pages, rows, torch.empty(4, 999))


def quantized_latents_of(
    name: str, num_heads: int, latent_dim: int, rope_dim: int, large: bool, warpgroups: bool = False
) -> None:
    latent_attention.takes_gathering = lambda call: warpgroups
    work = TileWork(
        torch.empty(9, 8, dtype=torch.int32), torch.empty(9, 2, dtype=torch.int32), not large, large, has_merge=True
    )
    call = LatentCall(
        torch.empty(4, num_heads, latent_dim + rope_dim, dtype=BF16),
        latent_planes_of(name, latent_dim, rope_dim),
        torch.empty(4, 16, dtype=torch.int32),
        0.1,
        torch.empty(4, num_heads * latent_dim),
        torch.empty(4, num_heads),
        torch.empty(4, num_heads, latent_dim, dtype=BF16),
        num_sms=1,
    )
    latent_attention.latent_attention(call, work)


def top_k_of(context: int, k: int) -> None:
    """Two rows of scores."""
    numbers, out = torch.zeros(2, dtype=torch.int32), torch.empty(2, k, dtype=torch.int32)
    scratch = {spec.name: torch.empty(spec.shape, dtype=torch.int32) for spec in top_k_specs(2, context, k)}
    top_k_tokens.top_k_tokens(torch.empty(2, context), SparseRows(numbers, numbers), out, scratch)


def sparse_of(
    name: str, num_heads: int, latent_dim: int = 512, rope_dim: int = 64, num_rows: int = 3, warpgroups: bool = False
) -> None:
    """Attention to lists of 2,048 places, split, and their merge; latents have to come while others are computed with."""
    latent_attention.takes_gathering = lambda call: warpgroups
    latent_attention.takes_low = lambda call: warpgroups and num_heads <= LOW_HEIGHT
    planes = latent_planes_of(name, latent_dim, rope_dim)
    numbers = torch.empty(num_rows, dtype=torch.int32)
    kernel: Any = latent_attention._lists_kernel
    kernel.num_copies = 0
    call = LatentCall(
        torch.empty(num_rows, num_heads, latent_dim + rope_dim, dtype=BF16),
        planes,
        torch.empty(4, 2048, dtype=torch.int32),
        0.1,
        torch.empty(32 * num_rows, num_heads * latent_dim),
        torch.empty(32 * num_rows, num_heads),
        torch.empty(num_rows, num_heads, latent_dim, dtype=BF16),
        num_sms=132,
    )
    tokens = torch.empty(num_rows, 2048, dtype=torch.int32)
    latent_attention.sparse_attention(call, SparseRows(numbers, numbers), tokens)
    assert warpgroups or kernel.num_copies, "Triton's pipeliner has left the loop over a list alone"


def compressed_of(name: str, num_heads: int, ratio: int, top_k: int, warpgroups: bool, num_rows: int = 3) -> None:
    """Window and entries as DeepSeek-V4 has them, split, and their merge."""
    compressed_attention.takes_warpgroups = lambda call: warpgroups
    planes, numbers = latent_planes_of(name, 448, 64), torch.empty(num_rows, dtype=torch.int32)
    pages = torch.empty(4, 2048, dtype=torch.int32)
    listed = torch.empty(num_rows, top_k, dtype=torch.int32) if top_k else None
    call = compressed_scopes.CompressedCall(
        torch.empty(num_rows, num_heads, 512, dtype=BF16),
        compressed_scopes.Scopes(128, planes, pages, ratio, planes, pages, listed),
        compressed_scopes.CompressedRows(numbers, numbers),
        torch.empty(num_heads),
        rotary_of(num_rows, 64),
        0.1,
        torch.empty(64 * num_rows, num_heads * 512, dtype=FP16),
        torch.empty(64 * num_rows, num_heads),
        torch.empty(num_rows, num_heads, 512, dtype=BF16),
        num_sms=132,
    )
    compressed_attention.compressed_attention(call)


def up_projected_of(nope_dim: int, value_dim: int, name: str) -> None:
    """A few rows behind a context that is split, of two heads."""
    shape, kv_format = up_projection.UpProjection(2, 512, 64, nope_dim, value_dim), ALL_KV_FORMATS[name]
    pages = {
        plane.name: torch.zeros(64, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        for plane in kv_format.planes(1, 576, 64)
    }
    planes = LatentPlanes.of(pages, kv_format, 512, 64, 64)
    specs = up_projection.expanded_specs(shape, "bfloat16", 5, 1029)
    scratch = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    q, kv_b = torch.zeros(5, 2, nope_dim + 64, dtype=BF16), torch.zeros(2, nope_dim + value_dim, 512, dtype=BF16)
    out, page_row = torch.empty(5, 2, value_dim, dtype=BF16), torch.zeros(17, dtype=torch.int32)
    latent_prefill.attend_up_projected(q, kv_b, planes, page_row, 1024, 0.1, scratch, out)


GPT_OSS = GateForm(is_interleaved=True, limit=7.0)
EXPERT_CASES: dict[str, Callable[[], None]] = {
    f"experts in {scheme or 'bfloat16'}, {num_rows} rows": partial(
        experts_of, scheme, (2880, 2880), gated=True, form=GPT_OSS, num_rows=num_rows
    )
    for scheme in (None, "mxfp4")
    for num_rows in (1, 8, 700)
}
"""In the widths of gpt-oss."""
V4_ROUTING, V4_FORM = routing.Routing(True, "sqrtsoftplus", share_scale=1.5), GateForm(limit=10.0, is_silu=True)


def states_of(
    dtype: str,
    heads: tuple[int, int],
    dims: tuple[int, int] = (128, 128),
    by_channel: bool = False,
    decode: bool = False,
) -> None:
    """A step of a gated delta net with `heads` keys and values: single rows alone, or chunks too."""
    num_rows, (key_heads, value_heads), (key_dim, value_dim) = 70, heads, dims
    torch_dtype, num_channels = getattr(torch, dtype), 2 * key_heads * key_dim + value_heads * value_dim
    x_TC, gate_shape = torch.empty(num_rows, num_channels, dtype=torch_dtype), (value_heads, key_dim)[: 1 + by_channel]
    a_TH, b_TH = (torch.empty(num_rows, *shape) for shape in (gate_shape, (value_heads,)))
    gates = a_TH, b_TH, torch.empty(value_heads), torch.empty(gate_shape)
    inputs = DeltaInputs.of(x_TC, key_heads, key_dim, value_heads, value_dim, *gates)
    numbers = torch.empty(num_rows, dtype=torch.int64)
    lists = [torch.empty(spec.shape, dtype=torch.int32) for spec in state_list_specs(num_rows, 4)]
    rows = StateRows(numbers, numbers) if decode else StateRows(numbers, numbers, *lists)
    conv_PCW, weight_CW = (
        torch.empty(*shape, dtype=torch_dtype) for shape in ((2, num_channels, 3), (num_channels, 4))
    )
    causal_conv.causal_conv_triton(x_TC, rows, weight_CW, conv_PCW, torch.empty_like(x_TC))
    state_PHKV, out_THV = torch.empty(2, value_heads, key_dim, value_dim), torch.empty_like(inputs.v_THV).contiguous()
    delta_step.delta_step_triton(inputs, rows, state_PHKV, out_THV)
    specs = delta_chunk_specs(num_rows, 4, value_heads, key_dim, dtype, "channel" if by_channel else "head")
    scratch = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    delta_chunks.delta_chunks_triton(inputs, rows, state_PHKV, out_THV, scratch)
    is_wide = scan_warpgroups.has_wide_rows(*inputs[:3]) and not by_channel
    if is_wide and rows.chunks_M4 is not None:
        squares = (scratch[name] for name in ("chunk systems", "chunk scores", "chunk coefficients"))
        systems, scores, coefficients = squares
        inverses = systems.view(torch_dtype)
        scan_warpgroups.scan_in_warpgroups(inputs, rows, inverses, scores, coefficients, state_PHKV, out_THV)
    gated_norm.gated_norm_triton(out_THV, out_THV, x_TC[0, :value_dim], 1e-6, out_THV)


def drafts_of(
    dtype: str,
    heads: tuple[int, int],
    dims: tuple[int, int] = (128, 128),
    by_channel: bool = False,
    num_drafts: int = 4,
    decode: bool = False,
) -> None:
    """A step of a gated delta net whose sequences may have draft tokens."""
    num_rows, num_slots, (key_heads, value_heads), (key_dim, value_dim) = 70, 4, heads, dims
    torch_dtype, num_channels = getattr(torch, dtype), 2 * key_heads * key_dim + value_heads * value_dim
    gate_shape = (value_heads, key_dim)[: 1 + by_channel]
    x_TC = torch.empty(num_rows, num_channels, dtype=torch_dtype)
    a_TH, b_TH = (torch.empty(num_rows, *shape) for shape in (gate_shape, (value_heads,)))
    gates = a_TH, b_TH, torch.empty(value_heads), torch.empty(gate_shape)
    inputs = DeltaInputs.of(x_TC, key_heads, key_dim, value_heads, value_dim, *gates)
    numbers = torch.empty(num_rows, dtype=torch.int64)
    sequences_N4 = None if decode else torch.empty(num_slots, 4, dtype=torch.int32)
    rows = StateRows(numbers, numbers, sequences_N4, drafts_T=numbers)
    specs = draft_specs(1, num_slots, num_drafts, num_channels, gate_shape, dtype)
    held = [torch.empty(spec.shape[1:], dtype=getattr(torch, spec.dtype)) for spec in specs]
    kept = KeptDrafts(*held, accepted_SDC=torch.empty_like(held[0]))
    conv_PCW, weight_CW = (
        torch.empty(*shape, dtype=torch_dtype) for shape in ((2, num_channels, 3), (num_channels, 4))
    )
    causal_conv.causal_conv_triton(x_TC, rows, weight_CW, conv_PCW, torch.empty_like(x_TC), kept=kept)
    state_PHKV, out_THV = torch.empty(2, value_heads, key_dim, value_dim), torch.empty_like(inputs.v_THV).contiguous()
    delta_drafts.delta_drafts_triton(inputs, rows, state_PHKV, out_THV, kept)


STATE_CASES: dict[str, Callable[[], None]] = {
    **{
        f"products of a state in {scheme or 'bfloat16'}, {num_rows} rows": partial(
            state_products_of, scheme, num_rows, 5120, 16384, 96
        )
        for scheme in (None, "fp8", "int8")
        for num_rows in (1, 16)
    },
    "states of 48 heads, decode": lambda: states_of("bfloat16", (16, 48), decode=True),
    "states of 48 heads": lambda: states_of("bfloat16", (16, 48)),
    "states of 32 heads": lambda: states_of("bfloat16", (16, 32)),
    "states of 6 heads of 24 by 48": lambda: states_of("float16", (3, 6), (24, 48)),
    "states of 2 heads in float32": lambda: states_of("float32", (1, 2), (96, 128)),
    "states by channel": lambda: states_of("bfloat16", (32, 32), by_channel=True),
    "states by channel, decode": lambda: states_of("bfloat16", (32, 32), by_channel=True, decode=True),
    "states by channel of 24 by 40": lambda: states_of("float16", (2, 4), (24, 40), by_channel=True),
    "states of 48 heads, draft tokens": lambda: drafts_of("bfloat16", (16, 48)),
    "states of 6 heads of 24 by 48, one draft token": lambda: drafts_of("float16", (3, 6), (24, 48), num_drafts=1),
    "states by channel, draft tokens, decode": lambda: drafts_of("bfloat16", (8, 8), by_channel=True, decode=True),
}

V4_CASES: dict[str, Callable[[], None]] = {
    "routing of V4": lambda: routing_of(256, 6, V4_ROUTING, True),
    "routing of V4 by a table": lambda: table_of(256, 6, V4_ROUTING),
    **{
        f"experts of V4 in {scheme}, {num_rows} rows": partial(
            experts_of, scheme, (2048, 4096), gated=True, form=V4_FORM, num_rows=num_rows, has_bias=False
        )
        for scheme in ("fp8_block", "mxfp4")
        for num_rows in (1, 8, 700)
    },
    "streams of V4-Flash, 1 row": lambda: streams_of(1, 4096),
    "streams of V4-Flash, 16 rows": lambda: streams_of(16, 4096),
    "streams of V4-Pro, 900 rows": lambda: streams_of(900, 7168),
}
CODE_CASES: dict[str, Callable[[], None]] = {
    **{
        f"tiles of {name}, {num_rows} rows": partial(codes_of, name, num_rows)
        for name, scheme in CODED_SCHEMES.items()
        if packed_kernels.has_tiles(scheme, 5120)
        for num_rows in (1, 16, 32, 64, 100)
    },
    "tiles of Q4_0 of odd sizes": lambda: codes_of("Q4_0", 3, (202, 2880), FP16),
    "tiles of Q5_0 of odd sizes": lambda: codes_of("Q5_0", 3, (202, 608)),
    **{
        f"tiles of experts in {name}, {num_rows} rows": partial(coded_experts_of, name, num_rows, num_rows != 8)
        for name in ("Q4_K", "Q6_K", "AWQ")
        for num_rows in (1, 8, 30, 130, 700)
    },
    **{
        f"fused tiles of {name}, {num_rows} rows": partial(fused_codes_of, name, num_rows)
        for name in ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "AWQ", "GPTQ", "nvfp4")
        for num_rows in (1, 16)
    },
    **{f"down of one token in {name}": partial(coded_down_of, name, name == "AWQ") for name in ("Q4_K", "Q6_K", "AWQ")},
    **{f"pieces of {name}": partial(dequantized_of, name) for name in CODED_SCHEMES},
}
PACKED_CASES: dict[str, Callable[[], None]] = {
    f"packed experts of {size_n} by {size_k}, {num_rows} rows": partial(
        packed_experts_of, form, (size_n, size_k), size_n != 96, num_rows
    )
    for form, size_n, size_k in ((GPT_OSS, 2880, 2880), (V4_FORM, 2048, 4096), (V4_FORM, 96, 160))
    for num_rows in (8, 30, 130, 700)
}
"""Unsorted, and in blocks of 32, 64 and 128 rows."""
LAYER_CASES: dict[str, Callable[[], None]] = {
    f"expert layer in {scheme or 'bfloat16'}, {num_rows} rows of {hidden}": partial(
        expert_layer_of, scheme, num_rows, hidden, inner
    )
    for scheme, num_rows, hidden, inner in (
        ("fp8", 1, 2048, 768),
        ("fp8", 8, 2048, 768),
        ("fp8", 1, 2000, 1408),
        (None, 1, 2048, 768),
        ("int8", 1, 2048, 1408),
    )
}
"""The first in the widths of Qwen3-30B-A3B."""
LAYER_CASES |= {
    f"expert layer with a shared one in {scheme or 'bfloat16'}, {num_rows} rows": partial(
        expert_layer_of, scheme, num_rows, 2048, 512, has_shared=True
    )
    for scheme, num_rows in ((None, 1), (None, 8), ("fp8", 1), ("int8", 1))
}
"""In the widths of Qwen3.5-35B-A3B."""


def exchange_of(size: int) -> None:
    """Every kernel among so many ranks."""
    ranks = sum_rows.Ranks(0, size, torch.zeros(4096, dtype=torch.int32), torch.zeros(16, dtype=torch.int64))
    rooms = [torch.zeros(16, 5120, dtype=BF16)] * size
    for two_passes in (False, True):
        for form in range(3):
            tiles = sum_rows.Tiles(1024, 4, form, pdl=form == 1)
            sum_rows.sum_rows_triton(rooms, torch.zeros(16, 5120, dtype=BF16), ranks, tiles, two_passes)
    x, norm_weight, floats = torch.zeros(16, 5120, dtype=BF16), torch.zeros(5120, dtype=BF16), torch.zeros(2560)
    for num_rows, amax in ((1, None), (16, None), (16, floats)):
        own = x[:num_rows]
        add_rows.add_rows_triton(rooms, add_rows.DeferredStream(own, norm_weight, own, floats, amax), ranks)
    whole = add_rows.DeferredStream(x, norm_weight, x, floats)
    add_rows.add_rows_triton(rooms, whole, ranks._replace(max_blocks=8))
    for out in (torch.zeros(16, 5120 * size, dtype=BF16), None):
        gather_rows.gather_columns_triton(rooms, out, 16, 5120 * size, ranks)
    ids = torch.zeros(64, dtype=torch.int64)
    gather_rows.gather_small_triton(ids, [ids] * size, torch.zeros(size, 64, dtype=torch.int64), ranks)
    gather_rows.share_first_triton(ids, [ids] * size, ranks)
    gather_rows.rendezvous_triton(ranks)
    end = links.offer_end(torch.zeros(4096, dtype=torch.int32), torch.zeros(4096, dtype=torch.int32), 0, 0)
    links.offer_rows(rooms[0], torch.zeros(size, 16 * 5120, dtype=BF16), end)
    links.fetch_rows(torch.zeros(1, 16 * 5120, dtype=BF16), rooms[0], end)


def placed_of(size_n: int, size_k: int) -> None:
    """Rows of a checkpoint, as they are and as codes of each kind, dense and transposed."""
    rows, finding = torch.empty(size_n, size_k, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    findings = place_kernels.Findings(finding, finding)
    for dtype in (BF16, torch.float32):
        place_kernels.place_plain_triton(rows, torch.empty(rows.shape, dtype=dtype), 0, findings, False)
    for name in ("fp8", "fp8_block", "mxfp4"):
        scheme = WEIGHT_SCHEMES[name]
        codes, scales = (
            torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes((size_n, size_k))
        )
        for x in (rows, torch.empty(size_k, size_n, dtype=BF16).t()):
            place_kernels.place_quantized_triton(x, (0, size_k), scheme, codes, scales, None, 0, findings, False)


CASES: dict[str, Callable[[], None]] = {
    "exchange of 2": lambda: exchange_of(2),
    "exchange of 4": lambda: exchange_of(4),
    "exchange of 3": lambda: exchange_of(3),
    "one row": lambda: rows_of(1, BF16, gated=False),
    "one gated row": lambda: rows_of(1, BF16, gated=True),
    "one row of odd sizes": lambda: rows_of(1, BF16, gated=True, size_n=101, size_k=576),
    "rows": lambda: rows_of(16, BF16, gated=False),
    "gated rows": lambda: rows_of(2, BF16, gated=True),
    "rows of odd sizes": lambda: rows_of(3, BF16, gated=True, size_n=101, size_k=576),
    "attention D8": lambda: attention_of(BF16, 1, 8, None),
    "attention D64": lambda: attention_of(FP16, 7, 64, None),
    "attention D128": lambda: attention_of(BF16, 8, 128, None),
    "attention D128, small batch": lambda: attention_of(BF16, 8, 128, None, num_rows=1),
    "attention D128, window": lambda: attention_of(BF16, 4, 128, 4096),
    "attention D256": lambda: attention_of(BF16, 8, 256, None),
    "attention D64, sinks": lambda: attention_of(BF16, 8, 64, 128, with_sinks=True),
    "attention D256, capped": lambda: attention_of(BF16, 2, 256, 4096, softcap=50.0),
    "attention D128, few rows, both": lambda: attention_of(BF16, 8, 128, None, 1, with_sinks=True, softcap=30.0),
    "prefill D128": lambda: attention_of(BF16, 8, 128, None, page_tokens=16),
    "prefill D128, pages of 256": lambda: attention_of(BF16, 8, 128, None, page_tokens=256),
    "prefill D64, window and sinks": lambda: attention_of(BF16, 8, 64, 128, with_sinks=True, page_tokens=16),
    "prefill D80, sinks": lambda: attention_of(BF16, 1, 80, None, with_sinks=True, page_tokens=16),
    "prefill D96": lambda: attention_of(FP16, 1, 96, None, page_tokens=32),
    "prefill D192, window": lambda: attention_of(BF16, 5, 192, 4096, page_tokens=64),
    "prefill D256": lambda: attention_of(BF16, 4, 256, None, page_tokens=16),
    "prefill D256, all options": lambda: attention_of(BF16, 2, 256, 4096, 4, True, 50.0, page_tokens=16),
    "rope rows": lambda: rope_rows_of(BF16, 64, (1.0,), (1,)),
    "rope rows of two ropes": lambda: rope_rows_of(FP16, 128, (1.0, 1.25), (1, 1)),
    "rope rows of V4": lambda: rope_rows_of(torch.float32, 24, (1.0, 1.1, 1.1, 1.1), (1, 1, 4, 128)),
    "write D128": lambda: write_of(BF16, 128),
    "write D80": lambda: write_of(FP16, 80),
    "write D256, a quarter turned, with gates": lambda: write_of(BF16, 256, 64, 2),
    "write quantized D256, a quarter turned, with gates": lambda: write_quantized_of(
        BF16, 256, formats=((8, 4), (4, 4)), with_near=True, with_scale=False, rope_dim=64, query_step=2
    ),
    "output gates": lambda: gate_outputs_of(BF16),
    "write quantized D64": lambda: write_quantized_of(FP16, 64),
    "write quantized D80": lambda: write_quantized_of(BF16, 80, with_norm=False),
    "write quantized D128": lambda: write_quantized_of(BF16, 128),
    "write quantized D128, one format": lambda: write_quantized_of(BF16, 128, formats=((4, 4),)),
    "write quantized D128, near rows": lambda: write_quantized_of(BF16, 128, with_near=True),
    "write quantized D80, near rows with a bias": lambda: write_quantized_of(FP16, 80, False, with_near=True),
    "write quantized D128, scaled keys": lambda: write_quantized_of(
        BF16, 128, formats=((4, 4), (3, 3)), with_scale=True
    ),
    "write quantized D80, near rows and scaled keys": lambda: write_quantized_of(
        FP16, 80, False, ((4, 4),), with_near=True, with_scale=True
    ),
    "write quantized D256": lambda: write_quantized_of(BF16, 256),
    "write quantized D128, keys of 5 bits": lambda: write_quantized_of(BF16, 128, formats=((5, 4),)),
    "write quantized D80, keys of 5 bits": lambda: write_quantized_of(FP16, 80, False, ((5, 4),), with_near=True),
    "write quantized in float32": lambda: write_quantized_of(torch.float32, 128, formats=((4, 4),)),
    "lane 8/4 D128": lambda: lane_case(BF16, (8, 4), 8, 128),
    "lane 3/3 D128, near": lambda: lane_case(BF16, (3, 3), 5, 128, near=16),
    "lane 8/8 D64, window": lambda: lane_case(FP16, (8, 8), 7, 64, 99, page_tokens=16),
    "lane 5/4 D80, both": lambda: lane_case(BF16, (5, 4), 1, 80, with_sinks=True, softcap=50.0),
    "lane 4/4 D192, near and window": lambda: lane_case(BF16, (4, 4), 4, 192, 99, near=0),
    "lane 4/4 D256": lambda: lane_case(BF16, (4, 4), 4, 256),
    "quantized 8/8 D128": lambda: quantized_attention_of(BF16, (8, 8), 16, 128),
    "quantized 8/4 D128": lambda: quantized_attention_of(BF16, (8, 4), 8, 128),
    "quantized 8/4 D128, large tiles": lambda: quantized_attention_of(BF16, (8, 4), 7, 128, small=False),
    "quantized 4/4 D128": lambda: quantized_attention_of(BF16, (4, 4), 8, 128),
    "quantized 5/4 D128": lambda: quantized_attention_of(BF16, (5, 4), 8, 128),
    "quantized 5/4 D64": lambda: quantized_attention_of(FP16, (5, 4), 3, 64),
    "quantized 5/4 D128, near": lambda: quantized_attention_of(BF16, (5, 4), 8, 128, near=16),
    "quantized 5/4 D64, near": lambda: quantized_attention_of(BF16, (5, 4), 3, 64, near=16),
    "quantized 5/4 D80, window": lambda: quantized_attention_of(BF16, (5, 4), 2, 80, 99, page_tokens=16),
    "quantized 5/4 D256": lambda: quantized_attention_of(BF16, (5, 4), 2, 256),
    "quantized 3/4 D128, small tiles": lambda: quantized_attention_of(BF16, (3, 4), 1, 128, large=False),
    "quantized 3/3 D128, window": lambda: quantized_attention_of(BF16, (3, 3), 8, 128, window=4096),
    "quantized 4/4 D128, near": lambda: quantized_attention_of(BF16, (4, 4), 8, 128, near=16),
    "quantized 3/4 D128, near": lambda: quantized_attention_of(BF16, (3, 4), 8, 128, near=16),
    "quantized 3/3 D64, near": lambda: quantized_attention_of(FP16, (3, 3), 3, 64, page_tokens=16, near=16),
    "quantized 8/8 D128, near": lambda: quantized_attention_of(BF16, (8, 8), 1, 128, near=16),
    "quantized 8/4 D256, near and window": lambda: quantized_attention_of(BF16, (8, 4), 2, 256, 1024, near=0),
    "quantized 3/3 D80, near and both": lambda: quantized_attention_of(
        BF16, (3, 3), 5, 80, with_sinks=True, softcap=50.0, near=16
    ),
    "quantized 4/4 D64": lambda: quantized_attention_of(FP16, (4, 4), 7, 64, page_tokens=16),
    "quantized 3/3 D64 in float32": lambda: quantized_attention_of(torch.float32, (3, 3), 16, 64, large=False),
    "quantized 3/3 D64, small tiles": lambda: quantized_attention_of(FP16, (3, 3), 16, 64, large=False),
    "quantized 4/4 D80, large tiles": lambda: quantized_attention_of(BF16, (4, 4), 1, 80, small=False),
    "quantized 3/3 D80": lambda: quantized_attention_of(BF16, (3, 3), 8, 80, page_tokens=16),
    "quantized 4/4 D256": lambda: quantized_attention_of(BF16, (4, 4), 8, 256),
    "quantized 3/3 D256, large tiles": lambda: quantized_attention_of(BF16, (3, 3), 8, 256, small=False),
    "quantized 8/8 D64, sinks": lambda: quantized_attention_of(
        BF16, (8, 8), 8, 64, 128, page_tokens=16, with_sinks=True
    ),
    "quantized 4/4 D128, both": lambda: quantized_attention_of(BF16, (4, 4), 8, 128, with_sinks=True, softcap=50.0),
    "quantized 3/3 D256, both": lambda: quantized_attention_of(BF16, (3, 3), 2, 256, 99, with_sinks=True, softcap=50.0),
    "row-scaled tiles, 32 rows": lambda: row_scaled_of(32, 5120, 8192),
    "row-scaled tiles, 64 rows": lambda: row_scaled_of(50, 5120, 25600),
    "row-scaled tiles, 128 rows": lambda: row_scaled_of(128, 5120, 8192),
    **{f"codes of a prompt, {size} columns": partial(coded_prompts_of, size) for size in (768, 5120, 25600)},
    "row-scaled tiles of odd sizes": lambda: row_scaled_of(7, 100, 2100),
    "blocks of 16 rows, split": lambda: block_scaled_tiles_of(16, 4096, 8192),
    "blocks of 64 rows": lambda: block_scaled_tiles_of(50, 32768, 1024),
    "blocks of rows of odd sizes": lambda: block_scaled_tiles_of(7, 100, 2100),
    "one row by two weights": lambda: joint_row_of(1536, 2624, 4096),
    "one row by a router": lambda: single_row_of(256, 4096, 1),
    "one row in groups": lambda: single_row_of(8192, 4096, 8),
    "one row by blocks": lambda: block_scaled_of(7168, 16384),
    "one row by blocks, a single load": lambda: block_scaled_of(8192, 1536),
    "one row by blocks of odd sizes": lambda: block_scaled_of(101, 4112),
    "one row by blocks in float32": lambda: block_scaled_of(2112, 7168, torch.float32),
    "one row by four bits": lambda: packed_of(51200, 5120),
    "one row by four bits, many columns": lambda: packed_of(5120, 25600),
    "one row by four bits of odd sizes": lambda: packed_of(101, 4128),
    "one row by four bits in float32": lambda: packed_of(512, 2880, torch.float32),
    "rows placed": lambda: placed_of(4096, 4096),
    "layer norm": lambda: layer_norm_of(BF16),
    "a rank of 24 rows": lambda: rank_of(24),
    "a rank of 1000 rows": lambda: rank_of(1000),
    "masks of 152K tokens": lambda: mask_of(8, 151936),
    "masks of 100 tokens": lambda: mask_of(1, 100),
    "kv_b of V2-Lite, 1 row": lambda: projections_of(1, 16, 128, 128),
    "kv_b of GLM, 64 rows": lambda: projections_of(64, 20, 192, 256),
    "kv_b of GLM, 900 rows": lambda: projections_of(900, 20, 192, 256),
    "latents, 16 heads": lambda: latents_of(16),
    "latents, 128 heads in warpgroups": lambda: latents_of(128, warpgroups=True),
    "latents, 20 heads in warpgroups": lambda: latents_of(20, page_tokens=256, warpgroups=True),
    "latents, 20 heads": lambda: latents_of(20),
    "latents, 128 heads": lambda: latents_of(128),
    "latents of MiniCPM3, 40 heads": lambda: latents_of(40, 256, 32),
    "latents, 3 heads, small pages": lambda: latents_of(3, page_tokens=16),
    "latents written": lambda: latents_written_of("bfloat16", 512, 64),
    "latents written, fp8": lambda: latents_written_of("fp8_ds_mla", 512, 64),
    "latents written, 4 bits": lambda: latents_written_of("turboquant_mla_4bit", 512, 64),
    "latents written, 4 bits of 192": lambda: latents_written_of("turboquant_mla_4bit_r8", 192, 24),
    "window": lambda: window_of("bfloat16", 64),
    "window, fp8": lambda: window_of("fp8_ds_v4", 128),
    "window, 4 bits": lambda: window_of("turboquant_mla_4bit", 64),
    "entries of 4, 4 bits": lambda: entries_of("turboquant_mla_4bit", 4),
    "entries of 4": lambda: entries_of("bfloat16", 4),
    "entries of 4, fp8": lambda: entries_of("fp8_ds_v4", 4),
    "entries of 128, fp8": lambda: entries_of("fp8_ds_v4", 128),
    "index of entries": lambda: entries_of("fp8", 4, dim=128),
    "index in fp8": lambda: index_of("fp8", 64, 128),
    "index in fp8, large pages": lambda: index_of("fp8", 32, 128, page_tokens=256),
    "index in fp8, small pages": lambda: index_of("fp8", 64, 128, page_tokens=8),
    "index in fp8, 3 heads of 48": lambda: index_of("fp8", 3, 48),
    "index in fp8 as bytes": lambda: index_of("fp8", 64, 128, operands="bytes"),
    "index in bfloat16": lambda: index_of("bfloat16", 64, 128),
    "index in float32": lambda: index_of("float32", 64, 128),
    "quantized latents, fp8": lambda: quantized_latents_of("fp8_ds_mla", 16, 128, 64, large=False),
    "quantized latents, 4 bits": lambda: quantized_latents_of("turboquant_mla_4bit", 20, 128, 64, large=True),
    "quantized latents, fp8 in warpgroups": lambda: quantized_latents_of("fp8_ds_mla", 128, 512, 64, False, True),
    "quantized latents, 4 bits in warpgroups": lambda: quantized_latents_of(
        "turboquant_mla_4bit", 20, 512, 64, large=True, warpgroups=True
    ),
    "quantized latents, 4 bits of 192": lambda: quantized_latents_of("turboquant_mla_4bit_r8", 3, 192, 24, large=False),
    "chosen tokens, 16 heads": lambda: sparse_of("bfloat16", 16),
    "chosen tokens, 128 heads": lambda: sparse_of("bfloat16", 128, num_rows=40),
    "chosen tokens, 20 heads of 192": lambda: sparse_of("bfloat16", 20, 192, 24, num_rows=80),
    "chosen tokens, 16 heads, fp8": lambda: sparse_of("fp8_ds_mla", 16),
    "chosen tokens, 128 heads, fp8": lambda: sparse_of("fp8_ds_mla", 128),
    "chosen tokens, 128 heads, 4 bits": lambda: sparse_of("turboquant_mla_4bit_r8", 128),
    "chosen tokens, 128 heads in warpgroups": lambda: sparse_of("bfloat16", 128, warpgroups=True),
    "chosen tokens, 40 heads in warpgroups, fp8": lambda: sparse_of("fp8_ds_mla", 40, warpgroups=True),
    "chosen tokens, 128 heads in warpgroups, 4 bits": lambda: sparse_of("turboquant_mla_4bit_r8", 128, warpgroups=True),
    "chosen tokens, 16 heads in low tiles": lambda: sparse_of("bfloat16", 16, warpgroups=True),
    "chosen tokens, 16 heads in turns, fp8": lambda: sparse_of("fp8_ds_mla", 16, warpgroups=True),
    "chosen tokens, 20 heads in low tiles, fp8": lambda: sparse_of("fp8_ds_mla", 20, warpgroups=True),
    "chosen tokens, 20 heads in low tiles, 4 bits": lambda: sparse_of("turboquant_mla_4bit", 20, warpgroups=True),
    "chosen tokens, 20 heads, 4 bits": lambda: sparse_of("turboquant_mla_4bit", 20),
    "chosen tokens, 16 heads, 4 bits and rope of 8": lambda: sparse_of("turboquant_mla_4bit_r8", 16),
    "chosen tokens, 3 heads, 4 bits of 192": lambda: sparse_of("turboquant_mla_4bit_r8", 3, 192, 24),
    "window and entries, 64 heads": lambda: compressed_of("bfloat16", 64, 128, 0, warpgroups=True, num_rows=20),
    "window and entries, 128 heads, fp8": lambda: compressed_of("fp8_ds_v4", 128, 4, 1024, warpgroups=True),
    "window and entries, 20 heads, fp8, any GPU": lambda: compressed_of("fp8_ds_v4", 20, 4, 512, warpgroups=False),
    "window, 64 heads, any GPU": lambda: compressed_of("bfloat16", 64, 0, 0, warpgroups=False),
    "up-projected P128": lambda: up_projected_of(128, 128, "bfloat16"),
    "up-projected P192, fp8": lambda: up_projected_of(192, 256, "fp8_ds_mla"),
    "up-projected P128, 4 bits": lambda: up_projected_of(128, 128, "turboquant_mla_4bit"),
    "up-projected P128, 4 bits and rope of 8": lambda: up_projected_of(128, 128, "turboquant_mla_4bit_r8"),
    "top-k of 8K": lambda: top_k_of(8192, 2048),
    "top-k of 160K": lambda: top_k_of(163840, 2048),
    "top-k of 1M": lambda: top_k_of(2**20, 512),
    "routing of V2": lambda: routing_of(160, 6, routing.Routing(False, "softmax", 8, 3, "largest", 16.0)),
    "routing of V3": lambda: routing_of(256, 8, routing.Routing(True, "sigmoid", 8, 4, "two_largest", 2.5), True),
    **V4_CASES,
    **EXPERT_CASES,
    **LAYER_CASES,
    **PACKED_CASES,
    **STATE_CASES,
    **CODE_CASES,
}


def main() -> None:
    """The cases that were named, with programmatic dependent launch (PDL)."""
    modules: list[ModuleType] = [
        add_rows,
        block_scaled_gemv,
        block_scaled_tiles,
        compressed_attention,
        compressed_scopes,
        compressed_warpgroups,
        deferred_rms_norm,
        deep_gemv,
        embedding,
        expert_gemv,
        expert_row,
        expert_sum,
        gather_rows,
        gathered_attention,
        grouped_gemm,
        hash_routing,
        activation,
        hyper_connections,
        joint_row,
        index_scores,
        lane_rows,
        lane_warpgroups,
        latent_attention,
        latent_prefill,
        latent_projection,
        latent_tiles,
        latent_warpgroups,
        links,
        edit_logits,
        normed_routing,
        operation,
        output_gate,
        packed_dequantize,
        packed_gemv,
        packed_mma,
        packed_tiles,
        place_kernels,
        prefill_warpgroups,
        quantize_activations,
        quantized_attention,
        rope_rows,
        row_scaled_tiles,
        routing,
        norm,
        small_batch,
        sparse_low_attention,
        split_kv,
        sum_rows,
        tiled_attention,
        compress,
        write_index,
        top_k_tokens,
        write_latent,
        write_kv,
        write_quantized_kv,
        write_window,
        *(causal_conv, delta_chunks, delta_drafts, delta_step, gated_norm, scan_warpgroups),
    ]
    kernels = []
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernels.append(CompiledOnly(getattr(module, name)))
            setattr(module, name, kernels[-1])
        for question, answer in ANSWERS.items():
            if hasattr(module, question):
                setattr(module, question, lambda tensor, answer=answer: answer)
    results: dict[str, object] = {}
    for case in sys.argv[1:]:
        for kernel in kernels:
            kernel.shared_bytes = 0
        try:
            CASES[case]()
        except Exception as error:
            results[case] = f"{type(error).__name__}: {error}"[-1500:]
        else:
            results[case] = max(kernel.shared_bytes for kernel in kernels)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
