"""N-gram drafts against none, same model, same requests: python benchmarks/ngram.py [--device cuda] [--model MODEL]

Greedy answers to tasks that repeat their input (edit this text, this program, this table), and to one that does not. Both engines
are open at once and alternate, so that other load slows both. A rate counts output tokens after the first of each answer,
the median of some rounds. Tokens must be identical on a CPU; on a GPU more rows are summed in another order, so the first
difference of each answer is printed with the gap of its two logits.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import gpu_records

from holdfast.api.llm import LLM
from holdfast.request.sampling_params import SamplingParams

TEXT = """The harbour master keeps a ledger of every ship that comes in. On Monday three ships came in from the north with
timber, and the harbour master wrote down their names, their captains and the number of planks. On Tuesday a storm kept every
ship outside the harbour wall, and the harbour master wrote down the height of the waves instead. On Wednesday the storm was
over, and eleven ships came in at once, so that the harbour master had to borrow a second ledger from the school. The
children of the school helped to count the crates of oranges, and the harbour master gave each of them an orange."""
PROGRAM = """def total_price(orders, tax_rate):
    total = 0
    for order in orders:
        price = order["price"]
        quantity = order["quantity"]
        total = total + price * quantity
    total = total + total * tax_rate
    return total


def average_price(orders):
    total = 0
    count = 0
    for order in orders:
        price = order["price"]
        quantity = order["quantity"]
        total = total + price * quantity
        count = count + quantity
    return total / count
"""
TABLE = "\n".join(
    f"| {name} | {2 * place + 3} crates | {place + 1} days | {'paid' if place % 3 else 'open'} |"
    for place, name in enumerate(("oranges", "timber", "salt", "copper", "linen", "honey", "nails", "candles"))
)


class Task(NamedTuple):
    """Prompts, and the most tokens of an answer."""

    name: str
    message: str
    max_tokens: int = 200


TASKS = (
    Task("edit a text", f"Edit this text: write it again, but call the harbour master the keeper.\n\n{TEXT}"),
    Task("edit a program", f"Edit this program: rename total to amount, and write all of it again.\n\n{PROGRAM}"),
    Task("copy a table", f"Write this table again, with the same rows:\n\n{TABLE}"),
    Task("write a story", "Write a story about a lighthouse, a cat and the winter in which the sea froze."),
)
"""The last task repeats none of its input."""


class Run(NamedTuple):
    """One round of one engine."""

    token_ids: list[list[int]]
    gaps: list[list[float]]
    """Logit gap between the two most likely tokens, at each position of each answer."""
    tokens_per_second: float
    num_proposed: int
    num_accepted: int


def run_task(llm: LLM, task: Task, batch: int, logprobs: int | None = None) -> Run:
    """Answer one task, with slightly different wording so that all prompts differ."""
    params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens, logprobs=logprobs, ignore_eos=True)
    words = [task.message, *(f"{task.message}\n({number})" for number in range(1, batch))]
    messages: list[list[Mapping[str, object]]] = [[{"role": "user", "content": content}] for content in words]
    before, start = llm.stats(), time.perf_counter()
    outputs = llm.chat(messages, params, progress=False)
    seconds = time.perf_counter() - start
    after = llm.stats()
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    # Prefill ends before the first tokens, and costs both the same.
    seconds -= min(metric.first_token_seconds for metric in metrics)
    answers = [output.outputs[0] for output in outputs]
    return Run(
        [list(answer.token_ids) for answer in answers],
        [[_gap(place) for place in answer.logprobs or ()] for answer in answers],
        sum(len(answer.token_ids) - 1 for answer in answers) / seconds,
        after.num_proposed_tokens - before.num_proposed_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def _gap(place: dict[int, Any]) -> float:
    first, second = sorted((found.logprob for found in place.values()), reverse=True)[:2]
    return first - second


def first_differences(plain: Run, guessing: Run) -> list[dict[str, object]]:
    """Return the position and logit gap of each differing answer."""
    found = []
    for number, (ours, theirs) in enumerate(zip(guessing.token_ids, plain.token_ids, strict=True)):
        place = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            found.append({"answer": number, "token": place, "gap of logits": round(plain.gaps[number][place], 5)})
    return found


def measure(plain: LLM, guessing: LLM, task: Task, batch: int, rounds: int, method: str) -> dict[str, Any]:
    """Alternate both engines; the first round of each is not counted and provides the logit gaps."""
    runs: dict[str, list[Run]] = {method: [], "plain": []}
    for number in range(rounds + 1):
        for name, llm in (("plain", plain), (method, guessing)):
            runs[name].append(run_task(llm, task, batch, None if number else 2))
    rates = {name: [run.tokens_per_second for run in found[1:]] for name, found in runs.items()}
    values = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    last = runs[method][-1]
    return {
        "measure": f"{task.name}, batch {batch}",
        "unit": "tokens/s",
        "values": values,
        "runs": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
        "speedup": round(values[method] / values["plain"], 3),
        "proposed": last.num_proposed,
        "accepted": last.num_accepted,
        "acceptance": round(last.num_accepted / last.num_proposed, 3) if last.num_proposed else None,
        "output_tokens": sum(map(len, last.token_ids)),
        "identical": all(run.token_ids == runs["plain"][0].token_ids for found in runs.values() for run in found),
        "first_differences": first_differences(runs["plain"][0], runs[method][0]),
    }


def main() -> None:
    """Measure, print, and write the record."""
    parser = gpu_records.options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--model", default=None, help="else the default model")
    parser.add_argument("--speculative", default="ngram:4")
    parser.add_argument("--batches", default="1,4", help="how many answers at once")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    batches = [int(word) for word in arguments.batches.split(",")]
    tasks = TASKS
    if arguments.tiny:
        tasks, batches = tuple(task._replace(max_tokens=8) for task in TASKS[:1]), [1]
    results = run_all(arguments, tasks, batches)
    wrong = [result["measure"] for result in results if arguments.device == "cpu" and not result["identical"]]
    facts = {"speculative": arguments.speculative, "rounds": arguments.rounds}
    model = arguments.model or "SmolLM2-135M-Instruct"
    settings = f"greedy, {arguments.speculative}, answers of up to {max(task.max_tokens for task in tasks)} tokens"
    record = gpu_records.make_record("ngram", results, model, settings, arguments, facts)
    gpu_name = gpu_records.record_name(gpu_records.device_name(arguments.device), "ngram", gpu_records.today())
    path = arguments.out / (f"cpu-{gpu_records.today()}-ngram.json" if arguments.device == "cpu" else gpu_name)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {path.name}")
    if wrong:
        sys.exit(f"error: the same tokens were expected on a CPU; {', '.join(wrong)} differ; see the record")


def run_all(arguments: argparse.Namespace, tasks: tuple[Task, ...], batches: list[int]) -> list[dict[str, Any]]:
    """Run both engines, open side by side."""
    options: dict[str, Any] = {"device": arguments.device, "max_model_len": 1024, "max_num_seqs": max(batches)}
    if arguments.device != "cpu":
        options["memory_utilization"] = 0.4
    plain = LLM(arguments.model, **options)
    guessing = LLM(arguments.model, speculative=arguments.speculative, **options)
    results = []
    for batch in batches:
        for task in tasks:
            found = measure(
                plain, guessing, task, batch, 1 if arguments.tiny else arguments.rounds, arguments.speculative
            )
            results.append(found)
            print(json.dumps(found), flush=True)
    guessing.shutdown()
    plain.shutdown()
    return results


if __name__ == "__main__":
    main()
