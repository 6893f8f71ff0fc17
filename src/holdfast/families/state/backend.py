"""StateBackend: plans and states of layers that keep one; HybridAttention: beside the attention of a model's other layers."""

from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import AttentionBackend, Batch, EagerStep, LayerStep, StepPlan
from holdfast.attention.declarations import StepBounds
from holdfast.cache.places import CONV, RECURRENT
from holdfast.cache.storage import StateStorage
from holdfast.families.state.spec import DRAFTS, LISTS, StateLayers
from holdfast.kernels.state.state_geometry import state_list_specs
from holdfast.kernels.state.state_rows import Piece, StateRows, fill_lists
from holdfast.memory.arena import MirroredTensor


class LayerStates(NamedTuple):
    """The states of one layer, by place, and what it keeps of draft tokens, by slot."""

    conv_PCW: torch.Tensor
    recurrent_PHKV: torch.Tensor
    drafts: tuple[torch.Tensor, ...] = ()
    """The first fields of KeptDrafts; empty without draft tokens."""


class StateBackend:
    """States of all layers, draft tokens, and the lists of a step's sequences and chunks in fixed memory."""

    def __init__(self, states: StateStorage, bounds: StepBounds, layers: StateLayers, device: torch.device) -> None:
        self._states = states
        kept = layers.kept_drafts(bounds.max_num_seqs)
        self._drafts = tuple(torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=device) for x in kept)
        self._places = {layer: place for place, layer in enumerate(sorted(layers.spec.layers))}
        is_shared = device.type == "cpu"
        specs = state_list_specs(bounds.max_num_rows, bounds.max_num_seqs)
        self._lists = tuple(MirroredTensor(spec.shape, torch.int32, device, is_shared) for spec in specs)

    def layer(self, layer: int) -> LayerStates:
        drafts = tuple(x[self._places[layer]] for x in self._drafts)
        return LayerStates(self._states.state(layer, CONV), self._states.state(layer, RECURRENT), drafts)

    def held_bytes(self) -> dict[str, int]:
        held = {LISTS: sum(one.tensor.nbytes for one in self._lists)}
        return held | ({DRAFTS: sum(x.nbytes for x in self._drafts)} if self._drafts else {})

    def plan(self, batch: Batch, captured: bool = False) -> StateRows:
        """List the step's sequences without their draft tokens, unless each has one row.

        A captured decode step has none of the lists: its rows are its sequences (`Batch.logits` is None there).
        """
        places_T, positions_T = batch.states_T, batch.positions_T
        assert places_T is not None, "a step without places of states"
        is_listed = any(rows.num_rows > 1 for rows in batch.sequences)
        if captured:
            is_listed = batch.logits is not None
        if not is_listed:
            return StateRows(places_T, positions_T, drafts_T=batch.drafts_T)
        pieces = [
            Piece(rows.row_start, rows.num_rows - rows.num_drafts, rows.place, rows.start) for rows in batch.sequences
        ]
        for one in self._lists:
            one.wait()
        fill_lists(pieces, *(torch.from_numpy(one.host) for one in self._lists))
        for one in self._lists:
            one.send([(0, one.host.size)])
        return StateRows(places_T, positions_T, *(one.tensor for one in self._lists), drafts_T=batch.drafts_T)


class HybridPlan(NamedTuple):
    """Plans of both kinds of layers."""

    attention: StepPlan
    states: StateRows


class HybridAttention(AttentionBackend):
    """Attention over pages, with the verbs of its family, beside layers that keep states."""

    def __init__(self, name: str, attention: Any, states: StateBackend) -> None:  # noqa: ANN401 of any family
        self.name = name  # type: ignore[misc]  # a class variable of others
        self.attention, self.states = attention, states
        self.write = attention.write

    @property
    def paged(self) -> AttentionBackend:
        return self.attention

    def held_bytes(self) -> dict[str, int]:
        return self.attention.held_bytes() | self.states.held_bytes()

    def plan(self, batch: Batch, captured: bool = False) -> HybridPlan:
        return HybridPlan(self.attention.plan(batch, captured), self.states.plan(batch, captured))

    def attend(self, q_THD: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool) -> torch.Tensor:
        return self.attention.attend(q_THD, step._replace(plan=step.plan.attention), out_TX, wanted_only)

    def eager_steps(self) -> tuple[EagerStep, ...]:
        return tuple(self.attention.eager_steps())
