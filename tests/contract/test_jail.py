"""Each layer of the jail: with it, an attack is held; without it and those that overlap, it is not.

What overlaps: TCP is kept by Landlock, the namespace and seccomp; UDP by the namespace and seccomp;
writing, making and removing files by Landlock and seccomp, and writing by the limits as well;
signals by Landlock and seccomp; forks by seccomp alone, as root (whom no limit of processes binds).
"""

from __future__ import annotations

import errno
import functools
import json
import os
import platform
import socket
import struct
import subprocess
import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import Prompt, Score
from echo_node.contract.jail import Layer, macos, seccomp, syscalls
from echo_node.contract.jail.process import MAX_MESSAGE_BYTES
from echo_node.contract.jail.worker import _read_answer
from echo_node.contract.sandbox import Failed, Sandbox, layers
from echo_node.errors import ContractError
from echo_node.runtime.ipc import MessageError, Pipe, PipeEndedError, PipeError, PipeSilentError
from tests.contract import hostile_contracts
from tests.contract.forbidden_syscalls import REFUSED

LINUX = ["no-new-privileges", "namespaces", "capabilities", "landlock", "seccomp", "limits"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="these layers are those of Linux")
ASKED = Prompt("")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return hostile_contracts.install(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def measured():
    return {layer.name: layer for layer in layers()}


@pytest.fixture(scope="module")
def jail(package, measured):
    """Open a jail without some of its layers, shared by all tests.

    Skipped where this machine has not all of them.
    """
    opened = {}

    def make(*off, contract="executing", require=()):
        for layer in measured.values():
            if not layer.active:
                pytest.skip(f"{layer.name}: {layer.why_not}")
        kind = off, contract, tuple(require)
        if kind not in opened:
            terms = {"folders": [package], "memory_bytes": 2**28, "seconds": 20.0, "require": require}
            opened[kind] = Sandbox(contract, "1", **terms, _without=off)
        return opened[kind]

    yield make
    for sandbox in opened.values():
        sandbox.close()


def run(sandbox, text):
    [result] = sandbox.scores([(ASKED, text)])
    return result


# Layers


@on_linux
def test_the_layers_are_measured_and_say_why_one_is_missing(measured):
    assert list(measured) == LINUX
    assert all(bool(layer.why_not) is not layer.active for layer in measured.values())


@on_linux
def test_a_layer_that_was_left_out_is_said_to_be_missing(jail):
    assert Layer("seccomp", active=False, why_not="switched off") in jail("seccomp").layers()
    assert [layer.name for layer in jail("seccomp").layers()] == LINUX


@on_linux
def test_a_layer_that_must_hold_and_does_not_keeps_everything_from_running(jail):
    with pytest.raises(ContractError, match="lacks a layer that must hold: landlock: switched off"):
        jail("landlock", require=["limits", "landlock"]).prompts([bytes(32)])
    with pytest.raises(ContractError, match="moat: this system has no such layer"):
        jail(require=["moat"]).prompts([bytes(32)])
    assert jail(require=LINUX).prompts([bytes(32)])


@on_linux
def test_without_no_new_privileges_the_kernel_takes_neither_landlock_nor_a_filter(jail):
    found = {layer.name: layer for layer in jail("no-new-privileges").layers()}
    assert not found["landlock"].active
    assert "not permitted" in found["landlock"].why_not
    assert not found["seccomp"].active
    assert "Permission denied" in found["seccomp"].why_not


FORBIDDING = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
TELLING = """
import json
from echo_node.contract.sandbox import layers
print(json.dumps({layer.name: layer.why_not for layer in layers()}))
"""


@on_linux
def test_where_new_user_namespaces_are_forbidden_all_else_holds(measured):
    command = ["unshare", "-U", "-r", "sh", "-c", FORBIDDING, sys.executable, TELLING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if not measured["namespaces"].active or not done.stdout:
        pytest.skip(f"no namespace to forbid them in: {done.stderr}")
    why_not = json.loads(done.stdout)
    assert "forbids new user namespaces" in why_not.pop("namespaces")
    assert set(why_not.values()) == {""}


@on_linux
def test_a_thread_that_an_import_started_is_bound_too(jail):
    found = {layer.name: layer for layer in jail(contract="threaded").layers()}
    assert found["landlock"].active
    assert found["seccomp"].active
    assert "denied" in run(jail(contract="threaded"), "told = ask_thread('/etc/hostname')").reason
    [first, second] = jail(contract="threaded").scores(
        [(ASKED, "import builtins\nbuiltins.x = 1"), (ASKED, "x")]
    )
    assert isinstance(first, Score)  # each in a process of its own: one with threads is not forked
    assert "NameError" in second.reason


READ = "told = open('{key}').read()"
CHMOD = "import os\nos.chmod('{key}', 0o644)\ntold = 'changed'"
UNIX = "import socket\nsocket.socket(socket.AF_UNIX).connect('{post}')\ntold = 'met'"
UDP = (
    "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))\n"
    "told = 'sent'"
)
RAW = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\ntold = 'raw'"
FORK = "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\ntold = 'forked'"
TAKE = "told = len(bytes(2**29))"
UNLINK = "import os\nos.unlink('{key}')\ntold = 'gone'"
SIGNAL = "import os\nos.kill(os.getppid(), 0)\ntold = 'reached'"


@on_linux
@pytest.mark.parametrize(
    ("off", "text", "escaped"),
    [
        (["landlock"], READ, "a secret key"),
        (["seccomp"], CHMOD, "changed"),
        (["seccomp"], UNIX, "met"),
        (["seccomp"], FORK, "forked"),
        (["seccomp", "namespaces"], UDP, "sent"),
        (["seccomp", "capabilities"], RAW, "raw"),
        (["seccomp", "landlock"], UNLINK, "gone"),
        (["seccomp", "landlock"], SIGNAL, "reached"),
        (["limits"], TAKE, str(2**29)),
    ],
)
def test_what_a_layer_is_for_gets_out_without_it_and_only_then(off, text, escaped, jail, tmp_path):
    key = tmp_path / "key"
    key.write_text("a secret key")
    key.chmod(0o600)
    with socket.socket(socket.AF_UNIX) as post, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        post.bind(str(tmp_path / "post"))
        post.listen()
        udp.bind(("127.0.0.1", 0))
        text = text.format(key=key, post=tmp_path / "post", udp=udp.getsockname()[1])
        for kept in off:
            held = run(jail(*[name for name in off if name != kept]), text)
            assert isinstance(held, Failed), f"{kept} alone does not hold it"
        assert run(jail(*off), text) == Score(0.5, escaped)


# The filter of system calls, on machines that we do not have


@functools.cache
def program(machine, forks):
    return seccomp.program(machine, 4242, forks=forks)


def verdict(machine, number, *arguments, architecture=None, forks=False):
    """What the kernel's small machine would come to: a reading of the filter of its own."""
    told = struct.pack(
        "<iIQ6Q",
        number,
        architecture or {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine],
        0,
        *[*arguments, 0, 0, 0, 0, 0, 0][:6],
    )
    steps = program(machine, forks)
    value, at = 0, 0
    while True:
        code, if_so, if_not, constant = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", told, constant)
        elif code == 0x54:
            value &= constant
        elif code == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(constant) or errno.errorcode[
                constant & 0xFFFF
            ]
        else:
            yes = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            at += if_so if yes else if_not


MACHINES = {"x86_64": 0, "aarch64": 1}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_that_is_not_allowed_is_refused(machine):
    own = MACHINES[machine]
    allowed = {numbers[own] for numbers in syscalls.ALLOWED.values()} - {None}
    closer = {numbers[own] for numbers in syscalls.CLOSER.values()} - {None}
    assert len(allowed) + len(closer) == sum(
        numbers[own] is not None for numbers in [*syscalls.ALLOWED.values(), *syscalls.CLOSER.values()]
    )
    for number in range(1024):
        if number not in closer:
            assert verdict(machine, number) == ("allow" if number in allowed else "EPERM")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_reaches_out_is_refused(name, machine):
    number = REFUSED[name][MACHINES[machine]]
    if number is not None:
        for arguments in ((), (1, 1, 1), (2**64 - 1,) * 6):
            assert verdict(machine, number, *arguments) == "EPERM"
        if name not in {"wait4", "seccomp"}:  # for a process that forks one child per text
            assert verdict(machine, number, forks=True) == "EPERM"


@pytest.mark.parametrize(
    ("machine", "calls"),
    [
        (
            "x86_64",
            {"execve": 59, "socket": 41, "ptrace": 101, "chmod": 90, "read": 0, "write": 1, "mmap": 9},
        ),
        (
            "aarch64",
            {
                "execve": 221,
                "socket": 198,
                "ptrace": 117,
                "fchmodat": 53,
                "read": 63,
                "write": 64,
                "mmap": 222,
            },
        ),
    ],
)
def test_the_numbers_are_those_of_the_kernel(machine, calls):
    for name, number in calls.items():
        assert verdict(machine, number) == ("allow" if name in {"read", "write", "mmap"} else "EPERM")


@pytest.mark.parametrize(
    ("machine", "clone", "clone3", "openat", "kill", "tgkill", "fcntl", "prlimit", "prctl"),
    [("x86_64", 56, 435, 257, 62, 234, 72, 302, 157), ("aarch64", 220, 435, 56, 129, 131, 25, 261, 167)],
)
def test_some_calls_are_looked_at_more_closely(
    machine, clone, clone3, openat, kill, tgkill, fcntl, prlimit, prctl
):
    threads = 0x3D0F00
    assert verdict(machine, clone, threads) == "allow"
    assert verdict(machine, clone, 17) == "EPERM"  # a fork
    assert verdict(machine, clone, 0x4111) == "EPERM"  # a spawn
    assert verdict(machine, clone3, 1) == "ENOSYS"
    assert verdict(machine, openat, 0, 0, os.O_RDONLY | os.O_CLOEXEC) == "allow"
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_RDWR | os.O_CLOEXEC):
        assert verdict(machine, openat, 0, 0, flags) == "EPERM"
    for number in (kill, tgkill):
        assert verdict(machine, number, 4242) == "allow"
        assert verdict(machine, number, 4241) == "EPERM"
        assert verdict(machine, number, 2**64 - 1) == "EPERM"  # everybody
        assert verdict(machine, number, 0) == "EPERM"  # its group
    assert verdict(machine, fcntl, 5, 3) == "allow"
    assert [verdict(machine, fcntl, 5, command) for command in (8, 10, 15)] == ["EPERM"] * 3
    assert verdict(machine, prlimit, 0) == "allow"
    assert verdict(machine, prlimit, 1) == "EPERM"
    assert [verdict(machine, prctl, command) for command in (1, 4, 15)] == ["EPERM", "EPERM", "allow"]
    for command in (22, 24, 35, 36, 38, 53, 59, 0x59616D61):  # seccomp, capabilities, memory map, Yama
        assert verdict(machine, prctl, command) == "EPERM"


@pytest.mark.parametrize(
    ("machine", "clone", "fcntl", "ioctl", "mmap", "sendto", "prctl"),
    [("x86_64", 56, 72, 16, 9, 44, 157), ("aarch64", 220, 25, 29, 222, 206, 167)],
)
def test_arguments_are_allowed_one_by_one(machine, clone, fcntl, ioctl, mmap, sendto, prctl):
    for namespace in (0x20000, 0x80, *(1 << bit for bit in range(25, 31))):
        assert verdict(machine, clone, 0x3D0F00 | namespace) == "EPERM"
        for forks in (False, True):
            assert verdict(machine, clone, 0x11 | namespace, forks=forks) == "EPERM"
    assert verdict(machine, clone, 0x1200011) == "EPERM"
    assert verdict(machine, clone, 0x1200011, forks=True) == "allow"
    assert verdict(machine, clone, 0x1208011, forks=True) == "EPERM"  # CLONE_PARENT: a sibling
    assert [verdict(machine, fcntl, 5, command) for command in (0, 1, 2, 3, 4, 1030)] == ["allow"] * 6
    for command in (5, 6, 7, 9, 11, 16, 36, 37, 38, 1024, 1026, 1031, 1033):  # locks, leases, watches, seals
        assert verdict(machine, fcntl, 5, command) == "EPERM"
    assert verdict(machine, ioctl, 5, 0x5401) == "allow"
    for command in (0x5412, 0x8901, 0x8902, 0x40086602, 0xC0185879):  # type, signal, change flags of files
        assert verdict(machine, ioctl, 5, command) == "EPERM"
    assert verdict(machine, mmap, 0, 4096, 3, 0x22) == "allow"
    assert verdict(machine, mmap, 0, 4096, 1, 0x01) == "allow"  # a file that is read
    assert verdict(machine, mmap, 0, 4096, 3, 0x21) == "EPERM"  # memory that children share
    assert verdict(machine, mmap, 0, 4096, 3, 0x23) == "EPERM"
    assert verdict(machine, sendto, 3, 0, 9, 0, 0) == "allow"
    assert verdict(machine, sendto, 3, 0, 9, 0, 1) == "EPERM"
    assert verdict(machine, sendto, 3, 0, 9, 0, 1 << 32) == "EPERM"
    assert verdict(machine, prctl, 1, 9, forks=True) == "allow"  # to die with the process that forked it
    assert verdict(machine, prctl, 1, 0, forks=True) == "EPERM"


def test_calls_of_another_machine_end_the_process():
    assert verdict("x86_64", 1, architecture=0x40000003) == "kill"  # i386
    assert verdict("x86_64", 0x40000000 + 1) == "kill"  # x32
    assert verdict("aarch64", 1, architecture=0x40000028) == "kill"  # 32-bit arm
    assert verdict("aarch64", 64, architecture=0xC000003E) == "kill"


@on_linux
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the call of another machine is written for this one"
)
def test_a_call_of_another_machine_costs_one_score(jail):
    text = (  # mov eax, 20; int 0x80; ret: getpid as a 32-bit program calls it
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
    )
    assert "SIGSYS" in run(jail(), text).reason


ALL_CALLS = """
import ctypes, errno
call = ctypes.CDLL(None, use_errno=True).syscall
call.restype = ctypes.c_long
made = []
for name, number in {calls}:
    ctypes.set_errno(0)
    result = call(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in {arguments}])
    if result != -1 or ctypes.get_errno() != errno.EPERM:
        made.append((name, result, ctypes.get_errno()))
told = made
"""


@on_linux
@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no numbers are known for this machine")
@pytest.mark.parametrize("arguments", [(0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (-1, -1, -1, -1, -1, -1)])
def test_this_kernel_refuses_every_call_that_reaches_out(jail, arguments):
    own = MACHINES[platform.machine()]
    calls = [(name, numbers[own]) for name, numbers in REFUSED.items() if numbers[own] is not None]
    made = run(jail(), ALL_CALLS.format(calls=calls, arguments=arguments))
    assert made == Score(0.5, "[]")


@on_linux
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\ntold = os.open(os.__file__, os.O_RDWR)", "not permitted"),
        ("import os\ntold = os.open('/tmp', os.O_TMPFILE | os.O_RDWR)", "not permitted"),
        ("import fcntl, os\nfcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_EX)", "not permitted"),
        ("import fcntl, os\nfcntl.lockf(os.open(os.__file__, 0), fcntl.LOCK_SH)", "not permitted"),
        (
            "import threading\n[threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(999)]",
            "",
        ),
        ("import os\nkept = [os.open(os.__file__, 0) for _ in range(99)]", "Too many open files"),
        ("import mmap\nmmap.mmap(-1, 4096)", "not permitted"),
        (
            "import multiprocessing.shared_memory as m\nm.SharedMemory(create=True, size=9)",
            "Permission|not permitted",
        ),
        ("told = open('/proc/self/environ').read()", "Permission denied"),
        ("told = open('/proc/self/mem', 'rb').read(1)", "Permission denied"),
        ("told = open('/sys/class/net/lo/address').read()", "Permission denied"),
        ("import os\nos.kill(os.getppid(), 9)", "not permitted"),
        ("import os\nos.nice(1)", "not permitted"),
        ("import os\nos.setsid()", "not permitted"),
        ("import os\ntold = os.waitpid(-1, 0)", "not permitted"),
    ],
)
def test_what_a_text_reaches_for_is_refused(jail, text, why):
    result = run(jail(), text)
    if why:
        assert isinstance(result, Failed)
        with pytest.raises(ContractError, match=why):
            raise ContractError(result.reason)
    assert run(jail(), "told = 'fine'") == Score(0.5, "fine")


@on_linux
def test_a_child_holds_no_descriptor_but_its_own_pipe(jail):
    text = (
        "import os, stat\nkinds = {}\n"
        "for n in range(64):\n"
        " try: kinds[n] = stat.S_IFMT(os.fstat(n).st_mode)\n"
        " except OSError: pass\n"
        "told = [sum(kind == wanted for kind in kinds.values()) for wanted in "
        "(stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK)] + [len(kinds)]"
    )
    assert run(jail(), text) == Score(0.5, "[3, 1, 0, 4]")  # /dev/null three times, and its pipe


def test_the_profile_of_macos_quotes_its_paths(tmp_path):
    odd = tmp_path / 'a "quoted" folder'
    rules = macos.profile([odd])
    assert rules.startswith("(version 1)\n(deny default)\n")
    assert rules.endswith('a \\"quoted\\" folder"))\n')
    assert not any(word in rules for word in ("network", "process-exec", "process-fork", "file-write"))


# The pipe


@pytest.fixture
def pipes():
    ours, theirs = socket.socketpair()
    pipe = Pipe(ours, max_bytes=MAX_MESSAGE_BYTES)
    yield pipe, theirs
    pipe.close()
    theirs.close()


def framed(body):
    return struct.pack("<I", len(body)) + body


def test_messages_go_both_ways_in_order(pipes):
    pipe, theirs = pipes
    other = Pipe(theirs)
    for number in range(100):
        other.send({"kind": "x", "items": [number, "text", b"bytes", {"a": 1.5}, None]})
    assert [pipe.expect(5.0)["items"][0] for _ in range(100)] == list(range(100))
    pipe.send({"kind": "y"}, seconds=5.0)
    assert other.expect(None) == {"kind": "y"}


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), "bytes, where"),
        (struct.pack("<I", 0), "bytes, where"),
        (framed(b"\xc1"), "no msgpack"),
        (framed(b"\x91" * 5000), "no msgpack"),
        (framed(msgpack.packb({"a": 1})), "does not say its kind"),
        (framed(msgpack.packb(["kind"])), "does not say its kind"),
        (framed(msgpack.packb({"kind": "x", "y": [msgpack.ExtType(1, b"x")]})), "no msgpack"),
        (framed(msgpack.packb({"kind": "x"}) + b"x"), "no msgpack"),
    ],
)
def test_nonsense_is_an_error_that_says_so(pipes, sent, why):
    pipe, theirs = pipes
    theirs.sendall(sent)
    with pytest.raises(PipeError, match=why):
        pipe.expect(5.0)


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_message_or_an_error(body):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(body)
        theirs.close()
        pipe, received = Pipe(ours, max_bytes=MAX_MESSAGE_BYTES), 0
        try:
            while type(pipe.expect(5.0)["kind"]) is str:
                received += 1
        except PipeError:
            assert received <= len(body) // 5
        else:
            pytest.fail("a message without a kind")


def test_an_end_and_a_silence_are_told_apart(pipes):
    pipe, theirs = pipes
    theirs.sendall(b"\5\0")
    with pytest.raises(PipeSilentError):
        pipe.expect(0.01)
    theirs.close()
    with pytest.raises(PipeEndedError):
        pipe.expect(5.0)
    with pytest.raises(PipeEndedError):
        pipe.send({"kind": "x"}, seconds=5.0)


def test_nobody_waits_for_one_who_does_not_read(pipes):
    pipe, _ = pipes
    with pytest.raises(PipeSilentError):
        pipe.send({"kind": "x", "data": bytes(MAX_MESSAGE_BYTES - 100)}, seconds=0.01)
    with pytest.raises(MessageError, match="where 8388608 are allowed"):
        pipe.send({"kind": "x", "data": bytes(MAX_MESSAGE_BYTES)}, seconds=0.01)


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "result"},
        {"kind": "result", "token": b"t"},
        {"kind": "result", "token": b"t", "index": 0},
        {"kind": "result", "token": b"t", "index": 0, "fields": 1},
        {"kind": "result", "token": b"t", "index": False, "fields": ["a"]},
        {"kind": "result", "token": b"t", "index": 1, "fields": ["a"]},
        {"kind": "result", "token": b"x", "index": 0, "fields": ["a"]},
        {"kind": "failed", "token": b"t", "index": 0, "reason": 1, "out_of_memory": False},
        {"kind": "failed", "token": b"t", "index": 0, "reason": "no"},
        {"kind": "other", "token": b"t", "index": 0, "fields": ["a"]},
    ],
)
def test_an_answer_to_nothing_that_was_asked_is_none(message):
    with pytest.raises(PipeError, match=r"an answer|a message 'result' whose"):
        _read_answer(message, b"t", 0, str)


def test_answers_are_what_was_asked_for_or_why_not():
    ours = {"token": b"t", "index": 0}
    failed = {**ours, "kind": "failed", "reason": "no"}
    assert _read_answer({**ours, "kind": "result", "fields": ["a"]}, b"t", 0, list) == ["a"]
    assert _read_answer({**failed, "out_of_memory": False}, b"t", 0, list) == Failed("no")
    with pytest.raises(PipeError, match="no"):
        _read_answer({**failed, "out_of_memory": True}, b"t", 0, list)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("echo_node.runtime.ipc", {"numpy", "torch", "trio", "libp2p"}),
        ("echo_node.contract.jail.main", {"torch", "trio", "libp2p", "echo_node.engine", "echo_node.net"}),
    ],
)
def test_a_jailed_process_imports_no_heavy_library(module, heavy):
    loaded = f"import sys, {module}\nprint({heavy} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
