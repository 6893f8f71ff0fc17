"""Quantized weights of earlier starts, in the user's cache: found by their source, bounded in size; no torch.

weights/ACTS-SOURCE/ in the cache folder, where ACTS is a digest of recipe, type, rank and plan, and SOURCE one of the files.
An error here is a line in the log, and the model loads from its source.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import HoldfastError, ModelError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import LoadPlan
from holdfast.loading.quantized.manifest import (
    VERSION,
    SourceIdentity,
    digest,
    identify_source,
    read_manifest,
    unsaved,
)
from holdfast.loading.quantized.source import QuantizedSource, open_quantized, plan_from_cache
from holdfast.loading.quantized.writer import plan_digest, remove_whole, sweep, whole_folder, write_weights
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.memory.cache_folder import private_folder
from holdfast.memory.sizes import format_bytes
from holdfast.observability.log import get_logger

if TYPE_CHECKING:
    from holdfast.quant.packed_weight import AnyWeight

MAX_CACHE_BYTES = 256 * 2**30
"""Size limit of the cache; the least recently used entry is evicted first."""
FREE_SHARE, FREE_BYTES = 20, 16 * 2**30
"""Free disk space to keep: 1/20 of the disk, but at most 16 GiB."""
_KEY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
log = get_logger(__name__)


def cache_folder() -> Path:
    """Return the folder of entries, made if absent. Only this user can write there, because its weights are trusted."""
    return private_folder("weights")


def cache_key(identity: SourceIdentity, plan: LoadPlan, mesh: Mesh = ALONE) -> str:
    """Return the name of an entry: a digest of the load and a digest of its source."""
    place = (0, 1) if mesh.is_alone else mesh
    acts = repr((VERSION, plan.recipe, plan.dtype, place, plan_digest(plan)))
    names = repr([file.name for file in identity.files])
    return f"{digest((acts + names).encode()).hex()[:16]}-{digest(repr(identity).encode()).hex()[:16]}"


@dataclass
class CacheSlot:
    """The cache entry of one load, with saved weights on a hit."""

    folder: Path
    plan: LoadPlan
    """Plan of the load from the source."""
    identity: SourceIdentity
    """Identity of the source before the load."""
    mesh: Mesh
    max_bytes: int = MAX_CACHE_BYTES
    hit: tuple[QuantizedSource, LoadPlan] | None = None
    """Saved weights and the plan that copies them; they replace the model's source and `plan`."""

    def discard(self, reason: object) -> None:
        """Remove a broken entry; the model then loads from its source."""
        if self.hit is not None:
            self.hit[0].close()
            self.hit = None
        log.warning("dropping cached weights and quantizing the model again: %s", reason)
        try:
            remove_whole(self.folder)
        except OSError as error:
            log.warning("%s could not be removed: %s", self.folder, error)

    def save(self, weights: Mapping[str, AnyWeight]) -> str | None:
        """Write the loaded weights for the next start; log and return the reason if that fails.

        If several processes start at once, only one writes.
        """
        try:
            sweep(self.folder.parent)
            if sweep(self.folder.parent, self.folder.name):
                log.info("another process is writing the same quantized weights")
                return None
            reason = self._no_room()
            if reason is None:
                with whole_folder(self.folder) as partial:
                    num_bytes = write_weights(partial, self.plan, weights, self.identity, self.mesh)
                log.info(
                    "saved quantized weights in %s (%s, the source has %s) for the next start",
                    self.folder,
                    format_bytes(num_bytes),
                    format_bytes(self.identity.num_bytes),
                )
        except FileExistsError:
            log.info("another process has just written the same quantized weights")
            return None
        except OSError as error:
            reason = f"{error.strerror or error}"
        if reason is not None:
            log.warning("quantized weights were not saved for the next start: %s", reason)
        return reason

    def _no_room(self) -> str | None:
        """Evict entries to make room; return the reason if there is still too little."""
        parent, needed = self.folder.parent, sum(spec.num_bytes for spec in self.plan.specs)
        if needed > self.max_bytes:
            return f"they have {format_bytes(needed)}, and the cache {format_bytes(self.max_bytes)}"
        disk = shutil.disk_usage(parent)
        if disk.free - needed < min(disk.total // FREE_SHARE, FREE_BYTES):
            return f"{format_bytes(needed)} are needed on a disk that has {format_bytes(disk.free)} left"
        trim_cache(parent, self.max_bytes - needed)
        return None


def find_cached(
    model: OpenModel,
    plan: LoadPlan,
    mesh: Mesh = ALONE,
    folder: Path | None = None,
    max_bytes: int = MAX_CACHE_BYTES,
) -> CacheSlot | str:
    """Return the cache slot of a load, with saved weights if valid ones match the source and the plan.

    Returns the reason if there is no slot: nothing is quantized, weights are dummies, or there is no cache.
    """
    if not any(move.scheme for move in plan.moves):
        return "nothing is quantized on load"
    reason = unsaved(plan.weights)
    if reason is not None:
        return reason
    try:
        identity = identify_source(model)
        if identity is None:
            return "weights are dummies"
        parent = cache_folder() if folder is None else folder
    except (OSError, HoldfastError) as error:
        log.warning("quantized weights are not cached: %s", error)
        return str(error)
    slot = CacheSlot(parent / cache_key(identity, plan, mesh), plan, identity, mesh, max_bytes)
    if os.path.isdir(slot.folder):
        _open(slot)
    else:
        _log_what_changed(slot)
    return slot


def _open(slot: CacheSlot) -> None:
    try:
        source = open_quantized(slot.folder)
    except ModelError as error:
        slot.discard(error)
        return
    slot.hit = (source, slot.plan)
    manifest = source.manifest
    change = slot.identity.change(manifest.source)
    if change is not None:
        slot.discard(f"the source changed: {change}")
        return
    was = (manifest.recipe, manifest.dtype, manifest.mesh, manifest.plan_digest)
    if was != (slot.plan.recipe, slot.plan.dtype, slot.mesh, plan_digest(slot.plan)):
        slot.discard(f"{MANIFEST_FILE} describes another load than the folder's name")
        return
    try:
        slot.hit = (source, plan_from_cache(slot.plan, source))
        os.utime(slot.folder / MANIFEST_FILE)
    except ModelError as error:
        slot.discard(error)
        return
    except OSError as error:
        log.info("%s cannot be marked as used: %s", slot.folder, error)
    log.info(
        "reading quantized weights of an earlier start from %s (%s)", slot.folder, format_bytes(manifest.num_bytes)
    )


def _log_what_changed(slot: CacheSlot) -> None:
    """Log how the source differs from that of a cached entry of the same load."""
    acts = slot.folder.name.partition("-")[0]
    others = [entry for entry in cache_entries(slot.folder.parent) if entry.folder.name.startswith(f"{acts}-")]
    if not others:
        return
    try:
        change = slot.identity.change(read_manifest(others[-1].folder / MANIFEST_FILE).source)
    except ModelError as error:
        change = str(error)
    log.info("cached weights have another source, so the model is quantized again: %s", change)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One saved load."""

    folder: Path
    num_bytes: int
    used_ns: int


def cache_entries(folder: Path) -> list[CacheEntry]:
    """List the entries of the cache, least recently used first."""
    entries: list[CacheEntry] = []
    try:
        folders = [path for path in folder.iterdir() if _KEY.fullmatch(path.name)]
    except OSError:
        return []
    for path in folders:
        try:
            statuses = {one.name: one.stat() for one in os.scandir(path)}
        except OSError:
            continue  # removed meanwhile
        used_ns = statuses[MANIFEST_FILE].st_mtime_ns if MANIFEST_FILE in statuses else 0
        entries.append(CacheEntry(path, sum(status.st_size for status in statuses.values()), used_ns))
    return sorted(entries, key=lambda entry: (entry.used_ns, entry.folder.name))


def trim_cache(folder: Path, max_bytes: int) -> int:
    """Remove entries until the rest has at most `max_bytes`, least recently used first and never one that is being read.

    Returns the number of removed bytes.
    """
    entries = cache_entries(folder)
    total = sum(entry.num_bytes for entry in entries)
    removed = 0
    for entry in entries:
        if total - removed <= max_bytes:
            break
        if _remove(entry):
            removed += entry.num_bytes
            log.info("removed %s of cached weights: %s", format_bytes(entry.num_bytes), entry.folder.name)
    return removed


def clear_cache(folder: Path | None = None) -> int:
    """Remove every entry that is not being read, and leftovers of dead processes; return the number of removed bytes."""
    folder = cache_folder() if folder is None else folder
    sweep(folder)
    return trim_cache(folder, -1)


def _remove(entry: CacheEntry) -> bool:
    try:
        return remove_whole(entry.folder)
    except OSError as error:
        log.warning("%s could not be removed: %s", entry.folder, error)
        return False
