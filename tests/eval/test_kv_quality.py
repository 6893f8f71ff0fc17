"""Contenders: what is settled for a window, which formats a model can have, and which layers are protected in them."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from holdfast.cache.groups import CacheGroup
from holdfast.config import EngineConfig, Limits
from holdfast.errors import ConfigError, HoldfastError
from holdfast.eval import quality as quality_module
from holdfast.eval.kv_quality import (
    CHUNK_TOKENS,
    Entry,
    OpenedContenders,
    format_entry,
    measure,
    narrower_formats,
    open_contenders,
    reference_entry,
    settle_config,
)
from holdfast.eval.quality import Contender, Quality, steps_of
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.quant.formats import KV_FORMATS
from loading.tiny_models import VOCAB, save_tiny

WINDOW, NUM_WINDOWS, CHUNK = 90, 3, 32
FORMATS = ("float16", "bfloat16", "fp8", "turboquant_4bit_nc", "turboquant_3bit_nc")
DICE = random.Random(0)
WINDOWS = [[DICE.randrange(8, VOCAB) for _ in range(WINDOW)] for _ in range(NUM_WINDOWS)]


def silent(done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return save_tiny("llama", folder)


def opened_with(folder: Path, chunk: int, *formats: str) -> OpenedContenders:
    model = open_model(str(folder), "auto")
    config = settle_config(EngineConfig(device="cpu", max_num_batched_tokens=chunk, kv_near_tokens=0), model, WINDOW)
    reference = reference_entry(config)
    entries = [reference, reference, *(format_entry(config, model, name) for name in formats)]
    try:
        return open_contenders(entries, model, silent)
    finally:
        model.source.close()


@pytest.fixture(scope="module")
def opened(folder: Path, theirs):
    contenders = opened_with(folder, CHUNK, *FORMATS)
    yield contenders
    contenders.release()


@pytest.fixture(scope="module")
def qualities(opened: OpenedContenders) -> dict[str, Quality]:
    own, again, *others = measure(opened.contenders[0], opened.contenders[1:], WINDOWS, silent)
    return {"reference": own, "again": again, **{quality.name: quality for quality in others}}


def all_logits(contender: Contender, window: int) -> torch.Tensor:
    """Those of a window, collected by hand: [predictions, V]."""
    pieces = []
    for step in steps_of(1000 + window, WINDOWS[window], contender.runner):
        hidden_TH = contender.runner.hidden_rows(step)
        pieces += [contender.runner.row_logits(rows).clone() for rows in hidden_TH.split(7)]
    return torch.cat(pieces)[:-1]


def test_measure_reference_has_no_divergence_from_itself(qualities: dict[str, Quality]) -> None:
    for quality in (qualities["reference"], qualities["again"]):
        assert (quality.mean_kl, quality.p99_kl, quality.max_kl, quality.kl_error) == (0, 0, 0, 0)
        assert quality.agreement == 1
        assert quality.num_predictions == NUM_WINDOWS * (WINDOW - 1)
        assert quality.seconds > 0
    assert qualities["again"].perplexity == qualities["reference"].perplexity


def test_perplexity_is_that_of_transformers(theirs, qualities: dict[str, Quality]) -> None:
    with torch.no_grad():
        losses = [theirs(input_ids=ids, labels=ids).loss.item() for ids in (torch.tensor([own]) for own in WINDOWS)]
    assert qualities["reference"].perplexity == pytest.approx(math.exp(sum(losses) / NUM_WINDOWS), rel=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_figures_are_those_of_plain_formulas(
    name: str, opened: OpenedContenders, qualities: dict[str, Quality]
) -> None:
    place = 2 + FORMATS.index(name)
    reference, contender, found = opened.contenders[0], opened.contenders[place], qualities[name]
    kl, same, losses = [], [], []
    for window in range(NUM_WINDOWS):
        ref_PV, own_PV = all_logits(reference, window).double(), all_logits(contender, window).double()
        ref_log_PV, own_log_PV = ref_PV.log_softmax(-1), own_PV.log_softmax(-1)
        kl.append(F.kl_div(own_log_PV, ref_log_PV, reduction="none", log_target=True).sum(-1))
        same.append(ref_PV.argmax(-1) == own_PV.argmax(-1))
        losses.append(F.cross_entropy(own_PV, torch.tensor(WINDOWS[window][1:]), reduction="none"))
    kl_X = torch.cat(kl)
    assert found.mean_kl == pytest.approx(kl_X.mean().item(), rel=1e-5, abs=1e-12)
    assert found.max_kl == pytest.approx(kl_X.max().item(), rel=1e-5, abs=1e-12)
    assert found.p99_kl == pytest.approx(kl_X.sort().values[math.ceil(0.99 * (len(kl_X) - 1))].item(), rel=1e-5)
    assert found.kl_error == pytest.approx((kl_X.std(correction=0) / len(kl_X) ** 0.5).item(), rel=1e-5)
    assert found.agreement == torch.cat(same).double().mean().item()
    assert found.perplexity == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-6)
    by_place = torch.stack(kl).mean(0).tensor_split(8)
    assert found.kl_by_place[0] == pytest.approx(by_place[0].mean().item(), rel=1e-5, abs=1e-12)
    assert found.num_broken == 0


def test_fewer_bits_are_further_away(qualities: dict[str, Quality]) -> None:
    distances = [qualities[name].mean_kl for name in ("float16", "bfloat16", "fp8", "turboquant_3bit_nc")]
    assert distances == sorted(distances)
    assert 0 < distances[0] < 1e-5


def test_near_tokens_bring_few_bits_closer(folder: Path, theirs) -> None:
    """Longer windows than a block, so that rows of later blocks read codes; the reference stays exact."""
    windows = [[DICE.randrange(8, VOCAB) for _ in range(200)] for _ in range(2)]
    found = []
    for near_tokens in (0, 64):
        with model_of(folder) as model:
            config = EngineConfig(device="cpu", kv_protected_layers=0, kv_near_tokens=near_tokens)
            config = settle_config(config, model, 200)
            entries = [reference_entry(config), format_entry(config, model, "turboquant_3bit_nc")]
            contenders = open_contenders(entries, model, silent)
        try:
            has_near = [len(one.runner.groups) == 2 for one in contenders.contenders]
            assert has_near == [False, near_tokens > 0]
            found.append(measure(contenders.contenders[0], contenders.contenders[1:], windows, silent))
        finally:
            contenders.release()
    (reference, coded), (same, near) = found
    assert same.perplexity == reference.perplexity
    assert 0 < near.mean_kl < 0.7 * coded.mean_kl


def test_bytes_are_the_formats_own(opened: OpenedContenders) -> None:
    heads, head_dim, layers = 2, 16, 2
    by_name = {contender.name: contender.size_bytes for contender in opened.contenders}
    assert by_name["float32"] == layers * heads * head_dim * 2 * 4
    assert by_name["float16"] == opened.plain_bytes_per_token == layers * heads * head_dim * 2 * 2
    assert by_name["fp8"] == layers * heads * 2 * (head_dim + 2)
    # One of the two layers is protected, in fp8.
    assert by_name["turboquant_4bit_nc"] == heads * 2 * (head_dim + 2) + heads * 2 * (head_dim // 2 + 2)


def test_chunks_change_nothing_but_rounding(folder: Path, qualities: dict[str, Quality]) -> None:
    whole = opened_with(folder, WINDOW, "turboquant_4bit_nc")
    *_, found = measure(whole.contenders[0], whole.contenders[1:], WINDOWS, silent)
    whole.release()
    # The warm-up prompt that keys are centred by is as long as a step allows, up to 128 tokens.
    assert found.mean_kl == pytest.approx(qualities["turboquant_4bit_nc"].mean_kl, rel=0.1)
    assert found.perplexity == pytest.approx(qualities["turboquant_4bit_nc"].perplexity, rel=0.02)


def test_measure_progress_counts_every_token(opened: OpenedContenders) -> None:
    reported = []
    measure(
        opened.contenders[0], opened.contenders[1:3], WINDOWS[:2], lambda done, total: reported.append((done, total))
    )
    assert {total for _, total in reported} == {3 * 2 * WINDOW}
    done = [count for count, _ in reported]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, 3 * 2 * WINDOW)


class FakeRunner:
    """Logits are a table by row of the text, changed by a caller that makes it."""

    def __init__(self, vocab_size: int, change=lambda logits_RV, first: logits_RV, chunk: int = 64) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device("cpu")
        self.limits = Limits(1, chunk, 10_000, 16)
        self.groups = (CacheGroup("whole context", 16),)
        self._change = change
        self.num_rows: list[int] = []

    def hidden_rows(self, step) -> torch.Tensor:
        (item,) = step.scheduled
        return torch.arange(item.start, item.start + item.num_new_tokens).unsqueeze(1).float()

    def row_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(hidden_RH))
        logits_RV = torch.sin(hidden_RH * 7 + torch.arange(self.vocab_size)) * 3
        return self._change(logits_RV, int(hidden_RH[0, 0]))


def fake(name: str, *arguments, **options) -> Contender:
    return Contender(name, FakeRunner(*arguments, **options), Fraction(100))  # type: ignore[arg-type]


def with_nan(logits_RV: torch.Tensor, first: int) -> torch.Tensor:
    """The eleventh row of the text has a NaN."""
    if first <= 10 < first + len(logits_RV):
        logits_RV[10 - first, 3] = math.nan
    return logits_RV


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_measure_non_finite_logits_affect_one_contender(wrong: float) -> None:
    def broken(logits_RV: torch.Tensor, first: int) -> torch.Tensor:
        return torch.where(with_nan(logits_RV, first).isnan(), wrong, logits_RV)

    _, bad, good = measure(fake("ref", 11), [fake("bad", 11, broken), fake("good", 11)], [[1] * 40, [2] * 40], silent)
    assert bad.num_broken == 2
    assert bad.mean_kl == bad.max_kl == bad.p99_kl == bad.perplexity == bad.kl_error == math.inf
    assert bad.agreement == 76 / 78
    assert (good.num_broken, good.mean_kl, good.agreement) == (0, 0, 1)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [(torch.float16, "Run it in another dtype, such as float32"), (torch.float32, "Check the weights and scales")],
)
def test_measure_non_finite_reference_is_refused(dtype: torch.dtype, advice: str, monkeypatch) -> None:
    plain = FakeRunner.hidden_rows
    monkeypatch.setattr(FakeRunner, "hidden_rows", lambda self, step: plain(self, step).to(dtype))
    with pytest.raises(HoldfastError, match=rf"reference ref are not finite. {advice}"):
        measure(fake("ref", 11, with_nan), [fake("other", 11)], [[1] * 40], silent)


def test_logits_far_apart_are_far_but_finite() -> None:
    def far(logits_RV: torch.Tensor, first: int) -> torch.Tensor:
        return logits_RV * -1000

    (_, found) = measure(fake("ref", 11), [fake("far", 11, far)], [[5] * 30], silent)
    assert 1000 < found.mean_kl < 1e5
    assert found.perplexity == math.inf or found.perplexity > 1e100
    assert found.num_broken == 0


def test_measure_shifted_logits_have_no_divergence() -> None:
    (_, found) = measure(fake("ref", 11), [fake("up", 11, lambda logits_RV, first: logits_RV + 64)], [[5] * 30], silent)
    assert found.mean_kl < 1e-10
    assert found.agreement == 1


@pytest.mark.parametrize(("vocab_size", "rows"), [(11, PROMPT_ROWS), (200, 5), (3000, 1)])
def test_pieces_are_bounded_by_rows_and_by_logits(vocab_size: int, rows: int, monkeypatch) -> None:
    monkeypatch.setattr(quality_module, "PIECE_ELEMENTS", 64 * 11 if vocab_size == 11 else 1000)
    reference, other = fake("ref", vocab_size, chunk=100), fake("other", vocab_size, chunk=100)
    measure(reference, [other], [[1] * 150], silent)
    for contender, times in ((reference, 2), (other, 1)):
        counts = contender.runner.num_rows  # type: ignore[attr-defined]
        assert max(counts) == rows
        assert sum(counts) == 149 * times


def test_half_of_the_progress_is_for_comparing() -> None:
    """Comparing may take as long as reading: with all of a text read, half of it is still to do."""
    reported: list[tuple[int, int]] = []
    contenders = [fake("ref", 11, chunk=1000), fake("other", 11, chunk=1000)]

    def listen(done: int, total: int) -> None:
        assert total == 2 * 150
        reported.append((done, sum(sum(each.runner.num_rows) for each in contenders)))  # type: ignore[attr-defined]

    measure(contenders[0], contenders[1:], [[1] * 150], listen)
    # The head of the reference runs again for the other contender.
    assert reported[-1] == (2 * 150, 3 * 149)
    assert max(done for done, num_compared in reported if num_compared == 0) == 75
    assert max(done for done, num_compared in reported if num_compared == 149) == 225


def test_measure_shortest_window_has_one_prediction() -> None:
    (own, other) = measure(fake("ref", 11), [fake("other", 11)], [[1, 2], [3, 4]], silent)
    assert own.num_predictions == other.num_predictions == 2
    assert len(own.kl_by_place) == 1


def test_measure_missing_predictions_raise(monkeypatch) -> None:
    monkeypatch.setattr(quality_module.Tally, "add", lambda *arguments: None)
    with pytest.raises(AssertionError, match="missing predictions"):
        measure(fake("ref", 11), [], [[1] * 5], silent)


@pytest.mark.gpu
def test_measure_on_gpu_agrees_with_transformers(folder: Path, theirs) -> None:
    """Runners have streams of their own there, and hand their logits from one to the other."""
    model = open_model(str(folder), "auto")
    config = settle_config(EngineConfig(device="cuda", dtype="bfloat16", max_num_batched_tokens=CHUNK, kv_near_tokens=0), model, WINDOW)
    reference = reference_entry(config)
    entries = [reference, reference, *(format_entry(config, model, name) for name in ("fp8", "turboquant_3bit_nc"))]
    opened = open_contenders(entries, model, silent)
    model.source.close()
    own, again, fp8, few = measure(opened.contenders[0], opened.contenders[1:], WINDOWS, silent)
    for _ in range(3):
        assert measure(opened.contenders[0], opened.contenders[1:], WINDOWS, silent)[3].mean_kl == few.mean_kl
    opened.release()
    assert again.mean_kl == 0
    assert again.agreement == 1
    assert 0 < fp8.mean_kl < few.mean_kl < 0.5
    with torch.no_grad():
        losses = [theirs(input_ids=ids, labels=ids).loss.item() for ids in (torch.tensor([own]) for own in WINDOWS)]
    assert own.perplexity == pytest.approx(math.exp(sum(losses) / NUM_WINDOWS), rel=0.02)


CODED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for family in ("llama", "llama_bias", "opt"):
        made[family] = tmp_path_factory.mktemp(family)
        save_tiny(family, made[family])
    return made


@contextmanager
def model_of(folder: Path) -> Iterator[OpenModel]:
    model = open_model(str(folder), "auto")
    try:
        yield model
    finally:
        model.source.close()


def test_settle_config_fits_one_window(folders) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu"), model, 2048)
        assert (config.dtype, config.device) == ("float32", "cpu")
        assert (config.max_model_len, config.max_num_seqs) == (2048, 1)
        assert config.max_num_batched_tokens == CHUNK_TOKENS
        assert config.enforce_eager
        short = settle_config(EngineConfig(device="cpu", max_num_batched_tokens=300), model, 100)
        assert short.max_num_batched_tokens == 100
        longer = settle_config(EngineConfig(device="cpu", max_num_batched_tokens=900, dtype="bfloat16"), model, 2048)
        assert (longer.max_num_batched_tokens, longer.dtype) == (900, "bfloat16")


def test_settle_config_window_beyond_positions_is_refused(folders) -> None:
    with model_of(folders["opt"]) as model, pytest.raises(ConfigError, match="256"):
        settle_config(EngineConfig(device="cpu"), model, 257)


@pytest.mark.parametrize(("dtype", "plain"), [("float32", ["float16", "bfloat16"]), ("bfloat16", [])])
def test_formats_below_the_dtype_are_taken(folders, dtype: str, plain: list[str]) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu", dtype=dtype), model, 64)
        choice = narrower_formats(config, model)
    assert list(choice.names) == [*plain, *CODED]
    assert choice.left_out == {}


def test_narrower_formats_give_reason_for_left_out_ones(folders) -> None:
    with model_of(folders["llama_bias"]) as model:
        config = settle_config(EngineConfig(device="cpu"), model, 64)
        choice = narrower_formats(config, model)
    assert list(choice.names) == ["float16", "bfloat16"]
    assert list(choice.left_out) == CODED
    assert all("24" in reason for reason in choice.left_out.values()), choice.left_out


@pytest.mark.parametrize("requested", [None, 0, 1, "0,1"])
def test_protection_is_for_formats_below_what_protects(folders, requested: int | str | None) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu", kv_protected_layers=requested), model, 64)
        entries = {name: format_entry(config, model, name) for name in ("float16", *CODED)}
        reference = reference_entry(config)
        assert set(narrower_formats(config, model).names) >= set(CODED)
    given = {name: entry.variant.config.kv_protected_layers for name, entry in entries.items()}
    assert given == {"float16": None, "fp8": None} | {name: requested for name in CODED if name != "fp8"}
    assert reference.variant.config.kv_protected_layers is None
    assert reference.name == reference.variant.config.kv_cache_dtype == "float32"


def test_reference_entry_has_no_narrower_index() -> None:
    """Else what an index in fp8 costs would not be in any figure."""
    config = EngineConfig(device="cpu", dtype="float32", index_cache_dtype="fp8")
    assert reference_entry(config).variant.config.index_cache_dtype == "auto"


def test_protection_in_the_dtype_reaches_eight_bits_too(folders) -> None:
    with model_of(folders["llama"]) as model:
        requested = EngineConfig(device="cpu", kv_protected_layers=1, kv_protected_dtype="auto")
        config = settle_config(requested, model, 64)
        assert format_entry(config, model, "fp8").variant.config.kv_protected_layers == 1
        opened = open_contenders([reference_entry(config), format_entry(config, model, "fp8")], model, lambda *_: None)
    heads, head_dim = 2, 16
    assert [contender.note for contender in opened.contenders] == ["", "layers 0 in float32"]
    assert opened.contenders[1].size_bytes == heads * 2 * (head_dim + 2) + heads * 2 * head_dim * 4
    opened.release()


def test_entry_may_give_its_own_bytes_per_token(folders) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu"), model, 64)
        reference = reference_entry(config)
        entries = [
            reference,
            Entry("another", reference.variant, reference.bytes_per_token),
            reference._replace(name="x"),
        ]
        entries[1] = entries[1]._replace(bytes_per_token=77, note="odd")  # type: ignore[arg-type]
        opened = open_contenders(entries, model, lambda *_: None)
    assert [contender.name for contender in opened.contenders] == ["float32", "another", "x"]
    assert [contender.size_bytes for contender in opened.contenders] == [512, 77, 512]
    assert opened.contenders[1].note == "odd"
    assert opened.plain_bytes_per_token == 256
    opened.release()
