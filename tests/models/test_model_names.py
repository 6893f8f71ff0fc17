"""Models by the names that people type: on the Hub, in Ollama, in a chat; what a name says of stored bits; near misses."""

import re

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelNotFoundError
from holdfast.models.catalogue import CATALOGUE, SAME, SOURCES, StoredAs, find_model, is_known, stored_as

TYPED = {
    "Llama-2-7b-hf": "llama2:7b, meta-llama/Llama-2-7b-chat-hf, Llama 2 7B",
    "Llama-2-13b-hf": "llama-2-13b, TheBloke/Llama-2-13B-chat-GPTQ",
    "Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf, llama2-70b-chat",
    "Meta-Llama-3-8B": "meta-llama/Meta-Llama-3-8B-Instruct, llama3:8b",
    "Llama-3.1-8B": "llama3.1-8b, meta-llama/Llama-3.1-8B-Instruct, Llama 3.1 8B, llama3.1:8b-instruct-q4_K_M, llama_3.1_8b",
    "Llama-3.1-405B": "llama-3.1-405b, meta-llama/Llama-3.1-405B-Instruct-FP8",
    "Llama-3.2-1B": "llama3.2:1b, meta-llama/Llama-3.2-1B-Instruct",
    "Llama-3.3-70B-Instruct": "Llama-3.3-70B, llama3.3 70b, llama3.3:70b",
    "DeepSeek-R1-Distill-Llama-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B, deepseek r1 distill llama 8b",
    "DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-r1-distill-qwen-1.5b",
    "DeepSeek-R1-Distill-Qwen-7B": "deepseek-r1-distill-qwen-7b, bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF",
    "DeepSeek-R1-Distill-Qwen-32B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B/",
    "Qwen3-0.6B": "qwen3:0.6b, Qwen3-0.6B-Base",
    "Qwen3-8B": "Qwen/Qwen3-8B, qwen3 8b, Qwen-3-8B, Qwen/Qwen3-8B-AWQ, Qwen/Qwen3-8B-FP8",
    "Qwen3-32B": "qwen3 32b, QWEN3_32B",
    "Qwen3-30B-A3B": "qwen3:30b-a3b, Qwen/Qwen3-30B-A3B-GPTQ-Int4",
    "Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B-Instruct-2507, qwen3-30b-a3b-instruct-2507-fp8",
    "Qwen3-30B-A3B-Thinking-2507": "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "Qwen3-4B-Instruct-2507": "qwen3-4b-instruct-2507",
    "Qwen3-235B-A22B-Thinking-2507": "qwen3 235b a22b thinking 2507",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B-FP8",
    "Qwen3-Coder-30B-A3B-Instruct": "qwen3-coder-30b-a3b, Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-Coder-480B-A35B-Instruct": "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
    "Qwen2.5-7B-Instruct": "qwen2.5-7b, Qwen/Qwen2.5-7B-Instruct-AWQ, qwen2.5:7b-instruct",
    "Qwen2.5-Coder-32B-Instruct": "qwen2.5-coder:32b, Qwen/Qwen2.5-Coder-32B-Instruct",
    "QwQ-32B": "qwq:32b",
    "Mistral-7B-v0.1": "mistralai/Mistral-7B-Instruct-v0.1, mistral-7b-v0.1",
    "Mistral-7B-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "Mistral-7B": "mistral-7b, mistral 7b instruct",
    "Mistral-Nemo-Instruct-2407": "mistralai/Mistral-Nemo-Instruct-2407",
    "Mistral-Nemo": "mistral-nemo",
    "Mistral-Small-24B-Instruct-2501": "mistralai/Mistral-Small-24B-Instruct-2501",
    "Mistral-Small-3.1-24B-Instruct-2503": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "Mixtral-8x7B": "mixtral:8x7b, mixtral-8x7b-instruct",
    "Mixtral-8x7B-v0.1": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "Mixtral-8x22B-v0.1": "mistralai/Mixtral-8x22B-v0.1",
    "gpt-oss-20b": "gpt-oss:20b, openai/gpt-oss-20b, GPT OSS 20B",
    "gpt-oss-120b": "openai/gpt-oss-120b, gptoss120b",
    "gemma-3-1b-it": "gemma3:1b, google/gemma-3-1b-pt",
    "gemma-3-27b-it": "google/gemma-3-27b-it, gemma 3 27b, gemma3:27b",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "phi-4": "microsoft/phi-4, phi4",
    "Phi-4-mini-instruct": "phi4-mini, microsoft/Phi-4-mini-instruct",
    "DeepSeek-V2-Lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "DeepSeek-V2": "deepseek v2",
    "DeepSeek-V3-0324": "deepseek-ai/DeepSeek-V3-0324",
    "DeepSeek-V3.1": "deepseek-v3.1",
    "DeepSeek-V3.2-Exp": "deepseek-ai/DeepSeek-V3.2-Exp",
    "DeepSeek-R1": "deepseek-ai/DeepSeek-R1, deepseek r1",
    "DeepSeek-V4-Flash": "deepseek v4 flash",
    "GLM-4.5-Air": "zai-org/GLM-4.5-Air, glm4.5-air, GLM-4.5-Air-FP8",
    "glm-4-9b-chat-hf": "glm-4-9b, THUDM/glm-4-9b-chat",
    "Kimi-K2-Instruct": "moonshotai/Kimi-K2-Instruct, kimi k2",
    "Qwen3.5-27B": "Qwen/Qwen3.5-27B, qwen3.5:27b, unsloth/Qwen3.5-27B-GGUF, Qwen3.5-27B-FP8",
    "Qwen3.6-35B-A3B": "qwen3.6 35b a3b",
    "Qwen3-Next-80B-A3B-Instruct": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "gemma-4-31B-it": "google/gemma-4-31B-it, gemma4:31b, gemma-4-31b",
    "gemma-4-E4B-it": "gemma-4-e4b",
    "Llama-4-Scout": "llama4 scout",
    "Kimi-K2.5": "moonshotai/Kimi-K2.5, kimi k2.5",
    "MiniMax-M2": "MiniMaxAI/MiniMax-M2, minimax m2",
    "Devstral-Small-2507": "mistralai/Devstral-Small-2507",
    "Nemotron-3-Nano": "nemotron 3 nano",
    "GLM-5.1": "zai-org/GLM-5.1",
    "OPT-125m": "facebook/opt-125m",
    "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
CASES = [(typed, name) for name, several in TYPED.items() for typed in several.split(", ")]


def test_find_model_cases_cover_sixty_names() -> None:
    assert len(CASES) >= 60
    assert len(CATALOGUE) >= 40


@for_each("typed, name", CASES)
def test_names_as_people_type_them(typed: str, name: str) -> None:
    assert find_model(typed) == (name, CATALOGUE[SAME.get(name, name)])


@for_each("name", [*CATALOGUE, *SAME, *SOURCES.values()])
def test_find_model_every_catalogue_name_finds_itself(name: str) -> None:
    """No two names are spelt so much alike that one hides the other."""
    assert find_model(name)[0] == name.rpartition("/")[2]


def test_sources_name_every_catalogue_model() -> None:
    assert SOURCES.keys() == CATALOGUE.keys()
    assert all(
        owner and SAME.get(name, name) == known
        for known, (owner, _, name) in ((k, s.partition("/")) for k, s in SOURCES.items())
    )
    assert set(SAME.values()) <= CATALOGUE.keys()


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("Qwen/Qwen3-8B-AWQ", StoredAs("AWQ", "mxfp4")),
        ("Qwen3-30B-A3B-GPTQ-Int4", StoredAs("GPTQ", "mxfp4")),
        ("RedHatAI/Llama-3.1-8B-Instruct-FP8-dynamic", StoredAs("FP8", "fp8")),
        ("Meta-Llama-3.1-8B-Instruct-quantized.w8a8", StoredAs("W8A8", "fp8")),
        ("llama3.1:8b-instruct-q4_K_M", StoredAs("Q4_K_M", "")),
        ("bartowski/Qwen2.5-7B-Instruct-GGUF", StoredAs("GGUF", "")),
        ("Qwen3-8B", None),
        ("gpt-oss-20b", None),
    ],
)
def test_stored_as_reads_bits_from_name(name: str, stored: StoredAs | None) -> None:
    assert stored_as(name) == stored


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen3-9B", "Qwen3-8B"),
        ("deepseek-v4", "DeepSeek-V4-Pro"),
        ("gemma-3-26b", "gemma-3-27b-it"),
        ("gpt-oss-21b", "gpt-oss-20b"),
        ("Qwen3-32", "Qwen3-32B"),
        ("lama-3.1-8b", "Llama-3.1-8B"),
        ("qwem3 32b", "Qwen3-32B"),
        ("Qwen3-Next", "Qwen3-Next-80B-A3B"),
        ("deepsek-r1", "DeepSeek-R1"),
        ("qwen3-30b", "Qwen3-30B-A3B"),
        ("Gemma-4-27B", "gemma-4-26B-A4B-it"),
    ],
)
def test_find_model_near_miss_suggests_nearest_name(name: str, near: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=f"Did you mean .*{near}.* Else pass its config.json with --config FILE"
    ):
        find_model(name)


UNKNOWN = (
    "Qwen4-32B, llama-5-70b, gpt-oss-2-20b, deepseek-v5, Qwen3.7-27B, Qwen3.8-27B, Qwen3-527B, Qwen36-27B-A3B, gemma-5-27b, "
    "kimi-k3, phi-5, glm-6, MiniMax-M3, mistral-large-3, Mistral-7B-v0.4, qwen3-embedding-8b, Qwen3-VL-8B-Instruct, "
    "Qwen2.5-VL-7B-Instruct, Qwen3-Omni-30B-A3B-Instruct, Qwen3-Coder-Next, Qwen3-Reranker-4B, Qwen2.5-Math-7B, "
    "DeepSeek-R1-0528-Qwen3-8B, Llama-3.1-Nemotron-70B-Instruct, Llama-3.2-11B-Vision-Instruct, llama-guard-4-12b, "
    "codellama-7b, nemotron-4-340b, gpt-4o, gpt-5, claude-4, grok-2, gemma-3n-e4b, QwQ-32B-Preview, 8b, ;rm -rf, "
    "$(reboot), Qwen/Qwen4-32B, unsloth/Qwen4-32B-GGUF, Qwen4-32B-AWQ, qwen2-7b, llama-3.3-8b, falcon-40b, %s%n"
)


@pytest.mark.parametrize("name", UNKNOWN.split(", "))
def test_find_model_unknown_name_suggests_no_model(name: str) -> None:
    with raises_code("architecture.not_in_catalogue", ModelNotFoundError, name=name) as caught:
        find_model(name)
    fix = r"Pass its config\.json with --config FILE, or --parameters [\d.]+[BM] for an estimate"
    assert re.match(fix, caught.value.hints[0])
    assert not is_known(name)


def test_find_model_unknown_name_offers_estimate_by_size() -> None:
    with pytest.raises(ModelNotFoundError, match="--parameters 70B for an estimate"):
        find_model("llama-5-70b")


@pytest.mark.parametrize("name", ["", "/", "x" * 100_000, "\x1b[31m", "../../etc/passwd", "Qwen3-8B" + " " * 300 + "x"])
def test_nonsense_is_sent_to_the_list(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"nor one of the {len(CATALOGUE)} models known by name") as caught:
        find_model(name)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 600
