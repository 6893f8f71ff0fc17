"""Rows of cos and sin against the table of the whole context that they replace: any position up to a million, any rope, any set."""

from typing import Any

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.rope_rows import (
    RopeRows,
    fill_rope_rows,
    fill_rope_rows_reference,
    fill_rope_rows_triton,
)
from holdfast.models.settings import Settings, read_rope
from holdfast.models.spec import RopeSpec
from kernels.triton_cases import QUIET, assert_allocates_nothing
from models.rope_oracle import empty_rows, table_rows
from red_zones import RedZones

pytestmark = QUIET

LONGEST = 2**20
TOLERANCE = 2e-7
HEAD_DIM = 128
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7}
LONG = {
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [1.0 + 0.8 * i for i in range(HEAD_DIM // 2)],
}
ROPES: dict[str, tuple[str, dict[str, Any], float]] = {
    "theta 1e4": ("default", {}, 1e4),
    "theta 5e5": ("default", {}, 5e5),
    "theta 1e6": ("default", {}, 1e6),
    "theta 1e7": ("default", {}, 1e7),
    "linear": ("linear", {"factor": 8.0}, 1e6),
    "llama3": ("llama3", LLAMA3, 5e5),
    "yarn with a magnitude": ("yarn", YARN, 1e4),
    "longrope": ("longrope", LONG, 1e4),
    "dynamic": ("dynamic", {"factor": 4.0}, 1e4),
}
FUNCTIONS = pytest.mark.parametrize(
    "function", [fill_rope_rows_triton, fill_rope_rows_reference], ids=["kernel", "reference"]
)


def rope_of(name: str) -> RopeSpec:
    kind, settings, theta = ROPES[name]
    parameters = settings | {"rope_type": kind, "rope_theta": theta}
    return read_rope(Settings({"rope_parameters": parameters}, "config.json"), HEAD_DIM, LONGEST // 8)


def far_positions(num_random: int = 4096) -> torch.Tensor:
    """Random ones up to a million, and the neighbours of every power of two."""
    generator = torch.Generator().manual_seed(0)
    powers = [2**k + step for k in range(21) for step in (-1, 0, 1) if 2**k + step <= LONGEST]
    return torch.cat((torch.randint(LONGEST, (num_random,), generator=generator), torch.tensor(powers)))


def filled(function: Any, positions_T: torch.Tensor, rows: RopeRows, device: torch.device) -> RopeRows:
    """Rows of poison between red zones, one more than the step has, filled on the device; what was left, on the CPU."""
    zones, (num_sets, _, num_pairs) = RedZones(device), rows.cos_STP.shape
    shape = num_sets, len(positions_T) + 1, num_pairs
    tables = [zones.allocate(*shape, dtype=rows.cos_STP.dtype).fill_(torch.nan) for _ in range(2)]
    placed = rows._replace(frequency_SP=rows.frequency_SP.to(device), cos_STP=tables[0], sin_STP=tables[1])
    function(positions_T.to(device), placed)
    zones.check()
    for table_STP in tables:
        assert bool(table_STP[:, -1].isnan().all()), "a row was written that the step does not have"
    return rows._replace(cos_STP=tables[0][:, :-1].cpu(), sin_STP=tables[1][:, :-1].cpu())


def judge(function: Any, name: str, positions_T: torch.Tensor, device: torch.device) -> float:
    """The largest difference from the table, which must be small; exactly none from the reference on a CPU."""
    shape = HEAD_DIM, LONGEST // 8, LONGEST
    wanted = table_rows(rope_of(name), *shape, positions_T)
    found = filled(function, positions_T, empty_rows(rope_of(name), *shape, 1), device).rotary(0)
    error = max(float((found.cos_TP - wanted.cos_TP).abs().max()), float((found.sin_TP - wanted.sin_TP).abs().max()))
    assert error <= TOLERANCE, f"{error=}"
    if function is fill_rope_rows_reference and device.type == "cpu":
        assert error == 0.0
    return error


@for_each("name", ROPES)
def test_rope_rows_reference_matches_table_up_to_a_million(name: str) -> None:
    judge(fill_rope_rows_reference, name, far_positions(), torch.device("cpu"))


@for_each("name", ROPES)
def test_rope_rows_kernel_matches_table_at_far_positions(device: torch.device, name: str) -> None:
    """The interpreter runs a row at a time, so few of them; all of them are compared on a GPU."""
    positions_T = far_positions(64)[:: 1 if name == "theta 1e4" else 4].contiguous()
    judge(fill_rope_rows_triton, name, positions_T, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROPES)
@FUNCTIONS
def test_rope_rows_compiled_kernel_matches_table_up_to_a_million(
    device: torch.device, function: Any, name: str
) -> None:
    judge(function, name, far_positions(), device)


def several_sets(dtype: torch.dtype = torch.float32, num_pairs: int = 12) -> RopeRows:
    """Two rotations of tokens and two of entries, with factors of their own."""
    frequency_SP = torch.stack([base ** -(torch.arange(num_pairs) / num_pairs) for base in (1e4, 1e6, 1e6, 1e6)])
    tables = (torch.empty(4, 1, num_pairs, dtype=dtype) for _ in range(2))
    return RopeRows(frequency_SP, (1.0, 1.25, 1.25, 0.5), (1, 1, 4, 128), *tables)


@FUNCTIONS
def test_rope_rows_use_frequencies_factor_and_ratio_of_each_set(device: torch.device, function: Any) -> None:
    rows, positions_T = several_sets(), torch.tensor([0, 1, 3, 4, 127, 128, 131, 1_000_003, LONGEST - 1])
    found = filled(function, positions_T, rows, device)
    for number, (magnitude, ratio) in enumerate(zip(rows.magnitudes, rows.ratios, strict=True)):
        start_T = positions_T - positions_T % ratio
        angle_TP = (start_T.float().unsqueeze(1) * rows.frequency_SP[number]).double()
        torch.testing.assert_close(found.cos_STP[number].double(), angle_TP.cos() * magnitude, rtol=0, atol=3e-7)
        torch.testing.assert_close(found.sin_STP[number].double(), angle_TP.sin() * magnitude, rtol=0, atol=3e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_rows_in_half_are_rounded_float32_rows(device: torch.device, dtype: torch.dtype) -> None:
    positions_T = far_positions(200)
    fine, coarse = (
        filled(fill_rope_rows_triton, positions_T, several_sets(kind), device) for kind in (torch.float32, dtype)
    )
    assert torch.equal(coarse.cos_STP, fine.cos_STP.to(dtype))
    assert torch.equal(coarse.sin_STP, fine.sin_STP.to(dtype))


@FUNCTIONS
def test_rope_rows_are_batch_invariant(device: torch.device, function: Any) -> None:
    positions_T = far_positions(9)[:12]
    together = filled(function, positions_T, several_sets(), device)
    for row in (0, 5, 11):
        alone = filled(function, positions_T[row : row + 1], several_sets(), device)
        assert torch.equal(alone.cos_STP[:, 0], together.cos_STP[:, row])
        assert torch.equal(alone.sin_STP[:, 0], together.sin_STP[:, row])


@FUNCTIONS
def test_rope_rows_of_stale_padding_are_finite(device: torch.device, function: Any) -> None:
    positions_T = torch.tensor([-1, -(2**40), 2**62, 2**63 - 1, -(2**63), 7])
    found = filled(function, positions_T, several_sets(), device)
    assert bool(found.cos_STP.isfinite().all())
    assert bool(found.sin_STP.isfinite().all())


@FUNCTIONS
def test_rope_rows_without_rows_write_nothing(device: torch.device, function: Any) -> None:
    filled(function, torch.empty(0, dtype=torch.int64), several_sets(), device)


def test_rope_rows_refuse_strided_tables(device: torch.device) -> None:
    rows = several_sets()
    apart = rows._replace(cos_STP=torch.empty(4, 1, 24, device=device)[..., ::2])
    with pytest.raises(AssertionError, match="rows must lie side by side"):
        fill_rope_rows_triton(torch.zeros(1, dtype=torch.int64, device=device), apart)
    with pytest.raises(AssertionError, match="positions must lie side by side"):
        fill_rope_rows_triton(torch.zeros(4, dtype=torch.int64, device=device)[::2], rows)
    with pytest.raises(AssertionError, match="num_rows=2"):
        fill_rope_rows_triton(torch.zeros(2, dtype=torch.int64, device=device), rows)


@pytest.mark.gpu
def test_rope_rows_graph_follows_positions_and_allocates_nothing(device: torch.device) -> None:
    rows = several_sets(torch.bfloat16)
    tables = (torch.full((4, 9, 12), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(2))
    placed = RopeRows(rows.frequency_SP.to(device), rows.magnitudes, rows.ratios, *tables)
    positions_T = torch.arange(9, device=device)
    assert_allocates_nothing(lambda: fill_rope_rows(positions_T, placed))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_rope_rows(positions_T, placed)
    positions_T.copy_(far_positions(0)[-9:])
    graph.replay()
    torch.cuda.synchronize()
    launched = filled(fill_rope_rows_triton, positions_T.cpu(), several_sets(torch.bfloat16), device)
    assert torch.equal(placed.cos_STP.cpu(), launched.cos_STP)
    assert torch.equal(placed.sin_STP.cpu(), launched.sin_STP)
