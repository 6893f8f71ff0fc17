"""Parameters of experts: rows, kinds and splits, and the same rows in every layout."""

from collections import Counter

import pytest
import torch

from holdfast.models.blueprints.anatomy import Experts
from holdfast.models.parameters import ExpertNames, Parameter, Part, list_experts
from holdfast.models.spec import ExpertsSpec

EXPERTS = ExpertsSpec(num_experts=3, top_k=2, intermediate_size=5, shared_size=7, has_shared_gate=True)
HIDDEN = 4


def listed(experts: ExpertsSpec = EXPERTS, with_layouts: bool = True) -> dict[str, Parameter]:
    parameters = list_experts(experts, ExpertNames(), HIDDEN, "layers.1.", "model.layers.1.", with_layouts)
    return {parameter.name.removeprefix("layers.1."): parameter for parameter in parameters}


def test_names_shapes_kinds_and_splits() -> None:
    found = {name: (own.shape, own.kind, own.split) for name, own in listed().items()}
    assert found == {
        "router.weight": ((3, 4), "router", "none"),
        "experts.gate_up.weight": ((3, 10, 4), "expert", "rows"),
        "experts.down.weight": ((3, 4, 5), "expert", "columns"),
        "shared.gate_up.weight": ((14, 4), "linear", "rows"),
        "shared.down.weight": ((4, 7), "linear", "columns"),
        "shared.gate.weight": ((1, 4), "router", "none"),
    }
    assert list(listed(ExpertsSpec(3, 2, 5))) == ["router.weight", "experts.gate_up.weight", "experts.down.weight"]


@pytest.mark.parametrize("shared_size", [0, 7])
def test_what_is_planned_for_other_models_is_the_same(shared_size: int) -> None:
    """Names, order, shapes and kinds are those of blueprint_experts.py, which plans models that do not run."""
    spec = ExpertsSpec(3, 2, 5, shared_size, has_shared_gate=shared_size > 0)
    planned = Experts(3, 2, 5, shared_size, shared_size > 0).weights("layers.1.", HIDDEN, 1)
    parameters = list_experts(spec, ExpertNames(), HIDDEN, "layers.1.", "model.layers.1.")
    assert [(own.name, own.shape, own.kind) for own in planned] == [
        (own.name, own.shape, own.kind) for own in parameters
    ]


def test_tensors_of_their_own_come_first() -> None:
    parts = listed()["experts.gate_up.weight"].parts
    assert [(part.tensor, part.row_start, part.shape) for part in parts[2:4]] == [
        ("model.layers.1.mlp.experts.1.gate_proj.weight", 10, (5, 4)),
        ("model.layers.1.mlp.experts.1.up_proj.weight", 15, (5, 4)),
    ]
    down = listed()["experts.down.weight"].parts
    assert down[2] == Part("model.layers.1.mlp.experts.2.down_proj.weight", 8, (4, 5))
    shared = listed()["shared.gate_up.weight"].parts
    assert [part.tensor.rpartition("mlp.")[2] for part in shared] == [
        "shared_expert.gate_proj.weight",
        "shared_expert.up_proj.weight",
    ]
    assert listed()["shared.gate.weight"].parts[0].tensor.endswith("mlp.shared_expert_gate.weight")
    assert listed()["router.weight"].parts[0].tensor.endswith("mlp.gate.weight")


def test_every_layout_has_the_same_parts_by_expert_and_half() -> None:
    """So that ranks can take some rows of every part, or the parts of some experts, whatever the layout is."""
    for name, num_layouts in (("experts.gate_up.weight", 6), ("experts.down.weight", 4)):
        parameter = listed()[name]
        parameter.check()
        assert len(parameter.layouts) == num_layouts
        for parts in parameter.layouts:
            assert [(part.row_start, part.num_rows) for part in parts] == [
                (part.row_start, part.num_rows) for part in parameter.parts
            ]
        tensors = Counter(tuple(sorted({part.tensor for part in parts})) for parts in parameter.layouts)
        assert max(tensors.values()) == 2, "upright and transposed are told apart by their shapes"


def test_a_plan_of_memory_does_without_layouts() -> None:
    with_none, with_all = listed(with_layouts=False), listed()
    assert all(not parameter.layouts for parameter in with_none.values())
    assert {name: own.parts for name, own in with_none.items()} == {name: own.parts for name, own in with_all.items()}


def test_rows_are_those_of_gates_and_ups_in_every_layout() -> None:
    fused = torch.arange(3 * 10 * 4).view(3, 10, 4)
    prefix = "model.layers.1.mlp.experts."
    gate, up = fused.chunk(2, dim=1)
    for suffix in ("", ".weight"):
        tensors = {f"{prefix}gate_proj{suffix}": gate, f"{prefix}up_proj{suffix}": up}
        for stored in (fused, fused.transpose(1, 2)):
            assert torch.equal(_filled({f"{prefix}gate_up_proj{suffix}": stored}), fused.view(30, 4))
        assert torch.equal(_filled(tensors), fused.view(30, 4))


def _filled(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layouts = listed()["experts.gate_up.weight"].layouts
    (parts,) = (parts for parts in layouts if {part.tensor: part.shape for part in parts} == shapes)
    rows = []
    for part in parts:
        source = tensors[part.tensor].transpose(1, 2) if part.is_transposed else tensors[part.tensor]
        rows.append(source.reshape(-1, source.shape[-1])[slice(*part.row_range)])
    return torch.cat(rows)
