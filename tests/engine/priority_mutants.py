"""Planted bugs of priorities: who is admitted, who gives way, where they wait."""

from engine.mutants import Mutant, entering
from holdfast.engine.queues import Lanes, Queues
from holdfast.engine.scheduler import Scheduler

PRIORITY_MUTANTS: dict[str, Mutant] = {}
mutant = entering(PRIORITY_MUTANTS)


@mutant("was admitted before|is not the order of arrival")
def the_oldest_starts_whatever_it_is_worth(patch):
    def first_waiting(self):
        return min(self.waiting_lanes, key=lambda sequence: sequence.sequence_id)

    def admit(self):
        sequence = first_waiting(self)
        self.waiting_lanes.discard(sequence)
        self.running_lanes.add(sequence)
        sequence.state = type(sequence.state).RUNNING
        return sequence

    patch.setattr(Queues, "first_waiting", property(first_waiting))
    patch.setattr(Queues, "admit", admit)


@mutant("gave way, and .* stayed|was preempted and is in the step")
def the_youngest_gives_way_whatever_it_is_worth(patch):
    def pop_last(self):
        sequence = max(self, key=lambda one: one.sequence_id)
        self.discard(sequence)
        return sequence

    patch.setattr(Lanes, "pop_last", pop_last)


@mutant("out of order of arrival")
def preempted_sequence_waits_after_its_equals(patch):
    def preempt(self):
        sequence = real(self)
        self.waiting_lanes.discard(sequence)
        self.waiting_lanes.add(sequence)
        return sequence

    real = Queues.preempt
    patch.setattr(Queues, "preempt", preempt)


@mutant(r"does not run|is not the order of arrival")
def the_least_important_are_served_first(patch):
    patch.setattr(Queues, "running", property(lambda self: list(self.running_lanes)[::-1]))


@mutant("a lane of .* is empty|priorities|lane")
def empty_lanes_stay(patch):
    def discard(self, sequence):
        lane = self.lanes.get(sequence.params.priority)
        if lane is not None and lane.pop(sequence.sequence_id, None) is not None:
            self.num_sequences -= 1

    def first(self):
        return next(sequence for sequence in self)

    def pop_last(self):
        sequence = list(self)[-1]
        self.discard(sequence)
        return sequence

    patch.setattr(Lanes, "discard", discard)
    patch.setattr(Lanes, "first", property(first))
    patch.setattr(Lanes, "pop_last", pop_last)


@mutant(r"fits on \d+ tokens and waits")
def one_that_does_not_fit_holds_up_more_important_ones_for_ever(patch):
    def is_still_blocked(self, sequence):
        return self._blocked is not None

    patch.setattr(Scheduler, "is_still_blocked", is_still_blocked)
