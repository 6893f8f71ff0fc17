"""vLLM 0.2x's KV compression in plain torch, to compare with ours: values pass through its codes and are stored in plain pages.

X any leading dimensions, K key/value heads, D head dim

    keys      8 bits: a bare cast to e4m3, no scale. 4 and 3 bits: divided by the norm, Hadamard-rotated, Lloyd-Max codes of a
              Gaussian; read back as norm * codes / |codes|, the norm in float16
    values    not rotated: from the least to the largest of a head in equal steps, step and least in float16
    layers    the first two and the last two stay in half precision, whatever the format
    prompt    rows of the first step may read keys and values as they came, as vLLM's do; later steps read its codes

Attention over the stored values is ours, so any difference in quality comes from the codes. Elements in half precision are
not rounded here, and count as two bytes.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch

from holdfast.attention.backend import AttentionBackend, Batch, EagerStep, LayerStep
from holdfast.attention.declarations import AttentionSpec, BackendDeclaration
from holdfast.cache.storage import PageStorage
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.grouped.pages import GroupedBackend
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.models.spec import ModelSpec
from holdfast.quant.kv_quantize import hadamard_block, rotate_heads

NUM_BOUNDARY = 2
"""Layers at either end that stay in half precision."""
PLAIN_BYTES = 2
FP8_MAX = 448.0
ITERATIONS = 2000


class VllmFormat(NamedTuple):
    """A vLLM format, by the common name."""

    name: str
    key_bits: int
    value_bits: int
    has_boundary: bool = True

    def head_bytes(self, head_dim: int) -> int:
        """Return bytes of a token and head: codes, a float16 for each norm, step and least; rounded up to an even number."""
        keys = head_dim * self.key_bits // 8 + (0 if self.key_bits == 8 else 2)
        values = head_dim * self.value_bits // 8 + (0 if self.value_bits == 8 else 4)
        return keys + values + (keys + values) % 2

    def exact_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layers that stay unquantized."""
        if not self.has_boundary:
            return frozenset()
        return frozenset((*range(NUM_BOUNDARY), *range(num_layers - NUM_BOUNDARY, num_layers))) & {*range(num_layers)}

    def note(self, num_layers: int) -> str:
        """Description of these layers."""
        layers = sorted(self.exact_layers(num_layers))
        return f"layers {','.join(map(str, layers))} in half precision" if layers else ""

    def bytes_per_token(self, spec: ModelSpec) -> Fraction:
        """Return bytes per token over all layers."""
        num_exact = len(self.exact_layers(spec.num_layers))
        exact = PLAIN_BYTES * 2 * spec.head_dim
        heads = (spec.num_layers - num_exact) * self.head_bytes(spec.head_dim) + num_exact * exact
        return Fraction(spec.num_kv_heads * heads)

    def keys(self, k_XD: torch.Tensor) -> torch.Tensor:
        """Return keys after the round trip."""
        return cast_fp8(k_XD) if self.key_bits == 8 else quantized_keys(k_XD, self.key_bits)

    def values(self, v_XD: torch.Tensor) -> torch.Tensor:
        """Return values after the round trip."""
        return cast_fp8(v_XD) if self.value_bits == 8 else stepped_values(v_XD, self.value_bits)


VLLM_FORMATS = (
    VllmFormat("fp8", 8, 8, has_boundary=False),
    VllmFormat("turboquant_k8v4", 8, 4),
    VllmFormat("turboquant_4bit_nc", 4, 4),
    VllmFormat("turboquant_k3v4_nc", 3, 4),
    VllmFormat("turboquant_3bit_nc", 3, 3),
)


def cast_fp8(x_XD: torch.Tensor) -> torch.Tensor:
    """Cast to e4m3, clamped to its largest number."""
    return x_XD.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x_XD.dtype)


def quantized_keys(k_XD: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize the rotated direction with Lloyd-Max codes, and restore the length."""
    head_dim = k_XD.shape[-1]
    assert hadamard_block(head_dim) == head_dim, f"{head_dim=} is no power of two, and it has no rotation for others"
    norm_X1 = k_XD.float().norm(dim=-1, keepdim=True)
    unit_XD = rotate_heads(k_XD.float() / (norm_X1 + 1e-8))
    centroids = torch.tensor(lloyd_max(bits), device=k_XD.device) * head_dim**-0.5
    codes_XD = torch.bucketize(unit_XD, (centroids[1:] + centroids[:-1]) / 2)
    read_XD = centroids[codes_XD]
    read_XD = read_XD / read_XD.norm(dim=-1, keepdim=True) * norm_X1.half().float()
    return rotate_heads(read_XD).to(k_XD.dtype)


def stepped_values(v_XD: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to the nearest of equal steps between a head's least and largest value."""
    v_XD, dtype = v_XD.float(), v_XD.dtype
    least_X1, largest_X1 = v_XD.amin(dim=-1, keepdim=True), v_XD.amax(dim=-1, keepdim=True)
    step_X1 = (largest_X1 - least_X1) / (2**bits - 1)
    codes_XD = ((v_XD - least_X1) / step_X1.clamp(min=1e-8) + 0.5).floor().clamp(0, 2**bits - 1)
    return (codes_XD * step_X1.half().float() + least_X1.half().float()).to(dtype)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """Return the values that best represent a standard normal number, ascending."""
    values = [(2 * index + 1) * 4 / 2**bits - 4 for index in range(2**bits)]
    for _ in range(ITERATIONS):
        middles = [(low + high) / 2 for low, high in pairwise(values)]
        edges = [-math.inf, *middles, math.inf]
        values = [_mean_between(low, high) for low, high in pairwise(edges)]
    return tuple(values)


def _mean_between(low: float, high: float) -> float:
    """Return the mean of a standard normal number in this interval."""
    density = math.exp(-low * low / 2) - math.exp(-high * high / 2)
    weight = math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))
    return density / weight * math.sqrt(2 / math.pi)


class VllmPages(GroupedBackend):
    """A backend over plain pages that writes keys and values after vLLM's round trip."""

    name: ClassVar[str] = "vllm_pages"

    def __init__(
        self, inner: GroupedBackend, storage: PageStorage, vllm_format: VllmFormat, has_exact_prompt: bool = False
    ) -> None:
        self._inner, self.pages, self.on_write = inner, inner.pages, inner.on_write
        self._storage = storage
        self._format = vllm_format
        self._has_exact_prompt = has_exact_prompt
        self._prompt_slots: dict[int, torch.Tensor] = {}
        self._exact = vllm_format.exact_layers(len(storage.spec.layers))

    def held_bytes(self) -> dict[str, int]:
        return self._inner.held_bytes()

    def eager_steps(self) -> Sequence[EagerStep]:
        return self._inner.eager_steps()

    def plan(self, batch: Batch, captured: bool = False) -> Any:  # noqa: ANN401 the backend's own type
        return self._inner.plan(batch, captured)

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        layer: int,
        out_THD: torch.Tensor,
    ) -> None:
        self._inner.write(qkv_TX, batch, head_norm, rotary, layer, out_THD)
        if layer in self._exact:
            return
        slots_T = batch.slots_GT[self._storage.spec.group_of(layer)]
        slots_T = slots_T[slots_T >= 0]
        if self._has_exact_prompt:
            # One sequence on the first pages: its first step writes slot 0.
            if bool((slots_T == 0).any()):
                self._prompt_slots[layer] = slots_T.clone()
                return
            if layer in self._prompt_slots:
                slots_T = torch.cat((self._prompt_slots.pop(layer), slots_T))
        for name, quantized in (("k", self._format.keys), ("v", self._format.values)):
            plane_SKD = self._storage.plane(layer, name)
            plane_SKD[slots_T] = quantized(plane_SKD[slots_T])

    def attend(
        self,
        q_THD: torch.Tensor,
        step: LayerStep,
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        return self._inner.attend(q_THD, step, out_TX, wanted_only)


class MakeVllmPages(NamedTuple):
    """Builds this backend instead of ours."""

    format: VllmFormat
    has_exact_prompt: bool = False
    """The first step reads keys and values as they came."""

    def __call__(
        self,
        declaration: BackendDeclaration,
        specs: Sequence[AttentionSpec],
        storage: PageStorage,
        inputs: BackendInputs,
    ) -> AttentionBackend:
        inner = build_backend(declaration, specs, storage, inputs)
        assert isinstance(inner, GroupedBackend), f"{inner.name} keeps no keys and values by head"
        return VllmPages(inner, storage, self.format, self.has_exact_prompt)
