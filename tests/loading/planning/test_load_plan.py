"""Load plans from headers alone: which rows go where, what is read, and in how much memory; a model known from its headers."""

import dataclasses
import json
from pathlib import Path

import pytest

from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.plan import (
    CHUNK_BYTES,
    CPU_CHUNK_BYTES,
    CPU_READERS,
    MAX_READERS,
    PINNED_CHUNKS,
    plan_load,
)
from holdfast.loading.sources.dummy import DummySource
from holdfast.memory.planner import PHASES
from holdfast.memory.workspace_plan import TensorSpec, arena_bytes
from holdfast.models.parameters import Parameter, Part
from holdfast.models.sharding import shard_parameters
from holdfast.quant.weight_schemes import (
    FP8,
    FP8_BLOCK,
    FP8_TENSOR,
    HEAD_SCHEME,
    INT8,
    MXFP4,
    WEIGHT_SCHEMES,
    WeightRecipe,
)
from loading.header_source import HeaderSource, entries_for, entry, experts, stacked
from loading.safetensors_bytes import write
from loading.sources.test_source import CONFIG, SHAPES

MIB = 2**20
EMBED = Parameter("embed.weight", (10, 4), (Part("model.embed_tokens.weight", 0, (10, 4)),), "embedding", "rows")
TIED_EMBED = Parameter("embed.weight", (10, 4), EMBED.parts, "head", "rows")
QKV = Parameter("layers.0.qkv.weight", (8, 4), (Part("q", 0, (4, 4)), Part("k", 4, (2, 4)), Part("v", 6, (2, 4))))
NORM = Parameter("norm.weight", (4,), (Part("norm", 0, (4,)),), "norm")
HEAD = Parameter("lm_head.weight", (10, 4), (Part("lm_head.weight", 0, (10, 4)),), "head", "rows")
UNTIED, TIED = (EMBED, QKV, NORM, HEAD), (TIED_EMBED, QKV, NORM)


def plan_of(parameters, dtype="bfloat16", recipe=None, entries=None, **more):
    source = HeaderSource(entries_for(parameters) if entries is None else entries, **more)
    return plan_load(parameters, source, dtype, recipe or WeightRecipe())


def test_plan_load_fills_each_row_of_each_parameter_once():
    plan = plan_of(UNTIED)
    for parameter in UNTIED:
        rows = [
            row
            for move in plan.moves
            if move.target == parameter.name
            for row in range(move.part.row_start, move.part.row_start + move.part.num_rows)
        ]
        assert sorted(rows) == list(range(parameter.num_rows))


def test_plan_load_counts_bytes_from_headers():
    plan = plan_of(UNTIED, entries=entries_for(UNTIED, "float32"))
    assert {weight.name: weight.num_bytes for weight in plan.weights} == {
        "embed.weight": 80,
        "layers.0.qkv.weight": 64,
        "norm.weight": 8,
        "lm_head.weight": 80,
    }
    assert plan.final_bytes == 4 * 256, "each begins at an aligned place"
    assert plan.read_bytes == 464
    assert plan.num_quantized == 0


def test_plan_specs_are_in_the_order_of_parameters():
    shuffled = [entries_for(UNTIED)[index] for index in (3, 0, 4, 2, 5, 1)]
    plan = plan_of(UNTIED, "float16", entries=shuffled)
    assert plan.specs == tuple(TensorSpec(parameter.name, parameter.shape, "float16") for parameter in UNTIED)
    assert [move.tensor for move in plan.moves] == [item.name for item in shuffled], "read in the order of the source"


def test_plan_load_reads_rows_of_a_tensor_front_to_back():
    """One tensor fills three parameters: its rows come in their order, whatever the parameters are called."""
    taken = {"a.weight": (4, 9), "b.weight": (0, 4), "c.weight": (9, 10)}
    parameters = [
        Parameter(name, (last - first, 4), (Part("fused", 0, (10, 4), rows=(first, last)),))
        for name, (first, last) in taken.items()
    ]
    plan = plan_of([NORM, *parameters], entries=[entry("fused", (10, 4)), entry("norm", (4,))])
    assert [(move.target, move.part.row_range) for move in plan.moves[:3]] == [
        *(("b.weight", (0, 4)), ("a.weight", (4, 9))),
        ("c.weight", (9, 10)),
    ]
    assert [move.num_bytes for move in plan.moves] == [32, 40, 8, 8]


def test_plan_load_keeps_the_own_dtype_of_a_parameter():
    router = Parameter("router.weight", (4, 8), (Part("gate", 0, (4, 8)),), "router", dtype="float32")
    plan = plan_of([router])
    assert plan.specs == (TensorSpec("router.weight", (4, 8), "float32"),)


def test_plan_load_moves_keep_the_dtype_of_the_checkpoint():
    plan = plan_of([QKV], entries=[entry("q", (4, 4), "float16"), entry("k", (2, 4), "float64"), entry("v", (2, 4))])
    assert {move.tensor: move.tensor_dtype for move in plan.moves} == {"q": "float16", "k": "float64", "v": "bfloat16"}


@for_each("scheme", WEIGHT_SCHEMES.values())
def test_plan_load_quantizes_matrices_and_the_head(scheme):
    wide = stacked("layers.0.qkv.weight", [256, 128, 128], 256)
    head = Parameter("lm_head.weight", (300, 256), (Part("lm_head.weight", 0, (300, 256)),), "head")
    embed = Parameter("embed.weight", (300, 256), (Part("e", 0, (300, 256)),), "embedding")
    bias = Parameter("layers.0.qkv.bias", (512,), (Part("b", 0, (512,)),), "bias")
    plan = plan_of([embed, wide, bias, head], recipe=WeightRecipe(scheme))
    by_name = {weight.name: weight.scheme for weight in plan.weights}
    assert by_name == {"embed.weight": None, wide.name: scheme, bias.name: None, "lm_head.weight": HEAD_SCHEME}
    assert plan.num_quantized == 2
    assert {move.target: move.scheme for move in plan.moves} == by_name
    assert f"{wide.name}.scale" in {spec.name for spec in plan.specs}
    assert plan.weights[1].num_bytes == sum(plane.num_bytes for plane in scheme.planes((512, 256)))


def test_plan_load_ignored_patterns_stay_unquantized():
    down = stacked("layers.0.down.weight", [64], 64, prefix="model.layers.0.mlp.down_proj")
    for pattern in ("layers.0.down", "*down_proj*", "re:.*down_proj"):
        plan = plan_of([QKV, down], recipe=WeightRecipe(FP8, ignore=(pattern,)))
        assert [weight.scheme for weight in plan.weights] == [FP8, None], pattern


@for_each(
    "heights, block_rows", [([256, 128], 128), ([576, 192, 192], 64), ([200], 128), ([192, 7], 64), ([36, 36], 4)]
)
def test_plan_load_block_rows_divide_each_part(heights, block_rows):
    plan = plan_of([stacked("w", heights, 128)], recipe=WeightRecipe(FP8_BLOCK))
    (weight,) = plan.weights
    assert weight.scheme is not None
    assert weight.scheme.block_rows == block_rows
    assert weight.specs[1].shape == (-(-sum(heights) // block_rows), 1)


@for_each("layout", range(3))
@for_each("scheme", WEIGHT_SCHEMES.values())
def test_plan_load_expert_layouts_give_the_same_weight(layout, scheme):
    parameter = experts(4, 96, 64)
    parts = (parameter.parts, *parameter.layouts)[layout]
    entries = entries_for([Parameter("w", parameter.shape, parts)])
    plan = plan_of([parameter], recipe=WeightRecipe(scheme), entries=entries)
    (weight,) = plan.weights
    assert weight.scheme == scheme.with_parts([96])
    assert len(plan.moves) == 8
    assert plan.read_bytes == 4 * 192 * 64 * 2
    assert all(move.num_bytes == 96 * 64 * 2 for move in plan.moves)
    wanted = (0, 96) if layout == 0 else (288, 384)
    assert plan.moves[3].amax_rows == (wanted if scheme is FP8_TENSOR else None), "gate and up have scales of their own"


def test_plan_load_stored_tied_head_is_compared():
    plan = plan_of(TIED, entries=[*entries_for(TIED), entry("lm_head.weight", (10, 4))], recipe=WeightRecipe(FP8))
    (head,) = plan.tied
    assert (head.tensor, head.target, head.scheme) == ("lm_head.weight", "embed.weight", INT8)
    assert plan.read_bytes == 2 * (40 + 32 + 4 + 40)
    assert plan_of(TIED).tied == ()


def test_plan_load_tied_embedding_may_be_stored_as_head():
    entries = [item for item in entries_for(UNTIED) if item.name != "model.embed_tokens.weight"]
    plan = plan_of(TIED, entries=entries)
    assert plan.tied == ()
    assert {move.tensor: move.target for move in plan.moves}["lm_head.weight"] == "embed.weight"


@for_each(
    "shape, dtype, scheme, chunk_bytes",
    [
        ((10, 4), "bfloat16", None, 256),
        ((1000, 2**14), "float32", None, CHUNK_BYTES),
        ((2, 2**22), "float64", None, 2**25),
        ((1, 2**20), "float16", None, 2**21),
        ((256, 2**18), "bfloat16", FP8_BLOCK, 128 * 2**19),
        ((100, 2**18), "bfloat16", FP8_BLOCK, 100 * 2**19),
        ((256, 2**18), "bfloat16", MXFP4, CHUNK_BYTES),
    ],
)
def test_chunk_bytes_is_constant_or_less_for_small_models(shape, dtype, scheme, chunk_bytes):
    parameter = Parameter("a", shape, (Part("x", 0, shape),))
    plan = plan_of([parameter], entries=[entry("x", shape, dtype)], recipe=WeightRecipe(scheme))
    assert plan.chunk_bytes("cuda") == chunk_bytes
    assert plan.staging_bytes("cuda") == 2 * chunk_bytes + 256 + 256
    least = plan.moves[0].least_bytes
    assert plan.chunk_bytes("cpu") == max(least, min(chunk_bytes, CPU_CHUNK_BYTES), 256)
    assert plan.staging_bytes("cpu") == 3 * plan.chunk_bytes("cpu") + 256 + 256


def test_chunk_bytes_of_a_transposed_stack_stays_constant():
    shape = (2, 2**14, 2**14)
    parameter = Parameter("w", shape, (Part("x", 0, shape, is_transposed=True),), "expert")
    assert plan_of([parameter], entries=[entry("x", shape, "float32")]).chunk_bytes("cuda") == CHUNK_BYTES


def test_chunk_bytes_fits_many_small_tensors_together():
    parameters = [Parameter(f"p{index}", (1000,), (Part(f"t{index}", 0, (1000,)),), "norm") for index in range(50)]
    assert plan_of(parameters).chunk_bytes("cuda") == 50 * 2048


def test_staging_specs_of_20k_moves_stay_at_two_chunks():
    parameter = stacked("w", [1] * 20_000, 1024)
    plan = plan_of([parameter], recipe=WeightRecipe(FP8_TENSOR))
    assert len(plan.moves) == 20_000
    specs = {spec.name: spec for spec in plan.staging_specs("cuda")}
    assert specs["findings"] == TensorSpec("findings", (20_000, 2), "int32")
    assert specs["amax"] == TensorSpec("amax", (20_000,), "float32")
    assert plan.staging_bytes("cuda") == arena_bytes(specs.values()) < 33 * MIB
    assert plan.pinned_bytes("cuda") == PINNED_CHUNKS * CHUNK_BYTES == 192 * MIB
    assert plan.host_bytes("cuda") <= 256 * MIB


def test_staging_specs_include_findings_of_a_tied_head():
    plan = plan_of(TIED, entries=[*entries_for(TIED), entry("lm_head.weight", (10, 4))])
    assert next(spec.shape for spec in plan.staging_specs("cuda") if spec.name == "findings") == (6, 2)


@for_each("reader_bytes, num_readers", [(0, MAX_READERS), (MIB, MAX_READERS), (10 * MIB, 3), (100 * MIB, 1)])
def test_plan_load_large_reader_scratch_reduces_readers(reader_bytes, num_readers):
    plan = plan_of(UNTIED, scratch_bytes_per_reader=reader_bytes)
    assert plan.num_readers == num_readers
    assert plan.host_bytes("cuda") == plan.pinned_bytes("cuda") + num_readers * reader_bytes
    assert plan.host_bytes("cpu") == plan.staging_bytes("cpu") + min(num_readers, CPU_READERS) * reader_bytes
    assert plan.pinned_bytes("cpu") == 0


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_plan_terms_are_weights_and_staging(device_kind):
    plan = plan_of(UNTIED)
    weights, staging = plan.terms(device_kind)
    assert (weights.owner, weights.num_bytes, weights.phases) == ("weights", plan.final_bytes, PHASES)
    assert weights.reason == "4 tensors in bfloat16"
    assert (staging.owner, staging.num_bytes) == ("staging", plan.staging_bytes(device_kind))
    assert staging.phases == ("load",)
    assert ("of pinned host memory" in staging.reason) == (device_kind == "cuda")


def test_plan_terms_say_how_weights_are_stored():
    parameters = [*(stacked(f"w{index}", [32], 32, prefix=f"w{index}.") for index in range(3)), NORM, HEAD]
    plan = plan_of(parameters, recipe=WeightRecipe(MXFP4))
    assert plan.terms("cuda")[0].reason == "3 tensors in mxfp4, 1 in bfloat16, 1 in int8"
    assert plan_of([]).terms("cuda")[0].reason == "0 tensors in bfloat16"
    assert plan_of(UNTIED[:1]).terms("cuda")[0].reason == "1 tensor in bfloat16"


@for_each("device_kind", ["cpu", "cuda"])
@for_each("dtype", ["float64", "float32", "bfloat16"])
def test_dummy_weights_take_the_staging_of_real_ones(device_kind, dtype):
    large = (Parameter("w", (5000, 4096), (Part("x", 0, (5000, 4096)),)),)
    dummy = plan_load(large, DummySource(large, dtype), "bfloat16")
    real = plan_of(large, entries=entries_for(large, dtype))
    assert dummy.writer_specs
    assert set(dummy.writer_specs) <= set(dummy.staging_specs(device_kind))
    assert dummy.pinned_bytes(device_kind) == 0
    assert dummy.final_bytes == real.final_bytes
    if device_kind == "cuda":
        assert dummy.staging_bytes(device_kind) == real.staging_bytes(device_kind) == 32 * MIB + 512
    small = plan_load(UNTIED, DummySource(UNTIED, dtype), "bfloat16")
    chunk_bytes = small.chunk_bytes(device_kind)
    others = {"cpu": 2, "cuda": 1}[device_kind] * chunk_bytes
    assert small.staging_bytes(device_kind) == others + arena_bytes(small.writer_specs) + 512


def test_plan_load_expert_rank_reads_only_its_share():
    whole = experts(8, 64, 128)
    (share,) = shard_parameters([whole], Mesh(3, 4, 3, 4), 8, 8)
    plan = plan_of([share], recipe=WeightRecipe(FP8), entries=entries_for([whole]))
    assert {move.tensor for move in plan.moves} == {
        f"experts.{expert}.{half}.weight" for expert in (6, 7) for half in ("gate", "up")
    }
    assert plan.read_bytes == 4 * 64 * 128 * 2
    assert plan.weights[0].shape == (2, 128, 128)


@for_each("scheme, share", [(FP8, 1), (FP8_TENSOR, 1), (INT8, 1), (FP8_BLOCK, 2), (MXFP4, 2), (None, 2)])
def test_plan_load_reads_whole_rows_only_if_a_scale_needs_them(scheme, share):
    whole = stacked("layers.0.o.weight", [128], 512, split="columns")
    (half,) = shard_parameters([whole], Mesh(1, 2), 8, 8)
    plan = plan_of([half], recipe=WeightRecipe(scheme), entries=entries_for([whole]))
    assert plan.read_bytes == 128 * 512 * 2 // share
    assert plan.weights[0].shape == (128, 256)


@pytest.fixture
def opened(tmp_path: Path) -> OpenModel:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write(tmp_path / "model.safetensors", {name: ("BF16", shape) for name, shape in SHAPES.items()})
    return open_model(str(tmp_path), "auto")


def test_open_directory_describes_a_model_from_its_headers(opened):
    assert opened.kind == "directory"
    assert opened.gguf is None
    assert opened.stored is None, "nothing in it is quantized"
    wanted = {part.tensor for parameter in opened.parameters for part in parameter.parts}
    assert wanted == set(opened.source.entries) == set(SHAPES)


def test_opened_model_is_frozen(opened):
    with pytest.raises(dataclasses.FrozenInstanceError):
        opened.kind = "gguf"  # type: ignore[misc]


def test_generation_defaults_are_empty():
    advice = GenerationDefaults()
    assert advice.eos_token_ids == ()
    assert all(getattr(advice, field.name) is None for field in dataclasses.fields(advice)[1:])
