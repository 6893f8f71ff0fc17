"""Keys and values by head: what a rank holds, against the families that run and against transformers."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.errors import ConfigError, ModelFormatError
from holdfast.kernels.geometry import (
    ROW_SCALED_BLOCK_N,
    ROW_SCALED_ROWS,
    ROW_SCALED_SPLIT_ROWS,
    row_scaled_splits,
)
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.dummy import DummySource
from holdfast.models.activations import (
    attention_request,
    head_request,
    mlp_request,
    quantized_rows_request,
    stream_request,
)
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE, find_model
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel, declare_decoder
from holdfast.models.declared_weights import Weight
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.spec import ModelSpec, RopeSpec
from holdfast.quant.weight_schemes import FP8, INT8, WEIGHT_SCHEMES, WeightRecipe, WeightScheme
from models.meta_models import count_elements
from models.test_family_fields import CASES

TINY_MOE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}
RUNNABLE = [name for name, config in CATALOGUE.items() if declare_config(config, name).spec is not None]
STEP = StepShape(num_rows=8, num_logit_rows=5, max_model_len=64, dtype="bfloat16")


def moe(family: str, **changes: object) -> dict[str, Any]:
    names = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss"}[family],
    }
    return TINY_MOE | names | changes


def elements(declared: DeclaredModel, num_ranks: int = 1) -> int:
    return sum(prod(weight.shape) for weight in declared.parameters(Mesh(tensor_size=num_ranks)))


@pytest.mark.parametrize(
    "config",
    [
        moe("Qwen2Moe", shared_expert_intermediate_size=40),
        moe("Qwen2Moe", shared_expert_intermediate_size=40, decoder_sparse_step=2),
        moe("Qwen3Moe"),
        moe("Qwen3Moe", mlp_only_layers=[0, 2], tie_word_embeddings=True),
        moe("GptOss"),
    ],
    ids=["qwen2", "qwen2 every second layer", "qwen3", "qwen3 with dense layers", "gpt-oss"],
)
def test_declaration_parameter_count_matches_transformers(config: dict[str, Any]) -> None:
    family = config["architectures"][0].removesuffix("ForCausalLM")
    assert elements(declare_config(config, "tiny")) == count_elements(family, config)


def with_few_experts(name: str) -> ModelSpec:
    """Hundreds of experts in every layer are listed as sixteen are; test_catalogue counts all of them."""
    spec = read_spec({**CATALOGUE[name], "quantization_config": None})
    if spec.experts is None:
        return spec
    return replace(spec, experts=replace(spec.experts, num_experts=min(16, spec.experts.num_experts)))


@pytest.mark.parametrize("name", RUNNABLE)
def test_declared_parameters_equal_loaded_parameters(name: str) -> None:
    spec = with_few_experts(name)
    loaded = [
        (one.name, one.shape, one.kind, one.dtype, tuple(part.tensor for part in one.parts), one.seam_rows)
        for one in parameters(spec)
    ]
    planned = declare_decoder(spec, name).parameters()
    assert [(one.name, one.shape, one.kind, one.dtype, one.tensors, one.seam_rows) for one in planned] == loaded


@pytest.mark.parametrize("scheme", [None, *WEIGHT_SCHEMES.values()], ids=lambda scheme: scheme and scheme.name)
@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe", "GptOss"])
def test_planned_bytes_of_experts_are_those_that_are_loaded(family: str, scheme: WeightScheme | None) -> None:
    """For an arena for the load that was planned from the headers of a dummy, whatever is quantized."""
    sizes = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 96}
    spec = read_spec(moe(family, **sizes, intermediate_size=160, mlp_only_layers=[1]))
    recipe, listed = WeightRecipe(scheme, "all"), parameters(spec)
    plan = plan_load(listed, DummySource(listed, "bfloat16"), "bfloat16", recipe)
    assert declare_decoder(spec, "x").weight_bytes("bfloat16", recipe) == plan.final_bytes


def test_experts_of_gpt_oss_are_stored_in_mxfp4() -> None:
    stored = declare_config(moe("GptOss", quantization_config={"quant_method": "mxfp4"}), "x")
    schemes = {weight.kind: weight.native for weight in stored.parameters()}
    assert schemes["expert"] == "mxfp4"
    assert {schemes[kind] for kind in schemes if kind != "expert"} == {None}
    assert stored.stored_recipe is not None


def test_ranks_share_biases_and_sinks_with_their_weights() -> None:
    whole, half = (
        {weight.name: weight.shape for weight in declare_config(moe("GptOss"), "x").parameters(Mesh(tensor_size=ranks))}
        for ranks in (1, 2)
    )
    assert (whole["layers.0.sinks"], half["layers.0.sinks"]) == ((4,), (2,))
    assert (whole["layers.0.experts.gate_up.bias"], half["layers.0.experts.gate_up.bias"]) == ((6, 224), (6, 112))
    assert whole["layers.0.experts.down.bias"] == half["layers.0.experts.down.bias"] == (6, 64)
    assert whole["layers.0.router.bias"] == half["layers.0.router.bias"] == (6,)


def test_declared_weights_have_expected_kinds() -> None:
    kinds: dict[str, set[str]] = {}
    for config in (CATALOGUE["OPT-125m"], CATALOGUE["Qwen3-8B"], CATALOGUE["Qwen2.5-7B-Instruct"]):
        for weight in declare_config(config, "x").parameters():
            kinds.setdefault(weight.kind, set()).add(weight.name.rpartition("layers.")[2].lstrip("0123456789."))
    assert kinds["embedding"] == {"embed.weight", "positions.weight"}
    assert kinds["head"] == {"lm_head.weight", "embed.weight"}, "an embedding that is the head is a head"
    assert kinds["linear"] == {"qkv.weight", "o.weight", "up.weight", "down.weight", "gate_up.weight"}
    assert all(name.endswith(".bias") for name in kinds["bias"])
    assert all(name.endswith("norm.weight") for name in kinds["norm"])


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_hold_everything_and_share_what_they_must(name: str, num_ranks: int) -> None:
    declared = declare_config(CATALOGUE[name], name)
    whole = {weight.name: prod(weight.shape) for weight in declared.parameters()}
    sharded = {weight.name: weight for weight in declared.parameters(Mesh(tensor_size=num_ranks))}
    assert sharded.keys() == whole.keys(), "every rank holds something of everything"
    num_copies = max(num_ranks - declared.num_kv_heads, 0)  # of keys' heads, and as many of values': one on each rank
    for part, weight in sharded.items():
        held = num_ranks * prod(weight.shape)
        if weight.kind in ("norm", "router"):
            assert held == num_ranks * whole[part], f"{part} is on every rank"
        elif ".qkv." in part:
            row = prod(weight.shape[1:])
            assert held == whole[part] + 2 * num_copies * declared.head_dim * row, f"{part}: {num_copies=}"
        else:
            assert held == whole[part], part


def test_key_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    declared = declare_config(CATALOGUE["Qwen3-30B-A3B"], "x")
    bytes_per_token = [declared.kv_bytes_per_token("bfloat16", Mesh(tensor_size=ranks)) for ranks in (1, 2, 4, 8, 16)]
    assert bytes_per_token == [98304, 49152, 24576, 24576, 24576]


@pytest.mark.parametrize(
    ("name", "num_ranks", "reason"),
    [
        ("Qwen3-8B", 3, "32 query heads do not divide into 3 equal parts. Try 1, 2, 4, 8, 16"),
        ("SmolLM2-135M", 2, "9 query heads do not divide into 2 equal parts. Try 1, 3"),
        ("Qwen2.5-7B-Instruct", 14, "4 key heads neither divide into 14 parts nor are shared by them evenly"),
        ("Qwen3-30B-A3B", 5, "32 query heads"),
        ("OPT-125m", 8, "12 query heads"),
    ],
)
def test_ranks_that_do_not_divide(name: str, num_ranks: int, reason: str) -> None:
    declared = declare_config(CATALOGUE[find_model(name)[0]], name)
    for ask in (declared.parameters, lambda mesh: declared.kv_bytes_per_token("bfloat16", mesh)):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size={num_ranks} is not possible: {reason}"):
            ask(Mesh(tensor_size=num_ranks))


@pytest.mark.parametrize("num_ranks", [0, -1, True, 2.0, "2", None, 10**9])
def test_ranks_that_are_no_number(num_ranks) -> None:
    code = "families.indivisible" if num_ranks == 10**9 else "rank.not_a_rank"
    with raises_code(code, ConfigError):
        declare_config(CATALOGUE["Qwen3-8B"], "x").parameters(Mesh(tensor_size=num_ranks))


def test_declaration_requests_equal_requests_of_runner() -> None:
    declared = declare_config(CATALOGUE["Qwen3-0.6B"], "x")
    spec = declared.spec
    assert spec is not None
    assert declared.declaration.requests(STEP, ALONE, ()) == (
        stream_request(spec, 8, "bfloat16"),
        attention_request(spec, 8, "bfloat16", ()),
        mlp_request(spec, 8, "bfloat16"),
        head_request(spec, 5, "bfloat16"),
    )


def test_declaration_requests_of_rank_are_narrower() -> None:
    declaration = declare_config(CATALOGUE["Qwen3-8B"], "x").declaration
    whole, part = (
        {request.owner: request for request in declaration.requests(STEP, Mesh(tensor_size=ranks), ())}
        for ranks in (1, 4)
    )
    assert [spec.shape[-1] for spec in part["head"].specs] == [4096, -(-151936 // 4)]
    assert part["stream"] == whole["stream"]
    assert "gathered" not in part
    assert part["mlp"].specs[0].shape == (8, 2 * 12288 // 4)
    assert part["attention"].specs[1].shape == (8, 32 // 4, 128)


@pytest.mark.parametrize("scheme", [FP8, INT8])
def test_codes_take_room_where_products_want_them(scheme: WeightScheme) -> None:
    declaration = declare_config(CATALOGUE["Qwen3-30B-A3B"], "x").declaration
    recipe = WeightRecipe(scheme)
    requests = {
        request.owner: request
        for request in declaration.requests(STEP._replace(recipe=recipe), Mesh(tensor_size=2), ())
    }
    spec = declaration.rank(Mesh(tensor_size=2))  # type: ignore[attr-defined]
    wanted = quantized_rows_request(spec, STEP.num_rows, STEP.num_logit_rows, recipe)
    assert requests.get("quantized_rows") == (wanted if scheme is FP8 else None)
    assert wanted.specs == () or wanted.specs[0].shape == (8 * 8 * 768 // 2,)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", RUNNABLE)
def test_products_of_middle_batches_share_room_on_a_gpu(name: str, num_ranks: int) -> None:
    """Enough partial sums, counters and amax for every weight that these kernels take."""
    declaration = declare_decoder(with_few_experts(name), name).declaration
    if declaration.indivisible(Mesh(tensor_size=num_ranks)) is not None:
        pytest.skip("not divided")
    step = STEP._replace(recipe=WeightRecipe(FP8), device_kind="cuda")
    requests = {request.owner: request for request in declaration.requests(step, Mesh(tensor_size=num_ranks), ())}
    on_cpu = declaration.requests(step._replace(device_kind="cpu"), Mesh(tensor_size=num_ranks), ())
    assert "row_scaled" not in {request.owner for request in on_cpu}
    parts, arrived, amax = (spec.shape[0] for spec in requests["row_scaled"].specs)
    weights = [weight for weight in declaration.weights(Mesh(tensor_size=num_ranks)) if weight.kind == "linear"]
    assert weights
    for weight in weights:
        size_n, size_k = weight.shape
        splits = row_scaled_splits(size_n, size_k)
        assert splits == 1 or ROW_SCALED_SPLIT_ROWS * splits * size_n <= parts
        assert splits == 1 or -(-size_n // ROW_SCALED_BLOCK_N) <= arrived
        if "gate_up" in weight.name:
            assert ROW_SCALED_ROWS * -(-size_n // 2 // ROW_SCALED_BLOCK_N) <= amax


def test_experts_take_the_place_of_the_mlp() -> None:
    declaration = declare_config(CATALOGUE["Qwen3-30B-A3B"], "x").declaration
    assert [request.owner for request in declaration.requests(STEP, ALONE, ())] == [
        "stream",
        "attention",
        "experts",
        "head",
    ]
    mixed = declare_config(moe("Qwen3Moe", mlp_only_layers=[1]), "x").declaration
    assert [request.owner for request in mixed.requests(STEP, ALONE, ())] == [
        "stream",
        "attention",
        "mlp",
        "experts",
        "head",
    ]


@given(
    heads=st.sampled_from([1, 2, 4, 8, 12]),
    shared_by=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 5),
    head_dim=st.sampled_from([16, 64, 80]),
    ranks=st.integers(1, 16),
    format=st.sampled_from(["float32", "bfloat16", "fp8", "turboquant_3bit_nc"]),
)
def test_ranks_together_keep_at_least_the_whole_cache(heads, shared_by, layers, head_dim, ranks, format) -> None:
    spec = replace(SPEC, num_kv_heads=heads, num_heads=heads * shared_by, num_layers=layers, head_dim=head_dim)
    declared = declare_decoder(spec, "x")
    if declared.declaration.indivisible(Mesh(tensor_size=ranks)) is not None:
        return
    whole, part = declared.kv_bytes_per_token(format), declared.kv_bytes_per_token(format, Mesh(tensor_size=ranks))
    assert part == whole / min(ranks, heads)


SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=960,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    checkpoint_dtype="float32",
    norm_eps=1e-5,
    rope=RopeSpec(10_000.0),
)


@pytest.mark.parametrize("value", ["1", [1, "2"], {"a": 1}])
def test_dense_layers_must_be_a_list_of_numbers(value) -> None:
    with pytest.raises(ModelFormatError, match="mlp_only_layers"):
        declare_config(moe("Qwen3Moe", mlp_only_layers=value), "x")


@pytest.mark.parametrize("name", [name for name in CASES if name != "deepseek_v4"])
def test_weights_of_stages_have_the_names_of_the_whole_model(name: str) -> None:
    """Names, tensors and shapes that patterns and loads go by: each once, and a tied head twice."""
    spec = CASES[name][1]
    declared = declare_decoder(spec, name)

    def facts(weights: tuple[Weight, ...]) -> list[tuple[object, ...]]:
        return [(weight.model_name, weight.tensors, weight.shape, weight.kind) for weight in weights]

    whole = facts(declared.parameters())
    for cuts in ([(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]):
        held: list[tuple[object, ...]] = []
        for mesh, (start, _) in zip(meshes(1, cuts), cuts, strict=True):
            if not declared.is_divisible(mesh):
                return  # a layer that takes the choice of one in another stage
            weights = declared.parameters(mesh)
            held += facts(weights)
            first = next(weight for weight in weights if weight.name.startswith("layers."))
            assert (first.name, first.model_name) == (first.name, first.name.replace(".0.", f".{start}.", 1))
        assert Counter(held) == Counter(
            whole + [own for own in whole if spec.tied_embeddings and own[0] == "embed.weight"]
        )
