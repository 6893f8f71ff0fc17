"""GPUs by name, and what a host can still give, with and without a limit on the group of processes."""

import os

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ConfigError
from holdfast.memory.devices import (
    ASSUMED,
    GIB,
    GPUS,
    PORTABLE,
    SAME_AS_H200,
    SEEN,
    Gpu,
    available_host_bytes,
    find_gpu,
    find_gpus,
)


def test_gpus_are_slightly_smaller_than_nominal() -> None:
    assert len(GPUS) >= 30
    for key, gpu in GPUS.items():
        assert gpu.key == key
        assert 0.9 * gpu.nominal_gb * GIB < gpu.total_bytes < gpu.nominal_gb * GIB, key
        assert 0 < gpu.context_bytes < GIB
        assert gpu.source.startswith((SEEN, ASSUMED, "total and context measured")), (
            "a number without a source is a rumour"
        )
        assert gpu.source.endswith(SAME_AS_H200) or gpu.source.startswith("total and context measured"), key


def test_boxes_say_what_data_sheets_say() -> None:
    """The sizes that people know cards by."""
    sizes = {24: "rtx3090 rtx4090 a10 a10g a30 l4", 32: "rtx5090 v100-32g", 48: "a40 l40 l40s rtxa6000 rtx6000-ada"}
    sizes |= {80: "h100 h100-pcie a100-80g a100-pcie-80g", 16: "t4 v100-16g rtx4080 rtx5080 rtx4060ti-16g p100"}
    sizes |= {40: "a100-40g a100-pcie-40g", 94: "h100-nvl", 96: "rtxpro6000", 141: "h200 h200-nvl", 180: "b200"}
    for nominal_gb, keys in sizes.items():
        assert {GPUS[key].nominal_gb for key in keys.split()} == {nominal_gb}


GENERATIONS = {
    (6, 0): "p100",
    (6, 1): "p40",
    (7, 0): "v100-16g v100-32g",
    (7, 5): "t4 rtx2080ti rtx8000",
    (8, 0): "a100-40g a100-pcie-40g a100-80g a100-pcie-80g a800-80g a30",
    (8, 6): "a10 a10g a40 rtxa4000 rtxa5000 rtxa6000 rtx3060 rtx3070 rtx3080 rtx3080-12g rtx3080ti rtx3090 rtx3090ti",
    (8, 9): "l4 l40 l40s rtx6000-ada rtx4060 rtx4060ti-8g rtx4060ti-16g rtx4070 rtx4070-super rtx4070ti "
    "rtx4070ti-super rtx4080 rtx4080-super rtx4090",
    (9, 0): "h100 h100-pcie h100-nvl h800 h20 h200 h200-nvl gh200",
    (10, 0): "b200 gb200",
    (10, 3): "b300 gb300",
    (12, 0): "rtx5060ti-16g rtx5070 rtx5070ti rtx5080 rtx5090 rtxpro6000",
}
"""As NVIDIA lists them."""


def test_capabilities_are_those_of_the_generations() -> None:
    listed = {key: capability for capability, keys in GENERATIONS.items() for key in keys.split()}
    assert {key: gpu.capability for key, gpu in GPUS.items()} == listed
    old = {key for key, gpu in GPUS.items() if gpu.is_too_old}
    assert old == {"p100", "p40", "v100-16g", "v100-32g", "t4", "rtx2080ti", "rtx8000"}


def test_gpus_are_sorted_by_size() -> None:
    sizes = [gpu.total_bytes for gpu in GPUS.values()]
    assert sizes == sorted(sizes)


def test_gpus_h200_size_equals_measurement() -> None:
    assert f"{GPUS['h200'].total_bytes / GIB:.1f}" == "139.8"


SPELLINGS = {
    "h200": ("h200", "H200", " NVIDIA H200 ", "h200-sxm", "H200 141GB"),
    "h200-nvl": ("h200 nvl", "NVIDIA H200 NVL"),
    "h100": (
        "h100",
        "H100",
        "h100 80gb",
        "H100-80GB",
        "h100-80",
        "H100 SXM",
        "h100_sxm5_80gb",
        "NVIDIA H100 80GB HBM3",
    ),
    "h100-pcie": ("H100-PCIe", "h100 pcie 80gb", "NVIDIA H100 PCIe"),
    "h100-nvl": ("h100-nvl", "H100 94GB", "NVIDIA H100 NVL"),
    "a100-80g": ("a100", "A100", "a100_80g", "A100 80GiB", "a100-80", "a10080gb", "NVIDIA A100-SXM4-80GB"),
    "a100-40g": ("a100-40g", "A100 40GB", "a100-sxm4-40gb"),
    "a100-pcie-40g": ("NVIDIA A100-PCIE-40GB", "a100 pcie 40g"),
    "a100-pcie-80g": ("A100-PCIe", "a100 80gb pcie", "NVIDIA A100 80GB PCIe"),
    "rtx4090": ("4090", "rtx 4090", "RTX-4090", "rtx_4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "4090 24gb"),
    "rtx3090": ("3090", "geforce rtx 3090"),
    "rtx3090ti": ("3090 Ti", "3090ti"),
    "rtx3080": ("3080", "3080 10GB"),
    "rtx3080-12g": ("rtx 3080 12gb", "3080-12g"),
    "rtx3060": ("3060", "3060 12GB"),
    "rtx4060ti-16g": ("4060 Ti", "4060ti 16gb", "rtx4060ti16g"),
    "rtx4060ti-8g": ("RTX 4060 Ti 8GB",),
    "rtx4070ti-super": ("4070 Ti Super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
    "rtx4080-super": ("4080 super", "4080S"),
    "rtx5060ti-16g": ("5060 ti 16g",),
    "rtx5070ti": ("5070ti", "RTX 5070 Ti"),
    "rtx5090": ("5090", "RTX5090"),
    "rtxa6000": ("a6000", "RTX A6000", "nvidia rtx a6000"),
    "rtx6000-ada": ("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation", "6000 Ada"),
    "rtxpro6000": ("RTX PRO 6000", "rtx pro 6000 blackwell", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    "l40s": ("L40S", "nvidia-l40s"),
    "a10g": ("A10G",),
    "a10": ("A10", "NVIDIA A10"),
    "t4": ("T4", "Tesla T4"),
    "v100-32g": ("v100", "v100-32GB"),
    "v100-16g": ("v100-16GB", "Tesla V100-SXM2-16GB"),
    "p100": ("P100", "Tesla P100-PCIE-16GB"),
    "rtx2080ti": ("2080 Ti",),
    "rtx8000": ("Quadro RTX 8000",),
    "b300": ("B300", "NVIDIA B300 SXM6 AC"),
    "gh200": ("GH200", "NVIDIA GH200 480GB"),
}


@for_each("key, name", [(key, name) for key, many in SPELLINGS.items() for name in many])
def test_find_gpu_accepts_other_spellings(key: str, name: str) -> None:
    assert find_gpu(name).key == key


def test_find_gpu_cases_cover_forty_spellings() -> None:
    assert sum(map(len, SPELLINGS.values())) >= 40


@for_each("gpu", GPUS.values())
def test_find_gpu_accepts_key_and_driver_name(gpu: Gpu) -> None:
    assert find_gpu(gpu.key) is gpu
    assert find_gpu(gpu.name).name == gpu.name, "of two sizes with one name the usual one is taken"
    assert find_gpu(gpu.key.replace("-", " ").upper()) is gpu


@pytest.mark.parametrize(
    ("name", "num_gpus", "key"),
    [
        ("2x4090", 2, "rtx4090"),
        ("2 x h100", 2, "h100"),
        ("8xH100-SXM", 8, "h100"),
        ("h100x2", 2, "h100"),
        ("4090x2", 2, "rtx4090"),
        ("4090 x 2", 2, "rtx4090"),
        ("2 x 4090", 2, "rtx4090"),
        ("rtx4090*2", 2, "rtx4090"),
        ("3090Ti X4", 4, "rtx3090ti"),
        ("4 * L40S", 4, "l40s"),
        ("8\N{MULTIPLICATION SIGN} a100-80gb", 8, "a100-80g"),
        ("rtx3090", 1, "rtx3090"),
    ],
)
def test_find_gpus_reads_number_of_gpus(name: str, num_gpus: int, key: str) -> None:
    found = find_gpus(name)
    assert (found.gpu.key, found.num_gpus) == (key, num_gpus)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("a100", "'a100' is taken as a100-80g, with 80 GB; there is a100-40g too"),
        ("V100", "'V100' is taken as v100-32g, with 32 GB; there is v100-16g too"),
        ("2xh100", "'2xh100' is taken as h100, with 80 GB; there is h100-nvl too"),
        ("3080", "'3080' is taken as rtx3080, with 10 GB; there is rtx3080-12g too"),
        ("a100-80g", None),
        ("h100 80gb", None),
        ("4090", None),
    ],
)
def test_find_gpus_ambiguous_name_has_note(name: str, note: str | None) -> None:
    assert find_gpus(name).note == note


@pytest.mark.parametrize(
    ("name", "near"), [("h10", "h100"), ("rtx409", "rtx4090"), ("h100 96gb", "h100-nvl"), ("rtx 6000", "rtx6000-ada")]
)
def test_find_gpu_unknown_name_suggests_nearest(name: str, near: str) -> None:
    with raises_code("device.unknown_gpu", ConfigError, value=name) as caught:
        find_gpu(name)
    assert near in caught.value.hints[0]


@pytest.mark.parametrize("name", ["2080 laptop", "mx300", "2x", "x2", "2x2"])
def test_find_gpu_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"none of the \d+ GPUs known by name"):
        find_gpu(name)


def test_find_gpus_with_an_absurd_number_is_refused() -> None:
    for name in ("0x4090", "9999x4090", "4090x0", "4090x9999", "rtx4090 x 99999", "2000 x h100"):
        with raises_code("value.out_of_range", ConfigError, name="gpu", maximum=1024):
            find_gpus(name)


def test_find_gpu_of_nonsense_says_what_to_pass() -> None:
    for name in ("", "   ", "x" * 10_000, "mi300x\n\x1b[31m", "🦆"):
        with raises_code("device.unknown_gpu", ConfigError) as caught:
            find_gpu(name)
        assert "ass its memory, such as --memory 24GiB." in str(caught.value)
        assert len(str(caught.value)) < 600
        assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(("name", "nearest"), [("h100-sxm-64g", "h100"), ("a100-64g", "a100")])
def test_find_gpu_suggests_same_family_first(name: str, nearest: str) -> None:
    with raises_code("device.unknown_gpu", ConfigError) as caught:
        find_gpu(name)
    assert caught.value.hints[0].startswith(f"Did you mean {nearest}")


GIB_HOST = 1024**3
MEMINFO = f"MemTotal: {16 * 1024**2} kB\nMemFree: 1 kB\nMemAvailable:   {8 * 1024**2} kB\nSwapFree: 5 kB\n"


@pytest.fixture
def host(tmp_path):
    """host(meminfo, **cgroup files) -> what it says is available; None leaves a file out."""

    def ask(meminfo=MEMINFO, **files):
        cgroup = tmp_path / "cgroup"
        cgroup.mkdir(exist_ok=True)
        for name, text in files.items():
            (cgroup / name.replace("_", ".")).write_text(text)
        path = tmp_path / "meminfo"
        if meminfo is not None:
            path.write_text(meminfo)
        return available_host_bytes(path, cgroup)

    return ask


def test_available_host_bytes_reads_meminfo(host):
    assert host() == 8 * GIB_HOST


def test_available_host_bytes_cgroup_without_limit_is_ignored(host):
    assert host(memory_max="max\n", memory_current=f"{5 * GIB}\n") == 8 * GIB_HOST


def test_available_host_bytes_is_bounded_by_cgroup(host):
    assert host(memory_max=f"{4 * GIB}\n", memory_current=f"{3 * GIB}\n") == GIB_HOST


def test_available_host_bytes_wider_cgroup_adds_nothing(host):
    assert host(memory_max=f"{64 * GIB}\n", memory_current=f"{GIB}\n") == 8 * GIB_HOST


def test_file_cache_can_be_taken_back(host):
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"
    assert host(memory_max=f"{4 * GIB}", memory_current=f"{3 * GIB}", memory_stat=stat) == 2 * GIB_HOST


def test_available_host_bytes_cgroup_over_limit_is_zero(host):
    assert host(memory_max=f"{GIB}", memory_current=f"{3 * GIB}") == 0


@pytest.mark.parametrize("stat", ["", "inactive_file many\n", "one two three\n"], ids=["empty", "words", "columns"])
def test_statistics_that_cannot_be_read_count_nothing(host, stat):
    assert host(memory_max=f"{4 * GIB}", memory_current=f"{3 * GIB}", memory_stat=stat) == GIB_HOST


@pytest.mark.parametrize(
    "meminfo",
    [None, "", "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: lots kB\n"],
    ids=["missing", "empty", "old kernel", "no number", "no digits"],
)
def test_available_host_bytes_without_meminfo_is_half_of_ram(host, meminfo):
    assert host(meminfo) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_available_host_bytes_of_this_machine_is_within_ram():
    assert 0 < available_host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "name", ["mi300x", "MI250X", "2xmi300x", "AMD Instinct MI355X", "rx7900xtx", "Radeon RX 7900 XTX"]
)
def test_find_gpus_of_amd_names_what_is_needed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"AMD GPUs are not supported.*NVIDIA GPU of compute capability 8\.0"):
        find_gpus(name)


@pytest.mark.parametrize(
    ("name", "key", "nominal_gb"),
    [
        ("rtx4090 laptop", "rtx4090-laptop", 16),
        ("4070m", "rtx4070-laptop", 8),
        ("rtx 5090 mobile", "rtx5090-laptop", 24),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx4060-laptop", 8),
        ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", "rtx3070ti-laptop", 8),
        ("rtx 3080 laptop 16gb", "rtx3080-laptop-16g", 16),
        ("4080 notebook", "rtx4080-laptop", 12),
        ("rtx4090", "rtx4090", 24),
        ("rtx 4090 pcie", "rtx4090", 24),
        ("dgx spark", "gb10", 128),
        ("NVIDIA GB10", "gb10", 128),
    ],
)
def test_find_gpu_of_a_laptop_has_its_own_memory(name: str, key: str, nominal_gb: int) -> None:
    found = find_gpu(name)
    assert (found.key, found.nominal_gb) == (key, nominal_gb)
    assert found.total_bytes < nominal_gb * 1024**3


def test_portable_gpus_find_themselves_and_are_apart() -> None:
    for key, gpu in PORTABLE.items():
        assert find_gpu(key) == gpu
        assert not gpu.is_too_old
    assert not PORTABLE.keys() & GPUS.keys()
    assert find_gpus("4090").note is None, "a desktop card is not taken for that of a laptop"


def test_find_gpus_of_a_dgx_spark_says_it_was_never_tried() -> None:
    note = find_gpus("dgx spark").note
    assert note is not None
    assert "shared with the operating system" in note
    assert "never run on it" in note


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "an AMD GPU: AMD GPUs are not supported") for name in ("mi300x", "7900 xtx", "9070xt", "strix halo")),
        *(
            (name, "an Apple chip.*llama.cpp or MLX")
            for name in ("m4 max", "m3 ultra", "mac studio 128gb", "MacBook Pro")
        ),
        *((name, "an Intel GPU") for name in ("arc b580", "Intel Arc A770", "gaudi 3")),
        *((name, "no GPU.*leave --gpu out") for name in ("cpu", "none")),
        *((name, "a TPU") for name in ("tpu v5e", "v5p", "trillium")),
        *((name, "a Jetson module.*--memory 48GiB") for name in ("orin", "jetson agx orin 64gb", "thor")),
        *((name, "an accelerator without CUDA") for name in ("trainium", "inferentia2")),
    ],
)
def test_find_gpus_of_another_device_says_what_to_do(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"is {words}"):
        find_gpus(name)
