"""Build an engine from a config: model, tokenizer and template, runner and core."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from holdfast.config import AUTO_STRETCH, EngineConfig
from holdfast.distributed.mesh import ALONE
from holdfast.engine.core import CoreResources, EngineCore, StepRunner, weak_check
from holdfast.engine.engine import Engine
from holdfast.engine.ngram import NgramProposer
from holdfast.engine.open_text import engine_of, open_text, open_tokenizer
from holdfast.engine.pacing import StepPacer
from holdfast.engine.rank_build import build_ranks
from holdfast.engine.scheduler import Scheduler
from holdfast.forks import refuse_lost_threads
from holdfast.loading.declared import declare_opened
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.report import MemoryReport, memory_report
from holdfast.observability.preparing import OnPrepare, prepare_silently
from holdfast.planning.plan import disk_account
from holdfast.planning.ranks import check_ranks
from holdfast.runner.build import BuiltRunner, build_runner
from holdfast.runner.runner import Runner
from holdfast.text.grammar import Grammars, Vocabulary
from holdfast.text.key_text import key_text_ids
from holdfast.text.tokenizer import Tokenizer

AUTO_STRETCHES = {"cpu": 3.0, "cuda": 1.7}
"""Target step time over a decode step: below the 4 and 2 that streams may see, as steps exceed predictions."""
TILE_ROWS = {"cuda": 16}
"""Prompt rows in an attention tile for 8 query heads per KV head; whole tiles for larger groups too."""
MAX_CPU_SECONDS = 1.0
"""Longest CPU step in which no sequence decodes: new requests wait for its end."""


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[int, int], None],
    model: OpenModel | None = None,
    *,
    on_prepare: OnPrepare = prepare_silently,
) -> Engine:
    """Build an engine, or release everything. An open model is used, and closed.

    `on_progress(done, total)` counts bytes read; `on_prepare` reports compilation and graph capture.
    """
    if model is None:
        model = open_model(config.model, config.load_format, config.revision)
    try:
        refuse_lost_threads(_use_threads)
        # Errors in small files are found before the large ones are read.
        text = tokenizer, _ = open_text(config, model)
        vocabulary = None if tokenizer is None else _vocabulary(model, lambda: tokenizer)
        core = build_core(config, model, on_progress, on_prepare, vocabulary=vocabulary)
    finally:
        model.source.close()
    return engine_of(config, model, core, text, vocabulary)


def build_core(
    config: EngineConfig,
    model: OpenModel,
    on_progress: Callable[[int, int], None],
    on_prepare: OnPrepare = prepare_silently,
    *,
    is_remote: bool = False,
    vocabulary: Vocabulary | None = None,
) -> EngineCore:
    """Build the core of an engine, or release everything. `is_remote`: its front is in another process.

    `vocabulary` is the front's, for grammars; by default one is opened on demand.
    """
    if vocabulary is None:
        vocabulary = _vocabulary(model, lambda: _reopened_tokenizer(config))
    grammars = Grammars(vocabulary)
    if config.num_ranks == 1:
        if config.enable_expert_parallel or config.nnodes is not None:
            check_ranks(config, declare_opened(model, model.name))
        text_ids: tuple[int, ...] = ()
        if config.may_scale_keys:
            text_ids = key_text_ids(vocabulary.open_tokenizer(), vocabulary.vocab_size)
        built = build_runner(config, model, on_progress, on_prepare, text_ids=text_ids)
        runner, release, ranks, watch = built.runner, built.release, (), None
    else:
        all_ranks = build_ranks(config, model, on_progress, on_prepare, is_remote=is_remote)
        built, runner, ranks = all_ranks.built, all_ranks.runner, all_ranks.ranks
        release, watch = all_ranks.release, all_ranks.watch
    built.runner.sampler.follow(grammars)
    try:
        memory = replace(_report(built), ranks=ranks)
        return _core(config, built, runner, CoreResources(memory, release, watch), grammars, is_remote=is_remote)
    except BaseException:
        release()
        raise


def _vocabulary(model: OpenModel, open_tokenizer: Callable[[], Tokenizer]) -> Vocabulary:
    return Vocabulary(open_tokenizer, model.spec.vocab_size, model.generation.eos_token_ids)


def _reopened_tokenizer(config: EngineConfig) -> Tokenizer:
    """Open the tokenizer of a model whose files were closed."""
    model = open_model(config.model, config.load_format, config.revision)
    try:
        return open_tokenizer(config, model)
    finally:
        model.source.close()


def _use_threads() -> None:
    """Run a sum on all threads of torch."""
    torch.ones(2**20).add_(1)


def _core(
    config: EngineConfig,
    built: BuiltRunner,
    runner: StepRunner,
    resources: CoreResources,
    grammars: Grammars,
    *,
    is_remote: bool,
) -> EngineCore:
    plan = built.plan
    assert plan.cache is not None, f"{plan.declared.name} runs without a cache"
    # A remote front counts waiting sequences by the last message, and all running ones may wait again meanwhile.
    num_unheard = runner.limits.max_num_seqs if is_remote else 0
    scheduler = Scheduler(
        runner.limits,
        runner.num_pages,
        config.enable_prefix_caching,
        config.max_queue + num_unheard,
        groups=plan.cache.cache_groups(),
        prefix_root=os.urandom(16),
        num_stages=config.pipeline_parallel_size,
        is_invariant=config.batch_invariant and plan.target.kind == "cuda",
        state_rule=plan.state_rule,
    )
    # One step per stage; on one device, one runs while the next is prepared, if that helps.
    run_ahead = scheduler.num_stages - 1 or int(built.runner.can_run_ahead)
    core = EngineCore(
        runner,
        scheduler,
        run_ahead=run_ahead,
        proposer=NgramProposer(plan.resolved.num_proposals) if plan.resolved.num_proposals else None,
        max_queue=config.max_queue,
        grammars=grammars,
        pacer=make_pacer(config, built.runner),
        resources=resources,
    )
    if plan.target.kind == "cpu" and config.num_ranks == 1:
        built.runner.model.before_layer = weak_check(core)
    return core


def make_pacer(config: EngineConfig, runner: Runner) -> StepPacer | None:
    """Make the pacer of a config; None if steps are not cut, as in pipelines."""
    stretch = config.max_step_stretch
    if not stretch or config.pipeline_parallel_size > 1:
        return None
    stretch = (
        AUTO_STRETCHES.get(runner.device.type, AUTO_STRETCHES["cpu"]) if stretch == AUTO_STRETCH else float(stretch)
    )
    max_seconds = MAX_CPU_SECONDS if runner.device.type == "cpu" else None
    return StepPacer(stretch, runner.padded_sizes, max_seconds, TILE_ROWS.get(runner.device.type, 1))


def _report(built: BuiltRunner) -> MemoryReport:
    plan, limits = built.plan, built.runner.limits
    measured_bytes = None
    if plan.target.kind == "cuda" and built.profile.taken_bytes is not None:
        measured_bytes = built.profile.taken_bytes + plan.target.present_bytes
    report = memory_report(
        plan.memory, built.ledger, limits.page_tokens, limits.max_model_len, measured_bytes, plan.groups
    )
    if plan.groups:
        report = replace(report, kv_tokens=plan.kv_tokens, kv_bytes_per_token=int(plan.kv_bytes_per_token))
    disk = disk_account(plan.resolved, ALONE)
    return replace(report, disk=disk, context_note=plan.context_note, kv_note=plan.kv_note())
