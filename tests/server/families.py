"""One request in the shape of each API family, and its answer, whole or streamed, in one shape."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Turn = tuple[str, str]
"""Role and text."""
Said = list[dict[str, str]]
Stops = Sequence[str] | None


@dataclass
class Call:
    """A call of a tool, complete."""

    name: str
    id: str
    written: str = ""

    @property
    def arguments(self) -> Any:
        return json.loads(self.written or "{}")


@dataclass
class Choice:
    """One completion."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    reason: str | None = None
    stop: str | None = None


@dataclass
class Answered:
    """All that an answer says."""

    choices: list[Choice]
    usage: tuple[int, int, int]
    """Tokens of the prompt, those of them that were cached, and tokens of the answer."""
    id: str = ""

    @property
    def only(self) -> Choice:
        assert len(self.choices) == 1, self.choices
        return self.choices[0]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of server-sent events, the last mark left out."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


class Api:
    """What the families share: how a request is put together."""

    def body(
        self,
        turns: Sequence[Turn],
        tools: Sequence[str] = (),
        stop: Stops = None,
        max_tokens: int | None = None,
    ) -> dict[str, Any]:
        body = self._body([{"role": role, "content": text} for role, text in turns], stop, max_tokens)
        return body | ({"tools": [self._tool(name) for name in tools]} if tools else {})

    def _body(self, messages: Said, stop: Stops, max_tokens: int | None) -> dict[str, Any]:
        raise NotImplementedError

    def _tool(self, name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}


class Chat(Api):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    called, stopped, cut = "tool_calls", "stop", "length"

    def _body(self, messages: Said, stop: Stops, max_tokens: int | None) -> dict[str, Any]:
        return {"messages": messages} | _known(stop=stop, max_tokens=max_tokens)

    def whole(self, value: dict[str, Any]) -> Answered:
        choices = []
        for place, one in enumerate(value["choices"]):
            assert one["index"] == place
            message = one["message"]
            calls = [
                Call(call["function"]["name"], call["id"], call["function"]["arguments"])
                for call in message.get("tool_calls", ())
            ]
            reasoning = message.get("reasoning_content", "")
            choices.append(
                Choice(message["content"] or "", reasoning, calls, one["finish_reason"], one.get("stop_reason"))
            )
        return Answered(choices, _openai_usage(value["usage"]), value["id"])

    def streamed(self, text: str) -> Answered:
        assert text.endswith("data: [DONE]\n\n")
        chunks = events(text)
        choices: dict[int, Choice] = {}
        for chunk in chunks:
            assert chunk["id"] == chunks[0]["id"]
            for one in chunk["choices"]:
                is_first = one["index"] not in choices
                choice = choices.setdefault(one["index"], Choice())
                assert choice.reason is None, "a choice goes on after its end"
                delta = one["delta"]
                assert ("role" in delta) == (is_first and self.path == Chat.path), "the first chunk has the role"
                choice.content += delta.get("content") or ""
                choice.reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(choice.calls):
                        choice.calls.append(Call(call["function"]["name"], call["id"]))
                    choice.calls[call["index"]].written += call["function"]["arguments"]
                choice.reason, choice.stop = one["finish_reason"], one.get("stop_reason")
        usage = _openai_usage(chunks[-1]["usage"]) if chunks[-1].get("usage") else (0, 0, 0)
        return Answered([choices[index] for index in sorted(choices)], usage, chunks[0]["id"])


class Completions(Chat):
    """/v1/completions, whose prompt is the last turn."""

    path = "/v1/completions"

    def _body(self, messages: Said, stop: Stops, max_tokens: int | None) -> dict[str, Any]:
        return {"prompt": messages[-1]["content"], "max_tokens": max_tokens or 100} | _known(stop=stop)

    def body(self, turns: Sequence[Turn], tools: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        return super().body(turns, (), **more)

    def whole(self, value: dict[str, Any]) -> Answered:
        assert [one["index"] for one in value["choices"]] == list(range(len(value["choices"])))
        choices = [
            Choice(one["text"], reason=one["finish_reason"], stop=one.get("stop_reason")) for one in value["choices"]
        ]
        return Answered(choices, _openai_usage(value["usage"]), value["id"])

    def streamed(self, text: str) -> Answered:
        as_chat = [
            {**chunk, "choices": [{**one, "delta": {"content": one["text"]}} for one in chunk["choices"]]}
            for chunk in events(text)
        ]
        assert text.endswith("data: [DONE]\n\n")
        return super().streamed("".join(f"data: {json.dumps(one)}\n\n" for one in as_chat) + "data: [DONE]\n\n")


class Responses(Api):
    """/v1/responses."""

    path = "/v1/responses"
    called, stopped, cut = "completed", "completed", "incomplete"

    def _body(self, messages: Said, stop: Stops, max_tokens: int | None) -> dict[str, Any]:
        return {"input": messages} | _known(stop=stop, max_output_tokens=max_tokens)

    def _tool(self, name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "parameters": None}

    def whole(self, value: dict[str, Any]) -> Answered:
        choice = Choice(reason=value["status"])
        for item in value["output"]:
            if item["type"] == "message":
                choice.content += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                choice.reasoning += "".join(part["text"] for part in item["content"])
            else:
                choice.calls.append(Call(item["name"], item["call_id"], item["arguments"]))
        usage = value["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        counts = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
        return Answered([choice], counts, value["id"])

    def streamed(self, text: str) -> Answered:
        """What deltas add up to; the last event has to say the same."""
        found = events(text)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        choice, calls = Choice(), dict[int, Call]()
        for event in found:
            match event["type"]:
                case "response.output_text.delta":
                    choice.content += event["delta"]
                case "response.reasoning_text.delta":
                    choice.reasoning += event["delta"]
                case "response.function_call_arguments.delta":
                    calls[event["output_index"]].written += event["delta"]
                case "response.output_item.added" if event["item"]["type"] == "function_call":
                    calls[event["output_index"]] = Call(event["item"]["name"], event["item"]["call_id"])
        final = self.whole(found[-1]["response"])
        choice.calls, choice.reason = [calls[place] for place in sorted(calls)], found[-1]["type"].split(".")[1]
        assert choice == final.only
        return final


class Messages(Api):
    """/v1/messages."""

    path = "/v1/messages"
    called, stopped, cut = "tool_use", "end_turn", "max_tokens"

    def _body(self, messages: Said, stop: Stops, max_tokens: int | None) -> dict[str, Any]:
        fixed = {"messages": messages, "max_tokens": max_tokens or 200, "thinking": {"type": "adaptive"}}
        return fixed | _known(stop_sequences=stop)

    def _tool(self, name: str) -> dict[str, Any]:
        return {"name": name, "input_schema": {"type": "object"}}

    def whole(self, value: dict[str, Any]) -> Answered:
        choice = Choice(reason=value["stop_reason"], stop=value["stop_sequence"])
        for block in value["content"]:
            if block["type"] == "tool_use":
                choice.calls.append(Call(block["name"], block["id"], json.dumps(block["input"])))
            elif block["type"] == "thinking":
                choice.reasoning += block["thinking"]
            else:
                choice.content += block["text"]
        return Answered([choice], _anthropic_usage(value["usage"]), value["id"])

    def streamed(self, text: str) -> Answered:
        found = [event for event in events(text) if event["type"] != "ping"]
        assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
        choice, open_block, num_blocks = Choice(), None, 0
        for event in found:
            if event["type"] == "content_block_start":
                assert (open_block, event["index"]) == (None, num_blocks), "blocks overlap, or one is skipped"
                open_block = event["content_block"]
                if open_block["type"] == "tool_use":
                    choice.calls.append(Call(open_block["name"], open_block["id"]))
            elif event["type"] == "content_block_stop":
                assert event["index"] == num_blocks
                open_block, num_blocks = None, num_blocks + 1
            elif event["type"] == "content_block_delta":
                assert event["index"] == num_blocks
                delta = event["delta"]
                choice.content += delta.get("text", "")
                choice.reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    choice.calls[-1].written += delta["partial_json"]
        end = found[-2]
        choice.reason, choice.stop = end["delta"]["stop_reason"], end["delta"]["stop_sequence"]
        return Answered([choice], _anthropic_usage(end["usage"]), found[0]["message"]["id"])


class Ollama(Api):
    """/api/chat."""

    path = "/api/chat"
    called, stopped, cut = "stop", "stop", "length"

    def _body(self, messages: Said, stop: Stops, max_tokens: int | None) -> dict[str, Any]:
        return {"messages": messages, "options": _known(stop=stop, num_predict=max_tokens)}

    def whole(self, value: dict[str, Any]) -> Answered:
        return self._answered([value])

    def streamed(self, text: str) -> Answered:
        return self._answered([json.loads(line) for line in text.split("\n") if line])

    def _answered(self, lines: list[dict[str, Any]]) -> Answered:
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        choice = Choice(reason=lines[-1]["done_reason"])
        for line in lines:
            message = line["message"]
            choice.content += message["content"]
            choice.reasoning += message.get("thinking", "")
            for call in message.get("tool_calls", ()):
                function = call["function"]
                assert function["index"] == len(choice.calls)
                choice.calls.append(Call(function["name"], call["id"], json.dumps(function["arguments"])))
        return Answered([choice], (lines[-1]["prompt_eval_count"], -1, lines[-1]["eval_count"]))


Family = Chat | Completions | Responses | Messages | Ollama
CHATS: tuple[Family, ...] = (Chat(), Responses(), Messages(), Ollama())
ALL: tuple[Family, ...] = (*CHATS, Completions())


def ask(
    client: httpx.Client,
    family: Family,
    body: dict[str, Any],
    *,
    stream: bool,
    headers: dict[str, str] | None = None,
) -> Answered:
    """Send a request, with usage in the stream if the family needs an option for it."""
    body = {**body, "stream": stream}
    if stream and isinstance(family, Chat):
        body["stream_options"] = {"include_usage": True}
    answer = client.post(family.path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return family.streamed(answer.text) if stream else family.whole(answer.json())


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _openai_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def _anthropic_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]
