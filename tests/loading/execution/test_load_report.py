from holdfast.loading.execution.execute import LoadReport

REPORT = LoadReport(
    seconds=2.0,
    read_bytes=30 * 10**9,
    read_seconds=9.5,
    num_readers=8,
    copy_seconds=0.75,
    place_seconds=0.25,
    final_bytes=15 * 10**9,
    staging_bytes=32 * 2**20,
    pinned_bytes=192 * 2**20,
    peak_allocated_bytes=None,
    peak_reserved_bytes=None,
    device_used_bytes=None,
    peak_anonymous_bytes=None,
)


def test_bytes_per_second_and_words():
    assert REPORT.bytes_per_second == 15e9
    assert REPORT.words == "30.00 GB in 2.00 s, 15.0 GB/s; reading 9.50 s in 8 threads; copying 0.75 s; placing 0.25 s"


def test_a_load_of_nothing_divides_by_nothing():
    from dataclasses import replace

    empty = replace(REPORT, seconds=0.0, read_bytes=0, num_readers=0, copy_seconds=0.0, place_seconds=0.0)
    assert empty.bytes_per_second == 0
    assert empty.words == "0.00 GB in 0.00 s, 0.0 GB/s; placing 0.00 s"
