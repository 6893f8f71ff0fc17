"""Every form that a step can take is compiled before ready: whatever is routed, sampled or requested, and however many rows there are."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.distributed.mesh import meshes
from holdfast.kernels import operation, triton_compat
from holdfast.kernels.geometry import order_specs
from holdfast.kernels.moe import routing
from holdfast.kernels.triton_compat import triton
from holdfast.models.spec import ExpertsSpec
from holdfast.observability.preparing import Preparing
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep
from holdfast.runner import warm_up
from holdfast.runner.graphs import step_form, warm_rows
from holdfast.runner.runner import Runner
from runner.gpu_traffic import Known, Traffic, in_a_row
from runner.launch_forms import Form, RecordedKernel, argument_form, recorded_runner

pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")

MODELS = [
    pytest.param("qwen3", {}, id="fused decode"),
    pytest.param("windows", {"dtype": "float16"}, marks=pytest.mark.slow, id="float16, with windows"),
    pytest.param("qwen3", {"batch_invariant": True}, id="batch invariant"),
    pytest.param("qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, id="fp8"),
    pytest.param(
        *("qwen3", {"quantization": "int8", "kv_cache_dtype": "turboquant_k8v4"}),
        marks=pytest.mark.slow,
        id="int8, k8v4",
    ),
    pytest.param("windows", {"quantization": "fp8_block", "kv_cache_dtype": "turboquant_3bit_nc"}, id="blocks, 3 bits"),
    pytest.param("experts", {}, marks=pytest.mark.slow, id="experts"),
    pytest.param("experts", {"quantization": "fp8"}, marks=pytest.mark.slow, id="experts in fp8"),
    pytest.param("experts", {"quantization": "fp8_block", "dtype": "float16"}, id="experts in fp8_block, float16"),
    pytest.param("shared", {"quantization": "mxfp4"}, id="shared expert in mxfp4"),
    pytest.param(
        *("shared", {"quantization": "int8", "quantization_ignore": ("*.o_proj",)}),
        marks=pytest.mark.slow,
        id="some left alone",
    ),
]
"""Each way that a step can go, once: weights by scheme, experts by scheme, pages by format, with and without the fused path."""
EXPERTS = ExpertsSpec(num_experts=128, top_k=8, intermediate_size=768)


def run_every_size(runner: Runner) -> None:
    """A prompt of each number of rows, all of which are wanted; and as many logits at a time as there may be."""
    limits = runner.limits
    for num_rows in range(1, limits.max_num_batched_tokens + 1):
        known = Known(num_rows, num_rows, num_rows, runner.vocab_size, SamplingParams())
        hidden_TH = runner.hidden_rows(LiveStep((known.schedule(num_rows, in_a_row(runner.groups, 0)),)))
        if num_rows <= PROMPT_ROWS:
            runner.row_logits(hidden_TH)


def run_traffic(runner: Runner, num_steps: int) -> None:
    """As the test that counts compiled kernels on a GPU does: every way of choosing tokens, prompts among decodes."""
    for step in Traffic(runner.limits, runner.groups, runner.num_pages, runner.vocab_size, 1).steps(
        num_steps, 0.4, asks_prompts=True
    ):
        runner.execute(step)


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_runner_steps_take_only_warmed_specializations(tmp_path: Path, name, options):
    with recorded_runner(tmp_path, name, enforce_eager=True, max_num_batched_tokens=140, **options) as (runner, forms):
        warmed = set(forms)
        run_every_size(runner)
        run_traffic(runner, 20)
        assert forms == warmed, "\n".join(map(str, sorted(forms - warmed, key=str)))
    assert {"norm._rms_norm_kernel", "sampling.sample._choose_kernel"} <= {kernel for kernel, _ in warmed}


@pytest.mark.parametrize(
    ("name", "whole_experts", "options"),
    [
        pytest.param("qwen3", False, {}, id="dense"),
        pytest.param("qwen3", False, {"quantization": "fp8"}, id="dense in fp8", marks=pytest.mark.slow),
        pytest.param("experts", True, {}, id="whole experts", marks=pytest.mark.slow),
        pytest.param("shared", False, {"quantization": "int8"}, id="sliced experts in int8", marks=pytest.mark.slow),
    ],
)
def test_rank_steps_take_only_warmed_specializations(tmp_path: Path, name, whole_experts, options):
    """Small batches take the fused decode path there too, and add up parts with the next norm deferred."""
    mesh, *_ = meshes(2, has_expert_parallelism=whole_experts)
    limits = {"enforce_eager": True, "max_num_batched_tokens": 140}
    with recorded_runner(tmp_path, name, mesh, **limits, **options) as (runner, forms):
        warmed = set(forms)
        run_every_size(runner)
        run_traffic(runner, 20)
        assert forms == warmed, "\n".join(map(str, sorted(forms - warmed, key=str)))
    forms_of = [form for kernel, form in warmed if kernel == "exchange.add_rows._add_kernel"]
    assert forms_of, "parts are added up elsewhere"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen3", {"quantization": "int8"}, marks=pytest.mark.slow),
        ("shared", {"quantization": "mxfp4"}),
    ],
    ids=["int8", "shared expert in mxfp4"],
)
def test_runner_with_graphs_takes_only_warmed_specializations(tmp_path: Path, name, options):
    with recorded_runner(tmp_path, name, **options) as (runner, forms):
        warmed = set(forms)
        run_traffic(runner, 40)
        assert forms == warmed, "\n".join(map(str, sorted(forms - warmed, key=str)))


@pytest.mark.parametrize("limits", [(1, 1), (3, 16), (20, 17)], ids=str)
def test_runner_takes_only_warmed_specializations_at_any_limits(tmp_path: Path, limits):
    options = dict(zip(("max_num_seqs", "max_num_batched_tokens"), limits, strict=True))
    with recorded_runner(tmp_path, "experts", enforce_eager=True, **options) as (runner, forms):
        warmed = set(forms)
        run_every_size(runner)
        run_traffic(runner, 20)
        assert forms == warmed, "\n".join(map(str, sorted(forms - warmed, key=str)))


@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "experts"])
def test_warm_rows_has_fewest_rows_for_each_specialization(experts):
    rows = warm_rows(range(1, 8193), experts)
    assert rows[0] == 1
    assert list(rows) == sorted(set(rows))
    forms = [step_form(num_rows, experts) for num_rows in range(1, 8193)]
    assert [forms.index(form) + 1 for form in dict.fromkeys(forms)] == list(rows)
    assert len(rows) <= 32, f"{rows} are many steps before a start is over"


def test_rows_that_steps_are_padded_to_are_the_fewest():
    assert warm_rows(range(16, 41), None) == (16, 17, 33)
    assert warm_rows((16, 24, 40), None) == (16, 24, 40)
    assert warm_rows((1,), EXPERTS) == (1,)


def test_order_experts_takes_specializations_of_step_form(monkeypatch):
    """Cuts of the pairs begin where a whole runner would be slow to run here."""
    forms: set[Form] = set()
    for name in ("_count_kernel", "_order_kernel", "_order_cuts_kernel"):
        monkeypatch.setattr(routing, name, RecordedKernel(getattr(routing, name), forms))
    monkeypatch.setattr(operation, "can_run", lambda tensor: True)
    said = {}
    for num_rows in range(1, 4097):
        forms.clear()
        ids_TS = torch.empty(num_rows, EXPERTS.top_k, dtype=torch.int32)
        tensors = [
            torch.empty(spec.shape, dtype=torch.int32)
            for spec in order_specs(num_rows, EXPERTS.top_k, EXPERTS.num_experts)
        ]
        routing.order_experts(ids_TS, EXPERTS.num_experts, tensors)
        assert said.setdefault(step_form(num_rows, EXPERTS), set(forms)) == forms, f"{num_rows} rows"


def test_argument_form_differs_wherever_triton_specializes():
    """By its own rule, which a launch on a GPU asks."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    jit = pytest.importorskip("triton.runtime.jit")
    backend = compiler.make_backend(pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32))
    numbers = torch.zeros(64)
    tensors = [numbers, numbers[1:], numbers[4:], numbers.to(torch.bfloat16), numbers.to(torch.float8_e4m3fn)]
    values = [None, True, False, 0, 1, 2, 15, 16, 17, 48, -16, 2**31, 2**31 + 1, 2**31 - 16, 0.0, 1.0, 0.5, *tensors]
    for is_count in (False, True):
        for left, right in combinations(values, 2):
            keys = [jit.native_specialize_impl(backend, value, False, not is_count, True) for value in (left, right)]
            ours = [argument_form(value, False, is_count) for value in (left, right)]
            assert keys[0] == keys[1] or ours[0] != ours[1], f"{left} and {right} are {keys}"


@pytest.mark.parametrize("is_compiled", [False, True], ids=["a first start", "a second start"])
def test_report_warm_reports_compiled_kernels_and_cache_folder(monkeypatch, is_compiled):
    """A fake Triton tells of one kernel; a kernel that was found compiled is nothing to wait for."""
    listeners = SimpleNamespace(listener=None)
    fake = SimpleNamespace(knobs=SimpleNamespace(compilation=listeners, cache=SimpleNamespace(dir="a-folder")))
    monkeypatch.setattr(triton_compat, "triton", fake)

    def warm(rows, graphs, on_graph, on_warm):
        on_warm(1, 3)
        listeners.listener(cache_hit=is_compiled)
        on_graph(2, 7)

    reported: list[Preparing] = []
    warm_up.report_warm(SimpleNamespace(warm=warm), (1, 16), None, reported.append)
    compiling = [Preparing("Compiling GPU kernels", 1, 3, "1 compiled, kept in a-folder")]
    assert reported == [*([] if is_compiled else compiling), Preparing("Capturing CUDA graphs", 2, 7)]
