"""What can be wrong with a model that chooses its tokens (DSA): one sentence from `holdfast plan` and from LLM, before a weight is read."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cli.cli_models import Here, make_model
from error_codes import raises_code
from holdfast.api.llm import LLM
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


def refused(here: Here, folder: Path, code: str, *, options: Mapping[str, str] | None = None, **values: object) -> None:
    """Check that the command and LLM refuse with one code, in one line each."""
    options = options or {}
    requested = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    ended = here("plan", folder, *requested)
    assert ended.code != 0
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1
    assert ended.refuses(code, **values), ended
    not_opened(folder, code, options=options, **values)


def not_opened(folder: Path, code: str, *, options: Mapping[str, str] | None = None, **values: object) -> None:
    with raises_code(code, **values) as caught:
        LLM(model=str(folder), device="cpu", **dict[str, Any](options or {}))
    assert "\n" not in str(caught.value)


def changed(sparse: Path, folder: Path, **settings: object) -> Path:
    """Like the one before files with other settings."""
    shutil.copytree(sparse, folder, dirs_exist_ok=True)
    config = json.loads((sparse / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    "settings",
    [{"index_topk": 257}, {"index_topk": 0}, {"index_n_heads": 65}, {"index_head_dim": 40}],
    ids=lambda value: "-".join(f"{key}-{size}" for key, size in value.items()),
)
def test_sizes_that_no_context_has_and_no_kernel_takes(
    here: Here, sparse: Path, tmp_path: Path, settings: dict[str, int]
) -> None:
    ((key, value),) = settings.items()
    refused(here, changed(sparse, tmp_path, **settings), "architecture.wrong_value", key=key, value=value)


def test_index_without_query_rank_is_refused(here: Here, sparse: Path, tmp_path: Path) -> None:
    refused(here, changed(sparse, tmp_path, q_lora_rank=None), "architecture.missing_key", key="q_lora_rank")


@pytest.mark.parametrize("name", MISSING)
def test_open_sparse_model_missing_index_tensor_is_refused(sparse: Path, tmp_path: Path, name: str) -> None:
    """A plan reads settings alone; opening the model compares files with them."""
    folder = changed(sparse, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[MISSING[name]]
    save_file(tensors, folder / "model.safetensors")
    not_opened(folder, "weights.missing_tensors", count=1, tensors=MISSING[name])


def test_tensors_of_another_number_of_heads(sparse: Path, tmp_path: Path) -> None:
    folder = changed(sparse, tmp_path, index_n_heads=32)
    not_opened(folder, "weights.wrong_shape", shape=[64, 60], expected="[32, 60]")


def test_index_cache_dtype_unknown_type_is_refused(here: Here, sparse: Path) -> None:
    options = {"index_cache_dtype": "int4"}
    refused(here, sparse, "value.not_one_of", options=options, name="index_cache_dtype", value="int4")


def test_index_cache_dtype_without_index_is_refused(here: Here, tiny: Path) -> None:
    refused(here, tiny, "plan.no_index", options={"index_cache_dtype": "fp8"}, name="index_cache_dtype", value="fp8")


@pytest.mark.parametrize("top_k", [1, 3, 7, 100, 255, 256])
def test_plan_accepts_any_index_topk_of_context(here: Here, sparse: Path, tmp_path: Path, top_k: int) -> None:
    """Kernels take any up to thousands; a context that is no longer is attended to whole."""
    folder = changed(sparse, tmp_path, index_topk=top_k)
    for options in ((), ("--gpu", "h200"), ("--max-model-len", "64")):
        ended = here("plan", folder, *options)
        assert (ended.code, ended.err) == (0, "")


def test_plan_gpu_refuses_index_topk_beyond_kernels(here: Here, sparse: Path, tmp_path: Path) -> None:
    """Plain torch would do it, slowly and without graphs."""
    folder = changed(sparse, tmp_path, index_topk=8192, max_position_embeddings=65536)
    ended = here("plan", folder, "--gpu", "h200", "--max-model-len", "65536")
    assert ended.code != 0
    assert ended.refuses("attention.no_backend"), ended
    assert "a row may choose up to 4096 tokens, not 8192" in ended.err
    assert here("plan", folder, "--gpu", "h200", "--max-model-len", "8192").code == 0
    assert here("plan", folder).code == 0
