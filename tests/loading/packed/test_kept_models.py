"""Packed checkpoints kept as stored: values of the same model stored plain, bytes of the plan, on ranks and through LLM."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.loading.declared import declare_opened
from holdfast.loading.execution.execute import LoadedWeights, load_weights
from holdfast.loading.model_files import open_directory
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import LoadPlan, plan_load
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import arena_bytes
from holdfast.models.sharding import shard_parameters
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import PackedPolicy, WeightRecipe
from loading.packed import packed_settings, packers
from loading.packed.packed_models import MODELS, MOE, make_packed, plain_of
from loading.packed.test_packed_models import logits_of

KEPT = WeightRecipe(packed=PackedPolicy("all"))
RANKS = (ALONE, Mesh(0, 2), Mesh(1, 2), Mesh(expert_rank=1, expert_size=2, tensor_rank=1, tensor_size=2))


def load(
    model: OpenModel, mesh: Mesh = ALONE, recipe: WeightRecipe = KEPT, ledger: Ledger | None = None
) -> tuple[LoadPlan, LoadedWeights]:
    """Load a model, or a rank's share."""
    parameters = model.parameters
    if not mesh.is_alone:
        parameters = shard_parameters(parameters, mesh, model.spec.num_heads, model.spec.num_kv_heads)
    plan = plan_load(parameters, model.source, "float32", recipe, model.stored)
    loaded = load_weights(plan, model.source, "cpu", Ledger() if ledger is None else ledger, lambda done, total: None)
    model.source.close()
    return plan, loaded


def values_of(weight: AnyWeight) -> torch.Tensor:
    """The float32 values of a weight, whatever it is stored as."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight).view(weight.shape)
    parts = []
    for part in weight.parts:
        matrices = [
            dequantize_rows(part, matrix, (0, part.num_rows), torch.empty(part.shape[-2:]))
            for matrix in range(int(np.prod(weight.shape[:-2])))
        ]
        parts.append(torch.stack(matrices).view(part.shape))
    return torch.cat(parts, dim=-2)


def assert_equal_values(kept: LoadedWeights, plain: LoadedWeights) -> None:
    assert kept.weights.keys() == plain.weights.keys()
    for name, weight in kept.weights.items():
        found, wanted = values_of(weight), values_of(plain.weights[name])
        assert bool((found == wanted).all()), name


@for_each("kind", MODELS)
def test_load_kept_model_has_the_values_of_the_plain_one(kind: str, tmp_path: Path) -> None:
    for name, sizes in (("dense", {}), ("experts", MOE)):
        folder = make_packed(tmp_path / kind / name, *MODELS[kind], **sizes)
        for mesh in RANKS:
            if mesh.expert_size > 1 and not sizes:
                continue
            ledger = Ledger()
            opened = open_directory(folder)
            declared = declare_opened(opened, "model")
            plan, kept = load(opened, mesh, ledger=ledger)
            assert_equal_values(kept, load(open_directory(plain_of(folder)), mesh)[1])
            held = [weight for weight in kept.weights.values() if not isinstance(weight, torch.Tensor)]
            assert held, f"{kind}: nothing stays packed"
            assert plan.final_bytes == arena_bytes(plan.specs) == ledger.total_bytes == kept.report.final_bytes
            assert plan.final_bytes == declared.weight_bytes("float32", KEPT, mesh), f"{kind} {name} {mesh}"


@pytest.mark.each_value
@pytest.mark.parametrize("sizes", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", MODELS)
def test_llm_kept_model_has_the_logits_of_the_plain_one(kind: str, sizes: dict[str, object], tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS[kind], **sizes)
    kept, plain = logits_of(folder, packed_weights="as_stored"), logits_of(plain_of(folder))
    assert kept[0] == plain[0], "greedy tokens differ"
    if kind not in ("mxfp4", "int-quantized"):  # these have products of their own, which round in another order
        assert kept == plain


def test_llm_kept_model_in_half_precision_has_the_logits_of_the_plain_one(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    for dtype in ("bfloat16", "float16"):
        options = {"dtype": dtype, "kv_cache_dtype": "float32"}
        assert logits_of(folder, packed_weights="as_stored", **options) == logits_of(plain_of(folder), **options)


def test_load_kept_parts_of_several_schemes_have_the_plain_values(tmp_path: Path) -> None:
    """Up and gate in 8 bits, q and v in 4, k plain: fused weights are parts of their own scheme."""

    def make(rng, rows, columns):
        bits, group = (8, 64) if rows == 128 else (4, 32)
        return packers.gptq(rng, rows, columns, group, bits=bits)

    dynamic = {"+:.*gate_proj": {"bits": 8, "group_size": 64}, "+:.*up_proj": {"bits": 8, "group_size": 64}}
    said = packed_settings.gptq(32, dynamic=dynamic | {"-:.*k_proj": {}})
    folder = make_packed(tmp_path / "model", said, make, plain=("k_proj",))
    for mesh in RANKS[:3]:
        _, kept = load(open_directory(folder), mesh)
        qkv = kept.weights["layers.0.qkv.weight"]
        assert isinstance(qkv, PackedWeight)
        assert [part.scheme.family for part in qkv.parts] == ["int", "plain", "int"]
        assert_equal_values(kept, load(open_directory(plain_of(folder)), mesh)[1])
    options = {"packed_weights": "as_stored"}
    assert logits_of(folder, **options) == logits_of(plain_of(folder))


def test_plan_load_ranks_that_cut_a_group_are_refused_before_memory(tmp_path: Path) -> None:
    """192 inputs in groups of 64: two ranks have a group and a half each."""
    folder = make_packed(
        tmp_path / "model",
        packed_settings.awq(64),
        lambda rng, rows, columns: packers.awq(rng, rows, columns, 64),
        intermediate_size=192,
    )
    opened, ledger = open_directory(folder), Ledger()
    with raises_code("weights.unsupported_scheme", UnsupportedModelError):
        load(opened, Mesh(0, 2), ledger=ledger)
    assert ledger.total_bytes == 0
    declared = declare_opened(open_directory(folder), "model")
    with raises_code("families.indivisible", ConfigError):
        declared.check_blocks(Mesh(0, 2), KEPT)
    load(open_directory(folder), Mesh(0, 2), WeightRecipe())  # expanded rows can be cut anywhere


def test_declared_kept_model_holds_few_bytes_more_than_its_tensors(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    opened = open_directory(folder)
    declared = declare_opened(opened, "model")
    plain = declare_opened(open_directory(plain_of(folder)), "model")
    assert declared.weight_bytes("float32") == plain.weight_bytes("float32")
    packed = [entry for entry in opened.source.entries.values() if entry.packed is not None]
    stored, matrices = sum(entry.num_bytes for entry in packed), sum(4 * prod(entry.shape) for entry in packed)
    kept = declared.weight_bytes("float32", KEPT) - declared.weight_bytes("float32") + matrices
    assert stored < kept <= 1.1 * stored, "tiny planes are rounded up to 256 bytes"


def test_config_packed_as_stored_and_quantization_exclude_each_other() -> None:
    from holdfast.config import EngineConfig

    with raises_code("config.packed_and_quantized", ConfigError):
        EngineConfig(packed_weights="as_stored", quantization="int8")
    EngineConfig(packed_weights="expanded", quantization="int8")


@for_each("version, written", [(1, 1), (2, 2), (1, 2)])
def test_load_gptq_symmetric_modules_beside_others_have_the_plain_values(
    version: int, written: int, tmp_path: Path
) -> None:
    """Headers do not tell them apart, so zero points do; (1, 2): symmetric modules say 7 is one less, and store 8."""

    def make(rng: np.random.Generator, num_rows: int, num_columns: int) -> packers.Packed:
        is_symmetric = num_rows == 128
        said = written if is_symmetric else version
        return packers.gptq(rng, num_rows, num_columns, 32, version=version, sym=is_symmetric, written=said)

    for sym in (True, False):
        said = packed_settings.gptq(32, version=version, sym=sym, dynamic={"+:.*(up|gate)_proj": {"sym": not sym}})
        folder = make_packed(tmp_path / f"{version}{written}{sym}", said, make)
        plain = load(open_directory(plain_of(folder)))[1]
        for recipe in (KEPT, WeightRecipe()):
            for mesh in RANKS[:2]:
                expected = plain if mesh is ALONE else load(open_directory(plain_of(folder)), mesh)[1]
                assert_equal_values(load(open_directory(folder), mesh, recipe)[1], expected)
