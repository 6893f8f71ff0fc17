"""Saves final weights in files that load without quantizing: atomic folders, under locks; no torch until a write.

Writers and readers lock the folder, and the lock ends with the process. So leftovers of a killed process differ from a
folder that is being written, and no process removes a folder that another one reads.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import LoadPlan
from holdfast.loading.quantized.manifest import (
    Manifest,
    PlaneFile,
    SourceIdentity,
    digest,
    identify_source,
    manifest_text,
    unsaved,
)
from holdfast.loading.sources.files import MANIFEST_FILE, SETTINGS_FILES
from holdfast.loading.sources.safetensors import TORCH_DTYPES, file_inside
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    import torch

    from holdfast.quant.packed_weight import AnyWeight

MAX_FILE_BYTES = 4 * 2**30
"""Most bytes of the planes in one file; a larger plane gets its own file."""
CHUNK_BYTES = 16 * 2**20
"""Bytes per step of checking, writing and copying from a GPU; writing needs no other memory."""
MAX_COPIED_BYTES = 512 * 2**20
STORED_DTYPES = {torch_name: name for name, torch_name in reversed(list(TORCH_DTYPES.items()))}
"""Names of the format by torch's name; bytes are U8."""
Progress = Callable[[int, int], None]


def save_quantized(
    folder: Path,
    model: OpenModel,
    plan: LoadPlan,
    weights: Mapping[str, AnyWeight],
    mesh: Mesh = ALONE,
    on_progress: Progress = lambda done, total: None,
    planned: SourceIdentity | None = None,
) -> int:
    """Write a complete model: weights, settings, tokenizer. Return the bytes of its weights.

    `planned` is the source's identity from `refuse_saving`, before the load; it must not have changed since.
    """
    found = refuse_saving(folder, model, plan)
    identity = found if planned is None else planned
    final = folder.absolute()
    try:
        sweep(final.parent, final.name)
        with whole_folder(final) as partial:
            copy_settings(model.path, partial)
            _refuse_changed(folder, model, identity)  # after the copy, so the settings match the weights
            return write_weights(partial, plan, weights, identity, mesh, on_progress)
    except FileExistsError as error:
        raise _cannot_save(folder, "another process has just written there", "Name a new folder") from error
    except OSError as error:
        raise _cannot_save(folder, str(error.strerror or error), "Name a writable folder with free space") from error


def refuse_saving(folder: Path, model: OpenModel, plan: LoadPlan) -> SourceIdentity:
    """Refuse a folder that cannot be written, before anything is loaded; return the identity of the source."""
    needed = sum(spec.num_bytes for spec in plan.specs)
    reason, fix = unsaved(plan.weights), "Leave the option out"
    identity = None if reason else identify_source(model)
    if reason is None and identity is None:
        reason = "dummy weights are not saved"
    if reason is None and model.kind == "gguf":
        reason, fix = (
            "a GGUF file has no config.json and no tokenizer.json to go with the weights",
            "Save from a folder",
        )
    if reason is None and not any(move.scheme for move in plan.moves):
        reason, fix = "nothing is quantized on load", _nothing_to_save(model, plan)
    try:
        if reason is None and os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            reason, fix = "the folder is not empty", "Name a new folder"
        if reason is None and not folder.absolute().parent.is_dir():
            reason, fix = "its parent folder does not exist", "Make it first"
        if reason is None and (free := shutil.disk_usage(folder.absolute().parent).free) < needed:
            reason, fix = f"{format_bytes(needed)} are needed and {format_bytes(free)} free", "Name another disk"
    except OSError as error:
        reason, fix = str(error.strerror or error), "Name a writable folder"
    if reason is not None or identity is None:
        raise _cannot_save(folder, str(reason), fix)
    return identity


def _cannot_save(folder: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError("weights.cannot_save", name="save_quantized", folder=folder, reason=reason, fix=fix)


def _refuse_changed(folder: Path, model: OpenModel, planned: SourceIdentity) -> None:
    """Refuse to mix weights of one model with settings of another."""
    now = identify_source(model)
    assert now is not None, f"{model.path.name} has no files, which refuse_saving allows"
    change = now.change(planned)
    if change is not None:
        raise _cannot_save(folder, f"the model changed while it was loaded: {change}", "Start again")


def _nothing_to_save(model: OpenModel, plan: LoadPlan) -> str:
    if model.kind == "directory" and os.path.lexists(model.path / MANIFEST_FILE):
        return f"Copy the folder {model.path.name}, which is already saved so"
    if model.stored is not None and plan.num_quantized:
        return f"Copy the folder {model.path.name}, which is already stored so"
    return "Leave some of quantization_ignore out, or save_quantized"


def write_weights(
    folder: Path,
    plan: LoadPlan,
    weights: Mapping[str, AnyWeight],
    identity: SourceIdentity,
    mesh: Mesh,
    on_progress: Progress = lambda done, total: None,
) -> int:
    """Write files of weights and their manifest into an empty folder; raises OSError."""
    planes = dict(_planes(plan, weights))
    writer = PlaneWriter(sum(spec.num_bytes for spec in plan.specs), on_progress)
    files = tuple(
        writer.write_file(folder / f"model-{number:05}.safetensors", specs, planes)
        for number, specs in enumerate(files_of(plan.specs), 1)
    )
    manifest = Manifest(plan.dtype, plan.recipe, mesh, plan_digest(plan), identity, plan.weights, files)
    with open(folder / MANIFEST_FILE, "x", encoding="utf-8") as file:
        file.write(manifest_text(manifest))
        file.flush()
        os.fsync(file.fileno())
    return manifest.num_bytes


def plan_digest(plan: LoadPlan) -> str:
    """Return a digest of the target of every checkpoint row and the storage of every weight."""
    return digest(repr((plan.dtype, plan.weights, plan.moves, plan.tied)).encode()).hex()


def files_of(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Yield the planes of each file, in order."""
    held: list[TensorSpec] = []
    held_bytes = 0
    for spec in specs:
        if held and held_bytes + spec.num_bytes > MAX_FILE_BYTES:
            yield held
            held, held_bytes = [], 0
        held.append(spec)
        held_bytes += spec.num_bytes
    if held:
        yield held


class PlaneWriter:
    """Writes planes chunk by chunk; planes on a GPU go through one pinned chunk."""

    def __init__(self, total_bytes: int, on_progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._done_bytes = 0
        self._pinned: torch.Tensor | None = None

    def write_file(self, path: Path, specs: list[TensorSpec], planes: Mapping[str, torch.Tensor]) -> PlaneFile:
        """Write one file and sync it to the disk."""
        header = header_of(specs)
        with open(path, "xb", buffering=0) as file:
            write_fully(file, memoryview(header))
            checksums = {spec.name: self._write_plane(file, spec, planes[spec.name]) for spec in specs}
            os.fsync(file.fileno())
        num_bytes = len(header) + sum(spec.num_bytes for spec in specs)
        return PlaneFile(path.name, num_bytes, digest(header).hex(), checksums)

    def _write_plane(self, file: FileIO, spec: TensorSpec, plane: torch.Tensor) -> int:
        import torch

        from holdfast.kernels.load.checksum import add_checksum, as_unsigned

        dtype = str(plane.dtype).removeprefix("torch.")
        assert (tuple(plane.shape), dtype) == (spec.shape, spec.dtype), f"{plane.shape} {dtype} for {spec}"
        assert plane.is_contiguous(), f"{spec.name}: strides {plane.stride()}"
        sum_1 = torch.zeros(1, dtype=torch.int64)
        for number, piece in enumerate(plane.detach().view(-1).view(torch.uint8).split(CHUNK_BYTES)):
            chunk = self.on_host(piece)
            add_checksum(chunk, number * CHUNK_BYTES, sum_1)
            write_fully(file, chunk.numpy().data)
            self._done_bytes += len(chunk)
            self._on_progress(self._done_bytes, self._total_bytes)
        return as_unsigned(int(sum_1))

    def on_host(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the piece, or its copy on the host; valid until the next call."""
        import torch

        if piece.device.type == "cpu":
            return piece
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._pinned[: piece.numel()].copy_(piece)


def header_of(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file, padded so that data begins at a multiple of 8."""
    values: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        values[spec.name] = {
            "dtype": STORED_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _planes(plan: LoadPlan, weights: Mapping[str, AnyWeight]) -> Iterator[tuple[str, torch.Tensor]]:
    from holdfast.quant.packed_weight import PackedWeight

    for weight in plan.weights:
        held = weights[weight.name]
        assert not isinstance(held, PackedWeight), f"{weight.name} stays packed in the checkpoint"
        tensors = (held.codes, held.scales) if isinstance(held, QuantizedWeight) else (held,)
        for spec, tensor in zip(weight.specs, tensors, strict=True):
            yield spec.name, tensor


def write_fully(file: FileIO, data: memoryview) -> None:
    """Write all bytes; one system call may write fewer."""
    while data:
        data = data[file.write(data) or 0 :]


def copy_settings(source: Path, folder: Path) -> None:
    """Copy the files beside the weights from one folder to another."""
    for name in SETTINGS_FILES:
        path = file_inside(source, name)
        if path.is_file() and path.stat().st_size <= MAX_COPIED_BYTES:
            shutil.copyfile(path, folder / name)


PARTIAL_ENDING = ".partial"


def locked(folder: Path, is_shared: bool) -> int | None:
    """Return a descriptor that locks the folder until closed; None if another lock conflicts.

    Readers share the lock, writers and removers do not. Raises OSError without the folder, or without file locks.
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
    """Yield a temporary folder; rename it to `final` at the end of the block, or remove it on an error.

    Raises FileExistsError if `final` exists by then and is not empty.
    """
    partial, descriptor = new_partial(final)
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


def new_partial(final: Path) -> tuple[Path, int | None]:
    """Make a hidden folder and lock it. On a file system without locks the lock is None, and nothing sweeps."""
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
        # Another process swept the folder before it was locked: it is gone, or will be.
        if descriptor is not None:
            os.close(descriptor)


def sweep(parent: Path, name: str | None = None) -> bool:
    """Remove leftovers of dead processes for this folder, or all; return True if a process is writing it."""
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
    """Remove a folder atomically; return False if a process is reading it."""
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
    """Sync a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_beside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL_ENDING}"
