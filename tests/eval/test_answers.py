"""Greedy answers over a runner: those of an engine, compared with the reference's."""

import pytest

from cli.cli_models import make_model
from holdfast.config import EngineConfig
from holdfast.engine.open_text import open_text
from holdfast.eval.answers import Answers, Generated, Questions, Valid
from holdfast.eval.kv_quality import (
    SEQUENCES,
    Pair,
    Result,
    Work,
    entry_of,
    evaluate,
    open_contenders,
    quick_formats,
    settle_config,
)
from holdfast.eval.tasks import Tasks, read_tasks
from holdfast.loading.model_files import open_model

TASKS = read_tasks()
NUM_TOKENS = 12
FORMATS = ("float32", "fp8", "turboquant_3bit_nc")
WINDOW = 64


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Results of a model whose context holds every chat."""
    model = open_model(str(make_model(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=1024)), "auto")
    config = EngineConfig(device="cpu", kv_near_tokens=0)
    tokenizer, template = open_text(config, model)
    assert tokenizer is not None
    text, tasks = settle_config(config, model, WINDOW), settle_config(config, model, WINDOW, 700, SEQUENCES)
    entries = [entry_of(each, model, name) for each in (text, tasks) for name in FORMATS]
    opened = open_contenders(entries, model, lambda done, total: None)
    pairs = list(map(Pair, opened.contenders[:3], opened.contenders[3:]))
    windows = [tokenizer.encode("It is not known who first thought of it, but there it was, again.")[:WINDOW]]
    work = Work(windows, Questions(TASKS.first(3, 1), tokenizer, template, NUM_TOKENS))
    reported: list[tuple[int, int]] = []
    found = list(evaluate(pairs, work, lambda contender: lambda done, total: reported.append((done, total))))
    assert reported[-1] == (work.num_tokens, work.num_tokens)
    opened.release()
    model.source.close()
    return found


def test_answers_of_reference_equal_themselves(results: list[Result]) -> None:
    answers = results[0].behaviour.answers
    assert answers is not None
    assert answers.same_tokens == (NUM_TOKENS,) * 3
    assert (answers.num_equal, answers.median_same) == (3, NUM_TOKENS)
    assert answers.json is not None
    assert answers.json.num_tasks == 1
    assert answers.json.num_lost == 0


def test_answers_of_few_bits_differ_early(results: list[Result]) -> None:
    fp8, few = (result.behaviour.answers for result in results[1:])
    assert fp8 is not None
    assert few is not None
    assert 0 <= few.median_same < NUM_TOKENS, "random weights have no clear argmax"
    assert few.median_same <= fp8.median_same


def test_compare_answers_counts_lost_ones() -> None:
    questions = Questions(Tasks(("a", "b"), TASKS.json[:3], TASKS.tools[:3], TASKS.recall), None, None, 4)  # type: ignore[arg-type]
    reference = Generated(((1, 2, 3, 4), (5, 6, 7, 8)), (True, True, False), (True, False, False))
    own = Generated(((1, 2, 3, 4), (5, 6, 0, 8)), (True, False, True), (False, False, False))
    assert questions.compare(reference, own) == Answers(4, (4, 2), Valid(3, 2, 1), Valid(3, 0, 1))
    bare = Generated(reference.continuations, (), ())
    assert questions.compare(bare, bare) == Answers(4, (4, 4), None, None)


def test_evaluate_yields_each_format_when_done(results: list[Result]) -> None:
    assert [result.quality.name for result in results] == list(FORMATS)
    assert results[0].quality.mean_kl == 0 < results[1].quality.mean_kl < results[2].quality.mean_kl
    assert all(result.behaviour.recall == () for result in results)


def test_quick_formats_are_widest_and_four_bits(tmp_path) -> None:
    model = open_model(str(make_model(tmp_path / "model")), "auto")
    names = ("float16", "fp8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc")
    assert quick_formats(names, model) == ("fp8", "turboquant_4bit_nc")
    assert quick_formats(names[:3], model) == ("fp8", "turboquant_k8v4")
    assert quick_formats(("float16",), model) == ("float16",)
    model.source.close()
