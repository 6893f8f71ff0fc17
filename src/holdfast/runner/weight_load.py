"""Weights of a runner: planned from headers, loaded from the source or the weight cache, cached for the next start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, ModelFormatError
from holdfast.loading.execution.execute import LoadedWeights, load_weights
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import LoadPlan, plan_load
from holdfast.loading.quantized.cache import CacheSlot, find_cached
from holdfast.loading.quantized.manifest import SourceIdentity
from holdfast.loading.quantized.source import QuantizedSource, plan_quantized
from holdfast.loading.quantized.writer import refuse_saving, save_quantized
from holdfast.loading.sources.source import WeightSource
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import Term
from holdfast.memory.sizes import format_bytes
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.parameters import Parameter
from holdfast.models.sharding import shard_parameters
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.quant.weight_schemes import WeightRecipe

log = get_logger(__name__)
OnProgress = Callable[[int, int], None]
NOT_FINITE = "the weights hold a NaN or an infinity, which the next start may not allow"


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """A planned load: from the model's source, or from the cache of an earlier start."""

    config: EngineConfig
    model: OpenModel
    plan: LoadPlan
    """Loads from the model's source."""
    slot: CacheSlot | None = None
    """Where these weights are or will be cached; None if they are not."""
    identity: SourceIdentity | None = None
    """Identity of the source when the load was planned, if it is to be saved."""

    @property
    def taken_plan(self) -> LoadPlan:
        """Plan to run, unless cached weights turn out to be damaged."""
        return self.plan if self.slot is None or self.slot.hit is None else self.slot.hit[1]

    def staging(self, device_kind: str) -> Term:
        """Return the staging memory of loading: the larger of both plans."""
        terms = [term for plan in (self.plan, self.taken_plan) for term in plan.terms(device_kind)]
        return max((term for term in terms if term.owner == "staging"), key=lambda term: term.num_bytes)

    def run(self, device: str, ledger: Ledger, on_progress: OnProgress) -> LoadedWeights:
        """Load, cache quantized weights, and close the source."""
        loaded = self._from_slot(device, ledger, on_progress)
        is_new = loaded is None
        if loaded is None:
            loaded = self._load(self.plan, self.model.source, device, ledger, on_progress)
        self.model.source.close()
        if is_new and self.slot is not None:
            reason = self.slot.save(loaded.weights) if loaded.is_finite else NOT_FINITE
            if not loaded.is_finite:
                log.info("quantized weights are not kept for the next start: %s", reason)
            if reason is not None and self.config.weight_cache == "on":
                fix = "Free some disk space, or leave it out." if loaded.is_finite else "Leave it out."
                raise ConfigError("runner.weight_cache", reason=reason, fix=fix)
        if self.config.save_quantized is not None:
            folder = _folder(self.config.save_quantized)
            num_bytes = save_quantized(folder, self.model, self.plan, loaded.weights, planned=self.identity)
            log.info("the model with quantized weights was saved to %s (%s)", folder, format_bytes(num_bytes))
        return loaded

    def _from_slot(self, device: str, ledger: Ledger, on_progress: OnProgress) -> LoadedWeights | None:
        """Load cached weights; None if there are none or they are damaged."""
        if self.slot is None or self.slot.hit is None:
            return None
        source, plan = self.slot.hit
        try:
            return self._load(plan, source, device, ledger, on_progress)
        except ModelFormatError as error:
            self.slot.discard(error)
        finally:
            source.close()
        return None

    def _load(
        self, plan: LoadPlan, source: WeightSource, device: str, ledger: Ledger, on_progress: OnProgress
    ) -> LoadedWeights:
        return load_weights(plan, source, device, ledger, on_progress, self.config.allow_nonfinite)


def plan_weights(
    config: EngineConfig, model: OpenModel, dtype: str, recipe: WeightRecipe, uses_cache: bool, mesh: Mesh = ALONE
) -> WeightLoad:
    """Plan the load of these weights, or of a rank's share; raise if the checkpoint or the save folder is wrong."""
    parameters = rank_parameters(model, mesh)
    if isinstance(model.source, QuantizedSource):
        plan = plan_quantized(parameters, model.source, dtype, recipe, mesh)
    else:
        whole = model.parameters if mesh.num_stages > 1 else None
        plan = plan_load(parameters, model.source, dtype, recipe, model.stored, whole)
    folder = None if config.save_quantized is None else _folder(config.save_quantized)
    if folder is not None and not mesh.is_alone:
        raise ConfigError("runner.shares_not_saved", folder=config.save_quantized, num_ranks=mesh.num_ranks)
    identity = None if folder is None else refuse_saving(folder, model, plan)
    slot = _find_slot(config, model, plan, mesh) if uses_cache else None
    return WeightLoad(config, model, plan, slot, identity)


def rank_spec(declared: DeclaredModel, mesh: Mesh) -> ModelSpec:
    """Return the spec of a rank's part of the decoder."""
    declaration = declared.declaration
    assert isinstance(declaration, DecoderDeclaration), f"{declared.name} cannot run"
    return declaration.rank(mesh)


def rank_parameters(model: OpenModel, mesh: Mesh) -> tuple[Parameter, ...]:
    """Return a rank's parameters: its share of each layer of its stage."""
    if mesh.is_alone:
        return model.parameters
    spec, parameters = model.spec, model.parameters
    return shard_parameters(parameters, mesh, *spec.units)


def _folder(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError("runner.bad_folder", folder=name, reason=error) from error


def _find_slot(config: EngineConfig, model: OpenModel, plan: LoadPlan, mesh: Mesh) -> CacheSlot | None:
    if config.weight_cache == "off" or not config.is_quantized:
        return None
    found = find_cached(model, plan, mesh)
    if isinstance(found, CacheSlot):
        return found
    if config.weight_cache == "on":
        raise ConfigError("runner.weight_cache", reason=found, fix="Leave it out.")
    log.info("quantized weights are not kept between starts: %s", found)
    return None
