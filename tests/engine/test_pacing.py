"""StepPacer against models of devices: it keeps to the target from below, follows a cost that grows, and never stops prompts."""

import random
from collections.abc import Callable
from itertools import pairwise

from for_each import for_each
from holdfast.engine.pacing import LOOK_STEPS, MIN_ROWS, START_ROWS, StepPacer

SIZES = (64, 128, 256, 512)
TILE_ROWS = 16
Cost = Callable[[int, int, int], float]
"""Seconds of a step: rows, those of prompts among them, and the context before these."""


def gpu_seconds(num_rows: int, num_prompt_rows: int, context: int) -> float:
    """Qwen3-32B on an H200: 15 ms to read weights, 0.094 ms of products a row, attention in tiles of 16 rows."""
    num_padded = next((size for size in SIZES if size >= num_rows), num_rows) if num_prompt_rows else num_rows
    return max(15e-3, 0.094e-3 * num_padded) + 6e-3 + 0.15e-6 * -(-num_prompt_rows // TILE_ROWS) * context


def cpu_seconds(num_rows: int, num_prompt_rows: int, context: int) -> float:
    """SmolLM2-135M on two cores: nearly all of it grows with the rows."""
    return 29e-3 + 3.4e-3 * num_rows + 0.5e-6 * num_prompt_rows * context


def read_prompt(
    pacer: StepPacer,
    cost: Cost,
    num_decoding: int,
    num_tokens: int,
    *,
    lag: int = 0,
    noise: Callable[[], float] = lambda: 1.0,
) -> list[tuple[int, float]]:
    """Rows of prompts and seconds of each step until the prompt is read; results arrive `lag` steps late."""
    steps: list[tuple[int, float]] = []
    late: list[tuple[int, int, int, float]] = []
    done = 0
    while done < num_tokens:
        wanted = pacer.prompt_rows(num_decoding)
        rows = num_tokens - done if wanted is None else min(wanted, num_tokens - done)
        seconds = cost(num_decoding + rows, rows, done) * noise()
        steps.append((rows, seconds))
        late.append((num_decoding + rows, rows, num_decoding, seconds))
        if len(late) > lag:
            pacer.see(*late.pop(0))
        done += rows
        assert len(steps) < 10_000, f"{done} of {num_tokens} tokens were read"
    return steps


def warm(pacer: StepPacer, cost: Cost, num_decoding: int) -> float:
    """Decode steps before the prompt comes; what one takes."""
    for _ in range(20):
        pacer.see(num_decoding, 0, num_decoding, cost(num_decoding, 0, 0))
    return cost(num_decoding, 0, 0)


@for_each("lag", [0, 1])
@for_each("num_decoding", [1, 8, 64])
def test_pacer_on_a_gpu_keeps_steps_below_twice(num_decoding: int, lag: int) -> None:
    pacer = StepPacer(1.7, SIZES, tile_rows=TILE_ROWS)
    base = warm(pacer, gpu_seconds, num_decoding)
    steps = read_prompt(pacer, gpu_seconds, num_decoding, 32768, lag=lag)
    assert max(seconds for _, seconds in steps) < 1.85 * base
    assert all(rows % TILE_ROWS == 0 for rows, _ in steps[:-1] if rows > TILE_ROWS), "a tile is not full"
    assert sum(seconds for _, seconds in steps) / len(steps) > 1.4 * base, "too few rows"


@for_each("num_decoding", [1, 4, 8])
def test_pacer_on_a_cpu_reaches_its_target_from_below(num_decoding: int) -> None:
    pacer = StepPacer(3.0, max_seconds=1.0)
    base = warm(pacer, cpu_seconds, num_decoding)
    steps = read_prompt(pacer, cpu_seconds, num_decoding, 4000)
    assert max(seconds for _, seconds in steps) < 3.15 * base
    reached = sorted(seconds for _, seconds in steps)[len(steps) // 2]
    assert reached > 2.8 * base, "too few rows"


def test_pacer_costs_no_throughput() -> None:
    pacer = StepPacer(1.7, SIZES, tile_rows=TILE_ROWS)
    base = warm(pacer, gpu_seconds, 64)
    steps = read_prompt(pacer, gpu_seconds, 64, 32768)
    uncut = sum(gpu_seconds(64 + 8128, 8128, start) for start in range(0, 32768, 8128)) + base * (len(steps) - 4)
    assert sum(seconds for _, seconds in steps) < 1.05 * uncut


def test_pacer_of_a_noisy_machine_keeps_to_the_target() -> None:
    dice = random.Random(1)
    pacer = StepPacer(3.0)
    base = warm(pacer, cpu_seconds, 4)
    steps = read_prompt(pacer, cpu_seconds, 4, 4000, noise=lambda: dice.uniform(0.85, 1.15))
    assert max(seconds for _, seconds in steps) < 4 * base


def test_pacer_at_most_doubles_the_rows_of_a_step() -> None:
    pacer = StepPacer(100.0)
    warm(pacer, cpu_seconds, 4)
    steps = read_prompt(pacer, cpu_seconds, 4, 3000)
    assert steps[0][0] == MIN_ROWS
    assert all(later <= 2 * earlier + 4 for (earlier, _), (later, _) in pairwise(steps))


def test_pacer_without_a_decode_step_looks_at_one() -> None:
    pacer = StepPacer(3.0)
    assert pacer.prompt_rows(4) == 0
    pacer.see(4, 0, 4, 0.04)
    assert pacer.prompt_rows(4) == MIN_ROWS
    assert pacer.prompt_rows(40) == 0, "that of 4 sequences says little of 40"


def test_pacer_looks_at_a_decode_step_now_and_then() -> None:
    pacer = StepPacer(3.0)
    warm(pacer, cpu_seconds, 4)
    wanted = [rows for rows, _ in read_prompt(pacer, cpu_seconds, 4, 4000)]
    looks = [place for place, rows in enumerate(wanted) if rows == 0]
    assert looks[0] == LOOK_STEPS
    assert len(looks) == len(wanted) // (LOOK_STEPS + 1)


def test_pacer_without_decoders_keeps_to_seconds() -> None:
    pacer = StepPacer(3.0, max_seconds=1.0)
    steps = read_prompt(pacer, cpu_seconds, 0, 8000)
    assert steps[0][0] == START_ROWS
    assert 0.8 < max(seconds for _, seconds in steps) < 1.05
    assert StepPacer(1.7).prompt_rows(0) is None


def test_pacer_takes_what_it_learned_to_fewer_decoders() -> None:
    pacer = StepPacer(3.0)
    warm(pacer, cpu_seconds, 8)
    read_prompt(pacer, cpu_seconds, 8, 1000)
    base = warm(pacer, cpu_seconds, 1)
    steps = read_prompt(pacer, cpu_seconds, 1, 1000)
    assert max(seconds for _, seconds in steps) < 3.3 * base


def test_pacer_after_one_slow_step_forgets_it() -> None:
    calm, shaken = StepPacer(10.0), StepPacer(10.0)
    for pacer in (calm, shaken):
        warm(pacer, cpu_seconds, 1)
    shaken.see(401, 400, 1, 60.0)
    most = [max(rows for rows, _ in read_prompt(pacer, cpu_seconds, 1, 3000)) for pacer in (calm, shaken)]
    assert most[1] > 0.8 * most[0] > 2 * MIN_ROWS


def test_pacer_of_a_slow_prompt_lets_it_go_on() -> None:
    pacer = StepPacer(1.5)
    warm(pacer, cpu_seconds, 1)
    for _ in range(10):
        rows = pacer.prompt_rows(1)
        assert rows == MIN_ROWS
        pacer.see(1 + rows, rows, 1, 9.0)
