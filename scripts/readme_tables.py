"""Writes the table of figures in README.md again, from the committed records under benchmarks/records/.

A record is one run on one machine, as JSON:

    {"date": "2026-01-31", "machine": "2 ARM cores", "model": "SmolLM2-135M-Instruct", "settings": "float32",
     "results": [{"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 40.0, "transformers": 19.2}}]}

The first engine of `values` is compared with the others; more is better. Other keys are kept in the record and not shown.
"""

import json
import sys
from pathlib import Path
from typing import Any

from architecture_rows import replaced

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "README.md"
RECORDS = ROOT / "benchmarks" / "records"
BEGIN = "<!-- records: begin (make docs writes this table) -->"
END = "<!-- records: end -->"


def read_record(path: Path) -> dict[str, Any]:
    """A record, or an exit that names the file and what is wrong with it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        titles = [record[key] for key in ("date", "machine", "model", "settings")]
        numbers = [float(value) for result in record["results"] for value in result["values"].values()]
        labels = [result[key] for result in record["results"] for key in ("measure", "unit")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"error: a record was asked; {path.name} is none ({error!r}); see the top of scripts/readme_tables.py")
    if not numbers or not all(isinstance(text, str) and text for text in (*titles, *labels)):
        sys.exit(f"error: a record was asked; {path.name} has empty places; see the top of scripts/readme_tables.py")
    return record


def record_table(record: dict[str, Any]) -> str:
    """One record: a line that says what was run where, and a row for each measure."""
    engines = list(dict.fromkeys(engine for result in record["results"] for engine in result["values"]))
    ours, *others = engines
    lines = [
        f"{record['model']}, {record['settings']}, on {record['machine']}, {record['date']}:",
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


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tables(folder: Path) -> str:
    """All records, newest first; a sentence when there is none."""
    records = sorted((read_record(path) for path in folder.glob("*.json")), key=lambda item: item["date"], reverse=True)
    return "\n\n".join(record_table(record) for record in records) or "No record is committed yet."


def main() -> None:
    """Rewrite the README in place."""
    document = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(replaced(document, tables(RECORDS), BEGIN, END), encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)}: {len(list(RECORDS.glob('*.json')))} records")


if __name__ == "__main__":
    main()
