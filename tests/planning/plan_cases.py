"""What tests of plans share: models by name, targets of any size, and a change applied as a person would."""

from dataclasses import replace
from functools import cache

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.memory.devices import GPUS
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.alternatives import Alternative
from holdfast.planning.resolve import PlanRequest
from holdfast.planning.target import Target, gpu_target

GIB = 1024**3
H200 = gpu_target(GPUS["h200"])
A100 = gpu_target(GPUS["a100-80g"])
RTX4090 = gpu_target(GPUS["rtx4090"])
HOST = Target("cpu", "cpu", 16 * GIB, 16 * GIB, 0, "a dummy")
RANKS = "tensor_parallel_size"
NUMBERS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_near_tokens")


@cache
def declared(name: str) -> DeclaredModel:
    return declare_config(CATALOGUE[name], name)


def plan_request(name: str = "Qwen3-8B", target: Target = H200, **options: object) -> PlanRequest:
    """A request; options that no config has go beside it."""
    beside = {key: options.pop(key) for key in ("mesh", "staging") if key in options}
    beside |= {"mesh": Mesh(tensor_size=options.pop(RANKS))} if RANKS in options else {}
    return PlanRequest(EngineConfig.from_options(**options), declared(name), target, **beside)  # type: ignore[arg-type]


def changed(request: PlanRequest, alternative: Alternative) -> PlanRequest:
    """The request with the advice taken."""
    for option, value in alternative.settings:
        request = _changed(request, option, value)
    return request


def _changed(request: PlanRequest, option: str, value: str) -> PlanRequest:
    if option == "gpu":
        config = replace(request.config, memory_limit=None)
        return replace(request, target=gpu_target(GPUS[value]), config=config, staging=None)
    if option == "quantization":
        return replace(request, config=request.config.with_quantization(value))
    if option == RANKS:
        return replace(request, mesh=Mesh(tensor_size=int(value)))
    typed: object = value or None
    if option in NUMBERS:
        typed = int(value)
    elif option == "memory_utilization":
        typed = float(value)
    elif option == "enforce_eager":
        typed = value == "true"
    return replace(request, config=replace(request.config, **{option: typed}))
