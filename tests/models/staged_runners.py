"""Ranks of a pipeline in lock-step threads over tiny models of some layers, and what they compute of the same steps."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import torch

from distributed.lock_step import LockStep
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.models.compressed_readers import HEAVY, OVERLAPPED, SLIDING
from runner.rank_runs import Built, build_rank, plan_rank, steps_of, write_model

WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
PROJECTED = {"do_layer_norm_before": False, "word_embed_proj_dim": 40}


def _compressed(layer_types: list[str], num_tables: int) -> dict[str, Any]:
    """DeepSeek-V4 of such layers, the first of which take their experts from tables."""
    num_layers = len(layer_types)
    experts = ["hash_moe"] * num_tables + ["moe"] * (num_layers - num_tables)
    return {"num_hidden_layers": num_layers, "layer_types": layer_types, "mlp_layer_types": experts}


STAGED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "llama_tied": ("llama_tied", {"num_hidden_layers": 3}),
    "qwen2": ("qwen2", {"num_hidden_layers": 3, "num_key_value_heads": 4}),
    "gemma3": ("gemma3", {"num_hidden_layers": 4, "layer_types": WINDOWS}),
    "opt": ("opt", {"num_hidden_layers": 3}),
    "opt, norms last": ("opt", {"num_hidden_layers": 3} | PROJECTED),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0, 2]}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4, "layer_types": WINDOWS}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 3}),
    "v4_flash": ("v4_flash", _compressed([SLIDING, SLIDING, OVERLAPPED, HEAVY, OVERLAPPED, HEAVY], num_tables=3)),
    "v4_pro": ("v4_pro", _compressed([HEAVY, HEAVY, OVERLAPPED, HEAVY, OVERLAPPED], num_tables=2)),
}
"""Models with a layer or more for each of three stages. A stage may have no layer of a group, or of one alone: of windows,
and of entries, which a stage of V4 may lack."""


def find_model(base: Path, family: str) -> Path:
    """One of those above, written where it is not there yet."""
    name, changes = STAGED[family]
    return write_model(base / family, name, **changes)


def num_layers(family: str) -> int:
    return STAGED[family][1]["num_hidden_layers"]


def cuts_of(family: str, num_stages: int) -> list[tuple[int, int]]:
    """Nearly equal ones, the longer ones first."""
    ends = [-(-num_layers(family) * (stage + 1) // num_stages) for stage in range(num_stages)]
    return list(zip([0, *ends], ends, strict=False))


class StagedRanks:
    """All ranks of a mesh. What was built stays where it is; `run` is one function on all of them at once."""

    def __init__(self, path: Path, ranks: SequenceABC[Mesh], **options: Any) -> None:
        self.meshes = tuple(ranks)
        if self.meshes[0] != ALONE:
            options |= {"pipeline_parallel_size": self.meshes[0].num_stages}
        needs = plan_rank(path, options, self.meshes[0])[-1].exchange_needs
        self.steps = LockStep(self.meshes, needs)
        self.built: list[Built] = self.steps.run(
            lambda mesh, exchange: build_rank(path, options, mesh, None if mesh == ALONE else exchange)
        )

    def run(self, function: Callable[[Built], Any]) -> list[Any]:
        return self.steps.run(lambda mesh, _: function(self.built[mesh.rank]))

    def release(self) -> None:
        for one in self.built:
            one.build.release()


@torch.inference_mode()
def stage_logits(built: Built) -> list[torch.Tensor]:
    """For each step the logits that are wanted, of a rank's share of the vocabulary; none before the last stage."""
    found, runner = [], built.runner
    for step, rows in steps_of(runner):
        batch = runner.buffers.fill(step, rows, step.num_tokens, len(rows))
        hidden_RH = runner.model.hidden(batch, runner.backend.plan(batch))
        if not built.mesh.is_last_stage:
            assert len(hidden_RH) == 0, "a stage before the last has hidden states"
        elif rows:
            found.append(runner.model.logits(hidden_RH).clone())
        if built.exchange is not None:
            built.exchange.end_step()
    return found


def pages_by_group(built: Built) -> list[list[int]]:
    """Those that the steps write."""
    sequences = {id(item.sequence): item.sequence for step, _ in steps_of(built.runner) for item in step.scheduled}
    groups = range(len(built.runner.groups))
    return [[page for one in sequences.values() for page in one.tables[index]] for index in groups]
