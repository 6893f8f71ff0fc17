"""Figures of a comparison: against plain float64 formulas and hand-computed values, and the bound on kept states."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from holdfast.eval import quality
from holdfast.eval.quality import Compared, Contender, HalfTokens, Tally, compare, most_windows


def plain_compare(reference_RV: torch.Tensor, logits_RV: torch.Tensor, target_ids_R: torch.Tensor) -> Compared:
    """The definition, in one pass of float64 each."""
    log_p_RV, log_q_RV = reference_RV.double().log_softmax(-1), logits_RV.double().log_softmax(-1)
    kl_R = F.kl_div(log_q_RV, log_p_RV, reduction="none", log_target=True).sum(-1)
    loss_R = -log_q_RV.gather(1, target_ids_R[:, None])[:, 0]
    return Compared(kl_R, loss_R, reference_RV.argmax(-1) == logits_RV.argmax(-1))


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.1, 5.0])
def test_compare_equals_plain_formula(spread: float) -> None:
    dice = torch.Generator().manual_seed(3)
    logits_RV = torch.randn(13, 301, generator=dice) * 4
    other_RV = logits_RV + spread * torch.randn(13, 301, generator=dice)
    target_ids_R = torch.arange(13) * 23
    found, wanted = compare(logits_RV, other_RV, target_ids_R), plain_compare(logits_RV, other_RV, target_ids_R)
    torch.testing.assert_close(found.kl_R, wanted.kl_R, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.loss_R, wanted.loss_R, rtol=1e-12, atol=0)
    assert found.is_same_R.equal(wanted.is_same_R)


def test_compare_equal_logits_gives_positive_zero() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, -3.0]])
    kl = compare(logits_RV, logits_RV, torch.tensor([1])).kl_R
    assert kl.tolist() == [0.0]
    assert not bool(kl.signbit().any()), "-0 would stand in the table"


def test_compare_ties_count_as_agreement() -> None:
    reference_RV, other_RV = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[3.0, 3.0, 1.0]])
    assert compare(reference_RV, other_RV, torch.tensor([0])).is_same_R.tolist() == [True]
    assert compare(reference_RV, other_RV.roll(1), torch.tensor([0])).is_same_R.tolist() == [True]
    assert compare(reference_RV, other_RV.roll(-1), torch.tensor([0])).is_same_R.tolist() == [False]


def filled(kl: list[float], loss: list[float]) -> Tally:
    tally = Tally(1, len(kl))
    tally.add(0, 0, Compared(torch.tensor(kl), torch.tensor(loss), torch.tensor([True] * len(kl))))
    return tally


def test_quality_errors_match_hand_computation() -> None:
    reference, own = np.array([[1.0, 2.0, 3.0, 2.0]]), [1.5, 2.5, 2.5, 2.5]
    found = filled([0.1] * 4, own).quality(Contender("x", None, Fraction(1)), reference)  # type: ignore[arg-type]
    assert found.perplexity == pytest.approx(math.exp(2.25))
    # Losses deviate by -0.75, 0.25, 0.25, 0.25; differences are 0.5, 0.5, -0.5, 0.5.
    assert found.perplexity_error == pytest.approx(math.exp(2.25) * math.sqrt(0.75 / 4) / 2)
    assert found.change_error == pytest.approx(math.exp(0.25) * math.sqrt(0.75 / 4) / 2)


def test_quality_from_first_prediction_leaves_earlier_ones_out() -> None:
    tally = Tally(1, 4)
    is_same = torch.tensor([True, True, False, True])
    tally.add(0, 0, Compared(torch.tensor([9.0, 9.0, 0.1, 0.3]), torch.tensor([9.0, 9.0, 1.5, 2.5]), is_same))
    found = tally.quality(Contender("x", None, Fraction(1)), np.ones((1, 4)), 2)  # type: ignore[arg-type]
    assert (found.num_predictions, found.agreement) == (2, 0.5)
    assert (found.mean_kl, found.max_kl) == pytest.approx((0.2, 0.3))
    assert found.perplexity == pytest.approx(math.exp(2.0))
    assert found.change_error == pytest.approx(math.exp(1.0) * 0.5 / math.sqrt(2))


def test_quality_quantiles_take_the_higher_value() -> None:
    kl = [float(place) for place in range(2000)]
    found = filled(kl, [1.0] * 2000).quality(Contender("x", None, Fraction(1)), np.ones((1, 2000)))  # type: ignore[arg-type]
    assert (found.p99_kl, found.p999_kl, found.max_kl) == (1980, 1998, 1999)


def test_most_windows_bounds_kept_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "MAX_HIDDEN_BYTES", 10_000)
    assert most_windows(10, 50, "float32") == 5
    assert most_windows(10, 50, "bfloat16") == 10
    assert most_windows(1000, 50, "float32") == 1, "one window is always read"


def test_half_tokens_finish_reports_all_once() -> None:
    reported: list[tuple[int, int]] = []
    halves = HalfTokens(5, lambda done, total: reported.append((done, total)))
    halves.add(3)
    halves.finish()
    halves.finish()
    assert reported == [(0, 5), (1, 5), (5, 5)]
