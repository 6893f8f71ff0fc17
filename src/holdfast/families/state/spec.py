"""State layers (gated delta nets): one convolution state and one recurrent state of a sequence, not its tokens; no torch.

T rows of a step, C channels of the convolution, W its width, Hk/Hv key and value heads, Dk/Dv elements of each

A state's place is a runner slot, or a snapshot after the slots (cache/places.py). The convolution keeps its last W - 1
inputs, the newest last. Channels are all queries, then all keys, then all values; key head j serves the value heads
from j * Hv / Hk on.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from holdfast.cache.places import CONV, RECURRENT, StatePart
from holdfast.kernels.state.state_geometry import draft_specs
from holdfast.memory.workspace_plan import TensorSpec

SCRATCH = "state."
"""Prefix of a state backend's scratch among the scratch of a model's backends."""
LISTS, DRAFTS = "states/lists", "states/drafts"
"""Owners of what a state backend holds for life."""
RECURRENT_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The layers of a decoder that keep a state; its other layers attend to tokens."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: Literal["head", "channel"] = "head"
    """A state decays by one factor a value head, or by one a row of it (KDA)."""
    output_gate: Literal["silu", "sigmoid"] = "silu"
    """Function of the factor on normed outputs."""
    is_joined: bool = False
    """Checkpoints join projections by key head: its query, key, values and gates, then the next head's."""
    joins_gates: bool = False
    """Checkpoints join the inputs of beta and of the decay by key head, too. GGUF files may join these alone."""
    is_tiled: bool = False
    """Columns of the output projection are the first value head of each key head, then the second of each (GGUF)."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the weights that quantization may cover."""
        return "in_proj", "o"

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def part_sizes(self) -> tuple[int, int, int, int]:
        """Rows of the fused projection: queries, keys, values, output gates."""
        return self.key_size, self.key_size, self.value_size, self.value_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of one layer."""
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width

    @property
    def value_runs(self) -> tuple[tuple[slice, slice], ...]:
        """Value heads, and their places among the inputs of the output projection."""
        if not self.is_tiled:
            return ((slice(None), slice(None)),)
        ratio, count = self.value_heads // self.key_heads, self.key_heads
        return tuple((slice(place, None, ratio), slice(place * count, (place + 1) * count)) for place in range(ratio))

    def runs(self, name: str) -> tuple[int, ...]:
        """Return the rows of a parameter that ranks split by key head, part by part; empty if they do not."""
        by_head = (self.value_heads,)
        sizes = {
            "in_proj.weight": self.part_sizes,
            "in_gates.weight": 2 * by_head,
            "conv.weight": self.part_sizes[:3],
            "A_log": by_head,
            "dt_bias": by_head,
        }
        return next((own for ending, own in sizes.items() if name.endswith(f".{ending}")), ())

    def products(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """List outputs and inputs of the weights, in the order of computation."""
        return (sum(self.part_sizes), hidden), (hidden, self.value_size)

    def parts(self, dtype: str) -> tuple[StatePart, ...]:
        """List what a place holds in all layers; `dtype` is that of activations."""
        layers = tuple(sorted(self.layers))
        state = self.value_heads, self.key_dim, self.value_dim
        return (
            StatePart(CONV, layers, (self.num_channels, self.conv_width - 1), dtype),
            StatePart(RECURRENT, layers, state, RECURRENT_DTYPE),
        )

    def tensors(self, num_rows: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Declare the tensors of `StateBuffers`."""
        return (
            TensorSpec("projected", (num_rows, sum(self.part_sizes)), dtype),
            TensorSpec("gate_inputs", (num_rows, 2 * self.value_heads), "float32"),
            TensorSpec("mixed", (num_rows, self.num_channels), dtype),
            TensorSpec("attended", (num_rows, self.value_size), dtype),
        )

    def share(self, num_ranks: int) -> "StateSpec":
        """Return a rank's heads."""
        return replace(self, key_heads=self.key_heads // num_ranks, value_heads=self.value_heads // num_ranks)

    def slice(self, first: int, last: int) -> "StateSpec | None":
        """Return the layers from `first` to before `last`, counted from 0 there; None if none has a state."""
        layers = frozenset(layer - first for layer in self.layers if first <= layer < last)
        return replace(self, layers=layers) if layers else None


class StateLayers(NamedTuple):
    """A rank's state layers as backends see them."""

    spec: StateSpec
    dtype: str
    """torch's name of the type of activations."""
    device_kind: str
    """cpu or cuda."""
    num_drafts: int = 0
    """Most draft tokens of a sequence in a step."""

    def kept_drafts(self, max_num_seqs: int) -> tuple[TensorSpec, ...]:
        """Declare what slots keep of draft tokens between steps; empty without draft tokens."""
        if not self.num_drafts:
            return ()
        spec = self.spec
        gates = (spec.value_heads,) if spec.gate == "head" else (spec.value_heads, spec.key_dim)
        sizes = len(spec.layers), max_num_seqs, self.num_drafts, spec.num_channels
        return draft_specs(*sizes, gates, self.dtype)
