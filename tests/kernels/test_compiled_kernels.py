"""What the interpreter takes, the compiler for GPUs takes too, and within the shared memory of a large one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "gpu_compiler.py"
SHARED_BYTES = 227 * 1024
"""What a program may hold on an H100 or H200."""
COMMON_CASES = (
    "one gated row",
    "rows",
    "one row by blocks",
    "row-scaled tiles, 32 rows",
    "write quantized D128, one format",
    "chosen tokens, 16 heads in low tiles",
    "streams of V4-Flash, 1 row",
    "packed experts of 2880 by 2880, 8 rows",
)
"""For each way to write a kernel, one that is compiled in a second or three."""
OTHER_CASES = (
    "rope rows",
    "write D128",
    "masks of 152K tokens",
    "attention D64",
    "top-k of 8K",
    "exchange of 2",
    "exchange of 3",
    "exchange of 4",
    "a rank of 24 rows",
    "a rank of 1000 rows",
    "one row",
    "one row of odd sizes",
    "gated rows",
    "rows of odd sizes",
    "window and entries, 64 heads",
    "window and entries, 128 heads, fp8",
    "window and entries, 20 heads, fp8, any GPU",
    "window, 64 heads, any GPU",
    "attention D8",
    "attention D128",
    "attention D128, small batch",
    "attention D128, window",
    "attention D256",
    "attention D64, sinks",
    "attention D256, capped",
    "attention D128, few rows, both",
    "rope rows of two ropes",
    "rope rows of V4",
    "write D80",
    "write quantized D64",
    "write quantized D80",
    "write quantized D128",
    "write quantized D128, near rows",
    "write quantized D80, near rows with a bias",
    "write quantized D256",
    "write quantized in float32",
    "quantized 8/8 D128",
    "quantized 8/4 D128",
    "quantized 8/4 D128, large tiles",
    "quantized 3/4 D128, small tiles",
    "quantized 3/3 D128, window",
    "quantized 4/4 D128",
    "quantized 4/4 D64",
    "quantized 3/3 D64 in float32",
    "quantized 3/3 D64, small tiles",
    "quantized 4/4 D80, large tiles",
    "quantized 3/3 D80",
    "quantized 4/4 D256",
    "quantized 3/3 D256, large tiles",
    "quantized 8/8 D64, sinks",
    "quantized 4/4 D128, both",
    "quantized 3/3 D256, both",
    "row-scaled tiles, 64 rows",
    "row-scaled tiles, 128 rows",
    "row-scaled tiles of odd sizes",
    "one row by blocks, a single load",
    "one row by blocks of odd sizes",
    "one row by four bits",
    "one row by four bits, many columns",
    "one row by four bits of odd sizes",
    "one row by four bits in float32",
    "one row by blocks in float32",
    "rows placed",
    "layer norm",
    "masks of 100 tokens",
    "kv_b of V2-Lite, 1 row",
    "kv_b of GLM, 64 rows",
    "kv_b of GLM, 900 rows",
    "latents, 16 heads",
    "latents, 128 heads in warpgroups",
    "latents, 20 heads in warpgroups",
    "latents, 20 heads",
    "latents, 128 heads",
    "latents of MiniCPM3, 40 heads",
    "latents, 3 heads, small pages",
    "latents written",
    "latents written, fp8",
    "latents written, 4 bits",
    "latents written, 4 bits of 192",
    "window",
    "window, fp8",
    "window, 4 bits",
    "entries of 4, 4 bits",
    "entries of 4",
    "entries of 4, fp8",
    "entries of 128, fp8",
    "index of entries",
    "index in fp8",
    "index in fp8, large pages",
    "index in fp8, small pages",
    "index in fp8, 3 heads of 48",
    "index in fp8 as bytes",
    "index in bfloat16",
    "index in float32",
    "quantized latents, fp8",
    "quantized latents, 4 bits",
    "quantized latents, fp8 in warpgroups",
    "quantized latents, 4 bits in warpgroups",
    "quantized latents, 4 bits of 192",
    "chosen tokens, 16 heads",
    "chosen tokens, 128 heads",
    "chosen tokens, 20 heads of 192",
    "chosen tokens, 16 heads, fp8",
    "chosen tokens, 128 heads, fp8",
    "chosen tokens, 128 heads, 4 bits",
    "chosen tokens, 128 heads in warpgroups",
    "chosen tokens, 40 heads in warpgroups, fp8",
    "chosen tokens, 128 heads in warpgroups, 4 bits",
    "chosen tokens, 16 heads in turns, fp8",
    "chosen tokens, 20 heads in low tiles, fp8",
    "chosen tokens, 20 heads in low tiles, 4 bits",
    "chosen tokens, 20 heads, 4 bits",
    "chosen tokens, 16 heads, 4 bits and rope of 8",
    "chosen tokens, 3 heads, 4 bits of 192",
    "up-projected P128",
    "up-projected P192, fp8",
    "up-projected P128, 4 bits",
    "up-projected P128, 4 bits and rope of 8",
    "top-k of 160K",
    "top-k of 1M",
    "streams of V4-Flash, 16 rows",
    "streams of V4-Pro, 900 rows",
    "routing of V4",
    "routing of V4 by a table",
    "experts of V4 in fp8_block, 1 rows",
    "experts of V4 in fp8_block, 8 rows",
    "experts of V4 in fp8_block, 700 rows",
    "experts of V4 in mxfp4, 1 rows",
    "experts of V4 in mxfp4, 8 rows",
    "experts of V4 in mxfp4, 700 rows",
    "routing of V2",
    "routing of V3",
    "experts in bfloat16, 1 rows",
    "experts in bfloat16, 8 rows",
    "experts in bfloat16, 700 rows",
    "experts in mxfp4, 1 rows",
    "experts in mxfp4, 8 rows",
    "experts in mxfp4, 700 rows",
    "expert layer in fp8, 1 rows of 2048",
    "expert layer in fp8, 8 rows of 2048",
    "expert layer in fp8, 1 rows of 2000",
    "expert layer in bfloat16, 1 rows of 2048",
    "expert layer in int8, 1 rows of 2048",
    "packed experts of 2880 by 2880, 30 rows",
    "packed experts of 2880 by 2880, 130 rows",
    "packed experts of 2880 by 2880, 700 rows",
    "packed experts of 2048 by 4096, 8 rows",
    "packed experts of 2048 by 4096, 30 rows",
    "packed experts of 96 by 160, 8 rows",
    "packed experts of 96 by 160, 30 rows",
    "packed experts of 96 by 160, 700 rows",
)


def check(cases: tuple[str, ...], cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(PROGRAM), *cases]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)
    assert results.keys() == set(cases)
    assert not {case: error for case, error in results.items() if isinstance(error, str)}
    assert not {case: size for case, size in results.items() if not 0 <= size <= SHARED_BYTES}


def test_compiled_kernels_build_in_common_shapes(tmp_path):
    check(COMMON_CASES, tmp_path)


@pytest.mark.slow
def test_compiled_kernels_build_in_every_shape(tmp_path):
    check(OTHER_CASES, tmp_path)
