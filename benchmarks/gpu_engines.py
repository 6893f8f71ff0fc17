"""Engines with dummy weights for the GPU benchmarks, and the tensors that they hold."""

import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from dummy_models import TINY as TINY
from dummy_models import few_layers, tiny_settings, write_dummy_model
from gpu_records import REHEARSAL_VARIABLE

import holdfast.engine.build as engine_build
from holdfast.api.llm import LLM
from holdfast.engine.admission import TokensPrompt
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.models.catalogue import find_model
from holdfast.models.layer_stack import LayerStack
from holdfast.runner.build import BuiltRunner
from holdfast.runner.runner import Runner

OWNERS = (
    (r"\bworkspace\b", "workspace"),
    (r"\b_?planes\b", "kv pages"),
    (r"\bbackend\b", "attention"),
    (r"^buffers\b", "inputs"),
    (r"^sampler\b", "sampling"),
    (r"rotary|\b_rope\b", "rope"),
    (r"^model\b", "weights"),
)
"""Parts of a runner and their owners in the plan, the most specific first."""
REHEARSED_BYTES = "1536MiB"
"""KV memory of a rehearsed engine, so that many fit one GPU at once."""


class OpenEngine(NamedTuple):
    """An engine and the memory account of its start."""

    llm: LLM
    built: BuiltRunner

    @property
    def runner(self) -> Runner:
        return self.built.runner

    @property
    def decoder(self) -> LayerStack:
        model = self.built.runner.model
        assert isinstance(model, LayerStack), f"{model} is no decoder"
        return model

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def core(self) -> EngineCore:
        core = self.llm.engine.core
        assert isinstance(core, EngineCore), f"{core} runs in another process"
        return core


def open_engine(
    name: str,
    folder: Path,
    tiny: bool,
    device: str,
    shapes: Mapping[str, Any] | None = None,
    **settings: Any,  # noqa: ANN401
) -> OpenEngine:
    """Open an engine with a catalogue model's shapes; `settings` go to LLM, `shapes` replace some of the model's."""
    shapes, is_rehearsed = {**(tiny_settings(name) if tiny else {}), **(shapes or {})}, REHEARSAL_VARIABLE in os.environ
    if is_rehearsed:
        shapes |= few_layers({**find_model(name)[1], **shapes})
        settings = {key: value for key, value in settings.items() if not key.startswith("memory_")}
        settings["kv_cache_memory"] = REHEARSED_BYTES
    opened = open_at(write_dummy_model(folder, name, **shapes), device, load_format="dummy", **settings)
    if is_rehearsed:
        sys.exit()
    return opened


def open_at(path: Path, device: str, **settings: Any) -> OpenEngine:  # noqa: ANN401
    """Open an engine with the weights of a path."""
    kept: list[BuiltRunner] = []
    build_runner = engine_build.build_runner

    def keep(*arguments: Any, **named: Any) -> BuiltRunner:  # noqa: ANN401
        kept.append(build_runner(*arguments, **named))
        return kept[0]

    engine_build.build_runner = keep
    try:
        llm = LLM(str(path), device=device, on_progress=lambda done, total: None, **settings)
    finally:
        engine_build.build_runner = build_runner
    return OpenEngine(llm, kept[0])


def prompts(dice: Random, lengths: list[int], vocab_size: int) -> list[TokensPrompt]:
    """Return prompts of these lengths, all with different tokens."""
    return [{"prompt_token_ids": [dice.randrange(vocab_size) for _ in range(length)]} for length in lengths]


IN_TURN = re.compile(r"(^|\.)_(collected|flights)\b")
"""Paths of the steps in flight: each has other buffers than the one before, in turn."""


def tensors_of(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Return every tensor reachable from an object, by its shortest path."""
    waiting: deque[tuple[str, object]] = deque([("", root)])
    seen: set[int] = set()
    while waiting:
        path, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield path, thing
            continue
        waiting.extend((f"{path}{step}".lstrip("."), part) for step, part in _parts(thing))


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Mapping):
        yield from ((f"[{key}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    elif type(thing).__module__.startswith("holdfast."):
        names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        names += getattr(thing, "__dict__", {})
        yield from ((f".{name}", getattr(thing, name)) for name in names if hasattr(thing, name))


def owner_of(path: str) -> str:
    """Return a tensor's owner, by its path in the runner."""
    return next((owner for pattern, owner in OWNERS if re.search(pattern, path)), "other")


def storages_by_owner(runner: Runner, device_type: str) -> dict[str, dict[int, int]]:
    """Return address and bytes of every device storage under a runner; the first matching rule gives its owner."""
    order = [owner for _, owner in OWNERS] + ["other"]
    owners: dict[int, str] = {}
    sizes: dict[int, int] = {}
    for path, tensor in tensors_of(runner):
        if tensor.device.type != device_type or tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        address, owner = storage.data_ptr(), owner_of(path)
        sizes[address] = storage.nbytes()
        owners[address] = min(owner, owners.get(address, owner), key=order.index)
    found: dict[str, dict[int, int]] = {}
    for address, owner in owners.items():
        found.setdefault(owner, {})[address] = sizes[address]
    return found


def pointers(runner: Runner) -> dict[str, tuple[int, int]]:
    """Return the address of every tensor under a runner, and of the storage that it views."""
    return {path: (tensor.data_ptr(), tensor.untyped_storage().data_ptr()) for path, tensor in tensors_of(runner)}


def moved(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return tensors that moved, and new ones in new memory; new views of old memory are fine."""
    known = {storage for _, storage in before.values()}
    return [
        path
        for path, place in after.items()
        if (before[path] != place if path in before else place[1] not in known) and not IN_TURN.search(path)
    ]
