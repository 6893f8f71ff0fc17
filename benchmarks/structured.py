"""Cost of structured outputs per step, same model, same prompts: python benchmarks/structured.py [--device cuda] [--model MODEL]

Rounds with a grammar and without one alternate on one engine. Only steps in which all sequences decode count. Times are CPU
time of this process, which other load hardly changes; wall times are beside them. `masks` is the part of a step that
advances grammars, fills masks and masks logits. `whole` is the added time of a step, with the copies and samples of edited
rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gpu_records

from holdfast.api.llm import LLM
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import StructuredOutputs
from holdfast.runner.sampling import device_sampler, sampler

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["ship", "crate", "person"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "notes": {"type": ["string", "null"]},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json schema": {"json": {"type": "array", "items": ITEM, "minItems": 50}},
    "regex": {"regex": r"([A-Z][a-z]{2,9} \d{1,4}[,;] ?){40,80}"},
}
TEMPERATURES = {"greedy": 0.0, "random": 0.8}


class Round(NamedTuple):
    """Medians over the steps of one round, in seconds."""

    step: float
    step_by_the_clock: float
    masks: float
    num_steps: int


class MaskTime:
    """CPU seconds of masks in this process; their functions are timed at the call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._put_back: list[Callable[[], None]] = []

    def watch(self, module: Any, name: str) -> None:  # noqa: ANN401 - a module
        """Time this function of a module from now on."""
        function = getattr(module, name)

        def timed(*arguments: object) -> None:
            began = time.process_time()
            function(*arguments)
            self.seconds += time.process_time() - began

        setattr(module, name, timed)
        self._put_back.append(lambda: setattr(module, name, function))

    def end(self) -> None:
        for put_back in self._put_back:
            put_back()


def run_round(llm: LLM, masks: MaskTime, batch: int, num_tokens: int, params: SamplingParams) -> Round:
    """Answer this many prompts step by step; measure the steps in which all sequences decode."""
    engine = llm.engine
    for number in range(batch):
        engine.add_request(None, f"A list of all that lies in harbour {number}, as JSON:", params)
    steps: list[tuple[float, float, float]] = []
    while engine.has_unfinished():
        masks_before, clock, began = masks.seconds, time.perf_counter(), time.process_time()
        deltas = engine.step()
        spent = time.process_time() - began, time.perf_counter() - clock, masks.seconds - masks_before
        if len(deltas) == batch and engine.stats().num_running == batch:
            steps.append(spent)
        if len(steps) >= num_tokens:
            engine.abort_all()
    engine.settle()
    medians = [statistics.median(column) for column in zip(*steps, strict=True)] if steps else [0.0] * 3
    return Round(*medians, num_steps=len(steps))


def measure(llm: LLM, name: str, kind: str, batch: int, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Alternate rounds, the first of each not counted; return medians of the rest."""
    masks = MaskTime()
    for module in (sampler, device_sampler):
        for function in ("fill_masks", "mask_logits"):
            masks.watch(module, function)
    plain = SamplingParams(temperature=TEMPERATURES[kind], max_tokens=2 * num_tokens, ignore_eos=True, seed=1)
    formed = SamplingParams(
        temperature=TEMPERATURES[kind],
        max_tokens=2 * num_tokens,
        ignore_eos=True,
        seed=1,
        structured_outputs=StructuredOutputs(**FORMS[name]),
    )
    found: dict[str, list[Round]] = {"plain": [], "structured": []}
    for number in range(rounds + 1):
        for way, params in (("plain", plain), ("structured", formed)):
            one = run_round(llm, masks, batch, num_tokens, params)
            if number or not rounds:
                found[way].append(one)
    masks.end()
    medians = {way: Round(*map(statistics.median, zip(*ones, strict=True))) for way, ones in found.items()}
    bare, own = medians["plain"], medians["structured"]
    return {
        "measure": f"{name}, {kind}, batch {batch}",
        "unit": "ms of a step",
        "values": {
            "plain": round(1e3 * bare.step, 3),
            "structured": round(1e3 * own.step, 3),
            "masks": round(1e3 * own.masks, 3),
        },
        "by the clock": {way: round(1e3 * one.step_by_the_clock, 3) for way, one in medians.items()},
        "masks of a step": round(own.masks / own.step, 4) if own.step else None,
        "whole": round(own.step / bare.step - 1, 4) if bare.step else None,
        "steps": [one.num_steps for one in found["structured"]],
    }


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every grammar, greedy and sampled, on one engine."""
    rounds, num_tokens = (1, 4) if arguments.tiny else (arguments.rounds, arguments.steps)
    options: dict[str, Any] = {"device": arguments.device, "max_model_len": 512, "max_num_seqs": arguments.batch}
    llm = LLM(arguments.model, **options)
    results = []
    for name in FORMS:
        for kind in TEMPERATURES:
            found = measure(llm, name, kind, arguments.batch, rounds, num_tokens)
            results.append(found)
            print(json.dumps(found), flush=True)
    llm.shutdown()
    return results


def main() -> None:
    """Measure, print, and write the record."""
    parser = gpu_records.options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--model", default=None, help="else the default model")
    parser.add_argument("--batch", type=int, default=8, help="sequences at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48, help="measured in each round")
    arguments = parser.parse_args()
    results = run_all(arguments)
    facts = {"rounds": arguments.rounds, "steps": arguments.steps}
    model = arguments.model or "SmolLM2-135M-Instruct"
    settings = f"batch {arguments.batch}, forms by llguidance, {arguments.steps} decode steps a round"
    record = gpu_records.make_record("structured", results, model, settings, arguments, facts)
    gpu_name = gpu_records.record_name(gpu_records.device_name(arguments.device), "structured", gpu_records.today())
    path = arguments.out / (f"cpu-{gpu_records.today()}-structured.json" if arguments.device == "cpu" else gpu_name)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
