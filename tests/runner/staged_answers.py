"""Run as a program: one engine on a GPU, of stages or not, and what it answers; ranks may be slowed, so that steps pile up before them.

    staged_answers.py '{"options": {...}, "settings": {...}, "slow": [0, 2]}' result.json

`slow` are ranks that sleep on their device before some of their steps. Every rank counts the steps that it took from graphs and the
kernels that Triton brought after ready. With four numbers for arguments it is the process of another rank.
"""

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

MODEL = "Qwen3-32B"
SETTINGS = {"num_hidden_layers": 3}
"""At its own shapes: cuBLAS multiplies by shares of them as by the whole, which benchmarks/gpu_ranks.py has shown."""
OPTIONS = {
    "load_format": "dummy",
    "device": "cuda",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory": "512MiB",
}
NUM_REQUESTS, NUM_TOKENS, NUM_ROUNDS = 12, 20, 2
RANK_ARGUMENTS = 5
FOLDER = "HOLDFAST_STAGED_FOLDER"
SLOW = "HOLDFAST_SLOW_RANKS"
TELL = "HOLDFAST_TELL_SECONDS"
"""After so many a process says where it stands."""
SLEEPS = (0, 0, 300_000, 4_000_000)
"""Cycles of the device: up to some 2 ms."""


class Look:
    """What a runner does after ready."""

    def __init__(self, runner: Any, rank: int) -> None:
        import torch

        from holdfast.kernels.triton_compat import counting_compiles

        self._path = Path(os.environ[FOLDER]) / f"rank-{rank}.json"
        self._open = contextlib.ExitStack()
        self._counted = self._open.enter_context(counting_compiles(lambda: None))
        self._replayed: list[list[int]] = []
        self._num_graphs = 0 if runner.graphs is None else len(runner.graphs)
        is_slow, dice = str(rank) in os.environ.get(SLOW, "").split(","), Random(rank)
        fill = runner.buffers.fill

        def fill_late(*given: Any, **named: Any) -> Any:
            if is_slow:
                torch.cuda._sleep(dice.choice(SLEEPS))
            return fill(*given, **named)

        runner.buffers.fill = fill_late
        if runner.graphs is not None:
            replay = runner.graphs.replay

            def replay_seen(size: int, is_decode: bool) -> torch.Tensor:
                self._replayed.append([size, int(is_decode)])
                if is_slow:
                    torch.cuda._sleep(dice.choice(SLEEPS))
                return replay(size, is_decode)

            runner.graphs.replay = replay_seen

    def close(self) -> None:
        """Leave what was counted."""
        self._open.close()
        reported = {"compiled": self._counted.num_compiled, "found": self._counted.num_found}
        self._path.write_text(json.dumps(reported | {"graphs": self._num_graphs, "replayed": self._replayed}))


def serve_rank() -> None:
    """The process of a rank, which looks at itself."""
    from holdfast.engine.rank_messages import RankStart
    from holdfast.engine.rank_process import Rank, RankServer, main, open_rank

    def open_seen(start: RankStart, server: RankServer) -> Rank:
        rank: Any = open_rank(start, server)
        look, close = Look(rank._runner, start.rank), rank.close

        def close_seen() -> None:
            look.close()
            close()

        rank.close = close_seen
        return rank

    main(open_seen)


def requests(seed: int) -> tuple[list[Any], list[Any]]:
    """Prompts of every length, several chunks among them, and parameters of every kind in turn."""
    from holdfast.request.sampling_params import SamplingParams

    dice = Random(seed)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "prompt_logprobs": 0},
    ]
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        length = dice.choice((1, 2, 15, 40, 90, 200, 400))
        prompts.append({"prompt_token_ids": [dice.randrange(250) for _ in range(length)]})
        own = {"seed": number, "max_tokens": dice.randint(4, NUM_TOKENS), "ignore_eos": True}
        params.append(SamplingParams(**kinds[number % len(kinds)], **own))
    return prompts, params


def answers(llm: Any) -> list[Any]:
    """Tokens and log-probabilities of every request, with and without steps of others, twice."""
    found: list[Any] = []
    for seed in range(NUM_ROUNDS):
        prompts, params = requests(seed)
        outputs = llm.generate(prompts, params, progress=False)
        outputs += llm.generate(prompts[1:2], params[1:2], progress=False)
        for output in outputs:
            assert output.error is None, output.error
            own = output.outputs[0]
            found.append([list(own.token_ids), repr(own.logprobs), repr(output.prompt_logprobs)])
    return found


def run(spec: dict[str, Any], result: Path) -> None:
    """Build, answer, tell."""
    engine_build: Any = import_module("holdfast.engine.build")
    write_dummy_model = import_module("dummy_models").write_dummy_model
    from holdfast.api.llm import LLM

    kept: list[Any] = []
    command = (sys.executable, "-P", __file__)
    build_ranks = engine_build.build_ranks

    def build_seen(*given: Any, **named: Any) -> Any:
        kept.append(build_ranks(*given, command=command, **named))
        return kept[0]

    engine_build.build_ranks = build_seen
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[FOLDER], os.environ[SLOW] = name, ",".join(map(str, spec.get("slow", ())))
        path = write_dummy_model(folder, spec.get("model", MODEL), **spec.get("settings", SETTINGS))
        with LLM(str(path), on_progress=lambda done, total: None, **OPTIONS | spec["options"]) as llm:
            runner: Any = llm.engine.core.runner  # type: ignore[union-attr]
            look = Look(getattr(runner, "inner", runner), 0)
            close = partial(look.close)
            found = {"answers": answers(llm)}
            close()
        found["ranks"] = [json.loads(one.read_text()) for one in sorted(folder.glob("rank-*.json"))]  # type: ignore[assignment]
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    if TELL in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[TELL]))
    if len(sys.argv) == RANK_ARGUMENTS:
        serve_rank()
    else:
        run(json.loads(sys.argv[1]), Path(sys.argv[2]))
