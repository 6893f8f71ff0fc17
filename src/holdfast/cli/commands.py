"""The commands and their help pages; whatever a command needs is imported when it runs; no torch."""

import copy
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli.as_typed import take_as_typed
from holdfast.cli.options import (
    BENCHMARK,
    ENGINE_SETTINGS,
    EVAL_SETTINGS,
    MEMORY,
    MODEL,
    OUTPUT,
    PLAN_SETTINGS,
    SAMPLING_SETTINGS,
    SEVERAL_SETTINGS,
    WEIGHT_EVAL_SETTINGS,
    Given,
    takes,
)

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder in Hugging Face layout, or a GGUF file. Left out: the default model.",
        show_default=False,
    ),
]
PlannedModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder with a config.json, a GGUF file, or a well-known name such as Qwen3-32B. Left out: the default model.",
        show_default=False,
    ),
]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="What the model is told first.", show_default=False)
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Run another engine in turn with ours, and print ratios: transformers.",
        show_default=False,
        rich_help_panel=BENCHMARK,
    ),
]
Threads = Annotated[
    str | None,
    typer.Option(metavar="N", help="CPU threads of every engine.", show_default=False, rich_help_panel=BENCHMARK),
]
Repeats = Annotated[
    str,
    typer.Option("--repeats", metavar="N", help="Runs of each case after one to warm up.", rich_help_panel=BENCHMARK),
]


def _written(option: str, help: str) -> object:
    """An option that names a file to write."""
    return typer.Option(option, metavar="FILE", help=help, show_default=False, rich_help_panel=OUTPUT)


JsonFile = Annotated[str | None, _written("--json", "Write a record of the run as JSON; - writes to stdout.")]
MemoryReport = Annotated[
    str | None, _written("--memory-report", "Write a page (HTML) that draws who holds which memory.")
]
QualityPage = Annotated[str | None, _written("--html", "Write a page that draws quality against bytes.")]
Window = Annotated[str, typer.Option(metavar="TOKENS", help="Tokens that are read together, from an empty cache.")]
MOST_TOKENS = "Most tokens of the text, such as 16K; at least one whole window is read."

app = typer.Typer(
    name="holdfast",
    help="An LLM inference engine that plans its memory, takes it once, and holds it.",
    epilog="Start with: holdfast run -p 'What is the capital of France?'",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure speed on this machine, alone or side by side with transformers.")
app.add_typer(bench, name="bench")
evaluate = typer.Typer(help="Measure what a setting costs in quality.")
app.add_typer(evaluate, name="eval")


def invoke(arguments: list[str]) -> int:
    """Run a command line; its exit code. Complaints about the command line itself are raised."""
    if arguments in ([], ["bench"], ["eval"]):
        arguments = [*arguments, "--help"]
    command = typer.main.get_command(_asked(arguments[0]))
    take_as_typed(command)
    try:
        with command.make_context("holdfast", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


def _asked(name: str) -> typer.Typer:
    """The app with the command that is asked for and no other: building them all takes as long as some need to run."""
    named = [command for command in app.registered_commands if command.name == name]
    if not named:
        return app
    narrow = copy.copy(app)
    narrow.registered_commands, narrow.registered_groups = named, []
    return narrow


@app.callback(invoke_without_command=True)
def _holdfast(
    version: Annotated[
        bool, typer.Option("--version", "-V", metavar="", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    if version:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.command("run")
@takes(several=SEVERAL_SETTINGS, sampling=SAMPLING_SETTINGS, engine=ENGINE_SETTINGS)
def _run(
    engine: Given,
    sampling: Given,
    several: Given,
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt; piped input follows it.", show_default=False),
    ] = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", metavar="", help="Continue the bare text, without the chat template.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", metavar="", help="Print the answer and nothing else.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print one JSON object in place of the text.", rich_help_panel=OUTPUT),
    ] = False,
    memory_report: MemoryReport = None,
) -> None:
    """Answer a prompt: the text streams to stdout; who holds which memory, and the speed, go to stderr.

    The model's chat template is applied where it has one. At most 512 tokens are generated unless --max-tokens says otherwise.

    \b
    Examples:
      holdfast run -p "What is the capital of France?"
      git diff | holdfast run path/to/model -p "Write a commit message" -q
      holdfast run model.gguf --raw -p "Once upon a time" --temperature 0.8 -n 3 --json
    """
    from holdfast.cli.run_command import RunOptions, run

    run(RunOptions(model, prompt, system, raw, quiet, as_json, memory_report), engine, sampling | several)


@app.command("chat")
@takes(sampling=SAMPLING_SETTINGS, engine=ENGINE_SETTINGS)
def _chat(
    engine: Given,
    sampling: Given,
    model: ModelArgument = None,
    system: System = None,
    memory_report: MemoryReport = None,
) -> None:
    """Talk with a model, turn by turn; /help lists what can be typed beside questions.

    Ctrl-C stops an answer and keeps the chat; Ctrl-D leaves. Piped input is taken line by line.

    \b
    Examples:
      holdfast chat
      holdfast chat path/to/model --system "Answer in one sentence." --temperature 0.7
      holdfast chat model.gguf --max-model-len 32K --kv-cache-dtype turboquant_4bit_nc
    """
    from holdfast.cli.chat_command import chat

    raise typer.Exit(chat(model, system, engine, sampling, memory_report))


@app.command("plan")
@takes(engine=PLAN_SETTINGS)
def _plan(
    engine: Given,
    model: PlannedModel = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU such as h200, a100-80g or rtx4090.", rich_help_panel=MEMORY),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="A GPU of that size, such as 24GiB.", rich_help_panel=MEMORY),
    ] = None,
    tensor_parallel_size: Annotated[
        str | None,
        typer.Option(
            "--tensor-parallel-size", "-tp", metavar="N", help="GPUs that share the model.", rich_help_panel=MODEL
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT),
    ] = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", metavar="", help="Chart tokens by KV format and weights.", rich_help_panel=OUTPUT),
    ] = False,
    html: Annotated[str | None, _written("--html", "Write a page with the plan and the sweep.")] = None,
) -> None:
    """Tell what a model would take of a device, before anything is read or taken; needs no GPU, no weights, no network.

    A folder whose weights are quantized already is counted as it would load: as stored, and with --quantization and its own scheme also what its makers left plain in that scheme. Exits with 0 where it fits and with 1 where it does not. --json prints: model, target, fits, short_bytes, budget (bytes, reason), kv_bytes_per_token, kv_tokens, max_model_len, max_concurrency, terms (owner, bytes, phases, reason), phases (bytes to load, capture and serve), choices, alternatives, not_in_this_version, command; with --sweep also sweep.

    \b
    Examples:
      holdfast plan Qwen3-32B --gpu h200
      holdfast plan path/to/model --memory 24GiB --max-model-len 32K --json
      holdfast plan Qwen3-32B --gpu rtx5090 --quantization mxfp4 --kv-cache-dtype fp8 --sweep --html plan.html
    """
    from holdfast.cli.plan_command import PlanOptions, plan

    options = PlanOptions(model, gpu, memory, tensor_parallel_size, as_json, sweep, html)
    raise typer.Exit(plan(options, engine))


@app.command("cache")
def _cache(
    clear: Annotated[bool, typer.Option("--clear", metavar="", help="Remove all that no process reads.")] = False,
) -> None:
    """List the quantized weights that earlier starts have kept for the next, or remove them.

    \b
    Examples:
      holdfast cache
      holdfast cache --clear
    """
    from holdfast.cli.cache_command import clear_weights, list_weights

    if clear:
        clear_weights()
    else:
        list_weights()


@bench.command("latency")
@takes(engine=ENGINE_SETTINGS)
def _latency(
    engine: Given,
    model: ModelArgument = None,
    prefill: Annotated[
        str,
        typer.Option(metavar="TOKENS", help="Prompt lengths whose reading is timed.", rich_help_panel=BENCHMARK),
    ] = "512,2048",
    batch: Annotated[
        str, typer.Option(metavar="SIZES", help="Batch sizes whose decoding is timed.", rich_help_panel=BENCHMARK)
    ] = "1,8",
    input_len: Annotated[
        str, typer.Option(metavar="TOKENS", help="Prompt of each sequence in a batch.", rich_help_panel=BENCHMARK)
    ] = "128",
    output_len: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens that each sequence generates.", rich_help_panel=BENCHMARK)
    ] = "64",
    repeats: Repeats = "3",
    against: Against = None,
    threads: Threads = None,
    json_file: JsonFile = None,
    memory_report: MemoryReport = None,
) -> None:
    """Time the reading of prompts and the decoding of batches.

    \b
    Examples:
      holdfast bench latency
      holdfast bench latency --against transformers --json record.json
      holdfast bench latency path/to/model --prefill 128,1k --batch 1,4,16 --output-len 32
    """
    from holdfast.cli.bench_command import BenchOptions, bench_latency

    options = BenchOptions(model, against, repeats, threads, json_file, memory_report)
    bench_latency(options, engine, prefill, batch, input_len, output_len)


@bench.command("throughput")
@takes(engine=ENGINE_SETTINGS)
def _throughput(
    engine: Given,
    model: ModelArgument = None,
    num_prompts: Annotated[str, typer.Option(metavar="N", help="How many requests.", rich_help_panel=BENCHMARK)] = "32",
    input_len: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="Lengths of their prompts.", rich_help_panel=BENCHMARK)
    ] = "32-256",
    output_len: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="Lengths of their answers.", rich_help_panel=BENCHMARK)
    ] = "16-96",
    peer_batch: Annotated[
        str,
        typer.Option(metavar="N", help="Batch size of the other engine, which pads.", rich_help_panel=BENCHMARK),
    ] = "8",
    repeats: Repeats = "3",
    against: Against = None,
    threads: Threads = None,
    json_file: JsonFile = None,
    memory_report: MemoryReport = None,
) -> None:
    """Time many requests of random lengths at once, through continuous batching.

    \b
    Examples:
      holdfast bench throughput
      holdfast bench throughput --against transformers --num-prompts 16
      holdfast bench throughput path/to/model --input-len 512 --output-len 128 --json -
    """
    from holdfast.cli.bench_command import BenchOptions, bench_throughput

    options = BenchOptions(model, against, repeats, threads, json_file, memory_report)
    bench_throughput(options, engine, num_prompts, input_len, output_len, peer_batch)


@evaluate.command("kv")
@takes(engine=EVAL_SETTINGS)
def _eval_kv(
    engine: Given,
    model: ModelArgument = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plain text (UTF-8) that is read.", show_default=False),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(metavar="NAMES", help="KV formats, with commas between; all: every one below the dtype."),
    ] = "all",
    window: Window = "1024",
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help=f"{MOST_TOKENS} Left out: all.", show_default=False),
    ] = None,
    json_file: JsonFile = None,
    html: QualityPage = None,
) -> None:
    """Read a text over pages of every KV format at once, and tell how far predictions move from those over full precision.

    For each format: bytes of a token, perplexity, mean and 99th percentile of the KL divergence, and how often the likeliest token is the same. The weights are loaded once and all formats see the same windows.

    \b
    Examples:
      holdfast eval kv --text book.txt --tokens 16K
      holdfast eval kv path/to/model --text book.txt --formats fp8,turboquant_4bit_nc --html quality.html
      holdfast eval kv model.gguf --text book.txt --window 4K --kv-protected-layers 0 --json record.json
    """
    from holdfast.cli.eval_command import EvalOptions, eval_kv

    eval_kv(EvalOptions(model, text, formats, window, tokens, json_file, html), engine)


@evaluate.command("weights")
@takes(engine=WEIGHT_EVAL_SETTINGS)
def _eval_weights(
    engine: Given,
    model: ModelArgument = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Plain text (UTF-8) that is read. Left out: what Python's own help knows of the language.",
            show_default=False,
        ),
    ] = None,
    schemes: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Weight schemes, with commas between; all: every one that can run."),
    ] = "all",
    window: Window = "512",
    tokens: Annotated[str, typer.Option(metavar="N", help=MOST_TOKENS)] = "1024",
    json_file: JsonFile = None,
    html: QualityPage = None,
) -> None:
    """Read a text with weights in one scheme after the other, and tell how far predictions move from those in float32.

    For each scheme: bytes of all weights, perplexity, mean and 99th percentile of the KL divergence, and how often the likeliest token is the same. The reference has the weights as stored, in float32, and stays loaded beside the scheme whose turn it is. Where they are stored quantized, the reference is called after their scheme ("fp8 as stored (float32)"), and that is the only scheme there is to compare.

    \b
    Examples:
      holdfast eval weights
      holdfast eval weights path/to/model --text book.txt --tokens 16K --schemes fp8,mxfp4 --html quality.html
      holdfast eval weights model.gguf --schemes int8 --quantized-embeddings none --json record.json
    """
    from holdfast.cli.eval_weights import WeightEvalOptions, eval_weights

    eval_weights(WeightEvalOptions(model, text, schemes, window, tokens, json_file, html), engine)
