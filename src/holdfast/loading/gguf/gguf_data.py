"""The tensor data of a GGUF file, by positional reads; no mapping, no torch."""

from array import array
from threading import Lock

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.gguf.gguf_file import GGUFFile, GGUFTensor
from holdfast.loading.sources.open_file import OpenFile


class GGUFData:
    """Opened at the first read, and only if the file is still the one whose header was checked; any thread may read."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._lock = Lock()
        self._opened: OpenFile | None = None

    def read_into(self, tensor: GGUFTensor, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor from its byte `start` on."""
        assert 0 <= start <= start + len(buffer) <= tensor.num_bytes, f"{tensor.name}: {start=} {len(buffer)=}"
        try:
            num_read = self._open().read(tensor.offset + start, buffer)
        except OSError as error:
            raise ModelFormatError(
                f"{self._file.path.name}: tensor {shown(tensor.name)} cannot be read",
                error.strerror or str(error),
                "check the file and the disk",
            ) from error
        if num_read < len(buffer):
            raise self._changed()

    def close(self) -> None:
        """Let go of the file; may be called twice. A later read opens it again, and one that goes on ends well."""
        with self._lock:
            self._opened = None

    def _open(self) -> OpenFile:
        with self._lock:
            if self._opened is None:
                opened = OpenFile(self._file.path)
                if (opened.status.st_size, opened.status.st_mtime_ns) != (
                    self._file.file_bytes,
                    self._file.modified_ns,
                ):
                    raise self._changed()
                self._opened = opened
            return self._opened

    def _changed(self) -> ModelFormatError:
        return ModelFormatError(
            f"{self._file.path.name} changed after its header was read",
            "weights would be read from the wrong places",
            "leave the file alone and start again",
        )


def read_floats(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    """All values of a small F32 tensor."""
    assert tensor.type.name == "F32", f"{tensor.name} is {tensor.type.name}"
    data = GGUFData(file)
    values = array("f", bytes(tensor.num_bytes))
    try:
        data.read_into(tensor, 0, memoryview(values).cast("B"))
    finally:
        data.close()
    return values.tolist()
