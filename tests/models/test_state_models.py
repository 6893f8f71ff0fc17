"""Gated delta nets between attention (Qwen3-Next, 3.5): logits at every position and greedy tokens against transformers, in any steps."""

import random

import pytest
import torch

from holdfast.config import Limits
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import require_native, same_bits
from models.test_decoder import theirs_logits
from models.tiny_states import STATE_MODELS, VOCAB, tiny
from runner.drive import GREEDY, Drive, LoadedModel, Request, Rig

TOLERANCE = 1e-4
LEAST_GAP = 5e-5
EVERY_POSITION = SamplingParams(temperature=0.0, prompt_logprobs=0)
MAX_MODEL_LEN = 240
NUM_STEPS = 6
LENGTHS = (1, 2, 63, 64, 65, 130, 193)
"""Around the ends of pieces: a last row alone on its chunk, a whole chunk, one row more."""


def make_drive(
    model: LoadedModel,
    max_num_batched_tokens: int,
    *,
    num_sequences: int = 4,
    num_pages: int | None = None,
    caches: bool = False,
    backend: str = "torch_paged",
) -> Drive:
    limits = Limits(num_sequences, max_num_batched_tokens, MAX_MODEL_LEN, page_tokens=16)
    num_pages = num_sequences * -(-MAX_MODEL_LEN // 16) if num_pages is None else num_pages
    return Drive(Rig(model, backend, limits, num_pages), num_pages, enable_prefix_caching=caches)


def make_requests(
    lengths=LENGTHS, num_steps: int = NUM_STEPS, params: SamplingParams = EVERY_POSITION
) -> list[Request]:
    dice = random.Random(3)
    return [
        Request([dice.randrange(3, VOCAB) for _ in range(length)], num_steps, index, params)
        for index, length in enumerate(lengths)
    ]


def judge(theirs, drive: Drive, request: Request) -> None:
    """By induction: each token is the argmax of transformers after all tokens before it."""
    token_ids = (*request.prompt, *request.output)
    expected = theirs_logits(theirs, token_ids)[:-1]
    logits = drive.logits(request)
    first = 0 if request.params is EVERY_POSITION else len(request.prompt) - 1
    computed = torch.stack([logits[position] for position in range(first, len(token_ids) - 1)])
    assert float((computed - expected[first:]).abs().max()) <= TOLERANCE
    after_prompt = expected[len(request.prompt) - 1 :]
    assert request.output == after_prompt.argmax(-1).tolist()
    best, second = after_prompt.topk(2).values.unbind(-1)
    assert float((best - second).min()) > LEAST_GAP, "a tie: take another seed"


@pytest.mark.parametrize("name", STATE_MODELS)
def test_logits_of_every_model_match_transformers_alone(name: str) -> None:
    theirs, ours = tiny(name)
    for request in make_requests():
        drive = make_drive(ours, 256, num_sequences=1)
        drive.run([request])
        judge(theirs, drive, request)


@pytest.mark.parametrize("name", STATE_MODELS)
def test_logits_match_transformers_in_company_and_pieces(name: str) -> None:
    theirs, ours = tiny(name)
    drive, requests = make_drive(ours, 100), make_requests()
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize("most", [64, 65, 127, 128, 192, 255])
def test_logits_are_equal_to_the_bit_whatever_a_step_holds(most: int) -> None:
    """Pieces end on the grid: neither their number nor company changes a bit of the states, so none of the logits."""
    require_native()
    _, ours = tiny("3.5")
    alone = []
    for request in make_requests():
        drive = make_drive(ours, 256, num_sequences=1, backend="native_paged")
        drive.run([request])
        alone.append(drive.logits(request))
    drive, requests = make_drive(ours, most, num_sequences=3, backend="native_paged"), make_requests()
    drive.run(requests)
    for request, expected in zip(requests, alone, strict=True):
        logits = drive.logits(request)
        for position, own_V in expected.items():
            assert same_bits(own_V, logits[position]), f"{len(request.prompt)=} {position=}"


def test_preempted_sequences_compute_the_same_tokens() -> None:
    theirs, ours = tiny("3.5")
    requests = make_requests((100, 90, 80, 70), num_steps=60, params=GREEDY)
    drive = make_drive(ours, 128, num_pages=25)
    drive.run(requests)
    assert drive.scheduler.num_preemptions > 0, "no sequence was preempted: take fewer pages"
    for request in requests:
        judge(theirs, drive, request)


def test_prefix_hits_compute_the_same_tokens() -> None:
    theirs, ours = tiny("next")
    dice = random.Random(5)
    prompt = [dice.randrange(3, VOCAB) for _ in range(200)]
    requests = [Request(prompt[:length], 5, 9 * index, GREEDY) for index, length in enumerate((200, 130, 193, 65, 200))]
    drive = make_drive(ours, 128, caches=True)
    drive.run(requests)
    assert drive.scheduler.num_prefix_hit_tokens >= 64, "no prefix was found"
    for request in requests:
        judge(theirs, drive, request)
