"""Planted bugs of near pages: which are kept, given back, registered and restored, and what a fork begins with."""

import holdfast.cache.prefix
import holdfast.engine.scheduler
from engine.mutants import Mutant, entering
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cache.prefix import BlockPart, PrefixCache
from holdfast.engine.page_needs import PageNeeds
from holdfast.engine.scheduler import Scheduler
from holdfast.engine.sharing import Start

NEAR_MUTANTS: dict[str, Mutant] = {}
mutant = entering(NEAR_MUTANTS)
LACKS, READS = "has not what its near sees from", "reads what is not its own"


@mutant(LACKS)
def kept_pages_are_given_back(patch):
    def give_back(self, sequence):
        real(self, sequence)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for place in range(min(group.kept_pages, group.passed(sequence.num_kept).start, len(table))):
                if group.first_page(sequence.num_kept) > place and table[place] != HOLE:
                    self.pool.release(table[place])
                    table[place] = HOLE

    real = Scheduler.give_back
    patch.setattr(Scheduler, "give_back", give_back)


@mutant(f"{LACKS}|{READS}", first_seed=111)
def a_hit_needs_no_kept_page(patch):
    patch.setattr(BlockPart, "keeps", lambda self, first: True)


@mutant(f"holds .* of its near|holds what is before its near|{LACKS}")
def blocks_are_sliding_windows(patch):
    def first_page(self, start):
        return 0 if self.window is None else max(0, start - self.window + 1) // self.page_tokens

    patch.setattr(CacheGroup, "first_page", first_page)


@mutant("starts inside a page|took its entry with it")
def a_prefix_ends_inside_a_block(patch):
    real = holdfast.cache.prefix.block_tokens
    patch.setattr(
        holdfast.cache.prefix,
        "block_tokens",
        lambda groups, grid=1: real([one for one in groups if not one.is_blocked]),
    )


@mutant(f"{LACKS}|{READS}|holds what is before its near")
def the_next_block_is_given_back_at_its_first_token(patch):
    def give_back(self, sequence):
        with patch.context() as inside:
            inside.setattr(CacheGroup, "passed", lambda self, start: passed(self, start + self.page_tokens))
            real(self, sequence)

    real, passed = Scheduler.give_back, CacheGroup.passed
    patch.setattr(Scheduler, "give_back", give_back)


@mutant("gave way for nothing|was admitted without pages", first_seed=6)
def claims_leave_out_kept_pages(patch):
    def claim(self, sequence, tables, num_kept, longest, is_shared):
        found = real(self, sequence, tables, num_kept, longest, is_shared)
        return max(found - sum(group.kept_pages for group in self.groups), 0)

    real = PageNeeds.claim
    patch.setattr(PageNeeds, "claim", claim)


@mutant(f"{LACKS}|{READS}", first_seed=10)
def a_fork_without_a_hit_gets_no_kept_pages(patch):
    def fork_start(hit, twin, groups):
        start = real(hit, twin, groups)
        tables = [
            table or (HOLE,) * group.first_page(start.num_computed)
            for group, table in zip(groups, start.tables, strict=True)
        ]
        return Start(start.hit, tuple(tables), start.num_computed, start.num_stored, twin)

    real = holdfast.engine.scheduler.fork_start
    patch.setattr(holdfast.engine.scheduler, "fork_start", fork_start)


@mutant("of near, unused")
def near_pages_of_every_block_are_registered(patch):
    def pages(self, table, index):
        first = index * self.count // self.span
        return table[first : first + self.count]

    patch.setattr(BlockPart, "pages", pages)


@mutant(f"{READS}|{LACKS}|is listed with another entry")
def kept_pages_are_restored_from_the_last_block(patch):
    real = PrefixCache.tables_of

    def tables_of(self, entries):
        found = list(real(self, entries))
        for index, part in enumerate(self._parts):
            if part.group.kept_pages and len(entries) > 1:
                found[index] = (*entries[-1].slots[part.first : part.end], *found[index][part.count :])
        return tuple(found)

    patch.setattr(PrefixCache, "tables_of", tables_of)


@mutant("holds what is before its near")
def the_whole_first_block_is_kept(patch):
    def passed_behind_a_block(self, start):
        found = passed(self, start)
        first = self.window // self.page_tokens if self.kept_pages else 0
        return range(first, max(found.stop, first))

    def give_back(self, sequence):
        with patch.context() as inside:
            inside.setattr(CacheGroup, "passed", passed_behind_a_block)
            real(self, sequence)

    real, passed = Scheduler.give_back, CacheGroup.passed
    patch.setattr(Scheduler, "give_back", give_back)


@mutant(LACKS)
def first_pages_but_one_are_given_back(patch):
    def give_back(self, sequence):
        real(self, sequence)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            place = group.kept_pages - 1
            if place > 0 and group.first_page(sequence.num_kept) > place and table[place] != HOLE:
                self.pool.release(table[place])
                table[place] = HOLE

    real = Scheduler.give_back
    patch.setattr(Scheduler, "give_back", give_back)
