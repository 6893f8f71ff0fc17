"""The options of every command: a row for each setting of an engine and of a request, with the setting's own default; no torch."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from holdfast.cli.values import read_biases, read_count, read_integers, read_number, read_patterns, read_share
from holdfast.config import ALIASES, DTYPES, LOAD_FORMATS, EngineConfig
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS
from holdfast.quant.weight_schemes import UNQUANTIZED, WEIGHT_SCHEMES
from holdfast.request.sampling_params import SamplingParams

MODEL, MEMORY, SAMPLING, OUTPUT, BENCHMARK = "Model", "Memory", "Sampling", "Output", "Benchmark"
"""Panels of a help page."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: the field that it sets, and how its text becomes the field's value."""

    owner: type[EngineConfig | SamplingParams]
    name: str
    panel: str
    help: str
    metavar: str = ""
    read: Callable[[Any], object] = str
    """Takes the text, or all texts where the option may be repeated; unused for a switch."""
    is_repeated: bool = False
    short: str | None = None
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
    def spellings(self) -> tuple[str, ...]:
        """Every name under which it may be given, its own first."""
        known = [alias for alias, name in ALIASES.items() if name == self.name and self.owner is EngineConfig]
        return (self.name, *self.aliases, *known)


def _engine(name: str, panel: str, help: str, metavar: str = "", read: Callable[[Any], object] = str) -> Setting:
    return Setting(EngineConfig, name, panel, help, metavar, read)


def _sampling(name: str, help: str, metavar: str = "", read: Callable[[Any], object] = str) -> Setting:
    return Setting(SamplingParams, name, SAMPLING, help, metavar, read)


def _format_words() -> str:
    """Every format; of coded ones the bits of keys and values."""
    return ", ".join(
        f"{kv_format.name} ({kv_format.key_bits}-bit keys, {kv_format.value_bits}-bit values)"
        if kv_format.is_coded
        else kv_format.name
        for kv_format in KV_FORMATS.values()
    )


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
    _engine("dtype", MODEL, f"Type of weights and activations: {', '.join(DTYPES)}.", "NAME"),
    _engine("device", MODEL, "Where the model runs: auto, cpu, cuda or cuda:N.", "NAME"),
    _engine("tokenizer", MODEL, "Folder or GGUF file of another tokenizer than the model's own.", "PATH"),
    _engine("chat_template", MODEL, "Jinja file, or the template itself, in place of the model's own.", "PATH"),
    _engine("load_format", MODEL, f"{', '.join(LOAD_FORMATS)} (made-up weights).", "NAME"),
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
        "What of the vocabulary is quantized too: head (also where it is the embedding), all (head and embedding), none. "
        "They are int8 with a scale a row, beside any scheme; those that are stored quantized stay so.",
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
    _engine("enforce_eager", MODEL, "Never capture graphs."),
    _engine(
        "max_model_len",
        MEMORY,
        "Longest prompt and answer together: 8192, 8K (8192), 8k (8000), 1M. Left out: the model's own, or what fits.",
        "TOKENS",
        read_count,
    ),
    _engine("memory_limit", MEMORY, "All that the engine may take, such as 20GiB.", "SIZE"),
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
    _engine("kv_protected_dtype", MEMORY, "That wider format: any of the same names; auto is the dtype.", "NAME"),
    _engine(
        "page_tokens",
        MEMORY,
        "Tokens in a KV page: a power of two from 1 to 256. Left out: 64 for coded formats, else 16.",
        "TOKENS",
        read_count,
    ),
    _engine("enable_prefix_caching", MEMORY, "Compute every prompt anew, even where another one began alike."),
    _engine("max_num_seqs", MEMORY, "Most sequences in one step.", "N", read_count),
    _engine(
        "max_num_batched_tokens", MEMORY, "Most tokens in one step; longer prompts run in chunks.", "N", read_count
    ),
    _engine("max_queue", MEMORY, "Most sequences that may wait.", "N", read_count),
    _engine("seed", SAMPLING, "Where random choices start; the same command gives the same answer.", "N", read_count),
)
"""Every field of EngineConfig but the model, which is an argument."""

PLAN_SETTINGS = tuple(
    setting
    for setting in ENGINE_SETTINGS
    if setting.name
    in (
        "dtype",
        "quantization",
        "quantized_embeddings",
        "quantization_ignore",
        "enforce_eager",
        "kv_cache_dtype",
        "kv_protected_layers",
        "kv_protected_dtype",
        "max_model_len",
        "memory_utilization",
        "page_tokens",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
)
"""Those that change how much memory is needed."""

EVAL_SETTINGS = tuple(
    setting
    for setting in ENGINE_SETTINGS
    if setting.name
    in (
        "dtype",
        "device",
        "tokenizer",
        "load_format",
        "quantization",
        "quantized_embeddings",
        "quantization_ignore",
        "allow_nonfinite",
        "kv_protected_layers",
        "kv_protected_dtype",
        "memory_limit",
        "memory_utilization",
        "page_tokens",
        "max_num_batched_tokens",
    )
)
"""Those that mean something where one text is read over pages of several formats, and nothing is generated."""

WEIGHT_EVAL_SETTINGS = tuple(
    setting
    for setting in ENGINE_SETTINGS
    if setting.name
    in (
        "dtype",
        "device",
        "tokenizer",
        "load_format",
        "quantized_embeddings",
        "quantization_ignore",
        "allow_nonfinite",
        "kv_cache_dtype",
        "memory_limit",
        "memory_utilization",
        "page_tokens",
        "max_num_batched_tokens",
    )
)
"""The same where weights are in several schemes, one after the other."""

SAMPLING_SETTINGS = (
    Setting(
        SamplingParams,
        "temperature",
        SAMPLING,
        "0 takes the likeliest token, more is bolder. Left out: what the model's makers advise; else 0, "
        "or 1 beside --top-p, --top-k, --min-p or -n.",
        "NUMBER",
        read_number,
        aliases=("temp",),
        tells_default=False,
    ),
    _sampling("max_tokens", "Most tokens to generate, within the context.", "TOKENS", read_count),
    _sampling("top_p", "Keep the smallest set of tokens whose probability reaches this.", "SHARE", read_number),
    _sampling("top_k", "Keep the k likeliest tokens; 0 keeps all.", "N", read_count),
    _sampling("min_p", "Drop tokens less likely than this share of the likeliest.", "SHARE", read_number),
    _sampling("repetition_penalty", "Above 1: tokens seen before become less likely.", "NUMBER", read_number),
    _sampling("presence_penalty", "Taken off the logit of tokens in the answer.", "NUMBER", read_number),
    _sampling("frequency_penalty", "The same for each time that they are in it.", "NUMBER", read_number),
    Setting(SamplingParams, "stop", SAMPLING, "End before this text; may be repeated.", "TEXT", list, is_repeated=True),
    Setting(SamplingParams, "stop_token_ids", SAMPLING, "End at these tokens.", "IDS", read_integers, is_repeated=True),
    Setting(
        SamplingParams, "logit_bias", SAMPLING, "Add to a token's logit.", "ID=NUMBER", read_biases, is_repeated=True
    ),
    _sampling("min_tokens", "Before this many tokens nothing ends the answer.", "TOKENS", read_count),
    _sampling("ignore_eos", "Go on past the model's own end tokens."),
    _sampling("skip_special_tokens", "Keep control tokens in the text."),
    _sampling("include_stop_str_in_output", "Keep the stop text that ended the answer."),
)
"""The fields of SamplingParams that fit every command; a request's own seed is left to the engine's."""

SEVERAL_SETTINGS = (
    Setting(SamplingParams, "n", SAMPLING, "How many answers to the same prompt.", "N", read_count, short="-n"),
    Setting(SamplingParams, "logprobs", OUTPUT, "With --json: how many likeliest tokens.", "N", read_count),
    Setting(SamplingParams, "prompt_logprobs", OUTPUT, "The same for the prompt's tokens.", "N", read_count),
)
"""The other fields of SamplingParams, for a command that answers once."""

Given = dict[str, Any]
"""Options that were given, by the name of the field or by another spelling that EngineConfig knows."""


def takes(**groups: tuple[Setting, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each group; its parameter of the group's name gets those that were given."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = [item for item in inspect.signature(body).parameters.values() if item.name not in groups]
        options = [option for settings in groups.values() for setting in settings for option in _options(setting)]

        @functools.wraps(body)
        def command(**values: object) -> None:
            for group, settings in groups.items():
                values[group] = _given(settings, values)
            body(**values)

        parameters = [*(item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own), *options]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        del command.__wrapped__
        return command

    return decorate


def _options(setting: Setting) -> Iterator[inspect.Parameter]:
    """What typer shows, and after it what it only understands."""
    default = setting.default
    if setting.is_switch:
        # Only the side that changes something is worth a line.
        for name, is_default in ((setting.name, default is True), (f"no_{setting.name}", default is False)):
            yield _parameter(setting, name, bool | None, setting.help, is_hidden=is_default)
        return
    tells = setting.tells_default and default not in (None, ())
    help = f"{setting.help} Default: {default}." if tells else setting.help
    for name in setting.spellings:
        kind = list[str] | None if setting.is_repeated else str | None
        yield _parameter(setting, name, kind, help, is_hidden=name != setting.name)


def _parameter(setting: Setting, name: str, kind: object, help: str, is_hidden: bool) -> inspect.Parameter:
    flags = [f"--{name.replace('_', '-')}"]
    if setting.short is not None and not is_hidden:
        flags.append(setting.short)
    option = typer.Option(
        *flags,
        help=help,
        metavar=setting.metavar,
        rich_help_panel=setting.panel,
        hidden=is_hidden,
        show_default=False,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],  # type: ignore[valid-type]
    )


def _given(settings: tuple[Setting, ...], values: dict[str, Any]) -> Given:
    given: Given = {}
    for setting in settings:
        if setting.is_switch:
            on, off = values.pop(setting.name), values.pop(f"no_{setting.name}")
            if on or off:
                given[setting.name] = not off
            continue
        for name in setting.spellings:
            value = values.pop(name)
            read = None if value is None or value == [] else setting.read(value)
            if read is not None:
                given[setting.name if name in setting.aliases else name] = read
    return given
