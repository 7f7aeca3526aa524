"""What the wire offers to the rest of the program, by name."""

import protocol


def test_everything_exported_exists_and_is_sorted():
    assert (
        sorted(protocol.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        == protocol.__all__
    )
    for name in protocol.__all__:
        assert hasattr(protocol, name)


def test_the_names_of_the_messages_are_exported():
    for name in (
        "Manifest",
        "TrajectoryGroup",
        "Join",
        "Roster",
        "Heartbeat",
        "Receipt",
        "Verdict",
        "WeightsHead",
    ):
        assert name in protocol.__all__
    for name in ("ChunkTable", "TermGrant", "Follower", "Identity", "seal", "open_sealed"):
        assert name in protocol.__all__
