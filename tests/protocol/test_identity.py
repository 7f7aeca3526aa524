"""Keys, and the peer ids that libp2p gives them."""

import hashlib
import random

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
from libp2p.peer.id import ID

from protocol.errors import BadKeyError, BadPeerIdError, BadSignatureError
from protocol.identity import Identity, check_key, peer_id, peer_id_bytes, public_key_of, verify

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
seeds = st.binary(min_size=32, max_size=32)


@given(seeds)
def test_the_peer_id_is_what_py_libp2p_derives(seed):
    ours = Identity(seed)
    theirs = ID.from_pubkey(create_new_key_pair(seed).public_key)
    assert ours.peer_id == str(theirs)
    assert peer_id_bytes(ours.public) == theirs.to_bytes()
    assert public_key_of(ours.peer_id) == ours.public


@given(seeds, st.binary(max_size=99))
def test_libp2p_verifies_what_we_sign(seed, message):
    signature = Identity(seed).sign(message)
    assert Ed25519PublicKey.from_bytes(Identity(seed).public).verify(message, signature)
    verify(Identity(seed).public, signature, message)


@given(seeds, st.integers(0, 511))
def test_a_changed_signature_is_refused(seed, bit):
    signature = bytearray(Identity(seed).sign(b"message"))
    signature[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadSignatureError):
        verify(Identity(seed).public, bytes(signature), b"message")


def add(a, b):
    """Addition on the twisted Edwards curve, in affine coordinates."""
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P
    return x, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def points_of_small_order():
    """All points whose order divides eight: multiples of eight give the neutral element for these
    only.
    """
    root = pow(2, (P - 1) // 4, P)
    found = set()
    for y in [0, 1, P - 1, *roots_for_order_8(root)]:
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        if x * x % P != square:
            x = x * root % P
        assert x * x % P == square
        found |= {(x, y), (-x % P, y)}
    return found


def roots_for_order_8(root):
    """y of the points that double to (±sqrt(-1), 0): there x² = y² up to sign, so D·y⁴ + 2y² - 1 =
    0.
    """
    discriminant = pow(1 + D, (P + 3) // 8, P)
    if discriminant * discriminant % P != (1 + D) % P:
        discriminant = discriminant * root % P
    for sign in (1, -1):
        square = (-1 + sign * discriminant) * pow(D, -1, P) % P
        y = pow(square, (P + 3) // 8, P)
        for candidate in (y, y * root % P):
            if candidate * candidate % P == square:
                yield from (candidate, -candidate % P)


def test_keys_of_small_order_are_refused():
    points = points_of_small_order()
    assert len(points) == 8
    for x, y in points:
        point = (x, y)
        for _ in range(3):
            point = add(point, point)
        assert point == (0, 1), "eight times a point of small order is the neutral element"
        with pytest.raises(BadKeyError):
            check_key((y | (x & 1) << 255).to_bytes(32, "little"))
        with pytest.raises(BadKeyError):
            check_key((y | (1 - (x & 1)) << 255).to_bytes(32, "little"))


@pytest.mark.parametrize("y", [*range(P, 2**255)])
def test_keys_in_another_form_are_refused(y):
    for sign in (0, 1 << 255):
        with pytest.raises(BadKeyError):
            check_key((y | sign).to_bytes(32, "little"))


def test_a_signature_of_mixed_order_is_refused():
    """One that holds only up to a point of small order: libraries that multiply by the cofactor
    accept it.
    """
    public = bytes.fromhex("693f359cc79846c7a91c68bde0a54a274050f6ae5f5be6da91eb88d6cd3b115f")
    signature = bytes.fromhex(
        "e9b2fe981587efae6478f48ba1fa60cec6126d0e26dde72a0a24f640dcd783e5"
        "b0ccdb153201c39e40e6f09ffb8d6622d21fcf07d07095c06c40eb0660eaf900"
    )
    with pytest.raises(BadSignatureError):
        verify(public, signature, b"mixed order")


ORDER = 2**252 + 27742317777372353535851937790883648493
BASE_Y = 4 * pow(5, -1, P) % P
BASE = (15112221349535400772501151409588531511454012693041857206046113283949847762202, BASE_Y)


def times(number, point):
    found = (0, 1)
    while number:
        if number & 1:
            found = add(found, point)
        point, number = add(point, point), number >> 1
    return found


def encoded(point):
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


def crafted(luck, message, key_twist, commitment_twist, *, no_luck=False):
    """A key and a signature by who knows the scalar of both, each shifted by a point of small
    order.
    """
    scalar, nonce = luck.randrange(1, ORDER), 0 if no_luck else luck.randrange(1, ORDER)
    public = encoded(add(times(scalar, BASE), key_twist))
    commitment = encoded(add(times(nonce, BASE), commitment_twist))
    challenge = int.from_bytes(hashlib.sha512(commitment + public + message).digest(), "little") % ORDER
    proof = (nonce + challenge * scalar) % ORDER
    return public, commitment + proof.to_bytes(32, "little")


def holds_by_openssl(public, signature, message):
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def holds(public, signature, message):
    try:
        verify(public, signature, message)
    except BadSignatureError:
        return False
    return True


@pytest.mark.parametrize("no_luck", [False, True])
def test_what_a_signer_crafts_holds_here_if_and_only_if_it_holds_by_the_specification(no_luck):
    """Nodes that disagreed on one would hold it against each other, so two libraries must come to
    the same.
    """
    luck, twists = random.Random(7), sorted(points_of_small_order())
    said = set()
    for number in range(160):
        message = number.to_bytes(2)
        key_twist, commitment_twist = luck.choice(twists), luck.choice(twists)
        public, signature = crafted(luck, message, key_twist, commitment_twist, no_luck=no_luck)
        held = holds(public, signature, message)
        assert held == holds_by_openssl(public, signature, message)
        said.add((held, (key_twist, commitment_twist) == ((0, 1), (0, 1))))
    assert {held for held, _ in said} == {True, False}
    assert (True, False) in said, "some that are shifted hold all the same"


@pytest.mark.parametrize("add_order", [1, 2, 7])
def test_a_proof_that_is_not_below_the_order_is_refused(add_order):
    identity = Identity(bytes(32))
    signature = identity.sign(b"message")
    proof = int.from_bytes(signature[32:], "little") + add_order * ORDER
    with pytest.raises(BadSignatureError):
        verify(identity.public, signature[:32] + proof.to_bytes(32, "little"), b"message")


@pytest.mark.parametrize("length", [0, 32, 63, 65])
def test_a_signature_of_another_length_is_refused_and_takes_nothing_from_the_message(length):
    identity = Identity(bytes(32))
    whole = identity.sign(b"message") + b"message"
    with pytest.raises(BadSignatureError):
        verify(identity.public, whole[:length], whole[length:])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_another_length_are_refused(length):
    with pytest.raises(BadKeyError):
        check_key(bytes(range(length)))
    with pytest.raises(BadKeyError):
        Identity(bytes(length))


def test_a_point_that_is_not_on_the_curve_verifies_nothing():
    y = next(
        y for y in range(2, 99) if pow((y * y - 1) * pow(D * y * y + 1, -1, P), (P - 1) // 2, P) == P - 1
    )
    with pytest.raises((BadKeyError, BadSignatureError)):
        verify(y.to_bytes(32, "little"), bytes(64), b"message")


GOOD = Identity(bytes(32)).peer_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD[:-1],
        GOOD + "1",
        GOOD[:-1] + "0",
        "1" * 52,
        "z" * 52,
        "Qm" + GOOD[2:],
        "13" + GOOD[2:],
        "é" * 52,
        peer_id(bytes(32)),
    ],
)
def test_what_is_no_peer_id_is_refused(text):
    with pytest.raises(BadPeerIdError):
        public_key_of(text)


@given(st.text(max_size=60))
def test_any_text_is_a_peer_id_or_refused(text):
    try:
        public = public_key_of(text)
    except BadPeerIdError:
        return
    assert peer_id(public) == text


def test_a_private_key_does_not_show_itself():
    identity = Identity(bytes(range(32)))
    assert bytes(range(32)).hex() not in repr(identity)
    assert identity.peer_id in repr(identity)
    assert Identity(identity.seed).public == identity.public
    assert Identity.generate().public != Identity.generate().public
