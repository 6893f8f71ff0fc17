"""The record of an evaluation: where, when and from what, and every figure of every format or scheme; no torch."""

import datetime
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from holdfast.cli import bench_record
from holdfast.cli.eval_table import EvalView


def quality_record(view: EvalView, command: Sequence[str], facts: Mapping[str, object]) -> dict[str, object]:
    """One run on this machine, now; the first result is the reference."""
    return {
        "section": view.subject.section,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": bench_record.machine(),
        "model": view.model,
        "settings": f"{view.settings}, {view.num_windows} windows of {view.window} tokens",
        "results": [_result(view, place) for place in range(len(view.qualities))],
        "command": shlex.join(command),
        "commit": bench_record.commit(),
        "versions": bench_record.versions(),
        "cpu": bench_record.cpu_name(),
        "num_cores": bench_record.num_cores(),
        "text": view.text,
        "window": view.window,
        "num_windows": view.num_windows,
        "reference": view.qualities[0].name,
        f"plain_{view.subject.size_key}": view.plain_bytes,
        **facts,
    }


def _result(view: EvalView, place: int) -> dict[str, object]:
    quality = view.qualities[place]
    figures = asdict(quality)
    return {
        "measure": figures.pop("name"),
        "unit": "nats",
        "values": {"mean_kl": quality.mean_kl},
        view.subject.size_key: figures.pop("size_bytes"),
        **figures,
        "ratio_to_16_bit": view.plain_bytes / quality.size_bytes,
        "perplexity_change": quality.perplexity / view.qualities[0].perplexity - 1,
    }
