"""The benchmarks that part the error of a KV format: parts together give the format's figure, and answers are compared."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from cli.cli_models import make_model
from holdfast.config import EngineConfig
from holdfast.eval.kv_quality import Entry, format_entry, open_contenders, reference_entry, settle_config
from holdfast.eval.quality import Quality, ReferenceReading, measure_against
from holdfast.eval.recall import Recall
from holdfast.eval.tasks import read_tasks
from holdfast.loading.model_files import open_model
from holdfast.runner.variants import Variant

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
kv_error = import_module("kv_error")
latent_error = import_module("latent_error")
kv_answers = import_module("kv_answers")
WINDOW = 40
FORMAT = "turboquant_4bit_nc"


@pytest.fixture(scope="module")
def parts_of_keys(tmp_path_factory) -> dict[str, Quality]:
    """The format of a tiny model, and some of its parts."""
    folder = make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=3, hidden_size=64, head_dim=16)
    model, chosen = open_model(str(folder), "auto"), kv_error.Chosen()
    config = settle_config(
        EngineConfig(model=str(folder), device="cpu", kv_protected_layers=0, kv_near_tokens=0), model, WINDOW
    )
    reference = reference_entry(config)
    part_entry = Entry("part", Variant(reference.variant.config, kv_error.MakePartPages(chosen)))
    opened = open_contenders(
        [reference, format_entry(config, model, FORMAT), part_entry], model, lambda done, total: None
    )
    model.source.close()
    own, engine, part_of = opened.contenders
    chosen.planes = list(kv_error.planes_of(engine))
    text = torch.randint(3, 60, (WINDOW,), generator=torch.Generator().manual_seed(5)).tolist()
    reading = ReferenceReading(own, [text])
    reading.read(lambda num_halves: None)
    found = {FORMAT: measure_against(reading, engine, lambda num_halves: None)}
    for chosen.part in (
        kv_error.NOTHING,
        kv_error.Part("written"),
        kv_error.Part("all distances", distances=(0, kv_error.FAR)),
        kv_error.Part("beyond", distances=(WINDOW, kv_error.FAR)),
        kv_error.Part("near", distances=(0, 4)),
        kv_error.Part("keys of all distances", values=False, distances=(0, kv_error.FAR)),
        kv_error.Part("keys", values=False),
    ):
        found[chosen.part.name] = measure_against(reading, part_of, lambda num_halves: None)
    opened.release()
    return found


def test_kv_error_all_distances_equal_format(parts_of_keys: dict[str, Quality]) -> None:
    whole = parts_of_keys[FORMAT].mean_kl
    assert whole > 0
    assert parts_of_keys["all distances"].mean_kl == pytest.approx(whole, rel=0.05)
    assert parts_of_keys["written"].mean_kl == pytest.approx(parts_of_keys["all distances"].mean_kl, rel=1e-3)
    assert parts_of_keys["keys of all distances"].mean_kl == pytest.approx(parts_of_keys["keys"].mean_kl, rel=1e-3)


def test_kv_error_of_nothing_is_zero(parts_of_keys: dict[str, Quality]) -> None:
    whole = parts_of_keys[FORMAT].mean_kl
    assert parts_of_keys["nothing"].mean_kl < 1e-6 * whole
    assert parts_of_keys["beyond"].mean_kl < 1e-6 * whole
    assert 0 < parts_of_keys["near"].mean_kl < whole


def test_latent_error_of_all_equals_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_error, "WINDOW", WINDOW)
    monkeypatch.setattr(latent_error, "LAYERS", 1)
    wanted = [latent_error.WHOLE, latent_error.Part("e4m3", rope=torch.float8_e4m3fn)]
    wanted.append(latent_error.Part("none", latents=False, rope=None))
    monkeypatch.setattr(latent_error, "parts", lambda: iter(wanted))
    texts = latent_error.plant(tmp_path, 0, latent_error.Traits("all", channels=10.0, common=1.0))
    found = {name: quality.mean_kl for name, quality in latent_error.measured(tmp_path, texts).items()}
    assert found[latent_error.WHOLE.name] == pytest.approx(found["turboquant_mla_4bit"], rel=0.02)
    assert found["e4m3"] == pytest.approx(found["turboquant_mla_4bit_r8"], rel=0.02)
    assert found["none"] < 1e-6 * found["e4m3"]


def test_latent_error_channels_leave_function_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_error, "WINDOW", WINDOW)
    perplexities = []
    for channels in (1.0, 30.0):
        folder = tmp_path / str(channels)
        folder.mkdir()
        texts = latent_error.plant(folder, 0, latent_error.Traits("some", channels=channels))
        model = open_model(str(folder), "auto")
        config = settle_config(EngineConfig(model=str(folder), device="cpu"), model, WINDOW)
        opened = open_contenders([reference_entry(config)], model, lambda done, total: None)
        model.source.close()
        perplexities.append(ReferenceReading(opened.contenders[0], texts).read(lambda num_halves: None).perplexity)
        opened.release()
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)


def test_moved_recall_task_keeps_words_in_turn() -> None:
    task = read_tasks().recall
    assert kv_answers.moved(task, 0) == task
    other = kv_answers.moved(task, 1)
    assert other.keys[0] == task.keys[kv_answers.SHIFT]
    assert sorted(other.words) == sorted(task.words)


def test_together_adds_facts_of_all_tests() -> None:
    tests = [(Recall(1024, 4, 40, right, logprob, rank),) for right, logprob, rank in ((3, -1.0, 1.5), (1, -3.0, 2.5))]
    (row,) = kv_answers.together(tests)
    assert (row["num_facts"], row["num_right"], row["mean_logprob"], row["mean_rank"]) == (8, 4, -2.0, 2.0)
    assert row["probability"] == pytest.approx(0.1353, abs=1e-4)
