"""The weights of a folder: one or many safetensors files as one source, read straight to where the bytes are wanted; no torch."""

from collections.abc import Mapping, Sequence
from math import prod
from threading import Lock

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.sources.json_file import AGAIN
from holdfast.loading.sources.open_file import MAX_GAP_BYTES, MAX_RUNS
from holdfast.loading.sources.row_reads import RowRead
from holdfast.loading.sources.safetensors_file import SafetensorsFile
from holdfast.loading.sources.source import TensorEntry
from holdfast.quant.formats import DTYPE_BYTES

MAX_OPEN_FILES = 4
"""Files that stay open between reads: readers work side by side, so they are in one file, or two at a seam."""
IGNORABLE_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "decoder.version")
"""Buffers that older checkpoints saved; what they hold follows from the config."""


class SafetensorsSource:
    """Checked headers of all files; entries are in the order of the files and of the data in them.

    Few files are open at a time, so that a model of a thousand files needs no more descriptors than one of a handful.
    """

    def __init__(self, files: Sequence[SafetensorsFile], renames: Sequence[tuple[str, str]] = ()) -> None:
        """`renames` are prefixes of names in the files, and what they stand for."""
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._files = tuple(files)
        self._lock = Lock()
        self._open_files: dict[SafetensorsFile, None] = {}
        """Those that were read, the last one last."""
        for file in files:
            for tensor in file.tensors.values():
                name = _renamed(tensor.name, renames)
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
        return frozenset(name for name in self._entries if name.endswith(IGNORABLE_ENDINGS))

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
