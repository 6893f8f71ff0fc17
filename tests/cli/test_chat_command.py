"""`holdfast chat`: messages, what is typed, turns and commands over an engine without a model; piped and at a terminal."""

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.cli_models import Here, pipe_in, start
from engine.fakes import assert_at_rest, make_engine
from error_codes import raises_code
from holdfast.api.llm import LLM
from holdfast.cli.chat import MORE, PROMPT, Answers, ChatHistory, ChatSession, Piped, Typed, split_thoughts
from holdfast.cli.opened_model import prepare, sampling_params, stream
from holdfast.errors import ConfigError, EngineDeadError, PromptError


def test_messages_alternate_after_the_system_message() -> None:
    history = ChatHistory("Be brief.")
    history.add("One?", "Two.")
    roles = [(message["role"], message["content"]) for message in history.messages("Three?")]
    assert roles == [("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?")]
    assert len(history.messages()) == 3


def test_chat_history_takes_turns_back_from_end() -> None:
    history = ChatHistory(None)
    history.add("a", "b")
    history.add("c", "d")
    assert history.take_back() == ("c", "d", "")
    assert history.messages() == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert history.clear() == 1
    assert history.take_back() is None


def test_chat_history_save_refuses_existing_file(tmp_path: Path) -> None:
    history = ChatHistory("Be brief.")
    history.add("Wie heißt \ud83d?", "So.")
    history.save(str(tmp_path / "chat.json"), "A-Model")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == {"model": "A-Model", "messages": history.messages()}
    (tmp_path / "chat.json").write_text("mine")
    with raises_code("cli.chat_not_saved", ConfigError, reason="File exists"):
        history.save(str(tmp_path / "chat.json"), "A-Model")
    assert (tmp_path / "chat.json").read_text() == "mine"


@pytest.mark.parametrize("file", ["no/such/folder/chat.json", ".", "a\0b", "~no-user-of-this-name/x"])
def test_chat_history_save_unwritable_path_raises(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_code("cli.chat_not_saved", ConfigError):
        ChatHistory(None).save(file, "A-Model")
    assert list(tmp_path.iterdir()) == []


def typing(*events: str | type[BaseException]) -> tuple[Callable[[str], str], list[str]]:
    """A caller at a keyboard, and the prompts that they saw; they leave at the end."""
    left, prompts = list(events), []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        event = left.pop(0) if left else EOFError
        if isinstance(event, str):
            return event
        raise event

    return ask, prompts


def test_typed_yields_lines_until_end() -> None:
    ask, prompts = typing("one", "", "two")
    assert list(Typed(ask)) == ["one", "", "two"]
    assert prompts == [PROMPT] * 4


def test_blocks_between_triple_quotes() -> None:
    ask, prompts = typing('"""', "a", "  b", '"""', '"""one line"""', '"""c', 'd"""', "e")
    assert list(Typed(ask)) == ["a\n  b", "one line", "c\nd", "e"]
    assert prompts.count(MORE) == 4


def test_typed_unclosed_block_yields_its_lines() -> None:
    assert list(Typed(typing('"""a', "b")[0])) == ["a\nb"]


def test_typed_second_consecutive_interrupt_ends_input(capsys: pytest.CaptureFixture[str]) -> None:
    ask, prompts = typing("one", KeyboardInterrupt, "two", KeyboardInterrupt, KeyboardInterrupt, "never")
    assert list(Typed(ask)) == ["one", "two"]
    assert capsys.readouterr().err.count("Ctrl-C again") == 2
    assert len(prompts) == 5


def test_typed_interrupt_drops_open_block() -> None:
    assert list(Typed(typing('"""a', KeyboardInterrupt, "b")[0])) == ["b"]


def test_piped_yields_lines_and_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe_in(monkeypatch, 'one\r\n"""\na\n\nb"""\nkäse'.encode())
    assert list(Piped()) == ["one", "a\n\nb", "käse"]
    assert capsys.readouterr() == ("", "")


def test_piped_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"fine\nnot \xff fine\n")
    messages = iter(Piped())
    assert next(messages) == "fine"
    with raises_code("cli.not_utf8", PromptError, place=4):
        next(messages)


@pytest.mark.parametrize(
    ("prompt", "text", "kept"),
    [
        ("[u]Q<think>\n", "so\n</think>\n\nYes.", {"content": "Yes.", "reasoning_content": "so"}),
        ("[u]Q<think>", "cut off", {"content": "", "reasoning_content": "cut off"}),
        ("[u]Q</think>", "a </think> b", {"content": "a </think> b"}),
        ("[u]Q", "<think>so</think>Yes.", {"content": "<think>so</think>Yes."}),
        (None, "Yes.", {"content": "Yes."}),
    ],
)
def test_history_keeps_opened_thoughts_apart(prompt, text, kept):
    history = ChatHistory(None)
    history.add("Q", *split_thoughts(text, prompt))
    assert history.messages()[1] == {"role": "assistant", **kept}


class FakeAnswers(Answers):
    """An engine whose tokens are hashes of what came before."""

    def __init__(self, context: int = 400) -> None:
        self.engine = make_engine(max_model_len=context, num_pages=context // 4, page_tokens=4)
        self.model_name, self.context_tokens = "A-Model", context
        self.llm = LLM.from_engine(self.engine)
        self.requested: list[list[tuple[str, str]]] = []
        self.interrupt_at: int | None = None

    def params(self, given):
        return sampling_params(given, self.engine.generation)

    def prepare(self, messages, params):
        self.requested.append([(message["role"], message["content"]) for message in messages])
        return prepare(self.engine, messages, params, 10)

    def stream(self, prepared):
        for place, delta in enumerate(stream(self.llm, prepared)):
            if place == self.interrupt_at:
                raise KeyboardInterrupt
            yield delta

    def show_memory(self) -> None:
        print("the table")


class Chat:
    """A chat, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], is_watched: bool = True, **options: int) -> None:
        self.answers = FakeAnswers(**options)
        self.history = ChatHistory(None)
        self.session = ChatSession(self.answers, self.history, {}, is_watched)
        self._capsys = capsys

    def __call__(self, *texts: str) -> tuple[str, str]:
        """Say things; what reached stdout and stderr."""
        self._capsys.readouterr()
        for text in texts:
            assert self.session.take(text)
        assert_at_rest(self.answers.engine)
        return self._capsys.readouterr()

    @property
    def contents(self) -> list[str]:
        return [str(message["content"]) for message in self.history.messages()]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str]) -> Chat:
    return Chat(capsys)


def test_answers_stream_to_stdout_and_join_the_history(chat: Chat) -> None:
    out, err = chat("Hello")
    assert chat.contents == ["Hello", out.removesuffix("\n")]
    assert len(chat.contents[1]) == 10
    assert "cut at max_tokens=10" in err
    assert "context" in err
    chat("And?")
    assert [role for role, _ in chat.answers.requested[1]] == ["user", "assistant", "user"]
    assert chat.answers.requested[1][1][1] == chat.contents[1]


def test_chat_ignores_blank_lines(chat: Chat) -> None:
    assert chat("", "   ") == ("", "")
    assert chat.answers.requested == []


def test_chat_treats_paths_and_double_slash_as_messages(chat: Chat) -> None:
    chat("/etc/passwd is a file", "//clear")
    assert [requested[-1][1] for requested in chat.answers.requested] == ["/etc/passwd is a file", "/clear"]


def test_chat_exit_and_quit_leave(chat: Chat) -> None:
    assert [chat.session.take(word) for word in ("/exit", "/quit", "/EXIT")] == [False] * 3


def test_help_lists_every_command(chat: Chat) -> None:
    _, err = chat("/help")
    for name in ("help", "clear", "system", "undo", "retry", "save", "set", "stats", "memory", "exit"):
        assert f"/{name} " in err
    assert chat("/?")[1] == err


def test_chat_unknown_command_suggests_nearest(chat: Chat) -> None:
    assert "Did you mean /clear?" in chat("/claer")[1]
    assert "Type /help" in chat("/zzz")[1]
    assert chat.session.num_failures == 2


def test_chat_undo_and_clear_remove_turns(chat: Chat) -> None:
    chat("One", "Two")
    assert "removed: 'Two'" in chat("/undo")[1]
    assert chat.history.num_turns == 1
    assert "(1 turn forgotten)" in chat("/clear")[1]
    assert chat.history.num_turns == 0
    assert "nothing to remove" in chat("/undo")[1]


def test_chat_system_command_sets_and_clears_message(chat: Chat) -> None:
    assert "no system message" in chat("/system")[1]
    assert "Be brief." in chat("/system Be brief.")[1]
    chat("Hello", "/clear")
    assert chat.answers.requested[0][0] == ("system", "Be brief.")
    assert chat.history.system == "Be brief."
    chat("/system off")
    assert chat.history.system is None


def test_retry_answers_the_same_question_again(chat: Chat) -> None:
    chat("Hello")
    first = chat.contents
    assert "temperature is 0" in chat("/retry")[1]
    assert chat.contents == first
    chat("/set temperature=1", "/retry")
    assert chat.contents[0] == "Hello"
    assert chat.contents != first


def test_chat_failed_retry_keeps_previous_answer(chat: Chat) -> None:
    chat("Hello")
    before = chat.contents
    _, err = chat("/set stop_token_ids=99999", "/retry")
    assert "token id 99999" in err
    assert chat.contents == before
    chat.answers.interrupt_at = 0
    chat("/set stop_token_ids=0", "/retry")
    assert chat.contents == before


def test_retry_needs_a_question(chat: Chat) -> None:
    assert "There is no question to retry" in chat("/retry")[1]


def test_chat_save_writes_messages(chat: Chat, tmp_path: Path) -> None:
    chat("Hello", f"/save {tmp_path / 'a chat.json'}")
    assert json.loads((tmp_path / "a chat.json").read_text())["messages"] == chat.history.messages()
    assert "name of a new file" in chat("/save")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/set temperature=0.7", "temperature=0.7"),
        ("/set --top-p = 0.5", "top_p=0.5"),
        ("/set max_tokens=3", "max_tokens=3"),
        ("/set stop=END", "stop=('END',)"),
        ("/set seed=7", "seed=7"),
        ("/set ignore_eos=on", "ignore_eos=True"),
        ("/set logit_bias=5=-100", "logit_bias={5: -100.0}"),
        ("/set", "temperature=0.0"),
    ],
)
def test_chat_set_prints_settings(chat: Chat, text: str, words: str) -> None:
    assert words in chat(text)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/set temprature=1", "Did you mean temperature=...?"),
        ("/set temperature", "Type /set temperature=0.7"),
        ("/set temperature=hot", "temperature"),
        ("/set temperature=nan", "temperature"),
        ("/set n=4", "The settings are"),
        ("/set ignore_eos=maybe", "ignore_eos"),
        ("/set max_tokens=0", "max_tokens"),
    ],
)
def test_chat_set_invalid_value_changes_nothing(chat: Chat, text: str, words: str) -> None:
    before = chat("/set")[1]
    assert words in chat(text)[1]
    assert chat("/set")[1] == before


def test_chat_set_applies_and_auto_resets(chat: Chat) -> None:
    chat("/set max_tokens=3", "Hello")
    assert len(chat.contents[1]) == 3
    chat("/set max_tokens=auto", "/retry")
    assert len(chat.contents[1]) == 10


def test_chat_stats_counts_turns_and_tokens(chat: Chat) -> None:
    assert "0 turns" in chat("/stats")[1]
    chat("Hello")
    _, err = chat("/stats")
    assert "last answer: prompt 23 tokens, generated 10 tokens" in err
    assert "chat: 1 turn, 10 tokens generated, context 33 of 400 used" in err


def test_stats_of_a_second_answer_count_both(chat: Chat) -> None:
    """All tokens that were generated, and the context of the last answer; what is forgotten takes no context."""
    chat("Hello", "/set max_tokens=4", "And?")
    _, err = chat("/stats")
    last = len("user: Hello\nassistant: \nuser: And?\nassistant: ") + 10
    assert f"last answer: prompt {last} tokens" in err
    assert f"chat: 2 turns, 14 tokens generated, context {last + 4} of 400 used" in err
    for forget in ("/undo", "/clear"):
        assert "14 tokens generated, context 0 of 400 used" in chat(forget, "/stats")[1]


def test_second_setting_keeps_the_first(chat: Chat) -> None:
    chat("/set temperature=0.5", "/set top_p=0.9", "/set max_tokens=3")
    assert set(chat("/set")[1].strip("()\n").split(", ")) == {"temperature=0.5", "top_p=0.9", "max_tokens=3"}
    chat("Hello", "Again", "/set max_tokens=auto", "/set temperature=0", "More")
    assert [len(text) for text in chat.contents[1::2]] == [3, 3, 10]
    assert set(chat("/set")[1].strip("()\n").split(", ")) == {"temperature=0.0", "top_p=0.9", "max_tokens=None"}


def test_chat_memory_prints_table(chat: Chat) -> None:
    assert chat("/memory")[0] == "the table\n"


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(chat: Chat) -> None:
    chat.answers.interrupt_at = 4
    out, err = chat("Hello")
    assert len(out.removesuffix("\n")) == 4
    assert "(stopped;" in err
    assert chat.contents == ["Hello", out.removesuffix("\n")]
    chat.answers.interrupt_at = None
    chat("Again")
    assert chat.history.num_turns == 2


def test_ctrl_c_before_the_first_word_takes_the_question_back(chat: Chat) -> None:
    chat.answers.interrupt_at = 0
    assert "the question is removed" in chat("Hello")[1]
    assert chat.contents == []


def test_chat_unwatched_ctrl_c_raises(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, is_watched=False)
    chat.answers.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        chat("Hello")


def test_chat_full_context_drops_message_and_keeps_history(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, context=64)
    chat("Hello")
    before = chat.contents
    _, err = chat("x" * 30)
    assert "the context holds 64" in err
    assert "The message was dropped; the chat keeps 1 turn." in err
    assert "/undo removes a turn, /clear all of them" in err
    assert chat.contents == before
    _, err = chat("/undo", "y" * 30)
    assert chat.history.num_turns == 1
    assert chat.contents[0] == "y" * 30


def test_chat_answer_filling_context_prints_notice(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, context=32)
    _, err = chat("Hello 12345")
    assert "the context of 32 tokens is full" in err
    assert "nothing was dropped" in err


def test_chat_first_message_too_long_omits_undo_hint(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, context=32)
    _, err = chat("x" * 100)
    assert "the context holds 32" in err
    assert "/undo" not in err


def test_chat_refuses_lone_surrogate(chat: Chat) -> None:
    assert "surrogate" in chat("half \ud800")[1]
    assert chat.contents == []


def test_chat_dead_engine_raises(chat: Chat) -> None:
    def die(step: object) -> None:
        raise RuntimeError("no more")

    chat.answers.engine.runner.on_step = die  # type: ignore[attr-defined]
    with raises_code("engine.dead", EngineDeadError):
        chat.session.take("Hello")


def test_chat_piped_prints_only_answers_to_stdout(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny, "--max-tokens", "4", "--ignore-eos", stdin="Hello\nAgain\n")
    assert ended.code == 0, ended
    again = here("chat", tiny, "--max-tokens", "4", "--ignore-eos", stdin="Hello\n/clear\nAgain\n")
    assert again.out.startswith(ended.out[:2])
    assert "Loading" not in ended.err
    assert ">>>" not in ended.out + ended.err


def test_commands_work_when_piped(here: Here, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    said = f'/set max_tokens=3\n"""\nHello\nthere\n"""\n/stats\n/memory\n/save {file}\n/exit\nnever requested\n'
    ended = here("chat", tiny, stdin=said)
    assert ended.code == 0, ended
    assert "context" in ended.err
    assert "weights" in ended.err
    assert file.read_text().count('"role"') == 2
    assert "Hello\\nthere" in file.read_text()


def test_chat_memory_report_writes_html(here: Here, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory.html"
    ended = here("chat", tiny, "--memory-report", file, stdin="")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert file.read_text().startswith("<!DOCTYPE html>")
    wrong = here("chat", "no/such/model", "--memory-report", tmp_path, stdin="")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "it is a folder" in wrong.err


def test_chat_piped_failure_sets_exit_code(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny, "--max-tokens", "2", stdin=f"{'x' * 300}\nHello\n")
    assert ended.code == 1
    assert "the context holds 256" in ended.err
    assert ended.err.count("error: ") == 1
    assert ended.out


def test_chat_empty_stdin_prints_nothing(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_chat_model_without_template_is_refused(here: Here, bare: Path) -> None:
    ended = here("chat", bare, stdin="Hello\n")
    assert ended.code == 2
    assert "no chat template" in ended.err
    assert ended.err.count("\n") == 1


def test_chat_template_option_replaces_missing_template(here: Here, bare: Path) -> None:
    template = "{{ messages[-1]['content'] }}"
    assert here("chat", bare, "--chat-template", template, "--max-tokens", "2", stdin="Hello\n").code == 0


@pytest.mark.parametrize("options", [("--temperature", "-1"), ("--max-model-len", "x")], ids=" ".join)
def test_wrong_options_are_refused_before_the_model_is_opened(here: Here, options: tuple[str, ...]) -> None:
    ended = here("chat", "no/such/model", *options)
    assert ended.code == 2
    assert "no/such/model" not in ended.err


def test_bytes_that_are_no_text_are_refused(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny, stdin=b"caf\xe9\n")
    assert ended.code == 2
    assert "is not UTF-8" in ended.err


class Terminal:
    """A chat at a terminal."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        environment = {"TERM": "dumb", "COLUMNS": "100"}
        self.process = start(
            *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read until the pattern is there; what came up to its end."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.shown)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} never came: {self.shown!r}"
            if select.select([self._ours], [], [], left)[0]:
                try:
                    self.shown += os.read(self._ours, 4096).decode(errors="replace")
                except OSError as error:
                    raise AssertionError(f"{pattern!r} never came: {self.shown!r}") from error
        seen, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return seen

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_prompt(self, pattern: str) -> None:
        """Ctrl-C at a prompt. One that falls between the prompt and the waiting for a line is noticed with the next."""
        for _ in range(4):
            time.sleep(0.5)
            self.interrupt()
            try:
                self.expect(pattern, seconds=15)
            except AssertionError:
                continue
            return
        raise AssertionError(f"{pattern!r} never came: {self.shown!r}")

    def kill(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ended(self) -> int:
        """Read to the end; the exit code."""
        while True:
            try:
                if not os.read(self._ours, 4096):
                    break
            except OSError:
                break
        os.close(self._ours)
        return self.process.wait(timeout=60)


def test_chat_at_terminal_answers_and_leaves_on_ctrl_d(endless: Path) -> None:
    terminal = Terminal("chat", endless, "--max-tokens", "6", "--ignore-eos")
    try:
        table = terminal.expect(r"Maximum\s+concurrency\s+for\s+100,000\s+tokens\s+per\s+request:\s+1.00x")
        assert re.search(r"owner +planned +held *\r\n", table), "compact: who and how much, not why"
        assert re.search(r"weights +[\d.]+ \w+ +[\d.]+ \w+", table)
        terminal.expect(r"A-Model, context of 100,000 tokens; /help lists commands, Ctrl-D leaves")
        terminal.expect(">>> ")
        terminal.type("Hello\n")
        terminal.expect(r"6 tokens, [\d.]+ tokens/s; context \d+ of 100,000\)")
        terminal.expect(">>> ")
        terminal.type("/set max_tokens=90000\n")
        terminal.expect(">>> ")
        terminal.type("A long story\n")
        terminal.expect(r"A long story\r\n[^\r]{3}")
        terminal.interrupt()
        terminal.expect(r"\(stopped; the answer so far is kept")
        terminal.expect(">>> ")
        terminal.type("/stats\n")
        terminal.expect(r"chat: 2 turns")
        terminal.expect(">>> ")
        terminal.interrupt_prompt(r"Ctrl-C again, Ctrl-D or /exit leaves")
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.ended() == 0, "Ctrl-D leaves"
    finally:
        terminal.kill()
