"""ChatSession: turns and /commands of one chat, over whatever answers; Ctrl-C stops an answer and nothing else; no torch."""

import difflib
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import fields
from typing import Protocol

from holdfast.cli.answers import Speed, speed_of, write_answer
from holdfast.cli.chat_history import ChatHistory
from holdfast.cli.options import SAMPLING_SETTINGS, Given
from holdfast.cli.side_lines import write_line
from holdfast.cli.values import read_count
from holdfast.engine.admission import PreparedRequest
from holdfast.engine.output_assembly import OutputAssembler
from holdfast.errors import ConfigError, RequestError, shown
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import SamplingParams

SETTINGS = {setting.name: setting for setting in SAMPLING_SETTINGS}
NAMES = (*SETTINGS, "seed")
"""What /set may change."""
SWITCH_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)


class Answers(Protocol):
    """The model, as a chat sees it."""

    model_name: str
    context_tokens: int

    def params(self, given: Given) -> SamplingParams:
        """What was asked, on top of the model's own defaults."""
        ...

    def prepare(self, messages: list[Mapping[str, object]], params: SamplingParams) -> PreparedRequest:
        """Check a conversation; RequestError where it cannot be answered."""
        ...

    def stream(self, prepared: PreparedRequest) -> Generator[CompletionDelta, None, None]:
        """Answer it."""
        ...

    def show_memory(self) -> None:
        """Who holds how many bytes, for people."""
        ...


class ChatSession:
    """One conversation. `take` handles what was typed; False ends the chat."""

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
            "system": ("TEXT: what the model is told first; off removes it, no text shows it", self._system),
            "undo": ("take back the last question and its answer", self._undo),
            "retry": ("answer the last question again", self._retry),
            "save": ("FILE: write the messages to a new file, as JSON", self._save),
            "set": ("NAME=VALUE: change sampling, such as temperature=0.7; nothing shows it", self._set),
            "stats": ("tokens, speed and context used", self._stats),
            "memory": ("who holds how many bytes", self._memory),
        }

    def take(self, text: str) -> bool:
        """A question or a /command; errors are told, and the chat goes on."""
        match = _COMMAND.fullmatch(text.strip())
        try:
            if match is not None:
                return self._command(match[1].lower(), (match[2] or "").strip())
            if text.strip():
                self._ask(text[1:] if text.startswith("//") else text)
        except (ConfigError, RequestError) as error:
            self.num_failures += 1
            write_line(f"error: {error}")
        return True

    def _command(self, name: str, rest: str) -> bool:
        if name in ("exit", "quit", "bye"):
            return False
        name = "help" if name == "?" else name
        if name not in self._commands:
            near = difflib.get_close_matches(name, [*self._commands, "exit"], n=1)
            do = f"did you mean /{near[0]}?" if near else "type /help, or //... to begin a message with a slash"
            raise ConfigError(f"/{name} was asked", "there is no such command", do)
        self._commands[name][1](rest)
        return True

    def _ask(self, question: str) -> bool:
        """Answer a question; it joins the history together with its answer, or not at all, which is False."""
        try:
            prepared = self._answers.prepare(self.history.messages(question), self._params)
        except RequestError as error:
            kept = f"your message was left out, and {_turns(self.history.num_turns)} before it kept"
            do = f"{error.do}; /undo takes back a turn, /clear all of them" if self.history.num_turns else error.do
            raise type(error)(error.asked, f"{error.has}; {kept}", do) from error
        output, was_stopped = self._stream(prepared)
        answer = output.outputs[0].text
        if not answer and was_stopped:
            write_line("(stopped before the first word; the question is taken back)")
            return False
        self.history.add(question, answer)
        self._speed = speed_of(output)
        self._num_output_tokens += self._speed.num_output_tokens
        self._tell_ending(output, prepared, was_stopped)
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

    def _tell_ending(self, output: RequestOutput, prepared: PreparedRequest, was_stopped: bool) -> None:
        assert self._speed is not None, "an answer has a speed"
        used = self._context_used()
        if was_stopped:
            write_line("(stopped; what was said so far is kept, /undo takes it back)")
        elif output.outputs[0].finish_reason == "length":
            if used >= self._answers.context_tokens:
                write_line(
                    f"(the context of {used:,} tokens is full, so the answer ends here; nothing was dropped: "
                    "/undo takes back a turn, /clear all of them)"
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
        lines = [f"  /{name:<8} {words}" for name, (words, _) in self._commands.items()]
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
        write_line("(there is nothing to take back)" if turn is None else f"(taken back: {shown(turn[0])})")

    def _retry(self, rest: str) -> None:
        turn = self.history.take_back()
        if turn is None:
            raise ConfigError("/retry was asked", "nothing was asked yet", "ask something first")
        if self._params.is_greedy:
            write_line("(temperature is 0, so the answer will be the same; /set temperature=0.8 varies it)")
        is_answered = False
        try:
            is_answered = self._ask(turn[0])
        finally:
            if not is_answered:
                self.history.add(*turn)

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save was asked", "it needs the name of a new file", "type /save chat.json")
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
            near = difflib.get_close_matches(name, NAMES, n=1)
            do = f"did you mean {near[0]}=...?" if near and has_value else "type /set temperature=0.7"
            raise ConfigError(f"/set {shown(name)[1:-1]} was asked", f"the names are {', '.join(NAMES)}", do)
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
    """A value of /set as its field takes it, or as it was typed: the field then refuses it in its own words."""
    setting = SETTINGS.get(name)
    if setting is None:
        return read_count(value)
    if setting.is_switch:
        return SWITCH_WORDS.get(value.lower(), value)
    return setting.read([value] if setting.is_repeated else value)


def _turns(num_turns: int) -> str:
    return "1 turn" if num_turns == 1 else f"{num_turns} turns"
