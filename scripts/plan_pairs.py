"""Print plans of 40 pairs of model and GPU as a table: python scripts/plan_pairs.py [MODEL GPU ...]

Each row is the result of `holdfast plan MODEL --gpu GPU`: verdict, tokens, tokens/s, seconds to a first token after 2,048 tokens.
If a pair does not fit, the row has the best command and its result. The script reads and downloads no models.
"""

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from typing import Any

from holdfast.cli.app import run

MODELS = {
    "SmolLM2-135M": "rtx3060",
    "Qwen3-0.6B": "rtx3060-laptop",
    "Llama-3.2-3B": "rtx3060 rtx4060-laptop",
    "Llama-3.1-8B": "rtx3080-12g rtx4060ti-16g rtx4090 l4 a100-40g",
    "Qwen3-8B": "rtx4090-laptop rtx4090 rtx5090",
    "gemma-3-27b-it": "rtx3090 rtx5090 h100",
    "gpt-oss-20b": "rtx3080-12g rtx4060ti-16g rtx4090 rtx5080 gb10",
    "gpt-oss-120b": "rtxpro6000 h100 2x4090",
    "Qwen3-30B-A3B": "rtx4090 rtx5090 gb10",
    "Qwen3-32B": "rtx4090 2x4090 rtxpro6000 h100 h200",
    "Llama-3.1-70B": "2x4090 h100 h200",
    "DeepSeek-R1": "h200 8xh200",
    "DeepSeek-V2-Lite": "rtx4090",
    "Qwen3-Next-80B-A3B": "h200",
    "Qwen3.5-27B": "rtx5090",
    "GLM-4.7-Flash": "rtxpro6000",
}
"""GPUs of each model."""
HEADINGS = ("model", "GPU", "verdict", "tokens", "tokens/s", "first token, s", "exit", "command")


def plan(model: str, gpu: str) -> tuple[int, Mapping[str, Any]]:
    """Return the exit status and the JSON of a plan."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = run(["plan", model, "--gpu", gpu, "--json"])
    return status, json.loads(printed.getvalue())


def best_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result of a plan's best command: the plan itself, or the change with that command's settings."""
    words = f"{answer['best_command']} "
    named = [
        one
        for one in answer["alternatives"]
        if one["fits"]
        and all(f"--{name.replace('_', '-')} {value} " in words for name, value in one["settings"].items())
    ]
    return answer if answer["fits"] else max(named, key=lambda one: len(one["settings"]), default=answer)


def row(model: str, gpu: str) -> tuple[str, ...]:
    """Return the row of one pair."""
    status, answer = plan(model, gpu)
    found = best_of(answer)
    speed = found.get("speed")
    rates = ("", "")
    if speed is not None:
        rates = tuple(
            f"{speed[name]['low']:.{digits}f} to {speed[name]['high']:.{digits}f}"
            for name, digits in (("one_stream", 0), ("first_token_seconds", 2))
        )
    return (
        model,
        gpu,
        answer["verdict"].partition(", about")[0],
        f"{found['kv_tokens']:,}",
        *rates,
        str(status),
        f"`{answer['best_command']}`" if answer["best_command"] else "",
    )


def main() -> None:
    """Print the table in Markdown."""
    typed = sys.argv[1:]
    pairs = list(zip(typed[::2], typed[1::2], strict=True))
    for cells in (HEADINGS, ("---",) * len(HEADINGS)):
        print(f"| {' | '.join(cells)} |")
    for model, gpu in pairs or [(model, gpu) for model, gpus in MODELS.items() for gpu in gpus.split()]:
        print(f"| {' | '.join(row(model, gpu))} |", flush=True)


if __name__ == "__main__":
    main()
