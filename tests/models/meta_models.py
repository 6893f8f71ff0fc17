"""Models of transformers without memory: how many parameters a config really has."""

from typing import Any

CONFIGS = {
    f"{family}ForCausalLM": f"{family}TextConfig" for family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
}
"""Classes of settings that are not called like their model."""


UNREAD = {
    "Gemma3ForConditionalGeneration": ("model.vision_tower.", "model.multi_modal_projector."),
    "Gemma4ForConditionalGeneration": ("model.vision_tower.", "model.embed_vision."),
    "Llama4ForConditionalGeneration": ("vision_model.", "multi_modal_projector."),
    "Qwen3_5ForConditionalGeneration": ("model.visual.",),
    "Qwen3_5MoeForConditionalGeneration": ("model.visual.",),
}
"""Parts of models that are not loaded: those for images."""


def count_elements(architecture: str, config: dict[str, Any], buffers: tuple[str, ...] = ()) -> int:
    """Parameters of a model of transformers, and those of its buffers whose names end like this; Llama means LlamaForCausalLM."""
    import torch
    import transformers

    if "For" not in architecture:
        architecture = f"{architecture}ForCausalLM"
    settings = CONFIGS.get(architecture, f"{architecture.partition('For')[0]}Config")
    options = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = getattr(transformers, architecture)(getattr(transformers, settings)(**options))
    unread = UNREAD.get(architecture, ())
    counted = sum(one.numel() for name, one in model.named_parameters() if not (unread and name.startswith(unread)))
    return counted + sum(tensor.numel() for name, tensor in model.named_buffers() if name.endswith(buffers))
