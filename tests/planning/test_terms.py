"""Terms by owner and phase: each from shapes, none forgotten, none counted twice."""

import itertools
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from holdfast.attention.declarations import INDEX_SCORE_BYTES, AttentionSpec, StepBounds
from holdfast.config import EngineConfig, Limits
from holdfast.distributed.mesh import meshes
from holdfast.families.choose import DECLARATIONS
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.geometry import EDITS_PER_PROGRAM
from holdfast.memory.devices import SPLIT_K_BYTES
from holdfast.memory.planner import PAGE_PHASES, PHASES, Term
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import declare_decoder
from holdfast.planning.resolve import DEFAULT_MAX_NUM_BATCHED_TOKENS, PlanRequest, resolve
from holdfast.planning.target import Target
from holdfast.planning.terms import (
    BLOCK_ELEMENTS,
    EDITED_ELEMENTS,
    LIBRARY_BYTES,
    LISTED_PAGES,
    MAX_GRAPH_ROWS,
    PROMPT_ROWS,
    ROUNDING_BYTES,
    STAGING_BYTES,
    Needs,
    batch_terms,
    device_specs,
    edited_rows_per_block,
    graph_bytes,
    graph_sizes,
    graph_term,
    host_specs,
    input_specs,
    list_needs,
    mixed_sizes,
    page_table_specs,
    rows_per_block,
    sampling_terms,
)
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from models.model_sample import SOME_MODELS
from planning.plan_cases import H200, HOST, declared, plan_request

ROPE = ("rope/table", "rope/frequencies")
INPUTS = ["inputs/token_ids", "inputs/positions", "inputs/slots", "inputs/logit_rows"]


def test_figures_of_a_gpu():
    terms = {term.owner: term.num_bytes for term in batch_terms(Limits(256, 8192, 2**20, 16), "cuda")}
    assert terms == {
        **dict.fromkeys([*INPUTS, "inputs/keep_slots"], 64 * 1024),
        "inputs/page_table": 64 * 1024**2,
        "inputs/page_updates": 64 * 1024,
    }


@pytest.mark.parametrize("max_num_seqs", [1, 512])
def test_batch_terms_on_cpu_have_no_page_table(max_num_seqs):
    terms = batch_terms(Limits(max_num_seqs, 2048, 2**20, 16), "cpu")
    assert [(term.owner, term.num_bytes) for term in terms] == [(owner, 8 * 2048) for owner in INPUTS]


@given(st.integers(1, 600), st.integers(1, 20000), st.integers(1, 2**21), st.sampled_from([1, 2, 16, 64, 256]))
def test_input_specs_have_room_for_every_step(max_num_seqs, max_num_rows, max_model_len, page_tokens):
    limits = Limits(max_num_seqs, max_num_rows, max_model_len, page_tokens)
    for spec in (*input_specs(limits), *input_specs(limits, 1, "cuda")):
        assert 0 <= spec.shape[0] - max_num_rows < ALIGNMENT_BYTES // 8
        assert spec.num_bytes == spec.aligned_bytes
    table, updates = page_table_specs(limits)
    num_seqs, num_pages = table.shape
    assert num_seqs == max_num_seqs
    assert (num_pages - 1) * page_tokens < max_model_len <= num_pages * page_tokens
    assert updates.shape[0] == max_num_seqs * LISTED_PAGES
    specs = (*input_specs(limits, 1, "cuda"), table, updates)
    assert [term.num_bytes for term in batch_terms(limits, "cuda")] == [spec.num_bytes for spec in specs]
    assert all(term.reason for term in batch_terms(limits, "cuda"))


def test_graph_sizes_by_hand() -> None:
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(256)[-13:] == (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert graph_sizes(512)[-3:] == (448, 480, 512)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (5, (1, 2, 4, 5)), (33, (1, 2, 4, 8, 16, 24, 32, 33))]
)
def test_graph_sizes_end_with_largest_step(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@given(st.integers(1, 2**31 - 1))
def test_graph_sizes_are_few_and_at_most_double(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == min(most, MAX_GRAPH_ROWS)
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) < 60, "absurd limits do not make absurd ladders"
    assert all(upper <= 2 * lower for lower, upper in pairwise(sizes)), "no step is mostly padding"


@pytest.mark.parametrize(("most", "sizes"), [(63, ()), (64, (64,)), (300, (64, 128, 256)), (8192, (64, 128, 256, 512))])
def test_buckets_of_mixed_steps(most: int, sizes: tuple[int, ...]) -> None:
    assert mixed_sizes(most) == sizes
    assert mixed_sizes(most, has_proposals=True) == (8, 16, 32, *sizes), (
        "few sequences with proposals are not padded to 64"
    )
    assert mixed_sizes(20, has_proposals=True) == (8, 16)


def test_bytes_grow_with_layers_and_graphs() -> None:
    assert graph_bytes(64, 20) > graph_bytes(32, 20) > graph_bytes(32, 10) > 0
    term = graph_term(64, 256, 8192)
    num_graphs = len(graph_sizes(256)) + 4
    assert (term.owner, term.num_bytes, term.phases) == ("cuda graphs", graph_bytes(64, num_graphs), PAGE_PHASES)
    assert graph_term(64, 256, 16).num_bytes == graph_bytes(64, len(graph_sizes(16))), (
        "no step has more rows than tokens"
    )


def num_bytes(max_num_seqs: int, vocab_size: int, device_kind: str = "cpu") -> dict[str, int]:
    return {term.owner: term.num_bytes for term in sampling_terms(max_num_seqs, vocab_size, device_kind)}


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152, 151936, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
def test_rows_per_block_holds_one_row_up_to_its_elements(vocab_size):
    rows = rows_per_block(vocab_size, 10**9)
    assert rows >= 1
    assert rows == 1 or rows * vocab_size <= BLOCK_ELEMENTS
    assert (rows + 1) * vocab_size > BLOCK_ELEMENTS
    assert rows_per_block(vocab_size, 1) == 1
    edited_rows = edited_rows_per_block(vocab_size, 10**9)
    assert edited_rows == 1 or edited_rows * vocab_size <= EDITED_ELEMENTS
    assert edited_rows_per_block(vocab_size, 1) == 1


@pytest.mark.parametrize(("max_num_seqs", "most_mib"), [(1, 14), (256, 60), (1024, 62)])
def test_sampling_terms_of_gpu_stay_below_limit(max_num_seqs, most_mib):
    """Edited rows are most of it; what grows with the sequences is little."""
    assert sum(num_bytes(max_num_seqs, 151936, "cuda").values()) < most_mib * 2**20


@pytest.mark.parametrize("vocab_size", [1, 100, 151936])
@pytest.mark.parametrize("max_num_seqs", [1, 64, 256])
def test_buffers_of_a_gpu(max_num_seqs, vocab_size):
    shapes = {spec.name: spec.shape for spec in device_specs(max_num_seqs, vocab_size)}
    rows = max(max_num_seqs, PROMPT_ROWS)
    assert shapes["argmax"] == shapes["chosen"] == (rows,)
    assert shapes["rows"][0] == 2 * rows  # a choice and log-probabilities
    assert shapes["block"][0] <= shapes["chunk_weights"][0] <= rows
    assert shapes["block_argmax"][0] >= max(PROMPT_ROWS, shapes["block"][0])
    assert shapes["edits"][0] % EDITS_PER_PROGRAM == 0
    assert shapes["edits"][0] >= min(4 * shapes["block"][0] * vocab_size, 2**20)
    assert all(shapes[spec.name] == spec.shape for spec in host_specs(max_num_seqs, vocab_size))


def test_sampling_terms_of_gpu_list_every_buffer():
    terms = sampling_terms(256, 151936, "cuda")
    assert [term.owner for term in terms] == [f"sampling/{spec.name}" for spec in device_specs(256, 151936)]
    assert {term.phases for term in terms} == {("capture", "serve")}


def test_sampling_terms_stop_growing_once_block_is_full():
    few, many = num_bytes(27, 151936), num_bytes(1024, 151936)
    assert many["sampling/block"] == few["sampling/block"] < 104 * 2**20
    assert many["sampling/edits"] == few["sampling/edits"] < 4 * 2**20
    assert many["sampling/results"] < 4 * 2**20


def test_sampling_terms_single_sequence_takes_no_whole_block():
    assert num_bytes(1, 151936)["sampling/block"] < num_bytes(27, 151936)["sampling/block"] / 26


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab_size", [2, 49152, 151936])
def test_sampling_terms_never_shrink_with_more_sequences(vocab_size, device_kind):
    plans = [num_bytes(max_num_seqs, vocab_size, device_kind) for max_num_seqs in (1, 2, 27, 28, 256)]
    for fewer, more in itertools.pairwise(plans):
        assert all(fewer[owner] <= more[owner] for owner in fewer)


def test_reasons_are_words_for_the_table():
    assert all(term.reason and term.owner for kind in ("cpu", "cuda") for term in sampling_terms(8, 1000, kind))


def test_terms_module_imports_no_torch():
    code = "import sys, holdfast.planning.terms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NARROW = "turboquant_4bit_nc"


def needs(*args, **options) -> Needs:
    return list_needs(resolve(plan_request(*args, **options)))


def by_owner(found: Needs) -> dict[str, Term]:
    owners = [term.owner for term in found.terms]
    assert len(owners) == len(set(owners)), f"an owner is counted twice: {owners}"
    return {term.owner: term for term in found.terms}


@pytest.mark.parametrize("name", SOME_MODELS)
def test_weights_add_up_to_their_arena(name: str) -> None:
    is_stored = declared(name).stored_recipe is not None
    for quantization in (None, *(() if is_stored else WEIGHT_SCHEMES)):
        wanted = plan_request(name, quantization=quantization)
        resolved = resolve(wanted)
        weights = [term for term in list_needs(resolved).terms if term.group == "weights"]
        assert sum(term.num_bytes for term in weights) == wanted.declared.weight_bytes(resolved.dtype, resolved.recipe)
        scheme = resolved.recipe.scheme
        assert scheme is None or any(scheme.name in term.reason for term in weights)


def test_weights_say_every_way_in_which_they_are_stored() -> None:
    reasons = {owner: term.reason for owner, term in by_owner(needs("Qwen3-30B-A3B", quantization="fp8")).items()}
    assert reasons["weights/layers"] == "336 tensors in fp8 and bfloat16"
    assert reasons["weights/experts"] == "96 tensors in fp8"
    assert reasons["weights/lm_head"] == "1 tensor in int8"
    assert reasons["weights/embed"] == reasons["weights/final_norm"] == "1 tensor in bfloat16"
    stored = by_owner(needs("DeepSeek-R1"))["weights/layers"]
    assert stored.reason == "726 tensors in fp8_block, bfloat16 and float32"


def test_owners_on_a_gpu() -> None:
    found = by_owner(needs("Qwen3-8B", H200))
    groups = {term.group for term in found.values()}
    assert groups == {
        *("weights", "workspace", "inputs", "sampling", "rope", "attention"),
        *("cuda context", "libraries", "allocator", "cuda graphs", "staging"),
    }
    assert {"weights/embed", "weights/layers", "weights/lm_head", "weights/final_norm"} <= found.keys()
    assert found["cuda context"].num_bytes == H200.context_bytes
    assert found["libraries"].num_bytes == LIBRARY_BYTES
    assert found["cuda graphs"] == graph_term(36, 256, 8192)
    assert (found["staging"].num_bytes, found["staging"].phases) == (STAGING_BYTES, ("load",))
    assert all(found[owner].phases == PHASES for owner in ("weights/layers", "cuda context"))
    assert all(found[owner].phases == PAGE_PHASES for owner in ("libraries", "allocator", "cuda graphs"))
    assert found["allocator"].num_bytes == ROUNDING_BYTES
    assert found["rope/table"].num_bytes == 2 * 2 * 8192 * 64
    assert found["rope/frequencies"].num_bytes == 4 * 64


def test_list_needs_batch_invariant_has_no_cublas_workspace() -> None:
    usual, invariant = by_owner(needs("Qwen3-8B", H200)), by_owner(needs("Qwen3-8B", H200, batch_invariant=True))
    assert usual.keys() - invariant.keys() == {"libraries"}
    assert usual["cuda context"].num_bytes - invariant["cuda context"].num_bytes == SPLIT_K_BYTES


def test_owners_on_a_cpu() -> None:
    found = by_owner(needs("Qwen3-0.6B", HOST))
    assert {term.group for term in found.values()} == {"weights", "workspace", "inputs", "sampling", "pooling", "rope"}
    assert {"weights/embed", "weights/layers", "weights/final_norm"} <= found.keys()
    assert found["weights/embed"].num_bytes == 4 * 151936 * 1024
    process = by_owner(needs("Qwen3-0.6B", HOST._replace(context_bytes=300 * 2**20)))["python and torch"]
    assert (process.num_bytes, process.phases) == (300 * 2**20, PHASES)
    unmeasured = HOST._replace(context_bytes=300 * 2**20)
    tokenizer = by_owner(needs("Qwen3-0.6B", unmeasured))["tokenizer"]
    assert (tokenizer.num_bytes, tokenizer.phases) == (800 * 151936, PHASES)
    assert "151,936 tokens of 800 bytes" in tokenizer.reason
    assert "tokenizer" not in by_owner(needs("Qwen3-0.6B", unmeasured._replace(present_bytes=1))), "it was measured"
    rows = DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"]
    assert found["rope/table"].num_bytes == 4 * 2 * rows * 64


def test_list_needs_includes_terms_of_every_module() -> None:
    wanted = plan_request("Qwen3-8B", H200, max_num_seqs=17, max_num_batched_tokens=99)
    found = list_needs(resolve(wanted))
    limits = resolve(wanted).limits
    assert set(batch_terms(limits, "cuda")) <= set(found.terms)
    assert set(sampling_terms(17, 151936, "cuda")) <= set(found.terms)
    assert set(found.workspace.terms()) <= set(found.terms)
    assert set(sampling_terms(64, 151936, "cpu")) <= set(needs("Qwen3-8B", HOST).terms)


def test_rows_that_are_chosen_from_may_be_more_than_sequences() -> None:
    """Logits and what chooses from them have room for all of them; inputs and tables are as they were."""
    resolved = resolve(plan_request("Qwen3-8B", H200, max_num_seqs=200, max_num_batched_tokens=2000))
    more = replace(resolved, limits=replace(resolved.limits, max_sampled_rows=1000))
    found, plain = (by_owner(list_needs(one)) for one in (more, resolved))
    assert found["sampling/chosen"].num_bytes == 8192 > plain["sampling/chosen"].num_bytes
    assert set(sampling_terms(1000, 151936, "cuda")) <= set(found.values())
    logits = next(request for request in list_needs(more).requests if request.owner == "head")
    assert any(spec.shape == (1000, 151936) for spec in logits.specs)
    same = [owner for owner in found if owner.startswith(("inputs/", "attention/", "cuda graphs"))]
    assert len(same) > 6
    assert all(found[owner] == plain[owner] for owner in same)


def test_eager_needs_no_graphs() -> None:
    assert "cuda graphs" not in by_owner(needs(enforce_eager=True))


def test_list_needs_graph_term_counts_layers_of_stage() -> None:
    """As one rank does; between nodes none does."""
    first, last = (by_owner(needs(mesh=mesh)) for mesh in meshes(1, [(0, 20), (20, 36)]))
    assert first["cuda graphs"] == graph_term(20, 256, 8192)
    assert last["cuda graphs"] == graph_term(16, 256, 8192)
    assert "cuda graphs" in by_owner(needs(mesh=meshes(2)[1]))
    far, *_ = meshes(8, [(0, 20), (20, 36)])
    assert "cuda graphs" not in by_owner(needs(mesh=far))
    assert "cuda graphs" not in by_owner(needs(mesh=meshes(1, [(0, 20), (20, 36)])[0], enforce_eager=True))


def test_ranks_exchange_rows_and_logits() -> None:
    """Qwen3-8B in bfloat16: rooms of the largest step, logits of a share, and the whole on the rank that chooses."""
    rows, hidden, vocab, logit_rows = 8192, 4096, 151936, 256
    assert not [owner for owner in by_owner(needs()) if "exchange" in owner]
    first, last = (by_owner(needs(mesh=mesh)) for mesh in meshes(2))
    assert first["exchange/rows"].num_bytes == last["exchange/rows"].num_bytes == 2 * rows * hidden * 2
    assert first["exchange/logits"].num_bytes == logit_rows * vocab // 2 * 4
    assert first["exchange/whole_logits"].num_bytes == logit_rows * vocab * 4
    assert "exchange/whole_logits" not in last
    assert "collectives/nccl" not in first, "one node does without"
    apart = by_owner(needs(mesh=meshes(8, [(0, 18), (18, 36)])[0]))
    assert {"collectives/nccl", "exchange/rounding"} <= apart.keys(), "two nodes do not"
    exact = by_owner(needs(mesh=meshes(2, is_exact=True)[0], batch_invariant=True))
    assert exact["exchange/rows"].num_bytes == 2 * rows * max(hidden, 12288 // 2) * 2, (
        "inner widths of ranks are gathered"
    )
    stages = [by_owner(needs(mesh=mesh)) for mesh in meshes(1, [(0, 20), (20, 36)])]
    assert all(stage["pipeline/hidden"].num_bytes == 2 * rows * hidden * 2 for stage in stages)
    assert "exchange/rows" not in stages[0]
    assert ["rope/table" in stage for stage in stages] == [True, True]
    assert {"weights/embed", "weights/lm_head"} & stages[0].keys() == {"weights/embed"}
    assert {"weights/embed", "weights/lm_head"} & stages[1].keys() == {"weights/lm_head"}


def test_staging_that_is_known_replaces_the_most() -> None:
    staging = Term("staging", 7, "dummy rows", ("load",))
    for target in (H200, HOST):
        assert by_owner(needs(target=target, staging=staging))["staging"] is staging


@for_each("name", CATALOGUE)
def test_rope_rows_at_a_million_tokens_take_8_mib_at_most(name: str) -> None:
    model = declared(name)
    if model.has_learned_positions:
        return
    short, long = (by_owner(needs(name, H200, max_model_len=length)) for length in (4096, 2**20))
    assert 0 < long["rope/table"].num_bytes <= 8 * 2**20
    assert [short[owner] for owner in ROPE] == [long[owner] for owner in ROPE]


def test_entries_have_rows_of_their_own() -> None:
    """DeepSeek-V4-Flash: two rotations of tokens, and one of entries of 4 and of 128 tokens each."""
    found = by_owner(needs("DeepSeek-V4-Flash", H200))
    assert found["rope/table"].num_bytes == 4 * 2 * 2 * 8192 * 32
    assert found["rope/frequencies"].num_bytes == 4 * 4 * 32


def test_learned_positions_have_no_rotary_table() -> None:
    assert "rope/table" not in by_owner(needs("OPT-125m", H200))


@pytest.mark.parametrize(("num_seqs", "rows"), [(1, PROMPT_ROWS), (64, 64), (300, 300)])
def test_logits_of_prompts_want_some_rows_even_for_one_sequence(num_seqs: int, rows: int) -> None:
    head = next(request for request in needs(max_num_seqs=num_seqs).requests if request.owner == "head")
    assert {spec.name: spec.shape for spec in head.specs}["logits"] == (rows, 151936)


def test_planes_that_need_padding_say_so() -> None:
    assert "kv pages/padding" not in by_owner(needs("Qwen3-8B", H200))
    narrow = {"kv_cache_dtype": "turboquant_3bit_nc", "page_tokens": 1}
    # Of a page, codes have 8 * 32 bytes, sign bits 8 * 16 and scales 16: none, 128 and 240 may be lost behind each.
    padding = by_owner(needs("Qwen3-8B", H200, **narrow, kv_protected_layers=0))["kv pages/padding"]
    assert padding.num_bytes == 36 * 2 * (0 + 128 + 240)
    # In fp8, codes have 8 * 128.
    mixed = by_owner(needs("Qwen3-8B", H200, **narrow, kv_protected_layers=4))["kv pages/padding"]
    assert mixed.num_bytes == 32 * 2 * (128 + 240) + 4 * 2 * 240
    assert mixed.reason.count("layers, each with") == 2
    assert "kv pages/padding" not in by_owner(needs("Qwen3-8B", H200, kv_cache_dtype="turboquant_3bit_nc"))


def test_list_needs_counts_states_per_sequence_of_v4() -> None:
    wanted = plan_request("DeepSeek-V4-Flash", H200, max_num_seqs=10)
    terms = by_owner(list_needs(resolve(wanted)))
    states = {owner: term for owner, term in terms.items() if owner.startswith("kv state/")}
    assert list(states) == ["kv state/entries of 4", "kv state/index of 4", "kv state/entries of 128"]
    # Of a channel the largest gate, the sum of weights and the weighted sum, in float32; twice where entries overlap.
    per_sequence = 3 * 4 * (21 * 2 * 512 + 21 * 2 * 128 + 20 * 512)
    assert sum(term.num_bytes for term in states.values()) == 10 * per_sequence
    assert per_sequence == wanted.declared.kv_bytes_per_sequence("bfloat16") == 445_440
    assert {term.phases for term in states.values()} == {("capture", "serve")}
    assert not any(owner.startswith("kv state") for owner in by_owner(needs("DeepSeek-R1", H200)))


def test_scratch_of_a_backend_is_part_of_attention() -> None:
    wanted = plan_request("Qwen3-8B", H200)
    resolved = resolve(wanted)
    found = list_needs(resolved)
    assert isinstance(found.declaration, TritonPagedDeclaration)
    heads, cache = resolved.heads(), resolved.pages().cache
    assert heads is not None
    assert cache is not None
    specs = [resolved.attention_spec(layer, heads) for layer in cache.layers]
    scratch = found.declaration.scratch(specs, StepBounds(256, 8192, 16))
    attention = next(request for request in found.requests if request.owner == "attention")
    assert attention.specs[-len(scratch) :] == scratch
    assert set(found.declaration.terms(specs, StepBounds(256, 8192, 16))) <= set(found.terms)


@pytest.mark.parametrize("target", [H200, HOST], ids=["gpu", "cpu"])
@pytest.mark.parametrize("kv_format", [name for name, value in KV_FORMATS.items() if value.is_quantized])
def test_list_needs_quantized_pages_backend_takes_every_layer(target: Target, kv_format: str) -> None:
    for options in ({}, {"kv_protected_layers": 3, "kv_protected_dtype": "auto"}):
        resolved = resolve(plan_request("Qwen3-8B", target, kv_cache_dtype=kv_format, **options))
        found, cache, heads = list_needs(resolved), resolved.pages().cache, resolved.heads()
        assert found.declaration is not None
        assert cache is not None
        assert heads is not None
        specs = [resolved.attention_spec(layer, heads) for layer in cache.layers]
        assert [reason for spec in specs if (reason := found.declaration.unsupported(spec)) is not None] == []
        limits = resolved.limits
        bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
        assert set(found.declaration.terms(specs, bounds)) <= set(found.terms), "one layer of each kind stands for all"


class Recording:
    """A declaration that takes everything, and remembers which layers it was queried about."""

    name, can_be_captured, can_be_invariant = "recording", False, False

    def __init__(self) -> None:
        self.layers: list[tuple[str, int | None]] = []

    def unsupported(self, spec: AttentionSpec) -> None:
        self.layers.append((spec.cache.format.name, spec.window))

    def scratch(self, specs, bounds):
        return ()

    terms = scratch


@pytest.mark.parametrize(
    ("changes", "options", "layers"),
    [
        ({}, {"kv_protected_layers": 0}, [(NARROW, None), (NARROW, 8)]),
        ({}, {"kv_protected_layers": 2}, [("fp8", None), (NARROW, None), (NARROW, 8), ("fp8", 8)]),
        ({}, {"kv_protected_layers": "2,3"}, [(NARROW, None), ("fp8", 8)]),
        ({"qkv_bias": True}, {"kv_protected_layers": "2,3"}, [(NARROW, None), ("fp8", 8)]),
        ({"qkv_bias": True}, {"kv_protected_layers": 1}, [("fp8", None), (NARROW, None), (NARROW, 8)]),
        (
            {"qkv_bias": True},
            {"kv_protected_layers": 1, "max_model_len": 8},
            [("fp8", None), (NARROW, None), ("fp8", 8), (NARROW, 8)],
        ),
    ],
    ids=["one format", "both ends", "a list", "a list in spite of biases", "of groups by position", "any may be one"],
)
def test_list_needs_queries_one_layer_of_each_kind(monkeypatch, changes, options, layers) -> None:
    """Two layers without a window, two with one."""
    spec = declared("Qwen3-8B").spec
    assert spec is not None
    spec = replace(spec, num_layers=4, sliding_windows=(None, None, 8, 8), **changes)
    recording = Recording()
    monkeypatch.setitem(DECLARATIONS, GroupedAttentionSpec, (recording,))
    config = EngineConfig(kv_cache_dtype=NARROW, **options)
    list_needs(resolve(PlanRequest(config, declare_decoder(spec, "x"), H200)))
    assert recording.layers == layers


def test_windows_are_kept_apart() -> None:
    found = needs("Mistral-7B-v0.3", HOST, dtype="bfloat16")
    assert found.declaration is not None
    assert "1 templates" in by_owner(found)["attention/masks"].reason


@pytest.mark.parametrize("name", ["Qwen3-32B", "DeepSeek-R1"])
def test_scratch_does_not_grow_with_the_context(name: str) -> None:
    short, long = (needs(name, H200, max_model_len=length).workspace.total_bytes for length in (2**15, 2**20))
    assert short == long


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4-Pro"])
def test_scratch_of_an_index_has_a_bound_that_no_context_moves(name: str) -> None:
    """Its scores are of as many rows as the bound allows: longer contexts take fewer of them at a time."""
    lengths = [2**power for power in (12, 15, 17, 18, 20, 22)]
    totals = [needs(name, H200, max_model_len=length).workspace.total_bytes for length in lengths]
    # Scores, and what the largest of them are found in; a row of the longest is far below either.
    assert max(totals) - totals[0] <= 2 * INDEX_SCORE_BYTES
    assert totals[-1] <= max(totals[1:4])
