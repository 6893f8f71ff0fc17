"""Saving final weights in files that load without quantizing: whole folders or none, under locks; no torch until a write.

Whoever writes or reads such a folder holds a lock on it, which ends with the process. So what a killed process left behind
can be told from what another is writing, and nobody removes what somebody reads.
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
from holdfast.loading.sources.files import CONFIG_FILE, MANIFEST_FILE
from holdfast.loading.sources.safetensors import TORCH_DTYPES, file_inside
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    import torch

MAX_FILE_BYTES = 4 * 2**30
"""Of the planes in one file; a plane that has more gets a file of its own."""
CHUNK_BYTES = 16 * 2**20
"""Bytes that are checked and written at a time, and that a GPU sends through pinned memory: the only memory that writing takes."""
MAX_COPIED_BYTES = 512 * 2**20
COPIED_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What a model has besides its weights, as far as it is read here."""
STORED_DTYPES = {torch_name: name for name, torch_name in TORCH_DTYPES.items()}
Progress = Callable[[int, int], None]
"""Bytes written so far, and in all."""


def save_quantized(
    folder: Path,
    model: OpenModel,
    plan: LoadPlan,
    weights: Mapping[str, torch.Tensor | QuantizedWeight],
    mesh: Mesh = ALONE,
    on_progress: Progress = lambda done, total: None,
    planned: SourceIdentity | None = None,
) -> int:
    """Write a folder that is a model of its own: weights, settings, tokenizer. The bytes of its weights are returned.

    `refuse_saving` says beforehand what can be known beforehand, and what the source was: `planned`, which it must still be.
    """
    found = refuse_saving(folder, model, plan)
    identity = found if planned is None else planned
    final = folder.absolute()
    try:
        sweep(final.parent, final.name)
        with whole_folder(final) as partial:
            copy_settings(model.path, partial)
            _refuse_changed(folder, model, identity)  # after the copy, which is then of the same model as the weights
            return write_weights(partial, plan, weights, identity, mesh, on_progress)
    except FileExistsError as error:
        raise ConfigError(
            f"save_quantized={folder} was asked",
            "another process has written there meanwhile",
            "use what is there now, or name a new folder",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"save_quantized={folder} was asked",
            f"it could not be written: {error.strerror or error}",
            "name a folder on a disk that has room and may be written",
        ) from error


def refuse_saving(folder: Path, model: OpenModel, plan: LoadPlan) -> SourceIdentity:
    """What is wrong with saving to this folder, as an error, before anything is loaded; else what the source is."""
    needed = sum(spec.num_bytes for spec in plan.specs)
    reason, do = unsaved(plan.weights), "leave the option out"
    identity = None if reason else identify_source(model)
    if reason is None and identity is None:
        reason = "dummy weights are not saved"
    if reason is None and model.kind == "gguf":
        reason, do = "a GGUF file has no config.json and no tokenizer.json to go with the weights", "save from a folder"
    if reason is None and not any(move.scheme for move in plan.moves):
        reason, do = "nothing is quantized as it loads", _nothing_to_save(model, plan)
    try:
        if reason is None and os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            reason, do = "there is something there already", "name a new folder"
        if reason is None and not folder.absolute().parent.is_dir():
            reason, do = "the folder that it would be in is not there", "make it first"
        if reason is None and (free := shutil.disk_usage(folder.absolute().parent).free) < needed:
            reason, do = f"{format_bytes(needed)} are needed and {format_bytes(free)} free", "name another disk"
    except OSError as error:
        reason, do = str(error.strerror or error), "name a folder that may be written"
    if reason is not None or identity is None:
        raise ConfigError(f"save_quantized={folder} was asked", str(reason), do)
    return identity


def _refuse_changed(folder: Path, model: OpenModel, planned: SourceIdentity) -> None:
    """Weights of one model and settings of another are no model."""
    now = identify_source(model)
    assert now is not None, f"{model.path.name} has files, or refuse_saving would have said so"
    change = now.change(planned)
    if change is not None:
        raise ConfigError(
            f"save_quantized={folder} was asked",
            f"the model was changed while it was loaded: {change}",
            "start again, and leave its files alone meanwhile",
        )


def _nothing_to_save(model: OpenModel, plan: LoadPlan) -> str:
    """What to do for weights that nothing changes on their way."""
    if model.kind == "directory" and os.path.lexists(model.path / MANIFEST_FILE):
        return f"copy the folder {model.path.name}, which was saved so already"
    if model.stored is not None and plan.num_quantized:
        return f"copy the folder {model.path.name}, which is stored so already"
    return "leave some of quantization_ignore out, or save_quantized"


def write_weights(
    folder: Path,
    plan: LoadPlan,
    weights: Mapping[str, torch.Tensor | QuantizedWeight],
    identity: SourceIdentity,
    mesh: Mesh,
    on_progress: Progress = lambda done, total: None,
) -> int:
    """Files of weights and their manifest, into a folder that has none; OSError where the disk says no."""
    planes = dict(_planes(plan, weights))
    writer = PlaneWriter(sum(spec.num_bytes for spec in plan.specs), on_progress)
    with writer:
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
    """Changes with every checkpoint row that goes elsewhere, and with every weight that is kept otherwise."""
    return digest(repr((plan.dtype, plan.weights, plan.moves, plan.tied)).encode()).hex()


def files_of(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The planes of each file, in order."""
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
    """Writes planes chunk by chunk; those of a GPU come through one pinned chunk, those of the host are written as they lie."""

    def __init__(self, total_bytes: int, on_progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._done_bytes = 0
        self._pinned: torch.Tensor | None = None

    def __enter__(self) -> PlaneWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._pinned = None

    def write_file(self, path: Path, specs: list[TensorSpec], planes: Mapping[str, torch.Tensor]) -> PlaneFile:
        """One file, on the disk when this returns."""
        header = header_of(specs)
        with open(path, "xb", buffering=0) as file:
            write_fully(file, memoryview(header))
            checksums = {spec.name: self._write_plane(file, spec, planes[spec.name]) for spec in specs}
            os.fsync(file.fileno())
        num_bytes = len(header) + sum(spec.num_bytes for spec in specs)
        return PlaneFile(path.name, num_bytes, digest(header).hex(), checksums)

    def _write_plane(self, file: FileIO, spec: TensorSpec, plane: torch.Tensor) -> int:
        """Its checksum."""
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
        """The piece itself, or what it was copied to; valid until the next."""
        import torch

        if piece.device.type == "cpu":
            return piece
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._pinned[: piece.numel()].copy_(piece)


def header_of(specs: list[TensorSpec]) -> bytes:
    """The beginning of a safetensors file, padded so that data begins at a multiple of 8."""
    values, end = {}, 0
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


def _planes(
    plan: LoadPlan, weights: Mapping[str, torch.Tensor | QuantizedWeight]
) -> Iterator[tuple[str, torch.Tensor]]:
    for weight in plan.weights:
        held = weights[weight.name]
        tensors = (held.codes, held.scales) if isinstance(held, QuantizedWeight) else (held,)
        for spec, tensor in zip(weight.specs, tensors, strict=True):
            yield spec.name, tensor


def write_fully(file: FileIO, data: memoryview) -> None:
    """One call may take less than it is given."""
    while data:
        data = data[file.write(data) or 0 :]


def copy_settings(source: Path, folder: Path) -> None:
    """What a model has besides its weights, from one folder to another."""
    for name in COPIED_FILES:
        path = file_inside(source, name)
        if path.is_file() and path.stat().st_size <= MAX_COPIED_BYTES:
            shutil.copyfile(path, folder / name)


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
