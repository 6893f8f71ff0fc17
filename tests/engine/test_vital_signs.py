"""VitalSigns and Pulse: what counts as a sign of life, how long silence may last, and numbers that do not disturb each other."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.fakes import own_pulse
from holdfast.engine import pulse as pulses
from holdfast.engine import vital_signs
from holdfast.engine.pulse import NUM_PLACES, CoreCounts
from holdfast.engine.vital_signs import LOCKED_SECONDS, LOOK_SECONDS, SILENCE_SECONDS, VitalSigns


class Other:
    """Another process, by its pulse and by what the system says; and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.state, self.ticks = 100.0, "S", 7
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(vital_signs, "time", clock)
        monkeypatch.setattr(pulses, "time", clock)
        monkeypatch.setattr(vital_signs, "process_state", lambda pid: (self.state, self.ticks))
        self.pulse = own_pulse()
        self.pulse.beat()
        self.signs = VitalSigns(1, self.pulse)
        self.signs.look()

    def look(self, seconds: float = LOOK_SECONDS) -> float:
        """One more look, so much later; the silence that it has found."""
        self.now += seconds
        self.signs.look()
        return self.signs.silent_seconds


SIGNS: dict[str, Any] = {
    "a beat": lambda other: other.pulse.beat(),
    "processor time": lambda other: setattr(other, "ticks", other.ticks + 1),
    "ready to run": lambda other: setattr(other, "state", "R"),
    "a disk": lambda other: setattr(other, "state", "D"),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_vital_signs_any_sign_of_life_ends_silence(monkeypatch, sign):
    other = Other(monkeypatch)
    for _ in range(2):
        other.state = "S"
        other.look()
        assert other.look() >= LOOK_SECONDS
        other.now += 0.01
        SIGNS[sign](other)
        assert other.look() == 0.0
    other.state = "S"
    assert [other.look() for _ in range(3)] == pytest.approx([0.25, 0.5, 0.75]), "the same sign is none"


def test_vital_signs_count_a_machine_that_slept_as_one_look(monkeypatch):
    other = Other(monkeypatch)
    assert other.look(1000.0) == 2 * LOOK_SECONDS
    assert other.look(0.1) == pytest.approx(2 * LOOK_SECONDS + 0.1)


@pytest.mark.parametrize(
    ("state", "is_ready", "most"),
    [
        *(("S", True, SILENCE_SECONDS), ("S", False, LOCKED_SECONDS)),
        *((state, is_ready, SILENCE_SECONDS) for state in "TtZX" for is_ready in (True, False)),
    ],
)
def test_vital_signs_are_those_of_the_dead_after_so_long(monkeypatch, state, is_ready, most):
    other = Other(monkeypatch)
    other.state = state
    for number in range(1, round(most / LOOK_SECONDS)):
        other.look()
        assert not other.signs.is_dead(is_ready), number
    other.look()
    assert other.signs.is_dead(is_ready)
    other.pulse.beat()
    other.look()
    assert not other.signs.is_dead(is_ready)


def test_process_state_reads_past_any_name(monkeypatch):
    fields = ["S", *map(str, range(4, 14)), "30", "12", *map(str, range(16, 30))]
    text = f"12 (a) R (b) {' '.join(fields)}"
    monkeypatch.setattr(vital_signs, "Path", lambda name: SimpleNamespace(read_text=lambda: text))
    assert vital_signs.process_state(12) == ("S", 42)
    assert not vital_signs.is_stopped(12)
    for state in "Tt":
        monkeypatch.setattr(vital_signs, "process_state", lambda pid, state=state: (state, 0))
        assert vital_signs.is_stopped(12)


def test_process_state_of_an_unknown_pid():
    assert vital_signs.process_state(-1) == ("S", 0)


def test_pulse_numbers_stand_apart(monkeypatch):
    """Each of them changes alone, and the clock of another process may be a little ahead."""
    now = [50.0]
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = own_pulse()
    pulse.beat()
    pulse.write_counts(CoreCounts(1, 2, 3, 0.25))
    now[0] += 2.0
    assert pulse.look() == (2.0, 0.0)
    pulse.begin_step()
    now[0] += 1.0
    assert pulse.look() == (3.0, 1.0)
    pulse.beat()
    assert (pulse.look(), pulse.beat_at) == ((0.0, 1.0), 53.0)
    now[0] -= 5.0
    assert pulse.look() == (0.0, 0.0)
    now[0] += 5.0
    pulse.end_step()
    pulse.hang_ups.add((0, NUM_PLACES - 1))
    assert pulse.look() == (0.0, 0.0)
    assert pulse.counts() == (1, 2, 3, 0.25)
    pulse.write_counts(CoreCounts(7, 8, 9, 1.0))
    assert pulse.counts() == (7, 8, 9, 1.0)
    assert (pulse.beat_at, pulse.hang_ups.has_all((0, NUM_PLACES - 1))) == (53.0, True)
