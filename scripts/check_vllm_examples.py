"""Run examples of a vLLM checkout with `vllm` replaced by `holdfast` and the model by a small one; print each result.

    python scripts/check_vllm_examples.py PATH_OF_VLLM [--only TEXT] [--seconds 300]

PATH_OF_VLLM is a working tree or a bare repository. The scripts are rewritten into a temporary folder. Only the package, model
names and the server's port of clients change. The model is the default one, with a shorter
context in its GGUF header, so that an answer without max_tokens ends soon.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTEXT_KEY = b"llama.context_length"
SERVED_NAME = "smollm2"
SERVER_CONTEXT = 1024
READY_SECONDS = 180.0
_OWNERS = "facebook|meta-llama|Qwen|mistralai|lmsys|deepseek-ai|microsoft|google|intfloat|BAAI|jinaai|jason9693|TinyLlama|NousResearch"
_MODEL = re.compile(rf"""(["'])(?:{_OWNERS})/[\w.-]+\1""")
_SERVER = re.compile(r"(?:localhost|0\.0\.0\.0|127\.0\.0\.1):8000")
_PACKAGE = re.compile(r"^(\s*)(from|import) vllm\b", re.MULTILINE)
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Exit))(?:: (.*))?$")


@dataclass(frozen=True)
class Example:
    """A script of vLLM's examples, and its arguments."""

    path: str
    arguments: str = ""
    context: int = 256
    is_client: bool = False
    """True if it is a client of a server, which runs meanwhile."""


EXAMPLES = (
    Example("basic/offline_inference/basic.py"),
    Example("basic/offline_inference/generate.py", "--max-tokens 32"),
    Example("basic/offline_inference/chat.py", "--max-tokens 16 --max_num_seqs 8"),
    Example("basic/offline_inference/embed.py"),
    Example("basic/offline_inference/classify.py"),
    Example("basic/offline_inference/score.py"),
    Example("deployment/async_llm_streaming.py"),
    Example("deployment/llm_engine_example.py", "--model MODEL --enforce-eager --swap-space 4"),
    Example("features/automatic_prefix_caching/prefix_caching_offline.py"),
    Example("features/automatic_prefix_caching/automatic_prefix_caching_offline.py", context=4096),
    Example("features/batch_invariance/reproducibility_offline.py"),
    Example("features/structured_outputs/structured_outputs_offline.py"),
    Example("features/reset_kv/reset_kv_offline.py", "--model MODEL", context=2048),
    Example("features/profiling/simple_profiling_offline.py"),
    Example("features/profiling/run_one_batch_offline.py"),
    Example("features/pause_resume/pause_resume_offline.py"),
    Example("features/context_extension/context_extension_offline.py"),
    Example("features/lora/multilora_offline.py"),
    Example("features/logits_processor/custom.py"),
    Example("features/data_parallel/data_parallel_offline.py", "--model MODEL -dp 1"),
    Example("generate/trace_replay_offline.py"),
    Example("generate/multimodal/vision_language_offline.py"),
    Example("observability/metrics/offline.py"),
    Example("tool_calling/chat_with_tools_offline.py"),
    Example("applications/api_server/server.py"),
    Example("basic/online_serving/openai_completion_client.py", is_client=True),
    Example("basic/online_serving/openai_completion_client.py", "--stream", is_client=True),
    Example("basic/online_serving/openai_chat_completion_client.py", is_client=True),
    Example("basic/online_serving/openai_chat_completion_client.py", "--stream", is_client=True),
    Example("tool_calling/openai_chat_completion_client_with_tools.py", is_client=True),
    Example("tool_calling/openai_chat_completion_client_with_tools_required.py", is_client=True),
    Example("tool_calling/openai_responses_client_with_tools.py", is_client=True),
    Example("reasoning/openai_chat_completion_with_reasoning.py", is_client=True),
    Example("reasoning/openai_responses_client.py", is_client=True),
    Example("features/structured_outputs/structured_outputs_client.py", is_client=True),
    Example("generate/batched_chat_completions_online.py", is_client=True),
    Example("pooling/embed/openai_embedding_client.py", is_client=True),
)


def rewrite(text: str, model: str, port: int) -> str:
    """Rewrite a script for this package, a model and a port."""
    text = _PACKAGE.sub(r"\1\2 holdfast", text)
    text = _MODEL.sub(lambda match: repr(model), text)
    return _SERVER.sub(f"127.0.0.1:{port}", text)


def outcome(code: int | None, error: str) -> str:
    """Summarize the result of a script: it runs, it stops with a sentence, or it breaks."""
    if code is None:
        return "ran out of time"
    if code == 0:
        return "runs"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    for line in reversed(lines):
        found = _ERROR.fullmatch(line)
        if found and line.startswith("holdfast.errors."):
            return f"stops: {found[2]}"
        if found:
            return f"breaks: {line[:200]}"
    return f"breaks: {lines[-1][:200] if lines else f'exit code {code}'}"


def with_context(source: Path, folder: Path, context: int) -> Path:
    """Copy a GGUF file with another context in its header."""
    target = folder / f"smollm2-{context}.gguf"
    if not target.exists():
        data = bytearray(source.read_bytes())
        place = data.index(CONTEXT_KEY) + len(CONTEXT_KEY) + 4  # the value's type is between them
        data[place : place + 4] = context.to_bytes(4, "little")
        target.write_bytes(data)
    return target


def read_example(checkout: Path, path: str) -> str | None:
    """Read the text of an example; None if this checkout does not have it."""
    file = checkout / "examples" / path
    if file.is_file():
        return file.read_text(encoding="utf-8")
    git = ["git", "--git-dir", str(checkout), "show", f"HEAD:examples/{path}"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def served(model: Path, port: int, log: Path) -> Iterator[None]:
    """Run a server of the model during the block."""
    options = ["--served-model-name", SERVED_NAME, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = [sys.executable, "-m", "holdfast", "serve", "-m", str(model), "--port", str(port), *options]
    with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as process:
        deadline = time.monotonic() + READY_SECONDS
        try:
            while " is ready at " not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()


def run_example(
    example: Example, text: str, folder: Path, source: Path, port: int, seconds: float
) -> tuple[str, float]:
    """Run one script; return its result and seconds."""
    model = SERVED_NAME if example.is_client else str(with_context(source, folder, example.context))
    script = folder / example.path.replace("/", "_")
    script.write_text(rewrite(text, model, port), encoding="utf-8")
    arguments = example.arguments.replace("MODEL", model).split()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_BASE_URL": f"http://127.0.0.1:{port}", "COLUMNS": "400"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        facts = outcome(done.returncode, done.stderr)
        (folder / f"{script.stem}.out").write_text(f"{done.stdout}\n{done.stderr}", encoding="utf-8")
    except subprocess.TimeoutExpired:
        facts = outcome(None, "")
    return facts.replace(str(folder), "FOLDER"), time.monotonic() - started


def main() -> None:
    """Run the examples and print a table; exit 1 if one breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="Scripts whose path has this text.")
    parser.add_argument("--seconds", type=float, default=300.0, help="For one script.")
    parser.add_argument("--keep", type=Path, help="Folder for the rewritten scripts and their output.")
    options = parser.parse_args()
    from holdfast.loading.model_files import find_default_model

    source = find_default_model()
    chosen = [example for example in EXAMPLES if options.only in example.path]
    results: list[tuple[Example, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()

        def run_all(some: list[Example]) -> None:
            for example in some:
                text = read_example(options.checkout, example.path)
                facts, spent = (
                    ("is not in this checkout", 0.0)
                    if text is None
                    else (run_example(example, text, folder, source, port, options.seconds))
                )
                results.append((example, facts))
                print(
                    f"| `{example.path}`{f' `{example.arguments}`' if example.arguments else ''} | {facts} |",
                    flush=True,
                )
                print(f"{spent:6.1f} s", file=sys.stderr, flush=True)

        run_all([example for example in chosen if not example.is_client])
        clients = [example for example in chosen if example.is_client]
        if clients:
            with served(with_context(source, folder, SERVER_CONTEXT), port, folder / "server.log"):
                run_all(clients)
    broken = [example.path for example, facts in results if facts.startswith(("breaks", "ran out"))]
    print(f"{len(results) - len(broken)} of {len(results)} run, or stop with a sentence", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
