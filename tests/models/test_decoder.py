"""Every family against transformers: logits at every position, greedy tokens over 64 steps, alone and in company."""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from holdfast.config import Limits
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import require_native, same_bits
from loading.tiny_models import FAMILIES, VOCAB, save_tiny
from runner.drive import Drive, LoadedModel, Request, Rig, load_model

NUM_STEPS = 64
TOLERANCE = 1e-4
LEAST_GAP = 5e-5
"""Between the likeliest token and the next: far above what two ways to compute in float32 differ by, so no tie decides."""
EVERY_POSITION = SamplingParams(temperature=0.0, prompt_logprobs=0)
PROMPT_LENGTHS = (1, 2, 17, 33, 64, 90)
MAX_MODEL_LEN = max(PROMPT_LENGTHS) + NUM_STEPS
CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "llama_longrope within its first length": (
        "llama_longrope",
        {
            "rope_parameters": FAMILIES["llama_longrope"][1]["rope_parameters"]
            | {"original_max_position_embeddings": 256}
        },
    ),
    "opt with gelu": ("opt", {"activation_function": "gelu"}),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
}
BACKENDS = ("native_paged", "torch_paged")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Everything in C, or everything in torch."""
    if request.param == "native_paged":
        require_native()
    else:
        monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    return request.param


@cache
def tiny(case: str) -> tuple[Any, LoadedModel]:
    """transformers' model and ours, from the same files."""
    family, overrides = CASES[case]
    with TemporaryDirectory() as folder:
        theirs = save_tiny(family, folder, **overrides)
        ours = load_model(Path(folder))
    # Dynamic frequencies follow the longest text seen, and here that is the longest allowed.
    theirs_logits(theirs, tuple(range(MAX_MODEL_LEN)))
    return theirs, ours


@cache
@torch.no_grad()
def theirs_logits(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0]


def make_requests(lengths=PROMPT_LENGTHS) -> list[Request]:
    dice = random.Random(7)
    return [
        Request([dice.randrange(3, VOCAB) for _ in range(length)], NUM_STEPS, 7 * index, EVERY_POSITION)
        for index, length in enumerate(lengths)
    ]


def make_drive(model: LoadedModel, backend: str, max_num_batched_tokens: int, page_tokens: int = 4) -> Drive:
    limits = Limits(4, max_num_batched_tokens, MAX_MODEL_LEN, page_tokens)
    num_pages = 4 * -(-MAX_MODEL_LEN // page_tokens)
    return Drive(Rig(model, backend, limits, num_pages), num_pages)


def judge(theirs: Any, drive: Drive, request: Request) -> None:
    """By induction: each token is the likeliest for transformers behind all tokens before it."""
    token_ids = (*request.prompt, *request.output)
    expected = theirs_logits(theirs, token_ids)[:-1]
    logits = drive.logits(request)
    assert sorted(logits) == list(range(len(token_ids) - 1)), "a position has no logits"
    computed = torch.stack([logits[position] for position in range(len(token_ids) - 1)])
    assert float((computed - expected).abs().max()) <= TOLERANCE
    behind_prompt = expected[len(request.prompt) - 1 :]
    assert len(request.output) == NUM_STEPS
    assert request.output == behind_prompt.argmax(-1).tolist()
    best, second = behind_prompt.topk(2).values.unbind(-1)
    assert float((best - second).min()) > LEAST_GAP, "a tie: take another seed"


@pytest.mark.parametrize("case", CASES)
def test_alone_and_whole(case, backend):
    theirs, ours = tiny(case)
    for request in make_requests((1, 33, 90)):
        drive = make_drive(ours, backend, max_num_batched_tokens=128)
        drive.run([request])
        judge(theirs, drive, request)


@pytest.mark.parametrize("case", CASES)
def test_in_company_of_other_lengths_and_in_chunks(case, backend):
    theirs, ours = tiny(case)
    requests = make_requests()
    drive = make_drive(ours, backend, max_num_batched_tokens=24, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_pages_cost_what_half_pages_cost(kv_dtype):
    theirs, ours = tiny("qwen3")
    limits = Limits(4, 24, MAX_MODEL_LEN, 4)
    drive = Drive(Rig(ours, "torch_paged", limits, 160, kv_dtype), 160)
    requests = make_requests((33, 90))
    drive.run(requests)
    for request in requests:
        expected = theirs_logits(theirs, (*request.prompt, *request.output))
        errors = [float((row - expected[position]).abs().max()) for position, row in drive.logits(request).items()]
        assert 1e-5 < max(errors) < (0.02 if kv_dtype == "float16" else 0.15)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_stay_near(dtype):
    theirs, _ = tiny("qwen3")
    with TemporaryDirectory() as folder:
        save_tiny("qwen3", folder)
        ours = load_model(Path(folder), dtype)
    limits = Limits(4, 24, MAX_MODEL_LEN, 4)
    drive = Drive(Rig(ours, "torch_paged", limits, 160, dtype, dtype), 160)
    (request,) = make_requests((90,))
    drive.run([request])
    expected = theirs_logits(theirs, (*request.prompt, *request.output))
    for position, row in drive.logits(request).items():
        assert row.dtype == torch.float32
        assert float((row - expected[position]).abs().max()) < (0.05 if dtype == "float16" else 0.4)


def test_only_the_rows_that_are_read_are_finished():
    """Logits of some rows are those of all rows, to the bit."""
    require_native()
    _, ours = tiny("llama")
    runs = []
    for params in (EVERY_POSITION, SamplingParams(temperature=0.0)):
        request = Request(list(range(3, 40)), 5, params=params)
        drive = make_drive(ours, "native_paged", max_num_batched_tokens=16)
        drive.run([request])
        runs.append(drive.logits(request))
    every, sampled = runs
    assert len(every) == 41
    assert len(sampled) == 5
    assert all(same_bits(sampled[position], every[position]) for position in sampled)
