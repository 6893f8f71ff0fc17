"""The tensor data of a GGUF file, by positional reads; no mapping, no torch."""

import os
from array import array
from typing import BinaryIO

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.gguf_file import GGUFFile, GGUFTensor


class GGUFData:
    """Opened at the first read, and only if the file is still the one whose header was checked."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._open_file: BinaryIO | None = None

    def read_into(self, tensor: GGUFTensor, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor from its byte `start` on."""
        assert 0 <= start <= start + len(buffer) <= tensor.num_bytes, f"{tensor.name}: {start=} {len(buffer)=}"
        done = 0
        while done < len(buffer):
            try:
                descriptor = self._descriptor()
                num_read = os.preadv(descriptor, [buffer[done:]], tensor.offset + start + done)
            except OSError as error:
                raise ModelFormatError(
                    f"{self._file.path.name}: tensor {shown(tensor.name)} cannot be read",
                    error.strerror or str(error),
                    "check the file and the disk",
                ) from error
            if num_read == 0:
                raise self._changed()
            done += num_read

    def close(self) -> None:
        """Let go of the file; may be called twice. A later read opens it again."""
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None

    def _descriptor(self) -> int:
        if self._open_file is None:
            self._open_file = open(self._file.path, "rb", buffering=0)  # noqa: SIM115 - held until `close`
            status = os.fstat(self._open_file.fileno())
            if (status.st_size, status.st_mtime_ns) != (self._file.file_bytes, self._file.modified_ns):
                self.close()
                raise self._changed()
        return self._open_file.fileno()

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
