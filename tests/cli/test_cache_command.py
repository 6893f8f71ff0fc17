"""`holdfast cache`: a line for each load that is kept, and its removal."""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.cli_models import Here
from holdfast.distributed.mesh import Mesh
from holdfast.kernels.native_library import native_library
from holdfast.loading.quantized.cache import CacheSlot, cache_entries, find_cached
from holdfast.loading.quantized.source import open_quantized
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.memory.cache_folder import CACHE_VARIABLE
from holdfast.memory.sizes import format_bytes
from holdfast.quant.weight_schemes import FP8, INT8, WeightRecipe
from loading.saved_weights import loaded, plan_of, write_model

DAY = 86400


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    """Take the C kernels from the cache of this machine: in a cache of its own each test would compile them."""
    native_library()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of entries, on a disk with room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(2**40, 0, 2**40))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture
def kept(tmp_path: Path, cache: Path) -> list[CacheSlot]:
    """Two loads: the whole in fp8, which was used last, and one rank of two in int8."""
    model = write_model(tmp_path / "m")
    slots = []
    for scheme, mesh, days in ((FP8, Mesh(0, 1), 20000), (INT8, Mesh(1, 2), 19000)):
        plan = plan_of(model, WeightRecipe(scheme))
        slot = find_cached(model, plan, mesh)
        assert isinstance(slot, CacheSlot), slot
        assert slot.save(loaded(plan)) is None
        os.utime(slot.folder / MANIFEST_FILE, (days * DAY + DAY // 2, days * DAY + DAY // 2))
        slots.append(slot)
    return slots


def test_cache_lists_most_recently_used_entry_first(here: Here, cache: Path, kept: list[CacheSlot]) -> None:
    ended = here("cache")
    assert ended.code == 0
    whole, rank = ended.out.splitlines()
    sizes = {entry.folder.name: entry.num_bytes for entry in cache_entries(cache)}
    for line, slot in ((whole, kept[0]), (rank, kept[1])):
        assert line.lstrip().startswith(format_bytes(sizes[slot.folder.name]))
        assert line.endswith(slot.folder.name)
        assert "of model-a.safetensors and 1 more (2." in line
    assert re.search(r"fp8, bfloat16 .* used 2024-10-0[345] \d\d:\d\d ", whole)
    assert re.search(r"int8, bfloat16, rank 1 of 2 .* used 2022-01-0[789] ", rank)
    assert ended.err == f"{format_bytes(sum(sizes.values()))} of quantized weights in {cache}\n"


def test_cache_empty_prints_zero_bytes(here: Here, cache: Path) -> None:
    ended = here("cache")
    assert (ended.code, ended.out, ended.err) == (0, "", f"0 B of quantized weights in {cache}\n")
    assert here("cache", "--clear").out == f"0 B of quantized weights removed from {cache}\n"


def test_cache_unreadable_entry_is_listed_and_cleared(here: Here, cache: Path, kept: list[CacheSlot]) -> None:
    (kept[0].folder / MANIFEST_FILE).write_text("{")
    (kept[1].folder / MANIFEST_FILE).unlink()
    lines = here("cache").out.splitlines()
    assert [line.split()[2] for line in lines] == ["unreadable"] * 2
    assert "0 B" not in here("cache", "--clear").out
    assert cache_entries(cache) == []


def test_cache_clear_reports_size_and_keeps_entries_in_use(here: Here, cache: Path, kept: list[CacheSlot]) -> None:
    sizes = {entry.folder.name: format_bytes(entry.num_bytes) for entry in cache_entries(cache)}
    read, other = (slot.folder.name for slot in kept)
    source = open_quantized(kept[0].folder)
    ended = here("cache", "--clear")
    assert ended.code == 0
    words = f"{sizes[other]} of quantized weights removed from {cache}; {sizes[read]} stay, in use or not removable\n"
    assert ended.out == words
    source.close()
    assert here("cache", "--clear").out == f"{sizes[read]} of quantized weights removed from {cache}\n"
    assert list(cache.iterdir()) == []


def test_cache_refuses_folder_writable_by_others(here: Here, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    for arguments in (("cache",), ("cache", "--clear")):
        ended = here(*arguments)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.count("\n") == 1
        assert "can be written by others; set HOLDFAST_CACHE to a folder of your own" in ended.err


def test_cache_help_has_examples(here: Here) -> None:
    shown = here("cache", "--help").out
    assert "holdfast cache --clear" in shown
    assert "Did you mean --clear?" in here("cache", "--clera").err
