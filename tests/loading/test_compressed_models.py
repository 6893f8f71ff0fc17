"""Folders of DeepSeek-V4: what is loaded is what was stored, in every spelling and in the types that it is shipped in; faults found from headers."""

import logging

import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelError, ModelFormatError, UnsupportedModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory, open_directory_without_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.blueprints.read import declare_config
from holdfast.models.declared_weights import weight_bytes
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.sharding import shard_parameters
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, WeightRecipe
from loading.compressed_models import BASE, CONFIG, FLASH, numbers, stored_as, tensors_of, with_drafts
from loading.latent_models import write_folder

SHIPPED = {"plain": CONFIG, "MXFP4 experts": FLASH, "fp8 experts": BASE}


def load(opened, recipe=None, dtype="bfloat16", shares=None):
    plan = plan_load(shares or opened.parameters, opened.source, dtype, recipe or WeightRecipe(), opened.stored)
    return plan, load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None).weights


def shipped(folder, config):
    tensors = with_drafts(tensors_of(config))
    stored = stored_as(config, tensors) if "quantization_config" in config else tensors
    return write_folder(folder, config, stored), stored


def wanted(spec, stored):
    """Every parameter in plain torch, as float32 unless it holds whole numbers; rounded where it is kept plain."""
    found = {}
    for parameter in parameters(spec):
        parts = [numbers(stored, part.tensor.replace("lm_head", "head")) for part in parameter.parts]
        found[parameter.name] = torch.cat(parts).view(parameter.shape)
    return found


@pytest.mark.parametrize("case", SHIPPED)
def test_load_deepseek_v4_shipped_weights_are_kept_as_stored(case, tmp_path, caplog):
    config = SHIPPED[case]
    folder, stored = shipped(tmp_path / "m", config)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        opened = open_directory(folder)
    num_drafts = sum(name.startswith("mtp.") for name in stored)
    assert f"skipping {num_drafts} tensors of {folder} for drafts of tokens" in caplog.text
    plan, weights = load(opened)
    references = wanted(opened.spec, stored)
    assert weights.keys() == references.keys()
    coded = set()
    for name, reference in references.items():
        held = weights[name]
        if isinstance(held, QuantizedWeight):
            coded.add((name.partition(".")[2].partition(".")[2], held.scheme.name))
            held = dequantize(held).view(held.shape)
        else:
            reference = reference.to(held.dtype)
        assert torch.equal(held, reference), name
    linear = {"qkv_a", "q_b", "o_b", "index_q", "shared.gate_up", "shared.down"} if config is not CONFIG else set()
    experts = {"plain": set(), "MXFP4 experts": {"mxfp4"}, "fp8 experts": {"fp8_block"}}[case]
    assert coded == {
        *((f"{module}.weight", "fp8_block") for module in linear),
        *((f"experts.{half}.weight", scheme) for half in ("gate_up", "down") for scheme in experts),
    }
    table, sinks = weights["layers.0.router.table"], weights["layers.1.sinks"]
    assert (table.dtype, sinks.dtype) == (torch.int64, torch.float32)
    planned = sum(weight_bytes(one, "bfloat16", WeightRecipe()) for one in open_declared(str(folder)).parameters())
    assert planned == plan.final_bytes
    (folder / "model.safetensors").unlink()
    declared = open_declared(str(folder)).parameters()
    if config is not CONFIG:  # 200 rows beside 64 end in a block, which settings alone know too
        assert planned == sum(weight_bytes(one, "bfloat16", WeightRecipe()) for one in declared)


@pytest.mark.parametrize("case", SHIPPED)
def test_load_deepseek_v4_ranks_hold_their_declared_shares(case, tmp_path):
    config = SHIPPED[case] | {"moe_intermediate_size": 256, "o_lora_rank": 128, "q_lora_rank": 256}
    folder, _ = shipped(tmp_path / "m", config)
    opened, declared = open_directory(folder), open_declared(str(folder))
    _, whole = load(opened)
    for rank in range(2):
        shares = shard_parameters(opened.parameters, Mesh(rank, 2), 4, 1, num_groups=2)
        plan, held = load(opened, shares=shares)
        planned = {weight.name: weight for weight in declared.parameters(Mesh(rank, 2))}
        assert {weight.name: weight.shape for weight in plan.weights} == {n: one.shape for n, one in planned.items()}
        assert sum(weight_bytes(one, "bfloat16", WeightRecipe()) for one in planned.values()) == plan.final_bytes
        for name in ("layers.1.o_a.weight", "layers.1.sinks"):
            assert torch.equal(held[name], whole[name].chunk(2)[rank]), name
        for name in ("layers.0.router.table", "layers.1.pool.weight", "layers.2.attn_streams.weight"):
            assert torch.equal(held[name], whole[name]), name


def test_load_deepseek_v4_each_naming_gives_the_same_weights(tmp_path):
    """DeepSeek's, those of transformers' modules, and the mixture that its save_pretrained writes."""
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "torch_dtype")}
    torch.manual_seed(3)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**options))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(torch.randint(3, tensor.shape) if name.endswith("tid2eid") else torch.randn(tensor.shape))
    model.save_pretrained(tmp_path / "saved")
    opened = open_directory(tmp_path / "saved")
    assert opened.spec == read_spec({**CONFIG, "torch_dtype": "float32"})
    _, saved = load(opened, dtype="float32")
    own = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    config = CONFIG | {"torch_dtype": "float32"}
    _, modules = load(open_directory(write_folder(tmp_path / "modules", config, own)), dtype="float32")
    assert saved.keys() == modules.keys() == {parameter.name for parameter in parameters(opened.spec)}
    for name, tensor in saved.items():
        assert torch.equal(tensor, modules[name]), name
    layer = "model.layers.1.self_attn."
    pool = [f"{layer}compressor.{part}_proj.weight" for part in ("kv", "gate")]
    pool += [f"{layer}compressor.indexer.{part}.weight" for part in ("kv_proj", "gate_proj", "scorer.weights_proj")]
    assert torch.equal(saved["layers.1.pool.weight"], torch.cat([own[name] for name in pool]))
    assert torch.equal(saved["layers.1.kv_norm.weight"], own[f"{layer}kv_norm.weight"])
    assert torch.equal(saved["layers.1.index.norm.weight"], own[f"{layer}compressor.indexer.kv_norm.weight"])
    assert torch.equal(saved["layers.2.router.score_bias"], own["model.layers.2.mlp.gate.e_score_correction_bias"])
    assert torch.equal(saved["head_streams.weight"], own["model.hc_head.hc_fn"])


@pytest.mark.parametrize("case", SHIPPED)
def test_dummy_weights_have_the_types_of_real_ones(case, tmp_path):
    folder, _ = shipped(tmp_path / "m", SHIPPED[case])
    real, _ = load(open_directory(folder))
    plan, weights = load(open_directory_without_weights(folder))
    assert [weight.specs for weight in plan.weights] == [weight.specs for weight in real.weights]
    table = weights["layers.0.router.table"]
    assert sorted(set(table.flatten().tolist())) == [0, 1, 2], "every expert is used"
    source = open_directory_without_weights(folder).source
    read = torch.empty(table.numel() * 8, dtype=torch.uint8)
    source.read_into("layers.0.ffn.gate.tid2eid", 0, 40, read.numpy().data)
    assert torch.equal(read.view(torch.int64).view(40, 2), table)


def test_load_deepseek_v4_plain_checkpoint_is_quantized(tmp_path):
    folder, _ = shipped(tmp_path / "m", CONFIG)
    _, weights = load(open_directory(folder), WeightRecipe(FP8))
    coded = {name.partition(".")[2].partition(".")[2] for name in weights if isinstance(weights[name], QuantizedWeight)}
    modules = ("qkv_a", "q_b", "o_b", "index_q", "experts.gate_up", "experts.down", "shared.gate_up", "shared.down")
    assert coded == {*(f"{module}.weight" for module in modules), ""}, "and the head"


def changed(tensors, name, values):
    return {**tensors, name: values}


FAULTS = {
    "too few sinks": (
        "layers.1.attn.attn_sink",
        torch.ones(3),
        "weights.wrong_shape",
    ),
    "a table of fewer tokens": (
        "layers.0.ffn.gate.tid2eid",
        torch.zeros(39, 2, dtype=torch.int64),
        "weights.wrong_shape",
    ),
    "a table of more experts": (
        "layers.0.ffn.gate.tid2eid",
        torch.zeros(40, 3, dtype=torch.int64),
        "weights.wrong_shape",
    ),
    "a table of numbers": (
        "layers.0.ffn.gate.tid2eid",
        torch.zeros(40, 2),
        "weights.unsupported_dtype",
    ),
    "streams of another model": (
        "layers.2.hc_attn_fn",
        torch.ones(24, 512),
        "weights.wrong_shape",
    ),
    "shares of two streams": ("layers.2.hc_ffn_base", torch.ones(8), "weights.wrong_shape"),
    "two scales of streams": ("layers.2.hc_ffn_scale", torch.ones(2), "weights.wrong_shape"),
    "a head of two streams": ("hc_head_fn", torch.ones(2, 512), "weights.wrong_shape"),
    "positions of another ratio": (
        "layers.1.attn.compressor.ape",
        torch.ones(8, 128),
        "weights.wrong_shape",
    ),
}


@for_each("fault", FAULTS)
def test_plan_load_deepseek_v4_wrong_shape_is_refused(fault, tmp_path):
    name, values, code = FAULTS[fault]
    folder = write_folder(tmp_path / "m", CONFIG, changed(tensors_of(CONFIG), name, values))
    opened = open_directory(folder)
    with raises_code(code, ModelError) as caught:
        plan_load(opened.parameters, opened.source, "bfloat16", stored=opened.stored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("row", "expert"), [(0, 3), (39, -1), (17, 2**40)])
def test_load_weights_hash_table_unknown_expert_is_refused(row, expert, tmp_path):
    tensors = tensors_of(CONFIG)
    table = tensors["layers.0.ffn.gate.tid2eid"].clone()
    table[row, 1] = expert
    folder = write_folder(tmp_path / "m", CONFIG, changed(tensors, "layers.0.ffn.gate.tid2eid", table))
    ledger = Ledger()
    opened = open_directory(folder)
    plan = plan_load(opened.parameters, opened.source, "bfloat16")
    with raises_code("weights.wrong_expert", ModelFormatError, expert=expert, row=row, count=3):
        load_weights(plan, opened.source, "cpu", ledger, lambda done, total: None)
    assert not list(ledger)


def test_plan_load_deepseek_v4_codes_without_scales_are_refused(tmp_path):
    stored = stored_as(FLASH, tensors_of(FLASH))
    for name in ("layers.1.ffn.experts.2.w1.scale", "layers.1.attn.wo_a.scale"):
        left = {other: tensor for other, tensor in stored.items() if other != name}
        folder = write_folder(tmp_path / name, FLASH, left)
        with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
            load(open_directory(folder))


def test_load_deepseek_v4_experts_of_undeclared_type_are_refused(tmp_path):
    stored = stored_as(FLASH, tensors_of(FLASH))
    folder = write_folder(tmp_path / "m", BASE, stored)
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        load(open_directory(folder))
    folder = write_folder(
        tmp_path / "n", CONFIG | {"quantization_config": FLASH["quantization_config"] | {"expert_dtype": "fp4"}}, stored
    )
    load(open_directory(folder))
    for name, said in (("o", "int3"), ("p", ["fp4"])):
        config = FLASH | {"expert_dtype": said}
        folder = write_folder(tmp_path / name, config, stored)
        with raises_code("weights.unsupported_setting", UnsupportedModelError):
            open_directory(folder)
        with pytest.raises(ModelFormatError):
            declare_config(config, "m")
