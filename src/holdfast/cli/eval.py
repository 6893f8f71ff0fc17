"""`holdfast eval`: the quality of KV formats and weight schemes, as a table, a record and a page; no torch."""

import datetime
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.api.opened import open_headers
from holdfast.api.progress import SECONDS_BETWEEN_UPDATES, Bar, LoadingBar, is_watched
from holdfast.cli.bench_record import make_record, record_file, write_record
from holdfast.cli.opened_model import BYTE_ORDER_MARK, import_torch, model_name, shown_download
from holdfast.cli.options import Given, read_count, read_counts, read_whole
from holdfast.cli.page import eval_page, page_file, write_page
from holdfast.cli.tables import WEIGHTS, EvalView, progress_line, quality_lines, show, show_beside
from holdfast.cli.terminal import INTERRUPTED, MAX_PATH, STDOUT, log_plainly, write_line
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, PromptError, did_you_mean, shown
from holdfast.eval.text_windows import MIN_WINDOW, beginning, cut_windows
from holdfast.loading.planning.open_model import OpenModel
from holdfast.quant.formats import ALL_KV_FORMATS
from holdfast.quant.weight_schemes import UNQUANTIZED, find_scheme

if TYPE_CHECKING:
    from holdfast.eval.kv_quality import Entry, Possible, Work
    from holdfast.eval.quality import Contender
    from holdfast.eval.weight_quality import SchemeEntry

NUM_LINES, NUM_KV_LINES = 10, 4
"""Lines of progress without a terminal."""
ALL, NONE = "all", "none"
MIN_DISTANCE, MAX_DISTANCES = 128, 8
"""Least tokens between a fact and its question, and most distances at once."""
MAX_ANSWER = 4096
FILLER_CHARS = 2**18
PROMPT_TOKENS = 448
"""Room for a task and an answer in JSON."""
MAX_TEXT_BYTES = 64 * 2**20
MAX_WINDOW = 2**24
TOPICS = "the topics of Python's help"
"""Name of the default text, which every installation has."""


class EvalBar(Bar):
    """`bar(done, total)` in tokens; without a terminal, `num_lines` lines. `name` is that of what is measured."""

    starts_at_once = True
    done = "read"

    def __init__(self, name: str = "", num_lines: int = NUM_LINES) -> None:
        self._started_at = self._shown_at = time.monotonic()
        self._num_reported, self._num_lines = 0, num_lines
        self._prefix = f"{name}: " if name else ""
        if not is_watched():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        speed = TextColumn("tokens, {task.fields[speed]:.0f} tokens/s, {task.fields[left]} left")
        title = TextColumn(f"Measuring {name}" if name else "Reading", markup=False)
        self.open((title, BarColumn(), MofNCompleteColumn(), speed), speed=0.0, left="-:--:--")

    def __call__(self, num_done: int, num_total: int) -> None:
        now = time.monotonic()
        speed = num_done / max(now - self._started_at, 1e-6)
        if self._progress is None:
            self._report(num_done, num_total, speed)
        elif now - self._shown_at >= SECONDS_BETWEEN_UPDATES or num_done == num_total:
            self._shown_at = now
            seconds = round(_seconds_left(num_done, num_total, speed))
            left = "-:--:--" if num_done == 0 else str(datetime.timedelta(seconds=seconds))
            self.update(completed=num_done, total=num_total, speed=speed, left=left)

    def _report(self, num_done: int, num_total: int, speed: float) -> None:
        part = num_done * self._num_lines // max(num_total, 1)
        if part > self._num_reported:
            self._num_reported = part
            left = _seconds_left(num_done, num_total, speed)
            write_line(
                f"{self._prefix}{self.done} {num_done:,} of {num_total:,} tokens, {speed:.0f} tokens/s, {left:.0f} s left"
            )


def _seconds_left(num_done: int, num_total: int, speed: float) -> float:
    """Estimate from the mean speed, because reading and comparing chunks alternate at different speeds."""
    return (num_total - num_done) / max(speed, 1e-6)


def quality_record(view: EvalView, command: Sequence[str], facts: Mapping[str, object]) -> dict[str, object]:
    """Describe a run on this machine, now; the first result is the reference."""
    settings = f"{view.settings}, {view.num_windows} windows of {view.window} tokens"
    own = {
        "section": view.subject.section,
        "text": view.text,
        "window": view.window,
        "num_windows": view.num_windows,
        "reference": view.qualities[0].name,
        f"plain_{view.subject.size_key}": view.plain_bytes,
        **({"missing": list(view.missing)} if view.missing else {}),
    }
    results = [_result(view, place) for place in range(len(view.qualities))]
    return make_record(view.model, settings, results, command, **own, **facts)


def _result(view: EvalView, place: int) -> dict[str, object]:
    quality = view.qualities[place]
    figures = asdict(quality)
    return {
        "measure": figures.pop("name"),
        "unit": "nats",
        "values": {"mean_kl": quality.mean_kl},
        view.subject.size_key: figures.pop("size_bytes"),
        **figures,
        **(asdict(view.behaviours[place]) if view.behaviours else {}),
        "ratio_to_16_bit": view.plain_bytes / quality.size_bytes,
        "perplexity_change": quality.perplexity / view.qualities[0].perplexity - 1,
    }


class EvalOptions(NamedTuple):
    """Options of both commands."""

    model: str | None
    text: str | None
    window: str
    tokens: str | None
    json_file: str | None
    html: str | None
    schemes: str | None = None
    files: str | None = None


class Size(NamedTuple):
    """How much `eval kv` measures, unless options say otherwise."""

    window: str
    tokens: str
    recall: str
    answer_tokens: str
    num_continuations: int
    num_objects: int
    """Tasks in JSON, and as many tool calls."""


FULL = Size("1024", "8K", "1K,2K,4K,8K", "64", 8, 6)
QUICK = Size("512", "1K", "512", "32", 4, 3)


class KvOptions(NamedTuple):
    """Options of `eval kv`; None is what the size says."""

    model: str | None
    text: str | None
    formats: str
    quick: bool
    window: str | None
    tokens: str | None
    recall: str | None
    answer_tokens: str | None
    json_file: str | None
    html: str | None

    @property
    def size(self) -> Size:
        """The size with the given options in place."""
        size = QUICK if self.quick else FULL
        names = ("window", "tokens", "recall", "answer_tokens")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        return size._replace(**own)

    @property
    def shared(self) -> EvalOptions:
        """The options that both commands have."""
        return EvalOptions(self.model, self.text, self.size.window, self.size.tokens, self.json_file, self.html)


class KvExtent(NamedTuple):
    """What `eval kv` measures besides the text."""

    quick: bool = False
    distances: tuple[int, ...] = ()
    """Tokens between each fact and its question; empty to skip facts."""
    answer_tokens: int = 0
    """Tokens of a continuation; 0 to skip all answers."""
    num_continuations: int = 0
    num_objects: int = 0

    @classmethod
    def read(cls, options: KvOptions) -> "KvExtent":
        """Check the options."""
        size = options.size
        distances: tuple[int, ...] = ()
        if size.recall.strip().lower() != NONE:
            distances = tuple(sorted(set(read_counts(size.recall, "--recall"))))
            if distances[0] < MIN_DISTANCE or len(distances) > MAX_DISTANCES:
                raise ConfigError("eval.bad_recall", value=size.recall, minimum=MIN_DISTANCE, maximum=MAX_DISTANCES)
        answer_tokens = read_whole(size.answer_tokens, "--answer-tokens", 0, MAX_ANSWER)
        return cls(options.quick, distances, answer_tokens, size.num_continuations, size.num_objects)

    @property
    def longest_answer(self) -> int:
        """Tokens of a prompt and its answer."""
        return PROMPT_TOKENS + self.answer_tokens if self.answer_tokens else 0

    def within(self, max_position: int, longest: int) -> "KvExtent":
        """Leave out distances beyond the model's context; `longest` is the context of the largest."""
        room = max_position - (longest - max(self.distances, default=0))
        return self._replace(distances=tuple(distance for distance in self.distances if distance <= room))


class EvalText(NamedTuple):
    """The text to read, and its windows."""

    text: str
    name: str
    window: int
    max_tokens: int | None


class _Setup(NamedTuple):
    """Checked options: the text and the output files."""

    text: EvalText
    json_file: str | None
    html: Path | None

    @classmethod
    def read(cls, options: EvalOptions, read: Callable[[str | None], tuple[str, str]]) -> "_Setup":
        """Check all options, the text last; `read` returns it with its name."""
        window = read_whole(options.window, "--window", MIN_WINDOW, MAX_WINDOW)
        count = None if options.tokens is None else read_count(options.tokens)
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ConfigError("value.too_small", name="--tokens", minimum=1, value=options.tokens)
        max_tokens = count if isinstance(count, int) else None
        html = None if options.html is None else page_file(options.html, "--html")
        json_file = record_file(options.json_file)
        text = EvalText(*read(options.text), window, max_tokens)
        log_plainly()
        if max_tokens is not None and max_tokens < window:
            write_line(f"reading {window} tokens, not {max_tokens}: one window is the minimum; see --window")
        return cls(text, json_file, html)

    def write(self, view: EvalView) -> None:
        """Print the table, and write page and record."""
        if self.save(view) and self.html is not None:
            write_line(f"page written to {shown(str(self.html), MAX_PATH)[1:-1]}")
        lines = quality_lines(view)
        show_beside(lines) if self.json_file == STDOUT else show(lines)
        if self.json_file is not None:
            write_record(self._record(view), self.json_file)

    def save(self, view: EvalView) -> bool:
        """Write the page; return False if there is none. A full disk costs the page, not the figures."""
        if self.html is None:
            return False
        try:
            write_page(self.html, eval_page(view))
        except OSError as error:
            write_line(f"page not written to {shown(str(self.html), MAX_PATH)[1:-1]}: {error.strerror or error}")
            return False
        return True

    def _record(self, view: EvalView) -> dict[str, object]:
        facts = {"text_sha256": hashlib.sha256(self.text.text.encode()).hexdigest()}
        return quality_record(view, ["holdfast", *sys.argv[1:]], facts)


def eval_kv(options: KvOptions, engine: Given) -> int:
    """Measure KV formats. All options are checked before the model is opened. After Ctrl-C, write what is complete."""
    names = read_formats(options.formats)
    extent = KvExtent.read(options)
    config = EngineConfig.from_options(model=options.model, **engine)
    setup = _Setup.read(options.shared, topics_or_text)
    model = open_headers(config, shown_download)
    try:
        import_torch()
        from holdfast.engine.engine import InterruptShield

        # A second Ctrl-C waits until everything that is complete is written.
        with InterruptShield() as shield:
            with shield.lifted():
                view = measure_formats(config, model, names, setup.text, extent, setup.save)
            setup.write(view)
            if view.missing:
                write_line(f"interrupted: {', '.join(view.missing)} not measured")
    finally:
        model.source.close()
    return INTERRUPTED if view.missing else 0


def measure_formats(
    config: EngineConfig,
    model: OpenModel,
    names: Sequence[str] | None,
    text: EvalText,
    extent: KvExtent = KvExtent(),  # noqa: B008 - a frozen value
    save: Callable[[EvalView], object] = lambda view: None,
) -> EvalView:
    """Measure formats one by one; `save` gets the view after each. Ctrl-C ends with those that are complete."""
    from holdfast.engine.open_text import open_tokenizer
    from holdfast.eval.kv_quality import SEQUENCES, Pair, entry_of, evaluate, open_contenders, settle_config
    from holdfast.eval.recall import cannot_recall, longest_test

    name = model_name(config)
    extent = extent.within(model.spec.max_position, longest_test(extent.distances))
    settled = settle_config(config, model, text.window)
    longest = max(longest_test(extent.distances), extent.longest_answer)
    longer = settle_config(config, model, text.window, longest, SEQUENCES) if longest else None
    work = _kv_work(settled, model, text, extent)
    entries = _format_entries(settled, model, names, extent.quick)
    others = [] if longer is None else [entry_of(longer, model, entry.name) for entry in entries]
    if not is_watched():
        write_line(f"Loading {name}")
    with LoadingBar() as bar:
        tokenizer = open_tokenizer(config, model) if settled.kv_key_scale else None
        opened = open_contenders([*entries, *others], model, bar, tokenizer)
    count = len(entries)
    pairs = list(map(Pair, opened.contenders[:count], opened.contenders[-count:]))
    if work.recall is not None and (reason := cannot_recall(pairs[0].tasks.runner)) is not None:
        write_line(f"skipping recall: {reason}")
        work = work._replace(recall=None)
    _report_exact_windows(text.window, opened.most_near_tokens)
    plain = float(opened.plain_bytes_per_token)
    view = EvalView(name, _settings_text(settled), text.name, text.window, len(work.windows), plain, [])
    bars: list[EvalBar] = []

    def watching(contender: "Contender") -> Callable[[int, int], None]:
        own = f"{contender.name} ({len(bars) + 1} of {count})"
        bars.append(EvalBar(own, NUM_KV_LINES).__enter__())
        return bars[-1]

    try:
        for result in evaluate(pairs, work, watching):
            bars[-1].__exit__()
            view = view.with_result(result)
            write_line(progress_line(view))
            save(view)
    except KeyboardInterrupt:
        if not view.qualities:
            raise
        write_line("stopping: results that are complete are written")
        view = view._replace(missing=tuple(entry.name for entry in entries[len(view.qualities) :]))
    finally:
        for bar in bars:
            bar.__exit__()
        opened.release()
    return view


def _report_exact_windows(window: int, near_tokens: int) -> None:
    """Print a line if attention reads no codes, because every window is one exact block."""
    if window <= near_tokens:
        write_line(
            f"windows of {window} tokens lie within the newest block of {near_tokens} tokens, which is exact: "
            "they show no error of the codes; see --window"
        )


def _settings_text(config: EngineConfig) -> str:
    """Return type, device, and the options that are not at their default."""
    notes = [f"{config.dtype} on {config.device}"]
    if config.kv_near_tokens is not None:
        notes.append(f"near blocks of {config.kv_near_tokens} tokens" if config.kv_near_tokens else "no near tokens")
    if not config.kv_key_scale:
        notes.append("keys not scaled")
    return ", ".join(notes)


def _kv_work(config: EngineConfig, model: OpenModel, text: EvalText, extent: KvExtent) -> "Work":
    """Make windows, questions and facts."""
    from holdfast.engine.open_text import open_text
    from holdfast.eval.answers import Questions
    from holdfast.eval.kv_quality import Work
    from holdfast.eval.quality import most_windows
    from holdfast.eval.recall import make_test
    from holdfast.eval.tasks import read_tasks

    tokenizer, template = open_text(config, model)
    if tokenizer is None:
        raise ConfigError("engine.no_tokenizer")
    windows = cut_windows(tokenizer, text.text, text.window, text.max_tokens, model.spec.vocab_size)
    most = most_windows(text.window, model.spec.hidden_size, config.dtype)
    if len(windows) > most:
        write_line(
            f"reading {most} of {len(windows)} windows: the reference's states of more take over 1 GiB; see --tokens"
        )
        windows = windows[:most]
    tasks = read_tasks().first(extent.num_continuations, extent.num_objects)
    questions, test = None, None
    if extent.answer_tokens:
        questions = Questions(tasks, tokenizer, template, extent.answer_tokens)
    if extent.distances:
        filler = tokenizer.encode(text.text[:FILLER_CHARS], add_special_tokens=False)
        test = make_test(tasks.recall, tokenizer, filler, extent.distances, beginning(tokenizer))
    return Work(windows, questions, test)


def _format_entries(
    config: EngineConfig, model: OpenModel, names: Sequence[str] | None, is_quick: bool
) -> "list[Entry]":
    """List the reference and the named formats, or all that can run, or two of them."""
    from holdfast.eval.kv_quality import entry_of, narrower_formats, quick_formats

    if names is None:
        choice = narrower_formats(config, model)
        names = quick_formats(choice.names, model) if is_quick else _reported(choice)
    return [entry_of(config, model, name) for name in dict.fromkeys((config.dtype, *names))]


def _reported(choice: "Possible") -> tuple[str, ...]:
    """Return the names that can run; print a line for each other one."""
    for name, reason in choice.left_out.items():
        write_line(f"skipping {name}: {reason}")
    return choice.names


def _names(typed: str) -> tuple[str, ...] | None:
    """Split comma-separated names, each once; None for all."""
    if typed.strip().lower() == ALL:
        return None
    return tuple(dict.fromkeys(part.strip() for part in typed.split(",") if part.strip())) or (typed,)


def read_formats(typed: str) -> tuple[str, ...] | None:
    """Read the names of KV formats; None for all."""
    names = _names(typed)
    for name in names or ():
        if name not in ALL_KV_FORMATS:
            error = ConfigError("value.not_one_of", name="--formats", accepted=list(ALL_KV_FORMATS), value=name)
            raise error.hinting(did_you_mean(name, ALL_KV_FORMATS, cutoff=0.3))
    return names


def read_text(file: str) -> str:
    """Read a UTF-8 file."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            data = opened.read(MAX_TEXT_BYTES + 1).removeprefix(BYTE_ORDER_MARK)
        if len(data) <= MAX_TEXT_BYTES:
            return data.decode()
        reason = f"it is larger than {MAX_TEXT_BYTES >> 20} MiB"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start}, 0x{error.object[error.start]:02x}, is not UTF-8; convert it with iconv -t utf-8"
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a path"
    raise PromptError("eval.bad_text", file=file, reason=reason)


def eval_weights(options: EvalOptions, engine: Given) -> None:
    """Measure weight schemes. All options are checked before the model is opened."""
    files = read_files(options.files)
    typed = options.schemes
    names = () if files and typed is None else read_schemes(ALL if typed is None else typed)
    ignore = engine.pop("quantization_ignore", ())
    # Patterns apply to every scheme, so any scheme can check them.
    EngineConfig.from_options(quantization="fp8", quantization_ignore=ignore)
    config = EngineConfig.from_options(model=options.model, **engine)
    setup = _Setup.read(options, topics_or_text)
    import_torch()
    setup.write(measure_schemes(config, ignore, names, setup.text, files))


def topics_or_text(file: str | None) -> tuple[str, str]:
    """Return a text and its name: that of a file, or Python's help topics."""
    if file is not None:
        return read_text(file), Path(file).name
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()), TOPICS


def measure_schemes(
    config: EngineConfig,
    ignore: tuple[str, ...],
    names: Sequence[str] | None,
    text: EvalText,
    files: Sequence[str] = (),
) -> EvalView:
    """Measure the named schemes, or all that can run, then other files of the model."""
    from holdfast.engine.open_text import open_tokenizer
    from holdfast.eval.weight_quality import (
        Listener,
        as_stored_entry,
        compare_schemes,
        file_entry,
        plain_bytes,
        settle_entries,
        stored_scheme,
    )

    model = open_headers(config, shown_download)
    try:
        tokenizer = open_tokenizer(config, model)
        windows = cut_windows(tokenizer, text.text, text.window, text.max_tokens, model.spec.vocab_size)
        reference, settled = settle_entries(config, model, text.window)
        stored = stored_scheme(reference, model)
        entries = [] if files and not names else _scheme_entries(settled, model, names, ignore, stored)
        entries += [file_entry(reference, model, file) for file in files]
        half_bytes = float(plain_bytes(model))
    finally:
        model.source.close()
    name = model_name(config)
    # One bar of tokens for all runs and a line per load, because two bars would overwrite each other.
    with EvalBar() as bar:
        listener = Listener(lambda scheme: write_line(f"Loading {name} in {scheme}"), bar)
        qualities = compare_schemes(as_stored_entry(reference, stored), entries, windows, listener)
    settings = f"{settled.dtype} on {settled.device}"
    return EvalView(name, settings, text.name, text.window, len(windows), half_bytes, qualities, WEIGHTS)


def read_files(typed: str | None) -> tuple[str, ...]:
    """Read comma-separated files, each once."""
    if typed is None:
        return ()
    files = tuple(dict.fromkeys(part.strip() for part in typed.split(",") if part.strip()))
    if not files:
        raise ConfigError("eval.no_files", value=typed)
    return files


def read_schemes(typed: str) -> tuple[str, ...] | None:
    """Read the names of weight schemes; None for all."""
    names = _names(typed)
    for name in names or ():
        try:
            find_scheme(name)
        except ConfigError as error:
            raise error.within(f"--schemes {shown(name)[1:-1]}") from None
    return names


def _scheme_entries(
    settled: EngineConfig,
    model: OpenModel,
    names: Sequence[str] | None,
    ignore: tuple[str, ...],
    stored: str | None,
) -> "list[SchemeEntry]":
    """List the named schemes, or all that can run, after the plain dtype if it is not float32."""
    from holdfast.eval.weight_quality import REFERENCE_DTYPE, as_stored_entry, possible_schemes, scheme_entry

    if names is None:
        names = _reported(possible_schemes(settled, model, ignore, stored))
    wanted = [name for name in names if name != UNQUANTIZED]
    other = next((name for name in wanted if stored not in (None, name)), None)
    if other is not None:
        raise ConfigError("eval.stored_quantized", scheme=other, model=model.path.name, stored=stored)
    plain = [] if settled.dtype == REFERENCE_DTYPE else [as_stored_entry(settled, stored)]
    return [*plain, *(scheme_entry(settled, name, ignore) for name in wanted)]
