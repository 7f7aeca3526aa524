"""The golden bytes: what is written down is what the code does, and it only ever grows."""

import json

import pytest

from protocol import ProtocolError, canonical, decode, decode_delta, decode_raw, encode, open_sealed
from protocol.batch import read_batch
from protocol.identity import check_key, public_key_of
from protocol.link import Link

from .examples import MESSAGES, SEALED_TYPES
from .frames import patterns
from .make_vectors import FILES, FOLDER, make, plain

VECTORS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
TYPES = {type(message).__name__: type(message) for message in MESSAGES.values()}
KINDS = {kind: type(message) for kind, (message, _, _) in SEALED_TYPES.items()}
INVALID = [(file, case) for file, cases in VECTORS.items() for case in cases.get("invalid", [])]


def attempt(file: str, case: dict) -> None:
    """Do with a case what its file says."""
    if file == "canonical":
        canonical.decode(bytes.fromhex(case["bytes"]))
    elif file == "messages":
        decode(TYPES[case["record"]], bytes.fromhex(case["bytes"]))
    elif file in {"envelope", "major1"}:
        signer = bytes.fromhex(case["signer"]) if "signer" in case else None
        open_sealed(
            bytes.fromhex(case["sealed"]), KINDS[case["kind"]], bytes.fromhex(case["run"]), signer=signer
        )
    elif file == "batch":
        read_batch(bytes.fromhex(case["bytes"]))
    elif file == "link":
        Link.parse(case["link"])
    elif file == "zstd":
        decode_raw(bytes.fromhex(case["frame"]), case["size"])
    elif file == "delta":
        decode_delta(bytes.fromhex(case["frame"]), patterns(case["base"]))
    else:
        raise AssertionError(f"no way to try {file}")


@pytest.mark.parametrize(
    ("file", "case"), INVALID, ids=[f"{file}: {case['name']}"[:80] for file, case in INVALID]
)
def test_every_invalid_vector_is_refused_with_its_reason(file, case):
    with pytest.raises(ProtocolError) as caught:
        attempt(file, case)
    assert caught.value.reason == case["error"]


def test_every_file_is_there_and_none_other():
    assert set(VECTORS) == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_the_code_still_writes_every_vector(file):
    """Computed anew, each case comes out as it stands in the file; so nothing on the wire has
    moved.
    """
    fresh = FRESH[file]
    assert set(fresh) == set(VECTORS[file])
    for cases, rows in fresh.items():
        if cases != "about":
            assert {row["name"]: row for row in rows} == {row["name"]: row for row in VECTORS[file][cases]}


FRESH = make()


def test_every_type_has_valid_and_invalid_vectors_of_every_sort():
    messages = VECTORS["messages"]
    assert {case["record"] for case in messages["valid"]} == set(TYPES)
    for record in TYPES:
        errors = {case["error"] for case in messages["invalid"] if case["record"] == record}
        assert {
            "unknown-field",
            "missing-field",
            "wrong-type",
            "out-of-range",
            "truncated",
            "trailing-bytes",
        } <= errors


def test_a_value_in_a_vector_is_the_value_of_its_bytes():
    for case in VECTORS["messages"]["valid"]:
        data = bytes.fromhex(case["bytes"])
        assert plain(canonical.decode(data)) == case["value"]
        assert encode(decode(TYPES[case["record"]], data)) == data


def test_bad_keys_and_peer_ids_are_refused():
    for case in VECTORS["identity"]["bad_keys"]:
        with pytest.raises(ProtocolError):
            check_key(bytes.fromhex(case["key"]))
    for case in VECTORS["identity"]["bad_peer_ids"]:
        with pytest.raises(ProtocolError):
            public_key_of(case["peer_id"])
