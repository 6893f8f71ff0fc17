"""vLLM's import paths below `holdfast` (data/vllm_paths.json), and their meta path finder; no torch.

`from holdfast.sampling_params import SamplingParams` finds no file, so Python calls the finders of sys.meta_path. Ours comes
last and knows the modules of the table; their names are imported on first use. A name or module that only vLLM has raises
ImportAbsentError.
"""

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, resources
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from holdfast.errors import ImportAbsentError, NameAbsentError
from holdfast.request.vllm_names import ABSENT_MODULES, ABSENT_NAMES

PACKAGE = "holdfast"
_TABLE = json.loads(resources.files(PACKAGE).joinpath("data", "vllm_paths.json").read_text(encoding="utf-8"))
NAMES: Mapping[str, str] = _TABLE["names"]
"""Names that only vLLM's package has, with their homes: a module, or module:name."""
HOMES: Mapping[str, str] = _TABLE["own_names"] | NAMES
"""Homes of all public names of this package."""
MODULES: Mapping[str, Mapping[str, str]] = _TABLE["modules"]
"""vLLM modules that programs import, each with the homes of its names."""
_PROGRAMS: Mapping[str, str] = _TABLE["programs"]
"""Source of the modules for python -m."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage between two models, as vLLM's programs do. There is no Ray to shut down."""
    gc.collect()


def look_up(name: str, homes: Mapping[str, str]) -> object:
    """Import the object that the table lists under a name."""
    home, _, other = homes[name].partition(":")
    return getattr(import_module(home), other or name)


def absent(name: str) -> str | None:
    """Return advice for an unsupported vLLM name such as LoRARequest; None if vLLM has no such name."""
    parts = name.split(".")
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return ABSENT_NAMES.get(parts[-1]) or next(
        (ABSENT_MODULES[path] for path in beginnings if path in ABSENT_MODULES), None
    )


class VllmPaths(MetaPathFinder):
    """Finds modules of the table for which Python found no file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table, or of a name of a from-import; None if unknown."""
        root, _, name = fullname.partition(".")
        if root != PACKAGE or not name:
            return None
        module, _, last = name.rpartition(".")
        if name in MODULES:
            # As a package, so that a from-import calls this finder for missing names.
            return ModuleSpec(fullname, _Loader(name), origin=__file__, is_package=name not in _PROGRAMS)
        if last in MODULES.get(module, {}):
            return ModuleSpec(fullname, _Loader(name))
        advice = absent(name)
        if advice is not None:
            raise ImportAbsentError("api.absent_name", name=fullname, advice=advice)
        return None


class _Loader(InspectLoader):
    """Fills a module of the table, or replaces a module by an object of the table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_source(self, fullname: str) -> str:
        """Return the source for python -m."""
        return _PROGRAMS.get(self._name, "")

    def is_package(self, fullname: str) -> bool:
        return self._name in MODULES and self._name not in _PROGRAMS

    def exec_module(self, module: ModuleType) -> None:
        homes = MODULES.get(self._name)
        if homes is None:
            # A from-import of a package with its own file (distributed) reads sys.modules.
            owner, _, name = self._name.rpartition(".")
            sys.modules[module.__name__] = look_up(name, MODULES[owner])  # type: ignore[assignment]
            return
        module.__doc__ = f"Names of vllm.{self._name}, from their homes in {PACKAGE}."
        module.__all__ = sorted(homes)  # type: ignore[attr-defined]

        def find(name: str) -> object:
            if name in homes:
                return look_up(name, homes)
            advice = None if name.startswith("_") else absent(f"{self._name}.{name}")
            if advice is not None:
                raise NameAbsentError("api.absent_name", name=f"{module.__name__}.{name}", advice=advice)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Install the finder. Idempotent."""
    if not any(isinstance(finder, VllmPaths) for finder in sys.meta_path):
        sys.meta_path.append(VllmPaths())
