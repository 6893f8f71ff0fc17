"""Rows pooled into entries by a streaming state: against windows pooled whole, in steps of any cut and company; entries in their slots."""

import pytest
import torch

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent import compress
from holdfast.kernels.latent.compress import (
    Compressor,
    PooledRows,
    compress_entries,
    compress_entries_reference,
    compress_entries_triton,
    compress_index,
    compress_index_reference,
    compress_index_triton,
    compress_rows,
    compress_rows_reference,
    compress_rows_triton,
)
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.quant.entry_state import pooled_width, state_bytes
from kernels.compress_cases import (
    CompressStep,
    Part,
    States,
    compressor_on,
    in_steps,
    make_compressor,
    make_rows,
    pooled_windows,
)
from kernels.index_cases import make_index_planes, planes_to
from kernels.latent_page_cases import (
    POISON_BYTE,
    assert_same_latents,
    make_latent_planes,
    on_device,
    rotary_rows,
    tensors_of,
)
from kernels.triton_cases import QUIET, amid_echoes, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

KINDS = pytest.mark.parametrize(("ratio", "is_overlapped", "dim"), [(4, True, 48), (8, False, 72), (5, True, 16)])
BOTH = pytest.mark.parametrize("function", [compress_rows_triton, compress_rows_reference])
PLACES = (3, 0, 4)


def where_of(function, device) -> torch.device:
    return torch.device("cpu") if function is compress_rows_reference else device


def pool(function, step: CompressStep, states: States, compressor: Compressor, device) -> torch.Tensor:
    """The entries of a step, on the CPU; rows that end no window are left as poison."""
    num_rows = len(step.pooled)
    entries_TD = states.zones.allocate(num_rows, compressor.dim).fill_(torch.nan)
    pooled_TX = amid_poison(step.pooled, device)
    positions_T, states_T = (amid_echoes(numbers, device) for numbers in (step.positions, step.states))
    rows = PooledRows(pooled_TX, positions_T, positions_T, states_T, states.state_PK3D)
    function(rows, compressor, entries_TD)
    states.zones.check()
    return entries_TD.cpu()


def run(
    function, sequences: list[torch.Tensor], steps, compressor: Compressor, device
) -> list[dict[int, torch.Tensor]]:
    """The entries of every sequence by position; no other row of a step may be written."""
    states, there = States(compressor, device), compressor_on(compressor, device)
    found: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
    for number, taken in enumerate(steps):
        # Every other step has no padding between its sequences.
        num_padding = number % 2
        parts = [Part(PLACES[i], start, sequences[i][start : start + size]) for i, start, size in taken]
        entries_TD = pool(function, CompressStep.of(parts, sequences[0].shape[1], num_padding), states, there, device)
        row = 0
        for i, start, size in taken:
            for position in range(start, start + size + num_padding):
                if position < start + size and (position + 1) % compressor.ratio == 0:
                    found[i][position] = entries_TD[row]
                else:
                    assert bool(entries_TD[row].isnan().all()), "a row has an entry that ends no window"
                row += 1
    return found


def judge(function, sequences: list[torch.Tensor], steps, compressor: Compressor, device) -> None:
    found = run(function, sequences, steps, compressor, where_of(function, device))
    for entries, rows_NX in zip(found, sequences, strict=True):
        wanted = pooled_windows(rows_NX, compressor)
        assert entries.keys() == wanted.keys()
        for position, entry_D in wanted.items():
            torch.testing.assert_close(entries[position].double(), entry_D, rtol=1e-6, atol=1e-6)


@pytest.mark.each_value
@KINDS
@BOTH
@pytest.mark.parametrize("gate_size", [1.0, 40.0])
def test_compress_rows_any_cut_gives_entries_of_whole_windows(
    device, function, ratio, is_overlapped, dim, gate_size
) -> None:
    compressor = make_compressor(ratio, is_overlapped, dim)
    lengths = [5 * ratio, 4 * ratio + 1, 5 * ratio + 3]
    sequences = [make_rows(length, compressor, gate_size, i) for i, length in enumerate(lengths)]
    everything = 6 * ratio
    for chunks in ([everything] * 3, [1, ratio, 2 * ratio + 1], [ratio + 1, 3, everything]):
        judge(function, sequences, in_steps(lengths, chunks, [0, 1, 0]), compressor, device)


@BOTH
def test_compress_rows_at_model_ratio_matches_windows(device, function) -> None:
    compressor = make_compressor(128, False, 32)
    lengths = [300, 130, 127]
    sequences = [make_rows(length, compressor, 8.0, i) for i, length in enumerate(lengths)]
    judge(function, sequences, in_steps(lengths, [77, 130, 126], [0, 0, 0]), compressor, device)


@BOTH
def test_compress_rows_at_model_width_matches_windows(device, function) -> None:
    compressor = make_compressor(4, True, 512)
    judge(function, [make_rows(23, compressor)], in_steps([23], [9], [0]), compressor, device)


@BOTH
def test_compress_rows_is_batch_invariant(device, function) -> None:
    compressor, where = make_compressor(4, True, 24), where_of(function, device)
    sequences = [make_rows(length, compressor, 4.0, i) for i, length in enumerate((14, 13))]
    together = run(function, sequences, in_steps([14, 13], [5, 3], [1, 0]), compressor, where)
    alone = run(function, sequences[:1], in_steps([14], [5], [0]), compressor, where)
    assert together[0].keys() == alone[0].keys()
    assert all(torch.equal(together[0][position], entry_D) for position, entry_D in alone[0].items())


@KINDS
def test_compress_rows_states_match_reference(device, ratio, is_overlapped, dim) -> None:
    compressor = make_compressor(ratio, is_overlapped, dim)
    rows_NX, width = make_rows(6 * ratio, compressor, 4.0), 2 * pooled_width(dim, is_overlapped)
    mine, theirs = States(compressor, device), States(compressor, "cpu")
    there, start = compressor_on(compressor, device), 0
    for size in (ratio - 1, 1, 2, 2 * ratio - 1, ratio - 1):
        step = CompressStep.of([Part(2, start, rows_NX[start : start + size])], width)
        start += size
        pool(compress_rows_triton, step, mine, there, device)
        pool(compress_rows_reference, step, theirs, compressor, torch.device("cpu"))
        torch.testing.assert_close(mine.state_PK3D.cpu(), theirs.state_PK3D, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert bool(mine.state_PK3D[[0, 1, 3, 4]].isnan().all()), "the state of another sequence was written"


@BOTH
def test_compress_rows_resumed_a_window_earlier_has_all_entries(device, function) -> None:
    """Without a state: what its place holds is another's."""
    compressor = make_compressor(4, True, 24)
    rows_NX, where = make_rows(40, compressor), where_of(function, device)
    wanted = pooled_windows(rows_NX, compressor)
    for chunks in ((28,), (1,) * 28, (3, 1, 24), (5, 2, 21)):
        states, there, start = States(compressor, where), compressor_on(compressor, where), 12
        for size in chunks:
            part = Part(1, start, rows_NX[start : start + size])
            entries_TD = pool(function, CompressStep.of([part], rows_NX.shape[1]), states, there, where)
            for row in range(size):
                position = start + row
                if position >= 16 and (position + 1) % 4 == 0:
                    close = {"rtol": 1e-6, "atol": 1e-6}
                    torch.testing.assert_close(entries_TD[row].double(), wanted[position], **close)
            start += size


@BOTH
def test_compress_rows_infinite_gates_match_windows(device, function) -> None:
    """A token whose gate is -inf is left out; one that is far above the others is alone."""
    compressor = make_compressor(4, True, 16)
    rows_NX = make_rows(16, compressor)
    rows_NX[1:3, 32:] = -torch.inf
    rows_NX[9, 32:] = 1e30
    judge(function, [rows_NX], in_steps([16], [3], [0]), compressor, device)
    judge(function, [rows_NX], in_steps([16], [16], [0]), compressor, device)


def test_compress_rows_padding_touches_nothing(device) -> None:
    compressor = make_compressor(4, True, 16)
    states, there = States(compressor, device), compressor_on(compressor, device)
    for step in (
        CompressStep(torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
        CompressStep.of([Part(0, 0, torch.zeros(0, 64))], 64, num_padding=3),
    ):
        assert bool(pool(compress_rows_triton, step, states, there, device).isnan().all())
    assert bool(states.state_PK3D.isnan().all())


def test_compress_state_of_v4_flash_is_under_half_a_megabyte() -> None:
    """21 layers with an index and 20 without: under half a megabyte for a sequence."""
    overlapped, index, other = state_bytes(512, True), state_bytes(128, True), state_bytes(512, False)
    assert (overlapped, index, other) == (12_288, 3_072, 6_144)
    assert 21 * (overlapped + index) + 20 * other == 445_440


LATENT_DIM, ROPE_DIM, PAGE_TOKENS, NUM_PAGES = 64, 16, 4, 3
LENGTHS = [11, 5, 9]


def make_step(compressor: Compressor) -> tuple[CompressStep, torch.Tensor]:
    """Three sequences from their first token on; the slots of rows that end a window, one of which is nowhere."""
    sequences = [make_rows(length, compressor, 2.0, i) for i, length in enumerate(LENGTHS)]
    step = CompressStep.of([Part(PLACES[i], 0, rows) for i, rows in enumerate(sequences)], sequences[0].shape[1])
    slots_T = torch.full((len(step.pooled),), -1)
    ends_E = ((step.states >= 0) & ((step.positions + 1) % compressor.ratio == 0)).nonzero().flatten()
    slots_T[ends_E] = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=torch.Generator().manual_seed(0))[: len(ends_E)]
    slots_T[ends_E[1]] = -1
    return step, slots_T


def rotary_on(device, step: CompressStep, ratio: int = 1) -> Rotary:
    """Rotation of the first token of each row's entry (its own token if `ratio` is 1); poison in padding."""
    rotary = rotary_rows(step.positions // ratio * ratio, ROPE_DIM)
    rotary.cos_TP[step.states < 0], rotary.sin_TP[step.states < 0] = torch.nan, torch.nan
    return Rotary(rotary.cos_TP.to(device), rotary.sin_TP.to(device))


def write(function, compressor: Compressor, name: str, device, dim: int = LATENT_DIM) -> LatentPlanes:
    step, slots_T = make_step(compressor)
    states, zones = States(compressor, device), RedZones(torch.device(device))
    planes = make_latent_planes(name, dim, ROPE_DIM, PAGE_TOKENS, NUM_PAGES, zones)
    rows = PooledRows(
        amid_poison(step.pooled, device),
        step.positions.to(device),
        slots_T.to(device),
        amid_echoes(step.states, device),
        states.state_PK3D,
    )
    function(
        rows,
        compressor_on(compressor, device),
        rotary_on(device, step, compressor.ratio),
        planes,
    )
    zones.check()
    states.zones.check()
    planes = on_device(planes, "cpu")
    unused = torch.ones(len(planes.rows_SX), dtype=torch.bool)
    unused[slots_T[slots_T >= 0]] = False
    for plane in tensors_of(planes):
        assert bool((plane[unused] == POISON_BYTE).all()), "a slot was written that no row has"
    return planes


FOUR_BITS = "turboquant_mla_4bit"


@pytest.mark.parametrize(
    "name", ["float32", "float16", "fp8_ds_v4", FOUR_BITS, pytest.param("bfloat16", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("ratio", "is_overlapped"), [(4, True), (3, False)])
def test_compressed_entries_in_slots_match_reference(device, name, ratio, is_overlapped) -> None:
    compressor = make_compressor(ratio, is_overlapped, LATENT_DIM + ROPE_DIM)._replace(eps=0.3)
    mine = write(compress_entries_triton, compressor, name, device)
    theirs = write(compress_entries_reference, compressor, name, torch.device("cpu"))
    _, slots_T = make_step(compressor)
    assert_same_latents(mine, theirs, slots_T[slots_T >= 0])


def test_compressed_entry_is_normed_and_rotated_at_first_token(device) -> None:
    compressor = make_compressor(4, True, LATENT_DIM + ROPE_DIM)._replace(eps=0.3)
    step, slots_T = make_step(compressor)
    planes = write(compress_entries, compressor, "float32", device)
    for row, first, i in ((3, 0, 0), (LENGTHS[0] + 1 + LENGTHS[1] + 1 + 7, 4, 2)):
        entry_D = pooled_windows(make_rows(LENGTHS[i], compressor, 2.0, i), compressor)[first + 3]
        normed_D = entry_D * (entry_D.square().mean() + 0.3).rsqrt() * compressor.weight_D.double()
        angle_F = first * 100.0 ** -(torch.arange(ROPE_DIM // 2) / (ROPE_DIM // 2)).double()
        even_F, odd_F = normed_D[LATENT_DIM::2], normed_D[LATENT_DIM + 1 :: 2]
        turned_R = torch.stack(
            (even_F * angle_F.cos() - odd_F * angle_F.sin(), odd_F * angle_F.cos() + even_F * angle_F.sin()), dim=1
        ).flatten()
        wanted_D = torch.cat((normed_D[:LATENT_DIM], turned_R))
        assert (int(step.states[row]), int(step.positions[row])) == (PLACES[i], first + 3)
        torch.testing.assert_close(planes.rows_SX[slots_T[row]].double(), wanted_D, rtol=1e-5, atol=1e-5)


def index_written(function, compressor: Compressor, name: str, device, num_heads: int):
    """Planes, rotated heads and the slots that rows have."""
    step, slots_T = make_step(compressor)
    states, zones = States(compressor, device), RedZones(torch.device(device))
    planes = make_index_planes(name, compressor.dim, PAGE_TOKENS, NUM_PAGES, zones)
    q = torch.randn(len(slots_T), num_heads * compressor.dim, generator=torch.Generator().manual_seed(1))
    q_TID = amid_poison(q, device).view(len(slots_T), num_heads, compressor.dim)
    rows = PooledRows(
        amid_poison(step.pooled, device),
        step.positions.to(device),
        slots_T.to(device),
        amid_echoes(step.states, device),
        states.state_PK3D,
    )
    function(
        rows,
        q_TID,
        compressor_on(compressor, device),
        rotary_on(device, step, compressor.ratio),
        rotary_on(device, step),
        planes,
    )
    zones.check()
    states.zones.check()
    padding = step.states < 0
    assert torch.equal(q_TID.cpu().flatten(1)[padding], q[padding]), "a row of padding was turned"
    return planes_to(planes, "cpu"), q_TID.cpu(), slots_T[slots_T >= 0]


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["float32", "fp8"])
@pytest.mark.parametrize(("dim", "num_heads"), [(32, 5), (48, 1)])
def test_compressed_index_matches_reference(device, monkeypatch, name, dim, num_heads) -> None:
    """Two heads go to a program, so that five need three."""
    monkeypatch.setattr(compress, "ELEMENTS_PER_PROGRAM", 2 * ROPE_DIM)
    compressor = make_compressor(4, True, dim)._replace(eps=0.3)
    mine, my_q, used = index_written(compress_index_triton, compressor, name, device, num_heads)
    theirs, their_q, _ = index_written(compress_index_reference, compressor, name, torch.device("cpu"), num_heads)
    torch.testing.assert_close(my_q, their_q, rtol=1e-6, atol=1e-6)
    unused = torch.ones(NUM_PAGES * PAGE_TOKENS, dtype=torch.bool)
    unused[used] = False
    assert bool((mine.rows_SD.view(torch.uint8)[unused] == POISON_BYTE).all()), "a slot was written that no row has"
    if name == "float32":
        torch.testing.assert_close(mine.rows_SD[used], theirs.rows_SD[used], rtol=1e-5, atol=1e-5)
        return
    assert mine.scales_S1 is not None
    assert theirs.scales_S1 is not None
    assert torch.equal(mine.scales_S1[used], theirs.scales_S1[used])
    my_codes, their_codes = (planes.rows_SD.view(torch.uint8)[used] for planes in (mine, theirs))
    assert int((my_codes != their_codes).sum()) <= 0.02 * my_codes.numel()


@pytest.mark.gpu
@pytest.mark.parametrize(("ratio", "is_overlapped"), [(4, True), (128, False)])
def test_compress_rows_allocates_nothing(device, ratio, is_overlapped) -> None:
    compressor = compressor_on(make_compressor(ratio, is_overlapped, 512), device)
    state_PK3D = States(compressor, device).state_PK3D
    planes = make_latent_planes("fp8_ds_v4", 448, 64, 4, 4, RedZones(device))
    table, numbers = torch.ones(4, 32, device=device), torch.arange(4, device=device)
    pooled_TX = torch.randn(4, 2 * pooled_width(512, is_overlapped), device=device)
    entries_TD = torch.empty(4, 512, device=device)
    rows = PooledRows(pooled_TX, numbers, numbers, numbers, state_PK3D)
    assert_allocates_nothing(lambda: compress_entries(rows, compressor, Rotary(table, table), planes))
    assert_allocates_nothing(lambda: compress_rows(rows, compressor, entries_TD))


@pytest.mark.gpu
def test_compressed_index_of_model_size_allocates_nothing(device) -> None:
    compressor = compressor_on(make_compressor(4, True, 128), device)
    planes = make_index_planes("fp8", 128, 4, 4, RedZones(device))
    table, numbers = torch.ones(4, 32, device=device), torch.arange(4, device=device)
    pooled_TX, q_TID = torch.randn(4, 512, device=device), torch.randn(4, 64, 128, device=device).bfloat16()
    rows = PooledRows(pooled_TX, numbers, numbers, numbers, States(compressor, device).state_PK3D)
    rotary = Rotary(table, table)
    assert_allocates_nothing(lambda: compress_index(rows, q_TID, compressor, rotary, rotary, planes))
