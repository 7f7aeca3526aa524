"""Links to runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import Link
from protocol.errors import BadLinkError, ProtocolError

from .examples import LINK
from .strategies import ANY


@given(ANY["link"])
def test_a_link_survives_being_pasted(link):
    assert Link.parse(str(link)) == link
    assert Link.parse(f" {link}\n") == link


@given(st.integers(5, len(str(LINK)) - 1), st.sampled_from("ABab01-_"))
def test_a_damaged_link_is_refused(at, character):
    good = str(LINK)
    for damaged in (good[:at] + good[at + 1 :], good[:at] + character + good[at:], good[:at]):
        with pytest.raises(BadLinkError):
            Link.parse(damaged)
    changed = good[:at] + character + good[at + 1 :]
    if changed != good:
        with pytest.raises(BadLinkError):
            Link.parse(changed)


@given(st.text(max_size=80).map(lambda text: "echo:" + text) | st.text(max_size=80))
def test_any_text_is_a_link_or_refused(text):
    with pytest.raises(ProtocolError):
        Link.parse(text)


def test_the_error_says_what_to_do():
    with pytest.raises(BadLinkError, match="copy the link again"):
        Link.parse(str(LINK)[:-1])
