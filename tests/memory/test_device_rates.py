"""Rates of devices: data sheets that are plausible, measurements kept and found again, assumptions for the rest."""

import json
from pathlib import Path

import pytest

from for_each import for_each
from holdfast.memory import device_rates
from holdfast.memory.cache_folder import CACHE_VARIABLE
from holdfast.memory.device_rates import (
    MEASURED_FILE,
    Measured,
    assumed_cpu_rates,
    cpu_identity,
    measured_cpu,
    measured_gpu,
    read_measured,
    sheet_rates,
    with_measured,
    write_measured,
)
from holdfast.memory.devices import LEAST_CAPABILITY, PLANNED_GPUS

H200 = Measured("NVIDIA H200", 150_109_880_320, 4.3e12, 780e12, "2026-11-18")


def test_sheets_of_all_known_gpus_are_there() -> None:
    assert all(gpu.sheet.gigabytes > 0 for gpu in PLANNED_GPUS.values())


@for_each("key", PLANNED_GPUS)
def test_bandwidth_of_a_sheet_is_bus_width_times_pin_rate(key: str) -> None:
    sheet = PLANNED_GPUS[key].sheet
    assert sheet.gigabytes == pytest.approx(sheet.bus_bits / 8 * sheet.pin_gigabits, rel=0.015)


@for_each("key", PLANNED_GPUS)
def test_products_of_a_sheet_fit_its_generation(key: str) -> None:
    sheet, capability = PLANNED_GPUS[key].sheet, PLANNED_GPUS[key].capability
    if capability >= (8, 9):
        assert sheet.fp8 == pytest.approx(2 * sheet.bfloat16, rel=0.03)
    else:
        assert sheet.fp8 == 0.0
    # A product of a row with a weight reads far longer than it multiplies, on every GPU that kernels run on.
    if capability >= LEAST_CAPABILITY:
        assert 30 < sheet.bfloat16 * 1e3 / sheet.gigabytes < 500


RISING = (
    "rtx3060 rtx3070 rtx3080 rtx3080-12g rtx3090ti",
    "rtx4060 rtx4060ti-16g rtx4070 rtx4070ti-super rtx4080 rtx4080-super rtx4090 rtx5090",
    "rtx5060ti-16g rtx5070 rtx5070ti rtx5080 rtx5090",
    "rtx4050-laptop rtx4060-laptop rtx4080-laptop rtx4090-laptop rtx5090-laptop",
    "rtxa4000 rtxa5000 rtx6000-ada rtxpro6000",
    "t4 a10 a40 l40s",
    "p100 v100-32g a100-40g a100-80g h100 h200 b200 gb300",
)


@pytest.mark.parametrize("keys", RISING)
def test_newer_and_larger_gpus_are_faster(keys: str) -> None:
    found = [PLANNED_GPUS[key].sheet for key in keys.split()]
    assert [sheet.gigabytes for sheet in found] == sorted(sheet.gigabytes for sheet in found)
    assert [sheet.bfloat16 for sheet in found] == sorted(sheet.bfloat16 for sheet in found)


def test_rates_of_an_h200_are_those_that_were_measured() -> None:
    rates = sheet_rates("h200")
    assert rates.read_bytes_per_second == pytest.approx(4.37e12)
    assert rates.flops_per_second == pytest.approx(790e12)
    assert rates.link == "nvlink"
    assert sheet_rates("rtx4090").link == "pcie"


def test_assumed_cpu_grows_with_cores_up_to_its_memory() -> None:
    few, some, many = (assumed_cpu_rates(cores) for cores in (2, 4, 64))
    assert few.read_bytes_per_second < some.read_bytes_per_second < many.read_bytes_per_second <= 60e9
    assert many.flops_per_second == 32 * few.flops_per_second


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_measured_rates_are_kept_by_device(folder: Path) -> None:
    cpu = Measured(cpu_identity(), 0, 24e9, 70e9, "2026-11-17")
    assert read_measured() == ()
    assert not folder.exists()
    write_measured([cpu, H200])
    later = cpu._replace(read_bytes_per_second=25e9, date="2026-11-18")
    path = write_measured([later])
    assert path == folder / MEASURED_FILE
    assert read_measured() == (H200, later)
    assert measured_cpu(read_measured()) == later
    assert measured_gpu(read_measured(), "NVIDIA H200", 149 * 10**9) == H200
    assert measured_gpu(read_measured(), "NVIDIA H200", 120 * 10**9) is None
    assert measured_gpu(read_measured(), "NVIDIA H100 PCIe", H200.total_bytes) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2, "devices": []}',
        '{"version": 1}',
        '{"version": 1, "devices": [{"device": "x"}]}',
        json.dumps({"version": 1, "devices": [H200._replace(flops_per_second=0)._asdict()]}),
        json.dumps({"version": 1, "devices": [H200._replace(read_bytes_per_second=1e30)._asdict()]}),
        json.dumps({"version": 1, "devices": [{**H200._asdict(), "flops_per_second": "fast"}]}),
        json.dumps({"version": 1, "devices": [{**H200._asdict(), "total_bytes": "large"}]}),
    ],
)
def test_measured_file_that_is_broken_is_passed_over(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / MEASURED_FILE).write_text(content)
    assert read_measured() == ()


def test_cache_variable_without_a_home_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "~no-user-of-this-name/x")
    assert read_measured() == ()


def test_measured_rates_take_the_place_of_the_sheet() -> None:
    rates = with_measured(sheet_rates("h200"), H200)
    assert rates.read_bytes_per_second == 4.3e12
    assert rates.flops_per_second == 780e12
    assert rates.fp8_flops_per_second == pytest.approx(1560e12, rel=0.01)


def test_cpu_identity_names_model_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "num_cores", lambda: 6)
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_identity(file).endswith("Some CPU @ 2 GHz, 6 cores")
    assert cpu_identity(tmp_path / "missing").endswith(", 6 cores")
