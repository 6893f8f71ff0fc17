import dataclasses

import pytest

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.dummy import DummySource
from holdfast.loading.plan import CHUNK_BYTES, plan_load
from holdfast.memory.planner import PHASES
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.formats import DTYPE_BYTES
from loading.made_up_source import TIED, UNTIED, MadeUpSource, entries_for, entry


def refusal(parameters, entries, kind=ModelFormatError, **more):
    source = MadeUpSource(entries, **more)
    with pytest.raises(kind) as caught:
        plan_load(parameters, source, "float32")
    assert source.reads == []
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_every_row_of_every_parameter_is_filled_once():
    plan = plan_load(UNTIED, MadeUpSource(entries_for(UNTIED)), "bfloat16")
    for parameter in UNTIED:
        rows = [
            row
            for move in plan.moves
            if move.parameter == parameter.name
            for row in range(move.row_start, move.row_start + move.shape[0])
        ]
        assert sorted(rows) == list(range(parameter.shape[0]))


def test_bytes_are_known_before_anything_is_read():
    source = MadeUpSource(entries_for(UNTIED))
    plan = plan_load(UNTIED, source, "bfloat16")
    assert plan.parameter_bytes == {"embed.weight": 80, "layers.0.qkv.weight": 64, "lm_head.weight": 80}
    assert plan.final_bytes == 3 * 256, "each begins at an aligned place"
    assert plan.read_bytes == 448
    assert source.reads == []


def test_the_final_tensors_are_specs_in_the_order_of_the_parameters():
    shuffled = [entries_for(UNTIED)[index] for index in (3, 0, 4, 2, 1)]
    plan = plan_load(UNTIED, MadeUpSource(shuffled), "float16")
    assert plan.specs == tuple(TensorSpec(parameter.name, parameter.shape, "float16") for parameter in UNTIED)


@pytest.mark.parametrize(
    ("shape", "dtype", "chunk_bytes"),
    [
        ((10, 4), "bfloat16", 80),
        ((1000, 2**14), "float32", CHUNK_BYTES),
        ((2, 2**22), "float64", 2**25),
        ((1, 2**20), "float16", 2**21),
    ],
    ids=["small", "many rows", "rows longer than a chunk", "one row"],
)
def test_staging_is_a_constant_and_no_more_than_the_model_needs(shape, dtype, chunk_bytes):
    parameter = Parameter("a", shape, (Part("x", 0, shape),))
    plan = plan_load([parameter], MadeUpSource([entry("x", shape, dtype)]), "bfloat16")
    assert plan.chunk_bytes == chunk_bytes
    assert plan.staging_bytes("cpu") == 3 * chunk_bytes
    assert plan.staging_bytes("cuda") == 0
    assert (plan.pinned_bytes("cpu"), plan.pinned_bytes("cuda")) == (0, 32 * 2**20)


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_terms_are_the_weights_for_good_and_staging_while_they_arrive(device_kind):
    plan = plan_load(UNTIED, MadeUpSource(entries_for(UNTIED)), "bfloat16")
    weights, staging = plan.terms(device_kind)
    assert (weights.owner, weights.num_bytes, weights.phases) == ("weights", plan.final_bytes, PHASES)
    assert (staging.owner, staging.num_bytes) == ("staging", plan.staging_bytes(device_kind))
    assert staging.phases == ("load",)
    assert ("32.00 MiB of pinned host memory" in staging.reason) == (device_kind == "cuda")


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_source_that_writes_rows_itself_says_what_it_takes(device_kind, dtype):
    plan = plan_load(UNTIED, DummySource(UNTIED, dtype), "bfloat16")
    assert plan.staging_bytes(device_kind) == plan.writer_bytes == (8 + DTYPE_BYTES[dtype]) * 2**20
    assert plan.staging_bytes(device_kind) <= 64 * 2**20
    assert plan.pinned_bytes(device_kind) == 0


def test_tensors_are_read_in_the_order_of_the_source():
    shuffled = [entries_for(UNTIED)[index] for index in (3, 0, 4, 2, 1)]
    plan = plan_load(UNTIED, MadeUpSource(shuffled), "float32")
    assert [move.tensor for move in plan.moves] == [entry.name for entry in shuffled]


def test_missing_tensors_are_counted_and_the_first_named():
    entries = entries_for(UNTIED)
    assert "m.safetensors lacks 1 tensor: k;" in refusal(UNTIED, [entry for entry in entries if entry.name != "k"])
    assert "the checkpoint lacks 5 tensors: model.embed_tokens.weight, q, k, v, lm_head.weight;" in refusal(UNTIED, [])


def test_unexpected_tensors_are_counted_and_the_first_named():
    more = [entry(f"extra.{index}", (1,), file="b.safetensors") for index in range(7)]
    message = refusal(UNTIED, entries_for(UNTIED) + more)
    assert "b.safetensors has 7 tensors too many: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more;" in message
    assert "a\\nb" in refusal(UNTIED, [*entries_for(UNTIED), entry("a\nb", (1,))])


def test_tensors_that_may_be_ignored_are():
    more = entry("rotary.inv_freq", (4,), dtype="int64")
    plan = plan_load(UNTIED, MadeUpSource([*entries_for(UNTIED), more], ignorable={"rotary.inv_freq"}), "float32")
    assert "rotary.inv_freq" not in {move.tensor for move in plan.moves}


@pytest.mark.parametrize("shape", [(4, 2), (2, 4, 1), (8,), (2, 5), ()])
def test_wrong_shapes_name_file_and_tensor(shape):
    entries = [entry("k", shape) if item.name == "k" else item for item in entries_for(UNTIED)]
    message = refusal(UNTIED, entries)
    assert f"m.safetensors: 'k' has the shape {list(shape)}; the model's settings need [2, 4]" in message


@pytest.mark.parametrize("dtype", ["int8", "F8_E4M3", "bool", "uint8"])
def test_types_that_are_no_floats_are_refused(dtype):
    entries = [dataclasses.replace(item, dtype=dtype) if item.name == "v" else item for item in entries_for(UNTIED)]
    message = refusal(UNTIED, entries, UnsupportedModelError)
    assert f"m.safetensors: 'v' is stored as {dtype}" in message


def test_a_tied_head_is_no_surprise_and_is_compared():
    plan = plan_load(TIED, MadeUpSource(entries_for(UNTIED)), "float32")
    assert [(twin.tensor, twin.parameter) for twin in plan.twins] == [("lm_head.weight", "embed.weight")]
    assert plan.final_bytes == 2 * 256
    assert plan.read_bytes == 448
    assert plan_load(TIED, MadeUpSource(entries_for(TIED)), "float32").twins == ()


def test_a_tied_embedding_may_be_stored_as_the_head_alone():
    entries = [item for item in entries_for(UNTIED) if item.name != "model.embed_tokens.weight"]
    plan = plan_load(TIED, MadeUpSource(entries), "float32")
    assert plan.twins == ()
    assert {move.tensor: move.parameter for move in plan.moves}["lm_head.weight"] == "embed.weight"


def test_a_tied_head_of_another_shape_is_refused():
    entries = [*entries_for(TIED), entry("lm_head.weight", (11, 4))]
    assert "'lm_head.weight' has the shape [11, 4]" in refusal(TIED, entries)
