"""The public surface keeps every name that it had: tests/public_surface.json is the list."""

import json
from pathlib import Path

import pytest

from public_surface import collect

KEPT = json.loads(Path(__file__).with_name("public_surface.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def surface() -> dict[str, object]:
    return collect()


def lost(kept: object, now: object, place: str) -> list[str]:
    """List what was there and is missing or different now; more names than before are fine."""
    if isinstance(kept, dict):
        assert isinstance(now, dict), place
        missing = [f"{place}/{key}" for key in kept if key not in now]
        return missing + [gone for key in kept if key in now for gone in lost(kept[key], now[key], f"{place}/{key}")]
    if isinstance(kept, list):
        assert isinstance(now, list), place
        return [f"{place}: {item}" for item in kept if item not in now]
    return [] if kept == now else [f"{place}: {kept} became {now}"]


@pytest.mark.parametrize("part", sorted(KEPT))
def test_public_surface_keeps_every_name(surface: dict[str, object], part: str) -> None:
    assert lost(KEPT[part], surface[part], part) == []


def test_lost_names_and_changed_defaults_are_listed() -> None:
    kept = {"flags": ["--a", "--b"], "options": {"x": "1", "y": "2"}}
    now = {"flags": ["--b", "--c"], "options": {"x": "3"}}
    assert lost(kept, now, "") == ["/flags: --a", "/options/y", "/options/x: 1 became 3"]
