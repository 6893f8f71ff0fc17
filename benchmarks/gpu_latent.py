"""Models with latent attention (MLA) on a GPU: plan, speed, tokens that fit: python benchmarks/gpu_latent.py [--cases NAME,...]

The method is that of benchmarks/gpu_groups.py, with dummy weights and a process for each engine: the shapes of
DeepSeek-V2-Lite, GLM-4.7-Flash, DeepSeek-R1, DeepSeek-V3.2 and DeepSeek-V4-Flash, with as many layers as fit one GPU. V3.2
and V4 also hold 64 contexts of 128 thousand tokens, V4 also 4 of a million, without prefill. A longer run after the timed
ones counts allocations and compilations over a thousand steps and more.
"""

from collections.abc import Mapping
from typing import Any

from gpu_groups import Case, run
from gpu_records import options

from holdfast.models.catalogue import find_model

LITE = {"max_model_len": 32768, "max_num_seqs": 64}
SPARSE = {"max_model_len": 131072, "max_num_seqs": 64, "kv_cache_dtype": "fp8_ds_mla", "memory_utilization": 0.95}
BLOCK = 2048
"""Tokens of whole pages in all of DeepSeek-V4's groups. A context one token longer is cached except that token, and no page is
copied."""
COMPRESSED = {"max_num_seqs": 64, "kv_cache_dtype": "fp8", "memory_utilization": 0.95}


def first_layers(model: str, num_layers: int) -> dict[str, Any]:
    """Return settings of a model with the first layers of one with entries, unchanged."""
    ratios = find_model(model)[1]["compress_ratios"]
    assert isinstance(ratios, list), f"{model} has no entries"
    return {"num_hidden_layers": num_layers, "compress_ratios": ratios[:num_layers]}


CASES: Mapping[str, Case] = {
    "v2-lite": Case("DeepSeek-V2-Lite", LITE, (1, 16, 64), steady_tokens=1100),
    "v2-lite-fp8": Case("DeepSeek-V2-Lite", {**LITE, "quantization": "fp8"}, (1, 16, 64)),
    **{
        f"v2-lite-{name}": Case("DeepSeek-V2-Lite", {**LITE, "kv_cache_dtype": name}, (1, 64))
        for name in ("fp8_ds_mla", "turboquant_mla_4bit", "turboquant_mla_4bit_r8")
    },
    "glm": Case("GLM-4.7-Flash", LITE, (1, 64)),
    "r1": Case("DeepSeek-R1", LITE, (1, 16, 64), shapes={"num_hidden_layers": 11}),
    "v32": Case(
        "DeepSeek-V3.2",
        SPARSE,
        (1, 16, 64),
        shapes={"num_hidden_layers": 9},
        steady_tokens=110,
        contexts=(8192, 130944),
    ),
    "v4-flash": Case(
        "DeepSeek-V4-Flash",
        {**COMPRESSED, "max_model_len": 64 * BLOCK + 256},
        (1, 16, 64),
        shapes=first_layers("DeepSeek-V4-Flash", 31),
        steady_tokens=110,
        contexts=(4 * BLOCK + 1, 64 * BLOCK + 1),
    ),
    "v4-flash-1m": Case(
        "DeepSeek-V4-Flash",
        {**COMPRESSED, "max_model_len": 512 * BLOCK, "max_num_seqs": 4},
        (1,),
        shapes=first_layers("DeepSeek-V4-Flash", 34),
        steady_tokens=110,
        contexts=(511 * BLOCK + 1,),
    ),
}
TINY_CASES: Mapping[str, Case] = {
    "v2-lite": Case("DeepSeek-V2-Lite", {"max_model_len": 256, "max_num_seqs": 4}, (1,), 0, 120, (3, 8)),
    "v32": Case("DeepSeek-V3.2", {"max_model_len": 256, "max_num_seqs": 4}, (1,), lengths=(3, 8), contexts=(128, 192)),
    "v4-flash": Case(
        "DeepSeek-V4-Flash",
        {"max_model_len": 768, "max_num_seqs": 4, "kv_cache_dtype": "fp8", "page_tokens": 1},
        (1, 3),
        steady_tokens=10,
        lengths=(3, 8),
        contexts=(257, 513),
    ),
}


def main() -> None:
    """Run the requested parts while time allows."""
    run(
        options("Models with latent attention: plan, speed, tokens that fit"), TINY_CASES, CASES, "gpu-latent", "latent"
    )


if __name__ == "__main__":
    main()
