"""Planted bugs of rows that stand for several tokens: where sequences begin behind a prefix, what is kept, what is written."""

import holdfast.engine.scheduler
from engine.fake_device import FakeDevice
from engine.mutants import Mutant, entering
from engine.shadow import Shadow
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


@mutant("waits:", first_seed=54)
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


RESTORED = "reads what is not its own|, it needs "


def copies_are(patch, change):
    """Copies of open rows are changed on their way into the step."""
    real = holdfast.engine.scheduler.row_copies
    patch.setattr(holdfast.engine.scheduler, "row_copies", lambda *own: tuple(map(change, real(*own))))


@mutant(RESTORED)
def a_copy_has_a_row_less(patch):
    copies_are(patch, lambda copy: copy._replace(num_rows=copy.num_rows - 1))


@mutant(RESTORED)
def rows_are_copied_for_another_group(patch):
    copies_are(patch, lambda copy: copy._replace(group=copy.group - 1))


@mutant("reads what is not its own")
def rows_are_not_copied(patch):
    patch.setattr(Shadow, "copy_rows", lambda self, copy: None)


@mutant("reads what is not its own")
def the_last_row_is_not_copied(patch):
    real = Shadow.copy_rows
    patch.setattr(Shadow, "copy_rows", lambda self, copy: real(self, copy._replace(num_rows=copy.num_rows - 1)))


@mutant("reads what is not its own")
def rows_are_copied_after_the_step(patch):
    def compute(self, parts):
        late, FakeDevice.late = FakeDevice.late, []
        real(self, parts)
        for flight in late:
            copy_rows(self, flight)

    real, copy_rows = FakeDevice._compute, FakeDevice._copy_rows
    patch.setattr(FakeDevice, "late", [], raising=False)
    patch.setattr(FakeDevice, "_copy_rows", lambda self, flight: FakeDevice.late.append(flight))
    patch.setattr(FakeDevice, "_compute", compute)


@mutant("reads what is not its own")
def rows_of_the_same_step_are_copied_before_it(patch):
    patch.setattr(PrefixCache, "is_computed_by", staticmethod(lambda hit, step: False))


@mutant("is released before|reads what is not its own")
def a_page_that_is_copied_is_released_early(patch):
    patch.setattr(Scheduler, "_hold", lambda self, open_rows: None)


@mutant("is listed with another entry|entries have .* in their slots|has a hole where|the pool keeps")
def an_evicted_long_page_drops_its_last_block_alone(patch):
    def replace(self, page, slot):
        self._drop(self.by_page[page])
        if page in self.by_page:
            del self.by_page[page]
            self._pool.forget(page)

    patch.setattr(PrefixCache, "_replace", replace)
