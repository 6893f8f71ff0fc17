"""Rows, pages and seconds of prompts that arrive together, with prefix sharing and without: python benchmarks/shared_prompts.py [--model FOLDER]

One engine shares (the default), one does not (enable_prefix_caching=False). Both get the same prompts in turn. Each case
has its own prompts, so no case hits another's cache. Rows are summed over all steps; pages are the most that sequences held
after a step. Seconds to the first token are those of the last sequence. The record is
benchmarks/records/<machine>-<date>-shared-prompts.json.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_records
from dummy_models import write_dummy_model

from holdfast.api.opened import open_engine
from holdfast.config import EngineConfig
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import Step

SECTION = "shared-prompts"
NUM_OUTPUT = 4


class Counted:
    """An engine that counts its steps."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.core, EngineCore), "the core runs in this process"
        assert engine.core.runner is not None, "the core is open"
        self.engine = engine
        self.num_rows = 0
        launch = engine.core.runner.launch

        def counting(step: Step) -> None:
            self.num_rows += step.num_tokens
            launch(step)

        engine.core.runner.launch = counting

    def run(self, prompts: Sequence[list[int]], n: int) -> dict[str, float]:
        """Answer prompts that arrive together."""
        engine, pool = self.engine, self.engine.scheduler.pool
        self.num_rows = max_pages = 0
        params = SamplingParams(n=n, max_tokens=NUM_OUTPUT, temperature=1.0, seed=1, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        for prompt in prompts:
            engine.add_request(None, {"prompt_token_ids": prompt}, params)
        first: dict[tuple[str, int], float] = {}
        while engine.has_unfinished():
            for delta in engine.step():
                first.setdefault((delta.request_id, delta.index), time.perf_counter() - begin)
            max_pages = max(max_pages, sum(pool.num_owned_by_group))
        seconds = time.perf_counter() - begin
        return {
            "rows": self.num_rows,
            "pages": max_pages,
            "seconds": round(seconds, 3),
            "last_first_token_seconds": round(max(first.values()), 3),
        }


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Return tokens with a beginning unique to the seed."""
    return [(7919 * (place + 1) + 104_729 * (seed + 1) + place * place) % 900 + 50 for place in range(num_tokens)]


def cases(num_tokens: int, is_tiny: bool) -> list[tuple[str, int, int, int]]:
    """Return (name, requests, completions each, own tokens after a common prefix); 0 own tokens means equal prompts."""
    counts = (1, 2, 4) if is_tiny else (1, 2, 4, 8, 16)
    listed = [(f"n={n}, {num_tokens} tokens", 1, n, 0) for n in counts]
    listed.append((f"4 equal prompts of {num_tokens} tokens", 4, 1, 0))
    listed.append((f"50 requests, {num_tokens} tokens in common and 30 of their own", 50, 1, 30))
    return listed


def measure(engines: dict[str, Counted], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each case on both engines, in turn."""
    rows: list[dict[str, Any]] = []
    for number, (name, num_requests, n, num_own) in enumerate(cases(arguments.tokens, arguments.tiny)):
        values: dict[str, Any] = {}
        for kind, counted in engines.items():
            if kind == "alone" and num_requests * n > arguments.most_alone:
                continue
            stem = prompt_of(arguments.tokens, 100 * number)
            prompts = [stem + prompt_of(num_own, 100 * number + place) for place in range(num_requests)]
            values[kind] = counted.run(prompts, n)
            print(f"{name}: {kind} {values[kind]}", flush=True)
        figures = {key: {kind: found[key] for kind, found in values.items()} for key in values["shared"]}
        rows.append({"measure": name, "unit": "rows", "values": figures.pop("rows"), **figures})
    return rows


def main() -> None:
    """Measure, print, and write the record."""
    parser: argparse.ArgumentParser = gpu_records.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--model", default=None, help="default: the default model; a name of dummy_models.py: dummy weights"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/shared-prompts"), help="where dummy models go")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--most-alone", type=int, default=64, help="cases with more sequences run only with sharing")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.tokens = 40
    options: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 2048, "page_tokens": 16, "device": arguments.device}
    if arguments.model is not None:
        model = write_dummy_model(arguments.folder, arguments.model)
        options |= {"model": str(model), "load_format": "dummy", "tokenizer": "none", "memory_utilization": 0.45}
    if arguments.device == "cpu":
        options["kv_cache_memory"] = "1GiB"
    engines: dict[str, Counted] = {}
    try:
        for kind, is_shared in (("shared", True), ("alone", False)):
            config = EngineConfig(enable_prefix_caching=is_shared, **options)
            engines[kind] = Counted(open_engine(config, lambda done, total: None))
            engines[kind].run([prompt_of(arguments.tokens, 77)], 2)
        rows = measure(engines, arguments)
    finally:
        for counted in engines.values():
            counted.engine.close()
    gpu_records.print_table(
        "prompts that arrive together",
        ("", "rows", "pages", "s", "rows alone", "s alone"),
        [
            (
                row["measure"],
                *(row[key]["shared"] for key in ("values", "pages", "seconds")),
                *(row[key].get("alone", "-") for key in ("values", "seconds")),
            )
            for row in rows
        ],
    )
    words = arguments.model or "SmolLM2-135M-Instruct"
    settings = f"prompts of {arguments.tokens} tokens, {NUM_OUTPUT} new ones each, pages of 16"
    record = gpu_records.make_record(SECTION, rows, words, settings, arguments, {})
    gpu_records.write_record(record, "shared-prompts", arguments)


if __name__ == "__main__":
    main()
