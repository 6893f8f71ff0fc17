"""DeepSeek-V4: sliding windows in every layer, beside a cache of one compressed row for 4 or 128 tokens; no torch."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.attention.declarations import INDEX_SCORE_BYTES, LATENT_ROWS, PARTIAL_HEAD_ROWS
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import LAYERS, STREAM, Request
from holdfast.models.declaration import CacheRows, Experts, StepShape, needed, split
from holdfast.models.declared_weights import FP8_BLOCK_E8M0, Weight
from holdfast.models.settings import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Settings
from holdfast.quant.formats import DTYPE_BYTES, KVFormat

FP8_TILE = 64
"""Elements that share a scale of one byte in a vector of fp8."""
OVERLAPPED = 4
"""The ratio whose windows overlap: twice the columns, twice the rows, and an index to choose among its entries."""
RATIOS = (0, OVERLAPPED, 128)


class CompressedBlueprint(NamedTuple):
    """One key that is also the value, shared by all heads; the residual stream is `num_streams` wide."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    num_groups: int
    group_rank: int
    num_index_heads: int
    index_dim: int
    index_top_k: int
    ratios: tuple[int, ...]
    """Tokens that one entry of a layer's cache stands for; 0: the layer has its window only."""
    window: int
    num_streams: int
    num_hash_layers: int
    experts: Experts
    num_draft_layers: int
    native: str | None

    @property
    def rope_width(self) -> int:
        return self.rope_dim

    def indivisible(self, num_ranks: int) -> str | None:
        reason = split(self.num_heads, num_ranks, "query heads") or split(self.num_groups, num_ranks, "output groups")
        return reason or self.experts.indivisible(num_ranks)

    def weights(self, num_ranks: int) -> tuple[Weight, ...]:
        hidden, rows = self.hidden_size, -(-self.vocab_size // num_ranks)
        weights = [Weight("embed.weight", (rows, hidden), "embedding")]
        for layer, ratio in enumerate(self.ratios):
            weights += self._layer(f"layers.{layer}.", ratio, layer < self.num_hash_layers, num_ranks)
        weights.append(Weight("final_norm.weight", (hidden,), "norm"))
        weights += self._stream_head("stream_head.")
        weights.append(Weight("lm_head.weight", (rows, hidden), "head"))
        for draft in range(self.num_draft_layers):
            prefix = f"mtp.{draft}."
            weights += self._layer(prefix, 0, False, num_ranks)
            weights += [self._matrix(f"{prefix}{name}", hidden, hidden) for name in ("e", "h")]
            weights += [
                Weight(f"{prefix}{name}.weight", (hidden,), "norm") for name in ("enorm", "hnorm", "final_norm")
            ]
            weights += self._stream_head(f"{prefix}stream_head.")
        return tuple(weights)

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        if not kv_format.is_quantized or kv_format.name == "fp8":
            return None
        return f"{kv_format.name} keeps keys and values by head, and this model keeps compressed vectors"

    def cache_rows(self, kv_format: KVFormat, num_ranks: int) -> tuple[CacheRows, ...]:
        rows = []
        for ratio, num_layers in sorted(Counter(self.ratios).items()):
            if ratio:
                rows.append(CacheRows(f"compressed by {ratio}", num_layers, self._vector_bytes(kv_format), ratio))
            if ratio == OVERLAPPED:
                rows.append(CacheRows("index", num_layers, self._index_bytes(kv_format), ratio))
        return tuple(rows)

    def sequence_bytes(self, kv_format: KVFormat, num_ranks: int) -> int:
        """Windows of all layers, and the rows in float32 from which the next entries are made."""
        num_bytes = len(self.ratios) * self.window * self._vector_bytes(kv_format)
        for ratio in self.ratios:
            num_bytes += _state_bytes(ratio, self.head_dim)
            if ratio == OVERLAPPED:
                num_bytes += _state_bytes(ratio, self.index_dim)
        return num_bytes

    def heads(self, num_ranks: int) -> None:
        return None

    def requests(self, step: StepShape, num_ranks: int, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        rows, dtype = step.num_rows, step.dtype
        wide = self.num_heads // num_ranks * self.head_dim
        index_width = self.num_index_heads * self.index_dim
        score_bytes = min(INDEX_SCORE_BYTES, 4 * rows * -(-step.max_model_len // OVERLAPPED))
        streams = tuple(TensorSpec(name, (rows, self.num_streams * self.hidden_size), dtype) for name in ("x", "mixed"))
        singles = tuple(TensorSpec(name, (rows, self.hidden_size), dtype) for name in ("normed", "delta"))
        attention = (
            TensorSpec("q_latent", (rows, self.q_rank), dtype),
            TensorSpec("q", (rows, wide), dtype),
            TensorSpec("kv", (rows, self.head_dim), dtype),
            TensorSpec("compressor", (rows, 4 * self.head_dim), "float32"),
            TensorSpec("index_q", (min(rows, LATENT_ROWS), index_width), dtype),
            TensorSpec("index_scores", (score_bytes,), "uint8"),
            TensorSpec("index_top", (rows, self.index_top_k), "int32"),
            TensorSpec("attended", (rows, wide), dtype),
            TensorSpec("grouped", (rows, self.num_groups // num_ranks * self.group_rank), dtype),
            TensorSpec("partial", (PARTIAL_HEAD_ROWS, self.head_dim + 2), "float32"),
            *scratch,
        )
        return (
            Request(STREAM, "stream", streams + singles),
            Request(LAYERS, "attention", attention),
            self.experts.request(step, self.hidden_size, num_ranks),
            _head(step, self.hidden_size, self.vocab_size),
        )

    def _vector_bytes(self, kv_format: KVFormat) -> int:
        if kv_format.name != "fp8":
            return self.head_dim * DTYPE_BYTES[kv_format.key_dtype]
        plain = self.head_dim - self.rope_dim
        scales = -(-plain // FP8_TILE)
        return plain + 2 * self.rope_dim + scales + scales % 2  # scales are padded to an even number

    def _index_bytes(self, kv_format: KVFormat) -> int:
        if kv_format.name == "fp8":
            return self.index_dim + 4
        return self.index_dim * DTYPE_BYTES[kv_format.key_dtype]

    def _layer(self, prefix: str, ratio: int, is_hashed: bool, num_ranks: int) -> list[Weight]:
        hidden, heads, groups = self.hidden_size, self.num_heads // num_ranks, self.num_groups // num_ranks
        group_width = self.num_heads * self.head_dim // self.num_groups
        weights = [
            Weight(f"{prefix}attn_norm.weight", (hidden,), "norm"),
            self._matrix(f"{prefix}q_a", self.q_rank, hidden),
            Weight(f"{prefix}q_a_norm.weight", (self.q_rank,), "norm"),
            self._matrix(f"{prefix}q_b", heads * self.head_dim, self.q_rank),
            self._matrix(f"{prefix}kv", self.head_dim, hidden),
            Weight(f"{prefix}kv_norm.weight", (self.head_dim,), "norm"),
            Weight(f"{prefix}sinks", (heads,), "bias", dtype="float32"),
            self._matrix(f"{prefix}o_a", groups * self.group_rank, group_width),
            self._matrix(f"{prefix}o_b", hidden, groups * self.group_rank),
            Weight(f"{prefix}mlp_norm.weight", (hidden,), "norm"),
        ]
        if ratio:
            weights += self._compressor(f"{prefix}compressor.", ratio, self.head_dim)
        if ratio == OVERLAPPED:
            weights.append(self._matrix(f"{prefix}index_q", self.num_index_heads * self.index_dim, self.q_rank))
            weights.append(Weight(f"{prefix}index_weights.weight", (self.num_index_heads, hidden), "router"))
            weights += self._compressor(f"{prefix}index.", ratio, self.index_dim)
        num_mixes = (2 + self.num_streams) * self.num_streams
        for block in ("attn", "mlp"):
            weights.append(_float32(f"{prefix}{block}_mix.weight", num_mixes, self.num_streams * hidden))
            weights.append(_float32(f"{prefix}{block}_mix.bias", num_mixes + 3))
        weights += self.experts.weights(prefix, hidden, num_ranks)
        if is_hashed:
            table = (self.vocab_size, self.experts.top_k)
            weights.append(Weight(f"{prefix}expert_of_token", table, "router", dtype="int64"))
        else:
            weights.append(_float32(f"{prefix}router.bias", self.experts.num_experts))
        return weights

    def _compressor(self, prefix: str, ratio: int, dim: int) -> list[Weight]:
        width = 2 * dim if ratio == OVERLAPPED else dim
        return [
            *(Weight(f"{prefix}{name}.weight", (width, self.hidden_size), "router") for name in ("kv", "gate")),
            _float32(f"{prefix}positions", ratio, width),
            Weight(f"{prefix}norm.weight", (dim,), "norm"),
        ]

    def _stream_head(self, prefix: str) -> list[Weight]:
        mix = _float32(f"{prefix}weight", self.num_streams, self.num_streams * self.hidden_size)
        return [mix, _float32(f"{prefix}bias", self.num_streams + 1)]

    def _matrix(self, name: str, rows: int, columns: int) -> Weight:
        return Weight(f"{name}.weight", (rows, columns), "linear", self.native)


def _float32(name: str, *shape: int) -> Weight:
    return Weight(name, shape, "bias", dtype="float32")


def _head(step: StepShape, hidden_size: int, vocab_size: int) -> Request:
    """Logits in float32, and the hidden states they come from."""
    hidden = TensorSpec("hidden", (step.num_logit_rows, hidden_size), step.dtype)
    return Request(LAYERS, "head", (hidden, TensorSpec("logits", (step.num_logit_rows, vocab_size), "float32")))


def _state_bytes(ratio: int, dim: int) -> int:
    """Keys and scores in float32 of the rows that the next entry of a layer is made of."""
    overlap = 2 if ratio == OVERLAPPED else 1
    return overlap * ratio * overlap * dim * 2 * 4


def deepseek_v4(settings: Settings, native: str | None) -> CompressedBlueprint:
    """DeepSeek-V4; matrices in fp8 have scales of one byte, experts may be in fp4."""
    num_layers = needed(settings, "num_hidden_layers", MAX_LAYERS)
    ratios = settings.values.get("compress_ratios")
    if ratios is None:
        raise settings.missing("compress_ratios", "a plan would be a guess without it")
    if not isinstance(ratios, list) or len(ratios) < num_layers or not all(ratio in RATIOS for ratio in ratios):
        wanted = f"a list of 0, 4 or 128 for each of {num_layers} layers"
        raise settings.refuse("compress_ratios", ratios, wanted)
    native = FP8_BLOCK_E8M0.name if native is not None else None
    inner = needed(settings, "moe_intermediate_size", MAX_WIDTH)
    num_heads, num_groups = needed(settings, "num_attention_heads", MAX_WIDTH), needed(settings, "o_groups", MAX_WIDTH)
    if num_heads % num_groups:
        raise settings.refuse("o_groups", num_groups, f"a divisor of num_attention_heads = {num_heads}")
    experts = Experts(
        num_experts=needed(settings, "n_routed_experts", MAX_WIDTH),
        top_k=needed(settings, "num_experts_per_tok", MAX_WIDTH),
        intermediate_size=inner,
        shared_size=needed(settings, "n_shared_experts", MAX_WIDTH) * inner,
        expert_native="mxfp4" if settings.text("expert_dtype", "") == "fp4" else native,
        shared_native=native,
    )
    return CompressedBlueprint(
        vocab_size=needed(settings, "vocab_size", MAX_VOCAB),
        hidden_size=needed(settings, "hidden_size", MAX_WIDTH),
        num_heads=num_heads,
        head_dim=needed(settings, "head_dim", MAX_WIDTH),
        rope_dim=needed(settings, "qk_rope_head_dim", MAX_WIDTH),
        q_rank=needed(settings, "q_lora_rank", MAX_WIDTH),
        num_groups=num_groups,
        group_rank=needed(settings, "o_lora_rank", MAX_WIDTH),
        num_index_heads=needed(settings, "index_n_heads", MAX_WIDTH),
        index_dim=needed(settings, "index_head_dim", MAX_WIDTH),
        index_top_k=needed(settings, "index_topk", MAX_WIDTH),
        ratios=tuple(ratios[:num_layers]),
        window=needed(settings, "sliding_window", MAX_WIDTH),
        num_streams=needed(settings, "hc_mult", 64),
        num_hash_layers=settings.count("num_hash_layers", 0, num_layers, low=0),
        experts=experts,
        num_draft_layers=settings.count("num_nextn_predict_layers", 0, MAX_LAYERS, low=0),
        native=native,
    )
