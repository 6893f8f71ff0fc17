import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.kernels.load.place_kernels import Pointer, RowLaunch, Tile

PROGRAM = Path(__file__).parent.parent / "row_launch_program.py"
TILE = Tile(4, 32, 2)


class Kernel:
    """Notes its launches, and gives a program that does."""

    def __init__(self, log, name="kernel"):
        self.log, self.name = log, name

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.log.append((self.name, grid, arguments, options))
            return Kernel(self.log, "program")

        return launch


def test_a_launch_is_of_all_tiles_with_arguments_in_order():
    log = []
    RowLaunch(Kernel(log), TILE, 3, (64, 1), (True, "x")).start(9, "a", "b", 5)
    assert log == [("kernel", (9,), ("a", "b", 5, 9, 64, 1, True, "x"), {"num_warps": 2})]


def test_no_rows_are_no_launch():
    log = []
    launch = RowLaunch(Kernel(log), TILE, 3, (), ())
    launch.start(0)
    for _ in range(2):
        launch.start_at(0, 16)
    assert log == []
    launch.start_at(1, 16)
    launch.start_at(0, 16)
    assert len(log) == 1
    RowLaunch(Kernel(log), TILE, 0, (), ()).start(5)
    assert len(log) == 1


def test_a_program_is_asked_for_once_and_only_started_where_all_is_aligned():
    log = []
    launch = RowLaunch(Kernel(log), TILE, 1, (64,), ())
    for addresses in (8, 16, 32, 40, 48):
        launch.start_at(4, addresses, "a")
    assert [(name, grid) for name, grid, _, _ in log] == [
        ("kernel", (1,)),
        ("kernel", (1,)),
        ("program", (1, 1, 1)),
        ("kernel", (1,)),
        ("program", (1, 1, 1)),
    ]
    assert log[2][2:] == (("a", 4, 64), {})


def test_a_pointer_is_an_address_and_a_type():
    pointer = Pointer(torch.int16)
    pointer.address = 48
    assert (pointer.data_ptr(), pointer.dtype) == (48, torch.int16)


def test_triton_takes_a_pointer_for_a_tensor_at_the_same_address():
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    memory = torch.empty(64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :][:32]
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.float16, torch.float32):
        pointer = Pointer(dtype)
        for start in (0, 8):
            tensor = memory[start : start + 8].view(dtype)
            pointer.address = tensor.data_ptr()
            for is_told in (True, False):
                asked = False, is_told, True
                assert jit.native_specialize_impl(backend, pointer, *asked) == jit.native_specialize_impl(
                    backend, tensor, *asked
                )


def test_compiled_kernels_are_started_over_addresses(tmp_path):
    """A program that is at hand gets what the launch before it gave, in the same order."""
    cases = ("plain", "peak", "row", "tensor", "block", "power")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(PROGRAM), *cases]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for case, (first, second, other) in json.loads(ran.stdout).items():
        assert first["program"] == second["program"] != other["program"], case
        assert first["types"] == second["types"] == other["types"], case
        assert first["aligned"] == ([0] if case == "peak" else [0, 1]), case
        assert other["aligned"] == [], "the program was compiled for addresses that it did not get"
        is_address = [kind.startswith("*") for kind in first["types"]]
        for late, shift, num_rows in ((second, 4096, 33), (other, 8, 100)):
            wanted = [
                value + shift if moved else num_rows if value == 100 else value
                for value, moved in zip(first["values"], is_address, strict=True)
            ]
            assert late["values"] == wanted, case
        assert first["values"].count(100) == 1, case
        assert second["grid"][0] <= first["grid"][0] == other["grid"][0], case
