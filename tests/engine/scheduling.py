"""Short hands for tests of the scheduler: small limits, sequences by length, one step at a time."""

from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, Sequence

PARAMS = SamplingParams()


def make(
    num_pages: int = 16,
    max_num_seqs: int = 8,
    max_tokens_a_step: int = 64,
    max_model_len: int = 64,
    page_tokens: int = 4,
    max_queue: int = 100,
    caching: bool = True,
) -> Scheduler:
    limits = Limits(max_num_seqs, max_tokens_a_step, max_model_len, page_tokens)
    return Scheduler(limits, num_pages, caching, max_queue, prefix_root=b"root")


def sequence(number: int, prompt: int | list[int], max_tokens: int = 8, **options) -> Sequence:
    """A prompt given by its length starts with a token of its own, so that nothing is shared by chance."""
    tokens = [1000 + number, *range(prompt - 1)] if isinstance(prompt, int) else list(prompt)
    return Sequence(number, tokens, len(tokens), PARAMS, 0, max_tokens, **options)


def run(scheduler: Scheduler, token: int = 7, max_prompt_rows: int | None = None) -> LiveStep:
    """Run one step and finish sequences with all tokens."""
    step = scheduler.schedule(None, max_prompt_rows)
    scheduler.check()
    assert step is not None, "nothing is in flight, and the scheduler waits"
    if step.scheduled:
        scheduler.complete(step, [(token,) if item.samples else () for item in step.scheduled])
    for item in step.scheduled:
        if item.sequence.num_output_tokens >= item.sequence.max_tokens:
            scheduler.finish(item.sequence)
    scheduler.check()
    return step


def has_work(scheduler: Scheduler) -> bool:
    return scheduler.num_waiting + scheduler.num_running > 0


def num_cached(scheduler: Scheduler) -> int:
    """Pages without an owner whose contents may be shared."""
    return scheduler.pool.num_available - scheduler.pool.num_free


def shape(step: LiveStep) -> list[tuple[int, int, int]]:
    return [(item.sequence.sequence_id, item.start, item.num_new_tokens) for item in step.scheduled]
