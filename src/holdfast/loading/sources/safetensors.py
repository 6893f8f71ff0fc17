"""Safetensors: a file with its checked header, the files of a folder, and all of them as one source; no torch.

[ header bytes: u64 | header: JSON name -> dtype, shape, data_offsets | tensor data ........ ]
0                   8                                                data_start     file_bytes

Offsets in the header count from data_start. The tensors must cover the data exactly: no hole, no overlap, no byte after
the last. Sizes are Python integers, so no product can wrap. Every file that passes here also passes the safetensors
package; a test compares them.
"""

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import TypeGuard

from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, shown
from holdfast.loading.sources.files import (
    MAX_GAP_BYTES,
    MAX_RUNS,
    OpenFile,
    parse_json,
    read_json_object,
    unreadable,
)
from holdfast.loading.sources.source import Columns, RowRead, TensorEntry, check_read, table_shape
from holdfast.models.settings import listed
from holdfast.quant.formats import DTYPE_BYTES

MAX_HEADER_BYTES = 16 * 2**20
"""Enough for over 100,000 tensors, far more than any file has. The safetensors package allows 100 MB."""
MAX_DIMENSIONS = 8
LFS_MARK = b"version https://git-lfs"
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("U8", "I8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per element of every type of the format."""
TORCH_DTYPES: Mapping[str, str] = {
    **{f"F{bits}": f"float{bits}" for bits in (64, 32, 16)},
    **{f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)},
    "BF16": "bfloat16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",
}
"""torch's names of the types that are read unchanged; any other type keeps its own name, for messages.

F8_E8M0 holds exponents only. They are read as bytes, because many checkpoints store them as U8.
"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor in the file; `dtype` is the file's name, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    num_bytes: int

    @property
    def torch_dtype(self) -> str:
        return TORCH_DTYPES.get(self.dtype, self.dtype)


class SafetensorsFile:
    """A file whose header has been checked; tensors are in the order of their data.

    It is open between a read and `close`. Any number of threads may read, and close, at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._opened: OpenFile | None = None
        try:
            # Check before opening: opening a pipe would block until its other end opens.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ModelFormatError("file.not_regular", file=path.name)
            opened = OpenFile(path)
            self._identity = _identity(opened)
            self.tensors: Mapping[str, StoredTensor] = _read_header(opened, path.name)
        except OSError as error:
            raise unreadable(path.name, error) from error

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor, from its byte `start`."""
        self.read_runs_into(name, start, len(buffer) or 1, len(buffer) or 1, buffer)

    def read_runs_into(self, name: str, start: int, stride: int, run_bytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs of a tensor's bytes: the first at its byte `start`, each `stride` after the last."""
        tensor = self.tensors[name]
        num_runs, rest = divmod(len(buffer), run_bytes)
        end = start + max(num_runs - 1, 0) * stride + min(len(buffer), run_bytes)
        assert rest == 0, f"{name}: {len(buffer)=} is not so many runs of {run_bytes=}"
        assert 0 <= start <= end <= tensor.num_bytes, f"{name}: {start=} {end=} {len(buffer)=} {tensor=}"
        try:
            opened = self._open()
            is_same = _identity(opened) == self._identity
            num_read = opened.read_runs(tensor.offset + start, stride, run_bytes, buffer) if is_same else 0
        except OSError as error:
            raise unreadable(f"{self.path.name}: {shown(name)}", error) from error
        if num_read < len(buffer) or not is_same:
            self.close()
            raise ModelFormatError("file.changed", file=self.path.name)

    def scatter(self, offset: int, buffers: list[memoryview]) -> bool:
        """Fill the buffers in order from byte `offset` of the file. If it returns False, `read_into` raises the reason."""
        num_wanted = sum(map(len, buffers))
        try:
            opened = self._open()
            return _identity(opened) == self._identity and opened.scatter(offset, buffers) == num_wanted
        except OSError:
            return False

    def close(self) -> None:
        """Drop the file. Idempotent; a running read finishes, and a later one opens the file again."""
        with self._lock:
            self._opened = None

    def _open(self) -> OpenFile:
        with self._lock:
            if self._opened is None:
                self._opened = OpenFile(self.path)
            return self._opened


def _identity(opened: OpenFile) -> tuple[int, int, int]:
    status = opened.status
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(opened: OpenFile, file: str) -> dict[str, StoredTensor]:
    file_bytes = opened.status.st_size
    start = _read_bytes(opened, 0, max(8, len(LFS_MARK)))
    if start.startswith(LFS_MARK):
        raise ModelFormatError("file.lfs_pointer", file=file)
    if len(start) < 8:
        raise ModelFormatError("weights.truncated", file=file, what="the header", needed=8, file_bytes=len(start))
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        problem = f"its header would have {header_bytes} bytes, and at most {MAX_HEADER_BYTES} are read"
        raise ModelFormatError("weights.not_safetensors", file=file, problem=problem)
    if header_bytes > file_bytes - 8:
        needed = 8 + header_bytes
        raise ModelFormatError("weights.truncated", file=file, what="the header", needed=needed, file_bytes=file_bytes)
    header = _read_bytes(opened, 8, header_bytes)
    if not header.startswith(b"{"):
        raise ModelFormatError("weights.not_safetensors", file=file, problem="its header is no JSON object")
    values = parse_json(header, file, parse_int=_natural)
    assert isinstance(values, dict), f"{file}: a text that begins with a brace parsed to {type(values)}"
    return _check_tensors(values, file, 8 + header_bytes, file_bytes)


def _read_bytes(opened: OpenFile, offset: int, num_bytes: int) -> bytes:
    """Read up to `num_bytes`, fewer at the end of the file."""
    data = bytearray(num_bytes)
    return bytes(data[: opened.read(offset, memoryview(data))])


def _check_tensors(header: dict[str, object], file: str, data_start: int, file_bytes: int) -> dict[str, StoredTensor]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) and _is_text(key) and _is_text(value) for key, value in metadata.items()
    ):
        raise ModelFormatError("weights.malformed", file=file, problem="__metadata__ is not a map of strings")
    tensors = [_check_tensor(name, info, file, data_start) for name, info in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        name = shown(tensor.name)
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            problem = f"{name} {what}: it begins at byte {tensor.offset - data_start}, not {end - data_start}"
            raise ModelFormatError("weights.malformed", file=file, problem=problem)
        end += tensor.num_bytes
        if end > file_bytes:
            raise ModelFormatError("weights.truncated", file=file, what=name, needed=end, file_bytes=file_bytes)
    if end != file_bytes:
        problem = f"{file_bytes - end} bytes follow the last tensor"
        raise ModelFormatError("weights.malformed", file=file, problem=problem)
    return {tensor.name: tensor for tensor in tensors}


def _check_tensor(name: str, info: object, file: str, data_start: int) -> StoredTensor:
    def broken(problem: str) -> ModelFormatError:
        return ModelFormatError("weights.malformed", file=file, problem=f"{shown(name)} {problem}")

    if not _is_text(name):
        raise broken("is not a valid name: half of a surrogate pair stands alone")
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise broken(f"needs dtype, shape and data_offsets, and has {shown(info)}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise broken(f"has the unknown type {shown(dtype)}, not one of {', '.join(DTYPE_BITS)}")
    if not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise broken(f"has the shape {shown(shape)}, not up to {MAX_DIMENSIONS} integers")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"has data_offsets {shown(offsets)}, not a start and an end")
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    if prod(max(size, 1) for size in shape) * DTYPE_BITS[dtype] >= 2**64:
        raise broken(f"has the shape {shown(shape)}, which no file can hold")
    if num_bits != 8 * (offsets[1] - offsets[0]):
        needed = f"{dtype} of shape {shown(shape)} needs {num_bits / 8:.15g}"
        raise broken(f"has {offsets[1] - offsets[0]} bytes, and {needed}")
    return StoredTensor(name, dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])


def _natural(digits: str) -> int:
    """Parse a number of a header: unsigned 64-bit only; longer texts are refused unconverted."""
    if len(digits) > 20 or digits[0] == "-":
        raise ValueError(f"{digits[:20]} is out of range")
    return int(digits)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item < 2**63 for item in value)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npz", ".joblib")
"""Suffixes of checkpoints that can run code when opened."""
MAX_FILES = 10_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,240}\.safetensors")


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder; refuse a link that leads out of it.

    The Hugging Face cache links snapshots/REVISION/ to files in blobs/ beside it: that is allowed.
    """
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelFormatError("file.bad_link", file=name, reason="in a circle") from error
    blobs = root.parent.parent / "blobs"
    if target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return path
    raise ModelFormatError("file.bad_link", file=name, reason=f"that leads out of {folder.name}")


def has_file(folder: Path, name: str) -> bool:
    """Return True if the folder has a regular file of this name; refuse anything else of this name."""
    path = folder / name
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    if path.is_symlink():
        raise ModelFormatError("file.bad_link", file=name, reason="to nowhere")
    raise ModelFormatError("file.not_regular", file=name)


def open_weight_files(folder: Path) -> list[SafetensorsFile]:
    """Open every safetensors file of the model, its header checked, and against the index."""
    if has_file(folder, SINGLE_FILE):
        return [SafetensorsFile(file_inside(folder, SINGLE_FILE))]
    if not has_file(folder, INDEX_FILE):
        raise _no_weights(folder)
    file_names = read_index(folder)
    paths = {file_name: file_inside(folder, file_name) for file_name in sorted(set(file_names.values()))}
    missing = [file_name for file_name, path in paths.items() if not path.is_file()]
    if missing:
        raise ModelNotFoundError("weights.missing_files", count=len(missing), files=listed(missing))
    files = [SafetensorsFile(path) for path in paths.values()]
    _check_index(file_names, files)
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Read the index: tensor name -> file name, each the name of a safetensors file in the same folder."""
    weight_map = read_json_object(file_inside(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError("weights.malformed", file=INDEX_FILE, problem="it has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _PLAIN_NAME.fullmatch(file_name):
            problem = f"{shown(name)} is in {shown(file_name)}, which is no safetensors file of the same folder"
            raise ModelFormatError("weights.malformed", file=INDEX_FILE, problem=problem)
    if len(set(weight_map.values())) > MAX_FILES:
        raise ModelFormatError("weights.malformed", file=INDEX_FILE, problem=f"it names more than {MAX_FILES} files")
    return weight_map


def _check_index(file_names: dict[str, str], files: list[SafetensorsFile]) -> None:
    """Check that the index and the files agree about every tensor."""
    held = {(name, file.path.name) for file in files for name in file.tensors}
    differing = sorted(held ^ set(file_names.items()))
    for name, file in differing:
        problem = "the file has it" if (name, file) in held else "the index places it there"
        raise ModelFormatError("weights.index_mismatch", index=INDEX_FILE, file=file, tensor=name, problem=problem)


def _no_weights(folder: Path) -> ModelNotFoundError | UnsupportedModelError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_ENDINGS)]
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if pickles and not others:
        return UnsupportedModelError("weights.pickle", path=f"{folder.name} ({listed(pickles)})")
    found = listed(others) if others else "no weights"
    error = ModelNotFoundError("weights.none", folder=folder.name, single=SINGLE_FILE, index=INDEX_FILE, found=found)
    has_gguf = bool(others) and others[0].endswith(".gguf")
    return error.hinting("Pass a .gguf file by its own path." if has_gguf else "Download the model again.")


MAX_OPEN_FILES = 4
"""Files kept open between reads. Readers work on adjacent chunks, so on one file, or two at a boundary."""
IGNORABLE_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "decoder.version")
"""Buffers that older checkpoints saved; their values follow from the config."""


class SafetensorsSource:
    """Checked headers of all files; entries are in the order of the files and of the data in them.

    At most `MAX_OPEN_FILES` stay open, so a model of a thousand files needs few descriptors.
    """

    scratch_bytes_per_reader = MAX_GAP_BYTES

    def __init__(
        self,
        files: Sequence[SafetensorsFile],
        renames: Sequence[tuple[str, str]] = (),
        unread: Sequence[str] = (),
        respell: Callable[[str], str] | None = None,
    ) -> None:
        """`renames` maps prefixes in the files to other prefixes; `unread` are prefixes of tensors that the model skips.

        `respell` makes one name of several spellings that differ in more than a prefix.
        """
        self._unread = tuple(unread)
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        self.entries: dict[str, TensorEntry] = {}
        self._files = tuple(files)
        self._lock = Lock()
        self._open_files: dict[SafetensorsFile, None] = {}
        for file in files:
            for tensor in file.tensors.values():
                name = tensor.name if respell is None else respell(tensor.name)
                prefix, new = next((pair for pair in renames if name.startswith(pair[0])), ("", ""))
                name = new + name.removeprefix(prefix)
                if name in self._places:
                    other = self._places[name][0].path.name
                    raise ModelFormatError("weights.duplicate_tensor", file=file.path.name, tensor=name, other=other)
                self._places[name] = (file, tensor.name)
                self.entries[name] = TensorEntry(
                    name, tensor.torch_dtype, tensor.shape, file.path.name, tensor.num_bytes
                )

    @property
    def ignorable(self) -> frozenset[str]:
        return self.unread | {name for name in self.entries if name.endswith(IGNORABLE_ENDINGS)}

    @property
    def unread(self) -> frozenset[str]:
        """Tensors of model parts that Holdfast does not run."""
        return frozenset(name for name in self.entries if self._unread and name.startswith(self._unread))

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Read rows unchanged from the file into `out`; errors name the file and the tensor."""
        file, stored_name = self._places[name]
        first, last = check_read(self.entries[name], row_start, row_end, out, columns)
        element_bytes = DTYPE_BYTES[self.entries[name].dtype]
        row_bytes = table_shape(self.entries[name].shape)[1] * element_bytes
        self._note_use(file)
        start = row_start * row_bytes + first * element_bytes
        file.read_runs_into(stored_name, start, row_bytes, (last - first) * element_bytes, out)

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """Like `read_into` for each, but whole rows that are adjacent in a file take one system call."""
        run: list[RowRead] = []
        run_file, run_start, run_end = None, 0, 0
        for read in reads:
            name, row_start, row_end, out, columns = read
            entry, (file, stored_name) = self.entries[name], self._places[name]
            num_rows = table_shape(entry.shape)[0]
            row_bytes = entry.num_bytes // max(1, num_rows)
            is_inside = 0 <= row_start <= row_end <= num_rows and (row_end - row_start) * row_bytes == len(out)
            is_run = columns is None and is_inside
            start = file.tensors[stored_name].offset + row_start * row_bytes
            if run and not (is_run and file is run_file and start == run_end and len(run) < MAX_RUNS):
                self._read_run(run_file, run_start, run)
                run = []
            if not is_run:
                self.read_into(*read)
                continue
            if not run:
                run_file, run_start = file, start
            run.append(read)
            run_end = start + len(out)
        if run:
            self._read_run(run_file, run_start, run)

    def _read_run(self, file: SafetensorsFile | None, start: int, run: list[RowRead]) -> None:
        assert file is not None, f"{len(run)} reads of no file"
        self._note_use(file)
        if not file.scatter(start, [read.out for read in run]):
            for read in run:  # one of these raises the error
                self.read_into(*read)

    def close(self) -> None:
        with self._lock:
            self._open_files.clear()
            for file in self._files:
                file.close()

    def _note_use(self, file: SafetensorsFile) -> None:
        """Close the least recently used file if too many are open; running reads of it finish."""
        with self._lock:
            self._open_files.pop(file, None)
            self._open_files[file] = None
            while len(self._open_files) > MAX_OPEN_FILES:
                oldest = next(iter(self._open_files))
                del self._open_files[oldest]
                oldest.close()
