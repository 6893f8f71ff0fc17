"""litellm and the llm command against a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.served import MODEL, Served, said, user


@pytest.mark.slow  # its import alone takes seconds
@pytest.mark.filterwarnings("ignore")
def test_litellm_completes_and_streams(server: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the internet
    import litellm

    body = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    done = litellm.completion(messages=user(said("Hello there")), temperature=0, **body)
    assert done.choices[0].message.content == "Hello there"
    assert done.usage.completion_tokens == 12
    again = [*user("Hi"), done.choices[0].message, *user(said("Again"))]
    assert litellm.completion(messages=again, **body).choices[0].message.content == "Again"
    chunks = litellm.completion(messages=user(said("<think>Hm</think>Streamed")), stream=True, **body)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Streamed"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=user("x" * 4000), **body)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=user("x"), **{**body, "model": "openai/other"})


@pytest.mark.slow
@pytest.mark.parametrize("words", ["stream", "whole"])
def test_llm_command(server: Served, tmp_path: Path, words: str):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n  api_key_name: none\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"}

    def ask(*words: str) -> str:
        command = [sys.executable, "-m", "llm", "prompt", "--no-log", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.rstrip("\n")

    if words == "stream":
        assert ask("-m", "here", "-o", "temperature", "0", "-s", "Be kind", said("Hello")) == "Hello"
    else:
        assert ask("-m", "here", "--no-stream", "-o", "max_tokens", "3", said("Hello")) == "Hel"
