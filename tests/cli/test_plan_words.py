"""A plan in words, and a command that makes the same plan again."""

import shlex
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from cli.plan_wishes import wish
from holdfast.cli.plan_words import asked_words, start_command, token_words
from holdfast.runner.planning.alternatives import Alternative
from holdfast.runner.planning.plan_fit import Wish, settle
from holdfast.runner.planning.target import cpu_target


def words_of(asked: Wish) -> str:
    return asked_words(asked, settle(asked)[1])


def change(option: str, value: object) -> Alternative:
    return Alternative("", option, value, 1, 1.0, True, None, True)  # type: ignore[arg-type]


def test_what_is_asked_is_one_line() -> None:
    assert words_of(wish(max_model_len=4096, max_num_seqs=1)) == (
        "Qwen3-8B on NVIDIA H200: weights in bfloat16, KV pages in bfloat16, context 4,096, one sequence, 8,192 tokens a step"
    )
    several = words_of(wish(tensor_parallel_size=4, quantization="fp8", kv_cache_dtype="turboquant_k8v4"))
    assert several.startswith(
        "Qwen3-8B on each of 4 x NVIDIA H200: weights in fp8, KV pages in turboquant_k8v4, context 40,960"
    )
    mixed = words_of(wish(kv_cache_dtype="turboquant_4bit_nc", kv_protected_dtype="auto"))
    assert "KV pages in turboquant_4bit_nc, 4 of 36 layers in bfloat16, context 40,960" in mixed
    assert "on the CPU of this machine" in words_of(wish()._replace(target=cpu_target()))


def test_what_is_asked_reads_as_a_person_would_say_it() -> None:
    one = words_of(wish(max_num_batched_tokens=1, quantization="none"))
    assert "weights in bfloat16" in one
    assert one.endswith(", 1 token a step")


def test_a_hostile_name_of_a_folder_stays_on_its_line() -> None:
    asked = wish()
    hostile = asked._replace(blueprint=replace(asked.blueprint, name="a\nb\x1b[2J"))
    words = words_of(hostile)
    assert words.isprintable()
    assert words.startswith("a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[2J on ")


def test_bytes_of_a_token() -> None:
    assert token_words(Fraction(147456)) == "144.00 KiB"
    assert token_words(Fraction(1000, 3)) == "333.33 B on average"


def test_only_what_was_asked_is_repeated() -> None:
    assert start_command(wish(), "Qwen3-8B") == "holdfast chat path/to/Qwen3-8B --max-num-seqs 256"
    assert start_command(wish()._replace(target=cpu_target()), None) == "holdfast chat --device cpu --max-num-seqs 64"
    alone = start_command(wish(max_num_seqs=1), "Qwen3-8B")
    assert alone == "holdfast chat path/to/Qwen3-8B --max-num-seqs 1", "one is a number here, not a switch"
    full = wish(
        dtype="float16",
        max_model_len=8192,
        max_num_batched_tokens=512,
        page_tokens=32,
        memory_utilization=0.95,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_dtype="turboquant_3bit_nc",
        kv_protected_layers=6,
        kv_protected_dtype="auto",
    )
    assert shlex.split(start_command(full, "Qwen3-8B") or "")[3:] == [
        *("--dtype", "float16"),
        *("--kv-cache-dtype", "turboquant_3bit_nc"),
        *("--kv-protected-layers", "6"),
        *("--kv-protected-dtype", "auto"),
        *("--max-model-len", "8192"),
        *("--max-num-batched-tokens", "512"),
        *("--page-tokens", "32"),
        *("--memory-utilization", "0.95"),
        "--enforce-eager",
        *("--max-num-seqs", "4"),
    ]


def test_no_protected_layers_are_repeated_too() -> None:
    command = start_command(wish(kv_cache_dtype="turboquant_3bit_nc", kv_protected_layers=0), "Qwen3-8B")
    assert command is not None
    assert "--kv-protected-layers 0 " in command
    assert "--kv-protected-dtype" not in command


def test_a_path_is_quoted_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a model; rm -rf"
    folder.mkdir()
    command = start_command(wish(), str(folder))
    assert shlex.split(command or "")[2] == str(folder)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_model_len", "2048", "--max-model-len 2048"),
        ("memory_utilization", 0.93, "--memory-utilization 0.93"),
        ("enforce_eager", "true", "--enforce-eager"),
        ("max_num_seqs", 16, "--max-num-seqs 16"),
        ("kv_cache_dtype", "turboquant_k8v4", "--kv-cache-dtype turboquant_k8v4"),
    ],
)
def test_a_change_is_part_of_the_command(option: str, value: object, words: str) -> None:
    command = start_command(wish(max_model_len=4096), "Qwen3-8B", change(option, value))
    assert command is not None
    assert words in command
    assert command.count("--max-num-seqs") == 1
    assert "true" not in command


def test_another_gpu_is_no_option_of_a_command() -> None:
    assert start_command(wish(), "Qwen3-8B", change("gpu", "b200")) is None
