"""Terms of a plan: everything a runner holds beside its pages, from shapes, by owner and phase; no torch.

`list_needs` collects them. Terms that no other package declares come first: inputs of a step and the page table (block
table); what the driver keeps for CUDA graphs; sampling. On a CPU sampling works in blocks of rows, so temporaries do not
grow with the number of sequences; on a GPU its buffers are allocated once, and only edited rows of logits are copied.

T rows of a step, N sequences, P pages of the longest one, U changed pages
"""

from collections import Counter
from typing import NamedTuple

from holdfast.attention.declarations import AttentionSpec, BackendDeclaration, StepBounds
from holdfast.cache.places import state_terms
from holdfast.cache.spec import LayerCache, kv_padding_term, uniform_cache
from holdfast.config import Limits
from holdfast.distributed.exchange_plan import CHOICE_FIELDS, ExchangeNeeds, can_be_captured, exchange_terms
from holdfast.families.choose import choose_declaration
from holdfast.families.grouped.declarations import key_bias_terms, sink_terms
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.geometry import EDITS_PER_PROGRAM, MAX_LOGIT_ROWS, NUM_FIELDS, key_bias_spec, logit_scratch_specs
from holdfast.kernels.packed_kernels import LANE, piece_specs
from holdfast.memory.devices import SPLIT_K_BYTES
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec, WorkspacePlan
from holdfast.models.activations import Request
from holdfast.models.declaration import HeadGeometry, StepShape
from holdfast.models.declared_weights import WeightGroup
from holdfast.planning.resolve import Resolved
from holdfast.planning.target import TOKEN_BYTES, tokenizer_bytes
from holdfast.quant.formats import DTYPE_BYTES, KVFormat
from holdfast.request.sampling_params import MAX_LOGPROBS

LISTED_PAGES = 16
"""Most new pages of one sequence that a step copies to the device as a list."""

ONE_GROUP = (1,)
"""Chunks of a page if all layers are one cache group."""

_BATCH_REASONS = {
    "token_ids": "one a row of a step",
    "positions": "one a row of a step",
    "slots": "one a row of a step",
    "states": "one a row of a step: the place of its sequence's state",
    "drafts": "one a row of a step: draft tokens, and how many were accepted before",
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
    near_tokens: int = 0,
    has_drafts: bool = False,
) -> tuple[Term, ...]:
    """Return the bytes of the input buffers, and on a GPU of the page tables.

    `chunks_per_page` and `tokens_per_row` have a number for each cache group; the latter may be empty if all are 1.
    `near_tokens`: tokens of a page of the last group, if that is the group of near pages. `has_drafts`: states must not
    keep draft tokens.
    """
    specs = input_specs(limits, len(chunks_per_page), device_kind, has_states, has_drafts)
    if device_kind != "cpu":
        for group, chunks in enumerate(chunks_per_page):
            is_last = group == len(chunks_per_page) - 1
            own = tokens_per_row[group] if tokens_per_row else 1
            specs += page_table_specs(limits, chunks, group, own, near_tokens if is_last else 0)
    return tuple(map(input_term, specs))


def input_term(spec: TensorSpec) -> Term:
    """Return the term of one buffer, in plan and ledger."""
    name, _, group = spec.name.partition(".")
    reason = _BATCH_REASONS[name]
    return Term(f"inputs/{spec.name}", spec.num_bytes, f"{reason}, of cache group {group}" if group else reason)


def input_specs(
    limits: Limits, num_groups: int = 1, device_kind: str = "cpu", has_states: bool = False, has_drafts: bool = False
) -> tuple[TensorSpec, ...]:
    """Return the buffers with one element a row. They are adjacent, and their length aligns each.

    On a CPU a step starts after the tokens of the last one are known, so it keeps none of them.
    """
    per_unit = ALIGNMENT_BYTES // DTYPE_BYTES["int64"]
    shape_T = (-(-limits.max_num_batched_tokens // per_unit) * per_unit,)
    slots = (_of_group("slots", group) for group in range(num_groups))
    keep_slots = () if device_kind == "cpu" else ("keep_slots",)
    states = (*(("states",) if has_states else ()), *(("drafts",) if has_drafts else ()))
    names = ("token_ids", "positions", *slots, *states, *keep_slots, "logit_rows")
    return tuple(TensorSpec(name, shape_T, "int64") for name in names)


def page_table_specs(
    limits: Limits, chunks_per_page: int = 1, group: int = 0, tokens_per_row: int = 1, near_tokens: int = 0
) -> tuple[TensorSpec, TensorSpec]:
    """Return the block table of a group, and the list of its changes: (index in the table, chunk).

    `near_tokens`: tokens of a chunk of near pages; 0 for every other group.
    """
    page_tokens = (near_tokens or limits.page_tokens) * chunks_per_page * tokens_per_row
    num_pages = -(-limits.max_model_len // page_tokens)
    shape_NP = (limits.max_num_seqs, num_pages * chunks_per_page)
    shape_U2 = (limits.max_num_seqs * listed_entries(chunks_per_page), 2)
    names = _of_group("page_table", group), _of_group("page_updates", group)
    return TensorSpec(names[0], shape_NP, "int32"), TensorSpec(names[1], shape_U2, "int64")


def listed_entries(chunks_per_page: int) -> int:
    """Return the most new table elements of one sequence in a list: at least those of one page."""
    return -(-max(LISTED_PAGES, chunks_per_page) // LISTED_PAGES) * LISTED_PAGES


def _of_group(name: str, group: int) -> str:
    return f"{name}.{group}" if group else name


MAX_GRAPH_ROWS = 1024
"""Sequences in the largest captured step; in larger steps launches no longer matter."""
TOKEN_BUCKETS = (64, 128, 256, 512)
PROPOSAL_BUCKETS = (8, 16, 32)
"""Rows of smaller mixed steps that are captured too if sequences have draft tokens."""
PRESENT_BYTES = 4 * 2**20
"""Part of the graphs' memory that the context already includes; measured on an H200."""
LEAST_BYTES = 2 * 2**20
"""The driver allocates in pieces of this size. The graphs' own pool stays empty: steps use the workspace."""
GRAPH_BYTES_PER_LAYER = 38_800
"""Device memory that the driver keeps for one layer's kernels in one graph; measured on an H200."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the captured batch sizes of decode steps, closest together where a padded row costs most."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    ladder = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_GRAPH_ROWS + 1, 32))
    sizes = [size for size in ladder if size <= largest]
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)


def mixed_sizes(max_num_batched_tokens: int, has_proposals: bool = False) -> tuple[int, ...]:
    """Return the row counts of captured steps with prompts or draft tokens."""
    buckets = (*PROPOSAL_BUCKETS, *TOKEN_BUCKETS) if has_proposals else TOKEN_BUCKETS
    return tuple(size for size in buckets if size <= max_num_batched_tokens)


def graph_bytes(num_layers: int, num_graphs: int) -> int:
    """Return the bytes of so many graphs."""
    return max(LEAST_BYTES, num_graphs * num_layers * GRAPH_BYTES_PER_LAYER - PRESENT_BYTES)


def graph_term(num_layers: int, max_num_seqs: int, max_num_batched_tokens: int, has_proposals: bool = False) -> Term:
    """Return the term of all graphs."""
    num_decode = len(graph_sizes(min(max_num_seqs, max_num_batched_tokens)))
    num_mixed = len(mixed_sizes(max_num_batched_tokens, has_proposals))
    reason = f"{num_decode} decode and {num_mixed} mixed sizes of {num_layers} layers, one pool"
    return Term("cuda graphs", graph_bytes(num_layers, num_decode + num_mixed), reason, PAGE_PHASES)


BLOCK_ELEMENTS = 2**22
"""Most logits in a block of rows on a CPU; a longer row is a block by itself."""
EDIT_ENTRIES = 2**16
"""Most logits that are penalised, biased or banned at once on a CPU."""
NUM_BUCKETS = 2048
"""Histogram buckets of one round of the search for a cutoff on a CPU."""
MAX_NARROW_TOP_K = 256
"""Largest top_k for which a CPU samples from sorted candidates instead of the whole vocabulary."""
EDITED_ELEMENTS = 2**23
"""Most logits in a block of edited rows on a GPU: every block costs a dozen launches."""
LISTED_EDITS = 2**20
"""Most edits in one copy to a GPU. More need several rounds, between which the host waits."""
PROMPT_ROWS = 64
"""Rows of a prompt whose log-probabilities a GPU computes at once."""
NUM_COLUMNS = 4 + 2 * MAX_LOGPROBS
"""Numbers of one row's log-probabilities."""

_FLOAT32, _INT32, _INT64, _FLOAT64, _BOOL = 4, 4, 8, 8, 1

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
    """Return the rows that a CPU samples together."""
    return min(max_rows, max(1, BLOCK_ELEMENTS // vocab_size))


def mask_words(vocab_size: int) -> int:
    """Return the 32-bit words of a bitmask over the vocabulary."""
    return -(-vocab_size // 32)


def edited_rows_per_block(vocab_size: int, max_rows: int) -> int:
    """Return the rows whose edited logits a GPU holds at once."""
    return min(max_rows, MAX_LOGIT_ROWS, max(1, EDITED_ELEMENTS // vocab_size))


def sampling_terms(max_rows: int, vocab_size: int, device_kind: str) -> tuple[Term, ...]:
    """Return what sampling `max_rows` rows needs."""
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
    """Return the sampling buffers on a GPU."""
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
    """Return the buffers that have a copy in pinned host memory."""
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
    """Return the masks in pinned memory: those of a whole step, which the device reads block by block."""
    return TensorSpec("masks", (max_rows, mask_words(vocab_size)), "int32")


def _row_bytes(vocab_size: int) -> int:
    """Return the peak bytes of one row: while the buckets of top_p are filled."""
    whole_vocabulary = (
        _FLOAT32  # distances below the row's largest logit, read as int32 keys
        + _INT64  # weights
        + _INT32  # bucket numbers
        + _INT64  # bucket numbers for scatter_add
    )
    buckets = 2 * (NUM_BUCKETS + 2) * _INT64  # histogram and running total
    candidates = MAX_NARROW_TOP_K * (8 * _INT64 + 2 * _FLOAT32 + 2 * _BOOL)  # keys, ids, orders, weights, totals
    return vocab_size * whole_vocabulary + buckets + candidates


def _edit_entry_bytes() -> int:
    """Return the bytes of one penalised logit: index, penalty, value, sign and the possible results."""
    return _INT64 + _FLOAT32 + _FLOAT32 + _BOOL + 3 * _FLOAT32


def _result_bytes() -> int:
    """Return the bytes of one row: seven parameters twice, and ids with log-probabilities."""
    parameters = 2 * 7 * _FLOAT64
    logprobs = 3 * NUM_COLUMNS * _FLOAT64
    return parameters + logprobs + 8 * _INT64


POOLED_ROWS = 64
"""Hidden states of pooled sequences that one copy brings from a GPU to the host."""
POOLED_OWNER = "pooling/row"
POOLED_REASON = "a hidden state on its way out, in float32"


def pooled_spec(hidden_size: int, dtype: str, device_kind: str) -> TensorSpec:
    """Return the buffer of pooled rows: pinned host memory for a GPU, one row on a CPU."""
    if device_kind == "cpu":
        return TensorSpec("row", (1, hidden_size), "float32")
    return TensorSpec("rows", (POOLED_ROWS, hidden_size), dtype)


def _pooled_terms(resolved: Resolved) -> list[Term]:
    if resolved.target.kind != "cpu":
        return []
    spec = pooled_spec(resolved.declared.hidden_size, resolved.dtype, "cpu")
    return [Term(POOLED_OWNER, spec.num_bytes, POOLED_REASON)]


PROCESS_OWNER = "python and torch"
"""Owner of a process's own memory on a host, without the engine's tensors."""
TOKENIZER_OWNER = "tokenizer"
"""Owner of the tokenizer's memory, if the process that will hold it could not be measured."""
LIBRARY_BYTES = 32 * 2**20
"""Workspace that torch gives to cuBLAS on the engine's stream; almost none with batch_invariant."""
ROUNDING_BYTES = 26 * 2**20
"""Rounding of torch's allocator: arenas to 2 MiB, small ones to 20 MiB; measured. Other terms are exact bytes."""
STAGING_BYTES = 64 * 2**20
"""Most that loading may hold on a GPU beside the final weights."""


class Needs(NamedTuple):
    """What a plan needs beside pages."""

    declaration: BackendDeclaration | None
    requests: tuple[Request, ...]
    workspace: WorkspacePlan
    terms: tuple[Term, ...]
    exchange: ExchangeNeeds | None = None
    """None if one rank runs the whole model."""


def list_needs(resolved: Resolved) -> Needs:
    """Count every term, from shapes."""
    needs = needs_beside_weights(resolved)
    groups = resolved.declared.group_bytes(resolved.dtype, resolved.recipe, resolved.mesh)
    weights = (Term(f"weights/{name}", group.num_bytes, _counted(group)) for name, group in groups.items())
    return needs._replace(terms=(*weights, *needs.terms))


def needs_beside_weights(resolved: Resolved) -> Needs:
    """Like `list_needs`, without the weights."""
    declared, limits, kind, mesh = resolved.declared, resolved.limits, resolved.target.kind, resolved.mesh
    bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
    specs = _distinct_specs(resolved)
    of_all = specs if resolved.all_layers is resolved else _distinct_specs(resolved.all_layers)
    state = resolved.state_layers()
    declaration = choose_declaration(of_all, state) if specs else None
    scratch = () if declaration is None else declaration.scratch(specs, bounds)
    logit_rows = max(limits.sampled_rows, PROMPT_ROWS)
    rows = limits.max_num_batched_tokens, logit_rows, limits.max_model_len
    step = StepShape(*rows, resolved.dtype, kind, resolved.recipe)
    requests = (*declared.declaration.requests(step, mesh, scratch), *_packed_requests(resolved))
    workspace = WorkspacePlan()
    for request in requests:
        workspace.reserve(request.owner, request.specs, request.lane)
    captures = (declaration is None or declaration.can_be_captured) and can_be_captured(resolved.exchange_kind, mesh)
    terms = [
        *_cache_terms(resolved),
        *workspace.terms(),
        *batch_terms(limits, kind, *_group_shapes(resolved), has_drafts=state is not None and state.num_drafts > 0),
        *sampling_terms(limits.sampled_rows, declared.vocab_size, kind),
        *_pooled_terms(resolved),
        *_rope_terms(resolved),
        *(() if declaration is None else declaration.terms(specs, bounds)),
        *_key_bias_terms(resolved, specs),
        *_key_scale_terms(resolved),
        # Sinks of compressed attention stay where they were loaded.
        *sink_terms(specs[:1] * len(resolved.paged_layers)),
        *_device_terms(resolved, captures),
    ]
    exchange = exchange_needs(resolved)
    if exchange is not None:
        terms += exchange_terms(exchange, mesh, resolved.exchange_kind)
    return Needs(declaration, requests, workspace, tuple(terms), exchange)


def _packed_requests(resolved: Resolved) -> tuple[Request, ...]:
    """Return the request for a piece of dequantized rows; empty if no weight stays packed."""
    shapes = resolved.declared.packed_shapes(resolved.recipe, resolved.mesh)
    specs = piece_specs(shapes, resolved.dtype, resolved.target.kind)
    return (Request(LANE, "packed rows", specs),) if specs else ()


def exchange_needs(resolved: Resolved) -> ExchangeNeeds | None:
    """Return the largest buffers that a rank's steps exchange with others; None if there are no others."""
    declared, limits, mesh = resolved.declared, resolved.limits, resolved.mesh
    if mesh.is_alone:
        return None
    rows, element_bytes = limits.max_num_batched_tokens, DTYPE_BYTES[resolved.dtype]
    logit_rows = max(limits.sampled_rows, PROMPT_ROWS)
    # Token ids, and argmaxes of vocabulary shards, use the same buffers.
    room_bytes = max(
        declared.declaration.room_elements(mesh, rows) * element_bytes,
        rows * DTYPE_BYTES["int64"],
        logit_rows * CHOICE_FIELDS * DTYPE_BYTES["float32"],
    )
    hidden_bytes = rows * declared.num_streams * declared.hidden_size * element_bytes
    return ExchangeNeeds(room_bytes, logit_rows, declared.vocab_size, hidden_bytes)


def _distinct_specs(resolved: Resolved) -> tuple[AttentionSpec, ...]:
    """Return one layer for each window and format."""
    heads = resolved.heads()
    if heads is None:
        return ()
    if heads.is_compressed:
        every = resolved.attention_specs()
        kinds = zip(heads.ratios, (layer in heads.overlapped_layers for layer in range(len(every))), strict=True)
        return tuple(dict(zip(reversed(list(kinds)), reversed(every), strict=True)).values())
    key = "distinct layers", *resolved.stored_key(), resolved.protected.is_open
    caches = resolved.declared.remembered(key, lambda: _distinct_layers(resolved, heads))
    return tuple(resolved.attention_spec(cache, heads) for cache in caches)


def _distinct_layers(resolved: Resolved, heads: HeadGeometry) -> tuple[LayerCache, ...]:
    by_layer = resolved.formats()
    # If weights decide which layers are protected, any layer may have any of the formats.
    everywhere = tuple(dict.fromkeys(by_layer)) if resolved.protected.is_open else ()
    first_of: dict[tuple[KVFormat, int | None], int] = {}
    for layer, own in zip(heads.paged_layers, by_layer, strict=True):
        for kv_format in everywhere or (own,):
            first_of.setdefault((kv_format, heads.windows[layer]), layer)
    shape = heads.num_kv_heads, heads.head_dim, heads.rope_dim, heads.index_dim
    return tuple(LayerCache(layer, "attention", kv_format, *shape) for (kv_format, _), layer in first_of.items())


def _group_shapes(resolved: Resolved) -> tuple[tuple[int, ...], tuple[int, ...], bool, int]:
    """Return each group's chunks of a page and tokens of a row, True if sequences have states beside pages, and the tokens
    of a near page, 0 if there are none."""
    pages = resolved.pages()
    if pages is None:
        return ONE_GROUP, ONE_GROUP, False, 0
    groups = pages.cache.groups
    chunks = tuple(group.chunks_per_page for group in groups)
    near_tokens = 0 if pages.cache.near is None else pages.cache.near.page_tokens
    return chunks, tuple(group.tokens_per_row for group in groups), pages.cache.has_states, near_tokens


def _counted(group: WeightGroup) -> str:
    *others, last = group.stored_as
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{group.num_tensors} {'tensor' if group.num_tensors == 1 else 'tensors'} in {names}"


def _cache_terms(resolved: Resolved) -> list[Term]:
    """Return what pages cost beyond their number: alignment, and what a sequence keeps whatever its length."""
    heads, pages, num_seqs = resolved.heads(), resolved.pages(), resolved.limits.max_num_seqs
    padding = () if pages is None or not pages.padding.num_bytes else (pages.padding,)
    if pages is not None and pages.cache.has_states:
        return [*padding, *state_terms(pages.states, num_seqs, resolved.num_snapshots)]
    if heads is not None and (pages is None or len(pages.groups) == 1):
        key = "padding", *resolved.stored_key()
        padding = resolved.declared.remembered(key, lambda: _padding_terms(resolved, heads))
    sequence_bytes = resolved.declared.kv_bytes_per_sequence(resolved.kv_format, resolved.mesh)
    if not sequence_bytes:
        return [*padding]
    reason = f"windows and unfinished entries of {num_seqs} sequences, whatever their length"
    return [*padding, Term("kv state", num_seqs * sequence_bytes, reason, PAGE_PHASES)]


def _padding_terms(resolved: Resolved, heads: HeadGeometry) -> tuple[Term, ...]:
    """Return what the arrays of ungrouped layers lose to alignment."""
    shape = (heads.num_kv_heads, heads.head_dim, resolved.limits.page_tokens)
    kinds = (
        (kv_format, 0 if layer in heads.shared_layers else heads.index_dim)
        for layer, kv_format in zip(heads.paged_layers, resolved.formats(), strict=True)
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


def _rope_terms(resolved: Resolved) -> list[Term]:
    declared, mesh = resolved.declared, resolved.mesh
    pairs = declared.remembered(("rope pairs", mesh), lambda: declared.declaration.rope_pairs(mesh))
    if not pairs:
        return []
    table_bytes = 2 * DTYPE_BYTES[resolved.dtype] * resolved.limits.max_num_batched_tokens * pairs
    return [
        Term("rope/table", table_bytes, "cos and sin of a step's tokens"),
        Term("rope/frequencies", DTYPE_BYTES["float32"] * pairs, "of the pairs that rope turns"),
    ]


def _key_bias_terms(resolved: Resolved, specs: tuple[AttentionSpec, ...]) -> list[Term]:
    """Return what quantized layers hold to store keys without bias: copies of it, without and with the keys' part."""
    heads = resolved.heads()
    num_layers = sum(kv_format.is_quantized for kv_format in resolved.formats())
    if heads is None or heads.rope_dim or num_layers == 0:
        return []
    is_plain = isinstance(specs[0], GroupedAttentionSpec) and specs[0].is_plain_softmax
    has_rotated_bias = any(spec.has_key_bias for spec in specs)
    means = []
    if is_plain and not has_rotated_bias:
        mean_bytes = num_layers * key_bias_spec(heads.num_kv_heads, heads.head_dim).num_bytes
        reason = f"what the keys of a head have in common, in {num_layers} layers"
        means = [Term("attention/key_means", mean_bytes, reason)]
    if not heads.has_separable_key_bias or not (is_plain or has_rotated_bias):
        return means
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    num_bytes = num_layers * width * DTYPE_BYTES[resolved.dtype]
    terms = [*means, Term("attention/qkv_bias", num_bytes, f"biases of {num_layers} layers with zeros for the keys")]
    biased = next((spec for spec in specs if spec.has_key_bias), None)
    return terms if biased is None else [*terms, *key_bias_terms((biased,) * num_layers)]


def _key_scale_terms(resolved: Resolved) -> list[Term]:
    """Return the scales of keys, and of queries, by pair."""
    heads = resolved.heads() if resolved.key_scale else None
    num_layers = 0 if heads is None else sum(one.rotates_keys for one in resolved.formats())
    if heads is None or not num_layers:
        return []
    num_bytes = 2 * num_layers * key_bias_spec(heads.num_kv_heads, heads.head_dim).num_bytes
    return [Term("attention/key_scales", num_bytes, f"factors of keys and queries by pair, in {num_layers} layers")]


def _device_terms(resolved: Resolved, has_graphs: bool) -> list[Term]:
    """Return what a device costs whatever the model, and what loading holds for a while."""
    target, limits, staging = resolved.target, resolved.limits, resolved.staging
    terms = [] if staging is None else [staging]
    if target.kind != "cuda":
        if target.context_bytes:
            held = "libraries, code, vocabulary" if target.present_bytes else "libraries and code"
            terms.append(Term(PROCESS_OWNER, target.context_bytes, f"the process itself: {held}"))
        # Rank 0 alone has a tokenizer, which a measured process already holds.
        if target.context_bytes and not target.present_bytes and not resolved.mesh.rank:
            vocab_size = resolved.declared.vocab_size
            reason = f"{vocab_size:,} tokens of {TOKEN_BYTES} bytes each, as measured"
            terms.append(Term(TOKENIZER_OWNER, tokenizer_bytes(vocab_size), reason))
        return terms
    context_bytes = target.context_bytes - (SPLIT_K_BYTES if resolved.is_invariant else 0)
    terms.append(Term("cuda context", context_bytes, "CUDA, its libraries' handles and the code of kernels"))
    if not resolved.is_invariant:
        terms.append(Term("libraries", LIBRARY_BYTES, "workspace of cuBLAS", PAGE_PHASES))
    terms.append(Term("allocator", ROUNDING_BYTES, "what torch rounds up", PAGE_PHASES))
    if has_graphs and not resolved.enforce_eager:
        bounds = limits.max_num_seqs, limits.max_num_batched_tokens, resolved.num_proposals > 0
        terms.append(graph_term(len(resolved.layers), *bounds))
    if staging is None:
        terms.append(Term("staging", STAGING_BYTES, "rows on their way to their place", ("load",)))
    return terms
