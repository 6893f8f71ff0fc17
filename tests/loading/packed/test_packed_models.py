"""Packed checkpoints from end to end: weights and logits of the same model stored plain, on ranks, quantized again."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from error_codes import raises_code
from for_each import for_each
from holdfast import LLM, SamplingParams
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.declared import declare_file, open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory, open_path
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.quantized.manifest import identify_source
from holdfast.memory.ledger import Ledger
from holdfast.models.sharding import shard_parameters
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import INT8, MXFP4, WeightRecipe
from loading.packed import packed_settings, packers
from loading.packed.packed_models import MODELS, MOE, make_packed, plain_of, rewrite, with_settings


def load(
    model: OpenModel, mesh: Mesh | None = None, recipe: WeightRecipe | None = None
) -> dict[str, list[torch.Tensor]]:
    """Load a model, or a rank's share: the planes of every weight."""
    parameters = model.parameters
    if mesh is not None:
        parameters = shard_parameters(parameters, mesh, model.spec.num_heads, model.spec.num_kv_heads)
    plan = plan_load(parameters, model.source, "float32", recipe or WeightRecipe(), model.stored)
    weights = load_weights(plan, model.source, "cpu", Ledger(), lambda done, total: None).weights
    model.source.close()
    return {
        name: [weight.codes, weight.scales] if isinstance(weight, QuantizedWeight) else [weight]
        for name, weight in weights.items()
    }


def assert_alike(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name, planes in one.items():
        for plane, wanted in zip(planes, other[name], strict=True):
            assert torch.equal(plane, wanted), name


@for_each("kind", MODELS)
def test_load_packed_model_equals_the_plain_one(kind: str, tmp_path: Path) -> None:
    for name, sizes in (("dense", {}), ("experts", MOE)):
        folder = make_packed(tmp_path / kind / name, *MODELS[kind], **sizes)
        assert_alike(load(open_directory(folder)), load(open_directory(plain_of(folder))))
        for rank in range(2):
            mesh = Mesh(tensor_rank=rank, tensor_size=2)
            assert_alike(load(open_directory(folder), mesh), load(open_directory(plain_of(folder)), mesh))


@for_each("scheme", [INT8, MXFP4])
def test_load_packed_model_is_quantized_like_the_plain_one(scheme, tmp_path: Path) -> None:
    folder = make_packed(tmp_path / scheme.name, *MODELS["gptq"])
    recipe = WeightRecipe(scheme)
    assert_alike(load(open_directory(folder), recipe=recipe), load(open_directory(plain_of(folder)), recipe=recipe))


def logits_of(folder: Path, **options: object) -> list[object]:
    """Log-probabilities of a prompt and of greedy tokens after it."""
    with LLM(str(folder), device="cpu", max_model_len=64, max_num_seqs=1, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=8, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 200, 31, 7]}], params, use_tqdm=False)
    return [output.outputs[0].token_ids, output.prompt_logprobs, output.outputs[0].logprobs]


@pytest.mark.each_value
@pytest.mark.parametrize("sizes", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", MODELS)
def test_llm_packed_model_has_the_logits_of_the_plain_one(kind: str, sizes: dict[str, object], tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS[kind], **sizes)
    assert logits_of(folder) == logits_of(plain_of(folder))


def test_llm_packed_model_quantized_again_matches_the_plain_one(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    options = {"quantization": "int8", "weight_cache": "off"}
    assert logits_of(folder, **options) == logits_of(plain_of(folder), **options)


def test_open_directory_modelopt_mixed_with_fp8_and_plain_modules(tmp_path: Path) -> None:
    """Projections of attention in fp8, the rest in NVFP4, one module plain; scales of KV pages lie beside keys."""

    def make(rng, rows, columns):
        return packers.fp8(rng, rows, columns) if columns == rows else packers.modelopt_nvfp4(rng, rows, columns)

    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    layers["model.layers.0.self_attn.q_proj"] = {"quant_algo": "FP8"}
    said = packed_settings.modelopt("MIXED_PRECISION", quantized_layers=layers, kv_cache_scheme={"num_bits": 8})
    folder = make_packed(tmp_path / "model", said, make, plain=("k_proj",))
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}))
    opened = open_directory(folder)
    assert_alike(load(opened), load(open_directory(plain_of(folder))))
    with_settings(folder, said | {"kv_cache_scheme": None})
    assert "k_scale" in "".join(open_declared(str(folder)).notes)


def test_open_directory_compressed_mixed_precision(tmp_path: Path) -> None:
    def make(rng, rows, columns):
        return packers.fp8(rng, rows, columns, "row") if columns == rows else packers.nvfp4(rng, rows, columns)

    said = packed_settings.compressed("mixed-precision", packed_settings.floats(16), packed_settings.floats(None))
    folder = make_packed(tmp_path / "model", said, make)
    assert_alike(load(open_directory(folder)), load(open_directory(plain_of(folder))))


def test_open_directory_gptq_dynamic_modules_have_their_own_bits(tmp_path: Path) -> None:
    def make(rng, rows, columns):
        bits, group = (8, 64) if rows == 128 else (4, 32)
        return packers.gptq(rng, rows, columns, group, bits=bits)

    dynamic = {"+:.*(up|gate)_proj": {"bits": 8, "group_size": 64}, "-:.*k_proj": {}}
    folder = make_packed(tmp_path / "model", packed_settings.gptq(32, dynamic=dynamic), make, plain=("k_proj",))
    assert_alike(load(open_directory(folder)), load(open_directory(plain_of(folder))))


def test_open_directory_packed_head_is_read(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["gptq"], vocab_size=264)
    head = packers.gptq(np.random.default_rng(1), 264, 64, 32, order=True)

    def pack_head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head{suffix}": values for suffix, values in head.tensors.items()})

    rewrite(folder, pack_head)
    assert torch.equal(load(open_directory(folder))["lm_head.weight"][0], head.weight)


def test_open_directory_settings_beside_config_are_read(tmp_path: Path) -> None:
    for name, kind, said in (
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        (
            "hf_quant_config.json",
            "modelopt",
            {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        ),
    ):
        folder = make_packed(tmp_path / kind, *MODELS[kind])
        with_settings(folder, None)
        with raises_code("model.mismatch", ModelFormatError):
            open_directory(folder)
        (folder / name).write_text(json.dumps(said))
        assert_alike(load(open_directory(folder)), load(open_directory(plain_of(folder))))
        assert len(open_declared(str(folder)).notes) == 1
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    for opening in (open_directory, lambda path: open_declared(str(path))):
        with raises_code("weights.unsupported_setting", UnsupportedModelError) as caught:
            opening(folder)
        assert (caught.value.values["file"], caught.value.values["key"]) == (
            "hf_quant_config.json",
            "quantization.quant_algo",
        )


def test_open_directory_config_without_dtype_takes_the_plain_tensors_type(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    rewrite(
        folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items() if t.dtype == torch.float32})
    )
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_directory(folder).spec.checkpoint_dtype == "float16"


def test_open_declared_packed_model_counts_expanded_weights(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    declared, plain = open_declared(str(folder)), open_declared(str(plain_of(folder)))
    assert declared.weight_bytes("bfloat16") == plain.weight_bytes("bfloat16")
    assert declared.on_disk is not None
    assert [(one.name, one.num_tensors) for one in declared.on_disk.types] == [
        ("AWQ of 4 bits in groups of 32", 7),
        ("float32", 5),
    ]
    assert declared.on_disk.num_bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    (note,) = declared.notes
    assert "AWQ of 4 bits in groups of 32" in note
    assert declare_file(str(folder / "config.json")).notes == (note,)
    assert declare_file(str(folder / "config.json")).weight_bytes("bfloat16") == plain.weight_bytes("bfloat16")
    (folder / "model.safetensors").unlink()
    assert open_declared(str(folder)).notes == (note,)


def test_open_path_dummy_weights_of_a_packed_config_are_plain(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    opened = open_path(folder, "dummy")
    assert opened.stored is None
    assert {entry.dtype for entry in opened.source.entries.values()} == {"float32"}


def test_identify_source_sees_settings_beside_config(tmp_path: Path) -> None:
    """Cached weights of other settings would be of another reading."""
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    with_settings(folder, None)
    (folder / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 32}))
    before = identify_source(open_directory(folder))
    assert before == identify_source(open_directory(folder))
    (folder / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 32, "zero_point": True}))
    assert before != identify_source(open_directory(folder))


@for_each(
    "form, integers, make",
    [
        ("pack-quantized", packed_settings.integers, packers.packed_int),
        ("int-quantized", lambda group, sym: packed_settings.integers(group, 8, sym), packers.int8),
    ],
)
def test_load_zero_points_beside_symmetric_settings_count(form: str, integers, make, tmp_path: Path) -> None:
    """Whichever group comes first, or if settings say that there are none."""
    group = 32 if form == "pack-quantized" else -1
    symmetric, other = integers(group, sym=True), integers(group, sym=False)
    for name, groups in (("first", (symmetric, other)), ("last", (other, symmetric)), ("alone", (symmetric,))):

        def made(rng: np.random.Generator, num_rows: int, num_columns: int) -> packers.Packed:
            own = {} if form == "int-quantized" else {"group": group}
            return make(rng, num_rows, num_columns, **own, sym=num_rows != 128)

        folder = make_packed(tmp_path / form / name, packed_settings.compressed(form, *groups), made)
        assert_alike(load(open_directory(folder)), load(open_directory(plain_of(folder))))


def test_load_old_zero_points_of_zero_are_checked(tmp_path: Path) -> None:
    """Old files of symmetric codes hold a zero for each scale."""
    said = packed_settings.compressed("pack-quantized", packed_settings.integers(32))
    folder = make_packed(
        tmp_path / "model", said, lambda rng, rows, columns: packers.packed_int(rng, rows, columns, 32)
    )

    def add_points(value: int) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if name.endswith(".weight_scale")]:
                points = torch.full_like(tensors[name], value, dtype=torch.int8)
                tensors[name.replace("weight_scale", "weight_zero_point")] = points

        rewrite(folder, change)

    add_points(0)
    assert_alike(load(open_directory(folder)), load(open_directory(plain_of(folder))))
    add_points(1)
    with raises_code("weights.packed_values", ModelFormatError):
        load(open_directory(folder))


@for_each(
    "file, said",
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "quant_method": None}),
        ("quant_config.json", {"anything": 1}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
    ],
)
def test_open_leftover_settings_beside_plain_weights_are_ignored(file: str, said: dict, tmp_path: Path) -> None:
    folder = plain_of(make_packed(tmp_path / file / "model", *MODELS["awq"]))
    (folder / file).write_text(json.dumps(said))
    open_directory(folder).source.close()
    assert open_declared(str(folder)).notes == ()
