"""Launches of the kernels that compile for a Hopper alone: which form a step takes, and every argument, without a GPU.

T rows, N query heads, L latent, R rotated elements, S slots, K places of a list
"""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent import (
    compressed_attention,
    compressed_warpgroups,
    gathered_tiles,
    latent_attention,
    latent_low_tiles,
    latent_quantized_attention,
    latent_quantized_warpgroups,
    latent_warpgroups,
    sparse_attention,
    sparse_low_attention,
    sparse_low_warpgroups,
    sparse_warpgroups,
)
from holdfast.kernels.latent.compressed_scopes import CompressedRows, Scopes
from holdfast.kernels.latent.latent_planes import LatentPlanes, SparseRows
from kernels.latent_page_cases import QUANTIZED_LATENTS, make_latent_planes
from red_zones import RedZones

BF16, SCALE, NUM_SMS = torch.bfloat16, 0.07, 10
FORMATS = ("plain", *QUANTIZED_LATENTS)
KINDS: dict[str, int] = dict(zip(FORMATS, range(4), strict=True))


class Launch(NamedTuple):
    grid: tuple[int, ...]
    told: dict[str, Any]
    """Arguments and options by name."""


class Recorder:
    """In a kernel's place."""

    def __init__(self, kernel: Any) -> None:
        self._names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **keywords: Any) -> None:
            told = dict(zip(self._names, arguments, strict=False)) | keywords
            assert set(self._names) <= set(told), f"missing {set(self._names) - set(told)}"
            self.launches.append(Launch(grid, told))

        return launch


class Step:
    """Tensors of a step, none like another in its strides."""

    def __init__(self, name: str, num_heads: int, num_rows: int = 3, num_places: int = 300) -> None:
        self.name, self.num_heads, self.num_rows = name, num_heads, num_rows
        if name == "plain":
            rows_SX = torch.zeros(128, 576, dtype=BF16)
            self.planes = LatentPlanes("plain", 512, 64, 64, rows_SX)
        else:
            self.planes = make_latent_planes(name, 512, 64, 64, 2, RedZones(torch.device("cpu")))
        self.q = torch.zeros(num_rows, num_heads, 576, dtype=BF16)
        self.out = torch.zeros(num_rows, num_heads, 512, dtype=BF16)
        self.table = torch.zeros(4, 9, dtype=torch.int32)[:, :7]
        self.tokens = torch.zeros(num_rows, num_places + 5, dtype=torch.int32)[:, :num_places]
        self.partial_out, self.partial_lse = torch.zeros(600, num_heads), torch.zeros(600, num_heads)
        self.rows = SparseRows(torch.zeros(5, dtype=torch.int32), torch.ones(5, dtype=torch.int32))
        tiles_X8, rows_T2 = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
        self.work = TileWork(tiles_X8, rows_T2, True, True, has_merge=True)

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.partial_out, self.partial_lse, self.out

    def check(self, launch: Launch) -> None:
        """What every kernel is told under these names."""
        told = launch.told
        same = {
            "p_q": self.q,
            "p_out": self.out,
            "p_partial_out": self.partial_out,
            "p_partial_lse": self.partial_lse,
            "p_pages": self.table,
            "p_tiles": self.work.tiles_X8,
            "p_tokens": self.tokens,
            "p_table_rows": self.rows.table_rows_T,
            "p_num_tokens": self.rows.num_tokens_T,
        }
        for name in same.keys() & told.keys():
            assert told[name] is same[name], name
        equal = {
            "table_stride": 9,
            "tokens_stride": self.tokens.stride(0),
            "num_places": self.tokens.shape[1],
            "NUM_HEADS": self.num_heads,
            "PAGE_TOKENS": 64,
            "PDL": True,
            "launch_pdl": True,
            "PLAIN_ROWS": self.name == "plain",
            "FP8": self.name == "fp8_ds_mla",
            "KIND": KINDS[self.name],
            "SMALL_ROPE": self.name.endswith("_r8"),
            "scale_log2": SCALE * LOG2_E,
        }
        for name in equal.keys() & told.keys():
            assert told[name] == equal[name], name
        rows, scales, rope = self.planes.rows_SX, self.planes.scales_SC, self.planes.rope_SR
        held = {"p_scales": rows if scales is None else scales, "p_rope": rows if rope is None else rope}
        for name in (held := held | {"p_codes": rows, "p_rows": rows}).keys() & told.keys():
            assert told[name].data_ptr() == held[name].data_ptr(), name
        if "NUM_BLOCKS" in told:
            assert (told["NUM_BLOCKS"] - 1) * told["GROUP"] < self.num_heads <= told["NUM_BLOCKS"] * told["GROUP"]
        if "places" in told:
            assert (launch.grid[1] - 1) * told["places"] < self.tokens.shape[1] <= launch.grid[1] * told["places"]


@pytest.fixture
def record(monkeypatch):
    """record(module) -> the launches of its kernel; PDL is on."""

    def of(module: ModuleType) -> list[Launch]:
        recorder = Recorder(vars(module)["_attend_kernel"])
        monkeypatch.setattr(module, "_attend_kernel", recorder)
        monkeypatch.setattr(module, "supports_pdl", lambda tensor: True)
        return recorder.launches

    return of


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("num_heads", [20, 100])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.each_pair
def test_tiles_of_a_step_are_launched_whole(record, monkeypatch, name, num_heads, large):
    step, descriptors = Step(name, num_heads), MagicMock()
    module = latent_warpgroups if name == "plain" else latent_quantized_warpgroups
    launches = record(module)
    attend = latent_quantized_warpgroups.attend_quantized_warpgroups
    if name == "plain":
        monkeypatch.setattr(module, "gl", MagicMock())
        monkeypatch.setattr(module, "TensorDescriptor", descriptors)
        attend = latent_warpgroups.attend_warpgroups
    attend(step.q, step.planes, step.table, step.work, large, SCALE, *step.results, NUM_SMS)
    (launch,) = launches
    step.check(launch)
    assert launch.grid == (NUM_SMS,)
    assert launch.told["LARGE"] == large
    assert launch.told["GROUP"] <= (8 if large else 64)
    if name == "plain":
        blocks = [(call.args[0], call.args[1]) for call in descriptors.from_tensor.call_args_list]
        assert [block for _, block in blocks] == [[64, 512], [64, 64]]
        assert all(rows is step.planes.rows_SX for rows, _ in blocks)


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_lists_of_a_step_are_launched_whole(record, monkeypatch, name, num_rows):
    """By each of the three kernels, and merged if they are split."""
    for module, attend, num_heads in (
        (sparse_warpgroups, sparse_warpgroups.sparse_warpgroup_attention, 100),
        (sparse_low_attention, sparse_low_attention.sparse_low_attention, 20),
        (sparse_low_warpgroups, sparse_low_warpgroups.sparse_turns_attention, 16),
    ):
        step, launches, merged = Step(name, num_heads, num_rows), record(module), []
        monkeypatch.setattr(module, "merge_lists", lambda *arguments, merged=merged: merged.append(arguments))
        assert attend(step.q, step.planes, step.table, step.rows, step.tokens, SCALE, *step.results, 60) is step.out
        (launch,) = launches
        step.check(launch)
        turns = 2 if module is sparse_low_warpgroups else 1
        assert launch.grid[0] == num_rows * (2 if num_heads == 100 else 1)
        num_partials = turns * launch.grid[1]
        assert num_partials * num_rows <= len(step.partial_lse)
        wanted = [(step.rows, num_partials, *step.results)] if num_partials > 1 else []
        assert merged == wanted


@pytest.mark.parametrize("name", FORMATS)
def test_turns_are_taken_by_kinds_that_gain(monkeypatch, name):
    taken, step = [], Step(name, 16)
    monkeypatch.setattr(sparse_low_attention, "sparse_turns_attention", lambda *_: taken.append("turns"))
    monkeypatch.setattr(sparse_low_attention, "attend_low", lambda *_: taken.append("low") or 1)
    told = (step.q, step.planes, step.table, step.rows, step.tokens, SCALE, *step.results, 60)
    sparse_low_attention.sparse_low_attention(*told)
    assert taken == ["turns" if name in ("plain", "fp8_ds_mla") else "low"]


def test_turns_need_partials_for_two_of_every_split():
    step = Step("plain", 16)
    lse = step.partial_lse
    needed = 2 * 3 * 16 * sparse_low_warpgroups.low_splits(3, 16, 300, 60, 128)
    assert sparse_low_warpgroups.takes_turns(step.q, step.tokens, lse.flatten()[:needed], 60)
    assert not sparse_low_warpgroups.takes_turns(step.q, step.tokens, lse.flatten()[: needed - 1], 60)
    assert not sparse_low_warpgroups.takes_turns(Step("plain", 17).q, step.tokens, lse, 60)


@pytest.mark.parametrize("scope", ["window", "entries", "selected"])
@pytest.mark.parametrize("name", ["plain", "fp8_ds_v4"])
def test_scopes_of_a_step_are_launched_whole(record, name, scope):
    def planes_of(page: int) -> LatentPlanes:
        if name == "plain":
            return LatentPlanes("plain", 448, 64, page, torch.zeros(128, 512, dtype=BF16))
        return make_latent_planes(name, 448, 64, page, 2, RedZones(torch.device("cpu")))

    launches, (window, entries) = record(compressed_warpgroups), (planes_of(64), planes_of(16))
    tables = torch.zeros(4, 9, dtype=torch.int32)[:, :7], torch.zeros(4, 13, dtype=torch.int32)[:, :11]
    scopes = Scopes(128, window, tables[0])
    if scope != "window":
        scopes = scopes._replace(ratio=4, entries=entries, entries_table_NP=tables[1])
    if scope == "selected":
        scopes = scopes._replace(selected_TK=torch.zeros(3, 25, dtype=torch.int32)[:, :20])
    q, out = torch.zeros(3, 100, 512, dtype=BF16), torch.zeros(3, 100, 512, dtype=BF16)
    rows = CompressedRows(torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    sinks, rotary = torch.zeros(100), Rotary(torch.zeros(3, 40)[:, :32], torch.zeros(3, 40)[:, :32])
    partials = torch.zeros(9, 100 * 512, dtype=torch.float16), torch.zeros(9, 100)
    compressed_warpgroups.attend_warpgroups(q, scopes, rows, sinks, rotary, SCALE, 3, *partials, out)
    ((grid, told),) = launches
    own = entries if scope != "window" else window
    assert grid == (3 * 2, 3)
    same = {"p_q": q, "p_sinks": sinks, "p_out": out, "p_partial_out": partials[0], "p_partial_lse": partials[1]}
    same |= {"p_table_rows": rows.table_rows_T, "p_positions": rows.positions_T}
    same |= {"p_window_pages": tables[0], "p_entries_pages": tables[scope != "window"]}
    assert [name for name, tensor in same.items() if told[name] is not tensor] == []
    assert (told["p_cos"], told["p_sin"]) == (rotary.cos_TP, rotary.sin_TP)
    numbers = {"window_stride": 9, "entries_stride": 9 if scope == "window" else 13, "rotary_stride": 40}
    numbers |= {"num_listed": 20 if scope == "selected" else 0, "scale_log2": SCALE * LOG2_E, "WINDOW": 128}
    numbers |= {"RATIO": 0 if scope == "window" else 4, "LISTED": scope == "selected", "NUM_HEADS": 100}
    numbers |= {"NUM_BLOCKS": 2, "GROUP": 50, "WINDOW_PAGE": 64, "ENTRIES_PAGE": own.page_tokens}
    numbers |= {"PLAIN_ROWS": name == "plain", "PDL": True, "launch_pdl": True}
    assert {name: told[name] for name in numbers} == numbers
    if scope == "selected":
        assert told["p_selected"] is scopes.selected_TK
        assert told["selected_stride"] == 25
    for prefix, planes in (("p_window", window), ("p_entries", own)):
        scales = planes.rows_SX if planes.scales_SC is None else planes.scales_SC
        assert told[prefix].data_ptr() == planes.rows_SX.data_ptr()
        assert told[f"{prefix}_scales"].data_ptr() == scales.data_ptr()


class OnGpu(SimpleNamespace):
    """What a launcher asks of a tensor, as if it lay on a GPU."""

    def __len__(self) -> int:
        return self.shape[0]

    def but(self, **values: Any) -> "OnGpu":
        return OnGpu(**vars(self) | values)


def on_gpu(tensor: torch.Tensor) -> Any:
    return OnGpu(shape=tensor.shape, dtype=tensor.dtype, is_cuda=True, device="cuda")


def hopper_step(name: str, num_heads: int, page: int = 64) -> tuple[Any, LatentPlanes]:
    step = Step(name, num_heads)
    rows: Any = on_gpu(step.planes.rows_SX)
    return on_gpu(step.q), step.planes._replace(rows_SX=rows, page_tokens=page)


@pytest.fixture
def capability(monkeypatch) -> list[int]:
    """The major number of the GPU, which a test may change; Gluon is there."""
    major = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))
    for module in (latent_warpgroups, gathered_tiles, latent_low_tiles, compressed_warpgroups):
        monkeypatch.setattr(module, "gl", MagicMock())
    return major


@pytest.mark.parametrize("name", FORMATS)
def test_forms_of_selected_tokens_follow_the_heads(capability, monkeypatch, name):
    taken = []
    for form in ("sparse_low_attention", "sparse_warpgroup_attention", "sparse_quantized_attention"):
        monkeypatch.setattr(sparse_attention, form, lambda *_, form=form: taken.append(form))
    for num_heads in (16, 32, 33, 128):
        q, planes = hopper_step(name, num_heads)
        sparse_attention.sparse_attention(q, planes, *8 * [MagicMock()])
    assert taken == 2 * ["sparse_low_attention"] + 2 * ["sparse_warpgroup_attention"]
    if name != "plain":
        capability[0] = 8
        sparse_attention.sparse_attention(*hopper_step(name, 16), *8 * [MagicMock()])
        assert taken[4:] == ["sparse_quantized_attention"]


@pytest.mark.parametrize("name", FORMATS)
def test_forms_of_tiles_follow_their_height(capability, monkeypatch, name):
    taken = []
    module = latent_attention if name == "plain" else latent_quantized_attention
    wide, narrow = ("attend_warpgroups", "_attend_plain")
    if name != "plain":
        wide, narrow = ("attend_quantized_warpgroups", "_attend_codes")
    for form in (wide, narrow):
        monkeypatch.setattr(module, form, lambda *told, form=form: taken.append((form, told[4])))
    monkeypatch.setattr(module, "merge_latents", lambda *_: taken.append("merge"))
    work = TileWork(MagicMock(), MagicMock(), has_small=True, has_large=True, has_merge=True)
    for num_heads in (16, 20, 64):
        q, planes = hopper_step(name, num_heads)
        attend = latent_attention.latent_attention
        attend(q, planes, MagicMock(), work, SCALE, *3 * [MagicMock()], NUM_SMS)
    small = [narrow, wide if name == "plain" else narrow, wide]
    assert taken == [one for form in small for one in ((form, False), (wide, True), "merge")]


def flipped(q: Any, planes: LatentPlanes) -> list[tuple[Any, LatentPlanes]]:
    """The same, with one thing each that the kernels for a Hopper do not take."""
    on_host = q.but(is_cuda=False)
    single = q.but(dtype=torch.float32)
    return [
        (q, planes._replace(latent_dim=448)),
        (q, planes._replace(rope_dim=32)),
        (on_host, planes),
        (single, planes),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_kernels_decline_what_they_do_not_know(capability, name):
    takes = gathered_tiles.takes_gathering
    q, planes = hopper_step(name, 20)
    assert takes(planes, q)
    assert latent_low_tiles.takes_low(q, planes)
    for other, others in flipped(q, planes):
        assert not takes(others, other)
        assert not latent_low_tiles.takes_low(other, others)
    half = q.but(dtype=torch.float16)
    assert takes(planes, half) == latent_low_tiles.takes_low(half, planes) == (name != "plain")
    capability[0] = 8
    assert not takes(planes, q)
    assert not latent_low_tiles.takes_low(q, planes)


def test_warpgroups_take_compressed_pages_of_one_kind(capability):
    rows: Any = on_gpu(torch.zeros(1, 1, dtype=BF16))
    q = on_gpu(torch.zeros(1, 64, 512, dtype=BF16))
    window = LatentPlanes("fp8_ds_v4", 448, 64, 64, rows)
    scopes = Scopes(128, window, MagicMock(), 4, window, MagicMock())
    takes = compressed_warpgroups.takes_warpgroups
    assert takes(q, scopes)
    assert takes(q, scopes._replace(entries=None))
    assert not takes(q, scopes._replace(entries=window._replace(kind="plain")))
    assert not takes(q, scopes._replace(window=window._replace(latent_dim=512)))
    assert not takes(q.but(dtype=torch.float32), scopes)
    capability[0] = 10
    assert not takes(q, scopes)
    assert not compressed_attention.takes_warpgroups(q.but(is_cuda=False), scopes)
