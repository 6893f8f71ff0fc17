"""A runner as a GPU has it, in host memory: its kernels are not run, and every launch is kept by the form it would be compiled in.

What Triton compiles a kernel for is known before the launch: constants, types, whether addresses and whole numbers are
multiples of 16 or one, and the options. So a form that a step takes and the warm-up did not is seen without a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.families.backends import build_backend
from holdfast.kernels import triton_compat
from holdfast.kernels.gemm import linear
from holdfast.loading.model_files import open_model
from holdfast.memory.devices import H200
from holdfast.memory.ledger import Ledger
from holdfast.planning.exactness import row_sizes
from holdfast.planning.target import gpu_target
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.runner import assembly
from holdfast.runner import build as building
from holdfast.runner.runner import Runner
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.step_inputs import BatchBuffers
from runner.gpu_traffic import SMALL, write_model
from runner.mirror_exchange import MirrorExchange

CPU = torch.device("cpu")
NUM_SMS = 132
Form = tuple[str, tuple[object, ...]]
"""A kernel's name, and what it is compiled for."""


def argument_form(value: object, is_constant: bool, is_count: bool) -> object:
    """What of an argument a kernel is compiled for; `is_count`: it was marked as one that is not to be looked at."""
    if is_constant or value is None or isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "float"
    if isinstance(value, tuple):  # the rooms of all ranks
        return tuple(argument_form(one, is_constant, is_count) for one in value)
    assert isinstance(value, int), f"{value!r} is no argument of a kernel"
    width = "int32" if -(2**31) <= value < 2**31 else "int64"
    return width if is_count else (width, value == 1, value % 16 == 0)


class RecordedKernel:
    """In a kernel's place: launches are kept and not made."""

    def __init__(self, kernel: Any, forms: set[Form]) -> None:
        self._name = f"{kernel.fn.__module__.removeprefix('holdfast.kernels.')}.{kernel.fn.__name__}"
        self._parameters = signature(kernel.fn).parameters
        # The interpreter keeps the options of its decorator, and does nothing with them.
        options = getattr(kernel, "kwargs", None) or vars(kernel)
        self._counts = frozenset(options.get("do_not_specialize") or ())
        assert self._counts <= self._parameters.keys(), f"{self._name} has no {self._counts - self._parameters.keys()}"
        self._forms = forms

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, **keywords: object) -> None:
        values = dict(zip(self._parameters, arguments, strict=False)) | keywords
        form: list[object] = []
        for name, parameter in self._parameters.items():
            is_constant = parameter.annotation is triton_compat.constexpr
            form.append((name, argument_form(values.pop(name), is_constant, name in self._counts)))
        self._forms.add((self._name, (*form, *sorted(values.items()))))


def _is_kernel(item: object) -> bool:
    return type(item).__name__ in ("JITFunction", "InterpretedFunction")


class FakeGraph:
    """A graph that holds nothing: what it would repeat was launched when it was captured."""

    def replay(self) -> None: ...


def _take_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by cuBLAS compile nothing, and take most of the time here."""

    def nothing(*arguments: Any, **options: Any) -> torch.Tensor:
        return options["out"] if "out" in options else arguments[-1]

    for name in ("plain_linear", "plain_linear_float32"):
        monkeypatch.setattr(linear, name, nothing)
    monkeypatch.setattr(linear.torch, "_scaled_mm", nothing)


def _record_kernels(monkeypatch: pytest.MonkeyPatch) -> set[Form]:
    """From here on kernels are launched as on a Hopper, wherever their tensors lie, and only recorded."""
    forms: set[Form] = set()
    answers = {"can_run": lambda tensor: True, "supports_pdl": lambda tensor: True, "is_interpreted": lambda: False}
    for name, module in list(sys.modules.items()):
        if not name.startswith("holdfast.kernels.") or name == triton_compat.__name__:
            continue
        for key, item in list(vars(module).items()):
            if _is_kernel(item):
                monkeypatch.setattr(module, key, RecordedKernel(item, forms))
            elif key in answers:
                monkeypatch.setattr(module, key, answers[key])
    return forms


def _device_sampler(vocab_size: int, max_rows: int) -> DeviceSampler:
    """That of a GPU; what its kernels would have left about log-probabilities is a number whose logarithm exists."""
    sampler = DeviceSampler(vocab_size, CPU, max_rows, Ledger())
    sampler.columns_SC.fill_(1.0)
    return sampler


@contextmanager
def recorded_runner(
    folder: Path, name: str = "qwen3", mesh: Mesh = ALONE, **options: Any
) -> Iterator[tuple[Runner, set[Form]]]:
    """A runner of a tiny model, warmed as on an H200, and the forms of all launches, to which its steps add.

    With `mesh` that of a rank, whose peers say what it says.
    """
    config = EngineConfig(**(SMALL | {"kv_cache_memory": "16MiB"} | options))
    model = open_model(str(write_model(folder, name)), "dummy")
    load, plan = building.plan_model(config, model, gpu_target(H200), mesh=mesh)
    build = building.RunnerBuild(config, model, plan, Ledger(), CPU)
    try:
        build.load(load, lambda done, total: None)
        if plan.exchange_needs is not None:
            build.connect(MirrorExchange(mesh, plan.exchange_needs, CPU))
        with pytest.MonkeyPatch.context() as monkeypatch:
            forms = _record_kernels(monkeypatch)
            _take_no_product(monkeypatch)
            takes_fused_decode = assembly.takes_fused_decode
            monkeypatch.setattr(
                assembly,
                "takes_fused_decode",
                lambda spec, dtype, _, recipe: takes_fused_decode(spec, dtype, "cuda", recipe),
            )
            monkeypatch.setattr(
                assembly,
                "BatchBuffers",
                lambda limits, device, ledger, is_shared, **kinds: BatchBuffers(
                    limits, device, ledger, is_shared=False, **kinds
                ),
            )
            monkeypatch.setattr(assembly, "HostSampler", _device_sampler)
            monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
            monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
            monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
            runner: Any = build.assemble(
                lambda declaration, specs, storage, inputs: build_backend(
                    declaration, specs, storage, replace(inputs, num_sms=NUM_SMS)
                )
            )
            runner.stream = SimpleNamespace(synchronize=lambda: None)
            runner.on_stream = runner.on_runner_stream = nullcontext
            monkeypatch.setattr(build, "device", SimpleNamespace(type="cuda"))
            if config.batch_invariant:
                limits = plan.resolved.limits
                most_logits = max(limits.sampled_rows, PROMPT_ROWS)
                runner.row_sizes = build.row_sizes = row_sizes(limits.max_num_batched_tokens, most_logits)
            build.capture(runner, config.enforce_eager)
            yield runner, forms
    finally:
        build.release()
