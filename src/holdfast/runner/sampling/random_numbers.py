"""Random numbers that are a function of (seed, position) and of nothing else; no torch.

A stateful generator would tie a sequence's choices to everything drawn before it: to its neighbours, to the order of
rows, to a preemption. A hash of the counter has no state to share or to rebuild.
"""

import struct
from hashlib import blake2b

_COUNTER = struct.Struct("<QQ")
_HASH = blake2b(digest_size=8, person=b"holdfast.sample")
"""Copied for each number, which costs half of making it."""
_WORD = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53; seeds are taken modulo 2**64."""
    counter = _HASH.copy()
    counter.update(_COUNTER.pack(seed & _WORD, position))
    return (int.from_bytes(counter.digest(), "little") >> 11) * 2.0**-53
