"""The fixtures themselves: a guard that cannot bark protects nothing."""

import gc
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from each_value import case_of, choose
from red_zones import RedZones
from scratch_memory import Memory, Poison, check_calls


@pytest.mark.parametrize("element", [-1, 12], ids=["one element before", "one element after"])
@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16", "uint8"])
def test_red_zones_find_write_beside_tensor(element: int, dtype_name: str) -> None:
    import torch

    zones = RedZones(torch.device("cpu"))
    tensor = zones.allocate(3, 4, dtype=getattr(torch, dtype_name))
    tensor.fill_(7)
    zones.check()
    tensor.as_strided((1,), (1,), tensor.storage_offset() + element).fill_(1)
    with pytest.raises(AssertionError, match=r"bytes were written (before|after) a tensor of \(3, 4\)"):
        zones.check()


def test_guarded_memory_is_aligned_for_kernels(guarded) -> None:
    tensor = guarded(5, 3)
    assert tensor.shape == (5, 3)
    assert tensor.data_ptr() % 16 == 0
    assert tensor.is_contiguous()


def test_poison_fills_memory_that_is_not_written(poison: Poison) -> None:
    import torch

    for made in (torch.empty(64), torch.empty_like(torch.ones(4)), torch.ones(4).new_empty(3, dtype=torch.float16)):
        assert {Poison.NAN: made.isnan(), Poison.ZEROS: made == 0, Poison.LEFTOVERS: made == 3}[poison].all()


def test_poison_ends_with_its_test() -> None:
    import torch

    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.empty.__name__ == torch.Tensor.new_empty.__name__.removeprefix("new_") == "empty"


@pytest.mark.parametrize("bug", ["counter is not reset", "output is not written", "writes after the end", None])
def test_calls_that_see_or_spoil_memory_are_found(device, bug: str | None) -> None:
    """Each bug passes two of the three states."""
    import torch

    def run(size: int, memory: Memory) -> list["torch.Tensor"]:
        out, counter = memory.take("out", size), memory.take("counter", 1, is_counter=True)
        if bug != "output is not written":
            out[:] = torch.arange(size)
        out[0] = counter
        counter.fill_(1 if bug == "counter is not reset" else 0)
        if bug == "writes after the end":
            out.as_strided((1,), (1,), out.storage_offset() + size).fill_(1.0)
        return [out]

    if bug is None:
        check_calls(device, run, [4, 9, 2])
        return
    with pytest.raises(AssertionError, match=r"sees memory|was written after its end"):
        check_calls(device, run, [4, 9, 2])


def values_of(cases: list[dict[str, int]], places: list[int], strength: int) -> set[object]:
    return {values for place in places for values in combinations(sorted(cases[place].items()), strength)}


@pytest.mark.parametrize("sizes", [(1,), (7,), (4, 3), (3, 3, 2), (2, 2, 2, 5)], ids=str)
def test_choose_covers_each_value_or_each_pair(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = choose(cases)
    assert len(chosen) == max(sizes)
    assert values_of(cases, chosen, 1) == values_of(cases, list(range(len(cases))), 1)
    if sizes == (3, 3, 2):
        assert len(values_of(cases, chosen, 2)) == 9, "three pairs in each of three cases"
    firsts = [cases[place]["a"] for place in chosen]
    assert max(map(firsts.count, firsts)) <= -(-len(chosen) // sizes[0]) + 1, (
        "no value comes much more often than others"
    )
    paired = choose(cases, 2)
    assert values_of(cases, paired, 2) == values_of(cases, list(range(len(cases))), 2)
    assert len(paired) <= 1.3 * max(sizes) * sorted(sizes)[-2:][0]


@pytest.mark.each_value
@pytest.mark.parametrize(("one", "two"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("other", [1, 2, pytest.param(3, marks=pytest.mark.gpu)])
def test_each_value_marker_keeps_few_quick_cases(device, one: int, two: int, other: int, request) -> None:
    own = [item for item in request.session.items if getattr(item, "originalname", "") == request.node.originalname]
    quick = [item for item in own if not any(item.get_closest_marker(name) for name in ("slow", "gpu"))]
    assert len(quick) <= (3 if device.type == "cpu" else 6)
    assert case_of(request.node).keys() == {("one", "two"), ("other",)}


def is_visited(value: object) -> bool:
    return any(one is value for one in gc.get_objects())


def test_new_test_file_hides_from_the_collector_what_earlier_ones_cached(
    root: Path, request: pytest.FixtureRequest
) -> None:
    """Each engine that closes runs the collector, which took half a second in the middle of a run."""
    conftest = request.config.pluginmanager.get_plugin(str(root / "tests" / "conftest.py"))
    assert conftest is not None
    cached = [[0]]
    conftest.pytest_runtest_setup(SimpleNamespace(session=request.session, path=request.path))
    assert is_visited(cached)
    conftest.pytest_runtest_setup(SimpleNamespace(session=request.session, path=Path("test_other.py")))
    assert not is_visited(cached)
