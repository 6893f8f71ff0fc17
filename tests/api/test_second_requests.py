"""The second of everything in the API: prompt, params, completion, conversation, request, abort, call after call."""

import pytest

from engine.fakes import HIDDEN_SIZE, make_engine
from holdfast.api.llm import LLM
from holdfast.api.llm_engine import LLMEngine
from holdfast.engine.engine import Engine
from holdfast.engine.pooling import Pooling
from holdfast.loading.planning.open_model import PoolingSettings
from holdfast.request.sampling_params import SamplingParams

PROMPTS = ["one prompt", "another one, longer than a page", "third"]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=number) for number in (2, 5, 3)]
SAMPLED = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=6)


def engine() -> Engine:
    return make_engine(pooling=Pooling(PoolingSettings(is_embedding=True), "fake", HIDDEN_SIZE))


def texts(outputs) -> list[list[str]]:
    return [[one.text for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[str]]:
    """What each prompt is answered with its own params, by an engine of its own."""
    return {
        prompt: texts(LLM.from_engine(engine()).generate(prompt, params, progress=False))[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    }


def test_llm_prompts_have_their_own_params(alone):
    llm = LLM.from_engine(engine())
    for prompts in (PROMPTS, PROMPTS[::-1]):
        params = [PARAMS[PROMPTS.index(prompt)] for prompt in prompts]
        outputs = llm.generate(prompts, params, progress=False)
        assert texts(outputs) == [alone[prompt] for prompt in prompts]
        assert [output.prompt for output in outputs] == prompts
        assert [len(output.outputs[0].token_ids) for output in outputs] == [own.max_tokens for own in params]
        assert len({output.request_id for output in outputs}) == 3
    llm.shutdown()
    llm.shutdown()


def test_llm_wrong_prompt_is_named_by_its_place():
    llm = LLM.from_engine(engine())
    with pytest.raises(Exception, match="prompt 1: "):
        llm.generate(["fine", "", "fine"], PARAMS[0], progress=False)
    assert llm.stats().num_requests == 0


def test_llm_completions_of_each_prompt_stay_together():
    llm = LLM.from_engine(engine())
    outputs = llm.generate(PROMPTS, SAMPLED, progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        [single] = LLM.from_engine(engine()).generate(prompt, SAMPLED, progress=False)
        assert texts([output]) == texts([single])
        streamed = ["", "", ""]
        for delta in LLM.from_engine(engine()).stream(prompt, SAMPLED):
            streamed[delta.index] += delta.text
        assert [streamed] == texts([output])


def test_llm_conversations_are_answered_one_by_one():
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    together = LLM.from_engine(engine()).chat(chats, PARAMS, progress=False)
    single = [
        LLM.from_engine(engine()).chat(chat, own, progress=False)[0] for chat, own in zip(chats, PARAMS, strict=True)
    ]
    assert texts(together) == texts(single)


def test_llm_cached_tokens_are_those_of_each_prompt():
    """For answers, embeddings and scores; a page has four tokens, and the last token is always computed."""
    llm = LLM.from_engine(engine())

    def cached(prompt: str) -> int:
        return (len(prompt) - 1) // 4 * 4

    first, second = (llm.generate(PROMPTS, PARAMS, progress=False) for _ in range(2))
    assert [output.num_cached_tokens for output in first] == [0, 0, 0]
    assert [output.num_cached_tokens for output in second] == [cached(prompt) for prompt in PROMPTS]
    embedded = llm.embed(PROMPTS, progress=False)
    assert [output.num_cached_tokens for output in embedded] == [cached(prompt) for prompt in PROMPTS]
    scores = llm.score(PROMPTS[0], PROMPTS[1:], progress=False)
    assert [output.num_cached_tokens for output in scores] == [
        cached(PROMPTS[0]) + cached(prompt) for prompt in PROMPTS[1:]
    ]
    ids = [list(PROMPTS[0].encode() + prompt.encode()) for prompt in PROMPTS[1:]]
    assert [output.prompt_token_ids for output in scores] == ids


def test_llm_engine_tells_each_request_under_its_name(alone):
    own = LLMEngine.from_engine(engine())
    for name, prompt, params in zip("abc", PROMPTS, PARAMS, strict=True):
        assert own.add_request(name, prompt, params) == name
    assert own.get_num_unfinished_requests() == 3
    last = {}
    while own.has_unfinished_requests():
        last |= {output.request_id: output for output in own.step()}
    assert {name: texts([output])[0] for name, output in last.items()} == dict(zip("abc", alone.values(), strict=True))
    assert all(output.finished for output in last.values())
    assert own.get_num_unfinished_requests() == 0
    own.shutdown()
    own.shutdown()


def test_llm_engine_abort_of_several_leaves_the_others(alone):
    own = LLMEngine.from_engine(engine())
    for name, prompt, params in zip("abc", PROMPTS, PARAMS, strict=True):
        own.add_request(name, prompt, params)
    own.step()
    own.abort_request(["a", "no caller", "c"])
    own.abort_request("a")
    assert own.get_num_unfinished_requests() == 1
    outputs = []
    while own.has_unfinished_requests():
        outputs += own.step()
    assert {output.request_id for output in outputs} == {"b"}
    assert texts(outputs[-1:])[0] == alone[PROMPTS[1]]
    assert own.stats().kv_usage == 0
