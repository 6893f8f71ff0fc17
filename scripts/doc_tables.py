"""Rewrite the tables of figures in the documents from the committed records under benchmarks/records/.

A record is one run on one machine, as JSON:

    {"date": "2026-01-31", "machine": "2 ARM cores", "model": "SmolLM2-135M-Instruct", "settings": "float32",
     "results": [{"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 40.0, "transformers": 19.2}}]}

The first engine of `values` is compared with the others; more is better. Other keys are kept in the record and not shown.

A table goes between the marks of its section, in the document that has them. A record without a `section` compares engines
(`records`); a section has its own columns. `highlights` are single figures from all records.

A record's figures get a mark if its kernels or plans differ from those of benchmarks/digests.json (scripts/digests.py).
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import digests
from error_table import error_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = tuple(
    ROOT / name
    for name in ("README.md", "docs/performance.md", "docs/quantization.md", "docs/ranks.md", "docs/errors.md")
)
RECORDS = ROOT / "benchmarks" / "records"
NO_RECORD = "No record is committed yet."
WORDS: dict[str, str] = json.loads((Path(__file__).parent / "record_words.json").read_text(encoding="utf-8"))
"""Names in older records, and their current names."""
TURBOQUANT_PAGES = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
Result = Mapping[str, Any]
Columns = Mapping[str, Callable[[Result], object]]
"""The title of each column, and its content."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a record, or exit with the file and its error."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        titles = [record[key] for key in ("date", "machine", "model", "settings")]
        numbers = [float(value) for result in record["results"] for value in result["values"].values()]
        labels = [result[key] for result in record["results"] for key in ("measure", "unit")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"error: {path.name} is no record ({error!r}); see the top of scripts/doc_tables.py")
    if not numbers or not all(isinstance(text, str) and text for text in (*titles, *labels)):
        sys.exit(f"error: the record {path.name} has empty places; see the top of scripts/doc_tables.py")
    return record


def record_table(record: dict[str, Any]) -> str:
    """Return the table of one record: a line about the run and its machine, and a row for each measure."""
    engines = list(dict.fromkeys(engine for result in record["results"] for engine in result["values"]))
    ours, *others = engines
    lines = [
        _title(record),
        "",
        f"| | unit | {' | '.join(engines)} |{''.join(f' against {engine} |' for engine in others)}",
        "|---" * (2 + len(engines) + len(others)) + "|",
    ]
    for result in record["results"]:
        values = result["values"]
        cells = [_number(values[engine]) if engine in values else "" for engine in engines]
        ratios = [f"{values[ours] / values[engine]:.2f}x" if values.get(engine) else "" for engine in others]
        lines.append(f"| {' | '.join([result['measure'], result['unit'], *cells, *ratios])} |")
    return "\n".join(lines)


def _title(record: Mapping[str, Any]) -> str:
    state = record.get("state", digests.SAME)
    commit = record.get("commit", "unknown")
    source = commit if " " in commit else f"commit {commit[:8]}"
    more = f", {source}, without a digest" if state == digests.WITHOUT else f" {state.mark}".rstrip()
    return _said(f"{record['model']}, {record['settings']}, on {record['machine']}, {record['date']}{more}:")


def _said(text: str) -> str:
    """Return a text with current names."""
    for old, new in WORDS.items():
        text = text.replace(old, new)
    return text


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def section_table(record: dict[str, Any], columns: Columns) -> str:
    """Return the table of one record of a section: a line about the run, the non-empty columns, and its note."""
    columns = {
        name: value_of
        for name, value_of in columns.items()
        if any(value_of(result) is not None for result in record["results"])
    }
    lines = [
        _title(record),
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for result in record["results"]:
        values = (value_of(result) for value_of in columns.values())
        lines.append(f"| {' | '.join(_cell(value) for value in values)} |")
    state = record.get("state", digests.SAME)
    notes = [record.get("note"), None if state in (digests.SAME, digests.WITHOUT) else f"{state.words}."]
    for note in filter(None, notes):
        lines += ["", _said(note)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return _number(value) if isinstance(value, float) else str(value)


def _value(*path: str) -> Callable[[Result], object]:
    """Format a nested number of a result; empty if it is missing."""

    def found(result: Result) -> object:
        value: Any = result
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return found


def _percent(*path: str) -> Callable[[Result], object]:
    """Format a number with its sign and two places."""

    def found(result: Result) -> object:
        value = _value(*path)(result)
        return f"{value:+.2f} %" if isinstance(value, int | float) else None

    return found


def _change(*path: str) -> Callable[[Result], object]:
    """Format a change of perplexity with its standard error, in percent."""

    def found(result: Result) -> object:
        change, error = (_value(*path, name)(result) for name in ("perplexity_change", "change_error"))
        if not isinstance(change, int | float) or not isinstance(error, int | float):
            return None
        return f"{change:+.2%} ± {error:.2%}"

    return found


def _mib(*path: str) -> Callable[[Result], object]:
    """Format a number of bytes in MiB."""

    def found(result: Result) -> object:
        value = _value(*path)(result)
        return value / 2**20 if isinstance(value, int | float) else None

    return found


def _load_rate(result: Result) -> object:
    """Return GB/s of the bytes read, or the reason without a figure."""
    return result.get("error") or _value("values", "holdfast")(result)


def _best_seconds(result: Result) -> object:
    """Return the seconds of the fastest load."""
    return min(result.get("seconds", ()), default=None)


def _plan_error(result: Result) -> object:
    """Return MiB between the measured and the planned peak of live tensors."""
    measured, planned = _value("peak", "allocated")(result), result.get("predicted_peak")
    if not isinstance(measured, int | float) or planned is None:
        return None
    return f"{(measured - planned) / 2**20:+.3f}"


def _load_host(result: Result) -> object:
    """Return host MiB of a process's second load; the first one's figure includes compiled kernels."""
    found = [_mib("host", name, "RssAnon")(result) for name in ("second load", "first load")]
    return next((value for value in found if value is not None), None)


def _by_weights(figure: str, words: str) -> Columns:
    """Return a column for each kind of weights."""
    return {f"{name}, {words}": _value(figure, name) for name in ("fp8", "bfloat16")}


def _violations(result: Result) -> object:
    """Return the violations of a run of steps, or of a comparison."""
    names = ("num_allocations", "num_segments", "num_syncs", "num_compilations", "num_moved", "num_errors")
    names += ("num_different", "num_wild")
    count = sum(result.get(name, 0) for name in names)
    return result.get("error") or (count if result.get("must_hold", True) else f"{count} (not promised)")


def _times(result: Result) -> str:
    """Return the microseconds of all columns."""
    return ", ".join(f"{name} {value}" for name, value in result["microseconds"].items())


def _first_rate(result: Result) -> object:
    """Return the rate of the first column, which is in use."""
    return next(iter(result["values"].values()), None)


def _held_pages(phase: str) -> Callable[[Mapping[str, Any]], str]:
    """Return the most pages of a sequence in each cache group, with its bound."""

    def cell(result: Mapping[str, Any]) -> str:
        return "; ".join(
            f"{name}: {found[f'held in {phase}']} of {found[f'bound in {phase}']}"
            for name, found in result["groups"].items()
        )

    return cell


def _listed_values(result: Mapping[str, Any]) -> str:
    """Return every value with its name."""
    return result.get("error") or ", ".join(f"{name} {value:,}" for name, value in result["values"].items())


def _ranks_percent(result: Result) -> object:
    """Return taken against planned bytes, for the rank with the largest difference."""
    return max(result.get("percent", {}).values(), key=abs, default=None)


def _proposing(result: Result) -> object:
    """Return the rate of the method compared with `plain`."""
    return next((value for name, value in result["values"].items() if name != "plain"), None)


def _accepted(result: Result) -> object:
    return f"{result['accepted']:,} of {result['proposed']:,}" if "proposed" in result else None


def _same_tokens(result: Result) -> object:
    """Return yes, or the first differences with their logit gaps."""
    if result.get("identical", True):
        return "yes" if "identical" in result else None
    found = (f"{one['token']} (gap {one['gap of logits']:.3g})" for one in result["first_differences"])
    return f"until token {', '.join(found)}"


RANK_COLUMNS = {"": _value("measure"), "found": _listed_values, "unit": _value("unit"), "%": _ranks_percent}
ANSWERS: Columns = {
    "": _value("measure"),
    "same tokens, median": _value("values", "median_same"),
    "same tokens, mean": _value("values", "mean_same"),
    "valid JSON": _value("json", "num_valid"),
    "valid tool calls": _value("tools", "num_valid"),
    "of": _value("json", "num_tasks"),
}
LATENT_PARTS = ("turboquant_mla_4bit", "token 0", "cure: near tokens exact")
"""Rows of latent-error that are shown."""
SECTIONS: Mapping[str, Columns] = {
    "fairness": {
        "": _value("measure"),
        "median before, ms": _value("values", "median_before_ms"),
        "median, ms": _value("values", "median_ms"),
        "largest, ms": _value("values", "largest_ms"),
        "largest / median before": _value("values", "ratio"),
        "first token, s": _value("values", "first_token_seconds"),
        "all work, s": _value("values", "seconds"),
    },
    "cpu-peers": {
        "": _value("measure"),
        "unit": _value("unit"),
        "holdfast": _value("values", "holdfast"),
        "llama.cpp": _value("values", "llama.cpp"),
        "llama.cpp / holdfast": _value("ratio"),
        "at least": _value("target"),
    },
    "gpu-latent-attention": {
        "": _value("measure"),
        "found": _listed_values,
        "unit": _value("unit"),
        "% of 4.37 TB/s": _value("percent_of_memory"),
        "TFLOPS": _value("tflops"),
        "% of the roof": _value("percent_of_roof"),
        "against bfloat16": _value("speed_against_plain"),
    },
    "gpu-sparse-attention": {
        "": _value("measure"),
        "scores, us": _value("values", "scores"),
        "% of their roof": _value("scores_percent_of_roof"),
        "top-k, us": _value("values", "top-k"),
        "chosen, us": _value("values", "sparse"),
        "% of 4.37 TB/s": _value("sparse_percent_of_memory"),
        "TFLOPS": _value("sparse_tflops"),
        "dense, us": _value("values", "dense"),
        "all three against dense": _value("speed_against_dense"),
    },
    "gpu-compressed-attention": {
        "": _value("measure"),
        "us": _listed_values,
        "TFLOPS": _value("tflops"),
        "% of the roof": _value("percent_of_roof"),
        "compressors, %": _value("compressors_percent"),
    },
    "gpu-latent": {
        "": _value("measure"),
        "found": _listed_values,
        "unit": _value("unit"),
        "% of the roof": _value("percent_of_roof"),
        "its graph alone": _value("graph_alone"),
    },
    "gpu-groups": {
        "": _value("measure"),
        "found": _listed_values,
        "unit": _value("unit"),
        "% of the roof": _value("percent_of_roof"),
        "its graph alone": _value("graph_alone"),
    },
    "gpu-overlap": {
        "tokens/s": _value("measure"),
        "waits": _value("values", "waits"),
        "runs ahead": _value("values", "runs ahead"),
        "its graph alone": _value("graph_alone", "runs ahead"),
        "% of the roof": _value("percent_of_roof", "runs ahead"),
        "against waiting": _value("ratio"),
    },
    "shared-prompts": {
        "": _value("measure"),
        "rows": _value("values", "shared"),
        "without sharing": _value("values", "alone"),
        "pages": _value("pages", "shared"),
        "without sharing ": _value("pages", "alone"),
        "seconds": _value("seconds", "shared"),
        "without sharing  ": _value("seconds", "alone"),
    },
    "channel": {
        "tokens/s": _value("measure"),
        "core in process": _value("values", "core in process"),
        "in a process of its own": _value("values", "core in a process of its own"),
        "cost, %": _value("cost_percent"),
    },
    "ngram": {
        "tokens/s": _value("measure"),
        "without proposals": _value("values", "plain"),
        "with": _proposing,
        "speed-up": _value("speedup"),
        "accepted of proposed": _accepted,
        "same tokens": _same_tokens,
    },
    "serve": {
        "": _value("measure"),
        "found": _listed_values,
        "unit": _value("unit"),
        "against transformers": _value("ratios", "transformers"),
    },
    "gpu-ranks": RANK_COLUMNS,
    "gpu-entry-ranks": RANK_COLUMNS,
    "gpu-exchange": {"": _value("measure"), "found": _listed_values, "unit": _value("unit")},
    "gpu-invariance": {
        "": _value("measure"),
        "rows that differ": lambda result: ", ".join(result["rows"]),
        "sizes of steps": _value("values", "sizes of steps"),
        "of them alike": _value("values", "left"),
    },
    "gpu-fused-ranks": {
        "us a step": _value("measure"),
        "plain": _value("values", "plain"),
        "fused": _value("values", "fused"),
        "times as fast": _value("ratio", "fused"),
    },
    "rank-frames": {
        "us": _value("measure"),
        "bytes": _value("frame_bytes"),
        "rank 0 is held up": _value("values", "sent"),
        "median": _value("medians", "sent"),
        "the last rank has it": _value("values", "there"),
    },
    "gpu-masks": {
        "us": _value("measure"),
        "mask kernel": _value("values", "mask kernel"),
        "copy of masks": _value("values", "copy of masks"),
        "% of the roof": _value("percent_of_roof"),
    },
    "structured": {
        "ms of a step": _value("measure"),
        "without a form": _value("values", "plain"),
        "with": _value("values", "structured"),
        "of which masks": _value("values", "masks"),
    },
    "predicted-ranks": {
        "": _value("measure"),
        "tokens/s": _listed_values,
        "scaling": _value("scaling"),
        "aiconfigurator's": _value("aiconfigurator_scaling"),
        "exact against batch_invariant": _value("exact_against_batch_invariant"),
        "sequences": _value("num_sequences", "tensor 8 x stages"),
        "ms a token": _value("milliseconds_a_token", "tensor 8 x stages"),
    },
    "window-pages": {
        "": _value("measure"),
        "sequences at once": _value("values", "at once"),
        "steps": _value("values", "steps"),
        "pages": _value("values", "pages"),
        "held at most": _value("values", "pages held"),
        "of a sequence, in its prompt": _held_pages("a prompt"),
        "and after": _held_pages("decode"),
    },
    "gpu-memory": {
        "": _value("measure"),
        "planned, GiB": _value("values", "planned"),
        "measured, GiB": _value("values", "measured"),
        "difference": _percent("total_percent"),
        "largest difference of an owner": lambda result: (
            result.get("error") or f"{_percent('worst_percent')(result)} ({result.get('worst_owner')})"
        ),
    },
    "gpu-decode": {
        "tokens/s": _value("measure"),
        "holdfast": _value("values", "holdfast"),
        "% of the roof": _value("percent_of_roof"),
        "its graph alone": _value("graph_alone", "holdfast"),
        "batch invariant": _value("values", "holdfast, batch invariant"),
        "transformers": _value("values", "transformers"),
    },
    "fill": {
        "": _value("measure"),
        "tokens in a context": _value("tokens"),
        "found in the prefix cache": _value("hit_tokens"),
        "tokens/s": _value("values", "holdfast"),
        "prefill": _value("prefill_tokens_per_s"),
        "decode": _value("decode_tokens_per_s"),
        "free MiB": lambda row: None if row.get("free_bytes") is None else row["free_bytes"] >> 20,
        "allocations": _value("allocations"),
    },
    "gpu-steady": {
        "": _value("measure"),
        "steps": _value("num_steps"),
        "compared": _value("num_compared"),
        "allocations, waits, compilations, moves, differences": _violations,
    },
    "gpu-attention": {
        "": _value("measure"),
        "ms": _value("milliseconds", "holdfast"),
        "rate": _value("values", "holdfast"),
        "unit": _value("unit"),
        "% of the roof": _value("percent_of_roof"),
        "torch SDPA, ms": _value("milliseconds", "torch SDPA"),
        "speed against it": _value("speed_against_sdpa"),
    },
    "gpu-prefill-attention": {
        "": _value("measure"),
        "ms": _value("milliseconds", "holdfast"),
        "TFLOPS": _value("values", "holdfast"),
        "in Triton": _value("values", "holdfast, triton"),
        "cuDNN": _value("values", "cuDNN"),
        "torch flash": _value("values", "torch flash"),
        "FlashAttention-3": _value("values", "FA3"),
        "FlashAttention-3, pages": _value("values", "FA3, pages"),
    },
    "gpu-packed": {
        "": _value("measure"),
        "packed, us": _value("values", "packed"),
        "bfloat16": _value("values", "bfloat16"),
        "fp8": _value("values", "fp8"),
        "% of the read rate": _value("percent_of_read_rate"),
    },
    "gpu-prefill-products": {
        "": _value("measure"),
        "us, in use and others": _times,
        "rate": _first_rate,
        "unit": _value("unit"),
        "wanted": _value("wanted"),
    },
    "gpu-lane-attention": {
        "": _value("measure"),
        "plain pages, ms": _value("values", "plain"),
        "through the lane": _value("values", "lane"),
        "over codes": _value("values", "codes"),
        "plain / lane": _value("against_plain"),
    },
    "gpu-state": {
        "": _value("measure"),
        "convolution, us": _value("values", "convolution"),
        "recurrence, us": _value("values", "step"),
        "chunks, us": _value("values", "chunks"),
        "norm, us": _value("values", "norm"),
        "all, us": _value("values", "all"),
        "% of the roof": _value("percent_of_roof"),
    },
    "gpu-quantized-attention": {
        "": _value("measure"),
        "ours": _value("values", "holdfast"),
        "torch SDPA, bf16": _value("values", "torch SDPA bf16"),
        "unit": _value("unit"),
        "% of the roof": _value("percent_of_roof"),
        "speed against it": _value("speed_against_sdpa"),
    },
    "gpu-near-attention": {
        "": _value("measure"),
        "without, ms": _value("values", "without"),
        "with near tokens, ms": _value("values", "near"),
        "a layer": _value("ratio"),
        "64 layers": _value("model_ratio"),
    },
    "gpu-quantized-kv": {
        "": _value("measure"),
        "unit": _value("unit"),
        "bfloat16 pages": _value("values", "bfloat16"),
        "fp8": _value("values", "fp8"),
        **{f"turboquant_{name}": _value("values", f"turboquant_{name}") for name in TURBOQUANT_PAGES},
        "k8v4 against bfloat16": _value("against_bfloat16", "turboquant_k8v4"),
    },
    "kv-quality": {
        "": _value("measure"),
        "bytes a token": _value("bytes_per_token"),
        "perplexity": _value("perplexity"),
        "mean KL": _value("mean_kl"),
        "p99 KL": _value("p99_kl"),
        "same top token": _value("agreement"),
    },
    "kv-near": {
        "": _value("measure"),
        "bytes a token": _value("bytes_per_token"),
        "perplexity": _change(),
        "mean KL": _value("mean_kl"),
        "p99.9 KL": _value("p999_kl"),
        "largest KL": _value("max_kl"),
        "same top token": _value("agreement"),
        "perplexity after the prompt": _change("after_prompt"),
        "mean KL after it": _value("after_prompt", "mean_kl"),
    },
    "kv-answers": ANSWERS,
    "kv-answers-behind": ANSWERS,
    "kv-recall": {
        "": _value("measure"),
        "1,024 tokens back": _value("values", "recall 1024"),
        "2,048": _value("values", "recall 2048"),
        "4,096": _value("values", "recall 4096"),
    },
    "latent-error": {
        "": _value("measure"),
        "mean KL": _value("values", "mean_kl"),
        "of all": _value("values", "of all"),
    },
    "key-bias": {
        "": _value("measure"),
        "mean KL": _value("values", "mean_kl"),
        "of that without a bias": _value("values", "of no bias"),
        "with the bias in the keys": _value("values", "in the keys, of no bias"),
    },
    "gpu-load": {
        "": _value("measure"),
        "GB/s": _load_rate,
        "seconds": _best_seconds,
        "bytes read against the source": _value("read_share"),
        "peak over final, MiB: allocated": _mib("over_final", "allocated"),
        "reserved": _mib("over_final", "reserved"),
        "used": _mib("over_final", "used"),
        "peak against the plan, MiB": _plan_error,
        "host, MiB": _load_host,
    },
    "gpu-quantized": {
        "": _value("measure"),
        **_by_weights("values", "tokens/s"),
        **_by_weights("milliseconds", "ms"),
        **_by_weights("percent_of_roof", "% of the roof"),
        **_by_weights("percent_of_roof_as_routed", "% as routed"),
        "fp8 against bfloat16": _value("against_unquantized", "fp8"),
    },
    "gpu-before-after": {
        "tokens/s": _value("measure"),
        "before": _value("values", "old"),
        "after": _value("values", "new"),
        "after / before": _value("ratio"),
    },
    "gpu-peers": {
        "": _value("measure"),
        "unit": _value("unit"),
        "holdfast": _value("values", "holdfast"),
        "vLLM": _value("values", "vllm"),
        "holdfast / vLLM": _value("ratio"),
    },
    "gpu-tests": {
        "": _value("measure"),
        "passed": _value("values", "passed"),
        "failed": _value("values", "failed"),
        "skipped": _value("values", "skipped"),
        "seconds": _value("seconds"),
    },
    "start": {
        "": _value("measure"),
        "seconds": _value("values", "seconds"),
        "processor seconds": _value("values", "processor seconds"),
    },
    "weight-quality": {
        "": _value("measure"),
        "MiB": _mib("weight_bytes"),
        "against 16 bit": _value("ratio_to_16_bit"),
        "perplexity": _value("perplexity"),
        "mean KL": _value("mean_kl"),
        "p99 KL": _value("p99_kl"),
        "same top token": _value("agreement"),
    },
}


class Highlight(NamedTuple):
    """One figure of the newest record that has it."""

    words: str
    """Text; `{model}` is replaced by the record's."""
    section: str | None
    measure: str
    """Measure of the result; "" if it covers all of them."""
    ours: Callable[[Result], str]
    beside: Callable[[Result], str]


def _rate(engine: str) -> Callable[[Result], str]:
    return lambda result: f"{_number(result['values'][engine])} {result['unit']}"


def _against_transformers(result: Result) -> str:
    return f"{result['values']['holdfast'] / result['values']['transformers']:.2f}x transformers, in the same run"


def _rates(name: str, section: str, *rows: tuple[str, str]) -> Highlight:
    """Return a highlight of several measures, each of one engine of a record."""

    def several(figure: Callable[[Result, str], float]) -> Callable[[Result], str]:
        def found(record: Result) -> str:
            results = {result["measure"]: result for result in record["results"]}
            return " / ".join(_number(figure(results[measure], engine)) for measure, engine in rows)

        return found

    def percent(result: Result, engine: str) -> float:
        value = result["percent_of_roof"]
        return round(value[engine] if isinstance(value, Mapping) else value)

    rates, percents = several(lambda result, engine: result["values"][engine]), several(percent)
    ours, beside = (
        (lambda record: f"{rates(record)} tokens/s"),
        (lambda record: f"{percents(record)} % of the memory roof"),
    )
    return Highlight(name, section, "", ours, beside)


def _worst_plan(record: Result) -> str:
    worst = max(abs(result["total_percent"]) for result in record["results"])
    return f"within {math.ceil(100 * worst) / 100:.2f} %"


HIGHLIGHTS = (
    Highlight(
        "{model}, decode, one stream",
        None,
        "decode, batch 1",
        _rate("holdfast"),
        _against_transformers,
    ),
    Highlight(
        "{model}, prefill of 512 tokens",
        None,
        "prefill, 512 tokens",
        _rate("holdfast"),
        _against_transformers,
    ),
    _rates(
        "Qwen3-32B, one stream / batch 64 / one stream with fp8 weights",
        "gpu-quantized",
        ("Qwen3-32B, batch 1", "bfloat16"),
        ("Qwen3-32B, batch 64", "bfloat16"),
        ("Qwen3-32B, batch 1", "fp8"),
    ),
    _rates(
        "gpt-oss-20b, one stream / batch 64",
        "gpu-groups",
        *((f"gpt-oss-20b, decode, batch {batch}", "holdfast") for batch in (1, 64)),
    ),
    _rates(
        "DeepSeek-V4-Flash, 31 of its layers, 8K of context, one stream / batch 64",
        "gpu-latent",
        *((f"DeepSeek-V4-Flash, fp8, 31 layers, decode, batch {batch}, context 8193", "holdfast") for batch in (1, 64)),
    ),
    Highlight(
        "decode attention over `turboquant_k8v4` pages, 32 x 8K",
        "gpu-quantized-attention",
        "decode, 32 x 8192, turboquant_k8v4",
        _rate("holdfast"),
        lambda result: f"{result['speed_against_sdpa']:.2f}x the speed of torch SDPA in bfloat16",
    ),
    Highlight(
        "{model}, KV tokens that fit in `turboquant_k8v4` pages",
        "gpu-quantized-kv",
        "tokens that fit",
        lambda result: f"{result['values']['turboquant_k8v4']:,.0f}",
        lambda result: f"{result['against_bfloat16']['turboquant_k8v4']:.2f}x bfloat16 pages",
    ),
    Highlight(
        "memory, measured against planned",
        "gpu-memory",
        "",
        _worst_plan,
        lambda record: f"the worst of {len(record['results'])} engines",
    ),
    Highlight(
        "Qwen1.5-MoE-A2.7B, load in fp8: peak over final size",
        "gpu-load",
        "Qwen1.5-MoE-A2.7B, fp8",
        lambda result: f"{_mib('over_final', 'used')(result):.0f} MiB",
        lambda result: f"at {_number(result['values']['holdfast'])} GB/s of checkpoint",
    ),
)
"""Figures in the README."""


def records(folder: Path, section: str | None) -> list[dict[str, Any]]:
    """Return the records of one section, or without one, newest first."""
    table = digests.read_table(folder.parent / digests.TABLE.name)
    found = [read_record(path) for path in sorted(folder.glob("*.json"))]
    for path, record in zip(sorted(folder.glob("*.json")), found, strict=True):
        record["state"] = digests.state_of(path.stem, record, table)
    return sorted(
        (record for record in found if record.get("section") == section), key=lambda item: item["date"], reverse=True
    )


def tables(folder: Path) -> str:
    """Return the tables of all records without a section; a sentence if there is none."""
    return "\n\n".join(map(record_table, records(folder, None))) or NO_RECORD


def section_tables(folder: Path, section: str) -> str:
    """Return the tables of all records of a section; a sentence if there is none."""
    found = records(folder, section)
    return "\n\n".join(section_table(record, SECTIONS[section]) for record in found) or NO_RECORD


def invariance_tables(folder: Path) -> str:
    """Return products that change with the number of rows, and the count of those that do not."""
    shown = []
    for record in records(folder, "gpu-invariance"):
        different = [result for result in record["results"] if not result["holds"]]
        num_alike, num_all = len(record["results"]) - len(different), len(record["results"])
        note = f"{num_alike} of {num_all} products are alike at every number of rows that was compared."
        shown.append(section_table({**record, "results": different, "note": note}, SECTIONS["gpu-invariance"]))
    return "\n\n".join(shown) or NO_RECORD


def latent_table(folder: Path) -> str:
    """Return the error of 4-bit latents by what is planted: all of it, that of token 0, and what a cure leaves."""
    shown = []
    for record in records(folder, "latent-error"):
        rows = [result for result in record["results"] if result["measure"].partition(": ")[2] in LATENT_PARTS]
        shown.append(section_table({**record, "results": rows}, SECTIONS["latent-error"]))
    return "\n\n".join(shown) or NO_RECORD


def highlight_table(folder: Path) -> str:
    """Return the highlights with figures; a sentence if there is none."""
    found = [row for highlight in HIGHLIGHTS if (row := _highlight_row(folder, highlight)) is not None]
    if not found:
        return NO_RECORD
    words = "; ".join(dict.fromkeys(state.words for _, state in found if state != digests.SAME))
    return "\n".join(
        [f"| | on | Holdfast | {words} |".replace("|  |", "| |"), "|---|---|---|---|", *(row for row, _ in found)]
    )


def _highlight_row(folder: Path, highlight: Highlight) -> tuple[str, digests.State] | None:
    """Return a row and the state of its record; None without a record."""
    for record in records(folder, highlight.section):
        for result in record["results"] if highlight.measure else [record]:
            if highlight.measure and result["measure"] != highlight.measure:
                continue
            try:
                figures = highlight.ours(result), highlight.beside(result)
            except (KeyError, TypeError):
                continue  # a run that was cut short, or without the other side; an older run may have both
            words = highlight.words.format(model=record["model"].removesuffix(".gguf"))
            ours, beside = figures
            cells = words, record["machine"], f"{ours} {record['state'].mark}".rstrip(), beside
            return f"| {' | '.join(cells)} |", record["state"]
    return None


def section_marks(section: str) -> tuple[str, str]:
    """Return the marks of a section's tables in a document."""
    return f"<!-- {section}: begin (make docs writes this table) -->", f"<!-- {section}: end -->"


BEGIN, END = section_marks("records")
MAKERS: Mapping[str, Callable[[Path], str]] = {
    "records": tables,
    "highlights": highlight_table,
    **{section: lambda folder, section=section: section_tables(folder, section) for section in SECTIONS},
    "gpu-invariance": invariance_tables,
    "latent-error": latent_table,
    "error-codes": error_table,
}
"""Content between the marks of each section."""


def written(document: str, folder: Path) -> str:
    """Return a document with all tables for its marks."""
    for section, make in MAKERS.items():
        begin, end = section_marks(section)
        if begin in document or end in document:
            document = replaced(document, make(folder), begin, end)
    return document


def replaced(document: str, content: str, begin: str, end: str) -> str:
    """Return the document with the text between the two marks replaced."""
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        sys.exit(f"error: the document must have one {begin} before one {end}; put the marks back")
    before, _, rest = document.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{content}\n{end}{after}"


def main() -> None:
    """Rewrite the documents in place, after comparing the records with this tree."""
    changed = [case for case, entry in digests.refresh()["cases"].items() if entry["ptx"] is None]
    if changed:
        print(f"not compared (run make digests): {', '.join(changed)}")
    for path in DOCUMENTS:
        document = path.read_text(encoding="utf-8")
        path.write_text(written(document, RECORDS), encoding="utf-8")
        shown = sum(section_marks(section)[0] in document for section in MAKERS)
        print(f"{path.relative_to(ROOT)}: tables of {shown} sections, from {len(list(RECORDS.glob('*.json')))} records")


if __name__ == "__main__":
    main()
