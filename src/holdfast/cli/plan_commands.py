"""Commands that a plan prints: one that starts it, one that makes the plan again, each with a change if need be; no torch."""

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
"""Commands that a plan may be for."""
ONE_SEQUENCE = 1
"""Sequences of `holdfast chat`, and of `holdfast run` with one answer, unless --max-num-seqs says otherwise."""
STARTING = (
    *("revision", "dtype", "quantization", "quantized_embeddings", "quantization_ignore"),
    *("kv_cache_memory", "kv_cache_dtype", "kv_protected_layers", "kv_protected_dtype", "index_cache_dtype"),
    *("max_model_len", "max_num_batched_tokens", "page_tokens", "memory_utilization", "speculative"),
    *("pipeline_parallel_size", "nnodes", "tensor_parallel_sums"),
)
"""Options that a plan and a command share, in the order in which they are written; switches and sequences are apart."""


def start_command(
    request: PlanRequest, model: str | None, change: Alternative | None = None, purpose: Purpose = "serve"
) -> str | None:
    """A command that starts what is planned, with one change if need be; None if the change is another device."""
    asked = _asked(request, change, purpose)
    if asked is None or "gpu" in asked:
        return None
    asked = _rank_options(request) | asked
    device = ["--device", "cpu"] if request.target.kind == "cpu" else []
    words = [*_model_words(request, model), *device, *_option_words(asked)]
    launcher = launcher_words(request, asked)
    if launcher:
        return _shell([*launcher, "-m", "holdfast", "serve", *words, "--no-core-process"])
    return _shell(["holdfast", purpose, *words, *(["-p", "Hello"] if purpose == "run" else [])])


def launcher_words(request: PlanRequest, asked: Mapping[str, object]) -> list[str]:
    """What starts ranks on several nodes, on each of which it is typed; nothing if there is one."""
    sizes = (int(str(asked.get(name, 1))) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
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
    """A command that makes the same plan again, or the one that a change promises; None if plans have no such option."""
    asked = _asked(request, change, purpose)
    if asked is None:
        return None
    device: dict[str, object] = {}
    if request.target.kind == "cuda":
        device = {"gpu": request.target.key}
        if not request.target.key:
            device = {"memory": _size_words(request.target.total_bytes)}
    if "gpu" in asked:
        device = {"gpu": asked.pop("gpu")}
    # A plan that does not fit, and that is for nothing in particular, would become one for a chat.
    is_told = purpose != "serve" or (change is not None and not change.fits)
    words = ["holdfast", "plan", *(request.declared.typed or ([] if model is None else [model]))]
    options = device | _rank_options(request) | ({"for": purpose} if is_told else {}) | asked
    return _shell([*words, *_option_words(options)])


def _shell(words: Iterable[str]) -> str:
    """Words of a command as a shell reads them."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    """A word with letters that would end a line or move a cursor, as bash and zsh read it."""
    letters = (
        letter
        if letter.isprintable() and letter not in "\\'"
        else "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))
        for letter in word
    )
    return f"$'{''.join(letters)}'"


def _rank_options(request: PlanRequest) -> dict[str, object]:
    return {} if request.tensor_parallel_size == 1 else {"tensor_parallel_size": request.tensor_parallel_size}


def _asked(request: PlanRequest, change: Alternative | None, purpose: Purpose) -> dict[str, object] | None:
    """Options that are not at their default, with those of a change; None if a plan has no option for one of them."""
    names = (*STARTING, "enable_expert_parallel", "batch_invariant", "enforce_eager", "max_num_seqs")
    asked: dict[str, object] = {name: getattr(request.config, name) for name in names}
    asked = {name: value for name, value in asked.items() if value != _default(name)}
    if change is not None:
        if not {name for name, _ in change.settings} <= {*names, "gpu", "tensor_parallel_size"}:
            return None
        asked |= dict(change.settings)
    if purpose != "serve" and str(asked.get("max_num_seqs")) == str(ONE_SEQUENCE):
        del asked["max_num_seqs"]
    return {name: value for name, value in asked.items() if value != LEFT_OUT}


def _option_words(asked: Mapping[str, object]) -> list[str]:
    """Options as they are typed."""
    words: list[str] = []
    for name, value in asked.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True and value != "true":
            words.append(_typed(value))
    return words


def _size_words(num_bytes: int) -> str:
    """A size that reads back to the byte."""
    for unit in ("GiB", "MiB"):
        if num_bytes % UNITS[unit.lower()] == 0:
            return f"{num_bytes // UNITS[unit.lower()]}{unit}"
    return f"{num_bytes}B"


def _model_words(request: PlanRequest, model: str | None) -> list[str]:
    """The path or the name on the Hub as it was typed; of a model that is known by name alone, its name there."""
    if request.declared.typed:  # a config.json says nothing of where the weights are
        return ["MODEL"]
    if model is None:
        return []
    # A name may say that its weights are stored in fewer bits than those of the catalogue, which are planned.
    is_other = stored_as(model) is not None and request.declared.name in (*CATALOGUE, *SAME)
    is_here = Path(model).expanduser().exists() or locate_config(model, request.config.revision) is not None
    if is_here or (parse_hub_name(model) is not None and not is_other):
        return [model]
    return [SOURCES.get(request.declared.name, f"path/to/{request.declared.name}")]


def _typed(value: object) -> str:
    """A value as a person types it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _default(name: str) -> object:
    return EngineConfig.__dataclass_fields__[name].default
