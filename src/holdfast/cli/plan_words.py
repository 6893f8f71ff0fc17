"""A plan in words: what was asked, what a token takes, and the command that starts it; no torch."""

import shlex
from fractions import Fraction
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.memory.sizes import format_bytes
from holdfast.runner.planning.alternatives import Alternative
from holdfast.runner.planning.plan_fit import Wish, settle
from holdfast.runner.planning.resolve import Resolved

STARTING = (
    *("dtype", "quantization", "quantized_embeddings", "quantization_ignore"),
    *("kv_cache_dtype", "kv_protected_layers", "kv_protected_dtype"),
    *("max_model_len", "max_num_batched_tokens", "page_tokens", "memory_utilization"),
)
"""Options that a plan and a command share, in the order in which they are written; switches and sequences are apart."""


def asked_words(wish: Wish, resolved: Resolved) -> str:
    """What the plan is of, on one line."""
    limits, ranks, scheme = resolved.limits, wish.tensor_parallel_size, resolved.recipe.scheme
    device = "the CPU of this machine" if wish.target.kind == "cpu" else wish.target.name
    return (
        f"{printable(wish.blueprint.name)} on {f'each of {ranks} x ' if ranks > 1 else ''}{device}: "
        f"weights in {resolved.dtype if scheme is None else scheme.name}, KV pages in {format_words(wish, resolved)}, "
        f"context {_context_words(resolved)}, {_sequence_words(limits.max_num_seqs)}, "
        f"{_token_count_words(limits.max_num_batched_tokens)} a step"
    )


def format_words(wish: Wish, resolved: Resolved) -> str:
    """The format of KV pages, and how many layers have another."""
    protected = resolved.protected
    if not protected.layers:
        return resolved.kv_format.name
    count = f"{len(protected.layers)} of {wish.blueprint.num_layers} layers"
    return f"{resolved.kv_format.name}, {count} in {protected.format.name}"


def _sequence_words(max_num_seqs: int) -> str:
    return "one sequence" if max_num_seqs == 1 else f"up to {max_num_seqs:,} sequences"


def _token_count_words(num_tokens: int) -> str:
    return "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"


def printable(name: str) -> str:
    """A folder may be called anything; what would move a cursor or end a line is shown as a mark."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _context_words(resolved: Resolved) -> str:
    """One that was left open shrinks to what fits; where nothing does, none was settled."""
    length = resolved.limits.max_model_len
    return "of any length" if resolved.may_shorten and length == 1 else f"{length:,}"


def token_words(bytes_per_token: Fraction) -> str:
    """Bytes of a token; those of a cache that keeps one row for several tokens are a mean."""
    if bytes_per_token.denominator == 1:
        return format_bytes(int(bytes_per_token))
    return f"{float(bytes_per_token):,.2f} B on average"


def start_command(wish: Wish, model: str | None, change: Alternative | None = None) -> str | None:
    """A command that makes the same plan again, with one change if need be; None where the change is another device."""
    if change is not None and change.option not in EngineConfig.__dataclass_fields__:
        return None
    asked = {name: getattr(wish.config, name) for name in (*STARTING, "enforce_eager")}
    # A chat is planned for one sequence unless it is told otherwise.
    asked["max_num_seqs"] = settle(wish)[1].limits.max_num_seqs
    if change is not None:
        asked[change.option] = change.value
    words = ["holdfast", "chat", *_model_words(wish, model)]
    if wish.target.kind == "cpu":
        words += ["--device", "cpu"]
    for name, value in asked.items():
        if value is True or value == "true":
            words.append(f"--{name.replace('_', '-')}")
        elif value is not False and value != _default(name):
            words += [f"--{name.replace('_', '-')}", _typed(value)]
    return shlex.join(words)


def _model_words(wish: Wish, model: str | None) -> list[str]:
    """The path as it was typed; of a model that is known by name alone, where it might be."""
    if model is None:
        return []
    return [model if Path(model).expanduser().exists() else f"path/to/{wish.blueprint.name}"]


def _typed(value: object) -> str:
    """A value as a person types it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(name: str) -> object:
    return EngineConfig.__dataclass_fields__[name].default
