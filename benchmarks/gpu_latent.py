"""Models with latent attention (MLA) on a GPU: plan, speed, tokens that fit: python benchmarks/gpu_latent.py [--cases NAME,...]

By the method of benchmarks/gpu_groups.py, with engines of the shapes of DeepSeek-V2-Lite, GLM-4.7-Flash, DeepSeek-R1 and
DeepSeek-V3.2 (as many layers as fit one GPU; V3.2 beside 64 contexts of 128 thousand tokens, which are not computed), dummy
weights, each in a process of its own. A longer run behind the timed ones counts allocations and compilations over a thousand
steps and more.
"""

from collections.abc import Mapping

from gpu_groups import Case, run
from gpu_records import options

LITE = {"max_model_len": 32768, "max_num_seqs": 64}
SPARSE = {"max_model_len": 131072, "max_num_seqs": 64, "kv_cache_dtype": "fp8_ds_mla", "memory_utilization": 0.95}
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
}
TINY_CASES: Mapping[str, Case] = {
    "v2-lite": Case("DeepSeek-V2-Lite", {"max_model_len": 256, "max_num_seqs": 4}, (1,), 0, 120, (3, 8)),
    "v32": Case("DeepSeek-V3.2", {"max_model_len": 256, "max_num_seqs": 4}, (1,), lengths=(3, 8), contexts=(128, 192)),
}


def main() -> None:
    """Run what was asked, as far as the time goes."""
    run(
        options("Models with latent attention: plan, speed, tokens that fit"), TINY_CASES, CASES, "gpu-latent", "latent"
    )


if __name__ == "__main__":
    main()
