"""The parameters of a mixture of experts, and the layouts in which checkpoints store stacked ones; no torch.

E experts, I inner width of one, H hidden

separate     every expert's gate, up and down are tensors of their own: [I, H], [I, H], [H, I]
fused        gate and up of all experts are one tensor, [E, 2 I, H], and down is another, [E, H, I]
transposed   the same as [E, H, 2 I] and [E, I, H]
by kind      gate, up and down of all experts are one tensor each: [E, I, H], [E, I, H], [E, H, I]

The last three go by module names with and without ".weight". Parts are by expert and by gate and up in every layout, so
that whoever divides experts among ranks finds them in the same order.
"""

from dataclasses import dataclass

from holdfast.models.parameters import Parameter, Part
from holdfast.models.spec import ExpertsSpec
from holdfast.models.stacked_parts import stack_parts, stacked

SUFFIXES = ("", ".weight")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the modules of a sparse layer; names of an expert follow `experts` and its number."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"


EXPERT_NAMES = ExpertNames()


def list_experts(
    experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, theirs: str, with_layouts: bool = True
) -> list[Parameter]:
    """The router, the experts and what every token takes, of one layer; `ours` and `theirs` are prefixes of names."""
    router = [(f"{theirs}{names.router}.weight", (experts.num_experts, hidden))]
    parameters = [stacked(f"{ours}router.weight", router, "router", "none")]
    for make in (_gate_up, _down):
        parameter = make(experts, names, hidden, f"{ours}experts.", f"{theirs}{names.experts}.", with_layouts)
        parameters.append(parameter)
    if experts.shared_size:
        shared, inner = f"{theirs}{names.shared}.", experts.shared_size
        gate_up = [(f"{shared}{module}.weight", (inner, hidden)) for module in (names.gate, names.up)]
        down = [(f"{shared}{names.down}.weight", (hidden, inner))]
        parameters.append(stacked(f"{ours}shared.gate_up.weight", gate_up, "linear", "rows"))
        parameters.append(stacked(f"{ours}shared.down.weight", down, "linear", "columns"))
    if experts.has_shared_gate:
        gate = [(f"{theirs}{names.shared_gate}.weight", (1, hidden))]
        parameters.append(stacked(f"{ours}shared.gate.weight", gate, "router", "none"))
    return parameters


def _gate_up(
    experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, prefix: str, with_layouts: bool
) -> Parameter:
    count, inner = experts.num_experts, experts.intermediate_size
    halves = (names.gate, names.up)
    separate = [(f"{prefix}{expert}.{half}.weight", (inner, hidden)) for expert in range(count) for half in halves]
    layouts, suffixes = [], SUFFIXES if with_layouts else ()
    for suffix in suffixes:
        fused = prefix + names.gate_up + suffix
        layouts.append(_slices(fused, (count, 2 * inner, hidden), 2 * count))
        layouts.append(_slices(fused, (count, hidden, 2 * inner), 2 * count, is_transposed=True))
    for suffix in suffixes:
        by_half = [_slices(prefix + half + suffix, (count, inner, hidden), count) for half in halves]
        layouts.append(_in_turn(by_half, inner))
    shape = (count, 2 * inner, hidden)
    return Parameter(f"{ours}gate_up.weight", shape, stack_parts(separate), "expert", "rows", tuple(layouts))


def _down(
    experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, prefix: str, with_layouts: bool
) -> Parameter:
    count, inner = experts.num_experts, experts.intermediate_size
    separate = [(f"{prefix}{expert}.{names.down}.weight", (hidden, inner)) for expert in range(count)]
    layouts, suffixes = [], SUFFIXES if with_layouts else ()
    for suffix in suffixes:
        tensor = prefix + names.down + suffix
        layouts.append(_slices(tensor, (count, hidden, inner), count))
        layouts.append(_slices(tensor, (count, inner, hidden), count, is_transposed=True))
    shape = (count, hidden, inner)
    return Parameter(f"{ours}down.weight", shape, stack_parts(separate), "expert", "columns", tuple(layouts))


def _slices(tensor: str, shape: tuple[int, int, int], num_parts: int, is_transposed: bool = False) -> tuple[Part, ...]:
    """All rows of a stacked tensor, in so many equal parts."""
    num_rows = shape[0] * shape[2 if is_transposed else 1] // num_parts
    return tuple(
        Part(tensor, start, shape, (start, start + num_rows), is_transposed=is_transposed)
        for start in range(0, num_parts * num_rows, num_rows)
    )


def _in_turn(tensors: list[tuple[Part, ...]], num_rows: int) -> tuple[Part, ...]:
    """The first part of each tensor, then the second of each, and so on; each fills `num_rows`."""
    parts = [part for same in zip(*tensors, strict=True) for part in same]
    return tuple(Part(part.tensor, place * num_rows, part.shape, part.rows) for place, part in enumerate(parts))
