"""The options of every command: a row for each setting of an engine and a request; values as typed; no torch.

A value that cannot be read stays as it was typed: the setting that it is for refuses it in its own words.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from holdfast.config import ALIASES, DTYPES, LOAD_FORMATS, EngineConfig
from holdfast.errors import ConfigError, RequestError, shown
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, DTYPE_BYTES, INDEX_FORMATS, KV_FORMATS, MLA_FORMATS
from holdfast.quant.weight_schemes import UNQUANTIZED, WEIGHT_SCHEMES
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import MAX_SCHEMA_BYTES, StructuredOutputs

ARGUMENTS, OPTIONS, MODEL, MEMORY, SAMPLING = "Arguments", "Options", "Model", "Memory", "Sampling"
OUTPUT, BENCHMARK, SERVER = "Output", "Benchmark", "Server"
PANELS = (ARGUMENTS, OPTIONS, OUTPUT, BENCHMARK, SERVER, SAMPLING, MODEL, MEMORY)
"""Parts of a help page, in their order."""
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""As in vLLM: small letters count in thousands, capitals in 1024s."""
_COUNT = re.compile(r"(-?[0-9]{1,18})(\.[0-9]{1,9})?([kKmMgG]?)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_count(text: str) -> int | str | None:
    """A whole number, as 8192, 8k (8000), 8K (8192) or 1M; auto is None, which leaves the choice open."""
    if text.strip().lower() == "auto":
        return None
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return text
    value = (
        float(f"{match[1]}{match[2]}") * COUNT_UNITS[match[3]] if match[2] else int(match[1]) * COUNT_UNITS[match[3]]
    )
    return int(value) if value == int(value) else text


def read_number(text: str) -> float | str:
    """A number, finite or not."""
    try:
        return float(text)
    except ValueError:
        return text


def read_share(text: str) -> float | str:
    """A share of a whole, as 0.8 or 80%."""
    number = read_number(text.strip().removesuffix("%"))
    if isinstance(number, str) or not text.strip().endswith("%"):
        return read_number(text)
    # One that is too large is refused as it was typed.
    return number / 100 if 0 < number <= 100 else text


def read_integers(texts: Sequence[str]) -> list[int | str]:
    """Whole numbers, each in a text of its own or several with commas between them."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    return [int(part) if re.fullmatch(r"-?[0-9]{1,18}", part) else part for part in parts]


def read_patterns(texts: Sequence[str]) -> tuple[str, ...]:
    """Patterns, each in a text of its own or several with commas between them."""
    return tuple(part.strip() for text in texts for part in text.split(","))


def read_biases(texts: Sequence[str]) -> dict[int, float]:
    """Token ids and what is added to their logits, as 42=-100."""
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        number = read_number(bias)
        if not re.fullmatch(r"[0-9]{1,18}", token.strip()) or isinstance(number, str):
            raise RequestError(
                f"--logit-bias {shown(text)} was asked", "a token id and a number work", "write --logit-bias 42=-100"
            )
        biases[int(token)] = number
    return biases


def read_form(text: str) -> StructuredOutputs:
    """The form of an answer as a JSON object, or as @FILE, a file that holds one."""
    try:
        if len(given := _form_text(text)) <= 4 * MAX_SCHEMA_BYTES:
            return StructuredOutputs.of(json.loads(given))
        has = f"it has {len(given)} characters, and at most {4 * MAX_SCHEMA_BYTES} work"
    except OSError as error:
        has = f"that file cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        has = "it is not JSON"
    raise RequestError(
        f"--structured-outputs {shown(text)} was asked",
        has,
        """write --structured-outputs '{"choice": ["yes", "no"]}'""",
    )


def _form_text(text: str) -> str:
    if not text.startswith("@"):
        return text
    with open(text[1:], encoding="utf-8") as file:
        return file.read(4 * MAX_SCHEMA_BYTES + 1)


def read_counts(text: str, option: str) -> tuple[int, ...]:
    """One or more counts with commas between them, each at least 1."""
    counts = [read_count(part) for part in text.split(",")]
    if not all(isinstance(count, int) and 1 <= count < 2**31 for count in counts):
        raise ConfigError(f"{option} {shown(text)} was asked", "whole numbers from 1 up work", f"write {option} 1,8")
    return tuple(count for count in counts if isinstance(count, int))


def read_range(text: str, option: str) -> tuple[int, int]:
    """A count, or two with a hyphen between them: the least and the most."""
    match = _RANGE.fullmatch(text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(
            f"{option} {shown(text)} was asked", "a range of whole numbers from 1 up works", f"write {option} 32-512"
        )
    return low, high


@dataclass(frozen=True, slots=True)
class Option:
    """An option of one command alone; its text is the command's to read."""

    name: str
    """Of the field that gets it."""
    help: str
    metavar: str = ""
    """Nothing for a switch."""
    default: str | None = None
    panel: str = OPTIONS
    flags: tuple[str, ...] = ()
    """Where it is not called as its field is."""
    is_repeated: bool = False
    """Its texts are a list, or None."""

    @property
    def all_flags(self) -> tuple[str, ...]:
        return self.flags or (flag(self.name),)

    @property
    def arguments(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """What argparse is told."""
        help = help_words(self.help, self.default)
        if self.panel == ARGUMENTS:
            yield (self.name,), {"metavar": self.metavar, "nargs": "?", "help": help}
        elif self.metavar:
            action = "append" if self.is_repeated else "store"
            told = {"dest": self.name, "metavar": self.metavar, "default": self.default, "help": help}
            yield self.all_flags, {**told, "action": action}
        else:
            yield self.all_flags, {"dest": self.name, "action": "store_true", "help": help}


def as_typed(value: object) -> object:
    """What was typed: the field reads and refuses it itself."""
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: the field that it sets, and how its text becomes the field's value."""

    owner: type[EngineConfig | SamplingParams]
    name: str
    panel: str
    help: str
    metavar: str = ""
    read: Callable[[Any], object] = as_typed
    """Takes the text, all texts where the option may be repeated, or what a switch was set to."""
    is_repeated: bool = False
    aliases: tuple[str, ...] = ()
    """Other spellings, understood and not shown."""
    tells_default: bool = True

    @property
    def default(self) -> object:
        """What the field is when nobody says anything."""
        return next(field.default for field in fields(self.owner) if field.name == self.name)

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def other_names(self) -> tuple[str, ...]:
        """Names of the same field that EngineConfig understands, and that it refuses beside the field's own."""
        return tuple(alias for alias, name in ALIASES.items() if name == self.name and self.owner is EngineConfig)

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Every spelling, the one that is shown first."""
        if self.is_switch:
            # Only the side that changes something is worth a line, so it comes first.
            on, off = flag(self.name), flag(f"no_{self.name}")
            return (off, on) if self.default else (on, off)
        return tuple(map(flag, (self.name, *self.aliases, *self.other_names)))

    @property
    def arguments(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """What argparse is told: one row of the help page, and spellings without one. What is not given leaves no trace."""
        help = help_words(self.help, self.default if self.tells_default else None)
        row: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": help}
        if self.is_switch:
            change, keep = ("store_false", "store_true") if self.default else ("store_true", "store_false")
            yield self.all_flags[:1], row | {"action": change, "help": help_words(self.help, None)}
            yield self.all_flags[1:], row | {"action": keep, "help": argparse.SUPPRESS}
            return
        row |= {"metavar": self.metavar, "action": "append" if self.is_repeated else "store"}
        yield (flag(self.name),), row
        for name in (*self.aliases, *self.other_names):
            dest = self.name if name in self.aliases else name
            yield (flag(name),), row | {"dest": dest, "help": argparse.SUPPRESS}


def flag(name: str) -> str:
    """A field's name as it is typed."""
    return f"--{name.replace('_', '-')}"


def _engine(name: str, panel: str, help: str, metavar: str = "", read: Callable[[Any], object] = as_typed) -> Setting:
    return Setting(EngineConfig, name, panel, help, metavar, read)


def _sampling(name: str, help: str, metavar: str = "", read: Callable[[Any], object] = as_typed) -> Setting:
    return Setting(SamplingParams, name, SAMPLING, help, metavar, read)


def _format_words() -> str:
    """Every format; of quantized ones the bits of keys and values, or of latents."""
    heads = (
        f"{kv_format.name} ({kv_format.key_bits}-bit keys, {kv_format.value_bits}-bit values)"
        if kv_format.is_quantized
        else kv_format.name
        for kv_format in KV_FORMATS.values()
    )
    latents = (
        f"{kv_format.name} ({kv_format.key_bits}-bit latents, {8 * DTYPE_BYTES[kv_format.rope_dtype or '']}-bit rope)"
        for kv_format in MLA_FORMATS.values()
    )
    return f"{', '.join(heads)}; for latents (MLA) {', '.join(latents)}"


def _scheme_words() -> str:
    """Every scheme, with what its scales are for."""
    told = {
        "fp8": "8 bits, a scale a row; activations in fp8 too",
        "fp8_tensor": "a scale a tensor",
        "fp8_block": "a scale for 128 x 128",
        "int8": "8 bits, a scale a row; weights alone",
        "mxfp4": "4 bits, a scale for 32; weights alone",
    }
    return ", ".join((UNQUANTIZED, *(f"{name} ({told[name]})" for name in WEIGHT_SCHEMES)))


def _default_words() -> str:
    """How many layers each format protects."""
    counts = [f"{count} for {name}" for name, count in DEFAULT_PROTECTED_LAYERS.items() if count]
    return ", ".join((*counts, "else 0" if counts else "0"))


ENGINE_SETTINGS = (
    _engine(
        "dtype",
        MODEL,
        f"Type of weights and activations: {', '.join(DTYPES)}; fp16 and the like are understood.",
        "NAME",
    ),
    _engine("device", MODEL, "Where the model runs: auto, cpu, cuda or cuda:N.", "NAME"),
    _engine("revision", MODEL, "Branch, tag or commit of a model of the Hub. Left out: main.", "NAME"),
    _engine("tokenizer", MODEL, "Folder, GGUF file or owner/name of another tokenizer than the model's own.", "PATH"),
    _engine("chat_template", MODEL, "Jinja file, or the template itself, in place of the model's own.", "PATH"),
    _engine("load_format", MODEL, f"{', '.join(LOAD_FORMATS)} (from config.json alone).", "NAME"),
    _engine(
        "quantization",
        MODEL,
        f"Weights in fewer bits, made while they load: {_scheme_words()}. Leave it out for a model that is quantized "
        "already: it loads as it is stored, and only its own scheme may be named, for what its makers left plain.",
        "NAME",
    ),
    _engine(
        "quantized_embeddings",
        MODEL,
        "What of the vocabulary is quantized too: head (also where it is the embedding), all (head and embedding), none; "
        "auto is head, and all where a GGUF file has its embedding quantized already. They are int8 with a scale a row, beside any scheme; those that are stored quantized stay so.",
        "NAME",
    ),
    Setting(
        EngineConfig,
        "quantization_ignore",
        MODEL,
        "Weights that stay as they are: names with * in them, commas between, such as '*down_proj*'; "
        "'re:' begins a regular expression. Not for weights that are stored quantized. May be repeated.",
        "PATTERNS",
        read_patterns,
        is_repeated=True,
    ),
    _engine(
        "weight_cache",
        MODEL,
        "Quantized weights of earlier starts: auto (read and written where weights are quantized), on (an error where "
        "that cannot be done), off.",
        "NAME",
    ),
    _engine(
        "save_quantized",
        MODEL,
        "Folder that gets the model with its quantized weights; it opens later like any model, without options of "
        "quantization.",
        "PATH",
    ),
    _engine("allow_nonfinite", MODEL, "Go on where weights hold a NaN or an infinity."),
    _engine("batch_invariant", MODEL, "Refuse to start unless logits are the same, to the bit, in any company."),
    _engine(
        "speculative",
        MODEL,
        "Guess tokens ahead, check them in one step: ngram:4 copies up to 4 from where the last tokens stood before. Same "
        "answers; faster where a text repeats its input.",
        "METHOD",
    ),
    _engine("enforce_eager", MODEL, "Never capture graphs."),
    _engine(
        "max_model_len",
        MEMORY,
        "Longest prompt and answer together: 8192, 8K (8192), 8k (8000), 1M. Left out: the model's own, or what fits.",
        "TOKENS",
        read_count,
    ),
    _engine(
        "memory_limit",
        MEMORY,
        "All that the engine may take, such as 20GiB; on a CPU with what Python and torch hold.",
        "SIZE",
    ),
    _engine(
        "memory_utilization",
        MEMORY,
        "Share of the device's memory that the engine may take: 0.9 or 90%.",
        "SHARE",
        read_share,
    ),
    _engine("kv_cache_memory", MEMORY, "Bytes for KV pages alone, such as 4GiB.", "SIZE"),
    _engine("kv_cache_dtype", MEMORY, f"Format of KV pages: auto (the dtype), {_format_words()}.", "NAME"),
    _engine(
        "kv_protected_layers",
        MEMORY,
        "Layers whose KV pages stay in a wider format: how many (4: those with the largest key biases, else the first "
        f"and the last), or which (0,1,30,31). Left out: {_default_words()}.",
        "LAYERS",
        read_count,
    ),
    _engine(
        "index_cache_dtype",
        MEMORY,
        f"How the index that chooses tokens is kept (DeepSeek-V3.2, GLM-5, DeepSeek-V4): {', '.join(INDEX_FORMATS)}; auto is fp8 beside quantized latents, else as they are.",
        "NAME",
    ),
    _engine("kv_protected_dtype", MEMORY, "That wider format: any of the same names; auto is the dtype.", "NAME"),
    _engine(
        "page_tokens",
        MEMORY,
        "Tokens in a KV page: a power of two from 1 to 256. Left out: 64 for quantized formats and latents, else 16.",
        "TOKENS",
        read_count,
    ),
    _engine("enable_prefix_caching", MEMORY, "Compute every prompt anew, even where another one began alike."),
    _engine("max_num_seqs", MEMORY, "Most sequences in one step.", "N", read_count),
    _engine(
        "max_num_batched_tokens", MEMORY, "Most tokens in one step; longer prompts run in chunks.", "N", read_count
    ),
    _engine(
        "max_step_stretch",
        MEMORY,
        "Cut prompts while others are answered, so that a step takes at most N times a decode step: above 1, 0 (never cut) or auto "
        "(3 on a CPU, 1.7 on a GPU). Left out: auto in serve, else 0.",
        "N",
        read_number,
    ),
    _engine("max_queue", MEMORY, "Most sequences that may wait.", "N", read_count),
    _engine(
        "scheduling_policy",
        MEMORY,
        "Order of requests: priority (lowest number first, equals by arrival), or fcfs (by arrival; priorities are refused).",
        "POLICY",
    ),
    _engine("tensor_parallel_size", MODEL, "GPUs that share every layer.", "N", read_count),
    _engine("pipeline_parallel_size", MODEL, "Stages of layers, each on GPUs of its own.", "N", read_count),
    _engine("nnodes", MODEL, "Nodes that these GPUs are on; torchrun starts the ranks there.", "N", read_count),
    _engine("enable_expert_parallel", MODEL, "These GPUs hold whole experts, not slices of each."),
    _engine(
        "tensor_parallel_sums",
        MODEL,
        "How they share output projections: reduce is fastest; with exact answers do not depend on their number.",
        "WAY",
    ),
    _engine("core_process", MODEL, "Run the model in a process of its own; tokenizer and templates stay in this one."),
    _engine("core_timeout", MODEL, "Silence after which that process counts as dead.", "SECONDS", read_number),
    _engine("seed", SAMPLING, "Where random choices start; the same command gives the same answer.", "N", read_count),
)
"""Every field of EngineConfig but the model, which is an argument."""


def _among(*names: str) -> tuple[Setting, ...]:
    """Some settings of an engine, in the order of all."""
    return tuple(setting for setting in ENGINE_SETTINGS if setting.name in names)


PLAN_SETTINGS = _among(
    *(
        "revision",
        "dtype",
        "quantization",
        "quantized_embeddings",
        "quantization_ignore",
        "speculative",
        "enforce_eager",
        "kv_cache_memory",
        "kv_cache_dtype",
    ),
    *("kv_protected_layers", "kv_protected_dtype", "max_model_len", "memory_utilization", "page_tokens"),
    *("index_cache_dtype", "max_num_seqs", "max_num_batched_tokens"),
    *("pipeline_parallel_size", "nnodes", "enable_expert_parallel", "tensor_parallel_sums", "batch_invariant"),
)
"""Those that change how much memory is needed; how many GPUs share a layer a plan asks for by itself, since a GPU may say it too."""

EVAL_SETTINGS = _among(
    *(
        "revision",
        "dtype",
        "device",
        "tokenizer",
        "load_format",
        "quantization",
        "quantized_embeddings",
        "quantization_ignore",
    ),
    *("allow_nonfinite", "kv_protected_layers", "kv_protected_dtype", "memory_limit", "memory_utilization"),
    *("index_cache_dtype", "page_tokens", "max_num_batched_tokens"),
)
"""Those that mean something where one text is read over pages of several formats, and nothing is generated."""

WEIGHT_EVAL_SETTINGS = _among(
    *(
        "revision",
        "dtype",
        "device",
        "tokenizer",
        "load_format",
        "quantized_embeddings",
        "quantization_ignore",
        "allow_nonfinite",
    ),
    *("kv_cache_dtype", "memory_limit", "memory_utilization", "page_tokens", "max_num_batched_tokens"),
)
"""The same where weights are in several schemes, one after the other."""

SAMPLING_SETTINGS = (
    Setting(
        SamplingParams,
        "temperature",
        SAMPLING,
        "0 takes the most likely token, more is bolder. Left out: what the model's makers advise; else 0, "
        "or 1 beside --top-p, --top-k, --min-p or --n.",
        "NUMBER",
        read_number,
        aliases=("temp",),
        tells_default=False,
    ),
    _sampling(
        "max_tokens",
        "Most tokens to generate; what is beyond the context is cut. Left out: 512 in run, 1024 in chat (from Python: "
        "as many as the context has room for).",
        "TOKENS",
        read_count,
    ),
    _sampling("top_p", "Keep the smallest set of tokens whose probability reaches this.", "SHARE", read_number),
    _sampling("top_k", "Keep the k most likely tokens; 0 keeps all.", "N", read_count),
    _sampling("min_p", "Drop tokens less likely than this share of the most likely one.", "SHARE", read_number),
    _sampling("repetition_penalty", "Above 1: tokens seen before become less likely.", "NUMBER", read_number),
    _sampling("presence_penalty", "Taken off the logit of tokens in the answer.", "NUMBER", read_number),
    _sampling("frequency_penalty", "The same for each time that they are in it.", "NUMBER", read_number),
    Setting(SamplingParams, "stop", SAMPLING, "End before this text; may be repeated.", "TEXT", list, is_repeated=True),
    Setting(SamplingParams, "stop_token_ids", SAMPLING, "End at these tokens.", "IDS", read_integers, is_repeated=True),
    Setting(
        SamplingParams, "logit_bias", SAMPLING, "Add to a token's logit.", "ID=NUMBER", read_biases, is_repeated=True
    ),
    Setting(
        SamplingParams,
        "bad_words",
        SAMPLING,
        "Never generate this text; may be repeated.",
        "TEXT",
        list,
        is_repeated=True,
    ),
    Setting(
        SamplingParams,
        "allowed_token_ids",
        SAMPLING,
        "Generate these tokens alone.",
        "IDS",
        read_integers,
        is_repeated=True,
    ),
    _sampling(
        "truncate_prompt_tokens",
        "Keep only so many of the prompt's last tokens; -1: what fits.",
        "TOKENS",
        read_count,
    ),
    _sampling(
        "structured_outputs",
        'The form of the answer: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT, ...]}, {"grammar": TEXT} or '
        '{"json_object": true}; @FILE reads it from a file (docs/structured_outputs.md).',
        "JSON",
        read_form,
    ),
    _sampling("skip_reading_prefix_cache", "Compute the whole prompt, even where another one began alike."),
    _sampling("min_tokens", "Before this many tokens nothing ends the answer.", "TOKENS", read_count),
    _sampling("ignore_eos", "Go on past the model's own end tokens."),
    _sampling("skip_special_tokens", "Keep control tokens in the text."),
    _sampling("include_stop_str_in_output", "Keep the stop text that ended the answer."),
)
"""The fields of SamplingParams that fit every command; a request's own seed is left to the engine's, text is shown, nobody is ahead."""

SEVERAL_SETTINGS = (
    Setting(SamplingParams, "n", SAMPLING, "How many answers to the same prompt.", "N", read_count),
    Setting(SamplingParams, "logprobs", OUTPUT, "With --json: how many of the most likely tokens.", "N", read_count),
    Setting(SamplingParams, "prompt_logprobs", OUTPUT, "The same for the prompt's tokens.", "N", read_count),
)
"""The other fields of SamplingParams, for a command that answers once."""

Given = dict[str, Any]
"""Options that were given, by the name of the field or by another spelling that EngineConfig knows."""


def given(settings: Iterable[Setting], values: Mapping[str, Any]) -> Given:
    """Of what was typed, the values of these settings; one that leaves its choice open counts as not given."""
    found: Given = {}
    for setting in settings:
        for name in (setting.name, *setting.other_names):
            read = setting.read(values[name]) if name in values else None
            if read is not None:
                found[name] = read
    return found


def help_words(help: str, default: object) -> str:
    """A help text with the default behind it, as argparse takes it."""
    words = help if default is None or default == () else f"{help} Default: {default}."
    return words.replace("%", "%%")
