"""Records of an H200 as cases of a predicted step: which rows are the speed of a whole engine, and which are not, and why."""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "benchmarks" / "records"
sys.path.insert(0, str(ROOT / "benchmarks"))

WAITED = frozenset(
    {
        "h200-2026-11-15-decode",
        "h200-2026-11-15-quantized-kv",
        "h200-2026-11-16-before-after",
        "h200-2026-11-16-before-after-again",
        "h200-2026-11-16-quantized",
        "h200-2026-11-17-before-after",
        "h200-2026-11-17-groups",
    }
)
"""Records of engines that waited for every step. Steps run ahead since, and reach the rate of their graph alone (adr/0013)."""
OLD_PRODUCTS = frozenset({"h200-2026-11-17-latent-v4"})
"""Records of products of DeepSeek-V4 that were replaced on 2026-11-19; not all of their contexts were measured again."""
SLOWER_THAN_ITS_GRAPH = frozenset(
    {("h200-2026-11-18-latent", "DeepSeek-V3.2, fp8_ds_mla, 9 layers, decode, batch 64, context 130944")}
)
"""Rows whose engine loses 41 % to its graph alone, for a reason that was not found (docs/log.md): held to the graph."""
TOO_FAST = frozenset({"DeepSeek-V2-Lite, bfloat16, prefill of 7992 tokens"})
"""Prompts of latents that a plan predicts 22 % too fast (docs/log.md)."""
NOT_ENGINES: Mapping[str, str] = {
    "gpu-attention": "attention alone",
    "gpu-compressed-attention": "attention alone",
    "gpu-lane-attention": "attention alone",
    "gpu-latent-attention": "attention alone",
    "gpu-near-attention": "attention alone",
    "gpu-prefill-attention": "attention alone",
    "gpu-packed": "products alone",
    "gpu-prefill-products": "parts of layers",
    "gpu-quantized-attention": "attention alone",
    "gpu-sparse-attention": "attention alone",
    "gpu-masks": "one kernel",
    "gpu-state": "kernels of one layer",
    "gpu-exchange": "sums alone",
    "gpu-fused-ranks": "two layers, ranks that share one GPU",
    "gpu-ranks": "two layers, ranks that share one GPU",
    "gpu-entry-ranks": "four layers, ranks that share one GPU",
    "gpu-memory": "bytes",
    "gpu-steady": "counts over steps",
    "gpu-load": "the load of weights",
    "gpu-invariance": "bits",
    "gpu-tests": "tests",
    "fairness": "gaps between tokens",
}
"""Sections of which no row is the speed of a whole engine on a GPU of its own."""


class SpeedCase(NamedTuple):
    """One row: the settings of an engine, what it ran, and tokens/s or seconds."""

    record: str
    measure: str
    date: str
    model: str
    options: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[str, Any], ...]
    batch: int
    context: float
    measured: float
    """Tokens/s of decode, or seconds to the last first token if there are `prompt_rows`."""
    prompt_rows: int = 0
    distinct_experts: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What two records of the same measurement have in common."""
        return self.model, self.options, self.shapes, self.batch, round(self.context / 200), self.prompt_rows


Row = Mapping[str, Any]


def _case(record: Row, row: Row, model: str, options: Row, batch: int, context: float, rate: float) -> SpeedCase:
    return SpeedCase(
        *(record["name"], row["measure"], record["date"], model, _frozen(options), (), batch, context, rate)
    )


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in options.items()))


WORDS: Mapping[str, Mapping[str, str]] = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8"},
    "k8v4 pages": {"kv_cache_dtype": "turboquant_k8v4"},
    "two ropes": {},
}
"""What stands between the model and the batch in a measure."""


def _named(measure: str) -> tuple[str, dict[str, str], int]:
    """A measure such as `Qwen3-32B, fp8, batch 1`."""
    model, *words, batch = measure.split(", ")
    return model, {k: v for word in words for k, v in WORDS[word].items()}, int(batch.removeprefix("batch "))


def _rate(record: Row, row: Row, engine: str) -> float:
    """The engine's, or that of its graph if it waited for every step or is slower for a reason that was not found."""
    alone = row.get("graph_alone")
    is_held_to_graph = record["name"] in WAITED or (record["name"], row["measure"]) in SLOWER_THAN_ITS_GRAPH
    if not is_held_to_graph or alone is None:
        return row["values"][engine]
    return alone[engine] if isinstance(alone, dict) else alone


def _context(record: Row) -> float:
    """512 tokens of prompt, and the mean of both lengths of output."""
    prompt, low, high = map(int, re.findall(r"\d+", record["context"]))
    return prompt + (low + high) / 2


def _decode(record: Row) -> Iterator[SpeedCase]:
    for row in record["results"]:
        context = 512 + (17 + 65) / 2
        yield _case(record, row, record["model"], {}, row["batch"], context, _rate(record, row, "holdfast"))


def _quantized_kv(record: Row) -> Iterator[SpeedCase]:
    for row in record["results"]:
        for name, rate in row["values"].items() if row["unit"] == "tokens/s" else ():
            batch, context = 1, 512
            if row["measure"] != "one stream":
                batch, context = row["at_once"][name], int(row["measure"].rpartition(" ")[2])
            options = {} if name == "bfloat16" else {"kv_cache_dtype": name}
            yield _case(record, row, record["model"], options, batch, context, rate)


def _before_after(record: Row) -> Iterator[SpeedCase]:
    for row in record["results"]:
        name, is_prefill, length = row["measure"].partition(", prefill of ")
        if is_prefill:
            num_rows, seconds = int(length.removesuffix(" tokens")), statistics.median(row["seconds"]["new"])
            found = _case(record, row, *_named(f"{name}, batch 1"), num_rows, seconds)
            yield found._replace(prompt_rows=num_rows)
            continue
        found = _case(record, row, *_named(row["measure"]), _context(record), _rate(record, row, "new"))
        distinct = row.get("distinct_experts", {}).get("new")
        yield found._replace(distinct_experts=None if distinct is None else distinct["measured"])


def _overlap(record: Row) -> Iterator[SpeedCase]:
    for row in record["results"]:
        yield _case(record, row, *_named(row["measure"]), _context(record), _rate(record, row, "runs ahead"))


def _quantized(record: Row) -> Iterator[SpeedCase]:
    for row in record["results"]:
        for scheme in row["values"]:
            rate = _rate(record, row, scheme)
            found = _case(record, row, row["model"], WORDS[scheme], row["batch"], _context(record), rate)
            distinct = row.get("distinct_experts", {}).get(scheme)
            yield found._replace(distinct_experts=None if distinct is None else distinct["measured"])


def _groups(record: Row) -> Iterator[SpeedCase]:
    """Rows of one engine follow its memory; the record names its engines in the same order."""
    known = {**import_module("gpu_groups").CASES, **import_module("gpu_latent").CASES}
    engines = iter(record["groups"])
    engine = None
    for row in record["results"]:
        if row["measure"].endswith(", memory"):
            engine = known[next(engines)]
            assert row["measure"].startswith(engine.model), f"{row['measure']} is of {engine.model}"
        found = re.search(r", decode, batch (\d+)(?:, context (\d+))?$", row["measure"])
        if found is None:
            continue
        assert engine is not None, f"{row['measure']} comes before the memory of an engine"
        prompt = engine.prompt_tokens if found[2] is None else int(found[2])
        context = prompt + sum(engine.lengths) / 2
        case = _case(record, row, engine.model, engine.options, int(found[1]), context, _rate(record, row, "holdfast"))
        distinct = row.get("distinct_experts")
        yield case._replace(
            shapes=_frozen(engine.shapes), distinct_experts=None if distinct is None else distinct["measured"]
        )


def _ngram(record: Row) -> Iterator[SpeedCase]:
    """Without proposals: prompts of a few hundred tokens and answers of up to 200."""
    model = record["model"].partition("-Instruct")[0]
    for row in record["results"]:
        yield _case(record, row, model, {}, 1, 400, row["values"]["plain"])


def _shared_prompts(record: Row) -> Iterator[SpeedCase]:
    """The engine that shares nothing. Of the other one forks and hits decide the time."""
    for row in record["results"]:
        rows, num_new = row["values"]["alone"], 3
        prompt = sum(map(int, re.findall(r"(\d+) (?:tokens|of their own)", row["measure"])))
        batch = rows // (prompt + num_new)
        seconds = row["last_first_token_seconds"]["alone"]
        found = _case(record, row, record["model"], {}, batch, prompt, seconds)
        yield found._replace(prompt_rows=batch * prompt)


PEER_CASES = import_module("gpu_peers").CASES


def _peers(record: Row) -> Iterator[SpeedCase]:
    """Our side alone. The findings of a case have the distinct experts of its batches, in their order."""
    for row in record["results"]:
        model, words, measure = row["measure"].split(", ", 2)
        if row["unit"] != "tokens/s" or "holdfast" not in row["values"]:
            continue
        rate = row["values"]["holdfast"]
        if found := re.fullmatch(r"prefill of (\d+) tokens", measure):
            num_rows = int(found[1])
            case = _case(record, row, model, WORDS[words], num_rows, num_rows, num_rows / rate)
            yield case._replace(batch=1, prompt_rows=num_rows)
            continue
        batch = int(measure.removeprefix("decode, batch "))
        own = (own["holdfast"] for key, own in record["findings"].items() if PEER_CASES[key][:2] == (model, words))
        counted = {one["batch"]: one["measured"] for one in next(own)["distinct_experts"]}
        found_case = _case(record, row, model, WORDS[words], batch, _context(record), rate)
        yield found_case._replace(distinct_experts=counted.get(batch))


READERS: Mapping[str, Callable[[Row], Iterator[SpeedCase]]] = {
    "gpu-decode": _decode,
    "gpu-quantized-kv": _quantized_kv,
    "gpu-before-after": _before_after,
    "gpu-overlap": _overlap,
    "gpu-quantized": _quantized,
    "gpu-groups": _groups,
    "gpu-latent": _groups,
    "gpu-peers": _peers,
    "ngram": _ngram,
    "shared-prompts": _shared_prompts,
}


def read_records() -> list[dict[str, Any]]:
    """Every record of an H200, with its name."""
    paths = sorted(RECORDS.glob("h200-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) | {"name": path.stem} for path in paths]


def read_cases() -> list[SpeedCase]:
    """Every row that is the speed of a whole engine; of a measurement that was made again later only the latest."""
    records = [record for record in read_records() if record["name"] not in OLD_PRODUCTS]
    cases = [case for record in records for case in READERS.get(record["section"], lambda _: iter(()))(record)]
    latest: dict[tuple[object, ...], str] = {}
    for case in cases:
        latest[case.key] = max(case.date, latest.get(case.key, ""))
    return [case for case in cases if case.date == latest[case.key]]
