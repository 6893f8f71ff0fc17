"""What is reserved: a lane is as large as its largest request, whatever the number of layers; refusals are sentences."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.errors import WorkspaceError
from holdfast.memory.planner import Term, plan_memory
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import (
    ALIGNMENT_BYTES,
    MAX_SHOWN_SPECS,
    TensorSpec,
    WorkspacePlan,
    aligned,
    arena_bytes,
    caller,
    described,
)
from holdfast.quant.formats import DTYPE_BYTES

shapes = st.lists(st.integers(0, 50), max_size=4).map(tuple)


@given(shapes, st.sampled_from(sorted(DTYPE_BYTES)))
def test_bytes_are_those_of_the_tensor(shape: tuple[int, ...], dtype: str) -> None:
    spec = TensorSpec("x", shape, dtype)
    assert spec.problem is None
    assert spec.num_bytes == torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
    assert spec.aligned_bytes == aligned(spec.num_bytes)


@given(st.integers(0, 2**60))
def test_alignment_goes_up_to_the_next_place(num_bytes: int) -> None:
    assert aligned(num_bytes) % ALIGNMENT_BYTES == 0
    assert 0 <= aligned(num_bytes) - num_bytes < ALIGNMENT_BYTES


def test_arena_bytes_sum_aligned_tensors() -> None:
    specs = (TensorSpec("a", (1,), "int8"), TensorSpec("b", (64,), "float32"), TensorSpec("c", (0, 9), "int64"))
    assert arena_bytes(specs) == 256 + 256 + 0
    assert arena_bytes(()) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((-1, 4), "float32", r"\(-1, 4\) is not a shape"),
        ((2.0, 4), "float32", "is not a shape"),
        ((True,), "float32", "is not a shape"),
        ((None, 4), "float32", "is not a shape"),
        ([2, 4], "float32", "is not a shape"),
        (7, "float32", "7 is not a shape"),
        ((10**5000, -1), "float32", "is not a shape"),
        ((2,), "half", "'half' is not the name of a type"),
        ((2,), "", "is not the name"),
        ((2,), torch.float16, "torch.float16 is not the name"),
        ((2,), ["float32"], "is not the name"),
        ((2,), None, "None is not the name"),
    ],
)
def test_tensor_spec_problem_describes_invalid_spec(shape: object, dtype: object, words: str) -> None:
    spec = TensorSpec("x", shape, dtype)  # type: ignore[arg-type]
    problem = spec.problem
    assert problem is not None
    assert re.search(words, problem), problem
    assert "\n" not in problem
    assert len(problem) < 250
    assert str(spec).startswith("x ")


def test_tensor_spec_str_is_one_line() -> None:
    assert str(TensorSpec("qkv", (8, 64), "bfloat16")) == "qkv bfloat16 (8, 64)"


requests = st.lists(
    st.tuples(st.sampled_from(["attention", "mlp", "head"]), st.sampled_from(["layers", "stream"]), st.integers(0, 10_000)),
    max_size=12,
)  # fmt: skip


def spec(num_bytes: int, name: str = "x") -> TensorSpec:
    return TensorSpec(name, (num_bytes,), "uint8")


@given(requests)
def test_workspace_plan_lane_is_its_largest_request(wanted: list[tuple[str, str, int]]) -> None:
    plan = WorkspacePlan()
    for owner, lane, num_bytes in wanted:
        plan.reserve(owner, (spec(num_bytes), spec(7, "y")), lane)
    totals = {lane: 0 for _, lane, _ in wanted}
    for _, lane, num_bytes in wanted:
        totals[lane] = max(totals[lane], arena_bytes((spec(num_bytes), spec(7))))
    assert plan.lane_bytes == totals
    assert list(plan.lane_bytes) == list(totals), "lanes come in the order of their first request"
    assert plan.total_bytes == sum(totals.values())
    assert {term.owner: term.num_bytes for term in plan.terms()} == {f"workspace/{x}": n for x, n in totals.items()}
    for lane, num_bytes in totals.items():
        assert max(plan.requesters(lane).values()) == num_bytes


def test_workspace_plan_shared_scratch_against_one_per_layer(root: Path) -> None:
    """The arithmetic of scratch that every layer keeps for itself: the largest GPU of its day, for one model's leftovers."""
    num_layers, num_seqs, num_heads, num_splits, head_dim = 60, 256, 64, 32, 128
    partials = TensorSpec("partials", (num_seqs, num_heads, num_splits, head_dim + 1), "float32")
    together, apart = WorkspacePlan(), WorkspacePlan()
    for layer in range(num_layers):
        together.reserve("attention", (partials,))
        apart.reserve("attention", (partials,), lane=f"layer {layer}")
    assert apart.total_bytes == 60 * 256 * 64 * 32 * 129 * 4 == 16_231_956_480
    assert together.total_bytes == 256 * 64 * 32 * 129 * 4 == 270_532_608
    assert apart.total_bytes == num_layers * together.total_bytes
    assert len(together.terms()) == 1
    text = (root / "docs/memory.md").read_text()
    assert f"take {format_bytes(together.total_bytes)}. A set for each of 60 layers" in text
    assert f"would take {format_bytes(apart.total_bytes)}." in text


def test_layers_with_other_shapes_need_no_more_than_the_largest() -> None:
    plan = WorkspacePlan()
    for layer in range(60):
        plan.reserve("attention", (spec(1000 * (1 + layer % 7)),))
    assert plan.total_bytes == arena_bytes((spec(7000),))


def test_terms_name_the_largest_and_cost_nothing_while_loading() -> None:
    plan = WorkspacePlan()
    plan.reserve("attention", (TensorSpec("q", (8, 4, 16), "float16"),))
    plan.reserve("mlp", (TensorSpec("wide", (8, 512), "float16"), TensorSpec("active", (8, 256), "float16")))
    plan.reserve("stream", (TensorSpec("x", (8, 64), "float32"),), lane="stream")
    layers, stream = plan.terms()
    reason = "mlp needs most: wide float16 (8, 512), active float16 (8, 256); 2 take turns"
    assert layers == Term("workspace/layers", 8 * 768 * 2, reason, ("capture", "serve"))
    assert stream.owner == "workspace/stream"
    memory = plan_memory(2**20, "", plan.terms(), 1024, 1, 4)
    assert memory.phase_bytes["load"] == 0
    assert memory.phase_bytes["serve"] == plan.total_bytes + 4 * 1024


def test_workspace_plan_smaller_reservation_keeps_larger() -> None:
    plan = WorkspacePlan()
    plan.reserve("mlp", (spec(1000),))
    plan.reserve("mlp", (spec(10),))
    assert plan.reserved_bytes("mlp") == 1024
    assert plan.reserved_bytes("mlp", "stream") is None
    assert plan.reserved_bytes("head") is None


def test_lock_forbids_larger_reservations() -> None:
    plan = WorkspacePlan()
    plan.reserve("mlp", (spec(1000),))
    plan.lock()
    plan.reserve("mlp", (spec(1024),))
    with pytest.raises(WorkspaceError) as caught:
        plan.reserve("mlp", (spec(1025),))
    text = str(caught.value)
    for part in ("'mlp'", "'layers'", "test_workspace_plan.py:", "x uint8 (1025,)", "1280 bytes", "1024 bytes"):
        assert part in text, text
    with raises_code("memory.reserved_too_late", WorkspaceError, held=0):
        plan.reserve("head", (spec(1),))
    assert plan.total_bytes == 1024


@pytest.mark.parametrize(
    ("shape", "dtype"), [((-1, 2), "float32"), ((2.5,), "float32"), ((2,), "halff"), ([2], "int8")], ids=str
)
def test_workspace_plan_reserve_invalid_tensor_refused(shape: tuple[int, ...], dtype: str) -> None:
    plan = WorkspacePlan()
    with pytest.raises(
        WorkspaceError, match=r"was acquired at test_workspace_plan\.py:\d+ with a wrong shape: wide: .* is not"
    ) as caught:
        plan.reserve("mlp", (spec(1), TensorSpec("wide", shape, dtype)))
    assert "\n" not in str(caught.value)
    assert plan.lane_bytes == {}


@pytest.mark.parametrize("lane", ["", "a/b"])
def test_workspace_plan_invalid_lane_name_refused(lane: str) -> None:
    with pytest.raises(AssertionError, match="lane="):
        WorkspacePlan().reserve("mlp", (spec(1),), lane)


def test_described_shortens_long_requests() -> None:
    specs = tuple(spec(1, f"t{number}") for number in range(MAX_SHOWN_SPECS + 3))
    assert described(specs).endswith("t7 uint8 (1,), 3 more")
    assert described(()) == "nothing"


def test_caller_is_outside_of_the_package() -> None:
    assert caller().startswith("test_workspace_plan.py:")


def test_workspace_plan_instances_are_independent() -> None:
    first, second = WorkspacePlan(), WorkspacePlan()
    first.reserve("mlp", (spec(1000),))
    assert second.lane_bytes == {}
    first.lock()
    second.reserve("mlp", (spec(5000),))
    assert (first.total_bytes, second.total_bytes) == (1024, 5120)
