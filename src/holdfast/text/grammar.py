"""Grammars of structured outputs: compiled by llguidance, with a bitmask of the tokens that may come next; no torch.

    front   GrammarCheck     checks once whether a grammar compiles, before its request costs anything else
    core    Grammars         a matcher for each sequence, compiled concurrently with the step loop
    runner  Grammars.fill    the masks of a step, from the current tokens of the sequences

A vocabulary has our detokenizer's bytes for each token, so a grammar sees the text that the caller gets. It is made for
the first grammar. Matchers of one request share caches; matchers of different requests share nothing, so none can use
up the limits of another.

R rows, W words of 32 bits
"""

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import RequestError, install_words
from holdfast.request.sequence import Sequence
from holdfast.request.structured import StructuredOutputs
from holdfast.text.grammar_guard import GrammarGuard, llguidance_text, parser_limits, plain_error
from holdfast.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_VERDICTS = 1024
"""Most cached verdicts. Each is a digest and a refusal's reason of at most MAX_ERROR_CHARS."""
ANY_OBJECT = '{"type":"object"}'
HARD_WORDS = ('"allOf"', '"pattern', '"not"', '"if"', '"format"', '"$dynamicRef"', '"x-guidance"')
"""Keywords for which the compiler compares expressions; a schema without them compiles in linear time."""
MASK_THREADS = 8
SHARED_ROWS = 16
"""Fewest rows to fill masks in several threads: a row takes about 0.1 ms, and waking a thread may take as long."""


def grammar_text(form: StructuredOutputs) -> tuple[str, str]:
    """Return kind and text of a structured output; choices are a JSON list."""
    if form.json_object:
        return "json", ANY_OBJECT
    if form.choice is not None:
        return "choice", json.dumps(form.choice, ensure_ascii=False)
    return form.kind, str(getattr(form, form.kind))


class Vocabulary:
    """The vocabulary for llguidance, made at first use. Thread-safe."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.open_tokenizer = open_tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    @property
    def has_end(self) -> bool:
        """True if the model has a token that ends an answer."""
        return bool(self._eos_token_ids)

    @property
    def num_words(self) -> int:
        """32-bit words of a mask; if no token ends an answer, one more bit stands for the end."""
        return -(-(self.vocab_size + (not self.has_end)) // 32)

    def get(self) -> "LLTokenizer":
        """Return the vocabulary, made at the first call."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = self.open_tokenizer()
        ends = self._eos_token_ids or [self.vocab_size]
        num_tokens = self.vocab_size + (not self.has_end)
        wrapped = TokenizerWrapper(_TokenBytes(tokenizer, self.vocab_size, num_tokens, ends))
        return LLTokenizer(wrapped, n_vocab=num_tokens, eos_token=ends)


class _TokenBytes:
    """The tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, num_tokens: int, ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = {token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size}
        self.tokens = [tokenizer.token_bytes(token_id) or b"" for token_id in range(vocab_size)]
        self.tokens += [b"<|end of the form|>"] * (num_tokens - vocab_size)
        self.special_token_ids = sorted(special | set(ends))
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def compile_grammar(form: StructuredOutputs, vocabulary: Vocabulary) -> "LLMatcher":
    """Compile a matcher at the start of an answer; raises ValueError with the reason if that fails."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(vocabulary.get(), llguidance_text(*grammar_text(form)), log_level=0, limits=parser_limits())
    except RequestError:
        raise
    except Exception as error:
        raise ValueError(plain_error(str(error)) or type(error).__name__) from error
    if matcher.is_error():
        raise ValueError(plain_error(matcher.get_error()))
    return matcher


def refuse_missing(form: StructuredOutputs) -> None:
    """Raise if llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError("grammar.not_installed", kind=form.kind, install=install_words("server"))


class GrammarCheck:
    """Checks that grammars compile. Thread-safe; caches at most MAX_VERDICTS verdicts."""

    def __init__(self, vocabulary: Vocabulary, guard: GrammarGuard | None = None) -> None:
        self._vocabulary = vocabulary
        self._guard = guard or GrammarGuard()
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, str | None] = {}

    def check(self, form: StructuredOutputs) -> None:
        """Raise RequestError for a grammar that does not compile, or not in time."""
        refuse_missing(form)
        kind, text = grammar_text(form)
        digest = blake2b(f"{kind}\0{text}".encode(), digest_size=32).digest()
        with self._lock:
            is_known, error = digest in self._verdicts, self._verdicts.get(digest)
        if not is_known:
            error = self._error(form, kind, text)
            with self._lock:
                self._verdicts[digest] = error
                while len(self._verdicts) > MAX_VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
        if error is not None:
            raise RequestError("grammar.refused", name="structured_outputs", kind=form.kind, reason=error)

    def close(self) -> None:
        """End the child process that compiles grammars, if there is one."""
        self._guard.close()

    @property
    def num_verdicts(self) -> int:
        """Number of cached verdicts."""
        return len(self._verdicts)

    def _error(self, form: StructuredOutputs, kind: str, text: str) -> str | None:
        is_easy = kind == "choice" or (kind == "json" and not any(word in text for word in HARD_WORDS))
        error = None if is_easy else self._guard.error(kind, text)
        if error is not None:
            return error
        try:
            matcher = compile_grammar(form, self._vocabulary)
        except ValueError as failure:
            return str(failure)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return plain_error(matcher.get_error())
        return None if any(mask) else "no token of the vocabulary can begin it"


@dataclass(eq=False, slots=True)
class _Following:
    """State of one sequence in its grammar."""

    matcher: "LLMatcher"
    num_consumed: int = 0
    """Output tokens that the matcher has seen."""
    failure: str | None = None


class Prepared(NamedTuple):
    """Sequences whose grammar has been compiled, or the error."""

    sequence_ids: tuple[int, ...]
    error: str | None


class Grammars:
    """Grammars of one core's sequences. Use from one thread; another compiles."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._following: dict[int, _Following] = {}
        self._compiling: dict[Future[LLMatcher], list[int]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def __len__(self) -> int:
        return len(self._following)

    def begin(self, sequence_ids: SequenceABC[int], form: StructuredOutputs) -> None:
        """Start to compile the grammar of these sequences; `ready` returns the result."""
        refuse_missing(form)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "holdfast-grammars")
        compiling = self._threads.submit(compile_grammar, form, self._vocabulary)
        self._compiling[compiling] = list(sequence_ids)

    def wait(self, seconds: float) -> None:
        """Wait for one running compilation, at most `seconds`. May be interrupted."""
        if self._compiling:
            wait(self._compiling, seconds, FIRST_COMPLETED)

    def ready(self) -> list[Prepared]:
        """Return the compilations that have ended since the last call."""
        done = [compiling for compiling in self._compiling if compiling.done()]
        return [self._prepared(compiling, tuple(self._compiling.pop(compiling))) for compiling in done]

    def _prepared(self, compiling: "Future[LLMatcher]", sequence_ids: tuple[int, ...]) -> Prepared:
        error = compiling.exception()
        if error is not None:
            return Prepared(sequence_ids, plain_error(str(error)) or type(error).__name__)
        matcher = compiling.result()
        for nth, sequence_id in enumerate(sequence_ids):
            self._following[sequence_id] = _Following(matcher.deep_copy() if nth else matcher)
        return Prepared(sequence_ids, None)

    def fill(self, sequences: SequenceABC[Sequence | None], masks_RW: "np.ndarray") -> None:
        """Set bit t of row i if token t may follow sequences[i]; no bits after a failure. Skip rows of None."""
        import numpy as np  # imported late: a command that only opens files need not wait for it

        num_words = self._vocabulary.num_words
        is_own = masks_RW.shape[1] == num_words and masks_RW.flags.c_contiguous
        words_RW = masks_RW if is_own else np.zeros((len(sequences), num_words), masks_RW.dtype)
        followed = [(row, self._advanced(sequence)) for row, sequence in enumerate(sequences) if sequence is not None]
        moving = [(one.matcher, row) for row, one in followed if one is not None and one.failure is None]
        self._compute(moving, words_RW)
        for row, one in followed:
            if one is not None and one.failure is None and one.matcher.is_error():
                one.failure = plain_error(one.matcher.get_error())
            if one is None or one.failure is not None:
                words_RW[row] = 0
            if not is_own:
                masks_RW[row] = words_RW[row, : masks_RW.shape[1]]

    def _advanced(self, sequence: Sequence) -> _Following | None:
        """Return the state of a sequence after all of its tokens; None for one that has ended."""
        one = self._following.get(sequence.sequence_id)
        if one is None or one.failure is not None:
            return one
        new = sequence.token_ids[sequence.num_prompt_tokens + one.num_consumed :]
        if new and not one.matcher.consume_tokens(new):
            one.failure = plain_error(one.matcher.get_error())
        one.num_consumed += len(new)
        return one

    def _compute(self, moving: list[tuple["LLMatcher", int]], words_RW: "np.ndarray") -> None:
        num_bytes = words_RW.shape[1] * words_RW.itemsize
        begin = words_RW.ctypes.data
        if len(moving) < SHARED_ROWS:
            for matcher, row in moving:
                matcher.unsafe_compute_mask_ptr(begin + row * num_bytes, num_bytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(MASK_THREADS, os.cpu_count() or 1))
        self._executor.unsafe_compute_mask_ptr(moving, begin, num_bytes, words_RW.shape[0])

    def is_complete(self, sequence_id: int) -> bool:
        """Return True if only the end can follow, and the model has no token for it."""
        one = self._following.get(sequence_id)
        if one is None or one.failure is not None or self._vocabulary.has_end:
            return False
        return one.matcher.is_stopped() and not one.matcher.is_error()

    def failure(self, sequence_id: int) -> str | None:
        """Return the reason why a sequence's grammar failed, or None."""
        one = self._following.get(sequence_id)
        return None if one is None else one.failure

    def forget(self, sequence_id: int) -> None:
        """Drop a finished sequence; cancel a compilation without sequences, unless it has begun."""
        if self._following.pop(sequence_id, None) is not None:
            return
        for compiling, sequence_ids in self._compiling.items():
            if sequence_id in sequence_ids:
                sequence_ids.remove(sequence_id)
                if not sequence_ids:
                    compiling.cancel()
                    del self._compiling[compiling]
                return

    def close(self) -> None:
        """Shut the thread down without waiting for its compilation."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self._following.clear()
        self._compiling.clear()
