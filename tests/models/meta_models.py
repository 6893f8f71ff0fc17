"""Models of transformers without memory: how many parameters a config really has."""

from typing import Any


def count_elements(family: str, config: dict[str, Any], buffers: tuple[str, ...] = ()) -> int:
    """Parameters of a model of transformers, and those of its buffers whose names end like this."""
    import torch
    import transformers

    options = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options))
    counted = sum(parameter.numel() for parameter in model.parameters())
    return counted + sum(tensor.numel() for name, tensor in model.named_buffers() if name.endswith(buffers))
