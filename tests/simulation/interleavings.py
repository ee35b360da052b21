"""Interleavings that random schedules hardly find, each as the steps that break a shortcut."""

from __future__ import annotations

from celery_redlock.lock.model.keys import tenure_key
from tests.simulation.stage import Actor, Stage

# ttl 100 s, a silence of 101 s, an answer within 25 s


def three_restarts(stage: Stage) -> None:
    """A repaired node is one on which another client still counts."""
    a, b = stage.actor("A"), stage.actor("B")
    a.tries()  # A holds 0, 1, 2 until 100
    stage.at(20)
    a.cut_off(0)
    stage.restarts(0)
    b.tries("x")  # meets 0, which is silent until 121
    stage.at(80)
    a.extends()  # on 1 and 2, until 180
    stage.restarts(1)
    a.cut_off(1)
    b.tries("y")  # meets 1, which is silent until 181
    stage.at(122)
    b.cut_off(1)
    b.tries()  # granted by 0, refused by 2; what it sends to 1 is on its way
    b.stops(until=183)
    stage.restarts(0)
    a.reaches(0)
    stage.at(123)
    a.extends()  # on 2; its key is missing on 0
    stage.at(150)
    a.extends()  # on 2, and a repair of 0, in its silence
    stage.at(160)
    a.extends()  # on both; but 0 must not count before 1 and 2 have confirmed A
    stage.at(182)
    b.reaches(1)  # which votes again: B has the votes of 0 and 1, and counts from 122
    stage.at(184)
    assert b.lock.held


def a_renewal_after_the_end(stage: Stage) -> None:
    """A client stopped past the end of its lease finds its keys gone, and puts them there again."""
    a, b = stage.actor("A"), stage.actor("B")
    a.tries()  # until 100
    stage.at(50)
    a.cut_off(0, 1, 2)
    a.extends()  # on its way to all
    a.stops(until=120)
    stage.at(101)
    b.tries()
    stage.at(110)
    b.releases()
    a.reaches(0, 1, 2)  # each says that no key of A stands there
    stage.at(121)
    a.extends()
    stage.at(160)
    a.extends()
    stage.at(161)


def anothers_key(stage: Stage) -> None:
    """A renewal meets the key of another, which must not pass for A's own."""
    a, b = stage.actor("A"), stage.actor("B")
    a.tries()
    a.cut_off(2)
    stage.at(60)
    a.extends()  # on 0 and 1, until 160
    stage.at(101)
    b.cut_off(1)
    b.tries()  # granted by 2, refused by 0
    b.cut_off(2)  # so its release does not come through
    a.reaches(2)
    stage.at(102)
    a.tries("x")
    stage.at(103)
    a.locks.pop()
    a.extends()


def a_late_release(stage: Stage) -> None:
    """The release of a failed try arrives when the same process has tried again, and won."""
    a, b = stage.actor("A"), stage.actor("B")
    b.tries()
    a.cut_off(0)
    stage.at(1)
    a.tries()  # refused by 1 and 2; its grant and its release are on their way to 0
    b.releases()
    a.breaks(0)
    a.reaches(0)
    stage.at(2)
    a.tries("x")  # connects anew
    a.cut_off(2)
    stage.at(3)
    a.tries()  # granted by 0 and 1
    a.late()
    stage.at(4)
    b.cut_off(1)
    b.tries()


def a_release_after_the_keys(stage: Stage) -> None:
    """Keys end by themselves while the release of a lock that was held is on its way to them."""
    a = stage.actor("A")
    a.tries()  # until 100
    a.cut_off(0, 1)
    stage.at(80)
    a.releases()
    stage.at(101)
    a.reaches(0, 1)  # no key stands there any more
    stage.at(130)


def a_counter_that_only_the_fast_saw(stage: Stage) -> None:
    """A token is made of one node's counter, which the next quorum does not meet."""
    fast = stage.actor("fast", wall_error=1000.0)
    a, b = stage.actor("A"), stage.actor("B")
    fast.cut_off(1, 2)
    fast.tries(fencing=True)  # on 0 alone: its counter is ahead
    stage.at(30)
    fast.reaches(1, 2)
    stage.at(31)
    a.cut_off(2)
    a.tries(fencing=True)  # on 0 and 1: its token is that of 0
    a.releases()
    a.cut_off(1)
    stage.at(32)
    b.cut_off(0)
    b.tries(fencing=True)  # on 1 and 2
    stage.at(90)


def counters_lost(stage: Stage) -> None:
    """Two nodes forget their counters between two holders."""
    a, b = stage.actor("A"), stage.actor("B")
    for _ in range(3):
        a.tries(fencing=True)
        a.releases()
    stage.at(1)
    stage.restarts(0, 1)
    b.tries("meets them")
    stage.at(103)
    b.cut_off(2)
    b.tries(fencing=True)
    stage.at(130)


def a_token_on_its_way(stage: Stage) -> None:
    """A holder uses a token that one node alone has reached."""
    fast = stage.actor("fast", wall_error=1000.0)
    a, b = stage.actor("A"), stage.actor("B")
    fast.cut_off(1, 2)
    fast.tries(fencing=True)  # on 0 alone: its counter is ahead
    stage.at(30)
    a.cut_off(0, 2)
    a.tries(fencing=True)  # granted by 1
    a.cut_off(1)
    a.reaches(0)  # granted by 0, which alone hears of the token
    stage.at(31)
    a.releases()
    stage.at(132)  # its key on 1 has ended
    b.cut_off(0)
    b.tries(fencing=True)


def a_proposal_from_before_the_loss(stage: Stage) -> None:
    """A client stops between its two clocks, and its calendar is behind."""
    a = stage.actor("A", wall_error=0.5)
    b = stage.actor("B", wall_error=-0.5)
    stage.at(10)
    b.process.stop_after(3, 101.8)
    b.tries(fencing=True)  # it has read its calendar
    stage.at(10.5)
    a.tries(fencing=True)  # its token is from now
    stage.at(10.6)
    stage.restarts(0, 1, 2)
    a.tries("x")  # meets them: they are silent until 111.6
    stage.at(112)


def a_grant_after_a_short_silence(stage: Stage) -> None:
    """A request from just after the loss is granted as the silence ends."""
    a, b = stage.actor("A", wall_error=0.5), stage.actor("B", wall_error=-0.5)
    stage.at(1)
    a.tries(fencing=True)
    a.releases()
    stage.at(1.1)
    stage.restarts(0, 1, 2)
    b.tries("x")  # meets them
    stage.at(1.2)
    b.cut_off(0, 1, 2)
    b.tries(fencing=True)  # on its way
    b.stops(until=101.2)
    stage.at(101.15)
    b.reaches(0, 1, 2)
    stage.at(101.3)


def a_fail_back_to_a_primary(stage: Stage) -> None:
    """A replica serves for its frozen primary and dies; a new client meets the primary again."""
    _fail_back(stage, copied=True)


def a_fail_back_to_another_server(stage: Stage) -> None:
    """An address leads to a server that knows nothing, and then back to the first one."""
    _fail_back(stage, copied=False)


def _fail_back(stage: Stage, *, copied: bool) -> None:
    a = stage.actor("A", new=True)
    a.tries("before")
    a.releases()
    stage.at(1)
    come_back = stage.replaces(0, copied=copied)
    c = stage.actor("C", new=True)
    c.tries("x")  # meets the second server, which is silent until 102
    stage.at(103)
    c.cut_off(2)
    c.tries()  # granted by 0 and 1
    stage.at(104)
    come_back()
    b = stage.actor("B", new=True)
    b.cut_off(1)
    b.tries()  # on 0 and 2, of which 2 knows who served for 0
    stage.at(140)
    assert c.lock.held


def a_vote_before_the_note(stage: Stage) -> None:
    """A new client has the vote of a server that is behind when it reaches a node that knows."""
    come_back = stage.replaces(0, copied=True)
    a = stage.actor("A", new=True)
    a.tries("x")
    stage.at(103)
    a.cut_off(2)
    a.tries()  # granted by 0 and 1
    stage.at(104)
    come_back()
    b = stage.actor("B", new=True)
    b.cut_off(1)
    b.paths[2].base = 4.0  # of a ttl of 100
    b.tries()  # granted by 0 at once, by 2 some seconds later
    stage.at(140)
    assert a.lock.held


def a_client_that_stays(stage: Stage) -> None:
    """A client goes from one server of an address to the other and back, and no other node knows.

    What it saw itself is enough: it was cut off from node 1, and node 2 has forgotten.
    """
    a, b = stage.actor("A"), stage.actor("B")
    a.cut_off(2)
    b.cut_off(1)
    come_back = stage.replaces(0, copied=True)
    b.tries("x")
    a.tries("y")
    stage.at(103)
    a.tries()  # granted by 0 and 1
    stage.nodes[2].drop(tenure_key("redlock", "node0").encode())
    come_back()
    b.tries()  # on 0 and 2
    stage.at(140)
    assert a.lock.held


# a rate of 1 in 1,000 s: a body begins within a second of its grant


def a_node_that_was_told_later(stage: Stage) -> None:
    """Of two nodes that granted a start, one forgets it, and the other one is away."""
    b = _starts_on_two(stage)
    stage.at(1180)
    stage.restarts(1)
    b.tries("x")  # meets 1, which abstains until 1281
    stage.at(1290)
    stage.nodes[0].stop(keeps="all")
    b.tries(rate="1/1000 s")  # granted by 1; 2 was told of the start after its body began
    stage.at(1330)


def a_node_that_remembers(stage: Stage) -> None:
    """Of two nodes that granted a start, one forgets it, and the third one never learns of it."""
    b = _starts_on_two(stage, is_told=False)
    stage.at(1200)
    stage.restarts(1)
    b.tries("x")  # meets 1, which abstains until 1301
    stage.at(1310)
    b.tries(rate="1/1000 s")  # granted by 1, which is young, and by 2; refused by 0
    stage.at(1350)


def _starts_on_two(stage: Stage, *, is_told: bool = True) -> Actor:
    a, b = stage.actor("A"), stage.actor("B")
    stage.at(1100)  # each node serves for longer than a start counts
    a.tries("x")  # connects anew, as all were idle
    a.cut_off(2)
    a.tries(rate="1/1000 s")  # granted by 0 and 1
    assert a.holds
    a.releases()
    a.paths[2].closed = not is_told
    a.breaks(2)  # its request is lost
    return b


def a_record_after_the_next_start(stage: Stage) -> None:
    """What a node is told of a start comes when its permit has another one."""
    a, b = stage.actor("A"), stage.actor("B")
    stage.at(1100)
    a.tries("x")
    a.cut_off(2)
    a.tries(rate="1/40 s")  # granted by 0 and 1
    a.releases()
    stage.at(1121)
    a.paths[2].closed = False
    a.breaks(2)  # its requests are lost; at 1150 it tells 2 of its start
    stage.at(1142)
    b.tries(rate="1/40 s")  # on all three
    assert b.holds
    b.releases()
    stage.at(1165)


def a_lost_reply_to_a_start(stage: Stage) -> None:
    """A node has granted a start when the connection breaks on which its reply is to come."""
    a = stage.actor("A")
    stage.nodes[1].stop(keeps="all")
    a.paths[2].base = 4.0  # of a node timeout of 25
    a.tries(rate="2/1000 s")
    while not [key for key in stage.nodes[2].keys() if b":rate:" in key]:  # noqa: SIM118
        stage.at(stage.world.now + 0.1)
    a.breaks(2)  # it asks once more, on another connection
    stage.at(60)


def a_body_after_a_pause(stage: Stage) -> None:
    """A client stops between its grant and its body, for longer than the slack."""
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate="1/20 s", body_follows=True)
    stage.at(1)
    a.begins()
    a.releases()
    stage.at(20.5)  # a period after the grant
    b.tries(rate="1/20 s")
    stage.at(30)


def an_extension_on_its_way(stage: Stage) -> None:
    """A client asks for its start once more, and no node hears it in time."""
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate="1/20 s", limit=2, body_follows=True)
    stage.at(1)
    a.cut_off(0, 1, 2)
    a.begins()
    stage.at(20.5)
    b.tries(rate="1/20 s", limit=2)
    stage.at(30)
