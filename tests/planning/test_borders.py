"""Plans to the byte: what fits with exactly the bytes that are needed, with one fewer and with a page more; protected layers of ranks."""

from dataclasses import replace
from typing import Any

import pytest

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import MemoryPlanError
from holdfast.planning.fit import fit_runner, try_fit, unfitting_runner
from holdfast.planning.plan import plan_runner
from holdfast.planning.ranks import rank_meshes
from holdfast.planning.resolve import PlanRequest, resolve
from planning.plan_cases import GIB, H200, HOST, declared, plan_request

LARGE_HOST = HOST._replace(total_bytes=128 * GIB, available_bytes=128 * GIB)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied embedding": ("Qwen3-0.6B", {}),
    "odd vocabulary, learned positions": ("OPT-125m", {"max_model_len": 999}),
    "biases": ("Qwen2.5-0.5B-Instruct", {}),
    "a share of ranks": ("Qwen3-0.6B", {"mesh": Mesh(tensor_rank=3, tensor_size=4)}),
    "a middle stage": ("Qwen3-0.6B", {"mesh": Mesh(stage=1, num_stages=3, layers=(9, 17))}),
    "cache groups": ("gemma-3-1b-it", {"max_model_len": 5000}),
    "quantized pages": ("Qwen3-0.6B", {"kv_cache_dtype": "turboquant_4bit_nc"}),
    "latents": ("DeepSeek-V2-Lite", {}),
    "no pages by head": ("gemma-2-9b", {}),
    "graphs and proposals": ("Qwen3-0.6B", {"speculative": "ngram:3"}),
    "fp8 weights": ("Qwen3-0.6B", {"quantization": "fp8"}),
}


def bounded(kind: str, target: Any, limit: int | None = None, **more: object) -> PlanRequest:
    name, options = KINDS[kind]
    wanted = {"max_model_len": 1000, "max_num_seqs": 3, "max_num_batched_tokens": 300} | options | more
    return plan_request(name, target, **wanted, memory_limit=limit)


@pytest.mark.parametrize("target", [H200, LARGE_HOST], ids=["gpu", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_plan_needs_its_peak_and_not_one_byte_less(kind: str, target: Any) -> None:
    smallest = unfitting_runner(resolve(bounded(kind, target))).memory
    needed, page = smallest.peak_bytes, smallest.page_bytes
    exact = try_fit(resolve(bounded(kind, target, needed)))
    assert exact is not None
    assert exact.memory.num_pages == smallest.num_pages
    short = bounded(kind, target, needed - 1)
    assert try_fit(resolve(short)) is None
    with pytest.raises(MemoryPlanError) as caught:
        fit_runner(short)
    assert caught.value.table is not None
    assert caught.value.table.short_bytes == 1
    if smallest.phase_bytes["serve"] == needed:
        for more, pages in ((page - 1, 0), (page, 1), (2 * page - 1, 1)):
            assert fit_runner(bounded(kind, target, needed + more)).memory.num_pages == smallest.num_pages + pages


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_one_sequence_are_the_least_that_fit(kind: str) -> None:
    """A bound on pages alone: one longest sequence, all of them, and a byte around both."""
    smallest = unfitting_runner(resolve(bounded(kind, H200))).memory
    least = smallest.num_pages * smallest.page_bytes

    def pages(num_bytes: int) -> tuple[int, str]:
        memory = fit_runner(bounded(kind, H200, kv_cache_memory=num_bytes)).memory
        return memory.num_pages, memory.pages_reason

    assert try_fit(resolve(bounded(kind, H200, kv_cache_memory=least - 1))) is None
    assert pages(least) == (smallest.num_pages, "kv_cache_memory")
    most = resolve(bounded(kind, H200)).most_pages()
    assert most == 3 * smallest.num_pages or kind == "quantized pages"
    assert pages(most * smallest.page_bytes - 1) == (most - 1, "kv_cache_memory")
    assert pages(most * smallest.page_bytes) == (most, "every sequence at its longest needs no more")


def test_plan_runner_one_byte_short_names_missing_bytes() -> None:
    needed = unfitting_runner(resolve(bounded("tied embedding", H200))).memory.peak_bytes
    request = bounded("tied embedding", H200, needed - 1)
    with pytest.raises(MemoryPlanError, match=r"GiB \(memory_limit\), 1 B short"):
        plan_runner(request)
    assert plan_runner(bounded("tied embedding", H200, needed)).memory.peak_bytes == needed


def staged(num_stages: int, size: int = 1, **options: object) -> list[PlanRequest]:
    """The request of every rank, where layers are cut in equal parts."""
    config = EngineConfig.from_options(
        pipeline_parallel_size=num_stages, tensor_parallel_size=size, max_model_len=1000, **options
    )
    layers = declared("Qwen3-0.6B").num_layers // num_stages
    cuts = tuple((stage * layers, (stage + 1) * layers) for stage in range(num_stages))
    meshes = rank_meshes(config, cuts)
    return [PlanRequest(config, declared("Qwen3-0.6B"), H200, mesh) for mesh in meshes]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("given", "layers"), [(3, (0, 1, 27)), ("6,7,13,14", (6, 7, 13, 14)), (None, (0, 1, 26, 27))])
def test_protected_layers_are_those_of_each_stage(given: object, layers: tuple[int, ...], size: int) -> None:
    """Qwen3-0.6B: 28 layers of 8 key heads of 128 on 4 stages; 132 bytes of a head and token in 4 bits, 260 in fp8."""
    requests = staged(4, size, kv_cache_dtype="turboquant_4bit_nc", kv_near_tokens=0, kv_protected_layers=given)
    for rank, request in enumerate(requests):
        plan, resolved = fit_runner(request), resolve(request)
        first = 7 * (rank // size)
        own = [layer for layer in layers if first <= layer < first + 7]
        assert plan.cache is not None
        wide = [layer.layer for layer in plan.cache.layers if layer.format.name == "fp8"]
        assert wide in (own, [layer - first for layer in own])
        names = ["fp8" if first + place in own else "turboquant_4bit_nc" for place in range(7)]
        assert [kv_format.name for kv_format in resolved.formats()] == names
        token = (7 - len(own)) * 8 * 132 + len(own) * 8 * 260
        assert plan.kv_bytes_per_token == token // size
        assert plan.memory.page_bytes == 64 * token // size
        assert [spec.cache.format for spec in plan.attention_specs] == [layer.format for layer in plan.cache.layers]


def test_weights_of_ranks_add_up_to_those_of_one() -> None:
    """What is shared is a share, what is not is whole: norms on every rank, the tied embedding on both ends."""
    model = declared("Qwen3-0.6B")
    whole = model.weight_bytes("bfloat16", resolve(plan_request("Qwen3-0.6B")).recipe, Mesh())
    embedding, norms = 2 * 151936 * 1024, 2 * 28 * (2 * 1024 + 2 * 128)

    def weights(request: PlanRequest) -> int:
        return sum(term.num_bytes for term in fit_runner(request).memory.terms if term.group == "weights")

    assert sum(map(weights, staged(4))) == whole + embedding
    assert sum(map(weights, staged(1, 4))) == whole + 3 * (norms + 2 * 1024)


def test_context_that_is_open_gives_way_by_one_token() -> None:
    """With a byte fewer than the given context needs, the open one is one token shorter, or a page."""
    request = bounded("tied embedding", H200, max_num_seqs=1, page_tokens=1)
    needed = unfitting_runner(resolve(request)).memory.peak_bytes
    for limit, length in ((needed, 1000), (needed - 1, 999)):
        config = replace(request.config, memory_limit=limit, max_model_len=None)
        assert fit_runner(replace(request, config=config)).resolved.limits.max_model_len == length


def test_windows_of_sequences_take_a_tenth_of_the_memory() -> None:
    """The largest power of two that has room, unless a number was given; the default stays to the byte."""
    model, target = declared("gemma-2-9b"), H200._replace(total_bytes=2**50, available_bytes=2**50)
    sequence = model.kv_bytes_per_sequence("bfloat16")
    for budget, expected in (
        (10 * 256 * sequence, 256),
        (10 * 256 * sequence - 1, 128),
        (10 * 37 * sequence, 32),
        (10 * 32 * sequence, 32),
        (10 * 32 * sequence - 1, 16),
        (sequence, 1),
    ):
        config = EngineConfig(memory_limit=budget)
        resolved = resolve(PlanRequest(config, model, target))
        assert resolved.limits.max_num_seqs == expected
        printed = [choice.value for choice in resolved.choices if choice.name == "max_num_seqs"]
        assert printed == ([] if expected == 256 else [str(expected)])
        requested = resolve(PlanRequest(replace(config, max_num_seqs=300), model, target))
        assert requested.limits.max_num_seqs == 300
