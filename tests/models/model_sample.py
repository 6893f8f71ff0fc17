"""Some models of the catalogue: one of each kind, for tests that would say the same of its sisters."""

from holdfast.models.catalogue import CATALOGUE


def _kind(name: str) -> tuple[object, ...]:
    """What makes a plan take another way: the architecture, one table for tokens and head, stored codes."""
    config = CATALOGUE[name]
    return (*config["architectures"], config.get("tie_word_embeddings"), "quantization_config" in config)  # type: ignore[misc]


SAMPLE = tuple({_kind(name): name for name in reversed(CATALOGUE)}.values())
"""The first of each kind."""
EVERY_SIZE = (
    "SmolLM2-135M",
    "SmolLM2-360M",
    "Qwen3-0.6B",
    "Qwen3-8B",
    "Qwen3-32B",
    "Qwen2.5-0.5B-Instruct",
    "Llama-3.1-8B",
)
"""Models with few and many heads, narrow and wide."""
SOME_MODELS = tuple(dict.fromkeys((*SAMPLE, *EVERY_SIZE)))
