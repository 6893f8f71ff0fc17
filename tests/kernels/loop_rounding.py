"""Compiles large tiles of attention for a GPU where none is: run as a program it prints, as JSON, what their loops over tokens round."""

import json
import re
import sys

import torch

torch.cuda.is_available = lambda: True  # before kernels are imported, because their import asks it

from triton import compile as compile_kernel  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from holdfast.kernels.attention.quantized_prefill import prefill_kernel  # noqa: E402
from holdfast.kernels.attention.tiled_attention import _attend_kernel  # noqa: E402
from holdfast.kernels.geometry import QUANTIZED_LARGE_TILE  # noqa: E402

HEADS = {"NUM_KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": 128, "HAS_WINDOW": False, "BLOCK_M": 128, "BLOCK_N": 64}
PLAIN = HEADS | {"LARGE": True, "BLOCK_D": 128, "NUM_STAGES": 3, "PDL": False, "SMALL_BATCH": False}
QUANTIZED = HEADS | {"PAGE_TOKENS": 16, "HAS_KEY_BIAS": False, "BLOCK_D": 128, "VALUE_COLUMNS": 64, "PAIR_COLUMNS": 64}
QUANTIZED |= {
    "BLOCK_M": QUANTIZED_LARGE_TILE,
    "KEY_BITS": 8,
    "VALUE_BITS": 8,
    "KEY_COLUMNS": 128,
    "NUM_STAGES": 2,
    "PLAIN": False,
    "PDL": False,
}
ABSENT = ("p_sinks", "p_bias", "p_cos", "p_sin", "p_near", "p_fragments", "p_k_signs", "p_v_signs")
TYPES = {"p_partial_out": "*fp32", "p_partial_lse": "*fp32", "p_pages": "*i32", "p_tiles": "*i32", "p_k_scale": "*fp16"}
TYPES |= {"scale_log2": "fp32", "softcap_log2": "fp32", "rotation_scale": "fp32", "p_v_scale": "*fp16"}


def ptx(is_quantized: bool, has_softcap: bool) -> str:
    """Of the large tiles."""
    kernel, constants = (prefill_kernel, dict(QUANTIZED)) if is_quantized else (_attend_kernel, dict(PLAIN))
    names = kernel.arg_names
    constants |= {name: None for name in ABSENT if name in names}
    constants |= {} if has_softcap else {"softcap_log2": None}
    types = TYPES | ({"p_k": "*u8", "p_v": "*i16"} if is_quantized else {})
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.startswith("p_") else "i32")
        for name in names
    }
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name[:2] == "p_"}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": 4 if is_quantized else 8}
    return compile_kernel(source, target=target, options=options).asm["ptx"]


def loops(text: str) -> list[dict[str, int]]:
    """Sums, differences, and products contracted with them, of every loop that has exponentials of many scores."""
    parts = re.split(r"^\$L__BB\S+:", text, flags=re.MULTILINE)
    ops = {op: re.compile(rf"\s{op}\.(?:rn\.)?(?:ftz\.)?f32\s") for op in ("fma", "sub", "add")}
    many = (part for part in parts if part.count("ex2.approx") > 16)
    return [{op: len(pattern.findall(part)) for op, pattern in ops.items()} for part in many]


if __name__ == "__main__":
    print(json.dumps(loops(ptx(sys.argv[1] == "quantized", sys.argv[2] == "softcap"))))
