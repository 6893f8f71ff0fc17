"""Cuts of a model into pipeline stages: contiguous layers that maximize the pages of the stage with the fewest; no torch.

Pages of a stage are what weights and all else leave of its budget. Among equal cuts, the one whose largest stage reads the
fewest weights wins: a step waits for that stage.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.memory.planner import PAGE_PHASES
from holdfast.models.declared_weights import weight_bytes
from holdfast.models.sharding import BEFORE_LAYERS
from holdfast.planning.resolve import Resolved
from holdfast.planning.terms import needs_beside_weights

Cuts = tuple[tuple[int, int], ...]
CountPages = Callable[[int, int, int], int]
"""Pages of a stage with layers [first, last): (stage, first, last)."""


def best_cuts(
    num_layers: int,
    num_stages: int,
    count_pages: CountPages,
    weigh: Callable[[int, int], int],
    shared_layers: frozenset[int] = frozenset(),
    needed: Sequence[frozenset[int]] = (),
) -> Cuts | None:
    """Return the layers of each stage; None if there are too few layers. No stage begins with one of `shared_layers`.

    More layers must leave no more pages and weigh no less. A stage needs a layer of each set in `needed`.
    """
    rules = shared_layers, needed

    def fewest(first: int, last: int, stage: int) -> int:
        return -count_pages(stage, first, last)

    cuts = _smallest_largest(num_layers, num_stages, fewest, *rules)
    if cuts is None:
        return None
    most = max(fewest(*layers, stage) for stage, layers in enumerate(cuts))

    def weight(first: int, last: int, stage: int) -> int | None:
        return weigh(first, last) if fewest(first, last, stage) <= most else None

    return _smallest_largest(num_layers, num_stages, weight, *rules)


def most_stages(num_layers: int, needed: Sequence[frozenset[int]]) -> int:
    """Return the most stages of which each has a layer of every set in `needed`: each ends as soon as it has."""
    num_stages, first = 0, 0
    for last in range(1, num_layers + 1):
        if not any(layers.isdisjoint(range(first, last)) for layers in needed):
            num_stages, first = num_stages + 1, last
    return num_stages


def _smallest_largest(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], int | None],
    shared_layers: frozenset[int],
    needed: Sequence[frozenset[int]],
) -> Cuts | None:
    """Return the cuts that minimize the most expensive stage. A stage whose cost is None is impossible."""
    reached: dict[int, tuple[int | None, Cuts]] = {0: (None, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        ends = [num_layers] if is_last else range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        found: dict[int, tuple[int | None, Cuts]] = {}
        for last in ends:
            if last in shared_layers:
                continue
            best: tuple[int, Cuts] | None = None
            for first in range(last - 1, stage - 1, -1):
                if first not in reached or any(layers.isdisjoint(range(first, last)) for layers in needed):
                    continue
                own = cost(first, last, stage)
                if own is None or (best is not None and own >= best[0]):
                    break  # with more layers it is no cheaper
                before, cuts = reached[first]
                largest = own if before is None else max(own, before)
                if best is None or largest < best[0]:
                    best = largest, (*cuts, (first, last))
            if best is not None:
                found[last] = best
        reached = found
    return reached[num_layers][1] if num_layers in reached else None


class StageCosts:
    """Cost of a model's layers on the first rank of a stage, which holds most. Like stages are counted once."""

    def __init__(self, resolved: Sequence[Resolved]) -> None:
        """`resolved` has one rank for each stage, the one with the smallest budget."""
        self._resolved, self._mesh, self._declared = resolved, resolved[0].mesh, resolved[0].declared
        self._sums, self._ends = _weigh_layers(resolved[0])
        self._kinds = _layer_kinds(resolved[0])
        self._known: dict[object, tuple[int, int]] = {}

    def weigh(self, first: int, last: int) -> int:
        """Return the bytes of the weights that a step reads in these layers, with the head but not the embedding."""
        head = self._ends[1] if last == self._declared.num_layers else 0
        return self._sums[last] - self._sums[first] + head

    def count_pages(self, stage: int, first: int, last: int) -> int:
        """Return the pages that the budget leaves; if it is too small, the negative number of bytes."""
        beside_bytes, page_bytes = self._beside(stage, first, last)
        weights = self._sums[last] - self._sums[first]
        weights += self._ends[0] * (stage == 0) + self._ends[1] * (stage == len(self._resolved) - 1)
        left_bytes = self._resolved[stage].budget_bytes - weights - beside_bytes
        # A lack is counted in bytes: pages are larger with more layers, so more layers would lack fewer pages.
        return left_bytes // page_bytes if left_bytes >= 0 else left_bytes

    def _beside(self, stage: int, first: int, last: int) -> tuple[int, int]:
        """Return what a stage holds beside weights, and bytes of a page: the same with as many layers of each kind."""
        own, num_stages = self._resolved[stage], len(self._resolved)
        kinds = frozenset(Counter(self._kinds[first:last]).items())
        key = (stage == 0, stage == num_stages - 1), kinds, own.target, own.limits
        if key not in self._known:
            placed = own.with_mesh(replace(self._mesh, stage=stage, num_stages=num_stages, layers=(first, last)))
            terms = needs_beside_weights(placed).terms
            beside = max(sum(term.num_bytes for term in terms if phase in term.phases) for phase in PAGE_PHASES)
            self._known[key] = beside, placed.page_bytes()
        return self._known[key]


def _weigh_layers(resolved: Resolved) -> tuple[list[int], tuple[int, int]]:
    """Return the bytes of all layers before each layer, and the bytes before the first and after the last layer."""
    declared = resolved.declared
    layers, before, after = [0] * declared.num_layers, 0, 0
    for weight in declared.parameters(resolved.mesh.all_layers):
        num_bytes = weight_bytes(weight, resolved.dtype, resolved.recipe)
        first, _, rest = weight.name.partition(".")
        if first == "layers":
            layers[int(rest.partition(".")[0])] += num_bytes
            continue
        before += num_bytes if first in BEFORE_LAYERS else 0
        after += num_bytes if first not in BEFORE_LAYERS or (first == "embed" and weight.kind == "head") else 0
    sums = [0]
    for num_bytes in layers:
        sums.append(sums[-1] + num_bytes)
    return sums, (before, after)


def _layer_kinds(resolved: Resolved) -> list[object]:
    """Return what determines the memory of each layer."""
    declared = resolved.declared
    heads, spec = declared.declaration.heads(resolved.mesh.all_layers), declared.spec
    formats = resolved.protected.formats(resolved.kv_format, declared.num_layers)
    windows = (None,) * declared.num_layers if heads is None else heads.windows
    shared = frozenset() if heads is None else heads.shared_layers
    return [
        (kv_format, window, layer in shared, None if spec is None else spec.layer_kind(layer))
        for layer, (kv_format, window) in enumerate(zip(formats, windows, strict=True))
    ]
