"""The workspace: views that live together, at places that never move, for their owners alone."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import WorkspaceError
from holdfast.memory import arena as arena_module
from holdfast.memory import workspace as workspace_module
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import plan_memory
from holdfast.memory.report import memory_report
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec, WorkspacePlan
from holdfast.quant.formats import DTYPE_BYTES

CPU = torch.device("cpu")
MAX_ROWS = 64
widths = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=6)


def attention(num_rows: int, num_heads: int = 4) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("qkv", (num_rows, 3 * num_heads * 16), "float16"),
        TensorSpec("attended", (num_rows, num_heads * 16), "float16"),
        TensorSpec("partial_lse", (2 * num_rows, num_heads), "float32"),
    )


def mlp(num_rows: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("wide", (num_rows, 512), "float16"),)


def make_plan(num_heads: int = 4, max_rows: int = MAX_ROWS) -> WorkspacePlan:
    plan = WorkspacePlan()
    plan.reserve("attention", attention(max_rows, num_heads))
    plan.reserve("mlp", mlp(max_rows))
    plan.reserve("stream", (TensorSpec("x", (max_rows, 64), "float16"),), lane="stream")
    return plan


@pytest.fixture
def workspace(device: torch.device) -> Workspace:
    return Workspace(make_plan(), device, Ledger())


def places(views: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    return [(view.data_ptr(), view.data_ptr() + view.nbytes) for view in views]


@given(widths, st.lists(st.integers(0, MAX_ROWS), min_size=1, max_size=6))
def test_views_are_aligned_apart_and_inside(columns: list[tuple[int, str]], row_counts: list[int]) -> None:
    def request(num_rows: int) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"t{i}", (num_rows, width), dtype) for i, (width, dtype) in enumerate(columns))

    plan = WorkspacePlan()
    plan.reserve("layer", request(MAX_ROWS))
    made = Workspace(plan, CPU, Ledger())
    (low, high), *_ = places(made.acquire("layer", (TensorSpec("all", (plan.total_bytes,), "uint8"),)))
    for num_rows in row_counts:
        specs = request(num_rows)
        views = made.acquire("layer", specs)
        assert [(tuple(v.shape), v.dtype) for v in views] == [(s.shape, getattr(torch, s.dtype)) for s in specs]
        assert all(view.is_contiguous() for view in views)
        held = sorted(place for place in places(views) if place[0] < place[1])
        assert all(start % ALIGNMENT_BYTES == 0 for start, _ in held)
        assert all(low <= start and end <= high for start, end in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(held))


def test_writes_stay_where_they_belong(guarded, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view is filled to its last byte: the others, the other lane and the red zones see nothing of it."""
    monkeypatch.setattr(arena_module, "allocate_bytes", lambda num_bytes, _: guarded(num_bytes, dtype=torch.uint8))
    made = Workspace(make_plan(), device, Ledger())
    (x,) = made.acquire("stream", (TensorSpec("x", (MAX_ROWS, 64), "float16"),), lane="stream")
    x.fill_(7)
    for num_rows in (MAX_ROWS, 1, 33):
        views = made.acquire("attention", attention(num_rows))
        for value, view in enumerate(views):
            view.fill_(value)
        assert [view.unique().tolist() for view in views] == [[0], [1], [2]]
    assert x.unique().tolist() == [7]


def test_workspace_acquire_same_request_gives_same_views(workspace: Workspace) -> None:
    first = workspace.acquire("attention", attention(8))
    assert workspace.acquire("attention", attention(8)) is first
    assert workspace.acquire("attention", list(attention(8))) is first  # type: ignore[arg-type]
    assert workspace.acquire("mlp", mlp(8)) is not first
    assert workspace.acquire("attention", attention(8)) is first


def test_places_never_move(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was captured with them is replayed long after the views were forgotten."""
    wanted = {num_rows: places(workspace.acquire("attention", attention(num_rows))) for num_rows in range(MAX_ROWS + 1)}
    monkeypatch.setattr(workspace_module, "MAX_CACHED_REQUESTS", 5)
    seen: list[weakref.ref[torch.Tensor]] = []
    for num_rows in [*reversed(wanted), *wanted]:
        assert places(workspace.acquire("attention", attention(num_rows))) == wanted[num_rows]
        seen.append(weakref.ref(workspace.acquire("mlp", mlp(num_rows))[0]))
        assert len({id(view) for ref in seen if (view := ref()) is not None}) <= 5


def test_workspace_caches_only_latest_views(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one: thousands of different steps hold no more than some did."""
    monkeypatch.setattr(workspace_module, "MAX_CACHED_REQUESTS", 5)
    seen = [workspace.acquire("mlp", mlp(num_rows)) for num_rows in range(8)]
    assert all(workspace.acquire("mlp", mlp(num_rows)) is seen[num_rows] for num_rows in range(3, 8))
    assert workspace.acquire("mlp", mlp(2)) is not seen[2]
    assert workspace.acquire("mlp", mlp(3)) is not seen[3]


def test_owners_of_a_lane_take_turns_and_lanes_do_not(workspace: Workspace) -> None:
    qkv, *_ = workspace.acquire("attention", attention(MAX_ROWS))
    (wide,) = workspace.acquire("mlp", mlp(MAX_ROWS))
    (x,) = workspace.acquire("stream", (TensorSpec("x", (MAX_ROWS, 64), "float16"),), lane="stream")
    assert qkv.data_ptr() == wide.data_ptr()
    assert x.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()


def test_plan_ledger_and_memory_agree_to_the_byte() -> None:
    plan, ledger = make_plan(), Ledger()
    made = Workspace(plan, CPU, ledger)
    assert {entry.owner: (entry.num_bytes, entry.reason) for entry in ledger} == {
        term.owner: (term.num_bytes, term.reason) for term in plan.terms()
    }
    storages = [
        made.acquire(owner, (TensorSpec("x", (1,), "uint8"),), lane)[0].untyped_storage().nbytes()
        for owner, lane in (("mlp", "layers"), ("stream", "stream"))
    ]
    assert storages == list(plan.lane_bytes.values())
    memory = plan_memory(2**20, "", plan.terms(), 1024, 1, 1)
    row = next(row for row in memory_report(memory, ledger, 4, 4).rows if row.owner == "workspace")
    assert row.planned_bytes == row.held_bytes == plan.total_bytes


def refusal(call, *arguments: object) -> str:
    with pytest.raises(WorkspaceError) as caught:
        call(*arguments)
    words = str(caught.value)
    assert "\n" not in words
    assert "test_workspace.py:" in words, "the caller is not named"
    return words


def test_workspace_acquire_over_reservation_refused_with_bytes(workspace: Workspace) -> None:
    words = refusal(workspace.acquire, "attention", attention(MAX_ROWS + 1))
    wanted = 65 * 192 * 2 + 65 * 64 * 2 + 130 * 4 * 4
    for part in (
        "'attention'",
        "'layers'",
        "qkv float16 (65, 192)",
        "partial_lse float32 (130, 4)",
        "34816 bytes are reserved",
    ):
        assert part in words, words
    assert f"{wanted + 128 + 128 + 224} bytes" in words, words


def test_workspace_acquire_is_bound_by_own_reservation_not_lane(workspace: Workspace) -> None:
    """It would fit into the lane, but not into what its owner said: the plan would no longer be the truth."""
    words = refusal(workspace.acquire, "attention", (TensorSpec("a", (40_000,), "uint8"),))
    assert "40192 bytes" in words
    assert "34816 bytes are reserved" in words
    (fits,) = workspace.acquire("mlp", (TensorSpec("a", (40_000,), "uint8"),))
    assert fits.nbytes == 40_000


@pytest.mark.parametrize(
    ("owner", "specs", "lane", "words"),
    [
        ("sampler", mlp(1), "layers", "this owner is not reserved. Reserved are attention, mlp"),
        ("stream", mlp(1), "layers", "this owner is not reserved"),
        ("mlp", mlp(1), "stream", "this owner is not reserved. Reserved are stream"),
        ("mlp", mlp(1), "prefill", "this lane is not reserved. Reserved are layers, stream"),
        ("mlp", (TensorSpec("wide", (-1, 4), "float16"),), "layers", "wide: (-1, 4) is not a shape"),
        ("mlp", (TensorSpec("wide", (1.5, 4), "float16"),), "layers", "is not a shape"),  # type: ignore[arg-type]
        ("mlp", (TensorSpec("wide", [1, 4], "float16"),), "layers", "is not a shape"),  # type: ignore[arg-type]
        ("mlp", (TensorSpec("wide", (1, 4), "half"),), "layers", "'half' is not the name of a type"),
        ("mlp", (TensorSpec("wide", (1, 4), torch.half),), "layers", "torch.float16 is not the name"),  # type: ignore[arg-type]
        ("mlp", (TensorSpec("wide", (2**70, 4), "int8"),), "layers", "65536 bytes are reserved"),
    ],
    ids=["owner", "owner of another lane", "lane of another owner", "lane", "negative", "fraction", "list", "type", "torch type", "huge"],
)  # fmt: skip
def test_wrong_requests_are_sentences(
    workspace: Workspace, owner: str, specs: tuple[TensorSpec, ...], lane: str, words: str
) -> None:
    for _ in range(2):
        assert words in refusal(workspace.acquire, owner, specs, lane)


def test_workspace_plan_refuses_reservation_after_allocation() -> None:
    plan = make_plan()
    Workspace(plan, CPU, Ledger())
    assert "the workspace is allocated" in refusal(plan.reserve, "mlp", mlp(MAX_ROWS + 1))
    plan.reserve("mlp", mlp(MAX_ROWS))


def test_workspace_instances_share_no_memory(device: torch.device) -> None:
    """Two models with other head counts and the same names of owners, layer after layer in turn."""
    small = Workspace(make_plan(num_heads=2, max_rows=8), device, Ledger())
    large = Workspace(make_plan(num_heads=16), device, Ledger())
    wanted = [places(made.acquire("attention", attention(8, heads))) for made, heads in ((small, 2), (large, 16))]
    for _ in range(3):
        mine, theirs = small.acquire("attention", attention(8, 2)), large.acquire("attention", attention(8, 16))
        for view in mine:
            view.fill_(1)
        for view in theirs:
            view.fill_(2)
        assert all(bool((view == 1).all()) for view in mine)
        assert [places(mine), places(theirs)] == wanted
    refusal(small.acquire, "attention", attention(8, 16))
    same_plan = make_plan()
    first, second = Workspace(same_plan, device, Ledger()), Workspace(same_plan, device, Ledger())
    assert places(first.acquire("mlp", mlp(1))) != places(second.acquire("mlp", mlp(1)))


def test_workspace_release_empties_ledger_and_reservations(device: torch.device) -> None:
    ledger = Ledger()
    made = Workspace(make_plan(), device, ledger)
    made.acquire("mlp", mlp(1))
    made.release()
    assert list(ledger) == []
    assert ledger.peak_bytes == make_plan().total_bytes
    assert "Reserved are none" in refusal(made.acquire, "mlp", mlp(1))
    made.release()


def test_workspace_failed_lane_frees_other_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = arena_module.allocate_bytes
    lane_bytes = make_plan().lane_bytes

    def refuse_second(num_bytes: int, device: torch.device) -> torch.Tensor:
        if num_bytes == lane_bytes["stream"]:
            raise torch.OutOfMemoryError("no")
        return allocate(num_bytes, device)

    monkeypatch.setattr(arena_module, "allocate_bytes", refuse_second)
    ledger = Ledger()
    with pytest.raises(torch.OutOfMemoryError):
        Workspace(make_plan(), CPU, ledger)
    assert list(ledger) == []
    assert ledger.peak_bytes == lane_bytes["layers"]


def test_acquire_without_reservation_is_refused() -> None:
    made = Workspace(WorkspacePlan(), CPU, Ledger())
    assert "Reserved are none" in refusal(made.acquire, "mlp", mlp(1))
    plan = WorkspacePlan()
    plan.reserve("idle", ())
    assert Workspace(plan, CPU, Ledger()).acquire("idle", ()) == ()


@pytest.mark.gpu
def test_acquiring_allocates_nothing_on_a_gpu() -> None:
    made = Workspace(make_plan(), torch.device("cuda"), Ledger())
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for num_rows in range(MAX_ROWS + 1):
        for view in (*made.acquire("attention", attention(num_rows)), *made.acquire("mlp", mlp(num_rows))):
            assert view.numel() == 0 or view.data_ptr() % ALIGNMENT_BYTES == 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    made.release()
    gc.collect()
