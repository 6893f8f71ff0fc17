"""Tokenizer and chat template of a model, from its own files or from configured ones, and the engine with both; no torch."""

from pathlib import Path

from holdfast.config import NO_TOKENIZER, EngineConfig
from holdfast.engine.core import Core
from holdfast.engine.engine import Engine
from holdfast.engine.pooling import Pooling, find_reranker
from holdfast.errors import ConfigError, ModelNotFoundError
from holdfast.loading.gguf.parts import read_parts
from holdfast.loading.locate import locate_tokenizer
from holdfast.loading.planning.open_model import OpenModel
from holdfast.text.chat_template import ChatTemplate, chat_template_from_directory, chat_template_from_gguf
from holdfast.text.deepseek_encoder import encoder_of
from holdfast.text.gguf_tokenizer import tokenizer_from_gguf
from holdfast.text.grammar import Vocabulary
from holdfast.text.tokenizer import Tokenizer, tokenizer_from_directory

MAX_TEMPLATE_BYTES = 1024**2


def engine_of(
    config: EngineConfig,
    model: OpenModel,
    core: Core,
    text: tuple[Tokenizer | None, ChatTemplate | None],
    vocabulary: Vocabulary | None = None,
) -> Engine:
    """Join a core with the text of its model."""
    return Engine(
        core,
        *text,
        config.seed,
        generation=model.generation,
        vocabulary=vocabulary,
        takes_priorities=config.takes_priorities,
        pooling=Pooling(model.pooling, model.name, model.spec.hidden_size, find_reranker(model.name, *text)),
    )


def open_text(config: EngineConfig, model: OpenModel) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Open tokenizer and chat template of an engine; neither with tokenizer=none."""
    if config.tokenizer == NO_TOKENIZER:
        return None, None
    tokenizer = open_tokenizer(config, model)
    template = open_chat_template(config, model, tokenizer)
    if template is not None:
        tokenizer.guard(template.control_texts)
    return tokenizer, template


def open_tokenizer(config: EngineConfig, model: OpenModel) -> Tokenizer:
    """Open the configured tokenizer, or the model's own."""
    if config.tokenizer == NO_TOKENIZER:
        raise ConfigError("engine.no_tokenizer")
    if config.tokenizer is None:
        if model.gguf is not None:
            return tokenizer_from_gguf(model.gguf.metadata, model.path.name)
        return tokenizer_from_directory(model.path)
    path = locate_tokenizer(config.tokenizer)
    if path is not None and path.is_dir():
        return tokenizer_from_directory(path)
    if path is not None and path.is_file() and path.suffix == ".gguf":
        return tokenizer_from_gguf(read_parts(path).metadata, path.name)
    raise ModelNotFoundError("engine.tokenizer_not_found", name="tokenizer", value=config.tokenizer)


def open_chat_template(config: EngineConfig, model: OpenModel, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Open the configured template, the model's own, or the encoder that its architecture has; None without any."""
    if config.chat_template is None:
        if model.gguf is not None:
            own = chat_template_from_gguf(model.gguf.metadata, model.path.name)
        else:
            own = chat_template_from_directory(model.path)
        return own or encoder_of(model.spec.architecture)
    source, origin = config.chat_template, "chat_template"
    if "{" not in source:
        path = Path(source).expanduser()
        try:
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise ConfigError("engine.template_too_large", name="chat_template", value=source)
            source, origin = path.read_text(encoding="utf-8"), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("engine.template_unreadable", name="chat_template", value=source, reason=error) from error
    return ChatTemplate(source, origin, tokenizer.special_tokens)
