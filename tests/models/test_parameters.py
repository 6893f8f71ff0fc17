"""Parameters: parts tile every tensor, names are those of checkpoints, and experts come in every layout."""

import dataclasses
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.parameters import (
    LLAMA_NAMES,
    ExpertNames,
    Parameter,
    Part,
    list_experts,
    list_parameters,
    stack_parts,
    stacked,
)
from holdfast.models.spec import ExpertsSpec
from loading.tiny_models import FAMILIES, save_tiny
from models.tiny_experts import EXPERT_MODELS, config_of, make_tiny, tensors_of


def stacked_parameters(heights: list[int], width: int = 4) -> Parameter:
    parts, row = [], 0
    for index, height in enumerate(heights):
        parts.append(Part(f"part{index}", row, (height, width)))
        row += height
    return Parameter("layers.0.qkv.weight", (row, width), tuple(parts))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_stacked_parts_are_sound(heights: list[int]) -> None:
    parameter = stacked_parameters(heights)
    parameter.check()
    assert parameter.num_elements == sum(heights) * 4


def broken(row_shift: int = 0, extra_rows: int = 0, width: int = 4) -> Parameter:
    first = Part("q", 0, (8, 4))
    second = Part("k", 8 + row_shift, (2, width))
    return Parameter("qkv", (10 + extra_rows, 4), (first, second))


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (broken(row_shift=1), "k starts at row 9, not 8"),
        (broken(row_shift=-1), "k starts at row 7, not 8"),
        (broken(extra_rows=1), "parts fill 10 rows of 11"),
        (broken(extra_rows=-1), "parts fill 10 rows of 9"),
        (broken(width=3), r"shape=\(2, 3\).* beside self.shape=\(10, 4\)"),
        (Parameter("qkv", (4, 4), ()), "parts fill 0 rows of 4"),
    ],
    ids=["gap", "overlap", "too few", "too many", "wrong width", "none"],
)
def test_parameter_check_names_rows_not_covered(parameter: Parameter, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        parameter.check()


def test_parameter_of_vector_is_checked() -> None:
    bias = Parameter("qkv.bias", (6,), (Part("q.bias", 0, (4,)), Part("k.bias", 4, (2,))))
    bias.check()
    assert bias.num_elements == 6


def test_parameter_check_covers_other_layouts() -> None:
    sound = Parameter("w", (6, 4), (Part("a", 0, (6, 4)),))
    replace(sound, layouts=((Part("b", 0, (2, 4)), Part("c", 2, (4, 4))),)).check()
    with pytest.raises(AssertionError, match="parts fill 4 rows of 6"):
        replace(sound, layouts=((Part("c", 0, (4, 4)),),)).check()


@pytest.mark.parametrize(
    ("part", "rows", "columns", "matrix_rows"),
    [
        (Part("a", 0, (6, 4)), 6, 4, 6),
        (Part("a", 0, (6,)), 6, 1, 6),
        (Part("a", 0, ()), 1, 1, 1),
        (Part("a", 0, (3, 6, 4)), 18, 4, 6),
        (Part("a", 0, (3, 6, 4), is_transposed=True), 12, 6, 4),
        (Part("a", 0, (6, 4), is_transposed=True), 4, 6, 4),
        (Part("a", 0, (3, 6, 4, 16), joined_rows=4), 18, 64, 6),
        (Part("a", 0, (6, 4, 16), joined_rows=4), 6, 64, 6),
    ],
    ids=["matrix", "vector", "number", "stack", "transposed stack", "transposed", "joined stack", "joined"],
)
def test_rows_and_columns_of_a_tensor(part: Part, rows: int, columns: int, matrix_rows: int) -> None:
    assert (part.source_rows, part.source_columns, part.matrix_rows) == (rows, columns, matrix_rows)
    assert (part.row_range, part.column_range, part.whole_range) == ((0, rows), (0, columns), (0, rows))
    assert (part.num_rows, part.num_columns) == (rows, columns)
    part.check()


def test_part_takes_rows_and_columns_with_repeats() -> None:
    part = Part("a", 0, (6, 4), rows=(2, 5), columns=(1, 3), repeats=2, whole_rows=(0, 6))
    assert (part.num_rows, part.num_columns, part.whole_range) == (6, 2, (0, 6))
    part.check()


@pytest.mark.parametrize(
    "part",
    [
        Part("a", 0, (6, 4), rows=(2, 7)),
        Part("a", 0, (6, 4), rows=(3, 3)),
        Part("a", 0, (6, 4), rows=(-1, 3)),
        Part("a", 0, (6, 4), columns=(1, 5)),
        Part("a", 0, (6, 4), columns=(2, 2)),
        Part("a", 0, (6, 4), rows=(1, 5), whole_rows=(2, 6)),
        Part("a", 0, (4, 6), rows=(0, 7), is_transposed=True),
    ],
)
def test_part_check_refuses_ranges_outside_its_tensor(part: Part) -> None:
    with pytest.raises(AssertionError, match="a: "):
        part.check()


@pytest.mark.parametrize(
    ("parameter", "seam_rows"),
    [
        (stacked_parameters([8]), 0),
        (stacked_parameters([8, 4, 4]), 4),
        (stacked_parameters([576, 192, 192]), 192),
        (stacked_parameters([96, 32, 7]), 32),
        (Parameter("w", (3, 10, 4), (Part("a", 0, (3, 10, 4)),)), 10),
        (Parameter("w", (2, 12, 4), tuple(Part(f"p{i}", 6 * i, (6, 4)) for i in range(4))), 6),
        (Parameter("w", (7,), (Part("a", 0, (4,)), Part("b", 4, (3,)))), 4),
    ],
    ids=["one part", "qkv", "nine heads", "an odd end is no seam", "a stack", "a stack of halves", "a bias"],
)
def test_seams_are_where_parts_and_matrices_meet(parameter: Parameter, seam_rows: int) -> None:
    parameter.check()
    assert parameter.seam_rows == seam_rows
    share = Parameter("w", (2, 4), (Part("a", 0, (6, 4), rows=(2, 4)),), whole=parameter)
    assert share.seam_rows == seam_rows, "a share has the blocks of the whole"


def test_parts_begin_where_the_last_one_ended() -> None:
    tensors = [("q", (6, 4)), ("k", (2, 4)), ("v", (2, 4))]
    assert stack_parts(tensors) == (Part("q", 0, (6, 4)), Part("k", 6, (2, 4)), Part("v", 8, (2, 4)))
    parameter = stacked("qkv.weight", tensors, "linear", "rows")
    assert (parameter.name, parameter.shape, parameter.kind, parameter.split) == (
        "qkv.weight",
        (10, 4),
        "linear",
        "rows",
    )
    assert parameter.parts == stack_parts(tensors)
    parameter.check()


def test_stacked_vectors_are_one_parameter() -> None:
    bias = stacked("qkv.bias", [("q", (6,)), ("k", (2,))], "bias", "rows")
    assert bias.shape == (8,)
    bias.check()


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


def test_expert_layouts_have_same_parts_by_expert_and_half() -> None:
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
        assert max(tensors.values()) == 2, "upright and transposed differ by their shapes"


def test_parameters_without_layouts_keep_their_parts() -> None:
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


LAYER = {"attn_norm.weight", "qkv.weight", "o.weight", "mlp_norm.weight", "gate_up.weight", "down.weight"}
OUTSIDE = {"embed.weight", "final_norm.weight", "lm_head.weight"}


def names(**config) -> set[str]:
    base = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return {parameter.name.removeprefix("layers.0.") for parameter in parameters(read_spec(base | config))}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_use_every_tensor_of_dense_model_once(family, tmp_path):
    model = save_tiny(family, tmp_path)
    spec = read_spec(model.config.to_dict())
    listed = parameters(spec)
    parts = [part for parameter in listed for part in parameter.parts]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if spec.tied_embeddings:
        del shapes["lm_head.weight"]
    assert {part.tensor: part.shape for part in parts} == shapes
    assert len(parts) == len(shapes)
    for parameter in listed:
        parameter.check()


def test_names_are_those_that_the_decoder_asks_for():
    assert names() == LAYER | OUTSIDE
    assert names(tie_word_embeddings=True) == (LAYER | OUTSIDE) - {"lm_head.weight"}
    biases = {"qkv.bias", "o.bias", "gate_up.bias", "down.bias"}
    assert names(attention_bias=True, mlp_bias=True) == LAYER | OUTSIDE | biases
    assert names(architectures=["Qwen3ForCausalLM"]) == LAYER | OUTSIDE | {"q_norm.weight", "k_norm.weight"}
    opt = {name.replace("gate_up", "up") for name in LAYER} | {"embed.weight", "final_norm.weight", "positions.weight"}
    opt |= {name.replace("weight", "bias") for name in opt - {"embed.weight", "positions.weight"}}
    assert names(architectures=["OPTForCausalLM"]) == opt


def test_experts_take_the_place_of_the_mlp_in_sparse_layers():
    sparse = (LAYER - {"gate_up.weight", "down.weight"}) | {
        "router.weight",
        "experts.gate_up.weight",
        "experts.down.weight",
    }
    qwen3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1}
    norms = {"q_norm.weight", "k_norm.weight"}
    assert names(**qwen3) == sparse | OUTSIDE | norms
    assert names(**qwen3, mlp_only_layers=[0]) == LAYER | OUTSIDE | norms
    shared = {"shared.gate_up.weight", "shared.down.weight", "shared.gate.weight", "qkv.bias"}
    qwen2 = qwen3 | {"architectures": ["Qwen2MoeForCausalLM"]}
    assert names(**qwen2) == sparse | OUTSIDE | shared


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_parameters_use_every_tensor_of_expert_model_once(name):
    model = make_tiny(name)
    listed = parameters(read_spec(config_of(model)))
    parts = [part for parameter in listed for part in parameter.parts]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(model, "separate").items()}
    assert {part.tensor: part.shape for part in parts} == shapes
    assert len({(part.tensor, part.rows) for part in parts}) == len(parts)
    for parameter in listed:
        parameter.check()


ROWS = {"embed", "lm_head", "qkv", "gate_up", "up"}
COLUMNS = {"o", "down"}


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_MODELS])
def test_kinds_and_splits(family):
    prefix, settings = (FAMILIES | EXPERT_MODELS)[family]
    spec = read_spec({"architectures": [f"{prefix}ForCausalLM"]} | settings)
    for parameter in parameters(spec):
        *path, module, end = parameter.name.split(".")
        split = "rows" if module in ROWS else "columns" if module in COLUMNS else "none"
        if end == "sinks":
            assert (parameter.kind, parameter.split) == ("bias", "rows")
            continue
        if end == "bias" and len(parameter.shape) == 2:  # of each expert a row: its columns are rows of the weight
            assert (parameter.kind, parameter.split) == ("bias", "columns" if split == "rows" else "outputs")
            continue
        if end == "bias":
            # A bias of outputs belongs to all ranks together.
            splits = {"rows": "rows", "columns": "outputs", "none": "none"}
            assert (parameter.kind, parameter.split) == ("bias", splits[split])
            continue
        kind = "linear"
        if module == "lm_head" or (module == "embed" and spec.tied_embeddings):
            kind = "head"
        elif module in ("embed", "positions"):
            kind = "embedding"
        elif module.endswith("norm"):
            kind = "norm"
        elif module == "router" or (path[-1:] == ["shared"] and module == "gate"):
            kind = "router"
        elif path[-1:] == ["experts"]:
            kind = "expert"
        assert (parameter.kind, parameter.split) == (kind, split), parameter.name


def test_fused_rows_are_query_key_value_and_gate_up():
    spec = read_spec(
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 100, "num_hidden_layers": 1}
    )
    by_name = {parameter.name: parameter for parameter in parameters(spec)}
    qkv = by_name["layers.0.qkv.weight"]
    assert qkv.shape == (64 + 32 + 32, 64)
    assert [(part.tensor.split(".")[-2], part.row_start) for part in qkv.parts] == [
        ("q_proj", 0),
        ("k_proj", 64),
        ("v_proj", 96),
    ]
    gate_up = by_name["layers.0.gate_up.weight"]
    assert [(part.tensor.split(".")[-2], part.row_start) for part in gate_up.parts] == [
        ("gate_proj", 0),
        ("up_proj", 100),
    ]


def test_layers_are_numbered_in_order():
    spec = dataclasses.replace(read_spec({"architectures": ["LlamaForCausalLM"]}), num_layers=12)
    order = [parameter.name.split(".")[1] for parameter in list_parameters(spec, LLAMA_NAMES)[1:-2]]
    assert list(dict.fromkeys(order)) == [str(layer) for layer in range(12)]
