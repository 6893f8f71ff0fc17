"""EngineConfig: every setting of an engine, frozen and validated; unknown names suggest the nearest; no torch.

An annotation holds the check of its field, and the docstring after the field is its help text (`option_help`).
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from holdfast.errors import ConfigError, ImportAbsentError, did_you_mean
from holdfast.memory.sizes import parse_bytes
from holdfast.quant.formats import ALL_KV_FORMATS, INDEX_FORMATS
from holdfast.quant.weight_schemes import (
    EMBEDDING_CHOICES,
    UNQUANTIZED,
    WeightRecipe,
    check_pattern,
    find_scheme,
)
from holdfast.request.vllm_names import (
    ABSENT_NAMES,
    ENGINE_ALIASES,
    ENGINE_NAMES,
    ENGINE_VALUES,
    MISSING_VALUES,
    STORED_AS_IS,
    Foreign,
    own_speculative,
    quiet_line,
    settle,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_QUALITIES = ("high", "balanced")
"""Accepted values of `kv_quality`."""
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
WEIGHT_CACHES = ("auto", "on", "off")
PACKED_WEIGHTS = ("as_stored", "expanded")
PACKED_ACTIVATIONS = ("auto", "int8", "full")
NO_TOKENIZER = "none"
AUTO_EMBEDDINGS = "auto"
"""The model's file decides how much of the vocabulary is quantized."""
NEAR_TOKENS = (0, 64, 128)
"""Accepted values of `kv_near_tokens`: tiles of 64 tokens, which is what kernels over pages take at a time."""
MAX_PATTERNS = 256
MAX_COUNT = 2**31 - 1
NGRAM = "ngram"
DEFAULT_PROPOSALS = 4
MAX_PROPOSALS = 16
AUTO_STRETCH = "auto"
ALIASES = ENGINE_ALIASES
"""vLLM's names of options, and ours."""
MAX_RANKS = 4096
PATHS = ("model", "tokenizer", "chat_template", "save_quantized")


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that hold at every step, and the page size they are counted in."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_tokens: int
    max_sampled_rows: int = 0
    """Most rows of a step that are sampled: a sequence with draft tokens has several. 0: max_num_seqs."""

    @property
    def sampled_rows(self) -> int:
        return self.max_sampled_rows or self.max_num_seqs


@dataclass(frozen=True, slots=True)
class OneOf:
    """Check of a field with a list of accepted names."""

    choices: tuple[str, ...]

    def __call__(self, value: object, name: str) -> None:
        if value not in self.choices:
            error = ConfigError("value.not_one_of", name=name, value=value, accepted=self.choices)
            raise error.hinting(did_you_mean(value, self.choices))


@dataclass(frozen=True, slots=True)
class Between:
    """Check of a number from `minimum` to `maximum`, both included."""

    minimum: float
    maximum: float = MAX_COUNT
    is_integer: bool = True

    def __call__(self, value: object, name: str) -> None:
        is_too_long = isinstance(value, str) and value.isdecimal()  # more digits than are parsed
        if not is_too_long and (
            isinstance(value, bool) or not isinstance(value, int if self.is_integer else int | float)
        ):
            raise ConfigError("value.not_integer" if self.is_integer else "value.not_number", name=name, value=value)
        if is_too_long or not self.minimum <= value <= self.maximum:  # type: ignore[operator]
            bounds = {"minimum": self.minimum, "maximum": self.maximum}
            raise ConfigError("value.out_of_range", name=name, value=value, **bounds)


def _check_bool(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise ConfigError("value.not_bool", name=name, value=value)


def _check_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise ConfigError("value.not_string", name=name, value=value)


def _check_folder(value: object, name: str) -> None:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigError("config.not_a_folder", name=name, value=value)


def _check_revision(value: object, name: str) -> None:
    """Accept what git may call a branch, a tag or a commit."""
    sound = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+/-]{0,199}", value)
    if not sound or ".." in str(value):
        raise ConfigError("config.not_a_revision", name=name, value=value)


def _check_page_size(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 256 or value & (value - 1):
        raise ConfigError("config.page_size", name=name, value=value)


def _check_share(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError("config.not_a_share", name=name, value=value)


def _check_stretch(value: object, name: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value not in (AUTO_STRETCH, 0) and not (is_number and 1 < float(value) <= MAX_COUNT):  # type: ignore[arg-type]
        raise ConfigError("config.step_stretch", name=name, value=value)


def _check_device(value: object, name: str) -> None:
    is_known = isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value)
    if not is_known:
        raise ConfigError("config.device", name=name, value=value)


def parse_patterns(value: object, name: str) -> tuple[str, ...]:
    """Read patterns over names of weights, each once: a list of them, or a string with commas between them."""
    listed = value.split(",") if isinstance(value, str) and value.strip() else value
    if listed == "":
        listed = ()
    if not isinstance(listed, list | tuple) or len(listed) > MAX_PATTERNS:
        raise ConfigError("config.patterns", name=name, value=value, maximum=MAX_PATTERNS)
    for pattern in listed:
        check_pattern(pattern, name)
    return tuple(dict.fromkeys(pattern.strip() for pattern in listed))


def parse_layers(value: object, name: str) -> int | tuple[int, ...] | None:
    """Read a count of layers, or a list of layers: numbers with a comma after or between them."""
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    listed = value.strip().removesuffix(",").split(",") if isinstance(value, str) else []
    layers = tuple(int(part) for part in listed if re.fullmatch(r"[0-9]{1,9}", part.strip()))
    if not listed or len(set(layers)) != len(listed):
        raise ConfigError("config.layers", name=name, value=value)
    return tuple(sorted(layers))


def parse_speculative(value: object, name: str = "speculative") -> int:
    """Return the most draft tokens of a sequence in a step; 0 for None."""
    if value is None:
        return 0
    method, colon, number = value.strip().partition(":") if isinstance(value, str) else ("", "", "")
    if method == NGRAM and not colon:
        return DEFAULT_PROPOSALS
    if method == NGRAM and re.fullmatch(r"[0-9]{1,9}", number) and 1 <= int(number) <= MAX_PROPOSALS:
        return int(number)
    raise ConfigError("config.speculative", name=name, value=value, maximum=MAX_PROPOSALS)


def _check_scheme(value: object, name: str) -> None:
    find_scheme(value, name)


def _check_near_tokens(value: object, name: str) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise ConfigError("value.not_integer", name=name, value=value)
    if value not in NEAR_TOKENS:
        raise ConfigError("value.not_one_of", name=name, value=value, accepted=tuple(map(str, NEAR_TOKENS)))


_COUNT = Between(1)
_RANKS = Between(1, MAX_RANKS)
_KV_DTYPES = OneOf(("auto", *ALL_KV_FORMATS))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options that a user gave. The engine resolves "auto" and None once, with a reason for each choice."""

    model: Annotated[str | None, _check_text] = None
    """A folder in Hugging Face layout, a GGUF file, or a model of the Hub (owner/name, owner/name:Q4_K_M); None: the default."""
    revision: Annotated[str | None, _check_revision] = None
    """Branch, tag or commit of a model of the Hub; None: main. owner/name@REVISION has the same effect."""
    tokenizer: Annotated[str | None, _check_text] = None
    """Folder, file or owner/name of another tokenizer than the model's own; "none": prompts and answers are token ids only."""
    chat_template: Annotated[str | None, _check_text] = None
    """A Jinja file, or the template itself, in place of the model's own."""
    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    """Type of weights and activations: auto, float32, float16, bfloat16. auto: float32 on a CPU, the checkpoint's on a GPU."""
    kv_cache_dtype: Annotated[str, _KV_DTYPES] = "auto"
    """Format of KV pages: auto (the dtype), float32, float16, bfloat16, fp8, a turboquant format of 8, 5, 4 or 3 bits, or one for
    latents (MLA): fp8_ds_mla, turboquant_mla_4bit, turboquant_mla_4bit_r8."""
    kv_quality: Annotated[str | None, OneOf(KV_QUALITIES)] = None
    """Let the plan choose kv_cache_dtype: high or balanced takes the best of its formats that holds
    max_num_seqs sequences of max_model_len tokens (one, if the number is not given)."""
    kv_protected_layers: Annotated[int | str | None, parse_layers] = None
    """Layers whose KV pages stay in a wider format: how many, or which, such as "0,1,30,31"; None: the format's default."""
    index_cache_dtype: Annotated[str, OneOf(("auto", *INDEX_FORMATS))] = "auto"
    """Format of the index that selects tokens (DeepSeek-V3.2): fp8, bfloat16, float16 or float32; auto: fp8 beside quantized
    latents, else the type of the latents."""
    kv_protected_dtype: Annotated[str, _KV_DTYPES] = "fp8"
    """The wider format of protected layers; auto: the dtype."""
    kv_near_tokens: Annotated[int | None, _check_near_tokens] = None
    """Tokens of the newest block, which attention reads in dtype beside quantized pages, like the first 16 tokens: 64 or 128;
    0: none; None: 64 beside turboquant formats."""
    kv_key_scale: bool = True
    """Multiply keys of fewer than 8 bits, and divide their queries, by numbers that a short text gives at the start."""
    quantization: Annotated[str | None, _check_scheme] = None
    """Scheme to which weights are quantized while they load: fp8, fp8_tensor, fp8_block, int8, mxfp4; None or none: as stored."""
    quantized_embeddings: Annotated[str, OneOf((AUTO_EMBEDDINGS, *EMBEDDING_CHOICES))] = AUTO_EMBEDDINGS
    """What of the vocabulary is quantized too: head (also if it is tied to the embedding), all (head and embedding) or none;
    auto: head, and all for a GGUF file whose embedding is already quantized."""
    quantization_ignore: Annotated[tuple[str, ...] | str, parse_patterns] = ()
    """Weights that stay as they are: globs over their names, or regular expressions after "re:", separated by commas."""
    packed_weights: Annotated[str | None, OneOf(PACKED_WEIGHTS)] = None
    """Weights that the checkpoint packs (GGUF blocks, AWQ, GPTQ, compressed-tensors, NVFP4): as_stored keeps them so in memory,
    expanded holds them in dtype. None: as_stored if the device has a kernel for them."""
    packed_activations: Annotated[str, OneOf(PACKED_ACTIVATIONS)] = "auto"
    """Inputs of products with packed weights: full (dtype), or int8 (8-bit codes, if a kernel takes them); auto: int8 for GGUF on a
    CPU unless dtype is given, else full."""
    allow_nonfinite: bool = False
    """Warn instead of failing if weights hold a NaN or an infinity."""
    save_quantized: Annotated[str | None, _check_folder] = None
    """Folder for a copy of the model with its weights quantized, which opens like any model."""
    weight_cache: Annotated[str, OneOf(WEIGHT_CACHES)] = "auto"
    """Quantized weights of earlier starts: auto uses them if possible, on requires them, off neither reads nor writes them."""
    load_format: Annotated[str, OneOf(LOAD_FORMATS)] = "auto"
    """auto, safetensors, gguf, or dummy (random weights from config.json alone, or of a well-known model by name)."""
    max_model_len: Annotated[int | None, _COUNT] = None
    """Longest prompt and output together; None: the model's own, or what fits."""
    max_num_seqs: Annotated[int | None, _COUNT] = None
    """Most sequences in one step."""
    max_num_batched_tokens: Annotated[int | None, _COUNT] = None
    """Most tokens in one step; longer prompts run in chunks."""
    max_step_stretch: Annotated[float | str | None, _check_stretch] = None
    """Chunk prompts while sequences decode, so that a step takes at most N times a decode step: above 1, 0 (never) or auto (3 on a
    CPU, 1.7 on a GPU). None: auto in AsyncLLM and serve, 0 in LLM. Pipelines never chunk for this."""
    max_queue: Annotated[int, _COUNT] = 4096
    """Most sequences that may wait; one more is refused."""
    scheduling_policy: Annotated[str, OneOf(("priority", "fcfs"))] = "priority"
    """Order of requests: priority (lowest number first, ties by arrival), or fcfs (by arrival; a request with a priority is
    refused)."""
    page_tokens: Annotated[int | None, _check_page_size] = None
    """Tokens in a KV page: a power of two from 1 to 256; None: 64 for quantized formats and latents, else 16."""
    memory_utilization: Annotated[float | None, _check_share] = None
    """Share of the device's memory that the engine may use."""
    memory_limit: Annotated[str | int | None, parse_bytes] = None
    """Memory that the engine may use, such as "20GiB"; overrides the share. On a CPU it includes Python and torch."""
    kv_cache_memory: Annotated[str | int | None, parse_bytes] = None
    """Bytes for KV pages alone, whatever the rest takes."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished prompts and share them with requests that start alike."""
    state_snapshots: Annotated[int | None, Between(0, 65536)] = None
    """States of prefixes that models with gated delta nets keep, so that prompts start after cached tokens; 0: no prompt does;
    None: at least 2, at most a tenth of the bytes of KV pages."""
    snapshot_tokens: Annotated[int, Between(64, MAX_COUNT)] = 8192
    """Tokens between two snapshots of a long prompt."""
    batch_invariant: bool = False
    """Refuse to start unless every logit is bitwise independent of what else runs in the step."""
    speculative: Annotated[str | None, parse_speculative] = None
    """Draft tokens and verify several in one step: ngram:K (K from 1 to 16; ngram: ngram:4) copies up to K from where the last
    tokens stood before. Answers do not change; text that repeats its input comes faster. None: off."""
    enforce_eager: bool = False
    """Never capture graphs."""
    device: Annotated[str, _check_device] = "auto"
    """auto, cpu, cuda or cuda:N."""
    tensor_parallel_size: Annotated[int, _RANKS] = 1
    """GPUs, or processes on a CPU, that share every layer."""
    pipeline_parallel_size: Annotated[int, _RANKS] = 1
    """Stages of layers, each on GPUs of its own."""
    nnodes: Annotated[int | None, _RANKS] = None
    """Nodes of the ranks, which a launcher starts there; None: the launcher's number, and in a plan one for every 8 GPUs."""
    enable_expert_parallel: bool = False
    """Give each tensor-parallel rank whole experts instead of slices of every expert."""
    tensor_parallel_sums: Annotated[str, OneOf(("auto", "reduce", "exact"))] = "auto"
    """How ranks combine output projections: reduce (all-reduce of float32 sums) or exact (all-gather, so that answers do not depend
    on the number of ranks). auto: reduce, and exact with batch_invariant."""
    seed: Annotated[int, Between(0, 2**64 - 1)] = 0
    """Seed of requests without one of their own."""
    core_process: bool = False
    """Run the model in a process of its own: tokenizer and templates stay in this one, which then needs no torch."""
    core_timeout: Annotated[float, Between(1, MAX_COUNT, is_integer=False)] = 30.0
    """Seconds without a heartbeat, at least 1, after which a core process counts as dead."""

    def __post_init__(self) -> None:
        for name, check, is_optional in _checks():
            value = getattr(self, name)
            if value is not None or not is_optional:
                check(value, name)
        if self.kv_quality is not None and self.kv_cache_dtype != "auto":
            values = {"value": self.kv_quality, "kv_cache_dtype": self.kv_cache_dtype}
            raise ConfigError("config.quality_and_format", name="kv_quality", **values)
        if self.is_quantized:
            if self.packed_weights == "as_stored":
                raise ConfigError("config.packed_and_quantized", name="packed_weights", quantization=self.quantization)
            return
        needing = ("quantization_ignore", "save_quantized") + (("weight_cache",) if self.weight_cache == "on" else ())
        for name in needing:
            if value := getattr(self, name):
                raise ConfigError("config.needs_quantization", name=name, value=value)

    @property
    def recipe(self) -> WeightRecipe:
        """Which weights are quantized, and how, before the model is known. `resolve` adds what its file says."""
        patterns = parse_patterns(self.quantization_ignore, "quantization_ignore")
        is_auto = self.quantized_embeddings == AUTO_EMBEDDINGS
        embeddings = WeightRecipe().embeddings if is_auto else self.quantized_embeddings
        return WeightRecipe(find_scheme(self.quantization), embeddings, patterns)  # type: ignore[arg-type]

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def may_scale_keys(self) -> bool:
        """True if scales of keys may be measured on a text; the plan says whether they are."""
        name = self.kv_cache_dtype
        has_codes = self.kv_quality is not None or (name != "auto" and ALL_KV_FORMATS[name].rotates_keys)
        return self.kv_key_scale and has_codes and self.tokenizer != NO_TOKENIZER

    @property
    def takes_priorities(self) -> bool:
        return self.scheduling_policy == "priority"

    @property
    def is_quantized(self) -> bool:
        """True if weights are quantized while they load."""
        return self.quantization not in (None, UNQUANTIZED)

    def paced(self) -> "EngineConfig":
        """Return a copy for streaming: max_step_stretch is auto unless it was given."""
        return self if self.max_step_stretch is not None else dataclasses.replace(self, max_step_stretch=AUTO_STRETCH)

    def with_quantization(self, name: str | None) -> "EngineConfig":
        """Return a copy with another scheme. Without a scheme, the options that need one return to their defaults."""
        if name not in (None, UNQUANTIZED):
            return dataclasses.replace(self, quantization=name)
        dependent = ("quantized_embeddings", "quantization_ignore", "save_quantized", "weight_cache")
        defaults: dict[str, Any] = {option: getattr(EngineConfig, option) for option in dependent}
        return dataclasses.replace(self, quantization=name, **defaults)

    @classmethod
    def from_options(cls, **options: object) -> "EngineConfig":
        """Build a config from keyword options, with vLLM's names and values. Unknown names raise.

        Options of vLLM that have no effect here are accepted, and one log line names them.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in names and name not in ALIASES and name not in ENGINE_NAMES:
                candidates = (*names, *ALIASES, *ENGINE_NAMES)
                hint = did_you_mean(name, candidates) or f"The options are {', '.join(sorted((*names, *ALIASES)))}."
                raise ConfigError("config.unknown_option", name=name).hinting(hint)
        left, quiet = settle(options, {*names, *ALIASES}, ENGINE_NAMES, ConfigError)
        known: dict[str, object] = {}
        for name, value in left.items():
            target = ALIASES.get(name, name)
            if name != target and value is None:
                continue  # a parser of a program fills in every name that it knows
            if target in known:
                raise ConfigError("config.same_option", name=name, other=target)
            known[target] = _own_value(target, value)
        if known.get("quantization") in STORED_AS_IS:
            quiet["quantization"] = known.pop("quantization")
        config = cls(**known)  # type: ignore[arg-type]
        if quiet:
            _log_ignored(quiet)
        return config


@cache
def _checks() -> tuple[tuple[str, Callable[[object, str], object], bool], ...]:
    """List each field with its check, and True if None is accepted: exactly the fields whose default is None."""
    kinds = EngineConfig.__annotations__
    return tuple(
        (field.name, getattr(kinds[field.name], "__metadata__", (_check_bool,))[0], field.default is None)
        for field in dataclasses.fields(EngineConfig)
    )


@cache
def option_help() -> Mapping[str, str]:
    """Return the docstring of every field of EngineConfig, on one line."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(EngineConfig)).body[0]
    assert isinstance(body, ast.ClassDef), body
    found = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[ast.unparse(node.target)] = " ".join(str(after.value.value).split())
    return found


def __getattr__(name: str) -> object:
    """Explain a name that a program imports from vllm.config and that does not exist here."""
    if name in ABSENT_NAMES:
        # An AttributeError would come out as Python's own sentence about the import.
        raise ImportAbsentError("config.absent_name", name=name, fix=ABSENT_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _own_value(name: str, value: object) -> object:
    """Convert a value to ours: paths to strings, torch's types and vLLM's names to our names."""
    if name in PATHS and isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "speculative" and (isinstance(value, Mapping) or (isinstance(value, str) and value.startswith("{"))):
        return own_speculative(value)
    types = {"dtype": DTYPES, "index_cache_dtype": ("auto", *INDEX_FORMATS)}.get(name)
    key = str(value) if types and type(value).__name__ == "dtype" else value
    if not isinstance(key, str | int | None):
        return value
    fix = MISSING_VALUES.get(name, {}).get(key) if isinstance(key, str) else None
    if fix is not None:
        raise ConfigError("value.unsupported_option", name=name, value=value, instead=fix)
    known = ENGINE_VALUES.get(name, {})
    if types and isinstance(key, str):
        small = key.lower()
        return small if small in types else known.get(small, value)
    return known.get(key, value)


def _log_ignored(quiet: dict[str, object]) -> None:
    # A config without such options is made without the time that logging takes to import.
    from holdfast.observability.log import get_logger, log_in_scripts

    log_in_scripts()
    stored = {"quantization": Foreign("a checkpoint that is quantized loads as it is stored")}
    get_logger(__name__).warning("%s", quiet_line(quiet, {**ENGINE_NAMES, **stored}))
