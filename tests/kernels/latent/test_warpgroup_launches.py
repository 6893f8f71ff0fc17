"""Launches of the kernels that compile for Hopper alone: which kernel a step takes, and every argument, without a GPU.

T rows, N query heads, L latent, R rotated elements, S slots, K places of a list
"""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from holdfast.kernels import operation
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent import (
    compressed_warpgroups,
    gathered_attention,
    latent_attention,
    latent_low_tiles,
    latent_warpgroups,
    sparse_low_attention,
)
from holdfast.kernels.latent.compressed_scopes import CompressedCall, CompressedRows, Scopes
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows
from kernels.latent_page_cases import QUANTIZED_LATENTS, make_latent_planes
from red_zones import RedZones

BF16, SCALE, NUM_SMS = torch.bfloat16, 0.07, 10
FORMATS = ("plain", *QUANTIZED_LATENTS)
KINDS: dict[str, int] = dict(zip(FORMATS, range(4), strict=True))


class Launch(NamedTuple):
    grid: tuple[int, ...]
    given: dict[str, Any]
    """Arguments and options by name."""


class Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, kernel: Any) -> None:
        self._names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **keywords: Any) -> None:
            given = dict(zip(self._names, arguments, strict=False)) | keywords
            assert set(self._names) <= set(given), f"missing {set(self._names) - set(given)}"
            self.launches.append(Launch(grid, given))

        return launch


class Step:
    """Tensors of a step, all with different strides."""

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

    def call(self, num_sms: int = NUM_SMS) -> LatentCall:
        results = self.partial_out, self.partial_lse, self.out
        return LatentCall(self.q, self.planes, self.table, SCALE, *results, num_sms)

    def check(self, launch: Launch) -> None:
        """Check what every kernel gets under these names; None stands for what its source does not have."""
        given = {name: value for name, value in launch.given.items() if value is not None}
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
        for name in same.keys() & given.keys():
            assert given[name] is same[name], name
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
        for name in equal.keys() & given.keys():
            assert given[name] == equal[name], name
        rows, scales, rope = self.planes.rows_SX, self.planes.scales_SC, self.planes.rope_SR
        held = {"p_scales": rows if scales is None else scales, "p_rope": rows if rope is None else rope}
        for name in (held := held | {"p_codes": rows, "p_rows": rows}).keys() & given.keys():
            assert given[name].data_ptr() == held[name].data_ptr(), name
        if "NUM_BLOCKS" in given:
            assert (given["NUM_BLOCKS"] - 1) * given["GROUP"] < self.num_heads <= given["NUM_BLOCKS"] * given["GROUP"]
        if "p_tokens" in given:
            assert (launch.grid[1] - 1) * given["places"] < self.tokens.shape[1] <= launch.grid[1] * given["places"]


@pytest.fixture
def record(monkeypatch):
    """record(module, kernel) -> the launches of its kernel; PDL is on."""

    def of(module: ModuleType, kernel: str = "_attend_kernel") -> list[Launch]:
        recorder = Recorder(vars(module)[kernel])
        monkeypatch.setattr(module, kernel, recorder)
        monkeypatch.setattr(operation, "supports_pdl", lambda tensor: True)
        return recorder.launches

    return of


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("num_heads", [20, 100])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.each_pair
def test_hopper_tile_launch_gets_every_argument(record, monkeypatch, name, num_heads, large):
    step, descriptors = Step(name, num_heads), MagicMock()
    module, attend = gathered_attention, gathered_attention.attend_gathered_tiles
    if name == "plain":
        module, attend = latent_warpgroups, latent_warpgroups.attend_warpgroups
        monkeypatch.setattr(module, "gl", MagicMock())
        monkeypatch.setattr(module, "TensorDescriptor", descriptors)
    launches = record(module)
    attend(step.call(), step.work, large)
    (launch,) = launches
    step.check(launch)
    assert launch.grid == (NUM_SMS,)
    assert launch.given["LARGE"] == large
    assert launch.given["p_tiles"] is step.work.tiles_X8
    assert launch.given["GROUP"] <= (8 if large else 64)
    if name == "plain":
        blocks = [(call.args[0], call.args[1]) for call in descriptors.from_tensor.call_args_list]
        assert [block for _, block in blocks] == [[64, 512], [64, 64]]
        assert all(rows is step.planes.rows_SX for rows, _ in blocks)
    else:
        assert not launch.given["LISTED"]


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_hopper_list_launch_gets_every_argument(record, name, num_rows):
    """Run each of the three kernels."""
    for module, kernel, attend, num_heads in (
        (gathered_attention, "_attend_kernel", gathered_attention.attend_gathered_lists, 100),
        (sparse_low_attention, "_attend_kernel", sparse_low_attention.attend_low_lists, 20),
        (sparse_low_attention, "_turns_kernel", sparse_low_attention.attend_turns, 16),
    ):
        step, launches = Step(name, num_heads, num_rows), record(module, kernel)
        num_partials = attend(step.call(60), step.rows, step.tokens)
        (launch,) = launches
        step.check(launch)
        assert launch.given["p_tokens"] is step.tokens
        assert launch.given.get("LISTED", True)
        assert launch.grid[0] == num_rows * (2 if num_heads == 100 else 1)
        assert num_partials == launch.grid[1] * (2 if kernel == "_turns_kernel" else 1)
        assert num_partials * num_rows <= len(step.partial_lse)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_hopper_lists_are_merged_if_split(monkeypatch, num_splits):
    step, merged = Step("plain", 16), []
    monkeypatch.setattr(latent_attention, "_attend_lists", lambda *_: num_splits)
    monkeypatch.setattr(latent_attention, "merge_lists", lambda *arguments: merged.append(arguments))
    call = step.call()
    assert latent_attention.sparse_attention(call, step.rows, step.tokens) is step.out
    assert merged == ([(call, step.rows, 3)] if num_splits == 3 else [])


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_turns_run_for_faster_kinds_only(record, monkeypatch, name):
    step, launches = Step(name, 16), record(sparse_low_attention)
    monkeypatch.setattr(sparse_low_attention, "attend_turns", lambda *_: 77)
    num_partials = sparse_low_attention.attend_low_lists(step.call(60), step.rows, step.tokens)
    assert (num_partials == 77) == (not launches) == (name in ("plain", "fp8_ds_mla"))


def test_hopper_turns_need_two_partials_a_split():
    call = Step("plain", 16).call(60)
    needed = 2 * 3 * 16 * sparse_low_attention.low_splits(3, 16, 300, 60, 128)
    for count, is_taken in ((needed, True), (needed - 1, False)):
        lse = call.partial_lse_CH.flatten()[:count]
        assert sparse_low_attention.takes_turns(call._replace(partial_lse_CH=lse), 300) == is_taken
    assert not sparse_low_attention.takes_turns(Step("plain", 17).call(60), 300)


@pytest.mark.parametrize("scope", ["window", "entries", "selected"])
@pytest.mark.parametrize("name", ["plain", "fp8_ds_v4"])
def test_hopper_scope_launch_gets_every_argument(record, name, scope):
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
    call = CompressedCall(q, scopes, rows, sinks, rotary, SCALE, *partials, out, NUM_SMS)
    compressed_warpgroups.attend_warpgroups(call, 3)
    ((grid, given),) = launches
    own = entries if scope != "window" else window
    assert grid == (3 * 2, 3)
    same = {"p_q": q, "p_sinks": sinks, "p_out": out, "p_partial_out": partials[0], "p_partial_lse": partials[1]}
    same |= {"p_table_rows": rows.table_rows_T, "p_positions": rows.positions_T}
    same |= {"p_window_pages": tables[0], "p_entries_pages": tables[scope != "window"]}
    assert [name for name, tensor in same.items() if given[name] is not tensor] == []
    assert (given["p_cos"], given["p_sin"]) == (rotary.cos_TP, rotary.sin_TP)
    numbers = {"window_stride": 9, "entries_stride": 9 if scope == "window" else 13, "rotary_stride": 40}
    numbers |= {"num_listed": 20 if scope == "selected" else 0, "scale_log2": SCALE * LOG2_E, "WINDOW": 128}
    numbers |= {"RATIO": 0 if scope == "window" else 4, "LISTED": scope == "selected", "NUM_HEADS": 100}
    numbers |= {"NUM_BLOCKS": 2, "GROUP": 50, "WINDOW_PAGE": 64, "ENTRIES_PAGE": own.page_tokens}
    numbers |= {"PLAIN_ROWS": name == "plain", "PDL": True, "launch_pdl": True}
    assert {name: given[name] for name in numbers} == numbers
    if scope == "selected":
        assert given["p_selected"] is scopes.selected_TK
        assert given["selected_stride"] == 25
    for prefix, planes in (("p_window", window), ("p_entries", own)):
        scales = planes.rows_SX if planes.scales_SC is None else planes.scales_SC
        assert given[prefix].data_ptr() == planes.rows_SX.data_ptr()
        assert given[f"{prefix}_scales"].data_ptr() == scales.data_ptr()


class OnGpu(SimpleNamespace):
    """A tensor as launchers see it, on a GPU."""

    def __len__(self) -> int:
        return self.shape[0]

    def but(self, **values: Any) -> "OnGpu":
        return OnGpu(**vars(self) | values)


def on_gpu(tensor: torch.Tensor) -> Any:
    return OnGpu(shape=tensor.shape, dtype=tensor.dtype, is_cuda=True, device="cuda")


def hopper_call(name: str, num_heads: int) -> LatentCall:
    call = Step(name, num_heads).call()
    return call._replace(q_TNX=on_gpu(call.q_TNX), planes=call.planes._replace(rows_SX=on_gpu(call.planes.rows_SX)))


@pytest.fixture
def capability(monkeypatch) -> list[int]:
    """The major number of the GPU, which a test may change; Gluon is available."""
    major = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))
    for module in (latent_warpgroups, gathered_attention, compressed_warpgroups):
        monkeypatch.setattr(module, "gl", MagicMock())
    return major


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_list_kernel_follows_the_heads(capability, monkeypatch, name):
    taken = []
    for kernel in ("attend_low_lists", "attend_gathered_lists", "_attend_lists"):
        monkeypatch.setattr(latent_attention, kernel, lambda *_, kernel=kernel: taken.append(kernel) or 1)
    for num_heads in (16, 32, 33, 128):
        latent_attention.sparse_attention(hopper_call(name, num_heads), MagicMock(), MagicMock())
    assert taken == 2 * ["attend_low_lists"] + 2 * ["attend_gathered_lists"]
    if name != "plain":
        capability[0] = 8
        latent_attention.sparse_attention(hopper_call(name, 16), MagicMock(), MagicMock())
        assert taken[4:] == ["_attend_lists"]


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_tile_kernel_follows_their_height(capability, monkeypatch, name):
    taken = []
    wide, narrow = "attend_warpgroups" if name == "plain" else "attend_gathered_tiles", "_attend_tiles"
    for kernel in (wide, narrow):
        record = lambda call, work, large, kernel=kernel: taken.append((kernel, large))  # noqa: E731
        monkeypatch.setattr(latent_attention, kernel, record)
    monkeypatch.setattr(latent_attention, "merge_latents", lambda *_: taken.append("merge"))
    work = TileWork(MagicMock(), MagicMock(), has_small=True, has_large=True, has_merge=True)
    for num_heads in (16, 20, 64):
        latent_attention.latent_attention(hopper_call(name, num_heads), work)
    small = [narrow, wide if name == "plain" else narrow, wide]
    assert taken == [one for kernel in small for one in ((kernel, False), (wide, True), "merge")]


def declined(call: LatentCall) -> list[LatentCall]:
    """Return calls with one thing each that the kernels for Hopper do not take."""
    q, planes = call.q_TNX, call.planes
    queries = [q.but(is_cuda=False), q.but(dtype=torch.float32)]
    sizes = [planes._replace(latent_dim=448), planes._replace(rope_dim=32)]
    return [call._replace(q_TNX=one) for one in queries] + [call._replace(planes=one) for one in sizes]


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_kernels_decline_other_types_and_sizes(capability, name):
    call = hopper_call(name, 20)
    half = call._replace(q_TNX=call.q_TNX.but(dtype=torch.float16))
    for takes in (gathered_attention.takes_gathering, latent_low_tiles.takes_low):
        capability[0] = 9
        assert takes(call)
        assert [takes(other) for other in declined(call)] == 4 * [False]
        assert takes(half) == (name != "plain")
        capability[0] = 8
        assert not takes(call)


def test_warpgroups_take_compressed_pages_of_one_kind(capability):
    rows: Any = on_gpu(torch.zeros(1, 1, dtype=BF16))
    q: Any = on_gpu(torch.zeros(1, 64, 512, dtype=BF16))
    window = LatentPlanes("fp8_ds_v4", 448, 64, 64, rows)
    scopes = Scopes(128, window, MagicMock(), 4, window, MagicMock())

    def takes(scopes: Scopes, q: Any = q) -> bool:
        others = [MagicMock() for _ in range(3)]
        call = CompressedCall(q, scopes, *others, SCALE, *others, NUM_SMS)
        return compressed_warpgroups.takes_warpgroups(call)

    assert takes(scopes)
    assert takes(scopes._replace(entries=None))
    assert not takes(scopes._replace(entries=window._replace(kind="plain")))
    assert not takes(scopes._replace(window=window._replace(latent_dim=512)))
    assert not takes(scopes, q.but(dtype=torch.float32))
    assert not takes(scopes, q.but(is_cuda=False))
    capability[0] = 10
    assert not takes(scopes)
