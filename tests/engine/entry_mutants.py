"""Planted bugs of rows that stand for several tokens: where sequences begin behind a prefix, what is kept, what is written."""

import holdfast.engine.scheduler
from engine.mutants import Mutant, entering
from holdfast.cache.groups import CacheGroup
from holdfast.cache.prefix import BlockPart, PrefixCache
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sequence import Sequence

ENTRY_MUTANTS: dict[str, Mutant] = {}
mutant = entering(ENTRY_MUTANTS)


@mutant("does not begin with what its state is made of")
def a_hit_begins_behind_its_last_token(patch):
    real = Scheduler.__init__

    def init(self, *arguments, **named):
        real(self, *arguments, **named)
        self.tokens_again = 0

    patch.setattr(Scheduler, "__init__", init)


@mutant("reads what is not its own")
def stored_tokens_are_not_sent(patch):
    real = holdfast.engine.scheduler.admitted
    patch.setattr(holdfast.engine.scheduler, "admitted", lambda *own: real(*own)._replace(num_stored=0))


@mutant("reads what is not its own|has not what its window of")
def a_window_serves_only_what_follows_the_hit(patch):
    def serves(self, run, num_tokens):
        return run >= min(self.group.window - 3, num_tokens)

    patch.setattr(BlockPart, "serves", serves)


@mutant("holds what is before|has not what its window of|reads what is not its own")
def windows_go_back_as_if_nothing_were_computed_again(patch):
    real = PrefixCache.tables_of

    def tables(self, entries):
        found = real(self, entries)
        again = max(group.tokens_again for group in self._groups)
        hidden = [part.group.first_page(len(entries) * self.block_tokens + again) for part in self._parts]
        return tuple(
            (*[-1] * min(first, len(table)), *table[first:]) for first, table in zip(hidden, found, strict=True)
        )

    patch.setattr(PrefixCache, "tables_of", tables)


@mutant("reads what is not its own", first_seed=8)
def a_failed_step_leaves_the_state_where_it_was(patch):
    patch.setattr(CacheGroup, "has_state", property(lambda self: self.is_state))


@mutant("waits:", first_seed=60)
def a_preempted_sequence_keeps_what_was_stored(patch):
    real = Scheduler.preempt_last

    def preempt(self):
        before = {own.sequence_id: own.num_stored for own in self.running}
        sequence = real(self)
        sequence.num_stored = before[sequence.sequence_id]
        return sequence

    patch.setattr(Scheduler, "preempt_last", preempt)


@mutant(
    "holds what is before|has not what its window of|is written and has other owners|more than|at most", first_seed=9
)
def pages_are_counted_from_where_it_computes(patch):
    patch.setattr(Sequence, "num_kept", property(lambda self: self.num_computed))
