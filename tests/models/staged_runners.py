"""Runners of all ranks of a tiny model in lock-step threads, built as an engine builds them, and steps that all of them run."""

import random
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import torch

from distributed.lock_step import LockStep
from holdfast.cache.groups import CacheGroup
from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.loading.model_files import open_model
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.build import BuiltRunner, build_runner
from loading.tiny_models import save_tiny
from models.tiny_experts import EXPERT_MODELS, make_random, save_tiny_experts
from models.tiny_latents import V3, YARN

SMALL = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_tokens": 4, "max_model_len": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}


def save_model(family: str, folder: Path) -> None:
    """One of those below."""
    if family == "deepseek_v3":
        save_tiny_experts(make_random("DeepseekV3", V3 | HEADS | {"rope_parameters": YARN}), folder)
    elif family == "qwen3_moe":
        prefix, settings = EXPERT_MODELS["qwen3_moe not normalized, dense layers"]
        save_tiny_experts(make_random(prefix, settings | {"num_experts_per_tok": 2}), folder)
    else:
        overrides: dict[str, Any] = {} if family == "gemma3" else {"num_hidden_layers": 3}
        save_tiny(family, folder, **overrides)


LAYERS = {"llama": 3, "gemma3": 4, "opt": 3, "opt_350m_like": 3, "qwen2": 3, "qwen3_moe": 3, "deepseek_v3": 3}
"""How many each has."""


class Ranks:
    """All ranks of one model. What was built stays where it is; `run` calls a function on each."""

    def __init__(self, folder: Path, ranks: SequenceABC[Mesh], **options: Any) -> None:
        self.meshes = tuple(ranks)
        model = open_model(str(folder), "auto")
        model.source.close()
        self.steps = LockStep(self.meshes, ExchangeNeeds(2**20, 64, model.spec.vocab_size, 2**20))
        self._folder = folder
        self._options = SMALL | {"pipeline_parallel_size": self.meshes[0].num_stages} | options
        self.built: list[BuiltRunner] = self.steps.run(self._build)

    def _build(self, mesh: Mesh, exchange: Any) -> BuiltRunner:
        model = open_model(str(self._folder), "auto")
        config = EngineConfig.from_options(**self._options)
        try:
            connect = None if mesh == ALONE else lambda plan, ledger: exchange
            return build_runner(config, model, lambda done, total: None, mesh=mesh, connect=connect)
        finally:
            model.source.close()

    def run(self, function: Any) -> list[Any]:
        """function(built, mesh, exchange) on every rank."""
        by_rank = dict(zip(self.meshes, self.built, strict=True))
        return self.steps.run(lambda mesh, exchange: function(by_rank[mesh], mesh, exchange))

    def release(self) -> None:
        for one in self.built:
            one.release()


def make_steps(groups: SequenceABC[CacheGroup], vocab_size: int, seed: int = 0) -> list[LiveStep]:
    """Prompts in chunks beside one another, then tokens one by one: of three sequences, on pages of their own."""
    dice = random.Random(seed)
    sequences, next_page = [], 0
    for number, length in enumerate((29, 17, 5)):
        tables = []
        for group in groups:
            num_pages = group.pages_for(length)
            tables.append(list(range(next_page, next_page + num_pages)))
            next_page += num_pages
        token_ids = [dice.randrange(3, vocab_size) for _ in range(length)]
        params = SamplingParams(temperature=0.0)
        sequences.append(Sequence(number, token_ids, length, params, 0, max_tokens=1, tables=tables, slot=number))
    long, middle, short = sequences
    parts = [
        [(long, 0, 9), (short, 0, 3)],
        [(long, 9, 26), (middle, 0, 13), (short, 3, 4)],
        [(long, 26, 27), (middle, 13, 14), (short, 4, 5)],
        [(middle, 14, 15)],
        [(long, 27, 29), (middle, 15, 17)],
    ]
    return [LiveStep(tuple(ScheduledSequence.of(one, start, end - start) for one, start, end in own)) for own in parts]


@torch.inference_mode()
def row_logits(built: BuiltRunner, mesh: Mesh, seed: int = 0) -> list[torch.Tensor]:
    """Logits of every row of every step, or of a rank's share; nothing before the last stage."""
    runner, found = built.runner, []
    for step in make_steps(runner.groups, runner.vocab_size, seed):
        hidden_TH = runner.hidden_rows(step)
        if mesh.is_last_stage:
            parts = [runner.row_logits(part_RH).clone() for part_RH in hidden_TH.split(PROMPT_ROWS)]
            found.append(torch.cat(parts))
    return found


def pages_of(built: BuiltRunner) -> list[dict[str, torch.Tensor]]:
    """By layer: all planes."""
    return [built.storage.planes(index) for index in range(len(built.storage.spec.layers))]


def pages_by_group(groups: SequenceABC[CacheGroup]) -> list[list[int]]:
    """Those that the steps write."""
    sequences = {id(item.sequence): item.sequence for step in make_steps(groups, 100) for item in step.scheduled}
    return [[page for one in sequences.values() for page in one.tables[index]] for index in range(len(groups))]
