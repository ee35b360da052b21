"""Exact schedules of workers and worker leases: what befalls whom, and when."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.broker import Question
from tests.simulation.recovery import LISTS, Recovery, Worker
from tests.simulation.recovery_invariants import DEAD, LEASES

READY = 3.5  # real s at which all workers have joined and have their messages


def workers(schedule: Recovery, *names: str, messages: int = 0, body: float = 30.0) -> list[Worker]:
    """Start workers, one after the other; the first has all messages, and runs one of them."""
    made = []
    for number, _ in enumerate(names):
        worker = schedule.add()
        worker.path.base, worker.path.slow = 0.001, 0.0
        worker.clock.rate, worker.slots, worker.prefetch = 1.0, 1, max(messages, 1)
        made.append(worker)
        if not number:
            schedule.world.run(0.5, schedule.witness.check)
            for _ in range(messages):
                schedule.publish(body, name=LISTS[0])
            schedule.world.run(1.5, schedule.witness.check)
    schedule.world.run(READY, schedule.witness.check)
    return made


def until_it_has_beaten(schedule: Recovery, worker: Worker) -> None:
    """Let time pass until the broker has executed a beat just now."""
    beats = schedule.broker.sets[LEASES]
    last = beats[worker.keeper.lease]
    while beats[worker.keeper.lease] == last:
        schedule.world.run(schedule.world.now + 0.01, schedule.witness.check)


def a_pause_as_the_clock_is_set(schedule: Recovery) -> None:
    """The broker's clock shows a worker that was stopped just now, which wakes 5.6 s later."""
    stopped, _ = workers(schedule, "stopped", "observer", messages=3, body=6.5)
    until_it_has_beaten(schedule, stopped)
    schedule.broker.offset += 10.0
    schedule.witness.clock_was_set()
    stopped.stop(5.6)
    schedule.until(schedule.world.now + 12.0)


def a_pause_before_the_reply(schedule: Recovery) -> None:
    """A worker is stopped while the reply to its beat is on its way, and reads it as it wakes."""
    stopped, _ = workers(schedule, "stopped", "observer", messages=3, body=6.5)
    stopped.path.base = 0.2
    until_it_has_beaten(schedule, stopped)
    until_it_has_beaten(schedule, stopped)
    stopped.stop(12.0)
    schedule.until(schedule.world.now + 16.0)


def a_pause_before_the_note(schedule: Recovery) -> None:
    """A worker is stopped with a message that it has not noted, and notes it last as it wakes."""
    stopped, _ = workers(schedule, "stopped", "observer", messages=1, body=0.1)

    def pause() -> None:
        stopped.before_note = bool
        stopped.stop(9.0)
        stopped.clock.sleep(9.5)

    stopped.before_note = pause
    for _ in range(4):
        schedule.publish(0.1, name=LISTS[0])
    schedule.until(schedule.world.now + 12.0)


def a_kill_after_the_note(schedule: Recovery) -> None:
    """As before, and the worker is killed then: nobody that lives knows of the message."""
    a_pause_before_the_note(schedule)
    while not schedule.world.counts["noted late"]:
        schedule.world.run(schedule.world.now + 0.01, schedule.witness.check)
    schedule.workers[0].kill()


def a_cut_as_it_moves_what_it_noted_late(schedule: Recovery) -> None:
    """As before, and the worker's move of that message gets no answer."""
    a_pause_before_the_note(schedule)
    world, broker, stopped = schedule.world, schedule.broker, schedule.workers[0]
    while not world.counts["noted late"]:
        world.run(world.now + 0.01, schedule.witness.check)
    stopped.path.base = 0.2
    scans: list[Question] = []
    while not scans:
        world.run(world.now + 0.01, schedule.witness.check)
        asked = [one for one in broker.asked if one.worker is stopped]
        scans = [one for one in asked if one.words[0] == "HSCAN"]
    scans[0].fail()
    schedule.until(world.now + 4.0)


def a_reconnect_as_it_begins_anew(schedule: Recovery) -> None:
    """A worker that was taken for dead wakes, and has lost its connection: two threads join."""
    stopped, _ = workers(schedule, "stopped", "observer")
    stopped.stop(9.0)
    schedule.world.run(schedule.world.now + 8.9, schedule.witness.check)
    stopped.path.base = 0.2
    stopped.cut()
    schedule.world.run(schedule.world.now + 4.0, schedule.witness.check)


def a_reconnect_that_may_not_join(schedule: Recovery) -> None:
    """A worker loses its connection with messages, and the broker refuses its join for a while."""
    workers(schedule, "reconnects", "observer", messages=3)
    broker, world = schedule.broker, schedule.world
    broker.stop()
    broker.no_joins_until = world.now + 4.0
    world.at(world.now + 0.5, broker.start)
    schedule.until(broker.no_joins_until)


def a_worker_after_a_warm_shutdown(schedule: Recovery) -> None:
    """A worker that has resigned has left messages; the next one starts."""
    (first,) = workers(schedule, "first", messages=3)
    first.kill()
    schedule.broker.execute(None, "ZADD", DEAD, "0", first.keeper.lease)
    schedule.broker.execute(None, "ZREM", LEASES, first.keeper.lease)
    schedule.world.run(READY + 1.0, schedule.witness.check)
    schedule.add().path.base = 0.001
    schedule.world.run(schedule.world.now + 1.5, schedule.witness.check)


def a_worker_beside_one_with_messages(schedule: Recovery) -> None:
    """Nothing befalls anybody: one worker has messages, and another one starts."""
    workers(schedule, "busy", "beside", messages=3)


def a_mover_after(steps: int, befalls: str) -> Callable[[Recovery], None]:
    """A worker dies, and something befalls its mover after so many points of I/O: it ends, too."""

    def a_mover_that_ends(schedule: Recovery) -> None:
        dead, mover, third = workers(schedule, "dead", "mover", "third", messages=6)
        third.path.base = 0.02
        dead.kill()
        mover.after(steps, mover.kill if befalls == "kill" else lambda: mover.stop(9.0))
        schedule.until(schedule.world.now + 20.0)

    return a_mover_that_ends
