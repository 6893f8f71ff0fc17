"""data_table: tables that the server reads from data files of the package; no torch."""

import json
import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def data_table(name: str) -> dict[str, Any]:
    """Read a TOML or JSON file of `holdfast/data` once."""
    text = resources.files("holdfast").joinpath("data", name).read_text("utf-8")
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)
