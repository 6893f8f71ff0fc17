"""For tests of endpoints: a model with scripted answers, in this process or at a real port.

The model of fakes continues a prompt with what stands between SAY and END in it, the last of them, and then ends; a prompt
without them it continues with letters that are a hash of it.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.fakes import EOS, HIDDEN_SIZE, HashRunner, make_engine
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.opened import open_engine
from holdfast.config import EngineConfig
from holdfast.engine.engine import Engine
from holdfast.engine.pooling import Pooling
from holdfast.loading.planning.open_model import PoolingSettings
from holdfast.memory.report import MemoryReport
from holdfast.request.sequence import ScheduledSequence
from holdfast.server.app import make_app
from holdfast.server.run import Server, address_of, bind_socket
from holdfast.server.service import Service
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.detokenizer import byte_alphabet
from loading.tiny_models import SMALL

SAY, END = "\x01", "\x02"
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }} <tool_call>
{% endif -%}
{% for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %} <tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}{#- <think></think> #}"""
MODEL = "fake"
NAMES = (MODEL, "alias/model")


def said(text: str) -> str:
    """A question that is answered with this text."""
    return f"{SAY}{text}{END}"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def make_served_engine(**options: Any) -> Engine:
    """Make an engine whose model gives scripted answers."""
    sizes = {"max_model_len": 1024, "num_pages": 1024, "page_tokens": 16, "max_num_batched_tokens": 512}
    template = ChatTemplate(TEMPLATE, "fake", {})
    account = MemoryReport((), 0, "none", 1, 1, 1)
    pooling = Pooling(PoolingSettings(is_embedding=True), MODEL, HIDDEN_SIZE)
    engine = make_engine(**{**sizes, "chat_template": template, "memory": account, "pooling": pooling, **options})
    engine.runner.choose = lambda item, prefix: _choose(engine.runner, item, prefix)  # type: ignore[attr-defined]
    return engine


def open_tiny_engine(
    folder: Path, template: str = TEMPLATE, special_tokens: Sequence[str] = (), **options: Any
) -> Engine:
    """A tiny random model of bytes, which says nothing of sense unless it must."""
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "head_dim": 16}
    own = {"max_position_embeddings": 2048, "eos_token_id": 258, "torch_dtype": "float32"}
    own["vocab_size"] = 259 + len(special_tokens)
    (folder / "config.json").write_text(json.dumps({**SMALL, **settings, **own}))
    backend = Backend(models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", *special_tokens])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    sizes = {"max_model_len": 1536, "max_num_seqs": 4, "kv_cache_memory": "64MB", "load_format": "dummy"}
    return open_engine(EngineConfig.from_options(model=folder, device="cpu", **{**sizes, **options}), None)


def _choose(runner: HashRunner, item: ScheduledSequence, prefix: bytes) -> int:
    sequence = item.sequence
    prompt = bytes(token if token < 256 else 0 for token in sequence.token_ids[: sequence.num_prompt_tokens])
    begin, end = prompt.rfind(SAY.encode()), prompt.rfind(END.encode())
    if not 0 <= begin < end:
        return HashRunner.choose(runner, item, prefix)
    text = prompt[begin + 1 : end]
    place = sequence.num_output_tokens
    return text[place] if place < len(text) else EOS


@dataclass
class Served:
    """A server in a thread of this process."""

    url: str
    service: Service
    engine: Engine


@contextmanager
def served(engine: Engine | None = None, **options: Any) -> Iterator[Served]:
    """A server on a port of its own."""
    engine = engine or make_served_engine(**options)
    service = Service(AsyncLLM.from_engine(engine), NAMES)
    listener = bind_socket("127.0.0.1", 0)
    is_ready = threading.Event()
    started: list[tuple[Server, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        server = Server(make_app(service), service, is_ready.set, owns_process=False)
        started.append((server, asyncio.get_running_loop()))
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(30), "the server did not start"
    try:
        yield Served(address_of(listener), service, engine)
    finally:
        server, loop = started[0]
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        service.llm.shutdown()


def until(condition: Callable[[], bool], words: str) -> None:
    """Wait for another thread."""
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError(words)


@contextmanager
def app_client(engine: Engine | None = None, **options: Any) -> Iterator[httpx.Client]:
    """A client of an app in this process, without a port."""
    from starlette.testclient import TestClient

    llm = AsyncLLM.from_engine(engine or make_served_engine(**options))
    try:
        with TestClient(make_app(Service(llm, NAMES)), base_url="http://localhost") as client:
            yield client
    finally:
        llm.shutdown()
