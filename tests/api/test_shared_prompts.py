"""Prompts that arrive together share rows and pages, in every family and KV format, and answer as without sharing."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.engine.build import build_engine
from holdfast.engine.engine import Engine
from holdfast.quant.formats import KV_FORMATS
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams
from holdfast.runner.runner import Runner
from runner.gpu_traffic import write_model

CASES = {
    "qwen3": ("auto", *(name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized)),
    "windows": ("auto", "turboquant_k8v4"),
    "gemma3": ("auto",),
    "gpt_oss": ("auto", "turboquant_4bit_nc"),
    "experts": ("auto",),
    "latent": ("auto", "fp8_ds_mla", "turboquant_mla_4bit", "turboquant_mla_4bit_r8"),
    "sparse": ("auto", "fp8_ds_mla"),
    "compressed": ("auto", "fp8_ds_v4"),
    "compressed_small": ("auto",),
}
QUICK = {"qwen3-turboquant_k8v4", "windows-auto", "gpt_oss-turboquant_4bit_nc", "latent-auto", "compressed_small-auto"}


def each_case(quick: Collection[str]) -> pytest.MarkDecorator:
    """Every family, format and device; on a CPU the `quick` ones at once and the others slow."""
    cases: list[Any] = []
    for family, kv_format in ((family, kv_format) for family, formats in CASES.items() for kv_format in formats):
        is_quick = f"{family}-{kv_format}" in quick
        cases.append(pytest.param(family, kv_format, "cpu", marks=() if is_quick else pytest.mark.slow))
        cases.append(pytest.param(family, kv_format, "cuda", marks=pytest.mark.gpu))
    return pytest.mark.parametrize(("family", "kv_format", "device"), cases)


NUM_OUTPUT = 3
NEAR = {"cpu": 1e-4, "cuda": 0.06}
"""Like the one before where also a CPU rounds by rows: over latents, and a lone row over codes."""
TOLERANCE = {"cpu": 0.0, "cuda": 0.06}
"""For log-probabilities: on a GPU products round by the number of rows of a step."""


@contextmanager
def opened(folder: Path, family: str, kv_format: str, device: str, **options: Any) -> Iterator[Engine]:
    """An engine of a tiny model with dummy weights."""
    config = EngineConfig(
        model=str(write_model(folder, family)),
        load_format="dummy",
        tokenizer="none",
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        kv_cache_dtype=kv_format,
        **({"max_num_seqs": 8, "max_model_len": 1280, "page_tokens": 16} | options),
    )
    engine = build_engine(config, lambda done, total: None)
    try:
        yield engine
    finally:
        engine.close()


class Counted:
    """Rows of the steps that runners take, and pages that sequences hold at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rows = self.max_pages = 0
        launch = Runner.launch

        def counting(runner: Runner, step: Any) -> None:
            self.num_rows += step.num_tokens
            launch(runner, step)

        monkeypatch.setattr(Runner, "launch", counting)

    def run(self, engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[Any]]:
        """Answer prompts that arrive together: of each completion the tokens with their log-probabilities."""
        self.num_rows = self.max_pages = 0
        reported: dict[tuple[str, int], list[Any]] = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params_of(**params))
        pool = engine.scheduler.pool
        while engine.has_unfinished():
            for delta in engine.step():
                _take(reported, delta)
            self.max_pages = max(self.max_pages, sum(pool.num_owned_by_group))
        return [reported[key] for key in sorted(reported)]


def params_of(**params: Any) -> SamplingParams:
    options = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "logprobs": 1, "temperature": 0.0, "detokenize": False}
    return SamplingParams(**(options | params))


def _take(reported: dict[tuple[str, int], list[Any]], delta: CompletionDelta) -> None:
    assert delta.error is None, delta.error
    own = reported.setdefault((delta.request_id, delta.index), [])
    own += [
        (token, by_token[token].logprob) for token, by_token in zip(delta.token_ids, delta.logprobs or (), strict=True)
    ]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7919 * (place + 31 * seed) + place * place) % 900 + 50 for place in range(num_tokens)]


def assert_alike(ones: list[list[Any]], others: list[list[Any]], tolerance: float) -> None:
    """Like the one before tokens and log-probabilities; with a tolerance, up to where two tokens were as likely."""
    assert len(ones) == len(others)
    if not tolerance:
        assert ones == others
        return
    num_alike = 0
    for one, other in zip(ones, others, strict=True):
        for (token, logprob), (other_token, other_logprob) in zip(one, other, strict=True):
            if token != other_token:
                break
            assert abs(logprob - other_logprob) <= tolerance
            num_alike += 1
    assert 2 * num_alike >= sum(map(len, ones)), "rounding changes few of the choices"


@each_case(QUICK)
def test_completions_of_one_prompt_compute_it_once(
    family: str, kv_format: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, num_tokens, n = Counted(monkeypatch), 90 if device == "cpu" else 1000, 4
    prompt, params = prompt_of(num_tokens), {"n": n, "temperature": 1.0, "seed": 5}
    with opened(tmp_path, family, kv_format, device) as engine:
        shared = counted.run(engine, [prompt], **params)
        assert counted.num_rows == num_tokens + n * (NUM_OUTPUT - 1)
    with opened(tmp_path, family, kv_format, device, enable_prefix_caching=False) as engine:
        alone = counted.run(engine, [prompt], **params)
        assert counted.num_rows == n * (num_tokens + NUM_OUTPUT - 1)
    # On x86, products of torch's BLAS round by the number of rows.
    near = NEAR if family.startswith("compressed") else TOLERANCE
    assert_alike(shared, alone, near[device])


@each_case({"qwen3-turboquant_k8v4", "windows-auto", "compressed_small-auto"})
def test_shared_prompts_common_beginning_is_computed_once(
    family: str, kv_format: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    stem = prompt_of(150 if device == "cpu" else 700)
    prompts = [stem + prompt_of(1 + 7 * seed, seed) for seed in range(4)]
    with opened(tmp_path, family, kv_format, device) as engine:
        shared, num_rows = counted.run(engine, prompts), counted.num_rows
        block = engine.scheduler.prefix.block_tokens
        again = engine.scheduler.tokens_again
    with opened(tmp_path, family, kv_format, device, enable_prefix_caching=False) as engine:
        alone = counted.run(engine, prompts)
    num_shared = max(len(stem) // block * block - again, 0) if len(stem) >= block else 0
    assert num_rows == counted.num_rows - 3 * num_shared
    # Over latents a row rounds by the number of rows beside it, so a found prefix is near and not the same.
    is_exact = device == "cpu" and not family.startswith(("latent", "sparse", "compressed"))
    assert_alike(shared, alone, 0.0 if is_exact else NEAR[device])


@pytest.mark.parametrize("num_tokens", [2, pytest.param(34, marks=pytest.mark.slow)])
@each_case({"windows-auto", "latent-auto"})
def test_shared_prompt_more_completions_than_tokens_match(
    family: str, kv_format: str, device: str, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also again, when the prefix cache leaves fewer rows than completions."""
    counted, prompt = Counted(monkeypatch), prompt_of(num_tokens)
    params = {"n": 7, "temperature": 1.0, "seed": 5}
    options = {"enforce_eager": True} if device == "cuda" else {}
    with opened(tmp_path, family, kv_format, device, **options) as engine:
        shared = counted.run(engine, [prompt], **params)
        assert counted.num_rows == num_tokens + 7 * (NUM_OUTPUT - 1)
        again = counted.run(engine, [prompt], **params)
    with opened(tmp_path, family, kv_format, device, enable_prefix_caching=False, **options) as engine:
        alone = counted.run(engine, [prompt], **params)
    is_exact = device == "cpu" and not family.startswith(("latent", "sparse", "compressed"))
    assert_alike(shared, alone, 0.0 if is_exact else NEAR[device])
    # Over codes torch rounds a lone row of a found prefix otherwise than rows of a chunk.
    assert_alike(again, alone, 0.0 if is_exact and kv_format == "auto" else NEAR[device])


def test_forks_with_prompt_logprobs_stay_within_the_step(tmp_path: Path) -> None:
    with opened(tmp_path, "qwen3", "auto", "cpu", max_num_batched_tokens=64) as engine:
        ends: list[Any] = []
        engine.add_request("a", {"prompt_token_ids": prompt_of(61)}, params_of(prompt_logprobs=0))
        engine.add_request("b", {"prompt_token_ids": prompt_of(2, 3)}, params_of(n=6, temperature=1.0))
        while engine.has_unfinished():
            ends += [delta.error for delta in engine.step() if delta.finish_reason is not None]
        assert ends == [None] * 7


def test_shared_prompt_more_sequences_than_step_rows_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, prompt = Counted(monkeypatch), prompt_of(20)
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 24}
    with opened(tmp_path, "qwen3", "auto", "cpu", **options) as engine:
        shared = counted.run(engine, [prompt], n=32, temperature=1.0, seed=5)
    with opened(tmp_path, "qwen3", "auto", "cpu", enable_prefix_caching=False, **options) as engine:
        assert_alike(shared, counted.run(engine, [prompt], n=32, temperature=1.0, seed=5), 0.0)


@pytest.mark.parametrize("num_batched", [40, 96])
def test_completions_of_a_prompt_in_chunks_compute_it_once(
    num_batched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, prompt = Counted(monkeypatch), prompt_of(100)
    with opened(tmp_path, "qwen3", "auto", "cpu", max_num_batched_tokens=num_batched) as engine:
        shared = counted.run(engine, [prompt], n=4, temperature=1.0, seed=5)
    assert counted.num_rows == 100 + 4 * (NUM_OUTPUT - 1)
    assert counted.max_pages <= 100 // 16 + 4
    with opened(tmp_path, "qwen3", "auto", "cpu", enable_prefix_caching=False) as engine:
        assert_alike(shared, counted.run(engine, [prompt], n=4, temperature=1.0, seed=5), 0.0)


@pytest.mark.gpu
def test_forks_batch_invariant_match_one_prompt_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, prompt = Counted(monkeypatch), prompt_of(777)
    options = {"batch_invariant": True, "max_num_batched_tokens": 512}
    with opened(tmp_path, "qwen3", "auto", "cuda", **options) as engine:
        shared = counted.run(engine, [prompt] * 4)
        assert counted.num_rows == 777 + 4 * (NUM_OUTPUT - 1)
    with opened(tmp_path, "qwen3", "auto", "cuda", enable_prefix_caching=False, **options) as engine:
        assert_alike(shared, counted.run(engine, [prompt]) * 4, 0.0)


@pytest.mark.gpu
def test_forks_allocate_nothing_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    with opened(tmp_path, "gpt_oss", "auto", "cuda") as engine:
        counted.run(engine, [prompt_of(200, 1)], n=4, temperature=1.0)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for seed in range(2, 5):
            counted.run(engine, [prompt_of(200, seed)], n=4, temperature=1.0)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
