"""Dummy weights: values by name and place alone, the same bits read and written, with the spread of a model's own."""

import hashlib
from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources import dummy
from holdfast.loading.sources.dummy import TABLE_VALUES, DummyPlane, DummySource
from holdfast.loading.sources.source import WritingSource, read_rows
from holdfast.memory.ledger import Ledger
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_quantize import e8m0_values
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
}


DTYPES = ["float32", "float16", "bfloat16"]


def matrix(name, *shape):
    return Parameter(name, shape, (Part(name, 0, shape),))


def writer_of(source, device="cpu"):
    return source.writer(
        {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in source.writer_specs
        }
    )


def rows_of(shape):
    return prod(shape[:-1]) if len(shape) > 1 else shape[0]


def written(source, name, chunk=None, device="cpu", write=None, columns=None):
    """The whole tensor, by a writer, between bytes that must stay."""
    write = write or writer_of(source, device)
    entry = source.entries[name]
    num_rows, width = rows_of(entry.shape), entry.shape[-1] if len(entry.shape) > 1 else 1
    first, last = columns or (0, width)
    dtype = getattr(torch, entry.dtype)
    row_bytes = (last - first) * dtype.itemsize
    places = torch.full(((num_rows + 2) * row_bytes,), 0xA5, dtype=torch.uint8, device=device)
    chunk = chunk or num_rows
    for start in reversed(range(0, num_rows, chunk)):
        end = min(start + chunk, num_rows)
        write(name, start, end, places[(1 + start) * row_bytes : (1 + end) * row_bytes], columns)
    assert (places[:row_bytes] == 0xA5).all(), f"{name}: bytes before were written"
    assert (places[-row_bytes:] == 0xA5).all(), f"{name}: bytes behind were written"
    values = places[row_bytes:-row_bytes].cpu().view(dtype)
    return values.view(num_rows, last - first) if len(entry.shape) > 1 else values


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@cache
def drawn_table():
    table = torch.empty(TABLE_VALUES)
    dummy.draw_table(table)
    return table


def by_definition(source, name):
    """Element i is entry (start + i) mod TABLE_VALUES of the table, scaled for its kind, in the checkpoint's type."""
    entry = source.entries[name]
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    places = (start % TABLE_VALUES + torch.arange(prod(entry.shape))) % TABLE_VALUES
    values = drawn_table()[places].view(entry.shape)
    if len(entry.shape) > 1:
        values = values * (1 / entry.shape[-1] ** 0.5)
    else:
        values = values * 0.1 + (1.0 if name.endswith(".weight") else 0.0)
    return values.to(getattr(torch, entry.dtype))


@for_each("chunk", [1, 2, 7, 13])
def test_dummy_values_are_independent_of_chunks(chunk):
    whole = read_rows(DummySource([matrix("a.weight", 13, 11)], "float32"), "a.weight", 0, 13)
    source = DummySource([matrix("b.weight", 3, 2), matrix("a.weight", 13, 11)], "float32")
    for start in reversed(range(0, 13, chunk)):
        end = min(start + chunk, 13)
        assert torch.equal(read_rows(source, "a.weight", start, end), whole[start:end])


def test_dummy_values_depend_on_name_and_place_across_the_end():
    name, width = "model.embed_tokens.weight", 1000
    num_rows = 2 * TABLE_VALUES // width + 3
    source = DummySource([matrix(name, num_rows, width)], "float32")
    whole = read_rows(source, name, 0, num_rows)
    assert torch.equal(whole.flatten()[:TABLE_VALUES], whole.flatten()[TABLE_VALUES : 2 * TABLE_VALUES])
    for row in (0, 1, num_rows // 2, num_rows - 1):
        assert torch.equal(read_rows(source, name, row, row + 1)[0], whole[row])


def test_dummy_tensors_and_rows_differ():
    source = DummySource([matrix("a.weight", 500, 64), matrix("b.weight", 500, 64)], "float32")
    rows_a = read_rows(source, "a.weight", 0, 500)
    assert not torch.equal(rows_a, read_rows(source, "b.weight", 0, 500))
    assert len({tuple(row.tolist()) for row in rows_a}) == 500


def test_scales_are_those_of_a_model_that_computes():
    listed = parameters(read_spec(CONFIG))
    source = DummySource(listed, "bfloat16")
    weights = load_weights(
        plan_load(listed, source, "float32"), source, "cpu", Ledger(), lambda done, total: None
    ).weights
    assert set(weights) == {parameter.name for parameter in listed}
    for name, tensor in weights.items():
        assert torch.isfinite(tensor).all()
        center = 1.0 if name.endswith("norm.weight") else 0.0
        spread = 0.1 if tensor.ndim == 1 else tensor.shape[1] ** -0.5
        assert abs(tensor.mean() - center) < spread, name
        assert 0.5 * spread < tensor.std() < 1.5 * spread, name


def test_dummy_source_lists_each_tensor_in_its_dtype():
    listed = parameters(read_spec(CONFIG))
    source = DummySource(listed, "float16")
    plan = plan_load(listed, source, "float16")
    assert plan.read_bytes == sum(weight.num_bytes for weight in plan.weights)
    name, entry = next(iter(source.entries.items()))
    assert read_rows(source, name, 0, 2).dtype == torch.float16
    assert entry.dtype == "float16"
    source.close()


def test_dummy_table_has_its_recorded_values():
    row = read_rows(DummySource([matrix("a.weight", 1, 4)], "float32"), "a.weight", 0, 1)
    again = read_rows(DummySource([matrix("a.weight", 1, 4)], "float32"), "a.weight", 0, 1)
    assert torch.equal(row, again)
    assert row.tolist()[0] == pytest.approx([-0.503112, 0.439023, -0.585149, -0.788577], abs=1e-5)
    assert hashlib.sha256(drawn_table().numpy().tobytes()).hexdigest().startswith("be28aa758cd0faa8")


@pytest.mark.each_value
@pytest.mark.parametrize("stored", ["float64", *DTYPES])
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (13, 11), (3, 2, 5), (3, TABLE_VALUES), (2, TABLE_VALUES + 1)])
def test_dummy_rows_match_their_definition(stored, shape):
    for name in ("a.weight", "b.bias"):
        source = DummySource([matrix(name, *shape)], stored)
        wanted = by_definition(source, name)
        assert torch.equal(bits(read_rows(source, name, 0, rows_of(shape))).view(-1), bits(wanted).view(-1))
        assert torch.equal(bits(written(source, name)).view(-1), bits(wanted).view(-1))


@settings(max_examples=max(20, settings().max_examples // 10))
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(1, 9),
    st.text("ab.", max_size=4),
    st.integers(0, 8),
    st.integers(1, 9),
)
def test_dummy_writer_matches_reading_bit_for_bit(shape, stored, chunk, prefix, first, width):
    names = {f"{prefix}x.weight": tuple(shape), f"{prefix}x.bias": (shape[0],), "y.weight": (shape[0], 3)}
    source = DummySource([matrix(name, *own) for name, own in names.items()], stored)
    write = writer_of(source)
    for name, own in (*names.items(), *names.items()):
        columns = None
        if len(own) > 1 and first < own[-1]:
            columns = (first, min(own[-1], first + width))
        whole = read_rows(source, name, 0, rows_of(own), columns)
        if columns:
            assert torch.equal(bits(whole), bits(read_rows(source, name, 0, rows_of(own))[:, columns[0] : columns[1]]))
        assert torch.equal(bits(written(source, name, chunk, write=write, columns=columns)), bits(whole))


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [1, 2, 700, 1049, 2500])
@pytest.mark.parametrize("columns", [None, (3, 700)])
def test_dummy_writer_wraps_the_table_in_any_chunks(chunk, columns):
    name, width, num_rows = "a.weight", 1000, 2 * TABLE_VALUES // 1000 + 3
    if chunk < 3:
        width, num_rows = 700_001, 5
    source = DummySource([matrix(name, num_rows, width)], "bfloat16")
    whole = read_rows(source, name, 0, num_rows, columns)
    assert torch.equal(bits(written(source, name, chunk, columns=columns)), bits(whole))


def test_dummy_rows_wider_than_the_table_have_columns():
    source = DummySource([matrix("a.weight", 3, 2 * TABLE_VALUES + 5)], "float16")
    columns = (7, TABLE_VALUES + 50)
    whole = by_definition(source, "a.weight")[:, columns[0] : columns[1]]
    assert torch.equal(bits(written(source, "a.weight", columns=columns)), bits(whole))


def test_dummy_transposed_matrix_is_scaled_by_its_inputs():
    parameter = Parameter("t.weight", (64, 16), (Part("t", 0, (16, 64), is_transposed=True),))
    source = DummySource([parameter], "float32")
    assert read_rows(source, "t", 0, 16).std() == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize("columns", [None, (1, 1000)])
def test_dummy_writer_of_a_large_tensor_takes_few_copies(columns, monkeypatch):
    source = DummySource([matrix("a.weight", 20_001, 1024)], "bfloat16")
    write = writer_of(source)
    width = 1024 if columns is None else 999
    out = torch.empty(20_000 * width * 2, dtype=torch.uint8)
    write("a.weight", 0, 1, out[: 2 * 1024], None)
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copies.append(self.numel()) or copy(self, other))
    write("a.weight", 1, 20_001, out, columns)
    assert len(copies) <= (3 if columns is None else 120)
    assert sum(copies) == out.numel() // 2


def plane_source(stored="bfloat16"):
    planes = [
        DummyPlane.codes("a.weight", (33, 700), FP8),
        DummyPlane.scales("a.weight_scale", (33, 1), FP8, 700),
        DummyPlane.scales("a.weight_scale_inv", (1, 6), FP8_BLOCK, 700),
        DummyPlane.codes("x_blocks", (2, 10, 20, 16), MXFP4),
        DummyPlane.scales("x_scales", (2, 10, 20), MXFP4, 640),
        DummyPlane.numbers("experts_of_tokens", (301, 6), "int64", 64),
    ]
    return DummySource([matrix("b.weight", 40, 64)], stored, planes)


def assert_writes_what_it_reads(source, device="cpu"):
    write = writer_of(source, device)
    for name, entry in (*source.entries.items(), *reversed(source.entries.items())):
        for columns in (None, (entry.shape[-1] // 2, entry.shape[-1])):
            whole = read_rows(source, name, 0, rows_of(entry.shape), columns)
            for chunk in (7, None):
                assert torch.equal(bits(written(source, name, chunk, device, write, columns)), bits(whole)), name


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_dummy_planes_are_written_as_they_are_read(stored):
    assert_writes_what_it_reads(plane_source(stored))


def test_dummy_planes_have_the_spread_of_plain_matrices():
    source = plane_source()
    plain = DummySource([matrix("b.weight", 40, 64)], "bfloat16")
    assert source.writer_specs == plain.writer_specs, "the same peak"
    codes = read_rows(source, "a.weight", 0, 33)
    assert codes.dtype == torch.float8_e4m3fn
    assert bits(codes).bitwise_and(0x7F).max() == 0x7E, "the largest number, and no NaN"
    for name in ("a.weight_scale", "a.weight_scale_inv"):
        scales = read_rows(source, name, 0, rows_of(source.entries[name].shape))
        assert (scales > 0).all()
        assert len(scales.unique()) == scales.numel()
        assert (codes.float() * scales.mean()).std() == pytest.approx(700**-0.5, rel=0.1)
    blocks = read_rows(source, "x_blocks", 0, 400)
    assert len(blocks.unique()) == 256
    exponents = read_rows(source, "x_scales", 0, 20)
    assert len(exponents.unique()) == 2
    assert e8m0_values(exponents).square().mean().sqrt() * dummy.E2M1_SPREAD == pytest.approx(640**-0.5, rel=0.15)
    with pytest.raises(AssertionError, match="no dummy codes of int8"):
        DummyPlane.codes("a.weight", (2, 2), INT8)


@for_each("limit, top_k", [(256, 6), (64, 6), (8, 2), (5, 5), (7, 1)])
def test_dummy_numbers_of_a_row_are_distinct_and_all_occur(limit, top_k):
    source = DummySource([], "bfloat16", [DummyPlane.numbers("t", (4001, top_k), "int64", limit)])
    numbers = read_rows(source, "t", 0, 4001)
    assert all(len(set(row)) == top_k for row in numbers.tolist())
    counts = numbers.flatten().bincount(minlength=limit)
    assert len(counts) == limit
    assert counts.min() > 0.3 * counts.float().mean()
    for columns in ((0, 1), (top_k - 1, top_k)):
        assert torch.equal(read_rows(source, "t", 17, 44, columns), numbers[17:44, columns[0] : columns[1]])


def test_dummy_embedding_with_experts_outweighs_layers():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    config = {key: value for key, value in CONFIG.items() if key != "attention_bias"}
    moe = {**config, **experts, "architectures": ["GptOssForCausalLM"], "sliding_window": 8, "num_attention_heads": 3}
    moe |= {"num_key_value_heads": 1, "layer_types": ["full_attention"], "rope_theta": 10000.0}
    source = DummySource(parameters(read_spec(moe)), "float32")
    assert read_rows(source, "model.embed_tokens.weight", 0, 301).std() == pytest.approx(
        dummy.EMBEDDING_SPREAD, rel=0.1
    )
    assert not read_rows(source, "model.layers.0.mlp.router.bias", 0, 4).any()
    assert read_rows(source, "model.layers.0.mlp.router.weight", 0, 4).std() == pytest.approx(48**-0.5, rel=0.2)
    plain = DummySource(parameters(read_spec(CONFIG)), "float32")
    assert read_rows(plain, "model.embed_tokens.weight", 0, 301).std() == pytest.approx(48**-0.5, rel=0.1)


@pytest.mark.gpu
def test_dummy_planes_written_on_a_gpu_match_reading():
    assert_writes_what_it_reads(plane_source(), "cuda")


def test_dummy_source_is_a_writing_source():
    assert isinstance(DummySource([], "float32"), WritingSource)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["float64", *DTYPES])
@pytest.mark.parametrize("shape", [(1,), (7,), (13, 11), (3, TABLE_VALUES), (2, 2 * TABLE_VALUES + 1), (4999, 1021)])
def test_dummy_writer_on_a_gpu_matches_reading(stored, shape):
    for name in ("a.weight", "b.bias"):
        source = DummySource([matrix(name, *shape)], stored)
        wanted = read_rows(source, name, 0, rows_of(shape))
        for chunk in (None, max(1, shape[0] // 3)):
            assert torch.equal(bits(written(source, name, chunk, "cuda")), bits(wanted))
