"""`holdfast chat`: opens a model, and takes messages until there are no more; no torch."""

import sys
from collections.abc import Generator, Mapping

from holdfast.cli.answers import prepare, sampling_params, stream
from holdfast.cli.chat_history import ChatHistory
from holdfast.cli.chat_input import Piped, Typed
from holdfast.cli.chat_session import ChatSession
from holdfast.cli.failures import FAILED
from holdfast.cli.memory_table import write_memory
from holdfast.cli.opening import OpenedModel, open_quietly, open_visibly, report_file
from holdfast.cli.options import Given
from holdfast.cli.side_lines import write_line
from holdfast.config import EngineConfig
from holdfast.engine.admission import PreparedRequest
from holdfast.errors import ConfigError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 1024


class ModelAnswers:
    """An opened model, as a chat sees it."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened
        self.model_name = opened.name
        self.context_tokens = opened.context_tokens

    def params(self, given: Given) -> SamplingParams:
        """What was asked, on top of the model's own defaults."""
        return sampling_params(given, self._opened.engine.generation)

    def prepare(self, messages: list[Mapping[str, object]], params: SamplingParams) -> PreparedRequest:
        """Check a conversation."""
        return prepare(self._opened.engine, messages, params, DEFAULT_MAX_TOKENS)

    def stream(self, prepared: PreparedRequest) -> Generator[CompletionDelta, None, None]:
        """Answer it."""
        return stream(self._opened.llm, prepared)

    def show_memory(self) -> None:
        """Who holds how many bytes."""
        write_memory(self._opened.memory)


def chat(
    model: str | None, system: str | None, engine: Given, sampling: Given, memory_report: str | None = None
) -> int:
    """Talk until the input ends; the exit code."""
    sampling_params(sampling, GenerationDefaults())
    # One conversation is all that will come, so memory is planned for one.
    config = EngineConfig.from_options(model=model, **({"max_num_seqs": 1} | engine))
    is_watched = sys.stdin is not None and sys.stdin.isatty()
    report = report_file(memory_report)
    opened = open_visibly(config, report) if is_watched else open_quietly(config, report)
    if not opened.engine.has_chat_template:
        raise ConfigError(
            f"a chat with {opened.name} was asked",
            "the model has no chat template",
            "pass --chat-template FILE, or use holdfast run --raw",
        )
    session = ChatSession(ModelAnswers(opened), ChatHistory(system), sampling, is_watched)
    if is_watched:
        write_memory(opened.memory, is_compact=True)
        write_line(f"{opened.name}, context of {opened.context_tokens:,} tokens; /help lists commands, Ctrl-D leaves")
    for text in Typed() if is_watched else Piped():
        if not session.take(text):
            break
    # Nobody watches a pipe, so what went wrong in between is told at the end.
    return FAILED if session.num_failures and not is_watched else 0
