"""`holdfast doctor --measure`: devices timed in another process with tiny sizes, reported beside data sheets, kept for plans."""

import json
from pathlib import Path

import pytest

from holdfast.cli import doctor, measure, rate_probe
from holdfast.cli.measure import Measurement, rate_rows, read_facts
from holdfast.kernels.native_library import NATIVE_VARIABLE
from holdfast.memory.cache_folder import CACHE_VARIABLE
from holdfast.memory.device_rates import Measured, cpu_identity, measured_cpu, read_measured
from holdfast.memory.devices import GPUS

CPU = Measured("some cpu, 2 cores", 0, 2.4e10, 7e10)
H200 = Measured("NVIDIA H200", GPUS["h200"].total_bytes, 4.3e12, 7.8e14)


def fact(measured: Measured) -> dict[str, object]:
    """As the probe tells it."""
    found = measured._asdict()
    del found["date"]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without compiled kernels: another process takes plain torch. This one remembers which it has, so it must not look."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(NATIVE_VARIABLE, "0")
    return tmp_path / "cache"


def test_probe_of_this_cpu_gives_rates() -> None:
    facts: list[dict[str, object]] = []
    rate_probe.probe(rate_probe.TINY, facts.append)
    assert facts[0] == {"next": cpu_identity()}
    (cpu, *_) = read_facts(map(json.dumps, facts)).devices
    assert cpu.is_cpu
    assert cpu.device == cpu_identity()
    assert cpu.read_bytes_per_second > 1e6
    assert cpu.flops_per_second > 1e6


@pytest.mark.slow
def test_measure_of_this_cpu_is_kept_for_plans(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    found = measure.measure(("tiny",))
    kept = measured_cpu(read_measured())
    assert kept is not None
    assert kept in found.devices
    assert Path(found.path).parent == folder
    assert f"measuring {cpu_identity()} ..." in capsys.readouterr().err


def test_lines_of_the_probe_become_rates_and_problems() -> None:
    lines = [
        json.dumps(one) for one in ({"next": "x"}, fact(CPU), {"problem": "y: no memory"}, fact(H200), {"odd": 1}, 3)
    ]
    found = read_facts(["a library says hello", *lines, "{"])
    assert [one.device for one in found.devices] == ["some cpu, 2 cores", "NVIDIA H200"]
    assert found.problems == ("y: no memory",)
    assert all(one.date for one in found.devices)


def test_rate_rows_show_the_data_sheet() -> None:
    devices = CPU, H200, H200._replace(device="new")
    rows = dict(rate_rows(Measurement(devices, ("busy",), "cache/file")))
    assert rows["some cpu, 2 cores"] == "reads 24.0 GB/s, multiplies 70.0 GFLOP/s in float32"
    assert rows["NVIDIA H200"] == (
        "reads 4,300.0 GB/s (data sheet 4,800), multiplies 780.0 TFLOP/s in bfloat16 (data sheet 989)"
    )
    assert rows["new"].endswith("no GPU of this name is known to holdfast plan")
    assert rows["note"] == "busy"
    assert rows["stored in"].startswith("cache/file")


def test_probe_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(measure, "PROBE", "raise SystemExit('no torch here')")
    assert measure.measure() == Measurement((), ("no torch here",))
    assert not folder.exists()


def test_measure_in_a_read_only_folder_reports_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.write_text("a file")
    monkeypatch.setattr(measure, "PROBE", f"print({json.dumps(fact(CPU))!r})")
    found = measure.measure()
    assert found.devices[0].device == "some cpu, 2 cores"
    assert any(problem.startswith("the rates are not stored") for problem in found.problems)


@pytest.mark.parametrize("as_json", [True, False])
def test_doctor_with_measure_shows_rates(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", doctor.Facts)
    monkeypatch.setattr(doctor, "measure", lambda: Measurement((CPU,), (), "cache/file"))
    doctor.doctor(doctor.DoctorOptions(as_json, measure=True), {})
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["measured"]["devices"][0]["read_bytes_per_second"] == 2.4e10
    else:
        assert printed.startswith("measured\n  some cpu, 2 cores")
    doctor.doctor(doctor.DoctorOptions(as_json), {})
    assert "some cpu" not in capsys.readouterr().out


def test_probe_passes_over_a_gpu_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor = "Some GPU", 9, 0

    def fail(index: int, sizes: rate_probe.Sizes) -> dict[str, object]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(rate_probe.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rate_probe.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(rate_probe.torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(rate_probe, "measure_gpu", fail)
    facts: list[dict[str, object]] = []
    rate_probe.probe(rate_probe.TINY, facts.append)
    assert facts[-2:] == [{"next": "Some GPU"}, {"problem": "Some GPU: CUDA out of memory"}]


@pytest.mark.gpu
def test_measured_rates_of_a_gpu_are_near_its_data_sheet() -> None:
    (found,) = read_facts([json.dumps(rate_probe.measure_gpu(0, rate_probe.Sizes(seconds=0.5)))]).devices
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == found.device), None)
    if gpu is None:
        pytest.skip(f"no data sheet of {found.device}")
    sheet = gpu.sheet
    assert 0.7 < found.read_bytes_per_second / (sheet.gigabytes * 1e9) < 1.02
    assert 0.5 < found.flops_per_second / (sheet.bfloat16 * 1e12) < 1.05
