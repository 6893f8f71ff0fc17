"""Say where the error of a KV format comes from: keys or values, layers, heads, positions, distances: python benchmarks/kv_error.py

Full-precision pages hold keys and values after the format's round trip, but only those of a part: all else stays exact.
The mean KL of a part, as a share of that of the whole format, is its share of the error. Shares of disjoint parts need not
sum to 1. No layer is protected. A part of positions is one of keys and values; every query reads it. A part of distances is
one of keys and values that a query reads so many tokens later; all other queries read them as they came. All distances
together give the figure of the format again.

T rows of the step, L stored tokens, K key/value heads, G query heads of each, D head dim
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from vllm_pages import VLLM_FORMATS, VllmPages

from holdfast.attention.backend import AttentionBackend, Batch, LayerStep, SequenceRows
from holdfast.attention.declarations import AttentionSpec, BackendDeclaration
from holdfast.cache.near import FIRST_TOKENS
from holdfast.cache.storage import PageStorage
from holdfast.cli.eval import read_text
from holdfast.config import EngineConfig
from holdfast.engine.open_text import open_tokenizer
from holdfast.eval.kv_quality import Entry, format_entry, open_contenders, reference_entry, settle_config
from holdfast.eval.quality import Contender, ReferenceReading, measure_against
from holdfast.eval.text_windows import cut_windows
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.grouped.pages import GroupedBackend, QuantizedPages
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.loading.model_files import open_model
from holdfast.quant.kv_quantize import (
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
    rotate_heads,
)
from holdfast.runner.variants import Variant

FAR = 2**31
POSITIONS = ((0, 1), (1, 4), (4, 64), (64, 256), (256, FAR))
DISTANCES = ((0, FAR), (0, 1), (1, 16), (0, 16), (16, 64), (64, 256), (256, FAR))
WORST = 4
"""Layers whose heads are measured one by one."""


class Part(NamedTuple):
    """What is quantized."""

    name: str
    keys: bool = True
    values: bool = True
    layers: frozenset[int] | None = None
    heads: frozenset[int] | None = None
    positions: tuple[int, int] = (0, FAR)
    distances: tuple[int, int] | None = None
    """Tokens between a query and what it reads; None: every query reads the part."""


NOTHING = Part("nothing", keys=False, values=False)


@dataclass
class Chosen:
    """The part of the next run, and the planes of the format by layer."""

    part: Part = NOTHING
    planes: list[QuantizedPlanes] = field(default_factory=list)


def round_trip(x_RKD: torch.Tensor, planes: QuantizedPlanes, is_key: bool) -> torch.Tensor:
    """Quantize and dequantize heads as the format does."""
    bits = planes.key_bits if is_key else planes.value_bits
    rotates = planes.rotates_keys if is_key else planes.rotates_values
    mean_KD = planes.k_mean_KD if is_key else None
    y_RKD = rotate_heads(x_RKD.float()) if rotates else x_RKD.float()
    y_RKD = y_RKD if mean_KD is None else y_RKD - mean_KD
    quantize, dequantize = (quantize_keys, dequantize_keys) if is_key else (quantize_values, dequantize_values)
    y_RKD = dequantize(quantize(y_RKD, bits), bits, planes.head_dim).float()
    y_RKD = y_RKD if mean_KD is None else y_RKD + mean_KD
    return (rotate_heads(y_RKD) if rotates else y_RKD).to(x_RKD.dtype)


class PartPages(VllmPages):
    """Plain pages that hold the chosen part after the round trip."""

    name = "part_pages"

    def __init__(
        self, inner: GroupedBackend, specs: Sequence[AttentionSpec], storage: PageStorage, chosen: Chosen
    ) -> None:
        super().__init__(inner, storage, VLLM_FORMATS[0])
        self._specs = specs
        self._chosen = chosen
        self._rows: SequenceRows | None = None

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        layer: int,
        out_THD: torch.Tensor,
    ) -> None:
        self._inner.write(qkv_TX, batch, head_norm, rotary, layer, out_THD)
        (self._rows,) = batch.sequences
        part = self._chosen.part
        if not self._has_codes(layer) or part.distances is not None:
            return
        slots_T = batch.slots_GT[self._storage.spec.group_of(layer)]
        # One sequence on the first pages: a slot is a position.
        slots_T = slots_T[(slots_T >= part.positions[0]) & (slots_T < part.positions[1])]
        for name, is_wanted in (("k", part.keys), ("v", part.values)):
            if is_wanted and len(slots_T):
                plane_SKD = self._storage.plane(layer, name)
                x_RKD = plane_SKD[slots_T]
                read_RKD = round_trip(x_RKD, self._chosen.planes[layer], name == "k")
                heads = range(x_RKD.shape[1]) if part.heads is None else part.heads
                for head in heads:
                    x_RKD[:, head] = read_RKD[:, head]
                plane_SKD[slots_T] = x_RKD

    def attend(self, q_THD: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool) -> torch.Tensor:
        part, layer = self._chosen.part, step.layer
        if part.distances is None or not self._has_codes(layer):
            return super().attend(q_THD, step, out_TX, wanted_only)
        spec, rows = self._specs[layer], self._rows
        assert isinstance(spec, GroupedAttentionSpec)
        assert rows is not None, "a step is written before it is attended"
        is_whole = spec.is_plain_softmax and spec.window is None
        assert is_whole, f"layer {layer} has sinks, a cap or a window"
        k_LKD, v_LKD = (self._storage.plane(layer, name)[: rows.end] for name in ("k", "v"))
        planes = self._chosen.planes[layer]
        k_read_LKD = round_trip(k_LKD, planes, True) if part.keys else k_LKD
        v_read_LKD = round_trip(v_LKD, planes, False) if part.values else v_LKD
        place_T1, place_L = torch.arange(rows.start, rows.end).unsqueeze(1), torch.arange(rows.end)
        distance_TL = place_T1 - place_L
        is_read_TL = (distance_TL >= part.distances[0]) & (distance_TL < part.distances[1])
        is_read_TL &= (place_L >= part.positions[0]) & (place_L < part.positions[1])
        q_TKGD = q_THD[: rows.num_rows].unflatten(1, (k_LKD.shape[1], -1))
        out_TKGD = out_TX[: rows.num_rows].view_as(q_TKGD)
        for head in range(k_LKD.shape[1]):
            q_GTD = q_TKGD[:, head].transpose(0, 1)
            scores_GTL = torch.where(is_read_TL, q_GTD @ k_read_LKD[:, head].T, q_GTD @ k_LKD[:, head].T)
            p_GTL = scores_GTL.mul_(spec.scale).masked_fill_(distance_TL < 0, -torch.inf).softmax(-1)
            read_GTD = (p_GTL * is_read_TL) @ v_read_LKD[:, head] + (p_GTL * ~is_read_TL) @ v_LKD[:, head]
            out_TKGD[:, head] = read_GTD.transpose(0, 1)
        return out_TX[: rows.num_rows]

    def _has_codes(self, layer: int) -> bool:
        layers = self._chosen.part.layers
        return bool(self._chosen.planes) and (layers is None or layer in layers)


class MakePartPages(NamedTuple):
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
        assert isinstance(inner, GroupedBackend), f"{inner.name} keeps no keys and values by head"
        return PartPages(inner, specs, storage, self.chosen)


def parts_of(num_layers: int, num_heads: int) -> Iterator[Part]:
    """Yield keys, values, positions, heads, and the keys of each layer."""
    yield Part("keys and values")
    yield Part("keys", values=False)
    yield Part("values", keys=False)
    for low, high in POSITIONS:
        yield Part(f"tokens {named(low, high)}", positions=(low, high))
    yield Part("tokens from 1 on", positions=(1, FAR))
    for distances in DISTANCES:
        yield Part(f"distance {named(*distances)}", distances=distances)
        behind = FIRST_TOKENS, FAR
        yield Part(f"distance {named(*distances)}, tokens {named(*behind)}", positions=behind, distances=distances)
    for head in range(num_heads):
        yield Part(f"keys of head {head}, all layers", values=False, heads=frozenset({head}))
        yield Part(f"values of head {head}, all layers", keys=False, heads=frozenset({head}))
    for layer in range(num_layers):
        yield Part(f"keys of layer {layer}", values=False, layers=frozenset({layer}))


def named(low: int, high: int) -> str:
    """Name the numbers from `low` to below `high`."""
    return f"{low} to {high - 1}" if high < FAR else f"from {low} on"


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="a folder or a GGUF file; left out: the default model")
    parser.add_argument("--text", default=None, help="a file of plain text; left out: the topics of Python's help")
    parser.add_argument("--format", default="turboquant_4bit_nc", help="a quantized KV format")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    return parser


def main() -> None:
    """Measure every part, and print its share."""
    arguments = options().parse_args()
    model = open_model(arguments.model, "auto", None)
    chosen = Chosen()
    try:
        config = replace(EngineConfig(model=arguments.model, device="cpu"), kv_protected_layers=0)
        settled = settle_config(config, model, arguments.window)
        tokenizer, spec = open_tokenizer(config, model), model.spec
        text = "\n\n".join(topics.values()) if arguments.text is None else read_text(arguments.text)
        windows = cut_windows(tokenizer, text, arguments.window, arguments.tokens, spec.vocab_size)
        reference = reference_entry(settled)
        part_entry = Entry("part", Variant(reference.variant.config, MakePartPages(chosen)))
        entries = [reference, format_entry(settled, model, arguments.format), part_entry]
        opened = open_contenders(entries, model, lambda done, total: None)
    finally:
        model.source.close()
    own, engine, part_of = opened.contenders
    chosen.planes = list(planes_of(engine))
    reading = ReferenceReading(own, windows)
    reading.read(lambda num_halves: None)
    whole = measure_against(reading, engine, lambda num_halves: None)
    print(
        f"{arguments.format}, no layer protected: mean KL {whole.mean_kl:.4g} over {whole.num_predictions} predictions"
    )
    shares: list[tuple[float, int]] = []
    for chosen.part in parts_of(spec.num_layers, spec.num_kv_heads):
        shares += _show(reading, part_of, chosen.part, whole.mean_kl)
    for _, layer in sorted(shares, reverse=True)[:WORST]:
        for head in range(spec.num_kv_heads):
            chosen.part = Part(
                f"keys of layer {layer}, head {head}", True, False, frozenset({layer}), frozenset({head})
            )
            _show(reading, part_of, chosen.part, whole.mean_kl)
    opened.release()


def planes_of(contender: Contender) -> Iterator[QuantizedPlanes]:
    """Yield the quantized planes of every layer, with its key means."""
    backend = contender.runner.backend
    assert isinstance(backend, GroupedBackend), f"{backend.name} keeps no keys and values by head"
    for pages in backend.pages:
        assert isinstance(pages, QuantizedPages), f"{contender.name} is not quantized"
        yield pages.planes


def _show(reading: ReferenceReading, contender: Contender, part: Part, whole: float) -> list[tuple[float, int]]:
    """Print a part; return the share of a layer."""
    kl = measure_against(reading, contender, lambda num_halves: None).mean_kl
    print(f"{part.name}: mean KL {kl:.4g}, {kl / whole:.1%}", flush=True)
    return [(kl, next(iter(part.layers)))] if part.layers and part.heads is None else []


if __name__ == "__main__":
    main()
