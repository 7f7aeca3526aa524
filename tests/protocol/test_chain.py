"""The rules of the chain, one by one."""

import dataclasses
import itertools
from contextlib import suppress

import pytest

from protocol import ChainError, Elector, Equivocation, Follower, TermGrant, TermVote
from protocol.election import cast
from protocol.errors import BadSignatureError

from .examples import HEAD_ZERO, RUN, STANDBY, STRANGER, TRAINER, VERIFIER, name
from .scenarios import RULES, ZERO_HEAD, after, follower, grant, line, opened


def refused(rule: str, attempt) -> None:
    with pytest.raises(ChainError) as caught:
        attempt()
    assert caught.value.rule == rule


def test_a_chain_grows_head_by_head():
    heads = line(5)
    state = follower(*heads)
    assert state.tip == heads[-1]
    assert state.heads == tuple(heads)
    assert state.accept(heads[2]) is state, "what is held already changes nothing"


def test_a_gap_is_not_jumped():
    heads = line(3)
    refused("gap", lambda: follower(heads[0]).accept(heads[2]))
    refused("gap", lambda: follower().accept(heads[1]))


def test_version_zero_is_the_manifests():
    other = opened(dataclasses.replace(HEAD_ZERO, root=name("other weights")))
    refused("wrong-root", lambda: follower().accept(other))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("not-trainer", {"signer": VERIFIER}),
        ("not-trainer", {"signer": STRANGER}),
        ("not-leader", {"signer": STANDBY}),
        ("wrong-layout", {"layout": name("another layout")}),
        ("gap", {"version": 7}),
        ("missing-grant", {"term": 2}),
        ("wrong-run", {"run": name("another run")}),
    ],
)
def test_a_head_that_does_not_belong_is_refused(rule, changes):
    refused(rule, lambda: follower(ZERO_HEAD).accept(after(ZERO_HEAD, **changes)))


def test_a_step_never_falls_but_may_stand():
    zero, one = line(1)
    refused("wrong-step", lambda: follower(zero, one).accept(after(one, step=0)))
    roster_only = after(one, step=1, roster=name("a new roster"), root=one.message.root)
    assert follower(zero, one).accept(roster_only).tip == roster_only


def test_a_refused_message_changes_nothing():
    state = follower(*line(2))
    before = dataclasses.replace(state)
    for attempt in (
        lambda: state.accept(after(ZERO_HEAD, signer=STANDBY)),
        lambda: state.grant(grant(name("nowhere"))),
        lambda: state.convict(Equivocation(state.heads[0], state.heads[1])),
    ):
        with pytest.raises(ChainError):
            attempt()
    assert state == before


def test_an_older_version_is_no_news():
    zero, one, two = line(2)
    linked = Follower.newcomer(RULES, (1, 1, one.id)).accept(one).accept(two)
    refused("rollback", lambda: linked.accept(zero))


def test_a_new_leader_cannot_publish_the_version_of_its_base_again():
    zero, one = line(1)
    state = follower(zero, one).grant(grant(one.id))
    again = after(one, signer=STANDBY, term=2, version=1)
    refused("rollback", lambda: state.accept(again))


def test_two_heads_for_one_version_revoke_their_signer():
    zero, one, two, three = line(3)
    twin = after(one, "twin")
    state = follower(zero, one, two, three).accept(twin)
    assert state.heads == (zero, one), "back to below the lie"
    assert state.revoked == {TRAINER.public}
    assert state.holding
    for head in (two, twin, three, after(one, "third")):
        refused("revoked", lambda head=head: state.accept(head))
    # the same proof, told by somebody else, has the same effect
    assert follower(zero, one, two, three).convict(Equivocation(two, twin)).heads == state.heads


def test_the_same_weights_with_other_luck_are_a_lie_too():
    zero, one = line(1)
    assert Equivocation.between(one, after(zero, "other luck", root=one.message.root))


def test_a_successor_that_denies_its_predecessor_is_proof():
    zero, one, two = line(2)
    hidden = after(one, "hidden")
    state = follower(zero, one, two).accept(after(hidden))
    assert state.heads == (zero, one)
    assert state.holding


def test_honest_heads_prove_nothing():
    zero, one, two = line(2)
    term_two = after(one, signer=STANDBY, term=2)
    for pair in ((zero, one), (one, two), (zero, two), (two, term_two), (one, one)):
        assert Equivocation.between(*pair) is None
        refused("no-proof", lambda pair=pair: follower(zero).convict(Equivocation(*pair)))


def test_a_stranger_proves_nothing_about_the_run():
    pair = [after(ZERO_HEAD, luck, signer=STRANGER) for luck in "ab"]
    refused("not-trainer", lambda: follower(ZERO_HEAD).convict(Equivocation(*pair)))


def test_a_new_leader_goes_on_from_the_base():
    zero, one, two = line(2)
    state = follower(zero, one, two).grant(grant(two.id))
    assert (state.term, state.leader, state.tip) == (2, STANDBY.public, two)
    refused("old-term", lambda: state.accept(after(two)))
    refused(
        "no-anchor",
        lambda: state.accept(after(two, signer=STANDBY, term=2, routes=after(two).message.routes)),
    )
    first = after(two, signer=STANDBY, term=2)
    assert state.accept(first).tip == first
    assert state.accept(first).accept(after(first)).tip.message.version == 4


def test_the_version_falls_only_to_the_base_of_a_grant():
    zero, one, two, three = line(3)
    state = follower(zero, one, two, three).grant(grant(one.id))
    assert state.tip == one
    refused("old-term", lambda: state.accept(two))
    first = after(one, signer=STANDBY, term=2)
    assert state.accept(first).heads == (zero, one, first)


def test_a_follower_that_is_behind_needs_the_base_first():
    zero, one, two = line(2)
    state = follower(zero)
    refused("gap", lambda: state.grant(grant(two.id)))
    refused("gap", lambda: state.grant(grant(two.id), [two]))
    refused("wrong-base", lambda: state.grant(grant(two.id), [one, after(two), two]))
    assert state.grant(grant(two.id), [one, two]).heads == (zero, one, two)


def test_a_branch_does_not_change_hands():
    zero, one = line(1)
    stolen = after(one, signer=STANDBY)
    refused("wrong-base", lambda: follower(zero, one).grant(grant(stolen.id), [stolen]))
    later = after(one, term=2)
    refused("wrong-base", lambda: follower(zero, one).grant(grant(later.id), [later]))
    foreign = after(one, layout=name("another layout"))
    refused("wrong-layout", lambda: follower(zero, one).grant(grant(foreign.id), [foreign]))


def test_a_follower_that_slept_through_a_term_is_shown_its_heads():
    zero, one, two = line(2)
    first = after(two, signer=STANDBY, term=2)
    second = after(first)
    state = follower(zero, one, two).grant(grant(two.id))
    third = grant(second.id, TRAINER, 3)
    refused("gap", lambda: state.grant(third))
    assert state.grant(third, [first, second]).heads == (zero, one, two, first, second)
    # even if that term's leader has been caught since, or when what is shown begins with what is
    # held
    caught = state.convict(Equivocation(second, after(first, "twin")))
    by_others = grant(second.id, TRAINER, 3, (TRAINER, VERIFIER))
    assert caught.grant(by_others, [two, first, second]).tip == second
    # but not past the base of that term, nor by another key
    astray = after(one, signer=STANDBY, term=2)
    refused("wrong-base", lambda: state.grant(grant(astray.id, TRAINER, 3), [astray]))
    forged = after(two, signer=TRAINER, term=2)
    refused("wrong-base", lambda: state.grant(grant(forged.id, TRAINER, 3), [forged]))


def test_a_vote_with_another_ext_is_another_vote():
    zero, one = line(1)
    state = follower(zero, one).grant(grant(one.id))
    vote = dataclasses.replace(grant(one.id).vote, ext={"a": 1})
    ballots = sorted((cast(vote, who, RUN) for who in (TRAINER, VERIFIER)), key=lambda ballot: ballot.elector)
    assert state.grant(TermGrant(tuple(ballots), vote)).revoked == {VERIFIER.public}


def test_a_grant_settles_a_fork():
    zero, one, two = line(2)
    twin = after(one, "twin")
    state = follower(zero, one, two).accept(twin)
    settled = state.grant(grant(twin.id), [twin])
    assert settled.heads == (zero, one, twin)
    assert not settled.holding
    first = after(twin, signer=STANDBY, term=2)
    assert settled.accept(first).tip == first
    # hearing of the old lie again moves nobody
    assert settled.accept(first).convict(Equivocation(two, twin)).tip == first


def test_a_fork_at_version_zero_is_settled_too():
    other = opened(dataclasses.replace(HEAD_ZERO, luck=name("other luck")))
    state = follower(ZERO_HEAD).accept(other)
    assert state.heads == ()
    assert state.grant(grant(other.id), [other]).heads == (other,)
    wrong = opened(dataclasses.replace(HEAD_ZERO, root=name("other weights")))
    refused("wrong-root", lambda: state.grant(grant(wrong.id), [wrong]))
    usurped = opened(dataclasses.replace(HEAD_ZERO, luck=name("third luck")), STANDBY)
    refused("not-leader", lambda: state.grant(grant(usurped.id), [usurped]))


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        ("no-majority", {"voters": (VERIFIER,)}),
        ("not-elector", {"voters": (VERIFIER, STRANGER)}),
        ("not-trainer", {"leader": VERIFIER}),
        ("missing-grant", {"term": 3}),
    ],
)
def test_a_grant_that_is_none_is_refused(rule, made):
    zero, one = line(1)
    refused(rule, lambda: follower(zero, one).grant(grant(one.id, **made)))


def test_a_ballot_for_another_leader_does_not_count():
    zero, one = line(1)
    honest = grant(one.id)
    forged = dataclasses.replace(honest, vote=dataclasses.replace(honest.vote, leader=TRAINER.public))
    with pytest.raises(BadSignatureError):
        follower(zero, one).grant(forged)


def test_a_term_whose_leader_was_caught_is_entered_and_held():
    zero, one = line(1)
    caught = follower(zero, one).convict(Equivocation(one, after(zero, "twin")))
    entered = caught.grant(grant(zero.id, TRAINER))
    assert (entered.term, entered.holding) == (2, True)
    refused("revoked", lambda: entered.accept(after(zero, signer=TRAINER, term=2)))
    assert not entered.grant(grant(zero.id, STANDBY, 3)).holding


def test_what_was_heard_before_does_not_decide_what_a_grant_is_worth():
    """A key that lies as a leader and votes twice as an elector: whatever comes first, all end in
    the same place.
    """
    zero, one, two = line(2)
    lie = Equivocation(two, after(one, "twin"))
    for_standby = grant(one.id, STANDBY, voters=(TRAINER, STANDBY))
    for_itself = grant(one.id, TRAINER, voters=(TRAINER, VERIFIER))
    first = after(one, signer=STANDBY, term=2)
    ends = set()
    for order in itertools.permutations((for_standby, for_itself, lie, first)):
        state = follower(zero, one)
        for _ in range(2):
            for heard in order:
                with suppress(ChainError):
                    state = _tell(state, heard)
        ends.add((state.term, state.leader, state.tip.id, state.revoked))
        assert state.grant(grant(first.id, STANDBY, 3), [first]).tip == first, "and nobody is stuck"
    assert ends == {(2, b"", one.id, frozenset({TRAINER.public}))}


def _tell(state, heard):
    if isinstance(heard, TermGrant):
        return state.grant(heard)
    return state.convict(heard) if isinstance(heard, Equivocation) else state.accept(heard)


def test_a_proof_is_the_same_whichever_head_is_named_first():
    zero, one, two, three = line(3)
    denier = after(after(one, "hidden"))
    state = follower(zero, one, two, three)
    assert state.convict(Equivocation(two, denier)) == state.convict(Equivocation(denier, two))
    foreign = after(one, "twin", layout=name("another layout"))
    for pair in ((two, foreign), (foreign, two)):
        refused("wrong-layout", lambda pair=pair: state.convict(Equivocation(*pair)))


def test_a_long_chain_is_followed_at_a_steady_pace():
    """A head is compared with its neighbours alone, however long the chain is: counted, not
    timed.
    """
    heads = line(300)
    state = follower(*heads)
    looked_at = []
    between = Equivocation.between
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Equivocation, "between", lambda a, b: looked_at.append(a) or between(a, b))
        state.accept(after(heads[-1]))
    assert len(looked_at) <= 3


def test_two_grants_for_one_term_revoke_who_voted_twice():
    zero, one, two = line(2)
    first = after(two, signer=STANDBY, term=2)
    state = follower(zero, one, two).grant(grant(two.id)).accept(first)
    contested = state.grant(grant(one.id, TRAINER, voters=(TRAINER, VERIFIER)))
    assert contested.heads == (zero, one), "what both leaders would have gone on from"
    assert contested.revoked == {VERIFIER.public}
    assert contested.holding
    refused("revoked", lambda: contested.accept(first))
    refused("old-term", lambda: contested.grant(grant(two.id)))
    assert contested.grant(grant(two.id, TRAINER, 3, (TRAINER, STANDBY)), [two]).leader == TRAINER.public


def test_an_election_that_was_double_is_remembered_after_its_term():
    """So that heads of the leader that lost can be followed should a later grant go on from
    them.
    """
    zero, one = line(1)
    state = follower(zero, one).grant(grant(one.id)).grant(grant(one.id, STANDBY, 3))
    late = state.grant(grant(one.id, TRAINER, voters=(TRAINER, VERIFIER)))
    assert (late.term, late.leader, late.heads) == (3, STANDBY.public, (zero, one))
    assert late.revoked == {VERIFIER.public}
    lost = after(one, signer=TRAINER, term=2)
    assert late.grant(grant(lost.id, STANDBY, 4), [lost]).tip == lost


def test_the_same_vote_with_other_ballots_is_no_contest():
    zero, one = line(1)
    state = follower(zero, one).grant(grant(one.id))
    refused("old-term", lambda: state.grant(grant(one.id, voters=(TRAINER, STANDBY))))


def test_nothing_older_than_the_link_is_accepted():
    zero, one, two, three = line(3)
    newcomer = Follower.newcomer(RULES, (1, 2, two.id))
    refused("below-link", lambda: newcomer.accept(zero))
    refused("below-link", lambda: newcomer.accept(one))
    refused("gap", lambda: newcomer.accept(after(one, "twin")))
    refused("gap", lambda: newcomer.accept(three))
    assert newcomer.accept(two).accept(three).heads == (two, three)


def test_what_the_link_vouches_for_is_never_dropped():
    zero, one, two = line(2)
    state = Follower.newcomer(RULES, (1, 1, one.id)).accept(one).accept(two).accept(after(zero, "twin"))
    assert state.heads == (one,)
    assert state.holding


def test_a_predecessor_that_the_links_head_denies_is_proof():
    zero, one, two = line(2)
    state = Follower.newcomer(RULES, (1, 2, two.id)).accept(two)
    refused("rollback", lambda: state.accept(one))
    convicted = state.accept(after(zero, "twin"))
    assert (convicted.heads, convicted.revoked) == ((two,), {TRAINER.public})


def test_a_link_into_a_later_term_brings_its_leader():
    _, _, two = line(2)
    first = after(two, signer=STANDBY, term=2)
    state = Follower.newcomer(RULES, (2, 3, first.id)).accept(first)
    assert (state.term, state.leader) == (2, STANDBY.public)
    assert state.accept(after(first)).tip.message.version == 4


def vote(term=2, leader=STANDBY, base=None, **changes):
    return TermVote(base=base.id, leader=leader.public, term=term, **changes)


def test_an_elector_votes_once_and_only_forward():
    zero, one, two = line(2)
    state = follower(zero, one)
    elector = Elector()
    refused("lease", lambda: elector.vote(state, vote(base=one), lease_over=False))
    refused("behind", lambda: elector.vote(state, vote(base=zero), lease_over=True))
    refused("old-term", lambda: elector.vote(state, vote(3, base=one), lease_over=True))
    refused("not-trainer", lambda: elector.vote(state, vote(leader=VERIFIER, base=one), lease_over=True))
    voted = elector.vote(state, vote(base=two), [two], lease_over=True)
    assert voted.vote(state, vote(base=two), [two], lease_over=True) == voted, "the same vote may be repeated"
    for other in (vote(leader=TRAINER, base=two), vote(base=one), vote(base=two, ext={"a": 1})):
        refused("voted", lambda other=other: voted.vote(state, other, [two], lease_over=True))
    caught = state.convict(Equivocation(one, after(zero, "twin")))
    refused("not-trainer", lambda: elector.vote(caught, vote(leader=TRAINER, base=zero), lease_over=True))


def test_an_elector_does_not_vote_for_a_base_that_nobody_can_reach():
    zero, one, two = line(2)
    state = follower(zero, one)
    invented = after(one, version=1_000_000_000)
    refused("gap", lambda: Elector().vote(state, vote(base=two), lease_over=True))
    refused("wrong-base", lambda: Elector().vote(state, vote(base=invented), [invented], lease_over=True))
    foreign = after(one, signer=STRANGER)
    refused("not-trainer", lambda: Elector().vote(state, vote(base=foreign), [foreign], lease_over=True))
