"""Attention sinks and soft caps in a runner: copies, plan and ledger to the byte, and logits beside those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.steps import Geometry
from holdfast.cache.chunks import ring_tables
from holdfast.families.grouped.pages import GroupedBackend, QuantizedPages
from holdfast.families.grouped.sinks import copy_sinks, sinks_name
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from kernels.exactness import random
from loading.tiny_models import save_tiny
from runner.tiny_runners import TinyBuilder, held_storages

TEXT = [5, 9, 200, 17, 33, 8, 101, 44, 7, 90, 250, 61, 12, 13, 77, 30, 31, 99, 3, 140]
GPT_OSS: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,  # all: a choice among them would jump with the last bit of a code
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def save_gpt_oss(folder: Path) -> Any:
    """A tiny model with sinks about as large as its scores, and the model itself."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**GPT_OSS, architectures=["GptOssForCausalLM"])
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for place, (name, parameter) in enumerate(model.named_parameters()):
            scale = 1.5 if name.endswith("sinks") else 0.2
            parameter.copy_(random(*parameter.shape, seed=place, scale=scale) + ("norm" in name))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def build(tmp_path: Path) -> TinyBuilder:
    return TinyBuilder(tmp_path)


def logits_of(runner, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """For the last token of TEXT, which is read in chunks."""
    own = Sequence(0, list(TEXT), len(TEXT), SamplingParams(temperature=0.0), seed=0, max_tokens=1)
    own.tables = ring_tables(runner.groups, len(TEXT), len(TEXT))
    hidden = torch.empty(0)
    for start, end in zip((0, *cuts), (*cuts, len(TEXT)), strict=True):
        hidden = runner.hidden_rows(LiveStep((ScheduledSequence.of(own, start, end - start),)))
    return runner.row_logits(hidden[-1:]).clone().float().cpu()


def attention_owners(built) -> tuple[dict[str, int], dict[str, int]]:
    """Planned and held bytes that attention has of its own."""
    planned = {term.owner: term.num_bytes for term in built.plan.memory.terms if term.owner.startswith("attention/")}
    held = {entry.owner: entry.num_bytes for entry in built.ledger if entry.owner.startswith("attention/")}
    return planned, held


@pytest.mark.parametrize("kv_format", ["float32", "float16", "fp8", "turboquant_4bit_nc"])
def test_runner_with_sinks_matches_transformers_and_plan(build: TinyBuilder, kv_format: str) -> None:
    """Plan and ledger agree; keys that are stored without their bias are whole for a sink too."""
    model = save_gpt_oss(build.folder / "gpt_oss")
    with torch.no_grad():
        wanted = model(torch.tensor([TEXT])).logits[0, -1:]
    built = build("gpt_oss", kv_cache_dtype=kv_format, max_model_len=64)
    planned, held = attention_owners(built)
    assert held == planned
    assert held["attention/sinks"] == 3 * 6 * 4
    assert "attention/key_means" not in held
    assert 0 <= sum(held_storages(built.runner).values()) - built.ledger.total_bytes < 4096
    tolerance = {"float32": 1e-4, "float16": 2e-3, "fp8": 0.1, "turboquant_4bit_nc": 0.3}[kv_format]
    logits = logits_of(built.runner, (7, 8))
    error = float((logits - wanted).norm() / wanted.norm())
    assert error < tolerance, f"{error=}"
    built.release()


def test_layers_with_a_cap_do_not_centre_their_keys(build: TinyBuilder) -> None:
    """A softmax does not see what all scores have in common; a cap does."""
    for softcap, centred in ((None, True), (5.0, False)):
        name = f"gemma3 {softcap}"
        (build.folder / name).mkdir()
        save_tiny("gemma3", build.folder / name)
        file = build.folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_logit_softcapping": softcap}))
        built = build(name, kv_cache_dtype="fp8", max_model_len=64)
        planned, held = attention_owners(built)
        assert held == planned
        assert ("attention/key_means" in held) == centred
        backend = built.runner.backend
        assert isinstance(backend, GroupedBackend)
        for pages in backend.pages:
            assert isinstance(pages, QuantizedPages)
            assert (pages.planes.k_mean_KD is not None) == centred
        plain = build(name, max_model_len=64)
        near, exact = logits_of(built.runner), logits_of(plain.runner)
        error = float((near - exact).norm() / exact.norm())
        assert error < (0.5 if softcap is None else 0.12), f"{softcap=} {error=}"
        plain.release()
        built.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_copy_sinks_are_own_float32_copies(dtype: torch.dtype) -> None:
    specs = Geometry(windows=(None, 5, 7), has_sinks=True).specs
    weights = {sinks_name(layer): random(6, seed=layer).to(dtype) for layer in range(3)}
    copies = copy_sinks(weights, specs)
    for layer, copy_H in enumerate(copies):
        assert copy_H is not None
        assert copy_H.dtype == torch.float32
        assert torch.equal(copy_H, weights[sinks_name(layer)].float())
        copy_H.zero_()
        assert weights[sinks_name(layer)].any(), "the weight was changed"
    assert copy_sinks({}, Geometry(windows=(None, 5)).specs) == (None, None)
