"""kv_b of a checkpoint in fp8, loaded as plain numbers: bit by bit code * scale, whatever the blocks, the ranks and the chunks."""

from dataclasses import replace

import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.planning import dequantized_source
from holdfast.loading.planning.dequantized_source import DequantizedSource, dequantize_plain_kinds
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.planning.stored_schemes import StoredSchemes
from holdfast.loading.sources.source import RowRead
from holdfast.memory.ledger import Ledger
from holdfast.models.declared_weights import review_stored, weight_bytes, weight_of
from holdfast.models.parameters import NAMES, list_parameters
from holdfast.models.sharding import shard_parameters
from holdfast.models.spec import LatentSpec, ModelSpec
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, WEIGHT_SCHEMES, WeightRecipe
from loading.smaller_chunks import chunks_of
from loading.tensor_source import TensorSource

HEADS, LATENT = 6, LatentSpec(q_rank=40, kv_rank=160, nope_dim=48, rope_dim=16, value_dim=64)
ROWS, RANK = HEADS * LATENT.expanded_dim, LATENT.kv_rank
"""112 rows a head: five blocks of 128 and a half, all but the first head across a seam of two; and two blocks of columns."""
SPEC = ModelSpec(
    architecture="DeepseekV3ForCausalLM",
    family="deepseek_v3",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=1,
    head_dim=LATENT.row_dim,
    max_position=128,
    checkpoint_dtype="bfloat16",
    norm_eps=1e-6,
    latent=LATENT,
)
NAME, TENSOR = "layers.0.kv_b.weight", "model.layers.0.self_attn.kv_b_proj.weight"
(KV_B,) = (one for one in list_parameters(SPEC, NAMES["deepseek"]) if one.name == NAME)
IN_BLOCKS, BY_ROW, BY_TENSOR = (
    StoredSchemes(FP8_BLOCK, ("_scale_inv", "_scale")),
    StoredSchemes(FP8, ("_scale",)),
    StoredSchemes(FP8_TENSOR, ("_scale",)),
)
BLOCKS = (-(-ROWS // 128), -(-RANK // 128))
WAYS = {
    "blocks": (IN_BLOCKS, "_scale_inv", BLOCKS, torch.float32),
    "blocks-by-another-name": (IN_BLOCKS, "_scale", BLOCKS, torch.float32),
    "blocks-bf16": (IN_BLOCKS, "_scale_inv", BLOCKS, torch.bfloat16),
    "blocks-e8m0": (IN_BLOCKS, "_scale_inv", BLOCKS, torch.uint8),
    "rows": (BY_ROW, "_scale", (ROWS, 1), torch.float32),
    "rows-flat": (BY_ROW, "_scale", (ROWS,), torch.float16),
    "number": (BY_TENSOR, "_scale", (), torch.float32),
    "one": (BY_TENSOR, "_scale", (1,), torch.float32),
}


def codes_of(rows=ROWS, columns=RANK):
    """Every code but the two that are NaN."""
    codes = torch.randint(0, 254, (rows, columns), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    codes += (codes >= 0x7F).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn)


def scales_of(shape, dtype):
    random = torch.Generator().manual_seed(2)
    if dtype == torch.uint8:
        return torch.randint(110, 130, shape, generator=random).to(torch.uint8)
    return (torch.rand(shape, generator=random) * 0.01 + 1e-4).to(dtype)


def checkpoint(way):
    stored, ending, shape, dtype = WAYS[way]
    return stored, {TENSOR: codes_of(), TENSOR + ending: scales_of(shape, dtype)}


def wanted(tensors):
    """Plain torch: float32 of a code times the scale that its row and column have."""
    codes, scales = tensors.values()
    scales = torch.pow(2.0, scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    if scales.shape == BLOCKS:
        scales = scales.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)[:, :RANK]
    elif scales.numel() == ROWS:
        scales = scales.view(ROWS, 1)
    return codes.float() * scales


def load(parameters, source, dtype, stored, recipe=None, device="cpu"):
    plan = plan_load(parameters, source, dtype, recipe or WeightRecipe(), stored)
    return plan, load_weights(plan, source, device, Ledger(), lambda done, total: None).weights


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("way", WAYS)
def test_dequantized_source_is_code_times_scale_rounded_once(way, dtype):
    stored, tensors = checkpoint(way)
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    plan, weights = load([KV_B], source, dtype, stored)
    assert torch.equal(weights[NAME], wanted(tensors).to(getattr(torch, dtype)))
    assert plan.final_bytes == -(-ROWS * RANK * getattr(torch, dtype).itemsize // 256) * 256
    assert plan.read_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert plan.num_quantized == 0


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_bytes", [None, 4 * RANK, 4 * RANK * 13 + 5], ids=["whole", "a row", "thirteen rows"])
@pytest.mark.parametrize("way", ["blocks", "rows", "number"])
def test_dequantized_source_is_independent_of_chunk_size(way, chunk_bytes, monkeypatch):
    monkeypatch.setattr(dequantized_source, "STEP_ELEMENTS", 7 * RANK + 3)
    stored, tensors = checkpoint(way)
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    with chunks_of(chunk_bytes):
        _, weights = load([KV_B], source, "float32", stored)
    assert torch.equal(weights[NAME], wanted(tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("way", ["blocks", "blocks-e8m0", "rows", "number"])
@pytest.mark.usefixtures("poison")
def test_dequantized_source_on_a_gpu_is_bit_exact(way, dtype):
    stored, tensors = checkpoint(way)
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    with chunks_of(5000):
        _, weights = load([KV_B], source, dtype, stored, device="cuda")
    assert torch.equal(weights[NAME].cpu(), wanted(tensors).to(getattr(torch, dtype)))


@pytest.mark.parametrize("size", [2, 3, 6])
def test_dequantized_source_ranks_have_the_rows_of_their_heads(size):
    stored, tensors = checkpoint("blocks")
    for rank in range(size):
        shares = shard_parameters([KV_B], Mesh(tensor_rank=rank, tensor_size=size), HEADS, 1)
        source = dequantize_plain_kinds(TensorSource(tensors=tensors), shares, stored)
        _, weights = load(shares, source, "float32", stored)
        rows = ROWS // size
        assert torch.equal(weights[NAME], wanted(tensors)[rank * rows : (rank + 1) * rows])


def test_dequantized_source_reads_column_ranges():
    stored, tensors = checkpoint("blocks")
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    out = torch.empty(5, 40)
    source.read_into(TENSOR, 126, 131, memoryview(out.view(-1).view(torch.uint8).numpy()), (100, 140))
    assert torch.equal(out, wanted(tensors)[126:131, 100:140])


@for_each("recipe", WEIGHT_SCHEMES)
def test_dequantized_source_is_never_quantized_again(recipe):
    stored, tensors = checkpoint("blocks")
    wanted_recipe = WeightRecipe(WEIGHT_SCHEMES[recipe])
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    plan, weights = load([KV_B], source, "float32", stored, wanted_recipe)
    assert torch.equal(weights[NAME], wanted(tensors))
    assert plan.final_bytes == weight_bytes(weight_of(KV_B), "float32", wanted_recipe)
    plain = TensorSource(tensors={TENSOR: wanted(tensors)})
    assert torch.equal(load([KV_B], plain, "float32", None, wanted_recipe)[1][NAME], wanted(tensors))


def test_review_stored_skips_dequantized_weights():
    linear = weight_of(replace(KV_B, name="layers.0.o.weight", kind="linear"), "fp8_block")
    recipe = review_stored([linear, weight_of(KV_B)], WeightRecipe(FP8), {NAME})
    assert recipe.scheme == FP8_BLOCK
    assert weight_of(KV_B).scheme(recipe) is None


def test_dequantized_source_passes_other_tensors_through():
    class Together(TensorSource):
        together = 0

        def read_together(self, reads):
            self.together += len(reads)
            for read in reads:
                self.read_into(*read)

    stored, tensors = checkpoint("blocks")
    other = torch.arange(12.0).view(3, 4)
    below = Together(tensors={**tensors, "other": other})
    source = dequantize_plain_kinds(below, [KV_B], stored)
    assert isinstance(source, DequantizedSource)
    outs = torch.empty(3, 4), torch.empty(2, RANK)
    views = [memoryview(out.view(-1).view(torch.uint8).numpy()) for out in outs]
    source.read_together([RowRead(TENSOR, 127, 129, views[1], None), RowRead("other", 0, 3, views[0], None)])
    assert torch.equal(outs[0], other)
    assert torch.equal(outs[1], wanted(tensors)[127:129])
    assert below.together == 1
    assert set(source.entries) == {*tensors, "other"}, "the files of all tensors include those of scales"
    assert source.ignorable == {f"{TENSOR}_scale_inv"}


def test_dequantize_plain_kinds_returns_a_plain_source_as_is():
    plain = TensorSource(tensors={TENSOR: wanted(checkpoint("blocks")[1])})
    assert dequantize_plain_kinds(plain, [KV_B], IN_BLOCKS) is plain
    assert dequantize_plain_kinds(plain, [KV_B], None) is plain


def test_dequantized_source_nan_code_is_refused():
    stored, tensors = checkpoint("blocks")
    tensors[TENSOR].view(torch.uint8)[200, 3] = 0x7F
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    with raises_code("weights.not_finite", ModelFormatError):
        load([KV_B], source, "float32", stored)


def test_dequantized_source_scratch_is_in_the_plan():
    stored, tensors = checkpoint("blocks")
    source = dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], stored)
    assert ROWS * RANK <= source.scratch_bytes_per_reader <= 2 * ROWS * RANK
    assert plan_load([KV_B], source, "float32", WeightRecipe(), stored).reader_bytes == source.scratch_bytes_per_reader


def test_dequantize_plain_kinds_wrong_scales_are_named():
    stored, tensors = checkpoint("blocks")
    name = f"{TENSOR}_scale_inv"
    for scales, error, code in (
        (None, ModelFormatError, "weights.missing_scales"),
        (torch.ones(5, 2), ModelFormatError, "weights.wrong_shape"),
        (torch.ones(BLOCKS, dtype=torch.int32), UnsupportedModelError, "weights.unsupported_dtype"),
    ):
        broken = {TENSOR: tensors[TENSOR]} | ({} if scales is None else {name: scales})
        with raises_code(code, error):
            dequantize_plain_kinds(TensorSource(tensors=broken), [KV_B], stored)
    left_plain = replace(stored, ignore=("kv_b_proj",))
    with raises_code("model.mismatch", ModelFormatError):
        dequantize_plain_kinds(TensorSource(tensors=tensors), [KV_B], left_plain)
