"""ExpertLayer: a router, routed experts, and possibly a shared expert that every row takes.

T rows, E experts, S experts of a row, P = T * S pairs of row and expert, H hidden, I inner width of an expert, V
vocabulary
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from holdfast.kernels.activation import SILU_HALVES, GateForm
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, RowAmax, SmallBatchScratch
from holdfast.kernels.gemm.linear import linear_float32, room_for_codes
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import normed_linear, small_batch_linear, takes_weight
from holdfast.kernels.moe.expert_linear import SharedLinear, expert_linear, expert_row_linear, stored_alike
from holdfast.kernels.moe.expert_row import SharedRow, down_row_add, takes_down_row
from holdfast.kernels.moe.expert_sum import ExpertOutputs, add_experts, sum_experts
from holdfast.kernels.moe.hash_routing import route_by_table
from holdfast.kernels.moe.normed_routing import SharedGate, route_normed
from holdfast.kernels.moe.routing import ExpertOrder, ExpertProduct, Routing, order_experts, route_tokens
from holdfast.layers.mlp import GatedMLP, MLPBuffers
from holdfast.layers.shared_experts import ExpertSharing, OwnPairs
from holdfast.layers.shared_linear import add_part
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight


class ExpertBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    logits_TE: torch.Tensor
    """float32."""
    expert_ids_TS: torch.Tensor
    """int32."""
    shares_TS: torch.Tensor
    """float32."""
    active_PI: torch.Tensor
    routed_PH: torch.Tensor
    order: tuple[torch.Tensor, ...]
    """Tensors of `order_specs` (kernels/geometry.py)."""
    shared: MLPBuffers | None = None
    """Buffers of the shared expert."""
    shared_TH: torch.Tensor | None = None
    """Its output."""
    shared_logit_T1: torch.Tensor | None = None
    """float32."""
    quantized: QuantizedRows | None = None
    """Buffer for quantized rows of one product; None if no weight needs them."""
    local_ids_TS: torch.Tensor | None = None
    """int32: expert ids local to the rank; None if it has all experts, or a slice of each."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "ExpertBuffers":
        """Take the tensors of `experts_request` by name; all others, in order, are `order`."""
        own = ("router", "expert_ids", "shares", "active", "routed")
        shared = ("shared_wide", "shared_active", "shared", "shared_logit", "local_ids")
        order = tuple(tensor for name, tensor in held.items() if name not in (*own, *shared))
        mlp = MLPBuffers(held["shared_wide"], held["shared_active"], quantized) if "shared_wide" in held else None
        logits_TE, ids_TS, shares_TS, active_PI, routed_PH = (held[name] for name in own)
        routing = logits_TE, ids_TS, shares_TS, active_PI, routed_PH, order
        return cls(*routing, mlp, held.get("shared"), held.get("shared_logit"), quantized, held.get("local_ids"))


class SharedOutput(NamedTuple):
    """What a shared expert gives, if there is one."""

    shared_TH: torch.Tensor | None
    logit_T1: torch.Tensor | None
    """Logit of its gate; None without one."""


class SharedExpert:
    """Shared expert of all rows; a gate, if any, scales it by the sigmoid of one more logit."""

    def __init__(self, mlp: GatedMLP, gate_1H: torch.Tensor | None) -> None:
        self.mlp = mlp
        self.gate_1H = gate_1H

    def takes_normed(self, scratch: SmallBatchScratch, gate_amax: RowAmax | None) -> bool:
        """Return True if small-batch products take the weights: plain, or 8-bit with scales by row.

        `gate_amax` are cleared amax, which e4m3 weights need.
        """
        weights = self.mlp.gate_up.weight_NK, self.mlp.down.weight_NK
        if self.mlp.limit is not None or self.mlp.activation != "silu":
            return False
        schemes = {weight.scheme.code_dtype for weight in weights if isinstance(weight, QuantizedWeight)}
        if not schemes:
            return all(isinstance(weight, torch.Tensor) for weight in weights)
        is_ready = scratch.amax is not None and (gate_amax is not None or schemes == {"int8"})
        return is_ready and len(schemes) == 1 and all(map(takes_weight, weights))

    def gate(self, buffers: ExpertBuffers) -> SharedGate | None:
        """Return the gate, whose logit the router's launch computes on the fused decode path."""
        if self.gate_1H is None:
            return None
        assert buffers.shared_logit_T1 is not None, "no place for the logit of the shared expert"
        return SharedGate(self.gate_1H, buffers.shared_logit_T1)

    def run_normed(
        self, rows: NormedRows, buffers: ExpertBuffers, scratch: SmallBatchScratch, gate_amax: RowAmax | None
    ) -> SharedOutput:
        """Fused decode path: compute the output for rows whose RMSNorm is deferred, in two launches."""
        assert buffers.shared is not None, "no tensors for the shared expert"
        assert buffers.shared_TH is not None, "no place for what the shared expert gives"
        gate_up, down, active_TI = self.mlp.gate_up, self.mlp.down, buffers.shared.active_TI
        normed_linear(rows, gate_up.weight_NK, gate_up.bias_N, True, active_TI, scratch)
        small_batch_linear(active_TI, down.weight_NK, down.bias_N, buffers.shared_TH, scratch, gate_amax)
        return SharedOutput(buffers.shared_TH, None if self.gate_1H is None else buffers.shared_logit_T1)


class ExpertBiases(NamedTuple):
    """Optional biases of a sparse layer's products, in the model's dtype."""

    router_E: torch.Tensor | None = None
    gate_up_EX: torch.Tensor | None = None
    """Row per expert, in the layout of gate and up."""
    down_EH: torch.Tensor | None = None
    """Part of an expert's output, so its share scales it too."""
    score_E: torch.Tensor | None = None
    """float32: affects the choice of experts, not their shares."""


NO_BIASES = ExpertBiases()


class ExpertLayer:
    """Sums a row's expert outputs by share: of the `top_k` most likely experts, or of its token's in a table.

    Rows do not affect each other.
    """

    def __init__(
        self,
        router_EH: torch.Tensor,
        gate_up: AnyWeight,
        down: AnyWeight,
        routing: Routing,
        shared: SharedExpert | None,
        biases: ExpertBiases = NO_BIASES,
        form: GateForm = SILU_HALVES,
        table_VS: torch.Tensor | None = None,
        sharing: ExpertSharing | None = None,
    ) -> None:
        """`gate_up` is [E, 2 I, H], laid out by `form`, and `down` is [E, H, I]; with `sharing`, this rank's share.

        `table_VS` lists the experts of each token id; loading rejects unknown experts (loading/execution/execute.py).
        """
        assert table_VS is None or biases.score_E is None, (
            "experts from a table are not chosen, and there is a bias for the choice"
        )
        self.router_EH = router_EH
        self.gate_up = gate_up
        self.down = down
        self.shared = shared
        self._routing = routing
        self._biases = biases if sharing is None or sharing.adds_bias else biases._replace(down_EH=None)
        self._form = form
        self._sharing = sharing
        self._table_VS = table_VS
        self._joins_shared = sharing is None and shared is not None and self._stored_alike(shared.mlp)
        """A row's own experts and the shared one are one product of the fused decode path."""
        self.watch: Callable[[torch.Tensor], None] | None = None
        """Called with `expert_ids_TS` of every eager step (runner/expert_counts.py); a replayed graph calls nothing."""

    def _stored_alike(self, mlp: GatedMLP) -> bool:
        """Return True if the shared expert could be one of the routed ones."""
        gate_up, down = mlp.gate_up, mlp.down
        return (
            self._form == SILU_HALVES
            and mlp.limit is None
            and mlp.activation == "silu"
            and gate_up.bias_N is None
            and down.bias_N is None
            and self._biases.gate_up_EX is None
            and stored_alike(gate_up.weight_NK, self.gate_up)
            and stored_alike(down.weight_NK, self.down)
        )

    def room_for_codes(self, buffers: ExpertBuffers, x_TH: torch.Tensor) -> QuantizedRows | None:
        """Return the buffer that the producer of x fills with codes for the shared expert; None if that takes none.

        Without a shared expert, the codes are for the others.
        """
        shared = self.shared
        if shared is None:
            return room_for_codes(buffers.quantized, self.gate_up, len(x_TH))
        if buffers.shared is None or shared.mlp.fuses_gate(x_TH, buffers.shared):
            return None
        return shared.mlp.gate_up.room_for_codes(buffers.shared.quantized, len(x_TH))

    def __call__(
        self,
        x_TH: torch.Tensor,
        buffers: ExpertBuffers,
        out_TH: torch.Tensor,
        token_ids_T: torch.Tensor | None = None,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """`token_ids_T` are read only if experts come from a table. If `is_coded`, `room_for_codes` has the codes of x."""
        routes_codes = is_coded and self.shared is None
        has_begun = self._begin(x_TH, buffers, is_coded and not routes_codes)
        ids_TS, shares_TS = buffers.expert_ids_TS, buffers.shares_TS
        biases, table_VS = self._biases, self._table_VS
        if table_VS is None:
            route_tokens(buffers.logits_TE, self._routing, ids_TS, shares_TS, biases.router_E, biases.score_E)
        else:
            assert token_ids_T is not None, (
                "experts come from a table by token id, and no token ids are here; pass them"
            )
            route_by_table(buffers.logits_TE, table_VS, token_ids_T, self._routing, ids_TS, shares_TS, biases.router_E)
        if self._sharing is not None:
            made = self._multiply_shared(self._sharing, x_TH, buffers, routes_codes, has_begun)
            return self._sharing.combine(made, out_TH)
        return sum_experts(self._multiply(x_TH, buffers, routes_codes, has_begun), out_TH)

    def _begin(self, x_TH: torch.Tensor, buffers: ExpertBuffers, is_coded: bool) -> bool:
        """Compute the router's logits, and beside them gate and up of the shared expert; return False without the latter.

        `is_coded`: codes of x are in the buffers, for these.
        """
        shared = self.shared
        if shared is None or buffers.shared is None or shared.mlp.fuses_gate(x_TH, buffers.shared):
            assert not is_coded, "codes of x for a shared expert that has not begun"
            linear_float32(x_TH, self.router_EH, buffers.logits_TE)
            return False
        own, wide_TX = buffers.shared.quantized, buffers.shared.wide_TX
        shared.mlp.gate_up.joint(x_TH, wide_TX, self.router_EH, buffers.logits_TE, own, is_coded)
        return True

    def _multiply_shared(
        self,
        sharing: ExpertSharing,
        x_TH: torch.Tensor,
        buffers: ExpertBuffers,
        is_coded: bool = False,
        has_begun: bool = False,
        given: SharedOutput | None = None,
    ) -> OwnPairs:
        """Compute this rank's products; `has_begun`: gate and up of the shared expert are in the buffers.

        `given` is what the shared expert gave, if it has run.

        The shared expert runs first: it may use the buffer that peers read, where routed pairs go later.
        """
        shared = given or self._share(x_TH, buffers, has_begun)
        ids_TS = sharing.dispatch(buffers.expert_ids_TS, buffers.local_ids_TS)
        order = self._order(ids_TS, buffers, sharing.num_local)
        active_PI = self._gate_and_up(x_TH, order, buffers, is_coded, sharing.room_for_inputs(buffers.active_PI))
        active_PI = sharing.whole_inputs(active_PI)
        pairs_PX, bias_EX = sharing.room_for_pairs(buffers.routed_PH), self._biases.down_EH
        expert_linear(ExpertProduct(active_PI, self.down, order, pairs_PX, False, buffers.quantized, bias_EX))
        return OwnPairs(ExpertOutputs(pairs_PX, buffers.shares_TS, *shared), buffers.routed_PH, ids_TS)

    @property
    def has_table(self) -> bool:
        """True if experts follow from the token id, which the fused decode path does not have."""
        return self._table_VS is not None

    @property
    def has_plain_routing(self) -> bool:
        """True if experts have the largest logits: the routing of the fused decode path."""
        return self._routing.is_plain and self._biases.score_E is None

    def add_normed(
        self,
        rows: NormedRows,
        buffers: ExpertBuffers,
        finished_TH: torch.Tensor,
        stream: ResidualStream,
        gate_amax: RowAmax | None = None,
    ) -> NormedRows:
        """Fused decode path: x += the layer's output for `rows`, whose norm is deferred; the next norm is deferred too.

        `finished_TH` is a buffer for the normed rows, if experts take them unquantized. `gate_amax` are cleared amax, if
        there are any, for an e4m3 shared expert.
        """
        assert not self.has_table, "experts come from a table by token id, and the fused decode path has no token ids"
        ids_TS, shares_TS, biases = buffers.expert_ids_TS, buffers.shares_TS, self._biases
        num_rows, scratch = len(stream.x_MN), stream.scratch
        is_joined = num_rows == 1 and self._joins_shared
        is_taken = self.shared is not None and (is_joined or self.shared.takes_normed(scratch, gate_amax))
        shared = self.shared if is_taken else None
        # Codes are made as the norm is finished if nothing but experts takes the rows, and with one scale a row.
        needs_numbers = scratch.amax is None or self.shared is not shared
        codes = None if needs_numbers else room_for_codes(buffers.quantized, self.gate_up, num_rows)
        finished = finished_TH if codes is None else codes
        route_normed(
            rows,
            self.router_EH,
            biases.router_E,
            self._routing.normalizes,
            buffers.logits_TE,
            ids_TS,
            shares_TS,
            finished,
            scratch,
            None if shared is None else shared.gate(buffers),
        )
        if not self.has_plain_routing:
            # Route by scores, groups and their bias, from the same logits.
            route_tokens(buffers.logits_TE, self._routing, ids_TS, shares_TS, biases.router_E, biases.score_E)
        is_coded, given = codes is not None, None
        if shared is not None and is_joined:
            return self._add_row(shared, finished_TH, buffers, stream, is_coded)
        if shared is not None:
            given = shared.run_normed(rows, buffers, scratch, gate_amax)
        if self._sharing is not None:
            made = self._multiply_shared(self._sharing, finished_TH, buffers, is_coded, given=given)
            return add_part(self._sharing.exchange, self._sharing.leave_part(made), stream)
        if num_rows == 1 and self.shared is None and takes_down_row(finished_TH, self.gate_up, self.down):
            active_PI = self._gate_and_up(finished_TH, self._order(ids_TS, buffers), buffers, is_coded)
            return down_row_add(active_PI, self.down, ids_TS, shares_TS, biases.down_EH, stream)
        return add_experts(self._multiply(finished_TH, buffers, is_coded, given=given), stream)

    def _add_row(
        self,
        shared: SharedExpert,
        finished_1H: torch.Tensor,
        buffers: ExpertBuffers,
        stream: ResidualStream,
        is_coded: bool,
    ) -> NormedRows:
        """Fused decode path of one row: its experts and the shared one in two launches."""
        assert buffers.shared is not None, "no tensors for the shared expert"
        order, active_1I = self._order(buffers.expert_ids_TS, buffers), buffers.shared.active_TI
        product = ExpertProduct(finished_1H, self.gate_up, order, buffers.active_PI, True, buffers.quantized, None)
        expert_row_linear(product, SharedLinear(shared.mlp.gate_up.weight_NK, active_1I), is_coded)
        logit_11 = None if shared.gate_1H is None else buffers.shared_logit_T1
        own = SharedRow(active_1I, shared.mlp.down.weight_NK, logit_11)
        ids_1S, shares_1S = buffers.expert_ids_TS, buffers.shares_TS
        return down_row_add(buffers.active_PI, self.down, ids_1S, shares_1S, self._biases.down_EH, stream, own)

    def _order(self, ids_TS: torch.Tensor, buffers: ExpertBuffers, num_local: int | None = None) -> ExpertOrder:
        """Group rows by expert; `ids_TS` are local ids if the rank has `num_local` experts."""
        if self.watch is not None:
            self.watch(buffers.expert_ids_TS)
        return order_experts(ids_TS, len(self.router_EH), buffers.order, num_local)

    def _gate_and_up(
        self,
        x_TH: torch.Tensor,
        order: ExpertOrder,
        buffers: ExpertBuffers,
        is_coded: bool,
        active_PI: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write to `active_PI`, by default the buffer."""
        bias_EX, active_PI = self._biases.gate_up_EX, buffers.active_PI if active_PI is None else active_PI
        product = ExpertProduct(x_TH, self.gate_up, order, active_PI, True, buffers.quantized, bias_EX, self._form)
        return expert_linear(product, is_coded)

    def _multiply(
        self,
        x_TH: torch.Tensor,
        buffers: ExpertBuffers,
        is_coded: bool = False,
        has_begun: bool = False,
        given: SharedOutput | None = None,
    ) -> ExpertOutputs:
        """Compute each expert's output for each of its rows; `has_begun` and `given` as in `_multiply_shared`."""
        order = self._order(buffers.expert_ids_TS, buffers)
        active_PI = self._gate_and_up(x_TH, order, buffers, is_coded)
        bias_EH = self._biases.down_EH
        routed_PH = buffers.routed_PH
        expert_linear(ExpertProduct(active_PI, self.down, order, routed_PH, False, buffers.quantized, bias_EH))
        shared = given or self._share(x_TH, buffers, has_begun)
        return ExpertOutputs(buffers.routed_PH, buffers.shares_TS, *shared)

    def _share(self, x_TH: torch.Tensor, buffers: ExpertBuffers, has_begun: bool) -> SharedOutput:
        """Compute the output of the shared expert and the logit of its gate, if there are any."""
        shared = self.shared
        if shared is None:
            return SharedOutput(None, None)
        assert buffers.shared is not None, "no tensors for the shared expert"
        assert buffers.shared_TH is not None, "no place for what the shared expert gives"
        room_TX = buffers.shared_TH if self._sharing is None else self._sharing.columns_of(buffers.shared_TH)
        mlp, own = shared.mlp, buffers.shared
        shared_TH = mlp.finish(own, room_TX) if has_begun else mlp(x_TH, own, room_TX)
        if shared.gate_1H is None:
            return SharedOutput(shared_TH, None)
        assert buffers.shared_logit_T1 is not None, "no place for the logit of the shared expert"
        return SharedOutput(shared_TH, linear_float32(x_TH, shared.gate_1H, buffers.shared_logit_T1))
