"""Every attention kernel, one property at a time: edges, peaks, scales, masks, and memory that an earlier call left."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from for_each import for_each
from kernels.every_attention import Attention, Memory, Poison, Step, assert_near, run_step
from kernels.every_grouped import GROUPED
from kernels.every_latent import HOPPER, LATENT
from kernels.exactness import same_bits
from kernels.quantized_kv_cases import QUIET

pytestmark = QUIET

EDGES = (-2, -1, 0, 1, 2)
OTHER_KERNELS = {
    "attention": {
        "output_gate:_gate_outputs_kernel",
        "rope_rows:_rope_rows_kernel",
        "write_kv:_scatter_pages_kernel",
        "write_kv:_write_kv_kernel",
        "write_quantized_kv:_write_quantized_kv_kernel",
    },
    "latent": {
        "compress:_compress_kernel",
        "index_scores:_score_kernel",
        "latent_projection:_absorb_kernel",
        "latent_projection:_value_kernel",
        "top_k_tokens:_filter_kernel",
        "top_k_tokens:_limit_kernel",
        "top_k_tokens:_row_kernel",
        "write_index:_quantize_queries_kernel",
        "write_index:_write_index_kernel",
        "write_latent:_write_latent_kernel",
        "write_window:_rotate_back_kernel",
        "write_window:_write_window_kernel",
    },
}
"""Kernels that do not attend: they have suites of their own."""


def that_take(*features: str, turn: int | None = None) -> pytest.MarkDecorator:
    """Parametrize over the kernels that have all of these features.

    With a turn, a quick run takes one adapter of each family: another one in each property.
    """
    families = defaultdict(list)
    for attention in (*GROUPED, *LATENT, *HOPPER):
        if attention.takes.issuperset(features):
            families[attention.family or attention.name].append(attention)
    cases = []
    for family in families.values():
        for place, one in enumerate(family):
            is_turn = place == (turn or 0) % len(family)
            if one not in HOPPER:
                cases.append(pytest.param(one, marks=() if turn is None or is_turn else pytest.mark.slow))
            elif is_turn or (not features and turn is None):  # each compiles kernels of its own for ten seconds
                cases.append(pytest.param(one, marks=pytest.mark.gpu))
    return pytest.mark.parametrize("attention", cases, ids=str)


def judge(attention: Attention, step: Step, device: torch.device) -> torch.Tensor:
    """Run a step in fresh memory against the definition; padding is zeros."""
    memory, world = Memory(device), attention.make(step, device)
    out_TX, expected_TX = world.run(memory).clone(), world.expected()
    memory.check()
    assert_near(attention, out_TX[: step.num_rows], expected_TX)
    assert same_bits(out_TX[step.num_rows :], torch.zeros_like(out_TX[step.num_rows :])), "padding is zeros"
    return out_TX


def rows_of(attention: Attention, count: int) -> int:
    """As many rows of one sequence, or one if the kernel takes no more."""
    return count if "prefill" in attention.takes else 1


def splits_of(attention: Attention, count: int = 2) -> int:
    return count if "splits" in attention.takes else 1


def longer(attention: Attention) -> Step:
    """Sequences of different lengths, beyond a block."""
    rows = ((attention.block + 2, 1), (attention.block - 1, rows_of(attention, 3)))
    return Step(rows, seed=4, splits=splits_of(attention))


def shorter(attention: Attention) -> Step:
    """Other lengths and inputs, and fewer rows."""
    return Step(((attention.block, 1), (1, 1)), seed=9, splits=splits_of(attention))


@that_take()
def test_attention_decode_at_every_block_edge_is_exact(device, attention):
    """Rows at different edges share one call."""
    rows = [(attention.block + offset, 1) for offset in EDGES]
    judge(attention, Step((*rows, (2 * attention.block, 1), (0, 1))), device)


@that_take(turn=0)
def test_attention_decode_at_every_page_edge_is_exact(device, attention):
    positions = [multiple * attention.page + offset for multiple in (1, 3) for offset in (-1, 0, 1)]
    judge(attention, Step(tuple((position, 1) for position in positions), seed=1), device)


@that_take("prefill", turn=1)
def test_attention_prefill_across_every_block_edge_is_exact(device, attention):
    rows = [(attention.block + offset, 2) for offset in EDGES]
    judge(attention, Step((*rows, (2 * attention.block - 2, 5), (0, 3)), seed=2), device)


@that_take("splits", turn=2)
def test_attention_splits_at_every_block_edge_are_exact(device, attention):
    rows = [(2 * attention.block + offset, rows_of(attention, 1 + index % 2)) for index, offset in enumerate(EDGES)]
    judge(attention, Step((*rows[:3], (1, 1)), seed=3, splits=2), device)
    judge(attention, Step((*rows[3:], (1, 1)), seed=3, splits=3), device)


@that_take("peak")
def test_attention_peak_in_last_block_rescales_the_others(device, attention):
    """Every format has parts of its own that are rescaled."""
    end = attention.block + 9
    judge(attention, Step(((end, 1),), peak=end), device)


@that_take("peak", turn=3)
@for_each("place", ["first", "middle", "last"])
def test_attention_peak_in_any_split_weighs_the_others(device, attention, place):
    """A merge rescales what came before a larger maximum, and weighs what comes after it."""
    end = 2 * attention.block + 9
    peak = {"first": 0, "middle": attention.block + 1, "last": end}[place]
    judge(attention, Step(((end, 1),), peak=peak, splits=splits_of(attention, 3)), device)


@that_take("uneven")
def test_attention_distant_scales_stay_with_their_group(device, attention):
    rows = ((attention.block + 3, 1), (attention.block // 2, 1))
    judge(attention, Step(rows, uneven=True), device)


@that_take(turn=4)
def test_attention_memory_contents_change_no_bit(device, attention):
    """Scratch, outputs, free slots, free pages and padding hold NaN, zeros, or what an earlier call left.

    The second call on the same memory is the shorter one: what the longer one left lies under it and after it.
    """
    padding = 2 * ("padding" in attention.takes)
    steps = [replace(shorter(attention), num_padding=padding), longer(attention)]
    expected = [judge(attention, step, device) for step in steps]
    for poison, order in ((Poison.ZEROS, (1, 0)), (Poison.LEFTOVERS, (0, 1, 0))):
        memory = Memory(device, poison)
        for call in order:
            out = run_step(attention, steps[call].with_poison(poison), device, memory)
            assert same_bits(out, expected[call]), f"{poison=} {order=} {call=}"


@that_take("window", turn=0)
def test_attention_does_not_read_before_the_window(device, attention):
    """Neither tokens nor entries of the block table: other sequences own these pages."""
    rows = ((attention.block + 2, 1), (attention.block + 20, rows_of(attention, 3)))
    step = Step(rows, window=attention.block // 2 + 3, splits=splits_of(attention))
    expected = judge(attention, step, device)
    for poison in (Poison.ZEROS, Poison.LEFTOVERS):
        assert same_bits(run_step(attention, step.with_poison(poison), device), expected), f"{poison=}"


@that_take("window", turn=1)
@for_each("window", ["one", "inside", "below", "edge", "above"])
def test_attention_window_of_any_size_hides_older_tokens(device, attention, window):
    """One sequence is shorter than the window."""
    block = attention.block
    size = {"one": 1, "inside": 7, "below": block - 1, "edge": block, "above": block + 1}[window]
    rows = ((block + 5, 1), (2 * block - 1, rows_of(attention, 3)), (3, 1))
    judge(attention, Step(rows, window=size, splits=splits_of(attention)), device)


@that_take("sinks", turn=2)
def test_attention_sinks_join_the_softmax_of_their_head_once(device, attention):
    for splits in {1, splits_of(attention)}:
        judge(attention, Step(((attention.block + 5, 1), (2, 1)), sinks=True, splits=splits), device)


@that_take("softcap", turn=3)
def test_attention_soft_cap_bends_every_score(device, attention):
    """A cap below the peak, and one that bends it by a few percent; sinks are not capped."""
    rows = ((attention.block + 5, 1), (2, rows_of(attention, 2)))
    for cap in (2.0, 20.0):
        judge(attention, Step(rows, softcap=cap, peak=3, sinks="sinks" in attention.takes), device)


@that_take("padding", turn=4)
@for_each("num_padding", [1, 9])
def test_attention_padding_is_written_as_zeros(device, attention, num_padding):
    """Whole and split rows beside it; a merge of many rows has another shape."""
    for splits in {1, splits_of(attention)}:
        judge(attention, Step(((attention.block, 1), (3, 1)), splits=splits, num_padding=num_padding), device)


@pytest.mark.parametrize(
    ("folder", "attentions"), [pytest.param("attention", GROUPED), *([("latent", LATENT)] if LATENT else [])]
)
def test_attention_kernels_all_have_adapters(device, root, monkeypatch, folder, attentions):
    """Kernels are found by their decorator; those for warp groups run on a GPU alone and have tests there."""
    if device.type != "cpu":
        pytest.skip("the interpreter counts launches")
    from triton.runtime import interpreter

    launched, launch = set(), interpreter.GridExecutor.__call__

    def launch_and_note(executor, *args, **kwargs):
        launched.add(f"{executor.fn.__module__}:{executor.fn.__name__}")
        return launch(executor, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_and_note)
    for attention in attentions:
        run_step(attention, Step(((3, rows_of(attention, 2)),), splits=splits_of(attention)), device)
    written = {
        f"{path.stem}:{name}"
        for path in (root / "src" / "holdfast" / "kernels" / folder).glob("*.py")
        for name in re.findall(r"^@jit(?:_counting\(.*\))?\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    attending = {f"holdfast.kernels.{folder}.{name}" for name in written - OTHER_KERNELS[folder]}
    assert written >= OTHER_KERNELS[folder], "a kernel of the list is gone"
    assert launched >= attending, f"no adapter launches {attending - launched}"
