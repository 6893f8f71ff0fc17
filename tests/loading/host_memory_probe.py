"""A process that loads one checkpoint under some schemes and prints how much memory each load took; run by its test.

python host_memory_probe.py FOLDER SCHEME ... writes the checkpoint if it is not there, and loads it.
"""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch

from holdfast.loading.execution.execute import load_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.safetensors import SafetensorsFile, SafetensorsSource
from holdfast.memory.ledger import Ledger
from holdfast.memory.profiler import anonymous_bytes
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_schemes import AS_STORED, WEIGHT_SCHEMES, WeightRecipe

LAYERS, EXPERTS, INNER, HIDDEN, VOCAB = 2, 19, 704, 1024, 32_000
NUM_FILES = 3


def model_parameters() -> tuple[Parameter, ...]:
    """A head, an embedding, and layers of attention and experts whose tensors are apart."""
    parameters = [
        Parameter(
            "embed.weight", (VOCAB, HIDDEN), (Part("model.embed_tokens.weight", 0, (VOCAB, HIDDEN)),), "embedding"
        ),
        Parameter("lm_head.weight", (VOCAB, HIDDEN), (Part("lm_head.weight", 0, (VOCAB, HIDDEN)),), "head"),
    ]
    for layer in range(LAYERS):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        shapes = {"q": 2 * HIDDEN, "k": 256, "v": 256}
        parts, row = [], 0
        for name, num_rows in shapes.items():
            parts.append(Part(f"{theirs}self_attn.{name}_proj.weight", row, (num_rows, HIDDEN)))
            row += num_rows
        parameters.append(Parameter(f"{ours}qkv.weight", (row, HIDDEN), tuple(parts)))
        norm = f"{theirs}input_layernorm.weight"
        parameters.append(Parameter(f"{ours}norm.weight", (HIDDEN,), (Part(norm, 0, (HIDDEN,)),), "norm"))
        for name, halves, num_rows, width in (
            ("gate_up", ("gate", "up"), INNER, HIDDEN),
            ("down", ("down",), HIDDEN, INNER),
        ):
            names = [f"{theirs}mlp.experts.{e}.{half}_proj.weight" for e in range(EXPERTS) for half in halves]
            parts = [Part(tensor, place * num_rows, (num_rows, width)) for place, tensor in enumerate(names)]
            shape = (EXPERTS, len(halves) * num_rows, width)
            parameters.append(Parameter(f"{ours}experts.{name}.weight", shape, tuple(parts), "expert"))
    return tuple(parameters)


def write_checkpoint(folder: Path) -> None:
    """All tensors in an order of their own over a few files; numbers repeat, which a load does not see."""
    parts = [part for parameter in model_parameters() for part in parameter.parts]
    random.Random(5).shuffle(parts)
    numbers = (torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    raw = numbers.view(torch.uint8).numpy().tobytes()
    for index in range(NUM_FILES):
        header, end = {}, 0
        for part in parts[index::NUM_FILES]:
            start, end = end, end + 2 * part.source_rows * part.source_columns
            header[part.tensor] = {"dtype": "BF16", "shape": list(part.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / f"{index}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, end, len(raw)):
                file.write(raw[: end - start])


class PeakWatch(threading.Thread):
    """Looks at the anonymous memory of the process a thousand times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes() or 0)

    def end(self) -> int:
        self._is_over.set()
        self.join()
        return self.peak_bytes


def measure(source: SafetensorsSource, recipe: WeightRecipe) -> dict[str, float]:
    plan = plan_load(model_parameters(), source, "bfloat16", recipe)
    before = anonymous_bytes() or 0
    watch = PeakWatch()
    watch.start()
    start = time.perf_counter()
    loaded = load_weights(plan, source, "cpu", Ledger(), lambda done, total: None)
    seconds = time.perf_counter() - start
    over = watch.end() - before - plan.final_bytes
    assert len(loaded.weights) == len(plan.weights)
    return {"over": over, "planned": plan.host_bytes("cpu"), "final": plan.final_bytes, "read": plan.read_bytes,
            "seconds": seconds}  # fmt: skip


def measure_apart(source: SafetensorsSource, name: str, recipe: WeightRecipe) -> None:
    """In a process of its own: an allocator may keep what an earlier load gave back, and give it to the next."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            print(json.dumps({"name": name} | measure(source, recipe)), flush=True)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise SystemExit(f"{name}: the load ended with {status}")


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "0.safetensors").exists():
        write_checkpoint(folder)
    torch.set_num_threads(1)
    recipes = {"none": AS_STORED} | {name: WeightRecipe(scheme) for name, scheme in WEIGHT_SCHEMES.items()}
    source = SafetensorsSource([SafetensorsFile(folder / f"{index}.safetensors") for index in range(NUM_FILES)])
    for name in sys.argv[2:]:
        measure_apart(source, name, recipes[name])


if __name__ == "__main__":
    main()
