"""The messages of a chat: what was said, taken back, or kept in a file; no torch."""

from collections.abc import Mapping
from pathlib import Path

from holdfast.cli.strict_json import dumps
from holdfast.errors import ConfigError, shown


class ChatHistory:
    """A system message, if any, and turns: a question and its answer, alternating."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self._turns: list[tuple[str, str]] = []

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def messages(self, question: str | None = None) -> list[Mapping[str, object]]:
        """All of it as a chat template takes it, with a further question at its end."""
        messages: list[Mapping[str, object]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for asked, answered in self._turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages

    def add(self, question: str, answer: str) -> None:
        """A turn that is over."""
        self._turns.append((question, answer))

    def take_back(self) -> tuple[str, str] | None:
        """Forget the last turn and return it; None if there was none."""
        return self._turns.pop() if self._turns else None

    def clear(self) -> int:
        """Forget every turn; how many there were."""
        num_turns = self.num_turns
        self._turns.clear()
        return num_turns

    def save(self, file: str, model: str) -> None:
        """Write the messages to a new file, as JSON."""
        text = dumps({"model": model, "messages": self.messages()}, indent=2)
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as out:
                out.write(f"{text}\n")
        except FileExistsError as error:
            raise ConfigError(
                f"/save {shown(file)[1:-1]} was asked", "there is such a file already", "choose another name"
            ) from error
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"/save {shown(file)[1:-1]} was asked", reason, "choose another place") from error
