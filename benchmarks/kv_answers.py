"""Compare greedy code answers, JSON, tool calls and far recall without and with near tokens, and write the record: python benchmarks/kv_answers.py

Code prompts pass through the chat template. A contender's answer counts its tokens before the first that differs from the
reference's. JSON, tool calls and facts are those of `holdfast eval kv`; recall repeats with other cities, words and filler.
--behind puts text before each code prompt, so that no part of an answer is in its first near block. The record is of the
section kv-answers, or kv-recall without answers.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gpu_records

from holdfast.cli import bench_record
from holdfast.cli.eval import read_text
from holdfast.cli.opened_model import model_name
from holdfast.cli.terminal import dumps
from holdfast.config import EngineConfig
from holdfast.engine.open_text import open_text
from holdfast.eval.answers import Questions
from holdfast.eval.kv_quality import SEQUENCES, Entry, format_entry, open_contenders, reference_entry, settle_config
from holdfast.eval.recall import Recall, RecallTest, longest_test, make_test, measure_recall
from holdfast.eval.tasks import RecallTask, Tasks, read_tasks
from holdfast.eval.text_windows import beginning
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.text.chat_template import ChatTemplate

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python class for a stack with push, pop and is_empty.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a C function that reverses a string in place.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write an SQL query that counts the orders of each customer.",
    "Write a Python function that reads a CSV file and returns a list of dictionaries.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a bash script that renames all .txt files in a folder to .md.",
    "Write a Python decorator that prints how long a function takes.",
)
CONTEXT = 512
"""Tokens of a prompt and its answer, without the text before it."""
FILLER_TOKENS = 2**14
SHIFT = 8
"""Places by which keys and words of a further recall test move."""


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="a folder or a GGUF file; left out: the default model")
    parser.add_argument("--text", default=None, help="a file of plain text as filler; left out: Python's help")
    parser.add_argument("--formats", nargs="*", default=["turboquant_4bit_nc"], help="quantized KV formats")
    parser.add_argument("--near", type=int, nargs="*", default=[0, 64], help="blocks of near tokens")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer; 0 for none")
    parser.add_argument("--behind", type=int, default=0, help="tokens of the text before each code prompt")
    parser.add_argument("--recall", type=int, nargs="*", default=[1024, 2048, 4096, 8000], help="distances in tokens")
    parser.add_argument("--tests", type=int, default=2, help="recall tests of 4 facts a distance")
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    return parser


def entries(config: EngineConfig, model: OpenModel, formats: Sequence[str], near: Sequence[int]) -> list[Entry]:
    """Return the reference, and every format without near tokens and with them."""
    found = [reference_entry(config)]
    for name in formats:
        for tokens in near:
            entry = format_entry(replace(config, kv_near_tokens=tokens), model, name)
            found.append(entry._replace(name=f"{name}, near {tokens}"))
    return found


def code_tasks(template: ChatTemplate, before: str = "") -> Tasks:
    """Return the code prompts as chats behind a text, with the packaged JSON and tool tasks."""
    packaged = read_tasks()
    chats = (template.render([{"role": "user", "content": before + prompt}]) for prompt in PROMPTS)
    return replace(packaged, continuations=tuple(chats))


def moved(task: RecallTask, number: int) -> RecallTask:
    """Return the task with other cities and words first."""
    keys, words = number * SHIFT % len(task.keys), number * SHIFT % len(task.words)
    return task._replace(keys=(*task.keys[keys:], *task.keys[:keys]), words=(*task.words[words:], *task.words[:words]))


def together(tests: Sequence[Sequence[Recall]]) -> list[Mapping[str, object]]:
    """Return the figures of each distance over all tests."""
    rows = []
    for recalls in zip(*tests, strict=True):
        logprob = statistics.mean(recall.mean_logprob for recall in recalls)
        whole = replace(
            recalls[0],
            num_facts=sum(recall.num_facts for recall in recalls),
            num_right=sum(recall.num_right for recall in recalls),
            mean_logprob=logprob,
            mean_rank=statistics.mean(recall.mean_rank for recall in recalls),
        )
        rows.append({**asdict(whole), "probability": whole.probability})
    return rows


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str, str]:
    """Measure every contender; return results, model and settings."""
    config = EngineConfig(model=arguments.model, device="cpu")
    model = open_model(config.model, config.load_format, config.revision)
    try:
        tokenizer, template = open_text(config, model)
        assert tokenizer is not None, "the model has no tokenizer"
        assert template is not None, "the model has no chat template"
        context = CONTEXT + arguments.behind
        longest = max(longest_test(arguments.recall), context)
        settled = settle_config(config, model, context, longest, SEQUENCES)
        chosen = entries(settled, model, arguments.formats, arguments.near)
        opened = open_contenders(chosen, model, lambda done, total: None)
    finally:
        model.source.close()
    text = "\n\n".join(topics.values()) if arguments.text is None else read_text(arguments.text)
    filler = tokenizer.encode(text, add_special_tokens=False)
    before = f"{tokenizer.decode(filler[: arguments.behind])}\n\n" if arguments.behind else ""
    questions = Questions(code_tasks(template, before), tokenizer, template, arguments.tokens)
    num_tests = arguments.tests if arguments.recall else 0
    tests = [recall_test(arguments, number, filler, tokenizer) for number in range(num_tests)]
    results: list[dict[str, Any]] = []
    reference, unit = None, "tokens" if arguments.tokens else "probability"
    try:
        for contender in opened.contenders:
            row: dict[str, Any] = {"measure": contender.name, "unit": unit, "values": {}}
            if arguments.tokens:
                own = questions.generate(contender)
                reference = reference or own
                answers = questions.compare(reference, own)
                row["values"] = {"median_same": answers.median_same, "mean_same": statistics.mean(answers.same_tokens)}
                row |= asdict(answers)
                print(contender.name, row["values"], answers, sep=": ", flush=True)
            if arguments.recall:
                row["recall"] = together([measure_recall(contender, test) for test in tests])
                row["values"] |= {f"recall {recall['distance']}": recall["probability"] for recall in row["recall"]}
                print(contender.name, *row["recall"], sep="\n  ", flush=True)
            results.append(row)
    finally:
        opened.release()
    return results, model_name(config), f"{settled.dtype} on {settled.device}"


def recall_test(arguments: argparse.Namespace, number: int, filler: Sequence[int], tokenizer: Any) -> RecallTest:  # noqa: ANN401
    """Return a recall test with its own cities, words and filler."""
    start = number * FILLER_TOKENS % len(filler)
    own = filler[start : start + FILLER_TOKENS]
    task = moved(read_tasks().recall, number)
    return make_test(task, tokenizer, own, arguments.recall, beginning(tokenizer))


def main() -> None:
    """Measure, print, and write the record."""
    arguments = options().parse_args()
    results, model, settings = run(arguments)
    text = {} if arguments.text is None else {"text": Path(arguments.text).name}
    words: list[object] = ["--tokens", arguments.tokens, "--tests", arguments.tests, "--recall", *arguments.recall]
    words += ["--behind", arguments.behind] if arguments.behind else []
    words += ["--formats", *arguments.formats, "--near", *arguments.near, *(("--text", text["text"]) if text else ())]
    command = ["python", "benchmarks/kv_answers.py", *map(str, words)]
    section = f"kv-answers{'-behind' if arguments.behind else ''}" if arguments.tokens else "kv-recall"
    record = bench_record.make_record(model, settings, results, command, section=section, **text)
    record["commit"] = arguments.commit or record["commit"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / gpu_records.record_name(str(record["cpu"]), section, str(record["date"]))
    path.write_text(f"{dumps(record, indent=1)}\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
