"""vLLM's names: those without effect here, those not in this version, and the nearest to a wrong one; no torch.

`settle` sorts the options of a call before the call. It accepts names and values that mean the same here, lists those
without an effect for one log line, and raises for what would change an answer. The tables are in data/vllm_names.json;
docs/from_vllm.md has them for people, and a test compares both.
"""

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import ConfigError, HoldfastError, KeywordError, NameAbsentError, shown

_DATA: dict[str, Any] = json.loads(
    resources.files("holdfast").joinpath("data", "vllm_names.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A vLLM name that Holdfast does not have."""

    words: str
    """Reason that it has no effect; or the alternative, if only some values are accepted."""
    taken: tuple[object, ...] | None = None
    """Values without effect; None: all."""
    is_switch: bool = False
    """True if a command line has --name and --no-name, without a value."""

    def takes(self, value: object) -> bool:
        # Compare types too: 1 == True, and a tensor does not compare.
        return self.taken is None or any(type(value) is type(quiet) and value == quiet for quiet in self.taken)

    @property
    def is_missing(self) -> bool:
        """True if some value of it needs what this version does not have."""
        return self.taken is not None


def _foreign(table: str) -> Mapping[str, Foreign]:
    switches, found = set(_DATA["switches"]), {}
    for row in _DATA[table]:
        taken = tuple(row["taken"]) if "taken" in row else None
        for name in row["names"]:
            is_switch = name in switches if taken is None else any(isinstance(value, bool) for value in taken)
            found[name] = Foreign(row["words"], taken, is_switch and name != "hf_token")
    return found


def _words(rows: list[dict[str, Any]]) -> Mapping[str, str]:
    return {name: row["words"] for row in rows for name in row["names"]}


ENGINE_ALIASES: Mapping[str, str] = _DATA["engine_aliases"]
"""vLLM's names of engine options, and ours."""
SAME_ENGINE_NAMES: tuple[str, ...] = tuple(_DATA["same_engine_names"])
SAME_SAMPLING_NAMES: tuple[str, ...] = tuple(_DATA["same_sampling_names"])
ENGINE_NAMES = _foreign("engine")
SAMPLING_NAMES = _foreign("sampling")
STRUCTURED_NAMES = _foreign("structured")
"""Fields of vLLM's StructuredOutputsParams."""
CALL_NAMES = _foreign("call")
"""Arguments of vLLM's generate and chat."""
SERVER_NAMES = _foreign("server")
"""Options of `vllm serve` that are not engine options."""
METHOD_NAMES = _words(_DATA["methods"])
"""Methods and attributes of vLLM's LLM and AsyncLLM, and the alternatives."""
ABSENT_NAMES = _words(_DATA["absent_names"])
"""Names that programs import from vLLM, and the alternatives."""
ABSENT_MODULES = _words(_DATA["absent_modules"])
"""Like ABSENT_NAMES for modules; the longest prefix of a path wins."""
ENGINE_VALUES: Mapping[str, Mapping[Any, object]] = {name: dict(rows) for name, rows in _DATA["engine_values"].items()}
"""Values that vLLM's users pass, and ours."""
MISSING_VALUES: Mapping[str, Mapping[str, str]] = {name: _words(rows) for name, rows in _DATA["missing_values"].items()}
"""Values of shared options that are not in this version, and the alternatives."""
PARSERS_OF_VLLM = frozenset(_DATA["parsers"])
"""Formats of tools and reasoning that vLLM has and this version does not."""
GUIDED_NAMES: Mapping[str, str] = _DATA["guided"]
"""Older names of vLLM for structured_outputs with one field, and that field."""
SHORT_FLAGS: Mapping[str, str] = _DATA["short_flags"]
"""Short flags of `vllm serve`, and the options that they set."""
STORED_AS_IS = ("compressed-tensors", "fbgemm_fp8", "gguf", "awq", "awq_marlin", "gptq", "gptq_marlin")
STORED_AS_IS += ("modelopt", "modelopt_fp4", "auto-round")
"""Quantization names that only describe how a checkpoint is stored."""
_Params = TypeVar("_Params", bound=type)


class Settled(NamedTuple):
    """The accepted options of a call, and those without effect."""

    options: dict[str, object]
    quiet: dict[str, object]


def settle(
    options: Mapping[str, object], names: Collection[str], foreign: Mapping[str, Foreign], error: type[HoldfastError]
) -> Settled:
    """Sort the options of a call that accepts `names`; raise `error` for an unknown or unsupported one."""
    left: dict[str, object] = {}
    quiet: dict[str, object] = {}
    for name, value in options.items():
        if name in names:
            left[name] = value
            continue
        known = foreign.get(name)
        if known is None:
            hint = _nearest(name, [*names, *foreign], names)
            raise error("value.unknown_option", name=shown(name)[1:-1], value=value, hint=hint)
        if not known.takes(value):
            raise error("value.unsupported_option", name=name, value=value, instead=known.words)
        if value is not None:
            quiet[name] = value
    return Settled(left, quiet)


def _nearest(name: str, candidates: Collection[str], names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"Did you mean {near[0]}?" if near else f"Accepted: {', '.join(sorted(names))}."


def with_vllm_names(
    foreign: Mapping[str, Foreign], own: Callable[[Mapping[str, object]], dict[str, object]] = dict
) -> Callable[[_Params], _Params]:
    """Decorate a dataclass so that its constructor takes keywords only, settled with vLLM's names."""

    def decorate(params_class: _Params) -> _Params:
        construct = params_class.__init__
        names = {field.name for field in fields(params_class)}

        @wraps(construct)
        def settled_init(self: object, *values: object, **options: object) -> None:
            if values:
                raise KeywordError(
                    "request.positional_field", kind=params_class.__name__, value=values[0], example=sorted(names)[-1]
                )
            construct(self, **settle(own(options), names, foreign, KeywordError).options)

        params_class.__init__ = settled_init
        return params_class

    return decorate


def own_structured(options: Mapping[str, object]) -> dict[str, object]:
    """Replace vLLM's older names of structured_outputs; None means absent."""
    guided = {own: options[name] for name, own in GUIDED_NAMES.items() if options.get(name) is not None}
    left = {name: value for name, value in options.items() if name not in GUIDED_NAMES}
    decoding = left.pop("guided_decoding", None)
    if isinstance(decoding, Mapping):
        decoding = {name: value for name, value in decoding.items() if value is not None}
    named = [f"guided_{name}" for name in list(guided)[:1]] + ["guided_decoding"] * bool(decoding)
    named += ["structured_outputs"] * bool(named and left.get("structured_outputs") is not None)
    if len(named) > 1:
        raise KeywordError("request.two_grammars", name=named[-1], first=named[-1], second=named[0])
    if named:
        left["structured_outputs"] = guided or decoding
    return left


def own_speculative(given: Mapping[Any, object] | str) -> str:
    """Convert vLLM's speculative_config, a dict or its JSON, to our option if it names n-gram drafts.

    Bounds of n-gram lengths change no answer, so they are accepted and dropped.
    """
    try:
        fields_of = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ConfigError("request.speculative_config", value=given, problem=f"It is not JSON ({error})") from error
    left = {name: value for name, value in fields_of.items() if value is not None}
    method = left.pop("method", None) or left.pop("model", None)
    if method == "ngram" and left.get("model") == "ngram":
        del left["model"]  # vLLM fills both
    number = left.pop("num_speculative_tokens", None)
    bounds = [left.pop(name, 1) for name in ("prompt_lookup_min", "prompt_lookup_max")]
    problem = None
    if method not in ("ngram", "[ngram]"):
        problem = "Draft tokens come from n-grams alone"
    elif any(type(bound) is not int or bound < 1 for bound in bounds):
        problem = "prompt_lookup_min and prompt_lookup_max must be positive integers"
    elif left:
        problem = f"{shown(next(iter(left)))} is not supported in this version"
    elif type(number) is not int:
        problem = "num_speculative_tokens must be an integer"
    if problem is not None:
        raise ConfigError("request.speculative_config", value=dict(fields_of), problem=problem)
    return f"ngram:{number}"


def missing_attribute(owner: object, name: str) -> object:
    """Implement `__getattr__` of an LLM: raise for an absent name, with the alternative if vLLM has it."""
    kind = type(owner)
    if hasattr(kind, name):
        return object.__getattribute__(owner, name)  # a property that failed raises its own error
    if name.startswith("_"):
        raise AttributeError(f"{kind.__name__} has no {name}")  # Python and notebooks probe for such names
    if name in METHOD_NAMES:
        raise NameAbsentError("request.unsupported_name", owner=kind.__name__, name=name, instead=METHOD_NAMES[name])
    public = [known for known in dir(kind) if not known.startswith("_")]
    hint = _nearest(name, public, public)
    raise NameAbsentError("request.unknown_name", owner=kind.__name__, name=shown(name)[1:-1], hint=hint)


def quiet_line(quiet: Mapping[str, object], foreign: Mapping[str, Foreign]) -> str:
    """Describe names without effect in one log line, with the reasons."""
    by_reason: dict[str, list[str]] = {}
    for name, value in quiet.items():
        why = "" if foreign[name].is_missing else foreign[name].words
        by_reason.setdefault(why, []).append(f"{name}={shown(value, 40)}")
    parts = [", ".join(names) + (f" ({why})" if why else "") for why, names in by_reason.items()]
    return f"accepted without effect: {'; '.join(parts)}"
