"""Tiny GGUF files of random blocks, for types that the `gguf` package reads and does not write."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

GRID_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
HIDDEN, VOCAB, NUM_EXPERTS = 256, 32, 3
"""One block of the widest type is a row."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file."""

    kind: str
    raw: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return np.ascontiguousarray(gguf.quants.dequantize(self.raw, getattr(gguf.GGMLQuantizationType, self.kind)))


def plain(values: np.ndarray) -> Stored:
    return Stored("F32", values.astype(np.float32))


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> Stored:
    """Random codes, signs and sub-scales. Scales keep values near 0.05, so that a model of them has finite logits."""
    rng = np.random.default_rng(seed)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
    num_blocks = int(np.prod(shape)) // block_elements
    raw = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    if kind == "NVFP4":
        raw[:, :4] = rng.integers(0, 40, (num_blocks, 4))
    else:
        raw[:, :2] = rng.uniform(1e-4, 1e-3, (num_blocks, 1)).astype(np.float16).view(np.uint8)
    return Stored(kind, raw.reshape(*shape[:-1], -1))


def write_tensors(path: Path, tensors: Mapping[str, Stored], arch: str = "qwen3", **numbers: int) -> None:
    """Write a file of these tensors, with the settings of the tiny model. `numbers` are more settings."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if arch == "qwen3moe":
        writer.add_expert_count(NUM_EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
    writer.add_token_list([f"token{index}" for index in range(VOCAB)])
    for key, number in numbers.items():
        writer.add_uint16(key.replace("__", "."), number)
    for name, stored in tensors.items():
        writer.add_tensor(name, stored.raw, raw_dtype=getattr(gguf.GGMLQuantizationType, stored.kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_tensors(kind: str, arch: str = "qwen3") -> dict[str, Stored]:
    """Tensors of the tiny model, with every matrix but the router in this type, and factors beside NVFP4."""
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output": (VOCAB, HIDDEN),
        "blk.0.attn_q": (256, HIDDEN),
        "blk.0.attn_k": (128, HIDDEN),
        "blk.0.attn_v": (128, HIDDEN),
        "blk.0.attn_output": (HIDDEN, 256),
    }
    experts = (NUM_EXPERTS,) if arch == "qwen3moe" else ()
    shapes |= {f"blk.0.ffn_{part}{'_exps' * len(experts)}": (*experts, 256, 256) for part in ("gate", "up", "down")}
    tensors: dict[str, Stored] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        tensors[f"{name}.weight"] = random_blocks(kind, shape, seed)
        if kind == "NVFP4" and name != "token_embd":
            count = shape[0] if len(shape) == 3 else 1
            tensors[f"{name}.scale"] = plain(0.3 + 0.1 * np.arange(seed, seed + count))
            tensors[f"{name}.input_scale"] = plain(np.full(count, 7.0))
    for seed, (name, width) in enumerate(
        {"output_norm": HIDDEN, "blk.0.attn_norm": HIDDEN, "blk.0.ffn_norm": HIDDEN}.items()
    ):
        tensors[f"{name}.weight"] = plain(np.random.default_rng(90 + seed).uniform(0.5, 1.5, width))
    tensors |= {f"blk.0.attn_{part}_norm.weight": plain(np.ones(64)) for part in "qk"}
    if experts:
        router = np.random.default_rng(99).standard_normal((NUM_EXPERTS, HIDDEN))
        tensors["blk.0.ffn_gate_inp.weight"] = plain(router)
    return tensors


def expanded(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors in F32: blocks as the `gguf` package reads them, times their factors, without the factors."""
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if name.endswith("scale"):
            continue
        values = stored.values
        factors = tensors.get(name.replace(".weight", ".scale"))
        if factors is not None:
            values = values * factors.raw.reshape(-1, *[1] * (2 if values.ndim == 3 else 1))
        found[name] = plain(values)
    return found
