"""A tiny model with a tokenizer and a chat template, and commands run against it in this process or in another."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from holdfast.models.grouped_readers import parameters, read_spec

CHAT_TEMPLATE = "{% for m in messages %}{{ '[' + m['role'][0] + ']' + m['content'] }}{% endfor %}[a]"
MAIN = "import sys; from holdfast.cli.app import main; sys.argv[0] = 'holdfast'; main()"


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def make_model(folder: Path, has_template: bool = True, **settings: object) -> Path:
    """A model whose tokens are bytes: whatever it says is short, quick and meaningless.

    Its tensors are those that the engine asks for, so that no other library has to be imported to make them.
    """
    import numpy as np
    from safetensors.numpy import save_file

    config = CONFIG | settings
    choose = np.random.default_rng(0)
    parts = {part.tensor: part.shape for item in parameters(read_spec(config, "test")) for part in item.parts}
    tensors = {}
    for name, shape in parts.items():
        values = choose.standard_normal(shape, dtype=np.float32)
        tensors[name] = values * shape[1] ** -0.5 if len(shape) == 2 else values * np.float32(0.1) + np.float32(1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    if has_template:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Three special tokens, then one token for every byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Ended:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str, error: BaseException | None = None) -> None:
        self.code, self.out, self.err, self.error = code, out, err, error

    def refuses(self, expected: str, **values: object) -> bool:
        """Return True if the error has this code and at least these values, or stderr has this text."""
        if expected != getattr(self.error, "code", None):
            return expected in self.err
        held: dict[str, object] = getattr(self.error, "values", {})
        return all(name in held and held[name] == value for name, value in values.items())

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- out\n{self.out}\n--- err\n{self.err}"


class Here:
    """Runs commands in this process, which has torch already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, stdin: str | bytes = b"") -> Ended:
        from holdfast.cli import app

        errors: list[BaseException] = []
        report = app.report
        self._monkeypatch.setattr(app, "report", lambda error: errors.append(error) or report(error))
        data = stdin.encode() if isinstance(stdin, str) else stdin
        words = [str(argument) for argument in arguments]
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        self._monkeypatch.setattr(sys, "argv", ["holdfast", *words])
        self._capsys.readouterr()
        hears = signal.getsignal(signal.SIGINT)
        code = app.run(words)
        signal.signal(signal.SIGINT, hears)  # an interrupted command leaves a second Ctrl-C to end the process
        self._monkeypatch.setattr(app, "report", report)
        forget_log()
        return Ended(code, *self._capsys.readouterr(), error=errors[0] if errors else None)


def forget_log() -> None:
    """As before a command: a handler keeps the stderr of the test that it was made in, a level what other tests look for."""
    logger = logging.getLogger("holdfast")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def run_apart(*arguments: object) -> Ended:
    """A command in this process for several tests, whose streams are no caller's."""
    from holdfast.cli.app import run

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    forget_log()
    return Ended(code, out.getvalue(), err.getvalue())


def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """A command in a process of its own, whose three streams are pipes unless something else is requested."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | options.pop("env", {})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    words = [str(argument) for argument in arguments]
    return subprocess.Popen([sys.executable, "-c", MAIN, *words], env=environment, preexec_fn=_hear_interrupts, **pipes)


def _hear_interrupts() -> None:
    # A caller that was started in the background of a shell ignores them, and so would its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[bytes], data: bytes | None = None) -> Ended:
    """Wait for a command to end."""
    out, err = process.communicate(data, timeout=120)
    return Ended(process.returncode, (out or b"").decode(), (err or b"").decode())


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """What this process finds on stdin."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def refuse(word: str) -> None:
    """For `parse_constant` of a JSON parser: NaN and infinities are no JSON."""
    raise AssertionError(f"{word} is no JSON")
