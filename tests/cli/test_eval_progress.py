"""Progress: ten lines where nobody watches, a bar where somebody does."""

import pytest

from holdfast.cli import eval_progress
from holdfast.cli.eval_progress import EvalBar


def test_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with EvalBar() as bar:
        for done in range(0, 2001, 5):
            bar(done, 2000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("read 200 of 2,000 tokens, ")
    assert lines[-1].startswith("read 2,000 of 2,000 tokens, ")
    assert lines[-1].endswith(" 0 s left")
    assert all(" tokens/s, " in line for line in lines)


def test_few_steps_tell_no_line_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with EvalBar() as bar:
        for done in (0, 3, 4, 4, 10, 10):
            bar(done, 10)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_nothing_to_do_is_no_error() -> None:
    with EvalBar() as bar:
        bar(0, 0)


def test_a_bar_shows_speed_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(eval_progress, "is_watched", lambda: True)
    monkeypatch.setattr(eval_progress, "SECONDS_BETWEEN_UPDATES", 0.0)
    with EvalBar() as bar:
        bar(0, 100)
        bar(50, 100)
        task = bar._progress.tasks[0]  # type: ignore[union-attr]
        assert (task.completed, task.total) == (50, 100)
        assert task.fields["speed"] > 0
        bar(100, 100)
        assert task.completed == 100
    assert "read " not in capsys.readouterr().err


def test_a_bar_ends_with_whatever_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_progress, "is_watched", lambda: True)
    with pytest.raises(KeyboardInterrupt), EvalBar() as bar:
        raise KeyboardInterrupt
    assert not bar._progress.live.is_started  # type: ignore[union-attr]
