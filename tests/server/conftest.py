"""One server for all tests of endpoints that need a port, and one app for those that do not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

    from holdfast.request.sampling_params import SamplingParams
    from server.served import Served


@pytest.fixture(scope="session")
def server() -> Iterator["Served"]:
    from server.served import served  # here, since a machine may lack what it needs

    with served() as running:
        yield running


@pytest.fixture(scope="session")
def client() -> Iterator["httpx.Client"]:
    from server.served import app_client

    with app_client() as session:
        yield session


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> "list[SamplingParams]":
    """Params of answers that are held to a form, which the fake model is not."""
    from holdfast.api.async_llm import AsyncLLM

    seen: list[SamplingParams] = []
    prepare = AsyncLLM.prepare

    async def spied(llm: Any, prompt: Any, params: "SamplingParams", **more: Any) -> Any:
        seen.append(params)
        return await prepare(llm, prompt, replace(params, structured_outputs=None), **more)

    monkeypatch.setattr(AsyncLLM, "prepare", spied)
    return seen


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Conversations as the engine gets them: messages, params and template options."""
    from holdfast.api.async_llm import AsyncLLM

    seen: list[dict[str, Any]] = []
    prepare = AsyncLLM.prepare_chat

    async def spied(llm: Any, messages: Any, params: Any, **more: Any) -> Any:
        seen.append({"messages": messages, "params": params, **more})
        return await prepare(llm, messages, params, **more)

    monkeypatch.setattr(AsyncLLM, "prepare_chat", spied)
    return seen
