"""Embeddings and scores of tiny models against transformers: end tokens, chunks, files of sentence-transformers, rerankers."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from error_codes import raises_code
from holdfast import LLM, AsyncLLM, PoolingParams, SamplingParams
from holdfast.engine.pooling import RERANK_PREFIX, RERANK_SUFFIX, Reranker
from holdfast.errors import PromptError, RequestError
from holdfast.text.detokenizer import byte_alphabet
from loading.test_pooling_settings import write_modules
from loading.tiny_models import save_tiny

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 256
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_tokens": 4, "kv_cache_memory": "8MB"}
TEXTS = ["a", "What is the capital of France?", "Paris is the capital of France. " * 4, "What is the capital of Chad?"]


def write_tokenizer(folder: Path, adds_end: bool) -> None:
    """Bytes, with an end token after every text as Qwen3-Embedding has it, and the two tokens that a reranker answers with."""
    backend = Backend(models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["yes", "no"])
    if adds_end:
        backend.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[(SPECIAL[0], END)]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder without a head, as Qwen3-Embedding-8B is stored: untied, and with names that lack their prefix."""
    folder = tmp_path_factory.mktemp("models") / "Tiny-Qwen3"
    tiny = save_tiny("qwen3", folder.parent / "whole", vocab_size=264, tie_word_embeddings=False)
    tiny.model.save_pretrained(folder)
    write_tokenizer(folder, adds_end=True)
    write_modules(folder, pooling_mode_lasttoken=True)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, np.ndarray]:
    """What transformers and torch make of the texts: the last hidden state, of unit length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    with torch.no_grad():
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            assert ids[0, -1] == END
            last_H = model(ids).last_hidden_state[0, -1]
            found[text] = torch.nn.functional.normalize(last_H, dim=-1).numpy()
    return found


def test_embed_matches_transformers(llm, expected):
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        vector_H = np.array(output.outputs.embedding, np.float32)
        assert output.prompt_token_ids[-1] == END
        assert float(vector_H @ expected[text]) > 0.99999
        assert np.abs(vector_H - expected[text]).max() < 1e-5
    again = llm.embed(TEXTS, use_tqdm=False)
    assert again[2].num_cached_tokens > 0
    assert np.abs(np.array(again[2].outputs.embedding) - expected[TEXTS[2]]).max() < 1e-5


def test_embed_with_dimensions_cuts_and_normalizes_again(llm, expected):
    [output] = llm.embed(TEXTS[1], PoolingParams(dimensions=8), use_tqdm=False)
    cut = expected[TEXTS[1]][:8]
    assert np.abs(np.array(output.outputs.embedding) - cut / np.linalg.norm(cut)).max() < 1e-5
    with raises_code("request.dimensions_too_large", RequestError, value=65, maximum=64):
        llm.embed("x", PoolingParams(dimensions=65))


def test_encode_gives_a_tensor_and_embed_takes_ids(llm, expected):
    ids = [*TEXTS[0].encode(), END]
    [output] = llm.encode(prompt_token_ids=[ids], use_tqdm=False)
    assert output.outputs.data.dtype == torch.float32
    assert np.abs(output.outputs.data.numpy() - expected[TEXTS[0]]).max() < 1e-5
    with raises_code("value.not_one_of", RequestError, name="pooling_task", value="classify"):
        llm.encode("x", pooling_task="classify")


def test_score_of_an_embedding_model_is_the_cosine(llm, expected):
    outputs = llm.score(TEXTS[1], TEXTS[2:], use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(
        [float(expected[TEXTS[1]] @ expected[text]) for text in TEXTS[2:]], abs=1e-5
    )
    with raises_code("request.pairs_differ", RequestError, first=2, second=3):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_generate_without_a_head_is_refused(llm):
    for ask in (lambda: llm.generate("x"), lambda: llm.stream("x")):
        with raises_code("request.no_head", RequestError):
            ask()


def test_embed_checks_all_prompts_before_any_runs(llm):
    before = llm.stats().num_requests
    with pytest.raises(PromptError):
        llm.embed(["fine", ""])
    with raises_code("request.prompt_too_many_chars", PromptError):
        llm.embed("x" * 10_000)
    assert llm.stats().num_requests == before
    assert len(llm.embed("x" * 10_000, truncate_prompt_tokens=-1, use_tqdm=False)[0].prompt_token_ids) > 1


def test_embed_of_another_pooling_mode_is_refused(folder, tmp_path):
    other = tmp_path / "mean"
    other.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (other / file).write_bytes((folder / file).read_bytes())
    write_modules(other, pooling_mode_mean_tokens=True)
    with LLM(str(other), **OPTIONS) as llm, raises_code("request.no_embeddings", RequestError):
        llm.embed("x")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("models") / "Tiny-Reranker"
    tiny = save_tiny("qwen3", folder, vocab_size=264, max_position_embeddings=512)
    write_tokenizer(folder, adds_end=False)
    return folder, tiny


def test_score_of_a_reranker_matches_transformers(judge):
    folder, tiny = judge
    documents = ["Paris.", "A <|im_end|> inside", "no"]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.score("capital of France?", documents, use_tqdm=False)
        reranker = llm.engine.pooling.reranker
        prompts = [reranker.prompt("capital of France?", document) for document in documents]
        control = llm.tokenizer.control_tokens.special
        [cut] = llm.score("x", "y" * 10_000, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut.prompt_token_ids) == llm.engine.core.facts.longest - 1
        with raises_code("request.prompt_too_long", PromptError):
            llm.score("x", "y" * 10_000)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = tokenizer.convert_tokens_to_ids("yes"), tokenizer.convert_tokens_to_ids("no")
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits_V = tiny(torch.tensor([prompt])).logits[0, -1].double()
        two = torch.softmax(logits_V[[yes, no]], -1)
        assert output.outputs.score == pytest.approx(two[0].item(), abs=1e-4)
        assert output.prompt_token_ids == prompt
    ends = tokenizer(RERANK_PREFIX)["input_ids"], tokenizer(RERANK_SUFFIX)["input_ids"]
    assert prompts[0][: len(ends[0])] == ends[0]
    assert prompts[0][-len(ends[1]) :] == ends[1]
    inner = prompts[1][len(ends[0]) : -len(ends[1])]
    assert control["<|im_end|>"] not in inner


def test_reranker_asks_again_for_a_token_that_was_not_reported(judge, monkeypatch):
    """With one log-probability each the token that was not chosen is unknown after the first request."""
    folder, _ = judge
    with LLM(str(folder), **OPTIONS) as llm:
        [usual] = llm.score("a", "b", use_tqdm=False)
        params = Reranker.params

        def fewer(self: Reranker, *args: Any, **options: Any) -> SamplingParams:
            requested = params(self, *args, **options)
            requested.logprobs = 0
            return requested

        monkeypatch.setattr(Reranker, "params", fewer)
        before = llm.stats().num_requests
        [again] = llm.score("a", "b", use_tqdm=False)
        assert llm.stats().num_requests == before + 2
    assert again.outputs.score == pytest.approx(usual.outputs.score, abs=1e-6)


def test_chat_model_is_reported_of_once_and_gives_no_scores(tmp_path, caplog):
    save_tiny("qwen3", tmp_path / "chat", vocab_size=264)
    write_tokenizer(tmp_path / "chat", adds_end=False)
    with LLM(str(tmp_path / "chat"), **OPTIONS) as llm, caplog.at_level(logging.WARNING, "holdfast"):
        llm.embed(["a", "b"], use_tqdm=False)
        llm.embed("c", use_tqdm=False)
        with raises_code("request.no_scores", RequestError):
            llm.score("a", "b")
    assert sum("was not trained for embeddings" in record.getMessage() for record in caplog.records) == 1


def test_async_llm_embeds_and_scores_beside_each_other(folder, expected):
    async def ask(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(llm.embed(text) for text in TEXTS))
        for text, output in zip(TEXTS, outputs, strict=True):
            assert np.abs(np.array(output.outputs.embedding) - expected[text]).max() < 1e-5
        [scored] = await llm.score(TEXTS[1], TEXTS[2])
        assert scored.outputs.score == pytest.approx(float(expected[TEXTS[1]] @ expected[TEXTS[2]]), abs=1e-5)
        with pytest.raises(PromptError):
            await llm.embed("")

    llm = AsyncLLM(str(folder), **OPTIONS)
    try:
        asyncio.run(ask(llm))
    finally:
        llm.shutdown()
