"""`holdfast cache`: list or remove the cached quantized weights; no torch."""

import time
from typing import NamedTuple

from holdfast.cli.layout import Table, table_lines
from holdfast.cli.options import Given
from holdfast.cli.tables import show
from holdfast.cli.terminal import log_plainly, write_answer, write_line
from holdfast.errors import HoldfastError
from holdfast.loading.quantized.cache import CacheEntry, cache_entries, cache_folder, clear_cache
from holdfast.loading.quantized.manifest import ALONE, read_manifest
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.memory.sizes import format_bytes
from holdfast.models.settings import plain


class CacheOptions(NamedTuple):
    """Options of this command."""

    clear: bool


def cache(options: CacheOptions, engine: Given) -> None:
    """List the entries, or remove the unused ones."""
    clear_weights() if options.clear else list_weights()


def list_weights() -> None:
    """Print one line per entry, most recently used first; print the total to stderr."""
    folder = cache_folder()
    entries = cache_entries(folder)[::-1]
    if entries:
        show(table_lines(Table(tuple(map(_cells, entries)), right=(0,), wraps=(2, 1, 3))))
    write_line(f"{format_bytes(_sum(entries))} of quantized weights in {folder}")


def clear_weights() -> None:
    """Remove the entries that no process uses, and print their size."""
    log_plainly()
    folder = cache_folder()
    removed = format_bytes(clear_cache(folder))
    kept = _sum(cache_entries(folder))
    stays = f"; {format_bytes(kept)} stay, in use or not removable" if kept else ""
    write_answer(f"{removed} of quantized weights removed from {folder}{stays}\n")


def _sum(entries: list[CacheEntry]) -> int:
    return sum(entry.num_bytes for entry in entries)


def _cells(entry: CacheEntry) -> tuple[str, str, str, str, str]:
    """Return size, scheme, source, last use and name."""
    size, name = format_bytes(entry.num_bytes), entry.folder.name
    try:
        manifest = read_manifest(entry.folder / MANIFEST_FILE)
    except HoldfastError:
        return size, "unreadable", "the next start that needs it makes it again", "", name
    recipe, mesh, source = manifest.recipe, manifest.mesh, manifest.source
    scheme = manifest.dtype if recipe.scheme is None else f"{recipe.scheme.name}, {manifest.dtype}"
    rank = "" if mesh == ALONE else f", rank {mesh.rank} of {mesh.num_ranks}"
    first, more = "".join(plain(file.name) for file in source.files[:1]), len(source.files) - 1
    files = f"{first} and {more} more" if more > 0 else first
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_ns / 1e9))
    return size, f"{scheme}{rank}", f"of {files} ({format_bytes(source.num_bytes)})", f"used {used}", name
