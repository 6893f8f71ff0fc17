"""Where a model is cut into pipeline stages: contiguous layers, so that the stage with fewest pages has most; no torch.

A stage's pages are what its weights and all else leave of its budget; embedding and head count where they are. Among cuts
that leave as many, those are taken whose largest stage reads the fewest weights: a step waits for it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.distributed.exchange_plan import ExchangeKind
from holdfast.distributed.mesh import Mesh
from holdfast.memory.planner import PAGE_PHASES
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.declared_weights import weight_bytes
from holdfast.models.sharding import BEFORE_LAYERS
from holdfast.planning.resolve import Resolved
from holdfast.planning.target import Target
from holdfast.planning.terms import Layout, needs_beside_weights

Cuts = tuple[tuple[int, int], ...]
CountPages = Callable[[int, int, int], int]
"""Pages of a stage with the layers from the second number to before the third."""


def best_cuts(
    num_layers: int,
    num_stages: int,
    count_pages: CountPages,
    weigh: Callable[[int, int], int],
    shared_layers: frozenset[int] = frozenset(),
) -> Cuts | None:
    """The layers of each stage; no stage begins with one of `shared_layers`. None where there are too few layers for that.

    More layers leave no more pages and weigh no less: whoever calls sees to that.
    """

    def fewest(first: int, last: int, stage: int) -> int:
        return -count_pages(stage, first, last)

    cuts = _smallest_largest(num_layers, num_stages, fewest, shared_layers)
    if cuts is None:
        return None
    most = max(fewest(*layers, stage) for stage, layers in enumerate(cuts))

    def weight(first: int, last: int, stage: int) -> int | None:
        return weigh(first, last) if fewest(first, last, stage) <= most else None

    return _smallest_largest(num_layers, num_stages, weight, shared_layers)


def _smallest_largest(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], int | None],
    shared_layers: frozenset[int],
) -> Cuts | None:
    """Cuts whose most expensive stage is as cheap as can be; a stage without a cost cannot be."""
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
                if first not in reached:
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


def equal_cuts(num_layers: int, num_stages: int) -> Cuts:
    """As many layers in each stage, one more in the first ones where they do not divide."""
    share, rest = divmod(num_layers, num_stages)
    ends = [share * (stage + 1) + min(stage + 1, rest) for stage in range(num_stages)]
    return tuple(zip([0, *ends], ends, strict=False))


class StageCosts:
    """What a model's layers cost on the first rank of a stage, which holds most; counted once for all stages that are alike."""

    def __init__(
        self,
        declared: DeclaredModel,
        mesh: Mesh,
        targets: Sequence[Target],
        resolved: Sequence[Resolved],
        enforce_eager: bool,
        is_invariant: bool = False,
        exchange: ExchangeKind = "symmetric",
    ) -> None:
        """`mesh` stands for the ranks of a stage; of targets and what is resolved for them there is one a stage, the smallest."""
        self._declared, self._mesh, self._targets, self._resolved = declared, mesh, targets, resolved
        self._enforce_eager, self._is_invariant = enforce_eager, is_invariant
        self._exchange: ExchangeKind = exchange
        self._sums, self._ends = _weigh_layers(declared, mesh, resolved[0])
        self._kinds = _layer_kinds(declared, mesh, resolved[0])
        self._known: dict[object, tuple[int, int]] = {}

    def weigh(self, first: int, last: int) -> int:
        """Bytes of the weights that a step reads in these layers; the head is one of them, an embedding is not."""
        head = self._ends[1] if last == self._declared.num_layers else 0
        return self._sums[last] - self._sums[first] + head

    def count_pages(self, stage: int, first: int, last: int) -> int:
        """Pages that are left of the budget; below 0 the bytes that are short of the rest."""
        num_stages = len(self._targets)
        beside_bytes, page_bytes = self._beside(stage, first, last)
        weights = self._sums[last] - self._sums[first]
        weights += self._ends[0] * (stage == 0) + self._ends[1] * (stage == num_stages - 1)
        left_bytes = self._resolved[stage].budget_bytes - weights - beside_bytes
        # What is short is counted in bytes: in pages, which are larger with more layers, more layers would be short of less.
        return left_bytes // page_bytes if left_bytes >= 0 else left_bytes

    def _beside(self, stage: int, first: int, last: int) -> tuple[int, int]:
        """What a stage holds beside weights, and bytes of a page: the same of all stages with as many layers of each kind."""
        num_stages = len(self._targets)
        kinds = frozenset(Counter(self._kinds[first:last]).items())
        ends = stage == 0, stage == num_stages - 1
        key = ends, kinds, self._targets[stage], self._resolved[stage].limits
        if key not in self._known:
            mesh = replace(self._mesh, stage=stage, num_stages=num_stages, layers=(first, last))
            layout = Layout(
                *(self._declared, self._targets[stage], mesh, self._enforce_eager, None),
                is_invariant=self._is_invariant,
                exchange_kind=self._exchange,
            )
            terms = needs_beside_weights(layout, self._resolved[stage]).terms
            beside = max(sum(term.num_bytes for term in terms if phase in term.phases) for phase in PAGE_PHASES)
            self._known[key] = beside, layout.page_bytes(self._resolved[stage])
        return self._known[key]


def _weigh_layers(declared: DeclaredModel, mesh: Mesh, resolved: Resolved) -> tuple[list[int], tuple[int, int]]:
    """Bytes of all layers before each, and those of the first stage before its layers and of the last behind them."""
    layers, before, behind = [0] * declared.num_layers, 0, 0
    for weight in declared.parameters(mesh.all_layers):
        num_bytes = weight_bytes(weight, resolved.dtype, resolved.recipe)
        first, _, rest = weight.name.partition(".")
        if first == "layers":
            layers[int(rest.partition(".")[0])] += num_bytes
            continue
        before += num_bytes if first in BEFORE_LAYERS else 0
        behind += num_bytes if first not in BEFORE_LAYERS or (first == "embed" and weight.kind == "head") else 0
    sums = [0]
    for num_bytes in layers:
        sums.append(sums[-1] + num_bytes)
    return sums, (before, behind)


def _layer_kinds(declared: DeclaredModel, mesh: Mesh, resolved: Resolved) -> list[object]:
    """Of each layer what its room follows from."""
    heads, spec = declared.declaration.heads(mesh.all_layers), declared.spec
    formats = resolved.protected.formats(resolved.kv_format, declared.num_layers)
    windows = (None,) * declared.num_layers if heads is None else heads.windows
    shared = frozenset() if heads is None else heads.shared_layers
    return [
        (kv_format, window, layer in shared, None if spec is None else spec.layer_kind(layer))
        for layer, (kv_format, window) in enumerate(zip(formats, windows, strict=True))
    ]
