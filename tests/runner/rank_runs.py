"""Ranks of tiny models in lock-step threads, built as an engine builds them, with dummy weights; and one rank alone beside them."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distributed.lock_step import LockStep
from holdfast.config import EngineConfig
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.families.compressed.pages import CompressedBackend
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.ledger import Ledger
from holdfast.models.compressed_readers import HEAVY, OVERLAPPED
from holdfast.models.compressed_readers import SLIDING as WINDOW
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.resolve import Agreed
from holdfast.planning.target import device_target
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.request.sequence import Sequence as TokenSequence
from holdfast.runner.build import RunnerBuild, plan_model
from holdfast.runner.runner import Runner
from holdfast.runner.weight_load import WeightLoad

VOCAB = 131
OPTIONS = {
    "device": "cpu",
    "load_format": "dummy",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "max_model_len": 64,
    "page_tokens": 4,
    "kv_cache_memory": "4MiB",
    "weight_cache": "off",
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama_tied": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 3, "head_dim": 8},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": 192,
        "do_layer_norm_before": True,
        "word_embed_proj_dim": 96,
        "activation_function": "relu",
        "head_dim": None,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 48,
        "head_dim": None,
        **EXPERTS,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **EXPERTS},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 0.9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 12,
        "head_dim": None,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
MODELS["deepseek_v32"] = MODELS["deepseek_v3"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 5,
}
MODELS["v4_flash"] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": None,
    "hidden_size": 48,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "num_attention_heads": 12,
    "o_groups": 4,
    "o_lora_rank": 12,
    "layer_types": [WINDOW, OVERLAPPED, HEAVY, OVERLAPPED],
    "num_hidden_layers": 4,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "sliding_window": 8,
    "compress_rate_hca": 8,
    "swiglu_limit": 0.8,
    "routed_scaling_factor": 1.7,
    "hc_sinkhorn_iters": 4,
}
"""Rows choose among entries from position 15 on."""
MODELS["v4_pro"] = MODELS["v4_flash"] | {
    "layer_types": [HEAVY, HEAVY, OVERLAPPED],
    "num_hidden_layers": 3,
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
    "num_attention_heads": 16,
    "o_groups": 8,
    "n_routed_experts": 12,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
MODELS["qwen3_5"] = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **DELTA}
MODELS["qwen3_next"] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 48,
    **DELTA,
    **EXPERTS,
}
MODELS["opt_350m"] = MODELS["opt"] | {"word_embed_proj_dim": 40, "do_layer_norm_before": False}
NUM_PAGES = 48
"""For every rank, so that a slot means the same on all of them."""
NUM_TOKENS = (17, 9, 2)
"""For three sequences, which come in several steps."""
NUM_PROMPT_TOKENS = (15, 9, 1)
"""What lies behind these is decoded: rows of prompts take other tiles with batch_invariant, and no graph of a decode step."""


def write_model(folder: Path, name: str, **changes: Any) -> Path:
    """config.json alone: weights are dummies, which depend on names and places."""
    values = {key: value for key, value in (BASE | MODELS[name] | changes).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


class Built(NamedTuple):
    """One rank."""

    mesh: Mesh
    build: RunnerBuild
    runner: Runner
    weights: Mapping[str, torch.Tensor | QuantizedWeight]
    exchange: Exchange | None


def plan_rank(
    path: Path | str, options: Mapping[str, Any], mesh: Mesh
) -> tuple[EngineConfig, OpenModel, WeightLoad, RunnerPlan]:
    """From headers."""
    config = EngineConfig.from_options(**(OPTIONS | dict(options)))
    model, target = open_model(str(path), config.load_format), device_target("cpu")
    load, plan = plan_model(
        config, model, target, config.weight_cache != "off", mesh, Agreed(config.max_model_len or 64, NUM_PAGES)
    )
    assert plan.memory.num_pages == NUM_PAGES, f"{plan.memory.num_pages} pages"
    return config, model, load, plan


def build_rank(path: Path | str, options: Mapping[str, Any], mesh: Mesh, exchange: Exchange | None) -> Built:
    """From headers to a runner, on the thread of a rank."""
    config, model, load, plan = plan_rank(path, options, mesh)
    ledger = Ledger()
    build = RunnerBuild(config, model, plan, ledger, torch.device("cpu"))
    build.load(load, lambda done, total: None)
    if exchange is not None:
        build.connect(exchange)
    runner = build.assemble()
    cache = build.plan.cache
    assert cache is not None, "no cache"
    for layer, own in enumerate(cache.layers):
        for plane in own.planes:
            build.storage.plane(layer, plane.name).view(torch.uint8).zero_()
    for state in states_of(runner):
        state.zero_()
    return Built(mesh, build, runner, build.weights, exchange)


class Ranks:
    """All ranks of a mesh, built together; `run` is one function on all of them at once."""

    def __init__(
        self, path: Path | str, num_ranks: int, *, exact: bool, whole_experts: bool = False, **options: Any
    ) -> None:
        ranks = meshes(num_ranks, has_expert_parallelism=whole_experts, is_exact=exact)
        self._steps = LockStep(ranks, plan_rank(path, options, ranks[0])[-1].exchange_needs)
        self.built = self._steps.run(lambda mesh, exchange: build_rank(path, options, mesh, exchange))

    def run(self, function: Callable[[Built], Any]) -> list[Any]:
        return self._steps.run(lambda mesh, _: function(self.built[mesh.rank]))


def one_rank(path: Path | str, **options: Any) -> Built:
    return build_rank(path, options, ALONE, None)


def steps_of(runner: Runner) -> list[tuple[LiveStep, list[int]]]:
    """Prompts in chunks, beside one that decodes; rows whose logits are wanted are some, none and all."""
    pages, sequences = count(), []
    for number, (length, num_prompt) in enumerate(zip(NUM_TOKENS, NUM_PROMPT_TOKENS, strict=True)):
        ids = [(7 * place + 31 * number + 5) % runner.vocab_size for place in range(length)]
        tables = [[next(pages) for _ in range(group.pages_for(length))] for group in runner.groups]
        sequence = TokenSequence(number, ids, num_prompt, SamplingParams(), seed=0, max_tokens=4, tables=tables)
        sequence.slot = number
        sequences.append(sequence)
    one, two, three = sequences

    def step(*items: tuple[TokenSequence, int, int]) -> LiveStep:
        return LiveStep(tuple(ScheduledSequence.of(*item) for item in items))

    return [
        (step((one, 0, 6), (two, 0, 3)), []),
        (step((one, 6, 9), (two, 3, 6), (three, 0, 1)), [3, 8, 14, 15]),
        (step((one, 15, 1), (three, 1, 1)), [0, 1]),
        (step((one, 16, 1)), [0]),
    ]


class Ran(NamedTuple):
    """What a rank has of each step with logits."""

    hidden: list[torch.Tensor]
    logits: list[torch.Tensor]
    """For its share of the vocabulary."""


@torch.inference_mode()
def run_steps(built: Built, steps: Sequence[tuple[LiveStep, list[int]]] | None = None) -> Ran:
    """`steps_of` the runner, or others."""
    ran, runner = Ran([], []), built.runner
    for step, rows in steps_of(runner) if steps is None else steps:
        batch = runner.buffers.fill(step, rows, step.num_tokens, len(rows))
        hidden_RH = runner.model.hidden(batch, runner.backend.plan(batch))
        if rows:
            ran.hidden.append(hidden_RH.clone())
            ran.logits.append(runner.model.logits(hidden_RH).clone())
        if built.exchange is not None:
            built.exchange.end_step()
    return ran


def whole_logits(ran: Sequence[Ran]) -> list[torch.Tensor]:
    """For all ranks, step by step."""
    return [torch.cat(parts, dim=1) for parts in zip(*(one.logits for one in ran), strict=True)]


def states_of(runner: Runner) -> list[torch.Tensor]:
    """[layers, places, ...] of every kind of state; none without entries."""
    backend: Any = runner.backend
    return list(backend._states._arena.tensors.values()) if isinstance(backend, CompressedBackend) else []


def pages_of(built: Built) -> list[torch.Tensor]:
    """Every plane of every layer, [chunks, heads, tokens, ...] of quantized ones, which lie so, else [slots, ...]; and states."""
    cache, storage, planes = built.build.plan.cache, built.build.storage, []
    assert cache is not None, "no cache"
    for place, own in enumerate(cache.layers):
        for plane in own.planes:
            held = storage.plane(place, plane.name)
            if own.format.is_quantized and not own.format.is_latent:
                num_heads = plane.token_shape[0]
                held = held.view(-1, num_heads, cache.page_tokens, *plane.token_shape[1:])
            planes.append(held)
    return planes + states_of(built.runner)


def share_of(whole: torch.Tensor, like: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The part of a plane that a rank has: all of it, or some of the heads, which neighbours may share."""
    assert whole.dim() == like.dim(), f"{whole.shape} {like.shape}"
    axes = [axis for axis in range(whole.dim()) if whole.shape[axis] != like.shape[axis]]
    if not axes:
        return whole
    (axis,) = axes
    size = like.shape[axis]
    start = mesh.tensor_rank * (whole.shape[axis] // size) // mesh.tensor_size * size
    return whole.narrow(axis, start, size)


def assert_pages_are_slices(alone: Built, ranks: Sequence[Built]) -> None:
    for built in ranks:
        for whole, own in zip(pages_of(alone), pages_of(built), strict=True):
            expected = share_of(whole, own, built.mesh).contiguous()
            assert torch.equal(expected.view(torch.uint8), own.view(torch.uint8)), f"{built.mesh}"
