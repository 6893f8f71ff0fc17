"""Fills the files of a WritePlan: rows are read, quantized and written step by step, each plane at its place."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.kernels.load.quantize_blocks import quantize_blocks
from holdfast.loading.writing.codes import pack_int4, pack_nvfp4, second_scale
from holdfast.loading.writing.rows import RowReader
from holdfast.loading.writing.written import Plane, WritePlan, Written
from holdfast.models.parameters import Part

Progress = Callable[[int, int], None]
"""Called with elements done and elements in all."""
NATIVE: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16}


class Place(NamedTuple):
    """Where a plane begins in the output: an open file, and the byte."""

    descriptor: int
    offset: int


class PlanWriter:
    """Writes the tensors of one plan; peak memory is a step of rows, its codes, and what makes them."""

    def __init__(self, plan: WritePlan, reader: RowReader, places: Mapping[str, Place], on_progress: Progress) -> None:
        """`places` has every plane by name."""
        self._plan = plan
        self._reader = reader
        self._places = places
        self._on_progress = on_progress
        self._num_done = 0
        self._amax: tuple[tuple[Part, ...], float] = ((), 0.0)

    def write_constants(self) -> None:
        """Write the planes that no row fills."""
        for written in self._plan.tensors:
            if not written.parts:
                self._put(written.planes[0], 0, memoryview(written.constant))

    def write_rows(self) -> None:
        """Write all other planes."""
        self._advance(0)
        for written in self._plan.tensors:
            if written.encoding == "copy":
                for start, piece in self._reader.copied(written):
                    self._put(written.planes[0], start, piece)
                self._advance(written.num_elements)
            elif written.parts:
                self._quantize(written)

    def _quantize(self, written: Written) -> None:
        second = second_scale(self._shared_amax(written)) if written.amax_parts else 1.0
        for row, values_RK in self._reader.steps(written):
            for plane, encoded in zip(written.planes, _encode(written, values_RK, second), strict=False):
                row_bytes = plane.num_bytes // written.num_rows
                data = encoded.contiguous().view(-1).view(torch.uint8)
                assert len(data) == len(values_RK) * row_bytes, f"{plane}: {len(data)} bytes of {len(values_RK)} rows"
                self._put(plane, row * row_bytes, data.numpy().data)
            self._advance(values_RK.numel())
        for plane, value in zip(written.planes[2:], _lone_values(written, second), strict=True):
            self._put(plane, 0, value.view(torch.uint8).numpy().data)

    def _shared_amax(self, written: Written) -> float:
        """Return the amax of the rows that share a scale; tensors that share one follow each other."""
        if self._amax[0] != written.amax_parts:
            found = 0.0
            for num_elements, amax in self._reader.amax(written.amax_parts):
                found = max(found, amax)
                self._advance(num_elements)
            self._amax = written.amax_parts, found
        return self._amax[1]

    def _put(self, plane: Plane, start: int, data: memoryview) -> None:
        place = self._places[plane.name]
        assert 0 <= start <= start + len(data) <= plane.num_bytes, f"{plane}: {len(data)} bytes at {start}"
        offset = place.offset + start
        while data:
            count = os.pwrite(place.descriptor, data, offset)
            data, offset = data[count:], offset + count

    def _advance(self, num_elements: int) -> None:
        self._num_done += num_elements
        self._on_progress(self._num_done, self._plan.num_elements)


def _encode(written: Written, values_RK: torch.Tensor, second: float) -> tuple[torch.Tensor, ...]:
    """Return the bytes of some rows for each plane that has rows."""
    if written.encoding == "int4":
        return pack_int4(values_RK, getattr(torch, written.planes[1].dtype))
    if written.encoding == "nvfp4":
        return pack_nvfp4(values_RK, second)
    if written.encoding == "plain":
        return (values_RK.to(getattr(torch, written.planes[0].dtype)),)
    if written.encoding in NATIVE:
        return (values_RK.to(NATIVE[written.encoding]),)
    return (quantize_blocks(values_RK, written.encoding),)


def _lone_values(written: Written, second: float) -> tuple[torch.Tensor, ...]:
    """Return the values of planes without rows: the shape beside int4 codes, the one scale beside NVFP4 scales."""
    if written.encoding == "int4":
        return (torch.tensor([written.num_rows, written.num_columns], dtype=torch.int64),)
    return (torch.tensor([second], dtype=torch.float32),) if written.encoding == "nvfp4" else ()


@contextmanager
def opened_for_writing(path: Path, header: bytes, num_bytes: int) -> Iterator[int]:
    """Make a file with this header and room for `num_bytes` in all; sync it to the disk at the end of the block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view, offset = memoryview(header), 0
        while view:
            count = os.pwrite(descriptor, view, offset)
            view, offset = view[count:], offset + count
        os.truncate(descriptor, num_bytes)
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
