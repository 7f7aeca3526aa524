"""Sealed messages open as what they were sealed as, and as nothing else."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import Envelope, Join, Manifest, canonical, encode, limits, open_manifest, open_sealed, seal
from protocol.digest import ZERO
from protocol.errors import (
    BadSignatureError,
    ProtocolError,
    WrongKindError,
    WrongMajorError,
    WrongRunError,
    WrongSignerError,
)

from .examples import JOIN, MANIFEST, RUN, SAMPLER, SEALED_JOIN, SEALED_TYPES, STRANGER, TRAINER, name
from .loose import loose_seal


@pytest.mark.parametrize("kind", SEALED_TYPES)
def test_a_sealed_message_opens_as_it_was_said(kind):
    message, who, run = SEALED_TYPES[kind]
    sealed = seal(message, who, run)
    opened = open_sealed(sealed, type(message), run, signer=who.public)
    assert (opened.message, opened.signer, opened.run) == (message, who.public, run)
    assert opened.sealed == sealed
    assert len(sealed) <= len(encode(message)) + limits.ENVELOPE_BYTES


@pytest.mark.parametrize(("made", "wanted"), list(itertools.permutations(SEALED_TYPES, 2)))
def test_a_signature_for_one_kind_never_opens_as_another(made, wanted):
    message, who, run = SEALED_TYPES[made]
    other, _, other_run = SEALED_TYPES[wanted]
    sealed = seal(message, who, run)
    with pytest.raises(WrongKindError):
        open_sealed(sealed, type(other), run)
    # nor when a body of the wanted kind is put under a signature that was made for the other kind
    parts = canonical.decode(sealed)
    swapped = canonical.pack([limits.MAJOR, wanted, other_run, who.public, encode(other), parts[5]])
    with pytest.raises(BadSignatureError):
        open_sealed(swapped, type(other), other_run)


@pytest.mark.parametrize("kind", SEALED_TYPES)
def test_a_signature_for_one_run_never_opens_in_another(kind):
    message, who, run = SEALED_TYPES[kind]
    sealed = seal(message, who, run)
    elsewhere = name("another run")
    with pytest.raises(WrongRunError):
        open_sealed(sealed, type(message), elsewhere)
    parts = canonical.decode(sealed)
    moved = canonical.pack([*parts[:2], elsewhere, *parts[3:]])
    with pytest.raises(BadSignatureError):
        open_sealed(moved, type(message), elsewhere)


@pytest.mark.parametrize("kind", SEALED_TYPES)
def test_an_unexpected_signer_is_refused(kind):
    message, who, run = SEALED_TYPES[kind]
    sealed = seal(message, who, run)
    with pytest.raises(WrongSignerError):
        open_sealed(sealed, type(message), run, signer=STRANGER.public)
    parts = canonical.decode(sealed)
    claimed = canonical.pack([*parts[:3], STRANGER.public, *parts[4:]])
    with pytest.raises(BadSignatureError):
        open_sealed(claimed, type(message), run, signer=STRANGER.public)


def test_another_major_version_is_named_first():
    for sealed in (
        loose_seal(encode(JOIN), "join", SAMPLER, RUN, major=limits.MAJOR + 1),
        canonical.pack([limits.MAJOR + 1, {"another": "shape"}]),
        canonical.pack([0]),
    ):
        with pytest.raises(WrongMajorError, match="upgrade"):
            open_sealed(sealed, Join, RUN)


@settings(max_examples=400)
@given(st.integers(0, 8 * len(SEALED_JOIN) - 1))
def test_a_changed_byte_breaks_the_seal(bit):
    broken = bytearray(SEALED_JOIN)
    broken[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        open_sealed(bytes(broken), Join, RUN)


def test_the_id_does_not_depend_on_the_signature():
    envelope = Envelope.parse(SEALED_JOIN)
    forged = Envelope.parse(canonical.pack([*canonical.decode(SEALED_JOIN)[:5], bytes(64)]))
    assert forged.id == envelope.id == open_sealed(SEALED_JOIN, Join, RUN).id
    assert envelope.claim(Join, RUN) == JOIN
    assert forged.claim(Join, RUN) == JOIN, "a claim is what somebody says"
    with pytest.raises(BadSignatureError):
        forged.open(Join, RUN)


def test_the_id_names_run_signer_and_body():
    ids = {
        open_sealed(seal(JOIN, who, run), Join, run).id
        for who in (SAMPLER, STRANGER)
        for run in (RUN, name("another run"))
    }
    assert len(ids) == 4


def test_the_run_is_named_by_its_manifest():
    sealed = seal(MANIFEST, TRAINER, ZERO)
    assert open_manifest(sealed).id == RUN
    assert open_manifest(sealed, RUN).message == MANIFEST
    with pytest.raises(WrongRunError):
        open_manifest(sealed, name("another run"))
    with pytest.raises(WrongRunError):
        open_manifest(seal(MANIFEST, TRAINER, RUN))
    assert open_manifest(seal(MANIFEST, STRANGER, ZERO)).id != RUN, "another author's run is another run"


def test_an_error_says_where_in_the_message_it_was():
    body = canonical.encode({"agent": "x", "engine": "Torch", "ext": {}, "head": bytes(32), "name": ""})
    with pytest.raises(ProtocolError) as caught:
        open_sealed(loose_seal(body, "join", SAMPLER, RUN), Join, RUN)
    assert caught.value.where == "join.engine"
    assert str(caught.value).startswith("join.engine: 'Torch' is not an engine class")


def test_a_run_of_another_length_is_not_sealed():
    with pytest.raises(ProtocolError):
        seal(JOIN, SAMPLER, b"short")
    assert Manifest.KIND == "manifest"
