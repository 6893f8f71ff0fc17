"""Blueprint, and LayeredBlueprint: a decoder listed layer by layer (weights, KV, state), planned and not run; no torch.

A window keeps that many tokens of a sequence, a state (gated delta net, Mamba2) a fixed number of bytes. Other layers
keep all tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from holdfast.attention.declarations import PARTIAL_HEAD_ROWS
from holdfast.distributed.mesh import Mesh
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import LAYERS, Request
from holdfast.models.declaration import CacheRows, HeadGeometry, StepShape, split
from holdfast.models.declared_weights import Weight
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.parameters import Kind
from holdfast.models.spec import ModelSpec
from holdfast.quant.formats import KVFormat

Cut = Literal["whole", "rows", "columns"]
CONV_BYTES, STATE_BYTES = 2, 4
"""Bytes per element: convolution inputs have the model's 16-bit type, recurrent states float32 (`mamba_ssm_dtype`)."""


class Part(NamedTuple):
    """One tensor, and how ranks share it."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "linear"
    cut: Cut = "whole"
    """Rows are outputs, columns inputs. An expert tensor is (experts, rows, columns)."""
    units: int = 0
    """Heads or groups that rows consist of. Ranks never cut one, and share one if there are too few; 0: single rows."""
    dtype: str | None = None

    def weight(self, prefix: str, native: str | None, mesh: Mesh) -> Weight:
        """Return the tensor as one rank holds it."""
        scheme = native if self.kind in ("linear", "expert") else None
        return Weight(f"{prefix}{self.name}", self._shape(mesh), self.kind, scheme, self.dtype)

    def _shape(self, mesh: Mesh) -> tuple[int, ...]:
        is_expert = self.kind == "expert"
        if is_expert and mesh.expert_size > 1:
            return (self.shape[0] // mesh.expert_size, *self.shape[1:])
        if self.cut == "whole" or mesh.tensor_size == 1:
            return self.shape
        shape = list(self.shape)
        # Ranks that gather split the outputs of every matrix.
        axis = len(shape) - 1 if self.cut == "columns" and not mesh.is_exact else int(is_expert)
        if self.units and axis == 0:
            shape[0] = shape[0] // self.units * max(1, self.units // mesh.tensor_size)
        else:
            shape[axis] //= mesh.tensor_size
        return tuple(shape)

    def indivisible(self, mesh: Mesh) -> str | None:
        """Return what does not divide; None if all does."""
        size, is_expert = mesh.tensor_size, self.kind == "expert"
        if is_expert and mesh.expert_size > 1:
            return split(self.shape[0], mesh.expert_size, "experts")
        if self.cut == "whole":
            return None
        if self.units and self.cut == "rows":
            if self.units % size == 0 or size % self.units == 0:
                return None
            return f"{self.units} heads or groups of {self.name} neither divide into {size} parts nor are shared evenly"
        axis = len(self.shape) - 1 if self.cut == "columns" and not mesh.is_exact else int(is_expert)
        return split(self.shape[axis], size, f"{'columns' if axis else 'rows'} of {self.name}")


class State(NamedTuple):
    """What a recurrent layer keeps of a sequence."""

    heads: int
    """Ranks split heads and groups."""
    elements: int
    """Elements of one head's recurrent state."""
    groups: int
    group_channels: int
    head_channels: int
    """Convolution channels of a group and of a head."""
    conv_width: int

    def num_bytes(self, num_ranks: int) -> int:
        heads, groups = self.heads // num_ranks, max(1, self.groups // num_ranks)
        channels = groups * self.group_channels + heads * self.head_channels
        return STATE_BYTES * heads * self.elements + CONV_BYTES * (self.conv_width - 1) * channels


class Layer(NamedTuple):
    """One layer."""

    parts: tuple[Part, ...]
    num_kv_heads: int = 0
    """0: the layer keeps no keys and values of its own."""
    head_dim: int = 0
    window: int | None = None
    """Newest tokens that the layer keeps; None: all."""
    state: State | None = None


@dataclass(frozen=True)
class Blueprint:
    """A decoder that is planned as a whole and not run."""

    grouped: DecoderDeclaration
    """The decoder as running families declare it: its ends, the widest layer's workspace, and what ranks share."""
    rotated_dim: int
    """Elements of a head that RoPE rotates."""

    @property
    def decoder(self) -> ModelSpec:
        return self.grouped.decoder

    @property
    def parts(self) -> Collection[Part]:
        """Distinct tensors that ranks split, beside those of `grouped`."""
        return ()

    @property
    def is_paged(self) -> bool:
        """True if all layers keep all tokens alike, as the paged cache does."""
        raise NotImplementedError

    def rope_pairs(self, mesh: Mesh) -> int:
        # 0 would mean learned positions. Attention without positions takes the smallest value.
        return max(1, self.rotated_dim // 2)

    def indivisible(self, mesh: Mesh) -> str | None:
        if mesh.num_stages > 1:
            return f"{mesh.num_stages} stages are planned of models that run, and this one is planned as a whole"
        found = (part.indivisible(mesh) for part in (self.parts if mesh.tensor_size > 1 else ()))
        return next((reason for reason in found if reason is not None), None) or self.grouped.indivisible(mesh)

    def weights(self, mesh: Mesh) -> tuple[Weight, ...]:
        raise NotImplementedError

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        return self.grouped.unsupported_format(kv_format)

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        raise NotImplementedError

    def sequence_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        raise NotImplementedError

    def heads(self, mesh: Mesh) -> HeadGeometry | None:
        return self.grouped.heads(mesh) if self.is_paged else None

    def room_elements(self, mesh: Mesh, num_rows: int) -> int:
        return self.grouped.room_elements(mesh, num_rows)

    def requests(self, step: StepShape, mesh: Mesh, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        if not self.is_paged:
            shape = (PARTIAL_HEAD_ROWS, self.decoder.head_dim + 2)
            scratch = (*scratch, TensorSpec("partial", shape, "float32"))
        return self.grouped.requests(step, mesh, scratch)


@dataclass(frozen=True)
class LayeredBlueprint(Blueprint):
    """A decoder given layer by layer."""

    layers: tuple[Layer, ...]
    ends: tuple[Part, ...] = ()
    """Tensors besides embedding, final norm and head."""
    linear_width: int = 0
    """Columns of all projections of a recurrent layer."""

    @property
    def parts(self) -> Collection[Part]:
        return dict.fromkeys(part for layer in self.layers for part in layer.parts)

    @property
    def is_paged(self) -> bool:
        spec = self.decoder
        alike = all((one.num_kv_heads, one.head_dim) == (spec.num_kv_heads, spec.head_dim) for one in self.layers)
        return alike and all(one.window is None and one.state is None for one in self.layers)

    def weights(self, mesh: Mesh) -> tuple[Weight, ...]:
        one = self.grouped._replace(decoder=replace(self.decoder, num_layers=1, experts=None, sliding_windows=()))
        return (
            *(weight._replace(tensors=()) for weight in one.weights(mesh) if weight.group != "layers"),
            *(part.weight("", None, mesh) for part in self.ends),
            *(
                part.weight(f"layers.{index}.", self.grouped.native, mesh)
                for index, layer in enumerate(self.layers)
                for part in layer.parts
            ),
        )

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        rows = [self._row_bytes(one, kv_format, mesh) for one in self.layers if one.num_kv_heads and one.window is None]
        return tuple(CacheRows("attention", rows.count(size), size) for size in dict.fromkeys(rows))

    def sequence_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        windows = sum((one.window or 0) * self._row_bytes(one, kv_format, mesh) for one in self.layers)
        return windows + sum(one.state.num_bytes(mesh.tensor_size) for one in self.layers if one.state is not None)

    def _row_bytes(self, layer: Layer, kv_format: KVFormat, mesh: Mesh) -> int:
        if not layer.num_kv_heads:
            return 0
        return kv_format.bytes_per_token(max(1, layer.num_kv_heads // mesh.tensor_size), layer.head_dim)

    def requests(self, step: StepShape, mesh: Mesh, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        requests = super().requests(step, mesh, scratch)
        if not self.linear_width:
            return requests
        width = (step.num_rows, self.linear_width // mesh.tensor_size)
        return (*requests, Request(LAYERS, "recurrent", (TensorSpec("projected", width, step.dtype),)))


def norm(name: str, width: int) -> Part:
    return Part(f"{name}.weight", (width,), "norm")


def matrix(name: str, rows: int, columns: int, cut: Cut, units: int = 0) -> Part:
    return Part(f"{name}.weight", (rows, columns), "linear", cut, units)


def mlp(hidden: int, inner: int, *, gated: bool = True, prefix: str = "") -> tuple[Part, ...]:
    """List gate and up as one matrix, and down."""
    wide = matrix(f"{prefix}gate_up" if gated else f"{prefix}up", (2 if gated else 1) * inner, hidden, "rows")
    return wide, matrix(f"{prefix}down", hidden, inner, "columns")


def experts(num_experts: int, width: int, inner: int, *, gated: bool = True) -> tuple[Part, ...]:
    """List all experts of a layer, over a stream of that width."""
    wide = "gate_up" if gated else "up"
    return (
        Part(f"experts.{wide}.weight", (num_experts, (2 if gated else 1) * inner, width), "expert", "rows"),
        Part("experts.down.weight", (num_experts, width, inner), "expert", "columns"),
    )


def router(num_experts: int, hidden: int, *, has_bias: bool = False) -> tuple[Part, ...]:
    """List the router, and the float32 bias that is added to choose experts."""
    parts = (Part("router.weight", (num_experts, hidden), "router"),)
    return (*parts, Part("router.bias", (num_experts,), "bias", dtype="float32")) if has_bias else parts


def attention(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, has_gate: bool = False, has_keys: bool = True,
    has_values: bool = True,
) -> tuple[Part, ...]:  # fmt: skip
    """List projections of queries (with a gate beside each if `has_gate`), keys, values and output."""
    width = heads * head_dim
    parts = [matrix("q", (2 if has_gate else 1) * width, hidden, "rows", heads)]
    for name, is_there in (("k", has_keys), ("v", has_keys and has_values)):
        parts += [matrix(name, kv_heads * head_dim, hidden, "rows", kv_heads)] if is_there else []
    return (*parts, matrix("o", hidden, width, "columns"))
