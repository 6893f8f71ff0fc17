"""ExpertSharing: experts split over ranks, in slices or whole (expert parallel): local pairs, exchange of outputs.

T rows, S experts of a row, P = T * S pairs of row and expert, H hidden, I inner width of an expert, n ranks

                     a rank multiplies          what it gives               then
sliced, summed       all pairs, I / n columns   [T, H], of its columns      the sum of all ranks
sliced, gathered     all pairs, inputs gathered [T, H / n], its columns     side by side
whole, summed        pairs of its experts       [T, H], of its experts      the sum of all ranks
whole, gathered      pairs of its experts       [P, H], others' are zero    pairs of all ranks, added by row as one rank does

Rows are equal on all ranks, so nothing is sent before the products: `dispatch` finds local pairs, `combine` makes
outputs whole. Only these two would change for all-to-all, where ranks have different rows.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.moe.expert_sum import ExpertOutputs, sum_experts
from holdfast.kernels.moe.routing import local_ids
from holdfast.layers.shared_linear import OutputSharing


class OwnPairs(NamedTuple):
    """Outputs of a rank's pairs."""

    outputs: ExpertOutputs
    """Its pairs fill the buffer of `room_for_pairs`."""
    routed_PH: torch.Tensor
    """The workspace buffer for pairs, used or not."""
    ids_TS: torch.Tensor
    """Result of `dispatch`."""


class ExpertSharing:
    """One rank's part in a mixture of experts."""

    def __init__(self, outputs: OutputSharing, first_expert: int = 0, num_local: int | None = None) -> None:
        """A rank has `num_local` whole experts from `first_expert` on; None: a slice of each."""
        self.exchange = outputs.exchange
        self._gathering = outputs.gathering
        self._first_expert = first_expert
        self.num_local = num_local

    @property
    def has_whole_experts(self) -> bool:
        return self.num_local is not None

    @property
    def sums_pairs(self) -> bool:
        """True if pairs are all-reduced before they are added by row; the shared expert must be whole then too."""
        return self._gathering is not None and self.has_whole_experts

    @property
    def adds_bias(self) -> bool:
        """True if this rank adds the experts' down biases; otherwise they would be added more than once."""
        return self._gathering is not None or self.has_whole_experts or self.exchange.rank == 0

    @property
    def keeps_columns(self) -> bool:
        """True if routed pairs and the shared expert's output are this rank's columns of H."""
        return self._gathering is not None and not self.has_whole_experts

    def dispatch(self, ids_TS: torch.Tensor, room_TS: torch.Tensor | None) -> torch.Tensor:
        """Return local expert ids of each row; PADDING for experts of other ranks."""
        if self.num_local is None:
            return ids_TS
        assert room_TS is not None, "no place for ids of local experts"
        return local_ids(ids_TS, self._first_expert, self.num_local, room_TS)

    def room_for_inputs(self, active_PI: torch.Tensor) -> torch.Tensor:
        """Return the output buffer of the first product: `active_PI`, or memory that peers read."""
        return self._gathering.room(active_PI) if self._gathering is not None and self.keeps_columns else active_PI

    def whole_inputs(self, active_PI: torch.Tensor) -> torch.Tensor:
        """Return the second product's input: all columns, gathered if its outputs are split."""
        return self._gathering(active_PI) if self._gathering is not None and self.keeps_columns else active_PI

    def columns_of(self, room_XH: torch.Tensor) -> torch.Tensor:
        """Return a dense view as wide as this rank's columns."""
        if not self.keeps_columns:
            return room_XH
        num_rows, width = room_XH.shape[0], room_XH.shape[1] // self.exchange.size
        return room_XH.view(-1)[: num_rows * width].view(num_rows, width)

    def room_for_pairs(self, routed_PH: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the second product's pairs; zeroed if pairs are summed over ranks."""
        if not self.has_whole_experts:
            return self.columns_of(routed_PH)
        if self._gathering is None:
            return routed_PH
        num_pairs, hidden = routed_PH.shape
        return self.exchange.room(num_pairs, hidden, routed_PH.dtype).zero_()

    def leave_part(self, own: OwnPairs) -> torch.Tensor:
        """Write this rank's part of every row to the exchange buffer, to be summed."""
        pairs_PX = own.outputs.routed_PH
        part_TH = self.exchange.room(len(own.ids_TS), pairs_PX.shape[1], pairs_PX.dtype)
        return sum_experts(own.outputs, part_TH, own.ids_TS if self.has_whole_experts else None)

    def combine(self, own: OwnPairs, out_TH: torch.Tensor) -> torch.Tensor:
        """Write the sum over all experts of every row, on every rank."""
        exchange, (num_rows, hidden) = self.exchange, out_TH.shape
        if num_rows == 0:
            return out_TH
        if self._gathering is None:
            return exchange.sum_rows(self.leave_part(own), out_TH)
        if self.sums_pairs:
            exchange.sum_rows(own.outputs.routed_PH, own.routed_PH)
            return sum_experts(own.outputs._replace(routed_PH=own.routed_PH), out_TH)
        part_TX = exchange.room(num_rows, hidden // exchange.size, out_TH.dtype)
        sum_experts(own.outputs, part_TX)
        return exchange.gather_columns(part_TX, out_TH)
