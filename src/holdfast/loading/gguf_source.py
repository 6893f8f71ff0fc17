"""A GGUF file as a source of weights: Hugging Face names, rows in Hugging Face order; no torch until a read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.loading.gguf_config import ROPE_FACTORS
from holdfast.loading.gguf_data import GGUFData
from holdfast.loading.gguf_file import GGUFFile, GGUFTensor
from holdfast.loading.source import TensorEntry
from holdfast.models.checkpoint_names import LLAMA_NAMES

if TYPE_CHECKING:
    import torch

MODULES: Mapping[str, str] = {
    "token_embd": LLAMA_NAMES.embed,
    "output_norm": LLAMA_NAMES.final_norm,
    "output": LLAMA_NAMES.lm_head,
}
LAYER_MODULES: Mapping[str, str] = {
    "attn_norm": LLAMA_NAMES.attn_norm,
    "attn_q": LLAMA_NAMES.q,
    "attn_k": LLAMA_NAMES.k,
    "attn_v": LLAMA_NAMES.v,
    "attn_output": LLAMA_NAMES.o,
    "attn_q_norm": LLAMA_NAMES.q_norm,
    "attn_k_norm": LLAMA_NAMES.k_norm,
    "ffn_norm": LLAMA_NAMES.mlp_norm,
    "ffn_gate": LLAMA_NAMES.gate,
    "ffn_up": LLAMA_NAMES.up,
    "ffn_down": LLAMA_NAMES.down,
}
NATIVE_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that torch holds as they are; all others are read as float32."""
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_INTERLEAVED = re.compile(r"blk\.[0-9]+\.attn_[qk]\.(weight|bias)", re.ASCII)


def hugging_face_name(name: str) -> str:
    """What Hugging Face calls a tensor. A name without a counterpart stays, and is unused under it."""
    module, _, kind = name.rpartition(".")
    if module in MODULES and kind in ("weight", "bias"):
        return f"{MODULES[module]}.{kind}"
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_MODULES:
        return name
    return f"{LLAMA_NAMES.layer.format(match[1])}{LAYER_MODULES[match[2]]}.{match[3]}"


class GGUFSource:
    """Implements WeightSource. Two buffers, of file bytes and of float32 values, grow to the largest read and are reused."""

    def __init__(self, file: GGUFFile, interleaved_head_dim: int | None) -> None:
        """With an interleaved head, rows 2i and 2i+1 of a query or key head are what Hugging Face has at i and i + half."""
        self._data = GGUFData(file)
        self._tensors = {hugging_face_name(name): tensor for name, tensor in file.tensors.items()}
        self._head_dim = interleaved_head_dim
        self._bytes = bytearray()
        self._values: torch.Tensor | None = None
        self._entries = {
            name: TensorEntry(
                name=name,
                dtype=NATIVE_DTYPES.get(tensor.type.name, "float32"),
                shape=tensor.shape,
                file=file.path.name,
                num_bytes=tensor.num_bytes,
            )
            for name, tensor in self._tensors.items()
        }

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor, by its Hugging Face name."""
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        """Rotary tables, which are read into the spec or computed."""
        return frozenset(
            name for name in self._entries if name == ROPE_FACTORS or name.endswith(".attn_rot_embd.weight")
        )

    def read_rows(self, name: str, row_start: int, row_end: int) -> torch.Tensor:
        """Rows [row_start, row_end), dequantized; valid until the next read."""
        import torch

        tensor = self._tensors[name]
        num_rows = tensor.shape[0]
        assert 0 <= row_start <= row_end <= num_rows, f"{name}: rows {row_start} to {row_end} of {num_rows}"
        if row_start == row_end:
            return torch.empty((0, *tensor.shape[1:]), dtype=getattr(torch, self._entries[name].dtype))
        if self._head_dim is None or not _INTERLEAVED.fullmatch(tensor.name):
            return self._read(tensor, row_start, row_end, None)
        head_dim, half = self._head_dim, self._head_dim // 2
        first_row = row_start // head_dim * head_dim
        rows = torch.arange(row_start, row_end)
        places = rows // head_dim * head_dim + rows % half * 2 + rows % head_dim // half
        return self._read(tensor, first_row, -(-row_end // head_dim) * head_dim, places - first_row)

    def close(self) -> None:
        """Let go of the file and the buffers; may be called twice."""
        self._data.close()
        self._bytes = bytearray()
        self._values = None

    def _read(self, tensor: GGUFTensor, first: int, last: int, picked: torch.Tensor | None) -> torch.Tensor:
        """Rows [first, last) of the file, of which `picked` counts from the first, in that order; or all of them."""
        import torch

        from holdfast.loading.gguf_dequant import dequantize

        is_native = tensor.type.name in NATIVE_DTYPES
        if not is_native and len(tensor.shape) == 1:
            # A quantized vector is one row of blocks: elements have no bytes of their own.
            raw = self._read_bytes(tensor, 0, tensor.num_bytes)
            values = dequantize(raw, tensor.type, self._float_buffer(tensor.shape))[first:last]
            return values if picked is None else values.index_select(0, picked)
        row_bytes = tensor.num_bytes // tensor.shape[0]
        raw = self._read_bytes(tensor, first * row_bytes, (last - first) * row_bytes).view(-1, row_bytes)
        if picked is not None:
            raw = raw.index_select(0, picked)
        shape = (raw.shape[0], *tensor.shape[1:])
        if is_native:
            return raw.view(getattr(torch, NATIVE_DTYPES[tensor.type.name])).view(shape)
        return dequantize(raw, tensor.type, self._float_buffer(shape))

    def _read_bytes(self, tensor: GGUFTensor, start: int, num_bytes: int) -> torch.Tensor:
        import torch

        if len(self._bytes) < num_bytes:
            self._bytes = bytearray(num_bytes)
        self._data.read_into(tensor, start, memoryview(self._bytes)[:num_bytes])
        return torch.frombuffer(self._bytes, dtype=torch.uint8, count=num_bytes)

    def _float_buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        num_elements = 1
        for size in shape:
            num_elements *= size
        if self._values is None or self._values.numel() < num_elements:
            self._values = torch.empty(num_elements, dtype=torch.float32)
        return self._values[:num_elements].view(shape)
