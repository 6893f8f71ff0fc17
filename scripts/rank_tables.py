"""Rewrite the tables of plans in docs/ranks.md: python scripts/rank_tables.py"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.config import EngineConfig
from holdfast.memory.devices import GPUS
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.fit import RunnerPlan
from holdfast.planning.ranks import worst_request
from holdfast.planning.target import gpu_target
from model_tables import filled, table

DOCUMENT = Path(__file__).parent.parent / "docs" / "ranks.md"
HEADINGS = "weights a rank", "exchange and pipeline", "workspace"
DENSE, ENTRIES = "Qwen3-32B", ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")
Shares = dict[str, dict[str, Any]]
"""Options by label."""
DENSE_SHARES: Shares = {
    "one GPU": {},
    "tensor 2, `reduce`": {"tensor_parallel_size": 2},
    "tensor 2, `exact`": {"tensor_parallel_size": 2, "tensor_parallel_sums": "exact", "batch_invariant": True},
    "tensor 4": {"tensor_parallel_size": 4},
    "tensor 2 x 2 stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "4 stages": {"pipeline_parallel_size": 4},
    "tensor 8": {"tensor_parallel_size": 8},
}
ENTRY_SHARES: dict[str, Shares] = {
    "DeepSeek-V4-Flash": {
        "tensor 2": {"tensor_parallel_size": 2},
        "2 stages": {"pipeline_parallel_size": 2},
        "tensor 4": {"tensor_parallel_size": 4},
        "tensor 2 x 2 stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "tensor 8": {"tensor_parallel_size": 8},
        "tensor 8, whole experts": {"tensor_parallel_size": 8, "enable_expert_parallel": True},
    },
    "DeepSeek-V4-Pro": {
        "tensor 8": {"tensor_parallel_size": 8},
        "tensor 4 x 2 stages": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        "tensor 8 x 2 stages": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
        "tensor 8 x 2 stages, whole experts": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 2,
            "enable_expert_parallel": True,
        },
        "tensor 4 x 4 stages": {"tensor_parallel_size": 4, "pipeline_parallel_size": 4},
    },
}


def plan_of(model: DeclaredModel, **options: Any) -> RunnerPlan:  # noqa: ANN401 those of a config
    """Return the plan of the rank that limits all, on H200s."""
    _, plans = worst_request(EngineConfig(**options), model, gpu_target(GPUS["h200"]))
    assert plans is not None, f"{model.name} does not fit with {options}"
    return plans.plans[plans.worst]


def sizes_of(plan: RunnerPlan) -> tuple[str, ...]:
    """Return the cells under HEADINGS."""

    def held(*owners: str) -> int:
        return sum(term.num_bytes for term in plan.memory.terms if term.owner.partition("/")[0] in owners)

    exchanged = held("exchange", "pipeline", "collectives") / 2**20
    return f"{held('weights') / 2**30:.2f} GiB", f"{exchanged:,.0f} MiB", f"{held('workspace') / 2**30:.2f} GiB"


def dense_rows() -> Iterable[tuple[str, ...]]:
    model = declare_config(CATALOGUE[DENSE], DENSE)
    for label, options in DENSE_SHARES.items():
        plan = plan_of(model, **options)
        yield label, *sizes_of(plan), f"{plan.kv_tokens:,}"


def entry_rows() -> Iterable[tuple[str, ...]]:
    for name in ENTRIES:
        model = declare_config(CATALOGUE[name], name)
        for label, options in ENTRY_SHARES[name].items():
            plans = [plan_of(model, **options, kv_cache_dtype=kept) for kept in ("auto", "fp8")]
            tokens = (f"{plan.kv_tokens:,}" for plan in plans)
            longest = f"{plans[0].resolved.limits.max_model_len:,}"
            yield f"{name.removeprefix('DeepSeek-')}, {label}", *sizes_of(plans[0]), *tokens, longest


def tables() -> dict[str, str]:
    """Return each table by the mark before it."""
    tokens = "KV tokens in bfloat16", "in fp8", "longest context"
    return {
        "plans": table((f"{DENSE} bfloat16, H200s at 0.9", *HEADINGS, "KV tokens"), list(dense_rows())),
        "entry plans": table(("DeepSeek-V4 as stored, H200s at 0.9", *HEADINGS, *tokens), list(entry_rows())),
    }


def written(text: str) -> str:
    """Return the document with current tables."""
    return filled(text, tables())


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
