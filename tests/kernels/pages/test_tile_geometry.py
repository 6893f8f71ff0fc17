import subprocess
import sys

import pytest

from holdfast.kernels.geometry import TileGeometry

PLAIN = TileGeometry(2, 16, small_programs_per_sm=4, large_programs_per_sm=2, block_tokens=64)


@pytest.mark.parametrize("num_rows", [1, 2, 8192])
def test_the_programs_are_the_same_for_any_step(num_rows):
    assert PLAIN.small_programs(num_rows) == 4


@pytest.mark.parametrize(("num_rows", "programs"), [(0, 3), (1, 3), (2, 3), (3, 4), (8192, 4)])
def test_or_fewer_for_few_rows(num_rows, programs):
    assert PLAIN._replace(few_rows=2, few_programs_per_sm=3).small_programs(num_rows) == programs


def test_nothing_more_is_asked_of_a_list_unless_it_is_said():
    assert not PLAIN.has_aligned_starts
    assert not PLAIN.takes_whole_turns


def test_it_is_known_without_torch():
    code = "import sys, holdfast.kernels.geometry; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
