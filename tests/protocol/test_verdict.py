"""Which groups a verifier looks at."""

import pytest

from protocol.errors import BadSignatureError
from protocol.verdict import check_draw, drawn, sign_draw

from .examples import RUN, STRANGER, VERIFIER, name


def test_a_lot_is_known_to_its_verifier_and_checked_by_all():
    group = name("group")
    lot = sign_draw(VERIFIER, RUN, group)
    check_draw(VERIFIER.public, RUN, group, lot)
    for verifier, run, other in (
        (STRANGER.public, RUN, group),
        (VERIFIER.public, name("run"), group),
        (VERIFIER.public, RUN, name("other")),
    ):
        with pytest.raises(BadSignatureError):
            check_draw(verifier, run, other, lot)


def test_lots_fall_at_the_rate():
    lots = [sign_draw(VERIFIER, RUN, name(f"group {index}")) for index in range(4000)]
    assert not any(drawn(lot, 0.0) for lot in lots)
    assert all(drawn(lot, 1.0) for lot in lots)
    share = sum(drawn(lot, 0.1) for lot in lots) / len(lots)
    assert 0.08 < share < 0.12
