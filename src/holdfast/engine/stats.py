"""EngineStats: what an engine has done and is doing, as plain numbers; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at an engine."""

    num_running: int
    num_waiting: int
    """Sequences, like those above; a request with n completions is n of them."""
    num_unfinished_requests: int
    kv_usage: float
    """Share of the KV pages that sequences hold."""
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    """Prompt tokens computed, those that a preemption made necessary again included."""
    num_output_tokens: int
    num_preemptions: int
    num_requests: int
    num_steps: int
