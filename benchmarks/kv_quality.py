"""Measure every KV format on the default model beside vLLM's version, and write the record: python benchmarks/kv_quality.py

The text is Python's own help on the language, which every installation has; --text takes another. The record is
benchmarks/records/<cpu>-<date>-kv-quality.json, and `make docs` shows it in docs/quantization.md. 16K tokens take half an hour
on two idle cores. --near measures our formats beside near tokens too. --prompt measures vLLM's with a prompt of one step that
reads its own keys and values, and adds the figures of all predictions after it. The record is then of the section kv-near.
"""

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
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
    CHUNK_TOKENS,
    Entry,
    OpenedContenders,
    format_entry,
    narrower_formats,
    open_contenders,
    reference_entry,
    settle_config,
)
from holdfast.eval.quality import HalfTokens, Quality, ReferenceReading, tally_against
from holdfast.eval.text_windows import cut_windows
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.planning.target import device_target
from holdfast.quant.formats import KV_FORMATS
from holdfast.runner.build import plan_model
from holdfast.runner.variants import Variant

TOPICS = "the topics of Python's help"
AS_VLLM = "as vLLM"
WIDE = "protected in half precision"
NONE = "no layer protected"
PROMPT_AS_VLLM = "as vLLM, its prompt exact"
CONTEXT = 4096
"""Tokens of a sequence whose near pages count: they are as many at any length."""
HALF_PRECISION = "bfloat16"


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
    parser.add_argument(
        "--near", nargs="*", default=[], help="blocks of near tokens: 64 for all formats, FORMAT:128 for one"
    )
    parser.add_argument(
        "--prompt", action="store_true", help=f"also vLLM's with a prompt of {CHUNK_TOKENS} tokens that is exact"
    )
    parser.add_argument("--html", type=Path, default=None, help="draw it too")
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    return parser


def near_entry(config: EngineConfig, model: OpenModel, name: str, near: int) -> Entry:
    """Return a format beside near tokens; its bytes are those of CONTEXT tokens in half precision, near pages included."""
    found = format_entry(replace(config, kv_near_tokens=near), model, name)
    in_half = replace(found.variant.config, dtype=HALF_PRECISION)
    _, plan = plan_model(in_half, model, device_target(config.device))
    pages = plan.resolved.pages()
    assert pages is not None, f"{name} has no pages"
    near_bytes = pages.groups[-1].most_held(1) * pages.page_bytes
    return found._replace(
        name=f"{name}, near {near}", bytes_per_token=plan.kv_bytes_per_token + Fraction(near_bytes, CONTEXT)
    )


def entries(
    config: EngineConfig, model: OpenModel, with_layers: bool, near: Sequence[str] = (), with_prompt: bool = False
) -> list[Entry]:
    """Return the reference, our formats and vLLM's; with other protected layers, near tokens or prompts, if requested."""
    ours = [name for name in narrower_formats(config, model).names if KV_FORMATS[name].is_quantized]
    found = [reference_entry(config), *(format_entry(config, model, name) for name in ours)]
    if with_layers:
        for name in ours:
            if KV_FORMATS[name].key_bits in (3, 4):
                none = replace(config, kv_protected_layers=0)
                wide = replace(config, kv_protected_layers=4, kv_protected_dtype="bfloat16")
                found.append(format_entry(none, model, name)._replace(name=f"{name}, {NONE}"))
                found.append(format_entry(wide, model, name)._replace(name=f"{name}, {WIDE}"))
    few_bits = [name for name in ours if KV_FORMATS[name].value_bits in (3, 4)]
    for words in near:
        name, _, tokens = words.rpartition(":")
        found += [near_entry(config, model, own, int(tokens)) for own in ([name] if name else few_bits)]
    plain = found[0].variant.config
    for vllm_format in VLLM_FORMATS:
        num_bytes, note = vllm_format.bytes_per_token(model.spec), vllm_format.note(model.spec.num_layers)
        for is_exact in (False, True) if with_prompt else (False,):
            variant = Variant(plain, MakeVllmPages(vllm_format, is_exact))
            name = f"{vllm_format.name}, {PROMPT_AS_VLLM if is_exact else AS_VLLM}"
            found.append(Entry(name, variant, num_bytes, note))
    return found


def measure_twice(
    opened: OpenedContenders, windows: Sequence[Sequence[int]], first: int
) -> tuple[list[Quality], list[Quality]]:
    """Measure all contenders: over all predictions, and over those from `first` on, none if that is 0."""
    reference, *others = opened.contenders
    with EvalBar() as bar:
        halves = HalfTokens(len(opened.contenders) * sum(map(len, windows)), bar)
        reading = ReferenceReading(reference, windows)
        loss_NP = reading.tally.loss_NP
        whole, later = [reading.read(halves.add)], []
        tallies = [reading.tally]
        for other in others:
            tallies.append(tally_against(reading, other, halves.add))
            whole.append(tallies[-1].quality(other, loss_NP))
            print(figures_line(whole[-1], whole[0].perplexity), flush=True)
    if first:
        later = [
            tally.quality(contender, loss_NP, first)
            for tally, contender in zip(tallies, opened.contenders, strict=True)
        ]
    return whole, later


def figures_line(quality: Quality, perplexity: float) -> str:
    """Return the figures of a format that is done."""
    change = f"{quality.perplexity / perplexity - 1:+.2%} +-{quality.change_error:.2%}"
    tail = f"p99 {quality.p99_kl:.4g}, p99.9 {quality.p999_kl:.4g}, max {quality.max_kl:.4g}"
    return f"{quality.name}: {quality.size_bytes:.0f} bytes, {change}, mean KL {quality.mean_kl:.5f}, {tail}, top-1 {quality.agreement:.1%}"


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
    words += ["--layers"] if arguments.layers else []
    words += ["--near", *arguments.near] if arguments.near else []
    return [*words, *(["--prompt"] if arguments.prompt else [])]


def run(arguments: argparse.Namespace) -> tuple[EvalView, list[Quality], str]:
    """Run all windows through all formats; return results, those after the prompt, and the text."""
    text = "\n\n".join(topics.values()) if arguments.text is None else read_text(arguments.text)
    text_name = TOPICS if arguments.text is None else Path(arguments.text).name
    config = EngineConfig(model=arguments.model, device=arguments.device)
    model = open_model(config.model, config.load_format, config.revision)
    try:
        tokenizer = open_tokenizer(config, model)
        windows = cut_windows(tokenizer, text, arguments.window, arguments.tokens, model.spec.vocab_size)
        settled = settle_config(config, model, arguments.window)
        chosen = entries(settled, model, arguments.layers, arguments.near, arguments.prompt)
        opened = open_contenders(chosen, model, lambda done, total: None)
    finally:
        model.source.close()
    try:
        qualities, later = measure_twice(opened, windows, CHUNK_TOKENS if arguments.prompt else 0)
    finally:
        opened.release()
    settings = f"{settled.dtype} on {settled.device}"
    plain = float(opened.plain_bytes_per_token)
    view = EvalView(model_name(config), settings, text_name, arguments.window, len(windows), plain, qualities)
    return view, later, text


def main() -> None:
    """Measure, print, and write the record."""
    parser = options()
    arguments = parser.parse_args()
    if arguments.prompt and arguments.window <= CHUNK_TOKENS + 1:
        parser.error(f"--window {arguments.window}: --prompt needs predictions after {CHUNK_TOKENS} tokens")
    view, later, text = run(arguments)
    found = verdicts(list(view.qualities))
    show(quality_lines(view))
    columns = ("format", "bytes of theirs", "KL of theirs", "p99 of theirs", "holds")
    gpu_records.print_table(
        f"Against the same format {AS_VLLM} runs it", columns, [list(row.values()) for row in found]
    )
    facts = {"against_vllm": found, "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    record = quality_record(view, command(arguments), facts)
    results = record["results"]
    assert isinstance(results, list)
    for result, quality in zip(results, later, strict=False):
        change = quality.perplexity / later[0].perplexity - 1
        result["after_prompt"] = {**asdict(quality), "perplexity_change": change}
    record["commit"] = arguments.commit or record["commit"]
    if arguments.html is not None:
        write_page(arguments.html, eval_page(view))
    arguments.out.mkdir(parents=True, exist_ok=True)
    section = "kv-near" if arguments.near else "kv-quality"
    record["section"] = section
    path = arguments.out / gpu_records.record_name(str(record["cpu"]), section, str(record["date"]))
    path.write_text(f"{dumps(record, indent=1)}\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
