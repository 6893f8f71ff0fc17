"""Commands that a plan prints: one starts it, one repeats the plan; each with an optional change; no torch."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Literal

from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import planned_nodes
from holdfast.loading.hub.names import parse_hub_name
from holdfast.loading.locate import locate_config
from holdfast.memory.sizes import UNITS
from holdfast.models.catalogue import CATALOGUE, SAME, SOURCES, stored_as
from holdfast.planning.alternatives import LEFT_OUT, Alternative
from holdfast.planning.resolve import PlanRequest

Purpose = Literal["chat", "run", "serve"]
PURPOSES: tuple[Purpose, ...] = ("chat", "run", "serve")
"""Commands that can start a plan."""
ONE_SEQUENCE = 1
"""Sequences that `holdfast chat`, and `holdfast run` with one answer, use by default."""
STARTING = (
    *("revision", "dtype", "quantization", "quantized_embeddings", "quantization_ignore"),
    *("packed_weights", "packed_activations"),
    *("kv_cache_memory", "kv_cache_dtype", "kv_protected_layers", "kv_protected_dtype", "index_cache_dtype"),
    *("kv_near_tokens", "kv_key_scale"),
    *("max_model_len", "max_num_batched_tokens", "page_tokens", "memory_utilization", "speculative"),
    *("state_snapshots", "snapshot_tokens"),
    *("pipeline_parallel_size", "nnodes", "tensor_parallel_sums"),
)
"""Options with values that `plan` and other commands share, in output order."""


def start_command(
    request: PlanRequest, model: str | None, change: Alternative | None = None, purpose: Purpose = "serve"
) -> str | None:
    """Return the command that starts the plan, with one change; None if the change is another device."""
    options = _changed_options(request, change, purpose)
    if options is None or "gpu" in options:
        return None
    options = _rank_options(request) | options
    device = ["--device", "cpu"] if request.target.kind == "cpu" else []
    arguments = [*_model_arguments(request, model), *device, *_as_arguments(options)]
    launcher = launcher_arguments(request, options)
    if launcher:
        return _shell([*launcher, "-m", "holdfast", "serve", *arguments, "--no-core-process"])
    return _shell(["holdfast", purpose, *arguments, *(["-p", "Hello"] if purpose == "run" else [])])


def launcher_arguments(request: PlanRequest, options: Mapping[str, object]) -> list[str]:
    """Return the torchrun arguments of each node; empty for one node."""
    sizes = (int(str(options.get(name, 1))) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    num_ranks, nnodes = prod(sizes), request.config.nnodes
    if nnodes is None and request.target.kind == "cpu":
        return []
    counts = Counter(planned_nodes(num_ranks, nnodes))
    if len(counts) == 1:
        return []
    num_local = str(counts[0]) if len(set(counts.values())) == 1 else "ITS_RANKS"
    nodes = ["torchrun", "--nnodes", str(len(counts)), "--node-rank", "NODE", "--nproc-per-node", num_local]
    return [*nodes, "--master-addr", "FIRST_NODE", "--master-port", "29500"]


def plan_command(
    request: PlanRequest, model: str | None, change: Alternative | None = None, purpose: Purpose = "serve"
) -> str | None:
    """Return the command that repeats this plan, with a change if given; None if `plan` has no option for it."""
    options = _changed_options(request, change, purpose)
    if options is None:
        return None
    device: dict[str, object] = {}
    if request.target.kind == "cuda":
        device = {"gpu": request.target.key}
        if not request.target.key:
            device = {"memory": _size_text(request.target.total_bytes)}
    if "gpu" in options:
        device = {"gpu": options.pop("gpu")}
    # --for is needed: otherwise a plan that does not fit becomes one for a chat.
    has_purpose = purpose != "serve" or (change is not None and not change.fits)
    words = ["holdfast", "plan", *(request.declared.typed or ([] if model is None else [model]))]
    typed = device | _rank_options(request) | ({"for": purpose} if has_purpose else {}) | options
    return _shell([*words, *_as_arguments(typed)])


def _shell(words: Iterable[str]) -> str:
    """Quote arguments for a shell."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    """Escape control characters as bash and zsh read them."""
    letters = (
        letter
        if letter.isprintable() and letter not in "\\'"
        else "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))
        for letter in word
    )
    return f"$'{''.join(letters)}'"


def _rank_options(request: PlanRequest) -> dict[str, object]:
    return {} if request.tensor_parallel_size == 1 else {"tensor_parallel_size": request.tensor_parallel_size}


def _changed_options(request: PlanRequest, change: Alternative | None, purpose: Purpose) -> dict[str, object] | None:
    """Return non-default options, with a change's options; None if `plan` lacks one of them."""
    names = (*STARTING, "enable_expert_parallel", "batch_invariant", "enforce_eager", "max_num_seqs")
    options: dict[str, object] = {name: getattr(request.config, name) for name in names}
    options = {
        name: value for name, value in options.items() if value != EngineConfig.__dataclass_fields__[name].default
    }
    if change is not None:
        if not {name for name, _ in change.settings} <= {*names, "gpu", "tensor_parallel_size"}:
            return None
        options |= dict(change.settings)
    if purpose != "serve" and str(options.get("max_num_seqs")) == str(ONE_SEQUENCE):
        del options["max_num_seqs"]
    return {name: value for name, value in options.items() if value != LEFT_OUT}


def _as_arguments(options: Mapping[str, object]) -> list[str]:
    """Write options as arguments."""
    words: list[str] = []
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True and value != "true":
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words


def _size_text(num_bytes: int) -> str:
    """Format a size so that it reads back exactly."""
    for unit in ("GiB", "MiB"):
        if num_bytes % UNITS[unit.lower()] == 0:
            return f"{num_bytes // UNITS[unit.lower()]}{unit}"
    return f"{num_bytes}B"


def _model_arguments(request: PlanRequest, model: str | None) -> list[str]:
    """Return the model as typed, or the Hub name of a catalogue model."""
    if request.declared.typed:  # a config.json does not locate the weights
        return ["MODEL"]
    if model is None:
        return []
    # The name may be a release with fewer bits than the catalogue's.
    is_other = stored_as(model) is not None and request.declared.name in (*CATALOGUE, *SAME)
    is_other &= not request.declared.release
    is_here = Path(model).expanduser().exists() or locate_config(model, request.config.revision) is not None
    if is_here or (parse_hub_name(model) is not None and not is_other):
        return [model]
    if request.declared.release:
        return [f"path/to/{request.declared.name}-{request.declared.release}"]
    return [SOURCES.get(request.declared.name, f"path/to/{request.declared.name}")]
