"""Find the numbers of rows for which products give the same bits: python benchmarks/gpu_invariance.py

batch_invariant and exact ranks rely on this property: without a workspace for split-K, cuBLAS multiplies a row alike for
every number of rows, and by a share of a weight as by the whole. An engine tests the numbers that its steps can have at the
start (runner/invariance.py). This benchmark tests every number up to MOST_ROWS, and some beyond, for the shapes of whole
models and of 2, 4 and 8 ranks. The reference is the most rows times the whole weight. Differing rows are printed as ranges;
the remaining sizes of steps are counted.

--workspace gives cuBLAS another workspace than an engine does (":0:0" is none).
On a CPU, to see that it runs: python benchmarks/gpu_invariance.py --tiny --device cpu
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpu_records import make_record, options, print_table, write_record

from holdfast.distributed.mesh import meshes
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.exactness import INVARIANT_ROWS, row_sizes
from holdfast.planning.target import SMALL_WORKSPACE
from holdfast.runner.invariance import Product, products

MODELS = ("Qwen3-32B", "Qwen3-8B", "Qwen3-0.6B", "Llama-3.1-8B")
SIZES = (1, 2, 4, 8)
MOST_ROWS = 512
BEYOND = (640, 768, 1000, 1024, 1536, 2000, 2048, 4096, 8192)
MOST_LOGITS = 256


def products_of(name: str, size: int) -> tuple[Product, ...]:
    """Return a rank's products that must equal those of the whole model."""
    declared = declare_config(CATALOGUE[name], name)
    whole = {weight.name: weight.shape for weight in declared.parameters()}
    shares = {weight.name: weight.shape for weight in declared.parameters(meshes(size, is_exact=True)[0])}
    return products(shares, whole, is_exact=True)


def ranges(numbers: Iterable[int], among: list[int]) -> Iterator[str]:
    """Join neighbours in `among` into ranges: 17 to 31."""
    places = [among.index(number) for number in numbers]
    start = 0
    for place, number in enumerate(places):
        if place + 1 == len(places) or places[place + 1] != number + 1:
            first, last = among[places[start]], among[number]
            yield str(first) if first == last else f"{first} to {last}"
            start = place + 1


def row_of(model: str, size: int, product: Product, rows: list[int], device: str) -> dict[str, Any]:
    """Compare one product: every number of rows against the most."""
    compared = [num_rows for num_rows in rows if num_rows <= MOST_LOGITS or not product.is_head]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    alike = product.alike(compared, compared[-1], dtype, torch.device(device))
    different = [num_rows for num_rows in compared if num_rows not in alike]
    steps = [num_rows for num_rows in row_sizes(compared[-1], min(MOST_LOGITS, compared[-1])) if num_rows in compared]
    return {
        "measure": f"{model}, {size} ranks: {product.name.split('.', 2)[-1]}, {product.size_n:,} x {product.size_k:,}",
        "unit": "numbers of rows",
        "values": {
            "compared": len(compared),
            "different": len(different),
            "sizes of steps": len(steps),
            "left": len(alike.intersection(steps)),
        },
        "holds": not different,
        "rows": list(ranges(different, compared)),
    }


@torch.inference_mode()
def main() -> None:
    """Compare, print, and write the record."""
    parser = options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--workspace", help="as CUBLAS_WORKSPACE_CONFIG has it; without it what an engine takes")
    arguments = parser.parse_args()
    os.environ.update(SMALL_WORKSPACE)  # torch reads this when it creates its first handle
    if arguments.workspace:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = arguments.workspace
    tiny = arguments.tiny
    rows = [*range(INVARIANT_ROWS, (24 if tiny else MOST_ROWS) + 1), *(() if tiny else BEYOND)]
    results = []
    for model in MODELS[2:3] if tiny else MODELS:
        for size in SIZES[:2] if tiny else SIZES:
            products = products_of(model, size)
            results += [
                row_of(model, size, product, rows, arguments.device) for product in (products[:1] if tiny else products)
            ]
    shown = [(row["measure"], *row["values"].values(), ", ".join(row["rows"])[:80]) for row in results]
    print_table("The same bits in any company", ("", *results[0]["values"], "rows that differ"), shown)
    settings = f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']}; {INVARIANT_ROWS} to {rows[-1]} rows"
    record = make_record("gpu-invariance", results, ", ".join(MODELS), settings, arguments, {})
    write_record(record, "invariance", arguments)


if __name__ == "__main__":
    main()
