"""Seconds that ranks take to exchange rows: all-reduces and gathers in a node, rows between stages; no torch."""

from collections.abc import Mapping
from itertools import pairwise

from holdfast.distributed.mesh import Mesh
from holdfast.memory.device_rates import Link

SUM_US: Mapping[int, tuple[tuple[int, float], ...]] = {
    2: ((4096, 4.64), (16384, 4.62), (65536, 4.82), (262144, 6.34), (524288, 8.43), (1048576, 12.44), (4194304, 42.99)),
    4: ((4096, 4.77), (16384, 4.92), (65536, 5.81), (262144, 10.48), (524288, 12.1), (1048576, 17.8), (4194304, 51.77)),
    8: (
        (4096, 5.14),
        (16384, 5.67),
        (65536, 7.94),
        (262144, 11.14),
        (524288, 14.07),
        (1048576, 18.11),
        (4194304, 48.39),
    ),
}
"""bfloat16 elements and microseconds of an all-reduce among so many H200 over NVLink inside a graph: vLLM 0.24.0's own kernel as
aiconfigurator 0.12.0 (Apache-2.0) has it in h200_sxm/comm/vllm/0.24.0/custom_allreduce_perf, some of its rows."""
NETWORK_BYTES_PER_SECOND, NETWORK_SECONDS = 50e9, 10e-6
"""Between nodes, one way: a 400 Gb/s card a GPU, and aiconfigurator's latency of a message (h200_sxm.yaml)."""
SLOW_LINKS: Mapping[Link, tuple[float, float]] = {"pcie": (20e9, 20e-6), "host": (4e9, 200e-6)}
"""Bytes/s and seconds of one exchange without NVLink: PCIe 4.0 x16 through a host; gloo among processes. Assumed, not measured."""
SUMS_PER_LAYER = 2
"""After attention and after the MLP or experts."""
GATHERS_PER_LAYER = 4
"""Of exact sums: inputs and outputs of both output projections."""


def sum_seconds(num_elements: float, size: int) -> float:
    """One all-reduce over NVLink, between the two rows of the table that it lies between; beyond the last in proportion."""
    table = SUM_US[next((known for known in SUM_US if known >= size), max(SUM_US))]
    if num_elements <= table[0][0]:
        return table[0][1] * 1e-6
    for (low, low_us), (high, high_us) in pairwise(table):
        if num_elements <= high:
            return (low_us + (high_us - low_us) * (num_elements - low) / (high - low)) * 1e-6
    return table[-1][1] * 1e-6 * num_elements / table[-1][0]


def gather_seconds(num_elements: float, size: int) -> float:
    """Every rank reads what all others have: as much as in a sum of one share, if each rank adds up for itself."""
    return sum_seconds(num_elements / size, size)


def exchange_seconds(mesh: Mesh, num_layers: int, rows: int, row_bytes: int, link: Link) -> float:
    """All exchanges of a step of one stage; `row_bytes` of hidden states."""
    seconds = 0.0
    if mesh.num_stages > 1:
        seconds += NETWORK_SECONDS + rows * row_bytes / NETWORK_BYTES_PER_SECOND
    size = mesh.tensor_size
    if size == 1:
        return seconds
    count = GATHERS_PER_LAYER if mesh.is_exact else SUMS_PER_LAYER
    if link == "nvlink":
        one = (gather_seconds if mesh.is_exact else sum_seconds)(rows * row_bytes / 2, size)
    else:
        bytes_per_second, latency = SLOW_LINKS[link]
        one = latency + 2 * (size - 1) / size * rows * row_bytes / bytes_per_second
    return seconds + num_layers * count * one
