"""GGUF models whose blocks stay as stored: tokens of the same model in F32, for every type, mixtures, experts and heads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast import LLM, SamplingParams
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelFormatError
from holdfast.loading.declared import declare_opened
from holdfast.loading.model_files import open_gguf
from holdfast.loading.planning.plan import plan_load
from holdfast.quant.packed_schemes import BLOCK_SCHEMES
from holdfast.quant.packed_weight import PackedWeight
from holdfast.quant.weight_schemes import WeightRecipe
from loading.block_files import HIDDEN, VOCAB, Stored, expanded, model_tensors, random_blocks, write_tensors
from loading.packed.test_kept_models import KEPT, assert_equal_values, load

gguf = pytest.importorskip("gguf")
MIXED = {"blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_down.weight": "Q6_K", "output.weight": "Q6_K"}
"""Tensors that llama.cpp stores in another type in a Q4_K_M file."""
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
"""Types that the gguf package writes."""
PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def stored_as(kind: str, shape: tuple[int, ...], seed: int) -> Stored:
    """Blocks of a type with values around 1/20."""
    rng = np.random.default_rng(seed)
    if kind in QUANTIZED:
        numbers = 0.05 * rng.standard_normal(shape, dtype=np.float32)
        return Stored(kind, gguf.quants.quantize(numbers, getattr(gguf.GGMLQuantizationType, kind)))
    stored = random_blocks(kind, shape, seed)
    if kind in PLACES:
        block_bytes = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)][1]
        raw = rng.integers(0, 256, (stored.raw.size // block_bytes, block_bytes), dtype=np.uint8)
        for place in PLACES[kind]:
            raw[:, place : place + 2] = rng.uniform(1e-5, 1e-4, (len(raw), 1)).astype(np.float16).view(np.uint8)
        stored = Stored(kind, raw.reshape(stored.raw.shape))
    return stored


def tensors_of(kind: str, arch: str = "qwen3", is_tied: bool = False, **others: str) -> dict[str, Stored]:
    """Tensors of the tiny model with blocks of this type, and of `others` by name."""
    tensors = model_tensors(kind, arch)
    for seed, (name, stored) in enumerate(tensors.items()):
        if stored.kind == kind or name in others:
            block = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
            shape = (*stored.raw.shape[:-1], stored.raw.shape[-1] // block[1] * block[0])
            tensors[name] = stored_as(others.get(name, kind), shape, seed)
    return {name: stored for name, stored in tensors.items() if not is_tied or not name.startswith("output.")}


def outputs_of(path: Path, **options: object) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a prompt, and log-probabilities of every token and the likeliest ones."""
    with LLM(str(path), device="cpu", tokenizer="none", max_model_len=48, max_num_seqs=2, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": [3, 14, 15, 9, 26, 5, 30]}], params, use_tqdm=False)
    rows = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return list(output.outputs[0].token_ids), torch.tensor([row[token].logprob for row in rows if row for token in row])


def assert_kept_equals(blocks: Path, plain: Path) -> None:
    """Equal tokens. A kernel adds products in another order, so log-probabilities are close."""
    tokens, logprobs = outputs_of(blocks, packed_weights="as_stored", packed_activations="full")
    expected, others = outputs_of(plain)
    assert tokens == expected
    torch.testing.assert_close(logprobs, others, rtol=1e-4, atol=1e-4)


def write_pair(folder: Path, tensors: dict[str, Stored], arch: str = "qwen3") -> tuple[Path, Path]:
    """Write the model in blocks, and its values in F32."""
    write_tensors(folder / "blocks.gguf", tensors, arch)
    write_tensors(folder / "plain.gguf", expanded(tensors), arch)
    return folder / "blocks.gguf", folder / "plain.gguf"


@pytest.mark.parametrize("kind", [*BLOCK_SCHEMES])
def test_llm_blocks_kept_give_the_tokens_of_their_values(kind: str, tmp_path: Path) -> None:
    blocks, plain = write_pair(tmp_path, tensors_of(kind))
    assert_kept_equals(blocks, plain)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_K", "IQ2_S", "NVFP4"])
def test_llm_kept_experts_give_the_tokens_of_their_values(kind: str, tmp_path: Path) -> None:
    blocks, plain = write_pair(tmp_path, tensors_of(kind, "qwen3moe"), "qwen3moe")
    assert_kept_equals(blocks, plain)


def test_llm_kept_types_mixed_as_q4_k_m_give_the_tokens_of_their_values(tmp_path: Path) -> None:
    blocks, plain = write_pair(tmp_path, tensors_of("Q4_K", **MIXED))
    _, kept = load(open_gguf(blocks))
    qkv = kept.weights["layers.0.qkv.weight"]
    assert isinstance(qkv, PackedWeight)
    assert [(part.scheme.title, part.num_rows) for part in qkv.parts] == [("Q4_K", 384), ("Q6_K", 128)]
    assert_kept_equals(blocks, plain)


def test_llm_kept_tied_head_is_looked_up_and_multiplied(tmp_path: Path) -> None:
    for kind in ("Q6_K", "Q8_0"):
        blocks, plain = write_pair(tmp_path, tensors_of(kind, is_tied=True))
        _, kept = load(open_gguf(blocks))
        assert isinstance(kept.weights["embed.weight"], PackedWeight)
        assert "lm_head.weight" not in kept.weights
        assert_kept_equals(blocks, plain)


@for_each("kind", ["Q4_1", "Q8_0", "NVFP4"])
def test_load_kept_blocks_on_ranks_have_the_plain_values(kind: str, tmp_path: Path) -> None:
    for arch in ("qwen3", "qwen3moe"):
        folder = tmp_path / kind / arch
        folder.mkdir(parents=True)
        blocks, plain = write_pair(folder, tensors_of(kind, arch), arch)
        for mesh in (Mesh(0, 2), Mesh(1, 2)):
            declared = declare_opened(open_gguf(blocks), "model")
            plan, kept = load(open_gguf(blocks), mesh)
            assert_equal_values(kept, load(open_gguf(plain), mesh)[1])
            assert plan.final_bytes == declared.weight_bytes("float32", KEPT, mesh), f"{kind} {arch}"


@for_each("kind", BLOCK_SCHEMES)
def test_plan_load_kept_blocks_hold_at_most_three_percent_more(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    blocks, _ = write_pair(folder, tensors_of(kind))
    opened = open_gguf(blocks)
    plan = plan_load(opened.parameters, opened.source, "float32", KEPT)
    held = sum(weight.num_bytes for weight in plan.weights if weight.packed)
    stored = sum(entry.num_bytes for entry in opened.source.entries.values() if entry.packed is not None)
    assert held <= 1.03 * stored, f"{kind}: {held} bytes of {stored}"
    opened.source.close()


def test_plan_load_expands_blocks_by_default(tmp_path: Path) -> None:
    blocks, _ = write_pair(tmp_path, tensors_of("Q4_K"))
    opened = open_gguf(blocks)
    plan = plan_load(opened.parameters, opened.source, "float32", WeightRecipe())
    assert not [weight for weight in plan.weights if weight.packed]
    assert plan.weights[0].shape == (VOCAB, HIDDEN)
    opened.source.close()


@for_each("kind", [kind for kind in BLOCK_SCHEMES if kind != "NVFP4"])
def test_load_kept_blocks_with_a_wrong_scale_name_the_row(kind: str, tmp_path: Path) -> None:
    """NaN and infinity, or an exponent beyond float32's range. Every byte of NVFP4 is a finite scale."""
    (tmp_path / kind).mkdir()
    tensors, name = tensors_of(kind), "blk.0.attn_output.weight"
    block_bytes = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)][1]
    numbers = np.array([np.inf, np.nan, -np.inf], np.float16).view(np.uint8).reshape(-1, 2)
    wrong = np.array([[255], [254], [253]], np.uint8) if kind == "MXFP4" else numbers
    for scale in wrong:
        for place in PLACES.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)):
            raw = tensors[name].raw.copy()
            raw[7, -block_bytes:][place : place + len(scale)] = scale
            path = tmp_path / kind / "blocks.gguf"
            write_tensors(path, tensors | {name: Stored(kind, raw)})
            for recipe in (KEPT, WeightRecipe()):
                with raises_code("weights.not_finite", ModelFormatError, row=7):
                    load(open_gguf(path), recipe=recipe)
