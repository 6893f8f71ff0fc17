"""Declaration: what a plan needs of a kind of model (weights, cache, workspace), and its experts; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, Protocol

from holdfast.cache.compressed import ENTRIES, StateKind, list_states
from holdfast.cache.places import PlaceKind
from holdfast.cache.spec import CacheSpec, LayerCache
from holdfast.distributed.mesh import Mesh
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.families.state.spec import StateSpec
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import Request
from holdfast.models.declared_weights import Weight
from holdfast.models.settings import Settings
from holdfast.models.spec import ExpertsSpec
from holdfast.quant.formats import KVFormat
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe


class CacheRows(NamedTuple):
    """Layers that keep rows of one size: one row for every `ratio` tokens of a sequence."""

    name: str
    num_layers: int
    row_bytes: int
    ratio: int = 1

    @property
    def bytes_per_token(self) -> Fraction:
        return Fraction(self.num_layers * self.row_bytes, self.ratio)


class HeadGeometry(NamedTuple):
    """Attention as backends see it: keys and values by head, or latents."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """For latents: all elements stored per token, `rope_dim` included."""
    windows: tuple[int | None, ...]
    """One entry a layer."""
    has_key_bias: bool = False
    has_separable_key_bias: bool = False
    """True if no norm stands between the projection and RoPE: keys can be stored without their bias."""
    scale: float | None = None
    """Factor on scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """Replaces every score by cap * tanh(score / cap); None: no cap."""
    has_sinks: bool = False
    """One logit per query head joins every softmax."""
    is_rotated: bool = True
    """RoPE rotates keys and queries; else positions are learned."""
    rope_dim: int = 0
    """Rotated elements of a latent (MLA); 0: keys and values by head."""
    nope_dim: int = 0
    """Elements of a query head that meet the latent through kv_b, beside `rope_dim`; 0 without latents."""
    value_dim: int = 0
    """Elements of a head's output, for latents."""
    index_heads: int = 0
    """Heads of the index (DSA), of `index_dim` elements each; 0: none."""
    index_dim: int = 0
    index_top_k: int = 0
    """Most tokens that a row attends to."""
    index_turns_neighbours: bool = False
    """RoPE rotates neighbouring elements of the index, not halves."""
    shared_layers: frozenset[int] = frozenset()
    """Layers without an index, which reuse the choice of an earlier layer."""
    ratios: tuple[int, ...] = ()
    """Compressed attention, by layer: tokens per entry, 0 if the layer has its window only; empty:
    every other attention."""
    overlapped_layers: frozenset[int] = frozenset()
    """Layers whose entries overlap, with an index to choose among them."""
    form_heads: int = 0
    """Compressed attention: `ModelSpec.form_heads`."""
    has_output_gate: bool = False
    """Grouped attention: the fused projection has a gate after each query head."""
    state: StateSpec | None = None
    """Layers that keep a state and no pages; None: none."""

    @property
    def is_compressed(self) -> bool:
        """True if layers attend to a window and to entries that stand for several tokens (cache/compressed.py)."""
        return bool(self.ratios)

    @property
    def states(self) -> tuple[StateKind, ...]:
        """The states of tokens that are not part of an entry yet."""
        return list_states(self.ratios, self.overlapped_layers, self.head_dim, self.index_dim)

    def place_kinds(self, dtype: str) -> tuple[PlaceKind, ...]:
        """List what a sequence keeps outside its pages; `dtype` is that of activations."""
        return self.states if self.state is None else self.state.parts(dtype)

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """Layers whose tokens are on pages: all that keep no state."""
        layers = range(len(self.windows))
        return tuple(layers) if self.state is None else tuple(sorted(set(layers) - self.state.layers))

    def compressed_specs(
        self, cache: CacheSpec, max_model_len: int, dtype: str, device_kind: str
    ) -> tuple[CompressedAttentionSpec, ...]:
        """List what the attention of every layer computes over its window and its entries."""
        places = {own.layer: place for place, own in enumerate(cache.layers) if own.name == ENTRIES}
        specs = []
        for layer, ratio in enumerate(self.ratios):
            own, is_overlapped, place = cache.layers[layer], layer in self.overlapped_layers, places.get(layer, -1)
            spec = CompressedAttentionSpec(
                *(own, self.num_heads, self.score_scale, self.windows[layer], max_model_len, dtype, device_kind),
                group=cache.group_of(layer),
                ratio=ratio,
                is_overlapped=is_overlapped,
                index_heads=self.index_heads if is_overlapped else 0,
                index_top_k=self.index_top_k if is_overlapped else 0,
                form_heads=self.form_heads,
            )
            if ratio:
                entries, group = cache.layers[place], cache.group_of(place)
                spec = replace(spec, entries=entries, entries_group=group, entries_index=place)
            specs.append(spec)
        return tuple(specs)

    def attention_spec(
        self, cache: LayerCache, group: int, max_model_len: int, dtype: str, device_kind: str
    ) -> GroupedAttentionSpec | LatentAttentionSpec:
        """Return what the attention of one layer computes over its cache, with keys and values by head or over latents."""
        window = self.windows[cache.layer]
        base = cache, self.num_heads, self.score_scale, window, max_model_len, dtype, device_kind, group
        if not self.rope_dim:
            has_key_bias = self.is_rotated and self.has_separable_key_bias and cache.format.is_quantized
            gated = self.has_output_gate
            return GroupedAttentionSpec(*base, has_key_bias, self.softcap, self.has_sinks, has_output_gate=gated)
        if not self.index_heads:
            return LatentAttentionSpec(*base, nope_dim=self.nope_dim, value_dim=self.value_dim)
        return SparseAttentionSpec(
            *base,
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
            index_heads=self.index_heads,
            index_top_k=self.index_top_k,
            index_turns_neighbours=self.index_turns_neighbours,
        )

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class StepShape(NamedTuple):
    """The largest step that scratch is planned for."""

    num_rows: int
    num_logit_rows: int
    max_model_len: int
    dtype: str
    device_kind: str = "cpu"
    recipe: WeightRecipe = AS_STORED
    """Which weights are quantized. Some schemes quantize the inputs of products too, which needs scratch."""


class Declaration(Protocol):
    """One kind of model. Each method answers for the mesh's rank."""

    def rope_pairs(self, mesh: Mesh) -> int:
        """Return a step's columns of cos per token, for all rotations of its stage; 0 if positions are learned."""
        ...

    def indivisible(self, mesh: Mesh) -> str | None:
        """Return None, or what the ranks do not divide; equal on all ranks."""
        ...

    def weights(self, mesh: Mesh) -> tuple[Weight, ...]:
        """List every tensor of one rank."""
        ...

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        """Return None, or why the cache cannot be kept in that format."""
        ...

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        """List what grows with the tokens of a sequence."""
        ...

    def sequence_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        """Return the bytes of a sequence that do not depend on its length."""
        ...

    def heads(self, mesh: Mesh) -> HeadGeometry | None:
        """Return keys and values by head, or latents; None if the cache keeps something else."""
        ...

    def room_elements(self, mesh: Mesh, num_rows: int) -> int:
        """Return the elements of the largest part of a step that ranks exchange; 0 if none of them share layers."""
        ...

    def requests(self, step: StepShape, mesh: Mesh, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        """List a step's workspace; `scratch` is what an attention backend needs beside queries and outputs."""
        ...


def split(size: int, num_ranks: int, what: str) -> str | None:
    """Return None if `size` divides into equal parts, else the reason."""
    return None if size % num_ranks == 0 else f"{size} {what} do not divide into {num_ranks} equal parts"


def needed(settings: Settings, key: str, high: int) -> int:
    """Read a whole number that a plan cannot do without."""
    if settings.values.get(key) is None:
        raise settings.missing(key, "a plan would be a guess without it")
    return settings.count(key, 1, high)


def rank_experts(experts: ExpertsSpec, mesh: Mesh) -> ExpertsSpec:
    """Return the experts as a rank computes them: a slice of each one's inner width, or whole ones."""
    experts = replace(experts, shared_size=experts.shared_size // mesh.tensor_size)
    if mesh.expert_size == 1:
        return replace(experts, intermediate_size=experts.intermediate_size // mesh.tensor_size)
    count = experts.num_experts // mesh.expert_size
    return replace(experts, first_local=mesh.expert_rank * count, num_local=count)


def indivisible_experts(experts: ExpertsSpec, mesh: Mesh) -> str | None:
    """Return None, or which width or number of experts the ranks do not divide."""
    if mesh.expert_size > 1:
        reason = split(experts.num_experts, mesh.expert_size, "experts")
    else:
        reason = split(experts.intermediate_size, mesh.tensor_size, "columns of an expert")
    return reason or split(experts.shared_size, mesh.tensor_size, "columns of the shared experts")
