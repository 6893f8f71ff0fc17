"""Pages of a sliding-window model, with its windows and with every token kept: python benchmarks/window_pages.py

The real Scheduler on the pages of a real plan, and no model: 64 requests of 31K prompt and 1K output tokens on Mistral-7B-v0.1 in
24 GiB, weights in fp8, pages in bfloat16 and in fp8. `before` is one group that keeps the whole context, `after` the groups of
the plan; both have the same bytes. In every step each sequence's pages are checked against the bound of its group: W - 1
tokens, the step's own, and a page. The result does not depend on the machine.
"""

import argparse
import json
import sys
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any, NamedTuple

import gpu_records

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cli import bench_record
from holdfast.config import EngineConfig, Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.loading.declared import open_declared
from holdfast.planning.fit import RunnerPlan
from holdfast.planning.plan import plan_runner
from holdfast.planning.resolve import PlanRequest
from holdfast.planning.target import memory_target
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, Sequence

MODEL, MEMORY = "Mistral-7B-v0.1", "24GiB"
FORMATS = ("bfloat16", "fp8")
CHECK_STEPS = 512
"""Steps between full checks of the accounts; bounds are checked in every step."""


class Traffic(NamedTuple):
    """The requests, all at once."""

    num_requests: int = 64
    prompt_tokens: int = 31 * 1024
    output_tokens: int = 1024


def make_plan(kv_format: str, traffic: Traffic) -> RunnerPlan:
    """Make the plan of the model in its memory."""
    config = EngineConfig(
        model=MODEL,
        quantization="fp8",
        kv_cache_dtype=kv_format,
        max_model_len=traffic.prompt_tokens + traffic.output_tokens,
        max_num_seqs=traffic.num_requests,
    )
    return plan_runner(PlanRequest(config, open_declared(MODEL, None), memory_target(MEMORY)))


class Watch:
    """Observations of a run: peaks, and some points over time."""

    def __init__(self, scheduler: Scheduler, every: int) -> None:
        self._scheduler = scheduler
        self._every = every
        self.num_steps = self.most_running = self.most_pages = 0
        self.in_prompt = [0] * len(scheduler.groups)
        """Most pages that a sequence held in each group in a step of several of its tokens ..."""
        self.in_decode = [0] * len(scheduler.groups)
        """... and in one of one token."""
        self.points: list[dict[str, Any]] = []

    def see(self, step: LiveStep) -> None:
        """Check a scheduled step: no sequence may hold more than its bounds."""
        scheduler = self._scheduler
        for item in step.scheduled:
            most = self.in_decode if item.num_new_tokens == 1 else self.in_prompt
            for index, (group, table) in enumerate(zip(scheduler.groups, item.sequence.tables, strict=True)):
                held = len(table) - table.count(HOLE)
                most[index] = max(most[index], held)
                bound = group.pages_for(item.start + item.num_new_tokens)
                if group.window is not None:
                    bound = min(bound, group.most_held(item.num_new_tokens))
                assert held <= bound, (
                    f"{held} pages of {group.name} in a step of {item.num_new_tokens}, at most {bound}"
                )
        self.most_running = max(self.most_running, scheduler.num_running)
        self.most_pages = max(self.most_pages, scheduler.pool.num_pages - scheduler.pool.num_available)
        if self.num_steps % self._every == 0:
            point = {"step": self.num_steps, "running": scheduler.num_running, "pages": scheduler.pages_by_group()}
            self.points.append(point)
        if self.num_steps % CHECK_STEPS == 0:
            scheduler.check()
        self.num_steps += 1

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions


def drive(limits: Limits, groups: SequenceABC[CacheGroup], num_pages: int, traffic: Traffic, every: int) -> Watch:
    """Run all requests to their ends, without tokens."""
    scheduler = Scheduler(limits, num_pages, True, traffic.num_requests, groups=groups)
    watch = Watch(scheduler, every)
    for number in range(traffic.num_requests):
        tokens = [number, *range(1, traffic.prompt_tokens)]
        scheduler.add(Sequence(number, tokens, len(tokens), SamplingParams(), 0, traffic.output_tokens))
    while scheduler.num_running + scheduler.num_waiting:
        step = scheduler.schedule()
        assert step is not None, "nothing is in flight, and the scheduler waits"
        watch.see(step)
        scheduler.complete(step, [(0,) if item.samples else () for item in step.scheduled])
        for item in step.scheduled:
            if item.sequence.num_output_tokens == traffic.output_tokens:
                scheduler.finish(item.sequence)
    scheduler.check()
    assert scheduler.pool.num_available == num_pages, f"{scheduler.pool.num_available} of {num_pages} pages came back"
    return watch


def result_of(name: str, plan: RunnerPlan, groups: SequenceABC[CacheGroup], traffic: Traffic) -> dict[str, Any]:
    """Return the result of one way to keep these bytes."""
    limits, num_pages = plan.resolved.limits, plan.memory.num_pages
    watch = drive(limits, groups, num_pages, traffic, every=max(traffic.output_tokens // 8, 1))
    longest = traffic.prompt_tokens + traffic.output_tokens
    held = {
        group.name: {
            "tokens a page": group.page_tokens,
            "bound in a prompt": group.most_pages(longest, limits.max_num_batched_tokens),
            "bound in decode": group.most_pages(longest, 1),
            "held in a prompt": watch.in_prompt[index],
            "held in decode": watch.in_decode[index],
        }
        for index, group in enumerate(groups)
    }
    values = {
        "at once": watch.most_running,
        "steps": watch.num_steps,
        "pages": num_pages,
        "pages held": watch.most_pages,
        "preemptions": watch.num_preemptions,
    }
    return {"measure": name, "unit": "sequences", "values": values, "groups": held, "over time": watch.points}


def main() -> None:
    """Run both, print, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=Traffic().num_requests)
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    arguments = parser.parse_args()
    traffic = Traffic(num_requests=arguments.requests)
    results: list[dict[str, Any]] = []
    for kv_format in FORMATS:
        plan = make_plan(kv_format, traffic)
        assert plan.cache is not None, f"{MODEL} has no pages"
        # One group of all layers has pages of equal bytes, whatever its window.
        whole = (CacheGroup("whole context", plan.resolved.limits.page_tokens),)
        for name, groups in (("before", whole), ("after", plan.cache.cache_groups())):
            results.append(result_of(f"{kv_format} pages, {name}", plan, groups, traffic))
            print(json.dumps({key: value for key, value in results[-1].items() if key != "over time"}), flush=True)
    record = {
        "section": "window-pages",
        "date": gpu_records.today(),
        "machine": "any machine, the scheduler alone",
        "model": MODEL,
        "settings": f"{traffic.num_requests} requests of {traffic.prompt_tokens} + {traffic.output_tokens} tokens, {MEMORY}, fp8 weights",
        "results": results,
        "command": " ".join(["python", "benchmarks/window_pages.py", *sys.argv[1:]]),
        "commit": arguments.commit or bench_record.commit(),
        "versions": bench_record.versions(),
        "cpu": bench_record.cpu_name(),
        "num_cores": bench_record.num_cores(),
    }
    path = arguments.out / f"cpu-{record['date']}-window-pages.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
