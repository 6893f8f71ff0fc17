"""The world that a simulation runs in: limits and pool from a seed, the fake model, and what a client knows."""

from dataclasses import dataclass, field, replace
from math import lcm
from random import Random

from engine.shadow import ShadowGroup, Truth
from holdfast.cache.groups import CacheGroup, block_tokens
from holdfast.cache.prefix import strong_hash
from holdfast.cache.states import StateRule
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
    """Share of rounds with an abort, before and inside the step."""
    shadows: tuple[ShadowGroup, ...] = ()
    """Left out: one group, whole contexts, of pages of limits.page_tokens."""
    run_ahead: int = 0
    """Most steps launched before the oldest is collected."""
    is_late: bool = False
    """Steps run at any moment before they are collected, stops are learned late, and everything is forgotten at times."""
    guess_share: float = 0.0
    """How many sequences may speculate."""
    travels: bool = False
    """Steps go through bytes."""
    has_priorities: bool = False
    """Not all sequences are equally important."""
    num_stages: int = 1
    """Stages of a pipeline."""
    is_invariant: bool = False
    """How a row is computed does not depend on others."""
    comes_together: bool = False
    """Bursts of sequences with equal prompts or equal beginnings arrive."""
    is_paced: bool = False
    """Steps have limits on the rows of prompts."""
    state_rule: StateRule | None = None
    """There are states outside the pages."""

    def __post_init__(self) -> None:
        if not self.shadows:
            whole = ShadowGroup(CacheGroup("whole context", self.limits.page_tokens))
            object.__setattr__(self, "shadows", (whole,))

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return tuple(own.group for own in self.shadows)

    @property
    def block(self) -> int:
        """Tokens of a block of the prefix cache."""
        return block_tokens(self.groups, self.grid)

    @property
    def grid(self) -> int:
        """Tokens that prompts are cut at multiples of."""
        return 1 if self.state_rule is None else self.state_rule.grid

    @property
    def can_hit(self) -> bool:
        """Prefixes can be served: there are rows, and each state begins anew somewhere."""
        has_rows = any(group.page_tokens for group in self.groups)
        if self.state_rule is not None and not self.state_rule.num_snapshots:
            return False
        return self.caches_prefixes and has_rows and all(group.state_period for group in self.groups if group.is_state)

    def most_pages(self, num_tokens: int) -> int:
        """What a sequence that computes so many tokens may hold in all groups."""
        budget = self.limits.max_num_batched_tokens
        return sum(own.most_pages(num_tokens, budget) for own in self.shadows)

    @classmethod
    def from_seed(cls, seed: int) -> "World":
        """Half of the worlds have one group, for the whole context, as most models do; the others what groups can be."""
        world, rng = cls.plain(seed), Random(f"groups {seed}")
        if seed % 4 < 2:
            return world
        shadows = random_groups(rng, world.limits.page_tokens, world.limits.max_model_len)
        block = block_tokens([own.group for own in shadows])
        max_model_len = max(world.limits.max_model_len, rng.randint(3, 5) * block + rng.choice((0, 1, 7)))
        if all(own.group.window is not None for own in shadows) and rng.random() < 0.5:
            max_model_len = 40 * block  # so that links outnumber pages
        limits = replace(world.limits, max_model_len=max_model_len)
        world = replace(world, limits=limits, shadows=shadows)
        # Some pools hold several of the longest sequences, some not even one.
        num_pages = int(world.most_pages(max_model_len) * rng.choice((0.7, 1, 1, 1.5, 2, 4)))
        return replace(world, num_pages=max(num_pages, 4))

    @classmethod
    def late(cls, seed: int) -> "World":
        """Like `seeded`, with late results: up to two steps ahead; half of those that can rewind draft."""
        return cls._made_late(cls.from_seed(seed), seed)

    @classmethod
    def piped(cls, seed: int) -> "World":
        """Like `late`, in a pipeline of two to four stages; every fourth world has priorities."""
        world, num_stages = cls._made_late(cls.from_seed(seed), seed), Random(f"stages {seed}").choice((2, 2, 3, 4))
        return replace(world, num_stages=num_stages, run_ahead=num_stages - 1, has_priorities=seed % 4 == 3)

    @classmethod
    def compressed(cls, seed: int) -> "World":
        """A window and rows of several tokens, unfinished ones beside the pages; in every other world results come late."""
        world, rng = cls.plain(seed), Random(f"compressed {seed}")
        shadows = compressed_groups(rng)
        block = block_tokens([own.group for own in shadows])
        longest = max(rng.randint(3, 6) * block, rng.randint(1, 3) * max(own.group.page_tokens for own in shadows))
        longest += rng.choice((0, 1, 3))
        limits = replace(world.limits, max_model_len=longest, page_tokens=1)
        world = replace(world, limits=limits, shadows=shadows, caches_prefixes=seed % 8 != 7)
        num_pages = int(world.most_pages(longest) * rng.choice((1, 1, 1.2, 1.5, 3)))
        world = replace(world, num_pages=max(num_pages, 4))
        return cls._made_late(world, seed) if seed % 2 else world

    @classmethod
    def near(cls, seed: int) -> "World":
        """Pages of the first tokens and the newest block beside others; half have late results, half bursts of equal prompts."""
        world, rng = cls.plain(seed), Random(f"near {seed}")
        shadows = near_groups(rng, world.limits.page_tokens)
        block = block_tokens([own.group for own in shadows])
        longest = max(world.limits.max_model_len, rng.randint(3, 5) * block + rng.choice((0, 1, 3)))
        world = replace(world, limits=replace(world.limits, max_model_len=longest), shadows=shadows)
        num_pages = int(world.most_pages(longest) * rng.choice((1, 1, 1.2, 1.5, 3)))
        world = replace(world, num_pages=max(num_pages, 4), comes_together=seed % 4 > 1)
        return cls._made_late(world, seed) if seed % 2 else world

    @classmethod
    def unequal(cls, seed: int) -> "World":
        """Any of these, with sequences that are more important than others."""
        makers = (cls.from_seed, cls.late, cls.from_seed, cls.compressed)
        return replace(makers[seed // 2 % 4](seed), has_priorities=True)

    @classmethod
    def invariant(cls, seed: int) -> "World":
        """Any of these, invariant and without drafts."""
        makers = (cls.from_seed, cls.late, cls.piped, cls.unequal)
        return replace(makers[seed // 2 % 4](seed), guess_share=0.0, is_invariant=True)

    @classmethod
    def together(cls, seed: int) -> "World":
        """Any of these, with bursts of equal prompts and equal beginnings."""
        makers = (cls.from_seed, cls.late, cls.compressed, cls.unequal, cls.piped, cls.invariant)
        # Each maker looks at the lowest bits of its seed, so it gets all of them.
        world = makers[seed % 6](seed // 6)
        rng = Random(f"together {seed}")
        limits = world.limits
        num_more = rng.choice((0, 0, 4, 12))
        limits = replace(
            limits,
            max_num_seqs=limits.max_num_seqs + num_more,
            max_sampled_rows=limits.max_sampled_rows + num_more if limits.max_sampled_rows else limits.max_sampled_rows,
        )
        num_pages = int(world.num_pages * rng.choice((1, 1, 1.5, 3)))
        return replace(world, limits=limits, num_pages=num_pages, max_queue=12, comes_together=True)

    @classmethod
    def paced(cls, seed: int) -> "World":
        """Any of these, with a random limit on the rows of prompts in most steps."""
        makers = (cls.from_seed, cls.late, cls.compressed, cls.unequal, cls.piped, cls.invariant, cls.together)
        return replace(makers[seed % 7](seed // 7), is_paced=True)

    @classmethod
    def stateful(cls, seed: int) -> "World":
        """Any of these with whole contexts, or windows too, and states outside the pages with few snapshots."""
        makers = (cls.plain, cls.late, cls.unequal, cls.piped, cls.together, cls.paced)
        world, rng = makers[seed % 6](seed // 6), Random(f"states {seed}")
        page, shadows = world.limits.page_tokens, [ShadowGroup(CacheGroup("whole context", world.limits.page_tokens))]
        if rng.random() < 0.2:
            window = rng.choice((1, page, 2 * page + 1))
            shadows.append(ShadowGroup(CacheGroup(f"window of {window}", page, window)))
        grid = rng.choice((2, 3, 4, 4, 8))
        block = block_tokens([own.group for own in shadows], grid)
        rule = StateRule(
            grid, rng.choice((0, 1, 1, 2, 2, 3, 5, 16)), rng.choice((1, block, 2 * block, 3 * block, 1000))
        )
        limits = world.limits
        limits = replace(
            limits,
            max_num_batched_tokens=max(limits.max_num_batched_tokens, grid + rng.choice((0, 0, 1, 3))),
            max_model_len=max(rng.randint(3, 6) * block + rng.choice((0, 1, 2)), limits.max_model_len // 2),
        )
        world = replace(world, limits=limits, shadows=tuple(shadows), guess_share=0.0, state_rule=rule)
        num_pages = int(world.most_pages(limits.max_model_len) * rng.choice((1, 1, 1.5, 2, 4)))
        return replace(world, num_pages=max(num_pages, 4))

    @classmethod
    def drafting(cls, seed: int) -> "World":
        """Any of those with states outside the pages, with draft tokens."""
        rng, number = Random(f"drafting {seed}"), seed
        while (world := cls.stateful(number)).is_invariant:
            number += 1000
        assert world.state_rule is not None, f"{seed=} has no states"
        limits = replace(world.limits, max_sampled_rows=world.limits.max_num_seqs + rng.choice((1, 4, 64)))
        rule = replace(world.state_rule, num_drafts=rng.choice((1, 2, 4)))
        share = rng.choice((0.3, 1.0, 1.0))
        return replace(world, limits=limits, state_rule=rule, guess_share=share, is_late=True)

    @classmethod
    def _made_late(cls, world: "World", seed: int) -> "World":
        rng = Random(f"late {seed}")
        run_ahead = rng.choice((0, 1, 1, 1, 2, 2))
        can_rewind = not any(group.has_state for group in world.groups)
        guess_share = rng.choice((0.0, 0.0, 0.3, 1.0)) if can_rewind else 0.0
        limits = world.limits
        if guess_share:
            limits = replace(limits, max_sampled_rows=limits.max_num_seqs + rng.choice((0, 1, 4, 64)))
        travels = rng.random() < 0.25
        return replace(
            world, limits=limits, run_ahead=run_ahead, is_late=True, guess_share=guess_share, travels=travels
        )

    @classmethod
    def plain(cls, seed: int) -> "World":
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


def random_groups(rng: Random, page: int, context: int) -> tuple[ShadowGroup, ...]:
    """One to four groups: whole contexts, windows of all kinds, rows of many tokens, and perhaps a state."""
    windows = (1, 2, max(page - 1, 1), page, page + 1, 2 * page + 1, 3 * page, context + 5)
    kinds = rng.choice(
        ("w", "w", "hw", "hw", "hw", "hww", "ww", "4", "4h", "4w", "h4w", "8h", "8w", "hs", "ws", "s", "h4s")
    )
    shadows: list[ShadowGroup] = []
    for index, kind in enumerate(kinds):
        if kind == "s":
            continue
        if kind in "48":
            ratio = 4 if kind == "4" else 128
            window = rng.choice((None, None, ratio + 1, 3 * ratio))
            group = CacheGroup(f"ratio {ratio} ({index})", ratio * rng.choice((1, 2) if ratio == 4 else (1,)), window)
            shadows.append(ShadowGroup(group, ratio))
        else:
            window = rng.choice(windows) if kind == "w" else None
            name = f"{'whole context' if window is None else f'window of {window}'} ({index})"
            shadows.append(ShadowGroup(CacheGroup(name, page * rng.choice((1, 1, 2)), window)))
    period = lcm(*(own.ratio for own in shadows))
    if "s" in kinds or period > 1:
        # Unfinished rows begin anew with each row; a state of all tokens never does.
        block = block_tokens([own.group for own in shadows])
        period = rng.choice((0, block, 2 * block)) if "s" in kinds else period
        state = CacheGroup("state", 0, state_pages=rng.choice((1, 2)), state_period=period)
        shadows.append(ShadowGroup(state))
    rng.shuffle(shadows)
    return tuple(shadows)


def near_groups(rng: Random, page: int) -> tuple[ShadowGroup, ...]:
    """Whole contexts, windows or both; and behind them blocks of their own pages, of which the first may be kept."""
    kinds, shadows = rng.choice(("h", "h", "hw", "w")), list[ShadowGroup]()
    for kind in kinds:
        window = rng.choice((1, page + 1, 3 * page)) if kind == "w" else None
        shadows.append(ShadowGroup(CacheGroup(f"codes ({kind})", page, window)))
    page_tokens, num_pages = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 4))
    kept_pages = rng.randint(1, num_pages) if "h" in kinds else rng.randint(0, num_pages)
    near = CacheGroup("near", page_tokens, num_pages * page_tokens, is_blocked=True, kept_pages=kept_pages)
    return (*shadows, ShadowGroup(near))


def compressed_groups(rng: Random) -> tuple[ShadowGroup, ...]:
    """A window, and rows of one or two ratios; those of the smaller one overlap in most worlds."""
    page, ratio = rng.choice((1, 2, 4)), rng.choice((2, 4))
    again = ratio if rng.random() < 0.8 else 0
    reach = rng.choice((1, 2, page + 1, 2 * page + 1, 8))
    shadows = [ShadowGroup(CacheGroup(f"window of {reach}", page, reach + again), 1, reach)]
    for own, tokens_again in ((ratio, again), (2 * ratio, 0)):
        page_tokens = own * rng.choice((1, 2, 2, 4, 8))
        group = CacheGroup(f"entries of {own}", page_tokens, tokens_per_row=own, tokens_again=tokens_again)
        shadows.append(ShadowGroup(group, own))
    return tuple(shadows[: rng.choice((2, 3, 3))])


@dataclass(eq=False, slots=True)
class Client:
    """A sequence with what is known about it from outside."""

    sequence: Sequence
    prompt: list[int]
    num_outputs: int
    """How many tokens it will take before it ends."""
    truth: Truth
    last_value: int = 0
    """Position of the last token of the truth."""
    tokens: list[int] = field(default_factory=list)
    """Those that the truth knows: the prompt, and what the model says."""
    lag: int = 0
    """Rounds between its last token and the moment when that is known."""
    num_rounds_left: int | None = None
    """Rounds left after that token."""
    num_final: int | None = None
    """Its tokens, once it has ended."""
    num_flying: int = 0
    """Positions in flight."""
    num_coming: int = 0
    """Tokens that steps in flight choose."""
    guesses: tuple[int, ...] = ()
    """What was last proposed."""
    is_placed: bool = False
    """The device has it in a slot."""
    is_running: bool = False
    num_preemptions: int = 0
    epoch: int = 0
    """Which life of the prefix cache it last started in."""
    is_anew: bool = False
    """It starts from its first token again, where it runs."""
    basis: int = 0
    """The step in flight that computes what it started on; 0: none."""
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

    def learn(self, num_tokens: int) -> None:
        """Extends the truth to so many tokens."""
        for position in range(len(self.tokens), num_tokens):
            is_prompt = position < len(self.prompt)
            self.tokens.append(self.prompt[position] if is_prompt else next_token(self.last_value))
            self.last_value = mix(self.last_value, self.tokens[-1])
            self.truth.append(self.last_value)
