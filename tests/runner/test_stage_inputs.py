"""A stage whose device lags behind: steps are filled and replayed one after the other, and none reads what is another's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import meshes
from holdfast.families.backends import build_backend
from holdfast.kernels.triton_compat import triton
from holdfast.loading.model_files import open_model
from holdfast.memory.devices import H200
from holdfast.memory.ledger import Ledger
from holdfast.planning.target import gpu_target
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner import assembly
from holdfast.runner import build as building
from holdfast.runner.graphs import StepGraphs
from holdfast.runner.runner import Runner, WantedRows
from holdfast.runner.step_inputs import BatchBuffers
from runner.deferred_device import DeferredDevice
from runner.mirror_exchange import MirrorExchange
from runner.rank_runs import OPTIONS, write_model

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 6, 2, 2
CPU = torch.device("cpu")


class DeferredGraphs(StepGraphs):
    """Graphs of what was captured, batch and plan included, on a device that lags."""

    def __init__(self, runner: Any, device: DeferredDevice) -> None:
        super().__init__((4,), (16,), 4)
        self._runner, self._device = runner, device
        self._held: dict[tuple[int, bool], tuple[Any, Any]] = {}
        for is_decode, size in ((True, 4), (False, 16)):
            batch = runner.capture_batch(size, is_decode, self)
            self._held[size, is_decode] = batch, runner.backend.plan(batch, captured=True)
        device.begin()

    def replay(self, size: int, is_decode: bool) -> torch.Tensor:
        self._device.put(lambda: self._runner.run_captured(*self._held[size, is_decode]))
        return torch.empty(0, 0)


@contextmanager
def first_stage(folder: Path, device: DeferredDevice) -> Iterator[tuple[Runner, list[torch.Tensor]]]:
    """For two, as on a GPU but for the interpreter; and what it sends on, step by step."""
    config = EngineConfig.from_options(**OPTIONS | {"max_num_seqs": 8, "dtype": "float16"})
    model = open_model(str(write_model(folder, "llama")), "dummy")
    mesh = meshes(1, [(0, 1), (1, 2)])[0]
    load, plan = building.plan_model(config, model, gpu_target(H200), mesh=mesh)
    build, sent = building.RunnerBuild(config, model, plan, Ledger(), CPU), []
    assert plan.exchange_needs is not None

    class KeptExchange(MirrorExchange):
        def send_rows(self, x_TH: torch.Tensor) -> None:
            sent.append(x_TH.clone())

    try:
        build.load(load, lambda done, total: None)
        build.connect(KeptExchange(mesh, plan.exchange_needs, CPU))
        with pytest.MonkeyPatch.context() as monkeypatch:
            device.take_over(monkeypatch)
            make = BatchBuffers
            monkeypatch.setattr(
                assembly, "BatchBuffers", lambda *given, **named: make(*given, **named | {"is_shared": False})
            )
            runner = build.assemble(
                lambda declaration, specs, storage, inputs: build_backend(
                    declaration, specs, storage, replace(inputs, num_sms=4)
                )
            )
            assert runner.backend.name == "triton_paged", "on a GPU it computes in half precision alone"
            runner.graphs = DeferredGraphs(runner, device)
            yield runner, sent
    finally:
        build.release()


def steps(runner: Runner) -> Iterator[LiveStep]:
    """Groups of sequences in turn, as stages have them: prompts first, then tokens one by one, and pages as they grow."""
    pages = iter(range(runner.num_pages))
    groups = [
        [
            Sequence(
                *(
                    GROUP_SIZE * group + number,
                    [(7 * place + 11 * group + number) % 120 + 3 for place in range(40)],
                    40,
                ),
                *(SamplingParams(temperature=0.0),),
                seed=0,
                max_tokens=9,
                tables=[[]],
            )
            for number in range(GROUP_SIZE)
        ]
        for group in range(NUM_GROUPS)
    ]
    for number in range(NUM_STEPS):
        round_number, items = number // NUM_GROUPS, []
        for place, sequence in enumerate(groups[number % NUM_GROUPS]):
            start, end = (0, 3 + place) if round_number == 0 else (2 + place + round_number, 3 + place + round_number)
            while 4 * len(sequence.tables[0]) < end:
                sequence.tables[0].append(next(pages))
            items.append(ScheduledSequence(sequence, start, end - start, True, ()))
        yield LiveStep(tuple(items))


@torch.inference_mode()
def test_stage_on_lagging_device_sends_same_rows(tmp_path: Path) -> None:
    if triton is None:
        pytest.skip("Triton is not installed")
    found = {}
    for is_deferred in (False, True):
        device = DeferredDevice(is_deferred)
        with first_stage(tmp_path, device) as (runner, sent):
            for step in steps(runner):
                runner.compute_stage(step, WantedRows.of(step))
            device.run_until()
            found[is_deferred] = list(sent)
            assert not is_deferred or device.most_queued > 4, "nothing lagged"
    assert len(found[False]) == len(found[True]) == NUM_STEPS
    real = [GROUP_SIZE if number >= NUM_GROUPS else 7 for number in range(NUM_STEPS)]
    for ours, theirs, num_rows in zip(found[True], found[False], real, strict=True):
        assert torch.equal(ours[:num_rows], theirs[:num_rows])
        assert ours[:num_rows].isfinite().all()
    assert len({own[:GROUP_SIZE].sum().item() for own in found[True]}) == NUM_STEPS
