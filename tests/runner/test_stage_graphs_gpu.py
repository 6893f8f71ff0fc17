"""Engines of several stages on one GPU: graphs give what eager stages give, and both what one rank gives, to the bit; nothing is compiled late.

Each engine has a process for every rank, under MPS where there is one.
"""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
mps = import_module("mps")
PROGRAM = Path(__file__).parent / "staged_answers.py"
LIMIT_SECONDS = 120.0

pytestmark = pytest.mark.gpu

INVARIANT = {"batch_invariant": True}
EXPERTS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
STAGES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "2 stages, the last slow": ({"pipeline_parallel_size": 2}, [1]),
    "3 stages, the first and the last slow": ({"pipeline_parallel_size": 3}, [0, 2]),
    "2 ranks in each of 2 stages": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, []),
}


def run_all(specs: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """What each engine found, or its words; one after the other, since kernels that wait take places on the GPU."""
    found: dict[str, dict[str, Any]] = {}
    for number, (name, spec) in enumerate(specs.items()):
        result, reported, begin = folder / f"{number}.json", folder / f"{number}.txt", time.monotonic()
        # Under MPS the death of one process ends all: an engine has its own.
        with mps.mps() as environment, reported.open("w") as out:
            env = {**os.environ, **(environment or mps.OVERLAP), "HOLDFAST_TELL_SECONDS": str(LIMIT_SECONDS - 5)}
            command = [sys.executable, str(PROGRAM), json.dumps(spec), str(result)]
            child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
            try:
                child.wait(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()  # its ranks go with it
                child.wait()
        words = [line for line in reported.read_text(errors="replace").splitlines() if "frame #" not in line]
        found[name] = json.loads(result.read_text()) if result.exists() else {"error": "\n".join(words[-60:])}
        print(f"{name}: {time.monotonic() - begin:.1f} s, {found[name].get('error', 'done')}", flush=True)
    return found


def assert_graphs_ran(name: str, found: dict[str, Any], num_ranks: int) -> None:
    ranks = found["ranks"]
    assert len(ranks) == num_ranks, name
    first = ranks[0]["replayed"]
    assert {is_decode for _, is_decode in first} == {0, 1}, f"{name}: decode and mixed steps come from graphs"
    assert all(rank["replayed"] == first for rank in ranks), f"{name}: stages took other graphs"
    late = [(rank["compiled"], rank["found"]) for rank in ranks]
    assert late == [(0, 0)] * num_ranks, f"{name}: kernels were compiled after ready: {late}"


def differences(answers: list[Any], expected: list[Any]) -> list[str]:
    """Where answers are not the same: which of them, in what, and the first place."""
    found = []
    for number, (own, theirs) in enumerate(zip(answers, expected, strict=True)):
        for kind, a, b in zip(("tokens", "log-probabilities", "those of the prompt"), own, theirs, strict=True):
            if a != b:
                place = next(
                    (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
                )
                start = max(0, place - 40)
                found.append(f"answer {number}, {kind}: {a[start : place + 30]} in place of {b[start : place + 30]}")
    return found


def compare(
    specs: dict[str, tuple[dict[str, Any], list[int]]], shared: dict[str, Any], folder: Path, *, has_eager: bool = False
) -> None:
    """Every pipeline against one rank; `has_eager`: the first of them eager too."""
    every = {"one rank": {"options": INVARIANT, **shared}}
    for name, (own, slow) in specs.items():
        every[name] = {"options": INVARIANT | own, "slow": slow, **shared}
    if has_eager:
        first, _ = next(iter(specs.values()))
        every["eager"] = {"options": INVARIANT | first | {"enforce_eager": True}, **shared}
    found = run_all(every, folder)
    errors = {name: one["error"] for name, one in found.items() if "error" in one}
    assert not errors, "\n".join(f"{name}: {words}" for name, words in errors.items())
    expected, faults = found["one rank"]["answers"], []
    for name, one in found.items():
        graphs = [rank["graphs"] for rank in one["ranks"]]
        print(f"{name}: {len(expected)} answers, {graphs} graphs")
        faults += [f"{name}: {words}" for words in differences(one["answers"], expected)]
        if name in specs:
            own = specs[name][0]
            assert_graphs_ran(name, one, own["pipeline_parallel_size"] * own.get("tensor_parallel_size", 1))
        elif name == "eager":
            assert not any(graphs)
    assert not faults, "\n".join(faults[:40])


def test_graphs_of_stages_give_what_one_rank_gives(tmp_path: Path) -> None:
    """Greedy and random, penalties, log-probabilities of tokens and prompts; steps in flight before stages that are slow."""
    compare(STAGES, {}, tmp_path)


def test_stages_of_experts(tmp_path: Path) -> None:
    shared = {"model": "Qwen3-30B-A3B", "settings": EXPERTS}
    compare({"2 stages": ({"pipeline_parallel_size": 2}, [])}, shared, tmp_path, has_eager=True)
