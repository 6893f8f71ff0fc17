import pytest
import torch

from holdfast.loading.dummy import TABLE_VALUES, DummySource
from holdfast.loading.execute import load_weights
from holdfast.loading.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.families import parameters, read_spec
from holdfast.models.parameters import Parameter, Part

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


def matrix(name, *shape):
    return Parameter(name, shape, (Part(name, 0, shape),))


@pytest.mark.parametrize("chunk", [1, 2, 7, 13])
def test_values_do_not_depend_on_chunks(chunk):
    whole = DummySource([matrix("a.weight", 13, 11)], "float32").read_rows("a.weight", 0, 13)
    source = DummySource([matrix("b.weight", 3, 2), matrix("a.weight", 13, 11)], "float32")
    for start in reversed(range(0, 13, chunk)):
        end = min(start + chunk, 13)
        assert torch.equal(source.read_rows("a.weight", start, end), whole[start:end])


def test_values_are_those_of_place_and_name_across_the_end_of_the_table():
    name, width = "model.embed_tokens.weight", 1000
    num_rows = 2 * TABLE_VALUES // width + 3
    source = DummySource([matrix(name, num_rows, width)], "float32")
    whole = source.read_rows(name, 0, num_rows)
    assert torch.equal(whole.flatten()[:TABLE_VALUES], whole.flatten()[TABLE_VALUES : 2 * TABLE_VALUES])
    for row in (0, 1, num_rows // 2, num_rows - 1):
        assert torch.equal(source.read_rows(name, row, row + 1)[0], whole[row])


def test_tensors_and_rows_differ():
    source = DummySource([matrix("a.weight", 500, 64), matrix("b.weight", 500, 64)], "float32")
    rows_a = source.read_rows("a.weight", 0, 500)
    assert not torch.equal(rows_a, source.read_rows("b.weight", 0, 500))
    assert len({tuple(row.tolist()) for row in rows_a}) == 500


def test_scales_are_those_of_a_model_that_computes():
    listed = parameters(read_spec(CONFIG))
    source = DummySource(listed, "bfloat16")
    weights = load_weights(plan_load(listed, source, "float32"), source, "cpu", Ledger(), lambda done, total: None)
    assert set(weights) == {parameter.name for parameter in listed}
    for name, tensor in weights.items():
        assert torch.isfinite(tensor).all()
        center = 1.0 if name.endswith("norm.weight") else 0.0
        spread = 0.1 if tensor.ndim == 1 else tensor.shape[1] ** -0.5
        assert abs(tensor.mean() - center) < spread, name
        assert 0.5 * spread < tensor.std() < 1.5 * spread, name


def test_the_source_has_what_the_model_needs_in_its_type():
    listed = parameters(read_spec(CONFIG))
    source = DummySource(listed, "float16")
    plan = plan_load(listed, source, "float16")
    assert plan.read_bytes == plan.final_bytes
    name, entry = next(iter(source.entries.items()))
    assert source.read_rows(name, 0, 2).dtype == torch.float16
    assert entry.dtype == "float16"
    source.close()


def test_the_table_is_the_same_everywhere():
    row = DummySource([matrix("a.weight", 1, 4)], "float32").read_rows("a.weight", 0, 1)
    again = DummySource([matrix("a.weight", 1, 4)], "float32").read_rows("a.weight", 0, 1)
    assert torch.equal(row, again)
    assert row.tolist()[0] == pytest.approx([-0.503112, 0.439023, -0.585149, -0.788577], abs=1e-5)
