"""A clock that jumps; thread work runs in place, since a jumping clock would not wait for it."""

from tests.election.conftest import autojump_clock

__all__ = ["autojump_clock"]
