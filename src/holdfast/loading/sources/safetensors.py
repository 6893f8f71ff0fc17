"""Safetensors: a file with its checked header, the files of a folder, and all of them as one source; no torch.

[ header bytes: u64 | header: JSON name -> dtype, shape, data_offsets | tensor data ........ ]
0                   8                                                data_start     file_bytes

Offsets in the header count from data_start. The tensors must cover the data exactly: no hole, no overlap, no byte after
the last. Sizes are Python integers, so no product can wrap. Every file that is accepted here is accepted by the
safetensors package too; a test compares them.
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
from holdfast.loading.sources.files import AGAIN, MAX_GAP_BYTES, MAX_RUNS, OpenFile, parse_json, read_json_object
from holdfast.loading.sources.source import RowRead, TensorEntry
from holdfast.models.settings import listed
from holdfast.quant.formats import DTYPE_BYTES

MAX_HEADER_BYTES = 16 * 2**20
"""The safetensors package reads up to 100 MB; 16 MiB describe more than 100,000 tensors, far more than any file has."""
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
"""Bits of an element of every type that the format knows."""
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",
}
"""torch's names of those that are read as they are; another type keeps its own name, for messages.

Numbers of F8_E8M0 are exponents alone. They are read as bytes, which is how checkpoints have them also where they say U8.
"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in the file."""

    name: str
    dtype: str
    """As the file names it, such as BF16."""
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
            # Checked before opening: opening a pipe would wait for its other end.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ModelFormatError(f"{path.name} is not a regular file", "a safetensors file is needed", AGAIN)
            opened = OpenFile(path)
            self._identity = _identity(opened)
            self.tensors: Mapping[str, StoredTensor] = _read_header(opened, path.name)
        except OSError as error:
            raise ModelFormatError(
                f"{path.name} cannot be read", str(error.strerror or error), "check the file"
            ) from error

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor from byte `start` of it on."""
        self.read_runs_into(name, start, len(buffer) or 1, len(buffer) or 1, buffer)

    def read_runs_into(self, name: str, start: int, stride: int, run_bytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs of a tensor's bytes: the first at byte `start` of it, each `stride` behind the last."""
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
            raise ModelFormatError(
                f"{self.path.name}: {shown(name)} cannot be read", str(error.strerror or error), "check the disk"
            ) from error
        if num_read < len(buffer) or not is_same:
            self.close()
            raise ModelFormatError(
                f"{self.path.name} was changed before {shown(name)} was read",
                "its header was checked as it was",
                "leave the file alone and start again",
            )

    def scatter(self, offset: int, buffers: list[memoryview]) -> bool:
        """Fill buffers one after the other with what the file has from byte `offset` of it on; whether all were filled.

        Why not, `read_into` tells.
        """
        num_wanted = sum(map(len, buffers))
        try:
            opened = self._open()
            return _identity(opened) == self._identity and opened.scatter(offset, buffers) == num_wanted
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the file; may be called twice, and a later read opens it again. A read that goes on ends well."""
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
        raise ModelFormatError(
            f"{file} is a Git LFS pointer", "the weights themselves were not downloaded", "run git lfs pull"
        )
    if len(start) < 8:
        raise ModelFormatError(f"{file} has {len(start)} bytes", "a safetensors header begins with 8", AGAIN)
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelFormatError(
            f"{file} says its header has {header_bytes} bytes",
            f"at most {MAX_HEADER_BYTES} are read",
            "check that it is a safetensors file",
        )
    if header_bytes > file_bytes - 8:
        raise ModelFormatError(
            f"{file} says its header has {header_bytes} bytes", f"the file has {file_bytes}: it is cut off", AGAIN
        )
    header = _read_bytes(opened, 8, header_bytes)
    if not header.startswith(b"{"):
        raise ModelFormatError(
            f"{file} does not begin as safetensors do", "its header is no JSON object", "check that it is one"
        )
    values = parse_json(header, file, parse_int=_natural)
    assert isinstance(values, dict), f"{file}: a text that begins with a brace parsed to {type(values)}"
    return _check_tensors(values, file, 8 + header_bytes, file_bytes)


def _read_bytes(opened: OpenFile, offset: int, num_bytes: int) -> bytes:
    """Up to `num_bytes`, fewer where the file ends."""
    data = bytearray(num_bytes)
    return bytes(data[: opened.read(offset, memoryview(data))])


def _check_tensors(header: dict[str, object], file: str, data_start: int, file_bytes: int) -> dict[str, StoredTensor]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) and _is_text(key) and _is_text(value) for key, value in metadata.items()
    ):
        raise ModelFormatError(f"{file}: __metadata__ is not a map of strings", "the header is broken", AGAIN)
    tensors = [_check_tensor(name, info, file, data_start) for name, info in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            raise ModelFormatError(
                f"{file}: {shown(tensor.name)} {what}",
                f"it begins at byte {tensor.offset - data_start} of the data, {end - data_start} is expected",
                AGAIN,
            )
        end += tensor.num_bytes
        if end > file_bytes:
            raise ModelFormatError(
                f"{file} is cut off in {shown(tensor.name)}",
                f"it needs {end} bytes and has {file_bytes}",
                AGAIN,
            )
    if end != file_bytes:
        raise ModelFormatError(
            f"{file} has {file_bytes - end} bytes after its last tensor", "nothing belongs there", AGAIN
        )
    return {tensor.name: tensor for tensor in tensors}


def _check_tensor(name: str, info: object, file: str, data_start: int) -> StoredTensor:
    def broken(what: str, has: str) -> ModelFormatError:
        return ModelFormatError(f"{file}: {shown(name)} {what}", has, AGAIN)

    if not _is_text(name):
        raise broken("is no sound name", "half of a character pair stands alone")
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise broken("is not described by dtype, shape and data_offsets", f"the header says {shown(info)}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise broken(f"has the unknown type {shown(dtype)}", f"the types are {', '.join(DTYPE_BITS)}")
    if not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise broken(f"has the shape {shown(shape)}", f"up to {MAX_DIMENSIONS} whole numbers are needed")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"has data_offsets {shown(offsets)}", "a start and an end are needed")
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    if prod(max(size, 1) for size in shape) * DTYPE_BITS[dtype] >= 2**64:
        raise broken(f"has the shape {shown(shape)}", "no file is that large")
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise broken(
            f"has {offsets[1] - offsets[0]} bytes", f"{dtype} of shape {shown(shape)} needs {num_bits / 8:.15g}"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])


def _natural(digits: str) -> int:
    """A number of a header: the format knows unsigned 64-bit ones only, and a longer text is never converted."""
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
"""Checkpoints that run code when they are opened."""
MAX_FILES = 10_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,240}\.safetensors")


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file in the folder; a link that leads out of it is refused.

    The download cache of Hugging Face keeps files in blobs/ beside snapshots/REVISION/ and links to them: that is allowed.
    """
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelFormatError(
            f"{name} is a link in a circle", "a file is needed", "put the file itself there"
        ) from error
    blobs = root.parent.parent / "blobs"
    if target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return path
    raise ModelFormatError(
        f"{name} is a link that leads out of {folder.name}",
        "files are read from the model's own folder only",
        "put the file itself there",
    )


def has_file(folder: Path, name: str) -> bool:
    """Whether the folder has a file of this name; something else of this name is refused, not passed over."""
    path = folder / name
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    what = "a link to nowhere" if path.is_symlink() else "no regular file"
    raise ModelFormatError(f"{folder.name} has {name}", f"it is {what}", AGAIN)


def open_weight_files(folder: Path) -> list[SafetensorsFile]:
    """Every safetensors file of the model, its header checked, and against the index."""
    if has_file(folder, SINGLE_FILE):
        return [SafetensorsFile(file_inside(folder, SINGLE_FILE))]
    if not has_file(folder, INDEX_FILE):
        raise _no_weights(folder)
    file_names = read_index(folder)
    paths = {file_name: file_inside(folder, file_name) for file_name in sorted(set(file_names.values()))}
    missing = [file_name for file_name, path in paths.items() if not path.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{INDEX_FILE} names {len(paths)} files",
            f"{len(missing)} of them are not there: {listed(missing)}",
            "download the rest of the model",
        )
    files = [SafetensorsFile(path) for path in paths.values()]
    _check_index(file_names, files)
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, each a plain name of a safetensors file."""
    weight_map = read_json_object(file_inside(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{INDEX_FILE} has no weight_map", "tensor names with their files are needed", AGAIN)
    file_names: dict[str, str] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _PLAIN_NAME.fullmatch(file_name):
            raise ModelFormatError(
                f"{INDEX_FILE} places {shown(name)} in {shown(file_name)}",
                "the name of a safetensors file in the same folder is needed",
                AGAIN,
            )
        file_names[name] = file_name
    if len(set(file_names.values())) > MAX_FILES:
        raise ModelFormatError(f"{INDEX_FILE} names more than {MAX_FILES} files", "no model has as many", AGAIN)
    return file_names


def _check_index(file_names: dict[str, str], files: list[SafetensorsFile]) -> None:
    """The index and the files agree about where every tensor is."""
    held = {(name, file.path.name) for file in files for name in file.tensors}
    for name, file_name in file_names.items():
        if (name, file_name) not in held:
            raise ModelFormatError(
                f"{INDEX_FILE} places {shown(name)} in {file_name}", "it is missing from that file", AGAIN
            )
    for file in files:
        for name in file.tensors:
            if file_names.get(name) != file.path.name:
                has = f"it is placed in {file_names[name]}" if name in file_names else "it is not mentioned"
                raise ModelFormatError(
                    f"{file.path.name} holds the tensor {shown(name)}", f"{has} by {INDEX_FILE}", AGAIN
                )


def _no_weights(folder: Path) -> ModelNotFoundError | UnsupportedModelError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_ENDINGS)]
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if others:
        return ModelNotFoundError(
            f"{folder.name} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            f"it has {listed(others)}",
            "pass a .gguf file by its own path" if others[0].endswith(".gguf") else "download the index too",
        )
    if pickles:
        return UnsupportedModelError(
            f"{folder.name} holds its weights as {listed(pickles)}",
            "such files run code when they are opened, so they are not",
            "convert the model to safetensors, or download it in that format",
        )
    return ModelNotFoundError(
        f"{folder.name} has neither {SINGLE_FILE} nor {INDEX_FILE}", "it holds no weights", "download them"
    )


MAX_OPEN_FILES = 4
"""Files that stay open between reads: readers work side by side, so they are in one file, or two at a seam."""
IGNORABLE_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "decoder.version")
"""Buffers that older checkpoints saved; what they hold follows from the config."""


class SafetensorsSource:
    """Checked headers of all files; entries are in the order of the files and of the data in them.

    Few files are open at a time, so that a model of a thousand files needs no more descriptors than one of a handful.
    """

    def __init__(
        self,
        files: Sequence[SafetensorsFile],
        renames: Sequence[tuple[str, str]] = (),
        unread: Sequence[str] = (),
        respell: Callable[[str], str] | None = None,
    ) -> None:
        """`renames` are prefixes of names in the files, and what they stand for; `unread` those of what nobody asks for.

        `respell` makes one name of several spellings, where other than prefixes differ.
        """
        self._unread = tuple(unread)
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._files = tuple(files)
        self._lock = Lock()
        self._open_files: dict[SafetensorsFile, None] = {}
        """Those that were read, the last one last."""
        for file in files:
            for tensor in file.tensors.values():
                name = _renamed(tensor.name if respell is None else respell(tensor.name), renames)
                if name in self._places:
                    first = self._places[name][0].path.name
                    raise ModelFormatError(
                        f"the tensor {shown(name)} is in {file.path.name}", f"it is in {first} too", AGAIN
                    )
                self._places[name] = (file, tensor.name)
                self._entries[name] = TensorEntry(
                    name, tensor.torch_dtype, tensor.shape, file.path.name, tensor.num_bytes
                )

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        return self.unread | {name for name in self._entries if name.endswith(IGNORABLE_ENDINGS)}

    @property
    def unread(self) -> frozenset[str]:
        """Tensors of parts of the model that are not run."""
        return frozenset(name for name in self._entries if self._unread and name.startswith(self._unread))

    @property
    def scratch_bytes_per_reader(self) -> int:
        """What lies between columns, where only some are wanted."""
        return MAX_GAP_BYTES

    def read_into(
        self, name: str, row_start: int, row_end: int, out: memoryview, columns: tuple[int, int] | None = None
    ) -> None:
        """Rows as they are stored, straight from the file into `out`; the errors name the file and the tensor."""
        entry = self._entries[name]
        file, stored_name = self._places[name]
        element_bytes = DTYPE_BYTES[entry.dtype]
        num_columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        first, last = columns or (0, num_columns)
        num_rows = prod(entry.shape[:-1]) if len(entry.shape) > 1 else prod(entry.shape)
        assert 0 <= row_start <= row_end <= num_rows, f"{name}: rows {row_start} to {row_end} of {num_rows}"
        assert 0 <= first < last <= num_columns, f"{name}: columns {first} to {last} of {num_columns}"
        row_bytes, run_bytes = num_columns * element_bytes, (last - first) * element_bytes
        assert len(out) == (row_end - row_start) * run_bytes, f"{name}: {len(out)=} for {row_end - row_start} rows"
        start = row_start * row_bytes + first * element_bytes
        self._note_use(file)
        file.read_runs_into(stored_name, start, row_bytes, run_bytes, out)

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """`read_into` for several: whole rows that lie side by side in a file come with one call of the system."""
        run: list[RowRead] = []
        run_file, run_start, run_end = None, 0, 0
        for read in reads:
            name, row_start, row_end, out, columns = read
            entry, (file, stored_name) = self._entries[name], self._places[name]
            num_rows = prod(entry.shape[:-1] if len(entry.shape) > 1 else entry.shape)
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
            for read in run:  # one of them will say what is wrong
                self.read_into(*read)

    def close(self) -> None:
        with self._lock:
            self._open_files.clear()
            for file in self._files:
                file.close()

    def _note_use(self, file: SafetensorsFile) -> None:
        """Close the file that was used longest ago, if there is one too many; who is reading it keeps it until then."""
        with self._lock:
            self._open_files.pop(file, None)
            self._open_files[file] = None
            while len(self._open_files) > MAX_OPEN_FILES:
                oldest = next(iter(self._open_files))
                del self._open_files[oldest]
                oldest.close()


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for prefix, replacement in renames:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
