"""From how many rows on, and up to how many, products give a row the same bits: python benchmarks/gpu_invariance.py

What batch_invariant and exact ranks rely on: cuBLAS, without a workspace to split products along K in, multiplies a row the same way
whatever the number of rows is, from 16 on, and by a share of a weight's rows as by all of them. An engine asks for a few numbers of
rows when it starts (runner/build.py); here it is every one up to MOST_ROWS, and some beyond, for the shapes of whole models and of 2, 4
and 8 ranks. Rows that differ are told as ranges.

On a CPU, to see that it runs: python benchmarks/gpu_invariance.py --tiny --device cpu
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpu_records import make_record, options, print_table, write_record

from holdfast.distributed.mesh import meshes
from holdfast.kernels.gemm.linear import linear, linear_float32
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.exactness import INVARIANT_ROWS
from holdfast.planning.target import SMALL_WORKSPACE

MODELS = ("Qwen3-32B", "Qwen3-8B", "Qwen3-0.6B", "Llama-3.1-8B")
SIZES = (1, 2, 4, 8)
MOST_ROWS = 512
BEYOND = (640, 768, 1000, 1024, 1536, 2000, 2048, 4096, 8192)
HEADS = ("lm_head.weight", "embed.weight")


def product_shapes(name: str, size: int) -> dict[tuple[int, int, bool], tuple[str, int]]:
    """(N, K, is it the head) of a rank's products: the name of one, and the N of the whole."""
    declared = declare_config(CATALOGUE[name], name)
    whole = {weight.name: weight.shape for weight in declared.parameters()}
    has_head = "lm_head.weight" in whole
    found: dict[tuple[int, int, bool], tuple[str, int]] = {}
    for weight in declared.parameters(meshes(size, is_exact=True)[0]):
        is_head = weight.name in HEADS
        if len(weight.shape) != 2 or (has_head and weight.name == "embed.weight"):
            continue
        found.setdefault((weight.shape[0], weight.shape[1], is_head), (weight.name, whole[weight.name][0]))
    return found


def multiply(x_TK: torch.Tensor, weight_NK: torch.Tensor, is_head: bool) -> torch.Tensor:
    """As a step does; logits are float32."""
    if not is_head:
        return linear(x_TK, weight_NK, None)
    return linear_float32(x_TK, weight_NK, x_TK.new_empty(len(x_TK), len(weight_NK), dtype=torch.float32))


def ranges(numbers: Iterable[int], among: list[int]) -> Iterator[str]:
    """Neighbours in `among` together: 17 to 31."""
    places = [among.index(number) for number in numbers]
    start = 0
    for place, number in enumerate(places):
        if place + 1 == len(places) or places[place + 1] != number + 1:
            first, last = among[places[start]], among[number]
            yield str(first) if first == last else f"{first} to {last}"
            start = place + 1


def row_of(
    model: str, size: int, shape: tuple[int, int, bool], name: str, all_n: int, rows: list[int], device: str
) -> dict[str, Any]:
    """One product: every number of rows against the fewest, and against the whole weight's."""
    (size_n, size_k, is_head), least = shape, rows[0]
    made = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    generator = torch.Generator(device).manual_seed(0)
    weight_NK = torch.randn(all_n, size_k, generator=generator, **made)
    x_TK = torch.randn(rows[-1], size_k, generator=generator, **made)
    alone_TN = multiply(x_TK[:least], weight_NK, is_head)[:, :size_n]
    different = [
        num_rows
        for num_rows in rows
        if not torch.equal(multiply(x_TK[:num_rows], weight_NK[:size_n], is_head)[:least], alone_TN)
    ]
    return {
        "measure": f"{model}, {size} ranks: {name.split('.', 2)[-1]}, {size_n:,} x {size_k:,}",
        "unit": "numbers of rows",
        "values": {"compared": len(rows), "different": len(different)},
        "holds": not different,
        "rows": list(ranges(different, rows)),
    }


@torch.inference_mode()
def main() -> None:
    """Compare, tell, and keep the record."""
    os.environ.update(SMALL_WORKSPACE)  # read by torch when it makes its first handle
    arguments = options((__doc__ or "").partition("\n")[0]).parse_args()
    tiny = arguments.tiny
    rows = [*range(INVARIANT_ROWS, (24 if tiny else MOST_ROWS) + 1), *(() if tiny else BEYOND)]
    results = []
    for model in MODELS[2:3] if tiny else MODELS:
        for size in SIZES[:2] if tiny else SIZES:
            shapes = list(product_shapes(model, size).items())
            for shape, (name, all_n) in shapes[1:2] if tiny else shapes:
                results.append(row_of(model, size, shape, name, all_n, rows, arguments.device))
    shown = [(row["measure"], *row["values"].values(), ", ".join(row["rows"])[:80]) for row in results]
    print_table("The same bits in any company", ("", "compared", "different", "rows"), shown)
    settings = f"cuBLAS without a workspace; {INVARIANT_ROWS} to {rows[-1]} rows"
    write_record(
        make_record("gpu-invariance", results, ", ".join(MODELS), settings, arguments, {}), "invariance", arguments
    )


if __name__ == "__main__":
    main()
