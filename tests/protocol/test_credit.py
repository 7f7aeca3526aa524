"""A sampler's account as it travels: who says it, of whom, and that all of it fits."""

from __future__ import annotations

import dataclasses

import pytest

from protocol import (
    CreditRefusal,
    CreditStatement,
    ProtocolError,
    decode,
    encode,
    limits,
    open_statement,
    seal,
)

from .examples import CREDIT_STATEMENT, JOIN, RUN, SAMPLER, STRANGER, TRAINER, VERIFIER, name


def test_a_statement_by_another_in_another_run_or_of_another_is_refused():
    def opened(sealed: bytes) -> object:
        return open_statement(sealed, RUN, signer=VERIFIER.public, sampler=SAMPLER.public)

    assert opened(seal(CREDIT_STATEMENT, VERIFIER, RUN)).message == CREDIT_STATEMENT
    of_another = dataclasses.replace(CREDIT_STATEMENT, sampler=STRANGER.public)
    honest = seal(CREDIT_STATEMENT, VERIFIER, RUN)
    for sealed, reason in {
        seal(CREDIT_STATEMENT, STRANGER, RUN): "wrong-signer",
        seal(CREDIT_STATEMENT, TRAINER, RUN): "wrong-signer",
        seal(CREDIT_STATEMENT, VERIFIER, name("another run")): "wrong-run",
        seal(of_another, VERIFIER, RUN): "inconsistent",
        seal(JOIN, VERIFIER, RUN): "wrong-kind",
        honest[:-1] + bytes([honest[-1] ^ 1]): "bad-signature",
    }.items():
        with pytest.raises(ProtocolError) as caught:
            opened(sealed)
        assert caught.value.reason == reason


def test_the_largest_statement_that_there_can_be_fits_into_one_message():
    longest = CreditStatement(
        at_ms=limits.SAFE_INTEGER,
        condemned=limits.SAFE_INTEGER,
        learnt=limits.SAFE_INTEGER,
        refused=tuple(
            CreditRefusal(f"{'r' * 30}{n:02}", limits.SAFE_INTEGER) for n in range(limits.CREDIT_REASONS)
        ),
        sampler=SAMPLER.public,
        since_ms=limits.SAFE_INTEGER,
        tokens=limits.SAFE_INTEGER,
        verified=limits.SAFE_INTEGER,
        ext={"k": b"x" * 1018},
    )
    assert decode(CreditStatement, encode(longest)) == longest
