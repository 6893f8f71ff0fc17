"""Who is compared by weights: what is settled, which schemes a model can have, and one load after the other."""

from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.eval.kv_quality import measure
from holdfast.eval.quality import Contender, Quality, ReferenceReading, measure_against
from holdfast.eval.weight_quality import (
    Listener,
    SchemeEntry,
    as_stored_entry,
    compare_schemes,
    opened_scheme,
    plain_bytes,
    possible_schemes,
    scheme_entry,
    settle_entries,
    stored_scheme,
)
from holdfast.loading.model_files import open_model
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from loading.stored_models import make_stored
from loading.tiny_models import save_tiny
from runner.tiny_runners import watched_arenas

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
    silent = Listener(lambda name: None, lambda *_: None)

    def open_entry(entry: SchemeEntry) -> Contender:
        context = opened_scheme(entry, silent)
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


def test_measure_against_in_turn_equals_measure_at_once(folder: Path, opened) -> None:
    first, second = (opened(entry) for entry in entries(folder, "fp8"))
    counted: list[int] = []
    reading = ReferenceReading(first, WINDOWS)
    own = reading.read(counted.append)
    other = measure_against(reading, second, counted.append)
    assert sum(counted) == 2 * 2 * 96
    together = measure(first, [second], WINDOWS, lambda done, total: None)
    assert [without_seconds(quality) for quality in (own, other)] == [without_seconds(quality) for quality in together]
    assert own.mean_kl == 0 < other.mean_kl < 0.1
    assert own.agreement == 1
    assert other.size_bytes < 0.4 * own.size_bytes
    again = measure_against(reading, second, lambda num: None)
    assert without_seconds(again) == without_seconds(other), "what is kept of the reference does not change"


def test_measure_against_of_reference_gives_its_own_figures(folder: Path, opened) -> None:
    first, second = (opened(entry) for entry in entries(folder, "none"))
    reading = ReferenceReading(first, WINDOWS)
    own = reading.read(lambda num: None)
    assert without_seconds(measure_against(reading, second, lambda num: None)) == without_seconds(own)


def test_reference_reading_refuses_non_finite_logits(folder: Path, opened, monkeypatch) -> None:
    (first,) = (opened(entry) for entry in entries(folder))
    real = first.runner.row_logits
    monkeypatch.setattr(first.runner, "row_logits", lambda hidden: real(hidden).fill_(float("nan")))
    with pytest.raises(HoldfastError, match=r"reference float32 are not finite. Check the weights"):
        ReferenceReading(first, WINDOWS).read(lambda num: None)


@pytest.fixture
def model(folder: Path):
    opened = open_model(str(folder), "auto")
    yield opened
    opened.source.close()


def config(folder: Path, **options) -> EngineConfig:
    return EngineConfig.from_options(**{"model": str(folder), "device": "cpu"} | options)


def test_settle_entries_reference_is_stored_weights_in_float32(folder: Path, model) -> None:
    requested = config(folder, dtype="bfloat16", quantized_embeddings="all")
    reference, settled = settle_entries(requested, model, 32)
    assert (reference.dtype, reference.quantization) == ("float32", None)
    assert (settled.dtype, settled.quantized_embeddings, settled.max_model_len) == ("bfloat16", "all", 32)
    assert reference.quantized_embeddings == "auto", "that is for schemes"
    plain = as_stored_entry(settled, None)
    assert (plain.name, plain.config.quantized_embeddings) == ("bfloat16", "auto")
    assert stored_scheme(reference, model) is None
    entry = scheme_entry(settled, "fp8", "*down*")
    assert (entry.name, entry.config.quantization, entry.config.quantization_ignore) == ("fp8", "fp8", "*down*")
    assert entry.config.weight_cache == "off", "an evaluation leaves nothing behind"


def test_possible_schemes_give_reason_for_left_out_ones(folder: Path, model) -> None:
    _, settled = settle_entries(config(folder), model, 32)
    choice = possible_schemes(settled, model, ())
    assert choice.names == ("fp8", "fp8_tensor", "fp8_block", "int8")
    assert "112 columns" in choice.left_out["mxfp4"]
    assert possible_schemes(settled, model, "*down*").names == tuple(WEIGHT_SCHEMES)
    assert plain_bytes(model) > 2 * 259 * 64 * 2


def test_as_stored_entry_is_named_after_stored_scheme(tmp_path: Path) -> None:
    folder = make_stored(tmp_path / "stored", "fp8", ("o_proj",))
    opened = open_model(str(folder), "auto")
    reference, settled = settle_entries(config(folder, dtype="bfloat16"), opened, 32)
    stored = stored_scheme(reference, opened)
    choice = possible_schemes(settled, opened, (), stored)
    opened.source.close()
    assert as_stored_entry(reference, stored).name == "fp8 as stored (float32)"
    assert as_stored_entry(settled, stored).name == "fp8 as stored (bfloat16)"
    assert choice.names == ("fp8",)
    assert choice.left_out["mxfp4"] == "the checkpoint stores its weights in fp8"


def test_compare_schemes_loads_and_releases_in_turn(folder: Path, model, monkeypatch) -> None:
    reference, settled = settle_entries(config(folder), model, 32)
    reported: list[object] = []
    listener = Listener(reported.append, lambda done, total: reported.append((done, total)))
    windows = [list(range(3, 35))]
    entries = [scheme_entry(settled, name, ()) for name in ("int8", "fp8_block")]
    with watched_arenas(monkeypatch) as taken:
        qualities = compare_schemes(SchemeEntry("float32", reference), entries, windows, listener)
    assert [quality.name for quality in qualities] == ["float32", "int8", "fp8_block"]
    assert [name for name in reported if isinstance(name, str)] == ["float32", "int8", "fp8_block"]
    assert reported[-1] == (96, 96)
    assert taken
    assert all(storage() is None for storage in taken)
    assert qualities[1].mean_kl < qualities[2].mean_kl, "weights alone cost less than weights and activations"


def test_compare_schemes_failure_releases_memory(folder: Path, model, monkeypatch) -> None:
    reference, settled = settle_entries(config(folder), model, 32)
    silent = Listener(lambda name: None, lambda *_: None)
    with watched_arenas(monkeypatch) as taken, pytest.raises(ConfigError, match="112 columns"):
        compare_schemes(
            SchemeEntry("float32", reference), [scheme_entry(settled, "mxfp4", ())], [list(range(3, 35))], silent
        )
    assert all(storage() is None for storage in taken)
