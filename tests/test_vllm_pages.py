"""vLLM's codes as they are imitated, and the benchmark that puts them beside ours."""

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import doc_tables
from cli.cli_models import make_model
from holdfast.loading.model_files import open_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
vllm_pages = import_module("vllm_pages")
kv_quality = import_module("kv_quality")
FORMATS = {own.name: own for own in vllm_pages.VLLM_FORMATS}


def heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, x: torch.Tensor) -> float:
    return ((found - x) ** 2).mean().item() / (x**2).mean().item()


def test_bytes_of_a_head_are_the_published_ones() -> None:
    sizes = {name: [own.head_bytes(dim) for dim in (64, 128, 256)] for name, own in FORMATS.items()}
    assert sizes == {
        "fp8": [128, 256, 512],
        "turboquant_k8v4": [100, 196, 388],
        "turboquant_4bit_nc": [70, 134, 262],
        "turboquant_k3v4_nc": [62, 118, 230],
        "turboquant_3bit_nc": [54, 102, 198],
    }


def test_codebooks_are_the_best_for_a_gaussian() -> None:
    assert vllm_pages.lloyd_max(3)[4:] == pytest.approx((0.2451, 0.756, 1.3439, 2.1519), abs=1e-4)
    four = vllm_pages.lloyd_max(4)
    assert four[8:] == pytest.approx((0.1284, 0.388, 0.6568, 0.9423, 1.2562, 1.618, 2.069, 2.7326), abs=1e-4)
    assert [-value for value in reversed(four)] == pytest.approx(list(four))


@pytest.mark.parametrize(("bits", "expected"), [(4, 0.0095), (3, 0.0345)])
def test_keys_lose_what_theory_says_and_keep_their_length(bits: int, expected: float) -> None:
    k_XD = heads(2000, 128)
    found = vllm_pages.quantized_keys(k_XD, bits)
    assert error(found, k_XD) == pytest.approx(expected, rel=0.06)
    assert torch.allclose(found.norm(dim=-1), k_XD.norm(dim=-1), rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 3])
def test_values_lie_on_equal_steps_between_the_ends(bits: int) -> None:
    v_XD = heads(50, 64) + 3
    found = vllm_pages.stepped_values(v_XD, bits)
    for own, got in zip(v_XD, found, strict=True):
        step = (own.max() - own.min()).item() / (2**bits - 1)
        assert len(got.unique()) <= 2**bits
        assert (got - own).abs().max().item() <= step / 2 + 0.01
        assert got.min().item() == pytest.approx(own.min().item(), abs=0.005)


def test_keys_of_eight_bits_have_no_scale() -> None:
    x = torch.tensor([[1e4, -1e4, 448.0, 0.001953125, 1e-6, 0.0]])
    assert vllm_pages.cast_fp8(x).tolist() == [[448.0, -448.0, 448.0, 0.001953125, 0.0, 0.0]]


def test_heads_that_are_odd_do_no_harm() -> None:
    zeros, alike = torch.zeros(3, 64), torch.full((3, 64), 2.5)
    for own in FORMATS.values():
        assert own.values(zeros).abs().max() == 0
        assert torch.allclose(own.values(alike), alike, rtol=1e-2)
        assert own.keys(zeros).abs().max() == 0
        assert own.keys(alike).isfinite().all()
    with pytest.raises(AssertionError, match="no power of two"):
        vllm_pages.quantized_keys(heads(2, 96), 4)


def test_exact_layers_are_ends_of_model() -> None:
    own = FORMATS["turboquant_4bit_nc"]
    assert own.exact_layers(30) == {0, 1, 28, 29}
    assert own.note(30) == "layers 0,1,28,29 in half precision"
    assert own.exact_layers(3) == {0, 1, 2}
    assert own.exact_layers(1) == {0}
    assert FORMATS["fp8"].exact_layers(30) == frozenset()
    assert FORMATS["fp8"].note(30) == ""


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("six") / "model", num_hidden_layers=6, hidden_size=64, head_dim=16)


def test_bytes_of_a_token_count_every_layer(six_layers: Path) -> None:
    model = open_model(str(six_layers), "auto")
    model.source.close()
    heads_, plain = 2, 2 * 2 * 16
    assert FORMATS["turboquant_4bit_nc"].bytes_per_token(model.spec) == heads_ * (4 * plain + 2 * (8 + 2 + 8 + 4))
    assert FORMATS["fp8"].bytes_per_token(model.spec) == heads_ * 6 * 32


@pytest.fixture(scope="module")
def record(six_layers: Path, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("out")
    text = out / "text.txt"
    text.write_text("No reader had ever posed it that before, and so it had no answer. " * 4)
    patch = pytest.MonkeyPatch()
    options = ["--model", str(six_layers), "--text", str(text), "--window", "40", "--tokens", "120", "--layers"]
    patch.setattr(sys, "argv", ["kv_quality.py", *options, "--out", str(out), "--html", str(out / "page.html")])
    kv_quality.main()
    patch.undo()
    assert (out / "page.html").exists()
    (path,) = out.glob("*-kv-quality.json")
    assert doc_tables.read_record(path)["section"] == "kv-quality"
    return json.loads(path.read_text())


@pytest.mark.slow
def test_kv_quality_measures_ours_and_vllm_in_one_run(record: dict) -> None:
    by_name = {result["measure"]: result for result in record["results"]}
    assert record["results"][0]["measure"] == "float32"
    for name in FORMATS:
        ours, theirs = by_name[name], by_name[f"{name}, {kv_quality.AS_VLLM}"]
        assert ours["num_predictions"] == theirs["num_predictions"] == 3 * 39
        assert 0 < theirs["mean_kl"] < 1
        assert 0 < ours["mean_kl"] < 1
    assert f"turboquant_4bit_nc, {kv_quality.WIDE}" in by_name
    bare = by_name[f"turboquant_4bit_nc, {kv_quality.NONE}"]
    assert bare["bytes_per_token"] < by_name["turboquant_4bit_nc"]["bytes_per_token"]
    command = "python benchmarks/kv_quality.py --tokens 120 --window 40 --model model --text text.txt --layers"
    assert record["command"] == command, "no place of this machine is in it"


@pytest.mark.slow
def test_kv_quality_with_near_tokens_measures_both_and_later_predictions(six_layers: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("No reader had ever posed it that before, and so it had no answer. " * 4)
    patch = pytest.MonkeyPatch()
    patch.setattr(kv_quality, "CHUNK_TOKENS", 64)
    options = ["--model", str(six_layers), "--text", str(text), "--window", "96", "--tokens", "96", "--prompt"]
    near = ["--near", "64", "turboquant_4bit_nc:128"]
    patch.setattr(sys, "argv", ["kv_quality.py", *options, *near, "--out", str(tmp_path)])
    kv_quality.main()
    patch.undo()
    (path,) = tmp_path.glob("*-kv-near.json")
    record = json.loads(path.read_text())
    by_name = {result["measure"]: result for result in record["results"]}
    assert 0 < by_name["turboquant_4bit_nc, near 64"]["mean_kl"] < by_name["turboquant_4bit_nc"]["mean_kl"]
    assert {name for name in by_name if name.endswith("near 128")} == {"turboquant_4bit_nc, near 128"}
    assert {result["after_prompt"]["num_predictions"] for result in record["results"]} == {95 - 64}
    assert all(result["after_prompt"]["name"] == name for name, result in by_name.items())


@pytest.mark.slow
def test_kv_quality_record_has_verdict_per_format(record: dict) -> None:
    found = {row["format"]: row for row in record["against_vllm"]}
    assert found.keys() == FORMATS.keys()
    by_name = {result["measure"]: result for result in record["results"]}
    for name, row in found.items():
        ours, theirs = by_name[name], by_name[f"{name}, {kv_quality.AS_VLLM}"]
        assert row["kl_of_theirs"] == pytest.approx(ours["mean_kl"] / theirs["mean_kl"])
        assert row["bytes_of_theirs"] == pytest.approx(ours["bytes_per_token"] / theirs["bytes_per_token"])
        assert row["holds"] == (
            ours["mean_kl"] <= theirs["mean_kl"] and ours["bytes_per_token"] <= theirs["bytes_per_token"]
        )


class Inner:
    """A backend that writes nothing."""

    pages, on_write = (), None

    def write(self, *arguments: object) -> None:
        """Do nothing."""


def test_exact_prompt_is_quantized_before_second_step_reads() -> None:
    own = FORMATS["turboquant_4bit_nc"]._replace(has_boundary=False)
    planes = {"k": heads(8, 1, 16), "v": heads(8, 1, 16, seed=1)}
    came = {name: plane.clone() for name, plane in planes.items()}
    spec = SimpleNamespace(layers=(0,), group_of=lambda layer: 0)
    storage = SimpleNamespace(spec=spec, plane=lambda layer, name: planes[name])
    pages = vllm_pages.VllmPages(Inner(), storage, own, True)

    def write(*slots: int) -> None:
        batch = SimpleNamespace(slots_GT=torch.tensor([slots]))
        pages.write(torch.empty(0), batch, None, None, 0, torch.empty(0))

    write(0, 1, 2, -1)
    assert all(planes[name].equal(came[name]) for name in planes), "rows of the prompt read it as it came"
    write(3, 4)
    for name, quantized in (("k", own.keys), ("v", own.values)):
        assert torch.allclose(planes[name][:5], quantized(came[name][:5]))
        assert planes[name][5:].equal(came[name][5:])
    read = {name: plane.clone() for name, plane in planes.items()}
    write(5)
    assert all(planes[name][:5].equal(read[name][:5]) for name in planes), "the prompt is quantized once"


def test_verdicts_without_divergence_have_no_ratio() -> None:
    from cli.eval_qualities import quality

    perfect = [quality("fp8", 10.0, mean_kl=0.1), quality(f"fp8, {kv_quality.AS_VLLM}", 10.0)]
    (row,) = kv_quality.verdicts(perfect)
    assert (row["kl_of_theirs"], row["holds"]) == (None, False)
    assert math.isfinite(row["bytes_of_theirs"])
