"""Mesh: a rank's coordinates among the ranks of one model: tensor, expert, stage, layers; no torch.

    rank = stage * tensor_size + tensor_rank

Ranks of one stage split each of its layers: heads, columns of the MLP, the vocabulary. With expert parallelism they
hold whole experts instead of slices of all. Stages hold different layers; the first has the embedding, the last the
head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.errors import ConfigError


def _check(kind: str, rank: object, size: object, rank_name: str = "", size_name: str = "") -> None:
    rank_name, size_name = rank_name or f"{kind}_rank", size_name or f"{kind}_size"
    if type(rank) is int and type(size) is int and 0 <= rank < size:
        return
    raise ConfigError("rank.not_a_rank", rank_name=rank_name, rank=rank, size_name=size_name, size=size)


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's coordinates. Model and mesh determine its weights, plan and computation."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    """1, or tensor_size: then each of those ranks holds whole experts."""
    stage: int = 0
    num_stages: int = 1
    layers: tuple[int, int] | None = None
    """Layers of this stage, [first, end); None: all of the model."""
    is_exact: bool = False
    """Output projections are split along N like all other weights, so that no result depends on the number of ranks;
    otherwise along K, with an all-reduce of float32 sums."""

    def __post_init__(self) -> None:
        for kind in ("tensor", "expert"):
            _check(kind, getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size"))
        _check("stage", self.stage, self.num_stages, "stage", "num_stages")
        assert self.layers is None or 0 <= self.layers[0] < self.layers[1], f"{self.layers=}"

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.tensor_size

    @property
    def is_alone(self) -> bool:
        """True if one rank runs the whole model."""
        return self.num_ranks == 1

    @property
    def is_first_stage(self) -> bool:
        """True if it has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if it has the final norm and the head."""
        return self.stage == self.num_stages - 1

    @property
    def all_layers(self) -> "Mesh":
        """This rank's share of every layer, as in a single stage."""
        return replace(self, stage=0, num_stages=1, layers=None)

    def layer_range(self, num_layers: int) -> range:
        """Return this rank's layers."""
        return range(num_layers) if self.layers is None else range(*self.layers)


ALONE = Mesh()


def meshes(
    tensor_size: int,
    cuts: Sequence[tuple[int, int]] | None = None,
    *,
    has_expert_parallelism: bool = False,
    is_exact: bool = False,
) -> tuple[Mesh, ...]:
    """Return all ranks in order; `cuts`: the layers of each stage, None for one stage."""
    stages = (None,) if cuts is None or len(cuts) == 1 else tuple(cuts)
    return tuple(
        Mesh(
            tensor_rank=rank,
            tensor_size=tensor_size,
            expert_rank=rank if has_expert_parallelism else 0,
            expert_size=tensor_size if has_expert_parallelism else 1,
            stage=stage,
            num_stages=len(stages),
            layers=layers,
            is_exact=is_exact and tensor_size > 1,
        )
        for stage, layers in enumerate(stages)
        for rank in range(tensor_size)
    )
