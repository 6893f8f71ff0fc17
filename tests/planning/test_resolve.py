"""Every open setting is settled, with a reason."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.config import EngineConfig, Limits, parse_layers
from holdfast.errors import ConfigError
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel, declare_decoder
from holdfast.models.spec import ModelSpec, RopeSpec
from holdfast.planning.protected_layers import ProtectedLayers, by_key_bias, by_position, choose_protected, listed
from holdfast.planning.resolve import CPU_KV_BYTES, PlanRequest, Resolved, choose_recipe, resolve, unsupported_scheme
from holdfast.planning.target import Target, memory_target
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS, MLA_FORMATS
from holdfast.quant.weight_schemes import (
    EMBEDDING_CHOICES,
    FP8,
    FP8_BLOCK,
    HEAD_SCHEME,
    WEIGHT_SCHEMES,
    QuantizedEmbeddings,
    WeightRecipe,
)
from planning.plan_cases import A100, GIB, H200, HOST, RTX4090, declared

SMOL = declared("SmolLM2-135M")
NARROW = "turboquant_4bit_nc"


def chosen(model: DeclaredModel = SMOL, kv_format: str = NARROW, dtype: str = "bfloat16", **options) -> ProtectedLayers:
    return choose_protected(EngineConfig(**options), model, KV_FORMATS[kv_format], dtype, near_tokens=0, page_tokens=64)


def with_layers(num_layers: int) -> DeclaredModel:
    assert SMOL.spec is not None
    return declare_decoder(replace(SMOL.spec, num_layers=num_layers), "a dummy")


@pytest.mark.parametrize("name", KV_FORMATS)
def test_protected_layers_default_of_every_kv_format(name: str) -> None:
    protected = chosen(kv_format=name)
    assert len(protected.layers) == DEFAULT_PROTECTED_LAYERS.get(name, 0)
    assert bool(protected.reason) == KV_FORMATS[name].is_quantized
    if protected.layers:
        assert protected == ((0, 1, 28, 29), KV_FORMATS["fp8"], False, protected.reason)


@pytest.mark.parametrize(("num_layers", "layers"), [(1, ()), (2, (0,)), (3, (0,)), (7, (0, 1, 6)), (8, (0, 1, 6, 7))])
def test_never_more_than_half_of_a_small_model(num_layers: int, layers: tuple[int, ...]) -> None:
    protected = chosen(with_layers(num_layers))
    assert protected.layers == layers
    assert ("half" in protected.reason) == (num_layers < 8)


@pytest.mark.parametrize(
    ("value", "layers", "reason"),
    [
        (0, (), ""),
        (1, (0,), "given; kept in fp8: the first (0)"),
        ("3", (0, 1, 29), "given; kept in fp8: the first and the last (0,1,29)"),
        (30, tuple(range(30)), None),
        ("29,3", (3, 29), ""),
        ("7,", (7,), ""),
    ],
)
def test_given_protected_layers_are_taken(value: object, layers: tuple[int, ...], reason: str | None) -> None:
    protected = chosen(kv_protected_layers=value)
    assert protected.layers == layers
    assert not protected.is_open
    assert reason is None or protected.reason == reason


def test_weights_have_the_last_word_where_there_are_key_biases() -> None:
    biased = declared("Qwen2.5-7B-Instruct")
    protected = chosen(biased)
    assert protected.is_open
    assert protected.reason == f"the default of {NARROW}; kept in fp8: those with the largest key biases"
    assert protected.layers == (0, 1, 26, 27), "by position until then"
    assert not chosen(biased, kv_protected_layers="5,6").is_open, "a list is a list"
    assert not chosen(biased, kv_protected_layers=28).is_open, "all of them are all of them"
    assert not chosen(biased, kv_format="turboquant_k8v4").is_open, "none are none"
    assert chosen(biased, kv_format="turboquant_k8v4", kv_protected_layers=1).is_open
    staged = chosen(biased, pipeline_parallel_size=2)
    assert (staged.is_open, staged.layers) == (False, (0, 1, 26, 27)), "bytes of a stage depend on which they are"
    assert biased.spec is not None
    windows = (None, 4096) * (biased.spec.num_layers // 2)
    grouped = declare_decoder(replace(biased.spec, sliding_windows=windows), "windows")
    assert not chosen(grouped, kv_protected_layers=4).is_open, "so do those of groups"
    assert chosen(grouped, kv_protected_layers=4, max_model_len=4096).is_open, "a window that is never left is none"


@pytest.mark.parametrize(
    ("kv_format", "options", "wider"),
    [
        (NARROW, {}, "fp8"),
        (NARROW, {"kv_protected_dtype": "auto"}, "bfloat16"),
        ("turboquant_3bit_nc", {"kv_protected_dtype": "turboquant_k8v4"}, "turboquant_k8v4"),
        ("turboquant_k8v4", {"kv_protected_layers": 2}, "fp8"),
        ("fp8", {"kv_protected_layers": 2, "kv_protected_dtype": "auto"}, "bfloat16"),
        ("bfloat16", {"kv_protected_layers": 2, "kv_protected_dtype": "float32"}, "float32"),
    ],
)
def test_protected_layers_take_wider_format(kv_format: str, options: dict, wider: str) -> None:
    protected = chosen(kv_format=kv_format, **options)
    assert protected.format.name == wider
    formats = protected.formats(KV_FORMATS[kv_format], 30)
    assert [form.name for form in formats].count(wider) == len(protected.layers) > 0
    assert all(form.name == kv_format for layer, form in enumerate(formats) if layer not in protected.layers)


@pytest.mark.parametrize(
    ("kv_format", "options", "code", "values"),
    [
        ("fp8", {"kv_protected_layers": 4}, "plan.protected_not_wider", {"num_bytes": 132, "kv_bytes": 132}),
        ("bfloat16", {"kv_protected_layers": "3,"}, "plan.nothing_to_protect", {"num_bytes": 132, "kv_bytes": 256}),
        ("float32", {"kv_protected_layers": 4, "kv_protected_dtype": "float32"}, "plan.nothing_to_protect", {}),
        (NARROW, {"kv_protected_dtype": "turboquant_3bit_nc"}, "plan.protected_not_wider", {}),
        (NARROW, {"kv_protected_layers": 31}, "plan.too_many_layers", {"value": 31, "num_layers": 30}),
        (NARROW, {"kv_protected_layers": "1,30"}, "plan.too_many_layers", {"value": "1,30", "last": 29}),
    ],
)
def test_impossible_protected_layers_are_refused(kv_format: str, options: dict, code: str, values: dict) -> None:
    with raises_code(code, ConfigError, **values) as caught:
        chosen(kv_format=kv_format, **options)
    assert "\n" not in str(caught.value)


def test_protected_latents_need_a_wider_latent_format() -> None:
    config = EngineConfig(kv_protected_layers=2, kv_protected_dtype="turboquant_3bit_nc")
    with pytest.raises(ConfigError, match="this model keeps latents"):
        choose_protected(config, declared("DeepSeek-R1"), MLA_FORMATS["fp8_ds_mla"], "bfloat16", 0, 64)
    config = replace(config, kv_protected_dtype="turboquant_mla_4bit")
    values = {"num_bytes": 386, "kv_bytes": 656, "accepted": ("float32", "float16", "bfloat16")}
    with raises_code("plan.protected_not_wider", ConfigError, **values):
        choose_protected(config, declared("DeepSeek-R1"), MLA_FORMATS["fp8_ds_mla"], "bfloat16", 0, 64)


@pytest.mark.parametrize(
    ("index", "wider", "num_bytes"),
    [
        ("bfloat16", "fp8", 656 + 256),
        ("fp8", "bfloat16", 1152 + 132),
        ("auto", "bfloat16", 1152 + 256),
        ("auto", "fp8", 656 + 132),
    ],
)
def test_given_index_format_holds_in_protected_layers(index: str, wider: str, num_bytes: int) -> None:
    config = EngineConfig(
        kv_cache_dtype="turboquant_mla_4bit",
        kv_protected_layers=4,
        kv_protected_dtype=wider,
        index_cache_dtype=index,
    )
    model = declared("DeepSeek-V3.2")
    assert model.kv_bytes_per_token(resolve(PlanRequest(config, model, H200)).protected.format) == 61 * num_bytes


def test_models_without_heads_protect_nothing() -> None:
    compressed = declared("DeepSeek-V4-Pro")
    assert chosen(compressed, "fp8") == ((), KV_FORMATS["fp8"], False, "")
    assert chosen(compressed, "fp8", kv_protected_layers=0).layers == ()
    for value in (1, "0,"):
        with raises_code("plan.one_kv_format", ConfigError, value=value):
            chosen(compressed, "fp8", kv_protected_layers=value)


@given(st.integers(1, 80).flatmap(lambda number: st.tuples(st.integers(0, number), st.just(number))))
def test_positions_are_the_two_ends(sizes: tuple[int, int]) -> None:
    count, num_layers = sizes
    first, last = (count + 1) // 2, count // 2
    assert by_position(count, num_layers) == tuple(
        layer for layer in range(num_layers) if layer < first or layer >= num_layers - last
    )
    if count < num_layers:
        norms = [1.0] * num_layers
        norms[num_layers // 2] = 0.5
        assert by_key_bias(count, norms)[0] == by_position(count, num_layers), "equals are taken by position"


@given(
    st.lists(st.floats(0, 1e30) | st.sampled_from([0.0, 1.0, math.inf, math.nan]), min_size=1, max_size=40),
    st.integers(1, 40),
)
def test_key_bias_protection_takes_largest_norms(norms: list[float], wanted: int) -> None:
    count = min(wanted, len(norms))
    layers, reason = by_key_bias(count, norms)
    assert len(set(layers)) == count
    assert list(layers) == sorted(layers)
    sizes = [math.inf if math.isnan(norm) else norm for norm in norms]
    left = [sizes[layer] for layer in range(len(sizes)) if layer not in layers]
    assert min(sizes[layer] for layer in layers) >= max(left, default=-1.0)
    assert reason
    assert "\n" not in reason


def test_biases_that_are_alike_are_taken_by_position() -> None:
    assert by_key_bias(4, [0.0] * 12) == (
        (0, 1, 10, 11),
        "all key biases are alike, and these are the first and the last",
    )
    assert by_key_bias(3, [1.0, 1.0, 5.0, 1.0, 1.0])[0] == (0, 2, 4), "the ends first among equals"


def test_key_bias_protection_reason_has_norms() -> None:
    """The norms of a model that is known to break with 4-bit keys: the ends, and one in the middle."""
    norms = [605.0, 22.0, 20.0, 300.0, 25.0, 18.0, 30.0, 921.0]
    layers, reason = by_key_bias(3, norms)
    assert layers == (0, 3, 7)
    assert reason == "their key biases are the largest, 300 to 921 where the median is 25"


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True))
def test_parse_layers_inverts_listed(layers: list[int]) -> None:
    assert parse_layers(listed(sorted(layers)), "x") == tuple(sorted(layers))


QUANTIZE_ACTIVATIONS = [name for name, scheme in WEIGHT_SCHEMES.items() if scheme.quantizes_activations]


def choose(model: str | DeclaredModel = "Qwen3-8B", target: Target = H200, **options):
    known = declared(model) if isinstance(model, str) else model
    return choose_recipe(EngineConfig.from_options(**options), known, target)


def test_recipe_without_options_reports_nothing() -> None:
    assert choose() == (WeightRecipe(), ())
    assert choose(quantization="none") == (WeightRecipe(), ())


def test_choose_recipe_every_scheme_runs_on_new_gpus_and_hosts() -> None:
    """A GPU of which only the size is known counts as a new one."""
    for target in (H200, RTX4090, HOST, memory_target("24GiB")):
        for name in WEIGHT_SCHEMES:
            recipe, notes = choose(target=target, quantization=name)
            assert recipe == WeightRecipe(WEIGHT_SCHEMES[name])
            assert notes == (("quantization", name, "given: 145 of 291 weights are quantized as they load"),)


def test_fp8_scheme_needs_a_gpu_with_fp8_products() -> None:
    for name in QUANTIZE_ACTIVATIONS:
        with raises_code("plan.scheme_needs_newer_gpu", ConfigError, value=name, accepted="int8 or mxfp4") as caught:
            choose(target=A100, quantization=name)
        assert "compute capability 8.0" in str(caught.value)
    works = [name for name, scheme in WEIGHT_SCHEMES.items() if unsupported_scheme(scheme, A100) is None]
    assert works == ["int8", "mxfp4"]


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
@pytest.mark.parametrize("embeddings", EMBEDDING_CHOICES)
def test_head_of_old_gpus_is_quantized_as_anywhere(name: str, embeddings: QuantizedEmbeddings) -> None:
    recipe, notes = choose(target=A100, quantization=name, quantized_embeddings=embeddings)
    assert recipe == WeightRecipe(WEIGHT_SCHEMES[name], embeddings)
    assert (recipe, notes) == choose(target=H200, quantization=name, quantized_embeddings=embeddings)
    head = recipe.scheme_for("head", ())
    assert head is None or not head.quantizes_activations, "else that GPU could not multiply by it"


def test_idle_pattern_is_reported_and_wrong_one_raises() -> None:
    _, notes = choose(quantization="fp8", quantization_ignore="*norm*,lm_head")
    assert notes[1] == ("quantization_ignore", "*norm*", "given, but what it matches is never quantized")
    _, notes = choose(quantization="fp8", quantization_ignore="*")
    assert notes == (("quantization", "fp8", "given, but no weight is quantized: quantization_ignore covers them all"),)
    with raises_code("quant.no_such_weight", ConfigError, value="*doun_proj*") as caught:
        choose(quantization="fp8", quantization_ignore="*doun_proj*")
    assert caught.value.hints == ("Did you mean *down_proj*?",)


def test_choose_recipe_quantized_checkpoint_keeps_its_scheme() -> None:
    recipe, notes = choose("DeepSeek-R1")
    assert recipe.scheme == FP8_BLOCK
    assert notes == (("quantization", "fp8_block", "the checkpoint's own"),)
    assert choose("DeepSeek-R1", quantization="fp8_block")[0] == recipe, "that is what it is"
    with raises_code("plan.already_quantized", ConfigError, value="mxfp4", stored="fp8_block"):
        choose("DeepSeek-R1", quantization="mxfp4")


STORED = {"layers.0.o.weight": FP8, "lm_head.weight": HEAD_SCHEME}


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"quantization_ignore": "*o_proj*"}, "quant.stored_weight", {"weight": "layers.0.o.weight", "stored": "fp8"}),
        ({"quantization_ignore": "*o_porj*"}, "quant.no_such_weight", {"value": "*o_porj*"}),
        ({"quantized_embeddings": "none"}, "quant.stored_embedding", {"name": "quantized_embeddings"}),
        ({"quantized_embeddings": "all"}, "quant.stored_embedding", {"name": "quantized_embeddings"}),
        ({"quantization": "int8"}, "plan.already_quantized", {"stored": "fp8", "value": "int8"}),
    ],
)
def test_stored_weights_refuse_other_recipes_with_a_fix(options: dict, code: str, values: dict) -> None:
    """No weight of them is open. Every fix works."""
    saved = replace(declared("Qwen3-8B"), stored=STORED)
    with raises_code(code, ConfigError, **values) as caught:
        choose(saved, **{"quantization": "fp8"} | options)
    assert caught.value.hints == (("Did you mean *o_proj*?",) if code == "quant.no_such_weight" else ())
    if "quantized_embeddings" in options:
        with raises_code(code, ConfigError, **values):
            choose(saved, **options)
    as_it_is = choose(saved)[0]
    assert choose(saved, quantization="fp8")[0] == as_it_is
    assert choose(saved, quantization="fp8", quantization_ignore="*down_proj*")[0] == as_it_is, "that is plain anyway"


def test_choose_recipe_own_scheme_applies_to_open_weights() -> None:
    plain = declared("Qwen3-8B")
    left = frozenset(weight.name for weight in plain.parameters() if "layers.1." not in weight.name)
    stored = replace(plain, stored={"layers.0.o.weight": FP8}, open_weights=left)
    recipe, notes = choose(stored, quantization="fp8", quantization_ignore="model.layers.2.*")
    (note,) = notes
    assert note[2] == "given, and the checkpoint's own; 136 of its plain weights are quantized on load"
    assert recipe.scheme_for("linear", ["layers.3.o.weight"]) == FP8
    assert recipe.scheme_for("linear", ["layers.1.o.weight"]) is None, "its makers left it out"
    assert recipe.scheme_for("linear", ["layers.2.o.weight"]) is None, "ignored by the user"
    assert choose(stored)[0] == stored.stored_recipe


def test_choose_recipe_unread_pattern_refused() -> None:
    plain = declared("Qwen3-8B")
    stored = replace(plain, stored={"layers.0.o.weight": FP8}, unread_pattern="re:(?!a)b")
    assert choose(stored)[0] == stored.stored_recipe
    with raises_code("plan.unread_pattern", ConfigError, value="fp8", pattern="re:(?!a)b"):
        choose(stored, quantization="fp8")


def test_embeddings_without_a_scheme_are_reported() -> None:
    recipe, notes = choose(quantized_embeddings="all")
    assert recipe.scheme is None
    assert notes == (("quantized_embeddings", "all", "given, but nothing is quantized without quantization"),)


def test_choose_recipe_fp8_checkpoint_on_old_gpu_refused() -> None:
    stored = replace(declared("Qwen3-8B"), stored={"layers.0.o.weight": FP8})
    assert choose(stored)[0].scheme == FP8
    for options in ({}, {"quantization": "int8"}):
        with raises_code("plan.stored_needs_newer_gpu", ConfigError, stored="fp8", accepted="int8 or mxfp4"):
            choose(stored, A100, **options)


SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
    checkpoint_dtype="bfloat16",
    norm_eps=1e-5,
    rope=RopeSpec(10_000.0),
)
SMALL_HOST = Target("cpu", "cpu", 10 * GIB, 10 * GIB, 0, "")
SHARED = Target("cuda", "cuda:0", 80 * GIB, 60 * GIB, GIB // 2, "20.00 GiB of 80.00 GiB are held by others")
FREE = Target("cuda", "cuda:1", 80 * GIB, 80 * GIB, GIB // 2, "")


def settle(spec: ModelSpec = SPEC, target: Target = SMALL_HOST, **options: object) -> Resolved:
    return resolve(PlanRequest(EngineConfig.from_options(**options), declare_decoder(spec, "a dummy"), target))


def reasons(resolved: Resolved) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.reason) for choice in resolved.choices}


def test_everything_left_open_on_a_cpu() -> None:
    resolved = settle()
    assert resolved.device == "cpu"
    assert resolved.dtype == "float32"
    assert resolved.kv_format.name == "float32"
    assert resolved.limits == Limits(64, 2048, 512, 16)
    assert resolved.may_shorten
    assert resolved.budget_bytes == 9 * GIB
    assert resolved.max_kv_bytes == CPU_KV_BYTES
    assert reasons(resolved) == {
        "dtype": ("float32", "the fastest exact type on a CPU"),
        "kv_cache_dtype": ("float32", "the same as dtype"),
        "max_model_len": ("512", "what the model was made for"),
        "memory": ("9.00 GiB", "90% of 10.00 GiB available"),
    }


def test_everything_left_open_on_a_gpu() -> None:
    resolved = settle(target=SHARED)
    assert resolved.device == "cuda:0"
    assert resolved.dtype == resolved.kv_format.name == "bfloat16"
    assert resolved.limits == Limits(256, 8192, 512, 16)
    assert resolved.budget_bytes == 60 * GIB, "others hold 20 GiB, so 90 % of the device is not there"
    assert resolved.max_kv_bytes is None
    assert reasons(resolved)["dtype"] == ("bfloat16", "the checkpoint's own")
    held = "what others leave: they hold 20.00 GiB of the device's 80.00 GiB"
    assert reasons(resolved)["memory"] == ("60.00 GiB", held)


@pytest.mark.parametrize(
    ("checkpoint_dtype", "dtype"), [("float16", "float16"), ("float32", "bfloat16"), ("float64", "bfloat16")]
)
def test_resolve_dtype_on_gpu_follows_checkpoint(checkpoint_dtype: str, dtype: str) -> None:
    assert settle(replace(SPEC, checkpoint_dtype=checkpoint_dtype), FREE).dtype == dtype


def test_given_options_are_taken_without_a_reason() -> None:
    resolved = settle(
        dtype="bfloat16",
        kv_cache_dtype="float16",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        page_tokens=4,
        memory_limit="2GiB",
        kv_cache_memory="1MiB",
    )
    assert resolved.dtype == "bfloat16"
    assert resolved.kv_format.name == "float16"
    assert resolved.limits == Limits(3, 7, 100, 4)
    assert not resolved.may_shorten
    assert (resolved.budget_bytes, resolved.max_kv_bytes) == (2 * GIB, 1024**2)
    assert reasons(resolved) == {"memory": ("2.00 GiB", "memory_limit")}


def test_resolve_takes_every_given_kv_format() -> None:
    for name in KV_FORMATS:
        resolved = settle(kv_cache_dtype=name)
        assert resolved.kv_format is KV_FORMATS[name]
        assert "kv_cache_dtype" not in reasons(resolved)


def test_quantized_pages_are_a_tile_unless_given() -> None:
    resolved = settle(kv_cache_dtype="fp8")
    assert resolved.limits.page_tokens == 64
    assert reasons(resolved)["page_tokens"] == ("64", "attention over quantized pages works in tiles of 64 tokens")
    given = settle(kv_cache_dtype="fp8", block_size=16)
    assert given.limits.page_tokens == 16
    assert "page_tokens" not in reasons(given)
    compressed, latent = (
        resolve(PlanRequest(EngineConfig(kv_cache_dtype="fp8"), declare_config(CATALOGUE[name], "x"), FREE))
        for name in ("DeepSeek-V4-Pro", "DeepSeek-R1")
    )
    assert compressed.limits.page_tokens == 16, "nothing is quantized by head there"
    assert latent.limits.page_tokens == 64
    assert reasons(latent)["page_tokens"] == ("64", "attention over latents works in tiles of 64 tokens")


def test_protected_layers_are_a_choice_with_a_reason() -> None:
    deep = replace(SPEC, num_layers=30)
    assert reasons(settle(deep, kv_cache_dtype="turboquant_4bit_nc", kv_near_tokens=0))["kv_protected_layers"] == (
        "4",
        "the default of turboquant_4bit_nc; kept in fp8: the first and the last (0,1,28,29)",
    )
    assert settle(deep, kv_cache_dtype="turboquant_4bit_nc", kv_near_tokens=0).protected.layers == (0, 1, 28, 29)
    assert "kv_protected_layers" not in reasons(settle(deep)), "plain pages protect nothing"


def test_other_layers_replace_the_choice() -> None:
    resolved = settle(replace(SPEC, num_layers=30, qkv_bias=True), kv_cache_dtype="turboquant_4bit_nc")
    protected = resolved.protected._replace(layers=(3, 4, 5, 6), reason="a dummy")
    other = resolved.with_protected(protected)
    assert other.protected is protected
    assert reasons(other)["kv_protected_layers"] == ("3,4,5,6", "a dummy")
    assert len(other.choices) == len(resolved.choices)


def test_odd_heads_cannot_be_quantized() -> None:
    odd = replace(SPEC, head_dim=72)
    for name in (name for name, value in KV_FORMATS.items() if value.is_quantized):
        with pytest.raises(ConfigError, match="head_dim is 72, and heads of a multiple of 16 elements"):
            settle(odd, kv_cache_dtype=name)
    assert settle(odd, kv_cache_dtype="bfloat16").kv_format.name == "bfloat16"


def test_shares_of_a_gpu() -> None:
    resolved = settle(target=SHARED, memory_utilization=0.5)
    assert resolved.budget_bytes == 40 * GIB
    assert resolved.budget_reason == "50% of the device's 80.00 GiB"
    assert settle(target=SHARED, memory_limit="7GiB", memory_utilization=0.5).budget_bytes == 7 * GIB, (
        "a size outranks a share"
    )


@pytest.mark.parametrize(
    ("target", "limit", "budget", "reason"),
    [
        (SHARED, "70GiB", 60 * GIB, "what others leave: they hold 20.00 GiB"),
        (FREE, "200GiB", 80 * GIB, "all of the device's 80.00 GiB, less than memory_limit"),
        (FREE, "70GiB", 70 * GIB, "memory_limit"),
    ],
)
def test_resolve_memory_limit_never_exceeds_device_memory(target: Target, limit: str, budget: int, reason: str) -> None:
    resolved = settle(target=target, memory_limit=limit)
    assert resolved.budget_bytes == budget
    assert resolved.budget_reason.startswith(reason)


def test_resolve_memory_limit_never_exceeds_host_memory() -> None:
    resolved = settle(memory_limit="1000TiB")
    assert resolved.budget_bytes == 9 * GIB, "its last page would be the end of the process"
    assert resolved.budget_reason == "90% of 10.00 GiB available, less than memory_limit"
    assert settle(memory_limit=10 * GIB).budget_bytes == 10 * GIB
    assert settle(memory_limit=10 * GIB + 1, memory_utilization=0.5).budget_bytes == 5 * GIB


def test_budget_reason_shows_the_given_share() -> None:
    assert settle(memory_utilization=0.975).budget_reason == "97.5% of 10.00 GiB available"
    assert settle(target=FREE, memory_utilization=0.29).budget_reason == "29% of the device's 80.00 GiB"


def test_resolve_memory_utilization_of_host_has_no_kv_bound() -> None:
    resolved = settle(memory_utilization=0.5)
    assert resolved.budget_bytes == 5 * GIB
    assert resolved.budget_reason == "50% of 10.00 GiB available"
    assert resolved.max_kv_bytes is None, "who names a share gets all of it"


def test_given_bound_on_pages_replaces_our_own() -> None:
    assert settle(kv_cache_memory="3GiB").max_kv_bytes == 3 * GIB


def test_resolve_context_beyond_model_is_taken_with_reason() -> None:
    resolved = settle(max_model_len=4096)
    assert resolved.limits.max_model_len == 4096
    assert reasons(resolved)["max_model_len"] == ("4096", "given, beyond the model's 512")


def test_learned_positions_cannot_be_exceeded() -> None:
    learned = declare_config(CATALOGUE["OPT-125m"], "opt")
    for model, longest in ((declare_decoder(replace(SPEC, rope=None), "x"), 512), (learned, 2048)):
        with raises_code("value.too_large", ConfigError, name="max_model_len", maximum=longest):
            resolve(PlanRequest(EngineConfig(max_model_len=longest + 1), model, SMALL_HOST))
        limits = resolve(PlanRequest(EngineConfig(max_model_len=longest), model, SMALL_HOST)).limits
        assert limits.max_model_len == longest


def test_resolve_settles_v4_pro() -> None:
    resolved = resolve(PlanRequest(EngineConfig(), declare_config(CATALOGUE["DeepSeek-V4-Pro"], "x"), FREE))
    assert resolved.dtype == "bfloat16"
    assert resolved.limits.max_model_len == 2**20


def test_resolved_with_max_model_len_replaces_choice() -> None:
    shorter = settle().with_max_model_len(100, "no room")
    assert shorter.limits.max_model_len == 100
    assert reasons(shorter)["max_model_len"] == ("100", "no room")
    assert len(shorter.choices) == len(settle().choices)
