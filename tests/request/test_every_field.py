"""Every field of a message travels and makes a difference: flipped one by one, alone and as the second of two."""

import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from for_each import for_each
from holdfast.config import Limits
from holdfast.engine.messages import (
    CoreFacts,
    CoreOutputs,
    CoreRequest,
    CoreStats,
    Ending,
    Ready,
    SequenceOutput,
    Submit,
    decode_message,
    encode_message,
)
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import TokenLogprobs
from holdfast.request.step import Admitted, RowCopy, Step, StepItem
from holdfast.request.structured import StructuredOutputs
from request.frames import decode_step, encode_step

PARAMS = SamplingParams()
FLIPPED_PARAMS: dict[str, object] = {
    "n": 3,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.25,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "logit_bias": {3: 1.5, 70000: -100.0},
    "allowed_token_ids": (5, 2, 9),
    "bad_words": ("no", "é"),
    "structured_outputs": StructuredOutputs(choice=("yes", "no")),
    "seed": 2**64 - 1,
    "stop": ("\n", "end"),
    "stop_token_ids": (8, 1),
    "ignore_eos": True,
    "max_tokens": 1,
    "min_tokens": 4,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "detokenize": False,
    "truncate_prompt_tokens": -1,
    "skip_reading_prefix_cache": True,
    "priority": -3,
    "output_kind": "delta",
}
MEASURED = (TokenLogprobs(4, -0.5, 2, ((7, -0.25), (4, -0.5))), TokenLogprobs(7, -0.125, 1, ()))
ADMITTED = Admitted(1, 77, (5, 6, 7), 2, PARAMS, 9)
ITEM = StepItem(0, 9, 1, True)
STEP = Step(3, (), (), (ITEM,))
REQUEST = CoreRequest(7, (5, 6), PARAMS, 11, 4)
OUTPUT = SequenceOutput(3, (5,), prompt_logprobs=MEASURED[:1])
FACTS = CoreFacts(Limits(4, 32, 128, 16, 6), 100, 264, (2, 5), 64)


def step_of_admitted(first: Admitted, second: Admitted) -> Step:
    return Step(3, (), (first, second), (ITEM,))


def flipped(table: dict[str, object], base: Any) -> list[Any]:
    """Copies of a value, each with one field changed; a field without an entry in the table fails."""
    names = [one.name for one in fields(base)] if is_dataclass(base) else list(base._fields)
    assert sorted(table) == sorted(names), "a field has no flipped value"
    made = [
        replace(base, **{name: value}) if is_dataclass(base) else base._replace(**{name: value})
        for name, value in table.items()
    ]
    assert all(one != base for one in made)
    return made


CASES: dict[str, tuple[object, list[Any], Callable[[Any, Any], object]]] = {
    "admitted": (
        ADMITTED,
        flipped(
            {
                "slot": 2,
                "sequence_id": 2**40,
                "token_ids": (5, 6, 8),
                "num_prompt_tokens": 3,
                "params": SamplingParams(top_k=2),
                "seed": 2**64 - 1,
                "bad_word_ids": ((1, 2), (3,)),
                "num_stored": 2,
                "fork_of": 0,
                "is_pooled": True,
                "copies": (RowCopy(2, 7, 9, 3),),
                "state_from": 0,
            },
            ADMITTED,
        ),
        step_of_admitted,
    ),
    "item": (
        ITEM,
        flipped(
            {
                "slot": 1,
                "start": 2,
                "num_new_tokens": 3,
                "samples": False,
                "pages": ((4, 5), (-1, 6)),
                "proposals": (8, 9),
                "state_to": 0,
            },
            ITEM,
        ),
        lambda first, second: Step(3, (), (), (first, second)),
    ),
    "request": (
        REQUEST,
        flipped(
            {
                "sequence_id": 2**40,
                "token_ids": (5, 6, 7),
                "params": SamplingParams(top_k=2),
                "seed": 2**64 - 1,
                "max_tokens": 5,
                "cache_salt": b"\x00salt",
                "use_prefix_cache": False,
                "bad_word_ids": ((1, 2), (3,)),
                "is_pooled": True,
            },
            REQUEST,
        ),
        lambda first, second: Submit((first, second)),
    ),
    "output": (
        OUTPUT,
        flipped(
            {
                "sequence_id": 2**40,
                "token_ids": (5, 6),
                "logprobs": MEASURED,
                "ending": Ending("stop", "text"),
                "num_cached_tokens": 16,
                "num_preemptions": 2,
                "queue_seconds": 0.75,
                "prompt_start": 4,
                "prompt_logprobs": MEASURED,
                "pooled": struct.pack("<2f", 1.5, -2.0),
            },
            OUTPUT,
        ),
        lambda first, second: CoreOutputs((first, second)),
    ),
    "stats": (
        CoreStats(),
        flipped({one.name: 0.5 if one.name == "kv_usage" else 2**40 for one in fields(CoreStats)}, CoreStats()),
        lambda first, second: CoreOutputs((), second),
    ),
    "facts": (
        FACTS,
        [
            *flipped(
                {
                    "limits": Limits(4, 32, 128, 16, 7),
                    "longest": 99,
                    "vocab_size": 265,
                    "eos_token_ids": (2,),
                    "max_queue": 65,
                },
                FACTS,
            ),
            *(replace(FACTS, limits=replace(FACTS.limits, **{one.name: 17})) for one in fields(Limits)),
        ],
        lambda first, second: Ready(second),
    ),
    "ending": (
        Ending("stop"),
        [Ending(reason) for reason in ("length", "abort", "error")]
        + [Ending("stop", 6), Ending("stop", ""), Ending("stop", "é"), Ending("error", error="why")],
        lambda first, second: CoreOutputs((OUTPUT._replace(ending=first), OUTPUT._replace(ending=second))),
    ),
}


def sent(message: Any) -> tuple[bytes, object]:
    if isinstance(message, Step):
        frame = encode_step(message)
        return frame, decode_step(frame)
    frame = encode_message(message, 5)
    return frame, decode_message(frame)[1]


@for_each("name", CASES)
def test_message_field_round_trips_alone_and_second(name: str) -> None:
    base, changed, made = CASES[name]
    messages: list[object] = []
    frames: set[bytes] = set()
    for one in (base, *changed):
        for message in (made(base, one), made(one, base), made(one, one)):
            frame, found = sent(message)
            assert found == message
            frames.add(frame)
            if message not in messages:
                messages.append(message)
    assert len(messages) > len(changed)
    assert len(frames) == len(messages), "two messages are the same bytes"


@for_each("name", FLIPPED_PARAMS)
def test_sampling_param_round_trips_in_step(name: str) -> None:
    assert set(FLIPPED_PARAMS) == {one.name for one in fields(SamplingParams)}
    changed = SamplingParams(**{name: FLIPPED_PARAMS[name]})  # type: ignore[arg-type]
    assert changed != PARAMS
    step = Step(3, (), tuple(ADMITTED._replace(params=params) for params in (changed, PARAMS, changed)))
    found = [one.params for one in decode_step(encode_step(step)).admitted]
    assert found == [changed, PARAMS, changed]
    assert getattr(found[2], name) == FLIPPED_PARAMS[name]
    assert changed.clone() == changed
    assert SamplingParams(**{name: getattr(changed, name)}) == changed  # type: ignore[arg-type]
    later = SamplingParams()
    setattr(later, name, FLIPPED_PARAMS[name])
    assert later == changed
    setattr(later, name, getattr(PARAMS, name))
    assert later == PARAMS
