"""Build an engine from a config: open the model, find its tokenizer and template, make its runner."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.config import EngineConfig
from holdfast.engine.engine import Engine
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import ConfigError, ModelNotFoundError
from holdfast.forks import refuse_lost_threads
from holdfast.loading.gguf.parts import read_parts
from holdfast.loading.locate import locate_tokenizer
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.report import memory_report
from holdfast.observability.preparing import OnPrepare, prepare_silently
from holdfast.planning.disk_account import disk_account
from holdfast.runner.build import BuiltRunner, build_runner
from holdfast.text.chat_template import ChatTemplate, chat_template_from_directory, chat_template_from_gguf
from holdfast.text.gguf_tokenizer import tokenizer_from_gguf
from holdfast.text.tokenizer import Tokenizer, tokenizer_from_directory

MAX_TEMPLATE_BYTES = 1024**2


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[int, int], None],
    model: OpenModel | None = None,
    *,
    on_prepare: OnPrepare = prepare_silently,
) -> Engine:
    """An engine that is ready; nothing is left behind where it fails. A model whose headers are open already is taken, and closed.

    `on_progress(done, total)` counts bytes read; `on_prepare` is told of kernels that are compiled and graphs captured.
    """
    if model is None:
        model = open_model(config.model, config.load_format, config.revision)
    try:
        refuse_lost_threads(_use_threads)
        # What can be wrong with small files is found before the large ones are read.
        tokenizer = open_tokenizer(config, model)
        chat_template = _chat_template(config, model, tokenizer)
        built = build_runner(config, model, on_progress, on_prepare)
    finally:
        model.source.close()
    try:
        return _engine(config, model, built, tokenizer, chat_template)
    except BaseException:
        built.release()
        raise


def _use_threads() -> None:
    """A sum that torch shares among its threads, if it has more than one."""
    torch.ones(2**20).add_(1)


def _engine(
    config: EngineConfig,
    model: OpenModel,
    built: BuiltRunner,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
) -> Engine:
    limits = built.runner.limits
    assert built.plan.cache is not None, f"{built.plan.declared.name} runs without a cache"
    scheduler = Scheduler(
        limits,
        built.runner.num_pages,
        config.enable_prefix_caching,
        config.max_queue,
        groups=built.plan.cache.cache_groups(),
        prefix_root=os.urandom(16),
    )
    measured_bytes = None
    if built.plan.target.kind == "cuda" and built.profile.taken_bytes is not None:
        measured_bytes = built.profile.taken_bytes + built.plan.target.present_bytes
    plan = built.plan
    report = memory_report(
        plan.memory, built.ledger, limits.page_tokens, limits.max_model_len, measured_bytes, plan.groups
    )
    if plan.groups:
        report = replace(report, kv_tokens=plan.kv_tokens, kv_bytes_per_token=int(plan.kv_bytes_per_token))
    disk = disk_account(plan.declared, plan.resolved)
    report = replace(report, disk=disk, context_note=plan.context_note, kv_note=plan.kv_note())
    return Engine(
        built.runner,
        tokenizer,
        chat_template,
        scheduler,
        config.seed,
        generation=model.generation,
        memory=report,
        release=built.release,
    )


def open_tokenizer(config: EngineConfig, model: OpenModel) -> Tokenizer:
    """The tokenizer that was asked for, or the model's own."""
    if config.tokenizer is None:
        if model.gguf is not None:
            return tokenizer_from_gguf(model.gguf.metadata, model.path.name)
        return tokenizer_from_directory(model.path)
    path = locate_tokenizer(config.tokenizer)
    if path is not None and path.is_dir():
        return tokenizer_from_directory(path)
    if path is not None and path.is_file() and path.suffix == ".gguf":
        return tokenizer_from_gguf(read_parts(path).metadata, path.name)
    raise ModelNotFoundError(
        f"tokenizer={config.tokenizer!r} was asked",
        "it is neither a folder nor a GGUF file nor a name on the Hub",
        "pass one of these",
    )


def _chat_template(config: EngineConfig, model: OpenModel, tokenizer: Tokenizer) -> ChatTemplate | None:
    if config.chat_template is None:
        if model.gguf is not None:
            return chat_template_from_gguf(model.gguf.metadata, model.path.name)
        return chat_template_from_directory(model.path)
    source, origin = config.chat_template, "chat_template"
    if "{" not in source:
        path = Path(source).expanduser()
        try:
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise ConfigError(f"chat_template={source!r} was asked", "it is over 1 MiB", "pass a template file")
            source, origin = path.read_text(encoding="utf-8"), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template={source!r} was asked", f"it cannot be read ({error})", "pass a Jinja file or its text"
            ) from error
    return ChatTemplate(source, origin, tokenizer.special_tokens)
