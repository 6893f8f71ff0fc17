"""Published figures: config.json of well-known models as their makers released them, from published.json beside this file; no torch.

The file has only what a plan needs. `like` names an earlier model whose settings hold unless `config` has others.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

Config = Mapping[str, object]
FILE = Path(__file__).with_suffix(".json")


class Published(NamedTuple):
    """One model."""

    repository: str
    """Owner and name on the Hugging Face Hub: the source of the figures."""
    config: Config
    same: tuple[str, ...] = ()
    """Names of other releases with the same figures."""
    short: str = ""
    """What people call it, where the repository's name is too long for a table."""

    @property
    def name(self) -> str:
        return self.short or self.repository.partition("/")[2]


def read_published(file: Path = FILE) -> tuple[Published, ...]:
    """Every model of a file, in its order."""
    found: dict[str, Published] = {}
    for row in json.loads(file.read_text(encoding="utf-8")):
        base = found[row["like"]].config if "like" in row else {}
        config = _merged(base, row.get("config", {}))
        model = Published(row["repository"], config, tuple(row.get("same", ())), row.get("name", ""))
        found[model.name] = model
    return tuple(found.values())


def _merged(base: Config, own: Config) -> Config:
    """Settings with others in their place; nested objects are merged too."""
    merged = dict(base)
    for key, value in own.items():
        old = merged.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        merged[key] = _merged(cast("Config", old), cast("Config", value)) if both else value
    return merged


PUBLISHED: tuple[Published, ...] = read_published()
"""Every model that can be planned by name, by family."""
