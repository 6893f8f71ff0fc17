"""Stored schemes: planes of a quantized checkpoint, carried out on small arrays and compared number by number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.planning.stored_schemes import StoredSchemes
from holdfast.models.parameters import Parameter, Part
from holdfast.models.sharding import Mesh, shard_parameters
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WeightRecipe
from loading.header_source import HeaderSource, entry, experts, stacked

BLOCKS = StoredSchemes(FP8_BLOCK, ("_scale_inv", "_scale"))
ROWS = StoredSchemes(FP8, ("_scale",))
TENSORS = StoredSchemes(FP8_TENSOR, ("_scale",))
MX = StoredSchemes(MXFP4)
E4M3 = "float8_e4m3fn"
NO_RECIPE = WeightRecipe()


def plan_of(parameters, entries, stored, recipe=NO_RECIPE):
    return plan_load(parameters, HeaderSource(entries), "bfloat16", recipe, stored)


def carried_out(plan, tensors):
    """Every plane that a plan fills, by copying numbers as its moves say."""
    planes = {spec.name: np.full(spec.shape, -1) for spec in plan.specs}
    for move in plan.moves:
        part = move.part
        array = tensors[move.tensor]
        if part.is_transposed:
            array = np.swapaxes(array, -1, -2)
        rows = array.reshape(part.source_rows, part.source_columns)
        (top, low), (left, right) = part.row_range, part.column_range
        out = planes[move.target].reshape(-1, part.num_columns)
        out[part.row_start : part.row_start + part.num_rows] = np.repeat(
            rows[top:low, left:right], part.repeats, axis=0
        )
    assert all((plane >= 0).all() for plane in planes.values())
    return planes


def spread(scales, scheme, shape):
    """The scale of every element."""
    scales = scales[..., None] if scheme.block_columns == 0 else scales
    wide = np.repeat(scales, scheme.block_columns or shape[-1], axis=-1)[..., : shape[-1]]
    return np.repeat(wide, scheme.block_rows, axis=-2)[..., : shape[-2], :]


def checkpoint(parts, scale_shape, rows_each, columns_each, random):
    """Codes and scales of whole tensors, their entries, and the scale of each element of them."""
    entries, tensors, spreads = [], {}, {}
    for part in {part.tensor: part for part in parts}.values():
        codes = random.integers(0, 256, part.shape)
        shape = scale_shape(part.shape)
        scales = random.integers(1, 10**6, shape)
        name = part.tensor + ("_scale_inv" if rows_each == 128 else "_scale")
        entries += [entry(part.tensor, part.shape, E4M3), entry(name, shape, "float32")]
        tensors |= {part.tensor: codes, name: scales}
        full = scales.reshape(*part.shape[:-2], -(-part.shape[-2] // rows_each), -(-part.shape[-1] // columns_each))
        wide = np.repeat(np.repeat(full, rows_each, axis=-2), columns_each, axis=-1)
        spreads[part.tensor] = wide[..., : part.shape[-2], : part.shape[-1]]
    return entries, tensors, spreads


def scales_of(parameter, parts, spreads):
    """What the scale of each element of a parameter should be."""
    out = np.zeros((parameter.num_rows, parameter.num_columns), dtype=int)
    for part in parts:
        rows = spreads[part.tensor].reshape(part.source_rows, part.source_columns)
        (top, low), (left, right) = part.row_range, part.column_range
        out[part.row_start : part.row_start + part.num_rows] = rows[top:low, left:right]
    return out.reshape(parameter.shape)


def block_shape(shape):
    return (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_blocks_of_fused_weights_keep_their_scales(data):
    heights = [16 * height for height in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))]
    size = data.draw(st.sampled_from([1, 2, 4]))
    whole = stacked("layers.0.gate_up.weight", [size * height for height in heights], 200, split="rows")
    rank = data.draw(st.integers(0, size - 1))
    (parameter,) = shard_parameters([whole], Mesh(rank, size), 1, 1)
    entries, tensors, spreads = checkpoint(whole.parts, block_shape, 128, 128, np.random.default_rng(0))
    plan = plan_of([parameter], entries, BLOCKS)
    (weight,) = plan.weights
    assert weight.scheme is not None
    assert 128 % weight.scheme.block_rows == 0
    planes = carried_out(plan, tensors)
    got = spread(planes[f"{parameter.name}.scale"], weight.scheme, parameter.shape)
    assert (got == scales_of(parameter, parameter.parts, spreads)).all()
    assert (planes[parameter.name] == scales_of(parameter, parameter.parts, tensors)).all()


@pytest.mark.parametrize(
    ("heights", "block_rows", "num_scale_moves"),
    [([256, 128], 128, 2), ([576, 192, 192], 64, 6), ([200], 128, 1), ([64, 64], 64, 2)],
    ids=["whole blocks", "nine heads", "a ragged end", "less than a block"],
)
def test_blocks_are_as_low_as_the_seams_need(heights, block_rows, num_scale_moves):
    parameter = stacked("layers.0.qkv.weight", heights, 256)
    entries, _, _ = checkpoint(parameter.parts, block_shape, 128, 128, np.random.default_rng(0))
    plan = plan_of([parameter], entries, BLOCKS)
    assert plan.weights[0].scheme == FP8_BLOCK.with_parts([block_rows])
    assert sum(move.target.endswith(".scale") for move in plan.moves) == num_scale_moves
    assert all(move.scheme is None for move in plan.moves), "nothing is quantized"
    assert plan.specs[1].shape == (-(-sum(heights) // block_rows), 2)


@pytest.mark.parametrize("layout", [0, 1], ids=["apart", "fused"])
@pytest.mark.parametrize("inner", [128, 192])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(1, 2), Mesh(0, 1, 1, 2), Mesh(1, 2, 1, 2)], ids=str)
def test_experts_in_blocks(layout, inner, mesh):
    whole = experts(4, inner, 128)
    parts = (whole.parts, *whole.layouts)[layout]
    (parameter,) = shard_parameters([whole], mesh, 1, 1)
    entries, tensors, spreads = checkpoint(parts, block_shape, 128, 128, np.random.default_rng(0))
    plan = plan_of([parameter], entries, BLOCKS)
    (weight,) = plan.weights
    own = (parameter.parts, *parameter.layouts)[layout]
    got = spread(carried_out(plan, tensors)[f"{parameter.name}.scale"], weight.scheme, parameter.shape)
    assert (got == scales_of(parameter, own, spreads)).all()


@pytest.mark.parametrize(
    ("scale_shape", "rows_each"),
    [
        (lambda shape: (shape[0], 1), 1),
        (lambda shape: (shape[0],), 1),
        (lambda shape: (), 10**6),
        (lambda shape: (1,), 10**6),
    ],
    ids=["[N, 1]", "[N]", "a number", "[1]"],
)
@pytest.mark.parametrize("stored", [ROWS, TENSORS], ids=["fp8", "fp8_tensor"])
@pytest.mark.parametrize("size", [1, 2])
def test_scales_by_row_or_tensor_are_kept_by_row(scale_shape, rows_each, stored, size):
    whole = stacked("layers.0.gate_up.weight", [6, 4, 4], 8, split="rows")
    for rank in range(size):
        (parameter,) = shard_parameters([whole], Mesh(rank, size), 1, 1)
        entries, tensors, spreads = checkpoint(whole.parts, scale_shape, rows_each, 8, np.random.default_rng(0))
        plan = plan_of([parameter], [*entries, entry("t0.input_scale", (), "float32")], stored)
        assert plan.weights[0].scheme == stored.scheme
        scales = carried_out(plan, tensors)[f"{parameter.name}.scale"]
        assert scales.shape == (14 // size,)
        assert (spread(scales, FP8, parameter.shape) == scales_of(parameter, parameter.parts, spreads)).all()


@pytest.mark.parametrize("ones", [(1, 1), (6, 1), (6,)], ids=["by expert", "by row", "by row, without a last 1"])
def test_scales_of_stacked_experts(ones):
    whole = experts(4, 3, 8)
    entries, tensors, spreads = checkpoint(
        whole.layouts[0], lambda shape: (shape[0], *ones), 6 // ones[0], 8, np.random.default_rng(0)
    )
    plan = plan_of([whole], entries, ROWS)
    scales = carried_out(plan, tensors)[f"{whole.name}.scale"]
    assert scales.shape == (4, 6)
    assert (spread(scales, FP8, whole.shape) == scales_of(whole, whole.layouts[0], spreads)).all()


def test_scales_of_experts_of_their_own():
    whole = experts(4, 3, 8)
    entries, tensors, spreads = checkpoint(whole.parts, lambda shape: (), 10**6, 8, np.random.default_rng(0))
    scales = carried_out(plan_of([whole], entries, TENSORS), tensors)[f"{whole.name}.scale"]
    assert (spread(scales, FP8, whole.shape) == scales_of(whole, whole.parts, spreads)).all()


def mx_checkpoint(random, count=4, rows=12, columns=128):
    blocks = random.integers(0, 256, (count, rows, columns // 32, 16))
    scales = random.integers(0, 256, (count, rows, columns // 32))
    tensors = {"experts.gate_up_blocks": blocks, "experts.gate_up_scales": scales}
    return [entry(name, array.shape, "uint8") for name, array in tensors.items()], tensors


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(1, 2), Mesh(0, 1, 1, 2), Mesh(2, 3, 1, 2)], ids=str)
def test_mxfp4_experts_are_taken_as_they_are(mesh):
    whole = experts(4, 6, 128)
    (parameter,) = shard_parameters([whole], mesh, 1, 1)
    entries, tensors = mx_checkpoint(np.random.default_rng(0))
    plan = plan_of([parameter], entries, MX)
    assert plan.weights[0].scheme == MXFP4
    planes = carried_out(plan, tensors)
    per, inner = 4 // mesh.expert_size, 6 // mesh.tensor_size
    chosen = slice(mesh.expert_rank * per, (mesh.expert_rank + 1) * per)
    rows = [half + mesh.tensor_rank * inner + row for half in (0, 6) for row in range(inner)]
    wanted = tensors["experts.gate_up_blocks"].reshape(4, 12, 64)[chosen][:, rows]
    assert (planes[parameter.name] == wanted).all()
    assert (planes[f"{parameter.name}.scale"] == tensors["experts.gate_up_scales"][chosen][:, rows]).all()


def test_plain_experts_beside_settings_of_mxfp4_may_have_any_shape():
    whole = experts(4, 6, 40)
    entries = [entry(part.tensor, part.shape) for part in whole.parts]
    assert plan_of([whole], entries, MX).num_quantized == 0
    with pytest.raises(UnsupportedModelError, match=r"is stored as mxfp4; it has 40 columns"):
        plan_of([whole], [entry("experts.gate_up_blocks", (4, 12, 1, 16), "uint8")], MX)


def test_columns_of_mxfp4_experts():
    parts = (Part("experts.gate_up", 0, (4, 12, 128)),)
    whole = Parameter("layers.0.experts.down.weight", (4, 12, 128), parts, "expert", "columns")
    (parameter,) = shard_parameters([whole], Mesh(1, 2), 1, 1)
    entries, tensors = mx_checkpoint(np.random.default_rng(0))
    planes = carried_out(plan_of([parameter], entries, MX), tensors)
    assert (planes[parameter.name] == tensors["experts.gate_up_blocks"].reshape(4, 12, 64)[..., 32:]).all()
    assert (planes[f"{parameter.name}.scale"] == tensors["experts.gate_up_scales"][..., 2:]).all()
    (odd,) = shard_parameters([whole], Mesh(1, 8), 1, 1)
    with pytest.raises(UnsupportedModelError, match=r"it has 16 columns.*take fewer ranks"):
        plan_of([odd], entries, MX)


def test_columns_of_blocks():
    whole = stacked("layers.0.o.weight", [256], 512, split="columns")
    entries, tensors, spreads = checkpoint(whole.parts, block_shape, 128, 128, np.random.default_rng(0))
    (parameter,) = shard_parameters([whole], Mesh(1, 2), 1, 1)
    plan = plan_of([parameter], entries, BLOCKS)
    got = spread(carried_out(plan, tensors)["layers.0.o.weight.scale"], FP8_BLOCK, parameter.shape)
    assert (got == scales_of(parameter, parameter.parts, spreads)).all()
    assert plan.read_bytes == 256 * 256 + 2 * 2 * 4
    (odd,) = shard_parameters([whole], Mesh(1, 8), 1, 1)
    with pytest.raises(UnsupportedModelError, match=r"the columns 64 to 127, and 128 share a scale; take fewer ranks"):
        plan_of([odd], entries, BLOCKS)


QKV = stacked("layers.0.qkv.weight", [128, 128], 128)
NAMES = ("t0", "t1")


def qkv_entries(dtype=E4M3):
    codes = [entry(name, (128, 128), dtype) for name in NAMES]
    return codes + [entry(f"{name}_scale_inv", (1, 1), "float32") for name in NAMES]


def test_a_missing_scale_is_missing():
    with pytest.raises(ModelFormatError, match=r"m.safetensors lacks 1 tensor: t1_scale_inv"):
        plan_of([QKV], qkv_entries()[:-1], BLOCKS)
    with pytest.raises(ModelFormatError, match=r"lacks 1 tensor: t0;"):
        plan_of([QKV], qkv_entries()[1:], BLOCKS)


def test_a_scale_of_another_shape_or_type_is_named():
    entries = [*qkv_entries()[:-1], entry("t1_scale_inv", (2, 1), "float32")]
    with pytest.raises(ModelFormatError, match=r"'t1_scale_inv' has the shape \[2, 1\]; .* need \[1, 1\]"):
        plan_of([QKV], entries, BLOCKS)
    entries = [*qkv_entries()[:-1], entry("t1_scale_inv", (1, 1), "int8")]
    with pytest.raises(UnsupportedModelError, match=r"'t1_scale_inv' is stored as int8; scales are read from .*uint8"):
        plan_of([QKV], entries, BLOCKS)


def test_scales_may_be_exponents_and_nothing_else_may():
    entries = [*qkv_entries()[:-1], entry("t1_scale_inv", (1, 1), "uint8")]
    plan = plan_of([QKV], entries, BLOCKS)
    assert [spec.dtype for spec in plan.specs] == [E4M3, "float32"]
    assert [move.tensor_dtype for move in plan.moves] == [E4M3, E4M3, "float32", "uint8"]
    norm = Parameter("norm.weight", (8,), (Part("norm.weight", 0, (8,)),), "norm", dtype="float32")
    with pytest.raises(UnsupportedModelError, match=r"'norm.weight' is stored as uint8; weights are read from"):
        plan_of([QKV, norm], [*entries, entry("norm.weight", (8,), "uint8")], BLOCKS)


def test_a_scale_without_codes_is_too_many():
    entries = [entry(name, (128, 128)) for name in NAMES]
    assert plan_of([QKV], entries, BLOCKS).num_quantized == 0, "headers say what is quantized"
    with pytest.raises(ModelFormatError, match="2 tensors too many: t0_scale_inv, t1_scale_inv"):
        plan_of([QKV], qkv_entries("bfloat16"), BLOCKS)


def test_parts_that_are_stored_differently_are_refused():
    entries = [entry("t1", (128, 128)) if item.name == "t1" else item for item in qkv_entries()]
    with pytest.raises(
        UnsupportedModelError, match=r"'t1' is stored as bfloat16; layers.0.qkv.weight is made of it and of 't0'"
    ):
        plan_of([QKV], entries, BLOCKS)


def test_quantizing_twice_is_refused_and_the_same_again_is_not():
    with pytest.raises(
        ConfigError, match=r"quantization=int8 was asked; layers.0.qkv.weight is stored as fp8_block already"
    ):
        plan_of([QKV], qkv_entries(), BLOCKS, WeightRecipe(INT8))
    assert plan_of([QKV], qkv_entries(), BLOCKS, WeightRecipe(FP8_BLOCK)).num_quantized == 1


def test_what_the_makers_left_out_stays_as_it_is():
    head = Parameter("lm_head.weight", (64, 128), (Part("lm_head.weight", 0, (64, 128)),), "head")
    other = Parameter("layers.0.o.weight", (64, 128), (Part("layers.0.o.weight", 0, (64, 128)),))
    entries = [*qkv_entries(), entry("lm_head.weight", (64, 128)), entry("layers.0.o.weight", (64, 128))]
    stored = StoredSchemes(FP8_BLOCK, ("_scale_inv",), ("lm_head",))
    plan = plan_of([QKV, head, other], entries, stored, WeightRecipe(FP8_BLOCK))
    assert [weight.stored_as for weight in plan.weights] == ["fp8_block", "bfloat16", "fp8_block"]
    assert {move.target: move.scheme for move in plan.moves}["layers.0.o.weight"] == FP8_BLOCK, "quantized on the way"


def test_settings_count_where_something_is_stored_so():
    names = [entry("t0", (128, 128)), entry("t0.input_scale", (), E4M3)]
    assert ROWS.used_by({one.name: one for one in names}) is None
    assert ROWS.used_by({one.name: one for one in qkv_entries()}) is ROWS
    assert StoredSchemes(FP8, (), ("lm_head", "re:(?!a)b")).unread_pattern == "re:(?!a)b"
    assert ROWS.unread_pattern is None


def test_codes_that_the_settings_call_unquantized_are_refused():
    stored = StoredSchemes(FP8_BLOCK, ("_scale_inv",), ("t1",))
    with pytest.raises(
        ModelFormatError, match=r"'t0' is stored as float8_e4m3fn; config.json says that it is not quantized"
    ):
        plan_of([QKV], qkv_entries(), stored)


@pytest.mark.parametrize(
    ("pattern", "left_alone"),
    [
        ("lm_head", ["lm_head.weight"]),
        ("model.layers.1", ["model.layers.1.mlp.gate.weight"]),
        ("gate", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("mlp.gate", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("re:.*lm_head", ["lm_head.weight"]),
        ("re:.*mlp.gate$", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        (r"re:^model\.layers\.1\.", ["model.layers.1.mlp.gate.weight"]),
        ("re:.*gate_proj", ["model.layers.1.mlp.gate_proj.weight"]),
        ("re:.*layers.1.*gate$", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("re:lm_head$", ["lm_head.weight"]),
        ("re:lm$", []),
        ("re:layers", []),
        ("re:(a+)+$", []),
        ("re:.*zz.*gate", []),
        ("re:.*lm_head.*lm_head$", []),
        ("mode", []),
    ],
)
def test_patterns_of_modules(pattern, left_alone):
    tensors = ["lm_head.weight", "model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]
    tensors.append("model.layers.1.mlp.gate_proj.weight")
    stored = StoredSchemes(FP8, ("_scale",), (pattern,))
    if pattern in ("model.layers.1", r"re:^model\.layers\.1\."):
        left_alone = [*left_alone, "model.layers.1.mlp.gate_proj.weight"]
    assert [tensor for tensor in tensors if stored.leaves_alone([tensor])] == left_alone


def test_heads_may_have_scales_by_row_and_routers_none():
    assert BLOCKS.kinds == ("linear", "expert")
    assert ROWS.kinds == ("linear", "expert", "head")
    assert MX.kinds == ("expert",)
    router = Parameter("layers.0.router.weight", (4, 8), (Part("gate", 0, (4, 8)),), "router")
    with pytest.raises(UnsupportedModelError, match="'gate' is stored as float8_e4m3fn; a router in fp8 is not read"):
        plan_of([router], [entry("gate", (4, 8), E4M3)], ROWS)
    head = Parameter("lm_head.weight", (128, 128), (Part("lm_head.weight", 0, (128, 128)),), "head")
    entries = [entry("lm_head.weight", (128, 128), E4M3), entry("lm_head.weight_scale_inv", (1, 1), "float32")]
    with pytest.raises(
        UnsupportedModelError, match=r"'lm_head.weight' is stored as .*; a head in fp8_block is not read"
    ):
        plan_of([head], entries, BLOCKS)
