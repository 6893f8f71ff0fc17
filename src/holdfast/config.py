"""EngineConfig: every setting of an engine, frozen and validated; unknown names suggest the nearest; no torch."""

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import ConfigError, ImportAbsentError, shown
from holdfast.memory.sizes import parse_bytes
from holdfast.quant.formats import ALL_KV_FORMATS, INDEX_FORMATS
from holdfast.quant.weight_schemes import EMBEDDING_CHOICES, REGEX_PREFIX, UNQUANTIZED, WeightRecipe, find_scheme
from holdfast.request.vllm_names import (
    ABSENT_NAMES,
    ENGINE_ALIASES,
    ENGINE_NAMES,
    ENGINE_VALUES,
    MISSING_VALUES,
    NOT_HERE,
    STORED_AS_IS,
    Foreign,
    own_speculative,
    quiet_line,
    settle,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
WEIGHT_CACHES = ("auto", "on", "off")
NO_TOKENIZER = "none"
AUTO_EMBEDDINGS = "auto"
"""What of the vocabulary is quantized is left to the file that the model comes from."""
MAX_PATTERNS = 256
MAX_COUNT = 2**31 - 1
NGRAM = "ngram"
DEFAULT_PROPOSALS = 4
MAX_PROPOSALS = 16
PAGE_TOKENS = tuple(2**power for power in range(9))
AUTO_STRETCH = "auto"
"""max_step_stretch by the device."""
ALIASES = ENGINE_ALIASES
"""Names that vLLM's users type, and ours."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that hold at every step, and the page size they are counted in."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_tokens: int
    max_sampled_rows: int = 0
    """Rows of a step whose logits are chosen from: more than one of a sequence with proposals. 0: max_num_seqs."""

    @property
    def sampled_rows(self) -> int:
        """max_sampled_rows, or what stands for it."""
        return self.max_sampled_rows or self.max_num_seqs


SWITCHES = (
    *("enable_prefix_caching", "batch_invariant", "enforce_eager", "allow_nonfinite", "core_process"),
    "enable_expert_parallel",
)
TENSOR_PARALLEL_SUMS = ("auto", "reduce", "exact")
SCHEDULING_POLICIES = ("priority", "fcfs")
MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a person asked for. "auto" and None are resolved once, by the engine, with a reason for each choice."""

    model: str | None = None
    """A folder in Hugging Face layout, a GGUF file, or a model of the Hub (owner/name, owner/name:Q4_K_M); None: the default."""
    revision: str | None = None
    """Branch, tag or commit of a model of the Hub; None takes main. owner/name@REVISION says the same."""
    tokenizer: str | None = None
    """Folder, file or owner/name of another tokenizer than the model's own; "none": prompts and answers are token ids alone."""
    chat_template: str | None = None
    """A Jinja file, or the template itself, in place of the model's own."""
    dtype: str = "auto"
    """Type of weights and activations: auto, float32, float16, bfloat16. auto: float32 on CPU, the checkpoint's on a GPU."""
    kv_cache_dtype: str = "auto"
    """Format of KV pages: auto (the dtype), float32, float16, bfloat16, fp8, a turboquant format of 8, 4 or 3 bits, or one for
    latents (MLA): fp8_ds_mla, turboquant_mla_4bit, turboquant_mla_4bit_r8."""
    kv_protected_layers: int | str | None = None
    """Layers that keep KV pages in a wider format: how many, or which, such as "0,1,30,31"; None takes the format's default."""
    index_cache_dtype: str = "auto"
    """How the index that chooses tokens is kept (DeepSeek-V3.2): fp8, bfloat16, float16 or float32; auto is fp8 beside quantized latents, else
    the type of the latents."""
    kv_protected_dtype: str = "fp8"
    """That wider format: the name of one, or auto for the dtype."""
    quantization: str | None = None
    """Scheme in which weights are kept, made while they load: fp8, fp8_tensor, fp8_block, int8, mxfp4; None or none: as stored."""
    quantized_embeddings: str = "auto"
    """What of the vocabulary is quantized too: head (also where it is the embedding), all (head and embedding) or none; auto is
    head, and all for a GGUF file that has its embedding quantized already."""
    quantization_ignore: tuple[str, ...] | str = ()
    """Weights that stay as they are: globs over their names, or regular expressions behind "re:"; commas part them in a text."""
    allow_nonfinite: bool = False
    """Go on where weights hold a NaN or an infinity, with a warning, instead of refusing."""
    save_quantized: str | None = None
    """Folder that gets a copy of the model with its weights quantized, which opens like any model."""
    weight_cache: str = "auto"
    """Quantized weights of earlier starts: auto uses them where it can, on insists, off neither reads nor writes them."""
    load_format: str = "auto"
    """auto, safetensors, gguf, or dummy (dummy weights from config.json alone)."""
    max_model_len: int | None = None
    """Longest prompt and output together; None takes the model's own."""
    max_num_seqs: int | None = None
    """Most sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; longer prompts run in chunks of it."""
    max_step_stretch: float | str | None = None
    """While sequences decode, prompts are cut so that a step takes at most so many times a decode step: a number above 1; 0: prompts
    are not cut; auto: 3 on a CPU and 1.7 on a GPU. None: auto in AsyncLLM and serve, 0 in LLM. Pipelines never cut."""
    max_queue: int = 4096
    """Most sequences that may wait; one more is refused."""
    scheduling_policy: str = "priority"
    """Order of requests: priority (the lowest number first, equals by arrival), or fcfs (by arrival; a request with a priority is
    refused)."""
    page_tokens: int | None = None
    """Tokens in a KV page: a power of two from 1 to 256; None takes 64 for quantized formats and latents, else 16."""
    memory_utilization: float | None = None
    """Share of the device's memory that the engine may take."""
    memory_limit: str | int | None = None
    """The same as a size, such as "20GiB"; takes precedence over a share. On a CPU, what Python and torch hold is part of it."""
    kv_cache_memory: str | int | None = None
    """Bytes for KV pages alone, whatever the rest takes."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished prompts and share them with requests that start alike."""
    batch_invariant: bool = False
    """Refuse to start unless every logit is independent, to the bit, of what else runs in the step."""
    speculative: str | None = None
    """Guess tokens ahead and check several in one step: ngram:K (K from 1 to 16; ngram alone is ngram:4) copies up to K from where
    the last tokens stood before. Answers are the same; text that repeats its input comes faster. None: off."""
    enforce_eager: bool = False
    """Never capture graphs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    tensor_parallel_size: int = 1
    """GPUs, or processes on a CPU, that share every layer."""
    pipeline_parallel_size: int = 1
    """Stages of layers, each on GPUs of its own."""
    nnodes: int | None = None
    """Nodes that ranks are on, started there by a launcher; None: as the launcher says, and in a plan as many as have 8 GPUs each."""
    enable_expert_parallel: bool = False
    """Ranks that share layers hold whole experts, not slices of every one."""
    tensor_parallel_sums: str = "auto"
    """How ranks share output projections: reduce exchanges float32 sums; exact gathers, so that answers do not depend on the number
    of ranks. auto is reduce, and exact with batch_invariant."""
    seed: int = 0
    """Where random choices start for requests without a seed of their own."""
    core_process: bool = False
    """Run the model in a process of its own: tokenizer and templates stay in this one, which then does without torch."""
    core_timeout: float = 30.0
    """Seconds of silence, from 1 up, after which a core process counts as dead."""

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", *ALL_KV_FORMATS))
        _choice("index_cache_dtype", self.index_cache_dtype, ("auto", *INDEX_FORMATS))
        _choice("kv_protected_dtype", self.kv_protected_dtype, ("auto", *ALL_KV_FORMATS))
        parse_layers(self.kv_protected_layers, "kv_protected_layers")
        _choice("load_format", self.load_format, LOAD_FORMATS)
        self._check_quantization()
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_queue"):
            _count(name, getattr(self, name))
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            _ranks(name, getattr(self, name))
        if self.nnodes is not None:
            _ranks("nnodes", self.nnodes)
        _choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _choice("tensor_parallel_sums", self.tensor_parallel_sums, TENSOR_PARALLEL_SUMS)
        parse_speculative(self.speculative)
        _page_size("page_tokens", self.page_tokens)
        _share("memory_utilization", self.memory_utilization)
        for name in ("memory_limit", "kv_cache_memory"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={shown(self.seed)} was asked", "a whole number from 0 to 2**64 - 1 works", "try 0")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))} was asked", "it is a switch", "pass True or False"
                )
        _stretch(self.max_step_stretch)
        _seconds("core_timeout", self.core_timeout)
        if not _is_device(self.device):
            raise ConfigError(f"device={shown(self.device)} was asked", "auto, cpu, cuda and cuda:N work", "try auto")
        for name in ("model", "tokenizer", "chat_template"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={shown(value)} was asked", "a path as a string works", "pass str(path)")
        _revision(self.revision)

    @property
    def recipe(self) -> WeightRecipe:
        """Which weights are quantized, and how, of a model that is not known yet: resolving adds what its file says."""
        patterns = parse_patterns(self.quantization_ignore, "quantization_ignore")
        asked = self.quantized_embeddings
        embeddings = WeightRecipe().embeddings if asked == AUTO_EMBEDDINGS else asked
        return WeightRecipe(find_scheme(self.quantization), embeddings, patterns)  # type: ignore[arg-type]

    @property
    def num_ranks(self) -> int:
        """How many processes compute."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def takes_priorities(self) -> bool:
        """Whether a request may have a priority."""
        return self.scheduling_policy == "priority"

    @property
    def is_quantized(self) -> bool:
        """Whether weights are to be quantized as they load."""
        return self.quantization not in (None, UNQUANTIZED)

    def paced(self) -> "EngineConfig":
        """The same for streams that are watched: max_step_stretch is auto unless it was given."""
        return self if self.max_step_stretch is not None else dataclasses.replace(self, max_step_stretch=AUTO_STRETCH)

    def with_quantization(self, name: str | None) -> "EngineConfig":
        """The same with weights in another scheme; what only makes sense with one goes where there is none."""
        if name not in (None, UNQUANTIZED):
            return dataclasses.replace(self, quantization=name)
        bare = {
            "quantized_embeddings": AUTO_EMBEDDINGS,
            "quantization_ignore": (),
            "save_quantized": None,
            "weight_cache": "auto",
        }
        return dataclasses.replace(self, quantization=name, **bare)  # type: ignore[arg-type]

    def _check_quantization(self) -> None:
        find_scheme(self.quantization)
        _choice("quantized_embeddings", self.quantized_embeddings, (AUTO_EMBEDDINGS, *EMBEDDING_CHOICES))
        patterns = parse_patterns(self.quantization_ignore, "quantization_ignore")
        _choice("weight_cache", self.weight_cache, WEIGHT_CACHES)
        folder = self.save_quantized
        if folder is not None and (not isinstance(folder, str) or not folder.strip() or "\0" in folder):
            raise ConfigError(
                f"save_quantized={shown(folder)} was asked", "a folder as a string works", "name a folder"
            )
        if self.is_quantized:
            return
        needing = {"quantization_ignore": patterns, "save_quantized": folder, "weight_cache": self.weight_cache == "on"}
        for name, value in needing.items():
            if value:
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))} was asked",
                    "nothing is quantized without quantization",
                    "add quantization (such as fp8; for a model that is quantized already, its own scheme), or leave it out",
                )

    @classmethod
    def from_options(cls, **options: object) -> "EngineConfig":
        """A config from keyword options; vLLM's names and values are understood, unknown ones raise.

        What has no effect here is taken, and named in one line of the log.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        left, quiet = settle(options, {*names, *ALIASES}, ENGINE_NAMES, ConfigError)
        known: dict[str, object] = {}
        for name, value in left.items():
            target = ALIASES.get(name, name)
            if name != target and value is None:
                continue  # a parser of a program fills in every name that it knows
            if target in known:
                raise ConfigError(
                    f"{name} was asked", f"{target} is the same option and is given too", "pass one of them"
                )
            known[target] = _own_value(target, value)
        if known.get("quantization") in STORED_AS_IS:
            quiet["quantization"] = known.pop("quantization")
        config = cls(**known)  # type: ignore[arg-type]
        if quiet:
            _tell(quiet)
        return config


def __getattr__(name: str) -> object:
    """Explain a name that a program imports from vllm.config and that is none here."""
    if name in ABSENT_NAMES:
        # An AttributeError would come out as Python's own sentence about the import.
        raise ImportAbsentError(f"holdfast.config.{name} was imported", NOT_HERE, ABSENT_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _own_value(name: str, value: object) -> object:
    """A value as our option takes it: paths as strings, types of torch and other names of vLLM by their own."""
    if name in ("model", "tokenizer", "chat_template", "save_quantized") and isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "speculative" and (isinstance(value, Mapping) or (isinstance(value, str) and value.startswith("{"))):
        return own_speculative(value)
    types = {"dtype": DTYPES, "index_cache_dtype": ("auto", *INDEX_FORMATS)}.get(name)
    key = str(value) if types and type(value).__name__ == "dtype" else value
    if not isinstance(key, str | int | None):
        return value
    do = MISSING_VALUES.get(name, {}).get(key) if isinstance(key, str) else None
    if do is not None:
        raise ConfigError(f"{name}={shown(value)} was asked", NOT_HERE, do)
    known = ENGINE_VALUES.get(name, {})
    if types and isinstance(key, str):
        small = key.lower()
        return small if small in types else known.get(small, value)
    return known.get(key, value)


def _tell(quiet: dict[str, object]) -> None:
    # A config without such options is made without the time that logging takes to import.
    from holdfast.observability.log import get_logger, log_in_scripts

    log_in_scripts()
    stored = {"quantization": Foreign("a checkpoint that is quantized loads as it is stored")}
    get_logger(__name__).warning("%s", quiet_line(quiet, {**ENGINE_NAMES, **stored}))


def parse_patterns(value: object, name: str) -> tuple[str, ...]:
    """Patterns over names of weights, each once: a text with commas between them, or a list of them."""
    listed = value.split(",") if isinstance(value, str) and value.strip() else value
    if listed == "":
        listed = ()
    if not isinstance(listed, list | tuple) or len(listed) > MAX_PATTERNS:
        has = f"a text with commas or a list of up to {MAX_PATTERNS} patterns works"
        raise ConfigError(f"{name}={shown(value)} was asked", has, 'try "*down_proj*"')
    for pattern in listed:
        problem = _pattern_problem(pattern)
        if problem is not None:
            do = 'try "*.down_proj", or "re:.*(q|k)_proj.*"'
            raise ConfigError(f"{name}: the pattern {shown(pattern)} was asked", problem, do)
    return tuple(dict.fromkeys(pattern.strip() for pattern in listed))


def _pattern_problem(pattern: object) -> str | None:
    """None, or why it matches nothing whatever the model, in words."""
    if not isinstance(pattern, str):
        return "it is no text"
    expression = pattern.strip().removeprefix(REGEX_PREFIX)
    if not expression:
        return "it is empty"
    if pattern.strip().startswith(REGEX_PREFIX):
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            return f"it is no regular expression ({error})"
    return None


def parse_layers(value: object, name: str) -> int | tuple[int, ...] | None:
    """How many layers, or which: a whole number is a count, numbers with a comma behind or between them are a list."""
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    listed = value.strip().removesuffix(",").split(",") if isinstance(value, str) else []
    layers = tuple(int(part) for part in listed if re.fullmatch(r"[0-9]{1,9}", part.strip()))
    if not listed or len(set(layers)) != len(listed):
        raise ConfigError(
            f"{name}={shown(value)} was asked",
            "a count or a list of different layers works",
            'try 4, or "0,1,30,31", or leave it out',
        )
    return tuple(sorted(layers))


def parse_speculative(value: object) -> int:
    """Most tokens that are proposed for a sequence in a step; 0 where nothing is."""
    if value is None:
        return 0
    method, colon, number = value.strip().partition(":") if isinstance(value, str) else ("", "", "")
    if method == NGRAM and not colon:
        return DEFAULT_PROPOSALS
    if method == NGRAM and re.fullmatch(r"[0-9]{1,9}", number) and 1 <= int(number) <= MAX_PROPOSALS:
        return int(number)
    raise ConfigError(
        f"speculative={shown(value)} was asked",
        f"{NGRAM}:K with K from 1 to {MAX_PROPOSALS} works, and {NGRAM} for {NGRAM}:{DEFAULT_PROPOSALS}",
        f"try {NGRAM}:{DEFAULT_PROPOSALS}, or leave it out",
    )


def _revision(value: object) -> None:
    """Of a model on the Hub: what git may call a branch, a tag or a commit."""
    sound = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+/-]{0,199}", value) and ".." not in value
    if value is not None and not sound:
        raise ConfigError(
            f"revision={shown(value)} was asked", "the name of a branch, a tag or a commit works", "try main"
        )


def _page_size(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or value is True or value not in PAGE_TOKENS:
        raise ConfigError(f"{name}={shown(value)} was asked", "powers of two from 1 to 256 work", "try 16")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        raise ConfigError(
            f"{name}={shown(value)} was asked",
            f"the choices are {', '.join(choices)}",
            f"try {near[0] if near else choices[0]}",
        )


def _ranks(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise ConfigError(f"{name}={shown(value)} was asked", f"a whole number from 1 to {MAX_RANKS} works", "try 1")


def _count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ConfigError(
            f"{name}={shown(value)} was asked",
            f"a whole number from 1 to {MAX_COUNT} works",
            "change it or leave it out",
        )


def _share(name: str, value: object) -> None:
    if value is None:
        return
    sound = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    if not sound:
        raise ConfigError(f"{name}={shown(value)} was asked", "a share above 0 and at most 1 works", "try 0.9")


def _seconds(name: str, value: object) -> None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT
    if not sound:
        raise ConfigError(f"{name}={shown(value)} was asked", "a number of seconds from 1 up works", "try 30")


def _stretch(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value not in (None, AUTO_STRETCH, 0) and not (is_number and 1 < float(value) <= MAX_COUNT):  # type: ignore[arg-type]
        raise ConfigError(
            f"max_step_stretch={shown(value)} was asked", "a number above 1, 0 (off) or auto works", "try auto"
        )


def _is_device(device: object) -> bool:
    if not isinstance(device, str):
        return False
    kind, _, index = device.partition(":")
    return device in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdecimal() and len(index) <= 3)
