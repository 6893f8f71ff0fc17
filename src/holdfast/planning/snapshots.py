"""Snapshots of states: how many the prefix cache keeps beside its pages, as given or as a share of them; no torch."""

from typing import NamedTuple

from holdfast.cache.states import GRID
from holdfast.config import EngineConfig, Limits
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError
from holdfast.models.declaration import HeadGeometry
from holdfast.models.declared_model import DeclaredModel

LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 2, 1024
"""Bounds of a number that the plan chooses."""
POOL_SHARE = 10
"""Snapshots of the plan's choice take at most 1/10 of the bytes of the KV pages."""


class Snapshots(NamedTuple):
    """A number of snapshots."""

    number: int
    reason: str = ""
    """Empty if there is nothing to report."""
    is_open: bool = False
    """More may follow from the bytes of the pages."""


def choose_snapshots(
    config: EngineConfig, model: DeclaredModel, heads: HeadGeometry | None, limits: Limits, mesh: Mesh
) -> Snapshots:
    """Return the given number, or the least; refuse steps that are too short for a piece of a prompt."""
    given = config.state_snapshots
    if heads is None or heads.state is None:
        return Snapshots(0, "" if given is None else "given, but no layer keeps a state")
    if limits.max_num_batched_tokens < GRID:
        values = {"value": limits.max_num_batched_tokens, "needed": GRID, "model": model.name}
        raise ConfigError("plan.short_state_steps", name="max_num_batched_tokens", **values)
    if not config.enable_prefix_caching:
        return Snapshots(0, "enable_prefix_caching is off")
    if given is not None:
        return Snapshots(given, "given" if given else "given: no prompt finds a cached prefix")
    if mesh.num_ranks > 1:
        return Snapshots(LEAST_SNAPSHOTS, "the least: ranks keep equal numbers")
    return Snapshots(LEAST_SNAPSHOTS, "the least that prefixes are found with", is_open=True)


def most_snapshots(place_bytes: int, pool_bytes: int, spare_bytes: int) -> int:
    """Return how many snapshots fit the share of the pages and the spare bytes; LEAST_SNAPSHOTS are planned already.

    What more snapshots take, the pool may lose: n places are at most a tenth of the pool that is left.
    """
    by_share = (pool_bytes + LEAST_SNAPSHOTS * place_bytes) // ((POOL_SHARE + 1) * place_bytes)
    by_memory = LEAST_SNAPSHOTS + max(spare_bytes, 0) // place_bytes
    return min(max(by_share, LEAST_SNAPSHOTS), by_memory, MOST_SNAPSHOTS)
