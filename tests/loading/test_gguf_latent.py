"""GGUF files of deepseek2: the spec and the tensors of the checkpoint that they were made from, with kv_b whole and in halves."""

import logging

import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast import LLM, SamplingParams
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory, open_gguf
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.grouped_readers import read_spec
from holdfast.models.sharding import shard_parameters
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightRecipe
from loading.latent_models import (
    SOFTMAX,
    config_of,
    gguf_metadata,
    gguf_tensors,
    tensors_of,
    write_folder,
    write_gguf,
)
from loading.smaller_chunks import chunks_of

gguf = pytest.importorskip("gguf")

KV_B = "layers.1.kv_b.weight"


def weights_of(opened, recipe=None, parameters=None):
    plan = plan_load(parameters or opened.parameters, opened.source, "float32", recipe or WeightRecipe(), opened.stored)
    return load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None).weights


def write(path, config, is_split=False, is_old=False, quantize=lambda name, values: None, **metadata):
    """A file and the tensors in it; metadata that is None is left out."""
    tensors = tensors_of(config)
    stored = gguf_tensors(config, tensors, is_split)
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    found = gguf_metadata(config, is_old) | {f"deepseek2.{key}": value for key, value in keys.items()}
    write_gguf(path, {key: value for key, value in found.items() if value is not None}, stored, quantize)
    return tensors, stored


@for_each(
    "changes, is_split, is_old",
    [({}, True, False), ({}, False, True), (SOFTMAX, False, True), ({"n_group": 1, "topk_group": 1}, True, False)],
)
def test_open_gguf_deepseek2_matches_its_source_folder(changes, is_split, is_old, tmp_path):
    config = config_of(**changes)
    tensors, _ = write(tmp_path / "m.gguf", config, is_split, is_old)
    theirs = open_directory(write_folder(tmp_path / "m", config, tensors))
    ours = open_gguf(tmp_path / "m.gguf")
    assert ours.spec == theirs.spec
    wanted, found = weights_of(theirs), weights_of(ours)
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
    assert {one.name for one in open_declared(str(tmp_path / "m.gguf")).parameters()} == set(wanted)


def test_llm_gguf_deepseek2_answers_as_its_source_folder(tmp_path):
    """By token ids: what cuts text in such files is not read."""
    config = config_of(q_lora_rank=128)
    tensors, _ = write(tmp_path / "m.gguf", config, is_split=True)
    write_folder(tmp_path / "m", config, tensors)
    answers = []
    for name in ("m", "m.gguf"):
        llm = LLM(str(tmp_path / name), tokenizer="none", device="cpu", max_model_len=64, max_num_seqs=1)
        (output,) = llm.generate(prompt_token_ids=[3, 5, 7, 11], params=SamplingParams(temperature=0, max_tokens=8))
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def as_q8_0(name, values):
    is_matrix = values.dim() > 1 and not name.endswith("ffn_gate_inp.weight") and values.shape[-1] % 32 == 0
    if not is_matrix:
        return None
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quants.quantize(values.numpy(), kind), kind


def as_q4_k(name, values):
    """Random blocks with small scales: what makes such codes of numbers is no part of the package."""
    if values.dim() < 2 or values.shape[-1] % 256 or name.endswith("ffn_gate_inp.weight"):
        return as_q8_0(name, values)
    generator = torch.Generator().manual_seed(len(name) + int(name.split(".")[1]) if name.startswith("blk.") else 0)
    blocks = torch.randint(0, 256, (*values.shape[:-1], values.shape[-1] // 256, 144), generator=generator)
    scales = torch.tensor([0.0003, 0.0002], dtype=torch.float16).view(torch.uint8)
    blocks[..., :4] = scales.to(blocks.dtype)
    data = blocks.to(torch.uint8).flatten(-2).numpy()
    return data, gguf.GGMLQuantizationType.Q4_K


@pytest.mark.each_value
@pytest.mark.parametrize("quantize", [as_q8_0, as_q4_k], ids=["q8_0", "q4_k"])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("chunk_bytes", [None, 20000], ids=["whole chunks", "small chunks"])
def test_load_gguf_deepseek2_matches_the_gguf_package(quantize, is_split, chunk_bytes, tmp_path):
    config = config_of()
    _, stored = write(tmp_path / "m.gguf", config, is_split, quantize=quantize)

    def numbers(name):
        values = stored[name]
        coded = quantize(name, values)
        return values if coded is None else torch.from_numpy(gguf.quants.dequantize(*coded)).view(values.shape)

    with chunks_of(chunk_bytes):
        weights = weights_of(open_gguf(tmp_path / "m.gguf"))
    if is_split:
        keys, values = numbers("blk.1.attn_k_b.weight").transpose(1, 2), numbers("blk.1.attn_v_b.weight")
        kv_b = torch.cat([keys, values], 1).reshape(-1, config["kv_lora_rank"])
    else:
        kv_b = numbers("blk.1.attn_kv_b.weight")
    assert torch.equal(weights[KV_B], kv_b)
    qkv_a = torch.cat([numbers("blk.1.attn_q_a.weight"), numbers("blk.1.attn_kv_a_mqa.weight")])
    assert torch.equal(weights["layers.1.qkv_a.weight"], qkv_a)
    assert torch.equal(weights["layers.1.q_b.weight"], numbers("blk.1.attn_q_b.weight"))
    halves = [numbers(f"blk.1.ffn_{half}_exps.weight") for half in ("gate", "up")]
    assert torch.equal(weights["layers.1.experts.gate_up.weight"], torch.cat(halves, 1))
    assert torch.equal(weights["layers.1.shared.down.weight"], numbers("blk.1.ffn_down_shexp.weight"))
    assert torch.equal(weights["layers.1.router.score_bias"], stored["blk.1.exp_probs_b.bias"])


def test_load_gguf_kv_b_ranks_take_their_heads_of_both_halves(tmp_path):
    config = config_of(num_attention_heads=4)
    tensors, _ = write(tmp_path / "m.gguf", config, is_split=True)
    whole = tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    for rank in range(2):
        opened = open_gguf(tmp_path / "m.gguf")
        share = shard_parameters(opened.parameters, Mesh(rank, 2), 4, 1)
        rows = len(whole) // 2
        assert torch.equal(weights_of(opened, parameters=share)[KV_B], whole[rank * rows : (rank + 1) * rows])


def test_load_gguf_kv_b_stays_plain_under_each_scheme(tmp_path):
    tensors, _ = write(tmp_path / "m.gguf", config_of(q_lora_rank=96), is_split=True)
    for scheme in WEIGHT_SCHEMES.values():
        weights = weights_of(open_gguf(tmp_path / "m.gguf"), WeightRecipe(scheme))
        assert torch.equal(weights[KV_B], tensors["model.layers.1.self_attn.kv_b_proj.weight"])


def test_load_gguf_kv_b_whole_wins_over_its_halves(tmp_path):
    config = config_of()
    tensors = tensors_of(config)
    both = gguf_tensors(config, tensors, is_split=True) | gguf_tensors(config, tensors, is_split=False)
    write_gguf(tmp_path / "m.gguf", gguf_metadata(config), both)
    weights = weights_of(open_gguf(tmp_path / "m.gguf"))
    assert torch.equal(weights[KV_B], tensors["model.layers.1.self_attn.kv_b_proj.weight"])


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("attn_v_b",), r"m\.gguf lacks 1 of .*: model\.layers\.1\.self_attn\.v_b_proj\.weight\."),
        (("attn_k_b",), r"m\.gguf lacks 1 of .*: model\.layers\.1\.self_attn\.k_b_proj\.weight\."),
        (("attn_k_b", "attn_v_b"), r"m\.gguf lacks 1 of .*: model\.layers\.1\.self_attn\.kv_b_proj\.weight\."),
    ],
    ids=["values", "keys", "both"],
)
def test_load_gguf_kv_b_missing_halves_are_refused(missing, words, tmp_path):
    config = config_of()
    stored = gguf_tensors(config, tensors_of(config), is_split=True)
    kept = {name: one for name, one in stored.items() if name not in [f"blk.1.{half}.weight" for half in missing]}
    write_gguf(tmp_path / "m.gguf", gguf_metadata(config), kept)
    with pytest.raises(ModelFormatError, match=words):
        weights_of(open_gguf(tmp_path / "m.gguf"))
    with pytest.raises(ModelFormatError, match=words):
        open_declared(str(tmp_path / "m.gguf"))


def test_load_gguf_draft_layers_are_left_unread(tmp_path, caplog):
    """They are among the blocks that a file counts; some conversions count them and leave them out."""
    config = config_of(num_nextn_predict_layers=1)
    tensors = tensors_of(config)
    stored = gguf_tensors(config, tensors, is_split=True)
    drafts = {name.replace("blk.1.", "blk.2."): one for name, one in stored.items() if name.startswith("blk.1.")}
    drafts |= {
        f"blk.2.nextn.{name}.weight": torch.ones(4) for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    for number, tensors_there in enumerate((stored, stored | drafts)):
        path = write_gguf(tmp_path / f"{number}.gguf", gguf_metadata(config), tensors_there)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="holdfast"):
            opened = open_gguf(path)
        assert opened.spec.num_layers == 2
        weights = weights_of(opened)
        assert torch.equal(weights[KV_B], tensors["model.layers.1.self_attn.kv_b_proj.weight"])
        assert (f"skipping {len(drafts)} tensors of {path} for drafts of tokens" in caplog.text) is bool(number)


def test_load_gguf_unannounced_draft_tensors_are_refused(tmp_path):
    config = config_of()
    stored = gguf_tensors(config, tensors_of(config), is_split=True)
    write_gguf(tmp_path / "m.gguf", gguf_metadata(config), stored | {"blk.1.nextn.enorm.weight": torch.ones(4)})
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        weights_of(open_gguf(tmp_path / "m.gguf"))


def test_scores_that_a_file_does_not_name(tmp_path):
    """Files of DeepSeek-V2 say nothing, nor do some of GLM-4.7-Flash: the bias on scores tells."""
    write(tmp_path / "sigmoid.gguf", config_of(), expert_gating_func=None)
    assert open_gguf(tmp_path / "sigmoid.gguf").spec == read_spec(config_of())
    write(tmp_path / "softmax.gguf", config_of(**SOFTMAX), expert_gating_func=None)
    assert open_gguf(tmp_path / "softmax.gguf").spec == read_spec(config_of(**SOFTMAX))


def test_open_gguf_deepseek2_missing_expert_settings_default(tmp_path):
    config = config_of(n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False)
    without = dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_weights_scale"))
    write(tmp_path / "m.gguf", config, **without)
    assert open_gguf(tmp_path / "m.gguf").spec == read_spec(config)


@for_each(
    "keys, error",
    [
        ({"attention__kv_lora_rank": None}, ModelFormatError),
        ({"rope__dimension_count": None}, ModelFormatError),
        ({"rope__dimension_count": 96}, ModelFormatError),
        ({"rope__scaling__factor": None}, ModelFormatError),
        ({"rope__scaling__original_context_length": None}, ModelFormatError),
        ({"rope__scaling__yarn_log_multiplier": None}, ModelFormatError),
        ({"expert_gating_func": 3}, UnsupportedModelError),
        ({"expert_group_used_count": None}, ModelFormatError),
        ({"expert_count": None}, ModelFormatError),
        ({"attention__temperature_scale": 0.1}, UnsupportedModelError),
        ({"nextn_predict_layers": 2}, ModelFormatError),
        ({"leading_dense_block_count": 0}, ModelFormatError),
        ({"attention__q_lora_rank": None}, ModelFormatError),
    ],
)
def test_open_gguf_wrong_metadata_is_refused_by_key(keys, error, tmp_path):
    write(tmp_path / "m.gguf", config_of(), **keys)
    (key,) = keys
    named = {"rope__dimension_count": "dimension_count|key_length", "leading_dense_block_count": "ffn_gate_inp"}
    with pytest.raises(error, match=named.get(key, key.rpartition("__")[2])):
        open_gguf(tmp_path / "m.gguf")
