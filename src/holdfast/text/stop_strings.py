"""StopStrings finds the first stop string in a streaming text and holds back text that may begin one; no torch.

The strings form one Aho-Corasick automaton. Its state is the longest suffix of the text that begins a stop string:
exactly the text to hold back. Each character is read once, however the text is split.
"""

from collections import deque
from collections.abc import Sequence

_Node = int
_ROOT: _Node = 0


class StopStrings:
    """Ends a text at the stop string that completes first; if several complete together, at the longest.

    `feed` returns the text to show and the stop string, if any. `feed_unstoppable` is for text in which stop strings do not
    count yet (fewer than min_tokens): a string that begins there and ends later does count.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        assert all(stop), f"{stop=} has an empty string"
        self._include = include
        self._children: list[dict[str, _Node]] = [{}]
        self._fallback: list[_Node] = [_ROOT]
        self._depth: list[int] = [0]
        self._found: list[str | None] = [None]
        for string in stop:
            self._insert(string)
        self._link()
        self._node = _ROOT
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text to show, and the stop string that ended it. After that, returns no text."""
        if self.matched is not None:
            return "", self.matched
        if len(self._children) == 1:
            return text, None
        node = self._node
        for index, character in enumerate(text):
            node = self._next(node, character)
            found = self._found[node]
            if found is not None:
                end = len(self._held) + index + 1
                whole = self._held + text
                self.matched, self._held, self._node = found, "", _ROOT
                return whole[: end if self._include else end - len(found)], found
        return self._advance(node, text), None

    def feed_unstoppable(self, text: str) -> str:
        """Return the text to show; no stop string may end the text yet."""
        if self.matched is not None or len(self._children) == 1:
            return "" if self.matched is not None else text
        node = self._node
        for character in text:
            node = self._next(node, character)
        return self._advance(node, text)

    def flush(self) -> str:
        """Return the held text; call after the last piece."""
        held, self._held, self._node = self._held, "", _ROOT
        return held

    @property
    def num_held(self) -> int:
        """Number of characters held back: less than the length of the longest stop string."""
        return len(self._held)

    def _advance(self, node: _Node, text: str) -> str:
        # A complete string that is no prefix of a longer one cannot match again.
        while node != _ROOT and not self._children[node]:
            node = self._fallback[node]
        whole = self._held + text
        cut = len(whole) - self._depth[node]
        self._node, self._held = node, whole[cut:]
        return whole[:cut]

    def _next(self, node: _Node, character: str) -> _Node:
        while character not in self._children[node]:
            if node == _ROOT:
                return _ROOT
            node = self._fallback[node]
        return self._children[node][character]

    def _insert(self, string: str) -> None:
        node = _ROOT
        for character in string:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._fallback.append(_ROOT)
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = child
        self._found[node] = string

    def _link(self) -> None:
        """Compute each node's fallback and the longest string that ends there, breadth first."""
        waiting = deque(self._children[_ROOT].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._children[node].items():
                waiting.append(child)
                self._fallback[child] = self._next(self._fallback[node], character)
                if self._found[child] is None:
                    self._found[child] = self._found[self._fallback[child]]
