"""Planted bugs of pipelines: each breaks one thing that the scheduler does right with a step in every stage.

They are planted like those of mutants.py, and run in worlds with stages.
"""

from engine.mutants import Mutant, entering
from holdfast.engine.scheduler import Scheduler

PIPELINE_MUTANTS: dict[str, Mutant] = {}
mutant = entering(PIPELINE_MUTANTS)


def with_stages(patch, name: str, num_stages: int) -> None:
    """One method believes in another number of stages."""

    def method(self, *arguments):
        own, self.num_stages = self.num_stages, num_stages
        try:
            return real(self, *arguments)
        finally:
            self.num_stages = own

    real = getattr(Scheduler, name)
    patch.setattr(Scheduler, name, method)


@mutant("is in two stages of a pipeline")
def a_sequence_in_flight_is_taken_again(patch):
    def share(self):
        taken = real(self)
        return taken + [one for one in self._queues.running if one.num_scheduled > one.num_computed][:1]

    real = Scheduler.stage_share
    patch.setattr(Scheduler, "stage_share", share)


@mutant("are more than a share of")
def a_step_takes_everybody_who_is_idle(patch):
    with_stages(patch, "stage_share", 1)


@mutant("new ones are more than a share")
def a_step_admits_everybody(patch):
    with_stages(patch, "admit_waiting", 1)


@mutant("have nothing in flight, and")
def a_share_is_rounded_down(patch):
    def share(self):
        return real(self)[: max(self.num_running // self.num_stages, 1)]

    real = Scheduler.stage_share
    patch.setattr(Scheduler, "stage_share", share)


@mutant("are more than a share of")
def a_stage_that_is_free_is_left_empty(patch):
    """Four of three stages are two and two, and not two, one and one."""

    def share(self):
        running = self._queues.running
        idle = [one for one in running if one.num_scheduled == one.num_computed]
        return idle[: -(-len(running) // self.num_stages)]

    patch.setattr(Scheduler, "stage_share", share)


@mutant("does not run")
def the_last_come_first(patch):
    def share(self):
        idle = [one for one in self._queues.running if one.num_scheduled == one.num_computed]
        return idle[-max(-(-self.num_running // self.num_stages), 1) :]

    patch.setattr(Scheduler, "stage_share", share)


@mutant("nothing is in flight, and nothing is scheduled")
def who_lacks_pages_is_never_served(patch):
    patch.setattr(Scheduler, "serve_short", lambda self, sequence: False)


@mutant("is preempted with . steps in flight|was preempted with . steps in flight")
def who_lacks_pages_is_served_with_steps_in_flight(patch):
    def serve(self, sequence):
        flights, self.in_flight = self.in_flight, type(self.in_flight)()
        try:
            return real(self, sequence)
        finally:
            self.in_flight = flights

    real = Scheduler.serve_short
    patch.setattr(Scheduler, "serve_short", serve)


@mutant("goes on after max_tokens")
def who_lacks_pages_is_served_past_its_end(patch):
    def serve(self, sequence):
        track = self._tracks.get(sequence.sequence_id)
        if track is not None:
            grow(self, sequence, track.longest + 1)
        return real(self, sequence)

    grow, real = Scheduler.grow, Scheduler.serve_short
    patch.setattr(Scheduler, "serve_short", serve)
