"""Planted bugs of steps in flight: each breaks one thing that the scheduler does right there, and names the check that sees it.

They are planted like those of mutants.py, and run in worlds with late results.
"""

from dataclasses import replace

import holdfast.engine.scheduler
from engine.mutants import Mutant, entering
from holdfast.engine.page_needs import PageNeeds
from holdfast.engine.queues import SlotPool
from holdfast.engine.scheduler import Quarantined, Scheduler
from holdfast.request.sequence import LiveStep, SequenceState

LATE_MUTANTS: dict[str, Mutant] = {}
mutant = entering(LATE_MUTANTS)
OTHERS = "reads what is not its own|has another state than its own"


def after(patch, name: str, act) -> None:
    """Something more happens behind a method: act(scheduler, *arguments)."""

    def method(self, *arguments):
        result = real(self, *arguments)
        act(self, *arguments)
        return result

    real = getattr(Scheduler, name)
    patch.setattr(Scheduler, name, method)


def running(step: LiveStep):
    """Items of a step whose sequences run."""
    return [item for item in step.scheduled if item.sequence.state is SequenceState.RUNNING]


@mutant(OTHERS)
def pages_are_reused_before_the_steps_in_flight_have_ended(patch):
    def finish(self, sequence):
        sequence.num_scheduled = sequence.num_computed
        real(self, sequence)

    real = Scheduler.finish
    patch.setattr(Scheduler, "finish", finish)


@mutant(OTHERS, first_seed=5)
def the_slot_of_one_in_flight_is_given_away(patch):
    """Its pages stay, but the last token of the slot is overwritten under the next one."""

    def finish(self, sequence):
        num_before = len(self._quarantine)
        real(self, sequence)
        for held in self._quarantine[num_before:]:
            self._slots.put(held.slot)
            self._released.append(held.slot)

    def leave(self, number):
        released = list(self._released)
        with patch.context() as inside:
            inside.setattr(SlotPool, "put", lambda self, slot: None)
            real_leave(self, number)
        self._released[:] = released

    real, real_leave = Scheduler.finish, Scheduler.leave_quarantine
    patch.setattr(Scheduler, "finish", finish)
    patch.setattr(Scheduler, "leave_quarantine", leave)
    # It would see it first.
    patch.setattr(SlotPool, "check", lambda self, taken: None)


@mutant(OTHERS)
def quarantine_ends_a_step_too_early(patch):
    def leave(self, number):
        real(self, number + 1)

    real = Scheduler.leave_quarantine
    patch.setattr(Scheduler, "leave_quarantine", leave)


@mutant(OTHERS + "|is kept for step")
def quarantine_counts_from_the_first_step_in_flight(patch):
    def finish(self, sequence):
        real(self, sequence)
        if self._quarantine and self.in_flight:
            self._quarantine[-1] = replace(self._quarantine[-1], last_step=self.in_flight[0].step.number)

    real = Scheduler.finish
    patch.setattr(Scheduler, "finish", finish)


@mutant("is kept for step")
def quarantine_never_ends(patch):
    patch.setattr(Scheduler, "leave_quarantine", lambda self, number: None)


@mutant("sequences hold pages .* times, the pool counts")
def quarantine_forgets_the_last_page(patch):
    def init(last_step, slot, tables):
        return Quarantined(last_step, slot, [table[:-1] for table in tables])

    patch.setattr(holdfast.engine.scheduler, "Quarantined", init)


@mutant(r"slots .* are free, .* are taken")
def a_slot_never_comes_back(patch):
    def leave(self, number):
        with patch.context() as inside:
            inside.setattr(SlotPool, "put", lambda self, slot: None)
            real(self, number)

    real = Scheduler.leave_quarantine
    patch.setattr(Scheduler, "leave_quarantine", leave)


@mutant("is given, and it is taken|slots .* are free, .* are taken")
def a_slot_is_given_twice(patch):
    patch.setattr(SlotPool, "take", lambda self: self._free[0])


@mutant("is given, and it is taken|has no release for")
def a_release_is_not_sent(patch):
    def launched(self, items):
        del self._released[:1]
        return real(self, items)

    real = Scheduler.launched
    patch.setattr(Scheduler, "launched", launched)


@mutant("is (released|running), and it is empty|the device has .* in its slots")
def a_release_is_sent_twice(patch):
    def launched(self, items):
        released = list(self._released)
        live = real(self, items)
        self._released += released
        return live

    real = Scheduler.launched
    patch.setattr(Scheduler, "launched", launched)


@mutant("was finished and got a token")
def surplus_tokens_are_counted(patch):
    def act(self, step, token_ids):
        for item, chosen in zip(step.scheduled, token_ids, strict=True):
            if item.sequence.state is SequenceState.FINISHED:
                item.sequence.token_ids += chosen

    after(patch, "complete", act)


@mutant("has other pages in its slot")
def new_pages_are_sent_twice(patch):
    def new_pages(sequence, track):
        num_sent = list(track.num_sent)
        pages = real(sequence, track)
        track.num_sent, track.is_grown = num_sent, True
        return pages

    real = holdfast.engine.scheduler.new_pages
    patch.setattr(holdfast.engine.scheduler, "new_pages", new_pages)


@mutant(r"was sent \d+ of \d+ places")
def new_pages_are_not_sent(patch):
    def act(self, sequence, num_tokens, missing):
        track = self._tracks[sequence.sequence_id]
        track.num_sent = [
            max(reported, len(table) - 1) for reported, table in zip(track.num_sent, sequence.tables, strict=True)
        ]

    after(patch, "extend", act)


@mutant(r"was sent \d+ of \d+ places")
def pages_of_a_hit_are_not_sent(patch):
    def act(self, sequence, hit):
        self._tracks[sequence.sequence_id].num_sent = [len(table) for table in sequence.tables]

    after(patch, "start", act)


@mutant(r"has sequence\.num_scheduled=\d+ sequence\.num_coming=\d+, in flight are")
def tokens_go_on_coming(patch):
    def act(self, item, chosen):
        item.sequence.num_coming += item.samples and item.sequence.sequence_id % 3 == 0

    after(patch, "book", act)


@mutant(
    r"has sequence\.num_scheduled=\d+ sequence\.num_coming=-?\d+, in flight are|the oldest sequence \d+ does not run"
)
def a_coming_token_is_not_counted(patch):
    def act(self, items):
        for item in items:
            item.sequence.num_coming = 0

    after(patch, "launched", act)


@mutant(r"starts at \d+")
def a_step_starts_one_too_far(patch):
    def launched(self, items):
        return real(self, [item._replace(start=item.start + (item.sequence.num_coming > 0)) for item in items])

    real = Scheduler.launched
    patch.setattr(Scheduler, "launched", launched)


@mutant("has not what its .* sees from|reads what is not its own")
def a_window_gives_back_what_steps_in_flight_see(patch):
    def give_back(self, sequence):
        num_computed, sequence.num_computed = sequence.num_computed, sequence.num_scheduled
        real(self, sequence)
        sequence.num_computed = num_computed

    real = Scheduler.give_back
    patch.setattr(Scheduler, "give_back", give_back)


@mutant(r"num_step_tokens=\d+|holds \d+ pages of its|holds more than \d+ pages", first_seed=19)
def a_window_is_run_ahead_without_a_bound(patch):
    patch.setattr(Scheduler, "most_ahead", lambda self, sequence: self.limits.max_num_batched_tokens)


@mutant(r"num_registered=\d+ blocks, num_full=|is written and holds a registered prefix")
def a_prefix_is_registered_with_tokens_that_are_not_known(patch):
    def act(self, item, chosen):
        sequence = item.sequence
        chain = self._tracks[sequence.sequence_id].chain
        self.prefix.register(chain, sequence.token_ids, sequence.tables, sequence.num_scheduled)

    after(patch, "book", act)


@mutant("none of .* has outgrown what admission promised|was admitted without pages", first_seed=34)
def a_claim_ignores_coming_tokens(patch):
    def claim(self, sequence, *rest):
        num_coming, sequence.num_coming = sequence.num_coming, 0
        try:
            return real(self, sequence, *rest)
        finally:
            sequence.num_coming = num_coming

    real = PageNeeds.claim
    patch.setattr(PageNeeds, "claim", claim)


@mutant(r"was preempted with \d+ steps in flight", first_seed=34)
def a_sequence_in_flight_is_preempted(patch):
    def grow(self, sequence, num_tokens):
        steps, self.in_flight = self.in_flight, type(self.in_flight)()
        try:
            return real(self, sequence, num_tokens)
        finally:
            self.in_flight = steps

    real = Scheduler.grow
    patch.setattr(Scheduler, "grow", grow)


@mutant("the device has .* in its slots|waits: .*sequence.slot=", first_seed=34)
def a_preempted_sequence_keeps_its_slot(patch):
    def preempt(self):
        with patch.context() as inside:
            inside.setattr(Scheduler, "release_slot", lambda self, sequence, track: None)
            return real(self)

    real = Scheduler.preempt_last
    patch.setattr(Scheduler, "preempt_last", preempt)


@mutant(r"runs up to \d+")
def one_runs_past_its_max_tokens(patch):
    def act(self, sequence):
        self._tracks[sequence.sequence_id].longest += 1

    after(patch, "add", act)


@mutant(r"has not the \d+ positions of its account", first_seed=36)
def rejected_proposals_count_as_computed(patch):
    def act(self, item, chosen):
        if item.proposals:
            item.sequence.num_computed = item.sequence.num_scheduled = item.start + item.num_new_tokens

    after(patch, "book", act)


@mutant(r"has sequence\.num_scheduled=\d+ sequence\.num_coming=\d+, in flight are", first_seed=36)
def rejected_proposals_stay_scheduled(patch):
    def act(self, item, chosen):
        if item.proposals:
            item.sequence.num_scheduled = item.start + item.num_new_tokens

    after(patch, "book", act)


@mutant(r"num_registered=\d+ blocks, num_full=|has not the \d+ outputs", first_seed=40)
def rejected_proposals_are_registered(patch):
    def act(self, item, chosen):
        sequence = item.sequence
        if item.proposals and item.start + item.num_new_tokens > sequence.num_computed:
            chain = self._tracks[sequence.sequence_id].chain
            guessed = [*sequence.token_ids[: item.num_tokens], *item.proposals]
            self.prefix.register(chain, guessed, sequence.tables, item.start + item.num_new_tokens)

    after(patch, "book", act)


@mutant(r"^\d+ rows choose in a step", first_seed=11)
def proposals_take_rows_that_are_not_there(patch):
    patch.setattr(Scheduler, "spare_rows", lambda self: 10**6)


@mutant(r"^\d+ tokens in a step|runs -\d+ tokens", first_seed=17)
def proposals_take_no_part_of_the_budget(patch):
    real = Scheduler.proposals
    patch.setattr(Scheduler, "proposals", lambda self, sequence, guesses, most: real(self, sequence, guesses, most + 9))


@mutant("none of .* has outgrown what admission promised|was admitted without pages", first_seed=40)
def proposals_take_what_others_claim(patch):
    def proposals(self, sequence, guesses, most):
        guesses.num_claimed = 0
        return real(self, sequence, guesses, most)

    real = Scheduler.proposals
    patch.setattr(Scheduler, "proposals", proposals)


@mutant("drafts after unknown tokens", first_seed=36)
def drafts_follow_coming_tokens(patch):
    def schedule(self, propose=None, limit=None):
        if propose is not None:
            for sequence in self._queues.running:
                if sequence.num_coming and sequence.may_speculate:
                    propose(sequence)
        return real(self, propose, limit)

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


@mutant(r"has sequence\.num_scheduled=\d+ sequence\.num_coming=\d+, in flight are", first_seed=12)
def forgotten_steps_leave_their_coming_tokens(patch):
    def forget(self):
        coming = [(sequence, sequence.num_coming) for sequence in self.running]
        real(self)
        for sequence, num_coming in coming:
            sequence.num_coming = num_coming

    real = Scheduler.forget_steps
    patch.setattr(Scheduler, "forget_steps", forget)


@mutant("is kept for step")
def forgotten_steps_leave_their_quarantine(patch):
    def forget(self):
        held = list(self._quarantine)
        with patch.context() as inside:
            inside.setattr(Scheduler, "leave_quarantine", lambda self, number: None)
            real(self)
        assert self._quarantine == held, "nothing has left"

    real = Scheduler.forget_steps
    patch.setattr(Scheduler, "forget_steps", forget)


@mutant("is given, and it is taken")
def one_that_starts_anew_is_not_released(patch):
    def start_anew(self, sequence):
        real(self, sequence)
        self._released.pop()

    real = Scheduler.start_anew
    patch.setattr(Scheduler, "start_anew", start_anew)


@mutant(r"runs up to \d+, and \d+ tokens are known or coming", first_seed=34)
def outputs_before_a_preemption_are_not_sent(patch):
    def admitted(sequence, fork_of, track):
        reported = real(sequence, fork_of, track)
        return reported._replace(token_ids=reported.token_ids[: reported.num_prompt_tokens])

    real = holdfast.engine.scheduler.admitted
    patch.setattr(holdfast.engine.scheduler, "admitted", admitted)


@mutant(r"step \d+ came behind step \d+")
def empty_steps_are_numbered(patch):
    def schedule(self, propose=None, limit=None):
        step = real(self, propose, limit)
        if step is not None and not step.scheduled and not self.in_flight:
            self.num_steps += 1
        return step

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


@mutant(r"fits on \d+ tokens and waits")
def one_blocked_by_quarantine_is_not_tried_again(patch):
    def leave(self, number):
        blocked = self._blocked
        real(self, number)
        if blocked is not None:
            self._blocked = replace(blocked, num_available=self.pool.num_available)

    real = Scheduler.leave_quarantine
    patch.setattr(Scheduler, "leave_quarantine", leave)
