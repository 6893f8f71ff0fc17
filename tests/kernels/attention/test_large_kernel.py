"""The kernel of a layer's large tiles: what decides it, and every argument of its launch, without a GPU."""

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from for_each import for_each
from holdfast.families.grouped.pages import PlainPages
from holdfast.kernels import operation
from holdfast.kernels.attention import prefill_warpgroups, tiled_attention
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from holdfast.kernels.attention.tiled_attention import TRITON_TILES, LargeKernel, choose_large_kernel

WARPGROUPS = LargeKernel("warpgroups", "a test", 1, 128)


def plane_on_gpu(num_kv_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A plane as the choice sees it."""
    return SimpleNamespace(shape=(4096, num_kv_heads, head_dim), dtype=dtype, is_cuda=True, device="cuda")


@pytest.fixture
def capability(monkeypatch) -> list[int]:
    """The major number of the GPU, which a test may change; Gluon is available."""
    major = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))
    monkeypatch.setattr(prefill_warpgroups, "gl", MagicMock())
    return major


@for_each("head_dim, tokens", [(64, 128), (72, 128), (96, 128), (128, 128), (136, 64), (192, 64), (256, 64)])
def test_large_kernel_on_hopper_is_in_warpgroups(capability, head_dim, tokens):
    for dtype in (torch.bfloat16, torch.float16):
        for page_tokens in (16, 48, 64, 256):
            chosen = choose_large_kernel(plane_on_gpu(head_dim=head_dim, dtype=dtype), page_tokens, 64, 0.1)
            assert chosen[:1] + chosen[2:] == ("warpgroups", 1, tokens)


@for_each(
    "plane, page_tokens, num_heads, scale, words",
    [
        (plane_on_gpu(head_dim=56), 16, 64, 0.1, "head_dim is 56"),
        (plane_on_gpu(head_dim=264), 16, 64, 0.1, "head_dim is 264"),
        (plane_on_gpu(head_dim=100), 16, 64, 0.1, "head_dim is 100"),
        (plane_on_gpu(dtype=torch.float32), 16, 64, 0.1, "half precision, not in torch.float32"),
        (plane_on_gpu(num_kv_heads=1), 16, 129, 0.1, "129 query heads share"),
        (plane_on_gpu(), 8, 64, 0.1, "pages have 8 tokens"),
        (plane_on_gpu(), 24, 64, 0.1, "pages have 24 tokens"),
        (plane_on_gpu(), 16, 64, 0.0, "scale of scores is 0.0"),
        (torch.empty(4, 8, 128, dtype=torch.bfloat16), 16, 64, 0.1, "Hopper"),
    ],
)
def test_large_kernel_declined_layer_stays_in_triton(capability, plane, page_tokens, num_heads, scale, words):
    chosen = choose_large_kernel(plane, page_tokens, num_heads, scale)
    assert chosen == TRITON_TILES._replace(reason=chosen.reason)
    assert words in chosen.reason


def test_large_kernel_follows_the_gpu_and_gluon(capability, monkeypatch):
    for capability[0], name in ((8, "triton"), (9, "warpgroups"), (10, "triton")):
        assert choose_large_kernel(plane_on_gpu(), 16, 64, 0.1).name == name
    capability[0] = 9
    monkeypatch.setattr(prefill_warpgroups, "gl", None)
    assert choose_large_kernel(plane_on_gpu(), 16, 64, 0.1).name == "triton"


def test_large_kernel_decides_programs_and_splits():
    """Small tiles are as before."""
    plane = torch.empty(0, 8, 128)
    old, new = (PlainPages(plane, plane, 16, large=large).tile_geometry(64) for large in (TRITON_TILES, WARPGROUPS))
    assert (old.large_programs_per_sm, old.large_block_tokens) == (2, 64)
    assert (new.large_programs_per_sm, new.large_block_tokens) == (1, 128)
    assert new == old._replace(large_programs_per_sm=1, large_block_tokens=128)


class Recorder:
    """Replaces a kernel and records the grid and the arguments of each launch by name."""

    def __init__(self, kernel: Any) -> None:
        self._names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **keywords: Any) -> None:
            given = dict(zip(self._names, arguments, strict=False)) | keywords
            assert set(self._names) <= set(given), f"missing {set(self._names) - set(given)}"
            self.launches.append((grid, given))

        return launch


def make_call(num_heads: int = 10, head_dim: int = 96, scoring: Scoring | None = None, **flags: bool) -> TileCall:
    q = torch.zeros(5, num_heads, head_dim, dtype=torch.bfloat16)
    table = torch.zeros(3, 9, dtype=torch.int32)[:, :7]
    lists = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(5, 2, dtype=torch.int32)
    work = TileWork(*lists, **({"has_small": True, "has_large": True, "has_merge": True} | flags))
    partials = torch.zeros(8, num_heads * head_dim), torch.zeros(8, num_heads)
    return TileCall(q, table, work, scoring or Scoring(0.25), *partials, torch.zeros_like(q).view(5, -1), 132)


@pytest.fixture
def launches(monkeypatch) -> dict[str, list[Any]]:
    """Launches of both kernels, and of the merge; PDL is on."""
    found: dict[str, list[Any]] = {"merge": []}
    for name, module in (("triton", tiled_attention), ("warpgroups", prefill_warpgroups)):
        recorder = Recorder(module._attend_kernel)
        monkeypatch.setattr(module, "_attend_kernel", recorder)
        found[name] = recorder.launches
    monkeypatch.setattr(tiled_attention, "merge_tiles", lambda *given, **_: found["merge"].append(given))
    monkeypatch.setattr(prefill_warpgroups, "gl", MagicMock())
    monkeypatch.setattr(prefill_warpgroups, "TensorDescriptor", MagicMock())
    monkeypatch.setattr(operation, "supports_pdl", lambda tensor: True)
    return found


@for_each("has_small, has_large", [(True, True), (True, False), (False, True)])
def test_warpgroups_take_large_tiles_only(launches, has_small, has_large):
    plane = torch.zeros(64, 2, 96, dtype=torch.bfloat16)
    for large, counts in (
        (TRITON_TILES, (has_small + has_large, 0)),
        (WARPGROUPS, (has_small, has_large)),
    ):
        for found in launches.values():
            found.clear()
        call = make_call(has_small=has_small, has_large=has_large)
        assert tiled_attention.tiled_attention(call, plane, plane, 16, large) is call.out_TX
        assert (len(launches["triton"]), len(launches["warpgroups"]), len(launches["merge"])) == (*counts, 1)


SINKS = torch.zeros(10)


@for_each(
    "scoring, numbers",
    [
        (Scoring(0.25), {"inner": 0.0, "outer": 0.25 * LOG2_E, "window": 0}),
        (Scoring(0.25, 77, SINKS), {"inner": 0.0, "outer": 0.25 * LOG2_E, "window": 77}),
        (Scoring(0.25, None, None, 8.0), {"inner": 0.03125, "outer": 8 * LOG2_E, "window": 0}),
    ],
)
def test_warpgroup_launch_gets_every_argument(launches, scoring, numbers):
    planes = [torch.zeros(96, 2, 96, dtype=torch.bfloat16) for _ in range(2)]
    call, describe = make_call(scoring=scoring), MagicMock()
    prefill_warpgroups.TensorDescriptor.from_tensor = describe
    launches["warpgroups"].clear()
    prefill_warpgroups.attend_prefill(call, *planes, 48)
    ((grid, given),) = launches["warpgroups"]
    assert grid == (132,)
    same = {"p_q": call.q_THD, "p_out": call.out_TX, "p_partial_out": call.partial_out_CX}
    same |= {"p_partial_lse": call.partial_lse_CH, "p_pages": call.page_table_NP, "p_tiles": call.work.tiles_X8}
    assert [name for name, tensor in same.items() if given[name] is not tensor] == []
    assert given["p_sinks"] is scoring.sinks_H
    numbers = numbers | {"table_stride": 9, "NUM_KV_HEADS": 2, "GROUP": 5, "HEAD_DIM": 96, "BLOCK_D": 128}
    numbers |= {"PAGE_TOKENS": 48, "HAS_WINDOW": scoring.window is not None, "HAS_SINKS": scoring.sinks_H is not None}
    numbers |= {"HAS_CAP": scoring.softcap is not None, "TOKENS": 128, "BOX": 16, "PDL": True, "launch_pdl": True}
    assert {name: given[name] for name in numbers} == numbers
    boxes = [(one.args[0] is plane, one.args[1]) for one, plane in zip(describe.call_args_list, planes, strict=True)]
    assert boxes == 2 * [(True, [16, 1, 64])], "heads of 96 columns are two boxes of 64, the second partly beyond them"


@for_each("page_tokens, head_dim, box", [(16, 64, 16), (256, 128, 128), (256, 256, 64), (96, 128, 32), (80, 128, 16)])
def test_warpgroup_copies_stay_in_a_page_and_a_block(launches, page_tokens, head_dim, box):
    plane, describe = torch.zeros(512, 2, head_dim, dtype=torch.float16), MagicMock()
    prefill_warpgroups.TensorDescriptor.from_tensor = describe
    launches["warpgroups"].clear()
    prefill_warpgroups.attend_prefill(make_call(4, head_dim), plane, plane, page_tokens)
    assert launches["warpgroups"][0][1]["BOX"] == box
    for one in describe.call_args_list:
        assert one.args[0].shape == (512, 2 * head_dim)
        assert one.args[1] == [box, 64]
