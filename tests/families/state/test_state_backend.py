"""Backends of layers with a state: lists of a step, the choice for both kinds of layers, bytes that are held as declared."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from error_codes import raises_code
from holdfast.attention.backend import Batch, LogitRows, SequenceRows
from holdfast.attention.declarations import StepBounds
from holdfast.cache.places import place_bytes
from holdfast.cache.storage import StateStorage
from holdfast.errors import UnsupportedModelError
from holdfast.families.choose import choose_declaration
from holdfast.families.state.backend import StateBackend
from holdfast.families.state.declarations import HybridDeclaration, TorchStateDeclaration, TritonStateDeclaration
from holdfast.families.state.spec import SCRATCH, StateLayers, StateSpec
from holdfast.kernels.state.state_rows import Piece
from holdfast.memory.ledger import Ledger

CPU = torch.device("cpu")
SPEC = StateSpec(frozenset({0, 1, 4}), key_heads=2, value_heads=6, key_dim=16, value_dim=24, conv_width=3)
BOUNDS = StepBounds(max_num_seqs=3, max_num_rows=200, page_tokens=16)


def make_batch(
    pieces: list[Piece], num_padding: int = 0, *, is_listed: bool = False, num_drafts: list[int] | None = None
) -> Batch:
    num_rows = sum(piece.num_rows for piece in pieces) + num_padding
    places_T, positions_T = torch.full((num_rows,), -1), torch.zeros(num_rows, dtype=torch.int64)
    sequences = []
    for piece, drafts in zip(pieces, num_drafts or [0] * len(pieces), strict=True):
        (row, count, place, start), own = piece, slice(piece.row, piece.row + piece.num_rows)
        places_T[own] = place
        positions_T[own] = torch.arange(start, start + count)
        sequences.append(SequenceRows(row, count, start, ((),), place=place, num_drafts=drafts))
    ids_T, slots_GT = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(1, num_rows, dtype=torch.int64)
    logits = LogitRows(torch.zeros(0, dtype=torch.int64), ()) if is_listed else None
    drafts_T = None if num_drafts is None else torch.zeros(num_rows, dtype=torch.int64)
    return Batch(ids_T, positions_T, slots_GT, tuple(sequences), logits, states_T=places_T, drafts_T=drafts_T)


@pytest.fixture
def backend() -> StateBackend:
    return make_backend()


def make_backend(num_drafts: int = 0) -> StateBackend:
    own = StateLayers(SPEC, "float32", "cpu", num_drafts)
    return StateBackend(StateStorage(SPEC.parts("float32"), 5, CPU, Ledger()), BOUNDS, own, CPU)


def test_plan_lists_sequences_if_one_has_several_rows(backend: StateBackend) -> None:
    pieces = [Piece(0, 1, 2, 70), Piece(1, 130, 0, 64), Piece(131, 5, 1, 0)]
    rows = backend.plan(make_batch(pieces, num_padding=2))
    assert rows.pieces() == pieces
    assert rows.chunks_M4 is not None and rows.chunks_M4[:4].tolist() == [  # noqa: PT018
        [1, 1, 64, 0],
        [1, 65, 64, 1],
        [1, 129, 2, 2],
        [2, 131, 5, 0],
    ]
    assert not rows.chunks_M4[4:].any()
    shorter = backend.plan(make_batch([Piece(0, 2, 1, 0)]))
    assert shorter.pieces() == [Piece(0, 2, 1, 0)], "entries of an earlier step"
    assert shorter.chunks_M4 is not None and shorter.chunks_M4[1:].any().item() is False  # noqa: PT018


def test_plan_of_single_rows_has_no_lists(backend: StateBackend) -> None:
    pieces = [Piece(0, 1, 2, 70), Piece(1, 1, 0, 0)]
    rows = backend.plan(make_batch(pieces, num_padding=1))
    assert (rows.sequences_N4, rows.chunks_M4) == (None, None)
    assert rows.pieces() == pieces


def test_captured_plan_has_lists_unless_it_is_a_decode_step(backend: StateBackend) -> None:
    """A graph replays a mixed step whose sequences may have one row each, so it reads the lists."""
    single = [Piece(0, 1, 2, 70)]
    assert backend.plan(make_batch(single, 3), captured=True).sequences_N4 is None
    mixed = backend.plan(make_batch(single, 3, is_listed=True), captured=True)
    assert mixed.pieces() == single
    addresses = [own.data_ptr() for own in (mixed.sequences_N4, mixed.chunks_M4) if own is not None]
    again = backend.plan(make_batch([Piece(0, 64, 1, 0)], is_listed=True), captured=True)
    assert [own.data_ptr() for own in (again.sequences_N4, again.chunks_M4) if own is not None] == addresses


def test_held_bytes_are_the_declared_ones(backend: StateBackend) -> None:
    layers = StateLayers(SPEC, "float32", "cpu")
    terms = {term.owner: term.num_bytes for term in TorchStateDeclaration().terms(layers, BOUNDS)}
    assert backend.held_bytes() == {"states/lists": terms["states/lists"]}


def test_plan_lists_sequences_without_their_draft_tokens() -> None:
    """Chunk kernels take sequences with several rows, and draft tokens are none."""
    backend = make_backend(num_drafts=4)
    batch = make_batch([Piece(0, 5, 2, 70), Piece(5, 1, 0, 3), Piece(6, 3, 1, 0)], num_drafts=[4, 0, 0])
    rows = backend.plan(batch)
    assert rows.pieces() == [Piece(0, 1, 2, 70), Piece(5, 1, 0, 3), Piece(6, 3, 1, 0)]
    assert rows.chunks_M4 is not None and rows.chunks_M4[:2].tolist() == [[2, 6, 3, 0], [0] * 4]  # noqa: PT018
    assert rows.drafts_T is batch.drafts_T
    single = make_batch([Piece(0, 1, 2, 70)], num_drafts=[0])
    assert backend.plan(single).drafts_T is single.drafts_T


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_kept_drafts_are_the_declared_bytes(num_drafts: int, gate: Literal["head", "channel"]) -> None:
    """Inputs of the convolution for each draft token, and gates of twice as many positions and one."""
    own = StateLayers(replace(SPEC, gate=gate), "bfloat16", "cpu", num_drafts)
    channels, decays = 2 * 2 * 16 + 6 * 24, 6 * (16 if gate == "channel" else 1)
    expected = 3 * 3 * (num_drafts * channels * 2 + (2 * num_drafts + 1) * (decays + 6) * 4)
    for declaration in (TorchStateDeclaration(), TritonStateDeclaration()):
        terms = {term.owner: term.num_bytes for term in declaration.terms(own, BOUNDS)}
        assert terms["states/drafts"] == expected
        (accepted,) = (one for one in declaration.scratch(own, BOUNDS) if one.name == f"{SCRATCH}accepted")
        assert (accepted.shape, accepted.dtype) == ((3, num_drafts, channels), "bfloat16")
    backend = StateBackend(StateStorage(SPEC.parts("bfloat16"), 5, CPU, Ledger()), BOUNDS, own, CPU)
    assert backend.held_bytes()["states/drafts"] == expected
    first, last = backend.layer(0).drafts, backend.layer(4).drafts
    assert {x.data_ptr() for x in first}.isdisjoint(x.data_ptr() for x in last)
    assert make_backend().layer(4).drafts == ()


def test_parts_are_the_bytes_of_the_contract() -> None:
    conv, recurrent = SPEC.parts("bfloat16")
    assert conv.place_bytes == 3 * 2 * (2 * 2 * 16 + 6 * 24) * 2
    assert recurrent.place_bytes == 3 * 6 * 16 * 24 * 4
    assert place_bytes((conv, recurrent)) == conv.place_bytes + recurrent.place_bytes
    half = SPEC.share(2)
    assert 2 * place_bytes(half.parts("bfloat16")) == place_bytes((conv, recurrent))
    stage = SPEC.slice(1, 5)
    assert stage is not None and stage.layers == {0, 3}  # noqa: PT018
    assert SPEC.slice(2, 4) is None


def test_copy_place_copies_every_part_of_every_layer() -> None:
    states = StateStorage(SPEC.parts("float32"), 3, CPU, Ledger())
    for layer in SPEC.layers:
        for part in SPEC.parts("float32"):
            own_PX = states.state(layer, part.name)
            own_PX.copy_(torch.arange(own_PX.numel()).view_as(own_PX) + layer)
    before = {key: states.state(*key).clone() for key in ((0, "conv"), (4, "recurrent"))}
    states.copy_place(0, 2)
    for (layer, name), own_PX in before.items():
        now_PX = states.state(layer, name)
        assert torch.equal(now_PX[2], own_PX[0])
        assert torch.equal(now_PX[:2], own_PX[:2])


def layers(device_kind: str = "cuda", dtype: str = "bfloat16", spec: StateSpec = SPEC) -> StateLayers:
    return StateLayers(spec, dtype, device_kind)


def test_choose_declaration_takes_a_backend_for_each_kind() -> None:
    from families.test_declarations import layer

    hybrid = choose_declaration([layer("bfloat16", dtype="bfloat16")], layers())
    assert hybrid.name == "triton_paged and triton_state"
    assert hybrid.can_be_captured and hybrid.can_be_invariant  # noqa: PT018
    on_cpu = choose_declaration([layer("float32", dtype="float32", device_kind="cpu")], layers("cpu", "float32"))
    assert isinstance(on_cpu, HybridDeclaration)
    assert on_cpu.states.name == "torch_state"
    assert not on_cpu.can_be_captured
    scratch = [spec.name for spec in hybrid.scratch([layer("bfloat16", dtype="bfloat16")], BOUNDS)]
    assert any(name.startswith(SCRATCH) for name in scratch)


def test_choose_declaration_lists_reasons_of_states() -> None:
    from families.test_declarations import layer

    wide = replace(SPEC, key_dim=320)
    with raises_code("attention.no_backend", UnsupportedModelError) as caught:
        choose_declaration([layer("bfloat16", dtype="bfloat16")], layers(spec=wide))
    assert "triton_state" in str(caught.value)
    assert "torch_state" in str(caught.value)
    assert TritonStateDeclaration().unsupported(layers(dtype="float32")) is not None
