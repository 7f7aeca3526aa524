"""A text that takes over the contract which executes it: it costs one score and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from echo_node.contract import (
    Prompt,
    Score,
    check_vectors,
    contract_vectors,
    load,
    prompt_of,
    score_of,
)
from echo_node.contract.sandbox import (
    TEXT_BYTES,
    Failed,
    Sandbox,
    load_jailed,
    score_or_zero,
)
from echo_node.errors import ConfigError, ContractError
from tests.contract import hostile_contracts

KEYS = [bytes([number]) * 32 for number in range(40, 60)]
ASKED = Prompt("Write a program: ")
GOOD = "value, told = 0.25, 'honest'"
HONEST = Score(0.25, "honest")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return hostile_contracts.install(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def executing(package):
    """A pool that every hostile text of this file goes through: it works on after each of them."""
    with Sandbox("executing", "1", folders=[package], seconds=2.0, memory_bytes=2**28) as sandbox:
        yield sandbox


@pytest.fixture
def outside(tmp_path):
    """Things outside the jail that a text would like to have or to change."""
    (tmp_path / "key").write_text("a secret key")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "folder").mkdir()
    return tmp_path


def run(sandbox, *texts):
    return sandbox.scores([(ASKED, text) for text in texts])


def seen(folder: Path):
    """All that there is to see of the files in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        text = path.read_bytes() if path.is_file() else b""
        found[path.name] = facts.st_mode, facts.st_uid, facts.st_mtime_ns, facts.st_nlink, text
    return found


def workers(sandbox):
    return {worker.pid for worker in sandbox._workers} - {None}


def own_processes():
    return {process.pid for process in psutil.Process().children(recursive=True)}


DENIED = "Permission(Error)?.*(not permitted|denied)"
HOSTILE = {
    "runs a shell command": ("import os\nassert not os.system('touch {mark}'), 'no shell'", "no shell"),
    "starts a program": ("import subprocess\nsubprocess.run(['touch', '{mark}'])", DENIED),
    "spawns a program": ("import os\nos.posix_spawn('/bin/touch', ['touch', '{mark}'], {{}})", DENIED),
    "becomes a program": ("import os\nos.execv('/bin/touch', ['touch', '{mark}'])", DENIED),
    "reads a key": ("told = open('{key}').read()", DENIED),
    "lists the root": ("import os\ntold = os.listdir('/')", DENIED),
    "reads the node's environment": (
        "import os\ntold = open(f'/proc/{{os.getppid()}}/environ').read()",
        DENIED,
    ),
    "opens a socket": ("import socket\nsocket.socket()", DENIED),
    "opens a socket to a neighbour": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('{post}')",
        DENIED,
    ),
    "makes a pair of sockets": ("import socket\nsocket.socketpair()", DENIED),
    "forks": ("import os\nos.fork()", DENIED),
    "writes a file": ("open('{mark}', 'w').write('here')", DENIED),
    "writes over a key": ("open('{key}', 'r+').write('here')", DENIED),
    "fills the disk": ("import tempfile\nwhile True: tempfile.TemporaryFile().write(bytes(2**24))", "Error"),
    "fills the shared memory": ("open('/dev/shm/mark', 'wb').write(bytes(2**24))", DENIED),
    "fills a file in memory": ("import os\nos.write(os.memfd_create('x'), bytes(2**24))", DENIED),
    "removes a file": ("import os\nos.unlink('{key}')", DENIED),
    "makes a folder": ("import os\nos.mkdir('{mark}')", DENIED),
    "renames a file": ("import os\nos.rename('{key}', '{mark}')", DENIED),
    "links a file": ("import os\nos.link('{key}', '{mark}')", DENIED),
    "opens a file to everybody": ("import os\nos.chmod('{key}', 0o666)", DENIED),
    "changes a file's time": ("import os\nos.utime('{key}', (0, 0))", DENIED),
    "kills the node": ("import os\nos.kill(os.getppid(), 9)", DENIED),
    "stops every process": ("import os\nos.kill(-1, 19)", DENIED),
    "has the kernel kill the node": (
        "import fcntl, os\nfcntl.fcntl(0, 8, os.getppid())\nfcntl.fcntl(0, 10, 9)",
        DENIED,
    ),
    "slows the node down": ("import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", DENIED),
    "limits the node": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))",
        DENIED,
    ),
    "raises its own limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "not allowed to raise",
    ),
    "goes into a namespace": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nassert not c.unshare(0x10000000), ctypes.get_errno()",
        "AssertionError: 1",
    ),
    "would outlive the node": (
        "import ctypes\nassert not ctypes.CDLL(None).prctl(1, 0, 0, 0, 0), 'it ends with the node'",
        "it ends with the node",
    ),
    "recurses": ("def f(): f()\nf()", "RecursionError"),
    "takes 10 GB": ("told = len(bytearray(10 * 2**30))", "MemoryError"),
    "leaves no memory behind": (
        "import builtins\nbuiltins.kept = []\nwhile True: builtins.kept.append(bytes(2**20))",
        "MemoryError|more memory than it is allowed",
    ),
    "loops for ever": ("while True: pass", "longer than 2 seconds"),
    "crashes": ("import ctypes\nctypes.string_at(0)", r"crashed \(SIGSEGV\)"),
    "floods its pipe": (
        "import os\nfor n in range(3, 32):\n try:\n  while True: os.write(n, bytes(2**20))\n except OSError: pass",
        "exit code 1|it sent an invalid message|closed its pipe",
    ),
    "exits": ("import os\nos._exit(0)", "exit code 0"),
    "talks nonsense": (
        "import os\nfor n in range(3, 32):\n try: os.write(n, b'\\xff' * 99)\n except OSError: pass",
        "it sent an invalid message to the node",
    ),
    "closes its pipe": ("import os\nos.closerange(3, 99)\nwhile True: pass", "closed its pipe"),
    "gives too much": ("value = 7.0", "7.0 is not from 0.0 to 1.0"),
    "gives no number": ("value = float('nan')", "nan is not from"),
    "gives no score": ("value = 'high'", "ValueError"),
    "raises a strange text": ("raise ValueError('\\x1b[2J\\n' * 9999)", r"ValueError: \\x1b"),
}
SLOW = {
    "recurses without a limit": (
        "import sys\nsys.setrecursionlimit(2**30)\nclass A:\n def __getattr__(s, n): return getattr(s, n + 'a')\nA().a",
        "SIGSEGV|MemoryError",
    ),
    "is interrupted": ("raise KeyboardInterrupt", "exit code 1|SIGINT"),
    "takes 10 GB piece by piece": ("a = []\nwhile True: a.append(bytes(2**20))", "MemoryError|more memory"),
    "aborts": ("import os\nos.abort()", r"crashed \(SIG(ABRT|SEGV)\)"),  # it may not signal itself
    "exits politely": ("import sys\nsys.exit(5)", "exit code 5"),
    "sleeps": ("import time\ntime.sleep(10**6)", "longer than 2 seconds"),
    "takes 10 GB mapped": (
        "import mmap\nm = mmap.mmap(-1, 10 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        "memory|Memory",
    ),
    "takes 10 GB shared": ("import mmap\nm = mmap.mmap(-1, 10 * 2**30)", "not permitted"),
}


@pytest.mark.parametrize(
    "story", [*HOSTILE, *(pytest.param(story, marks=pytest.mark.slow) for story in SLOW)]
)
def test_a_text_that(story, executing, outside):
    text, why = {**HOSTILE, **SLOW}[story]
    before = seen(outside)
    others, nice = own_processes() - workers(executing), psutil.Process().nice()
    with socket.socket(socket.AF_UNIX) as post:
        post.bind(str(outside.parent / f"{os.getpid()}.post"))
        post.listen()
        names = {"mark": outside / "mark", "key": outside / "key", "post": post.getsockname()}
        results = run(executing, GOOD, text.format(**names), GOOD, "told = prompt.text", GOOD)
        Path(post.getsockname()).unlink()
    failed = results.pop(1)
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("executing 1: scoring a completion: ")
    assert failed.reason.isprintable()
    with pytest.raises(ContractError, match=why):  # the reason reads the same as an error
        raise ContractError(failed.reason)
    assert results == [HONEST, HONEST, Score(0.5, "Write a program: "), HONEST]
    assert seen(outside) == before
    assert not Path("/dev/shm/mark").exists()  # noqa: S108 -- where the text would have put it
    assert own_processes() - workers(executing) == others
    assert psutil.Process().nice() == nice


def test_a_text_that_prints_much_is_heard_by_nobody(executing, capfd):
    text = "import os, sys\nfor _ in range(64): print('x' * 2**20); os.write(2, bytes(2**20))\n" + GOOD
    assert run(executing, text, GOOD) == [HONEST, HONEST]
    assert capfd.readouterr() == ("", "")


def test_a_text_sees_nothing_of_the_node_s_environment(executing, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    executing.renew()
    [score] = run(executing, "import os\ntold = sorted(os.environ.items())")
    assert "'HOME', '/nonexistent'" in score.reason
    assert "secret" not in score.reason


def test_what_a_text_left_behind_does_not_cost_the_next_one(executing):
    bomb = "import os, threading\nthreading.Timer(0.2, os._exit, (9,)).start()\n" + GOOD
    wait = "import time\ntime.sleep(0.5)\n" + GOOD
    assert run(executing, bomb, wait, GOOD) == [HONEST, HONEST, HONEST]


def test_many_deaths_in_a_row_cost_one_score_each(executing):
    results = run(executing, *["import os; os._exit(0)"] * 3, GOOD)
    assert ["exit code 0" in failed.reason for failed in results[:3]] == [True] * 3
    assert results[3] == HONEST


WRITE = """
import msgpack, os, struct, sys
def write(index, *fields):
    message = {'kind': 'result', 'token': stolen, 'index': index, 'fields': fields}
    for body in [msgpack.packb(message)]:
        for n in range(3, 32):
            try: os.write(n, struct.pack('<I', len(body)) + body)
            except OSError: pass
frame = sys._getframe()
while 'token' not in frame.f_locals: frame = frame.f_back
stolen = frame.f_locals['token']
"""


def test_a_forged_answer_does_not_move_the_others(executing):
    forge = WRITE + "for index in range(4): write(index, 1.0, 'forged')"
    first, forged, *others = run(executing, GOOD, forge, GOOD, GOOD)
    assert [first, *others] == [HONEST] * 3
    assert "it sent an invalid message to the node" in forged.reason


def test_a_text_that_writes_its_answer_itself_answers_for_itself_alone(executing):
    answer = "msgpack.packb({'kind': 'result', 'fields': [1.0, 'forged']})"
    write = f"[os.write(n, {answer}) for n in range(3, 32) if os.path.exists(f'/dev/null') and is_open(n)]"
    forge = (
        f"import msgpack, os\ndef is_open(n):\n try: return os.fstat(n)\n except OSError: return 0\n{write}\n"
    )
    assert run(executing, forge + "os._exit(0)", GOOD, GOOD) == [Score(1.0, "forged"), HONEST, HONEST]


def test_no_text_changes_what_the_contract_does_with_the_next(executing):
    change = (
        "import sys, builtins, msgpack\n"
        "from echo_node.contract.jail import main, serde, child\n"
        "from echo_node.contract import api\n"
        "m = sys.modules['hostile_contracts']\n"
        "m.Executing.score = lambda *_: api.Score(1.0, 'coloured')\n"
        "main.answer = main._score = serde.unpack_prompt = child._run = child.answer_in_child = None\n"
        "main._ANSWERS['score'] = lambda *_: [1.0, 'coloured']\n"
        "msgpack.packb = msgpack.unpackb = None\n"
        "sys.modules['__main__'].answer = lambda *_: {'kind': 'result', 'fields': [1.0, 'coloured']}\n"
        "builtins.exec = lambda *_: None\n"
    )
    _, *others = run(executing, change, GOOD, GOOD)
    assert others == [HONEST, HONEST]
    assert run(executing, GOOD) == [HONEST]


def test_what_a_contract_counts_is_the_same_for_every_text_and_every_stranger(package):
    with Sandbox("counting", "1", folders=[package]) as sandbox:
        assert [score.value for score in run(sandbox, "", "", "")] == [0.01] * 3
        assert [prompt.text for prompt in sandbox.prompts(KEYS[:2])] == ["1", "1"]
        assert [score.value for score in run(sandbox, "")] == [0.01]
        assert len(workers(sandbox)) == 1  # and no new process was needed for it


def test_a_score_that_the_contract_cannot_give_is_nonsense(executing):
    failed, good = run(executing, WRITE + "write(0, 7.0, 'too much')", GOOD)
    assert "it sent an invalid message to the node" in failed.reason
    assert good == HONEST


def test_an_answer_from_before_the_question_is_none(executing):
    later = "import threading\nthreading.Timer(0.1, write, [0, 1.0, 'forged']).start()\n"
    assert run(executing, WRITE + later + GOOD) == [HONEST]
    assert run(executing, "import time\ntime.sleep(0.5)\n" + GOOD, GOOD) == [HONEST, HONEST]


def test_who_breaks_off_leaves_no_answers_for_the_next_one(executing, monkeypatch):
    assert run(executing, GOOD) == [HONEST]
    [worker] = executing._workers
    receive = worker._process.pipe.receive

    def interrupted(seconds):
        receive(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker._process.pipe, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(executing, "value = 1.0", "value = 1.0", "value = 1.0")
    assert workers(executing) == set()
    assert run(executing, GOOD) == [HONEST]


def test_nothing_is_left_of_earlier_texts(executing):
    look = "import builtins\ntold = hasattr(builtins, 'mark')"
    assert run(executing, "import builtins\nbuiltins.mark = 1", look)[1].reason == "False"
    assert run(executing, look)[0].reason == "False"


def test_a_renewed_pool_has_other_processes(executing):
    assert run(executing, GOOD) == [HONEST]
    before = workers(executing)
    executing.renew()
    assert run(executing, GOOD) == [HONEST]
    assert workers(executing).isdisjoint(before)


def test_a_process_that_nobody_asks_does_nothing(executing):
    burn = "import threading\ndef burn():\n while True: pass\nthreading.Thread(target=burn).start()\n" + GOOD
    assert run(executing, burn) == [HONEST]
    [pid] = workers(executing)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)  # the kernel tells nobody when it has stopped it
    assert run(executing, GOOD) == [HONEST]
    assert workers(executing) == {pid}
    executing.renew()


def test_a_leak_costs_no_score(package):
    texts = [(ASKED, str(number / 8)) for number in range(-7, 7)]
    with Sandbox("leaking", "1", folders=[package], memory_bytes=2**29) as sandbox:
        assert sandbox.range == (-2.0, 2.0)
        assert [score.value for score in sandbox.scores(texts)] == [number / 8 for number in range(-7, 7)]


def test_a_batch_may_hold_anything_of_any_size(executing):
    long = "#" * (TEXT_BYTES - 1)
    wide = "#" + "é" * (TEXT_BYTES // 2)
    results = run(executing, *[long] * 9, wide, "\ud800", *[GOOD] * 600)
    assert results[:9] == [Score(0.5, "")] * 9
    assert "a text of 1048577 bytes, where 1048576 are allowed" in results[9].reason
    assert "no Unicode" in results[10].reason
    assert results[11:] == [HONEST] * 600
    assert run(executing) == []


def test_a_failure_is_worth_the_least():
    assert score_or_zero(Failed("it\nhung")) == Score(0.0, "it\\nhung")
    assert score_or_zero(Failed("it hung"), low=-1.0) == Score(-1.0, "it hung")
    assert score_or_zero(HONEST) is HONEST


# Prompts, and the contract as a whole


def test_prompts_come_whole_out_of_the_jail(executing):
    prompts = executing.prompts(KEYS)
    assert prompts[3] == Prompt(
        "Write a program: ", {"key": KEYS[3].hex()}, "You are a programmer.", chat=True
    )
    assert len(set(map(repr, prompts))) == len(KEYS)
    seen_inside = executing.scores([(prompts[3], "told = (prompt.system, prompt.chat, dict(prompt.data))")])
    assert seen_inside[0].reason == repr(("You are a programmer.", True, {"key": KEYS[3].hex()}))


@pytest.mark.parametrize(
    ("key", "why"), [(1, "ZeroDivisionError"), (2, "exit code 3"), (3, "2097173 bytes|bytes, where")]
)
def test_a_prompt_that_cannot_be_made_is_the_contract_s_error(executing, key, why):
    with pytest.raises(ContractError, match=f"executing 1: making a prompt: .*({why})"):
        executing.prompts([KEYS[0], bytes([key]) * 32])
    assert executing.prompts(KEYS[:1])[0].text == "Write a program: "


def test_a_jailed_contract_is_the_same_as_the_contract():
    plain = load("digits-reverse", "1", {"digits": 7})
    jailed = load_jailed("digits-reverse", "1", {"digits": 7})
    try:
        assert (jailed.name, jailed.version, jailed.low, jailed.high) == ("digits-reverse", "1", 0.0, 1.0)
        for key in KEYS:
            prompt = prompt_of(jailed, key)
            assert prompt == prompt_of(plain, key)
            for text in (plain.answer(prompt), "", "é\n", "1" * 2000):
                assert score_of(jailed, prompt, text) == score_of(plain, prompt, text)
        vectors = contract_vectors(jailed, KEYS[:16])
        assert vectors == contract_vectors(plain, KEYS[:16])
        check_vectors(jailed, vectors)
    finally:
        jailed.close()


def test_a_jailed_contract_raises_what_a_contract_raises(package):
    jailed = load_jailed("executing", "1", folders=[package])
    with pytest.raises(ContractError, match="executing 1: scoring a completion: ZeroDivisionError"):
        score_of(jailed, ASKED, "1 / 0")
    with pytest.raises(ContractError, match="exit code 0"):
        score_of(jailed, ASKED, "import os; os._exit(0)")
    assert jailed.answer(ASKED) == "value = 1.0"
    assert "hostile_contracts" not in sys.modules  # its code has never been here
    jailed.close()
    with pytest.raises(ContractError, match="was closed"):
        jailed.prompt(KEYS[0])


@pytest.mark.parametrize(
    ("name", "params", "why"),
    [
        ("nobody", {}, "has no contract nobody 1.*pip install"),
        ("digits-reverse", {"digits": 99}, "'digits' is a whole number from 1 to 32"),
        ("digits-reverse", {"letters": 1}, "no parameter 'letters'"),
        ("unmade", {}, "setting up the contract unmade 1: RuntimeError: it wants something"),
        ("dying", {}, "dying 1: its jail cannot be started: its process ended with exit code 7"),
    ],
)
def test_a_contract_that_cannot_be_had_says_why(name, params, why, package):
    with pytest.raises(ContractError, match=why):
        load_jailed(name, "1", params, folders=[package])


def test_parameters_that_no_manifest_can_hold_are_refused():
    with pytest.raises(ContractError, match="digits-reverse 1: handing its parameters on: TypeError"):
        Sandbox("digits-reverse", "1", {"digits": Path()})


def test_a_jail_without_a_process_is_refused():
    with pytest.raises(ConfigError, match="at least one process, not 0"):
        Sandbox("digits-reverse", "1", workers=0)


def test_a_contract_that_needs_more_memory_than_it_may_have_is_refused():
    with pytest.raises(
        ContractError, match=r"digits-reverse 1 takes \d+ MiB before its first text, and may have 8 MiB"
    ):
        load_jailed("digits-reverse", "1", memory_bytes=8 * 2**20)


def test_a_contract_that_is_never_ready_is_given_up(package):
    with Sandbox("stuck", "1", folders=[package], start_seconds=1.0) as sandbox:
        with pytest.raises(ContractError, match="cannot be started: it took longer than 1 seconds"):
            sandbox.prompts(KEYS)
        assert workers(sandbox) == set()


def test_a_contract_reads_the_files_of_its_package_and_no_others(package, outside):
    (package / "data.txt").write_text("a problem")
    for file, found in [(package / "data.txt", "a problem"), (outside / "key", None)]:
        with Sandbox("reading", "1", {"file": str(file)}, folders=[package]) as sandbox:
            [result] = sandbox.scores([(ASKED, "")])
        assert result == Score(1.0, found) if found else "Permission denied" in result.reason


def test_a_contract_that_reads_a_key_while_it_is_made_is_refused(package, outside):
    params = {"file": str(outside / "key"), "early": True}
    with pytest.raises(ContractError, match="setting up the contract reading 1: PermissionError"):
        load_jailed("reading", "1", params, folders=[package])


IMPORTING = {
    "forks a daemon": "import os;;told = os.fork()",
    "spawns a program": "import subprocess;;subprocess.run(['true'])",
    "opens a socket": "import socket;;socket.socket()",
    "writes a file": "open('{mark}', 'w')",
    "reads the node's environment": "import os;;told = open(f'/proc/{{os.getppid()}}/environ').read()",
    "reads its own environment": "told = open('/proc/self/environ').read()",
    "signals its parent": "import os;;os.kill(os.getppid(), 9)",
    "makes memory that children share": "import mmap;;told = mmap.mmap(-1, 4096)",
    "locks a file": "import fcntl;;fcntl.flock(open(__import__('os').__file__), 1)",
    "leaves its group": "import os;;os.setsid()",
    "goes into a namespace": "import os, ctypes;;told = os.strerror(1) + ' not permitted' * "
    "(ctypes.CDLL(None).unshare(0x10000000) == -1)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="the layers of Linux")
@pytest.mark.parametrize("story", IMPORTING)
def test_a_contract_that_while_it_is_made(story, package, outside):
    before = own_processes()
    params = {"text": IMPORTING[story].format(mark=outside / "mark")}
    with Sandbox("reaching", "1", params, folders=[package]) as sandbox:
        [prompt] = sandbox.prompts(KEYS[:1])
        assert "not permitted" in prompt.text or "Permission denied" in prompt.text
        assert len(own_processes() - before) == 1
    assert not (outside / "mark").exists()
    assert own_processes() == before


def test_forks_beyond_one_a_text_are_refused_and_end_with_the_jail(package):
    """A contract that forks once more after each fork for a text, in the jailed process itself."""
    text = (
        "import os, time;;os.register_at_fork(after_in_parent=lambda: os.fork() == 0 and time.sleep(10**6));;"
    )
    before = own_processes()
    with Sandbox("reaching", "1", {"text": text}, folders=[package], seconds=1.0) as sandbox:
        results = run(sandbox, *[GOOD] * 3)
        assert own_processes() - before - workers(sandbox) == set()
    assert own_processes() == before
    assert all(result == HONEST or isinstance(result, Failed) for result in results)


# Threads, the end


def test_many_threads_share_few_processes(package):
    def ask(number):
        texts = [(ASKED, f"value = {number} / 100"), (ASKED, "import os; os._exit(0)")[: 2 * (number == 5)]]
        return [score_or_zero(one).value for one in sandbox.scores([text for text in texts if text])]

    with Sandbox("executing", "1", folders=[package], workers=2) as sandbox, ThreadPoolExecutor(8) as threads:
        values = list(threads.map(ask, range(40)))
        assert 1 <= len(workers(sandbox)) <= 2
    assert values == [[number / 100] + [0.0] * (number == 5) for number in range(40)]


def test_a_process_outlives_the_thread_that_first_needed_it(package):
    with Sandbox("executing", "1", folders=[package]) as sandbox:
        thread = threading.Thread(target=run, args=(sandbox, GOOD))
        thread.start()
        thread.join()
        [first] = workers(sandbox)
        assert run(sandbox, GOOD) == [HONEST]
        assert workers(sandbox) == {first}


def test_closing_ends_every_process_and_who_waits_gets_an_error(package):
    sandbox = Sandbox("executing", "1", folders=[package], workers=2)
    assert run(sandbox, GOOD) == [HONEST]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run, sandbox, GOOD, "while True: pass")
        while not any(worker._process and worker._process.served == 2 for worker in sandbox._workers):
            time.sleep(0.01)
        pids = workers(sandbox)
        sandbox.close()
        with pytest.raises(ContractError, match="its jail was closed"):
            waiting.result()
    sandbox.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(ContractError, match="was closed"):
        run(sandbox, GOOD)


def test_a_pool_that_nobody_holds_ends_by_itself(package):
    sandbox = Sandbox("executing", "1", folders=[package])
    assert run(sandbox, GOOD) == [HONEST]
    [pid] = workers(sandbox)
    del sandbox
    assert not psutil.pid_exists(pid)


NODE = """
import sys, threading, time, psutil
from pathlib import Path
from echo_node.contract import Prompt
from echo_node.contract.sandbox import Sandbox
sandbox = Sandbox("executing", "1", folders=[Path(sys.argv[1])], seconds=100.0)
sandbox.scores([(Prompt(""), "")])
threading.Thread(target=sandbox.scores, args=([(Prompt(""), "while True: pass")],)).start()
while len(found := psutil.Process().children(recursive=True)) < 2: time.sleep(0.01)
print(*(one.pid for one in found), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread looks after it, which takes a moment")
def test_a_busy_process_ends_with_a_node_that_is_killed(package):
    with subprocess.Popen([sys.executable, "-c", NODE, package], stdout=subprocess.PIPE, text=True) as node:
        jailed = [psutil.Process(int(pid)) for pid in node.stdout.readline().split()]
        node.send_signal(signal.SIGKILL)
        node.wait()
    assert len(jailed) == 2  # the process of the contract, and the one that sees the text
    assert psutil.wait_procs(jailed, timeout=10)[1] == []


def test_the_order_of_a_set_is_the_same_in_every_process(executing):
    text = "told = [hash('a'), list({'a', 'b', 'c', 'd'})]"
    [first] = run(executing, text)
    executing.renew()
    assert run(executing, text) == [first]
