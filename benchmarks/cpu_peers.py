"""Compare products and models of GGUF blocks with llama.cpp on this CPU: python benchmarks/cpu_peers.py --llama PYTHON

PYTHON is an interpreter that imports llama_cpp (llama-cpp-python, built for this processor). Both engines take the same
file and the same number of threads in one run, by turns; figures are medians. On a machine with other work, `--clock cpu --threads 1` counts seconds of the processor
instead. The record is benchmarks/records/<cpu>-<date>-cpu-peers.json; rows of parts that did not run stay as they were.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_records
import numpy as np
import torch
from dummy_models import write_dummy_model
from safetensors.torch import save_file
from tokenizers import Tokenizer

from holdfast import LLM, SamplingParams
from holdfast.cli import bench_record
from holdfast.cli.app import run as run_command
from holdfast.kernels.load.place_blocks import StoredRows, place_tiles
from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.kernels.native_library import native_library
from holdfast.loading.model_files import find_default_model
from holdfast.quant.packed_schemes import BLOCK_SCHEMES
from holdfast.quant.packed_tiles import TILE_ROWS, TILE_SCHEMES, TILE_TYPES, input_bytes

PEER = Path(__file__).parent / "cpu_packed_peer.py"
SECTION = "cpu-peers"
ROUNDS = 5
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
COLD_BYTES = 96 << 20
"""Bytes of a weight's copies, so that decode reads memory and not a cache."""
MOST_COPIES = 64
SMALL_SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate, up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
LARGE_SHAPES = {"qkv": (2560, 2048), "o": (2048, 2048), "gate, up": (11264, 2048), "down": (2048, 5632)}
KERNELS: Sequence[tuple[str, str, dict[str, tuple[int, int]]]] = (
    ("135M", "Q4_1", SMALL_SHAPES),
    ("135M", "Q4_0", SMALL_SHAPES),
    ("135M", "Q8_0", SMALL_SHAPES),
    ("1B", "Q4_K", LARGE_SHAPES),
    ("1B", "Q6_K", {"v": (256, 2048), "down": (2048, 5632), "head": (32000, 2048)}),
)
KERNEL_ROWS = (1, 8, 512)
KERNEL_TARGET = 0.95
DUMMY = "TinyLlama-1.1B"
MODELS = {"135m-q4_1": "135M Q4_1", "135m-q4_0": "135M Q4_0", "135m-q8_0": "135M Q8_0", "1b-q4_k": "1B Q4_K_M"}
TARGETS = {"135M": {"batch 1": 0.75, "batch 8": 0.9}, "1B": {"batch 1": 0.9, "batch 8": 0.9, "prefill 512": 0.8}}
PROMPT, PREFILL, CONTEXT, SEQUENCES = 64, 512, 1024, 8
PROCESS = "python and torch"
MEMORY_TARGET = round(1 / 1.3, 3)
"""Bytes of llama.cpp over ours."""


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen([python, str(PEER)], **pipes)

    def __call__(self, do: str, **request: object) -> Any:  # noqa: ANN401 whatever the action answers
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended during {do}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class Bench(NamedTuple):
    """llama.cpp, and how both engines are measured."""

    peer: Peer
    rounds: int
    threads: int
    num_steps: int
    clock: Callable[[], float]


class Product(NamedTuple):
    """One weight shape in one block type."""

    model: str
    kind: str
    name: str
    size_n: int
    size_k: int

    @property
    def num_copies(self) -> int:
        scheme = TILE_SCHEMES[self.kind]
        weight_bytes = self.size_n // TILE_ROWS * scheme.planes[0].row_elements(self.size_k)
        return max(1, min(MOST_COPIES, -(-COLD_BYTES // weight_bytes)))


def blocks_of(peer: Peer, product: Product, folder: Path) -> Path:
    """Write the blocks of a random weight, as llama.cpp quantizes it."""
    source, target = folder / "values.f32", folder / "blocks"
    generator = np.random.default_rng(1)
    generator.standard_normal((product.size_n, product.size_k), np.float32).tofile(source)
    peer(
        "quantize",
        kind=product.kind,
        source=str(source),
        size_n=product.size_n,
        size_k=product.size_k,
        target=str(target),
    )
    return target


def our_tiles(product: Product, blocks: Path) -> torch.Tensor:
    """Return the copies of the same weight in tiles, [copies, groups, bytes]."""
    raw = torch.from_numpy(np.fromfile(blocks, np.uint8)).view(product.size_n, -1)
    tiles, num_blocks = TILE_SCHEMES[product.kind], product.size_k // BLOCK_SCHEMES[product.kind].unit_columns
    first = torch.empty(product.size_n // TILE_ROWS, tiles.planes[0].row_elements(product.size_k), dtype=torch.uint8)
    stored = StoredRows(raw, 0, product.size_n, 0, num_blocks)
    assert place_tiles(stored, raw.shape[1] // num_blocks, first, tiles) == UNSEEN, "a scale is not finite"
    return torch.stack([first] * product.num_copies)


def our_run(
    bench: Bench, product: Product, tiles: torch.Tensor, x: torch.Tensor
) -> tuple[Callable[[], float], torch.Tensor]:
    """Return a function that times a product by every copy and returns the seconds of one, and the result."""
    library = native_library()
    assert library is not None, "there is no C library"
    out = torch.empty(len(x), product.size_n)
    room = torch.empty(input_bytes(len(x), product.size_k), dtype=torch.uint8)
    sizes = TILE_TYPES[product.kind], len(x), product.size_n, product.size_k, product.size_n
    weights = [one.data_ptr() for one in tiles]

    def measure() -> float:
        places = out.data_ptr(), room.data_ptr()
        began = bench.clock()
        for weight in weights:
            library.holdfast_packed_linear(x.data_ptr(), weight, 0, *places, *sizes)
        return (bench.clock() - began) / len(weights)

    return measure, out


def measure_kernel(bench: Bench, product: Product, folder: Path) -> list[dict[str, Any]]:
    """Time one weight with every number of rows, by turns, and compare the results."""
    peer = bench.peer
    blocks = blocks_of(peer, product, folder)
    tiles = our_tiles(product, blocks)
    sizes = {"size_n": product.size_n, "size_k": product.size_k, "copies": product.num_copies}
    peer("hold_product", kind=product.kind, blocks=str(blocks), threads=bench.threads, **sizes)
    found = []
    for num_rows in KERNEL_ROWS:
        if product.name == "head" and num_rows > 8:
            continue  # a prompt takes logits of one row
        x = torch.randn(num_rows, product.size_k, generator=torch.Generator().manual_seed(2))
        (folder / "x").write_bytes(x.numpy().tobytes())
        measure, out = our_run(bench, product, tiles, x)
        request = {"x": str(folder / "x"), "rows": num_rows, "result": str(folder / "y")}
        measure()
        ours, theirs = [], []
        for _ in range(bench.rounds):
            theirs += peer("run_product", **request, rounds=1)
            ours.append(measure())
        other = torch.from_numpy(np.fromfile(folder / "y", np.float32)).view_as(out)
        error = float((out - other).norm() / other.norm())
        assert error < 0.02, f"{product}: results differ by {error}"
        name = f"{product.kind}, {product.model}'s {product.name}, {num_rows} rows"
        found.append(compared(f"product: {name}", "us", ours, theirs, KERNEL_TARGET, 1e6))
    peer("drop")
    return found


def compared(
    measure: str, unit: str, ours: Sequence[float], theirs: Sequence[float], target: float | None, factor: float
) -> dict[str, Any]:
    """Return a row: medians in a unit of time, and how fast we are as a multiple of llama.cpp."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    row = {
        "measure": measure,
        "unit": unit,
        "values": {"holdfast": round(mine * factor, 3), "llama.cpp": round(other * factor, 3)},
        "ratio": round(other / mine, 3),
        "target": target,
        "rounds": {"holdfast": list(ours), "llama.cpp": list(theirs)},
    }
    print(f"{measure}: {row['values']} {unit}, {row['ratio']}x" + (f" (target {target})" if target else ""), flush=True)
    return row


def model_file(name: str, folder: Path) -> Path:
    """Return a model's file; make it in the folder unless it is there."""
    if name == "135m-q4_1":
        return find_default_model()
    path = folder / f"{name}.gguf"
    if not path.exists():
        size, _, kind = name.partition("-")
        source = [str(write_random_model(folder))] if size == "1b" else []
        assert run_command(["quantize", *source, str(path), "--to", kind]) == 0, f"quantize {name}"
    return path


def write_random_model(folder: Path) -> Path:
    """Write a Llama of 1.1B with normal weights, and a tokenizer that a GGUF file can hold."""
    path = write_dummy_model(folder, DUMMY)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    ids = {f"{end}_token_id": tokenizer.token_to_id(f"<|{word}|>") for end, word in (("bos", "begin"), ("eos", "end"))}
    (path / "config.json").write_text(json.dumps({**config, **ids}))
    hidden, wide, num_vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (num_vocab, hidden), "lm_head": (num_vocab, hidden), "model.norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        own = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    tensors = {
        f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class OurModel:
    """Holdfast with a model file."""

    def __init__(self, path: Path, clock: Callable[[], float], num_steps: int) -> None:
        self.llm = LLM(model=str(path), max_model_len=CONTEXT, max_num_seqs=SEQUENCES, max_num_batched_tokens=PREFILL)
        self._clock, self._num_steps = clock, num_steps
        self._num_prefills = 0

    @property
    def planned_mib(self) -> dict[str, float]:
        """MiB of the plan by owner, without Python and torch, and without what only loading holds."""
        rows = (row for row in self.llm.memory.rows if row.owner != PROCESS and "serve" in row.phases)
        return {row.owner: round(row.planned_bytes / 2**20, 2) for row in rows}

    def prefill(self) -> float:
        """Return the seconds of a new prompt, with its first token."""
        self._num_prefills += 1
        return self._seconds([[1000 + i * 7 % 900 + self._num_prefills for i in range(PREFILL)]], 1)

    def decode(self, num_sequences: int) -> float:
        """Return the seconds of a step after prompts that the prefix cache holds."""
        prompts = [[1000 + i + sequence for i in range(PROMPT)] for sequence in range(num_sequences)]
        self._seconds(prompts, 1)
        first = self._seconds(prompts, 1)
        return (self._seconds(prompts, 1 + self._num_steps) - first) / self._num_steps

    def _seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        requests: Any = [{"prompt_token_ids": ids} for ids in prompts]
        began = self._clock()
        self.llm.generate(requests, params, use_tqdm=False)
        return self._clock() - began


def measure_model(bench: Bench, name: str, path: Path) -> list[dict[str, Any]]:
    """Time decode and prefill of one file by turns, and compare bytes."""
    peer, ours = bench.peer, OurModel(path, bench.clock, bench.num_steps)
    buffers: dict[str, float] = peer("hold_model", path=str(path), threads=bench.threads, most_tokens=CONTEXT)
    found = [compared_memory(name, ours.planned_mib, buffers)]
    turns: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        f"batch {count}": (
            partial(ours.decode, count),
            partial(peer, "decode", num_sequences=count, num_prompt=PROMPT, num_steps=bench.num_steps),
        )
        for count in (1, SEQUENCES)
    }
    turns[f"prefill {PREFILL}"] = (ours.prefill, partial(peer, "prefill", num_tokens=PREFILL))
    targets = TARGETS[name.partition(" ")[0]]
    for what, engines in turns.items():
        for engine in engines:
            engine()
        seconds = [[engine() for engine in engines] for _ in range(bench.rounds)]
        mine, theirs = ([pair[i] for pair in seconds] for i in (0, 1))
        found.append(compared(f"{name}: {what}", "ms", mine, theirs, targets.get(what), 1e3))
    peer("drop")
    return found


def compared_memory(name: str, ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    """Return a row of MiB: the plan of one engine, and the buffers of the other."""
    mine, other = sum(ours.values()), sum(theirs.values())
    row = {
        "measure": f"{name}: memory",
        "unit": "MiB",
        "values": {"holdfast": round(mine, 1), "llama.cpp": round(other, 1)},
        "ratio": round(other / mine, 3),
        "target": MEMORY_TARGET,
        "parts": {"holdfast": ours, "llama.cpp": theirs},
    }
    print(f"{row['measure']}: {row['values']} MiB, {row['ratio']}x (target {MEMORY_TARGET})", flush=True)
    return row


def llama_version(python: str) -> str | None:
    """Return the version that the interpreter has; None if it has none."""
    code = "import llama_cpp; print(llama_cpp.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama", default=sys.executable, help="a Python with llama_cpp; else this one")
    parser.add_argument("--parts", default="kernels,models", help="kernels, models or both")
    parser.add_argument("--only", default="", help="a regular expression that names of rows match")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=32, help="of decode in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--folder", type=Path, default=None, help="where model files are made and kept")
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    return parser.parse_args()


def write(rows: list[dict[str, Any]], version: str, options: argparse.Namespace) -> None:
    """Write rows into today's record; its other rows stay."""
    path = options.out / gpu_records.record_name(bench_record.cpu_name(), SECTION, bench_record.today())
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    merged = {row["measure"]: row for row in (*kept, *rows)}
    clock = ", seconds of the processor on a machine with other work" if options.clock == "cpu" else ""
    settings = (
        f"{options.threads} threads, GGUF blocks as stored, 8-bit activations in both engines, "
        f"{SEQUENCES} sequences of {CONTEXT} tokens{clock}"
    )
    model = "SmolLM2-135M-Instruct, and a Llama of 1.1B with random weights"
    command = ["python", f"benchmarks/{Path(__file__).name}", "--llama", "PYTHON"]
    command += ["--threads", str(options.threads), "--clock", options.clock, "--steps", str(options.steps)]
    record = bench_record.make_record(model, settings, list(merged.values()), command, section=SECTION)
    record["versions"] = {**bench_record.versions(), "llama-cpp-python": version}
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Measure the parts and write the record."""
    options = read_options()
    version = llama_version(options.llama)
    if version is None:
        sys.exit(f"llama.cpp is not there: {options.llama} does not import llama_cpp")
    torch.set_num_threads(options.threads)
    bench = Bench(Peer(options.llama), options.rounds, options.threads, options.steps, CLOCKS[options.clock])
    bench.peer("set_clock", name=options.clock)
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model, kind, shapes in KERNELS if "kernels" in parts else ():
            for name, (size_n, size_k) in shapes.items():
                product = Product(model, kind, name, size_n, size_k)
                if re.search(options.only, f"{kind}, {model}'s {name}"):
                    write(measure_kernel(bench, product, Path(scratch)), version, options)
        for key, name in MODELS.items() if "models" in parts else ():
            if re.search(options.only, name):
                write(measure_model(bench, name, model_file(key, folder)), version, options)
    bench.peer.close()


if __name__ == "__main__":
    main()
