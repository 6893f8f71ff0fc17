"""Turns and commands of a chat, over an engine without a model."""

import json
from pathlib import Path

import pytest

from engine.fakes import assert_at_rest, make_engine
from holdfast.cli.answers import prepare, sampling_params, stream
from holdfast.cli.chat_history import ChatHistory
from holdfast.cli.chat_session import ChatSession
from holdfast.engine.llm import LLM
from holdfast.errors import HoldfastError


class FakeAnswers:
    """An engine whose tokens are hashes of what came before."""

    model_name = "A-Model"

    def __init__(self, context: int = 400) -> None:
        self.engine = make_engine(max_model_len=context, num_pages=context // 4, page_tokens=4)
        self.context_tokens = context
        self.llm = LLM.from_engine(self.engine)
        self.asked: list[list[tuple[str, str]]] = []
        self.interrupt_at: int | None = None

    def params(self, given):
        return sampling_params(given, self.engine.generation)

    def prepare(self, messages, params):
        self.asked.append([(message["role"], message["content"]) for message in messages])
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
    assert [role for role, _ in chat.answers.asked[1]] == ["user", "assistant", "user"]
    assert chat.answers.asked[1][1][1] == chat.contents[1]


def test_nothing_is_no_question(chat: Chat) -> None:
    assert chat("", "   ") == ("", "")
    assert chat.answers.asked == []


def test_a_slash_is_a_command_only_where_a_word_follows_it(chat: Chat) -> None:
    chat("/etc/passwd is a file", "//clear")
    assert [asked[-1][1] for asked in chat.answers.asked] == ["/etc/passwd is a file", "/clear"]


def test_leaving(chat: Chat) -> None:
    assert [chat.session.take(word) for word in ("/exit", "/quit", "/EXIT")] == [False] * 3


def test_help_lists_every_command(chat: Chat) -> None:
    _, err = chat("/help")
    for name in ("help", "clear", "system", "undo", "retry", "save", "set", "stats", "memory", "exit"):
        assert f"/{name} " in err
    assert chat("/?")[1] == err


def test_an_unknown_command_is_told_with_the_nearest(chat: Chat) -> None:
    assert "did you mean /clear?" in chat("/claer")[1]
    assert "type /help" in chat("/zzz")[1]
    assert chat.session.num_failures == 2


def test_clear_and_undo(chat: Chat) -> None:
    chat("One", "Two")
    assert "taken back: 'Two'" in chat("/undo")[1]
    assert chat.history.num_turns == 1
    assert "(1 turn forgotten)" in chat("/clear")[1]
    assert chat.history.num_turns == 0
    assert "nothing to take back" in chat("/undo")[1]


def test_the_system_message(chat: Chat) -> None:
    assert "no system message" in chat("/system")[1]
    assert "Be brief." in chat("/system Be brief.")[1]
    chat("Hello", "/clear")
    assert chat.answers.asked[0][0] == ("system", "Be brief.")
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


def test_retry_that_fails_keeps_the_answer_there_was(chat: Chat) -> None:
    chat("Hello")
    before = chat.contents
    _, err = chat("/set max_tokens=5000", "/retry")
    assert "max_tokens=5000" in err
    assert chat.contents == before
    chat.answers.interrupt_at = 0
    chat("/set max_tokens=5", "/retry")
    assert chat.contents == before


def test_retry_needs_a_question(chat: Chat) -> None:
    assert "nothing was asked yet" in chat("/retry")[1]


def test_save(chat: Chat, tmp_path: Path) -> None:
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
def test_set(chat: Chat, text: str, words: str) -> None:
    assert words in chat(text)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/set temprature=1", "did you mean temperature=...?"),
        ("/set temperature", "type /set temperature=0.7"),
        ("/set temperature=hot", "temperature='hot' was asked"),
        ("/set temperature=nan", "temperature=nan was asked"),
        ("/set n=4", "the names are"),
        ("/set ignore_eos=maybe", "it is a switch"),
        ("/set max_tokens=0", "max_tokens=0 was asked"),
    ],
)
def test_a_wrong_setting_changes_nothing(chat: Chat, text: str, words: str) -> None:
    before = chat("/set")[1]
    assert words in chat(text)[1]
    assert chat("/set")[1] == before


def test_a_setting_is_used_and_can_be_taken_back(chat: Chat) -> None:
    chat("/set max_tokens=3", "Hello")
    assert len(chat.contents[1]) == 3
    chat("/set max_tokens=auto", "/retry")
    assert len(chat.contents[1]) == 10


def test_stats(chat: Chat) -> None:
    assert "0 turns" in chat("/stats")[1]
    chat("Hello")
    _, err = chat("/stats")
    assert "last answer: prompt 23 tokens, generated 10 tokens" in err
    assert "chat: 1 turn, 10 tokens generated, context 33 of 400 used" in err


def test_memory(chat: Chat) -> None:
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
    assert "taken back" in chat("Hello")[1]
    assert chat.contents == []


def test_ctrl_c_where_nobody_watches_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, is_watched=False)
    chat.answers.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        chat("Hello")


def test_a_full_context_drops_nothing_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, context=64)
    chat("Hello")
    before = chat.contents
    _, err = chat("x" * 30)
    assert "the context holds 64" in err
    assert "your message was left out, and 1 turn before it kept" in err
    assert "/undo takes back a turn, /clear all of them" in err
    assert chat.contents == before
    _, err = chat("/undo", "y" * 30)
    assert chat.history.num_turns == 1
    assert chat.contents[0] == "y" * 30


def test_an_answer_that_fills_the_context_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, context=32)
    _, err = chat("Hello 12345")
    assert "the context of 32 tokens is full" in err
    assert "nothing was dropped" in err


def test_a_first_message_that_is_too_long_is_not_told_to_undo(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(capsys, context=32)
    _, err = chat("x" * 100)
    assert "the context holds 32" in err
    assert "/undo" not in err


def test_a_lone_surrogate_is_refused(chat: Chat) -> None:
    assert "surrogate" in chat("half \ud800")[1]
    assert chat.contents == []


def test_a_dead_engine_ends_the_chat(chat: Chat) -> None:
    def die(step: object) -> None:
        raise RuntimeError("no more")

    chat.answers.engine.runner.on_step = die  # type: ignore[attr-defined]
    with pytest.raises(HoldfastError, match="no more"):
        chat.session.take("Hello")
