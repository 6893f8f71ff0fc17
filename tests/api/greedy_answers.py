"""Greedy tokens of a prompt: what LLM answers, and what transformers generates."""

from typing import Any

import torch

from holdfast.api.llm import LLM
from holdfast.request.sampling_params import SamplingParams


def answer_greedily(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return so many tokens for each prompt, whatever ends a text."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def generate_greedily(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return so many tokens of a model of transformers."""
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()
