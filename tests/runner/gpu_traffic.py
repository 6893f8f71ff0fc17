"""Steps for a runner on a GPU: sequences whose tokens are known ahead, so that every run of a seed takes the same steps."""

import json
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

from holdfast.attention.backend import Batch
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import EngineConfig, Limits
from holdfast.loading.model_files import open_model
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.build import BuiltRunner, build_runner
from kernels.exactness import same_bits

COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "head_dim": 64,
    },
    "windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 300,
        "max_window_layers": 1,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "mlp_only_layers": [1],
    },
    "shared": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 256,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "sliding_window": 100,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 192,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 300,
        "sliding_window_pattern": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
STATES = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MODELS["states_wide"] = {**STATES, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
MODELS["states_experts"] = {
    **STATES,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
"""Tiny, and wide enough for the fused decode path."""
MODELS["qwen3_wide"] = MODELS["qwen3"] | {"head_dim": 128}
"""Tiny, and wide enough for the fused decode path."""
LATENT = {
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
MODELS["latent"] = {
    **LATENT,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
MODELS["latent_q"] = {
    **LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 256,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 0.25,  # of dummy weights: a group that another rounding has chosen must not decide the logits
}
MODELS["sparse"] = {
    **MODELS["latent_q"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 64,
}
"""Most contexts of traffic are longer than what a row attends to, and some are not."""
MODELS["sparse_shared"] = {
    **MODELS["sparse"],
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "index_n_heads": 32,
    "index_topk_pattern": "FSF",
}
"""A layer between two that choose takes what the first chose."""
MODELS["compressed"] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_attention_heads": 20,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160000.0,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 0.25,
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""Rows from 67 on choose their entries; the sizes are those that kernels of a Hopper are made for."""
MODELS["compressed_small"] = MODELS["compressed"] | {
    "num_attention_heads": 4,
    "head_dim": 160,
    "qk_rope_head_dim": 32,
    "sliding_window": 20,
    "index_topk": 5,
}
"""Sizes that any GPU's kernels take."""
MODELS["states"] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
"""Gated delta nets."""
SMALL: dict[str, Any] = {
    "load_format": "dummy",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 300,
    "max_model_len": 2048,
    "page_tokens": 16,
}
LENGTHS = (1, 1, 2, 15, 16, 17, 63, 64, 65, 130, 250, 255, 256, 257, 500, 700, 1990)
"""For prompts: on both sides of pages, of blocks and of splits."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3, "logit_bias": {3: -5.0, 7: 2.0}, "logprobs": 1},
    {"temperature": 0.0, "min_tokens": 5},
)


def write_model(folder: Path, name: str) -> Path:
    """A folder that load_format="dummy" can open."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
    return path


def build_dummy(folder: Path, name: str = "qwen3", **options: Any) -> BuiltRunner:
    """A runner of a tiny model with dummy weights."""
    model = open_model(str(write_model(folder, name)), "dummy")
    return build_runner(EngineConfig(**(SMALL | options)), model, lambda done, total: None)


class Known:
    """One sequence: tokens known to its end, computed up to `position`."""

    def __init__(self, number: int, prompt_length: int, length: int, vocab_size: int, params: SamplingParams) -> None:
        dice = Random(number)
        self.tokens = [dice.randrange(8, vocab_size) for _ in range(length)]
        prompt = self.tokens[:prompt_length]
        self.sequence = Sequence(number, prompt, prompt_length, params, seed=number, max_tokens=length)
        self.position = 0

    @property
    def is_decoding(self) -> bool:
        return self.position >= self.sequence.num_prompt_tokens

    @property
    def is_done(self) -> bool:
        return self.position == len(self.tokens)

    def schedule(self, num_tokens: int, grow: Callable[[Sequence, int, int], None]) -> ScheduledSequence:
        """The next tokens, of the prompt at most to its end; `grow(sequence, start, end)` gives it the pages for them."""
        sequence, start = self.sequence, self.position
        if self.is_decoding:
            sequence.token_ids = self.tokens[: start + 1]
        end = min(start + num_tokens, sequence.num_tokens)
        grow(sequence, start, end)
        self.position = sequence.num_computed = end
        return ScheduledSequence.of(sequence, start, end - start)


GROUP_PAGES = 200
"""Between the pages that the groups of one sequence have in a row."""


def in_a_row(groups: SequenceABC[CacheGroup], first_page: int) -> Callable[[Sequence, int, int], None]:
    """Gives a sequence neighbouring pages in each group, and takes none back."""

    def grow(sequence: Sequence, start: int, end: int) -> None:
        sequence.tables += [[] for _ in range(len(groups) - len(sequence.tables))]
        for index, (group, table) in enumerate(zip(groups, sequence.tables, strict=True)):
            base = first_page + GROUP_PAGES * index
            table += range(base + len(table), base + group.pages_for(end))

    return grow


class Traffic:
    """Sequences that come and go; the company changes at every step, and pages change their owners."""

    def __init__(
        self, limits: Limits, groups: SequenceABC[CacheGroup], num_pages: int, vocab_size: int, seed: int
    ) -> None:
        self._limits = limits
        self._groups = groups
        self._vocab_size = vocab_size
        self._dice = Random(seed)
        self._free = list(range(num_pages))
        self._dice.shuffle(self._free)
        self._number = 1000 * seed
        self._live: list[Known] = []

    @property
    def free_pages(self) -> list[int]:
        return list(self._free)

    def steps(self, count: int, decode_share: float = 0.5, asks_prompts: bool = False) -> Iterator[LiveStep]:
        """Some with a row for each sequence, never as many as at the last step; the others with prompts among them."""
        size = 0
        for _ in range(count):
            self._renew(asks_prompts)
            decoding = [known for known in self._live if known.is_decoding]
            if 2 * len(decoding) < len(self._live) or self._dice.random() >= decode_share:
                yield self._mixed()
                continue
            size = self._dice.choice([number for number in range(1, len(decoding) + 1) if number != size] or [1])
            yield LiveStep(tuple(self._schedule(known, 1) for known in self._dice.sample(decoding, size)))

    def _mixed(self) -> LiveStep:
        """Everybody in some order, prompts in chunks of any size, as long as there are rows."""
        room = self._dice.choice((5, 64, 100, self._limits.max_num_batched_tokens))
        room, items = min(room, self._limits.max_num_batched_tokens), []
        for known in self._dice.sample(self._live, len(self._live)):
            if room:
                items.append(self._schedule(known, self._dice.randint(1, room)))
                room -= items[-1].num_new_tokens
        return LiveStep(tuple(items))

    def _schedule(self, known: Known, num_tokens: int) -> ScheduledSequence:
        return known.schedule(num_tokens, self._grow)

    def _grow(self, sequence: Sequence, start: int, end: int) -> None:
        """What lies behind a window goes back first, and may be another's in the same step."""
        sequence.tables += [[] for _ in range(len(self._groups) - len(sequence.tables))]
        for group, table in zip(self._groups, sequence.tables, strict=True):
            for place in group.passed(start):
                if place < len(table) and table[place] != HOLE:
                    self._free.insert(0, table[place])
                    table[place] = HOLE
            table += [self._free.pop() for _ in range(group.pages_for(end) - len(table))]

    def _most_pages(self, num_tokens: int) -> int:
        budget = self._limits.max_num_batched_tokens
        return sum(group.most_pages(num_tokens, budget) for group in self._groups)

    def _renew(self, asks_prompts: bool) -> None:
        """Who is done gives pages back and others come; a sequence comes only where all its pages are there."""
        for known in [known for known in self._live if known.is_done]:
            self._live.remove(known)
            self._free[:0] = _held(known.sequence)
        while len(self._live) < self._limits.max_num_seqs:
            prompt_length = min(self._dice.choice(LENGTHS), self._limits.max_model_len - 50)
            length = prompt_length + self._dice.randint(1, 50)
            promised = sum(self._most_pages(len(known.tokens)) for known in self._live)
            owned = sum(len(_held(known.sequence)) for known in self._live)
            if self._most_pages(length) > len(self._free) - (promised - owned):
                return
            self._number += 1
            kind = dict(self._dice.choice(KINDS))
            if asks_prompts and self._dice.random() < 0.1:
                kind["prompt_logprobs"] = 1
            params = SamplingParams(**kind)
            taken = {known.sequence.slot for known in self._live}
            self._live.append(Known(self._number, prompt_length, length, self._vocab_size, params))
            # A sequence whose layers keep states has a place of its own for them.
            self._live[-1].sequence.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _held(sequence: Sequence) -> list[int]:
    return [page for table in sequence.tables for page in table if page != HOLE]


def traffic(built: BuiltRunner, seed: int = 1) -> Traffic:
    runner = built.runner
    return Traffic(runner.limits, runner.groups, runner.num_pages, runner.vocab_size, seed)


@contextmanager
def recorded(built: BuiltRunner) -> Iterator[list[torch.Tensor]]:
    """Inside, every row of logits that is sampled from is kept, one tensor a step that samples."""
    sampler: Any = built.runner.sampler
    kept: list[torch.Tensor] = []
    launch = sampler.launch

    def launch_and_keep(logits_SV: torch.Tensor | None, *arguments: Any) -> Any:
        if logits_SV is not None:
            kept.append(logits_SV.clone())
        return launch(logits_SV, *arguments)

    sampler.launch = launch_and_keep
    try:
        yield kept
    finally:
        del sampler.launch


class CheckedReplays:
    """Runs the kernels of every replayed step one by one behind it, on the same buffers, and compares all that is left."""

    def __init__(self, built: BuiltRunner) -> None:
        self._runner: Any = built.runner
        self._planned: tuple[Batch, Any] | None = None
        self._plan, self._replay = self._runner.backend.plan, self._runner.graphs.replay
        self._runner.backend.plan = self._keep_plan
        self._runner.graphs.replay = self._check
        self.sizes: list[tuple[int, bool]] = []

    def _keep_plan(self, batch: Batch, captured: bool = False) -> Any:
        plan = self._plan(batch, captured)
        self._planned = batch, plan
        return plan

    def _check(self, size: int, is_decode: bool) -> torch.Tensor:
        assert self._planned is not None, "a replay without a plan"
        logits_RV = self._replay(size, is_decode)
        sampler, num_rows = self._runner.sampler, len(logits_RV)
        from_graph = logits_RV.clone(), sampler.argmax_S[:num_rows].clone()
        eager_RV = self._runner.model.step_logits(*self._planned)
        sampler.find_argmax(eager_RV)
        assert same_bits(eager_RV, from_graph[0]), f"logits of {size=} {is_decode=} differ"
        assert torch.equal(sampler.argmax_S[:num_rows], from_graph[1]), f"argmax of {size=} {is_decode=} differ"
        self.sizes.append((size, is_decode))
        return logits_RV


class CheckedStates(CheckedReplays):
    """A step adds its rows to states: they are put back before its kernels run once more, and compared behind them."""

    def __init__(self, built: BuiltRunner, states: SequenceABC[torch.Tensor]) -> None:
        super().__init__(built)
        self._states = states

    def _check(self, size: int, is_decode: bool) -> torch.Tensor:
        before, replay = [state.clone() for state in self._states], self._replay
        after: list[torch.Tensor] = []

        def replay_and_put_back(size: int, is_decode: bool) -> torch.Tensor:
            logits_RV = replay(size, is_decode)
            after.extend(state.clone() for state in self._states)
            for state, old in zip(self._states, before, strict=True):
                state.copy_(old)
            return logits_RV

        self._replay = replay_and_put_back
        try:
            logits_RV = super()._check(size, is_decode)
        finally:
            self._replay = replay
        assert all(same_bits(*pair) for pair in zip(self._states, after, strict=True)), f"states of {size=} differ"
        return logits_RV


def num_compiled() -> int:
    """Kernels that Triton has compiled for this package."""
    functions: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("holdfast.kernels."):
            functions |= {id(item): item for item in vars(module).values() if hasattr(item, "device_caches")}
    return sum(len(caches[0]) for function in functions.values() for caches in function.device_caches.values())
