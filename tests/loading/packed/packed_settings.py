"""quantization_config objects as AutoAWQ, GPTQModel, compressed-tensors, ModelOpt and AutoRound write them."""

from typing import Any


def awq(group: int = 128, **other: Any) -> dict[str, Any]:
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return said | {"modules_to_not_convert": None} | other


def gptq(
    group: int = 128, bits: int = 4, version: int = 1, sym: bool = False, order: bool = False, **other: Any
) -> dict[str, Any]:
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": order}
    said |= {"checkpoint_format": "gptq" if version == 1 else "gptq_v2", "damp_percent": 0.01, "true_sequential": True}
    return said | other


def compressed(form: str, *groups: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with these weights, one group each."""
    found = {
        f"group_{place}": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        for place, weights in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": found, "ignore": ["lm_head"]} | other


def integers(group: int = 128, bits: int = 4, sym: bool = True, order: str | None = None) -> dict[str, Any]:
    said = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group" if group > 0 else "channel"}
    return said | {"group_size": group if group > 0 else None, "actorder": order, "dynamic": False}


def floats(group: int | None) -> dict[str, Any]:
    """4 bits by group, or 8 bits by tensor."""
    if group is None:
        return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    strategy = "tensor_group" if group == 16 else "group"
    return {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}


def modelopt(algorithm: str = "NVFP4", **other: Any) -> dict[str, Any]:
    said = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return said | {"producer": {"name": "modelopt", "version": "0.47.0"}} | other


def auto_round(packing: str, group: int = 128, sym: bool = True, **other: Any) -> dict[str, Any]:
    said = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": group, "sym": sym}
    return said | {"data_type": "int", "iters": 200} | other
