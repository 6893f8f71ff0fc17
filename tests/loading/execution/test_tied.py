"""Packed heads of tied models: compared with the embedding before memory is taken, in every way they are held."""

from pathlib import Path

import numpy as np
import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError
from holdfast.loading.execution import execute
from holdfast.loading.execution.execute import LoadedWeights, load_weights
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.gguf.source import GGUFSource
from holdfast.loading.planning.moves import EMBEDDING
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.packed_weight import PackedWeight
from holdfast.quant.weight_schemes import INT8, PackedPolicy, WeightRecipe
from loading.block_files import Stored, random_blocks, write_tensors

pytest.importorskip("gguf")
SHAPE = (48, 256)
RECIPES = {
    "tiles": WeightRecipe(packed=PackedPolicy("all", "cpu")),
    "planes": WeightRecipe(packed=PackedPolicy("all", "cuda")),
    "expanded": WeightRecipe(),
}


def load_tied(path: Path, embedding: Stored, head: Stored, recipe: WeightRecipe) -> LoadedWeights:
    write_tensors(path, {"token_embd.weight": embedding, "output.weight": head})
    source = GGUFSource(read_gguf(path), None)
    tied = Parameter(EMBEDDING, SHAPE, (Part("model.embed_tokens.weight", 0, SHAPE),), "head")
    try:
        return load_weights(plan_load((tied,), source, "float32", recipe), source, "cpu", Ledger(), lambda *_: None)
    finally:
        source.close()


@for_each("how", RECIPES)
def test_load_packed_head_that_differs_is_refused_before_memory(how, tmp_path, monkeypatch):
    def no_memory(*arguments):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(execute, "Arena", no_memory)
    for kind, row in (("Q8_0", 0), ("Q4_K", 31), ("Q6_K", 47)):
        stored = random_blocks(kind, SHAPE, seed=1)
        other = Stored(kind, stored.raw.copy())
        other.raw[row, -5] ^= 1
        with raises_code("weights.not_tied", ModelFormatError, tensor="lm_head.weight", row=row):
            load_tied(tmp_path / f"{how}{kind}.gguf", stored, other, RECIPES[how])


@for_each("how", RECIPES)
def test_load_packed_head_that_equals_the_embedding_loads_once(how, tmp_path):
    stored = random_blocks("Q4_0", SHAPE, seed=2)
    loaded = load_tied(tmp_path / f"{how}.gguf", stored, stored, RECIPES[how])
    assert list(loaded.weights) == [EMBEDDING]
    assert isinstance(loaded.weights[EMBEDDING], PackedWeight) == (how != "expanded")
    assert loaded.is_finite


def test_load_head_stored_in_another_way_is_compared_by_values(tmp_path):
    stored = random_blocks("Q8_0", SHAPE, seed=3)
    plain = Stored("F32", stored.values.astype(np.float32))
    for one, other in ((stored, plain), (plain, stored)):
        loaded = load_tied(tmp_path / "equal.gguf", one, other, RECIPES["tiles"])
        assert np.array_equal(loaded.weights[EMBEDDING].numpy(), plain.raw)
    changed = plain.raw.copy()
    changed[17, 200] += 1e-3
    with raises_code("weights.not_tied", ModelFormatError, row=17):
        load_tied(tmp_path / "other.gguf", stored, Stored("F32", changed), RECIPES["tiles"])


def test_load_packed_head_quantized_again_is_compared_by_codes(tmp_path):
    stored = random_blocks("Q8_0", SHAPE, seed=4)
    other = Stored("Q8_0", stored.raw.copy())
    other.raw[9] = other.raw[10]
    recipe = WeightRecipe(INT8, "all")
    assert set(load_tied(tmp_path / "equal.gguf", stored, stored, recipe).weights) == {EMBEDDING}
    with raises_code("weights.not_tied", ModelFormatError, row=9):
        load_tied(tmp_path / "other.gguf", stored, other, recipe)
