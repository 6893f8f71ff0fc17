"""Decoders of every family, dense and with experts, against transformers: logits at every position and greedy tokens, alone and in company."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from holdfast.config import Limits
from holdfast.layers.mlp import GatedMLP, LayerNorm, PlainMLP, RMSNorm
from holdfast.layers.moe import ExpertLayer
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.decoder_layer import DecoderLayer, DecoderParts, LayerBuilder
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.rope import StepRope
from holdfast.models.spec import ModelSpec
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import INT8
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import require_native, same_bits
from loading.tiny_models import FAMILIES, VOCAB, save_tiny
from models.test_decoder_workspace import WatchedWorkspace, make_step
from models.tiny_experts import EXPERT_MODELS, LAYOUTS, assembled, config_of, make_tiny, save_tiny_experts, tensors_of
from quant.whole_weights import quantize
from runner.drive import Drive, LoadedModel, Request, Rig, load_model, workspace_plan

NUM_STEPS = 64
FEW_STEPS = 16
TOLERANCE = 1e-4
LEAST_GAP = 5e-5
"""Between the most likely token and the next: far above what two ways to compute in float32 differ by, so no tie decides."""
EVERY_POSITION = SamplingParams(temperature=0.0, prompt_logprobs=0)
PROMPT_LENGTHS = (1, 2, 17, 33, 64, 90)
MAX_MODEL_LEN = max(PROMPT_LENGTHS) + NUM_STEPS
LARGE_EPS = {"rms_norm_eps": 0.03}
"""So large that a norm with another one shows."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, LARGE_EPS if family in ("qwen3", "gemma3") else {}) for family in FAMILIES
} | {
    "llama_longrope within its first length": (
        "llama_longrope",
        {
            "rope_parameters": FAMILIES["llama_longrope"][1]["rope_parameters"]
            | {"original_max_position_embeddings": 256}
        },
    ),
    "opt with gelu": ("opt", {"activation_function": "gelu"}),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
}
BACKENDS = ("native_paged", "torch_paged")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Everything in C, or everything in torch."""
    if request.param == "native_paged":
        require_native()
    else:
        monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    return request.param


@cache
def tiny(case: str) -> tuple[Any, LoadedModel]:
    """transformers' model and ours, from the same files."""
    family, overrides = CASES[case]
    with TemporaryDirectory() as folder:
        theirs = save_tiny(family, folder, **overrides)
        ours = load_model(Path(folder))
    # Dynamic frequencies follow the longest text seen, and here that is the longest allowed.
    theirs_logits(theirs, tuple(range(MAX_MODEL_LEN)))
    return theirs, ours


@cache
@torch.no_grad()
def theirs_logits(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0]


def make_requests(lengths=PROMPT_LENGTHS, num_steps: int = NUM_STEPS) -> list[Request]:
    dice = random.Random(7)
    return [
        Request([dice.randrange(3, VOCAB) for _ in range(length)], num_steps, 7 * index, EVERY_POSITION)
        for index, length in enumerate(lengths)
    ]


def make_drive(model: LoadedModel, backend: str, max_num_batched_tokens: int, page_tokens: int = 4) -> Drive:
    limits = Limits(4, max_num_batched_tokens, MAX_MODEL_LEN, page_tokens)
    num_pages = 4 * -(-MAX_MODEL_LEN // page_tokens)
    if model.spec.sliding_windows:
        num_pages *= 2
    return Drive(Rig(model, backend, limits, num_pages), num_pages)


def judge(theirs: Any, drive: Drive, request: Request) -> None:
    """By induction: each token is the argmax of transformers behind all tokens before it."""
    token_ids = (*request.prompt, *request.output)
    expected = theirs_logits(theirs, token_ids)[:-1]
    logits = drive.logits(request)
    assert sorted(logits) == list(range(len(token_ids) - 1)), "a position has no logits"
    computed = torch.stack([logits[position] for position in range(len(token_ids) - 1)])
    assert float((computed - expected).abs().max()) <= TOLERANCE
    behind_prompt = expected[len(request.prompt) - 1 :]
    assert len(request.output) == request.max_tokens
    assert request.output == behind_prompt.argmax(-1).tolist()
    best, second = behind_prompt.topk(2).values.unbind(-1)
    assert float((best - second).min()) > LEAST_GAP, "a tie: take another seed"


BY_LENGTH = ("llama_dynamic", "llama_longrope")
"""Families whose rotation follows the length of the text, so that none of theirs is cut short."""
WHOLE_AT_ONCE = ("llama", "qwen3", "gemma3")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("case", "num_steps"),
    [
        *((case, NUM_STEPS if case in BY_LENGTH else FEW_STEPS) for case in CASES),
        *(pytest.param(case, NUM_STEPS, marks=pytest.mark.slow) for case in CASES if case not in BY_LENGTH),
    ],
)
def test_logits_of_single_sequence_match_transformers(case, backend, num_steps):
    theirs, ours = tiny(case)
    for request in make_requests((1, 90) if num_steps == FEW_STEPS else (1, 33, 90), num_steps):
        drive = make_drive(ours, backend, max_num_batched_tokens=128)
        drive.run([request])
        judge(theirs, drive, request)


@pytest.mark.each_value
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_logits_batched_and_chunked_match_transformers(case, backend, is_whole):
    """At once whole texts of some families in C, and beginnings of the others' and in torch."""
    theirs, ours = tiny(case)
    whole_at_once = case in BY_LENGTH or (backend == "native_paged" and case in WHOLE_AT_ONCE)
    if is_whole and whole_at_once:
        pytest.skip("whole at once")
    requests = make_requests(num_steps=NUM_STEPS if is_whole or whole_at_once else FEW_STEPS)
    drive = make_drive(ours, backend, max_num_batched_tokens=24, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_pages_cost_what_half_pages_cost(kv_dtype):
    theirs, ours = tiny("qwen3")
    limits = Limits(4, 24, MAX_MODEL_LEN, 4)
    drive = Drive(Rig(ours, "torch_paged", limits, 160, kv_dtype), 160)
    requests = make_requests((33, 90))
    drive.run(requests)
    for request in requests:
        expected = theirs_logits(theirs, (*request.prompt, *request.output))
        errors = [float((row - expected[position]).abs().max()) for position, row in drive.logits(request).items()]
        assert 1e-5 < max(errors) < (0.02 if kv_dtype == "float16" else 0.15)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_stay_near(dtype):
    theirs, _ = tiny("qwen3")
    with TemporaryDirectory() as folder:
        save_tiny("qwen3", folder, **LARGE_EPS)
        ours = load_model(Path(folder), dtype)
    limits = Limits(4, 24, MAX_MODEL_LEN, 4)
    drive = Drive(Rig(ours, "torch_paged", limits, 160, dtype, dtype), 160)
    (request,) = make_requests((90,))
    drive.run([request])
    expected = theirs_logits(theirs, (*request.prompt, *request.output))
    for position, row in drive.logits(request).items():
        assert row.dtype == torch.float32
        assert float((row - expected[position]).abs().max()) < (0.05 if dtype == "float16" else 0.4)


def test_decoder_finishes_only_rows_whose_logits_are_read():
    """Logits of some rows are those of all rows, to the bit."""
    require_native()
    _, ours = tiny("llama")
    runs = []
    for params in (EVERY_POSITION, SamplingParams(temperature=0.0)):
        request = Request(list(range(3, 40)), 5, params=params)
        drive = make_drive(ours, "native_paged", max_num_batched_tokens=16)
        drive.run([request])
        runs.append(drive.logits(request))
    every, sampled = runs
    assert len(every) == 41
    assert len(sampled) == 5
    assert all(same_bits(sampled[position], every[position]) for position in sampled)


def make(name: str) -> tuple[ModelSpec, dict[str, Any]]:
    prefix, settings = (FAMILIES | EXPERT_MODELS)[name]
    spec = read_spec({"architectures": [f"{prefix}ForCausalLM"]} | settings)
    return spec, {parameter.name: torch.zeros(parameter.shape) for parameter in parameters(spec)}


def builder(spec: ModelSpec, weights: dict[str, Any]) -> LayerBuilder:
    backend: Any = object()
    nothing = (None,) * spec.num_layers
    return LayerBuilder(DecoderParts(spec, weights, backend, StepRope(None, nothing, nothing), backend, ()))


def built_layer(spec: ModelSpec, weights: dict[str, Any], index: int) -> DecoderLayer[Any]:
    made = builder(spec, weights)
    return made.layer(index, made.attention(index))


def test_decoder_layer_has_weights_of_its_index() -> None:
    spec, weights = make("qwen3")
    layer = built_layer(spec, weights, 2)
    assert layer.attention.qkv.weight_NK is weights["layers.2.qkv.weight"]
    assert layer.attention.o.weight_NK is weights["layers.2.o.weight"]
    assert layer.attention.qkv.bias_N is None
    assert isinstance(layer.attn_norm, RMSNorm)
    assert layer.attn_norm.weight_H is weights["layers.2.attn_norm.weight"]
    assert isinstance(layer.mlp, GatedMLP)
    assert layer.mlp.down.weight_NK is weights["layers.2.down.weight"]


def test_biases_and_plain_mlps() -> None:
    spec, weights = make("opt")
    layer = built_layer(spec, weights, 1)
    assert layer.attention.qkv.bias_N is weights["layers.1.qkv.bias"]
    assert isinstance(layer.attn_norm, LayerNorm)
    assert isinstance(layer.mlp, PlainMLP)


def test_experts_where_the_spec_has_them() -> None:
    spec, weights = make("qwen2_moe normalized, every second layer")
    layers = [built_layer(spec, weights, index) for index in range(4)]
    assert [isinstance(layer.mlp, ExpertLayer) for layer in layers] == [False, True, False, True]
    experts = layers[3].mlp
    assert isinstance(experts, ExpertLayer)
    assert experts.router_EH is weights["layers.3.router.weight"]
    assert experts.gate_up is weights["layers.3.experts.gate_up.weight"]
    assert experts.down is weights["layers.3.experts.down.weight"]
    assert experts.shared is not None
    assert experts.shared.gate_1H is weights["layers.3.shared.gate.weight"]
    assert experts.shared.mlp.gate_up.weight_NK is weights["layers.3.shared.gate_up.weight"]
    assert spec.experts is not None
    ungated = replace(spec, experts=replace(spec.experts, has_shared_gate=False))
    layer = built_layer(ungated, weights, 1).mlp
    assert isinstance(layer, ExpertLayer)
    assert layer.shared is not None
    assert layer.shared.gate_1H is None


def test_expert_layer_of_qwen3_moe_has_no_shared_expert() -> None:
    spec, weights = make("qwen3_moe")
    experts = built_layer(spec, weights, 0).mlp
    assert isinstance(experts, ExpertLayer)
    assert experts.shared is None


def test_codes_go_where_they_can_and_nowhere_else() -> None:
    spec, weights = make("qwen3_moe")
    for name in ("layers.0.qkv.weight", "layers.0.experts.down.weight", "layers.0.router.weight"):
        values = weights[name]
        codes, scales = quantize(values.reshape(-1, values.shape[-1]), INT8)
        shape = tuple(values.shape)
        weights[name] = QuantizedWeight(INT8, shape, codes.view(shape), scales.view(shape[:-1]))
    with pytest.raises(AssertionError, match=r"layers\.0\.router\.weight is quantized"):
        built_layer(spec, weights, 0)
    weights["layers.0.router.weight"] = torch.zeros(weights["layers.0.router.weight"].shape)
    layer = built_layer(spec, weights, 0)
    assert layer.attention.qkv.weight_NK is weights["layers.0.qkv.weight"]


def choose(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything in C, or everything in torch."""
    if backend == "native_paged":
        require_native()
    else:
        monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    return backend


@cache
def tiny_experts(name: str) -> tuple[Any, LoadedModel]:
    """transformers' model, and ours over the same weights."""
    theirs = make_tiny(name)
    spec = read_spec(config_of(theirs))
    return theirs, LoadedModel(spec, assembled(parameters(spec), tensors_of(theirs, "separate")))


SOME_OR_ALL_STEPS = pytest.mark.parametrize("num_steps", [FEW_STEPS, pytest.param(NUM_STEPS, marks=pytest.mark.slow)])


@SOME_OR_ALL_STEPS
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_expert_logits_of_single_sequence_match_transformers(name, num_steps, monkeypatch):
    theirs, ours = tiny_experts(name)
    (request,) = make_requests((33,), num_steps)
    drive = make_drive(ours, choose("torch_paged", monkeypatch), max_num_batched_tokens=128)
    drive.run([request])
    judge(theirs, drive, request)


@SOME_OR_ALL_STEPS
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_expert_logits_batched_and_chunked_match_transformers(name, num_steps, monkeypatch):
    backend = choose("native_paged", monkeypatch)
    theirs, ours = tiny_experts(name)
    requests = make_requests((1, 17, 64), num_steps)
    drive = make_drive(ours, backend, max_num_batched_tokens=24, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_neighbours_change_no_bit_of_a_row(name):
    """Alone or beside others, whole or in chunks: the experts of a row do not hear of the other rows."""
    require_native()
    _, ours = tiny_experts(name)
    alone = Request(list(range(3, 40)), 6, params=EVERY_POSITION)
    beside = Request(list(range(3, 40)), 6, params=EVERY_POSITION)
    others = [Request(list(range(50 + n, 90)), 9, params=EVERY_POSITION) for n in (0, 20)]
    found = []
    for own, requests, max_rows in ((alone, [alone], 128), (beside, [others[0], beside, others[1]], 16)):
        drive = make_drive(ours, "native_paged", max_num_batched_tokens=max_rows)
        drive.run(requests)
        found.append(drive.logits(own))
    assert found[0].keys() == found[1].keys()
    assert all(same_bits(found[0][position], found[1][position]) for position in found[0])


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_workspace_largest_step_uses_all_reserved_bytes(name, monkeypatch):
    require_native()
    limits = Limits(4, 90, 100, 4)
    rig = Rig(tiny_experts(name)[1], "native_paged", limits, 100)
    watched = WatchedWorkspace(rig.workspace, monkeypatch)
    rig.execute(make_step(90, groups=rig.groups))
    plan = workspace_plan(tiny_experts(name)[1].spec, limits, "float32", ())
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes == reserved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_model_every_expert_layout_gives_same_weights(layout, tmp_path):
    """By the engine's own loader, and by what the parts say."""
    name = "qwen2_moe normalized, every second layer"
    theirs, ours = tiny_experts(name)
    listed = parameters(ours.spec)
    for parameter in listed:
        parameter.check()
    straight = assembled(listed, tensors_of(theirs, layout))
    save_tiny_experts(theirs, tmp_path, layout)
    model = open_model(str(tmp_path), "auto")
    plan = plan_load(model.parameters, model.source, "float32")
    loaded = load_weights(plan, model.source, "cpu", Ledger(), lambda done, total: None).weights
    model.source.close()
    assert model.spec == ours.spec
    assert straight.keys() == ours.weights.keys() == loaded.keys()
    for weight in ours.weights:
        assert torch.equal(straight[weight], ours.weights[weight]), weight
        assert torch.equal(loaded[weight], ours.weights[weight]), weight


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_of_experts_stay_near(dtype):
    theirs, ours = tiny_experts("qwen2_moe")
    halves = {name: weight.to(getattr(torch, dtype)) for name, weight in ours.weights.items()}
    rig = Rig(LoadedModel(ours.spec, halves), "torch_paged", Limits(4, 24, 100, 4), 100, dtype, dtype)
    drive, (request,) = Drive(rig, 100), make_requests((33,))
    request.max_tokens = 4
    drive.run([request])
    with torch.no_grad():
        expected = theirs(torch.tensor([[*request.prompt, *request.output]])).logits[0]
    errors = [float((row - expected[position]).abs().max()) for position, row in drive.logits(request).items()]
    # A row whose experts are nearly tied may take others in half precision, so most rows are near, and all are finite.
    near = sorted(errors)[: -(-len(errors) * 9 // 10)]
    assert near[-1] < (0.05 if dtype == "float16" else 0.4)
    assert all(row.isfinite().all() for row in drive.logits(request).values())
