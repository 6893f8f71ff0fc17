"""The commands and their help pages; whatever a command needs is imported when it runs; no torch."""

from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli.options import (
    BENCHMARK,
    ENGINE_SETTINGS,
    OUTPUT,
    SAMPLING_SETTINGS,
    SEVERAL_SETTINGS,
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
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write a record of the run as JSON; - writes to stdout.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]

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


def invoke(arguments: list[str]) -> int:
    """Run a command line; its exit code. Complaints about the command line itself are raised."""
    if arguments in ([], ["bench"]):
        arguments = [*arguments, "--help"]
    command = typer.main.get_command(app)
    try:
        with command.make_context("holdfast", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


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

    run(RunOptions(model, prompt, system, raw, quiet, as_json), engine, sampling | several)


@app.command("chat")
@takes(sampling=SAMPLING_SETTINGS, engine=ENGINE_SETTINGS)
def _chat(engine: Given, sampling: Given, model: ModelArgument = None, system: System = None) -> None:
    """Talk with a model, turn by turn; /help lists what can be typed beside questions.

    Ctrl-C stops an answer and keeps the chat; Ctrl-D leaves. Piped input is taken line by line.

    \b
    Examples:
      holdfast chat
      holdfast chat path/to/model --system "Answer in one sentence." --temperature 0.7
      holdfast chat model.gguf --max-model-len 32K --kv-cache-dtype bfloat16
    """
    from holdfast.cli.chat_command import chat

    raise typer.Exit(chat(model, system, engine, sampling))


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
) -> None:
    """Time the reading of prompts and the decoding of batches.

    \b
    Examples:
      holdfast bench latency
      holdfast bench latency --against transformers --json record.json
      holdfast bench latency path/to/model --prefill 128,1k --batch 1,4,16 --output-len 32
    """
    from holdfast.cli.bench_command import BenchOptions, bench_latency

    options = BenchOptions(model, against, repeats, threads, json_file)
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
) -> None:
    """Time many requests of random lengths at once, through continuous batching.

    \b
    Examples:
      holdfast bench throughput
      holdfast bench throughput --against transformers --num-prompts 16
      holdfast bench throughput path/to/model --input-len 512 --output-len 128 --json -
    """
    from holdfast.cli.bench_command import BenchOptions, bench_throughput

    options = BenchOptions(model, against, repeats, threads, json_file)
    bench_throughput(options, engine, num_prompts, input_len, output_len, peer_batch)
