"""What an exchange holds, from shapes alone: symmetric memory is as large on every rank, and as large as the driver gives it."""

from for_each import for_each
from holdfast.distributed.exchange_plan import (
    SYMMETRIC_UNIT_BYTES,
    ExchangeKind,
    ExchangeNeeds,
    can_be_captured,
    exchange_specs,
    exchange_terms,
    find_exchange,
    planned_nodes,
    rounding_bytes,
    shared_specs,
)
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.memory.workspace_plan import arena_bytes

NEEDS = ExchangeNeeds(room_bytes=1000, num_logit_rows=3, vocab_size=101, hidden_bytes=500)
MESHES = [meshes(2), meshes(3), meshes(1, [(0, 1), (1, 2)]), meshes(4, [(0, 1), (1, 2), (2, 3)])]


@for_each("ranks", MESHES)
def test_shared_specs_are_equal_on_every_rank(ranks: tuple[Mesh, ...]) -> None:
    assert len({tuple(shared_specs(NEEDS, mesh).items()) for mesh in ranks}) == 1
    for mesh in ranks:
        num_bytes = arena_bytes(shared_specs(NEEDS, mesh).values()) + rounding_bytes(NEEDS, mesh)
        assert num_bytes % SYMMETRIC_UNIT_BYTES == 0
        assert num_bytes == sum(
            term.num_bytes
            for term in exchange_terms(NEEDS, mesh, "symmetric")
            if term.owner not in ("exchange/whole_logits", "sampling/shares")
        )


@for_each("kind", ["symmetric", "gloo", "nccl", "linked"])
def test_exchange_specs_of_one_rank_are_empty(kind: ExchangeKind) -> None:
    assert not exchange_specs(NEEDS, ALONE, kind)
    assert not exchange_terms(NEEDS, ALONE, kind)


@for_each("kind", ["symmetric", "gloo", "nccl", "linked"])
@for_each("ranks", MESHES)
def test_exchange_specs_follow_the_place_of_the_rank(ranks: tuple[Mesh, ...], kind: ExchangeKind) -> None:
    for mesh in ranks:
        specs = exchange_specs(NEEDS, mesh, kind)
        assert ("exchange/rows" in specs) == (mesh.tensor_size > 1)
        assert ("exchange/gathered" in specs) == (mesh.tensor_size > 1 and kind in ("gloo", "nccl"))
        assert ("exchange/whole_logits" in specs) == (mesh.rank == 0)
        assert ("pipeline/hidden" in specs) == (mesh.num_stages > 1)
        assert "exchange/logits" in specs or not (mesh.is_last_stage or mesh.rank == 0)


@for_each(
    "nodes, tensor_size, kind",
    [
        ("aaaa", 2, "symmetric"),
        ("aabb", 2, "linked"),
        ("abab", 2, "nccl"),
        ("aaab", 2, "nccl"),
        ("aabb", 1, "nccl"),
        ("aabb", 4, "nccl"),
        ("aabbbb", 2, "linked"),
    ],
)
def test_find_exchange_follows_nodes_and_device(nodes: str, tensor_size: int, kind: ExchangeKind) -> None:
    assert find_exchange("cuda", nodes, tensor_size) == kind
    assert find_exchange("cpu", nodes, tensor_size) == "gloo"


def test_planned_nodes_give_even_shares() -> None:
    assert planned_nodes(8, None) == [0] * 8
    assert planned_nodes(16, None) == [0] * 8 + [1] * 8
    assert planned_nodes(4, 2) == [0, 0, 1, 1]
    assert planned_nodes(3, 2) == [0, 0, 1]


def test_can_be_captured_excludes_nccl_stages_and_gloo() -> None:
    """NCCL's between stages are the only ones on GPUs that it may not."""
    one, two = meshes(2)[1], meshes(1, [(0, 1), (1, 2)])[0]
    assert all(can_be_captured("symmetric", mesh) for mesh in (ALONE, one, two))
    assert can_be_captured("nccl", one)
    assert not can_be_captured("nccl", two)
    assert not can_be_captured("gloo", one)
