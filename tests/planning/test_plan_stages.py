"""Cuts of pipeline stages: as good as any that can be tried, and never worse than equal ones."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.memory.devices import GPUS
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.fit import fit_runner
from holdfast.planning.ranks import cut_stages, rank_meshes, stage_costs
from holdfast.planning.resolve import PlanRequest
from holdfast.planning.stages import StageCosts, best_cuts, most_stages
from holdfast.planning.target import Target, gpu_target
from holdfast.planning.terms import graph_term
from planning.plan_cases import A100, H200, RTX4090, declared


def every_cut(num_layers: int, num_stages: int):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(pairwise((0, *inner, num_layers)))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_cuts_are_those_of_brute_force(data) -> None:
    """Layers of any cost, ends with a cost of their own, budgets by stage, layers that no stage may begin with or have alone."""
    num_layers = data.draw(st.integers(1, 9))
    num_stages = data.draw(st.integers(1, min(4, num_layers)))
    costs = data.draw(st.lists(st.integers(1, 50), min_size=num_layers, max_size=num_layers))
    pages = data.draw(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))
    budgets = data.draw(st.lists(st.integers(1, 400), min_size=num_stages, max_size=num_stages))
    ends = data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60)))
    shared = data.draw(st.frozensets(st.integers(1, num_layers), max_size=3)) - {num_layers}
    every = frozenset(range(num_layers))
    unpaged = data.draw(st.frozensets(st.integers(0, num_layers - 1), max_size=5))
    pages = [0 if layer in unpaged else own for layer, own in enumerate(pages)]
    needed = (every - unpaged, *data.draw(st.sampled_from([(), (unpaged,)])))

    def count_pages(stage: int, first: int, last: int) -> int:
        beside = ends[0] * (stage == 0) + ends[1] * (stage == num_stages - 1)
        left = budgets[stage] - beside - sum(costs[first:last])
        return left // sum(pages[first:last]) if left >= 0 else left

    def weigh(first: int, last: int) -> int:
        return sum(costs[first:last])

    def worth(cuts) -> tuple[int, int]:
        fewest = min(count_pages(stage, *layers) for stage, layers in enumerate(cuts))
        return fewest, -max(weigh(*layers) for layers in cuts)

    allowed = [
        cuts
        for cuts in every_cut(num_layers, num_stages)
        if not {first for first, _ in cuts} & shared
        and all(own & set(range(*layers)) for layers in cuts for own in needed)
    ]
    found = best_cuts(num_layers, num_stages, count_pages, weigh, shared, needed)
    if not shared:
        assert (num_stages <= most_stages(num_layers, needed)) == bool(allowed)
    if not allowed:
        assert found is None
        return
    assert found in allowed
    assert worth(found) == max(map(worth, allowed))


def equal_cuts(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Give each stage as many layers, and the first ones one more if they do not divide."""
    share, rest = divmod(num_layers, num_stages)
    ends = [share * (stage + 1) + min(stage + 1, rest) for stage in range(num_stages)]
    return tuple(zip([0, *ends], ends, strict=False))


CASES = [
    ("Qwen3-8B", RTX4090, 1, 2, {}),
    ("gemma-3-27b-it", H200, 2, 2, {}),
    ("gpt-oss-20b", RTX4090, 1, 3, {}),
    ("Llama-3.2-1B", RTX4090, 2, 2, {}),  # tied: both ends hold the embedding
    ("Qwen2.5-7B-Instruct", RTX4090, 1, 2, {"kv_cache_dtype": "turboquant_k3v4_nc", "quantization": "fp8"}),
    ("DeepSeek-V2-Lite", A100, 1, 2, {}),
    ("DeepSeek-V4-Flash", H200, 1, 3, {}),
    ("DeepSeek-V4-Flash", H200, 2, 2, {"kv_cache_dtype": "fp8"}),
]


@pytest.mark.parametrize(
    ("name", "target", "size", "num_stages", "options"),
    [pytest.param(*case, id=case[0], marks=[] if case[0] == "Llama-3.2-1B" else pytest.mark.slow) for case in CASES],
)
def test_pages_of_a_cut_are_those_of_its_plans(name, target, size, num_stages, options) -> None:
    """What cuts are chosen by is what the plans of their stages say, to the page; so no other cut has more."""
    model = declared(name)
    config = EngineConfig(
        tensor_parallel_size=size,
        pipeline_parallel_size=num_stages,
        max_model_len=4096,
        max_num_seqs=2048,
        max_num_batched_tokens=2048,
        **options,
    )
    targets = [target] * size * num_stages
    costs, found = stage_costs(config, model, targets), cut_stages(config, model, targets)
    assert found is not None
    tried = [found, equal_cuts(model.num_layers, num_stages)]
    tried += [tuple(pairwise((0, *inner, model.num_layers))) for inner in _inner_near(found)]
    fewest = {}
    for cuts in tried:
        counted = [costs.count_pages(stage, *layers) for stage, layers in enumerate(cuts)]
        plans = [
            fit_runner(PlanRequest(config, model, target, mesh)).memory for mesh in rank_meshes(config, cuts)[::size]
        ]
        most = max(plan.num_pages for plan in plans)
        assert [min(pages, most) for pages in counted] == [plan.num_pages for plan in plans], cuts
        fewest[cuts] = min(counted)
    assert fewest[found] == max(fewest.values())


def test_step_of_a_stage_reads_its_layers_and_the_head() -> None:
    """Qwen3-8B in fp8, by hand: codes and a float32 a row, norms; the head is int8, and rows of the embedding are looked up."""
    config = EngineConfig(pipeline_parallel_size=2, quantization="fp8", max_model_len=4096)
    costs = stage_costs(config, declared("Qwen3-8B"), [H200] * 2)
    rows = {6144: 4096, 4096: 4096, 24576: 4096}
    layer = sum(n * k + 4 * n for n, k in rows.items()) + 4096 * 12288 + 4 * 4096 + 2 * (2 * 4096 + 2 * 128)
    head = 151936 * 4096 + 4 * 151936 + 2 * 4096
    for first, last in ((0, 1), (3, 30), (35, 36), (0, 36)):
        expected = (last - first) * layer + (head if last == 36 else 0)
        assert costs.weigh(first, last) == pytest.approx(expected, rel=1e-4), (first, last)


def test_cuts_count_the_graphs_of_a_stage() -> None:
    """To the byte where a budget is short: what it lacks is counted in bytes."""
    model, (first, last) = declared("Qwen3-32B"), (0, 40)
    short = {}
    for is_eager in (False, True):
        limits = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
        config = EngineConfig(pipeline_parallel_size=2, enforce_eager=is_eager, **limits)
        short[is_eager] = stage_costs(config, model, [RTX4090] * 2).count_pages(0, first, last)
    assert short[True] < 0
    assert short[True] - short[False] == graph_term(last - first, 64, 2048).num_bytes


def _inner_near(cuts):
    """Cuts like these with one of them moved by a layer."""
    inner = [first for first, _ in cuts[1:]]
    for place in range(len(inner)):
        for step in (-1, 1):
            moved = [*inner]
            moved[place] += step
            if all(first < last for first, last in pairwise((0, *moved, cuts[-1][1]))):
                yield moved


def catalogue_cases() -> list[tuple[str, int]]:
    """Models that run, one of each shape, with 2 to 4 stages."""
    found: dict[object, str] = {}
    for name in CATALOGUE:
        model = declared(name)
        if model.spec is not None:
            found.setdefault(model.spec, name)
    return [(name, num_stages) for name in found.values() for num_stages in (2, 3, 4)]


def smallest_target(name: str, num_stages: int) -> Target:
    """The smallest GPU of the list on which as many ranks as stages hold a model's weights with a quarter to spare; where none
    does, one that is as large as that needs."""
    weights = declared(name).weight_bytes(declared(name).checkpoint_dtype)
    gpus = sorted(GPUS.values(), key=lambda gpu: gpu.total_bytes)
    found = next((gpu_target(gpu) for gpu in gpus if gpu.total_bytes * num_stages > 1.25 * weights), None)
    if found is not None:
        return found
    num_bytes = int(1.3 * weights) // num_stages
    return gpu_target(gpus[-1])._replace(name="no GPU of the list", total_bytes=num_bytes, available_bytes=num_bytes)


def brute_force(num_layers: int, num_stages: int, costs: StageCosts, shared: frozenset[int]) -> tuple[int, int]:
    """The worth of the best of all cuts: the fewest pages of a stage, and how little the largest reads, negative.

    Each run of layers is counted once for each stage; then all cuts are tried, one by one.
    """
    starts = [layer for layer in range(num_layers) if layer not in shared]
    spans = [(first, last) for first in starts for last in range(first + 1, num_layers + 1)]
    # Only what can be: the first stage begins with the first layer, the last ends with the last, and no other does.
    pages = [
        {
            (first, last): costs.count_pages(stage, first, last)
            for first, last in spans
            if (first == 0) == (stage == 0) and (last == num_layers) == (stage == num_stages - 1)
        }
        for stage in range(num_stages)
    ]
    weights = {span: costs.weigh(*span) for span in spans}
    best = None
    for inner in combinations(starts[1:], num_stages - 1):
        cuts = tuple(pairwise((0, *inner, num_layers)))
        fewest = min(map(dict.__getitem__, pages, cuts))
        if best is None or fewest >= best[0]:
            own = fewest, -max(map(weights.__getitem__, cuts))
            best = own if best is None else max(best, own)
    assert best is not None, f"{num_layers} layers cannot be cut into {num_stages}"
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_stages"), catalogue_cases())
def test_cuts_of_the_catalogue_are_those_of_brute_force(name: str, num_stages: int) -> None:
    """Every cut of every model; the fewest pages of it and of equal cuts are printed (-s)."""
    model, target = declared(name), smallest_target(name, num_stages)
    config = EngineConfig(
        pipeline_parallel_size=num_stages, max_model_len=min(4096, model.max_position), max_num_batched_tokens=2048
    )
    targets = [target] * num_stages
    costs, found = stage_costs(config, model, targets), cut_stages(config, model, targets)
    assert found is not None
    heads = model.declaration.heads(Mesh())
    shared = frozenset() if heads is None else heads.shared_layers

    def worth(cuts) -> tuple[int, int]:
        fewest = min(costs.count_pages(stage, *layers) for stage, layers in enumerate(cuts))
        return fewest, -max(costs.weigh(*layers) for layers in cuts)

    assert not {first for first, _ in found} & shared
    assert worth(found) == brute_force(model.num_layers, num_stages, costs, shared)
    equal = equal_cuts(model.num_layers, num_stages)
    sizes = "+".join(str(last - first) for first, last in found)
    pages_of_equal = (
        "none: a layer that shares would be first" if {one for one, _ in equal} & shared else worth(equal)[0]
    )
    print(f"\n{name:32} {target.name:28} {sizes:14} {worth(found)[0]:>9,} {pages_of_equal}")
