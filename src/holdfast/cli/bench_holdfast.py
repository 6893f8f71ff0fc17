"""Our engine in a race: requests in, steps until all are answered; no torch."""

import time

from holdfast.cli.bench_cases import Case, Timing
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError
from holdfast.request.sampling_params import SamplingParams


class HoldfastContestant:
    """Drives an engine as `LLM` does, with a clock. The engine must not cache prefixes."""

    name = "holdfast"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, case: Case) -> Timing:
        """Submit all, step until the last token is there."""
        engine = self._engine
        start = time.perf_counter()
        token_ids: dict[str, list[int]] = {}
        for prompt, num_new in zip(case.prompts, case.num_new, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
            token_ids[engine.add_request(None, {"prompt_token_ids": list(prompt)}, params)] = []
        first_seconds, waiting = 0.0, set(token_ids)
        while engine.has_unfinished():
            for delta in engine.step():
                if delta.error is not None:
                    raise HoldfastError(f"{case.measure} was asked", delta.error, "report this")
                token_ids[delta.request_id].extend(delta.token_ids)
                waiting.discard(delta.request_id)
            if not waiting and not first_seconds:
                first_seconds = time.perf_counter() - start
        total_seconds = time.perf_counter() - start
        return Timing(tuple(map(tuple, token_ids.values())), first_seconds, total_seconds)
