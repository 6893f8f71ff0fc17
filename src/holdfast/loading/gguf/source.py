"""A GGUF file, or several, as a source of weights: Hugging Face names, rows in Hugging Face order; no torch until a read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from threading import local
from typing import TYPE_CHECKING

from holdfast.errors import ModelFormatError
from holdfast.loading.gguf.config import ROPE_FACTORS, SCORE_BIAS, TABLES
from holdfast.loading.gguf.file import GGUFData, GGUFFile, GGUFTensor
from holdfast.loading.gguf.state_rows import RATES, VECTORS, StateRows
from holdfast.loading.sources.source import Columns, TensorEntry, check_read, table_shape
from holdfast.models.parameters import LATENT_NAMES, LLAMA_NAMES, STATE_NAMES, CheckpointNames
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme, with_second
from holdfast.quant.packed_tiles import TILE_ROWS

if TYPE_CHECKING:
    import torch

    from holdfast.kernels.load.place_blocks import StoredRows

MODULES: Mapping[str, str] = {
    "token_embd": LLAMA_NAMES.embed,
    "output_norm": LLAMA_NAMES.final_norm,
    "output": LLAMA_NAMES.lm_head,
}
SHARED_GATE = "ffn_gate_inp_shexp"
"""A matrix of one row in Hugging Face's files, a vector in GGUF files."""
CONVOLUTION = "ssm_conv1d"
"""Stacked matrices of one row in Hugging Face's files, one matrix in GGUF files."""
LAYER_TENSORS: Mapping[str, str] = {
    name: tensor.format(state=STATE_NAMES) for name, tensor in TABLES["layer_tensors"].items()
}
"""Tensors of a layer that are no weight or bias of a module in either kind of file."""


def layer_modules(names: CheckpointNames) -> dict[str, str]:
    """Return a family's names of the modules of a layer, by their names in a file.

    Stacked experts [E, N, K] use the layout by kind: one tensor each for gate, up and down of all experts.
    """
    modules = {
        name: module.format(names=names, latent=LATENT_NAMES, state=STATE_NAMES)
        for name, module in TABLES["layer_modules"].items()
    }
    return {name: module for name, module in modules.items() if module}


SCALED_TYPE = "NVFP4"
"""Type of weights that may have a factor of their own beside the scales of blocks."""
FACTOR, INPUT_FACTOR = "scale", "input_scale"
"""Endings of tensors beside such a weight: its factor, and one for codes of activations, which stay plain here."""
NATIVE_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that torch holds as they are; all others are read as float32."""
STEP_ELEMENTS = 2**18
"""Elements per step: few enough that each pass finds the previous pass's results in cache."""
DEQUANT_BYTES = 2 * 2**20
"""Most bytes of unpacked codes and scales per step, beside blocks and results."""
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_OTHER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([\w.]+)", re.ASCII)
_DRAFT_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(nextn\..+)", re.ASCII)
_INTERLEAVED = re.compile(r"blk\.[0-9]+\.attn_[qk]\.(weight|bias)", re.ASCII)


LAYER_MODULES: Mapping[str, str] = layer_modules(LLAMA_NAMES)


def hugging_face_name(name: str, modules: Mapping[str, str] = LAYER_MODULES) -> str:
    """Return the Hugging Face name of a tensor. A name without a counterpart stays, and is unused."""
    module, _, kind = name.rpartition(".")
    if module in MODULES and kind in ("weight", "bias"):
        return f"{MODULES[module]}.{kind}"
    if match := _DRAFT_TENSOR.fullmatch(name):  # one prefix for all that a draft layer holds
        return f"{LLAMA_NAMES.layer.format(match[1])}{match[2]}"
    if (match := _OTHER_TENSOR.fullmatch(name)) and match[2] in LAYER_TENSORS:
        return f"{LLAMA_NAMES.layer.format(match[1])}{LAYER_TENSORS[match[2]]}"
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in modules:
        return name
    ending = "" if match[2] == SCORE_BIAS else f".{match[3]}"  # a buffer there, not the bias of a module
    return f"{LLAMA_NAMES.layer.format(match[1])}{modules[match[2]]}{ending}"


class GGUFSource:
    """Implements WeightSource. Each thread has its own buffers, sized for a step of the widest tensor it read."""

    def __init__(
        self,
        file: GGUFFile,
        interleaved_head_dim: int | None,
        names: CheckpointNames = LLAMA_NAMES,
        unread: Sequence[str] = (),
        states: StateRows | None = None,
    ) -> None:
        """An interleaved query or key head has Hugging Face's rows i and i + half as rows 2i and 2i+1.

        `unread` are prefixes of tensors that the model skips. Without `states`, gated delta nets stay as in the file.
        """
        if states is not None:
            _refuse_coded_vectors(file)
        modules = layer_modules(names)
        self._unread = tuple(unread)
        self._data = GGUFData(file)
        self._file = file
        self._factors = {
            name: _factor_of(file, tensor) for name, tensor in file.tensors.items() if tensor.type.name == SCALED_TYPE
        }
        beside = {_beside(name, ending) for name in self._factors for ending in (FACTOR, INPUT_FACTOR)}
        self._tensors = {
            hugging_face_name(name, modules): _as_expected(tensor)
            for name, tensor in file.tensors.items()
            if name not in beside
        }
        self._head_dim, self._states = interleaved_head_dim, states
        self._buffers = local()
        self.entries = {
            name: TensorEntry(
                name=name,
                dtype=NATIVE_DTYPES.get(tensor.type.name, "float32"),
                shape=tensor.shape,
                file=file.files[tensor.part].path.name,
                num_bytes=tensor.num_bytes + self._factor_bytes(tensor),
                packed=self._scheme(tensor),
            )
            for name, tensor in self._tensors.items()
        }

    @property
    def ignorable(self) -> frozenset[str]:
        """Rotary tables, which the spec holds or computes; and halves of kv_b if the whole is there."""
        tables = {name for name in self.entries if name == ROPE_FACTORS or name.endswith(".attn_rot_embd.weight")}
        # Some conversions write kv_b both whole and in halves.
        whole = f"{LATENT_NAMES.kv_b}.weight"
        layers = [name.removesuffix(whole) for name in self.entries if name.endswith(whole)]
        halves = {f"{layer}{half}.weight" for layer in layers for half in (LATENT_NAMES.k_b, LATENT_NAMES.v_b)}
        return self.unread | tables | (halves & self.entries.keys())

    @property
    def unread(self) -> frozenset[str]:
        """Tensors of model parts that Holdfast does not run."""
        return frozenset(name for name in self.entries if self._unread and name.startswith(self._unread))

    @property
    def scratch_bytes_per_reader(self) -> int:
        """Bytes of a step: blocks as stored and as reordered from interleaved heads, values, unpacked codes."""
        return max((self._step_bytes(tensor) for tensor in self._tensors.values()), default=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of this thread's buffers: at most the scratch without the unpacked codes."""
        raw, values = (getattr(self._buffers, name, None) for name in ("raw", "values"))
        return (0 if raw is None else len(raw)) + (0 if values is None else values.nbytes)

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Dequantize rows [row_start, row_end) into `out` in steps; read whole rows of native types directly."""
        import torch

        tensor, entry = self._tensors[name], self.entries[name]
        first, last = check_read(entry, row_start, row_end, out, columns)
        if row_start == row_end:
            return
        num_columns = table_shape(tensor.shape)[1]
        dtype = getattr(torch, entry.dtype)
        head_dim = self._head_dim if _INTERLEAVED.fullmatch(tensor.name) else None
        if tensor.type.name in NATIVE_DTYPES and head_dim is None and columns is None:
            self._read_rows(tensor, (row_start, row_end), num_columns * dtype.itemsize, out)
            if self._states is not None and RATES.fullmatch(tensor.name):
                torch.frombuffer(out, dtype=dtype).neg_().log_()
            return
        values = torch.frombuffer(out, dtype=dtype).view(row_end - row_start, last - first)
        step = max(1, STEP_ELEMENTS // num_columns)
        for start in range(row_start, row_end, step):
            rows = start, min(start + step, row_end)
            step_values = values[start - row_start : rows[1] - row_start]
            self._read_step(tensor, rows, head_dim, (first, last), step_values)
            self._apply_factors(tensor, rows, step_values)

    def read_packed(
        self, name: str, scheme: PackedScheme, rows: tuple[int, int], out: memoryview, columns: Columns = None
    ) -> None:
        """Split the blocks of some rows into planes, in steps; the factor of a matrix is each row's second scale."""
        import torch

        from holdfast.kernels.load.place_blocks import split_rows
        from holdfast.quant.packed_weight import plane_bytes

        tensor = self._tensors[name]
        row_start, row_end = rows
        if row_start == row_end:
            return
        first, last = columns or (0, tensor.shape[-1])
        views = plane_bytes(scheme, row_end - row_start, last - first, torch.frombuffer(out, dtype=torch.uint8))
        has_second = scheme.second != "none"
        own = views[:-1] if has_second else views
        for start, stored in self._stored_rows(tensor, rows, (first, last)):
            some = [view[start - row_start : start - row_start + stored.num_rows] for view in own]
            split_rows(stored, tensor.type.block_bytes, some, tensor.type.name)
        if has_second:
            numbers = torch.ones(row_end - row_start, 1)
            self._apply_factors(tensor, rows, numbers)
            views[-1].copy_(numbers.view(torch.uint8))

    def read_tiles(
        self, name: str, scheme: PackedScheme, rows: tuple[int, int], tiles_GX: torch.Tensor, columns: Columns = None
    ) -> int | None:
        """Interleave the blocks of some rows in one pass, in steps that fit a cache."""
        from holdfast.kernels.load.place_blocks import place_tiles
        from holdfast.kernels.load.place_kernels import UNSEEN

        tensor, found = self._tensors[name], None
        for start, stored in self._stored_rows(tensor, rows, columns or (0, tensor.shape[-1])):
            group = (start - rows[0]) // scheme.row_group
            some = tiles_GX[group : group + stored.num_rows // scheme.row_group]
            wrong = place_tiles(stored, tensor.type.block_bytes, some, scheme)
            if found is None and wrong != UNSEEN:
                found = start + wrong
        return found

    def close(self) -> None:
        """Drop the file and the buffers. Idempotent."""
        self._data.close()
        self._buffers = local()

    def _read_step(
        self,
        tensor: GGUFTensor,
        rows: tuple[int, int],
        head_dim: int | None,
        columns: tuple[int, int],
        out: torch.Tensor,
    ) -> None:
        """Read the blocks of a few rows, put them in order, and dequantize the wanted ones."""
        import torch

        from holdfast.loading.gguf.dequantize import dequantize

        (start, end), (first, last), kind = rows, columns, tensor.type
        if len(tensor.shape) == 1 and kind.block_elements > 1:
            # Elements of a quantized vector have no bytes of their own: read the blocks around them, as one row.
            places = torch.arange(start, end) if head_dim is None else _places(start, end, head_dim)
            low, high = int(places.min()), int(places.max()) + 1
            first_block, last_block = low // kind.block_elements, -(-high // kind.block_elements)
            whole = self._values((last_block - first_block) * kind.block_elements)
            dequantize(self._read_blocks(tensor, first_block, last_block), kind, whole)
            out.copy_(whole.index_select(0, places - first_block * kind.block_elements).unsqueeze(1))
            return
        blocks = self._row_blocks(tensor, rows, head_dim, columns)
        first_block, last_block = first // kind.block_elements, -(-last // kind.block_elements)
        if kind.name in NATIVE_DTYPES:
            out.copy_(blocks.view(out.dtype).view(out.shape))
        elif (last_block - first_block) * kind.block_elements == last - first:
            dequantize(blocks, kind, out)
        else:
            whole = self._values(blocks.shape[0] * blocks.shape[1] * kind.block_elements)
            dequantize(blocks, kind, whole)
            skipped = first_block * kind.block_elements
            out.copy_(whole.view(blocks.shape[0], -1)[:, first - skipped : last - skipped])

    def _row_blocks(
        self, tensor: GGUFTensor, rows: tuple[int, int], head_dim: int | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        """Read the blocks of a few rows and columns, in the order of the rows here: [rows, blocks, bytes]."""
        (start, end), (first, last), kind = rows, columns, tensor.type
        first_row, last_row = start, end
        if head_dim is not None:
            first_row, last_row = start // head_dim * head_dim, -(-end // head_dim) * head_dim
        row_blocks = table_shape(tensor.shape)[1] // kind.block_elements
        blocks = self._read_blocks(tensor, first_row * row_blocks, last_row * row_blocks)
        blocks = blocks.view(last_row - first_row, row_blocks, kind.block_bytes)
        blocks = blocks[:, first // kind.block_elements : -(-last // kind.block_elements)]
        if head_dim is not None:
            blocks = blocks.index_select(0, _places(start, end, head_dim) - first_row)
        return blocks.contiguous()

    def _stored_rows(
        self, tensor: GGUFTensor, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[int, StoredRows]]:
        """Yield steps of rows as stored, each with its first row; valid until this thread's next read."""
        from holdfast.kernels.load.place_blocks import StoredRows

        kind, head_dim = tensor.type, self._head_dim if _INTERLEAVED.fullmatch(tensor.name) else None
        num_blocks = tensor.shape[-1] // kind.block_elements
        first_block, last_block = columns[0] // kind.block_elements, -(-columns[1] // kind.block_elements)
        step = _step_rows(tensor.shape[-1], head_dim)
        for start in range(*rows, step):
            end = min(start + step, rows[1])
            low, high = (
                (start, end) if head_dim is None else (start // head_dim * head_dim, -(-end // head_dim) * head_dim)
            )
            bytes_RB = self._read_blocks(tensor, low * num_blocks, high * num_blocks).view(high - low, -1)
            first_byte, count = first_block * kind.block_bytes, last_block - first_block
            yield start, StoredRows(bytes_RB, start - low, end - start, first_byte, count, head_dim or 0)

    def _scheme(self, tensor: GGUFTensor) -> PackedScheme | None:
        """Return the scheme of a matrix in blocks; None for other tensors."""
        scheme = BLOCK_SCHEMES.get(tensor.type.name)
        if scheme is None or len(tensor.shape) < 2:
            return None
        return scheme if self._factors.get(tensor.name) is None else with_second(scheme, "values_times")

    def _factor_bytes(self, tensor: GGUFTensor) -> int:
        factors = self._factors.get(tensor.name)
        return 0 if factors is None else factors.num_bytes

    def _apply_factors(self, tensor: GGUFTensor, rows: tuple[int, int], values: torch.Tensor) -> None:
        """Multiply rows [start, end) by the factors of their matrices, which are read anew and not held."""
        import torch

        factors = self._factors.get(tensor.name)
        if factors is None:
            return
        start, end = rows
        matrix_rows = table_shape(tensor.shape)[0] // factors.shape[0]
        first, last = start // matrix_rows, -(-end // matrix_rows)
        raw = bytearray(4 * (last - first))
        self._data.read_into(factors, 4 * first, memoryview(raw))
        numbers = torch.frombuffer(raw, dtype=torch.float32)
        if not bool(numbers.isfinite().all()):
            raise _wrong_factors(self._file, factors, "holds infinity or NaN", "a finite number")
        for matrix in range(first, last):
            low, high = max(start, matrix * matrix_rows), min(end, (matrix + 1) * matrix_rows)
            values[low - start : high - start].mul_(numbers[matrix - first])

    def _read_blocks(self, tensor: GGUFTensor, first: int, last: int) -> torch.Tensor:
        """Read blocks [first, last) of a tensor as bytes; valid until this thread's next read."""
        import torch

        num_bytes = (last - first) * tensor.type.block_bytes
        raw: bytearray | None = getattr(self._buffers, "raw", None)
        if raw is None or len(raw) < num_bytes:
            raw = self._buffers.raw = bytearray(num_bytes)
        row_blocks = max(1, table_shape(tensor.shape)[1] // tensor.type.block_elements)
        rows, row_bytes = (first // row_blocks, last // row_blocks), row_blocks * tensor.type.block_bytes
        self._read_rows(tensor, rows, row_bytes, memoryview(raw)[:num_bytes])
        return torch.frombuffer(raw, dtype=torch.uint8, count=num_bytes)

    def _read_rows(self, tensor: GGUFTensor, rows: tuple[int, int], row_bytes: int, out: memoryview) -> None:
        """Read rows as stored; those of gated delta nets in the order of a checkpoint."""
        if self._states is None:
            self._data.read_into(tensor, rows[0] * row_bytes, out)
            return
        for run in self._states.runs(tensor.name, *rows):
            place = (run.row - rows[0]) * row_bytes
            self._data.read_into(tensor, run.file_row * row_bytes, out[place : place + run.num_rows * row_bytes])

    def _values(self, num_elements: int) -> torch.Tensor:
        """Return a buffer of float32 values; valid until this thread's next read."""
        import torch

        values: torch.Tensor | None = getattr(self._buffers, "values", None)
        if values is None or values.numel() < num_elements:
            values = self._buffers.values = torch.empty(num_elements, dtype=torch.float32)
        return values[:num_elements]

    def _step_bytes(self, tensor: GGUFTensor) -> int:
        """Return the scratch bytes of a step of this tensor: its rows, and up to a head more on either side."""
        all_rows, num_columns = table_shape(tensor.shape)
        head_dim = self._head_dim if _INTERLEAVED.fullmatch(tensor.name) else None
        num_rows = _step_rows(num_columns, head_dim) + 2 * (head_dim or 0)
        num_elements = min(num_rows, all_rows) * num_columns + 2 * tensor.type.block_elements
        raw_bytes = -(-num_elements // tensor.type.block_elements) * tensor.type.block_bytes
        if tensor.type.name in NATIVE_DTYPES:
            return 2 * raw_bytes
        return 2 * raw_bytes + 4 * num_elements + DEQUANT_BYTES


def _step_rows(num_columns: int, head_dim: int | None) -> int:
    """Return the rows of a step: whole groups of rows that lie interleaved in tiles, and whole heads if they are."""
    unit = lcm(TILE_ROWS, head_dim or 1)
    return max(1, STEP_ELEMENTS // num_columns // unit) * unit


def _beside(name: str, ending: str) -> str:
    """Return the name of a tensor beside a weight: blk.0.ffn_up.scale beside blk.0.ffn_up.weight."""
    return f"{name.removesuffix('.weight')}.{ending}"


def _factor_of(file: GGUFFile, tensor: GGUFTensor) -> GGUFTensor | None:
    """Return the tensor with a factor for each matrix; None if it is absent, since conversions leave out ones."""
    factors = file.tensors.get(_beside(tensor.name, FACTOR))
    shape = (prod(tensor.shape[:-2]),)
    if factors is not None and (factors.type.name, factors.shape) != ("F32", shape):
        found = f"is {factors.type.name} of shape {factors.shape}"
        raise _wrong_factors(file, factors, found, f"F32 of shape {shape}")
    return factors


def _wrong_factors(file: GGUFFile, factors: GGUFTensor, found: str, expected: str) -> ModelFormatError:
    name = file.files[factors.part].path.name
    return ModelFormatError("gguf.wrong_tensor", file=name, tensor=factors.name, found=found, expected=expected)


def _refuse_coded_vectors(file: GGUFFile) -> None:
    """Refuse rates and biases by head in blocks: a head would have no bytes of its own."""
    for name, tensor in file.tensors.items():
        if VECTORS.fullmatch(name) and tensor.type.name not in NATIVE_DTYPES:
            raise _wrong_factors(file, tensor, f"is {tensor.type.name}", f"{', '.join(NATIVE_DTYPES)}")


def _as_expected(tensor: GGUFTensor) -> GGUFTensor:
    match = _LAYER_TENSOR.fullmatch(tensor.name)
    if len(tensor.shape) == 1 and match is not None and match[2] == SHARED_GATE and match[3] == "weight":
        return replace(tensor, shape=(1, *tensor.shape))
    if len(tensor.shape) == 2 and match is not None and match[2] == CONVOLUTION:
        return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    return tensor


def _places(start: int, end: int, head_dim: int) -> torch.Tensor:
    """Return the file's row indices for rows [start, end) of interleaved heads."""
    import torch

    rows, half = torch.arange(start, end), head_dim // 2
    return rows // head_dim * head_dim + rows % half * 2 + rows % head_dim // half
