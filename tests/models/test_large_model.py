"""Memory of `run new` is bounded by a piece of a tensor, not by the model."""

from __future__ import annotations

import sys

import pytest

from protocol import Identity
from tests.models.large_model import QWEN2_1_5B, peak_own_memory, write_qwen2

MOST = 1.5e9  # bytes beyond the mapped file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_a_3_gb_model_is_sealed_in_little_memory(tmp_path, record_property):
    folder = write_qwen2(tmp_path / "model", QWEN2_1_5B)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 3e9
    key = Identity(b"k" * 32).peer_id
    (tmp_path / "big.toml").write_text(f'name = "big"\nmodel = "{folder}"\ntrainers = ["{key}"]\n')
    command = [sys.executable, "-m", "echo_node", "run", "new", str(tmp_path / "big.toml")]
    peak, seconds, done = peak_own_memory([*command, "--state", str(tmp_path / "state")], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    record_property("peak_bytes", peak)
    record_property("seconds", seconds)
    assert peak < MOST
