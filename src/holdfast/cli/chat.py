"""`holdfast chat`: messages from a terminal or a pipe, /commands, and the history; no torch."""

import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from holdfast.cli.opened_model import (
    OpenedModel,
    Speed,
    decode,
    open_quietly,
    open_visibly,
    prepare,
    refuse_bare_ids,
    report_file,
    sampling_params,
    speed_of,
    stream,
)
from holdfast.cli.options import SAMPLING_SETTINGS, Given, read_count
from holdfast.cli.start_line import StartLine
from holdfast.cli.tables import memory_lines, show_beside
from holdfast.cli.terminal import FAILED, dumps, quoted, write_answer, write_line
from holdfast.config import EngineConfig
from holdfast.engine.admission import ChatOptions, PreparedRequest
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import ConfigError, RequestError, did_you_mean
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.reasoning import CLOSING, OPENING

QUOTES = '"""'
PROMPT, MORE = ">>> ", "... "
SETTINGS = {setting.name: setting for setting in SAMPLING_SETTINGS}
NAMES = (*SETTINGS, "seed")
"""Settings that /set changes."""
SWITCH_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
DEFAULT_MAX_TOKENS = 1024


Turn = tuple[str, str, str]
"""A question, its answer, and the reasoning before the answer."""


class ChatHistory:
    """A system message, if any, and the turns."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self._turns: list[Turn] = []

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def messages(self, question: str | None = None) -> list[Mapping[str, object]]:
        """Return the messages for a chat template, with a further question."""
        messages: list[Mapping[str, object]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for earlier, answer, thoughts in self._turns:
            messages.append({"role": "user", "content": earlier})
            reasoning = {"reasoning_content": thoughts} if thoughts else {}
            messages.append({"role": "assistant", "content": answer, **reasoning})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages

    def add(self, question: str, answer: str, thoughts: str = "") -> None:
        """Append a finished turn."""
        self._turns.append((question, answer, thoughts))

    def take_back(self) -> Turn | None:
        """Remove and return the last turn; None if there is none."""
        return self._turns.pop() if self._turns else None

    def clear(self) -> int:
        """Remove every turn and return their number."""
        num_turns = self.num_turns
        self._turns.clear()
        return num_turns

    def save(self, file: str, model: str) -> None:
        """Write the messages to a new JSON file."""
        text = dumps({"model": model, "messages": self.messages()}, indent=2)
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as out:
                out.write(f"{text}\n")
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError("cli.chat_not_saved", file=file, reason=reason) from error


def split_thoughts(text: str, prompt: str | None) -> tuple[str, str]:
    """Split a text into answer and reasoning if the prompt opened a reasoning block.

    Jinja templates find reasoning in old content; an encoder needs it in its own field.
    """
    if prompt is None or not prompt.rstrip().endswith(OPENING):
        return text, ""
    thoughts, _, answer = text.partition(CLOSING)
    return answer.strip(), thoughts.strip()


class Typed:
    """Messages from a terminal. Ctrl-C clears the line; two in a row, or Ctrl-D, end the chat."""

    def __init__(self, read: Callable[[str], str] | None = None) -> None:
        with suppress(ImportError):  # arrow keys and history, on systems that have them
            import readline  # noqa: F401
        self._read = read if read is not None else input

    def __iter__(self) -> Iterator[str]:
        was_interrupted = False
        while True:
            try:
                message = _message(self._read)
            except EOFError:
                write_line("")
                return
            except UnicodeDecodeError as error:
                write_line(f"error: the line is not {error.encoding} and was dropped. Set LC_ALL=C.UTF-8.")
                continue
            except KeyboardInterrupt:
                if was_interrupted:
                    write_line("")
                    return
                was_interrupted = True
                write_line("\n(Ctrl-C again, Ctrl-D or /exit leaves)")
                continue
            was_interrupted = False
            yield message


class Piped:
    """Messages from a pipe or file: one per line, or several lines between triple quotes."""

    def __iter__(self) -> Iterator[str]:
        def read(prompt: str) -> str:
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            return decode(line, "a line of standard input").removesuffix("\n").removesuffix("\r")

        while True:
            try:
                yield _message(read)
            except EOFError:
                return


def _message(read: Callable[[str], str]) -> str:
    """Read one line, or several between triple quotes."""
    line = read(PROMPT)
    if not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(read(MORE))
        except EOFError:
            return "\n".join(lines)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


class Answers:
    """Answers of an opened model."""

    def __init__(self, opened: OpenedModel, reading: ChatOptions | None = None) -> None:
        self._opened = opened
        self._reading = reading
        self.model_name = opened.name
        self.context_tokens = opened.context_tokens

    def params(self, given: Given) -> SamplingParams:
        """Return sampling parameters over the model's defaults."""
        return sampling_params(given, self._opened.engine.generation)

    def prepare(self, messages: list[Mapping[str, object]], params: SamplingParams) -> PreparedRequest:
        """Check a conversation; raise RequestError if it cannot be answered."""
        return prepare(self._opened.engine, messages, params, DEFAULT_MAX_TOKENS, self._reading)

    def stream(self, prepared: PreparedRequest) -> Generator[CompletionDelta, None, None]:
        """Stream the answer."""
        return stream(self._opened.llm, prepared)

    def show_memory(self) -> None:
        """Print memory by owner."""
        show_beside(memory_lines(self._opened.memory))


class ChatSession:
    """One conversation. `take` handles an input and returns False to end the chat."""

    def __init__(self, answers: Answers, history: ChatHistory, given: Given, is_watched: bool) -> None:
        self._answers = answers
        self.history = history
        self._given = given
        self._params = answers.params(given)
        self._is_watched = is_watched
        self._speed: Speed | None = None
        self._num_output_tokens = 0
        self.num_failures = 0
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "help": ("this list", self._help),
            "clear": ("forget the conversation; the system message stays", self._clear),
            "system": ("TEXT: set the system message; off removes it, no text shows it", self._system),
            "undo": ("take back the last question and its answer", self._undo),
            "retry": ("answer the last question again", self._retry),
            "save": ("FILE: write the messages to a new file, as JSON", self._save),
            "set": ("NAME=VALUE: change sampling, such as temperature=0.7; without it, show the settings", self._set),
            "stats": ("tokens, speed and context used", self._stats),
            "memory": ("memory by owner", self._memory),
        }

    def take(self, text: str) -> bool:
        """Handle a question or a /command; print errors and continue."""
        match = _COMMAND.fullmatch(text.strip())
        try:
            if match is not None:
                return self._command(match[1].lower(), (match[2] or "").strip())
            if text.strip():
                self._answer(text[1:] if text.startswith("//") else text)
        except (ConfigError, RequestError) as error:
            self.num_failures += 1
            write_line(f"error: {error}")
        return True

    def _command(self, name: str, rest: str) -> bool:
        if name in ("exit", "quit", "bye"):
            return False
        name = "help" if name == "?" else name
        if name not in self._commands:
            nearest = did_you_mean(name, [*self._commands, "exit"], form="/{}")
            nearest = nearest or "Type /help, or //... to begin a message with a slash."
            raise ConfigError("cli.chat_unknown_command", name=name, nearest=nearest)
        self._commands[name][1](rest)
        return True

    def _answer(self, question: str) -> bool:
        """Answer a question and add both to the history; return False if there is no answer."""
        try:
            prepared = self._answers.prepare(self.history.messages(question), self._params)
        except RequestError as error:
            error.hinting(f"The message was dropped; the chat keeps {_turns(self.history.num_turns)}.")
            error.hinting("/undo removes a turn, /clear all of them." if self.history.num_turns else "")
            raise
        output, was_stopped = self._stream(prepared)
        answer = output.outputs[0].text
        if not answer and was_stopped:
            write_line("(stopped before the first token; the question is removed)")
            return False
        self.history.add(question, *split_thoughts(answer, prepared.prompt))
        self._speed = speed_of(output)
        self._num_output_tokens += self._speed.num_output_tokens
        self._report_ending(output, prepared, was_stopped)
        return True

    def _stream(self, prepared: PreparedRequest) -> tuple[RequestOutput, bool]:
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, 1)
        was_stopped = False
        with closing(self._answers.stream(prepared)) as deltas:
            try:
                for delta in deltas:
                    assembler.add(delta)
                    write_answer(delta.text)
            except KeyboardInterrupt:
                if not self._is_watched:
                    raise
                was_stopped = True
        output = assembler.output()
        if not output.outputs[0].text.endswith("\n"):
            write_answer("\n")
        return output, was_stopped

    def _report_ending(self, output: RequestOutput, prepared: PreparedRequest, was_stopped: bool) -> None:
        assert self._speed is not None, "an answer has a speed"
        used = self._context_used()
        if was_stopped:
            write_line("(stopped; the answer so far is kept, /undo removes it)")
        elif output.outputs[0].finish_reason == "length":
            if used >= self._answers.context_tokens:
                write_line(
                    f"(the context of {used:,} tokens is full, so the answer ends here; nothing was dropped: "
                    "/undo removes a turn, /clear all of them)"
                )
            else:
                write_line(f"(cut at max_tokens={prepared.max_tokens}; /set max_tokens=N allows more)")
        if self._is_watched:
            rate = self._speed.decode_rate
            speed = "" if rate is None else f", {rate:.1f} tokens/s"
            write_line(f"({self._speed.num_output_tokens} tokens{speed}; context {used:,} of {self._context()})\n")

    def _context_used(self) -> int:
        return 0 if self._speed is None else self._speed.num_prompt_tokens + self._speed.num_output_tokens

    def _context(self) -> str:
        return f"{self._answers.context_tokens:,}"

    def _help(self, rest: str) -> None:
        lines = [f"  /{name:<8} {help}" for name, (help, _) in self._commands.items()]
        lines.append("  /exit     leave; so does Ctrl-D")
        lines.append('Anything else is a question; """ begins and ends one of several lines. Ctrl-C stops an answer.')
        write_line("\n".join(lines))

    def _clear(self, rest: str) -> None:
        num_turns = self.history.clear()
        self._speed = None
        write_line(f"({_turns(num_turns)} forgotten)")

    def _system(self, rest: str) -> None:
        if rest:
            self.history.system = None if rest == "off" else rest
        system = self.history.system
        write_line("(no system message)" if system is None else f"(system message: {system})")

    def _undo(self, rest: str) -> None:
        turn = self.history.take_back()
        self._speed = None
        write_line("(nothing to remove)" if turn is None else f"(removed: '{quoted(turn[0])}')")

    def _retry(self, rest: str) -> None:
        turn = self.history.take_back()
        if turn is None:
            raise ConfigError("cli.chat_nothing_to_retry")
        if self._params.is_greedy:
            write_line("(temperature is 0, so the answer will be the same; /set temperature=0.8 varies it)")
        is_answered = False
        try:
            is_answered = self._answer(turn[0])
        finally:
            if not is_answered:
                self.history.add(*turn)

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("cli.chat_save_needs_file")
        self.history.save(rest, self._answers.model_name)
        write_line(f"({len(self.history.messages())} messages saved)")

    def _set(self, rest: str) -> None:
        if rest:
            name, equals, value = rest.partition("=")
            self._change(name.strip().lstrip("-").replace("-", "_"), value.strip(), bool(equals))
        shown_values = [
            f"{field.name}={getattr(self._params, field.name)}"
            for field in fields(SamplingParams)
            if field.name in ("temperature", "max_tokens") or getattr(self._params, field.name) != field.default
        ]
        write_line(f"({', '.join(shown_values)})")

    def _change(self, name: str, value: str, has_value: bool) -> None:
        if name not in NAMES or not has_value:
            nearest = (has_value and did_you_mean(name, NAMES, form="{}=...")) or "Type /set temperature=0.7."
            raise ConfigError("cli.chat_unknown_setting", value=name, accepted=NAMES, nearest=nearest)
        read = _read(name, value)
        given = {key: old for key, old in self._given.items() if key != name}
        if read is not None:
            given[name] = read
        self._params = self._answers.params(given)
        self._given = given

    def _stats(self, rest: str) -> None:
        if self._speed is not None:
            write_line(f"last answer: {self._speed.line}")
        write_line(
            f"chat: {_turns(self.history.num_turns)}, {self._num_output_tokens} tokens generated, "
            f"context {self._context_used():,} of {self._context()} used"
        )

    def _memory(self, rest: str) -> None:
        self._answers.show_memory()


def _read(name: str, value: str) -> object:
    """Parse a value of /set; keep an invalid one as text, so that the field refuses it."""
    setting = SETTINGS.get(name)
    if setting is None:
        return read_count(value)
    if setting.is_switch:
        return SWITCH_WORDS.get(value.lower(), value)
    return setting.read([value] if setting.is_repeated else value)


def _turns(num_turns: int) -> str:
    return "1 turn" if num_turns == 1 else f"{num_turns} turns"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Options of this command."""

    model: str | None
    system: str | None = None
    memory_report: str | None = None
    allow_special_tokens: bool = False


def chat(options: ChatRequest, engine: Given, sampling: Given, start: StartLine | None = None) -> int:
    """Chat until the input ends and return the exit code."""
    sampling_params(sampling, GenerationDefaults())
    if sys.stdin is None:
        raise ConfigError("cli.chat_without_stdin")
    # One conversation: plan memory for one sequence.
    config = EngineConfig.from_options(model=options.model, **({"max_num_seqs": 1} | engine))
    refuse_bare_ids(config)
    is_watched = sys.stdin.isatty()
    report = report_file(options.memory_report)
    opened = open_visibly(config, report, start) if is_watched else open_quietly(config, report)
    if not opened.engine.has_chat_template:
        raise ConfigError("cli.no_chat_template", model=opened.name)
    answers = Answers(opened, ChatOptions(allow_special_tokens=options.allow_special_tokens))
    session = ChatSession(answers, ChatHistory(options.system), sampling, is_watched)
    if is_watched:
        show_beside(memory_lines(opened.memory, is_compact=True))
        write_line(f"{opened.name}, context of {opened.context_tokens:,} tokens; /help lists commands, Ctrl-D leaves")
    for text in Typed() if is_watched else Piped():
        if not session.take(text):
            break
    # Piped input: any error sets the exit code at the end.
    return FAILED if session.num_failures and not is_watched else 0
