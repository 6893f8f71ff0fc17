"""The world that a simulation runs in: limits and pool from a seed, the fake model, and what a client knows."""

from dataclasses import dataclass, field
from random import Random

from holdfast.cache.prefix import strong_hash
from holdfast.config import Limits
from holdfast.request.sequence import Sequence

VOCABULARY = 50
MASK = 2**64 - 1


def mix(value: int, token_id: int) -> int:
    """The fake model: 64 bits that depend on every token so far."""
    value = (value * 6364136223846793005 + token_id * 2654435761 + 1442695040888963407) & MASK
    return value ^ (value >> 29)


def first_value(salt: bytes) -> int:
    """What stands before the first token."""
    return mix(int.from_bytes(salt, "big"), 1)


def next_token(value: int) -> int:
    """The fake model's choice."""
    return (value >> 32) % VOCABULARY


def solo_run(prompt: list[int], salt: bytes, num_tokens: int) -> list[int]:
    """The tokens of a sequence that has the machine for itself, without pages at all."""
    tokens, value = [], first_value(salt)
    for position in range(num_tokens):
        tokens.append(prompt[position] if position < len(prompt) else next_token(value))
        value = mix(value, tokens[-1])
    return tokens


def colliding_hash(data: bytes) -> bytes:
    """Sixteen names for everything, which see nothing but the last token of a page: not its parent, not its salt."""
    return bytes([strong_hash(data[-8:])[0] & 15])


@dataclass(frozen=True)
class World:
    """What one simulation is about."""

    limits: Limits
    num_pages: int
    max_queue: int
    caches_prefixes: bool = True
    collides: bool = False
    long_share: float = 0.9
    """How many sequences take all the tokens that they may."""
    abort_share: float = 0.05
    """In how many rounds somebody goes away, once before the step and once inside it."""

    @classmethod
    def from_seed(cls, seed: int) -> "World":
        """A small pool, so that everything is scarce; in every other world all want to grow at once."""
        rng = Random(f"world {seed}")
        is_tight = seed % 2 == 0
        page_tokens = rng.choice((1, 2, 4, 4) if is_tight else (1, 2, 4, 8))
        num_pages = rng.randint(8, 24)
        capacity = num_pages * page_tokens
        limits = Limits(
            max_num_seqs=rng.choice((4, 8, 16) if is_tight else (1, 2, 4, 8)),
            max_num_batched_tokens=rng.choice((8, 16, 64) if is_tight else (1, 3, page_tokens + 1, 16, 64)),
            max_model_len=rng.choice((capacity, capacity // 2, capacity // 2 + 1, capacity // 3, capacity + 3)),
            page_tokens=page_tokens,
        )
        return cls(
            limits,
            num_pages,
            max_queue=rng.randint(2, 8),
            caches_prefixes=rng.random() < 0.9,
            collides=rng.random() < 0.3,
            long_share=0.9 if is_tight else rng.choice((0.1, 0.5, 0.9)),
            abort_share=rng.choice((0.02, 0.1) if is_tight else (0.02, 0.1, 0.3)),
        )


@dataclass(eq=False, slots=True)
class Client:
    """A sequence with what is known about it from outside."""

    sequence: Sequence
    prompt: list[int]
    num_outputs: int
    """How many tokens it will take before it ends."""
    values: list[list[int]] = field(default_factory=list)
    """The truth: what each position of each of its pages holds."""
    last_value: int = 0
    num_values: int = 0
    is_running: bool = False
    num_preemptions: int = 0
    epoch: int = 0
    """Which life of the prefix cache it was last admitted in."""
    num_given: int = 0
    """Tokens of output that it was given."""
    num_run: int = 0
    """Positions that steps computed for it, every time that they did ..."""
    num_found: int = 0
    """... those that it found cached when it was admitted ..."""
    num_lost: int = 0
    """... and those of both that preemptions took away."""

    @property
    def num_held(self) -> int:
        """Positions that are there for it now."""
        return self.num_run + self.num_found - self.num_lost

    def learn(self, page_tokens: int) -> None:
        """Extends the truth to all of its tokens."""
        for token_id in self.sequence.token_ids[self.num_values :]:
            self.last_value = mix(self.last_value, token_id)
            if self.num_values % page_tokens == 0:
                self.values.append([])
            self.values[-1].append(self.last_value)
            self.num_values += 1
