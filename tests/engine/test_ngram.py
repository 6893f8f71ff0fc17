"""N-gram proposals against a plain search of every place; what an index holds; backing off."""

import random
import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.ngram import MAX_WAIT, NgramProposer


def search(token_ids: list[int], num_proposals: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Reference by definition: every n, every place from the latest on."""
    for n in range(longest, shortest - 1, -1):
        for place in range(len(token_ids) - 1, n - 1, -1):
            if len(token_ids) > n and token_ids[place - n : place] == token_ids[-n:]:
                copied = list(token_ids)
                for offset in range(num_proposals):
                    copied.append(copied[place + offset])
                return tuple(copied[len(token_ids) :])
    return ()


@st.composite
def growing_sequences(draw):
    """Tokens of a small vocabulary, and the lengths at which it drafts."""
    token_ids = draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=1, max_size=60))
    lengths = draw(st.lists(st.integers(1, len(token_ids)), min_size=1, max_size=12))
    return token_ids, sorted(lengths)


@settings(max_examples=400, deadline=None)
@given(growing_sequences(), st.integers(1, 16), st.integers(1, 3), st.integers(0, 3))
def test_proposals_are_those_of_a_plain_search(grown, num_proposals, shortest, further):
    token_ids, lengths = grown
    proposer = NgramProposer(num_proposals, shortest + further, shortest)
    for length in lengths:
        found = proposer.propose(7, token_ids[:length])
        assert found == search(token_ids[:length], num_proposals, shortest + further, shortest)


@settings(max_examples=200, deadline=None)
@given(growing_sequences(), st.integers(1, 9))
def test_full_index_spans_one_to_two_generations(grown, max_indexed):
    token_ids, lengths = grown
    proposer = NgramProposer(3, 3, 2, max_indexed)
    for length in lengths:
        own = token_ids[:length]
        found = proposer.propose(1, own)
        # By n: an n-gram that ended within the last generation is found, one that ended before the last two is not.
        near = [search(own[max(0, length - max_indexed - n) :], 3, n, n) for n in (3, 2)]
        if near[0]:
            assert found == near[0]
        elif near[1]:
            assert found
        far = own[max(0, length - 2 * max_indexed - 4) :]
        if not search(far, 3, 3, 2):
            assert not found
        index = proposer._indexes[1]
        assert sum(map(len, (*index.young, *index.old))) <= 2 * 2 * max_indexed


def test_longest_then_latest_match_wins():
    proposer = NgramProposer(2, 3, 2)
    assert proposer.propose(1, [1, 2, 3, 40, 41, 2, 3, 50, 51, 1, 2, 3]) == (40, 41)
    assert proposer.propose(2, [2, 3, 40, 41, 2, 3, 50, 51, 9, 2, 3]) == (50, 51)
    assert proposer.propose(3, [1, 2, 3, 4, 5, 6]) == ()
    assert proposer.propose(4, [1]) == ()


def test_ngram_proposer_repeats_period():
    proposer = NgramProposer(7, 4, 2)
    assert proposer.propose(1, [5, 8, 8, 8]) == (8,) * 7
    assert proposer.propose(2, [1, 2, 3, 1, 2, 3, 1]) == (2, 3, 1, 2, 3, 1, 2)


def test_rejected_sequence_backs_off_until_a_token_is_accepted():
    proposer = NgramProposer(2, 2, 1)
    token_ids, wanted = [1, 1], []
    for _ in range(200):
        if proposer.propose(1, token_ids):
            wanted.append(len(token_ids))
            token_ids.append(1)
            proposer.book(1, 0, len(token_ids))
        else:
            assert proposer.is_waiting(1, len(token_ids))
            token_ids.append(1)
    gaps = [later - earlier for earlier, later in pairwise(wanted)]
    assert gaps[:6] == [1, 2, 4, 8, 16, 32]
    assert set(gaps[6:]) == {MAX_WAIT + 1}
    proposer.book(1, 1, len(token_ids))
    assert not proposer.is_waiting(1, len(token_ids))
    assert proposer.propose(1, token_ids) == (1, 1)


def test_sequences_are_apart_and_forgotten_ones_hold_nothing():
    proposer = NgramProposer(2)
    assert proposer.propose(1, [1, 2, 3, 1, 2]) == (3, 1)
    assert proposer.propose(2, [4, 1, 2]) == ()
    assert proposer.num_sequences == 2
    proposer.forget(1)
    proposer.forget(1)
    proposer.book(1, 0, 5)  # a step that was in flight may be booked later
    assert proposer.num_sequences == 1
    assert proposer.propose(1, [1, 2, 3, 1, 2, 3]) == (1, 2), "read again after a preemption"


def test_other_tokens_under_a_known_number_are_read_anew():
    proposer = NgramProposer(2)
    proposer.propose(1, [1, 2, 3, 1, 2, 4, 4, 4])
    assert proposer.propose(1, [7, 8, 9, 7, 8]) == (9, 7)


def test_ngram_proposer_256_sequences_take_milliseconds():
    chance = random.Random(1)
    proposer = NgramProposer(4)
    sequences = [[chance.randrange(500) for _ in range(300)] for _ in range(256)]
    for number, token_ids in enumerate(sequences):
        proposer.propose(number, token_ids)
    fastest = 1.0
    for _ in range(5):
        for token_ids in sequences:
            token_ids.append(chance.randrange(500))
        start = time.perf_counter()
        for number, token_ids in enumerate(sequences):
            proposer.propose(number, token_ids)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.05, f"{fastest:.3f} s"  # about 3 ms on an idle core; a quadratic search takes 100 times that
