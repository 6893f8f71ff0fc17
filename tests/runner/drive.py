"""A whole runner around any attention backend, driven by the real scheduler, with every row of logits kept by position."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch

from holdfast.attention.backend import AttentionBackend
from holdfast.attention.declarations import AttentionSpec, BackendDeclaration, StepBounds
from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.compressed import compressed_cache
from holdfast.cache.spec import CacheSpec, mixed_cache
from holdfast.cache.states import StateRule
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.config import Limits
from holdfast.distributed.mesh import ALONE
from holdfast.engine.scheduler import Scheduler
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.choose import DECLARATIONS
from holdfast.families.grouped.sinks import copy_sinks
from holdfast.families.state.declarations import HybridDeclaration, TorchStateDeclaration
from holdfast.families.state.spec import StateLayers
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec, WorkspacePlan
from holdfast.models.compressed_decoder import CompressedDecoder
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import declare_decoder
from holdfast.models.decoder_layer import DecoderParts
from holdfast.models.layer_stack import LayerStack
from holdfast.models.rope import make_step_rope
from holdfast.models.spec import ModelSpec
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.quant.formats import ALL_KV_FORMATS, KVFormat
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, LiveStep, Sequence, SequenceState, StepResult, TokenLogprobs
from holdfast.runner.assembly import copy_cache
from holdfast.runner.pooled_rows import PooledRows
from holdfast.runner.runner import Runner, RunnerParts
from holdfast.runner.sampling.batch import Choice, Choosing
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.sampler import HostSampler, Sampler
from holdfast.runner.step_inputs import BatchBuffers

CPU = torch.device("cpu")


def declaration_named(name: str) -> BackendDeclaration:
    """The declaration of a backend, of any family."""
    return next(one for family in DECLARATIONS.values() for one in family if one.name == name)


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class LoadedModel:
    """What stays the same for every runner of a model."""

    spec: ModelSpec
    weights: Mapping[str, torch.Tensor | QuantizedWeight]


def load_model(folder: Path, dtype: str = "float32", load_format: str = "auto") -> LoadedModel:
    """A model from disk, by the engine's own loader."""
    model = open_model(str(folder), load_format)
    plan = plan_load(model.parameters, model.source, dtype)
    loaded = load_weights(plan, model.source, "cpu", Ledger(), _silent)
    model.source.close()
    return LoadedModel(model.spec, loaded.weights)


def _silent(done: int, total: int) -> None: ...


class RecordedLogits(Sampler):
    """Keeps every row of logits before the sampler that it is mixed into takes it."""

    sampled: list[torch.Tensor]
    prompt: list[torch.Tensor]

    def launch(
        self,
        logits_SV: torch.Tensor | None,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
        keep_slots_S: torch.Tensor | None = None,
    ) -> Choosing:
        self.sampled += [] if logits_SV is None else logits_SV.clone()
        return super().launch(logits_SV, choices, eos_token_ids, chosen_by_graph, keep_slots_S)

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        self.prompt += logits_TV.clone()
        return super().prompt_logprobs(logits_TV, target_ids, num_top)  # type: ignore[misc]


class RecordingHostSampler(RecordedLogits, HostSampler):
    """The sampler of a CPU."""


class RecordingDeviceSampler(RecordedLogits, DeviceSampler):
    """Chooses as a GPU does, by the references of its kernels."""


def recording_sampler(
    vocab_size: int, max_rows: int, *, like_gpu: bool
) -> RecordingHostSampler | RecordingDeviceSampler:
    """Make the sampler of the device in `CPU`, which tests on a GPU replace; `like_gpu`: that of a GPU."""
    sampler = RecordingHostSampler(vocab_size, max_rows)
    if like_gpu or CPU.type == "cuda":
        sampler = RecordingDeviceSampler(vocab_size, CPU, max_rows, Ledger())
    sampler.sampled, sampler.prompt = [], []
    return sampler


class Rig:
    """A runner, and what it computed: `logits[sequence id][position]` are those behind the token at that position.

    Pages hold NaN before the first step, and the workspace holds NaN before every one. A backend that reads a page table
    gets it as on a GPU, in memory of its own.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: str,
        limits: Limits,
        num_pages: int,
        kv_dtype: str = "float32",
        dtype: str = "float32",
        row_sizes: tuple[int, ...] = (),
        keeps_tokens: bool = False,
        index_dtype: str = "float32",
        num_snapshots: int = 4,
        num_drafts: int = 0,
    ) -> None:
        """`keeps_tokens`: steps begin when they are launched, as on a GPU, and its sampler chooses. `index_dtype`: of a model with one.

        `num_drafts`: most draft tokens that states outside the pages have to forget.
        """
        spec = model.spec
        self.model = model
        kv_format = ALL_KV_FORMATS[kv_dtype]
        if spec.latent is not None and spec.latent.index is not None:
            kv_format = replace(kv_format, index_dtype=index_dtype)
        cache, specs = lay_out(spec, kv_format, limits, dtype)
        bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
        declaration = declaration_named(backend)
        if spec.state is not None:
            own = StateLayers(spec.state, dtype, "cpu", num_drafts)
            declaration = HybridDeclaration(declaration, TorchStateDeclaration(), own)
        rule = StateRule(num_snapshots=num_snapshots, snapshot_tokens=64, num_drafts=num_drafts)
        self.state_rule = None if spec.state is None else rule
        scratch = declaration.scratch(specs, bounds)
        self.limits = limits
        self.storage = PageStorage(cache, num_pages, CPU, Ledger())
        for place, layer in enumerate(cache.layers):
            for plane in layer.planes:
                self.storage.plane(place, plane.name).view(torch.uint8).fill_(0xFF)  # NaN in every type
        self.workspace = Workspace(workspace_plan(spec, limits, dtype, scratch), CPU, Ledger())
        rope = make_step_rope(spec, limits.max_model_len, limits.max_num_batched_tokens, getattr(torch, dtype), CPU)
        self.sampler = recording_sampler(spec.vocab_size, limits.sampled_rows, like_gpu=keeps_tokens)
        self.states = self._make_states(spec, limits, dtype, num_snapshots) if cache.has_states else None
        sinks = copy_sinks(model.weights, specs) if spec.has_sinks and spec.compressed is None else None
        inputs = BackendInputs(bounds, sinks=sinks, states=self.states)
        self.backend: AttentionBackend = build_backend(declaration, specs, self.storage, inputs)
        parts = DecoderParts(spec, model.weights, self.backend, rope, self.workspace, scratch, dtype=dtype)
        self.decoder = (LayerStack if spec.compressed is None else CompressedDecoder)(parts)
        shapes, is_shared = chunk_shapes(cache, num_pages), not backend.startswith("triton") and not keeps_tokens
        kinds = {"has_states": cache.has_states, "has_drafts": num_drafts > 0}
        self.buffers = BatchBuffers(limits, CPU, Ledger(), is_shared=is_shared, shapes=shapes, **kinds)
        self.groups = cache.cache_groups()
        parts = (
            self.decoder,
            self.backend,
            self.buffers,
            self.sampler,
            limits,
            self.groups,
            num_pages,
            spec.vocab_size,
        )
        pooled_rows = PooledRows(spec.hidden_size, dtype, CPU, Ledger())
        copied = partial(copy_cache, self.storage, self.states)
        self.runner = Runner(
            RunnerParts(
                *(*parts, frozenset({2}), CPU),
                row_sizes=row_sizes,
                copy_cache=copied,
                pooled_rows=pooled_rows,
                state_rule=self.state_rule,
            )
        )
        self.logits: dict[int, dict[int, torch.Tensor]] = {}

    @staticmethod
    def _make_states(spec: ModelSpec, limits: Limits, dtype: str, num_snapshots: int) -> StateStorage:
        """All NaN: what a place held of another sequence may be anything."""
        heads = declare_decoder(spec, "tiny").declaration.heads(ALONE)
        assert heads is not None, f"{spec.architecture} has no heads"
        kinds = heads.place_kinds(dtype)
        num_places = limits.max_num_seqs + (num_snapshots if spec.state is not None else 0)
        states = StateStorage(kinds, num_places, CPU, Ledger())
        for kind in kinds:
            for layer in kind.layers:
                states.state(layer, kind.name).fill_(float("nan"))
        return states

    def poison(self) -> None:
        """Every byte of the workspace is NaN in every float, and -1 in every integer."""
        for arena in lanes(self.workspace).values():
            arena.fill_(0xFF)

    def poison_pages(self, pages: Iterable[int]) -> None:
        """NaN in every layer's part of these pages."""
        found = torch.tensor(list(pages), dtype=torch.int64)
        if not len(found):
            return
        for layer, group in ((layer, own) for own in self.storage.spec.groups for layer in own.layers):
            for plane in self.storage.spec.layers[layer].planes:
                # As bytes, since torch fills no fp8 by index; all bits set are NaN in every type.
                stored = self.storage.plane(layer, plane.name).view(torch.uint8)
                chunks = stored.unflatten(0, (group.chunks_per_page, -1, self.limits.page_tokens))
                chunks.index_fill_(1, found, 0xFF)

    def execute(self, step: LiveStep) -> StepResult:
        """Run a step and file its logits. A position that is computed again replaces what was there."""
        self.sampler.sampled.clear()
        self.sampler.prompt.clear()
        self.poison()
        result = self.runner.execute(step)
        sampled, prompt = iter(self.sampler.sampled), iter(self.sampler.prompt)
        for item, own in zip(step.scheduled, result.results, strict=True):
            logits = self.logits.setdefault(item.sequence.sequence_id, {})
            for offset in range(len(own.prompt_logprobs)):
                logits[item.start + offset] = next(prompt)
            if own.token_id is not None:
                logits[item.start + item.num_new_tokens - 1] = next(sampled)
        assert next(sampled, None) is None is next(prompt, None), "logits that belong to no one"
        return result


def lay_out(
    spec: ModelSpec, kv_format: KVFormat, limits: Limits, dtype: str
) -> tuple[CacheSpec, tuple[AttentionSpec, ...]]:
    """The cache of a model in one format, and what its layers compute over it."""
    geometry = declare_decoder(spec, "tiny").declaration.heads(ALONE)
    assert geometry is not None, "keys and values by head, latents, or windows and entries"
    paged = geometry.paged_layers
    formats = (kv_format,) * len(paged)
    if geometry.is_compressed:
        cache = compressed_cache(
            formats,
            geometry.head_dim,
            geometry.rope_dim,
            geometry.windows[0] or 0,
            geometry.ratios,
            geometry.overlapped_layers,
            geometry.index_dim,
            limits.page_tokens,
        )
        return cache, geometry.compressed_specs(cache, limits.max_model_len, dtype, "cpu")
    cache = mixed_cache(
        formats,
        spec.num_kv_heads,
        spec.head_dim,
        limits.page_tokens,
        spec.sliding_windows,
        limits.max_model_len,
        geometry.rope_dim,
        geometry.index_dim,
        geometry.shared_layers,
        () if spec.state is None else paged,
    )
    geometry = geometry._replace(has_separable_key_bias=False)  # pages hold keys with their bias
    specs = (
        geometry.attention_spec(layer, cache.group_of(place), limits.max_model_len, dtype, "cpu")
        for place, layer in enumerate(cache.layers)
    )
    return cache, tuple(specs)


def workspace_plan(spec: ModelSpec, limits: Limits, dtype: str, scratch: tuple[TensorSpec, ...]) -> WorkspacePlan:
    """What the largest step of a model asks for, and nothing more."""
    logit_rows = max(limits.sampled_rows, PROMPT_ROWS)
    step = StepShape(limits.max_num_batched_tokens, logit_rows, limits.max_model_len, dtype)
    plan = WorkspacePlan()
    for request in declare_decoder(spec, "tiny").declaration.requests(step, ALONE, scratch):
        plan.reserve(request.owner, request.specs, request.lane)
    return plan


def lanes(workspace: Workspace) -> dict[str, torch.Tensor]:
    """Every byte of a workspace, by lane."""
    return workspace.lanes


@dataclass
class Request:
    """One request, and when it comes: after that many steps."""

    prompt: list[int]
    max_tokens: int
    arrival: int = 0
    params: SamplingParams = GREEDY
    sequence: Sequence | None = field(default=None, repr=False)

    @property
    def output(self) -> list[int]:
        assert self.sequence is not None, "it has not run"
        return self.sequence.token_ids[self.sequence.num_prompt_tokens :]


class Drive:
    """A rig behind the real scheduler. Requests may come in several rounds; the prefix cache lives through all of them."""

    def __init__(
        self, rig: Rig, num_pages: int, enable_prefix_caching: bool = True, is_invariant: bool = False
    ) -> None:
        self.rig = rig
        self.scheduler = Scheduler(
            *(rig.limits, num_pages, enable_prefix_caching, 1000),
            groups=rig.groups,
            is_invariant=is_invariant,
            state_rule=rig.state_rule,
        )
        self._num_owners = [0] * num_pages
        self._ids = count()

    def run(self, requests: Iterable[Request]) -> None:
        """All requests to their ends."""
        waiting = sorted(requests, key=lambda request: request.arrival)
        live: list[Sequence] = []
        num_steps = 0
        while waiting or self.scheduler.num_waiting or self.scheduler.num_running:
            is_idle = self.scheduler.num_waiting + self.scheduler.num_running == 0
            while waiting and (waiting[0].arrival <= num_steps or is_idle):
                is_idle = False
                live.append(self._add(waiting.pop(0)))
            step = self.scheduler.schedule()
            assert step is not None, "nothing is in flight"
            assert step.scheduled, "no one is scheduled, and someone waits"
            self._poison_given_back()
            result = self.rig.execute(step)
            self._book(step, result)
            for sequence in [sequence for sequence in live if sequence.num_output_tokens >= sequence.max_tokens]:
                self.scheduler.finish(sequence)
            live = [sequence for sequence in live if sequence.state is not SequenceState.FINISHED]
            num_steps += 1

    def _poison_given_back(self) -> None:
        """What no one owns and no one keeps any more, since the last step, may be anything."""
        pool, had = self.scheduler.pool, self._num_owners
        self._num_owners = pool.owner_counts()
        now = zip(had, self._num_owners, strict=True)
        self.rig.poison_pages(page for page, (was, own) in enumerate(now) if was and not own and not pool.is_kept(page))

    def _book(self, step: LiveStep, result: StepResult) -> None:
        """As the engine does: a sequence whose numbers are not finite ends there."""
        token_ids = [own.token_id for own in result.results]
        for index, (item, token_id) in enumerate(zip(step.scheduled, token_ids, strict=True)):
            if token_id == NO_TOKEN:
                self.scheduler.finish(item.sequence)
                token_ids[index] = None
        self.scheduler.complete(step, [() if token_id is None else (token_id,) for token_id in token_ids])

    def _add(self, request: Request) -> Sequence:
        request.sequence = Sequence(
            next(self._ids),
            list(request.prompt),
            len(request.prompt),
            request.params,
            seed=0,
            max_tokens=request.max_tokens,
            use_prefix_cache=request.params.prompt_logprobs is None,
        )
        self.scheduler.add(request.sequence)
        return request.sequence

    def logits(self, request: Request) -> dict[int, torch.Tensor]:
        """By position, of a request that has run."""
        assert request.sequence is not None, "it has not run"
        return self.rig.logits[request.sequence.sequence_id]
