"""GPUs by name, and what a host can still give, with and without a limit on the group of processes."""

import os

import pytest

from holdfast.errors import ConfigError
from holdfast.memory.devices import ASSUMED, GIB, GPUS, SAME_AS_H200, SEEN, available_host_bytes, find_gpu

NOMINAL_GB = {
    "h200": 141,
    "h100": 80,
    "h100-nvl": 94,
    "a100-80g": 80,
    "a100-40g": 40,
    "l40s": 48,
    "l4": 24,
    "a10": 24,
    "t4": 16,
    "v100-32g": 32,
    "v100-16g": 16,
    "rtx3090": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "rtx4080": 16,
    "rtx3060": 12,
    "rtxa6000": 48,
    "rtxpro6000": 96,
    "b200": 192,
}


def test_every_gpu_is_a_little_smaller_than_its_box_says() -> None:
    assert GPUS.keys() == NOMINAL_GB.keys()
    for key, gpu in GPUS.items():
        assert gpu.key == key
        assert 0.9 * NOMINAL_GB[key] * GIB < gpu.total_bytes < NOMINAL_GB[key] * GIB, key
        assert 0 < gpu.context_bytes < GIB
        assert gpu.source.startswith((SEEN, ASSUMED, "total and context measured")), (
            "a number without a source is a rumour"
        )
        assert gpu.source.endswith(SAME_AS_H200) or gpu.source.startswith("total and context measured"), key


def test_capabilities_are_those_of_the_generations() -> None:
    capable = {key for key, gpu in GPUS.items() if gpu.capability >= (8, 9)}
    old = {"rtx3060", "t4", "v100-16g", "v100-32g", "a10", "rtx3090", "a100-40g", "a100-80g", "rtxa6000"}
    assert GPUS.keys() - capable == old, "these have no products in fp8"
    assert GPUS["h200"].capability == GPUS["h100"].capability == (9, 0)


def test_the_smallest_come_first() -> None:
    sizes = [gpu.total_bytes for gpu in GPUS.values()]
    assert sizes == sorted(sizes)


def test_an_h200_is_as_measured() -> None:
    assert f"{GPUS['h200'].total_bytes / GIB:.1f}" == "139.8"


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        (" NVIDIA H200 ", "h200"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("a100_80g", "a100-80g"),
        ("A100", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("a6000", "rtxa6000"),
    ],
)
def test_spellings(asked: str, key: str) -> None:
    assert find_gpu(asked).key == key


@pytest.mark.parametrize(("asked", "near"), [("h20", "h200"), ("rtx409", "rtx4090"), ("a100-80", "a100-80g")])
def test_the_nearest_is_suggested(asked: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"gpu='{asked}' was asked; .*did you mean .*{near}"):
        find_gpu(asked)


@pytest.mark.parametrize("asked", ["", "   ", "x" * 10_000, "mi300x\n\x1b[31m", "🦆"])
def test_nonsense_is_told_what_to_pass(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"pass a memory size such as 24GiB|did you mean") as caught:
        find_gpu(asked)
    assert len(str(caught.value)) < 600
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "key"),
    [("a100-40gb", "a100-40g"), ("A100 80GiB", "a100-80g"), ("H100-80GB", "h100"), ("v100-16GB", "v100-16g")],
)
def test_sizes_in_names_are_spelt_in_many_ways(asked: str, key: str) -> None:
    assert find_gpu(asked) is GPUS[key]


@pytest.mark.parametrize(("asked", "nearest"), [("4090", "rtx4090"), ("h100-sxm-80g", "h100"), ("a100-64g", "a100")])
def test_the_family_comes_first_among_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(asked)
    assert caught.value.do.startswith(f"did you mean {nearest}")


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


def test_the_kernel_s_word(host):
    assert host() == 8 * GIB_HOST


def test_a_control_group_without_a_limit(host):
    assert host(memory_max="max\n", memory_current=f"{5 * GIB}\n") == 8 * GIB_HOST


def test_a_control_group_bounds_it(host):
    assert host(memory_max=f"{4 * GIB}\n", memory_current=f"{3 * GIB}\n") == GIB_HOST


def test_a_wider_control_group_does_not_add_to_it(host):
    assert host(memory_max=f"{64 * GIB}\n", memory_current=f"{GIB}\n") == 8 * GIB_HOST


def test_file_cache_can_be_taken_back(host):
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"
    assert host(memory_max=f"{4 * GIB}", memory_current=f"{3 * GIB}", memory_stat=stat) == 2 * GIB_HOST


def test_a_control_group_that_is_over_its_limit(host):
    assert host(memory_max=f"{GIB}", memory_current=f"{3 * GIB}") == 0


@pytest.mark.parametrize("stat", ["", "inactive_file many\n", "one two three\n"], ids=["empty", "words", "columns"])
def test_statistics_that_cannot_be_read_count_nothing(host, stat):
    assert host(memory_max=f"{4 * GIB}", memory_current=f"{3 * GIB}", memory_stat=stat) == GIB_HOST


@pytest.mark.parametrize(
    "meminfo",
    [None, "", "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: lots kB\n"],
    ids=["missing", "empty", "old kernel", "no number", "no digits"],
)
def test_without_the_kernel_s_word_half_of_what_is_built_in(host, meminfo):
    assert host(meminfo) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_this_machine():
    assert 0 < available_host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
