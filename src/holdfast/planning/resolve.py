"""PlanRequest and Resolved: every open setting settled, with a reason, and how a rank stores the model; no torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.compressed import compressed_cache
from holdfast.cache.groups import CacheGroup, block_tokens, tokens_again, unrewindable
from holdfast.cache.near import FIRST_TOKENS
from holdfast.cache.places import PlaceKind
from holdfast.cache.spec import CacheSpec, LayerCache, kv_padding_term, mixed_cache
from holdfast.config import AUTO_EMBEDDINGS, NGRAM, NO_TOKENIZER, EngineConfig, Limits, parse_speculative
from holdfast.distributed.exchange_plan import ExchangeKind, find_exchange, planned_nodes
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError
from holdfast.families.grouped.declarations import declined_lane
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec
from holdfast.families.state.spec import StateLayers
from holdfast.memory.planner import Term
from holdfast.memory.sizes import format_bytes, parse_bytes
from holdfast.models.declaration import HeadGeometry
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.declared_weights import BEFORE
from holdfast.models.packed_rows import PackedAccount
from holdfast.planning.exactness import refuse_inequality, refuse_variant_weights
from holdfast.planning.protected_layers import ProtectedLayers, choose_protected, listed
from holdfast.planning.snapshots import choose_snapshots
from holdfast.planning.target import Target
from holdfast.quant.formats import (
    DEFAULT_NEAR_TOKENS,
    KVFormat,
    index_dtype_beside,
)
from holdfast.quant.weight_schemes import HEAD_SCHEME, WEIGHT_SCHEMES, PackedPolicy, WeightRecipe, WeightScheme

CPU_KV_BYTES = 1024**3
KV_IS_GIVEN = "kv_cache_memory"
"""Reason of a bound on KV pages that the user gave. Our own bound gives way if one sequence needs more."""
DEFAULT_UTILIZATION = 0.9
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
WINDOW_SHARE = 10
"""Unless max_num_seqs is given, 1/10 of the memory is for per-sequence storage of fixed size."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
PAGE_TOKENS = 16
QUANTIZED_PAGE_TOKENS = 64
"""Kernels over quantized pages load a tile of tokens of one head, which is contiguous if a page is a tile."""
LATENT_PAGE_TOKENS = 64
"""Latents (MLA) have wide rows, and a tile of them fills a program's shared memory."""
COMPRESSED_PAGE_TOKENS = 16
"""Rows of a page of compressed attention: one row stands for up to 128 tokens, and prefixes are cached by whole pages."""
FP8_PRODUCTS = (8, 9)
"""The lowest compute capability with e4m3 products."""
SHORTER_STEPS = (2048, 512)
"""Default tokens of a step, in turn, if near rows of longer steps would cut the context."""
SPECULATED_ROWS = 128
"""Sampled rows of a step with draft tokens, unless there are more sequences: beyond, compute costs more than reading weights."""
AGREED_CONTEXT = "what fits on every rank"


class Choice(NamedTuple):
    """One setting that was left open, its value, and why."""

    name: str
    value: str
    reason: str


class Agreed(NamedTuple):
    """What all ranks of one engine have in common, before any of them reads a weight."""

    max_model_len: int
    num_pages: int | None = None
    """None: not settled yet."""
    exchange: ExchangeKind | None = None
    """None: as for ranks that are spread evenly over the nodes of the config."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Input of the plan of one rank."""

    config: EngineConfig
    declared: DeclaredModel
    target: Target
    mesh: Mesh = ALONE
    """The rank's place; the parallel sizes of the config are for planning all ranks."""
    staging: "Callable[[Resolved], Term | None] | Term | None" = None
    """Memory that loading holds beside the weights, or a function that returns it; None: the most that loading may hold."""
    agreed: Agreed | None = None
    """None: plan this rank by itself."""
    exchange: ExchangeKind | None = None
    """How ranks exchange, if already known."""
    kv_reason: str = ""
    """Why kv_quality chose this kv_cache_dtype; empty if it did not."""

    @property
    def tensor_parallel_size(self) -> int:
        return self.mesh.tensor_size

    @property
    def exchange_kind(self) -> ExchangeKind:
        """What the ranks agreed on; for devices that are not here, what the config implies."""
        known = self.exchange or (None if self.agreed is None else self.agreed.exchange)
        nodes = planned_nodes(self.mesh.num_ranks, self.config.nnodes)
        return known or find_exchange(self.target.kind, nodes, self.mesh.tensor_size)


class Pages(NamedTuple):
    """How a model's pages are laid out."""

    cache: CacheSpec
    page_bytes: int
    groups: tuple[CacheGroup, ...]
    padding: Term
    """Bytes between planes; what groups leave of a page is part of `page_bytes`."""
    states: tuple[PlaceKind, ...] = ()
    """States of sequences beside their pages."""

    @classmethod
    def of(cls, cache: CacheSpec, states: tuple[PlaceKind, ...] = ()) -> "Pages":
        return cls(cache, cache.bytes_per_page, cache.cache_groups(), kv_padding_term(cache), states)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request with every setting settled, and the resulting storage of one rank."""

    request: PlanRequest
    dtype: str
    recipe: WeightRecipe
    kv_format: KVFormat
    """The format of all layers except the protected ones."""
    protected: ProtectedLayers
    limits: Limits
    may_shorten: bool
    """max_model_len was left open, so it may shrink to what fits."""
    budget_bytes: int
    budget_reason: str
    max_kv_bytes: int | None
    """Bound on KV pages beside the budget."""
    max_kv_reason: str
    choices: tuple[Choice, ...]
    num_proposals: int = 0
    """Most draft tokens of a sequence in a step."""
    staging: Term | None = None
    near_tokens: int = 0
    """Tokens of the newest block, which is kept exact beside quantized pages, as the first tokens are; 0: none."""
    key_scale: bool = False
    """Rotated keys are scaled by pair before they are quantized."""
    num_snapshots: int = 0
    """Snapshots of states that the prefix cache keeps."""
    may_add_snapshots: bool = False
    """Their number was left open, so it may grow with the pages."""

    @property
    def mesh(self) -> Mesh:
        return self.request.mesh

    @property
    def declared(self) -> DeclaredModel:
        return self.request.declared

    @property
    def target(self) -> Target:
        return self.request.target

    @property
    def device(self) -> str:
        return self.request.target.name

    @property
    def enforce_eager(self) -> bool:
        """Never capture graphs: by the option, or because the reference multiplies packed weights, which allocates.

        Tiles of packed experts take half precision.
        """
        account = self.packed_account
        is_slow = bool(account.by_reference) or (self.dtype == "float32" and account.num_kept > 0)
        by_reference = self.target.kind == "cuda" and is_slow
        return self.request.config.enforce_eager or by_reference

    @property
    def packed_account(self) -> PackedAccount:
        return self.declared.packed_account(self.recipe)

    @property
    def is_invariant(self) -> bool:
        """batch_invariant: cuBLAS gets no workspace to split products along K."""
        return self.request.config.batch_invariant

    @property
    def exchange_kind(self) -> ExchangeKind:
        return self.request.exchange_kind

    def with_max_model_len(self, max_model_len: int, reason: str) -> "Resolved":
        limits = replace(self.limits, max_model_len=max_model_len)
        choice = Choice("max_model_len", str(max_model_len), reason)
        return replace(self, limits=limits, choices=self._with_choice(choice)).with_near_choice()

    def with_shorter_steps(self) -> Iterator["Resolved"]:
        """Yield this with fewer tokens a step, if they are open. All near rows of a step are on pages, in the type of the model."""
        config, limits = self.request.config, self.limits
        if not self.near_tokens or config.max_num_batched_tokens is not None or self.mesh.num_ranks > 1:
            return
        for tokens in SHORTER_STEPS:
            if limits.sampled_rows <= tokens < limits.max_num_batched_tokens:
                reason = f"longer steps, whose rows are in {self.dtype} while they run, would leave less context"
                choice = Choice("max_num_batched_tokens", str(tokens), reason)
                shorter = replace(limits, max_num_batched_tokens=tokens)
                yield replace(self, limits=shorter, choices=self._with_choice(choice))

    def with_near_choice(self) -> "Resolved":
        """Note what near pages cost a sequence, whatever its length."""
        pages, value = self.pages() if self.near_tokens else None, self.near_tokens
        if pages is None:
            return self
        if self.lacks_near and self.request.config.kv_near_tokens is not None:
            values = {"value": value, "page_tokens": self.limits.page_tokens, "dtype": self.dtype}
            raise ConfigError("plan.near_page_too_small", name="kv_near_tokens", **values)
        if pages.cache.near is None:
            choice = Choice("kv_near_tokens", "0", f"{value} has no effect: no layer's pages are quantized")
            return replace(self, near_tokens=0, choices=self._with_choice(choice))
        num_bytes = self.near_bytes()
        why = f"the default of {self.kv_format.name}" if self.request.config.kv_near_tokens is None else "given"
        reason = f"{why}: {self.near_which()} stay in {self.dtype} too, which takes up to {format_bytes(num_bytes)} a sequence"
        return replace(self, choices=self._with_choice(Choice("kv_near_tokens", str(value), reason)))

    def with_protected(self, protected: ProtectedLayers) -> "Resolved":
        choice = Choice("kv_protected_layers", listed(protected.layers), protected.reason)
        return replace(self, protected=protected, choices=self._with_choice(choice))

    def with_snapshots(self, count: int, reason: str) -> "Resolved":
        choice = Choice("state_snapshots", str(count), reason)
        return replace(self, num_snapshots=count, choices=self._with_choice(choice))

    def with_mesh(self, mesh: Mesh) -> "Resolved":
        return replace(self, request=replace(self.request, mesh=mesh))

    def _with_choice(self, choice: Choice) -> tuple[Choice, ...]:
        return (*(other for other in self.choices if other.name != choice.name), choice)

    def request_with(self, **options: Any) -> PlanRequest:  # noqa: ANN401 values of options
        """Return the request with other options. Staging is not computed again."""
        return replace(self.request, config=replace(self.request.config, **options), staging=self.staging)

    @property
    def all_layers(self) -> "Resolved":
        """This rank's share of the layers of all stages, which determine cache groups and the backend."""
        return self if self.mesh.layers is None else self.with_mesh(self.mesh.all_layers)

    @property
    def lacks_near(self) -> bool:
        """True if quantized pages are too small for a near token of every layer."""
        pages = self.pages() if self.near_tokens else None
        is_quantized = pages is not None and any(layer.format.is_quantized for layer in pages.cache.layers)
        return is_quantized and pages is not None and pages.cache.near is None

    def near_which(self) -> str:
        """Name the tokens that stay exact."""
        pages, newest = self.pages(), f"the newest block of {self.near_tokens} tokens"
        has_first = pages is not None and pages.groups[-1].kept_pages > 0
        return f"the first {FIRST_TOKENS} tokens and {newest}" if has_first else newest

    def near_bytes(self) -> int:
        """Most bytes of near pages that a sequence holds."""
        pages = self.pages() if self.near_tokens else None
        return 0 if pages is None else pages.groups[-1].most_held(1) * pages.page_bytes

    @property
    def layers(self) -> range:
        """The layers of this stage."""
        return self.mesh.layer_range(self.declared.num_layers)

    def heads(self) -> HeadGeometry | None:
        return self.declared.remembered(("heads", self.mesh), lambda: self.declared.declaration.heads(self.mesh))

    def stored_key(self) -> tuple[object, ...]:
        """Key of what this stage's layers store, except windows that contexts exceed."""
        protected = self.protected
        own = self.kv_format, protected.format, protected.layers, self.limits.page_tokens, self.mesh
        return (*own, self.near_tokens, self.dtype) if self.near_tokens else own

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers of this stage whose tokens are on pages, counted from its first."""
        heads = self.heads()
        return tuple(range(len(self.layers))) if heads is None else heads.paged_layers

    def formats(self) -> tuple[KVFormat, ...]:
        """The KV format of each of `paged_layers`."""
        by_layer, first = self.protected.formats(self.kv_format, self.declared.num_layers), self.layers.start
        return tuple([by_layer[first + layer] for layer in self.paged_layers])

    def bytes_per_token(self) -> Fraction:
        """KV bytes in all layers of this stage. Layers of mixed formats have the same heads, so only their counts matter."""
        num_protected = sum(layer in self.layers for layer in self.protected.layers)
        token_bytes = self.declared.kv_bytes_per_token(self.kv_format, self.mesh)
        if not num_protected:
            return token_bytes
        wider_bytes = self.declared.kv_bytes_per_token(self.protected.format, self.mesh)
        return token_bytes + (wider_bytes - token_bytes) * num_protected / len(self.paged_layers)

    def page_bytes(self) -> int:
        """Bytes of a page of the pool, rounded up if a row stands for several tokens."""
        pages = self.pages()
        return math.ceil(self.limits.page_tokens * self.bytes_per_token()) if pages is None else pages.page_bytes

    def pages(self) -> Pages | None:
        """Return the page layout; None if the model stores something else. Few context lengths change it, so it is cached."""
        heads, limits = self.all_layers.heads(), self.limits
        if heads is None:
            return None
        outgrown = frozenset(w for w in set(heads.windows) if w is not None and w < limits.max_model_len)

        def make() -> Pages:
            if self.mesh.num_stages > 1:
                whole = self.all_layers.pages()
                assert whole is not None, f"{self.declared.name} has heads and no cache"
                own = self.heads()
                assert own is not None, f"{self.declared.name} has heads in some stages only"
                return Pages.of(whole.cache.for_stage(self.layers), own.place_kinds(self.dtype))
            states = heads.place_kinds(self.dtype)
            if heads.is_compressed:
                return Pages.of(compressed_pages(heads, self.formats(), limits.page_tokens), states)
            shape = heads.num_kv_heads, heads.head_dim, limits.page_tokens
            latent = heads.rope_dim, heads.index_dim, heads.shared_layers
            layers = heads.paged_layers
            windows = [heads.windows[layer] for layer in layers]
            numbers = () if heads.state is None else layers
            cache = mixed_cache(self.formats(), *shape, windows, limits.max_model_len, *latent, numbers)
            return Pages.of(self._with_near(cache, heads), states)

        return self.declared.remembered(("pages", *self.stored_key(), self.dtype, outgrown), make)

    def _with_near(self, cache: CacheSpec, heads: HeadGeometry) -> CacheSpec:
        """Add near pages of the layers whose pages are quantized, if there are any."""
        layers = [place for place, own in enumerate(cache.layers) if own.format.is_quantized]
        if not self.near_tokens or not layers:
            return cache
        first_tokens = max(_first_tokens(heads.windows[cache.layers[place].layer]) for place in layers)
        found = cache.with_near(layers, self.near_tokens, first_tokens, self.dtype)
        return cache if found is None else found

    def _near_spec(self, layer: LayerCache, heads: HeadGeometry) -> NearSpec | None:
        """Return what a layer keeps exact beside its own pages."""
        pages = self.pages()
        near = None if pages is None else pages.cache.near
        if near is None or pages is None or not layer.format.is_quantized:
            return None
        first_tokens = _first_tokens(heads.windows[layer.layer])
        return NearSpec(self.near_tokens, len(pages.groups) - 1, near.page_tokens, first_tokens)

    def sequence_pages(self, max_step_tokens: int) -> int:
        """Most pages of one sequence of the longest context, in steps of at most so many tokens."""
        limits, pages = self.limits, self.pages()
        if pages is None:
            return -(-limits.max_model_len // limits.page_tokens)
        return sum(group.most_pages(limits.max_model_len, max_step_tokens) for group in pages.groups)

    def most_pages(self) -> int:
        """Most pages that all sequences of a full engine hold at once."""
        limits, pages = self.limits, self.pages()
        most = limits.max_num_seqs * self.sequence_pages(limits.max_num_batched_tokens)
        if pages is None or pages.cache.near is None:
            return most
        windows = [group for group in pages.groups if group.window is not None]
        held = limits.max_num_seqs * (self.sequence_pages(1) + len(windows))
        # Rows of two steps, one of them in flight, are shared by all sequences; each may round up by a page of a group.
        return min(most, held + 2 * sum(group.pages_for(limits.max_num_batched_tokens) for group in windows))

    def attention_spec(self, layer: LayerCache, heads: HeadGeometry, group: int = 0) -> AttentionSpec:
        spec = heads.attention_spec(layer, group, self.limits.max_model_len, self.dtype, self.target.kind)
        if not isinstance(spec, GroupedAttentionSpec):
            return spec
        near = self._near_spec(layer, heads) if self.near_tokens else None
        has_lane = declined_lane(spec, self.target.capability, self.is_invariant) is None
        return replace(spec, near=near, has_lane=has_lane)

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of every layer; empty if the model stores something else."""
        pages, heads = self.pages(), self.heads()
        if pages is None or heads is None:
            return ()
        if heads.is_compressed:
            return heads.compressed_specs(pages.cache, self.limits.max_model_len, self.dtype, self.target.kind)
        rows = pages.cache.row_groups
        group_of = {place: index for index, group in enumerate(rows) for place in group.layers}
        return tuple(self.attention_spec(own, heads, group_of[place]) for place, own in enumerate(pages.cache.layers))

    def state_layers(self) -> StateLayers | None:
        """The layers of this stage that keep a state; None: none do."""
        heads = self.heads()
        if heads is None or heads.state is None:
            return None
        return StateLayers(heads.state, self.dtype, self.target.kind, self.num_proposals)


def resolve(request: PlanRequest) -> Resolved:
    """Settle every open setting of a request, whatever the memory. Raises if no plan is possible."""
    config, model, target, mesh = request.config, request.declared, request.target, request.mesh
    model.check_ranks(mesh)
    choices: list[Choice] = []
    dtype, reason = choose_dtype(config, model.checkpoint_dtype, target.kind)
    if reason:
        choices.append(Choice("dtype", dtype, reason))
    recipe, recipe_choices = choose_recipe(config, model, target)
    choices += recipe_choices
    model.check_blocks(mesh, recipe)
    if config.kv_quality is not None:
        raise ConfigError("plan.kv_quality_ranks", name="kv_quality", value=config.kv_quality)
    kv_format = _choose_kv_format(request, dtype, choices)
    page_tokens = _page_tokens(config, model, kv_format, choices)
    near_tokens = _choose_near(config, model, kv_format, choices)
    protected = choose_protected(config, model, kv_format, dtype, near_tokens, page_tokens)
    if protected.reason:
        choices.append(Choice("kv_protected_layers", str(len(protected.layers)), protected.reason))
    key_scale = config.kv_key_scale and _can_scale_keys(request, kv_format, protected)
    limits = _limits(config, model, target.kind, page_tokens, choices)
    budget_bytes, budget_reason, max_kv_bytes, max_kv_reason = _budget(config, target)
    choices.append(Choice("memory", format_bytes(budget_bytes), budget_reason))
    if config.max_num_seqs is None:
        limits = _fewer_windows(limits, model.kv_bytes_per_sequence(kv_format), budget_bytes, choices)
    snapshots = choose_snapshots(config, model, model.declaration.heads(ALONE), limits, mesh)
    if snapshots.reason:
        choices.append(Choice("state_snapshots", str(snapshots.number), snapshots.reason))
    num_proposals = parse_speculative(config.speculative)
    if num_proposals:
        limits = _with_proposals(limits, num_proposals, model, kv_format, choices)
    refuse_variant_weights(config, recipe, target)
    refuse_inequality(config, model, limits.max_num_batched_tokens, target, mesh)
    budget = budget_bytes, budget_reason, max_kv_bytes, max_kv_reason
    is_open = config.max_model_len is None and request.agreed is None
    settings = dtype, recipe, kv_format, protected, limits, is_open, *budget, tuple(choices), num_proposals
    is_growing = snapshots.is_open and request.agreed is None
    own = near_tokens, key_scale, snapshots.number, is_growing
    resolved = Resolved(request, *settings, None, *own)
    if config.kv_near_tokens is None and resolved.lacks_near:
        without = resolve(replace(request, config=replace(config, kv_near_tokens=0)))
        reason = f"pages of {page_tokens} tokens hold no near token of every layer"
        return replace(without, choices=(*without.choices, Choice("kv_near_tokens", "0", reason)))
    # Staging is counted for the settings as they are before ranks agree on a context.
    staging = request.staging(resolved) if callable(request.staging) else request.staging
    resolved = replace(resolved, staging=staging)
    if request.agreed is not None and request.agreed.max_model_len != limits.max_model_len:
        resolved = resolved.with_max_model_len(request.agreed.max_model_len, AGREED_CONTEXT)
    resolved = resolved.with_near_choice()
    pages = resolved.pages() if num_proposals else None
    if pages is not None and (problem := unrewindable(pages.groups)) is not None:
        raise ConfigError("plan.no_draft_tokens", name="speculative", value=config.speculative, reason=problem)
    return resolved


def _choose_kv_format(request: PlanRequest, dtype: str, choices: list[Choice]) -> KVFormat:
    """Return the format of the KV pages, with that of the index beside latents if the model has one."""
    config, model = request.config, request.declared
    kv_format = model.check_format(dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    if request.kv_reason:
        choices.append(Choice("kv_cache_dtype", kv_format.name, request.kv_reason))
    elif config.kv_cache_dtype == "auto":
        choices.append(Choice("kv_cache_dtype", dtype, "the same as dtype"))
    elif kv_format.name not in (config.kv_cache_dtype, dtype):
        what = "tokens and entries that all heads share" if model.is_compressed else "latents (MLA)"
        choices.append(Choice("kv_cache_dtype", kv_format.name, f"what {config.kv_cache_dtype} is of {what}"))
    heads, index_dtype = model.declaration.heads(ALONE), config.index_cache_dtype
    if heads is None or not heads.index_dim:
        if index_dtype != "auto":
            raise ConfigError("plan.no_index", name="index_cache_dtype", value=index_dtype, model=model.name)
        return kv_format
    if index_dtype == "auto":
        index_dtype = index_dtype_beside(kv_format)
        what = "entries" if model.is_compressed else "latents"
        reason = f"{what} are quantized too" if kv_format.is_quantized else f"as {what} are"
        choices.append(Choice("index_cache_dtype", index_dtype, reason))
    return replace(kv_format, index_dtype=index_dtype)


def _choose_near(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, choices: list[Choice]) -> int:
    """Return the tokens of a block that is kept exact beside quantized pages; 0 if there are none."""
    value, heads = config.kv_near_tokens, model.declaration.heads(ALONE)
    has_heads = heads is not None and not heads.is_compressed and not heads.rope_dim
    if value is None:
        return DEFAULT_NEAR_TOKENS.get(kv_format.name, 0) if has_heads else 0
    if not value:
        return 0
    if not has_heads:
        raise ConfigError("plan.near_needs_heads", name="kv_near_tokens", value=value, model=model.name)
    if not kv_format.is_quantized:
        choices.append(Choice("kv_near_tokens", "0", f"{value} has no effect: pages are not quantized"))
        return 0
    return value


def _can_scale_keys(request: PlanRequest, kv_format: KVFormat, protected: ProtectedLayers) -> bool:
    """Return True if some layer codes keys by head, a text can be read, and each rank has all queries of its key heads."""
    heads = request.declared.declaration.heads(ALONE)
    if heads is None or heads.is_compressed or heads.rope_dim or request.config.tokenizer == NO_TOKENIZER:
        return False
    formats = protected.formats(kv_format, request.declared.num_layers)
    return any(one.rotates_keys for one in set(formats)) and request.mesh.tensor_size <= heads.num_kv_heads


def _first_tokens(window: int | None) -> int:
    """Return the tokens at the start that a layer with near pages sees exact."""
    return FIRST_TOKENS if window is None else 0


def choose_dtype(config: EngineConfig, checkpoint_dtype: str, kind: str) -> tuple[str, str]:
    """Return the compute type and the reason, which is empty if the user gave the type."""
    if config.dtype != "auto":
        return config.dtype, ""
    if kind == "cpu":
        return "float32", "the fastest exact type on a CPU"
    if checkpoint_dtype in ("float16", "bfloat16"):
        return checkpoint_dtype, "the checkpoint's own"
    return "bfloat16", f"the checkpoint is {checkpoint_dtype}, and half of that serves on a GPU"


def _page_tokens(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, choices: list[Choice]) -> int:
    heads = model.declaration.heads(ALONE)
    if heads is not None and heads.is_compressed:
        return _compressed_page_tokens(config, heads, kv_format, choices)
    if config.page_tokens is not None:
        return config.page_tokens
    if model.keeps_latents:
        tokens, what = LATENT_PAGE_TOKENS, "latents"
    elif kv_format.is_quantized and heads is not None:
        tokens, what = QUANTIZED_PAGE_TOKENS, "quantized pages"
    else:
        return PAGE_TOKENS
    choices.append(Choice("page_tokens", str(tokens), f"attention over {what} works in tiles of {tokens} tokens"))
    return tokens


def _compressed_page_tokens(
    config: EngineConfig, heads: HeadGeometry, kv_format: KVFormat, choices: list[Choice]
) -> int:
    """Return the rows of a page of compressed attention, and note the block size of the prefix cache."""
    rows = config.page_tokens or COMPRESSED_PAGE_TOKENS
    if config.page_tokens is None:
        longest = max(heads.ratios, default=0)
        reason = f"rows, of which one stands for up to {longest} tokens" if longest else "the default"
        choices.append(Choice("page_tokens", str(rows), reason))
    groups = compressed_pages(heads, (kv_format,) * len(heads.ratios), rows).cache_groups()
    again = tokens_again(groups)
    block = block_tokens(groups)
    reason = "whole rows of every cache group"
    if any(group.page_tokens > block for group in groups):
        reason += "; a prefix that ends inside a longer page gets a copy of it"
    if again:
        reason += f"; the last {again} tokens of a prefix that is found are computed again, to make states of them"
    choices.append(Choice("prefix block", f"{block} tokens", reason))
    return rows


def compressed_pages(heads: HeadGeometry, formats: Sequence[KVFormat], page_tokens: int) -> CacheSpec:
    """Return the pages of windows and entries."""
    (window,) = set(heads.windows)
    assert window is not None, "compressed attention has a window in every layer"
    ratios = heads.ratios, heads.overlapped_layers
    return compressed_cache(formats, heads.head_dim, heads.rope_dim, window, *ratios, heads.index_dim, page_tokens)


def _limits(config: EngineConfig, model: DeclaredModel, kind: str, page_tokens: int, choices: list[Choice]) -> Limits:
    max_model_len, longest = config.max_model_len, model.max_position
    if max_model_len is None:
        max_model_len = longest
        choices.append(Choice("max_model_len", str(max_model_len), "what the model was made for"))
    elif max_model_len > longest:
        if model.has_learned_positions:
            raise ConfigError("value.too_large", name="max_model_len", value=max_model_len, maximum=longest)
        choices.append(Choice("max_model_len", str(max_model_len), f"given, beyond the model's {longest}"))
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[kind]
    max_num_batched_tokens = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[kind]
    return Limits(max_num_seqs, max_num_batched_tokens, max_model_len, page_tokens)


def _fewer_windows(limits: Limits, sequence_bytes: int, budget_bytes: int, choices: list[Choice]) -> Limits:
    """Lower max_num_seqs so that windows and states of all sequences take at most their share of the memory."""
    share_bytes = budget_bytes // WINDOW_SHARE
    if limits.max_num_seqs * sequence_bytes <= share_bytes:
        return limits
    fewer = 2 ** (max(1, share_bytes // sequence_bytes).bit_length() - 1)
    reason = f"a sequence keeps {format_bytes(sequence_bytes)} in windows and states, which get 1/{WINDOW_SHARE} of the memory"
    choices.append(Choice("max_num_seqs", str(fewer), reason))
    return replace(limits, max_num_seqs=fewer)


def _with_proposals(
    limits: Limits, num_proposals: int, model: DeclaredModel, kv_format: KVFormat, choices: list[Choice]
) -> Limits:
    """Allow more sampled rows: up to SPECULATED_ROWS, or one a sequence if that is more."""
    value, most, needed = f"{NGRAM}:{num_proposals}", limits.max_num_batched_tokens, 1 + num_proposals
    reason = _unrewindable(model, kv_format)
    if reason is not None:
        raise ConfigError("plan.no_draft_tokens", name="speculative", value=value, reason=reason)
    if most <= num_proposals:
        raise ConfigError("plan.few_batched_tokens", name="speculative", value=value, needed=needed, maximum=most)
    rows = min(limits.max_num_seqs * needed, max(limits.max_num_seqs, SPECULATED_ROWS), most)
    reason = f"given: up to {num_proposals} tokens more a sequence in a step, checked in {rows} rows of logits together"
    choices.append(Choice("speculative", value, reason))
    return replace(limits, max_sampled_rows=rows)


def _unrewindable(model: DeclaredModel, kv_format: KVFormat) -> str | None:
    """Return why a model cannot drop a rejected draft token; None if it can."""
    if model.not_runnable is not None:
        return f"{model.name} is planned, not run: {model.not_runnable}"
    heads = model.declaration.heads(ALONE)
    if model.kv_bytes_per_sequence(kv_format) and (heads is None or heads.state is None):
        return f"{model.name} keeps sums of a sequence's tokens, which cannot drop a rejected one"
    for rows in model.declaration.cache_rows(kv_format, ALONE):
        if rows.ratio > 1:
            return f"{model.name} keeps one row for {rows.ratio} tokens ({rows.name}), which cannot drop one of them"
    return None


def _budget(config: EngineConfig, target: Target) -> tuple[int, str, int | None, str]:
    """Return the bytes for everything with their reason, and a bound on KV pages alone with its reason."""
    limit = None if config.memory_limit is None else parse_bytes(config.memory_limit, "memory_limit")
    share = config.memory_utilization or DEFAULT_UTILIZATION
    max_kv, kv_reason = None, ""
    if config.kv_cache_memory is not None:
        max_kv, kv_reason = parse_bytes(config.kv_cache_memory, "kv_cache_memory"), KV_IS_GIVEN
    if target.kind == "cuda":
        wanted = int(target.total_bytes * share) if limit is None else limit
        reason = f"{100 * share:g}% of the device's {format_bytes(target.total_bytes)}"
        reason = reason if limit is None else "memory_limit"
        if wanted <= target.available_bytes:
            return wanted, reason, max_kv, kv_reason
        return target.available_bytes, _bounded_reason(target, reason), max_kv, kv_reason
    reason = f"{100 * share:g}% of {format_bytes(target.available_bytes)} available"
    if limit is not None and limit <= target.available_bytes:
        return limit, "memory_limit", max_kv, kv_reason
    if limit is not None:
        reason = f"{reason}, less than memory_limit"  # a host that gives its last page kills a process silently
    elif config.memory_utilization is None and max_kv is None:
        max_kv, kv_reason = CPU_KV_BYTES, f"{format_bytes(CPU_KV_BYTES)} on a CPU, unless an option sets more"
    return int(target.available_bytes * share), reason, max_kv, kv_reason


def _bounded_reason(target: Target, wanted: str) -> str:
    total = format_bytes(target.total_bytes)
    if target.held_by_others_bytes == 0:
        return f"all of the device's {total}, less than {wanted}"
    return f"what others leave: they hold {format_bytes(target.held_by_others_bytes)} of the device's {total}"


def choose_recipe(
    config: EngineConfig, model: DeclaredModel, target: Target
) -> tuple[WeightRecipe, tuple[Choice, ...]]:
    """Return the recipe of a load, and the choices worth reporting. Raises if it is impossible."""
    recipe = config.recipe
    if config.quantized_embeddings == AUTO_EMBEDDINGS:
        recipe = with_stored_embedding(recipe, model)
    if model.stored_recipe is not None:
        return _as_stored(recipe, model.stored_recipe, model, target)
    if recipe.scheme is None:
        recipe, packed = choose_packed(recipe, config, model, target)
        if recipe.embeddings == WeightRecipe().embeddings:
            return recipe, packed
        reason = "given, but nothing is quantized without quantization"
        return recipe, (*packed, Choice("quantized_embeddings", recipe.embeddings, reason))
    scheme = recipe.scheme.name
    declined = unsupported_scheme(recipe.scheme, target)
    if declined is not None:
        values = {"name": "quantization", "value": scheme, "reason": declined, "accepted": _works_on(target)}
        raise ConfigError("plan.scheme_needs_newer_gpu", **values)
    found = model.review_recipe(recipe)
    if found.num_quantized == 0:
        reason = "given, but no weight is quantized: quantization_ignore covers them all"
    else:
        reason = f"given: {found.num_quantized} of {found.num_weights} weights are quantized as they load"
    choices = [Choice("quantization", scheme, reason)]
    if recipe.embeddings != config.recipe.embeddings and model.on_disk is not None:
        reason = (
            f"the file stores the embedding as {model.on_disk.embedding_type}; it is {HEAD_SCHEME.name} by rows here"
        )
        choices.append(Choice("quantized_embeddings", recipe.embeddings, reason))
    idle = "given, but what it matches is never quantized"
    return recipe, (*choices, *(Choice("quantization_ignore", pattern, idle) for pattern in found.idle))


def choose_packed(
    recipe: WeightRecipe, config: EngineConfig, model: DeclaredModel, target: Target
) -> tuple[WeightRecipe, tuple[Choice, ...]]:
    """Settle which weights stay packed as the checkpoint stores them, and say why others are expanded."""
    if not model.packed:
        return recipe, ()
    keeps = {None: "with_kernel", "as_stored": "all", "expanded": "none"}[config.packed_weights]
    recipe = replace(recipe, packed=PackedPolicy(keeps, target.kind))  # type: ignore[arg-type]  # one of its values
    account = model.packed_account(recipe)
    if config.packed_weights is not None:
        weights = Choice("packed_weights", config.packed_weights, f"given: {account.summary}")
    else:
        weights = Choice("packed_weights", "as_stored" if account.num_kept else "expanded", account.summary)
    activations = choose_packed_activations(config, account)
    recipe = replace(recipe, packed=recipe.packed._replace(activations=activations.value))
    return recipe, (weights, activations) if activations.reason else (weights,)


def choose_packed_activations(config: EngineConfig, account: PackedAccount) -> Choice:
    """Choose the activations of products with packed weights; without a reason there is nothing to choose."""
    name, given = "packed_activations", config.packed_activations
    if not account.takes_int8:
        return Choice(name, "full", "given, but no kernel here takes 8-bit activations" if given == "int8" else "")
    if given != "auto":
        return Choice(name, given, "given")
    if config.dtype == "float32":
        return Choice(name, "full", "dtype=float32 is given")
    return Choice(name, "int8", "a CPU multiplies blocks of codes by 8-bit activations several times faster")


def with_stored_embedding(recipe: WeightRecipe, model: DeclaredModel) -> WeightRecipe:
    """Quantize the embedding too if the file stores it quantized and it is not tied to the head."""
    if recipe.scheme is None or model.on_disk is None or model.on_disk.embedding_type is None:
        return recipe
    if all(weight.kind != "embedding" for weight in model.parameters()):
        return recipe
    return replace(recipe, embeddings="all")


def _as_stored(
    given: WeightRecipe, stored: WeightRecipe, model: DeclaredModel, target: Target
) -> tuple[WeightRecipe, tuple[Choice, ...]]:
    """Keep a quantized checkpoint as it is. Its own scheme, if given, is for the weights that it left plain."""
    assert stored.scheme is not None, f"{model.name} is stored in no scheme"
    values = {"name": "quantization", "model": model.name, "stored": stored.scheme.name}
    declined = unsupported_scheme(stored.scheme, target)
    if declined is not None and model.not_runnable is None:
        raise ConfigError("plan.stored_needs_newer_gpu", **values, reason=declined, accepted=_works_on(target))
    if given.scheme is not None and given.scheme.name != stored.scheme.name:
        raise ConfigError("plan.already_quantized", **values, value=given.scheme.name, other=BEFORE)
    if given.scheme is not None and model.unread_pattern is not None:
        raise ConfigError("plan.unread_pattern", **values, value=given.scheme.name, pattern=model.unread_pattern)
    recipe = model.review_stored(given)
    reason = "the checkpoint's own" if given.scheme is None else "given, and the checkpoint's own"
    if stored.expert_scheme is not None:
        reason += f", with experts in {stored.expert_scheme.name}"
    num_more = len(stored.ignore) - len(recipe.ignore)
    if num_more:
        reason += f"; {num_more} of its plain weights {'is' if num_more == 1 else 'are'} quantized on load"
    return recipe, (Choice("quantization", stored.scheme.name, reason),)


def unsupported_scheme(scheme: WeightScheme, target: Target) -> str | None:
    """Return why a device cannot run products of a scheme; None if it can. A CPU runs all, through their references."""
    needs_fp8 = scheme.quantizes_activations and target.kind == "cuda"
    if not needs_fp8 or target.capability is None or target.capability >= FP8_PRODUCTS:
        return None
    major, minor = target.capability
    return f"{target.name} has compute capability {major}.{minor}, and products in fp8 need 8.9"


def _works_on(target: Target) -> str:
    return " or ".join(name for name, scheme in WEIGHT_SCHEMES.items() if unsupported_scheme(scheme, target) is None)
