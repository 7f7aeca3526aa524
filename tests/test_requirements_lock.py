"""The list of releases that a set-up installs: complete, and every file by its hash."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
ENTRY = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<hashes>( \\\n    --hash=sha256:[0-9a-f]{64})+)$",
    re.MULTILINE,
)
LEFT_OUT = {"fuzz", "log"}
PINNED_BY_VERSION_ALONE = {"torch"}


def entries():
    return {found["name"]: found for found in ENTRY.finditer(LOCK.read_text())}


def test_every_line_is_a_release_with_hashes_or_a_comment():
    rest = ENTRY.sub("", LOCK.read_text()).split("\n")
    assert [line for line in rest if line and not line.startswith("#")] == []


def test_every_package_that_the_project_names_is_in_it_and_fits():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    named = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        *(each for extra, some in extras.items() if extra not in LEFT_OUT for each in some),
    ]
    locked = entries()
    for each in map(Requirement, named):
        name = canonicalize_name(each.name)
        if name in PINNED_BY_VERSION_ALONE:
            assert str(each.specifier).startswith("==")
        elif name != "echo-node":
            assert each.specifier.contains(locked[name]["version"]), each


def test_whatever_those_packages_need_is_in_it_too():
    locked = entries()
    missing = set()
    for name in locked:
        try:
            needs = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        for need in needs:
            wanted = canonicalize_name(need.name)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                missing |= {wanted} - locked.keys() - PINNED_BY_VERSION_ALONE
    assert missing - {"llm", "llama-cpp-python"} == set()  # llm is the runtime of the packaged model


def test_pip_refuses_a_file_of_another_hash(tmp_path):
    wheel = tmp_path / "left_pad-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    list_ = tmp_path / "requirements.lock"
    list_.write_text(f"left-pad==1.0 --hash=sha256:{'0' * 64}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        "--no-index",
        "--dry-run",
    ]
    done = subprocess.run(
        [*command, "--find-links", tmp_path, "-r", list_],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
