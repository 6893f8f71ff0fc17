"""Tasks of an evaluation, read from data/eval_tasks.json: continuations, JSON, tool calls, facts; no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

Conversation = tuple[dict[str, str], ...]


class JsonTask(NamedTuple):
    """A conversation whose answer is a JSON object."""

    conversation: Conversation
    keys: tuple[str, ...]
    """Keys that the object has, and no others."""
    name: str = ""
    """Function to call; empty if the object itself is the answer."""


class RecallTask(NamedTuple):
    """Facts about keys, and words to choose from."""

    fact: str
    question: str
    keys: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tasks:
    """All tasks, or a few for a quick run."""

    continuations: tuple[str, ...]
    """Prompts of code and prose."""
    json: tuple[JsonTask, ...]
    tools: tuple[JsonTask, ...]
    recall: RecallTask

    def first(self, num_continuations: int, num_objects: int) -> "Tasks":
        """Return a few tasks of each kind."""
        return Tasks(
            self.continuations[:num_continuations], self.json[:num_objects], self.tools[:num_objects], self.recall
        )


@cache
def read_tasks() -> Tasks:
    """Read the tasks."""
    text = resources.files("holdfast").joinpath("data", "eval_tasks.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    recall = data["recall"]
    return Tasks(
        tuple(row["prompt"] for row in data["continuations"]),
        tuple(JsonTask((_said("user", row["ask"]),), tuple(row["keys"])) for row in data["json"]),
        _tool_tasks(data["tools"]),
        RecallTask(recall["fact"], recall["question"], tuple(recall["keys"]), tuple(recall["words"])),
    )


def _tool_tasks(data: dict[str, Any]) -> tuple[JsonTask, ...]:
    """Make conversations with one worked call, so that a small model knows the form in any chat template."""
    before = (_said("user", data["ask"]), _said("assistant", data["answer"]))
    arguments = tuple(data["arguments"])
    return tuple(JsonTask((*before, _said("user", ask)), arguments, data["name"]) for ask in data["more"])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def is_valid(task: JsonTask, answer: str) -> bool:
    """Return True if an answer holds a JSON object with the task's keys, or a call of its function with such arguments.

    Text around the object, such as a code fence, is accepted.
    """
    found = first_object(answer)
    if task.name:
        if found is None or found.get("name") != task.name:
            return False
        found = found.get("arguments")
    return isinstance(found, dict) and sorted(found) == sorted(task.keys)


def first_object(answer: str) -> dict[str, Any] | None:
    """Parse the JSON object at the first brace of a text; None without one."""
    start = answer.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(answer[start:])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def same_tokens(reference: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many first tokens of two answers are equal."""
    pairs = zip(reference, answer, strict=False)
    return next((place for place, (ours, own) in enumerate(pairs) if ours != own), min(len(reference), len(answer)))
