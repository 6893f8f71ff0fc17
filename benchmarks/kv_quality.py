"""Measure every KV format on the default model beside vLLM's version, and write the record: python benchmarks/kv_quality.py

The text is Python's own help on the language, which every installation has; --text takes another. The record is
benchmarks/records/<cpu>-<date>-kv-quality.json, and `make docs` shows it in docs/quantization.md. 16K tokens take half an hour
on two idle cores.
"""

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import gpu_records
from vllm_pages import VLLM_FORMATS, MakeVllmPages

from holdfast.cli.eval import EvalBar, quality_record, read_text
from holdfast.cli.opened_model import model_name
from holdfast.cli.page import eval_page, write_page
from holdfast.cli.tables import EvalView, quality_lines, show
from holdfast.cli.terminal import dumps
from holdfast.config import EngineConfig
from holdfast.engine.open_text import open_tokenizer
from holdfast.eval.kv_quality import (
    Entry,
    format_entry,
    measure,
    narrower_formats,
    open_contenders,
    reference_entry,
    settle_config,
)
from holdfast.eval.quality import Quality
from holdfast.eval.text_windows import cut_windows
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.quant.formats import KV_FORMATS
from holdfast.runner.variants import Variant

TOPICS = "the topics of Python's help"
AS_VLLM = "as vLLM"
WIDE = "protected in half precision"
NONE = "no layer protected"


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="a folder or a GGUF file; left out: the default model")
    parser.add_argument("--text", default=None, help=f"a file of plain text; left out: {TOPICS}")
    parser.add_argument("--tokens", type=int, default=16 * 1024, help="of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--layers", action="store_true", help="also with no layer protected, and with bfloat16 for them"
    )
    parser.add_argument("--html", type=Path, default=None, help="draw it too")
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    return parser


def entries(config: EngineConfig, model: OpenModel, with_layers: bool) -> list[Entry]:
    """Return the reference, our formats and vLLM's; with other protected layers, if requested."""
    ours = [name for name in narrower_formats(config, model).names if KV_FORMATS[name].is_quantized]
    found = [reference_entry(config), *(format_entry(config, model, name) for name in ours)]
    if with_layers:
        for name in ours:
            if KV_FORMATS[name].key_bits in (3, 4):
                none = replace(config, kv_protected_layers=0)
                wide = replace(config, kv_protected_layers=4, kv_protected_dtype="bfloat16")
                found.append(format_entry(none, model, name)._replace(name=f"{name}, {NONE}"))
                found.append(format_entry(wide, model, name)._replace(name=f"{name}, {WIDE}"))
    plain = found[0].variant.config
    for vllm_format in VLLM_FORMATS:
        variant = Variant(plain, MakeVllmPages(vllm_format))
        name, num_bytes = f"{vllm_format.name}, {AS_VLLM}", vllm_format.bytes_per_token(model.spec)
        found.append(Entry(name, variant, num_bytes, vllm_format.note(model.spec.num_layers)))
    return found


def verdicts(qualities: list[Quality]) -> list[dict[str, object]]:
    """Compare each of our formats with vLLM's of the same name: bytes and divergence as shares of vLLM's."""
    by_name = {quality.name: quality for quality in qualities}
    pairs = [
        (by_name[vllm_format.name], by_name[f"{vllm_format.name}, {AS_VLLM}"])
        for vllm_format in VLLM_FORMATS
        if vllm_format.name in by_name
    ]
    return [
        {
            "format": ours.name,
            "bytes_of_theirs": ours.size_bytes / theirs.size_bytes,
            "kl_of_theirs": ours.mean_kl / theirs.mean_kl if theirs.mean_kl else None,
            "p99_of_theirs": ours.p99_kl / theirs.p99_kl if theirs.p99_kl else None,
            "holds": ours.mean_kl <= theirs.mean_kl and ours.size_bytes <= theirs.size_bytes,
        }
        for ours, theirs in pairs
    ]


def command(arguments: argparse.Namespace) -> list[str]:
    """Return the command as typed, without local paths."""
    words = ["python", "benchmarks/kv_quality.py", "--tokens", str(arguments.tokens), "--window", str(arguments.window)]
    for option in ("model", "text"):
        if getattr(arguments, option) is not None:
            words += [f"--{option}", Path(getattr(arguments, option)).name]
    return [*words, *(["--layers"] if arguments.layers else [])]


def run(arguments: argparse.Namespace) -> tuple[EvalView, str]:
    """Run all windows through all formats; return results and text."""
    text = "\n\n".join(topics.values()) if arguments.text is None else read_text(arguments.text)
    text_name = TOPICS if arguments.text is None else Path(arguments.text).name
    config = EngineConfig(model=arguments.model, device=arguments.device)
    model = open_model(config.model, config.load_format, config.revision)
    try:
        tokenizer = open_tokenizer(config, model)
        windows = cut_windows(tokenizer, text, arguments.window, arguments.tokens, model.spec.vocab_size)
        settled = settle_config(config, model, arguments.window)
        opened = open_contenders(entries(settled, model, arguments.layers), model, lambda done, total: None)
    finally:
        model.source.close()
    try:
        with EvalBar() as bar:
            qualities = measure(opened.contenders[0], opened.contenders[1:], windows, bar)
    finally:
        opened.release()
    settings = f"{settled.dtype} on {settled.device}"
    plain = float(opened.plain_bytes_per_token)
    return EvalView(model_name(config), settings, text_name, arguments.window, len(windows), plain, qualities), text


def main() -> None:
    """Measure, print, and write the record."""
    arguments = options().parse_args()
    view, text = run(arguments)
    found = verdicts(list(view.qualities))
    show(quality_lines(view))
    columns = ("format", "bytes of theirs", "KL of theirs", "p99 of theirs", "holds")
    gpu_records.print_table(
        f"Against the same format {AS_VLLM} runs it", columns, [list(row.values()) for row in found]
    )
    facts = {"against_vllm": found, "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    record = quality_record(view, command(arguments), facts)
    record["commit"] = arguments.commit or record["commit"]
    if arguments.html is not None:
        write_page(arguments.html, eval_page(view))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / gpu_records.record_name(str(record["cpu"]), "kv-quality", str(record["date"]))
    path.write_text(f"{dumps(record, indent=1)}\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
