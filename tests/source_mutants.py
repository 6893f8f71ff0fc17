"""Bugs that once passed every test: each a change of one place in the source, and the test that has to see it.

The scheduler has its own in engine/mutants.py, planted in the running program. These are planted in a copy of the source,
so they reach kernels and constants too. Found by changing the source at random, not by thinking of what could go wrong.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceMutant:
    """A bug, where it goes, and who sees it."""

    file: str
    """Below src/holdfast."""
    old: str
    """Stands there exactly once."""
    new: str
    test: str
    """A test as pytest names it, with all its parameters; at least one case fails, none breaks in another way."""
    says: str
    """Found in what a failing test says: a regular expression, so that it fails for the reason that is meant."""


SOURCE_MUTANTS = {
    "unmasked blocks reach a token too far": SourceMutant(
        file="kernels/attention/tiled_attention.py",
        old="clear = tl.minimum(high, position + 1)",
        new="clear = tl.minimum(high, position + 2)",
        test="tests/kernels/attention/test_tiled_attention.py::test_tiles_that_begin_where_a_block_ends_see_no_token_behind_their_own",
        says="Tensor-likes are not close",
    ),
    "every split takes the sink of its head": SourceMutant(
        file="kernels/attention/tiled_attention.py",
        old="b_l = add_sinks(b_l, b_m, p_sinks, o_head, first_partial < 0)",
        new="b_l = add_sinks(b_l, b_m, p_sinks, o_head, first_partial < 2**30)",
        test="tests/kernels/attention/test_sinks.py::test_a_sink_is_added_once_however_many_splits_there_are",
        says="Tensor-likes are not close",
    ),
    "the C kernel reads what lies behind a window": SourceMutant(
        file="kernels/native/attention.c",
        old="long behind = lowest > tile ? lowest - tile : 0;",
        new="long behind = 0;",
        test="tests/kernels/attention/test_sinks.py::test_c_does_not_look_behind_the_window",
        says="a number from behind the window",
    ),
    "the merge of quantized splits does not rescale": SourceMutant(
        file="kernels/attention/split_kv.py",
        old="b_acc = b_acc * b_alpha + tl.sum(b_part * b_p[:, None], axis=0)",
        new="b_acc = b_acc + tl.sum(b_part * b_p[:, None], axis=0)",
        test="tests/kernels/attention/test_quantized_attention.py::test_a_peak_in_the_last_of_many_splits_rescales_what_was_merged_before_it",
        says="errors of heads",
    ),
    "angles of rope are not rounded to float32": SourceMutant(
        file="kernels/attention/rope_rows.py",
        old="b_angle = (i_start.to(tl.float32) * b_frequency).to(tl.float64)",
        new="b_angle = i_start.to(tl.float64) * b_frequency.to(tl.float64)",
        test="tests/kernels/attention/test_rope_rows.py::test_kernel_at_far_positions_is_near_the_table",
        says="error=",
    ),
    "only the first eos id counts": SourceMutant(
        file="runner/build.py",
        old="frozenset(self._model.generation.eos_token_ids)",
        new="frozenset(self._model.generation.eos_token_ids[:1])",
        test="tests/runner/test_runner_build.py::test_every_id_that_ends_a_text_reaches_the_runner",
        says=r"frozenset\(\{2\}\) == frozenset\(\{2, 5\}\)",
    ),
    "cached prefixes outlive numbers that are not finite": SourceMutant(
        file="engine/core.py",
        old="        self._finish(sequence)\n        self.scheduler.reset_prefix_cache()",
        new="        self._finish(sequence)",
        test="tests/engine/test_engine_faults.py::test_nothing_computed_before_numbers_that_are_not_finite_is_shared_afterwards",
        says="assert 24 == 0",
    ),
    "the advised memory limit is rounded down": SourceMutant(
        file="memory/planner.py",
        old="needed_mib = -(-table.needed_bytes // 1024**2)",
        new="needed_mib = table.needed_bytes // 1024**2",
        test="tests/memory/test_planner.py::test_the_limit_that_a_refusal_offers_fits_terms_that_are_no_whole_mib",
        says="'103MiB' == '104MiB'",
    ),
    "stop ids end a text before min_tokens": SourceMutant(
        file="engine/core.py",
        old="elif may_stop and token_id in params.stop_token_ids:",
        new="elif token_id in params.stop_token_ids:",
        test="tests/engine/test_core.py::test_ends",
        says="assert",
    ),
    "headers do not name compiled kernels": SourceMutant(
        file="kernels/native_library.py",
        old='if source.suffix in (".c", ".h"):',
        new='if source.suffix == ".c":',
        test="tests/kernels/test_native_library.py::test_a_change_of_any_source_asks_for_another_library",
        says=r"len\(set\(seen\)\)|assert \d+ ==",
    ),
    "a blocked request waits for pages alone": SourceMutant(
        file="engine/scheduler.py",
        old="if self.pool.num_available > blocked.num_available or self.num_running < blocked.num_running:",
        new="if self.pool.num_available > blocked.num_available:",
        test="tests/engine/test_scheduler.py::test_one_that_was_blocked_is_tried_again_when_somebody_leaves_and_another_takes_the_page",
        says=r"\[\(1, 4, 1\)\] == \[\(1, 4, 1\), \(2, 0, 16\)\]",
    ),
    "a text goes on from two bytes of its prompt": SourceMutant(
        file="text/detokenizer.py",
        old="MIN_CONTEXT_BYTES = 8",
        new="MIN_CONTEXT_BYTES = 2",
        test="tests/text/test_detokenizer.py::test_every_byte_that_a_prompt_has_of_its_last_character_counts",
        says="== '😀'",
    ),
}
