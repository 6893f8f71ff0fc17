"""Starts kernels over addresses where no GPU is: compiled for one, and handed to a driver that only writes down.

Run as a program it prints, as JSON, the arguments of the driver at each launch. Every case is started three times: twice at
aligned addresses and once at others.
"""

import json
import sys
from typing import Any

import torch

torch.cuda.is_available = lambda: True  # before kernels are imported, because their import asks it

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from holdfast.kernels.load.place_kernels import (  # noqa: E402  # noqa: E402
    Pointer,
    RowLaunch,
    amax_launch,
    codes_launch,
    plain_launch,
)
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, MXFP4  # noqa: E402

I16, U8, I32 = torch.int16, torch.uint8, torch.int32
launches: list[dict[str, Any]] = []


class Writing:
    """In the launcher's place."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types = list(source.signature.values())
        self._attributes = {path[0]: kind for path, kind in source.attrs.items()}

    def __call__(self, *arguments: Any) -> None:
        grid, values = arguments[:3], arguments[9:]
        assert len(values) == len(self._types), f"{len(values)} arguments for {self._types}"
        launches.append(
            {
                "grid": grid,
                "program": id(self),
                "types": self._types,
                "aligned": [index for index, kind in self._attributes.items() if kind and self._types[index][0] == "*"],
                "values": [value.data_ptr() if isinstance(value, Pointer) else value for value in values],
            }
        )


class Utilities:
    def load_binary(self, *_: object) -> tuple[object, int, int, int, int]:
        return object(), 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Driver:
    """A GPU of which nothing is there but its kind."""

    utils, launcher_cls = Utilities(), Writing

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


CASES: dict[str, tuple[RowLaunch, list[torch.dtype | None], tuple[int, ...]]] = {
    "plain": (plain_launch(torch.bfloat16, torch.float16, 64, (64, 1), (64, 1), False), [I16, I16, I32, I32], (7,)),
    "amax": (amax_launch(64, (64, 1)), [I16, I32], ()),
    "row": (codes_launch(FP8, 64, (0, 64), (64, 1), False), [I16, U8, I32, None, I32, I32], (7,)),
    "tensor": (codes_launch(FP8_TENSOR, 64, (0, 64), (64, 1), False), [I16, U8, I32, I32, I32, I32], (7,)),
    "block": (codes_launch(FP8_BLOCK, 128, (0, 128), (128, 1), False), [I16, U8, I32, I32, I32], (7,)),
    "power": (codes_launch(MXFP4, 64, (0, 64), (64, 1), False), [I16, U8, U8, I32, I32], (7,)),
}


def main() -> None:
    """The cases that were named."""
    driver.set_active(Driver())
    results = {}
    for case in sys.argv[1:]:
        launch, types, numbers = CASES[case]
        pointers = [None if kind is None else Pointer(kind) for kind in types]
        for num_rows, first in ((100, 4096), (33, 8192), (100, 4104)):
            for index, pointer in enumerate(pointers):
                if pointer is not None:
                    # All but the first two are at odd places: nothing follows from where they are.
                    pointer.address = first + (1024 * index if index < 2 else 1000 * index + 4)
            launch.start_at(num_rows, first, *pointers, *numbers)
        results[case] = launches.copy()
        launches.clear()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
