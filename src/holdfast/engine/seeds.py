"""Seeds of sequences, derived so that a completion depends on its request's seed and its index and on nothing else; no torch.

    request seed   params.seed, or derive_seed(engine seed, number of the request)
    sequence seed  derive_seed(request seed, index of the completion)

The first completion is thus the same for n = 1 and n = 4, and unseeded requests repeat when an engine is made again with
the same seed and is given the same requests in the same order.
"""

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def derive_seed(seed: int, index: int) -> int:
    """The seed of stream `index` under `seed`: the SplitMix64 finalizer over two rounds, one for each number."""
    return _mix((_mix((seed + _GOLDEN_GAMMA) & _MASK) + (index + 1) * _GOLDEN_GAMMA) & _MASK)


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
