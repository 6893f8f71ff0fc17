"""Flags that users of vLLM, llama.cpp and Ollama type: put as ours, taken without effect, or answered; no torch.

The flags of a command come first: a row here never changes what one of them means. A row that stands for a flag of ours counts
in commands that have it. Help pages and completion leave these spellings out; docs/from_vllm.md lists them.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.cli.options import ARGUMENTS, Option, Setting, flag
from holdfast.cli.terminal import write_line
from holdfast.errors import ConfigError, shown
from holdfast.request.vllm_flags import SHORT_FLAGS, find_flag, read_value
from holdfast.request.vllm_names import ENGINE_NAMES, NOT_HERE, SERVER_NAMES

MODEL = "MODEL"
"""Stands for the argument of a command, where others have a flag."""
ALL_LAYERS = 99
"""So many layers of -ngl, or more, are all of them."""
LONGEST = str(2**31 - 1)
"""As max_tokens: what is beyond the context is cut."""
_SWITCH_WORDS = ("true", "false", "on", "off", "auto", "1", "0")
Act = Callable[[str, str], Sequence[str] | None]
"""From the flag and its value to our arguments; None: it has no effect."""


@dataclass(frozen=True, slots=True)
class Habit:
    """A flag of another program."""

    flags: str
    """Every spelling."""
    own: str = ""
    """Our flag that means the same; MODEL is the argument. Empty: there is none."""
    words: str = ""
    """Why it has no effect here; or, if it is declined, what to do."""
    act: Act | None = None
    """In place of the same value for our flag."""
    values: str = "1"
    """How many follow: 0, 1, or ? for one that may be left out."""
    is_declined: bool = False
    only: str = ""
    """Commands that it is for; empty: all of an engine."""


def _decline(do: str, flags: str, values: str = "1", only: str = "") -> Habit:
    return Habit(flags, words=do, values=values, is_declined=True, only=only)


def _quiet(why: str, flags: str, values: str = "0", only: str = "") -> Habit:
    return Habit(flags, words=why, values=values, only=only)


def _unless(quiet: Sequence[str], own: str) -> Act:
    """The value for our flag; some ask for what is the default here."""
    return lambda typed, value: None if value in quiet else (f"{own}={value}",)


def _gpu_layers(typed: str, value: str) -> Sequence[str] | None:
    count = read_value(value)
    if value in ("all", "auto", "-1") or (isinstance(count, int) and count >= ALL_LAYERS):
        return None
    if count == 0:
        return ("--device=cpu",)
    raise ConfigError(
        f"option {typed} {shown(value)[1:-1]} was asked",
        "a model runs on one device here, and no layers are left to the CPU",
        f"write {typed} {ALL_LAYERS} (all) or {typed} 0 (CPU); holdfast plan MODEL tells what fits",
    )


def _num_predict(typed: str, value: str) -> Sequence[str]:
    return (f"--max-tokens={LONGEST if value in ('-1', '-2') else value}",)


def _cache_type(typed: str, value: str) -> Sequence[str] | None:
    if value in ("f32", "f16", "bf16"):
        return None
    do = "use --kv-cache-dtype for keys and values: fp8, turboquant_4bit_nc and others"
    raise ConfigError(f"option {typed} {shown(value)[1:-1]} was asked", NOT_HERE, do)


def _form(name: str) -> Act:
    return lambda typed, value: (f"--structured-outputs={json.dumps({name: value})}",)


def _format(typed: str, value: str) -> Sequence[str]:
    form: dict[str, object] = {"json_object": True} if value == "json" else {"json": read_value(value)}
    return (f"--structured-outputs={json.dumps(form)}",)


def _origins(typed: str, value: str) -> Sequence[str]:
    read = read_value(value)
    return [f"--allow-origin={origin}" for origin in (read if isinstance(read, list) else [value])]


def _rate(typed: str, value: str) -> Sequence[str] | None:
    return None if value == "inf" else (f"--rate={value}",)


_REQUEST = "it belongs to each request: a client sends it"
_SAMPLERS = "temperature, top-k, top-p, min-p and penalties are the samplers here"
_TLS = "put a reverse proxy with TLS in front"
_DATASET = "use --dataset FILE with prompts of your own, or random prompts of --input-len"
_SHARE = "use --tensor-parallel-size N"

HABITS: tuple[Habit, ...] = (
    # vllm bench
    Habit("--base-url", "--url"),
    Habit("--num-prompts", "--requests"),
    Habit("--max-concurrency", "--clients"),
    Habit("--request-rate", "--rate", act=_rate, words="requests come as clients have time"),
    Habit("--random-input-len", "--input-len"),
    Habit("--random-output-len", "--output-len"),
    Habit("--batch-size", "--batch"),
    Habit("--num-iters", "--repeats"),
    Habit("--num-iters-warmup", words="one run warms up", only="bench"),
    Habit(
        "--dataset-name",
        act=lambda typed, value: None,
        words="prompts are random unless --dataset names a file",
        only="bench",
    ),
    Habit("--backend --endpoint-type", words="an engine, and OpenAI's API, are what is measured", only="bench"),
    _decline(_DATASET, "--dataset-path", only="bench"),
    # the model
    Habit("-m", MODEL),
    Habit("-hf -hfr --hf-repo", MODEL),
    _decline("name it in MODEL: owner/name:Q4_K_M", "-hff --hf-file"),
    _decline("download the file and name it", "-mu --model-url"),
    # vllm serve
    Habit("--tool-call-parser", "--tool-parser"),
    Habit("--allowed-origins", "--allow-origin", act=_origins),
    Habit("-q", "--quantization", only="serve"),
    # llama.cpp: the engine
    Habit(
        "-c --ctx-size",
        "--max-model-len",
        act=_unless(("0",), "--max-model-len"),
        words="the model's own context is the default",
    ),
    Habit("-np --parallel", "--max-num-seqs", act=_unless(("-1",), "--max-num-seqs"), words="the plan says how many"),
    Habit("-b --batch-size", "--max-num-batched-tokens"),
    _quiet("--max-num-batched-tokens alone bounds a step", "-ub --ubatch-size", "1"),
    Habit("-ngl --gpu-layers --n-gpu-layers", "--device", act=_gpu_layers, words="every layer runs on the device"),
    _quiet("every layer runs on the device", "-ngl --gpu-layers --n-gpu-layers", "1", "plan"),
    Habit("-t --threads", "--threads"),
    _decline("set OMP_NUM_THREADS=N before the command", "-t --threads -tb --threads-batch"),
    _quiet("attention never stores its scores", "-fa --flash-attn", "?"),
    _quiet("weights are read once and held", "--mlock --mmap --no-mmap"),
    _quiet("kernels are warm before the first request", "--warmup --no-warmup"),
    _quiet("requests share steps always", "-cb --cont-batching -nocb --no-cont-batching"),
    _quiet("chat templates are Jinja already", "--jinja"),
    _quiet("HOLDFAST_LOG_LEVEL=INFO shows more", "-v --verbose --verbosity --log-disable --perf --no-perf --color"),
    Habit(
        "-ctk --cache-type-k -ctv --cache-type-v",
        "--kv-cache-dtype",
        act=_cache_type,
        words="keys and values have the dtype",
    ),
    Habit("--chat-template-file", "--chat-template"),
    _decline(_SHARE, "-sm --split-mode -ts --tensor-split -mg --main-gpu"),
    _decline(ENGINE_NAMES["enable_lora"].words, "--lora --lora-scaled"),
    _decline(ENGINE_NAMES["rope_theta"].words, "--rope-freq-base --rope-freq-scale --rope-scale"),
    _decline("use --speculative ngram:4", "-md --model-draft --draft --draft-max --draft-min"),
    _decline("only text is read here", "-mm --mmproj --image --audio"),
    # llama.cpp and Ollama: sampling and prompts
    Habit("-n --predict --n-predict --num-predict", "--max-tokens", act=_num_predict),
    Habit("--repeat-penalty", "--repetition-penalty"),
    Habit("-r --reverse-prompt", "--stop"),
    Habit("-sys --system-prompt", "--system"),
    Habit("--grammar", "--structured-outputs", act=_form("grammar")),
    Habit("-j --json-schema", "--structured-outputs", act=_form("json")),
    Habit("--format", "--structured-outputs", act=_format),
    _decline(
        _SAMPLERS,
        "--typical --mirostat --xtc-probability --dry-multiplier --dynatemp-range --samplers",
        only="run chat",
    ),
    _decline("penalties look at the whole text: leave it out", "--repeat-last-n", only="run chat"),
    Habit("-no-cnv --no-conversation", "--raw", act=lambda typed, value: ("--raw",), values="0"),
    _quiet("a chat is what this is", "-cnv --conversation -i --interactive", only="chat"),
    _decline("use holdfast chat", "-cnv --conversation -i --interactive", "0", "run"),
    _decline("use holdfast run -p TEXT, or --system TEXT", "-p --prompt", only="chat"),
    _decline("pipe it in: holdfast run MODEL < FILE", "-f --file", only="run chat"),
    _quiet("the prompt is not repeated", "--no-display-prompt -st --single-turn --nowordwrap", only="run chat"),
    _quiet("\\n in a prompt stays as typed; bash writes a line's end as $'a\\nb'", "-e --escape", only="run chat"),
    _quiet("a command holds its model until it ends", "--keepalive", "1"),
    # llama-server
    Habit("-a --alias", "--served-model-name"),
    _quiet("they are served always", "--metrics --slots --props --webui", only="serve"),
    _decline(
        _REQUEST, "-n --predict --n-predict --temp --temperature --top-k --top-p --min-p --repeat-penalty", only="serve"
    ),
    _decline(_TLS, "--ssl-key-file --ssl-cert-file", only="serve"),
)
"""The first row of a flag that fits a command counts."""

SEVERAL_VALUES = frozenset(
    (
        "cudagraph_capture_sizes",
        "lora_modules",
        "logits_processors",
        "allowed_media_domains",
        "ignore_patterns",
        "middleware",
    )
)
"""Options of vLLM that take all values up to the next flag."""


class _Quiet(NamedTuple):
    """A flag that was taken without effect."""

    typed: str
    why: str


class Typed:
    """A command line, read from left to right."""

    def __init__(self, path: Sequence[str], rows: Sequence[Option | Setting], arguments: Sequence[str]) -> None:
        self._path = path
        options = [row for row in rows if row.panel != ARGUMENTS]
        self._takes_value = {flag: bool(row.metavar) for row in options for flag in row.all_flags}
        self._places = {flag: row.name for row in rows if row.panel == ARGUMENTS for flag in row.all_flags}
        self._has_engine = any(isinstance(row, Setting) for row in rows)
        self._habits = self._those_that_fit()
        self._foreign = {**ENGINE_NAMES, **(SERVER_NAMES if path[0] == "serve" else {})} if self._has_engine else {}
        self._waiting = deque(arguments)
        self._left: list[str] = []
        self._models: list[str] = []
        self._words: list[str] = []
        self._quiet: list[_Quiet] = []

    def as_ours(self) -> list[str]:
        """The command line in flags of ours; one line names what has no effect."""
        while self._waiting:
            typed = self._waiting.popleft()
            if typed.startswith("-") and typed != "-":
                self._take_flag(typed)
            else:
                self._words.append(typed)
        if self._quiet:
            write_line(f"note: taken without effect here: {_listed(self._quiet)}")
        return [*self._left, *self._arguments()]

    def _those_that_fit(self) -> dict[str, Habit]:
        found: dict[str, Habit] = {}
        for habit in HABITS:
            if habit.own == MODEL:
                fits = bool(self._places)
            elif habit.own:
                fits = habit.own in self._takes_value
            else:
                fits = self._has_engine or bool(habit.only)
            if fits and (not habit.only or self._path[0] in habit.only.split()):
                for spelling in habit.flags.split():
                    found.setdefault(spelling, habit)
        return found

    def _take_flag(self, typed: str) -> None:
        name, equals, value = typed.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        given = value if equals else None
        own = flag(SHORT_FLAGS[name]) if name in SHORT_FLAGS and name not in self._takes_value else name
        if own in self._takes_value:
            self._left.append(f"{own}{equals}{value}")
            if self._takes_value[own] and not equals and self._waiting and self._waiting[0] not in self._takes_value:
                self._left.append(self._waiting.popleft())
        elif name in self._places:
            self._models.append(self._value(name, given))
        elif name in self._habits:
            self._take_habit(self._habits[name], name, given)
        elif not self._take_foreign(name, given):
            self._left.append(typed)

    def _take_habit(self, habit: Habit, name: str, given: str | None) -> None:
        if habit.values == "1":
            value = self._value(name, given)
        elif habit.values == "?" and given is None and self._waiting and self._waiting[0] in _SWITCH_WORDS:
            value = self._waiting.popleft()
        else:
            value = given or ""
        shown_words = f"{name} {value}".rstrip()
        if habit.is_declined:
            raise ConfigError(f"option {shown(shown_words)[1:-1]} was asked", NOT_HERE, habit.words)
        if habit.own == MODEL:
            self._models.append(value)
            return
        ours = habit.act(name, value) if habit.act else (f"{habit.own}={value}",) if habit.own else None
        if ours is None:
            self._quiet.append(_Quiet(shown_words, habit.words))
        else:
            self._left.extend(ours)

    def _take_foreign(self, name: str, given: str | None) -> bool:
        """Take an option of vLLM that has no effect, or refuse it in words; False where vLLM has none of that name."""
        found = find_flag(name, self._foreign)
        if found is None:
            return False
        foreign, before = found.foreign, list(self._waiting)
        value = self._foreign_value(name, given, found.name, foreign.is_switch)
        if found.is_off:
            value = not value
        values = before[: len(before) - len(self._waiting)] if given is None else [given]
        typed = shown(" ".join((name, *values)))[1:-1]
        if not foreign.takes(value):
            raise ConfigError(f"option {typed} was asked", NOT_HERE, foreign.words)
        self._quiet.append(_Quiet(typed, "" if foreign.is_missing else foreign.words))
        return True

    def _foreign_value(self, name: str, given: str | None, option: str, is_switch: bool) -> object:
        if is_switch:
            follows = given is None and self._waiting and self._waiting[0].lower() in ("true", "false")
            text = self._waiting.popleft() if follows else given
            return True if text is None else read_value(text)
        if name.startswith("-O") and name[2:].isdecimal():
            return read_value(name[2:])
        if option in SEVERAL_VALUES and given is None:
            several = [self._value(name, None)]
            while self._waiting and not self._waiting[0].startswith("-"):
                several.append(self._waiting.popleft())
            return several
        value = read_value(self._value(name, given))
        return {name.partition(".")[2]: value} if "." in name else value

    def _value(self, name: str, given: str | None) -> str:
        if given is not None:
            return given
        if not self._waiting or self._waiting[0] in self._takes_value:
            raise ConfigError(
                f"option {name} was asked", "it requires an argument", f"run holdfast {' '.join(self._path)} --help"
            )
        return self._waiting.popleft()

    def _arguments(self) -> Iterator[str]:
        """The model, however it was named, and what stands behind it."""
        words = list(self._words)
        if len(self._models) > 1 or (self._models and words and self._path[0] != "run"):
            asked = (
                f"{MODEL} {shown(self._models[0])[1:-1]} and {shown((self._models[1:] + words)[0])[1:-1]} were asked"
            )
            raise ConfigError(asked, "a command takes one model", "name one of them")
        yield from self._models or words[:1]
        rest = words if self._models else words[1:]
        has_prompt = any(word.partition("=")[0] in ("-p", "--prompt") for word in self._left)
        if rest and self._path[0] == "run" and not has_prompt:
            yield f"--prompt={' '.join(rest)}"  # as behind ollama run
        else:
            yield from rest


def _listed(quiet: Sequence[_Quiet]) -> str:
    """Flags, those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for one in quiet:
        by_reason.setdefault(one.why, []).append(one.typed)
    return "; ".join(", ".join(flags) + (f" ({why})" if why else "") for why, flags in by_reason.items())


def as_ours(path: Sequence[str], rows: Sequence[Option | Setting], arguments: Sequence[str]) -> list[str]:
    """A command line in flags of ours, whichever program's flags it has."""
    return Typed(path, rows, arguments).as_ours()


_NO_LIST = "use holdfast doctor for models that are here, or holdfast plan --list for those known by name"
_NO_FETCH = "use holdfast run owner/name, which downloads what the cache lacks, or hf download owner/name"
COMMANDS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("server", "api-server", "llama-server"), "use holdfast serve [MODEL]"),
    **dict.fromkeys(("pull", "download"), _NO_FETCH),
    **dict.fromkeys(("list", "ls", "models"), _NO_LIST),
    **dict.fromkeys(
        ("rm", "remove"), "use hf cache delete for a model of the Hub, holdfast cache --clear for quantized weights"
    ),
    **dict.fromkeys(("show", "info"), "use holdfast plan MODEL: its memory, formats and speed before a start"),
    "stop": "press Ctrl-C where holdfast serve runs, or send its process SIGTERM: running requests finish",
    **dict.fromkeys(
        ("create", "cp", "push"),
        "name a folder, a GGUF file or owner/name: holdfast serve MODEL --served-model-name NAME",
    ),
    **dict.fromkeys(("cli", "llama-cli"), "use holdfast run, or holdfast chat"),
    **dict.fromkeys(("complete", "completion-text"), "use holdfast run --raw -p TEXT, which continues a bare text"),
    "generate": "use holdfast run -p TEXT",
    "run-batch": "use LLM.generate in a Python program: it takes a list of prompts as one batch",
    "collect-env": "use holdfast doctor",
}
"""Commands of other programs, and what to type here."""
