"""Planted bugs of sharing: each breaks one thing about pending pages, forks or leaders, and names the check that sees it.

They are planted like those of mutants.py, and run in worlds with bursts of equal prompts.
"""

from dataclasses import replace

import holdfast.engine.scheduler
import holdfast.engine.sharing
from engine.mutants import Mutant, entering
from holdfast.cache.prefix import PrefixCache
from holdfast.engine.scheduler import Scheduler
from holdfast.engine.sharing import Leaders, Start
from holdfast.request.sequence import ScheduledSequence

SHARING_MUTANTS: dict[str, Mutant] = {}
mutant = entering(SHARING_MUTANTS)
OTHERS = "reads what is not its own|has another state than its own"


@mutant(r"is written and holds a registered prefix|num_registered=\d+ blocks|" + OTHERS, first_seed=4)
def blocks_are_registered_before_their_step_is_certain(patch):
    def schedule(self, propose=None, limit=None):
        for one in self.running:
            track = self._tracks[one.sequence_id]
            end = min(one.num_scheduled + self.limits.max_num_batched_tokens, track.capacity, len(one.token_ids))
            self.prefix.register(track.chain, one.token_ids, one.tables, end, self.num_steps + 1)
        return real(self, propose, limit)

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


@mutant("assert not")
def pending_pages_are_never_settled(patch):
    patch.setattr(PrefixCache, "settle", lambda self, step: None)


@mutant("is written and holds a registered prefix|" + OTHERS, first_seed=24)
def pending_pages_of_dropped_steps_stay(patch):
    patch.setattr(PrefixCache, "forget_pending", lambda self: self.pending.clear())


@mutant(r"\[0, 0, 0\]")
def sequences_on_a_dropped_step_are_not_restarted(patch):
    patch.setattr(PrefixCache, "pending_step", lambda self, tables: 0)


@mutant(r"num_registered=\d+ blocks", first_seed=24)
def chains_of_dropped_steps_are_not_rewound(patch):
    patch.setattr(PrefixCache, "rewind", lambda self, chain, num_tokens: None)


@mutant("forks across salts")
def forks_ignore_the_salt(patch):
    real = holdfast.engine.sharing.prompt_key
    patch.setattr(holdfast.engine.sharing, "prompt_key", lambda sequence: (b"", *real(sequence)[1:]))


@mutant("assert")
def forks_ignore_a_reset(patch):
    patch.setattr(PrefixCache, "is_current", lambda self, chain: True)


@mutant("forks from another prompt", first_seed=14)
def forks_compare_only_the_last_tokens(patch):
    patch.setattr(holdfast.engine.sharing, "KEY_TOKENS", 1)
    patch.setattr(Leaders, "twin", lambda self, sequence: self._twins.get(holdfast.engine.sharing.prompt_key(sequence)))


@mutant("must compute its whole prompt|must not use cached pages")
def sequences_that_must_not_share_fork(patch):
    def admit(self, scheduled, budget, ends_prompt):
        waiting = {one: one.use_prefix_cache for one in self.waiting}
        for one in waiting:
            one.use_prefix_cache = True
        real(self, scheduled, budget, ends_prompt)
        for one, uses in waiting.items():
            one.use_prefix_cache = uses

    real = Scheduler.admit_waiting
    patch.setattr(Scheduler, "admit_waiting", admit)


@mutant(OTHERS)
def open_page_of_a_fork_is_not_copied(patch):
    def admitted(sequence, fork_of, track):
        reported = real(sequence, fork_of, track)
        return reported._replace(num_stored=reported.num_stored + 64) if fork_of >= 0 else reported

    real = holdfast.engine.scheduler.admitted
    patch.setattr(holdfast.engine.scheduler, "admitted", admitted)


@mutant("which is not in the step before it|forks at|forks from a fork|" + OTHERS)
def forks_copy_from_another_slot(patch):
    def admitted(sequence, fork_of, track):
        return real(sequence, fork_of if fork_of < 0 else max(fork_of - 1, 0), track)

    real = holdfast.engine.scheduler.admitted
    patch.setattr(holdfast.engine.scheduler, "admitted", admitted)


@mutant("forks at|forks from another prompt|does not start at its last token")
def forks_sample_from_a_decode_row(patch):
    def add(self, item):
        real(self, item)
        sequence = item.sequence
        if item.num_tokens > sequence.num_prompt_tokens and self._prefix.is_current(
            self._chain_of(sequence.sequence_id)
        ):
            self._twins.setdefault(holdfast.engine.sharing.prompt_key(sequence), sequence)

    real = Leaders.add
    patch.setattr(Leaders, "add", add)


@mutant("sequences are left after|the oldest sequence .* does not run|nothing is scheduled")
def equal_prompts_wait_for_ever(patch):
    def awaits(self, sequence, chain):
        return any(leader.cache_salt == sequence.cache_salt for leader, _ in self._computing) or not self._twins

    patch.setattr(Leaders, "awaits", awaits)


@mutant("holds what is before its", first_seed=13)
def window_pages_of_a_fork_are_not_trimmed(patch):
    def fork_start(hit, twin, groups):
        return Start(hit, hit.tables, twin.num_prompt_tokens - 1, hit.num_tokens, twin)

    patch.setattr(holdfast.engine.scheduler, "fork_start", fork_start)


@mutant("holds what is before its", first_seed=13)
def window_pages_of_a_fork_after_its_hit_are_kept(patch):
    def fork_start(hit, twin, groups):
        start = real(hit, twin, groups)
        tables = [table[: len(own)] for table, own in zip(start.tables, hit.tables, strict=True)]
        return replace(start, tables=tuple(tables))

    real = holdfast.engine.scheduler.fork_start
    patch.setattr(holdfast.engine.scheduler, "fork_start", fork_start)


@mutant(r"tokens in a step|runs -\d+ tokens", first_seed=3)
def forks_count_as_rows(patch):
    patch.setattr(ScheduledSequence, "num_rows", property(lambda self: self.num_new_tokens))


@mutant("the step still copies to it|sequences hold pages|in flight")
def pages_of_a_fork_in_flight_are_released(patch):
    def finish(self, sequence):
        track = self._tracks.get(sequence.sequence_id)
        is_fork = track is not None and track.ready_step == track.last_step > 0
        if is_fork:
            sequence.num_scheduled = sequence.num_computed
        real(self, sequence)

    real = Scheduler.finish
    patch.setattr(Scheduler, "finish", finish)
