"""The cache of quantized weights: a second start gets the bytes of the first, from sound entries of the same source alone."""

import errno
import logging
import os
import shutil
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ModelFormatError
from holdfast.kernels.native_library import native_library
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.quantized import cache as quantized_cache
from holdfast.loading.quantized import writer as quantized_writer
from holdfast.loading.quantized.cache import (
    CacheSlot,
    cache_entries,
    cache_folder,
    cache_key,
    clear_cache,
    find_cached,
    trim_cache,
)
from holdfast.loading.quantized.manifest import identify_source
from holdfast.loading.sources.dummy import DummySource
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.memory.cache_folder import CACHE_VARIABLE
from holdfast.memory.ledger import Ledger
from holdfast.quant.weight_schemes import FP8, FP8_TENSOR, INT8, MXFP4, WeightRecipe
from loading.saved_weights import (
    FILES,
    PARAMETERS,
    RECIPES,
    bits,
    loaded,
    open_written,
    plan_of,
    planes_of,
    read_all,
    write_model,
)

FILE = "model-00001.safetensors"
Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "m")


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    """Take the C kernels from the cache of this machine: in a cache of its own each test would compile them."""
    native_library()


@pytest.fixture
def cache(tmp_path, monkeypatch, caplog):
    """The cache folder, on a disk with room."""
    caplog.set_level(logging.INFO, logger="holdfast")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(2**40, 0, 2**40))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def slot_of(*arguments, **options) -> CacheSlot:
    slot = find_cached(*arguments, **options)
    assert isinstance(slot, CacheSlot), slot
    return slot


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("recipe", RECIPES, ids=[str(recipe.scheme and recipe.scheme.name) for recipe in RECIPES])
def test_cache_slot_second_start_hits_the_saved_entry(cache, model, caplog, recipe):
    plan = plan_of(model, recipe)
    weights = loaded(plan)
    first = slot_of(model, plan)
    assert first.hit is None
    assert first.save(weights) is None
    assert "for the next start" in caplog.text
    second = slot_of(open_written(model.path), plan_of(model, recipe))
    assert second.hit is not None
    source, again = second.hit
    assert (again.weights, again.recipe) == (plan.weights, plan.recipe)
    assert read_all(source, again, 300_000) == {name: bits(plane) for name, plane in planes_of(plan, weights).items()}
    source.close()
    assert "reading quantized weights of an earlier start from" in caplog.text
    assert names(cache) == [cache_key(first.identity, plan)]


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES, ids=[str(recipe.scheme and recipe.scheme.name) for recipe in RECIPES])
@pytest.mark.usefixtures("poison")
def test_load_weights_from_cache_matches_the_first_load(cache, model, recipe):
    """The whole way: read, quantize, keep; then copy what was kept, without quantizing, to the bit."""
    for name in FILES:
        fill_with_noise(model.path / name)
    model = open_written(model.path)
    plan, ledger = plan_of(model, recipe), Ledger()
    first = load_weights(plan, model.source, "cpu", ledger, lambda done, total: None).weights
    assert slot_of(model, plan).save(first) is None
    slot = slot_of(model, plan)
    assert slot.hit is not None
    source, again = slot.hit
    second = load_weights(again, source, "cpu", Ledger(), lambda done, total: None).weights
    source.close()
    model.source.close()
    was, now = ({name: bits(plane) for name, plane in planes_of(plan, weights).items()} for weights in (first, second))
    assert was == now
    assert len(set(was["layers.0.experts.weight"])) > 10, "there is something in it"


def fill_with_noise(path: Path) -> None:
    """Sound bf16 values in the place of the zeros."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    values = torch.randn((len(data) - end) // 2, generator=torch.Generator().manual_seed(end)).to(torch.bfloat16)
    path.write_bytes(data[:end] + bits(values))


def test_cache_slot_hits_after_the_model_moved(cache, model, tmp_path):
    plan = plan_of(model)
    slot_of(model, plan).save(loaded(plan))
    model.path.rename(tmp_path / "elsewhere")
    slot = slot_of(open_written(tmp_path / "elsewhere"), plan)
    assert slot.hit is not None
    slot.hit[0].close()


def test_cache_slot_misses_for_another_recipe_dtype_or_rank(cache, model):
    plan = plan_of(model)
    slot_of(model, plan).save(loaded(plan))
    identity = identify_source(model)
    assert identity is not None
    others = [
        (plan_of(model, WeightRecipe(INT8)), ALONE),
        (plan_of(model, WeightRecipe(MXFP4)), ALONE),
        (plan_of(model, WeightRecipe(FP8_TENSOR)), ALONE),
        (plan_of(model, WeightRecipe(FP8, "none")), ALONE),
        (plan_of(model, WeightRecipe(FP8, "head", ("*.qkv*",))), ALONE),
        (plan_of(model, dtype="float16"), ALONE),
        (plan, Mesh(0, 2)),
        (plan, Mesh(1, 2)),
        (replace(plan, moves=(replace(plan.moves[0], tensor="else"), *plan.moves[1:])), ALONE),
    ]
    assert all(slot_of(model, *other).hit is None for other in others)
    keys = {cache_key(identity, *other) for other in [(plan, ALONE), *others]}
    assert len(keys) == 1 + len(others)
    assert cache_key(identity, plan) in keys


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def other_header(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'": {"dtype"', b'" :{"dtype"', 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def longer_header(path: Path) -> None:
    data = path.read_bytes()
    num_bytes = int.from_bytes(data[:8], "little")
    path.write_bytes((num_bytes + 1).to_bytes(8, "little") + data[8 : 8 + num_bytes] + b" " + data[8 + num_bytes :])


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model-b.safetensors", touch, "model-b.safetensors was written at another time"),
        ("model-a.safetensors", other_header, "model-a.safetensors has another header"),
        ("model-a.safetensors", longer_header, "model-a.safetensors has "),
        ("config.json", lambda path: path.write_text("{}"), "config.json was changed"),
    ],
)
def test_cache_slot_changed_source_misses_and_saves_anew(cache, model, caplog, file, change, words):
    plan = plan_of(model)
    slot_of(model, plan).save(loaded(plan))
    change(model.path / file)
    changed = open_written(model.path)
    slot = slot_of(changed, plan_of(changed))
    assert slot.hit is None
    assert f"cached weights have another source, so the model is quantized again: {words}" in caplog.text
    assert slot.save(loaded(slot.plan)) is None
    assert len(names(cache)) == 2
    hit = slot_of(changed, plan_of(changed)).hit
    assert hit is not None
    hit[0].close()


def test_cache_save_source_changed_during_load_misses_later(cache, model):
    plan = plan_of(model)
    slot = slot_of(model, plan)
    touch(model.path / "model-a.safetensors")
    slot.save(loaded(plan))
    assert slot_of(model, plan).hit is None


def test_cache_slot_damaged_entry_is_dropped_and_rewritten(cache, model, caplog):
    plan = plan_of(model)
    slot = slot_of(model, plan)
    slot.save(loaded(plan))
    os.truncate(slot.folder / FILE, 1000)
    again = slot_of(model, plan)
    assert again.hit is None
    assert f"dropping cached weights and quantizing the model again: {FILE}: it has 1000 bytes" in caplog.text
    assert names(cache) == []
    assert again.save(loaded(plan)) is None
    hit = slot_of(model, plan).hit
    assert hit is not None
    hit[0].close()


def test_cache_slot_drops_an_entry_damaged_while_reading(cache, model):
    plan = plan_of(model)
    first = slot_of(model, plan)
    first.save(loaded(plan))
    path = first.folder / FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    slot = slot_of(model, plan)
    assert slot.hit is not None
    with raises_code("weights.damaged", ModelFormatError) as error:
        load_weights(slot.hit[1], slot.hit[0], "cpu", Ledger(), lambda done, total: None, allow_nonfinite=True)
    slot.discard(error.value)
    assert slot.hit is None
    assert names(cache) == []


def test_cache_slot_entry_with_another_key_is_dropped(cache, model, caplog):
    plans = [plan_of(model), plan_of(model, WeightRecipe(INT8))]
    slots = [slot_of(model, plan) for plan in plans]
    slots[0].save(loaded(plans[0]))
    slots[0].folder.rename(slots[1].folder)
    assert slot_of(model, plans[1]).hit is None
    assert "describes another load than the folder's name" in caplog.text
    slots[0].save(loaded(plans[0]))
    manifest = slots[0].folder / MANIFEST_FILE
    manifest.write_text(manifest.read_text().replace('"mtime_ns": 1', '"mtime_ns": 2'))
    assert slot_of(model, plans[0]).hit is None
    assert "the source changed: model-a.safetensors was written at another time" in caplog.text


def test_find_cached_without_use_returns_the_reason(cache, model):
    assert find_cached(model, plan_of(model, WeightRecipe())) == "nothing is quantized on load"
    dummy = replace(model, source=DummySource(PARAMETERS, "bfloat16"))
    assert find_cached(dummy, plan_of(model)) == "weights are dummies"
    plan = plan_of(model)
    odd = replace(plan.weights[2], scheme=replace(FP8, name="own"))
    reason = find_cached(model, replace(plan, weights=(odd,)))
    assert isinstance(reason, str)
    assert "stored as own" in reason
    assert not cache.exists()


def test_cache_save_short_of_disk_room_writes_nothing(cache, model, monkeypatch, caplog):
    plan = plan_of(model)
    slot = slot_of(model, plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(2**40, 2**39, 16 * 2**30 + 1000))
    reason = slot.save(loaded(plan))
    assert reason is not None
    assert "are needed on a disk that has 16.00 GiB left" in reason
    assert reason in caplog.text
    assert names(cache) == []


def test_cache_save_on_a_full_disk_leaves_nothing(cache, model, monkeypatch, caplog):
    plan = plan_of(model)
    write, num_written = quantized_writer.write_fully, []

    def full(file, data) -> None:
        num_written.append(len(data))
        if sum(num_written) > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    monkeypatch.setattr(quantized_writer, "write_fully", full)
    assert slot_of(model, plan).save(loaded(plan)) == "No space left on device"
    assert len(num_written) > 1
    assert "not saved for the next start: No space left on device" in caplog.text
    assert names(cache) == []


def test_cache_unwritable_is_a_logged_reason_not_an_error(cache, model, monkeypatch, caplog, tmp_path):
    plan = plan_of(model)
    slot = slot_of(model, plan)

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.loading.quantized.writer.os.mkdir", refuse)
        assert slot.save(loaded(plan)) == "Permission denied"
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    reason = find_cached(model, plan)
    assert isinstance(reason, str)
    assert "Not a directory" in reason
    assert "quantized weights are not cached" in caplog.text


def test_cache_folder_writable_by_others_is_refused(cache, tmp_path, monkeypatch):
    assert cache_folder() == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(OSError, match="can be written by others; set HOLDFAST_CACHE"):
        cache_folder()
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "holdfast" / "weights"
    monkeypatch.setenv(CACHE_VARIABLE, "~absent-user/x")
    with pytest.raises(OSError, match="names no folder here"):
        cache_folder()


def test_cache_save_by_four_threads_leaves_one_sound_entry(cache, model):
    plan = plan_of(model)
    weights = loaded(plan)
    slots = [slot_of(model, plan) for _ in range(4)]
    results: list[str | None] = []
    threads = [threading.Thread(target=lambda slot=slot: results.append(slot.save(weights))) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [None] * 4, "what another one writes is kept all the same"
    assert names(cache) == [slots[0].folder.name]
    hit = slot_of(model, plan).hit
    assert hit is not None
    assert read_all(*hit, 10**6) == {name: bits(plane) for name, plane in planes_of(plan, weights).items()}
    hit[0].close()


def save_under(model, recipe, used_ns: int, **options) -> CacheSlot:
    plan = plan_of(model, recipe)
    slot = slot_of(model, plan, **options)
    assert slot.hit is None
    assert slot.save(loaded(plan)) is None
    os.utime(slot.folder / MANIFEST_FILE, ns=(used_ns, used_ns))
    return slot


def test_cache_trim_drops_the_least_recently_used_entry(cache, model, caplog):
    slots = {
        name: save_under(model, WeightRecipe(scheme), used)
        for used, (name, scheme) in enumerate({"fp8": FP8, "int8": INT8, "tensor": FP8_TENSOR}.items(), 1)
    }
    entries = cache_entries(cache)
    assert [entry.folder for entry in entries] == [slot.folder for slot in slots.values()]
    hit = slot_of(model, slots["fp8"].plan).hit
    assert hit is not None
    hit[0].close()
    assert [entry.folder for entry in cache_entries(cache)][-1] == slots["fp8"].folder, "it has just been used"
    bound = sum(entry.num_bytes for entry in entries)
    save_under(model, WeightRecipe(MXFP4), 10, max_bytes=bound)
    assert not slots["int8"].folder.exists()
    assert slots["fp8"].folder.exists()
    assert slots["tensor"].folder.exists()
    assert "of cached weights: " in caplog.text
    reason = slot_of(model, plan_of(model, WeightRecipe(FP8, "none")), max_bytes=1000).save({})
    assert reason is not None
    assert "the cache 1000 B" in reason


def test_trim_cache_keeps_an_entry_in_use(cache, model):
    slot = save_under(model, WeightRecipe(FP8), 1)
    other = save_under(model, WeightRecipe(INT8), 2)
    hit = slot_of(model, slot.plan).hit
    assert hit is not None
    os.utime(slot.folder / MANIFEST_FILE, ns=(1, 1))
    assert trim_cache(cache, 0) > 0
    assert names(cache) == [slot.folder.name]
    hit[0].close()
    assert not other.folder.exists()
    assert trim_cache(cache, 10**9) == 0
    assert clear_cache() > 0
    assert names(cache) == []


def test_trim_cache_stops_at_the_bound_and_returns_freed_bytes(cache, model):
    """The least recently used of three first, one that is read is passed over, and the sum of removed bytes is returned."""
    schemes = {1: FP8, 2: INT8, 3: FP8_TENSOR}
    slots = [save_under(model, WeightRecipe(scheme), used) for used, scheme in schemes.items()]
    sizes = [entry.num_bytes for entry in cache_entries(cache)]
    assert trim_cache(cache, sum(sizes)) == 0
    assert len(names(cache)) == 3
    hit = slot_of(model, slots[0].plan).hit
    assert hit is not None
    os.utime(slots[0].folder / MANIFEST_FILE, ns=(1, 1))
    assert trim_cache(cache, sum(sizes) - 1) == sizes[1]
    assert names(cache) == sorted(slot.folder.name for slot in (slots[0], slots[2]))
    hit[0].close()
    assert trim_cache(cache, 0) == sizes[0] + sizes[2]
    assert names(cache) == []


@pytest.mark.parametrize(("total", "kept_free"), [(2**40, 16 * 2**30), (100 * 2**30, 5 * 2**30)])
def test_cache_save_keeps_the_smaller_of_two_bounds_free(cache, model, monkeypatch, total, kept_free):
    plan = plan_of(model)
    needed = sum(spec.num_bytes for spec in plan.specs)
    for free, is_kept in ((kept_free + needed - 1, False), (kept_free + needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Disk(total, 0, free))
        assert (slot_of(model, plan).save(loaded(plan)) is None) == is_kept
        assert len(names(cache)) == is_kept


def test_cache_slot_entry_of_another_rank_misses(cache, model):
    """Its folder was renamed: the same recipe, type and weights, and other rows of the checkpoint."""
    plan = plan_of(model)
    ranks = [slot_of(model, plan, Mesh(rank, 2)) for rank in range(2)]
    assert ranks[0].save(loaded(plan)) is None
    ranks[0].folder.rename(ranks[1].folder)
    assert slot_of(model, plan, Mesh(1, 2)).hit is None
    assert names(cache) == []


def test_cache_slot_logs_the_change_since_the_latest_entry(cache, model, caplog):
    """Two sources before this one: what is said of the newest is what a person did since."""
    plan, path = plan_of(model), model.path / "model-a.safetensors"
    for used in (1, 2):
        os.utime(path, ns=(used, used))
        slot = slot_of(open_written(model.path), plan)
        slot.save(loaded(plan))
        os.utime(slot.folder / MANIFEST_FILE, ns=(used, used))
    os.utime(model.path / "model-b.safetensors", ns=(7, 7))
    caplog.clear()
    assert slot_of(open_written(model.path), plan).hit is None
    assert "model-b.safetensors was written at another time" in caplog.text
    assert "model-a" not in caplog.text


def test_clear_cache_keeps_unrelated_files(cache, model):
    save_under(model, WeightRecipe(FP8), 1)
    (cache / "notes.txt").touch()
    (cache / ".x.1.partial").mkdir()
    (cache / ".x.1.partial" / FILE).touch()
    clear_cache()
    assert names(cache) == ["notes.txt"]
    assert quantized_cache.cache_entries(cache / "nowhere") == []
