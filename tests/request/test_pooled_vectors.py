"""Vectors from hidden states: cut, normalised, compared; and params that are refused."""

import struct

import numpy as np
import pytest

from for_each import for_each
from holdfast.errors import RequestError
from holdfast.request.pooling import PoolingParams, cosine, vector_of

HIDDEN = struct.pack("<4f", 3.0, 4.0, 0.0, 12.0)


def test_vector_of_normalizes_after_the_cut():
    assert vector_of(HIDDEN, 2, True).tolist() == pytest.approx([0.6, 0.8])
    assert vector_of(HIDDEN, None, True) @ vector_of(HIDDEN, None, True) == pytest.approx(1.0)


def test_vector_of_unnormalized_is_the_hidden_state():
    assert vector_of(HIDDEN, None, False).tolist() == [3.0, 4.0, 0.0, 12.0]


def test_vector_of_zeros_stays_zeros():
    assert vector_of(bytes(16), None, True).tolist() == [0.0] * 4


def test_vector_of_does_not_share_memory_with_its_bytes():
    vector_H = vector_of(HIDDEN, None, False)
    vector_H[0] = 9.0
    assert struct.unpack("<4f", HIDDEN)[0] == 3.0


def test_cosine_ignores_lengths():
    one, other = np.array([1.0, 0.0], np.float32), np.array([5.0, 5.0], np.float32)
    assert cosine(one, other) == pytest.approx(0.5**0.5)
    assert cosine(one, np.zeros(2, np.float32)) == 0.0


@for_each(
    "wrong",
    [{"dimensions": 0}, {"dimensions": True}, {"dimensions": 1.5}, {"normalize": 2}, {"truncate_prompt_tokens": 5}],
)
def test_pooling_params_of_wrong_values_are_refused(wrong):
    with pytest.raises(RequestError):
        PoolingParams(**wrong)
