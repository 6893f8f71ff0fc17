"""Measure KV formats on small models with added key biases, through the engine, and write the record: python benchmarks/key_bias.py

A model is a random Qwen2 of a few layers. Its keys have a norm of about the root of the head dim. A bias of 10 or 30 times
that is added to a few pairs of coordinates, as in real models with such biases: to slow RoPE pairs, or to fast ones. Queries
then weight the fast pairs less, in proportion to the largest bias. Otherwise attention depends on the bias alone and any
error changes the result; `all` shows that case. The figure is the KL divergence from float32 pages of the same model, as a
multiple of that without a bias. `in the keys` quantizes keys with their bias.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import gpu_records
import torch
from safetensors.torch import save_file

from holdfast.cli import bench_record
from holdfast.config import EngineConfig
from holdfast.eval.kv_quality import format_entry, measure, open_contenders, reference_entry, settle_config
from holdfast.eval.quality import Quality
from holdfast.loading.model_files import open_model
from holdfast.models.spec import ModelSpec
from holdfast.quant.formats import KV_FORMATS

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 4, 2, 64, 512
FACTORS = (0, 10, 30)
PLACES = {"slow": (31, 29, 24), "fast": (2, 7, 11), "all": tuple(range(32))}
"""Pairs of coordinates with the bias."""
FORMATS = tuple(name for name, value in KV_FORMATS.items() if value.is_quantized)


def plant(folder: Path, seed: int, factor: float, place: str) -> list[int]:
    """Write a model whose key biases have `factor` times the norm of its keys; return a text for it."""
    dice = torch.Generator().manual_seed(seed)
    tensors = {"model.norm.weight": torch.ones(HIDDEN)}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        tensors[name] = torch.randn(rows, columns, generator=dice) * gain / columns**0.5

    matrix("model.embed_tokens.weight", VOCAB, HIDDEN)
    matrix("lm_head.weight", VOCAB, HIDDEN, 1.5)
    for layer in range(LAYERS):
        own, sizes = f"model.layers.{layer}", {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{own}.{name}.weight"] = torch.ones(HIDDEN)
        for name, heads in sizes.items():
            matrix(f"{own}.self_attn.{name}_proj.weight", heads * HEAD_DIM, HIDDEN)
            tensors[f"{own}.self_attn.{name}_proj.bias"] = torch.zeros(heads * HEAD_DIM)
        matrix(f"{own}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        matrix(f"{own}.mlp.gate_proj.weight", INNER, HIDDEN)
        matrix(f"{own}.mlp.up_proj.weight", INNER, HIDDEN)
        matrix(f"{own}.mlp.down_proj.weight", HIDDEN, INNER)
        plant_bias(tensors, own, factor, place, dice)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings()), encoding="utf-8")
    return torch.randint(3, VOCAB, (384,), generator=dice).tolist()


def plant_bias(tensors: dict[str, torch.Tensor], layer: str, factor: float, place: str, dice: torch.Generator) -> None:
    """Draw equal numbers for every factor, so that models differ only in the factor."""
    pairs = torch.tensor(PLACES[place])
    channels = torch.cat((pairs, pairs + HEAD_DIM // 2))
    bias_KD = torch.zeros(KV_HEADS, HEAD_DIM)
    bias_KD[:, channels] = torch.randn(KV_HEADS, len(channels), generator=dice)
    bias_KD *= factor * HEAD_DIM**0.5 / bias_KD.norm(dim=-1, keepdim=True)
    tensors[f"{layer}.self_attn.k_proj.bias"] = bias_KD.flatten()
    if place == "fast":
        # Also without a bias, so that the same model is compared.
        query = tensors[f"{layer}.self_attn.q_proj.weight"].view(HEADS, HEAD_DIM, HIDDEN)
        query[:, channels] /= 2 * FACTORS[-1]


def settings() -> dict[str, Any]:
    """Return the config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@contextmanager
def biased_keys(wanted: bool) -> Iterator[None]:
    """Quantize keys with their bias."""
    if not wanted:
        yield
        return
    with patch.object(ModelSpec, "has_separable_key_bias", PropertyMock(return_value=False)):
        yield


def qualities(folder: Path, text: list[int], formats: tuple[str, ...], protected: int | None) -> dict[str, Quality]:
    """Compare every format with float32 pages of the same model; None protects the default number of layers."""
    model = open_model(str(folder), "auto")
    try:
        config = EngineConfig(
            model=str(folder), device="cpu", kv_protected_layers=protected, kv_near_tokens=0, kv_key_scale=False
        )
        config = settle_config(config, model, len(text))
        entries = [reference_entry(config), *(format_entry(config, model, name) for name in formats)]
        opened = open_contenders(entries, model, lambda done, total: None)
    finally:
        model.source.close()
    try:
        found = measure(opened.contenders[0], opened.contenders[1:], [text], lambda done, total: None)
    finally:
        opened.release()
    return {quality.name: quality for quality in found[1:]}


def planted_kl(place: str, factor: float, seeds: int, in_keys: bool = False) -> dict[str, float]:
    """Return the mean KL of every format over some models, no layer protected."""
    sums = dict.fromkeys(FORMATS, 0.0)
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder, biased_keys(in_keys):
            text = plant(Path(folder), seed, factor, place)
            for name, quality in qualities(Path(folder), text, FORMATS, 0).items():
                sums[name] += quality.mean_kl / seeds
    return sums


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    arguments = parser.parse_args()
    results = []
    for place in PLACES:
        plain: dict[str, float] = {}
        for factor in FACTORS if place != "all" else FACTORS[:-1]:
            found = planted_kl(place, factor, arguments.seeds)
            plain = plain or found
            before = planted_kl(place, factor, arguments.seeds, in_keys=True) if factor else found
            for name in FORMATS:
                row = {"mean_kl": found[name], "of no bias": found[name] / plain[name]}
                row |= {"mean_kl in the keys": before[name], "in the keys, of no bias": before[name] / plain[name]}
                results.append({"measure": f"{place} pairs, bias {factor}x, {name}", "unit": "nats", "values": row})
                print(
                    results[-1]["measure"], *(f"{key} {value:.4g}" for key, value in row.items()), sep="; ", flush=True
                )
    record = {
        "section": "key-bias",
        "date": gpu_records.today(),
        "machine": bench_record.machine(),
        "model": f"random Qwen2 of {LAYERS} layers, heads of {HEAD_DIM}, {arguments.seeds} seeds, no layer protected",
        "settings": "float32 on cpu, a text of 384 tokens each",
        "results": results,
        "command": " ".join(["python", "benchmarks/key_bias.py", *sys.argv[1:]]),
        "commit": arguments.commit or bench_record.commit(),
        "versions": bench_record.versions(),
        "cpu": bench_record.cpu_name(),
        "num_cores": bench_record.num_cores(),
    }
    path = arguments.out / f"cpu-{record['date']}-key-bias.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
