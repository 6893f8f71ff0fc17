"""Everything a runner holds beside its pages, as terms of a plan: from shapes, by owner and phase; no torch.

`list_needs` puts them together; before it stand the terms that no other package declares. Inputs of a step: one buffer
each, and on a GPU the page table (block table). CUDA graphs: what the driver keeps for them. Sampling: on a CPU
temporaries of a step, in blocks of rows, so that they do not grow with the number of sequences; on a GPU buffers that are
taken once: kernels leave no temporaries, and only rows whose logits are edited are copied, a block at a time.

T rows of a step, N sequences, P pages of the longest one, U changed pages
"""

from collections import Counter
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from holdfast.attention.declarations import AttentionSpec, BackendDeclaration, StepBounds
from holdfast.cache.compressed import StateKind, state_terms
from holdfast.cache.groups import CacheGroup
from holdfast.cache.spec import CacheSpec, LayerCache, kv_padding_term, mixed_cache, uniform_cache
from holdfast.config import Limits
from holdfast.distributed.exchange_plan import (
    CHOICE_FIELDS,
    ExchangeKind,
    ExchangeNeeds,
    can_be_captured,
    exchange_terms,
)
from holdfast.distributed.mesh import Mesh
from holdfast.families.choose import choose_declaration
from holdfast.families.grouped.declarations import key_bias_terms, sink_terms
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.geometry import EDITS_PER_PROGRAM, MAX_LOGIT_ROWS, NUM_FIELDS, key_bias_spec, logit_scratch_specs
from holdfast.memory.devices import SPLIT_K_BYTES
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec, WorkspacePlan
from holdfast.models.activations import Request
from holdfast.models.declaration import HeadGeometry, StepShape
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.declared_weights import WeightGroup
from holdfast.planning.resolve import Resolved, compressed_pages
from holdfast.planning.target import TOKEN_BYTES, Target, tokenizer_bytes
from holdfast.quant.formats import DTYPE_BYTES, KVFormat
from holdfast.request.sampling_params import MAX_LOGPROBS

LISTED_PAGES = 16
"""Most new pages of one sequence that reach the device in a list; the list has room for as many of every sequence."""

ONE_GROUP = (1,)
"""Chunks of a page where all layers are one cache group."""

_BATCH_REASONS = {
    "token_ids": "one a row of a step",
    "positions": "one a row of a step",
    "slots": "one a row of a step",
    "states": "one a row of a step: the place of its sequence's state",
    "keep_slots": "one a row of a step: where the token that is chosen from it is kept",
    "logit_rows": "one a row of a step",
    "page_table": "pages of every sequence of a step, at its longest",
    "page_updates": f"what changed in the page table, up to {LISTED_PAGES} pages a sequence",
}


def batch_terms(
    limits: Limits,
    device_kind: str = "cpu",
    chunks_per_page: tuple[int, ...] = ONE_GROUP,
    tokens_per_row: tuple[int, ...] = (),
    has_states: bool = False,
) -> tuple[Term, ...]:
    """Bytes of the input buffers, and of the page tables where kernels read them; `device_kind` is cpu or cuda.

    `chunks_per_page` and `tokens_per_row`: of each cache group; the latter left out where it is 1 in all of them.
    """
    specs = input_specs(limits, len(chunks_per_page), device_kind, has_states)
    if device_kind != "cpu":
        for group, chunks in enumerate(chunks_per_page):
            specs += page_table_specs(limits, chunks, group, tokens_per_row[group] if tokens_per_row else 1)
    return tuple(map(input_term, specs))


def input_term(spec: TensorSpec) -> Term:
    """The line of one buffer in plan and ledger."""
    name, _, group = spec.name.partition(".")
    reason = _BATCH_REASONS[name]
    return Term(f"inputs/{spec.name}", spec.num_bytes, f"{reason}, of cache group {group}" if group else reason)


def input_specs(
    limits: Limits, num_groups: int = 1, device_kind: str = "cpu", has_states: bool = False
) -> tuple[TensorSpec, ...]:
    """The buffers with an entry a row. They lie one behind the other, and their length makes each begin aligned.

    On a CPU a step begins when the tokens of the last one are known, and none is kept for it.
    """
    per_unit = ALIGNMENT_BYTES // DTYPE_BYTES["int64"]
    shape_T = (-(-limits.max_num_batched_tokens // per_unit) * per_unit,)
    slots = (_of_group("slots", group) for group in range(num_groups))
    keep_slots = () if device_kind == "cpu" else ("keep_slots",)
    states = ("states",) if has_states else ()
    names = ("token_ids", "positions", *slots, *states, *keep_slots, "logit_rows")
    return tuple(TensorSpec(name, shape_T, "int64") for name in names)


def page_table_specs(
    limits: Limits, chunks_per_page: int = 1, group: int = 0, tokens_per_row: int = 1
) -> tuple[TensorSpec, TensorSpec]:
    """The table of a group, and the list of what changed in it: (place in the table, chunk) in each entry."""
    num_pages = -(-limits.max_model_len // (limits.page_tokens * chunks_per_page * tokens_per_row))
    shape_NP = (limits.max_num_seqs, num_pages * chunks_per_page)
    shape_U2 = (limits.max_num_seqs * listed_entries(chunks_per_page), 2)
    names = _of_group("page_table", group), _of_group("page_updates", group)
    return TensorSpec(names[0], shape_NP, "int32"), TensorSpec(names[1], shape_U2, "int64")


def listed_entries(chunks_per_page: int) -> int:
    """Most new entries of one sequence that reach the device in a list: at least those of one page."""
    return -(-max(LISTED_PAGES, chunks_per_page) // LISTED_PAGES) * LISTED_PAGES


def _of_group(name: str, group: int) -> str:
    return f"{name}.{group}" if group else name


MAX_GRAPH_ROWS = 1024
"""Sequences in the largest captured step; a larger one runs without a graph, where launches no longer count."""
TOKEN_BUCKETS = (64, 128, 256, 512)
PROPOSAL_BUCKETS = (8, 16, 32)
"""Rows of smaller mixed steps that are captured too where a sequence may bring several: those of few sequences with proposals."""
PRESENT_BYTES = 4 * 2**20
"""Of what the driver keeps for graphs, so much lies in memory that the context has already; measured on an H200."""
LEAST_BYTES = 2 * 2**20
"""The driver takes memory in pieces of this size. The graphs' own pool stays empty: steps work in the workspace."""
GRAPH_BYTES_PER_LAYER = 38_800
"""What the driver keeps on the device for one layer's kernels in one graph; measured on an H200."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of decode steps that are captured: close together where a padded row costs most."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    ladder = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_GRAPH_ROWS + 1, 32))
    sizes = [size for size in ladder if size <= largest]
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)


def mixed_sizes(max_num_batched_tokens: int, has_proposals: bool = False) -> tuple[int, ...]:
    """Rows of the captured steps in which some sequences have several: prompts, or proposals."""
    buckets = (*PROPOSAL_BUCKETS, *TOKEN_BUCKETS) if has_proposals else TOKEN_BUCKETS
    return tuple(size for size in buckets if size <= max_num_batched_tokens)


def graph_bytes(num_layers: int, num_graphs: int) -> int:
    """What so many graphs take together."""
    return max(LEAST_BYTES, num_graphs * num_layers * GRAPH_BYTES_PER_LAYER - PRESENT_BYTES)


def graph_term(num_layers: int, max_num_seqs: int, max_num_batched_tokens: int, has_proposals: bool = False) -> Term:
    """The line of the plan."""
    num_decode = len(graph_sizes(min(max_num_seqs, max_num_batched_tokens)))
    num_mixed = len(mixed_sizes(max_num_batched_tokens, has_proposals))
    reason = f"{num_decode} decode and {num_mixed} mixed sizes of {num_layers} layers, one pool"
    return Term("cuda graphs", graph_bytes(num_layers, num_decode + num_mixed), reason, PAGE_PHASES)


BLOCK_ELEMENTS = 2**22
"""Most logits in a block of rows on a CPU; a row that is longer is a block of its own."""
EDIT_ENTRIES = 2**16
"""Most single logits that are penalised, biased or banned at once on a CPU."""
NUM_BUCKETS = 2048
"""Histogram buckets of one round of the search for a cutoff on a CPU."""
MAX_NARROW_TOP_K = 256
"""Up to this top_k a row is sampled from its sorted candidates on a CPU, beyond it from the whole vocabulary."""
EDITED_ELEMENTS = 2**23
"""Most logits in a block of edited rows on a GPU: every block costs a dozen launches."""
LISTED_EDITS = 2**20
"""Most edits that are on their way to a GPU at once. More go in rounds, between which the host waits."""
PROMPT_ROWS = 64
"""Rows of a prompt whose log-probabilities a GPU computes at once, however few sequences there are."""
NUM_COLUMNS = 4 + 2 * MAX_LOGPROBS
"""Of one row's log-probabilities."""

_FLOAT32 = 4
_INT32 = 4
_INT64 = 8
_FLOAT64 = 8
_BOOL = 1

_SAMPLING_REASONS = {
    "argmax": "argmax of each row",
    "chosen": "the chosen token of each row",
    "last_tokens": "the newest token of each sequence, which its next step begins with",
    "block_argmax": "the same for a block of rows",
    "rows": "parameters of each row",
    "columns": "log-probabilities of each row",
    "block": "edited rows, a block at a time",
    "masks": "tokens that structured outputs allow, a bit each",
    "edits": "penalised, biased and banned logits",
    "chunk_largest": "argmax by chunk of the vocabulary",
    "chunk_argmax": "argmax by chunk of the vocabulary",
    "chunk_weights": "sums by chunk of the vocabulary",
    "chunk_nearer": "sums by chunk of the vocabulary",
    "chunk_counts": "tokens by chunk and distance",
    "num_listed": "candidates of each row",
    "listed_logits": "candidates of each row",
    "listed_ids": "candidates of each row",
}


def rows_per_block(vocab_size: int, max_rows: int) -> int:
    """Rows that are worked on together on a CPU."""
    return min(max_rows, max(1, BLOCK_ELEMENTS // vocab_size))


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits with a bit for each token."""
    return -(-vocab_size // 32)


def edited_rows_per_block(vocab_size: int, max_rows: int) -> int:
    """Rows whose edited logits are held at once on a GPU."""
    return min(max_rows, MAX_LOGIT_ROWS, max(1, EDITED_ELEMENTS // vocab_size))


def sampling_terms(max_rows: int, vocab_size: int, device_kind: str) -> tuple[Term, ...]:
    """What a step that chooses from `max_rows` rows needs at its largest; `device_kind` is cpu or cuda."""
    if device_kind != "cpu":
        return tuple(
            Term(f"sampling/{spec.name}", spec.aligned_bytes, _SAMPLING_REASONS[spec.name], PAGE_PHASES)
            for spec in device_specs(max_rows, vocab_size)
        )
    rows = rows_per_block(vocab_size, max_rows)
    return (
        Term("sampling/block", rows * _row_bytes(vocab_size), f"temporaries of {rows} rows at a time"),
        Term(
            "sampling/edits",
            min(rows * vocab_size, EDIT_ENTRIES) * _edit_entry_bytes(),
            "penalised, biased and banned logits",
        ),
        Term("sampling/masks", rows * mask_words(vocab_size) * _INT32, _SAMPLING_REASONS["masks"]),
        Term(
            "sampling/results",
            vocab_size * _INT32 + max_rows * _result_bytes(),
            "token ids, parameters and log-probabilities",
        ),
    )


def device_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """The buffers on a GPU."""
    rows = max(max_rows, PROMPT_ROWS)
    return (
        TensorSpec("argmax", (rows,), "int64"),
        TensorSpec("last_tokens", (max_rows,), "int64"),
        TensorSpec("block_argmax", (min(rows, MAX_LOGIT_ROWS),), "int64"),
        *host_specs(max_rows, vocab_size),
        TensorSpec("block", (edited_rows_per_block(vocab_size, max_rows), vocab_size), "float32"),
        TensorSpec("masks", (edited_rows_per_block(vocab_size, max_rows), mask_words(vocab_size)), "int32"),
        *logit_scratch_specs(rows, vocab_size),
    )


def host_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """Buffers that have a double in pinned memory of the host, through which their numbers come and go."""
    rows = max(max_rows, PROMPT_ROWS)
    most_edits = 4 * edited_rows_per_block(vocab_size, max_rows) * vocab_size
    num_edits = (4 + min(most_edits, LISTED_EDITS) // EDITS_PER_PROGRAM) * EDITS_PER_PROGRAM  # kinds begin apart
    return (
        TensorSpec("chosen", (rows,), "int64"),
        TensorSpec("rows", (2 * rows, NUM_FIELDS), "float64"),
        TensorSpec("columns", (rows, NUM_COLUMNS), "float64"),
        TensorSpec("edits", (num_edits, 2), "int32"),
    )


def host_mask_spec(max_rows: int, vocab_size: int) -> TensorSpec:
    """Masks in pinned memory: those of a whole step, since the device reads one block of them when it is done with another."""
    return TensorSpec("masks", (max_rows, mask_words(vocab_size)), "int32")


def _row_bytes(vocab_size: int) -> int:
    """The most that lives at once for one row, which is while the buckets of a nucleus are filled."""
    whole_vocabulary = (
        _FLOAT32  # distances below the row's largest logit, read as int32 keys
        + _INT64  # weights
        + _INT32  # bucket numbers
        + _INT64  # the same, as scatter_add wants them
    )
    buckets = 2 * (NUM_BUCKETS + 2) * _INT64  # histogram and running total
    candidates = MAX_NARROW_TOP_K * (8 * _INT64 + 2 * _FLOAT32 + 2 * _BOOL)  # keys, ids, orders, weights, totals
    return vocab_size * whole_vocabulary + buckets + candidates


def _edit_entry_bytes() -> int:
    """One penalised logit: where it is, its penalty, its value, whether it is positive, and what it could become."""
    return _INT64 + _FLOAT32 + _FLOAT32 + _BOOL + 3 * _FLOAT32


def _result_bytes() -> int:
    """Of one row: seven parameters in two forms, and ids with log-probabilities while they are put together."""
    parameters = 2 * 7 * _FLOAT64
    logprobs = 3 * NUM_COLUMNS * _FLOAT64
    return parameters + logprobs + 8 * _INT64


POOLED_ROWS = 64
"""Hidden states of pooled sequences that a step brings to the host at once on a GPU; more go in rounds."""
POOLED_OWNER = "pooling/row"
POOLED_REASON = "a hidden state on its way out, in float32"


def pooled_spec(hidden_size: int, dtype: str, device_kind: str) -> TensorSpec:
    """The buffer of pooled rows: pinned memory of the host on a GPU, which has none of its own; one row on a CPU."""
    if device_kind == "cpu":
        return TensorSpec("row", (1, hidden_size), "float32")
    return TensorSpec("rows", (POOLED_ROWS, hidden_size), dtype)


def _pooled_terms(layout: "Layout", resolved: Resolved) -> list[Term]:
    if layout.target.kind != "cpu":
        return []
    spec = pooled_spec(layout.declared.hidden_size, resolved.dtype, layout.target.kind)
    return [Term(POOLED_OWNER, spec.num_bytes, POOLED_REASON)]


PROCESS_OWNER = "python and torch"
"""Of a host's memory; beside it stand an engine's own tensors."""
TOKENIZER_OWNER = "tokenizer"
"""Of a host's memory, if the process that will hold it could not be measured."""
LIBRARY_BYTES = 32 * 2**20
"""The workspace that torch gives to cuBLAS on the one stream that an engine uses; next to nothing where products are invariant."""
ROUNDING_BYTES = 26 * 2**20
"""What torch's allocator holds beyond what it was asked for: arenas in whole 2 MiB, small ones in 20 MiB; measured.

No other term has a share of it: owners are planned at the bytes that they ask for."""
STAGING_BYTES = 64 * 2**20
"""Most that loading may hold on a GPU beside the final weights."""


class Pages(NamedTuple):
    """How a model's pages are laid out, and what a plan counts of them."""

    cache: CacheSpec
    page_bytes: int
    groups: tuple[CacheGroup, ...]
    padding: Term
    """Behind planes; what groups leave of a page is part of `page_bytes`."""
    states: tuple[StateKind, ...] = ()
    """What sequences keep beside their pages."""

    @property
    def has_groups(self) -> bool:
        """Whether there is more than one lifetime to tell apart from what all layers keep."""
        return len(self.groups) > 1


class Layout(NamedTuple):
    """How one rank keeps a model, and who attends: what a plan's terms follow from."""

    declared: DeclaredModel
    target: Target
    mesh: Mesh
    enforce_eager: bool
    staging: Term | None
    """What loading holds beside the weights; None takes the most that it may."""
    agreed_pages: int | None = None
    """As many as every rank has; None: as many as fit."""
    is_invariant: bool = False
    """Products do not depend on their company (batch_invariant): cuBLAS has no workspace to split them along K in."""
    exchange_kind: ExchangeKind = "symmetric"
    """With other ranks, where there are any."""

    @property
    def all_layers(self) -> "Layout":
        """The same share of the layers of all stages: groups of the cache and who attends follow from these."""
        return self if self.mesh.layers is None else self._replace(mesh=self.mesh.all_layers)

    def heads(self) -> HeadGeometry | None:
        return self.declared.remembered(("heads", self.mesh), lambda: self.declared.declaration.heads(self.mesh))

    def stored_key(self, resolved: Resolved) -> tuple[object, ...]:
        """Whatever layers of its stage keep follows from this, and from the windows that contexts outgrow."""
        protected = resolved.protected
        return resolved.kv_format, protected.format, protected.layers, resolved.limits.page_tokens, self.mesh

    def formats(self, resolved: Resolved) -> tuple[KVFormat, ...]:
        """One entry a layer of its stage."""
        by_layer = resolved.protected.formats(resolved.kv_format, self.declared.num_layers)
        layers = self.mesh.layer_range(self.declared.num_layers)
        return by_layer[layers.start : layers.stop]

    @property
    def num_layers(self) -> int:
        """Of its stage."""
        return len(self.mesh.layer_range(self.declared.num_layers))

    def bytes_per_token(self, resolved: Resolved) -> Fraction:
        """Of all layers of its stage; where formats are mixed they have the same heads, so that only the numbers of layers count."""
        protected, num_layers = resolved.protected, self.num_layers
        num_protected = sum(layer in self.mesh.layer_range(self.declared.num_layers) for layer in protected.layers)
        token_bytes = self.declared.kv_bytes_per_token(resolved.kv_format, self.mesh)
        if not num_protected:
            return token_bytes
        wider_bytes = self.declared.kv_bytes_per_token(protected.format, self.mesh)
        return token_bytes + (wider_bytes - token_bytes) * num_protected / num_layers

    def page_bytes(self, resolved: Resolved) -> int:
        """Of one page of the pool; rows that stand for several tokens are rounded up to whole bytes."""
        pages = self.pages(resolved)
        if pages is not None:
            return pages.page_bytes
        return ceil(resolved.limits.page_tokens * self.bytes_per_token(resolved))

    def cache(self, resolved: Resolved) -> CacheSpec | None:
        """Keys and values by head, or None where the model keeps something else."""
        pages = self.pages(resolved)
        return None if pages is None else pages.cache

    def states(self, resolved: Resolved) -> tuple[StateKind, ...]:
        """What sequences keep beside their pages; nothing in most models."""
        pages = self.pages(resolved)
        return () if pages is None else pages.states

    def pages(self, resolved: Resolved) -> "Pages | None":
        """The same with what is counted from it. A search asks for many lengths, and few of them change anything."""
        heads, limits = self.all_layers.heads(), resolved.limits
        if heads is None:
            return None
        outgrown = frozenset(w for w in set(heads.windows) if w is not None and w < limits.max_model_len)

        def make() -> Pages:
            if self.mesh.num_stages > 1:
                whole = self.all_layers.cache(resolved)
                assert whole is not None, f"{self.declared.name} has heads and no cache"
                cache = whole.for_stage(self.mesh.layer_range(self.declared.num_layers))
                return Pages(cache, cache.bytes_per_page, cache.cache_groups(), kv_padding_term(cache))
            if heads.is_compressed:
                cache, states = compressed_pages(heads, self.formats(resolved), limits.page_tokens)
                return Pages(cache, cache.bytes_per_page, cache.cache_groups(), kv_padding_term(cache), states)
            shape = heads.num_kv_heads, heads.head_dim, limits.page_tokens
            latent = heads.rope_dim, heads.index_dim, heads.shared_layers
            cache = mixed_cache(self.formats(resolved), *shape, heads.windows, limits.max_model_len, *latent)
            return Pages(cache, cache.bytes_per_page, cache.cache_groups(), kv_padding_term(cache))

        return self.declared.remembered(("pages", *self.stored_key(resolved), outgrown), make)

    def sequence_pages(self, resolved: Resolved, max_step_tokens: int) -> int:
        """Pages of one sequence of the longest context, at the most, in steps of so many tokens."""
        limits, pages = resolved.limits, self.pages(resolved)
        if pages is None:
            return -(-limits.max_model_len // limits.page_tokens)
        return sum(group.most_pages(limits.max_model_len, max_step_tokens) for group in pages.groups)

    def attention_spec(
        self, resolved: Resolved, layer: LayerCache, heads: HeadGeometry, group: int = 0
    ) -> AttentionSpec:
        return heads.attention_spec(layer, group, resolved.limits.max_model_len, resolved.dtype, self.target.kind)

    def attention_specs(self, resolved: Resolved) -> tuple[AttentionSpec, ...]:
        """Of every layer; nothing where the model keeps something else."""
        cache, heads = self.cache(resolved), self.heads()
        if cache is None or heads is None:
            return ()
        if heads.is_compressed:
            length, kind = resolved.limits.max_model_len, self.target.kind
            return heads.compressed_specs(cache, length, resolved.dtype, kind)
        group_of = {layer: index for index, group in enumerate(cache.groups) for layer in group.layers}
        return tuple(self.attention_spec(resolved, layer, heads, group_of[layer.layer]) for layer in cache.layers)


class Needs(NamedTuple):
    """What a plan must find room for beside pages."""

    declaration: BackendDeclaration | None
    requests: tuple[Request, ...]
    workspace: WorkspacePlan
    terms: tuple[Term, ...]
    exchange: ExchangeNeeds | None = None
    """None where one rank runs all of the model."""


def list_needs(layout: Layout, resolved: Resolved) -> Needs:
    """Every term, from shapes."""
    needs = needs_beside_weights(layout, resolved)
    return needs._replace(terms=(*_weight_terms(layout, resolved), *needs.terms))


def needs_beside_weights(layout: Layout, resolved: Resolved) -> Needs:
    """Every other term."""
    declared, target, limits = layout.declared, layout.target, resolved.limits
    bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
    specs = _distinct_specs(layout, resolved)
    of_all = specs if layout.all_layers is layout else _distinct_specs(layout.all_layers, resolved)
    declaration = choose_declaration(of_all) if specs else None
    scratch = () if declaration is None else declaration.scratch(specs, bounds)
    logit_rows = max(limits.sampled_rows, PROMPT_ROWS)
    step = StepShape(
        limits.max_num_batched_tokens, logit_rows, limits.max_model_len, resolved.dtype, target.kind, resolved.recipe
    )
    requests = declared.declaration.requests(step, layout.mesh, scratch)
    workspace = WorkspacePlan()
    for request in requests:
        workspace.reserve(request.owner, request.specs, request.lane)
    terms = [
        *_cache_terms(layout, resolved),
        *workspace.terms(),
        *batch_terms(limits, target.kind, *_group_shapes(layout, resolved)),
        *sampling_terms(limits.sampled_rows, declared.vocab_size, target.kind),
        *_pooled_terms(layout, resolved),
        *_rope_terms(layout, resolved),
        *(() if declaration is None else declaration.terms(specs, bounds)),
        *_key_bias_terms(layout, resolved, specs),
        # Those of compressed attention are read where they were loaded.
        *sink_terms(specs[:1] * layout.num_layers),
        *_device_terms(
            layout,
            resolved,
            (declaration is None or declaration.can_be_captured) and can_be_captured(layout.exchange_kind, layout.mesh),
        ),
    ]
    exchange = exchange_needs(layout, resolved)
    if exchange is not None:
        terms += exchange_terms(exchange, layout.mesh, layout.exchange_kind)
    return Needs(declaration, requests, workspace, tuple(terms), exchange)


def exchange_needs(layout: Layout, resolved: Resolved) -> ExchangeNeeds | None:
    """What the steps of a rank exchange with others at their largest; None where there are no others."""
    declared, limits, mesh = layout.declared, resolved.limits, layout.mesh
    if mesh.is_alone:
        return None
    rows, element_bytes = limits.max_num_batched_tokens, DTYPE_BYTES[resolved.dtype]
    logit_rows = max(limits.sampled_rows, PROMPT_ROWS)
    # Ids of tokens, and argmaxes of shares, go through rooms too.
    room_bytes = max(
        declared.declaration.room_elements(mesh, rows) * element_bytes,
        rows * DTYPE_BYTES["int64"],
        logit_rows * CHOICE_FIELDS * DTYPE_BYTES["float32"],
    )
    hidden_bytes = rows * declared.hidden_size * element_bytes
    return ExchangeNeeds(room_bytes, logit_rows, declared.vocab_size, hidden_bytes)


def _distinct_specs(layout: Layout, resolved: Resolved) -> tuple[AttentionSpec, ...]:
    """One layer for each that differs, by its window or its format."""
    heads = layout.heads()
    if heads is None:
        return ()
    if heads.is_compressed:
        every = layout.attention_specs(resolved)
        kinds = zip(heads.ratios, (layer in heads.overlapped_layers for layer in range(len(every))), strict=True)
        return tuple(dict(zip(reversed(list(kinds)), reversed(every), strict=True)).values())
    key = "distinct layers", *layout.stored_key(resolved), resolved.protected.is_open
    caches = layout.declared.remembered(key, lambda: _distinct_layers(layout, resolved, heads))
    return tuple(layout.attention_spec(resolved, cache, heads) for cache in caches)


def _distinct_layers(layout: Layout, resolved: Resolved, heads: HeadGeometry) -> tuple[LayerCache, ...]:
    by_layer = layout.formats(resolved)
    everywhere = tuple(dict.fromkeys(by_layer)) if resolved.protected.is_open else ()
    first_of: dict[tuple[KVFormat, int | None], int] = {}
    for layer, (own, window) in enumerate(zip(by_layer, heads.windows, strict=True)):
        # Where weights will say which layers are protected, any layer may have any of the formats.
        for kv_format in everywhere or (own,):
            first_of.setdefault((kv_format, window), layer)
    shape = heads.num_kv_heads, heads.head_dim, heads.rope_dim, heads.index_dim
    return tuple(LayerCache(layer, "attention", kv_format, *shape) for (kv_format, _), layer in first_of.items())


def _group_shapes(layout: Layout, resolved: Resolved) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Of each group chunks of a page and tokens of a row; and whether sequences have states beside pages."""
    pages = layout.pages(resolved)
    if pages is None:
        return ONE_GROUP, ONE_GROUP, False
    groups = pages.cache.groups
    chunks = tuple(group.chunks_per_page for group in groups)
    return chunks, tuple(group.tokens_per_row for group in groups), pages.cache.has_states


def _weight_terms(layout: Layout, resolved: Resolved) -> list[Term]:
    groups = layout.declared.group_bytes(resolved.dtype, resolved.recipe, layout.mesh)
    return [Term(f"weights/{name}", group.num_bytes, _counted(group)) for name, group in groups.items()]


def _counted(group: WeightGroup) -> str:
    noun = "tensor" if group.num_tensors == 1 else "tensors"
    return f"{group.num_tensors} {noun} in {_enumerated(group.stored_as)}"


def _enumerated(names: tuple[str, ...]) -> str:
    """All of them: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _cache_terms(layout: Layout, resolved: Resolved) -> list[Term]:
    """What pages cost beyond their number: alignment, and what a sequence keeps whatever its length."""
    terms, heads, pages = [], layout.heads(), layout.pages(resolved)
    if pages is not None and pages.cache.has_states:
        terms += [pages.padding] if pages.padding.num_bytes else []
        return [*terms, *state_terms(pages.states, resolved.limits.max_num_seqs)]
    if pages is not None and pages.has_groups:
        terms += [pages.padding] if pages.padding.num_bytes else []
    elif heads is not None:
        key = "padding", *layout.stored_key(resolved)
        terms += layout.declared.remembered(key, lambda: _padding_terms(layout, resolved, heads))
    sequence_bytes = layout.declared.kv_bytes_per_sequence(resolved.kv_format, layout.mesh)
    if sequence_bytes:
        num_seqs = resolved.limits.max_num_seqs
        reason = f"windows and unfinished entries of {num_seqs} sequences, whatever their length"
        terms.append(Term("kv state", num_seqs * sequence_bytes, reason, PAGE_PHASES))
    return terms


def _padding_terms(layout: Layout, resolved: Resolved, heads: HeadGeometry) -> tuple[Term, ...]:
    """What the arrays of layers that are not grouped lose to their alignment."""
    shape = (heads.num_kv_heads, heads.head_dim, resolved.limits.page_tokens)
    kinds = (
        (kv_format, 0 if layer in heads.shared_layers else heads.index_dim)
        for layer, kv_format in enumerate(layout.formats(resolved))
    )
    alone = (
        (count, uniform_cache(1, kv_format, *shape, heads.rope_dim, index_dim))
        for (kv_format, index_dim), count in Counter(kinds).items()
    )
    paddings = [(count, kv_padding_term(cache)) for count, cache in alone]
    if not any(padding.num_bytes for _, padding in paddings):
        return ()
    num_bytes = sum(count * padding.num_bytes for count, padding in paddings)
    reason = "; ".join(f"{count} layers, each with {padding.reason}" for count, padding in paddings)
    return (Term(paddings[0][1].owner, num_bytes, reason, PAGE_PHASES),)


def _rope_terms(layout: Layout, resolved: Resolved) -> list[Term]:
    declared, mesh = layout.declared, layout.mesh
    pairs = declared.remembered(("rope pairs", mesh), lambda: declared.declaration.rope_pairs(mesh))
    if not pairs:
        return []
    table_bytes = 2 * DTYPE_BYTES[resolved.dtype] * resolved.limits.max_num_batched_tokens * pairs
    return [
        Term("rope/table", table_bytes, "cos and sin of a step's tokens"),
        Term("rope/frequencies", DTYPE_BYTES["float32"] * pairs, "of the pairs that rope turns"),
    ]


def _key_bias_terms(layout: Layout, resolved: Resolved, specs: tuple[AttentionSpec, ...]) -> list[Term]:
    """What quantized layers hold so that their pages have keys without bias: copies of it, without and with the keys' part."""
    heads = layout.heads()
    num_layers = sum(kv_format.is_quantized for kv_format in layout.formats(resolved))
    if heads is None or heads.rope_dim or num_layers == 0:
        return []
    is_plain = isinstance(specs[0], GroupedAttentionSpec) and specs[0].is_plain_softmax
    has_turned_bias = any(spec.has_key_bias for spec in specs)
    if is_plain and not has_turned_bias:
        mean_bytes = num_layers * key_bias_spec(heads.num_kv_heads, heads.head_dim).num_bytes
        means = [
            Term("attention/key_means", mean_bytes, f"what the keys of a head have in common, in {num_layers} layers")
        ]
    else:
        means = []
    if not heads.has_separable_key_bias or not (is_plain or has_turned_bias):
        return means
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    num_bytes = num_layers * width * DTYPE_BYTES[resolved.dtype]
    terms = [*means, Term("attention/qkv_bias", num_bytes, f"biases of {num_layers} layers with zeros for the keys")]
    biased = next((spec for spec in specs if spec.has_key_bias), None)
    return terms if biased is None else [*terms, *key_bias_terms((biased,) * num_layers)]


def _tokenizer_terms(layout: Layout) -> list[Term]:
    """The vocabulary, if the process that will hold it was not measured with it; rank 0 alone has a tokenizer."""
    if layout.target.present_bytes or layout.mesh.rank:
        return []
    vocab_size = layout.declared.vocab_size
    reason = f"{vocab_size:,} tokens of {TOKEN_BYTES} bytes each, as measured"
    return [Term(TOKENIZER_OWNER, tokenizer_bytes(vocab_size), reason)]


def _device_terms(layout: Layout, resolved: Resolved, has_graphs: bool) -> list[Term]:
    """What a device costs whatever the model, and what loading takes for a while."""
    target, limits = layout.target, resolved.limits
    terms = [] if layout.staging is None else [layout.staging]
    if target.kind != "cuda":
        if target.context_bytes:
            held = "libraries, code, vocabulary" if target.present_bytes else "libraries and code"
            terms.append(Term(PROCESS_OWNER, target.context_bytes, f"the process itself: {held}"))
            terms += _tokenizer_terms(layout)
        return terms
    context_bytes = target.context_bytes - (SPLIT_K_BYTES if layout.is_invariant else 0)
    terms.append(Term("cuda context", context_bytes, "CUDA, its libraries' handles and the code of kernels"))
    if not layout.is_invariant:
        terms.append(Term("libraries", LIBRARY_BYTES, "workspace of cuBLAS", PAGE_PHASES))
    terms.append(Term("allocator", ROUNDING_BYTES, "what torch rounds up", PAGE_PHASES))
    if has_graphs and not layout.enforce_eager:
        bounds = limits.max_num_seqs, limits.max_num_batched_tokens, resolved.num_proposals > 0
        terms.append(graph_term(layout.num_layers, *bounds))
    if layout.staging is None:
        terms.append(Term("staging", STAGING_BYTES, "rows on their way to their place", ("load",)))
    return terms
