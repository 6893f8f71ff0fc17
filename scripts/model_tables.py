"""Rewrite the tables of docs/models.md: models and GPUs known by name, with the figures used by plans."""

from collections.abc import Mapping
from pathlib import Path

from holdfast.cli.plan_names import ModelRow, model_rows
from holdfast.memory.devices import ASSUMED, PLANNED_GPUS, SEEN, Gpu
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE, SAME

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
MODEL_HEADINGS = (
    "name",
    "",
    "parameters",
    "bytes in bfloat16",
    "KV bytes a token",
    "windows or states of a sequence",
    "source",
)
GPU_HEADINGS = ("name", "as its driver calls it", "GB", "bytes", "compute capability", "bytes are")
TOO_OLD = "too old to run"


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join((*lines, *(f"| {' | '.join(row)} |" for row in rows)))


def model_row(row: ModelRow) -> tuple[str, ...]:
    """Return the row of a model; bytes are those of its shapes in bfloat16, whatever its stored type."""
    found = declare_config(
        {**CATALOGUE[row.name], "quantization_config": None, "expert_dtype": ""},
        row.name,
    )
    kv_bytes = found.kv_bytes_per_token("bfloat16")
    return (
        row.name,
        "runs" if row.runs else "planned only",
        f"{row.parameters:,}",
        f"{found.weight_bytes('bfloat16'):,}",
        f"{int(kv_bytes):,}" if kv_bytes.denominator == 1 else f"{float(kv_bytes):,.2f}",
        f"{row.kv_bytes_per_sequence:,}" if row.kv_bytes_per_sequence else "",
        row.source,
    )


def gpu_row(gpu: Gpu) -> tuple[str, ...]:
    """Return the row of a GPU; the source of its bytes is one of three."""
    origin = "seen" if gpu.source.startswith(SEEN) else "assumed" if gpu.source.startswith(ASSUMED) else "measured"
    capability = ".".join(map(str, gpu.capability)) + (f", {TOO_OLD}" if gpu.is_too_old else "")
    return gpu.key, gpu.name, str(gpu.nominal_gb), f"{gpu.total_bytes:,}", capability, origin


def tables() -> dict[str, str]:
    """Return each table by the mark before it."""
    return {
        "models": table(MODEL_HEADINGS, [model_row(row) for row in model_rows()]),
        "same": table(("name", "has the figures of"), list(SAME.items())),
        "gpus": table(GPU_HEADINGS, [gpu_row(gpu) for gpu in PLANNED_GPUS.values()]),
    }


def written(text: str) -> str:
    """Return the document with current tables."""
    return filled(text, tables())


def filled(text: str, found: Mapping[str, str]) -> str:
    """Return a document with these tables between their marks."""
    for name, content in found.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, mark, rest = text.partition(begin)
        _, other, after = rest.partition(end)
        assert mark, f"the document lacks {begin}"
        assert other, f"the document lacks {end}"
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
