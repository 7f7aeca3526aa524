"""The names under which nodes meet."""

import pytest

from protocol import limits, topics
from protocol.errors import OutOfRangeError

from .examples import RUN, name


def test_the_major_version_is_in_every_name():
    for stream in topics.STREAMS:
        assert stream.endswith(f"/{limits.MAJOR}")
    assert topics.KAD_PROTOCOL == "/echo/kad/2.0.0"
    for cargo in topics.CARGOES:
        assert topics.topic(RUN, cargo) == f"/echo/2/{RUN.hex()}/{cargo}"


def test_roles_runs_and_blobs_meet_under_different_keys():
    keys = {topics.role_key(run, role) for run in (RUN, name("another")) for role in topics.ROLES}
    keys |= {topics.blob_key(RUN), topics.blob_key(name("blob"))}
    assert len(keys) == 2 * len(topics.ROLES) + 2
    assert all(len(key) == 34 and key.startswith(b"\x1e\x20") for key in keys)


def test_an_unknown_cargo_or_role_is_refused():
    for wrong in (lambda: topics.topic(RUN, "gossip"), lambda: topics.role_key(RUN, "king")):
        with pytest.raises(OutOfRangeError):
            wrong()
