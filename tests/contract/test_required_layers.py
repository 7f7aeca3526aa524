"""Layers that must hold before the contract of a run is executed, as `join` requires them."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from echo_node.contract.jail import Layer
from echo_node.contract.jail.enclosure import Bounds, Enclosure
from echo_node.contract.jail.required import REQUIRED
from echo_node.contract.sandbox import layers
from echo_node.runs.spec import RunSpec, new_run, write_run
from protocol import Identity

TRAINER = Identity(b"t" * 32)
LANDLOCK = 444
UNSHARE, SECCOMP = {"x86_64": (272, 317), "aarch64": (97, 277)}.get(platform.machine(), (0, 0))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels of Linux")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    for layer in layers():
        if not layer.active:
            pytest.skip(f"{layer.name}: {layer.why_not}")
    folder = tmp_path_factory.mktemp("run") / "digits"
    told = RunSpec(name="a test", trainers=[TRAINER.peer_id], engines=["torch/f32"])
    write_run(folder, new_run(told, TRAINER))
    return folder


@pytest.fixture
def join(run, tmp_path):
    """Join the run on a kernel that lacks these calls; yield the first events, or its error."""
    started = []

    def start(*lacks, words=()):
        older = (sys.executable, "-m", "tests.contract.older_kernel", ",".join(map(str, lacks)))
        command = (sys.executable, "-m", "echo_node", "join", "--role", "sampler", str(run), "--json")
        where = ("--state", str(tmp_path / "state"), "--listen", "/ip4/127.0.0.1/tcp/0", *words)
        process = subprocess.Popen(
            [*(older if lacks else ()), *command, *where],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "jail":
                return event
        return process.stderr.read()

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def test_join_says_which_layers_hold(join):
    event = join()
    assert event["missing"] == {}
    assert {"seccomp", "landlock", "namespaces", "limits"} <= set(event["active"])


def test_one_of_landlock_and_namespaces_is_enough(join):
    assert list(join(LANDLOCK)["missing"]) == ["landlock"]


@pytest.mark.parametrize("lacks", [(LANDLOCK, UNSHARE), (SECCOMP,)])
def test_a_kernel_that_cannot_isolate_runs_no_contract_and_says_what_to_do(join, lacks):
    said = join(*lacks).strip()
    assert "\n" not in said
    assert "lacks a layer that must hold" in said
    assert "echo-node doctor" in said
    assert "--unsafe-no-jail" in said


def test_the_person_may_go_round_it_and_still_gets_every_layer_that_holds(join):
    event = join(LANDLOCK, UNSHARE, words=["--unsafe-no-jail"])
    assert set(event["missing"]) == {"landlock", "namespaces"}
    assert {"seccomp", "limits", "no-new-privileges"} <= set(event["active"])


def test_the_doctor_finds_it_wrong(run, tmp_path):  # noqa: ARG001 -- skipped where a layer is missing
    older = (sys.executable, "-m", "tests.contract.older_kernel", f"{LANDLOCK},{UNSHARE}")
    doctor = (sys.executable, "-m", "echo_node", "doctor", "--json", "--state", str(tmp_path / "none"))
    done = subprocess.run([*older, *doctor], capture_output=True, text=True, timeout=100, check=False)
    points = [json.loads(line) for line in done.stdout.splitlines()]
    [found] = [point for point in points if point["what"] == "landlock or namespaces"]
    assert found["fine"] is False
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("active", "lacks"),
    [
        ({"seccomp", "landlock", "limits", "no-new-privileges"}, ""),
        ({"seccomp", "namespaces", "limits", "no-new-privileges"}, ""),
        ({"landlock", "namespaces", "limits", "no-new-privileges"}, "seccomp: no"),
        ({"seccomp", "limits", "no-new-privileges"}, "landlock: no and namespaces: no"),
        (set(), "no-new-privileges: no; seccomp: no; landlock: no and namespaces: no; limits: no"),
    ],
)
def test_what_is_required_is_seccomp_and_one_of_landlock_and_namespaces(active, lacks):
    enclosure = Enclosure(Bounds(1, 1, 1))
    names = ("no-new-privileges", "namespaces", "landlock", "seccomp", "limits")
    enclosure.layers = [Layer(name, name in active, "" if name in active else "no") for name in names]
    assert enclosure.missing(REQUIRED) == lacks
