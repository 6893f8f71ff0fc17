"""Say what quantized latents (MLA) lose and where, on small models with planted traits: python benchmarks/latent_error.py

A model is a random DeepSeek-V2 of a few dense layers. Planted traits, as real models have them:

    sink        token 0 takes about half of the attention: a direction of queries that all tokens share meets its latent
    near        queries prefer near tokens: rotated parts of queries and keys share a constant vector
    channels    a few elements of every latent are as many times larger; kv_b divides by that, so the function is unchanged
    common      all latents share a vector, so many times as long as the rest of a latent

The figure is the KL divergence from float32 pages of the same model. A part is what is quantized: all else is read as it came.
Shares of disjoint parts need not sum to 1. Cures are simulated: latents without their mean over another text, near tokens exact.

T rows of the step, L stored tokens, N query heads, D elements of a query head, X elements of a row: latent, then rotated ones
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gpu_records
import torch
from safetensors.torch import save_file

from holdfast.attention.backend import AttentionBackend, Batch, LayerStep, SequenceRows
from holdfast.attention.declarations import AttentionSpec, BackendDeclaration
from holdfast.cache.near import FIRST_TOKENS
from holdfast.cache.storage import PageStorage
from holdfast.cli import bench_record
from holdfast.config import EngineConfig
from holdfast.eval.kv_quality import Entry, format_entry, open_contenders, reference_entry, settle_config
from holdfast.eval.quality import Quality, ReferenceReading, measure_against
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.latent.pages import LatentBackend
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_projection import absorb_queries, project_values
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.loading.model_files import open_model
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.quant.latent_quantize import dequantize_latents, quantize_latents
from holdfast.runner.variants import Variant

HIDDEN, INNER, LAYERS, HEADS, LATENT, ROPE, NOPE, VALUE, VOCAB = 256, 512, 4, 4, 512, 64, 64, 64, 512
WINDOW, FIRST = 512, 1
"""Tokens of a text, and the token that begins it."""
SHARED, OF_FIRST = 0, 1
"""Channels of hidden states: one that all tokens have, and one that token 0 alone has."""
SHARED_SIZE, FIRST_SIZE = 8.0, 32.0
SINK_SCORE, NEAR_SCORE = 6.0, 6.0
NUM_CHANNELS = 4
FORMATS = ("fp8_ds_mla", "turboquant_mla_4bit", "turboquant_mla_4bit_r8")
FAR = 2**31
DISTANCES = ((0, FAR), (0, 16), (16, 64), (64, 256), (256, FAR))
NEAR_BLOCK = 64


class Traits(NamedTuple):
    """What is planted."""

    name: str
    has_sink: bool = True
    has_near: bool = True
    channels: float = 1.0
    common: float = 0.0


CASES = (
    Traits("none", has_sink=False, has_near=False),
    Traits("sink", has_near=False),
    Traits("near", has_sink=False),
    Traits("sink and near"),
    Traits("sink, near, channels 10x", channels=10.0),
    Traits("sink, near, channels 30x", channels=30.0),
    Traits("sink, near, common 1x", common=1.0),
    Traits("sink, near, common 3x", common=3.0),
)


class Part(NamedTuple):
    """What is quantized."""

    name: str
    latents: bool = True
    rope: torch.dtype | None = torch.bfloat16
    """None: rotated elements are read as they came."""
    positions: tuple[int, int] = (0, FAR)
    distances: tuple[int, int] = (0, FAR)
    has_near: bool = False
    """The first tokens and a row's own block are read as they came."""
    has_mean: bool = False
    """Latents are quantized without their mean."""


WHOLE = Part("all, rotated elements in bfloat16")


@dataclass
class Chosen:
    """The part of the next run; None: nothing. Sums of latents by layer, while `counts`."""

    part: Part | None = None
    counts: bool = False
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)


class PartLatents(LatentBackend):
    """Plain pages, of which the chosen part is read after the round trip."""

    name: ClassVar[str] = "part_latents"

    def __init__(self, inner: LatentBackend, specs: Sequence[LatentAttentionSpec], chosen: Chosen) -> None:
        self._inner, self._specs, self.planes = inner, tuple(specs), inner.planes
        self._chosen = chosen
        self._rows: SequenceRows | None = None

    def plan(self, batch: Batch, captured: bool = False) -> Any:  # noqa: ANN401 the backend's own type
        (self._rows,) = batch.sequences
        return self._inner.plan(batch, captured)

    def write(
        self, latent_TX: torch.Tensor, q_TND: torch.Tensor, batch: Batch, norm: LatentNorm, rotary: Rotary, layer: int
    ) -> None:
        self._inner.write(latent_TX, q_TND, batch, norm, rotary, layer)
        chosen, slots_T = self._chosen, batch.slots_GT[self._specs[layer].group]
        if chosen.counts:
            rows_TX = self.planes[layer].rows_SX[slots_T[slots_T > 0]]
            chosen.sums[layer] = chosen.sums.get(layer, 0) + rows_TX[:, :LATENT].sum(0)
            chosen.num_tokens[layer] = chosen.num_tokens.get(layer, 0) + len(rows_TX)

    def attend(
        self, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool
    ) -> torch.Tensor:
        part, layer, rows = self._chosen.part, step.layer, self._rows
        if part is None:
            return self._inner.attend(q_TND, kv_b_NXL, step, out_TX, wanted_only)
        assert rows is not None, "a step is planned before it is attended"
        rows_LX = self.planes[layer].rows_SX[: rows.end]
        mean_X = self._chosen.sums[layer] / self._chosen.num_tokens[layer] if part.has_mean else None
        read_LX = round_trip(rows_LX, part, mean_X)
        place_T1, place_L = torch.arange(rows.start, rows.end).unsqueeze(1), torch.arange(rows.end)
        distance_TL = place_T1 - place_L
        is_read_TL = (distance_TL >= part.distances[0]) & (distance_TL < part.distances[1])
        is_read_TL &= (place_L >= part.positions[0]) & (place_L < part.positions[1])
        if part.has_near:
            is_read_TL &= (place_L >= FIRST_TOKENS) & (place_L < place_T1 // NEAR_BLOCK * NEAR_BLOCK)
        absorbed_TNX = q_TND.new_empty(rows.num_rows, HEADS, LATENT + ROPE)
        absorb_queries(q_TND[: rows.num_rows], kv_b_NXL, absorbed_TNX)
        latent_TNX = absorbed_TNX.new_empty(rows.num_rows, HEADS, LATENT)
        for head in range(HEADS):
            q_TX = absorbed_TNX[:, head]
            scores_TL = torch.where(is_read_TL, q_TX @ read_LX.T, q_TX @ rows_LX.T) * self._specs[layer].scale
            p_TL = scores_TL.masked_fill(distance_TL < 0, -torch.inf).softmax(-1)
            latent_TNX[:, head] = (p_TL * is_read_TL) @ read_LX[:, :LATENT] + (p_TL * ~is_read_TL) @ rows_LX[:, :LATENT]
        project_values(latent_TNX, kv_b_NXL, out_TX[: rows.num_rows].unflatten(1, (HEADS, -1)))
        return out_TX[: rows.num_rows]


def round_trip(rows_LX: torch.Tensor, part: Part, mean_X: torch.Tensor | None) -> torch.Tensor:
    """Quantize and dequantize rows as the format does."""
    latent_LX, rope_LX = rows_LX.split((LATENT, ROPE), dim=-1)
    centred_LX = latent_LX if mean_X is None else latent_LX - mean_X
    stored = quantize_latents(rotate_heads(centred_LX), rope_LX, part.rope or torch.bfloat16)
    read_LX, read_rope_LX = dequantize_latents(stored).split((LATENT, ROPE), dim=-1)
    read_LX = rotate_heads(read_LX) if mean_X is None else rotate_heads(read_LX) + mean_X
    return torch.cat((read_LX if part.latents else latent_LX, rope_LX if part.rope is None else read_rope_LX), dim=-1)


class MakePartLatents(NamedTuple):
    """Builds this backend instead of ours."""

    chosen: Chosen

    def __call__(
        self,
        declaration: BackendDeclaration,
        specs: Sequence[AttentionSpec],
        storage: PageStorage,
        inputs: BackendInputs,
    ) -> AttentionBackend:
        inner = build_backend(declaration, specs, storage, inputs)
        assert isinstance(inner, LatentBackend), f"{inner.name} keeps no latents"
        latent_specs = [spec for spec in specs if isinstance(spec, LatentAttentionSpec)]
        return PartLatents(inner, latent_specs, self.chosen)


def parts() -> Iterator[Part]:
    """Yield what is quantized, one after the other."""
    yield WHOLE
    yield Part("latents alone", rope=None)
    yield Part("rotated elements alone, bfloat16", latents=False)
    yield Part("rotated elements alone, e4m3", latents=False, rope=torch.float8_e4m3fn)
    yield Part("token 0", positions=(0, 1))
    yield Part("tokens from 1 on", positions=(1, FAR))
    for low, high in DISTANCES[1:]:
        name = f"distance {low} to {high - 1}" if high < FAR else f"distance from {low} on"
        yield Part(f"{name}, tokens from {FIRST_TOKENS} on", positions=(FIRST_TOKENS, FAR), distances=(low, high))
    yield Part("cure: near tokens exact", has_near=True)
    yield Part("cure: without the mean latent", has_mean=True)
    yield Part("cure: both", has_near=True, has_mean=True)
    yield Part("cure: both, rotated elements in e4m3", rope=torch.float8_e4m3fn, has_near=True, has_mean=True)


def plant(folder: Path, seed: int, traits: Traits) -> list[list[int]]:
    """Write a model; return two texts for it. Models of a seed differ in the traits alone."""
    dice = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=dice) * gain / shape[-1] ** 0.5

    embedding = drawn(VOCAB, HIDDEN) * HIDDEN**0.5
    embedding[:, (SHARED, OF_FIRST)] = torch.tensor((SHARED_SIZE, 0.0))
    embedding[FIRST, OF_FIRST] = FIRST_SIZE
    last = torch.ones(HIDDEN)
    last[[SHARED, OF_FIRST]] = 0.0
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": last}
    tensors["lm_head.weight"] = drawn(VOCAB, HIDDEN, gain=1.5)
    shared = SHARED_SIZE / (1 + SHARED_SIZE**2 / HIDDEN) ** 0.5
    """The shared channel after a norm."""
    for layer in range(LAYERS):
        q, kv_a = drawn(HEADS, NOPE + ROPE, HIDDEN, gain=1.5), drawn(LATENT + ROPE, HIDDEN)
        kv_b, norm = drawn(HEADS, NOPE + VALUE, LATENT), torch.ones(LATENT)
        query, of_first, near, common = drawn(HEADS, NOPE), drawn(LATENT), drawn(ROPE), drawn(LATENT)
        of_first, near = of_first / of_first.norm(), near / near.norm()
        scale = (NOPE + ROPE) ** 0.5
        q[:, :, SHARED], kv_a[:, SHARED], kv_a[:, OF_FIRST] = 0.0, 0.0, 0.0
        if traits.has_sink:
            unit = query / query.norm(dim=-1, keepdim=True)
            q[:, :NOPE, SHARED] = unit * scale**0.5 / shared
            kv_a[:LATENT, OF_FIRST] = 10 * of_first
            kv_b[:, :NOPE] += SINK_SCORE * scale**0.5 / LATENT**0.5 * unit.unsqueeze(-1) * of_first
            kv_b[:, NOPE:] -= 0.9 * (kv_b[:, NOPE:] @ of_first).unsqueeze(-1) * of_first
        if traits.has_near:
            q[:, NOPE:, SHARED] += near * (NEAR_SCORE * scale) ** 0.5 / shared
            kv_a[LATENT:, SHARED] += near * (NEAR_SCORE * scale) ** 0.5 / shared
        if traits.common:
            kv_a[:LATENT, SHARED] = traits.common * common / common.norm() * LATENT**0.5 / shared
        norm[:NUM_CHANNELS], kv_b[:, :, :NUM_CHANNELS] = traits.channels, kv_b[:, :, :NUM_CHANNELS] / traits.channels
        own = f"model.layers.{layer}"
        tensors |= {
            f"{own}.{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors[f"{own}.self_attn.q_proj.weight"] = q.flatten(0, 1)
        tensors[f"{own}.self_attn.kv_a_proj_with_mqa.weight"] = kv_a
        tensors[f"{own}.self_attn.kv_a_layernorm.weight"] = norm
        tensors[f"{own}.self_attn.kv_b_proj.weight"] = kv_b.flatten(0, 1)
        tensors[f"{own}.self_attn.o_proj.weight"] = without_shared(drawn(HIDDEN, HEADS * VALUE))
        tensors[f"{own}.mlp.gate_proj.weight"] = drawn(INNER, HIDDEN, gain=0.5)
        tensors[f"{own}.mlp.up_proj.weight"] = drawn(INNER, HIDDEN, gain=0.5)
        tensors[f"{own}.mlp.down_proj.weight"] = without_shared(drawn(HIDDEN, INNER))
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings()), encoding="utf-8")
    texts = torch.randint(3, VOCAB, (2, WINDOW), generator=dice)
    texts[:, 0] = FIRST
    return texts.tolist()


def without_shared(weight: torch.Tensor) -> torch.Tensor:
    """Let no layer write the planted channels."""
    weight[[SHARED, OF_FIRST]] = 0.0
    return weight


def settings() -> dict[str, Any]:
    """Return the config.json."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": FIRST,
        "eos_token_id": 2,
    }


def measured(folder: Path, texts: Sequence[list[int]]) -> dict[str, Quality]:
    """Measure every format and every part on the second text; the mean latent is of the first."""
    model, chosen = open_model(str(folder), "auto"), Chosen()
    try:
        config = settle_config(EngineConfig(model=str(folder), device="cpu"), model, WINDOW)
        reference = reference_entry(config)
        part_entry = Entry("part", Variant(reference.variant.config, MakePartLatents(chosen)))
        entries = [reference, *(format_entry(config, model, name) for name in FORMATS), part_entry]
        opened = open_contenders(entries, model, lambda done, total: None)
    finally:
        model.source.close()
    own, *engines, part_of = opened.contenders
    try:
        chosen.counts = True
        ReferenceReading(part_of, texts[:1]).read(lambda num_halves: None)
        chosen.counts = False
        reading = ReferenceReading(own, texts[1:])
        reading.read(lambda num_halves: None)
        found = {engine.name: measure_against(reading, engine, lambda num_halves: None) for engine in engines}
        for chosen.part in parts():
            found[chosen.part.name] = measure_against(reading, part_of, lambda num_halves: None)
    finally:
        opened.release()
    return found


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=gpu_records.ROOT / gpu_records.RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help="else what git says")
    arguments = parser.parse_args()
    results = []
    for traits in CASES:
        sums: dict[str, float] = {}
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                texts = plant(Path(folder), seed, traits)
                for name, quality in measured(Path(folder), texts).items():
                    sums[name] = sums.get(name, 0.0) + quality.mean_kl / arguments.seeds
        for name, kl in sums.items():
            row = {"mean_kl": kl, "of all": kl / sums[WHOLE.name]}
            results.append({"measure": f"{traits.name}: {name}", "unit": "nats", "values": row})
            print(f"{traits.name}: {name}: mean KL {kl:.4g}, {row['of all']:.1%}", flush=True)
    record = {
        "section": "latent-error",
        "date": gpu_records.today(),
        "machine": bench_record.machine(),
        "model": f"random DeepSeek-V2 of {LAYERS} layers, latents of {LATENT} and {ROPE}, {arguments.seeds} seeds",
        "settings": f"float32 on cpu, a text of {WINDOW} tokens each",
        "results": results,
        "command": " ".join(["python", "benchmarks/latent_error.py", *sys.argv[1:]]),
        "commit": arguments.commit or bench_record.commit(),
        "versions": bench_record.versions(),
        "cpu": bench_record.cpu_name(),
        "num_cores": bench_record.num_cores(),
    }
    path = arguments.out / f"cpu-{record['date']}-latent-error.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {path.name}")


if __name__ == "__main__":
    main()
