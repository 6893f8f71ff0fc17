"""Backends of layers with a state, as the planner sees them: Triton and plain torch, and attention beside them; no torch of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdfast.attention.declarations import HALF_PRECISION, AttentionSpec, BackendDeclaration, StepBounds
from holdfast.families.state.spec import DRAFTS, LISTS, SCRATCH, StateLayers
from holdfast.kernels.state.state_geometry import (
    ACCEPTED,
    CHUNK_ROWS,
    delta_chunk_specs,
    state_list_specs,
    unsupported_state,
)
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import bytes_for


class StateDeclaration:
    """A backend's supported states and bytes, known without building it."""

    name: ClassVar[str]
    can_be_captured: ClassVar[bool] = False
    can_be_invariant: ClassVar[bool] = True

    def unsupported(self, layers: StateLayers) -> str | None:
        """Return None, or why these layers cannot run here."""
        raise NotImplementedError

    def scratch(self, layers: StateLayers, bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """List the workspace of a layer, beside `StateSpec.tensors`: outputs for accepted draft tokens."""
        if not layers.num_drafts:
            return ()
        shape = bounds.max_num_seqs, layers.num_drafts, layers.spec.num_channels
        return (TensorSpec(f"{SCRATCH}{ACCEPTED}", shape, layers.dtype),)

    def terms(self, layers: StateLayers, bounds: StepBounds) -> tuple[Term, ...]:
        """List the memory the backend holds for life."""
        specs = state_list_specs(bounds.max_num_rows, bounds.max_num_seqs)
        lists = Term(LISTS, sum(spec.num_bytes for spec in specs), "sequences and chunks of a step")
        kept = layers.kept_drafts(bounds.max_num_seqs)
        if not kept:
            return (lists,)
        reason = f"inputs of up to {layers.num_drafts} draft tokens a sequence in {len(layers.spec.layers)} layers"
        return lists, Term(DRAFTS, sum(spec.num_bytes for spec in kept), reason)


class TritonStateDeclaration(StateDeclaration):
    """Triton kernels in half precision on a GPU."""

    name = "triton_state"
    can_be_captured = True

    def unsupported(self, layers: StateLayers) -> str | None:
        if layers.device_kind != "cuda":
            return f"it runs on GPUs, not on {layers.device_kind}"
        if layers.dtype not in HALF_PRECISION:
            return f"it computes in half precision, not in {layers.dtype}"
        return unsupported_state(*layers.spec.shape)

    def scratch(self, layers: StateLayers, bounds: StepBounds) -> tuple[TensorSpec, ...]:
        spec = layers.spec
        own = delta_chunk_specs(
            bounds.max_num_rows, bounds.max_num_seqs, spec.value_heads, spec.key_dim, layers.dtype, spec.gate
        )
        chunks = (TensorSpec(f"{SCRATCH}{one.name}", one.shape, one.dtype) for one in own)
        return (*chunks, *super().scratch(layers, bounds))


class TorchStateDeclaration(StateDeclaration):
    """Plain torch, anywhere."""

    name = "torch_state"

    def unsupported(self, layers: StateLayers) -> str | None:
        return unsupported_state(*layers.spec.shape)

    def terms(self, layers: StateLayers, bounds: StepBounds) -> tuple[Term, ...]:
        """Declare what a step takes beside the lists: copies of rows in float32, of single rows, and of one chunk."""
        spec, keys = layers.spec, layers.spec.value_heads * layers.spec.key_dim
        num_elements = bounds.max_num_rows * max(spec.num_channels, 5 * spec.value_size)
        num_elements += bounds.max_num_seqs * (3 * spec.num_channels * spec.conv_width + 5 * keys)
        num_elements += CHUNK_ROWS * (6 * keys + 6 * spec.value_size + 5 * spec.value_heads * CHUNK_ROWS)
        num_elements += 3 * spec.value_heads * spec.key_dim * spec.value_dim
        # Draft tokens of one sequence, and the state that they advance.
        drafts = layers.num_drafts * (3 * spec.num_channels * spec.conv_width + 3 * spec.value_size)
        num_elements += drafts + (keys * spec.value_dim if drafts else 0)
        reason = "rows of a step in float32, one chunk of them at a time, and a state that advances"
        return (*super().terms(layers, bounds), Term("states/rows", bytes_for("float32", (num_elements,)), reason))


DECLARATIONS = TritonStateDeclaration(), TorchStateDeclaration()


@dataclass(frozen=True)
class HybridDeclaration(BackendDeclaration):
    """Attention of some layers, and states of the others."""

    attention: BackendDeclaration
    states: StateDeclaration
    layers: StateLayers

    @property
    def name(self) -> str:  # type: ignore[override]  # a class variable of others
        return f"{self.attention.name} and {self.states.name}"

    @property
    def can_be_captured(self) -> bool:  # type: ignore[override]
        return self.attention.can_be_captured and self.states.can_be_captured

    @property
    def can_be_invariant(self) -> bool:  # type: ignore[override]
        return self.attention.can_be_invariant and self.states.can_be_invariant

    def unsupported(self, spec: AttentionSpec) -> str | None:
        return self.attention.unsupported(spec) or self.states.unsupported(self.layers)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        return (*self.attention.scratch(specs, bounds), *self.states.scratch(self.layers, bounds))

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        return (*self.attention.terms(specs, bounds), *self.states.terms(self.layers, bounds))
