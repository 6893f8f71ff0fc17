"""Every command that a plan prints gives the tokens beside it: a plan again, and what chat, run and serve would open."""

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from holdfast.cli import chat as chat_module
from holdfast.cli import run as run_module
from holdfast.cli.commands import COMMANDS, parser_of
from holdfast.cli.options import Given, given
from holdfast.cli.plan import PlanOptions, place, read_plan
from holdfast.cli.plan_commands import ONE_SEQUENCE, PURPOSES, plan_command
from holdfast.cli.plan_view import CANNOT_START, PlanView, view_of
from holdfast.cli.run import RunOptions
from holdfast.config import EngineConfig
from holdfast.loading.declared import open_declared
from holdfast.memory.devices import GPUS
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.fit import fit_runner
from holdfast.planning.resolve import FP8_PRODUCTS, PlanRequest
from holdfast.planning.target import Target, gpu_target

MODELS = ("Qwen3-8B", "Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V2-Lite", "DeepSeek-V4-Flash", "phi-4")
"""Dense, with experts, with windows and sinks, with latents, with entries, and one that is planned only."""
STORED_IN_FP8 = "DeepSeek-V4-Flash"
"""GPUs without products in fp8 refuse it in one line, whatever their memory."""
QUICK = {
    ("gpt-oss-20b", "rtx4060ti-16g"),
    ("Qwen3-8B", "rtx3080-12g"),
    ("DeepSeek-V2-Lite", "rtx4090"),
    ("DeepSeek-V4-Flash", "h200"),
    ("phi-4", "t4"),
}
PAIRS = [
    (model, gpu) if (model, gpu) in QUICK else pytest.param(model, gpu, marks=pytest.mark.slow)
    for model in MODELS
    for gpu in GPUS
    if model != STORED_IN_FP8 or GPUS[gpu].capability >= FP8_PRODUCTS
]
PARSERS = {command.path: (command, parser_of(command)) for command in COMMANDS}


@cache
def declared(model: str) -> DeclaredModel:
    return open_declared(model)


def parsed(words: list[str]) -> tuple[str, Given, Given]:
    """The command, its own options and those of an engine, as the command line reads them."""
    assert words[0] == "holdfast"
    command, parser = PARSERS[words[1],]
    values = vars(parser.parse_args(words[2:]))
    return words[1], {option.name: values[option.name] for option in command.options}, given(command.engine, values)


def tokens_of(line: str, requested: DeclaredModel, target: Target) -> tuple[int, int]:
    """Tokens and context that a command gives: of a plan on the device that it names, of an engine on the target."""
    command, own, engine = parsed(shlex.split(line))
    if command == "plan":
        request: PlanRequest = read_plan(PlanOptions(**own), engine).request
    else:
        few = {} if command == "serve" else {"max_num_seqs": ONE_SEQUENCE}
        request = place(EngineConfig.from_options(**(few | engine)), requested, target)[0]
    fit = fit_runner(request)
    return fit.kv_tokens, fit.resolved.limits.max_model_len


def check_promises(model: str, target: Target, view: PlanView) -> None:
    for way, command in zip(view.alternatives, view.commands, strict=True):
        if way.fits:
            assert command is not None
            assert tokens_of(command, declared(model), target) == (way.kv_tokens, way.max_model_len), command
    assert bool(view.starts) == (view.status != CANNOT_START and (view.fits or any(i.fits for i in view.alternatives)))
    for start in view.starts:
        assert tokens_of(start.command, declared(model), target)[0] == start.kv_tokens, start.command
        assert "--max-num-seqs 256" not in start.command


@pytest.mark.parametrize(("model", "gpu"), PAIRS)
def test_plan_commands_give_the_tokens_beside_them(model: str, gpu: str) -> None:
    planned = read_plan(PlanOptions(model=model, gpu=gpu), {})
    view = view_of(planned.request, model, planned.ranks, planned.purpose, planned.beside)
    target = gpu_target(GPUS[gpu])
    assert planned.request.target == target
    check_promises(model, target, view)
    if GPUS[gpu].name.endswith(("4060 Ti", "3080")):
        assert f"({GPUS[gpu].nominal_gb} GB)" in view.summary


@pytest.mark.parametrize("gpu", ["rtx3080", pytest.param("2xrtx3080", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "purpose", [*PURPOSES[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in PURPOSES[1:])]
)
def test_plan_for_a_command_gives_what_the_command_opens(purpose: str, gpu: str) -> None:
    planned = read_plan(PlanOptions(model="Qwen3-8B", gpu=gpu, purpose=purpose), {"kv_cache_dtype": "fp8"})
    view = view_of(planned.request, "Qwen3-8B", planned.ranks, planned.purpose, planned.beside)
    assert view.starts[0].command.startswith(f"holdfast {purpose} ")
    check_promises("Qwen3-8B", gpu_target(GPUS["rtx3080"]), view)


class OpenedError(Exception):
    """Carries the config that a command would open."""


def refuse_to_open(config: EngineConfig, *rest: object) -> None:
    raise OpenedError(config)


RUN = RunOptions("model", "Hello", None, raw=False, quiet=True, as_json=False)


@pytest.mark.parametrize(
    "opens",
    [lambda: chat_module.chat(chat_module.ChatRequest("model"), {}, {}), lambda: run_module.run(RUN, {}, {})],
    ids=["chat", "run"],
)
def test_chat_and_run_open_one_sequence(opens: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan assumes of them is what they do."""
    for module in (chat_module, run_module):
        monkeypatch.setattr(module, "open_quietly", refuse_to_open)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    with pytest.raises(OpenedError) as caught:
        opens()
    assert caught.value.args[0].max_num_seqs == ONE_SEQUENCE


@pytest.mark.parametrize("name", ["a\nb", "it's \x1b[31m", "a model; rm -rf", "caf\udce9"], ids=ascii)
def test_plan_command_of_an_odd_name_is_one_printable_line(name: str) -> None:
    requested = PlanRequest(EngineConfig(), declared("Qwen3-8B"), gpu_target(GPUS["h200"]))
    command = plan_command(requested, name)
    assert command is not None
    assert command.isprintable()
    ended = subprocess.run(["bash", "-c", f'set -- {command}; printf %s "$3"'], capture_output=True, check=True)
    assert ended.stdout == name.encode("utf-8", "surrogateescape")
