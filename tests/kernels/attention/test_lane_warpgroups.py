"""Large tiles that read the lane on a Hopper GPU: options, odd lengths and contexts amid poison; lanes and cuts, to the bit."""

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.exactness import same_bits
from kernels.lane_cases import by_lane, near_reference, with_near
from kernels.paged_cases import odd_sinks
from kernels.quantized_kv_cases import QUIET, Cut, QuantizedStep, assert_near, cut_tiles, quantized_step, run_tiles

pytestmark = [QUIET, pytest.mark.gpu]
LARGE = Cut(large=True)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class LaneCase:
    """One specialization of both kernels."""

    bits: tuple[int, int]
    head_dim: int = 128
    group: int = 8
    near: int | None = None
    """First tokens beside near blocks; None: no near pages."""
    window: int | None = None
    has_options: bool = False
    """Sinks and a soft cap."""
    page_tokens: int = 64
    dtype: torch.dtype = torch.bfloat16

    def step(self, rows: list[tuple[int, int]]) -> QuantizedStep:
        step = quantized_step(self.bits, rows, self.head_dim, self.group, 2, self.page_tokens, self.window, self.dtype)
        if self.has_options:
            step.sinks, step.softcap = odd_sinks(2 * self.group), 20.0
        if self.window is not None:
            step.poison, step.hole = float("nan"), 2**30
        return step

    def run(self, step: QuantizedStep, device: torch.device, heads: int | None = None, num_sms: int = 132):
        if self.near is None:
            return run_tiles(step, cut_tiles(step, len(step.rows) * [LARGE]), device, by_lane(None, heads), num_sms)
        near, _, tiles = with_near(step, self.near, device, max(1, 128 // self.group))
        return run_tiles(step, tiles, device, by_lane(near, heads), num_sms)

    def expected(self, step: QuantizedStep) -> torch.Tensor:
        if self.near is None:
            return step.exact()
        near, tiles, _ = with_near(step, self.near, CPU, max(1, 128 // self.group))
        return run_tiles(step, tiles, CPU, near_reference(near)).double()


CASES = {
    "k8v4, near": LaneCase((8, 4), near=16),
    "3 bits, near, options": LaneCase((3, 3), group=5, near=16, has_options=True),
    "fp8, D64, window": LaneCase((8, 8), 64, 7, window=100, page_tokens=16, dtype=torch.float16),
    "4 bits, D256": LaneCase((4, 4), 256, 4),
    "k5v4, D80, near, window": LaneCase((5, 4), 80, 1, near=0, window=200),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lane_step_is_exact_in_any_lane_and_any_cut(device, case):
    """Odd lengths and contexts; one head a round; a machine of three multiprocessors; a prompt in three steps."""
    step = case.step([(0, 200), (0, 1), (5, 70), (127, 40), (500, 90)])
    out = case.run(step, device)
    assert_near(out, case.expected(step), step)
    assert same_bits(case.run(step, device, heads=1, num_sms=3), out)
    whole = case.step([(70, 330)])
    (k, v), outs, first = whole.tokens[0], [], 70
    for count in (1, 200, 129):
        rows = slice(first - 70, first - 70 + count)
        part = replace(whole, rows=[(first, count)], q=whole.q[rows], tokens=[(k[: first + count], v[: first + count])])
        outs.append(case.run(part, device))
        first += count
    assert same_bits(torch.cat(outs), case.run(whole, device))
