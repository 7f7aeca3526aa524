"""The mesh as a state machine: size, grafts and prunes, IHAVE and IWANT, expiry.

Last, fifty of them together, on links that lose most of what goes along the mesh.
"""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from echo_node.net.dedup import message_id
from echo_node.net.gossip.mesh import (
    ASK_PER_BEAT,
    DEGREE,
    DEGREE_HIGH,
    DEGREE_LOW,
    FLOOD,
    HISTORY,
    LAZY,
    LEAVE_SECONDS,
    OFFERED,
    PRUNE_SECONDS,
    RESEND,
    SLACK_SECONDS,
    TOPICS_PER_PEER,
    WINDOW,
    Mesh,
)
from echo_node.net.gossip.wire import Control, Published

TOPIC = "topic"


def name(n):
    return n.to_bytes(32)


def meet(mesh, count, now=0.0, first=0):
    """So many peers that listen to the topic; whom it grafts because of that."""
    grafted = []
    for n in range(first, first + count):
        out, _ = mesh.handle_subscription(name(n), TOPIC, now, on=True)
        grafted += [peer for peer, control in out.items() if control.graft]
    return grafted


def joined(count, seed=0):
    mesh = Mesh(Random(seed))
    mesh.join(TOPIC, 0.0)
    meet(mesh, count)
    return mesh


def remember(mesh, n, *, own=False, topic=TOPIC):
    message = Published(topic, b"%d" % n)
    identifier = message_id(topic, message.data)
    mesh.remember(identifier, message, own=own)
    return identifier


def offered(out):
    return {peer: [each for _, ids in control.have for each in ids] for peer, control in out.items()}


# Its size


def test_joining_grafts_a_few_of_those_who_listen_and_coming_fills_what_lacks():
    mesh = Mesh(Random(0))
    meet(mesh, 40)
    out = mesh.join(TOPIC, 0.0)
    assert len(out) == DEGREE
    assert mesh.mesh(TOPIC) == out.keys()
    assert meet(mesh, 5, first=40) == [], "it has enough"

    late = Mesh(Random(0))
    late.join(TOPIC, 0.0)
    assert len(meet(late, 40)) == DEGREE_LOW


def test_a_mesh_that_loses_members_is_filled_at_the_next_heartbeat():
    mesh = joined(40)
    for peer in mesh.mesh(TOPIC):
        mesh.remove(peer)
    assert mesh.mesh(TOPIC) == frozenset()
    out = mesh.heartbeat(1.0)
    assert len(mesh.mesh(TOPIC)) == DEGREE
    assert {peer for peer, control in out.items() if control.graft == [TOPIC]} == mesh.mesh(TOPIC)
    assert not any(control.graft for control in mesh.heartbeat(2.0).values())


def test_however_many_graft_the_mesh_stays_in_its_bounds():
    mesh = joined(100)
    answers = [mesh.handle_graft(name(n), TOPIC, 0.0) for n in range(100)]
    assert len(mesh.mesh(TOPIC)) == DEGREE_HIGH
    assert [fault for _, fault in answers if fault] == []
    pruned = [peer for out, _ in answers for peer in out]
    assert len(pruned) == 100 - DEGREE_HIGH
    assert not mesh.mesh(TOPIC) & set(pruned)


def test_who_listens_no_longer_is_no_member():
    mesh = joined(3)
    assert len(mesh.mesh(TOPIC)) == 3
    mesh.handle_subscription(name(0), TOPIC, 0.0, on=False)
    assert name(0) not in mesh.mesh(TOPIC) | mesh.subscribers(TOPIC)


def test_a_peer_is_heard_on_so_many_topics_and_no_more():
    mesh = Mesh(Random(0))
    for n in range(2 * TOPICS_PER_PEER):
        mesh.handle_subscription(name(0), f"topic {n}", 0.0, on=True)
    assert len(mesh._subscribed[name(0)]) == TOPICS_PER_PEER


# Who grafts whom, and when


def test_a_graft_on_a_topic_that_is_not_ours_is_passed_over():
    mesh = Mesh(Random(0))
    assert mesh.handle_graft(name(0), "unheard of", 0.0) == ({}, "")
    assert mesh.mesh("unheard of") == frozenset()


def test_a_graft_of_somebody_who_does_not_listen_is_pruned():
    mesh = joined(0)
    out, fault = mesh.handle_graft(name(0), TOPIC, 0.0)
    assert (out, fault) == ({name(0): Control(prune=[(TOPIC, PRUNE_SECONDS)])}, "")


def test_a_second_graft_of_a_member_changes_nothing():
    mesh = joined(1)
    assert mesh.handle_graft(name(0), TOPIC, 0.0) == ({}, "")
    assert mesh.mesh(TOPIC) == {name(0)}


def test_who_pruned_us_is_not_grafted_before_its_time():
    mesh = joined(1)
    mesh.handle_prune(name(0), TOPIC, 30, 0.0)
    assert mesh.mesh(TOPIC) == frozenset()
    for now in range(1, 30 + SLACK_SECONDS):
        assert mesh.heartbeat(float(now)) == {}
    assert mesh.heartbeat(30.0 + SLACK_SECONDS) == {name(0): Control(graft=[TOPIC])}


def test_a_prune_that_names_no_time_has_the_usual_one():
    mesh = joined(1)
    mesh.handle_prune(name(0), TOPIC, 0, 0.0)
    assert mesh.heartbeat(PRUNE_SECONDS - 1.0) == {}
    assert mesh.heartbeat(PRUNE_SECONDS + SLACK_SECONDS + 1.0) != {}


def test_who_pruned_us_may_still_graft_us():
    mesh = joined(1)
    mesh.handle_prune(name(0), TOPIC, 60, 0.0)
    assert mesh.handle_graft(name(0), TOPIC, 1.0) == ({}, "")
    assert mesh.mesh(TOPIC) == {name(0)}


def test_who_was_pruned_and_grafts_too_early_waits_from_then_on_and_it_is_a_fault():
    mesh = joined(1)
    assert mesh.leave(TOPIC, 0.0) == {name(0): Control(prune=[(TOPIC, LEAVE_SECONDS)])}
    assert mesh.join(TOPIC, 1.0) == {}, "we keep to it too"
    early = {name(0): Control(prune=[(TOPIC, PRUNE_SECONDS)])}
    assert mesh.handle_graft(name(0), TOPIC, LEAVE_SECONDS - 1.0) == (early, "early-graft")
    again = LEAVE_SECONDS + PRUNE_SECONDS - 1.0
    assert mesh.handle_graft(name(0), TOPIC, again - 1.0) == (early, "early-graft")
    assert mesh.handle_graft(name(0), TOPIC, again + PRUNE_SECONDS) == ({}, "")


def test_who_was_pruned_and_comes_back_anew_is_taken():
    """A pruned peer may have been restarted, and know nothing of it; our own backoff holds."""
    mesh = joined(2)
    mesh.leave(TOPIC, 0.0)
    mesh.join(TOPIC, 0.0)
    mesh.handle_prune(name(1), TOPIC, 60, 0.0)
    for n in (0, 1):
        mesh.remove(name(n))
    assert meet(mesh, 2, now=1.0) == []
    assert mesh.handle_graft(name(0), TOPIC, 1.0) == ({}, "")
    assert mesh.heartbeat(30.0) == {}


def test_two_that_are_both_full_do_not_graft_each_other_again_and_again():
    """A node that wants members among full ones asks each once per backoff, not per heartbeat."""
    eager = joined(0)
    full = {}
    for n in range(3):
        full[name(n)] = other = joined(DEGREE_HIGH, seed=n)
        for m in range(DEGREE_HIGH):
            other.handle_graft(name(m), TOPIC, 0.0)
        other.handle_subscription(name(99), TOPIC, 0.0, on=True)
        assert len(other.mesh(TOPIC)) == DEGREE_HIGH
    grafts = faults = 0
    waiting = meet(eager, 3)
    for now in range(1, 200):
        for peer in waiting:
            grafts += 1
            out, fault = full[peer].handle_graft(name(99), TOPIC, now + 0.4)
            faults += bool(fault)
            for topic, seconds in out[name(99)].prune:
                eager.handle_prune(peer, topic, seconds, now + 0.8)
        waiting = [peer for peer, control in eager.heartbeat(float(now + 1)).items() if control.graft]
    assert grafts <= 3 * (200 / PRUNE_SECONDS + 1)
    assert faults == 0


def test_what_is_remembered_of_prunes_is_forgotten_in_time():
    mesh = joined(50)
    for n in range(50):
        mesh.handle_graft(name(n), TOPIC, 0.0)
        mesh.handle_prune(name(n), TOPIC, 3600, 0.0)
    mesh.heartbeat(3600.0 + SLACK_SECONDS)
    assert mesh._no_graft_to == mesh._no_graft_from == {}


# Who gets what


def test_a_message_of_our_own_goes_to_many_and_one_of_others_to_the_mesh():
    mesh = joined(100)
    assert mesh.recipients(TOPIC, 0.0, own=False) == mesh.mesh(TOPIC)
    own = mesh.recipients(TOPIC, 0.0, own=True)
    assert len(own) == FLOOD
    assert own > mesh.mesh(TOPIC)
    member = next(iter(mesh.mesh(TOPIC)))
    assert member not in mesh.recipients(TOPIC, 0.0, own=False, but=(member,))


def test_a_message_on_a_topic_that_we_do_not_listen_to_goes_to_those_who_do():
    mesh = Mesh(Random(0))
    meet(mesh, 3)
    assert mesh.recipients(TOPIC, 0.0, own=True) == {name(n) for n in range(3)}
    assert mesh.recipients(TOPIC, 0.0, own=False) == set()


def test_who_comes_after_we_spoke_gets_it_and_not_over_and_over():
    mesh = joined(0)
    remember(mesh, 1, own=True)
    remember(mesh, 2, own=False)
    got = []
    for _ in range(10):
        got += mesh.handle_subscription(name(0), TOPIC, 0.0, on=True)[1]
        mesh.handle_subscription(name(0), TOPIC, 0.0, on=False)
    assert got == [Published(TOPIC, b"1")] * RESEND


# What is offered and asked for


def test_recent_messages_are_offered_to_some_beside_the_mesh_for_a_few_heartbeats():
    mesh = joined(100)
    first = remember(mesh, 1)
    for beat in range(HISTORY + 2):
        told = offered(mesh.heartbeat(float(beat)))
        if beat < WINDOW:
            assert len(told) == 96 // 4
            assert not told.keys() & mesh.mesh(TOPIC)
            assert set(map(tuple, told.values())) == {(first,)}
        else:
            assert told == {}


def test_a_few_are_told_where_there_are_few():
    mesh = joined(DEGREE_LOW + LAZY + 3)
    remember(mesh, 1)
    assert len(offered(mesh.heartbeat(1.0))) == LAZY


def test_one_offer_names_so_many_the_newest():
    mesh = joined(DEGREE_LOW + 1)
    ids = [remember(mesh, n) for n in range(OFFERED + 5)]
    (told,) = offered(mesh.heartbeat(1.0)).values()
    assert told == ids[5:]


def test_a_message_can_be_asked_for_a_few_times_and_for_a_few_heartbeats():
    mesh = joined(1)
    wanted = remember(mesh, 1)
    assert mesh.handle_iwant(name(0), [wanted, wanted, b"unheard of"]) == [Published(TOPIC, b"1")]
    for _ in range(5 * RESEND):
        mesh.handle_iwant(name(0), [wanted])
    assert mesh.handle_iwant(name(0), [wanted]) == []
    for beat in range(HISTORY):
        assert mesh.handle_iwant(name(100 + beat), [wanted]) == [Published(TOPIC, b"1")]
        mesh.heartbeat(float(beat))
    assert mesh.handle_iwant(name(200), [wanted]) == []
    assert (mesh._messages, mesh._bytes) == ({}, 0)


def test_what_is_remembered_has_a_bound_in_number_and_in_bytes(monkeypatch):
    monkeypatch.setattr("echo_node.net.gossip.mesh.REMEMBERED", 10)
    mesh = joined(1)
    ids = [remember(mesh, n) for n in range(25)]
    assert list(mesh._messages) == ids[15:]
    monkeypatch.setattr("echo_node.net.gossip.mesh.REMEMBERED_BYTES", 6)
    newest = remember(mesh, 99)
    assert list(mesh._messages) == [*ids[-2:], newest]
    assert mesh._bytes == 6


def test_one_peer_makes_us_ask_for_so_many_between_two_heartbeats():
    mesh = joined(1)
    noise = [message_id(TOPIC, b"%d" % n) for n in range(3 * ASK_PER_BEAT)]
    assert mesh.handle_ihave(name(0), TOPIC, noise[:10])[name(0)].want == noise[:10]
    assert mesh.handle_ihave(name(0), TOPIC, noise)[name(0)].want == noise[: ASK_PER_BEAT - 10]
    assert mesh.handle_ihave(name(0), TOPIC, noise) == {}
    assert len(mesh.handle_ihave(name(1), TOPIC, noise)[name(1)].want) == ASK_PER_BEAT, "another has its own"
    mesh.heartbeat(1.0)
    assert mesh.handle_ihave(name(0), TOPIC, [noise[0]] * 9)[name(0)].want == [noise[0]]


def test_what_is_offered_on_a_topic_that_is_not_ours_is_not_asked_for():
    assert Mesh(Random(0)).handle_ihave(name(0), TOPIC, [b"id"]) == {}


def test_a_member_whose_queue_was_full_is_offered_what_it_did_not_get():
    mesh = joined(2)
    lost = remember(mesh, 1)
    mesh.owe(name(0), lost, TOPIC)
    assert offered(mesh.heartbeat(0.0)) == {name(0): [lost]}
    for beat in range(HISTORY):
        mesh.heartbeat(float(beat))
    assert mesh.heartbeat(99.0) == mesh._owed == {}


def test_owed_messages_are_offered_at_every_heartbeat_until_they_are_forgotten():
    mesh, other = joined(2), "another topic"
    first = remember(mesh, 1)
    mesh.owe(name(0), first, TOPIC)
    beats = [offered(mesh.heartbeat(0.0))]
    later = remember(mesh, 2, topic=other)
    mesh.owe(name(0), later, other)
    both = mesh.heartbeat(0.0)
    assert both[name(0)].have == [(TOPIC, [first]), (other, [later])]
    beats += [offered(both), *(offered(mesh.heartbeat(0.0)) for _ in range(HISTORY - 1))]
    assert list(mesh._owed[name(0)]) == [later], "what is forgotten is owed no more"
    beats.append(offered(mesh.heartbeat(0.0)))
    assert beats == [
        {name(0): [first]},
        *[{name(0): [first, later]}] * (HISTORY - 1),
        {name(0): [later]},
        {},
    ]
    assert mesh._owed == {}


def test_a_peer_that_leaves_takes_its_quotas_and_debts_with_it_and_those_of_others_stay():
    mesh = joined(2)
    message = remember(mesh, 1)
    ids = [name(n) for n in range(ASK_PER_BEAT)]
    for n in range(2):
        mesh.owe(name(n), message, TOPIC)
        for _ in range(RESEND):
            assert mesh.handle_iwant(name(n), [message]) == [Published(TOPIC, b"1")]
        assert mesh.handle_iwant(name(n), [message]) == []
        assert mesh.handle_ihave(name(n), TOPIC, ids) == {name(n): Control(want=ids)}
        assert mesh.handle_ihave(name(n), TOPIC, [b"one more"]) == {}
    mesh.remove(name(0))
    meet(mesh, 1)
    for _ in range(RESEND):
        assert mesh.handle_iwant(name(0), [message]) == [Published(TOPIC, b"1")]
    assert mesh.handle_iwant(name(0), [message]) == mesh.handle_iwant(name(1), [message]) == []
    assert mesh.handle_ihave(name(0), TOPIC, ids) == {name(0): Control(want=ids)}
    assert mesh.handle_ihave(name(1), TOPIC, ids) == {}
    assert offered(mesh.heartbeat(0.0)) == {name(1): [message]}


def test_what_one_peer_is_owed_has_a_bound():
    mesh = joined(1)
    for n in range(2 * OFFERED):
        mesh.owe(name(0), remember(mesh, n), TOPIC)
    (told,) = offered(mesh.heartbeat(0.0)).values()
    assert len(told) == OFFERED


# Fifty together


class Swarm:
    """Nodes on a random graph.

    What is sent along the mesh gets lost with a chance; the rest arrives.
    """

    def __init__(self, seed, *, loss, offers=True, nodes=50, links=24):
        self.random = Random(seed)
        self.loss = loss
        self.offers = offers
        self.names = [name(n) for n in range(nodes)]
        self.meshes = {each: Mesh(Random(seed + n)) for n, each in enumerate(self.names)}
        self.got = {each: set() for each in self.names}
        self.faults = 0
        self.now = 0.0
        self.frames = deque()
        for mesh in self.meshes.values():
            mesh.join(TOPIC, 0.0)
        for n, each in enumerate(self.names):
            near = {self.names[n - 1], *self.random.sample(self.names, links // 2)} - {each}
            for other in near:
                for a, b in ((each, other), (other, each)):
                    out, _ = self.meshes[a].handle_subscription(b, TOPIC, 0.0, on=True)
                    self.tell(a, out)
        self.deliver()

    def tell(self, sender, out):
        self.frames.extend((sender, to, control) for to, control in out.items())

    def push(self, sender, message, to):
        self.frames.extend((sender, each, message) for each in to if self.random.random() >= self.loss)

    def publish(self, author, n):
        message = Published(TOPIC, b"%d" % n)
        identifier = message_id(TOPIC, message.data)
        self.got[author].add(identifier)
        self.meshes[author].remember(identifier, message, own=True)
        self.push(author, message, self.meshes[author].recipients(TOPIC, self.now, own=True))
        return identifier

    def deliver(self):
        while self.frames:
            sender, to, said = self.frames.popleft()
            (self.hear if isinstance(said, Published) else self.control)(sender, to, said)

    def hear(self, sender, to, message):
        identifier = message_id(TOPIC, message.data)
        if identifier not in self.got[to]:
            self.got[to].add(identifier)
            self.meshes[to].remember(identifier, message, own=False)
            self.push(to, message, self.meshes[to].recipients(TOPIC, self.now, own=False, but=(sender,)))

    def control(self, sender, to, said):
        mesh = self.meshes[to]
        for topic in said.graft:
            out, fault = mesh.handle_graft(sender, topic, self.now)
            self.faults += bool(fault)
            self.tell(to, out)
        for topic, seconds in said.prune:
            mesh.handle_prune(sender, topic, seconds, self.now)
        for topic, ids in said.have if self.offers else ():
            self.tell(
                to, mesh.handle_ihave(sender, topic, [each for each in ids if each not in self.got[to]])
            )
        self.frames.extend((to, sender, message) for message in mesh.handle_iwant(sender, said.want))

    def beat(self):
        self.now += 1.0
        for each in self.names:
            self.tell(each, self.meshes[each].heartbeat(self.now))
        self.deliver()

    def run(self, messages):
        """Say so many, three a heartbeat; how many of all that should have arrived did not."""
        said = []
        for n in range(messages):
            said.append(self.publish(self.random.choice(self.names), n))
            self.deliver()
            if n % 3 == 2:
                self.beat()
        for _ in range(2 * HISTORY):
            self.beat()
        return sum(each not in got for each in said for got in self.got.values())


@pytest.mark.parametrize("seed", range(5))
def test_every_message_reaches_all_fifty_though_the_mesh_loses_most_of_it(seed):
    swarm = Swarm(seed, loss=0.7)
    assert swarm.run(60) == 0
    assert swarm.faults == 0
    for mesh in swarm.meshes.values():
        assert DEGREE_LOW <= len(mesh.mesh(TOPIC)) <= DEGREE_HIGH


def test_without_offers_much_of_it_would_be_lost():
    assert Swarm(0, loss=0.7, offers=False).run(60) > 100


@pytest.mark.parametrize("seed", range(5))
def test_a_mesh_that_loses_nothing_needs_no_offers(seed):
    assert Swarm(seed, loss=0.0, offers=False).run(60) == 0
