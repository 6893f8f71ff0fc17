"""Predict the speed of several GPUs from records of one: python benchmarks/predict_ranks.py [--no-record]

None of it ran on several GPUs. Times of one H200 come from the committed records. Times of exchanges come from published
tables of eight H200 (`SUM_US` of planning/exchange_time.py, `ALL_TO_ALL_US`: sources beside them).

    T(n) = F + (T1 - F) / n + sums          F: the part that does not shrink with its share (launches, norms, small kernels)

Qwen3-32B bfloat16, decode at 512 tokens of context: `reduce` (two sums a layer) with the fused decode path and without it;
`exact` (four gathers a layer) against batch_invariant on one rank. DeepSeek-V3 fp8 at 4K: tensor 8 in a node, one stage per
node, as built. Beside it data-parallel attention with an all-to-all of experts, which is not built.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_records import RECORDS, ROOT, command, print_table, record_name, today, versions

from holdfast.cli import bench_record
from holdfast.memory.device_rates import H200_FLOPS_PER_SECOND
from holdfast.models.catalogue import find_model
from holdfast.planning.exchange_time import NETWORK_BYTES_PER_SECOND, NETWORK_SECONDS, gather_seconds, sum_seconds

NEVER_RAN = "predicted: nothing of this record ran on several GPUs"
SIZES = (2, 4, 8)
ALL_TO_ALL_US: Mapping[int, tuple[float, float]] = {8: (35.1, 67.7), 16: (118, 195), 32: (155, 273), 64: (173, 314)}
"""Dispatch and combine of 128 rows of 7168 to 8 experts each, fp8 there and bfloat16 back. 8: an H200 node, SGLang 0.5.12's
table in aiconfigurator 0.12.0; more: DeepEP V1's own table of H800 with one 400 Gb/s card each."""
CUBLAS_SECONDS = 16.88e-3
"""All products of a Qwen3-32B step of one row by cuBLAS, in one graph on an H200, 2026-11-15; not in our records."""
FP8_FLOPS_PER_SECOND = 2 * H200_FLOPS_PER_SECOND
"""Twice what an H200 gave in bfloat16 (flops_per_second of the record of latent attention)."""
GPU_BYTES = 139.8 * 2**30
UTILIZATION, OTHER_BYTES = 0.98, 6 * 2**30
"""Usable share of the GPU's memory; and a rank's bytes beside weights and pages: workspace, exchange buffers, graphs, the context."""
AICONFIGURATOR: Mapping[str, Mapping[int, float]] = {
    "Qwen3-32B, batch 1": {1: 54.80, 2: 94.28, 4: 143.96, 8: 200.63},
    "Qwen3-32B, batch 128": {1: 4885.24, 2: 8289.66, 4: 12568.20, 8: 17887.70},
    "DeepSeek-V3, tensor 8": {8: 8 * 373.90},
    "DeepSeek-V3, all-to-all": {8: 8 * 1995.52, 16: 16 * 2253.05, 32: 32 * 2377.50, 64: 64 * 1784.93},
}
"""Tokens/s by number of GPUs of `aiconfigurator cli estimate --estimate-mode static_gen --system h200_sxm`, version 0.12.0: vLLM
0.24.0 (512 tokens in, 64 out; DeepSeek-V3 4096 in, 128 sequences), and for the all-to-all its fastest engine, TensorRT-LLM."""
MIN_ROWS: Mapping[int, int] = {2: 16, 4: 16, 8: 64}
"""Minimum rows of an exact step, by ranks: from there on cuBLAS gives a share of a weight the bits of the whole."""
CONTEXT = 4096


# --- one GPU


def record(name: str) -> dict[str, Any]:
    """Read a committed record."""
    return json.loads((ROOT / RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def result(name: str, measure: str) -> dict[str, Any]:
    """Return one line of a record."""
    return next(line for line in record(name)["results"] if line["measure"] == measure)


class OneGpu(NamedTuple):
    """Seconds of a step of Qwen3-32B on one H200, and the part that does not shrink with a share."""

    fused: float
    unfused: float
    """Without the fused decode path: batch_invariant, and every step with ranks."""
    fused_fixed: float
    unfused_fixed: float


def one_gpu(batch: int) -> OneGpu:
    """Read the record of steps that run ahead.

    Steps of 32 rows and more are not fused, so they give the extra cost of an unfused step: all time above the roof at
    32 rows. The slower cuBLAS products in it shrink with the share; the rest does not.
    """
    found = {size: result("h200-2026-11-17-overlap", f"Qwen3-32B, bfloat16, batch {size}") for size in (1, 32, batch)}
    seconds = {size: size / line["values"]["runs ahead"] for size, line in found.items()}
    roof = {size: size / line["roof"]["runs ahead"] for size, line in found.items()}
    weights = found[1]["roof"]["runs ahead"] ** -1
    unfused_fixed = seconds[32] - roof[32] - (CUBLAS_SECONDS - weights)
    unfused = seconds[batch] if batch >= 32 else roof[batch] + seconds[32] - roof[32]
    return OneGpu(seconds[batch], unfused, seconds[1] - roof[1], unfused_fixed)


# --- exchanges between ranks


def shared_seconds(whole: float, fixed: float, exchanged: float, size: int) -> float:
    """Return T(n) of the formula at the top."""
    return fixed + (whole - fixed) / size + exchanged


# --- Qwen3-32B


class Rates(NamedTuple):
    """Tokens a second for one number of ranks."""

    fused: float
    reduce: float
    exact: float


def qwen_rates(batch: int, size: int) -> Rates:
    """Predict the rates. With one rank `exact` is batch_invariant, and all three rates are measured or derived from it."""
    config: dict[str, Any] = dict(find_model("Qwen3-32B")[1])
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads, inner = config["num_attention_heads"] * config["head_dim"], config["intermediate_size"]
    one = one_gpu(batch)
    if size == 1:
        return Rates(batch / one.fused, batch / one.unfused, batch / one.unfused)
    sums = 2 * layers * sum_seconds(batch * hidden, size)
    rows = max(batch, MIN_ROWS[size])
    gathers = layers * sum(gather_seconds(rows * width, size) for width in (heads, hidden, inner, hidden))
    return Rates(
        batch / shared_seconds(one.fused, one.fused_fixed, sums, size),
        batch / shared_seconds(one.unfused, one.unfused_fixed, sums, size),
        batch / shared_seconds(one.unfused, one.unfused_fixed, gathers, size),
    )


# --- DeepSeek-V3


class DeepSeek(NamedTuple):
    """Bytes of a layer in fp8 and of a token, and times of such layers on one H200."""

    num_layers: int
    num_dense: int
    hidden: int
    num_experts: int
    top_k: int
    attention_bytes: int
    latent_bytes: int
    expert_bytes: int
    dense_bytes: int
    head_bytes: int
    """Bytes of the embedding, or of the head."""
    read_bytes_per_second: float
    """Weights' share of the roof in a whole engine: fp8 experts at 64 rows."""
    layer_seconds: float
    """Part of a layer that does not shrink: all time above the roof of a step of one row."""
    latent_seconds: Mapping[int, float]
    """Seconds of one layer's attention to one stored token, by heads."""


def deepseek() -> DeepSeek:
    """Read shapes from the catalogue and times from the records."""
    config: dict[str, Any] = dict(find_model("DeepSeek-V3")[1])
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, queries = config["kv_lora_rank"], config["q_lora_rank"]
    projections = hidden * queries + queries * heads * (nope + rope) + hidden * (latent + rope) + heads * value * hidden
    kv_b = 2 * latent * heads * (nope + value)  # bfloat16: kv_b is on both sides of the latents
    rate = record("h200-2026-11-17-latent-r1")["read_bytes_per_second"]
    experts = result("h200-2026-11-17-overlap", "Qwen3-30B-A3B, fp8, batch 64")["percent_of_roof"]["runs ahead"] / 100
    alone = result("h200-2026-11-17-latent-r1", "DeepSeek-R1, 11 layers, decode, batch 1")
    latents = {
        num_heads: result("h200-2026-11-17-latent-attention", measure)["values"]["holdfast"] * 1e-3 / num_tokens
        for num_heads, measure, num_tokens in (
            (16, "16 heads, 128 x 4096, bfloat16", 128 * 4096),
            (128, "128 heads, 64 x 8192, bfloat16", 64 * 8192),
        )
    }
    return DeepSeek(
        num_layers=config["num_hidden_layers"],
        num_dense=config["first_k_dense_replace"],
        hidden=hidden,
        num_experts=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        attention_bytes=projections + kv_b,
        latent_bytes=2 * (latent + rope),
        expert_bytes=3 * hidden * config["moe_intermediate_size"],
        dense_bytes=3 * hidden * config["intermediate_size"],
        head_bytes=2 * hidden * config["vocab_size"],
        read_bytes_per_second=rate * experts,
        layer_seconds=(1 / alone["values"]["holdfast"] - 1 / alone["roof"]) / 11,
        latent_seconds=latents,
    )


def expert_seconds(model: DeepSeek, num_rows: int, num_local: int) -> float:
    """Return seconds of one rank's experts in one layer, for the rows of all ranks: chosen bytes or FLOPs, the larger."""
    chosen = 1 - (1 - model.top_k / model.num_experts) ** num_rows
    pairs = num_rows * model.top_k * num_local / model.num_experts
    read = num_local * chosen * model.expert_bytes / model.read_bytes_per_second
    return max(read, 2 * pairs * model.expert_bytes / FP8_FLOPS_PER_SECOND)


class Prediction(NamedTuple):
    """DeepSeek-V3 on a number of GPUs."""

    num_sequences: int
    """Sequences that fit at this context, over all GPUs."""
    step_milliseconds: float
    tokens_per_second: float


def built(num_stages: int, most_sequences: int | None = None) -> Prediction:
    """Predict tensor 8 in a node, whole experts over replicated rows, one stage per node, latents on all 8 ranks of a stage."""
    model, size = deepseek(), 8
    layers, experts = model.num_layers / num_stages, (model.num_layers - model.num_dense) / num_stages
    shared = layers * model.attention_bytes + model.num_dense / num_stages * model.dense_bytes
    held = shared + experts * (model.num_experts + 1) * model.expert_bytes + 2 * model.head_bytes / num_stages
    pages = GPU_BYTES * UTILIZATION - OTHER_BYTES - held / size
    num_sequences = int(pages / (CONTEXT * layers * model.latent_bytes))
    if most_sequences is not None:
        num_sequences = min(num_sequences, most_sequences)
    rows = num_sequences // num_stages
    read = (shared + experts * model.expert_bytes + model.head_bytes / num_stages) / size / model.read_bytes_per_second
    seconds = (
        read
        + experts * expert_seconds(model, rows, model.num_experts // size)
        + layers * rows * CONTEXT * model.latent_seconds[16]
        + layers * model.layer_seconds
        + 2 * layers * sum_seconds(rows * model.hidden, size)
        + (NETWORK_SECONDS + rows * 2 * model.hidden / NETWORK_BYTES_PER_SECOND if num_stages > 1 else 0)
    )
    return Prediction(num_sequences, seconds * num_stages * 1e3, rows / seconds)


def all_to_all(size: int, rows: int = 128) -> Prediction:
    """Predict the variant not built: each GPU attends for its own 128 sequences, rows go to their experts and back, no overlap."""
    model = deepseek()
    experts = model.num_layers - model.num_dense
    alike = (
        model.num_layers * model.attention_bytes + experts * model.expert_bytes + model.num_dense * model.dense_bytes
    )
    seconds = (
        (alike + model.head_bytes) / model.read_bytes_per_second
        + experts * expert_seconds(model, rows * size, model.num_experts // size)
        + model.num_layers * rows * CONTEXT * model.latent_seconds[128]
        + model.num_layers * model.layer_seconds
        + experts * sum(ALL_TO_ALL_US[size]) * 1e-6
    )
    return Prediction(rows * size, seconds * 1e3, rows * size / seconds)


# --- the record


def results() -> list[dict[str, Any]]:
    """Return all predictions."""
    found: list[dict[str, Any]] = []
    for batch in (1, 128):
        one, theirs = qwen_rates(batch, 1), AICONFIGURATOR[f"Qwen3-32B, batch {batch}"]
        for size in (1, *SIZES):
            rates = qwen_rates(batch, size)
            found.append(
                {
                    "measure": f"Qwen3-32B, batch {batch}, tensor {size}",
                    "unit": "tokens/s",
                    "values": {
                        "reduce (fused decode)": round(rates.fused, 1),
                        "reduce": round(rates.reduce, 1),
                        "exact": round(rates.exact, 1),
                        "aiconfigurator (vLLM)": theirs[size],
                    },
                    "scaling": round(rates.reduce / one.reduce, 3),
                    "scaling_fused": round(rates.fused / one.fused, 3),
                    "aiconfigurator_scaling": round(theirs[size] / theirs[1], 3),
                    "exact_against_batch_invariant": round(rates.exact / one.exact, 3),
                }
            )
    for num_stages in (1, 2, 4, 8):
        own, other = built(num_stages), all_to_all(8 * num_stages)
        theirs = {
            f"aiconfigurator ({name})": round(AICONFIGURATOR[f"DeepSeek-V3, {name}"][8 * num_stages])
            for name in ("tensor 8", "all-to-all")
            if 8 * num_stages in AICONFIGURATOR[f"DeepSeek-V3, {name}"]
        }
        found.append(
            {
                "measure": f"DeepSeek-V3 fp8, {8 * num_stages} GPUs",
                "unit": "tokens/s",
                "values": {
                    "tensor 8 x stages": round(own.tokens_per_second),
                    "128 sequences": round(built(num_stages, 128).tokens_per_second),
                    "all-to-all (not built)": round(other.tokens_per_second),
                    **theirs,
                },
                "num_sequences": {"tensor 8 x stages": own.num_sequences, "all-to-all": other.num_sequences},
                "milliseconds_a_token": {
                    "tensor 8 x stages": round(own.step_milliseconds, 1),
                    "all-to-all": round(other.step_milliseconds, 1),
                },
            }
        )
    return found


def make_record(found: list[dict[str, Any]], argv: list[str]) -> dict[str, Any]:
    """Build the record, with sources and a description."""
    one = one_gpu(1)
    return {
        "section": "predicted-ranks",
        "date": today(),
        "machine": "no machine",
        "model": "Qwen3-32B, DeepSeek-V3",
        "settings": NEVER_RAN,
        "results": found,
        "command": command(argv),
        "commit": bench_record.commit(),
        "versions": {**versions(), "aiconfigurator": "0.12.0"},
        "constants": {
            "qwen_step_milliseconds": {key: round(value * 1e3, 3) for key, value in one._asdict().items()},
            "deepseek_layer_microseconds": round(deepseek().layer_seconds * 1e6, 1),
            "deepseek_read_bytes_per_second": round(deepseek().read_bytes_per_second),
        },
        "sources": {
            "one H200": "h200-2026-11-17-overlap, h200-2026-11-17-latent-r1, h200-2026-11-17-latent-attention",
            "all-reduce": "aiconfigurator 0.12.0, vLLM 0.24.0's kernel on H200",
            "all-to-all": "aiconfigurator 0.12.0, SGLang 0.5.12 on H200 (8); DeepEP V1's table, H800 (16 to 64)",
            "network": "aiconfigurator 0.12.0, h200_sxm.yaml",
        },
        "note": f"{NEVER_RAN}. Exact steps of fewer than 16 rows are padded to 16, with 8 ranks to 64: of one sequence more is gathered than it has.",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / RECORDS, help="folder of the record")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    found = results()
    qwen = [line for line in found if "scaling" in line]
    columns = ("reduce (fused decode)", "reduce", "exact", "aiconfigurator (vLLM)")
    print_table(
        f"tokens/s; {NEVER_RAN}",
        ("", *columns, "scaling", "theirs", "exact / batch_invariant"),
        [
            [
                line["measure"],
                *(line["values"][name] for name in columns),
                line["scaling"],
                line["aiconfigurator_scaling"],
                line["exact_against_batch_invariant"],
            ]
            for line in qwen
        ],
    )
    ours = (
        "tensor 8 x stages",
        "128 sequences",
        "aiconfigurator (tensor 8)",
        "all-to-all (not built)",
        "aiconfigurator (all-to-all)",
    )
    print_table(
        f"tokens/s at {CONTEXT} tokens of context; {NEVER_RAN}",
        ("", *ours, "sequences", "ms a token"),
        [
            [
                line["measure"],
                *(line["values"].get(name) for name in ours),
                line["num_sequences"]["tensor 8 x stages"],
                line["milliseconds_a_token"]["tensor 8 x stages"],
            ]
            for line in found
            if "num_sequences" in line
        ],
    )
    if not arguments.no_record:
        made = make_record(found, sys.argv)
        path = arguments.out / record_name("predicted", "ranks", made["date"])
        path.write_text(json.dumps(made, indent=1) + "\n")
        print(f"record: {path.name}")


if __name__ == "__main__":
    main()
