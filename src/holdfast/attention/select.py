"""From what is declared to what runs: the backend that a declaration stands for."""

from collections.abc import Sequence
from typing import Any

from holdfast.attention.backend import CompressedAttention, GroupedAttention, LatentAttention
from holdfast.attention.declarations import AttentionSpec, BackendDeclaration, StepBounds
from holdfast.attention.layer_pages import KeyBiases, KeyMeans, Sinks
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.torch_compressed import TorchCompressedAttention
from holdfast.attention.torch_latent import TorchLatentAttention
from holdfast.attention.torch_paged import TorchPagedAttention
from holdfast.attention.torch_sparse import TorchSparseLatentAttention
from holdfast.attention.triton_compressed import TritonCompressedAttention
from holdfast.attention.triton_latent import TritonLatentAttention
from holdfast.attention.triton_paged import TritonPagedAttention
from holdfast.attention.triton_sparse import TritonSparseLatentAttention
from holdfast.cache.storage import PageStorage, StateStorage


def build_backend(
    declaration: BackendDeclaration,
    specs: Sequence[AttentionSpec],
    storage: PageStorage,
    bounds: StepBounds,
    num_sms: int,
    batch_invariant: bool,
    k_means: KeyMeans | None = None,
    key_biases: KeyBiases | None = None,
    sinks: Sinks | None = None,
) -> GroupedAttention[Any]:
    """The backend over its storage.

    `k_means`: what is subtracted from the keys of each layer before they are quantized. `key_biases`: what keys are written
    without, and scores get. `sinks`: the logits that join the softmax of each layer's query heads.
    """
    if declaration.name == TritonPagedAttention.name:
        return TritonPagedAttention(specs, storage, bounds, num_sms, batch_invariant, k_means, key_biases, sinks)
    if declaration.name == TorchPagedAttention.name:
        return TorchPagedAttention(specs, storage, k_means, key_biases, sinks)
    return {NativePagedAttention.name: NativePagedAttention}[declaration.name](specs, storage, sinks)


def build_latent_backend(
    declaration: BackendDeclaration,
    specs: Sequence[AttentionSpec],
    storage: PageStorage,
    bounds: StepBounds,
    num_sms: int,
) -> LatentAttention[Any]:
    """The backend over latents (MLA), sparse (DSA) where the declaration is of one."""
    on_gpu = {one.name: one for one in (TritonLatentAttention, TritonSparseLatentAttention)}
    if declaration.name in on_gpu:
        return on_gpu[declaration.name](specs, storage, bounds, num_sms)
    by_name = {one.name: one for one in (TorchLatentAttention, TorchSparseLatentAttention)}
    return by_name[declaration.name](specs, storage)


def build_compressed_backend(
    declaration: BackendDeclaration,
    specs: Sequence[AttentionSpec],
    storage: PageStorage,
    states: StateStorage | None,
    bounds: StepBounds,
    num_sms: int,
) -> CompressedAttention[Any]:
    """The backend over windows, entries and states (DeepSeek-V4); no states where no layer has entries."""
    if declaration.name == TritonCompressedAttention.name:
        return TritonCompressedAttention(specs, storage, states, bounds, num_sms)
    return {TorchCompressedAttention.name: TorchCompressedAttention}[declaration.name](specs, storage, states)
