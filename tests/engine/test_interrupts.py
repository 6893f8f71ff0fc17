"""InterruptShield: an interrupt waits for the end of a block, or for the part that lets it through."""

import signal
import threading

import pytest

from holdfast.engine.engine import InterruptShield


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    """The usual handler before, and no other one after."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


def test_interrupt_shield_raises_interrupt_at_exit():
    done = []

    def work():
        with InterruptShield():
            interrupt()
            interrupt()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]


def test_interrupt_shield_without_interrupt_is_silent():
    with InterruptShield() as shield, shield.lifted():
        pass


def test_interrupt_shield_lifted_raises_at_once():
    done = []

    def work():
        with InterruptShield() as shield:
            with shield.lifted():
                interrupt()
                done.append("too late")
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_interrupt_shield_lifted_raises_pending_interrupt():
    done = []

    def work():
        with InterruptShield() as shield:
            interrupt()
            done.append("shielded")
            with shield.lifted():
                done.append("too late")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["shielded"]


def test_interrupt_shield_is_up_again_after_lifted_interrupt():
    done = []

    def work():
        with InterruptShield() as shield:
            try:
                with shield.lifted():
                    interrupt()
            except KeyboardInterrupt:
                interrupt()
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["cleaned up"]


def test_interrupt_shield_keeps_error_as_context():
    def work():
        with InterruptShield():
            interrupt()
            raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_foreign_handler_is_called_and_kept():
    calls = []

    def own(signum, frame):
        calls.append(signum)

    signal.signal(signal.SIGINT, own)
    try:
        with InterruptShield():
            interrupt()
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_interrupt_shield_lifted_calls_recording_handler_at_once():
    calls = []
    signal.signal(signal.SIGINT, lambda signum, frame: calls.append(signum))
    try:
        with InterruptShield() as shield:
            with shield.lifted():
                interrupt()
                interrupt()
                assert len(calls) == 2
            interrupt()
            assert len(calls) == 2
            with shield.lifted():
                assert len(calls) == 3
        assert len(calls) == 3
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_interrupt_shield_keeps_ignored_interrupt_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptShield() as shield:
            interrupt()
            with shield.lifted():
                interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_interrupt_shield_in_other_thread_raises_nothing():
    errors = []

    def work():
        try:
            with InterruptShield() as shield, shield.lifted():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
