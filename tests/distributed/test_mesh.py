"""Mesh: every rank has its place, ranks are numbered stage by stage, and wrong places raise."""

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.errors import ConfigError


def test_mesh_numbers_ranks_stage_by_stage() -> None:
    found = meshes(2, [(0, 3), (3, 5)], has_expert_parallelism=True, is_exact=True)
    assert [mesh.rank for mesh in found] == [0, 1, 2, 3]
    assert [(mesh.stage, mesh.tensor_rank, mesh.expert_rank) for mesh in found] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]
    assert [list(mesh.layer_range(5)) for mesh in found[::2]] == [[0, 1, 2], [3, 4]]
    assert [(mesh.is_first_stage, mesh.is_last_stage) for mesh in found[::2]] == [(True, False), (False, True)]
    assert all(mesh.num_ranks == 4 and mesh.is_exact and not mesh.is_alone for mesh in found)


def test_mesh_of_one_rank_is_alone() -> None:
    assert meshes(1, is_exact=True) == (ALONE,)
    assert ALONE.is_alone
    assert list(ALONE.layer_range(3)) == [0, 1, 2]


@for_each("place", [{"tensor_rank": 2, "tensor_size": 2}, {"stage": -1}, {"expert_rank": True, "expert_size": 2}])
def test_mesh_refuses_invalid_places(place: dict[str, int]) -> None:
    with raises_code("rank.not_a_rank", ConfigError):
        Mesh(**place)
