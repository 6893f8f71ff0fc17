"""Random numbers that are a function of (seed, position) and of nothing else; no torch.

A stateful generator would tie a sequence's choices to everything drawn before it: to its neighbours, to the order of
rows, to a preemption. A hash of the counter has no state to share or to rebuild.
"""

import struct
from hashlib import blake2b

_COUNTER = struct.Struct("<QQ")
_PURPOSE = b"holdfast.sample"
_WORD = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53; seeds are taken modulo 2**64."""
    digest = blake2b(_COUNTER.pack(seed & _WORD, position), digest_size=8, person=_PURPOSE).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
