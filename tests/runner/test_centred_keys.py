"""Keys without their bias, and centred: what quantized layers hold for it, to the byte; what it is worth; what it must not change."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.config import EngineConfig
from holdfast.families.grouped.pages import QuantizedPages
from holdfast.kernels.attention.key_bias import key_bias_rows
from holdfast.kernels.latent.write_index import rotate_halves
from holdfast.loading.model_files import open_model
from holdfast.models.rope import rope_frequencies
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.key_means import average_turn, warm_token_ids
from holdfast.runner.variants import Variant, build_variants
from loading.tiny_models import save_tiny
from models.rope_oracle import table_rows
from runner.tiny_runners import SMALL, TinyBuilder, held_storages

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
planted = import_module("key_bias")

PLANTED = 40.0
TEXT = [5, 9, 200, 17, 33, 8, 101, 44, 7, 90, 250, 61, 12, 13, 77, 30, 31, 99, 3, 140]


def plant(folder: Path) -> None:
    """Large key biases in a saved model, not the same in any two layers."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for place, name in enumerate(sorted(name for name in tensors if name.endswith("k_proj.bias"))):
        dice = torch.Generator().manual_seed(place)
        tensors[name] = torch.randn(tensors[name].shape, generator=dice) * PLANTED * (place + 1)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> TinyBuilder:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "opt"):
        (folder / family).mkdir()
        save_tiny(family, folder / family)
        plant(folder / family)
    return TinyBuilder(folder)


def step_of(ids: list[int], start: int, end: int, pages: list[int]) -> LiveStep:
    own = Sequence(0, list(ids), len(ids), SamplingParams(temperature=0.0), seed=0, max_tokens=1)
    own.tables = [pages]
    return LiveStep((ScheduledSequence.of(own, start, end - start),))


def logits_of(runner, ids: list[int], cuts: tuple[int, ...], pages: list[int]) -> torch.Tensor:
    """For the last token, where the text is read in chunks."""
    ends = (*cuts, len(ids))
    hidden = torch.empty(0)
    for start, end in zip((0, *cuts), ends, strict=True):
        hidden = runner.hidden_rows(step_of(ids, start, end, pages))
    return runner.row_logits(hidden[-1:]).clone()


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["qwen2", "opt", "llama", "qwen3"])
@pytest.mark.parametrize("kv_format", ["fp8", "turboquant_4bit_nc"])
def test_centred_keys_held_bytes_equal_plan(build: TinyBuilder, family: str, kv_format: str) -> None:
    built = build(family, kv_cache_dtype=kv_format, max_model_len=64)
    planned = {term.owner: term.num_bytes for term in built.plan.memory.terms if term.owner.startswith("attention/")}
    held = {entry.owner: entry.num_bytes for entry in built.ledger if entry.owner in planned}
    assert held == {owner: num_bytes for owner, num_bytes in planned.items() if owner in held}
    wanted = {"qwen2": {"key_bias", "qkv_bias"}, "opt": {"key_means", "qkv_bias"}}.get(family, {"key_means"})
    assert {owner.partition("/")[2] for owner in held} & {"key_bias", "qkv_bias", "key_means"} == wanted
    own_bytes = sum(held_storages(built.runner).values()) - built.ledger.total_bytes
    assert 0 <= own_bytes < 4096, "what is held is in the ledger"
    built.release()
    assert held_storages(built.runner) == {}


def test_plain_pages_keep_the_bias_in_their_keys(build: TinyBuilder) -> None:
    """Layers that are protected in a plain format too."""
    for options in (
        {},
        {"kv_cache_dtype": "turboquant_4bit_nc", "kv_protected_layers": 2, "kv_protected_dtype": "auto"},
    ):
        built = build("qwen2", max_model_len=64, **options)
        assert not any(spec.has_key_bias for spec in built.plan.attention_specs)
        assert not any("bias" in entry.owner for entry in built.ledger if entry.owner.startswith("attention/"))
        built.release()


def test_centred_keys_leave_shared_weights_unchanged(build: TinyBuilder) -> None:
    config = EngineConfig.from_options(**SMALL, max_model_len=64)
    folder = build.folder / "qwen2"
    model = open_model(str(folder), "auto")
    quantized = replace(config, kv_cache_dtype="turboquant_4bit_nc", kv_protected_layers=0)
    built = build_variants([Variant(config), Variant(quantized), Variant(config)], model, lambda done, total: None)
    model.source.close()
    first, _, last = (logits_of(runner, TEXT, (), list(range(8))) for runner in built.runners)
    assert torch.equal(first, last)
    (file,) = folder.glob("*.safetensors")
    stored, keys = load_file(file), model.spec.key_part
    for runner, is_split in zip(built.runners, (False, True, False), strict=True):
        bias = runner.model.layers[0].attention.qkv.bias_N
        wanted = stored["model.layers.0.self_attn.k_proj.bias"]
        assert torch.equal(bias[keys], wanted) != is_split
    built.release()


def test_scores_get_what_keys_are_short_of(build: TinyBuilder) -> None:
    """The bias of the checkpoint, less what the projection has of it, at every position."""
    built = build("qwen2", kv_cache_dtype="fp8", max_model_len=64)
    spec = open_model(str(build.folder / "qwen2"), "auto").spec
    (file,) = (build.folder / "qwen2").glob("*.safetensors")
    stored = load_file(file)
    assert spec.rope is not None
    rotary = table_rows(spec.rope, spec.head_dim, spec.max_position, 64, torch.arange(64), torch.float64)
    for layer, pages in enumerate(built.runner.backend.pages):
        assert isinstance(pages, QuantizedPages)
        assert pages.planes.key_bias is not None
        projected = built.runner.model.layers[layer].attention.qkv.bias_N[spec.key_part]
        bias = (stored[f"model.layers.{layer}.self_attn.k_proj.bias"] - projected).view(2, 1, -1).double()
        turned = rotate_halves(bias.expand(2, 64, -1).transpose(0, 1), rotary).transpose(0, 1).double()
        rows = key_bias_rows(pages.planes.key_bias, torch.arange(64)).double()
        torch.testing.assert_close(rows, turned, rtol=1e-4, atol=1e-3)
        assert bias.abs().max() > PLANTED, "it is the planted one"
    built.release()


@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_centred_keys_large_bias_costs_little_in_fp8(build: TinyBuilder, family: str) -> None:
    """In 8 bits: without it half of the tokens would be others."""
    exact, coded = (build(family, max_model_len=64, kv_cache_dtype=name) for name in ("float32", "fp8"))
    wanted, found = (logits_of(built.runner, TEXT, (), list(range(8))) for built in (exact, coded))
    assert (wanted - found).abs().mean() < 0.1 * wanted.std()
    for built in (exact, coded):
        built.release()


@pytest.mark.parametrize("kv_format", ["fp8", "turboquant_4bit_nc"])
def test_chunks_and_pages_change_nothing(build: TinyBuilder, kv_format: str) -> None:
    """A prefix that is there already, in other pages, gives the logits of one that is computed in one go."""
    built = build("qwen2", kv_cache_dtype=kv_format, max_model_len=64)
    runner, whole = built.runner, None
    for cuts, pages in (((), [0, 1, 2, 3, 4]), ((8, 16), [0, 1, 2, 3, 4]), ((4,), [9, 3, 7, 0, 5])):
        found = logits_of(runner, TEXT, cuts, pages)
        whole = found if whole is None else whole
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    hit = runner.hidden_rows(step_of(TEXT, 16, len(TEXT), [9, 3, 7, 0, 5]))
    again = runner.hidden_rows(step_of(TEXT, 16, len(TEXT), [9, 3, 7, 0, 5]))
    assert torch.equal(hit, again)
    built.release()


def test_centred_keys_two_starts_give_same_means(build: TinyBuilder) -> None:
    found = []
    for _ in range(2):
        built = build("llama", kv_cache_dtype="turboquant_3bit_nc", max_model_len=64)
        means = [pages.planes.k_mean_KD for pages in built.runner.backend.pages if isinstance(pages, QuantizedPages)]
        found.append([mean.clone() for mean in means if mean is not None])
        assert all(mean.abs().sum() > 0 for mean in found[-1])
        built.release()
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def transformers_keys(model: torch.nn.Module, token_ids: list[int]) -> list[torch.Tensor]:
    """float32 [T, K, D] of each layer, as transformers computes them: after the norm, before rope; without rope, without bias."""
    found: list[torch.Tensor] = []
    config, decoder = model.config, getattr(model.model, "decoder", model.model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def keep(module: torch.nn.Module, inputs: object, out: torch.Tensor) -> None:
        is_by_head = out.dim() == 4 and out.shape[2] == len(token_ids)
        keys = out.transpose(1, 2) if is_by_head else out
        keys = keys - module.bias if decoder is not model.model else keys  # it shifts all scores of a row alike
        found.append(keys.detach().reshape(len(token_ids), -1, head_dim))

    attention = [layer.self_attn for layer in decoder.layers]
    hooks = [getattr(own, "k_norm", own.k_proj).register_forward_hook(keep) for own in attention]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return found


def averaged(key_KD: torch.Tensor, spec, layer: int, num_positions: int) -> torch.Tensor:
    """The mean of a key turned to every position of the context, one by one."""
    rope = spec.layer_rope(layer)
    if rope is None:
        return key_KD
    rotary = table_rows(rope, spec.head_dim, spec.max_position, num_positions, torch.arange(num_positions))
    return rotate_halves(key_KD.expand(num_positions, *key_KD.shape), rotary).double().mean(0).float()


@pytest.mark.each_value
@pytest.mark.parametrize("num_tokens", [32, 45])
@pytest.mark.parametrize("family", ["llama", "llama_yarn", "qwen3", "gemma3", "opt", "qwen2"])
def test_mean_is_of_the_keys_after_the_first_four(tmp_path: Path, family: str, num_tokens: int) -> None:
    """Against transformers: each head and pair, norms that add 1, a rope for each kind of layer; a key bias is part of it."""
    (tmp_path / family).mkdir()
    model = save_tiny(family, tmp_path / family)
    built = TinyBuilder(tmp_path)(family, kv_cache_dtype="fp8", max_model_len=num_tokens)
    spec = open_model(str(tmp_path / family), "auto").spec
    keys = transformers_keys(model, warm_token_ids(spec.vocab_size, num_tokens))
    for layer, pages in enumerate(built.runner.backend.pages):
        assert isinstance(pages, QuantizedPages)
        expected = keys[layer][4:].mean(0)
        if pages.planes.key_bias is not None:
            found = pages.planes.key_bias.bias_KD
        else:
            assert pages.planes.k_mean_KD is not None
            found, expected = pages.planes.k_mean_KD, averaged(expected, spec, layer, num_tokens)
        # Pages in fp8 change what the layers after them read.
        error = float((found - expected).norm() / expected.norm())
        assert error < (2**-8 if layer == 0 else 0.06)
    built.release()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_centred_keys_step_size_changes_no_mean(build: TinyBuilder, family: str) -> None:
    found = []
    for num_tokens in (64, 33, 5):
        built = build(
            family,
            kv_cache_dtype="turboquant_4bit_nc",
            max_model_len=64,
            max_num_batched_tokens=num_tokens,
            kv_protected_layers=0,
        )
        pages = [one.planes for one in built.runner.backend.pages]
        tables = [one.k_mean_KD if one.key_bias is None else one.key_bias.bias_KD for one in pages]
        found.append([table.clone() for table in tables if table is not None])
        assert found[-1]
        built.release()
    for others in found[1:]:
        assert all(torch.equal(first, other) for first, other in zip(found[0], others, strict=True))


def test_key_mean_of_rotated_format_is_rotated(build: TinyBuilder) -> None:
    plain, rotated = (
        build("llama", kv_cache_dtype=name, max_model_len=64, kv_protected_layers=0)
        for name in ("fp8", "turboquant_4bit_nc")
    )
    first, second = (built.runner.backend.pages[0].planes.k_mean_KD.clone() for built in (plain, rotated))
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, rotate_heads(first))
    torch.testing.assert_close(second.norm(dim=-1), first.norm(dim=-1))
    for built in (plain, rotated):
        built.release()


@pytest.mark.parametrize(
    ("options", "has_mean"),
    [
        ({"max_num_batched_tokens": 1}, True),
        ({"max_num_batched_tokens": 31}, True),
        ({"max_model_len": 31}, False),
        ({"max_model_len": 32}, True),
    ],
)
def test_mean_of_fewer_than_32_tokens_is_left_out(build: TinyBuilder, options: dict, has_mean: bool) -> None:
    built = build("llama", **({"kv_cache_dtype": "fp8", "max_model_len": 64} | options))
    means = [pages.planes.k_mean_KD for pages in built.runner.backend.pages]
    assert all(bool(mean.any()) == has_mean for mean in means)
    built.release()


def test_keys_in_half_precision_lose_what_scores_get(build: TinyBuilder) -> None:
    """To the bit: the mean is rounded to the type of the projection before it is split."""
    built = build("qwen2", kv_cache_dtype="fp8", max_model_len=64, dtype="bfloat16")
    spec = open_model(str(build.folder / "qwen2"), "auto").spec
    (file,) = (build.folder / "qwen2").glob("*.safetensors")
    stored = load_file(file)
    for layer, pages in enumerate(built.runner.backend.pages):
        projected = built.runner.model.layers[layer].attention.qkv.bias_N[spec.key_part]
        bias = stored[f"model.layers.{layer}.self_attn.k_proj.bias"].bfloat16().float()
        assert projected.dtype == torch.bfloat16
        assert projected.any()
        assert torch.equal(pages.planes.key_bias.bias_KD.flatten(), bias - projected.float())
    built.release()


def test_mean_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    save_tiny("llama", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    built = TinyBuilder(tmp_path)("llama", kv_cache_dtype="fp8", max_model_len=64, allow_nonfinite=True)
    first, second = (pages.planes.k_mean_KD for pages in built.runner.backend.pages)
    assert first.any()
    assert not second.any()
    built.release()


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 259, 151_936])
def test_warm_up_tokens_are_of_the_vocabulary(vocab_size: int) -> None:
    ids = warm_token_ids(vocab_size, 128)
    assert len(ids) == 128
    assert 0 <= min(ids) <= max(ids) < vocab_size


def test_warm_up_tokens_are_spread_by_the_golden_ratio() -> None:
    """As many in each octave of ids from 16 on, none of them below."""
    ids = warm_token_ids(2**16, 120)
    assert ids[:6] == [16, 2733, 113, 19473, 812, 33]
    octaves = [sum(2**power <= one < 2 ** (power + 1) for one in ids) for power in range(4, 16)]
    assert sum(octaves) == 120
    assert all(9 <= count <= 11 for count in octaves)


def test_average_turn_equals_mean_of_rotated_keys() -> None:
    spec = replace(open_spec(), theta=5000.0)
    key_KD = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    for num_positions in (1, 2, 300, 100_000):
        rotary = table_rows(spec, 16, 512, num_positions, torch.arange(num_positions))
        turned_LKD = rotate_halves(key_KD.expand(num_positions, 3, 16), rotary)
        turn_DD = average_turn(*rope_frequencies(spec, 16, 512, num_positions), num_positions, 8)
        wanted_KD = turned_LKD.double().mean(0).float()
        torch.testing.assert_close(key_KD @ turn_DD, wanted_KD, rtol=1e-4, atol=1e-5)


def open_spec():
    from holdfast.models.spec import RopeSpec

    return RopeSpec(theta=10000.0)


def test_planted_biases_leave_the_divergence_where_it_was(tmp_path: Path) -> None:
    """4-bit keys on a small Qwen2, no layer protected: 10 times the norm of keys, in pairs that turn fast, costs less than 1.3 x."""
    kl, formats = {}, ("turboquant_4bit_nc",)
    for factor in (0, 10):
        folder = tmp_path / str(factor)
        folder.mkdir()
        text = planted.plant(folder, 0, factor, "fast")[:128]
        kl[factor] = planted.qualities(folder, text, formats, 0)[formats[0]].mean_kl
    assert kl[10] < 1.3 * kl[0]
    with planted.biased_keys(wanted=True):
        assert planted.qualities(folder, text, formats, 0)[formats[0]].mean_kl > 2 * kl[0]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
