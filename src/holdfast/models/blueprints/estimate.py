"""An estimate from a parameter count, without a config.json: exact weights, KV of a typical shape; no torch."""

import re
from dataclasses import replace
from math import log, prod
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.models.blueprints.layered import Layer, LayeredBlueprint, Part, attention, mlp, norm
from holdfast.models.declared_model import DeclaredModel, declare_named
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.parameters import LLAMA_NAMES
from holdfast.models.spec import ModelSpec, RopeSpec


class Shape(NamedTuple):
    """A dense decoder shape that is typical of its size."""

    billions: float
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab: int = 151936
    is_tied: bool = False


SHAPES = (
    Shape(0.135, 576, 30, 9, 3, 64, 49152, True),
    Shape(0.6, 1024, 28, 16, 8, is_tied=True),
    Shape(1.7, 2048, 28, 16, 8, is_tied=True),
    Shape(4, 2560, 36, 32, 8, is_tied=True),
    Shape(8, 4096, 36, 32, 8),
    Shape(14, 5120, 40, 40, 8),
    Shape(32, 5120, 64, 64, 8),
    Shape(70, 8192, 80, 64, 8, vocab=128256),
    Shape(405, 16384, 126, 128, 8, vocab=128256),
)
"""Shapes of SmolLM2, Qwen3 and Llama 3, whose configs are in the catalogue."""
POSITIONS = 131072
UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
LEAST, MOST = 70 * 10**6, 20 * 10**12
_COUNT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([mbt])", re.IGNORECASE)
MOST_WITHOUT_MLP = 0.9
"""Largest share of the parameters that embeddings and attention may take."""
INNER_STEP, REST_COLUMNS = 32, 128
"""Inner widths are multiples that ranks and four-bit blocks divide. The remaining count becomes rows of this width."""


def parse_count(text: str) -> int:
    """Parse a number of parameters such as 32B, 350M or 1.2T."""
    found = _COUNT.fullmatch(text.strip()) if len(text) <= 20 else None
    count = 0 if found is None else round(float(found[1]) * UNITS[found[2].lower()])
    if not LEAST <= count <= MOST:
        raise ConfigError("plan.parameter_count", name="--parameters", value=text)
    return count


def declare_estimate(text: str, name: str | None = None) -> DeclaredModel:
    """Declare a dense decoder with that many parameters in bfloat16."""
    count = parse_count(text)
    fitting = [shape for shape in SHAPES if _without_mlp(shape) < MOST_WITHOUT_MLP * count]
    shape = min(fitting, key=lambda one: abs(log(count / 1e9 / one.billions)))
    declaration = _decoder(shape, count)
    said = text.strip().upper()
    kv_bytes = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    notes = (
        f"this is an estimate: {count:,} parameters are counted exactly, and the rest is assumed: a dense decoder of "
        f"{shape.num_layers} layers, hidden size {shape.hidden:,}, {shape.num_kv_heads} KV heads of {shape.head_dim} "
        f"({kv_bytes:,} bytes of KV a token in bfloat16), {shape.vocab:,} tokens in its vocabulary, a context of "
        f"{POSITIONS:,}",
        "models with experts, latents, windows or recurrent layers keep less KV: pass a config.json with --config FILE",
    )
    reason = f"an estimate of {said} parameters is not a model"
    label = f"{name or f'{said} parameters'} (estimate)"
    typed = (*(() if name is None else (name,)), "--parameters", said)
    declared = declare_named(label, declaration.grouped, reason)
    return replace(declared, declaration=declaration, notes=notes, typed=typed)


def _attention(shape: Shape) -> tuple[Part, ...]:
    heads = attention(shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return norm("attn_norm", shape.hidden), norm("mlp_norm", shape.hidden), *heads


def _without_mlp(shape: Shape) -> int:
    """Count the parameters of embeddings, final norm, head and attention."""
    ends = shape.vocab * shape.hidden * (1 if shape.is_tied else 2) + shape.hidden
    return ends + shape.num_layers * sum(prod(part.shape) for part in _attention(shape))


def _decoder(shape: Shape, count: int) -> LayeredBlueprint:
    """Build a decoder with the widest MLP that the count allows; the rest becomes one more tensor."""
    hidden, layers = shape.hidden, shape.num_layers
    left = count - _without_mlp(shape)
    inner = left // (3 * hidden * layers) // INNER_STEP * INNER_STEP
    left -= 3 * hidden * inner * layers
    rest = (
        Part("rest.weight", (left // REST_COLUMNS, REST_COLUMNS)),
        Part("rest.bias", (left % REST_COLUMNS,), "bias"),
    )
    spec = ModelSpec(
        architecture="",
        family="estimate",
        vocab_size=shape.vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=POSITIONS,
        checkpoint_dtype="bfloat16",
        norm_eps=1e-6,
        rope=RopeSpec(1e6),
        tied_embeddings=shape.is_tied,
    )
    layer = Layer((*_attention(shape), *mlp(hidden, inner)), shape.num_kv_heads, shape.head_dim)
    grouped = DecoderDeclaration(spec, LLAMA_NAMES)
    ends_left = tuple(part for part in rest if prod(part.shape))
    return LayeredBlueprint(grouped, shape.head_dim, (layer,) * layers, ends_left)
