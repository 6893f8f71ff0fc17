"""Terms by owner and phase: each from shapes, none forgotten, none counted twice."""

from dataclasses import replace

import pytest

from holdfast.attention.declarations import AttentionSpec, StepBounds, TritonPagedDeclaration
from holdfast.config import EngineConfig
from holdfast.memory.planner import PAGE_PHASES, PHASES, Term
from holdfast.models.blueprints.blueprint import spec_blueprint
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.fit import Wish, settle
from holdfast.planning.target import Target
from holdfast.planning.terms import (
    COLLECTIVE_BYTES,
    LIBRARY_BYTES,
    PROMPT_ROWS,
    ROUNDING_BYTES,
    STAGING_BYTES,
    Needs,
    batch_terms,
    graph_term,
    list_needs,
    sampling_terms,
)
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from runner.plan_cases import H200, HOST, blueprint, wish

NARROW = "turboquant_4bit_nc"


def needs(*args, **options) -> Needs:
    return list_needs(*settle(wish(*args, **options)))


def by_owner(found: Needs) -> dict[str, Term]:
    owners = [term.owner for term in found.terms]
    assert len(owners) == len(set(owners)), f"somebody is counted twice: {owners}"
    return {term.owner: term for term in found.terms}


@pytest.mark.parametrize("name", CATALOGUE)
def test_weights_add_up_to_their_arena(name: str) -> None:
    is_stored = blueprint(name).stored_recipe is not None
    for quantization in (None, *(() if is_stored else WEIGHT_SCHEMES)):
        wanted = wish(name, quantization=quantization)
        layout, resolved = settle(wanted)
        weights = [term for term in list_needs(layout, resolved).terms if term.group == "weights"]
        assert sum(term.num_bytes for term in weights) == wanted.blueprint.weight_bytes(resolved.dtype, resolved.recipe)
        scheme = resolved.recipe.scheme
        assert scheme is None or any(scheme.name in term.reason for term in weights)


def test_weights_say_every_way_in_which_they_are_stored() -> None:
    reasons = {owner: term.reason for owner, term in by_owner(needs("Qwen3-30B-A3B", quantization="fp8")).items()}
    assert reasons["weights/layers"] == "336 tensors in fp8 and bfloat16"
    assert reasons["weights/experts"] == "96 tensors in fp8"
    assert reasons["weights/lm_head"] == "1 tensor in int8"
    assert reasons["weights/embed"] == reasons["weights/final_norm"] == "1 tensor in bfloat16"
    stored = by_owner(needs("DeepSeek-R1"))["weights/layers"]
    assert stored.reason == "787 tensors in fp8_block, bfloat16 and float32"


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
    assert found["rope/table"].num_bytes == 2 * 2 * 40960 * 128


def test_owners_on_a_cpu() -> None:
    found = by_owner(needs("Qwen3-0.6B", HOST))
    assert {term.group for term in found.values()} == {"weights", "workspace", "inputs", "sampling", "rope"}
    assert {"weights/embed", "weights/layers", "weights/final_norm"} <= found.keys()
    assert found["weights/embed"].num_bytes == 4 * 151936 * 1024
    assert found["rope/table"].num_bytes == 4 * 2 * 40960 * 128


def test_neighbours_are_asked_for_their_own_terms() -> None:
    wanted = wish("Qwen3-8B", H200, max_num_seqs=17, max_num_batched_tokens=99)
    found = list_needs(*settle(wanted))
    limits = settle(wanted)[1].limits
    assert set(batch_terms(limits, "cuda")) <= set(found.terms)
    assert set(sampling_terms(17, 151936, "cuda")) <= set(found.terms)
    assert set(found.workspace.terms()) <= set(found.terms)
    assert set(sampling_terms(64, 151936, "cpu")) <= set(needs("Qwen3-8B", HOST).terms)


def test_eager_needs_no_graphs() -> None:
    assert "cuda graphs" not in by_owner(needs(enforce_eager=True))


def test_ranks_need_collectives() -> None:
    assert "collectives" not in by_owner(needs())
    assert by_owner(needs(tensor_parallel_size=2))["collectives"].num_bytes == COLLECTIVE_BYTES


def test_staging_that_is_known_replaces_the_most() -> None:
    staging = Term("staging", 7, "made-up rows", ("load",))
    for target in (H200, HOST):
        assert by_owner(needs(target=target, staging=staging))["staging"] is staging


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


def test_what_a_sequence_keeps_whatever_its_length() -> None:
    wanted = wish("DeepSeek-V4-Flash", H200, max_num_seqs=10)
    state = by_owner(list_needs(*settle(wanted)))["kv state"]
    assert state.num_bytes == 10 * wanted.blueprint.kv_bytes_per_sequence("bfloat16")
    assert state.phases == ("capture", "serve")
    assert "kv state" not in by_owner(needs("DeepSeek-R1", H200))


def test_scratch_of_a_backend_is_part_of_attention() -> None:
    wanted = wish("Qwen3-8B", H200)
    layout, resolved = settle(wanted)
    found = list_needs(layout, resolved)
    assert isinstance(found.declaration, TritonPagedDeclaration)
    heads, cache = layout.heads(), layout.cache(resolved)
    assert heads is not None
    assert cache is not None
    specs = [layout.attention_spec(resolved, layer, heads) for layer in cache.layers]
    scratch = found.declaration.scratch(specs, StepBounds(256, 8192, 16))
    attention = next(request for request in found.requests if request.owner == "attention")
    assert attention.specs[-len(scratch) :] == scratch
    assert set(found.declaration.terms(specs, StepBounds(256, 8192, 16))) <= set(found.terms)


@pytest.mark.parametrize("target", [H200, HOST], ids=["gpu", "cpu"])
@pytest.mark.parametrize("kv_format", [name for name, value in KV_FORMATS.items() if value.is_coded])
def test_whoever_reads_coded_pages_takes_every_layer(target: Target, kv_format: str) -> None:
    for options in ({}, {"kv_protected_layers": 3, "kv_protected_dtype": "auto"}):
        layout, resolved = settle(wish("Qwen3-8B", target, kv_cache_dtype=kv_format, **options))
        found, cache, heads = list_needs(layout, resolved), layout.cache(resolved), layout.heads()
        assert found.declaration is not None
        assert cache is not None
        assert heads is not None
        specs = [layout.attention_spec(resolved, layer, heads) for layer in cache.layers]
        assert [reason for spec in specs if (reason := found.declaration.unsupported(spec)) is not None] == []
        limits = resolved.limits
        bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
        assert set(found.declaration.terms(specs, bounds)) <= set(found.terms), "one layer of each kind stands for all"


class Asked:
    """A declaration that takes everything, and remembers which layers it was asked about."""

    name, can_be_captured, can_be_invariant = "asked", False, False

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
        ({"qkv_bias": True}, {"kv_protected_layers": 1}, [("fp8", None), (NARROW, None), ("fp8", 8), (NARROW, 8)]),
    ],
    ids=["one format", "both ends", "a list", "a list in spite of biases", "any layer may be protected"],
)
def test_one_layer_of_each_kind_is_asked_about(monkeypatch, changes, options, layers) -> None:
    """Two layers without a window, two with one."""
    spec = blueprint("Qwen3-8B").spec
    assert spec is not None
    spec = replace(spec, num_layers=4, sliding_windows=(None, None, 8, 8), **changes)
    asked = Asked()
    monkeypatch.setattr("holdfast.attention.declarations.DECLARATIONS", (asked,))
    config = EngineConfig(kv_cache_dtype=NARROW, **options)
    list_needs(*settle(Wish(config, spec_blueprint(spec, "x"), H200)))
    assert asked.layers == layers


def test_windows_are_kept_apart() -> None:
    found = needs("Mistral-7B-v0.3", HOST, dtype="bfloat16")
    assert found.declaration is not None
    assert "1 templates" in by_owner(found)["attention/masks"].reason


@pytest.mark.parametrize("name", ["Qwen3-32B", "DeepSeek-R1", "DeepSeek-V4-Pro"])
def test_scratch_does_not_grow_with_the_context(name: str) -> None:
    short, long = (needs(name, H200, max_model_len=length).workspace.total_bytes for length in (2**15, 2**20))
    assert short == long
