"""A folder that is there whole or not at all: written beside its place under a hidden name, then renamed; no torch.

Whoever writes or reads such a folder holds a lock on it, which ends with the process. So what a killed process left behind
can be told from what another is writing, and nobody removes what somebody reads.
"""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL_ENDING = ".partial"


def locked(folder: Path, is_shared: bool) -> int | None:
    """A descriptor that locks the folder until it is closed; None where somebody else's lock is in the way.

    Readers share, writers and removers do not. OSError: there is no such folder, or its file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes its place when the block ends; an error in the block leaves nothing.

    Where a folder with something in it has taken the place meanwhile, FileExistsError is raised and that one stays.
    """
    partial, descriptor = _new_partial(final)
    try:
        yield partial
        sync_folder(partial)
        try:
            os.rename(partial, final)
        except OSError as error:
            if final.is_dir():
                raise FileExistsError(error.errno, "another process was faster", str(final)) from error
            raise
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _new_partial(final: Path) -> tuple[Path, int | None]:
    """A new hidden folder and the lock on it; None where there are no locks, and so nobody sweeps."""
    while True:
        partial = _hidden_beside(final)
        os.mkdir(partial)
        try:
            descriptor = locked(partial, is_shared=False)
        except FileNotFoundError:
            continue
        except OSError:
            return partial, None
        if descriptor is not None and partial.exists():
            return partial, descriptor
        # Somebody who sweeps was between the two lines: it is gone, or will be.
        if descriptor is not None:
            os.close(descriptor)


def sweep(parent: Path, name: str | None = None) -> bool:
    """Remove what processes that are gone have left of a folder of this name, or of any; whether one is being written now."""
    is_written = False
    pattern = "*" if name is None else glob.escape(name)
    for partial in parent.glob(f".{pattern}.*{PARTIAL_ENDING}"):
        with suppress(OSError):
            descriptor = locked(partial, is_shared=False)
            if descriptor is None:
                is_written = True
                continue
            shutil.rmtree(partial, ignore_errors=True)
            os.close(descriptor)
    return is_written


def remove_whole(folder: Path) -> bool:
    """Remove a folder so that nobody ever sees a part of it; whether it is gone, which it is not while somebody reads it."""
    try:
        descriptor = locked(folder, is_shared=False)
    except FileNotFoundError:
        return True
    if descriptor is None:
        return False
    try:
        hidden = _hidden_beside(folder)
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    finally:
        os.close(descriptor)
    return True


def sync_folder(folder: Path) -> None:
    """Names in the folder outlast a machine that fails now."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_beside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL_ENDING}"
