"""Tiny random models with latent attention, transformers' and ours over the same weights, and what judges one by the other."""

import random
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch

from holdfast.config import Limits
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.request.sampling_params import SamplingParams
from models.tiny_experts import assembled, config_of, make_random, tensors_of
from runner.drive import Drive, LoadedModel, Request, Rig

VOCAB = 131
TOLERANCE = 1e-4
LEAST_GAP = 5e-5
"""Between the most likely token and the next: far above what two ways to compute in float32 differ by, so no tie decides."""
EVERY_POSITION = SamplingParams(temperature=0.0, prompt_logprobs=0)
MAX_MODEL_LEN = 96
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
"""Both the rotation's own factor and that of scores are far from 1."""
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""The eps of a layer's norms is one that shows where it is taken for that of latents."""
V2 = SMALL | {"first_k_dense_replace": 1}
V3 = SMALL | {
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
GLM = SMALL | {"num_attention_heads": 7, "num_key_value_heads": 7, "n_shared_experts": 1}
V32 = V3 | {"index_n_heads": 64, "index_head_dim": 32, "index_topk": 5}
"""With so many heads no two scores are zero, and none tie: torch.topk breaks ties as it likes."""
GLM_DSA = V32 | {"index_n_heads": 32, "n_group": 1, "topk_group": 1, "num_hidden_layers": 5}
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 like V2-Lite": ("DeepseekV2", V2 | {"q_lora_rank": None, "rope_parameters": YARN, "topk_method": "greedy"}),
    "v2 with groups and biases": (
        "DeepseekV2",
        V2
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
        | {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN | {"mscale_all_dim": 0.0}},
    ),
    "v3 like R1": ("DeepseekV3", V3 | {"rope_parameters": YARN}),
    "v3 with biases, no query latent, no yarn": (
        "DeepseekV3",
        V3 | {"attention_bias": True, "q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "sparse like V3.2": ("DeepseekV32", V32 | {"rope_parameters": YARN}),
    "sparse with biases, no yarn, 3 tokens": (
        "DeepseekV32",
        V32 | {"attention_bias": True, "index_topk": 3, "index_head_dim": 16, "first_k_dense_replace": 0},
    ),
    "sparse like GLM-5": (
        "GlmMoeDsa",
        GLM_DSA | {"indexer_types": ["full", "full", "shared", "shared", "full"]},
    ),
    "sparse like GLM-5, a shared layer last, biases, yarn": (
        "GlmMoeDsa",
        GLM_DSA
        | {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4, "index_topk": 3}
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "attention_bias": True, "rope_parameters": YARN},
    ),
    "glm like GLM-4.7-Flash": ("Glm4MoeLite", GLM | {"n_group": 1, "topk_group": 1}),
    "glm with listed layers and yarn": (
        "Glm4MoeLite",
        GLM
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 2, "topk_group": 1}
        | {"attention_bias": True, "rope_parameters": YARN},
    ),
}


@cache
def tiny(case: str) -> tuple[Any, LoadedModel]:
    """transformers' model, and ours over the same weights."""
    prefix, settings = LATENT_MODELS[case]
    theirs = make_random(prefix, settings, seed=len(case))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight", "k_norm.weight")):
                tensor.copy_(1.0 + 0.3 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith("k_norm.bias"):
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    spec = read_spec(config_of(theirs))
    return theirs, LoadedModel(spec, assembled(parameters(spec), tensors_of(theirs, "separate")))


@cache
@torch.no_grad()
def theirs_logits(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0]


def make_drive(model: LoadedModel, max_rows: int, page_tokens: int = 4, num_pages: int = 100) -> Drive:
    limits = Limits(4, max_rows, MAX_MODEL_LEN, page_tokens)
    is_sparse = model.spec.latent is not None and model.spec.latent.index is not None
    return Drive(Rig(model, "torch_sparse" if is_sparse else "torch_latent", limits, num_pages), num_pages)


def make_request(length: int, num_output: int, arrival: int = 0) -> Request:
    dice = random.Random(length)
    return Request([dice.randrange(3, VOCAB) for _ in range(length)], num_output, arrival, EVERY_POSITION)


def judge(theirs: Any, drive: Drive, request: Request) -> None:
    """By induction: each token is the argmax of transformers behind all tokens before it; all logits that were computed are theirs."""
    token_ids = (*request.prompt, *request.output)
    expected = theirs_logits(theirs, token_ids)[:-1]
    logits = drive.logits(request)
    wanted = (
        range(len(token_ids) - 1) if request.params is EVERY_POSITION else range(len(request.prompt) - 1, len(expected))
    )
    assert set(wanted) <= set(logits), "a position has no logits"
    for position in logits:
        assert float((logits[position] - expected[position]).abs().max()) <= TOLERANCE, f"{position=}"
    behind_prompt = expected[len(request.prompt) - 1 :]
    assert len(request.output) == request.max_tokens
    assert request.output == behind_prompt.argmax(-1).tolist()
    best, second = behind_prompt.topk(2).values.unbind(-1)
    assert float((best - second).min()) > LEAST_GAP, "a tie: take another seed"


@dataclass
class Answer:
    """A request that ran by itself, in one chunk on fresh pages, and was judged."""

    prompt: list[int]
    output: list[int]
    logits: dict[int, torch.Tensor]

    def check(self, drive: Drive, request: Request) -> None:
        """Just the same in any company."""
        assert request.output == self.output
        for position, row in drive.logits(request).items():
            assert float((row - self.logits[position]).abs().max()) <= TOLERANCE, f"{position=}"


@cache
def alone(case: str, length: int, num_output: int) -> Answer:
    theirs, ours = tiny(case)
    request = make_request(length, num_output)
    drive = make_drive(ours, max_rows=MAX_MODEL_LEN)
    drive.run([request])
    judge(theirs, drive, request)
    return Answer(request.prompt, request.output, drive.logits(request))


def moved(drive: Drive, request: Request, answer: Answer) -> float:
    """The most that a logit is from what was judged."""
    return max(float((row - answer.logits[place]).abs().max()) for place, row in drive.logits(request).items())


def fork(answer: Answer, place: int) -> list[int]:
    """The first tokens of a prompt, and others behind them."""
    others = make_request(41, 0).prompt
    assert others[place] != answer.prompt[place]
    return answer.prompt[:place] + others[place : place + 6]


def preempt_after(drive: Drive, num_steps: int) -> None:
    """Take a sequence's pages after so many steps, as a neighbour would."""
    complete, steps = drive.scheduler.complete, count(1)

    def then_preempt(step: Any, token_ids: Any) -> None:
        complete(step, token_ids)
        if next(steps) == num_steps:
            drive.scheduler.preempt_last()

    drive.scheduler.complete = then_preempt
