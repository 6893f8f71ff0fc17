"""What can be wrong with a model that chooses its tokens (DSA): one sentence from `holdfast plan` and from LLM, before a weight is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cli.cli_models import Here, make_model
from holdfast.api.llm import LLM
from holdfast.errors import HoldfastError
from holdfast.runner import weight_load
from models.tiny_latents import LATENT_MODELS

MISSING = {
    "wq_b": "model.layers.1.self_attn.indexer.wq_b.weight",
    "wk": "model.layers.1.self_attn.indexer.wk.weight",
    "k_norm's bias": "model.layers.1.self_attn.indexer.k_norm.bias",
    "weights_proj": "model.layers.1.self_attn.indexer.weights_proj.weight",
}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek V3.2."""
    prefix, settings = LATENT_MODELS["sparse like V3.2"]
    named: dict[str, Any] = {"architectures": [f"{prefix}ForCausalLM"], "model_type": "deepseek_v32"}
    return make_model(tmp_path_factory.mktemp("sparse"), **(settings | named | {"vocab_size": 259}))


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight fails the test."""

    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(weight_load, "load_weights", read)


def refused(here: Here, folder: Path, sentence: str, **options: str) -> None:
    """From both doors, in one line each."""
    requested = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    ended = here("plan", folder, *requested)
    assert ended.code != 0
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1
    assert sentence in ended.err
    not_opened(folder, sentence, **options)


def not_opened(folder: Path, sentence: str, **options: Any) -> None:
    with pytest.raises(HoldfastError) as caught:
        LLM(model=str(folder), device="cpu", **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def changed(sparse: Path, folder: Path, **settings: object) -> Path:
    """Like the one before files with other settings."""
    shutil.copytree(sparse, folder, dirs_exist_ok=True)
    config = json.loads((sparse / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"index_topk": 257}, "index_topk = 257; at most the 256 tokens of the longest context is needed there"),
        ({"index_topk": 0}, "index_topk = 0; a whole number from 1"),
        ({"index_n_heads": 65}, "index_n_heads = 65; up to 64 heads, which kernels take, is needed there"),
        ({"index_head_dim": 40}, "index_head_dim = 40; a multiple of 16 up to 128, which kernels take, is needed"),
        ({"q_lora_rank": None}, "config.json has no q_lora_rank; an index takes its queries from there"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_no_context_has_and_no_kernel_takes(
    here: Here, sparse: Path, tmp_path: Path, settings: dict[str, object], sentence: str
) -> None:
    refused(here, changed(sparse, tmp_path, **settings), sentence)


@pytest.mark.parametrize("name", MISSING)
def test_an_index_without_one_of_its_tensors(sparse: Path, tmp_path: Path, name: str) -> None:
    """A plan is of settings; files are compared with them by who opens them."""
    folder = changed(sparse, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[MISSING[name]]
    save_file(tensors, folder / "model.safetensors")
    not_opened(folder, MISSING[name])


def test_tensors_of_another_number_of_heads(sparse: Path, tmp_path: Path) -> None:
    sentence = "indexer.weights_proj.weight' has the shape [64, 60], and [32, 60] is needed"
    not_opened(changed(sparse, tmp_path, index_n_heads=32), sentence)


def test_an_index_kept_in_an_unknown_type(here: Here, sparse: Path) -> None:
    sentence = "index_cache_dtype='int4' was asked; the choices are auto, fp8, bfloat16, float16, float32; try auto"
    refused(here, sparse, sentence, index_cache_dtype="int4")


def test_an_index_that_a_model_does_not_have(here: Here, tiny: Path) -> None:
    sentence = "index_cache_dtype=fp8 was asked; model has no index that chooses tokens (DSA); leave it out"
    refused(here, tiny, sentence, index_cache_dtype="fp8")


@pytest.mark.parametrize("top_k", [1, 3, 7, 100, 255, 256])
def test_any_number_of_tokens_that_a_context_has_is_planned(
    here: Here, sparse: Path, tmp_path: Path, top_k: int
) -> None:
    """Kernels take any up to thousands; a context that is no longer is attended to whole."""
    folder = changed(sparse, tmp_path, index_topk=top_k)
    for options in ((), ("--gpu", "h200"), ("--max-model-len", "64")):
        ended = here("plan", folder, *options)
        assert (ended.code, ended.err) == (0, "")


def test_more_tokens_than_kernels_choose_are_refused_on_a_gpu(here: Here, sparse: Path, tmp_path: Path) -> None:
    """Plain torch would do it, slowly and without graphs."""
    folder = changed(sparse, tmp_path, index_topk=8192, max_position_embeddings=65536)
    ended = here("plan", folder, "--gpu", "h200", "--max-model-len", "65536")
    assert ended.code != 0
    assert "a row may choose up to 4096 tokens, not 8192" in ended.err
    assert "a shorter max_model_len" in ended.err
    assert here("plan", folder, "--gpu", "h200", "--max-model-len", "8192").code == 0
    assert here("plan", folder).code == 0
