"""Front: requests in, deltas out: admission, names, text, stop strings, metrics; a request can only fail itself; no torch.

    admission  checks a request (engine/admission.py)
    open       make its completions, and the sequences for the core
    take       turn outputs of the core into text and deltas; return sequences that ended here first
    deliver    return the deltas, once

A front knows its core by `CoreFacts` alone, and never calls it: an `Engine` joins the two, in one process or in two.
Names of callers are labels; sequences have integers that never repeat.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from holdfast.engine.admission import Admission, PreparedRequest, derive_seed, describe
from holdfast.engine.memory_map import CoreMap, HeldPages, MemoryMap, PoolPages, RequestPages
from holdfast.engine.messages import CoreFacts, CoreOutputs, CoreRequest, Ending, SequenceOutput
from holdfast.engine.outputs import Completion
from holdfast.engine.pooling import Pooling
from holdfast.errors import RequestError, shown
from holdfast.observability.log import get_logger
from holdfast.request.outputs import CompletionDelta
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.grammar import GrammarCheck, Vocabulary
from holdfast.text.tokenizer import Tokenizer

MAX_REQUEST_ID_CHARS = 256
MAX_STEP_BITS = 18
_log = get_logger(__name__)


class Front:
    """The text side of one engine. One thread at a time (`admission` excepted)."""

    def __init__(
        self,
        facts: CoreFacts,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        seed: int,
        clock: Callable[[], float],
        vocabulary: Vocabulary | None = None,
        takes_priorities: bool = True,
        pooling: Pooling | None = None,
    ) -> None:
        """`vocabulary`: the tokenizer's, for grammars, if it is shared."""
        if vocabulary is None and tokenizer is not None:
            vocabulary = Vocabulary(lambda: tokenizer, facts.vocab_size, facts.eos_token_ids)
        self._forms = forms = None if vocabulary is None else GrammarCheck(vocabulary)
        self.admission = Admission(
            *(facts.longest, facts.vocab_size, facts.max_queue, tokenizer, chat_template, forms),
            *(takes_priorities, pooling),
        )
        self._tokenizer = tokenizer
        self._seed = seed
        self._clock = clock
        self._requests: dict[str, dict[int, Completion]] = {}
        """Live completions by the request's name, then by sequence id."""
        self._by_sequence: dict[int, Completion] = {}
        self._undelivered: list[CompletionDelta] = []
        self._num_sequences = 0
        self.num_requests = 0
        self.num_output_tokens = 0
        self.steps_by_size = [0] * MAX_STEP_BITS
        """Steps by their tokens: place k counts steps of at most 2**k prompt and output tokens, and more than half."""
        self.num_step_tokens = 0
        self._num_prompt_tokens = 0

    @property
    def num_unfinished(self) -> int:
        """Live requests."""
        return len(self._requests)

    @property
    def has_undelivered(self) -> bool:
        return bool(self._undelivered)

    def unused_name(self) -> str:
        """Return a name that no live request has."""
        number = self.num_requests
        while str(number) in self._requests:
            number += 1
        return str(number)

    def checked_name(self, request_id: object) -> str:
        """Check the name that a caller gave."""
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise RequestError("request.request_id", value=request_id, maximum=MAX_REQUEST_ID_CHARS)
        if request_id in self._requests or any(delta.request_id == request_id for delta in self._undelivered):
            raise RequestError("request.request_id_in_use", value=request_id)
        return request_id

    def open(self, prepared: PreparedRequest, name: str) -> list[Completion]:
        """Make the completions of a prepared request; `register` records them."""
        try:
            return list(self._completions(name, prepared))
        except Exception as error:
            raise RequestError("request.setup_failed", reason=describe(error)) from error

    def register(self, name: str, completions: list[Completion]) -> None:
        """Record a request whose sequences the core has accepted."""
        self.num_requests += 1
        self._num_sequences += len(completions)
        self._requests[name] = {completion.sequence_id: completion for completion in completions}
        self._by_sequence.update(self._requests[name])

    def take(self, outputs: CoreOutputs) -> list[int]:
        """Make text of outputs; return the sequences that ended here and not in the core.

        Outputs of ended completions are surplus, and dropped.
        """
        now, ended, num_tokens = self._clock(), [], outputs.stats.num_prompt_tokens - self._num_prompt_tokens
        self._num_prompt_tokens += num_tokens
        for output in outputs.outputs:
            num_tokens += len(output.token_ids)
            completion = self._by_sequence.get(output.sequence_id)
            if completion is not None:
                ended += self._advance(completion, output, now)
        if num_tokens > 0:
            self.num_step_tokens += num_tokens
            self.steps_by_size[min((num_tokens - 1).bit_length(), MAX_STEP_BITS - 1)] += 1
        return ended

    def deliver(self) -> list[CompletionDelta]:
        """Return every delta that was not delivered."""
        deltas, self._undelivered = self._undelivered, []
        return deltas

    def end_request(self, request_id: str, ending: Ending) -> tuple[list[CompletionDelta], list[int]]:
        """End a live request; return its undelivered and last deltas, and its sequences."""
        waiting = [delta for delta in self._undelivered if delta.request_id == request_id]
        self._undelivered = [delta for delta in self._undelivered if delta.request_id != request_id]
        deltas, ids = self._end(self._requests.get(request_id, {}).values(), ending)
        return waiting + deltas, ids

    def end_all(self, ending: Ending) -> None:
        """End every live request. Never fails."""
        deltas, _ = self._end(self._by_sequence.values(), ending)
        self._undelivered += deltas

    def named_map(self, seen: CoreMap) -> MemoryMap:
        """Add the names of requests to a map; requests that ended here are left out."""
        now, requests = self._clock(), []
        for sequence in seen.sequences:
            completion = self._by_sequence.get(sequence.sequence_id)
            if completion is not None:
                held, speed = _values(HeldPages, sequence), completion.tokens_per_second(now)
                name, index = completion.request_id, completion.index
                requests.append(RequestPages(**held, request_id=name, index=index, tokens_per_second=speed))
        return MemoryMap(**_values(PoolPages, seen), requests=tuple(requests), taken_at=now)

    def close(self) -> None:
        """End the process that compiles grammars for checks."""
        if self._forms is not None:
            self._forms.close()

    def sequence_ids(self, request_id: str) -> tuple[int, ...]:
        """Sequences of a live request. Any thread."""
        return tuple(self._requests.get(request_id, ()))

    def names(self) -> list[str]:
        """Names of all live requests."""
        return list(self._requests)

    def _completions(self, name: str, prepared: PreparedRequest) -> Iterator[Completion]:
        params, now = prepared.params, self._clock()
        seed = derive_seed(self._seed, self.num_requests) if params.seed is None else params.seed
        token_ids = tuple(prepared.prompt_token_ids)
        # Prompt logprobs are equal for all completions, so only the first computes them.
        later_params = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        for index in range(params.n):
            own_params = later_params if index else params
            request = CoreRequest(
                *(self._num_sequences + index, token_ids, own_params, derive_seed(seed, index), prepared.max_tokens),
                cache_salt=prepared.cache_salt,
                use_prefix_cache=own_params.prompt_logprobs is None and not own_params.skip_reading_prefix_cache,
                bad_word_ids=prepared.bad_word_ids,
                is_pooled=prepared.is_pooled,
            )
            yield Completion(name, index, request, self._tokenizer, now, prepared.kept_token_ids)

    def _advance(self, completion: Completion, output: SequenceOutput, now: float) -> list[int]:
        """Give a completion its tokens; an exception in its text ends this request alone."""
        try:
            delta = completion.advance(output, now)
        except Exception as error:
            _log.warning("request %s failed: %s", shown(completion.request_id), describe(error), exc_info=error)
            ending = Ending("error", error=f"its text could not be made: {describe(error)}")
            deltas, ids = self._end(self._requests[completion.request_id].values(), ending)
            self._undelivered += deltas
            return ids
        if delta is None:
            return []
        self.num_output_tokens += len(delta.token_ids)
        self._undelivered.append(delta)
        if delta.finish_reason is None:
            return []
        self._forget(completion)
        return [] if output.ending is not None else [completion.sequence_id]

    def _end(self, completions: Iterable[Completion], ending: Ending) -> tuple[list[CompletionDelta], list[int]]:
        now, ended = self._clock(), list(completions)
        deltas = [completion.end(ending, now) for completion in ended]
        for completion in ended:
            self._forget(completion)
        return deltas, [completion.sequence_id for completion in ended]

    def _forget(self, completion: Completion) -> None:
        """Forget a completion, and its request with the last one."""
        del self._by_sequence[completion.sequence_id]
        siblings = self._requests[completion.request_id]
        del siblings[completion.sequence_id]
        if not siblings:
            del self._requests[completion.request_id]


def _values(kind: type[HeldPages | PoolPages], value: HeldPages | PoolPages) -> dict[str, Any]:
    """Return the fields that a value has as a `kind`."""
    return {field.name: getattr(value, field.name) for field in fields(kind)}
