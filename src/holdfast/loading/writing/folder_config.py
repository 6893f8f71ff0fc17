"""config.json of a folder that is made from a GGUF file; no torch.

Biases follow from tensors, which metadata does not mention. The written folder is opened and its spec compared.
"""

from holdfast.loading.gguf.config import gguf_config
from holdfast.loading.gguf.file import GGUFFile
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.models.grouped_readers import FAMILIES
from holdfast.models.spec import ModelSpec


def folder_config(file: GGUFFile, spec: ModelSpec, generation: GenerationDefaults) -> dict[str, object]:
    """Return the settings of a GGUF model as transformers writes them."""
    config = {key: value for key, value in gguf_config(file).items() if value not in ({}, None)}
    config |= {"model_type": FAMILIES[spec.architecture].name, "attention_bias": spec.qkv_bias}
    if spec.qkv_bias and spec.experts is not None:
        config["qkv_bias"] = True
    if spec.mlp_bias:
        config["mlp_bias"] = True
    if generation.bos_token_id is not None:
        config["bos_token_id"] = generation.bos_token_id
    ends = list(generation.eos_token_ids)
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config
