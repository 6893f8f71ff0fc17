"""Measure the default model against transformers on this CPU, and write the record: python benchmarks/cpu.py [NAME]

The record is benchmarks/records/<cpu>-<date>-<name>.json, one run of `holdfast bench latency`; `make docs` shows it in
docs/performance.md. About five minutes on two idle cores; keep the machine idle meanwhile.
"""

import datetime
import os
import re
import sys
from pathlib import Path

from holdfast.cli.app import run
from holdfast.cli.bench_record import cpu_name

ROOT = Path(__file__).parent.parent
RECORDS = Path("benchmarks") / "records"


def record_path(name: str) -> Path:
    """Return the path of today's record, from the root of the repository."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    cpu = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return RECORDS / f"{cpu}-{date}-{name}.json"


def main() -> None:
    """Run the benchmark that the documents quote."""
    name = sys.argv[1] if len(sys.argv) > 1 else "latency"
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", name):
        sys.exit(f"error: the name {name!r} must consist of small letters, digits and hyphens")
    os.chdir(ROOT)
    RECORDS.mkdir(parents=True, exist_ok=True)
    arguments = ["bench", "latency", "--against", "transformers", "--json", str(record_path(name))]
    sys.argv = ["holdfast", *arguments]
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
