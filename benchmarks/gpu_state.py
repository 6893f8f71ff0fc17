"""Gated delta nets: convolution, recurrence, chunks and gated norm of a layer: python benchmarks/gpu_state.py

Correctness comes first: a mixed step against the references in float32, and bits of cuts and of neighbours. Then decode of
1, 16 and 64 sequences and prompts of 2K and 8K tokens, for layers of Qwen3.5-27B and Qwen3.5-35B-A3B. A measurement is a CUDA graph
over several layers, each with its own states, so that the L2 cache is cold; the median of some replays counts. The roof of a decode
step is its states, read and written once, at the rate of a copy. That of a prompt is its products, counted once, at the rate of dense ones.

With --peer FOLDER the kernels of flash-linear-attention run in between, over the same inputs (state_peer.py).

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_state.py --tiny --device cpu

T rows, H value heads, C channels, K, V elements of keys and values, P places, W taps
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_attention import seconds_per_call
from gpu_latent_attention import FLOPS_PER_SECOND
from gpu_records import Budget, make_record, options, print_table, write_record
from state_peer import Peer, compiled_at_once, load_peer

from holdfast.kernels.state.causal_conv import causal_conv_reference, causal_conv_triton
from holdfast.kernels.state.delta_chunks import delta_chunks_reference, delta_chunks_triton
from holdfast.kernels.state.delta_inputs import DeltaInputs
from holdfast.kernels.state.delta_step import delta_step_reference, delta_step_triton
from holdfast.kernels.state.gated_norm import gated_norm_reference, gated_norm_triton
from holdfast.kernels.state.state_geometry import CHUNK_ROWS, delta_chunk_specs, state_list_specs
from holdfast.kernels.state.state_rows import Piece, StateRows, fill_lists

COPY_BYTES_PER_SECOND = 4.24e12
"""Rate of a copy on an H200, each byte read and written."""
ROTATED_BYTES = 1.2e9
MAX_LAYERS = 24
MAX_STATE_ERROR = {"float32": 1e-5, "bfloat16": 3e-5, "float16": 3e-5}
MAX_OUTPUT_ERROR = {"float32": 1e-5, "bfloat16": 0.02, "float16": 0.01}
"""Tolerances against the reference, relative to its norm. Outputs are rounded to the type of inputs, states are not."""
WIDTH = 4
EPS = 1e-6


class Layer(NamedTuple):
    """Heads of a layer."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.value_heads * self.key_dim * self.value_dim

    @property
    def chunk_flops(self) -> float:
        """Products of a chunk: two of keys, three with the state, two within the chunk, one into the state."""
        square, wide = CHUNK_ROWS**2, CHUNK_ROWS * self.key_dim * self.value_dim
        return 2.0 * self.value_heads * (square * 2 * self.key_dim + square * 2 * self.value_dim + 3 * wide)


class Shape(NamedTuple):
    """Cases of the run."""

    layers: tuple[Layer, ...] = (Layer("Qwen3.5-27B", 16, 48), Layer("Qwen3.5-35B-A3B", 16, 32))
    dtype: str = "bfloat16"
    decode: tuple[int, ...] = (1, 16, 64)
    prefill: tuple[int, ...] = (2048, 8192)
    mixed: tuple[tuple[int, int], ...] = ((0, 200), (64, 64), (7, 1), (128, 67), (0, 1), (9000, 1))
    """Starts and rows of the sequences of the check."""


FULL = Shape()
TINY = Shape((Layer("tiny", 1, 2, 16, 16),), "float16", (2,), (70,), ((0, 66), (7, 1), (64, 2)))


class Rig:
    """Inputs of a step, and states of some layers."""

    def __init__(
        self,
        layer: Layer,
        pieces: Sequence[tuple[int, int]],
        num_layers: int,
        dtype: str,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.layer, self.pieces, self.dtype, torch_dtype = layer, pieces, dtype, getattr(torch, dtype)
        num_rows, places = sum(count for _, count in pieces), len(pieces)
        self.rows = rows_of(pieces, device)
        self.x_TC, self.a_TH, self.b_TH = (
            random(num_rows, size).to(torch_dtype)
            for size in (layer.num_channels, layer.value_heads, layer.value_heads)
        )
        self.z_THV = random(num_rows, layer.value_heads, layer.value_dim).to(torch_dtype)
        self.weight_CW, self.weight_V = random(layer.num_channels, WIDTH).to(torch_dtype), random(layer.value_dim)
        self.gates = random(layer.value_heads) - 2, random(layer.value_heads)
        self.conv_LPCW = random(num_layers, places, layer.num_channels, WIDTH - 1).to(torch_dtype)
        self.state_LPHKV = random(num_layers, places, layer.value_heads, layer.key_dim, layer.value_dim)
        self.qkv_TC, self.out_THV = torch.zeros_like(self.x_TC), torch.zeros_like(self.z_THV)
        specs = delta_chunk_specs(num_rows, places, layer.value_heads, layer.key_dim, dtype)
        self.scratch = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in specs
        }

    def inputs(self) -> DeltaInputs:
        _, key_heads, value_heads, key_dim, value_dim = self.layer
        return DeltaInputs.of(
            self.qkv_TC, key_heads, key_dim, value_heads, value_dim, self.a_TH, self.b_TH, *self.gates
        )

    def convolve(self, layer: int) -> None:
        causal_conv_triton(self.x_TC, self.rows, self.weight_CW, self.conv_LPCW[layer], self.qkv_TC)

    def step(self, layer: int) -> None:
        delta_step_triton(self.inputs(), self.rows, self.state_LPHKV[layer], self.out_THV)

    def advance(self, layer: int) -> None:
        delta_chunks_triton(self.inputs(), self.rows, self.state_LPHKV[layer], self.out_THV, self.scratch)

    def norm(self, layer: int) -> None:
        gated_norm_triton(self.out_THV, self.z_THV, self.weight_V, EPS, self.out_THV)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and states of the first layer."""
        for verb in (self.convolve, self.step, self.advance, self.norm):
            verb(0)
        return self.out_THV.clone(), self.state_LPHKV[0].clone()

    def piece(self, source: "Rig", first: int, end: int) -> torch.Tensor:
        """Return outputs of some rows of another rig's first sequence."""
        self.weight_CW, self.weight_V, self.gates = source.weight_CW, source.weight_V, source.gates
        self.x_TC, self.a_TH, self.b_TH, self.z_THV = (
            x[first:end] for x in (source.x_TC, source.a_TH, source.b_TH, source.z_THV)
        )
        self.qkv_TC, self.out_THV = torch.zeros_like(self.x_TC), torch.zeros_like(self.z_THV)
        self.rows = rows_of([(first, end - first)], self.x_TC.device)
        return self.run()[0]

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what references give on the CPU for convolved inputs of the kernel, in float32 and unrounded."""
        rows = rows_of(self.pieces, torch.device("cpu"))
        x_TC, weight_CW, conv_PCW, z_THV, weight_V = (
            x.cpu().float().clone() for x in (self.x_TC, self.weight_CW, self.conv_LPCW[0], self.z_THV, self.weight_V)
        )
        qkv_TC, state_PHKV, out_THV = torch.empty_like(x_TC), self.state_LPHKV[0].cpu().clone(), torch.empty_like(z_THV)
        causal_conv_reference(x_TC, rows, weight_CW, conv_PCW, qkv_TC)
        qkv_TC = qkv_TC.to(getattr(torch, self.dtype)).float()
        _, key_heads, value_heads, key_dim, value_dim = self.layer
        gates = (x.cpu().float() for x in (self.a_TH, self.b_TH, *self.gates))
        inputs = DeltaInputs.of(qkv_TC, key_heads, key_dim, value_heads, value_dim, *gates)
        delta_step_reference(inputs, rows, state_PHKV, out_THV)
        delta_chunks_reference(inputs, rows, state_PHKV, out_THV)
        gated_norm_reference(out_THV, z_THV, weight_V, EPS, out_THV)
        return out_THV, state_PHKV


def rows_of(pieces: Sequence[tuple[int, int]], device: torch.device) -> StateRows:
    """Rows of a step; without lists if every sequence has one row."""
    places = [place for place, (_, count) in enumerate(pieces) for _ in range(count)]
    positions = [start + i for start, count in pieces for i in range(count)]
    numbers = torch.tensor([places, positions]).to(device)
    if len(places) == len(pieces):
        return StateRows(numbers[0], numbers[1])
    lists = [torch.zeros(spec.shape, dtype=torch.int32) for spec in state_list_specs(len(places), len(pieces))]
    entries, row = [], 0
    for place, (start, count) in enumerate(pieces):
        entries.append(Piece(row, count, place, start))
        row += count
    fill_lists(entries, *lists)
    return StateRows(numbers[0], numbers[1], *(table.to(device) for table in lists))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


@torch.inference_mode()
def check(layer: Layer, shape: Shape, dtype: str, device: torch.device) -> dict[str, float]:
    """Return errors of a mixed step, and whether a cut at a multiple of CHUNK_ROWS or a missing neighbour changes bits."""
    rig = Rig(layer, shape.mixed, 1, dtype, device)
    wanted_out, wanted_state = rig.reference()
    out_THV, state_PHKV = rig.run()
    length, is_same = shape.mixed[0][1], True
    for cuts in ((0, length), (0, CHUNK_ROWS, length)):
        alone = Rig(layer, shape.mixed[:1], 1, dtype, device)
        outputs = [alone.piece(rig, first, end) for first, end in pairwise(cuts)]
        is_same &= torch.equal(torch.cat(outputs), out_THV[:length])
        is_same &= torch.equal(alone.state_LPHKV[0, 0], state_PHKV[0])
    return {
        "output_error": relative_error(out_THV, wanted_out),
        "state_error": relative_error(state_PHKV, wanted_state),
        "is_same": float(is_same),
    }


@torch.inference_mode()
def measure(
    layer: Layer, pieces: Sequence[tuple[int, int]], dtype: str, device: torch.device, peer: Peer | None
) -> dict[str, dict[str, float]]:
    """Return microseconds of each operation of a step, by layer, and those of the peer's."""
    num_layers = min(MAX_LAYERS, max(2, round(ROTATED_BYTES / (layer.state_bytes * len(pieces)))))
    rig = Rig(layer, pieces, num_layers if device.type == "cuda" else 1, dtype, device)
    is_decode = rig.rows.sequences_N4 is None
    verbs: dict[str, Callable[[int], None]] = {"convolution": rig.convolve, "norm": rig.norm}
    verbs["step" if is_decode else "chunks"] = rig.step if is_decode else rig.advance
    layers = range(len(rig.state_LPHKV))

    def all_of(number: int) -> None:
        rig.convolve(number)
        (rig.step if is_decode else rig.advance)(number)
        rig.norm(number)

    found = {}
    for name, verb in {**verbs, "all": all_of}.items():
        calls = [lambda number=number, verb=verb: verb(number) for number in layers]
        found[name] = round(seconds_per_call(calls, device) * 1e6, 2)
    return {"values": found} | ({} if peer is None else measure_peer(rig, peer, is_decode, device))


def measure_peer(rig: Rig, peer: Peer, decode: bool, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the peer's microseconds, and by how much its outputs and states differ from ours."""
    rig.convolve(0)
    verbs = peer.calls(rig.inputs(), rig.x_TC, rig.weight_CW, rig.state_LPHKV, decode)
    number = len(rig.state_LPHKV) - 1
    name = "step" if decode else "chunks"
    with compiled_at_once():
        found_out, found_state = (x.float() for x in verbs[name](number))
        (rig.step if decode else rig.advance)(number)
        wanted = {"output": (found_out, rig.out_THV), "state": (found_state, rig.state_LPHKV[number])}
        differences = {
            name: round(relative_error(found.reshape(ours.shape), ours.cpu()), 6)
            for name, (found, ours) in wanted.items()
        }
        found = {
            name: round(
                1e6
                * seconds_per_call(
                    [lambda layer=layer, verb=verb: verb(layer) for layer in range(len(rig.state_LPHKV))], device
                ),
                2,
            )
            for name, verb in verbs.items()
        }
    return {"flash-linear-attention": found, "flash-linear-attention differs by": differences}


def rows_of_decode(
    layer: Layer, num_seqs: int, shape: Shape, device: torch.device, peer: Peer | None
) -> dict[str, Any]:
    measured = measure(layer, [(1000, 1)] * num_seqs, shape.dtype, device, peer)
    values = measured["values"]
    roof = 2.0 * num_seqs * layer.state_bytes / COPY_BYTES_PER_SECOND
    return {
        "measure": f"{layer.name}, decode of {num_seqs}",
        "unit": "us",
        **measured,
        "step_percent_of_roof": round(100 * roof / (values["step"] * 1e-6), 1),
        "percent_of_roof": round(100 * roof / (values["all"] * 1e-6), 1),
    }


def rows_of_prefill(
    layer: Layer, num_tokens: int, shape: Shape, device: torch.device, peer: Peer | None
) -> dict[str, Any]:
    measured = measure(layer, [(0, num_tokens)], shape.dtype, device, peer)
    values = measured["values"]
    roof = layer.chunk_flops * num_tokens / CHUNK_ROWS / FLOPS_PER_SECOND
    return {
        "measure": f"{layer.name}, prompt of {num_tokens}",
        "unit": "us",
        **measured,
        "chunks_percent_of_roof": round(100 * roof / (values["chunks"] * 1e-6), 1),
        "percent_of_roof": round(100 * roof / (values["all"] * 1e-6), 1),
    }


def main() -> None:
    """Check, measure, print."""
    parser = options("Layers of gated delta nets")
    parser.add_argument("--peer", type=Path, default=None, help="folder of packages with fla")
    parser.set_defaults(budget_seconds=85.0)
    arguments = parser.parse_args()
    shape, device = TINY if arguments.tiny else FULL, torch.device(arguments.device)
    budget, peer = Budget(arguments.budget_seconds), load_peer(arguments.peer)
    checks = {
        f"{layer.name}, {dtype}": check(layer, shape, dtype, device)
        for layer in shape.layers
        for dtype in (shape.dtype, "float32")
    }
    print(f"checks: {checks}", flush=True)
    results: list[dict[str, Any]] = []
    for layer in shape.layers:
        cases = [(rows_of_decode, size) for size in shape.decode] + [(rows_of_prefill, size) for size in shape.prefill]
        for make, size in cases:
            if budget.left_seconds < 5:
                print(f"left out: {layer.name}, {size}: no time")
                continue
            results.append(make(layer, size, shape, device, peer))
            print(results[-1], flush=True)
    is_right = all(
        found["is_same"] == 1
        and found["state_error"] <= MAX_STATE_ERROR[name.rpartition(" ")[2]]
        and found["output_error"] <= MAX_OUTPUT_ERROR[name.rpartition(" ")[2]]
        for name, found in checks.items()
    )
    facts = {"check": {"errors": checks, "is_right": is_right}, "copy_bytes_per_second": COPY_BYTES_PER_SECOND}
    facts["flops_per_second"] = FLOPS_PER_SECOND
    facts["peer"] = None if peer is None else f"flash-linear-attention {peer.version}"
    record = make_record("gpu-state", results, "gated delta nets", "random inputs", arguments, facts)
    print_table(
        "Layers of gated delta nets",
        ("", "us", "% of the roof"),
        [(row["measure"], str(row["values"]), row["percent_of_roof"]) for row in results],
    )
    write_record(record, "state", arguments)


if __name__ == "__main__":
    main()
