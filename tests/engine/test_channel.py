"""Channel: whole frames in order, a closed end, two senders at once, silence."""

import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from error_codes import raises_code
from holdfast.engine.channel import Channel, ChannelClosedError, channel_pair
from holdfast.engine.messages import Died, Heartbeat, decode_message, encode_message
from holdfast.errors import MessageError


@pytest.fixture
def pair():
    ends = tuple(map(Channel, channel_pair()))
    yield ends
    for end in ends:
        end.close()


def frame(number: int, words: str = "") -> bytes:
    return encode_message(Died(words), number)


def test_frames_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    assert theirs.take() is None
    assert not theirs.wait(0.0)
    for number in range(1, 6):
        ours.send(lambda number=number: frame(number, "x" * 1000 * number))
    assert theirs.wait(0.0)
    assert [decode_message(theirs.take())[0] for _ in range(5)] == [1, 2, 3, 4, 5]
    assert theirs.take() is None


def test_frames_arrive_byte_by_byte():
    ours, theirs = channel_pair()
    channel, whole = Channel(theirs), frame(1, "words") + frame(2)
    found = []
    for place in range(len(whole)):
        ours.sendall(whole[place : place + 1])
        taken = channel.take()
        if taken is not None:
            found.append((place + 1, decode_message(taken)))
    assert found == [(len(frame(1, "words")), (1, Died("words"))), (len(whole), (2, Died("")))]
    ours.close()
    channel.close()


def test_channel_closes_after_the_last_frame(pair):
    ours, theirs = pair
    ours.send(lambda: frame(1))
    assert not theirs.is_other_side_gone()
    ours.close()
    assert theirs.is_other_side_gone()
    assert theirs.wait(0.0)
    assert decode_message(theirs.take())[0] == 1
    for _ in range(2):
        with pytest.raises(ChannelClosedError):
            theirs.take()
    with pytest.raises(ChannelClosedError):
        theirs.send(lambda: frame(1))
    with pytest.raises(ChannelClosedError):
        ours.wait(0.0)
    ours.close()


def test_frame_cut_short_by_its_sender_is_refused():
    for length in (1, 15, 16, 20):
        ours, theirs = channel_pair()
        ours.sendall(frame(1, "words")[:length])
        ours.close()
        channel = Channel(theirs)
        with raises_code("wire.cut_short", MessageError):
            channel.take()
        channel.close()


def test_foreign_bytes_are_refused():
    ours, theirs = channel_pair()
    ours.sendall(b"GET / HTTP/1.1\r\n\r\n")
    channel = Channel(theirs)
    with raises_code("wire.wrong_magic", MessageError):
        channel.take()
    ours.close()
    channel.close()


def test_channel_simultaneous_senders_do_not_deadlock(pair):
    num_frames, found = 40, {}

    def talk(index: int) -> None:
        channel, heard = pair[index], []
        for number in range(1, num_frames + 1):
            channel.send(lambda number=number: frame(number, "x" * 100_000))
        while len(heard) < num_frames:
            taken = channel.take()
            if taken is None:
                channel.wait(10)
            else:
                heard.append(decode_message(taken)[0])
        found[index] = heard

    threads = [threading.Thread(target=talk, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: list(range(1, num_frames + 1)), 1: list(range(1, num_frames + 1))}


def test_bytes_read_while_sending_are_bounded():
    ours, theirs = channel_pair()
    channel, other = Channel(ours, max_unread_bytes=2**18), Channel(theirs)
    errors = []

    def flood() -> None:
        try:
            for number in range(1, 100):
                channel.send(lambda number=number: frame(number, "x" * 100_000))
        except MessageError as error:
            errors.append(error.code)
            channel.close()

    thread = threading.Thread(target=flood)
    thread.start()

    def talk() -> None:
        for number in range(1, 100):
            other.send(lambda number=number: frame(number, "x" * 100_000), is_owner=False)

    with pytest.raises(ChannelClosedError):
        talk()
    thread.join(30)
    assert errors == ["wire.other_side_floods"]
    other.close()


@pytest.mark.parametrize("name", ["send", "send_frame", "try_send"])
def test_large_frames_of_another_thread_arrive_whole(pair, name):
    """The other side reads slowly, and the reading thread alone takes what it sends meanwhile."""
    ours, theirs = pair
    frames = [frame(number, str(number) * 300_000) for number in (1, 2, 3)]
    theirs.send(lambda: frame(9))

    def talk() -> None:
        for whole in frames:
            if name == "send":
                ours.send(lambda whole=whole: whole, is_owner=False)
            elif name == "send_frame":
                ours.send_frame(whole)
            else:
                while not ours.try_send(lambda whole=whole: whole):
                    pass

    thread, found = threading.Thread(target=talk), []
    thread.start()
    while len(found) < len(frames):
        assert theirs.wait(10)
        threading.Event().wait(0.001)
        taken = theirs.take()
        if taken is not None:
            found.append(taken)
    thread.join(10)
    assert found == frames
    assert not ours.unread, "only the reading thread reads"
    assert ours.take() == frame(9)


def test_channel_sends_after_the_other_side_closed_one_way(pair, monkeypatch):
    """A close that was read while sending is no busy wait, and no frame before it is lost."""
    ours, theirs = pair
    theirs.send(lambda: frame(1))
    theirs.connection.shutdown(socket.SHUT_WR)
    sent, thread_ended = frame(2, "x" * 1_000_000), threading.Event()
    poll, polls = ours.poll, []
    monkeypatch.setattr(ours, "poll", lambda *args: (polls.append(0), poll(*args))[1])

    def talk() -> None:
        ours.send(lambda: sent)
        thread_ended.set()

    threading.Thread(target=talk, daemon=True).start()
    assert not thread_ended.wait(0.05), "the socket is full"
    assert len(polls) < 9
    found = None
    while found is None:
        assert theirs.wait(10)
        found = theirs.take()
    assert found == sent
    assert thread_ended.wait(10)
    assert ours.take() == frame(1)
    with pytest.raises(ChannelClosedError):
        ours.take()


def test_silence_counts_from_the_last_bytes(monkeypatch):
    """Only waits since the other side last read or sent count."""
    ours, theirs = channel_pair()
    channel, waits = Channel(ours, silence_seconds=1.0), []
    moves = iter([False, False, False, True, False, False])

    def make_way(is_owner: bool, timeout: float | None) -> bool:
        waits.append(timeout)
        return next(moves)

    def send(left: bytes) -> int:
        if len(waits) in taken and not taken[len(waits)]:
            taken[len(waits)] = True
            return 1
        raise BlockingIOError

    taken = {1: False, 2: False}
    channel.connection = SimpleNamespace(send=send, fileno=ours.fileno, close=ours.close)  # type: ignore[assignment]
    monkeypatch.setattr(channel, "make_way", make_way)
    with raises_code("wire.other_side_hangs", MessageError, seconds="1.0"):
        channel.send(lambda: b"abcdef")
    assert waits == [0.5] * 6, "the last two in a row are too many"
    channel.close()
    theirs.close()


def test_heartbeat_does_not_wait(pair):
    ours, _ = pair

    def beat() -> bytes:
        return encode_message(Heartbeat(1.0), 1)

    assert ours.try_send(beat)
    num_sent = 0
    while ours.try_send(beat):
        num_sent += 1
    assert num_sent > 10
    assert not ours.try_send(beat)


def test_sender_gives_up_on_a_silent_process():
    ours, theirs = channel_pair()
    channel = Channel(ours, silence_seconds=0.2)
    with raises_code("wire.other_side_hangs", MessageError, seconds="0.2"):
        channel.send(lambda: frame(1, "x" * 10_000_000))
    channel.close()
    theirs.close()


def test_process_that_sends_may_read_late():
    ours, theirs = channel_pair()
    channel, other, whole = Channel(ours, silence_seconds=0.4), Channel(theirs), frame(1, "x" * 3_000_000)

    def talk() -> None:
        for number in range(1, 8):
            other.send(lambda number=number: frame(number), is_owner=False)
            threading.Event().wait(0.1)
        while other.wait(1.0) and other.take() is None:
            pass

    thread = threading.Thread(target=talk)
    thread.start()
    channel.send(lambda: whole)
    thread.join(30)
    assert [decode_message(channel.take())[0] for _ in range(7)] == list(range(1, 8))
    channel.close()
    other.close()


def test_sockets_avoid_standard_streams():
    code = (
        "import os, sys\n"
        "report = os.dup(1)\n"
        "os.closerange(0, 3)\n"
        "from holdfast.engine.channel import channel_pair\n"
        "numbers = [end.fileno() for end in channel_pair()]\n"
        "os.write(report, repr(min(numbers) > 2).encode())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"True"
