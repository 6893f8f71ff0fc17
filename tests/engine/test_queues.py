"""Queues: order of arrival holds whatever moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.scheduler import Queues, named
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence, SequenceState


def sequence(number: int) -> Sequence:
    return Sequence(number, [1, 2, 3], 3, SamplingParams(), 0, 4)


def filled(num_sequences: int) -> tuple[Queues, list[Sequence]]:
    queues = Queues()
    sequences = [sequence(number) for number in range(num_sequences)]
    for one in sequences:
        queues.append(one)
    return queues, sequences


def test_admission_and_preemption_are_each_others_reverse() -> None:
    queues, sequences = filled(4)
    assert [queues.admit() for _ in range(3)] == sequences[:3]
    assert queues.youngest_running is sequences[2]
    assert queues.oldest_waiting is sequences[3]
    assert [queues.preempt() for _ in range(2)] == [sequences[2], sequences[1]]
    assert queues.running == sequences[:1]
    assert queues.waiting == sequences[1:]
    queues.check()


def test_states_follow() -> None:
    queues, (one, two) = filled(2)
    queues.admit()
    assert (one.state, two.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    queues.preempt()
    assert one.state is SequenceState.WAITING
    queues.remove(one)
    queues.remove(one)
    assert one.state is SequenceState.FINISHED
    assert one not in queues
    assert (len(queues), queues.num_waiting, queues.num_running) == (1, 1, 0)


def test_a_stranger_can_be_removed() -> None:
    queues, _ = filled(2)
    stranger = sequence(77)
    queues.remove(stranger)
    assert stranger.state is SequenceState.FINISHED
    assert len(queues) == 2


@given(st.lists(st.sampled_from(["append", "admit", "preempt", "remove"]), max_size=60), st.randoms())
def test_running_before_waiting_is_always_sorted_by_arrival(moves: list[str], random) -> None:
    queues = Queues()
    arrived: list[Sequence] = []
    for move in moves:
        if move == "append":
            # Ids need not grow; arrival is what counts.
            arrived.append(sequence(1000 - len(arrived) * 7 % 97 - 100 * (len(arrived) // 97)))
            queues.append(arrived[-1])
        elif move == "admit" and queues.num_waiting:
            queues.admit()
        elif move == "preempt" and queues.num_running:
            queues.preempt()
        elif move == "remove" and len(queues):
            queues.remove(random.choice([*queues.running, *queues.waiting]))
        queues.check()
        assert [*queues.running, *queues.waiting] == [one for one in arrived if one in queues]


@pytest.mark.parametrize("state", [SequenceState.RUNNING, SequenceState.FINISHED])
def test_only_new_sequences_join(state: SequenceState) -> None:
    queues, (one,) = filled(1)
    with pytest.raises(AssertionError, match="sequence 0 is not new"):
        queues.append(one)
    used = sequence(5)
    used.state = state
    with pytest.raises(AssertionError, match="sequence 5 is not new"):
        queues.append(used)
    assert len(queues) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda queues: queues._waiting.move_to_end(2, last=False),
        lambda queues: queues._running.update({3: queues.oldest_waiting}),
        lambda queues: setattr(queues.oldest_waiting, "state", SequenceState.FINISHED),
        lambda queues: setattr(queues.oldest_waiting, "sequence_id", 9),
        lambda queues: queues._arrivals.pop(2),
    ],
    ids=["order", "both", "state", "id", "arrival"],
)
def test_check_notices_damage(damage) -> None:
    queues, _ = filled(4)
    queues.admit()
    queues.check()
    damage(queues)
    with pytest.raises(AssertionError):
        queues.check()


def test_messages_never_show_tokens() -> None:
    assert named(sequence(12)) == "sequence 12"
