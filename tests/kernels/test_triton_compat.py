"""The door to Triton: kernels run in the interpreter, PDL where GPUs have it, and a plain CPU run imports nothing of it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels import triton_compat
from holdfast.kernels.activation import silu_mul_reference, silu_mul_triton
from holdfast.kernels.norm import rms_norm_reference, rms_norm_triton
from holdfast.kernels.triton_compat import can_run, next_power_of_two, pdl_launch, supports_pdl

HALF_STEP = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative tolerances: a few roundings of each type."""


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates what it stores as bfloat16; compiled kernels round.
    return list(HALF_STEP) if device == "cuda" else [torch.float32, torch.float16]


@pytest.fixture
def kernels_run(device) -> str:
    if triton_compat.triton is None:
        pytest.fail(
            "Triton is not installed: the dev extra brings it, and without a GPU conftest.py asks for its interpreter"
        )
    return str(device)


@pytest.mark.parametrize("size", [1, 63, 64, 1000])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_rms_norm_triton_matches_reference(kernels_run, size, num_rows):
    for dtype in dtypes(kernels_run):
        x = torch.randn(num_rows, size, dtype=torch.float32).to(kernels_run, dtype)
        weight = torch.randn(size).to(kernels_run, dtype)
        got, want = rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x.float(), weight.float(), 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=HALF_STEP[dtype], atol=HALF_STEP[dtype])


def test_rms_norm_triton_accepts_heads(kernels_run):
    x = torch.randn(3, 5, 24, device=kernels_run)
    weight = torch.randn(24, device=kernels_run)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


@pytest.mark.parametrize("size", [1, 63, 1024, 1500])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_silu_mul_triton_matches_reference(kernels_run, size, num_rows):
    for dtype in dtypes(kernels_run):
        gate_up = (4 * torch.randn(num_rows, 2 * size)).to(kernels_run, dtype)
        got, want = silu_mul_triton(gate_up), silu_mul_reference(gate_up.float())
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=HALF_STEP[dtype], atol=HALF_STEP[dtype])


def test_rms_norm_triton_nonfinite_row_stays_alone(kernels_run):
    x = torch.randn(4, 100, device=kernels_run)
    clean = rms_norm_triton(x, torch.ones(100, device=kernels_run), 1e-5)
    x[2, 5] = float("nan")
    soiled = rms_norm_triton(x, torch.ones(100, device=kernels_run), 1e-5)
    others = [0, 1, 3]
    assert soiled[2].isnan().all()
    assert torch.equal(soiled[others], clean[others])


def test_can_run_refuses_cpu_tensors():
    assert not can_run(torch.zeros(1))


def test_supports_pdl_refuses_cpu_tensors():
    assert not supports_pdl(torch.zeros(1))


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_supports_pdl_only_from_hopper_on(monkeypatch, capability, expected):
    """Older ones do not know the instruction with which a kernel waits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert supports_pdl(on_gpu) is expected  # type: ignore[arg-type]


def test_pdl_launch_is_empty_without_pdl():
    """Neither the interpreter nor an older GPU knows it."""
    assert pdl_launch(True) == {"launch_pdl": True}
    assert pdl_launch(False) == {}


@pytest.mark.gpu
def test_supports_pdl_follows_the_gpu_of_the_tensor(device):
    assert can_run(torch.zeros(1, device=device))
    assert supports_pdl(torch.zeros(1, device=device)) is (torch.cuda.get_device_capability(device)[0] >= 9)


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_two_rounds_up(number, power):
    assert next_power_of_two(number) == power


def test_cpu_run_imports_no_triton():
    code = "import sys, holdfast.kernels.norm as k; print('triton' in sys.modules, k.rms_norm_reference is not None)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


class FakeKernels:
    """Stands for Triton: a place for a listener, which hears of every requested kernel."""

    def __init__(self, listener=None):
        self.knobs = SimpleNamespace(
            compilation=SimpleNamespace(listener=listener), cache=SimpleNamespace(dir="a folder")
        )

    def want(self, is_compiled: bool) -> None:
        self.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=is_compiled)


def test_counting_compiles_reports_compiled_kernels_only(monkeypatch):
    heard, reported = [], []
    fake = FakeKernels(lambda **event: heard.append(event["cache_hit"]))
    before = fake.knobs.compilation.listener
    monkeypatch.setattr(triton_compat, "triton", fake)
    with triton_compat.counting_compiles(lambda: reported.append(count.num_compiled)) as count:
        for is_compiled in (False, True, False):
            fake.want(is_compiled)
    assert (count.num_compiled, count.num_found) == (2, 1)
    assert reported == [1, 2]
    assert heard == [False, True, False], "an earlier listener hears all"
    assert fake.knobs.compilation.listener is before
    assert triton_compat.compiled_folder() == "a folder"


def test_counting_compiles_without_triton_counts_nothing(monkeypatch):
    monkeypatch.setattr(triton_compat, "triton", None)
    with triton_compat.counting_compiles(lambda: pytest.fail("nothing compiles")) as count:
        pass
    assert count.num_compiled == 0
    assert triton_compat.compiled_folder()
