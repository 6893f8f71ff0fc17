"""Gemma 3 through LLM: a folder with weights, tokenizer and template, by text, chat and stream, beside transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.api.llm import LLM
from holdfast.engine.admission import Message
from holdfast.request.sampling_params import SamplingParams
from loading.tiny_models import save_tiny
from text.tokenizer_cases import gemma, write_folder

TEMPLATE = (
    "{{ bos_token }}{%- set ns = namespace(first='') -%}"
    "{%- if messages[0].role == 'system' -%}"
    "{%- set ns.first = messages[0].content + '\n\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('turns must alternate') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ ns.first if loop.first else '' }}{{ message.content | trim + '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
CHAT: list[Message] = [{"role": "system", "content": "this is a test"}, {"role": "user", "content": " hello  world "}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gemma")
    vocab_size = gemma().get_vocab_size()
    theirs = save_tiny("gemma3", path, vocab_size=vocab_size, bos_token_id=2, eos_token_id=1)
    write_folder(path, "gemma", chat_template=TEMPLATE)
    end = gemma().token_to_id("<end_of_turn>")
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 2, "eos_token_id": [1, end]}))
    return path, theirs


def answer(theirs: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_llm_gemma3_prompts_begin_with_one_bos(folder) -> None:
    path, theirs = folder
    llm, native = LLM(model=str(path), **OPTIONS), gemma()
    said, chatted = llm.generate("hello world", GREEDY)[0], llm.chat(CHAT, GREEDY)[0]
    turns = "<start_of_turn>user\nthis is a test\n\nhello  world<end_of_turn>\n<start_of_turn>model\n"
    assert said.prompt_token_ids == [2, *native.encode("hello world", add_special_tokens=False).ids]
    assert chatted.prompt_token_ids == [2, *native.encode(turns, add_special_tokens=False).ids]
    for output in (said, chatted):
        expected = answer(theirs, output.prompt_token_ids, 24)
        assert list(output.outputs[0].token_ids) == expected
        before_bytes = [part.partition("\ufffd")[0] for part in (output.outputs[0].text, native.decode(expected))]
        assert before_bytes[0] == before_bytes[1]
    llm.shutdown()


def test_llm_gemma3_stream_adds_up_to_the_answer(folder) -> None:
    """Spaces at the start of a token are part of the text, also of the first one."""
    llm = LLM(model=str(folder[0]), **OPTIONS)
    whole = llm.generate("hello", GREEDY)[0].outputs[0].text
    pieces = [delta.text for delta in llm.stream("hello", GREEDY)]
    assert "".join(pieces) == whole
    assert len(pieces) > 5
    llm.shutdown()


def test_llm_gemma3_both_end_tokens_stop_an_answer(folder) -> None:
    llm = LLM(model=str(folder[0]), **OPTIONS)
    for end in (1, gemma().token_to_id("<end_of_turn>") or 0):
        biased = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={end: 100.0})
        output = llm.generate("hello", biased)[0].outputs[0]
        assert (output.finish_reason, output.text) == ("stop", "")
    llm.shutdown()
