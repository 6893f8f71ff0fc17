"""Mesh: where a rank stands among those that run one model: tensor, expert, stage, layers; no torch.

    rank = stage * tensor_size + tensor_rank

Ranks of one stage share every layer of it: heads, columns of the MLP, the vocabulary. With expert parallelism they hold whole
experts in place of slices of all of them. Stages hold different layers; the first has the embedding, the last the head.
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
    """One rank's place. Everything that a rank holds, plans and computes follows from the model and this."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    """1, or as many as tensor_size: then each of those ranks holds whole experts."""
    stage: int = 0
    num_stages: int = 1
    layers: tuple[int, int] | None = None
    """The layers of this stage, from the first to before the last; None: all of the model."""
    is_exact: bool = False
    """Output projections are cut along N as all other weights are, so that no number depends on how many ranks there are;
    else along K, and float32 sums are exchanged."""

    def __post_init__(self) -> None:
        for kind in ("tensor", "expert"):
            _check(kind, getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size"))
        _check("stage", self.stage, self.num_stages, "stage", "num_stages")
        assert self.layers is None or 0 <= self.layers[0] < self.layers[1], f"{self.layers=}"

    @property
    def rank(self) -> int:
        """Among all."""
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.tensor_size

    @property
    def is_alone(self) -> bool:
        """Whether one rank runs all of the model."""
        return self.num_ranks == 1

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.stage == self.num_stages - 1

    @property
    def all_layers(self) -> "Mesh":
        """The same share of every layer, as if one stage had all of them."""
        return replace(self, stage=0, num_stages=1, layers=None)

    def layer_range(self, num_layers: int) -> range:
        """The layers that it holds, of so many."""
        return range(num_layers) if self.layers is None else range(*self.layers)


ALONE = Mesh()


def meshes(
    tensor_size: int,
    cuts: Sequence[tuple[int, int]] | None = None,
    *,
    has_expert_parallelism: bool = False,
    is_exact: bool = False,
) -> tuple[Mesh, ...]:
    """All ranks in order; `cuts` are the layers of each stage, left out where there is one."""
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
