"""Checkpoints with a catalogue model's shapes and dummy numbers: written fast, in shuffled order, or as headers alone; no torch.

A file without numbers has its full length but is sparse, so it takes no disk space. That is enough for a plan.
"""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from dummy_models import write_dummy_model

from holdfast.loading.model_files import open_model
from holdfast.loading.sources.safetensors import INDEX_FILE
from holdfast.loading.sources.source import TensorEntry
from holdfast.quant.formats import bytes_for

DTYPE, STORED_DTYPE = "bfloat16", "BF16"
SPREAD = 0.02
"""Standard deviation of matrices, as in trained models; vectors around 1 have ten times that."""
BUFFER_VALUES = 2**24
"""Random numbers, written repeatedly; each tensor starts at another offset."""
NUM_WRITERS = 8
READ_BYTES = 16 * 2**20
NUM_READERS = 8


class Checkpoint(NamedTuple):
    """What was written."""

    path: Path
    num_bytes: int
    num_tensors: int
    num_files: int
    seconds: float


class Piece(NamedTuple):
    """A tensor's place in its file."""

    entry: TensorEntry
    file: int
    start: int
    """Offset of its bytes, from the end of the header."""


class _Room(NamedTuple):
    """A tensor's destination."""

    descriptor: int
    offset: int
    piece: Piece


def list_tensors(path: Path) -> list[TensorEntry]:
    """List the tensors of this model's checkpoint in Hugging Face layout, experts separate; only config.json is needed."""
    source = open_model(str(path), "dummy").source
    return list(source.entries.values())


def total_bytes(entries: Sequence[TensorEntry]) -> int:
    return sum(bytes_for(DTYPE, entry.shape) for entry in entries)


def model_bytes(folder: Path, name: str, **settings: object) -> int:
    """Return the bytes of a whole checkpoint before writing it; writes config.json into the folder."""
    return total_bytes(list_tensors(write_dummy_model(folder, name, **settings)))


def write_checkpoint(
    folder: Path,
    name: str,
    num_files: int = 4,
    seed: int = 0,
    headers_only: bool = False,
    stop_at: float = float("inf"),
    **settings: object,
) -> Checkpoint:
    """Write a catalogue model to `folder`/NAME, in any order of tensors; raises after `stop_at` of `time.monotonic()`."""
    start = time.monotonic()
    path = write_dummy_model(folder, name, **settings)
    pieces = lay_out(list_tensors(path), num_files, Random(seed))
    names = [f"model-{number + 1:05}-of-{num_files:05}.safetensors" for number in range(num_files)]
    index = {piece.entry.name: names[piece.file] for piece in pieces}
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with ExitStack() as opened:
        rooms: list[_Room] = []
        for number, file_name in enumerate(names):
            own = [piece for piece in pieces if piece.file == number]
            file = opened.enter_context((path / file_name).open("wb", buffering=0))
            header = make_header(own)
            file.write(header)
            file.truncate(len(header) + total_bytes([piece.entry for piece in own]))
            rooms += (_Room(file.fileno(), len(header) + piece.start, piece) for piece in own)
        if not headers_only:
            _write_numbers(rooms, seed, stop_at)
    num_bytes = total_bytes([piece.entry for piece in pieces])
    return Checkpoint(path, num_bytes, len(pieces), num_files, time.monotonic() - start)


def lay_out(entries: Sequence[TensorEntry], num_files: int, dice: Random) -> list[Piece]:
    """Place tensors in random order, each in the smallest file so far."""
    shuffled = list(entries)
    dice.shuffle(shuffled)
    ends = [0] * num_files
    pieces: list[Piece] = []
    for entry in shuffled:
        file = ends.index(min(ends))
        pieces.append(Piece(entry, file, ends[file]))
        ends[file] += bytes_for(DTYPE, entry.shape)
    return pieces


def make_header(pieces: Sequence[Piece]) -> bytes:
    """Return the header of a safetensors file, in the order of the data."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry, _, start in pieces:
        end = start + bytes_for(DTYPE, entry.shape)
        described[entry.name] = {"dtype": STORED_DTYPE, "shape": entry.shape, "data_offsets": [start, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def random_bfloat16(num_values: int, mean: float, spread: float, seed: int) -> memoryview:
    """Draw normal numbers, rounded toward zero."""
    values = np.random.default_rng(seed).standard_normal(num_values, dtype=np.float32)
    values *= np.float32(spread)
    values += np.float32(mean)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).data.cast("B")


def _write_numbers(rooms: Sequence[_Room], seed: int, stop_at: float) -> None:
    most = max(bytes_for(DTYPE, room.piece.entry.shape) for room in rooms) // 2
    matrix = random_bfloat16(min(BUFFER_VALUES, most + 4096), 0.0, SPREAD, seed)
    vector = random_bfloat16(2**16, 1.0, 10 * SPREAD, seed + 1)
    dice = Random(seed)
    starts = [2 * dice.randrange(2**15) for _ in rooms]

    def write(room: _Room, start: int) -> None:
        shape = room.piece.entry.shape
        numbers = vector if len(shape) == 1 else matrix
        done, num_bytes = 0, bytes_for(DTYPE, shape)
        start %= len(numbers)
        while done < num_bytes:
            if time.monotonic() > stop_at:
                raise TimeoutError("writing the checkpoint takes too long")
            done += os.pwrite(room.descriptor, numbers[start : start + num_bytes - done], room.offset + done)
            start = 0

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        for _ in pool.map(write, rooms, starts):
            pass


def read_seconds(path: Path, num_readers: int = NUM_READERS) -> float:
    """Return seconds to read every weight file once with plain positional reads from several threads, into reused memory."""
    files = sorted(path.glob("*.safetensors"))
    with ExitStack() as opened, ThreadPoolExecutor(num_readers) as pool:
        handles = [opened.enter_context(file.open("rb", buffering=0)) for file in files]
        pieces = [
            (handle.fileno(), offset)
            for handle, file in zip(handles, files, strict=True)
            for offset in range(0, file.stat().st_size, READ_BYTES)
        ]
        buffers = [bytearray(READ_BYTES) for _ in range(num_readers)]
        start = time.perf_counter()
        list(pool.map(lambda number: _read_some(pieces[number::num_readers], buffers[number]), range(num_readers)))
        return time.perf_counter() - start


def _read_some(pieces: Sequence[tuple[int, int]], buffer: bytearray) -> None:
    for descriptor, offset in pieces:
        os.preadv(descriptor, [buffer], offset)
