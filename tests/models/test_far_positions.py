"""Logits at positions near a million against transformers: rope rows of a step, whole, in chunks and in decode.

A step's positions are shifted where the model takes them, and pages are those of a short text: attention sees only differences of
positions, so a text of some tokens that begins near a million costs what a short text costs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.kernels.attention.rope_rows import RopeRows
from holdfast.models import layer_stack
from models import test_decoder, tiny_latents
from runner.drive import Drive, LoadedModel, Request

FAR = 2**20 - 64
LATENT = "v3 like R1"
CASES = ("llama", "llama3", "llama_yarn", "gemma3", "qwen3", LATENT, "sparse like V3.2")


def far_drive(case: str, max_rows: int) -> tuple[Any, Drive, Request]:
    """transformers' model, ours with shifted positions, and a request of 33 tokens and 6 more."""
    if case in tiny_latents.LATENT_MODELS:
        theirs, ours = tiny_latents.tiny(case)
        drive, request = tiny_latents.make_drive(ours, max_rows), tiny_latents.make_request(33, 6)
    else:
        theirs, ours = test_decoder.tiny(case)
        drive = test_decoder.make_drive(far(ours), "torch_paged", max_rows)
        (request,) = test_decoder.make_requests((33,), 6)
    decoder: Any = drive.rig.decoder
    for name in ("step_logits", "hidden"):
        setattr(decoder, name, shifted(getattr(decoder, name)))
    return theirs, drive, request


def far(model: LoadedModel) -> LoadedModel:
    """Just the same with a context of a million tokens."""
    return replace(model, spec=replace(model.spec, max_position=2**20))


def shifted(compute: Any) -> Any:
    """Just the same of a step whose tokens stand FAR later; what it calls itself is not shifted again."""

    def at(batch: Any, plan: Any) -> torch.Tensor:
        positions_T = torch.where(batch.positions_T < FAR, batch.positions_T + FAR, batch.positions_T)
        return compute(replace(batch, positions_T=positions_T), plan)

    return at


@torch.no_grad()
def error(case: str, max_rows: int) -> float:
    """The largest difference of a logit from transformers', over all positions."""
    theirs, drive, request = far_drive(case, max_rows)
    drive.run([request])
    token_ids = [*request.prompt, *request.output]
    wanted = theirs(torch.tensor([token_ids]), position_ids=FAR + torch.arange(len(token_ids))[None]).logits[0, :-1]
    logits = drive.logits(request)
    found = torch.stack([logits[position] for position in range(len(token_ids) - 1)])
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("max_rows", [64, 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES)
def test_logits_near_a_million_are_those_of_transformers(case: str, max_rows: int) -> None:
    assert error(case, max_rows) <= 1e-4


@pytest.mark.parametrize("case", ["llama", LATENT])
def test_logits_from_exact_angles_are_others(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above sees how an angle is rounded."""

    def exact(positions_T: torch.Tensor, rows: RopeRows) -> None:
        angle_TP = torch.outer(positions_T.double(), rows.frequency_SP[0].double())
        rows.cos_STP[0, : len(angle_TP)] = angle_TP.cos() * rows.magnitudes[0]
        rows.sin_STP[0, : len(angle_TP)] = angle_TP.sin() * rows.magnitudes[0]

    monkeypatch.setattr(layer_stack, "fill_rope_rows", exact)
    assert error(case, 64) > 1e-3
