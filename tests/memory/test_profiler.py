"""What the device says: measured at the end of each phase, above what was there before, and held against the plan."""

import mmap
import os
from pathlib import Path

import pytest

from holdfast.memory.planner import Term, plan_memory
from holdfast.memory.profiler import DeviceBytes, PhaseProfile, anonymous_bytes, measure, take_peak_bytes

MIB = 2**20


class PretendDevice:
    """A device with a neighbour on it, and an allocator that counts."""

    def __init__(self, before: int) -> None:
        self.others = before
        self.allocated = self.peak = self.reserved = 0

    def take(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def measure(self, device: object) -> DeviceBytes:
        assert device == "pretend"
        return DeviceBytes(self.allocated, self.reserved, self.others + self.reserved, 1000 * MIB)

    def take_peak(self, device: object) -> int:
        assert device == "pretend"
        peak, self.peak = self.peak, self.allocated
        return peak


def profiled() -> tuple[PretendDevice, PhaseProfile]:
    device = PretendDevice(300 * MIB)
    device.take(50 * MIB)  # another engine of the same process
    return device, PhaseProfile("pretend", device.measure, device.take_peak)


def test_phases_are_measured_above_what_was_there() -> None:
    device, profile = profiled()
    device.take(100 * MIB)
    device.take(20 * MIB)
    device.take(-20 * MIB)
    device.reserved -= 20 * MIB
    load = profile.end("load")
    device.take(200 * MIB)
    capture = profile.end("capture")
    serve = profile.end("serve")
    assert load is not None
    assert capture is not None
    assert serve is not None
    assert (load.taken_bytes, load.peak_allocated_bytes) == (100 * MIB, 120 * MIB)
    assert (capture.taken_bytes, capture.peak_allocated_bytes) == (300 * MIB, 300 * MIB)
    assert (serve.taken_bytes, serve.peak_allocated_bytes) == (300 * MIB, 300 * MIB), "a peak begins anew in each phase"
    assert profile.taken_bytes == 300 * MIB
    assert load.at_end.used == (300 + 50 + 100) * MIB


def test_phase_profile_compare_lists_planned_and_measured() -> None:
    device, profile = profiled()
    device.take(100 * MIB)
    profile.end("load")
    device.take(40 * MIB)
    profile.end("serve")
    terms = (Term("weights", 100 * MIB, ""), Term("staging", 8 * MIB, "", ("load",)), Term("context", 5 * MIB, ""))
    plan = plan_memory(1000 * MIB, "", terms, MIB, 1, 30)
    load, serve = profile.compare(plan, before_bytes=5 * MIB)
    assert (load.phase, load.planned_bytes, load.measured_bytes) == ("load", 113 * MIB, 105 * MIB)
    assert (serve.phase, serve.planned_bytes, serve.measured_bytes) == ("serve", 135 * MIB, 145 * MIB)
    assert serve.peak_allocated_bytes == 140 * MIB


def test_serving_can_be_measured_again_and_again() -> None:
    device, profile = profiled()
    profile.end("serve")
    device.take(5 * MIB)
    device.take(-5 * MIB)
    profile.end("serve")
    again = profile.end("serve")
    assert again is not None
    assert again.peak_allocated_bytes == 5 * MIB, "a peak of the phase is forgotten"
    with pytest.raises(AssertionError, match="cannot end after"):
        profile.end("load")
    with pytest.raises(AssertionError, match="must be one of"):
        profile.end("lunch")


def test_phase_profile_taken_bytes_is_none_when_others_release() -> None:
    """A rank would tell a number below zero, which no rank may."""
    device, profile = profiled()
    device.take(20 * MIB)
    device.others -= 30 * MIB
    profile.end("load")
    assert profile.taken_bytes is None
    device.take(30 * MIB)
    profile.end("capture")
    assert profile.taken_bytes == 20 * MIB


def test_phase_profile_of_meta_device_measures_nothing() -> None:
    profile = PhaseProfile("meta")
    assert profile.end("load") is None
    assert profile.taken_bytes is None
    assert profile.compare(plan_memory(MIB, "", (), 1, 1, 1)) == ()
    assert measure("meta") is None


def test_this_process_on_a_cpu() -> None:
    found = measure("cpu")
    assert found is not None
    assert found.allocated == found.reserved == found.used
    assert MIB < found.used < found.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert take_peak_bytes("cpu") is None


def test_phase_profile_of_cpu_reads_resident_bytes(tmp_path: Path) -> None:
    path, page = tmp_path / "statm", os.sysconf("SC_PAGE_SIZE")
    path.write_text("900 100 50 1 0 200 0\n")
    profile = PhaseProfile("cpu", lambda device: measure(device, path))
    path.write_text("900 350 50 1 0 200 0\n")
    found = profile.end("load")
    assert found is not None
    assert found.at_end.used == 350 * page
    assert found.taken_bytes == found.peak_allocated_bytes == 250 * page


@pytest.mark.parametrize("text", [None, "", "1", "1 two 3"], ids=["missing", "empty", "one column", "words"])
def test_measure_cpu_without_statm_is_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "statm"
    if text is not None:
        path.write_text(text)
    assert measure("cpu", path) is None


@pytest.mark.gpu
@pytest.mark.alone
def test_phase_profile_of_gpu_reads_allocator_peak() -> None:
    import torch

    device = torch.device("cuda")
    profile = PhaseProfile(device)
    held = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    gone = torch.empty(128 * MIB, dtype=torch.uint8, device=device)
    del gone
    torch.cuda.empty_cache()
    found = profile.end("load")
    assert found is not None
    assert found.peak_allocated_bytes == 384 * MIB
    assert abs(found.taken_bytes - held.nbytes) <= 4 * MIB
    assert found.at_end.allocated <= found.at_end.reserved <= found.at_end.used <= found.at_end.total
    second = profile.end("serve")
    assert second is not None
    assert second.peak_allocated_bytes == held.nbytes


def test_anonymous_bytes_grows_with_writes_or_is_none(tmp_path: Path) -> None:
    before = anonymous_bytes()
    if before is None:
        pytest.skip("the system does not tell")
    # Pages straight from the system: malloc could hand back some that a test before this one has left resident.
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for start in range(0, len(block), mmap.PAGESIZE):
            block[start] = 1
        grown = (anonymous_bytes() or 0) - before
    assert 60 * MIB < grown < 80 * MIB
    assert anonymous_bytes(tmp_path / "absent") is None
    (tmp_path / "status").write_text("Name: x\nRssAnon:\t   12 kB\n")
    assert anonymous_bytes(tmp_path / "status") == 12 * 1024
    (tmp_path / "status").write_text("RssAnon: none kB\n")
    assert anonymous_bytes(tmp_path / "status") is None
