"""Measure every weight scheme on the default model against its float32 weights, and write the record: python benchmarks/weight_quality.py

The text is Python's own help on the language, which every installation has; --text takes another. The record is
benchmarks/records/<cpu>-<date>-weight-quality.json, and `make docs` shows it in docs/quantization.md. 2K tokens take some
minutes on two idle cores.
"""

import argparse
import hashlib
from pathlib import Path

import gpu_records

from holdfast.cli.eval import TOPICS, EvalText, measure_schemes, quality_record, read_schemes, topics_or_text
from holdfast.cli.page import eval_page, write_page
from holdfast.cli.tables import EvalView, quality_lines, show
from holdfast.cli.terminal import dumps
from holdfast.config import EngineConfig


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="a folder or a GGUF file; left out: the default model")
    parser.add_argument("--schemes", default="all", help="with commas between; all: every one that can run")
    parser.add_argument("--text", default=None, help=f"a file of plain text; left out: {TOPICS}")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--embeddings", default="head", help="what of the vocabulary is quantized: head, all, none")
    parser.add_argument("--html", type=Path, default=None, help="draw it too")
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    return parser


def command(arguments: argparse.Namespace) -> list[str]:
    """Return the command as typed, without local paths."""
    words = ["python", "benchmarks/weight_quality.py"]
    for option in ("tokens", "window", "schemes", "embeddings"):
        words += [f"--{option}", str(getattr(arguments, option))]
    for option in ("model", "text"):
        if getattr(arguments, option) is not None:
            words += [f"--{option}", Path(getattr(arguments, option)).name]
    return words


def run(arguments: argparse.Namespace) -> tuple[EvalView, str]:
    """Run all windows through all schemes; return results and text."""
    text, text_name = topics_or_text(arguments.text)
    config = EngineConfig(model=arguments.model, device=arguments.device, quantized_embeddings=arguments.embeddings)
    names = read_schemes(arguments.schemes)
    return measure_schemes(config, (), names, EvalText(text, text_name, arguments.window, arguments.tokens)), text


def main() -> None:
    """Measure, print, and write the record."""
    arguments = options().parse_args()
    view, text = run(arguments)
    show(quality_lines(view))
    facts = {
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "quantized_embeddings": arguments.embeddings,
    }
    record = quality_record(view, command(arguments), facts)
    record["commit"] = arguments.commit or record["commit"]
    if arguments.html is not None:
        write_page(arguments.html, eval_page(view))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / gpu_records.record_name(str(record["cpu"]), view.subject.section, str(record["date"]))
    path.write_text(f"{dumps(record, indent=1)}\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
