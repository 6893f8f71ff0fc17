"""Isolation: no request learns, by a hit or by a wait, what a request with another salt has cached or is computing."""

from dataclasses import replace

from engine.fakes import make_engine, run_all
from engine.scheduling import has_work, run, sequence
from for_each import for_each
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.admission import PreparedRequest
from holdfast.engine.engine import Engine
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
TEXT = "a secret that fills several pages of the cache"
SALTS = (None, "a", "b", "ab", "\x00", "a\x00b")


def as_prompt(engine: Engine, salt: str | None) -> PreparedRequest:
    return engine.prepare(TEXT, GREEDY, cache_salt=salt)


def as_dict(engine: Engine, salt: str | None) -> PreparedRequest:
    own = {} if salt is None else {"cache_salt": salt}
    return engine.prepare({"prompt": TEXT, **own}, GREEDY)


def as_ids(engine: Engine, salt: str | None) -> PreparedRequest:
    own = {} if salt is None else {"cache_salt": salt}
    return engine.prepare({"prompt_token_ids": list(TEXT.encode()), **own}, GREEDY)


def as_chat(engine: Engine, salt: str | None) -> PreparedRequest:
    return engine.prepare_chat([{"role": "user", "content": TEXT}], GREEDY, cache_salt=salt)


def as_pooled(engine: Engine, salt: str | None) -> PreparedRequest:
    return engine.prepare_pooled(TEXT, cache_salt=salt)


def as_pooled_dict(engine: Engine, salt: str | None) -> PreparedRequest:
    own = {} if salt is None else {"cache_salt": salt}
    return engine.prepare_pooled({"prompt": TEXT, **own})


WAYS = (as_prompt, as_dict, as_ids, as_chat, as_pooled, as_pooled_dict)


def cached_tokens(engine: Engine, prepared: PreparedRequest) -> int:
    engine.submit(prepared, "one")
    return run_all(engine)["one", 0][-1].num_cached_tokens


@for_each("way", WAYS)
def test_hit_needs_the_same_salt(way) -> None:
    engine = make_engine()
    for salt in SALTS:
        assert cached_tokens(engine, way(engine, salt)) == 0, "another salt's pages were found"
    for salt in SALTS:
        assert cached_tokens(engine, way(engine, salt)) >= 44, "its own pages were not found"


def test_salt_of_the_call_replaces_that_of_the_prompt() -> None:
    engine = make_engine()
    prompt = {"prompt": TEXT, "cache_salt": "of the prompt"}
    assert cached_tokens(engine, engine.prepare(prompt, GREEDY, cache_salt="of the key")) == 0
    assert cached_tokens(engine, as_prompt(engine, "of the prompt")) == 0
    assert cached_tokens(engine, as_prompt(engine, "of the key")) == 44
    assert cached_tokens(engine, engine.prepare_pooled(prompt, cache_salt="of the key")) == 44


@for_each("n", [1, 3])
@for_each("salts", [(None, "a"), ("a", None), ("a", "b")])
def test_equal_prompts_of_two_salts_share_no_row(salts: tuple[str | None, str | None], n: int) -> None:
    engine = make_engine(max_num_batched_tokens=128, run_ahead=0)
    for name, salt in zip(("one", "two"), salts, strict=True):
        engine.submit(engine.prepare(TEXT, replace(GREEDY, n=n), cache_salt=salt), name)
    found = run_all(engine)
    assert [found[name, 0][-1].num_cached_tokens for name in ("one", "two")] == [0, 0]
    # Both computed their prompt in the first step; only completions of the same request fork.
    first = {sequence_id: num_tokens for sequence_id, start, num_tokens in engine.runner.steps[0] if start == 0}
    assert first == {0: len(TEXT), n: len(TEXT)}


def steps_of(first_salt: bytes, first: list[int], tokens: list[int]) -> list[list[tuple[int, int]]]:
    """Rows of a request with salt b in each step, beside one with another salt or with another prompt."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=6, max_model_len=64, page_tokens=2)
    scheduler = Scheduler(limits, 64, True, 10, prefix_root=b"root")
    scheduler.add(sequence(0, first, max_tokens=8, cache_salt=first_salt))
    run(scheduler)
    scheduler.add(sequence(1, tokens, max_tokens=8, cache_salt=b"b"))
    found = []
    while has_work(scheduler):
        # Prompts share four rows, so that the second is admitted while the first is still read.
        step = run(scheduler, max_prompt_rows=4)
        found.append([(item.start, item.num_new_tokens) for item in step.scheduled if item.sequence.sequence_id == 1])
    return found


@for_each("num_common", [2, 4, 7, 11, 15])
def test_steps_do_not_show_what_another_salt_computes(num_common: int) -> None:
    tokens = list(range(20))
    beside = tokens[:num_common] + [99] * (20 - num_common)
    unrelated = steps_of(b"a", [99] * 20, tokens)
    assert steps_of(b"a", beside, tokens) == unrelated
    assert steps_of(b"a", tokens, tokens) == unrelated
    assert steps_of(b"b", tokens, tokens) != unrelated, "of the same salt it waits and shares"


GROUPS = {
    "whole": (CacheGroup("whole", 2),),
    "window": (CacheGroup("window", 2, window=4),),
    "both": (CacheGroup("whole", 4), CacheGroup("window", 2, window=5)),
    "state": (CacheGroup("whole", 2), CacheGroup("state", 0, state_pages=1, state_period=4)),
    "entries": (CacheGroup("window", 2, window=8), CacheGroup("entries", 4, tokens_per_row=4, tokens_again=4)),
}


@for_each("name", GROUPS)
def test_groups_of_every_kind_keep_salts_apart(name: str) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, page_tokens=2)
    scheduler = Scheduler(limits, 200, True, 10, groups=GROUPS[name], prefix_root=b"root")
    kept = {}
    for number, salt in enumerate((b"", b"a", b"b", b"", b"a", b"b")):
        one = sequence(number, list(range(13)), max_tokens=2, cache_salt=salt)
        scheduler.add(one)
        while has_work(scheduler):
            run(scheduler)
        kept.setdefault(salt, []).append(one.num_cached_tokens)
    assert kept == {b"": [0, 12], b"a": [0, 12], b"b": [0, 12]}
    # What is computed again of a hit was found all the same.
    assert (scheduler.num_prefix_query_tokens, scheduler.num_prefix_hit_tokens) == (6 * 13, 3 * 12)
    one = sequence(9, list(range(13)), max_tokens=2, cache_salt=b"a", use_prefix_cache=False)
    scheduler.add(one)
    run(scheduler)
    assert one.num_cached_tokens == 0
    scheduler.check()
