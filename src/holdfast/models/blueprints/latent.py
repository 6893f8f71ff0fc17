"""Models with latent attention (MLA): DeepSeek-V2 to V3.2, R1 and Kimi-K2, whose cache keeps one compressed row a token; no torch."""

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import UnsupportedModelError, shown
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import LAYERS, STREAM, Request
from holdfast.models.declaration import CacheRows, Experts, StepShape, needed, split
from holdfast.models.declared_weights import Weight
from holdfast.models.families import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from holdfast.models.settings import Settings
from holdfast.quant.formats import DTYPE_BYTES, KVFormat

FP8_TILE = 128
"""Latent elements that share a float32 scale in a row of fp8."""
INDEX_SCORE_BYTES = 128 * 2**20
"""Scores of a block of rows against all entries of an index; long contexts take fewer rows at a time, not more memory."""
ROWS_AT_ONCE = 1024
"""Rows whose queries are widened to the latent's size together: that is what would grow with heads and rows."""
PARTIAL_HEAD_ROWS = 2 * 2 * 132 * 64
"""Head rows whose split results are kept at once: two waves over 132 multiprocessors, two tiles of 64 heads in each."""


class LatentBlueprint(NamedTuple):
    """Queries and keys meet in a latent of `kv_rank` elements, beside `rope_dim` rotated ones."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_rank: int | None
    """None: queries are projected in one step."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    intermediate_size: int
    num_dense_layers: int
    experts: Experts
    tied_embeddings: bool
    num_draft_layers: int
    """Layers that draft tokens; the checkpoint holds them, with an embedding and a head of their own."""
    native: str | None
    num_index_heads: int = 0
    """Of the index that chooses which tokens are attended to (V3.2); 0: all are."""
    index_dim: int = 0
    index_top_k: int = 0

    @property
    def rope_width(self) -> int:
        return self.rope_dim

    def indivisible(self, num_ranks: int) -> str | None:
        reason = split(self.num_heads, num_ranks, "query heads")
        if reason is None and self.num_dense_layers:
            reason = split(self.intermediate_size, num_ranks, "columns of the MLP")
        return reason or self.experts.indivisible(num_ranks)

    def weights(self, num_ranks: int) -> tuple[Weight, ...]:
        hidden, rows = self.hidden_size, -(-self.vocab_size // num_ranks)
        weights = [Weight("embed.weight", (rows, hidden), "embedding")]
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            weights += self._attention(prefix, num_ranks)
            if layer >= self.num_dense_layers:
                weights += self.experts.weights(prefix, hidden, num_ranks)
                continue
            inner = self.intermediate_size // num_ranks
            weights.append(Weight(f"{prefix}gate_up.weight", (2 * inner, hidden), "linear", self.native))
            weights.append(Weight(f"{prefix}down.weight", (hidden, inner), "linear", self.native))
        weights.append(Weight("final_norm.weight", (hidden,), "norm"))
        if not self.tied_embeddings:
            weights.append(Weight("lm_head.weight", (rows, hidden), "head"))
        for draft in range(self.num_draft_layers):
            weights += self._draft(f"mtp.{draft}.", rows, num_ranks)
        return tuple(weights)

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        if not kv_format.is_quantized or kv_format.name == "fp8":
            return None
        return f"{kv_format.name} keeps keys and values by head, and this model keeps latents"

    def cache_rows(self, kv_format: KVFormat, num_ranks: int) -> tuple[CacheRows, ...]:
        rows = [CacheRows("latent", self.num_layers, self._row_bytes(kv_format))]
        if self.num_index_heads:
            index_bytes = self.index_dim + 4 if kv_format.name == "fp8" else self.index_dim * _plain_bytes(kv_format)
            rows.append(CacheRows("index", self.num_layers, index_bytes))
        return tuple(rows)

    def sequence_bytes(self, kv_format: KVFormat, num_ranks: int) -> int:
        return 0

    def heads(self, num_ranks: int) -> None:
        return None

    def requests(self, step: StepShape, num_ranks: int, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        rows, dtype, heads = step.num_rows, step.dtype, self.num_heads // num_ranks
        at_once, row = min(rows, ROWS_AT_ONCE), self.kv_rank + self.rope_dim
        stream = tuple(TensorSpec(name, (rows, self.hidden_size), dtype) for name in ("x", "normed", "delta"))
        attention = [
            TensorSpec("q", (rows, heads * (self.nope_dim + self.rope_dim)), dtype),
            TensorSpec("latent", (rows, row), dtype),
            TensorSpec("absorbed", (at_once, heads * row), dtype),
            TensorSpec("attended_latent", (at_once, heads * self.kv_rank), dtype),
            TensorSpec("attended", (rows, heads * self.value_dim), dtype),
            TensorSpec("partial", (PARTIAL_HEAD_ROWS, self.kv_rank + 2), "float32"),
            *scratch,
        ]
        if self.q_rank is not None:
            attention.append(TensorSpec("q_latent", (rows, self.q_rank), dtype))
        if self.num_index_heads:
            attention += [
                TensorSpec("index_q", (at_once, self.num_index_heads * self.index_dim), dtype),
                TensorSpec("index_scores", (min(INDEX_SCORE_BYTES, 4 * rows * step.max_model_len),), "uint8"),
                TensorSpec("index_top", (rows, self.index_top_k), "int32"),
            ]
        requests = [Request(STREAM, "stream", stream), Request(LAYERS, "attention", tuple(attention))]
        if self.num_dense_layers:
            inner = self.intermediate_size // num_ranks
            mlp = (TensorSpec("wide", (rows, 2 * inner), dtype), TensorSpec("active", (rows, inner), dtype))
            requests.append(Request(LAYERS, "mlp", mlp))
        requests.append(self.experts.request(step, self.hidden_size, num_ranks))
        requests.append(head(step, self.hidden_size, self.vocab_size))
        return tuple(requests)

    def _row_bytes(self, kv_format: KVFormat) -> int:
        if kv_format.name == "fp8":
            return self.kv_rank + 4 * -(-self.kv_rank // FP8_TILE) + 2 * self.rope_dim
        return (self.kv_rank + self.rope_dim) * _plain_bytes(kv_format)

    def _attention(self, prefix: str, num_ranks: int) -> list[Weight]:
        heads, hidden, native = self.num_heads // num_ranks, self.hidden_size, self.native
        q_rows = heads * (self.nope_dim + self.rope_dim)
        weights = [Weight(f"{prefix}attn_norm.weight", (hidden,), "norm")]
        if self.q_rank is None:
            weights.append(Weight(f"{prefix}q.weight", (q_rows, hidden), "linear", native))
        else:
            weights += [
                Weight(f"{prefix}q_a.weight", (self.q_rank, hidden), "linear", native),
                Weight(f"{prefix}q_a_norm.weight", (self.q_rank,), "norm"),
                Weight(f"{prefix}q_b.weight", (q_rows, self.q_rank), "linear", native),
            ]
        kv_rows = heads * (self.nope_dim + self.value_dim)
        return [
            *weights,
            Weight(f"{prefix}kv_a.weight", (self.kv_rank + self.rope_dim, hidden), "linear", native),
            Weight(f"{prefix}kv_a_norm.weight", (self.kv_rank,), "norm"),
            Weight(f"{prefix}kv_b.weight", (kv_rows, self.kv_rank), "linear", native),
            Weight(f"{prefix}o.weight", (hidden, heads * self.value_dim), "linear", native),
            Weight(f"{prefix}mlp_norm.weight", (hidden,), "norm"),
            *(self._index(prefix) if self.num_index_heads else ()),
        ]

    def _index(self, prefix: str) -> list[Weight]:
        """Every rank has all of it: its heads are summed up before tokens are chosen."""
        assert self.q_rank is not None, "an index takes its queries from the query latent"
        return [
            Weight(
                f"{prefix}index_q.weight", (self.num_index_heads * self.index_dim, self.q_rank), "linear", self.native
            ),
            Weight(f"{prefix}index_k.weight", (self.index_dim, self.hidden_size), "linear", self.native),
            Weight(f"{prefix}index_k_norm.weight", (self.index_dim,), "norm"),
            Weight(f"{prefix}index_k_norm.bias", (self.index_dim,), "bias"),
            Weight(f"{prefix}index_weights.weight", (self.num_index_heads, self.hidden_size), "router"),
        ]

    def _draft(self, prefix: str, vocab_rows: int, num_ranks: int) -> list[Weight]:
        hidden = self.hidden_size
        return [
            Weight(f"{prefix}embed.weight", (vocab_rows, hidden), "embedding"),
            *(Weight(f"{prefix}{name}.weight", (hidden,), "norm") for name in ("enorm", "hnorm", "final_norm")),
            Weight(f"{prefix}eh.weight", (hidden, 2 * hidden), "linear"),
            *self._attention(prefix, num_ranks),
            *self.experts.weights(prefix, hidden, num_ranks),
            Weight(f"{prefix}lm_head.weight", (vocab_rows, hidden), "head"),
        ]


def _plain_bytes(kv_format: KVFormat) -> int:
    return DTYPE_BYTES[kv_format.key_dtype]


def head(step: StepShape, hidden_size: int, vocab_size: int) -> Request:
    """Logits in float32, and the hidden states they come from."""
    hidden = TensorSpec("hidden", (step.num_logit_rows, hidden_size), step.dtype)
    return Request(LAYERS, "head", (hidden, TensorSpec("logits", (step.num_logit_rows, vocab_size), "float32")))


def deepseek(settings: Settings, native: str | None) -> LatentBlueprint:
    """DeepSeek-V2 to V3.2, and those that took its architecture."""
    if settings.count("moe_layer_freq", 1, MAX_LAYERS) != 1:
        raise UnsupportedModelError(
            f"{settings.file} sets moe_layer_freq = {shown(settings.values['moe_layer_freq'])}",
            "every layer behind the first dense ones is taken to have experts",
            "use a model without it",
        )
    num_layers = needed(settings, "num_hidden_layers", MAX_LAYERS)
    has_index = settings.values.get("index_n_heads") is not None
    q_rank = settings.optional_count("q_lora_rank", None, MAX_WIDTH)
    if has_index and q_rank is None:
        raise settings.missing("q_lora_rank", "an index takes its queries from there")
    inner = needed(settings, "moe_intermediate_size", MAX_WIDTH)
    num_shared = settings.optional_count("n_shared_experts", None, MAX_WIDTH) or 0
    experts = Experts(
        num_experts=needed(settings, "n_routed_experts", MAX_WIDTH),
        top_k=needed(settings, "num_experts_per_tok", MAX_WIDTH),
        intermediate_size=inner,
        shared_size=num_shared * inner,
        has_router_bias=settings.text("topk_method", "greedy") == "noaux_tc",
        expert_native=native,
        shared_native=native,
    )
    return LatentBlueprint(
        vocab_size=needed(settings, "vocab_size", MAX_VOCAB),
        hidden_size=needed(settings, "hidden_size", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=needed(settings, "num_attention_heads", MAX_WIDTH),
        q_rank=q_rank,
        kv_rank=needed(settings, "kv_lora_rank", MAX_WIDTH),
        nope_dim=needed(settings, "qk_nope_head_dim", MAX_WIDTH),
        rope_dim=needed(settings, "qk_rope_head_dim", MAX_WIDTH),
        value_dim=needed(settings, "v_head_dim", MAX_WIDTH),
        intermediate_size=needed(settings, "intermediate_size", MAX_WIDTH),
        num_dense_layers=settings.count("first_k_dense_replace", 0, num_layers, low=0),
        experts=experts,
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        num_draft_layers=settings.count("num_nextn_predict_layers", 0, MAX_LAYERS, low=0),
        native=native,
        num_index_heads=needed(settings, "index_n_heads", MAX_WIDTH) if has_index else 0,
        index_dim=needed(settings, "index_head_dim", MAX_WIDTH) if has_index else 0,
        index_top_k=needed(settings, "index_topk", MAX_WIDTH) if has_index else 0,
    )
