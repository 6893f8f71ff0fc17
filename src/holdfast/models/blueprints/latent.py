"""DeepSeek-V3.2: latent attention (MLA) to tokens that an index of every layer chooses; scratch of latents as plans count it; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import LAYERS, Request
from holdfast.models.declaration import CacheRows, StepShape, needed
from holdfast.models.declared_weights import Weight
from holdfast.models.latent_declaration import LatentDeclaration
from holdfast.models.latent_families import DEEPSEEK_V3, read_latent
from holdfast.models.parameters import DEEPSEEK_NAMES
from holdfast.models.settings import MAX_WIDTH, Settings
from holdfast.quant.formats import DTYPE_BYTES, KVFormat

INDEX_SCORE_BYTES = 128 * 2**20
"""Scores of a block of rows against all entries of an index; long contexts take fewer rows at a time, not more memory."""
INDEX_SCALE_BYTES = 4
"""Of a row of an index in fp8."""
ROWS_AT_ONCE = 1024
"""Rows whose queries are widened to the latent's size together: that is what would grow with heads and rows."""
PARTIAL_HEAD_ROWS = 2 * 2 * 132 * 64
"""Head rows whose split results are kept at once: two waves over 132 multiprocessors, two tiles of 64 heads in each."""
DEEPSEEK_V32 = replace(DEEPSEEK_V3, name="deepseek_v32", architecture="DeepseekV32ForCausalLM")


class IndexedBlueprint(NamedTuple):
    """Latents, and beside each a short key: of all tokens those are attended to whose keys score highest."""

    latent: LatentDeclaration
    num_index_heads: int
    index_dim: int
    index_top_k: int

    @property
    def rope_width(self) -> int:
        return self.latent.rope_width

    def indivisible(self, num_ranks: int) -> str | None:
        return self.latent.indivisible(num_ranks)

    def weights(self, num_ranks: int) -> tuple[Weight, ...]:
        num_layers = self.latent.decoder.num_layers
        index = (weight for layer in range(num_layers) for weight in self._index(f"layers.{layer}."))
        return (*self.latent.weights(num_ranks), *index)

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        return self.latent.unsupported_format(kv_format)

    def cache_rows(self, kv_format: KVFormat, num_ranks: int) -> tuple[CacheRows, ...]:
        index_bytes = self.index_dim * DTYPE_BYTES[kv_format.key_dtype]
        if kv_format.is_quantized:
            index_bytes = self.index_dim + INDEX_SCALE_BYTES
        index = CacheRows("index", self.latent.decoder.num_layers, index_bytes)
        return (*self.latent.cache_rows(kv_format, num_ranks), index)

    def sequence_bytes(self, kv_format: KVFormat, num_ranks: int) -> int:
        return self.latent.sequence_bytes(kv_format, num_ranks)

    def heads(self, num_ranks: int) -> None:
        """No backend of this version attends to chosen tokens."""

    def requests(self, step: StepShape, num_ranks: int, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        heads, dims, rows = self.latent.rank(num_ranks).num_heads, self.latent.latent, step.num_rows
        at_once = min(rows, ROWS_AT_ONCE)
        return self.latent.requests(
            step,
            num_ranks,
            (
                *scratch,
                TensorSpec("absorbed", (at_once, heads * dims.row_dim), step.dtype),
                TensorSpec("attended_latent", (at_once, heads * dims.kv_rank), step.dtype),
                TensorSpec("partial", (PARTIAL_HEAD_ROWS, dims.kv_rank + 2), "float32"),
                TensorSpec("index_q", (at_once, self.num_index_heads * self.index_dim), step.dtype),
                TensorSpec("index_scores", (min(INDEX_SCORE_BYTES, 4 * rows * step.max_model_len),), "uint8"),
                TensorSpec("index_top", (rows, self.index_top_k), "int32"),
            ),
        )

    def _index(self, prefix: str) -> list[Weight]:
        """Every rank has all of it: its heads are summed up before tokens are chosen."""
        hidden, q_rank, native = self.latent.decoder.hidden_size, self.latent.latent.q_rank, self.latent.native
        assert q_rank is not None, "an index takes its queries from the query latent"
        return [
            Weight(f"{prefix}index_q.weight", (self.num_index_heads * self.index_dim, q_rank), "linear", native),
            Weight(f"{prefix}index_k.weight", (self.index_dim, hidden), "linear", native),
            Weight(f"{prefix}index_k_norm.weight", (self.index_dim,), "norm"),
            Weight(f"{prefix}index_k_norm.bias", (self.index_dim,), "bias"),
            Weight(f"{prefix}index_weights.weight", (self.num_index_heads, hidden), "router"),
        ]


def head(step: StepShape, hidden_size: int, vocab_size: int) -> Request:
    """Logits in float32, and the hidden states they come from."""
    hidden = TensorSpec("hidden", (step.num_logit_rows, hidden_size), step.dtype)
    return Request(LAYERS, "head", (hidden, TensorSpec("logits", (step.num_logit_rows, vocab_size), "float32")))


def deepseek_v32(settings: Settings, native: str | None) -> IndexedBlueprint:
    """V3 with an index."""
    spec = read_latent(DEEPSEEK_V32, settings)
    if spec.latent is None or spec.latent.q_rank is None:
        raise settings.missing("q_lora_rank", "an index takes its queries from there")
    return IndexedBlueprint(
        LatentDeclaration(spec, DEEPSEEK_NAMES, native),
        num_index_heads=needed(settings, "index_n_heads", MAX_WIDTH),
        index_dim=needed(settings, "index_head_dim", MAX_WIDTH),
        index_top_k=needed(settings, "index_topk", MAX_WIDTH),
    )
