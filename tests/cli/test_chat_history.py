"""The messages of a chat."""

import json
from pathlib import Path

import pytest

from holdfast.cli.chat_history import ChatHistory
from holdfast.errors import ConfigError


def test_messages_alternate_after_the_system_message() -> None:
    history = ChatHistory("Be brief.")
    history.add("One?", "Two.")
    roles = [(message["role"], message["content"]) for message in history.messages("Three?")]
    assert roles == [("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?")]
    assert len(history.messages()) == 3


def test_turns_are_taken_back_from_the_end() -> None:
    history = ChatHistory(None)
    history.add("a", "b")
    history.add("c", "d")
    assert history.take_back() == ("c", "d")
    assert history.messages() == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert history.clear() == 1
    assert history.take_back() is None


def test_a_chat_is_saved_once(tmp_path: Path) -> None:
    history = ChatHistory("Be brief.")
    history.add("Wie heißt \ud83d?", "So.")
    history.save(str(tmp_path / "chat.json"), "A-Model")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == {"model": "A-Model", "messages": history.messages()}
    (tmp_path / "chat.json").write_text("mine")
    with pytest.raises(ConfigError, match="such a file already"):
        history.save(str(tmp_path / "chat.json"), "A-Model")
    assert (tmp_path / "chat.json").read_text() == "mine"


@pytest.mark.parametrize("file", ["no/such/folder/chat.json", ".", "a\0b", "~nobody-of-this-name/x"])
def test_a_place_that_cannot_be_written_is_told(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="/save"):
        ChatHistory(None).save(file, "A-Model")
    assert list(tmp_path.iterdir()) == []
