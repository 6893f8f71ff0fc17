"""The attention backend that a declaration stands for, built over its pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.attention.backend import AttentionBackend
from holdfast.attention.declarations import BackendDeclaration, StepBounds
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.families.compressed.torch_backend import TorchCompressedAttention
from holdfast.families.compressed.triton_backend import TritonCompressedAttention
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.pages import KeyBiases, KeyMeans, PairScales, Sinks
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.families.latent.torch_backend import TorchLatentAttention
from holdfast.families.latent.triton_backend import TritonLatentAttention
from holdfast.families.sparse.torch_backend import TorchSparseLatentAttention
from holdfast.families.sparse.triton_backend import TritonSparseLatentAttention
from holdfast.families.state.backend import HybridAttention, StateBackend
from holdfast.families.state.declarations import HybridDeclaration


@dataclass(frozen=True, slots=True)
class BackendInputs:
    """What backends take beside specs and pages; each reads the fields of its family."""

    bounds: StepBounds
    num_sms: int = 1
    batch_invariant: bool = False
    k_means: KeyMeans | None = None
    """Means subtracted from the keys of each grouped layer before they are quantized."""
    key_biases: KeyBiases | None = None
    """Biases that stored keys lack; scores include them."""
    sinks: Sinks | None = None
    """Logits that join the softmax of each grouped layer's query heads."""
    pair_scales: PairScales | None = None
    """Factors of keys before they are quantized, and of queries."""
    states: StateStorage | None = None
    """States outside the pages, if some layer has one."""


def build_backend(
    declaration: BackendDeclaration, specs: Sequence[Any], storage: PageStorage, inputs: BackendInputs
) -> AttentionBackend:
    """Build the backend of a declaration; `specs` are those of its family."""
    if isinstance(declaration, HybridDeclaration):
        assert inputs.states is not None, f"{declaration.name} has no states"
        states = StateBackend(inputs.states, inputs.bounds, declaration.layers, inputs.states.device)
        return HybridAttention(declaration.name, build_backend(declaration.attention, specs, storage, inputs), states)
    name, machine = declaration.name, (inputs.bounds, inputs.num_sms)
    names = "k_means", "key_biases", "sinks", "pair_scales"
    layers = {one: getattr(inputs, one) for one in names}
    match name:
        case NativePagedAttention.name:
            return NativePagedAttention(specs, storage, inputs.sinks)
        case TorchPagedAttention.name:
            return TorchPagedAttention(specs, storage, **layers)
        case TritonPagedAttention.name:
            return TritonPagedAttention(specs, storage, *machine, inputs.batch_invariant, **layers)
        case TorchCompressedAttention.name:
            return TorchCompressedAttention(specs, storage, inputs.states)
        case TritonCompressedAttention.name:
            return TritonCompressedAttention(specs, storage, inputs.states, *machine)
    on_gpu = {one.name: one for one in (TritonLatentAttention, TritonSparseLatentAttention)}
    if name in on_gpu:
        return on_gpu[name](specs, storage, *machine)
    return {one.name: one for one in (TorchLatentAttention, TorchSparseLatentAttention)}[name](specs, storage)
