"""Planted bugs: each breaks one thing that the scheduler, pool or prefix cache does right, and names the check that sees it.

Each takes pytest's monkeypatch. Those of the source, kernels and all, are in mutants/*.toml, beside this folder.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import holdfast.cache.prefix
import holdfast.engine.holdings
import holdfast.engine.scheduler
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cache.pages import FreeRuns, PagePool
from holdfast.cache.prefix import BlockPart, PrefixCache, PrefixEntry
from holdfast.engine.page_needs import PageNeeds
from holdfast.engine.queues import Lanes, Queues
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import RequestError
from holdfast.request.sequence import LiveStep, ScheduledSequence, SequenceState


class Mutant(NamedTuple):
    """A planted bug, and who catches it."""

    plant: Callable
    says: str
    """Found in the words of the check that is meant to see it: a regular expression."""
    first_seed: int | None = None
    """Seed of the world that shows it soonest."""


def entering(registry: dict[str, Mutant]) -> Callable[..., Callable[[Callable], Callable]]:
    """What enters planted bugs by their names, each with what the check says that is meant to see it."""

    def mutant(says: str, first_seed: int | None = None) -> Callable[[Callable], Callable]:
        def enter(plant: Callable) -> Callable:
            registry[plant.__name__] = Mutant(plant, says, first_seed)
            return plant

        return enter

    return mutant


MUTANTS: dict[str, Mutant] = {}
mutant = entering(MUTANTS)


@mutant("is finished and holds pages")
def finish_leaks_the_pages(patch):
    patch.setattr(Scheduler, "finish", lambda self, sequence: self._queues.remove(sequence))


@mutant("sequences hold pages .* times, the pool counts")
def finish_releases_all_but_the_last_page(patch):
    release = PagePool.release_many
    patch.setattr(PagePool, "release_many", lambda self, pages: release(self, pages[:-1]))


@mutant("is listed as waiting")
def finish_while_waiting_leaves_it_in_the_queue(patch):
    def remove(self, sequence):
        if sequence.state is not SequenceState.WAITING:
            return real(self, sequence)
        sequence.state = SequenceState.FINISHED
        return None

    real = Queues.remove
    patch.setattr(Queues, "remove", remove)


@mutant("is released and has no owner")
def pages_are_released_twice(patch):
    release = PagePool.release_many
    patch.setattr(PagePool, "release_many", lambda self, pages: (release(self, pages), release(self, pages[:1])))


@mutant("is released and has no owner")
def a_second_finish_releases_again(patch):
    def finish(self, sequence):
        held = holdfast.engine.scheduler.by_position(self.groups, sequence.tables)
        real(self, sequence)
        if held:
            gone[sequence.sequence_id] = held
        else:
            self.pool.release_many(gone.get(sequence.sequence_id, ()))

    gone: dict[int, list[int]] = {}
    real = Scheduler.finish
    patch.setattr(Scheduler, "finish", finish)


def compare(patch, is_same: Callable) -> None:
    """Replaces what is compared on a hit."""
    patch.setattr(PrefixCache, "is_same", staticmethod(is_same))


@mutant("reads what is not its own")
def tokens_are_not_compared_on_a_hit(patch):
    compare(patch, lambda entry, parent, salt, key: entry.parent is parent and entry.salt == salt)


@mutant("reads what is not its own|which does not know it", first_seed=28)
def the_parent_is_not_compared_on_a_hit(patch):
    compare(patch, lambda entry, parent, salt, key: entry.key.tokens == key.tokens and entry.salt == salt)


@mutant("reads what is not its own")
def the_salt_is_not_compared_on_a_hit(patch):
    compare(patch, lambda entry, parent, salt, key: entry.parent is parent and entry.key.tokens == key.tokens)


@mutant("reads what is not its own")
def the_salt_is_ignored(patch):
    real = PrefixCache.chain
    patch.setattr(PrefixCache, "chain", lambda self, salt: real(self, b""))


@mutant("has nothing left to compute", first_seed=4)
def a_hit_may_cover_the_last_token(patch):
    real = PrefixCache.match
    patch.setattr(PrefixCache, "match", lambda self, chain, ids, num_tokens: real(self, chain, ids, num_tokens + 1))


@mutant("starts inside a page")
def a_hit_counts_one_token_too_many(patch):
    def admit(self, sequence, hits, max_new_tokens):
        item = real(self, sequence, hits, max_new_tokens)
        if not hits or item.num_new_tokens < 2:
            return item
        sequence.num_computed += 1
        sequence.num_scheduled += 1
        return ScheduledSequence.of(sequence, item.start + 1, item.num_new_tokens - 1)

    real = Scheduler.admit
    patch.setattr(Scheduler, "admit", admit)


@mutant("must not use cached pages")
def sequences_that_must_not_hit_do(patch):
    patch.setattr(Scheduler, "uses_cache", lambda self, sequence: self._caches_prefixes)


@mutant("has not the 0 positions of its account", first_seed=12)
def preemption_keeps_num_computed(patch):
    def preempt(self):
        num_computed = self._queues.running[-1].num_computed
        sequence = real(self)
        sequence.num_computed = num_computed
        return sequence

    real = Scheduler.preempt_last
    patch.setattr(Scheduler, "preempt_last", preempt)


@mutant(r"has not the \d+ outputs that it was given", first_seed=12)
def preemption_drops_the_outputs(patch):
    """A model that says the same again hides it from all but those who count."""

    def preempt(self):
        sequence = real(self)
        del sequence.token_ids[sequence.num_prompt_tokens :]
        return sequence

    real = Scheduler.preempt_last
    patch.setattr(Scheduler, "preempt_last", preempt)


@mutant(r"the scheduler counts \d+ preemptions of \d+", first_seed=12)
def preemptions_are_counted_twice(patch):
    def preempt(self):
        self.num_preemptions += 1
        return real(self)

    real = Scheduler.preempt_last
    patch.setattr(Scheduler, "preempt_last", preempt)


@mutant(r"waits: sequence\.tables=\[\[\d", first_seed=12)
def preemption_keeps_the_pages(patch):
    def preempt(self):
        sequence = self._queues.running[-1]
        tables = [list(table) for table in sequence.tables]
        real(self)
        sequence.tables = tables
        return sequence

    real = Scheduler.preempt_last
    patch.setattr(Scheduler, "preempt_last", preempt)


@mutant("out of order of arrival", first_seed=12)
def preempted_sequences_go_to_the_back(patch):
    def preempt(self):
        sequence = real(self)
        self.waiting_lanes.discard(sequence)
        self.waiting_lanes.add(sequence)
        return sequence

    real = Queues.preempt
    patch.setattr(Queues, "preempt", preempt)


@mutant("was preempted and is in the step", first_seed=12)
def the_oldest_is_preempted(patch):
    patch.setattr(Lanes, "pop_last", Lanes.pop_first)


@mutant("was preempted and is in the step", first_seed=12)
def a_preempted_sequence_stays_in_the_step(patch):
    def schedule(self, propose=None, limit=None):
        running = self._queues.running
        step = real(self, propose, limit)
        victims = [sequence for sequence in running if sequence.state is SequenceState.WAITING]
        if not victims:
            return step
        self.in_flight[-1] = LiveStep((*step.scheduled, ScheduledSequence.of(victims[0], 0, 1)), step.step)
        return self.in_flight[-1]

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


@mutant(r"num_registered=\d+ blocks, num_full=")
def pages_are_registered_before_they_are_computed(patch):
    def register(self, chain, token_ids, tables, num_tokens, step=0):
        rows = zip(self._parts, tables, strict=True)
        num_places = min(len(table) * part.group.page_tokens for part, table in rows if part.count)
        ahead = min(num_places, len(token_ids)) // self.block_tokens * self.block_tokens
        real(self, chain, token_ids, tables, max(num_tokens, ahead), step)

    real = PrefixCache.register
    patch.setattr(PrefixCache, "register", register)


@mutant("is shared and is not registered|is written and holds a registered prefix")
def pages_of_a_step_are_registered_as_computed(patch):
    real = Scheduler.register
    patch.setattr(Scheduler, "register", lambda self, sequence, num_tokens, step=0: real(self, sequence, num_tokens))


@mutant(r"are not \d+ pages once")
def an_owned_page_is_evicted(patch):
    def share(self, page):
        self.owners_by_page[page] += 1

    patch.setattr(PagePool, "share", share)


@mutant("sequences hold pages .* times, the pool counts")
def sharing_does_not_count(patch):
    def share(self, page):
        if self.owners_by_page[page] == 0:
            real(self, page)

    real = PagePool.share
    patch.setattr(PagePool, "share", share)


@mutant("the pool keeps .* registered are")
def an_evicted_page_is_still_found(patch):
    patch.setattr(PrefixCache, "evict", lambda self, page: self._pool.forget(page))


@mutant(r"\d+ children for \d+ entries")
def eviction_leaves_the_children(patch):
    def evict(self, page):
        entry = self.by_page.pop(page)
        entry.is_registered = False
        del self._entries[entry.key.digest]
        self._pool.forget(page)

    patch.setattr(PrefixCache, "evict", evict)


@mutant("no run is left, though")
def cached_pages_are_evicted_and_freed_twice(patch):
    def evict(self):
        page = next(iter(self.cached))
        self.on_evict(page)
        self.free_runs.put(page)

    patch.setattr(PagePool, "evict", evict)


@mutant("is listed with another entry than its own|entries have .* in their slots, the pool keeps")
def a_second_registration_replaces_the_first(patch):
    def enter(self, chain, key, slots, step):
        entry = self._entries.get(key.digest)
        if entry is None or entry.slots == slots:
            return real(self, chain, key, slots, step)
        self._entries[key.digest] = PrefixEntry(slots, len(slots) - slots.count(HOLE), chain.tip, chain.salt, key)
        return self._entries[key.digest]

    real = PrefixCache.enter
    patch.setattr(PrefixCache, "enter", enter)


@mutant("hits pages from before a reset", first_seed=24)
def reset_lets_old_pages_be_registered_later(patch):
    def register(self, chain, token_ids, tables, num_tokens, step=0):
        if chain.epoch != self._epoch:
            chain.epoch, chain.num_blocks, chain.tip = self._epoch, 0, None
        real(self, chain, token_ids, tables, num_tokens, step)

    real = PrefixCache.register
    patch.setattr(PrefixCache, "register", register)


@mutant(r"the pool keeps .* registered are \[\]", first_seed=6)
def reset_forgets_names_but_not_pages(patch):
    def reset(self):
        self._entries.clear()
        self.by_page.clear()
        self._epoch += 1

    patch.setattr(PrefixCache, "reset", reset)


@mutant("hits pages from before a reset", first_seed=8)
def reset_does_nothing(patch):
    patch.setattr(PrefixCache, "reset", lambda self: None)


@mutant(r"reads what is not its own|are not \d+ pages once|are not apart")
def runs_are_joined_over_a_page_in_use(patch):
    def put(self, page):
        real(self, page)
        end = self.ends.get(page + 2)
        if end is not None and page in self.ends and self.ends[page] == page + 1:
            self.cut(page, 0, 1)
            self.cut(page + 2, 0, end - page - 2)
            self._insert(page, end)
            self.num_pages += end - page

    real = FreeRuns.put
    patch.setattr(FreeRuns, "put", put)


@mutant(r"has not \d+ pages for \d+ tokens")
def one_page_too_few_for_a_full_last_page(patch):
    real = PageNeeds.missing
    patch.setattr(
        PageNeeds, "missing", lambda self, tables, tokens, kept=0: real(self, tables, max(tokens - 1, 1), kept)
    )


@mutant("was admitted without pages", first_seed=4)
def cached_hits_count_as_available_too(patch):
    def admit_waiting(self, scheduled, budget, ends_prompt):
        with patch.context() as inside:
            inside.setattr(PagePool, "num_owners", lambda self, page: 1)
            real(self, scheduled, budget, ends_prompt)

    real = Scheduler.admit_waiting
    patch.setattr(Scheduler, "admit_waiting", admit_waiting)


@mutant(r"^\d+ tokens in a step")
def the_token_budget_is_exceeded_by_one(patch):
    real = Scheduler.admit
    patch.setattr(Scheduler, "admit", lambda self, sequence, hits, most: real(self, sequence, hits, most + 1))


@mutant(r"^\d+ sequences in a step", first_seed=9)
def one_sequence_too_many_runs(patch):
    real = Scheduler.__init__

    def init(self, limits, *arguments, **options):
        real(self, replace(limits, max_num_seqs=limits.max_num_seqs + 1), *arguments, **options)

    patch.setattr(Scheduler, "__init__", init)


@mutant(r"^\d+ wait, self\.world\.max_queue=")
def the_queue_holds_one_too_many(patch):
    real = Scheduler.__init__

    def init(self, limits, num_pages, enable_prefix_caching, max_queue, **options):
        real(self, limits, num_pages, enable_prefix_caching, max_queue + 1, **options)

    patch.setattr(Scheduler, "__init__", init)


@mutant("was finished and got a token", first_seed=5)
def aborted_sequences_still_get_their_token(patch):
    def complete(self, step, token_ids):
        real(self, step, token_ids)
        for item, chosen in zip(step.scheduled, token_ids, strict=True):
            if item.sequence.state is SequenceState.FINISHED:
                item.sequence.token_ids += chosen

    real = Scheduler.complete
    patch.setattr(Scheduler, "complete", complete)


@mutant(r"the oldest sequence \d+ does not run")
def admission_waits_until_the_pool_is_empty_of_owners_and_cache(patch):
    def admit_waiting(self, scheduled, budget, ends_prompt):
        if self.pool.num_free == self.pool.num_pages:
            real(self, scheduled, budget, ends_prompt)

    real = Scheduler.admit_waiting
    patch.setattr(Scheduler, "admit_waiting", admit_waiting)


@mutant(r"fits on \d+ tokens and waits")
def a_blocked_sequence_is_never_tried_again(patch):
    def is_still_blocked(self, sequence):
        return self._blocked is not None and self._blocked.sequence_id == sequence.sequence_id

    patch.setattr(Scheduler, "is_still_blocked", is_still_blocked)


@mutant("is not the order of arrival")
def young_sequences_overtake_the_queue(patch):
    def admit(self):
        youngest = self.waiting[-1]
        self.waiting_lanes.discard(youngest)
        self.waiting_lanes.add(youngest, is_oldest=True)
        return real(self)

    real = Queues.admit
    patch.setattr(Queues, "first_waiting", property(lambda self: self.waiting[-1]))
    patch.setattr(Queues, "admit", admit)


@mutant(r"has not the \d+ positions of its account", first_seed=12)
def what_a_failed_step_computed_is_believed(patch):
    def forget_steps(self):
        steps = list(self.in_flight)
        real(self)
        for item in (item for step in steps for item in step.scheduled):
            if item.sequence.state is SequenceState.RUNNING:
                item.sequence.num_computed = item.sequence.num_scheduled = item.start + item.num_new_tokens

    real = Scheduler.forget_steps
    patch.setattr(Scheduler, "forget_steps", forget_steps)


@mutant("which can never run")
def sequences_that_can_never_run_are_taken_in(patch):
    def max_pages(self, sequence):
        try:
            return real(self, sequence)
        except RequestError:
            return self.num_pages

    real = PageNeeds.max_pages
    patch.setattr(PageNeeds, "max_pages", max_pages)


def shift_what_is_given_back(patch, by: int) -> None:
    """The scheduler, but not its checks, starts windows so many places later."""

    def give_back(self, sequence):
        with patch.context() as inside:
            inside.setattr(CacheGroup, "first_page", lambda self, start: min(first(self, start) + by, start))
            give(self, sequence)

    def give(self, sequence):
        for index in self._windows:
            table = sequence.tables[index]
            for place in range(min(self.groups[index].first_page(sequence.num_computed), len(table))):
                if table[place] != HOLE:
                    self.pool.release(table[place])
                    table[place] = HOLE

    first = CacheGroup.first_page
    patch.setattr(Scheduler, "give_back", give_back)


@mutant("has not what its .* sees from", first_seed=14)
def a_page_is_given_back_too_early(patch):
    shift_what_is_given_back(patch, 1)


@mutant("holds what is before its", first_seed=14)
def a_page_is_given_back_too_late(patch):
    shift_what_is_given_back(patch, -1)


@mutant("holds what is before its", first_seed=6)
def nothing_is_given_back(patch):
    patch.setattr(Scheduler, "give_back", lambda self, sequence: None)


@mutant("sequences hold pages .* times, the pool counts", first_seed=6)
def what_is_given_back_is_not_released(patch):
    def give_back(self, sequence):
        with patch.context() as inside:
            inside.setattr(PagePool, "release", lambda self, page: None)
            real(self, sequence)

    real = Scheduler.give_back
    patch.setattr(Scheduler, "give_back", give_back)


@mutant("holds what is before its|is released and has no owner", first_seed=14)
def what_is_given_back_stays_in_the_table(patch):
    def give_back(self, sequence):
        tables = [list(table) for table in sequence.tables]
        real(self, sequence)
        sequence.tables = tables

    real = Scheduler.give_back
    patch.setattr(Scheduler, "give_back", give_back)


@mutant("reads what is not its own", first_seed=2)
def a_hit_believes_a_hole(patch):
    def run(self, slots, run_before):
        return run_before + self.count * self.group.page_tokens

    patch.setattr(BlockPart, "run", run)


@mutant("reads what is not its own", first_seed=2)
def a_hit_wants_a_page_too_few_of_a_window(patch):
    real = BlockPart.serves
    patch.setattr(BlockPart, "serves", lambda self, run, tokens: real(self, run + self.group.page_tokens, tokens))


@mutant(r"holds what is before its|the oldest sequence \d+ does not run|fits on \d+ tokens and waits", first_seed=6)
def a_hit_takes_what_is_behind_the_window_too(patch):
    def tables(self, entries):
        with patch.context() as inside:
            inside.setattr(CacheGroup, "first_page", lambda self, start: 0)
            return real(self, entries)

    real = PrefixCache.tables_of
    patch.setattr(PrefixCache, "tables_of", tables)


@mutant("reads what is not its own", first_seed=14)
def a_hit_mixes_up_groups_with_pages_of_one_size(patch):
    def tables(self, entries):
        made = list(real(self, entries))
        for index, table in enumerate(made[1:], 1):
            if len(table) == len(made[0]) and HOLE not in (*table, *made[0]):
                made[0], made[index] = table, made[0]
                break
        return tuple(made)

    real = PrefixCache.tables_of
    patch.setattr(PrefixCache, "tables_of", tables)


@mutant("took its entry with it", first_seed=14)
def a_window_page_evicts_the_whole_chain(patch):
    patch.setattr(PrefixCache, "evict", lambda self, page: self._drop(self.by_page[page]))


@mutant("has a hole where the whole context is kept", first_seed=3)
def a_page_of_a_whole_context_leaves_a_hole(patch):
    def evict(self, page):
        with patch.context() as inside:
            inside.setattr(self, "is_whole", (False,) * len(self.is_whole))
            real(self, page)

    real = PrefixCache.evict
    patch.setattr(PrefixCache, "evict", evict)


@mutant("leads to no page", first_seed=14)
def entries_without_pages_stay(patch):
    def evict(self, page):
        entry = self.by_page[page]
        if self.is_whole[entry.slots.index(page)]:
            return real(self, page)
        del self.by_page[page]
        entry.slots[entry.slots.index(page)] = HOLE
        entry.num_pages -= 1
        return self._pool.forget(page)

    real = PrefixCache.evict
    patch.setattr(PrefixCache, "evict", evict)


@mutant("listed with another entry|entries have .* in their slots|is registered twice", first_seed=14)
def an_evicted_page_of_a_window_keeps_its_slot(patch):
    def evict(self, page):
        entry = self.by_page[page]
        slot = entry.slots.index(page)
        real(self, page)
        if entry.is_registered:
            entry.slots[slot] = page

    real = PrefixCache.evict
    patch.setattr(PrefixCache, "evict", evict)


@mutant(r"^\d+ entries, at most \d+", first_seed=86)
def links_are_not_bounded(patch):
    def enter(self, chain, key, slots, step):
        most, self.max_entries = self.max_entries, 10**9
        try:
            return real(self, chain, key, slots, step)
        finally:
            self.max_entries = most

    real = PrefixCache.enter
    patch.setattr(PrefixCache, "enter", enter)


@mutant("listed with another entry|entries have .* in their slots", first_seed=2)
def pages_that_are_there_are_replaced(patch):
    def fill(self, entry, slots, step):
        entry.slots = [HOLE if new != HOLE else old for old, new in zip(entry.slots, slots, strict=True)]
        entry.num_pages = len(entry.slots) - entry.slots.count(HOLE)
        return real(self, entry, slots, step)

    real = PrefixCache.fill_holes
    patch.setattr(PrefixCache, "fill_holes", fill)


@mutant("is written and holds a registered prefix", first_seed=38)
def holes_are_filled_with_a_page_that_is_not_full(patch):
    def admit(self, sequence, start, max_new_tokens):
        item = real(self, sequence, start, max_new_tokens)
        hit = start.hit
        prefix, keys = self.prefix, self._tracks[sequence.sequence_id].chain.keys
        for index in range(len(hit.entries), hit.num_known):
            entry = prefix._entries.get(keys[index].digest)
            slots = [HOLE] * len(prefix.is_whole)
            for part, table in zip(prefix._parts, sequence.tables, strict=True):
                own = table[index * part.count : (index + 1) * part.count]
                slots[part.first : part.first + len(own)] = own
            if entry is not None:
                prefix.fill_holes(entry, slots, 0)
        return item

    real = Scheduler.admit
    patch.setattr(Scheduler, "admit", admit)


@mutant("starts inside a page|reads what is not its own|is written and holds a registered prefix", first_seed=2)
def blocks_have_the_size_of_one_groups_pages(patch):
    def block_tokens(groups, grid=1):
        return min((group.page_tokens for group in groups if not group.is_state), default=1)

    patch.setattr(holdfast.cache.prefix, "block_tokens", block_tokens)


@mutant("starts inside a state", first_seed=15)
def a_hit_ends_in_the_middle_of_a_state(patch):
    def init(self, *arguments, **options):
        real(self, *arguments, **options)
        self._periods = ()

    real = PrefixCache.__init__
    patch.setattr(PrefixCache, "__init__", init)


@mutant("starts inside a state", first_seed=18)
def a_state_of_all_tokens_is_hit(patch):
    def init(self, *arguments, **options):
        real(self, *arguments, **options)
        self._periods = tuple(filter(None, self._periods))

    def has_rows(groups):
        return not all(group.is_state for group in groups)

    real = PrefixCache.__init__
    patch.setattr(PrefixCache, "__init__", init)
    patch.setattr(holdfast.cache.prefix, "can_hit", has_rows)
    patch.setattr(holdfast.engine.holdings, "can_hit", has_rows)


@mutant("sequences hold pages .* times, the pool counts", first_seed=47)
def states_are_not_released(patch):
    def by_position(groups, tables):
        rows = [(group, table) for group, table in zip(groups, tables, strict=True) if not group.is_state]
        return real([group for group, _ in rows], [table for _, table in rows]) if rows else []

    real = holdfast.engine.scheduler.by_position
    patch.setattr(holdfast.engine.scheduler, "by_position", by_position)


@mutant(r"has not the \d+ positions of its account|has another state than its own", first_seed=47)
def a_state_goes_on_after_a_step_that_failed(patch):
    patch.setattr(Scheduler, "start_anew", lambda self, sequence: None)


@mutant(r"has not \d+ pages for \d+ tokens", first_seed=15)
def the_last_group_does_not_grow(patch):
    def missing(self, tables, num_tokens, num_kept=0):
        found = real(self, tables, num_tokens, num_kept)
        return found if len(found) == 1 else [*found[:-1], 0]

    real = PageNeeds.missing
    patch.setattr(PageNeeds, "missing", missing)


def claim_of(patch, change: Callable) -> None:
    """Replaces the arguments of a claim."""
    real = PageNeeds.claim

    def claim(self, sequence, tables, num_computed, longest, is_shared):
        return change(real, self, sequence, tables, num_computed, longest, is_shared)

    patch.setattr(PageNeeds, "claim", claim)


@mutant("was admitted without pages|none of .* has outgrown", first_seed=3)
def a_claim_forgets_a_group(patch):
    def change(real, self, sequence, tables, *rest):
        return real(replace(self, groups=self.groups[:1]), sequence, tables[:1], *rest)

    claim_of(patch, change)


@mutant("was admitted without pages|none of .* has outgrown", first_seed=18)
def a_claim_of_a_window_forgets_the_prompt(patch):
    def change(real, *arguments):
        with patch.context() as inside:
            inside.setattr(CacheGroup, "most_pages", lambda self, tokens, step: most(self, tokens, 1))
            return real(*arguments)

    most = CacheGroup.most_pages

    claim_of(patch, change)


@mutant(r"which can never run|holds \d+ pages of its .*, at most \d+", first_seed=3)
def the_bound_of_a_window_is_a_page_too_low(patch):
    real = CacheGroup.most_held
    patch.setattr(CacheGroup, "most_held", lambda self, step_tokens: real(self, step_tokens) - 1)


@mutant("none of .* has outgrown what admission promised|was admitted without pages")
def a_claim_has_no_page_to_grow_into(patch):
    def change(real, self, sequence, tables, done, longest, is_shared):
        return real(self, sequence, tables, done, min(longest, len(sequence.token_ids)), is_shared)

    claim_of(patch, change)
