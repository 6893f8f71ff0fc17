import os

import pytest

from holdfast.memory.devices import available_host_bytes

GIB = 1024**3
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
    assert host() == 8 * GIB


def test_a_control_group_without_a_limit(host):
    assert host(memory_max="max\n", memory_current=f"{5 * GIB}\n") == 8 * GIB


def test_a_control_group_bounds_it(host):
    assert host(memory_max=f"{4 * GIB}\n", memory_current=f"{3 * GIB}\n") == GIB


def test_a_wider_control_group_does_not_add_to_it(host):
    assert host(memory_max=f"{64 * GIB}\n", memory_current=f"{GIB}\n") == 8 * GIB


def test_file_cache_can_be_taken_back(host):
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"
    assert host(memory_max=f"{4 * GIB}", memory_current=f"{3 * GIB}", memory_stat=stat) == 2 * GIB


def test_a_control_group_that_is_over_its_limit(host):
    assert host(memory_max=f"{GIB}", memory_current=f"{3 * GIB}") == 0


@pytest.mark.parametrize("stat", ["", "inactive_file many\n", "one two three\n"], ids=["empty", "words", "columns"])
def test_statistics_that_cannot_be_read_count_nothing(host, stat):
    assert host(memory_max=f"{4 * GIB}", memory_current=f"{3 * GIB}", memory_stat=stat) == GIB


@pytest.mark.parametrize(
    "meminfo",
    [None, "", "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: lots kB\n"],
    ids=["missing", "empty", "old kernel", "no number", "no digits"],
)
def test_without_the_kernel_s_word_half_of_what_is_built_in(host, meminfo):
    assert host(meminfo) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_this_machine():
    assert 0 < available_host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
