"""The prediction of several GPUs: its formula, its distance from aiconfigurator, and the record and the page that show it."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
predict_ranks = import_module("predict_ranks")
RECORD = ROOT / "benchmarks" / "records" / "predicted-2026-11-17-ranks.json"


def test_qwen_scales_within_a_fifth_of_aiconfigurator() -> None:
    for batch in (1, 128):
        theirs = predict_ranks.AICONFIGURATOR[f"Qwen3-32B, batch {batch}"]
        one = predict_ranks.qwen_rates(batch, 1)
        for size in (2, 4, 8):
            rates = predict_ranks.qwen_rates(batch, size)
            expected = pytest.approx(theirs[size] / theirs[1], rel=0.2)
            assert rates.reduce / one.reduce == expected
            assert rates.fused / one.fused == expected


def test_qwen_rates_of_one_rank_are_those_measured() -> None:
    assert predict_ranks.qwen_rates(1, 1).fused == pytest.approx(63.141)
    assert predict_ranks.qwen_rates(128, 1).reduce == pytest.approx(4879.851)


@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_exact_costs_more_than_reduce_and_gains_over_one_rank(batch: int, size: int) -> None:
    rates, one = predict_ranks.qwen_rates(batch, size), predict_ranks.qwen_rates(batch, 1)
    assert one.exact < rates.exact < rates.reduce <= rates.fused
    assert rates.reduce < size * one.reduce


def test_shared_seconds_without_exchange_keep_fixed_part() -> None:
    assert predict_ranks.shared_seconds(10.0, 2.0, 0.0, 4) == 4.0
    assert predict_ranks.shared_seconds(10.0, 2.0, 1.5, 4) == 5.5


def test_sums_follow_their_table_and_grow() -> None:
    assert predict_ranks.sum_seconds(65536, 4) == pytest.approx(5.81e-6)
    assert predict_ranks.sum_seconds(10, 2) == pytest.approx(4.64e-6)
    assert predict_ranks.sum_seconds(8388608, 8) == pytest.approx(2 * 48.39e-6)
    for size in (2, 4, 8):
        times = [predict_ranks.sum_seconds(2**power, size) for power in range(14, 24)]
        assert times == sorted(times)


def test_deepseek_on_its_own_shapes() -> None:
    model = predict_ranks.deepseek()
    experts = (model.num_layers - model.num_dense) * (model.num_experts + 1) * model.expert_bytes
    whole = (
        experts + model.num_layers * model.attention_bytes + model.num_dense * model.dense_bytes + 2 * model.head_bytes
    )
    assert whole == pytest.approx(671e9, rel=0.02)  # parameters, a byte each but for kv_b, embedding and head
    assert model.latent_bytes == 1152
    # Chosen experts of one row are top_k of all, of very many rows every one.
    alone = predict_ranks.expert_seconds(model, 1, model.num_experts)
    assert alone == pytest.approx(model.top_k * model.expert_bytes / model.read_bytes_per_second)


def test_all_to_all_lies_near_aiconfigurator() -> None:
    theirs = predict_ranks.AICONFIGURATOR["DeepSeek-V3, all-to-all"]
    for size, rate in theirs.items():
        assert predict_ranks.all_to_all(size).tokens_per_second == pytest.approx(rate, rel=0.2)


def test_predict_ranks_committed_record_matches_script() -> None:
    record = json.loads(RECORD.read_text())
    assert record["results"] == predict_ranks.results()
    assert "nothing of this record ran on several GPUs" in record["settings"]
    assert record["machine"] == "no machine"


def test_predict_ranks_writes_record_to_given_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["predict_ranks.py", "--out", str(tmp_path)])
    predict_ranks.main()
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["results"] == predict_ranks.results()
    assert capsys.readouterr().out.count(predict_ranks.NEVER_RAN) == 2
