"""The user's cache folder of Holdfast: its path, and a check that no other user can write to it; no torch."""

import os
from pathlib import Path

CACHE_VARIABLE = "HOLDFAST_CACHE"


def cache_path() -> Path:
    """Return the folder's path, even if it does not exist."""
    root = os.environ.get(CACHE_VARIABLE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "holdfast")
    try:
        return Path(root).expanduser()
    except RuntimeError as error:
        raise OSError(f"{root} names no folder here; set {CACHE_VARIABLE} to a folder of your own") from error


def private_folder(name: str = "") -> Path:
    """Make and return the folder, or one inside it. It must be private: files in it are trusted, some executed."""
    folder = cache_path() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} can be written by others; set {CACHE_VARIABLE} to a folder of your own")
    return folder
