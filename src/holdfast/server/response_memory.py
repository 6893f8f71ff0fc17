"""ResponseMemory: stored answers of /v1/responses for later requests, in memory and bounded in bytes; no torch.

A response holds its own items as JSON bytes and refers to the one that it continues. So a long conversation is held once,
and bytes are counted exactly. The oldest response is dropped first. Its items stay, and count, while a later response
continues it.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from holdfast.memory.sizes import format_bytes

OVERHEAD_BYTES = 1024
"""Bytes per response besides its JSON: objects, id and index entry."""


@dataclass(eq=False, slots=True)
class KeptResponse:
    """One response with its items."""

    key_index: int | None
    """The API key that made it; only this key finds it."""
    previous: "KeptResponse | None"
    frame: bytes
    """The response without its output."""
    items: bytes
    """Its own input, then its output."""
    num_inputs: int
    chain_bytes: int
    """Bytes of this response and of all it continues."""
    num_holders: int = 1
    """Reference count: the index and responses that continue this one."""

    @property
    def num_bytes(self) -> int:
        """Bytes of this response alone."""
        return len(self.frame) + len(self.items) + OVERHEAD_BYTES

    def response(self) -> dict[str, Any]:
        """Return the complete answer."""
        return {**json.loads(self.frame), "output": json.loads(self.items)[self.num_inputs :]}

    def input_items(self) -> list[dict[str, Any]]:
        """Return all input in order: the conversation before it, then its own."""
        earlier = [] if self.previous is None else self.previous.conversation()
        return [*earlier, *json.loads(self.items)[: self.num_inputs]]

    def conversation(self) -> list[dict[str, Any]]:
        """Return all items, which the next request continues."""
        return [item for link in reversed(_chain(self)) for item in json.loads(link.items)]


class ResponseMemory:
    """Responses by id. Used from the event loop only."""

    def __init__(self, limit_bytes: int, max_responses: int) -> None:
        self.limit_bytes = limit_bytes
        self.max_responses = max_responses
        self.num_bytes = 0
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        """Return True if this server stores responses."""
        return self.limit_bytes > 0

    def terms(self) -> str:
        """Describe how long a response is kept."""
        if not self:
            return "this server stores no responses (--response-memory 0)"
        limit = f"{format_bytes(self.limit_bytes)} and {self.max_responses} responses"
        return f"responses stay in memory until newer ones need the space ({limit}) or the server ends"

    def keep(
        self,
        response: dict[str, Any],
        inputs: list[dict[str, Any]],
        key_index: int | None,
        previous: KeptResponse | None,
    ) -> None:
        """Store a complete response, unless it exceeds the limit together with all it continues."""
        frame = {name: value for name, value in response.items() if name != "output"}
        made = KeptResponse(key_index, previous, _json(frame), _json([*inputs, *response["output"]]), len(inputs), 0)
        made.chain_bytes = made.num_bytes + (0 if previous is None else previous.chain_bytes)
        if made.chain_bytes > self.limit_bytes:
            return
        if previous is not None:
            # Count it again if it was dropped since this answer began.
            self._hold(previous)
        self._kept[response["id"]] = made
        self.num_bytes += made.num_bytes
        while self.num_bytes > self.limit_bytes or len(self._kept) > self.max_responses:
            self._release(self._kept.popitem(last=False)[1])

    def find(self, response_id: str, key_index: int | None) -> KeptResponse | None:
        """Return the response of this id if this key made it."""
        kept = self._kept.get(response_id)
        return kept if kept is not None and kept.key_index == key_index else None

    def delete(self, response_id: str, key_index: int | None) -> bool:
        """Delete a response; False if there is none."""
        if self.find(response_id, key_index) is None:
            return False
        self._release(self._kept.pop(response_id))
        return True

    def _hold(self, link: KeptResponse) -> None:
        holder: KeptResponse | None = link
        while holder is not None:
            holder.num_holders += 1
            if holder.num_holders > 1:
                return
            self.num_bytes += holder.num_bytes
            holder = holder.previous

    def _release(self, link: KeptResponse) -> None:
        holder: KeptResponse | None = link
        while holder is not None:
            holder.num_holders -= 1
            if holder.num_holders > 0:
                return
            self.num_bytes -= holder.num_bytes
            holder = holder.previous

    def check(self) -> None:
        """Assert that the byte count equals the bytes held."""
        held = {id(link): link for kept in self._kept.values() for link in _chain(kept)}
        counted = sum(link.num_bytes for link in held.values())
        assert counted == self.num_bytes <= max(self.limit_bytes, 0), (
            f"{counted=} {self.num_bytes=} {self.limit_bytes=}"
        )
        assert len(self._kept) <= self.max_responses, f"{len(self._kept)} responses"


def _chain(kept: KeptResponse) -> list[KeptResponse]:
    links: list[KeptResponse] = []
    link: KeptResponse | None = kept
    while link is not None:
        links.append(link)
        link = link.previous
    return links


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
