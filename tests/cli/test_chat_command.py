"""`holdfast chat`, piped and at a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from cli.cli_models import Here, start


def test_a_line_is_a_turn_and_only_answers_reach_stdout(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny, "--max-tokens", "4", "--ignore-eos", stdin="Hello\nAgain\n")
    assert ended.code == 0, ended
    again = here("chat", tiny, "--max-tokens", "4", "--ignore-eos", stdin="Hello\n/clear\nAgain\n")
    assert again.out.startswith(ended.out[:2])
    assert "Loading" not in ended.err
    assert ">>>" not in ended.out + ended.err


def test_commands_work_when_piped(here: Here, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    said = f'/set max_tokens=3\n"""\nHello\nthere\n"""\n/stats\n/memory\n/save {file}\n/exit\nnever asked\n'
    ended = here("chat", tiny, stdin=said)
    assert ended.code == 0, ended
    assert "context" in ended.err
    assert "weights" in ended.err
    assert file.read_text().count('"role"') == 2
    assert "Hello\\nthere" in file.read_text()


def test_the_memory_is_drawn_where_it_is_asked(here: Here, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory.html"
    ended = here("chat", tiny, "--memory-report", file, stdin="")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert file.read_text().startswith("<!DOCTYPE html>")
    wrong = here("chat", "no/such/model", "--memory-report", tmp_path, stdin="")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "it is a folder" in wrong.err


def test_what_failed_in_a_pipe_shows_in_the_exit_code(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny, "--max-tokens", "2", stdin=f"{'x' * 300}\nHello\n")
    assert ended.code == 1
    assert "the context holds 256" in ended.err
    assert ended.err.count("error: ") == 1
    assert ended.out


def test_no_input_is_no_chat(here: Here, tiny: Path) -> None:
    ended = here("chat", tiny)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_a_model_without_a_template_is_refused(here: Here, bare: Path) -> None:
    ended = here("chat", bare, stdin="Hello\n")
    assert ended.code == 2
    assert "no chat template" in ended.err
    assert ended.err.count("\n") == 1


def test_another_template_may_be_given(here: Here, bare: Path) -> None:
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

    def interrupted_end(self) -> int:
        """Ctrl-C at a prompt that ends the chat; the exit code."""
        time.sleep(0.5)
        self.interrupt()
        again = threading.Timer(15, self.interrupt)
        again.start()
        try:
            return self.ended()
        finally:
            again.cancel()

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


def test_a_chat_at_a_terminal(endless: Path) -> None:
    terminal = Terminal("chat", endless, "--max-tokens", "6", "--ignore-eos")
    try:
        table = terminal.expect(r"Maximum concurrency for 100,000 tokens per request: 1.00x")
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
        terminal.expect(r"\(stopped; what was said so far is kept")
        terminal.expect(">>> ")
        terminal.type("/stats\n")
        terminal.expect(r"chat: 2 turns")
        terminal.expect(">>> ")
        terminal.interrupt_prompt(r"Ctrl-C again, Ctrl-D or /exit leaves")
        terminal.expect(">>> ")
        assert terminal.interrupted_end() == 0
    finally:
        terminal.kill()


def test_ctrl_d_leaves(tiny: Path) -> None:
    terminal = Terminal("chat", tiny)
    try:
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.ended() == 0
    except subprocess.TimeoutExpired:
        terminal.process.kill()
        raise
