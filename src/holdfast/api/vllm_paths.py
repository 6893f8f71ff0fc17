"""Import paths of vLLM under the name of this package: a table, and the finder that Python asks when no file is there; no torch.

`from holdfast.sampling_params import SamplingParams` finds no file, so Python asks the finders of sys.meta_path. Ours comes
last and knows the modules of the table. Their names are looked up in their homes on first use. A name or a module that vLLM
has and this version has not raises ImportAbsentError, which is an ImportError in one sentence.
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from holdfast.errors import ImportAbsentError, NameAbsentError
from holdfast.request.vllm_names import ABSENT_MODULES, ABSENT_NAMES, NOT_HERE

PACKAGE = "holdfast"
_ARGS, _ASYNC, _ENGINE = "holdfast.cli.engine_args", "holdfast.api.async_llm", "holdfast.api.llm_engine"
_OUTPUTS, _PROMPTS = "holdfast.request.outputs", "holdfast.engine.admission"
_POOLING = "holdfast.request.pooling"
_PARAMS, _FORMS = "holdfast.request.sampling_params", "holdfast.request.structured"
_PROMPT_NAMES = {"PromptType": f"{_PROMPTS}:Prompt", "TextPrompt": _PROMPTS, "TokensPrompt": _PROMPTS}

NAMES: Mapping[str, str] = {
    "AsyncEngineArgs": _ARGS,
    "AsyncLLMEngine": f"{_ASYNC}:AsyncLLM",
    "EngineArgs": _ARGS,
    "LLMEngine": _ENGINE,
    "PromptType": f"{_PROMPTS}:Prompt",
}
"""What vLLM's package itself has beside the names that are ours too, and where it is here."""

MODULES: Mapping[str, Mapping[str, str]] = {
    "sampling_params": {
        "SamplingParams": _PARAMS,
        "RequestOutputKind": _PARAMS,
        "StructuredOutputsParams": f"{_FORMS}:StructuredOutputs",
        "GuidedDecodingParams": f"{_FORMS}:StructuredOutputs",
    },
    "pooling_params": {"PoolingParams": _POOLING},
    "outputs": {
        "CompletionOutput": _OUTPUTS,
        "RequestOutput": _OUTPUTS,
        "EmbeddingOutput": _POOLING,
        "EmbeddingRequestOutput": _POOLING,
        "PoolingOutput": _POOLING,
        "PoolingRequestOutput": _POOLING,
        "ScoringOutput": _POOLING,
        "ScoringRequestOutput": _POOLING,
    },
    "logprobs": {"Logprob": _OUTPUTS},
    "sequence": {"Logprob": _OUTPUTS, "RequestMetrics": _OUTPUTS},
    "inputs": _PROMPT_NAMES,
    "inputs.data": _PROMPT_NAMES,
    "engine.arg_utils": {"AsyncEngineArgs": _ARGS, "EngineArgs": _ARGS},
    "engine.llm_engine": {"LLMEngine": _ENGINE},
    "engine.async_llm_engine": {"AsyncLLMEngine": f"{_ASYNC}:AsyncLLM"},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": {"AsyncLLM": _ASYNC},
    "v1.engine.llm_engine": {"LLMEngine": _ENGINE},
    "entrypoints": {},
    "entrypoints.llm": {"LLM": "holdfast.api.llm"},
    "entrypoints.openai": {},
    "entrypoints.openai.api_server": {},
    "utils": {"FlexibleArgumentParser": _ARGS, "random_uuid": _ARGS},
    "utils.argparse_utils": {"FlexibleArgumentParser": _ARGS},
    "logger": {"init_logger": "holdfast.observability.log:get_logger"},
    "version": {"__version__": PACKAGE},
    "distributed": {"cleanup_dist_env_and_memory": __name__},
    "distributed.parallel_state": {"cleanup_dist_env_and_memory": __name__},
}
"""Modules of vLLM that programs import: their names, and where each is here, as module or module:name."""

_PROGRAMS = {
    "entrypoints.openai.api_server": "from holdfast.cli.app import serve_main\n\nserve_main()\n",
}
"""Modules that are run with python -m, and what they run."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage between two models, as vLLM's programs do. There is no Ray to shut down."""
    gc.collect()


def look_up(name: str, homes: Mapping[str, str]) -> object:
    """The object behind a name of a table."""
    home, _, other = homes[name].partition(":")
    return getattr(import_module(home), other or name)


def absent(name: str) -> str | None:
    """What to do without a name or a module of vLLM, such as lora.request or LoRARequest; None where vLLM has no such name either."""
    parts = name.split(".")
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return ABSENT_NAMES.get(parts[-1]) or next(
        (ABSENT_MODULES[path] for path in beginnings if path in ABSENT_MODULES), None
    )


class VllmPaths(MetaPathFinder):
    """Finds the modules of the table; asked only where no file is found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table, or of a name that a from-import looks for; None for what nobody knows."""
        root, _, name = fullname.partition(".")
        if root != PACKAGE or not name:
            return None
        module, _, last = name.rpartition(".")
        if name in MODULES:
            # Packages, so that Python asks here for names that a from-import does not find in them.
            return ModuleSpec(fullname, _Loader(name), origin=__file__, is_package=name not in _PROGRAMS)
        if last in MODULES.get(module, {}):
            return ModuleSpec(fullname, _Loader(name))
        do = absent(name)
        if do is not None:
            raise ImportAbsentError(f"{fullname} was imported", NOT_HERE, do)
        return None


class _Loader(InspectLoader):
    """Fills a module of the table, or puts an object of it in the place of a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_source(self, fullname: str) -> str:
        """What python -m runs."""
        return _PROGRAMS.get(self._name, "")

    def is_package(self, fullname: str) -> bool:
        return self._name in MODULES and self._name not in _PROGRAMS

    def exec_module(self, module: ModuleType) -> None:
        homes = MODULES.get(self._name)
        if homes is None:
            # A from-import out of a package with a file of its own (distributed) takes what stands in sys.modules.
            owner, _, name = self._name.rpartition(".")
            sys.modules[module.__name__] = look_up(name, MODULES[owner])  # type: ignore[assignment]
            return
        module.__doc__ = f"Names of vllm.{self._name}, from their homes in {PACKAGE}."
        module.__all__ = sorted(homes)  # type: ignore[attr-defined]

        def find(name: str) -> object:
            if name in homes:
                return look_up(name, homes)
            do = None if name.startswith("_") else absent(f"{self._name}.{name}")
            if do is not None:
                raise NameAbsentError(f"{module.__name__}.{name} was asked", NOT_HERE, do)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Let imports find the table, once."""
    if not any(isinstance(finder, VllmPaths) for finder in sys.meta_path):
        sys.meta_path.append(VllmPaths())
