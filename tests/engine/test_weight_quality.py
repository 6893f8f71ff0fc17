"""Figures of weight schemes: kept hidden states give the reference's own logits, and a scheme is compared with them."""

from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import HoldfastError
from holdfast.eval import weight_quality as weight_quality_entries
from holdfast.eval.kv_quality import Contender, Quality, measure
from holdfast.eval.weight_quality import (
    ReferenceReading,
    SchemeEntry,
    as_stored_entry,
    measure_scheme,
    scheme_entry,
    settle_entries,
)
from holdfast.loading.model_files import open_model
from loading.tiny_models import save_tiny

WINDOWS = [[7 * place % 250 + 3 for place in range(start, start + 48)] for start in (0, 48)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", path)
    return path


@pytest.fixture
def opened(folder: Path):
    """opened(entry) -> a contender, released at the end."""
    contexts = []
    silent = weight_quality_entries.Listener(lambda name: None, lambda *_: None, lambda *_: None)

    def open_entry(entry: SchemeEntry) -> Contender:
        context = weight_quality_entries._opened(entry, silent)
        contexts.append(context)
        return context.__enter__()

    yield open_entry
    for context in reversed(contexts):
        context.__exit__(None, None, None)


def entries(folder: Path, *names: str) -> list[SchemeEntry]:
    model = open_model(str(folder), "auto")
    try:
        config = EngineConfig(model=str(folder), device="cpu", max_num_batched_tokens=20)
        reference, settled = settle_entries(config, model, 48)
    finally:
        model.source.close()
    others = (as_stored_entry(settled, None) if name == "none" else scheme_entry(settled, name, ()) for name in names)
    return [SchemeEntry("float32", reference), *others]


def without_seconds(quality: Quality) -> dict[str, object]:
    return {name: getattr(quality, name) for name in quality.__dataclass_fields__ if name != "seconds"}


def test_one_after_the_other_gives_what_all_at_once_gives(folder: Path, opened) -> None:
    first, second = (opened(entry) for entry in entries(folder, "fp8"))
    counted: list[int] = []
    reading = ReferenceReading(first, WINDOWS)
    own = reading.read(counted.append)
    other = measure_scheme(second, reading, counted.append)
    assert sum(counted) == 2 * 96
    together = measure(first, [second], WINDOWS, lambda done, total: None)
    assert [without_seconds(quality) for quality in (own, other)] == [without_seconds(quality) for quality in together]
    assert own.mean_kl == 0 < other.mean_kl < 0.1
    assert own.agreement == 1
    assert other.size_bytes < 0.4 * own.size_bytes
    again = measure_scheme(second, reading, lambda num: None)
    assert without_seconds(again) == without_seconds(other), "what is kept of the reference does not change"


def test_the_reference_against_itself_is_nothing(folder: Path, opened) -> None:
    first, second = (opened(entry) for entry in entries(folder, "none"))
    reading = ReferenceReading(first, WINDOWS)
    own = reading.read(lambda num: None)
    assert without_seconds(measure_scheme(second, reading, lambda num: None)) == without_seconds(own)


def test_a_reference_whose_logits_are_no_numbers_is_refused(folder: Path, opened, monkeypatch) -> None:
    (first,) = (opened(entry) for entry in entries(folder))
    real = first.runner.row_logits
    monkeypatch.setattr(first.runner, "row_logits", lambda hidden: real(hidden).fill_(float("nan")))
    with pytest.raises(HoldfastError, match=r"a comparison with float32 was asked; .*not finite; check its weights"):
        ReferenceReading(first, WINDOWS).read(lambda num: None)
