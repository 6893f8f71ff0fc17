"""Seconds of exchanges among ranks: all-reduce and all-gather in a node, rows between stages; no torch."""

from collections.abc import Mapping
from itertools import pairwise

from holdfast.distributed.mesh import Mesh
from holdfast.memory.device_rates import Link
from holdfast.memory.devices import read_data

SUM_US: Mapping[int, list[tuple[int, float]]] = {
    int(size): [(elements, microseconds) for elements, microseconds in rows]
    for size, rows in read_data("all_reduce_us.json").items()
}
"""By number of H200s: bfloat16 elements and microseconds of an all-reduce over NVLink inside a graph. vLLM 0.24.0's kernel in
aiconfigurator 0.12.0 (Apache-2.0), some rows of h200_sxm/comm/vllm/0.24.0/custom_allreduce_perf."""
NETWORK_BYTES_PER_SECOND, NETWORK_SECONDS = 50e9, 10e-6
"""Between nodes, one way: a 400 Gb/s card a GPU, and aiconfigurator's latency of a message (h200_sxm.yaml)."""
SLOW_LINKS: Mapping[Link, tuple[float, float]] = {"pcie": (20e9, 20e-6), "host": (4e9, 200e-6)}
"""Bytes/s and seconds of one exchange without NVLink: PCIe 4.0 x16 through a host; gloo among processes. Assumed, not measured."""
SUMS_PER_LAYER = 2
"""All-reduces: after attention, and after the MLP or experts."""
GATHERS_PER_LAYER = 4
"""All-gathers with exact sums: inputs and outputs of both output projections."""


def sum_seconds(num_elements: float, size: int) -> float:
    """Return the seconds of an all-reduce over NVLink, interpolated in the table and proportional beyond it."""
    table = SUM_US[next((known for known in SUM_US if known >= size), max(SUM_US))]
    if num_elements <= table[0][0]:
        return table[0][1] * 1e-6
    for (low, low_us), (high, high_us) in pairwise(table):
        if num_elements <= high:
            return (low_us + (high_us - low_us) * (num_elements - low) / (high - low)) * 1e-6
    return table[-1][1] * 1e-6 * num_elements / table[-1][0]


def gather_seconds(num_elements: float, size: int) -> float:
    """Return the seconds of an all-gather: as long as an all-reduce of one share."""
    return sum_seconds(num_elements / size, size)


def exchange_seconds(mesh: Mesh, num_layers: int, rows: int, row_bytes: int, link: Link, num_streams: int = 1) -> float:
    """Return the seconds of all exchanges of a step of one stage; `row_bytes` are hidden states of one stream."""
    seconds = 0.0
    if mesh.num_stages > 1:
        seconds += NETWORK_SECONDS + rows * num_streams * row_bytes / NETWORK_BYTES_PER_SECOND
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
