"""Decode steps of a tiny model on the fused decode path, beside the same steps by the ordinary way: the tokens are given.

The path runs on the plain-torch references of its kernels, or on the kernels themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.config import Limits
from holdfast.families.grouped import layer as attention
from holdfast.families.latent import layer as latent_attention
from holdfast.families.state import layer as state
from holdfast.families.state.declarations import TritonStateDeclaration
from holdfast.kernels.gemm.deferred_rms_norm import defer_rms_norm_reference
from holdfast.kernels.geometry import FUSED_DECODE_ROWS
from holdfast.layers import moe
from holdfast.models import activations, decoder_declaration, fused_decode
from holdfast.models.declaration import StepShape
from holdfast.models.decoder_layer import DecoderParts
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from kernels.gemm_references import (
    linear_add_reference,
    normed_linear_reference,
    row_amax_reference,
    small_batch_linear_reference,
)
from kernels.quantized_cases import weight_on
from runner import drive
from runner.drive import CPU, LoadedModel, Rig

LIMITS = Limits(max_num_seqs=5, max_num_batched_tokens=60, max_model_len=40, page_tokens=4)
NUM_PAGES = 80
GROUP_PAGES = 40
NUM_STEPS = 5
"""Behind the prompt, so that every sequence enters a page of its own at least once."""
REFERENCES: Mapping[str, Callable[..., Any]] = {
    "defer_rms_norm": defer_rms_norm_reference,
    "row_amax": row_amax_reference,
    "normed_linear": normed_linear_reference,
    "linear_add": linear_add_reference,
    "small_batch_linear": small_batch_linear_reference,
}
"""What the path launches, in plain torch."""


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the path run on a CPU, and take as many rows of e4m3 as of other weights."""
    monkeypatch.setattr(activations, "QUANTIZED_DECODE_ROWS", FUSED_DECODE_ROWS)
    for name, reference in REFERENCES.items():
        for module in (fused_decode, attention, latent_attention, state, moe):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, reference)


def make_rig(
    model: LoadedModel,
    recipe: WeightRecipe = AS_STORED,
    fused: bool = True,
    backend: str = "torch_paged",
    dtype: str = "float32",
    row_sizes: tuple[int, ...] = (),
    device: torch.device = CPU,
) -> Rig:
    """A runner whose decoder takes the path or does not, whatever device and type it is for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "DecoderParts", partial(DecoderParts, takes_fused_decode=fused, recipe=recipe))
        patch.setattr(drive, "CPU", device)
        patch.setattr(drive, "StepShape", partial(StepShape, recipe=recipe))
        if device.type == "cuda":
            patch.setattr(drive, "TorchStateDeclaration", TritonStateDeclaration)
        patch.setattr(decoder_declaration, "takes_fused_decode", lambda *_: fused)
        rig = Rig(model, backend, LIMITS, NUM_PAGES, kv_dtype=dtype, dtype=dtype, row_sizes=row_sizes)
    poison = rig.poison

    def spare_counters() -> None:
        """Counters are at zero between launches; all else that products share is theirs only while they run."""
        poison()
        if rig.decoder.fused is not None:
            rig.decoder.fused.scratch.arrived.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize()  # the runner works on a stream of its own

    rig.poison = spare_counters  # type: ignore[method-assign]
    return rig


def placed(model: LoadedModel, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Just the same model elsewhere, with numbers in another type; codes stay what they are."""

    def moved(weight: AnyWeight) -> AnyWeight:
        if isinstance(weight, PackedWeight):
            parts = (replace(part, planes=tuple(plane.to(device) for plane in part.planes)) for part in weight.parts)
            return replace(weight, parts=tuple(parts))
        return weight_on(weight, device) if isinstance(weight, QuantizedWeight) else weight.to(device, dtype)

    return LoadedModel(model.spec, {name: moved(weight) for name, weight in model.weights.items()})


def decode(rig: Rig, num_rows: int, num_steps: int = NUM_STEPS) -> torch.Tensor:
    """Logits of so many sequences over some decode steps, behind prompts of different lengths: [steps, rows, V]."""
    tokens = torch.randint(
        8, rig.runner.vocab_size, (num_rows, 40), generator=torch.Generator().manual_seed(num_rows)
    ).tolist()
    sequences, found = [], []
    for index, own in enumerate(tokens):
        firsts = [group * GROUP_PAGES + index * 8 for group in range(len(rig.groups))]
        tables = [list(range(first, first + 8))[::-1] for first in firsts]
        length = 3 + 2 * index
        sequences.append(Sequence(index, own[:length], length, SamplingParams(temperature=0.0), 0, 9, tables=tables))
        sequences[-1].slot = index
    rig.execute(LiveStep(tuple(ScheduledSequence.of(sequence, 0, sequence.num_tokens) for sequence in sequences)))
    for _ in range(num_steps):
        for sequence, own in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(own[sequence.num_tokens])
        rig.execute(LiveStep(tuple(ScheduledSequence.of(one, one.num_tokens - 1, 1) for one in sequences)))
        found.append(torch.stack([rig.logits[one.sequence_id][one.num_tokens - 1] for one in sequences]))
    return torch.stack(found)
