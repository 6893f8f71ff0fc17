"""GrammarGuard first compiles grammars of requests in a child process, which dies if one takes too long; no torch.

The compiler has limits (fuel, states, sizes), but not everywhere: the conjunction of several patterns may take forever. Native
code cannot be stopped in a thread, so a child compiles a grammar first, under limits of the kernel: CPU seconds and bytes. A
child that reaches one dies, and the next grammar gets another.

This file is also the child: it runs by its path, and imports nothing of the package.
"""

import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any

CPU_SECONDS = 2
"""CPU time of a child for one grammar, rounded up to a whole second."""
WALL_SECONDS = 15.0
"""Wall time for one grammar, on a busy machine."""
CHILD_BYTES = 2 * 2**30
MAX_ERROR_CHARS = 240
WHITESPACE = r"(\x20|\n[\x20\t]{0,40})"
"""Bounded space between parts of JSON: a space, or a line break with indent. Else a model may write only space."""
LIMITS = {
    "max_items_in_row": 2500,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits beside llguidance's fuel per step: enough for an object of 512 optional properties, up to about 20 MB of states, no
precomputation, and errors that do not repeat the text."""


def llguidance_text(kind: str, text: str) -> str:
    """Return a grammar for llguidance; `text` is a schema, a regex, a grammar, or choices as a JSON list."""
    from llguidance import LLMatcher

    if kind == "json":
        # These override x-guidance of the schema: an answer is JSON.
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": WHITESPACE, "item_separator": ",", "key_separator": ":"}
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(ascii_classes(text))
    if kind == "choice":
        text = f"start: {' | '.join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))}"
    elif "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        text = any_to_lark(text)
    # A bare text could be a grammar in llguidance's own format too.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}


def ascii_classes(regex: str) -> str:
    r"""Return the expression with \d and \w limited to ASCII, as in JSON schemas."""
    found: list[str] = []
    is_in_class, place = False, 0
    while place < len(regex):
        one = regex[place]
        pair = regex[place : place + 2]
        if one == "\\":
            if len(pair) < 2:
                raise ValueError("it ends in a backslash")
            listed = _CLASSES.get(pair[1].lower())
            is_negated = pair[1].isupper()
            if listed is None or (is_in_class and is_negated):
                found.append(pair)
            elif is_in_class:
                found.append(listed)
            else:
                found.append(f"[{'^' * is_negated}{listed}]")
            place += 2
            continue
        if one == "[" and not is_in_class:
            is_in_class = True
            lead = next(lead for lead in ("[^]", "[]", "[^", "[") if regex.startswith(lead, place))
            found.append(lead)  # a leading bracket is a character
            place += len(lead)
            continue
        is_in_class = is_in_class and one != "]"
        found.append(one)
        place += 1
    return "".join(found)


def parser_limits() -> Any:  # noqa: ANN401 - llguidance may be missing
    """Return the limits of compiling and of every step."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


def plain_error(text: str) -> str:
    """Return a compiler's error as one bounded line."""
    text = text.replace("<non-verbose/>", " ").partition("\n   1 |")[0]
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "use anyOf")
    text = text.replace("NoExtensionBias", "it refers to itself and to nothing else")
    line = "".join(one if one.isprintable() else " " for one in text)
    line = " ".join(line.split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[: MAX_ERROR_CHARS - 3]}..."


class GrammarGuard:
    """One child at a time, started on demand. Thread-safe."""

    def __init__(self, cpu_seconds: int = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> None:
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end = weakref.finalize(self, lambda: None)

    def error(self, kind: str, text: str) -> str | None:
        """Return the reason why this grammar does not compile; None if it does."""
        with self._lock:
            child = self._started()
            line = json.dumps([kind, text]).encode() + b"\n"
            answer = b""
            try:
                assert child.stdin is not None, "it was opened with a pipe"
                child.stdin.write(line)
                child.stdin.flush()
                answer = self._answer(child)
            except OSError:  # it died at the previous grammar
                pass
            if not answer.endswith(b"\n"):
                self._end()
                self._child = None
                return f"it takes more than {self._cpu_seconds} seconds to compile, or too much memory"
            return json.loads(answer)

    def close(self) -> None:
        """End the child, even while it compiles; the next grammar starts another."""
        self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            command = [sys.executable, "-P", str(Path(__file__).resolve()), str(self._cpu_seconds)]
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on a terminal must not reach the child
            )
            # Also runs when the guard is collected, and before the interpreter ends.
            self._end = weakref.finalize(self, _end_child, self._child)
        return self._child

    def _answer(self, child: subprocess.Popen[bytes]) -> bytes:
        """Read one line, or part of it if the timeout comes first."""
        assert child.stdout is not None, "it was opened with a pipe"
        end, answer = time.monotonic() + self._wall_seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n") and selector.select(max(end - time.monotonic(), 0.0)):
                piece = child.stdout.read1(2**16)  # pyright: ignore[reportAttributeAccessIssue] - it is buffered
                if not piece:
                    break
                answer += piece
        return answer


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def try_out(kind: str, text: str) -> str | None:
    """Compile a grammar without a vocabulary, in the child; return the reason if that fails."""
    from llguidance import LLMatcher

    try:
        error = LLMatcher.validate_grammar(llguidance_text(kind, text), None, limits=parser_limits())
    except Exception as failure:
        return plain_error(str(failure)) or type(failure).__name__
    return None if not error or error.startswith("WARNING") else plain_error(error)


def serve(requests: IO[bytes], answers: IO[bytes], cpu_seconds: int) -> None:
    """Run the child's loop: one grammar per line."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    for line in requests:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        most = int(usage.ru_utime + usage.ru_stime) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        kind, text = json.loads(line)
        answers.write(json.dumps(try_out(kind, text)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
