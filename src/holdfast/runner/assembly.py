"""Assembly: pages, workspace, attention, model and runner of a plan over loaded weights, each byte in the ledger."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from holdfast.attention.backend import AttentionBackend
from holdfast.attention.declarations import BackendDeclaration, StepBounds
from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.distributed.exchange import Exchange
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.grouped.key_bias import SplitBiases, key_bias_norms, split_biases
from holdfast.families.grouped.sinks import copy_sinks
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.latent.rotation import fold_rotation
from holdfast.kernels.packed_kernels import ARRIVED_BYTES, LANE
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace import Workspace
from holdfast.models.activations import takes_fused_decode
from holdfast.models.compressed_decoder import CompressedDecoder
from holdfast.models.decoder_layer import DecoderParts
from holdfast.models.layer_stack import LayerStack
from holdfast.models.rope import StepRope, key_turns, make_step_rope
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.protected_layers import by_key_bias, listed
from holdfast.planning.terms import PROCESS_OWNER, TOKENIZER_OWNER
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.runner.key_means import KeyRooms, centre_keys, make_means
from holdfast.runner.key_scale import make_scales, scale_keys
from holdfast.runner.pooled_rows import PooledRows
from holdfast.runner.runner import Runner, RunnerParts
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.sampler import HostSampler
from holdfast.runner.sampling.shared_sampler import SharedSampler
from holdfast.runner.step_inputs import BatchBuffers

log = get_logger(__name__)

HELD_OUTSIDE = ("cuda context", "libraries", "allocator", "cuda graphs", PROCESS_OWNER, TOKENIZER_OWNER)
"""Owners without a tensor of ours. The ledger books their planned bytes; the report adds the device's own total."""
MakeBackend = Callable[[BackendDeclaration, Sequence[Any], PageStorage, BackendInputs], AttentionBackend]
"""Replaces `build_backend`, for measurements."""
Weights = Mapping[str, AnyWeight]


def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(eq=False)
class Assembly:
    """Parts that a runner is built from. `releases` frees every allocation, last first."""

    plan: RunnerPlan
    whole: ModelSpec
    """The whole model."""
    spec: ModelSpec
    """This rank's part."""
    weights: Weights
    ledger: Ledger
    device: torch.device
    exchange: Exchange | None = None
    row_sizes: tuple[int, ...] = ()
    """Row counts that steps are padded to, if products must round alike; empty if any count will do."""
    batch_invariant: bool = False
    is_sharing: bool = False
    """Other runners read the weights too, so they are not changed in place."""
    text_ids: Sequence[int] = ()
    """A short text, which key scales are measured on."""
    releases: list[Callable[[], None]] = field(default_factory=list)
    storage: PageStorage = field(init=False)
    """The pages; set by `runner`."""

    def settle_layers(self) -> None:
        """Choose protected layers by their weights: as many as were planned, so no byte changes."""
        protected = self.plan.resolved.protected
        if not protected.is_open:
            return
        assert self.spec.qkv_bias, f"{self.spec.architecture} has no key biases"
        norms = key_bias_norms(self.weights, self._by_head(), self.exchange, self.whole.num_kv_heads)
        layers, reason = by_key_bias(len(protected.layers), norms)
        self.plan = self.plan.with_protected(layers, reason)
        log.info("kv_protected_layers=%s because %s", listed(layers), reason)

    def runner(self, eos_token_ids: frozenset[int], make_backend: MakeBackend | None = None) -> Runner:
        """Build the runner; `make_backend` replaces `build_backend`."""
        self.settle_layers()
        plan, spec, device, ledger = self.plan, self.spec, self.device, self.ledger
        limits, cache, declaration = plan.resolved.limits, plan.cache, plan.declaration
        assert cache is not None and declaration is not None, f"{plan.declared.name} cannot run"  # noqa: PT018
        storage = self.storage = PageStorage(cache, plan.memory.num_pages, device, ledger)
        self.releases.append(storage.release)
        workspace = Workspace(plan.workspace, device, ledger)
        self.releases.append(workspace.release)
        rope, bounds = self._step_rope(), self._bounds
        by_head = self._by_head()
        biases, means = self._split_biases(by_head), make_means(by_head, device)
        tables = self._layer_tables(by_head, biases, means)
        states = self._states() if cache.has_states else None
        inputs = BackendInputs(bounds, num_sms(device), self.batch_invariant, **tables, states=states)
        make = make_backend or build_backend
        backend = make(declaration, plan.attention_specs, storage, inputs)
        parts = DecoderParts(
            spec,
            {**in_room(self.weights, workspace, plan), **biases.qkv, **self._folded_weights()},
            backend,
            rope,
            workspace,
            declaration.scratch(plan.attention_specs, bounds),
            self._takes_fused_decode,
            plan.resolved.dtype,
            plan.resolved.recipe,
            self.exchange,
            plan.mesh.is_exact,
        )
        model = LayerStack(parts) if spec.compressed is None else CompressedDecoder(parts)
        self._record(backend)
        shapes = chunk_shapes(cache, storage.num_pages)
        kinds = {"has_states": cache.has_states, "has_drafts": states is not None and plan.resolved.num_proposals > 0}
        buffers = BatchBuffers(limits, device, ledger, is_shared=device.type == "cpu", shapes=shapes, **kinds)
        runner = Runner(
            RunnerParts(
                model,
                backend,
                buffers,
                self._sampler(),
                limits,
                cache.cache_groups(),
                plan.memory.num_pages,
                self.whole.vocab_size,
                eos_token_ids,
                device,
                plan.mesh,
                self.row_sizes,
                partial(copy_cache, storage, states),
                PooledRows(spec.hidden_size, plan.resolved.dtype, device, ledger),
                plan.state_rule,
            )
        )
        self.releases.append(runner.close)
        self._centre_keys(runner, biases, means)
        self._scale_keys(runner, by_head, tables.get("pair_scales", ()))
        return runner

    def _by_head(self) -> list[GroupedAttentionSpec]:
        return [own for own in self.plan.attention_specs if isinstance(own, GroupedAttentionSpec)]

    @property
    def _bounds(self) -> StepBounds:
        limits = self.plan.resolved.limits
        return StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)

    @property
    def _takes_fused_decode(self) -> bool:
        """True if small batches take the fused decode path, as far as is known before weights are read."""
        resolved = self.plan.resolved
        takes = takes_fused_decode(self.spec, resolved.dtype, self.device.type, resolved.recipe)
        return takes and not self.batch_invariant

    def _states(self) -> StateStorage:
        resolved = self.plan.resolved
        num_places = resolved.limits.max_num_seqs + resolved.num_snapshots
        states = StateStorage(self.plan.states, num_places, self.device, self.ledger)
        self.releases.append(states.release)
        return states

    def _sampler(self) -> HostSampler | DeviceSampler | SharedSampler:
        """Build a sampler of whole logits, or of this rank's share."""
        limits, mesh = self.plan.resolved.limits, self.plan.mesh
        shape = self.whole.vocab_size, limits.sampled_rows
        sampler = HostSampler(*shape)
        if self.device.type != "cpu":
            sampler = DeviceSampler(shape[0], self.device, shape[1], self.ledger)
        if self.exchange is None:
            return sampler
        needs = self.plan.exchange_needs
        assert needs is not None, f"{mesh} exchanges nothing"
        return SharedSampler(sampler, self.exchange, mesh, needs, self.device, self.ledger)

    def _folded_weights(self) -> dict[str, torch.Tensor]:
        """Fold the rotation of stored latents into adjacent weights; the runner owns any copies."""
        folded = fold_rotation(self.weights, self.plan.attention_specs, self.is_sharing)
        if self.is_sharing and folded:
            num_bytes = sum(weight.nbytes for weight in folded.values())
            owner = "attention/o_a" if self.spec.latent is None else "attention/kv_b"
            self.ledger.record(owner, num_bytes, "rotated copies, because other runners read the weights too")
        return folded

    def _layer_tables(
        self, specs: Sequence[GroupedAttentionSpec], biases: SplitBiases, means: Sequence[torch.Tensor | None]
    ) -> dict[str, Any]:
        """Return the tables of grouped layers: key biases, means, scales, sinks, if any layer has them."""
        sinks = copy_sinks(self.weights, specs)
        named: dict[str, Sequence[Any]] = {"key_biases": biases.keys, "k_means": means, "sinks": sinks}
        named["pair_scales"] = make_scales(specs, self.device) if self.plan.resolved.key_scale else ()
        return {name: tables for name, tables in named.items() if any(table is not None for table in tables)}

    def _record(self, backend: AttentionBackend) -> None:
        """Book the backend's bytes and those of HELD_OUTSIDE in the ledger."""
        for owner, num_bytes in backend.held_bytes().items():
            self.ledger.record(owner, num_bytes, f"{backend.name}'s own")
        for term in self.plan.memory.terms:
            if term.owner in HELD_OUTSIDE:
                self.ledger.record(term.owner, term.num_bytes, term.reason)

    def _centre_keys(self, runner: Runner, biases: SplitBiases, means: Sequence[torch.Tensor | None]) -> None:
        """Measure the mean keys before the first page of a request is written. They never change afterwards."""
        mean_bytes = sum(mean_KD.nbytes for mean_KD in means if mean_KD is not None)
        if mean_bytes:
            self.ledger.record("attention/key_means", mean_bytes, "what the keys of a head have in common")
        # The prompt runs through all stages, even those with nothing to measure.
        is_staged = self.plan.mesh.num_stages > 1 and self.plan.resolved.kv_format.is_quantized
        if mean_bytes or any(biases.keys) or is_staged:
            rooms = KeyRooms(biases.keys, biases.by_layer, means)
            num_tokens = centre_keys(runner, self.spec, rooms)
            if num_tokens:
                log.info("Keys are centred by their mean over %d warm-up tokens", num_tokens)

    def _scale_keys(
        self, runner: Runner, specs: Sequence[GroupedAttentionSpec], scales: Sequence[torch.Tensor | None]
    ) -> None:
        """Measure the key scales after the means, before the first page of a request is written."""
        if not self.plan.resolved.key_scale:
            return
        scale_bytes = sum(scale_2KD.nbytes for scale_2KD in scales if scale_2KD is not None)
        if scale_bytes:
            self.ledger.record("attention/key_scales", scale_bytes, "factors of keys and queries by pair")
        # The text runs through all stages, even those with nothing to measure.
        num_tokens, num_heads = scale_keys(runner, specs, self.text_ids)
        if num_tokens:
            log.info("Keys of %d heads are scaled, measured on %d tokens of text", num_heads, num_tokens)
        else:
            log.info(
                "%s", "kv_key_scale scales no key: there is no text, or a sequence or the pages hold too little of it"
            )

    def _step_rope(self) -> StepRope:
        """Allocate cos and sin of the largest step."""
        limits, dtype = self.plan.resolved.limits, getattr(torch, self.plan.resolved.dtype)
        rope = make_step_rope(self.spec, limits.max_model_len, limits.max_num_batched_tokens, dtype, self.device)
        if rope.rows is not None:
            table_bytes = rope.rows.cos_STP.nbytes + rope.rows.sin_STP.nbytes
            self.ledger.record("rope/table", table_bytes, "cos and sin of a step's tokens")
            self.ledger.record("rope/frequencies", rope.rows.frequency_SP.nbytes, "of the pairs that RoPE turns")
        return rope

    def _split_biases(self, specs: Sequence[GroupedAttentionSpec]) -> SplitBiases:
        """Split biases for layers that store keys without theirs."""
        spec, plan, turns = self.spec, self.plan, None
        if spec.rope is not None and any(own.has_key_bias for own in specs):
            dtype, longest = getattr(torch, plan.resolved.dtype), plan.resolved.limits.max_model_len
            turns = key_turns(spec, spec.rope, longest, dtype, self.device)
        biases = split_biases(self.weights, specs, spec.has_separable_key_bias, turns, spec.rope_dim)
        if biases.qkv:
            self.ledger.record("attention/qkv_bias", biases.qkv_bytes, "biases with zeros for the keys")
        return biases


def in_room(weights: Weights, workspace: Workspace, plan: RunnerPlan) -> dict[str, AnyWeight]:
    """Return the weights with the workspace lane of packed products, and the type of their activations."""
    room_X, activations = workspace.lanes.get(LANE), plan.resolved.recipe.packed.activations
    if room_X is not None and room_X.is_cuda:
        room_X[:ARRIVED_BYTES].zero_()
    own = {"room": room_X, "activations": activations, "is_invariant": plan.resolved.is_invariant}
    return {
        name: replace(weight, **own) if isinstance(weight, PackedWeight) else weight for name, weight in weights.items()
    }


def copy_cache(
    storage: PageStorage, states: StateStorage | None, pairs: Sequence[tuple[int, int]], slots: tuple[int, int] | None
) -> None:
    """Copy pages, and the states of one slot to another for a sequence that forks."""
    storage.copy_pages(pairs)
    if states is not None and slots is not None:
        states.copy_place(*slots)
