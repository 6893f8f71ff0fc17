"""Grammar masks (structured outputs) alone on a GPU: python benchmarks/gpu_masks.py

One bit a token masks float32 logits. The cost of a step is the copy of the masks from pinned host memory, and the kernel.
The roof is bytes / 4.37 TB/s: the kernel reads the bits and writes the masked logits. Correctness comes first:
every bit against plain torch.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_masks.py --tiny --device cpu
"""

from typing import Any

import torch
from gpu_attention import READ_BYTES_PER_SECOND, seconds_per_call
from gpu_records import make_record, options, print_table, write_record

from holdfast.kernels.sampling.edit_logits import WORD_BITS, mask_logits_reference, mask_logits_triton

VOCABULARIES = (49152, 128256, 151936, 262144)
ROWS = (1, 8, 64)
NUM_CALLS = 20
"""Calls in one graph."""
ALLOWED = (0.0005, 0.3)
"""Shares of tokens that a grammar allows: a JSON key, and the inside of a string."""


def make_masks(num_rows: int, vocab_size: int, allowed: float) -> torch.Tensor:
    """Return int32 words with this share of ones."""
    num_words = -(-vocab_size // WORD_BITS)
    generator = torch.Generator().manual_seed(num_rows)
    is_allowed = torch.rand(num_rows, num_words, WORD_BITS, generator=generator) < allowed
    values = is_allowed.long() << torch.arange(WORD_BITS)
    return values.sum(-1).to(torch.int32)


def row_of(num_rows: int, vocab_size: int, allowed: float, device: torch.device) -> dict[str, Any]:
    """Check one shape, then time it."""
    masks_RW = make_masks(num_rows, vocab_size, allowed)
    if device.type == "cuda":
        masks_RW = masks_RW.pin_memory()
    logits_RV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))
    expected_RV, block_RV = logits_RV.clone(), logits_RV.to(device)
    mask_logits_reference(expected_RV, masks_RW)
    on_device_RW = masks_RW.to(device)
    mask_logits_triton(block_RV, on_device_RW)
    assert torch.equal(block_RV.cpu(), expected_RV), f"{num_rows} rows of {vocab_size} differ from plain torch"
    kernel = seconds_per_call([lambda: mask_logits_triton(block_RV, on_device_RW)] * NUM_CALLS, device)
    copy = seconds_per_call([lambda: on_device_RW.copy_(masks_RW, non_blocking=True)] * NUM_CALLS, device)
    num_bytes = masks_RW.nbytes + int((1 - allowed) * 4 * num_rows * vocab_size)
    return {
        "measure": f"{num_rows} rows of {vocab_size:,} tokens, {allowed:.2%} left",
        "unit": "us",
        "values": {"mask kernel": round(1e6 * kernel, 2), "copy of masks": round(1e6 * copy, 2)},
        "percent_of_roof": round(100 * num_bytes / READ_BYTES_PER_SECOND / kernel, 1),
    }


def main() -> None:
    """Check, time, and write the record."""
    arguments = options((__doc__ or "").partition("\n")[0]).parse_args()
    device = torch.device(arguments.device)
    vocabularies, rows = ((100,), (1, 3)) if arguments.tiny else (VOCABULARIES, ROWS)
    results = [
        row_of(num_rows, vocab_size, allowed, device)
        for vocab_size in vocabularies
        for num_rows in rows
        for allowed in ALLOWED
    ]
    columns = ("", "mask kernel, us", "copy of masks, us", "% of the roof")
    print_table(
        "Masks", columns, [(row["measure"], *row["values"].values(), row["percent_of_roof"]) for row in results]
    )
    record = make_record("gpu-masks", results, "logits alone", "float32 logits, one bit a token", arguments, {})
    write_record(record, "masks", arguments)


if __name__ == "__main__":
    main()
