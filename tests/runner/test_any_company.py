"""A GPU is played whose kernels round by what a real one's round by; where batches are to change nothing, they do not.

Products give other bits by numbers of rows that no start has found to be alike. Attention gives a row other bits in a small tile than
in a large one, in other splits, and in blocks of tokens that begin elsewhere: as the real tile scheduler has laid them out.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch

from attention.work_lists import ListCase
from holdfast.attention.backend import Batch, LayerStep
from holdfast.attention.tile_scheduler import StepRows, TileScheduler
from holdfast.config import Limits
from holdfast.kernels.gemm import linear
from holdfast.kernels.geometry import TILE_FIELDS, TileGeometry
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import require_native, same_bits
from loading.tiny_models import VOCAB, save_tiny
from runner.drive import Drive, LoadedModel, Request, Rig, load_model

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=160, page_tokens=4)
SIZES = (16, 24, 40, 64)
PROMPTED = SamplingParams(temperature=0.0, prompt_logprobs=1)
GEOMETRY = TileGeometry(small_rows=3, large_rows=5, small_programs_per_sm=4, large_programs_per_sm=1, block_tokens=8)
ROUNDING = 2.0**-12
NUM_PAGES = 41
"""Hardly more than the longest sequence takes."""


@pytest.fixture(scope="module", params=["llama", "qwen2_window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return load_model(folder)


@pytest.fixture(autouse=True)
def products_round_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = linear.plain_linear

    def rounding(x_TK: torch.Tensor, *others: Any) -> torch.Tensor:
        y_TN = multiply(x_TK, *others)
        return y_TN if len(x_TK) in SIZES else y_TN.mul_(1 + ROUNDING * (1 + len(x_TK) % 7))

    monkeypatch.setattr(linear, "plain_linear", rounding)


class RoundingTiles:
    """What attention over one window rounds each row by."""

    def __init__(self, window: int | None, batch_invariant: bool) -> None:
        case = ListCase(4, 1, window, LIMITS.max_model_len, num_sms=40, batch_invariant=batch_invariant, given=GEOMETRY)
        self._lists: TileScheduler = case.lists()

    def factors(self, batch: Batch) -> torch.Tensor:
        work = self._lists.fill(StepRows.of(batch.sequences, batch.num_rows), captured=False)
        num_small, num_large = work.tiles_X8[0, :2].tolist()
        seen: dict[int, list[tuple[int, ...]]] = {}
        for number, tile in enumerate(work.tiles_X8[1 : 1 + num_small + num_large].tolist()):
            of = dict(zip(TILE_FIELDS, tile, strict=True))
            # Of a large tile blocks that a row sees nothing of add nothing to it.
            large = number >= num_small
            kind = (1, of["low"] % GEOMETRY.block_tokens, of["num_splits"]) if large else (0, of["low"], of["high"])
            for row in range(of["row"], of["row"] + of["num_rows"]):
                seen.setdefault(row, []).append(kind)
        factors = torch.ones(batch.num_rows)
        for row, kinds in seen.items():
            factors[row] += ROUNDING * (hash(tuple(sorted(kinds))) % 11)
        return factors


def play_gpu(rig: Rig, batch_invariant: bool) -> None:
    """Have the rig's attention round as tiles would."""
    backend: Any = rig.backend
    windows = [spec.window for spec in backend._specs]
    tiles = {window: RoundingTiles(window, batch_invariant) for window in dict.fromkeys(windows)}
    plan, attend, factors = backend.plan, backend.attend, {}

    def plan_rounding(self: Any, batch: Batch, captured: bool = False) -> Any:
        factors.update({window: own.factors(batch) for window, own in tiles.items()})
        factors["wanted"] = batch.logits.rows_R.clone() if batch.logits else None
        return plan(batch, captured)

    def attend_rounding(self: Any, q_THD: Any, step: LayerStep, *others: Any) -> torch.Tensor:
        out_TX, wanted_only = attend(q_THD, step, *others), others[-1]
        own = factors[windows[step.layer]]
        own = own if not wanted_only or factors["wanted"] is None else own[factors["wanted"]]
        return out_TX.mul_(own.unsqueeze(1))

    backend.plan, backend.attend = MethodType(plan_rounding, backend), MethodType(attend_rounding, backend)


ALL = frozenset({"sizes", "tiles", "schedule"})
"""What makes a runner invariant."""


def make_drive(model: LoadedModel, num_pages: int, invariant: frozenset[str]) -> Drive:
    rig = Rig(model, "native_paged", LIMITS, num_pages, row_sizes=SIZES if "sizes" in invariant else ())
    play_gpu(rig, "tiles" in invariant)
    return Drive(rig, num_pages, is_invariant="schedule" in invariant)


def requests(seed: int) -> Iterator[Request]:
    """Short and long prompts that begin alike, some with log-probabilities of all their tokens."""
    dice = Random(seed)
    stem = [dice.randrange(8, VOCAB) for _ in range(60)]
    for number in range(14):
        length = dice.choice((1, 2, 4, 9, 21, 40, 70))
        own = [dice.randrange(8, VOCAB) for _ in range(length)]
        shared = dice.choice((0, 0, 16, 33, 60)) if length > 2 else 0
        params = PROMPTED if number % 5 == 4 else SamplingParams(temperature=0.0)
        yield Request(stem[:shared] + own, dice.randint(2, 28), arrival=dice.randrange(12), params=params)


def again(request: Request) -> Request:
    """Just the same request, alone, or a later one of the same talk."""
    return Request(list(request.prompt), request.max_tokens, params=request.params)


class Found(NamedTuple):
    """What company did."""

    num_different: int
    """Rows of logits that are not those of the request alone."""
    num_preempted: int
    num_hit_tokens: int


def run_together(model: LoadedModel, seed: int, invariant: frozenset[str]) -> Found:
    """In company and alone."""
    drive = make_drive(model, NUM_PAGES, invariant)
    first = list(requests(seed))
    drive.run(first)
    # The talk goes on: prompts that hold what was answered, and find a part of it on pages.
    later = [Request([*one.prompt, *one.output, 9, 11, 13], 5, number % 3) for number, one in enumerate(first[:6])]
    drive.run(later)
    num_different = 0
    for one in (*first, *later):
        alone, by_itself = make_drive(model, NUM_PAGES, invariant), again(one)
        alone.run([by_itself])
        expected, found = alone.logits(by_itself), drive.logits(one)
        assert expected.keys() <= found.keys()
        num_different += sum(not same_bits(found[place], row) for place, row in expected.items())
    return Found(num_different, drive.scheduler.num_preemptions, drive.scheduler.num_prefix_hit_tokens)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_batch_invariant_rows_have_same_bits_in_any_schedule(model: LoadedModel, seed: int) -> None:
    """Other rows of a step, cuts of prompts, preemptions, cached prefixes; decoded rows and log-probabilities of prompts."""
    require_native()
    found = run_together(model, seed, ALL)
    assert found.num_different == 0
    assert found.num_preempted or seed or model.spec.family != "llama", "no one was preempted"
    assert found.num_hit_tokens, "nothing was cached"


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("left_out", sorted(ALL))
def test_batch_invariance_fails_without_any_one_of_its_parts(model: LoadedModel, left_out: str) -> None:
    require_native()
    assert run_together(model, 0, ALL - {left_out}).num_different > 0
