"""Key scales: what they are, what quantized layers hold for them to the byte, what they are worth, and what they must not change."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.cache.spec import uniform_cache
from holdfast.families.grouped.pages import QuantizedPages
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import dequantize_keys, quantize_keys, rotate_heads
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.build import BuiltRunner
from holdfast.runner.key_scale import MIXED, Balance, best_choices, pair_scale
from kernels.exactness import random
from kernels.quantized_kv_cases import make_planes
from loading.tiny_models import save_tiny
from runner.tiny_runners import TinyBuilder, held_storages
from runner.unbalanced_models import unbalance

FEW_BITS = {"kv_cache_dtype": "turboquant_4bit_nc", "kv_protected_layers": 0, "max_model_len": 200, "page_tokens": 16}
TEXT = [(7 * place * place + 11 * place) % 240 + 3 for place in range(200)]
PROMPT = [(13 * place * place + 5 * place) % 240 + 3 for place in range(60)]
HEAD_DIM = 32


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> TinyBuilder:
    """Models of wide heads: as they are, and with planted pairs."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"head_dim": HEAD_DIM, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    for family in ("llama", "qwen2"):
        for is_planted in (False, True):
            name = f"{family} planted" if is_planted else family
            (folder / name).mkdir()
            torch.manual_seed(0)
            save_tiny(family, folder / name, **shape, initializer_range=0.3)
            unbalance(folder / name, HEAD_DIM, 4.0 if is_planted else 1.0)
    return TinyBuilder(folder)


def scales_of(built: BuiltRunner) -> list[torch.Tensor]:
    """[2, K, D] of each layer that has some."""
    pages = [own for own in built.runner.backend.pages if isinstance(own, QuantizedPages)]
    return [own.planes.pair_scale_2KD.clone() for own in pages if own.planes.pair_scale_2KD is not None]


def logits_of(built: BuiltRunner) -> torch.Tensor:
    """For all tokens of the prompt, read in chunks."""
    own = Sequence(0, list(PROMPT), len(PROMPT), SamplingParams(temperature=0.0), seed=0, max_tokens=1)
    first, own.tables = 0, []
    for group in built.runner.groups:
        count = group.pages_for(len(PROMPT))
        own.tables.append(list(range(first, first + count)))
        first += count
    found = []
    for start in range(0, len(PROMPT), 30):
        hidden = built.runner.hidden_rows(LiveStep((ScheduledSequence.of(own, start, 30),)))
        found.append(built.runner.row_logits(hidden[-8:]).clone())
    return torch.cat(found)


def error_of(build: TinyBuilder, family: str, **options) -> float:
    """Error of logits beside those of plain pages."""
    built, plain = build(family, text_ids=TEXT, **FEW_BITS | options), build(family, max_model_len=200, page_tokens=16)
    found, wanted = logits_of(built), logits_of(plain)
    for one in (built, plain):
        one.release()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kv_format", ["turboquant_4bit_nc", "turboquant_k3v4_nc"])
def test_key_scales_balance_planted_pairs(build: TinyBuilder, family: str, kv_format: str) -> None:
    """Codes lose what they lose without the planted pairs; without scales they lose far more."""
    plain, unscaled, scaled = (
        error_of(build, name, kv_cache_dtype=kv_format, kv_near_tokens=0, kv_key_scale=is_scaled)
        for name, is_scaled in ((family, False), (f"{family} planted", False), (f"{family} planted", True))
    )
    assert unscaled > 1.5 * plain, (plain, unscaled, scaled)
    assert scaled < 1.2 * plain, (plain, unscaled, scaled)


@pytest.mark.parametrize("family", ["llama planted", "qwen2 planted"])
def test_key_scales_leave_exact_tokens_exact(build: TinyBuilder, family: str) -> None:
    """Near rows, their mean and their key bias have the scale: within the first block scores are those of the model."""
    assert error_of(build, family, kv_near_tokens=64, page_tokens=64, kv_key_scale=True) < 1e-4


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "opt"])
@pytest.mark.parametrize("layers", [0, 1])
def test_key_scales_held_bytes_equal_plan(build: TinyBuilder, family: str, layers: int) -> None:
    """A protected layer has none."""
    options = {"kv_protected_layers": layers, "page_tokens": 4, "max_model_len": 128}
    built = build(family, text_ids=TEXT, **FEW_BITS | options, kv_key_scale=True)
    planned = {term.owner: term.num_bytes for term in built.plan.memory.terms if term.owner.startswith("attention/")}
    held = {entry.owner: entry.num_bytes for entry in built.ledger if entry.owner in planned}
    assert held == {owner: num_bytes for owner, num_bytes in planned.items() if owner in held}
    spec = built.plan.attention_specs[0].cache
    num_layers = len(built.plan.attention_specs) - layers
    assert held["attention/key_scales"] == num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4
    assert len(scales_of(built)) == num_layers
    own_bytes = sum(held_storages(built.runner).values()) - built.ledger.total_bytes
    assert 0 <= own_bytes < 4096, "what is held is in the ledger"
    built.release()


def test_key_scales_off_or_without_narrow_keys_hold_nothing(build: TinyBuilder) -> None:
    for options in ({"kv_key_scale": False}, {"kv_cache_dtype": "fp8"}, {"tokenizer": "none"}):
        built = build("llama", text_ids=TEXT, **FEW_BITS | options)
        assert not scales_of(built)
        assert not any(term.owner == "attention/key_scales" for term in built.plan.memory.terms)
        built.release()


@pytest.mark.parametrize("options", [{"text_ids": TEXT[:63]}, {"max_model_len": 63}])
def test_key_scales_with_too_little_text_are_one(
    build: TinyBuilder, options: dict, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    built = build("llama planted", **{"text_ids": TEXT} | FEW_BITS | options)
    assert all(bool((scale == 1).all()) for scale in scales_of(built))
    assert "scales no key" in caplog.text
    built.release()


def test_key_scales_are_equal_whatever_the_steps(build: TinyBuilder) -> None:
    """A block of rows comes in one step or in many."""
    found = []
    for num_tokens in (128, 200, 21):
        built = build("qwen2 planted", text_ids=TEXT, kv_key_scale=True, max_num_batched_tokens=num_tokens, **FEW_BITS)
        found.append(scales_of(built))
        built.release()
    for scales in found:
        assert all(torch.equal(one, other) for one, other in zip(scales, found[0], strict=True))
        for scale in scales:
            assert bool((scale != 1).any(-1).all()), "every head has a scale"
            assert torch.equal(scale[..., : HEAD_DIM // 2], scale[..., HEAD_DIM // 2 :]), "both dims of a pair"
            torch.testing.assert_close(scale[0] * scale[1], torch.ones_like(scale[0]))


def test_key_scales_of_a_head_that_is_no_number_are_one(build: TinyBuilder) -> None:
    folder = build.folder / "infinite"
    folder.mkdir()
    save_tiny("llama", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    built = build("infinite", text_ids=TEXT, **FEW_BITS, kv_key_scale=True, allow_nonfinite=True)
    assert bool((scales_of(built)[1][:, 0] == 1).all())
    built.release()


def test_key_scales_scale_means_and_biases_too(build: TinyBuilder) -> None:
    for family in ("llama planted", "qwen2 planted"):
        plain, scaled = (build(family, text_ids=TEXT, **FEW_BITS, kv_key_scale=on) for on in (False, True))
        for own, other in zip(scaled.runner.backend.pages, plain.runner.backend.pages, strict=True):
            assert own.planes.pair_scale_2KD is not None
            scale = own.planes.pair_scale_2KD[0]
            if own.planes.key_bias is not None:
                torch.testing.assert_close(own.planes.key_bias.bias_KD, other.planes.key_bias.bias_KD * scale)
            else:
                wanted = rotate_heads(rotate_heads(other.planes.k_mean_KD) * scale)
                torch.testing.assert_close(own.planes.k_mean_KD, wanted)
        for built in (plain, scaled):
            built.release()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "near", [None, NearSpec(64, 1, 16, 0), NearSpec(64, 1, 16, 16)], ids=["codes", "late", "first"]
)
def test_balance_weighs_errors_by_the_softmax(softcap: float | None, near: NearSpec | None) -> None:
    """Against loops in float64; the first tokens count unless they are read exact."""
    num_kv_heads, head_dim, half = 2, 16, 32
    cache = uniform_cache(1, KV_FORMATS["turboquant_4bit_nc"], num_kv_heads, head_dim, 4).layers[0]
    spec = GroupedAttentionSpec(cache, 6, 0.4, None, 64, "float32", "cpu", softcap=softcap, near=near)
    planes = make_planes(4, 4, num_kv_heads, head_dim, 4, 1, torch.float32, k_mean_KD=random(num_kv_heads, head_dim))
    balance, qkv = Balance(spec, planes, half), random(64, 10 * head_dim, seed=3)
    for start in (0, 32):
        balance.read(qkv[start : start + 32], None, None)
    q, k = qkv.double().unflatten(1, (10, head_dim)).split((6, 4), dim=1)
    k, firsts = k[:, :2], list(range(0 if near is not None and near.first_tokens else 4))
    coded = k - rotate_heads(planes.k_mean_KD).double()
    codes = quantize_keys(rotate_heads(coded.float()), 4)
    error = rotate_heads(dequantize_keys(codes, 4, head_dim)).double() - coded
    wanted = torch.zeros(num_kv_heads, dtype=torch.float64)
    for row in range(32, 64):
        seen = [*firsts, *range(32, row + 1)]
        for head in range(6):
            scores = k[seen, head // 3] @ q[row, head] * 0.4
            scores = scores if softcap is None else (scores / softcap).tanh() * softcap
            weights, wrong = scores.softmax(0), error[seen, head // 3] @ q[row, head] * 0.4
            wanted[head // 3] += weights @ (wrong - weights @ wrong) ** 2
    torch.testing.assert_close(balance.error_SK[0], wanted, rtol=1e-4, atol=0.0)


def test_best_choices_need_a_gain() -> None:
    error = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.9, 0.96, 0.8, 0.0], [0.7, 0.99, 0.9, 0.0]])
    assert best_choices(error)[:3].tolist() == [2, 0, 1]
    assert best_choices(error.nan_to_num() + torch.nan).tolist() == [0] * 4


def test_pair_scale_is_the_fourth_root_of_the_ratio() -> None:
    """Queries over keys, with a mean share on top; the geometric mean is 1."""
    q_squares = torch.tensor([[1.0, 4.0, 16.0, 64.0]], dtype=torch.float64)
    k_squares = q_squares.flip(1)
    mixed = q_squares + MIXED * q_squares.mean()
    wanted = (mixed / mixed.flip(1)) ** 0.25
    found = pair_scale(q_squares, k_squares)
    assert bool(((found / wanted).log2().abs() <= 0.5 / 8 + 1e-9).all()), "rounded to eighths of an octave"
    assert abs(float(found.log2().mean())) < 1e-9


@pytest.mark.parametrize("number", [0.0, torch.inf, torch.nan])
def test_pair_scale_without_numbers_is_one(number: float) -> None:
    """In that head alone; the scale of any other stays within its bounds."""
    squares = torch.ones(2, 4, dtype=torch.float64)
    large = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1e30, 1.0, 1e-30, 1.0]], dtype=torch.float64)
    squares[0, 1 if number else slice(None)] = number
    found = pair_scale(large, squares)
    assert bool((found[0] == 1).all())
    assert bool((found[1] != 1).all())
    assert float(found.min()) >= 1 / 8
    assert float(found.max()) <= 8
