"""Requests for plans: well-known models on GPUs that need not be there."""

from typing import Any

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.loading.declared import open_declared
from holdfast.memory.devices import find_gpu
from holdfast.planning.resolve import PlanRequest
from holdfast.planning.target import Target, gpu_target, memory_target


def plan_request(model: str = "Qwen3-8B", gpu: str = "h200", memory: str | None = None, **options: Any) -> PlanRequest:
    """A request; `tensor_parallel_size` stands beside the config's options."""
    mesh = Mesh(tensor_size=options.pop("tensor_parallel_size", 1))
    target: Target = gpu_target(find_gpu(gpu)) if memory is None else memory_target(memory)
    return PlanRequest(EngineConfig(**options), open_declared(model), target, mesh)
