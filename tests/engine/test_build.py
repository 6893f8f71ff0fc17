"""Everything between a config and an engine that answers, on a tiny model."""

import gc
import shutil
from pathlib import Path

import pytest

from cli.cli_models import make_model
from error_codes import raises_code
from holdfast import LLM, AsyncLLM, SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.build import build_engine
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    MemoryPlanError,
    ModelFormatError,
    ModelNotFoundError,
    PromptError,
)
from holdfast.memory.report import MemoryReport
from runner.tiny_runners import watched_arenas

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


def build(model: Path, **options: object):
    progress: list[tuple[int, int]] = []
    engine = build_engine(
        EngineConfig(model=str(model), **options),  # type: ignore[arg-type]
        lambda done, total: progress.append((done, total)),
    )
    return engine, progress


def run(engine) -> list[int]:
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens.extend(token for delta in engine.step() for token in delta.token_ids)
    return tokens


def test_build_engine_answers_and_reports_memory(model):
    engine, progress = build(model)
    engine.add_request("a", "hello", GREEDY)
    assert len(run(engine)) == 4
    assert isinstance(engine.memory, MemoryReport)
    rows = {row.owner: row for row in engine.memory.rows}
    assert all(row.held_bytes in (None, row.planned_bytes) for row in rows.values())
    assert rows["weights"].held_bytes
    assert rows["kv pages"].held_bytes
    assert progress[-1][0] == progress[-1][1] > 0
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_build_two_engines_answer_independently(model):
    first, _ = build(model)
    second, _ = build(model, max_model_len=64, max_num_seqs=2)
    for engine in (first, second):
        engine.add_request("a", "hello", GREEDY)
    assert run(first) == run(second)
    assert first.memory.kv_tokens != second.memory.kv_tokens


def test_build_leaves_no_file_open(model):
    # The strict warning filter fails the run where a file is left to the garbage collector.
    engine, _ = build(model)
    del engine


def test_unreadable_tokenizer_fails_before_weights_are_read(model, tmp_path):
    """As Kimi-K2's, which is tiktoken's."""
    folder = tmp_path / "ids"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_bytes(b"AAAA 0")
    config, progress = EngineConfig(model=str(folder)), []
    with pytest.raises(ModelFormatError, match="a tiktoken model") as caught:
        build_engine(config, lambda done, total: progress.append(done))
    assert 'LLM(model, tokenizer="none").generate(prompt_token_ids=[...])' in str(caught.value)
    assert progress == []
    ids = list(b"hello")
    (wanted,) = LLM(str(model)).generate(prompt_token_ids=ids, params=GREEDY)
    llm = LLM(str(folder), tokenizer="none")
    (output,) = llm.generate(prompt_token_ids=ids, params=GREEDY)
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert output.outputs[0].text == ""
    with raises_code("request.no_tokenizer", PromptError):
        llm.generate("hello", GREEDY)


@pytest.mark.parametrize("form", ["text", "file"])
def test_build_own_chat_template_is_used(model, tmp_path, form):
    source = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    given = source
    if form == "file":
        given = str(tmp_path / "own.jinja")
        Path(given).write_text(source)
    engine, _ = build(model, chat_template=given)
    messages = [{"role": "user", "content": "hi"}]
    own = engine.prepare_chat(messages, GREEDY).prompt_token_ids
    assert own == engine.tokenizer.encode("[hi]", add_special_tokens=False)
    plain, _ = build(model)
    assert plain.prepare_chat(messages, GREEDY).prompt_token_ids != own


def test_build_own_tokenizer_replaces_missing_one(model, tmp_path):
    bare = make_model(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(HoldfastError, match=r"tokenizer\.json"):
        build(bare)
    engine, _ = build(bare, tokenizer=str(model))
    engine.add_request("a", "hello", GREEDY)
    assert len(run(engine)) == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tokenizer": "/no/such/place"}, ModelNotFoundError, "neither a folder, a GGUF file"),
        ({"chat_template": "/no/such/file.jinja"}, ConfigError, "is not readable"),
        ({"memory_limit": "1KiB"}, MemoryPlanError, "short"),
        ({"max_model_len": 10**6, "memory_limit": "1MiB"}, MemoryPlanError, "short"),
        ({"device": "cuda:99"}, ConfigError, "CUDA devices"),
    ],
    ids=["tokenizer", "template", "budget", "context", "device"],
)
def test_refusals_come_before_any_weight_is_read(model, options, error, words):
    with pytest.raises(error, match=words) as caught:
        build_engine(EngineConfig(model=str(model), **options), lambda done, total: pytest.fail("a weight was read"))
    assert "\n" not in str(caught.value)


def test_engine_close_releases_all_memory(model, monkeypatch):
    with watched_arenas(monkeypatch) as taken:
        engine, _ = build(model)
    engine.add_request("a", "hello", GREEDY)
    run(engine)
    assert len(taken) >= 5
    assert sum(storage() is None for storage in taken) == 1, "staging was given back"
    engine.close()
    assert all(storage() is None for storage in taken)
    engine.close()
    assert engine.memory.rows, "what it was is still known"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_llm_shutdown_releases_all_memory(model, monkeypatch, kind):
    with watched_arenas(monkeypatch) as taken:
        llm = kind(str(model))
    assert sum(storage() is None for storage in taken) == 1, "staging was given back"
    llm.shutdown()
    assert len(taken) >= 5
    assert all(storage() is None for storage in taken)
    llm.shutdown()


def test_llm_shutdown_ends_open_stream(model):
    llm = LLM(str(model))
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    first = next(stream)
    assert first.token_ids
    llm.shutdown()
    assert sum(len(delta.token_ids) for delta in stream) < 49


def test_expert_parallelism_without_experts_is_refused(model):
    with raises_code("plan.no_experts", ConfigError):
        build(model, enable_expert_parallel=True)


def test_build_failure_releases_memory(model, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no scheduler today")

    monkeypatch.setattr("holdfast.engine.build.Scheduler", refuse)
    with watched_arenas(monkeypatch) as taken, pytest.raises(RuntimeError, match="no scheduler today"):
        build(model)
    gc.collect()
    assert len(taken) >= 4
    assert all(storage() is None for storage in taken)
