"""An engine in its own process samples as one in this process, and its faults are errors here."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from echo_node.engine.base import (
    Change,
    Claim,
    EngineStoppedError,
    Prefix,
    TensorBytes,
    Update,
    generate_groups,
)
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.worker import partial_draws, rpc_generate
from echo_node.engine.worker import process as processes
from echo_node.engine.worker.client import Backoff, WorkerEngine
from echo_node.engine.worker.partial_draws import PartialDraws
from echo_node.engine.worker.process import EngineProcess
from echo_node.errors import ConfigError, EngineError
from echo_node.runtime.threads import run_stoppable
from protocol import sampling
from tests.engine import models
from tests.engine.models import HEAD, LIMITS

ROOT = Path(__file__).resolve().parents[2]
NEW = b"n" * 32
LONG = dataclasses.replace(LIMITS, max_tokens=400, end_tokens=frozenset())
SHORT = dataclasses.replace(LIMITS, max_tokens=1)
LIGHT = "llama/f16" if find_spec("llama_cpp") else "torch/f32"  # which starts ten times as fast
QUICK = Backoff(first_seconds=0.01, most_seconds=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.folder(tmp_path_factory.mktemp("worker"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def weights(folder):
    return models.weights(folder)


def spec_of(folder, engine_class="torch/f32", rows=12):
    return EngineSpec(engine_class, folder, device="cpu", rows=rows, threads=1)


@pytest.fixture(scope="module")
def shared(folder):
    """One engine for all tests that leave it intact.

    The thread that starts it ends at once, as trio's threads may.
    """
    stages = []
    with WorkerEngine(spec_of(folder), progress=stages.append, backoff=dataclasses.replace(QUICK)) as engine:
        thread = threading.Thread(target=engine.start)
        thread.start()
        thread.join()
        assert stages == ["importing torch", "building the model", "ready"]
        yield engine


@pytest.fixture
def engine(shared, weights):
    shared.load(HEAD, weights)
    return shared


@pytest.fixture(scope="module")
def local(folder, weights):
    engine = make_engine(spec_of(folder))
    engine.load(HEAD, weights)
    return engine


def mixed(seed=0):
    """A short one and long ones: while the short one is out, the long ones run."""
    short = models.requests(1, group_size=1, limits=SHORT, seed=seed)
    return short + models.requests(3, group_size=2, limits=LONG, lengths=(3, 8), seed=seed + 1)


def flat(groups):
    return [(d.ids.tolist(), d.logprobs.tolist(), d.finish, d.spans) for group in groups for d in group]


def take_all(finished, act):
    """Draw everything, and do something after each completion."""
    for _ in finished:
        act()


def assert_gone(pid):
    assert not psutil.pid_exists(pid), f"process {pid} is still there"


def update_to(
    target: dict[str, TensorBytes], opened: list[str] | None = None, *, since=HEAD, head_id=NEW
) -> Update:
    @contextmanager
    def changes(_granule):
        if opened is not None:
            opened.append("open")
        yield (
            Change(name, np.arange(len(tensor.data) // 2), np.frombuffer(tensor.data, "<u2"))
            for name, tensor in target.items()
        )
        if opened is not None:
            opened.append("closed")

    return Update(since, head_id, changes)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    at = tmp_path_factory.mktemp("other")
    return models.weights(models.folder(at, seed=1, max_position_embeddings=4096))


# Draws


def test_a_list_gives_the_draws_of_an_engine_in_this_process_bit_for_bit(engine, local):
    requests = models.requests(9, lengths=(3, 7), seed=4)  # 45 completions on 12 rows
    there = flat(generate_groups(engine, requests))
    assert there == flat(generate_groups(local, requests))
    assert len(there) == 45
    assert flat(generate_groups(engine, requests)) == there
    lazily = {(each.request, each.completion): each.draw for each in engine.generate(iter(requests))}
    assert flat([[lazily[place] for place in sorted(lazily)]]) == there


def test_scores_are_the_same_too(engine, local):
    prompt, ids = models.requests(1)[0].prompt, np.array([4, 9, 3])
    claims = [Claim(prompt, ids), Claim(prompt[:1], ids[:1])]
    there, here = engine.score_many(claims, LIMITS), local.score_many(claims, LIMITS)
    there, here = [*there, engine.score(prompt, ids, LIMITS)], [*here, local.score(prompt, ids, LIMITS)]
    for name in ("logprobs", "low", "high", "squares_low", "squares_high", "squares"):
        assert [getattr(each, name).tobytes() for each in there] == [
            getattr(each, name).tobytes() for each in here
        ]
    assert engine.score_many([], LIMITS) == []


def test_an_engine_of_llama_cpp_draws_the_same_in_its_own_process(folder, weights):
    pytest.importorskip("llama_cpp")
    spec, requests = spec_of(folder, "llama/f16"), models.requests(5, lengths=(3, 7))
    here = make_engine(spec)
    here.load(HEAD, weights)
    with WorkerEngine(spec) as engine:
        engine.load(HEAD, weights)
        assert flat(generate_groups(engine, requests)) == flat(generate_groups(here, requests))
    here.close()


def test_a_short_completion_arrives_before_a_long_one_ends(engine):
    order = [(each.request, each.draw.ids.size) for each in engine.generate(mixed())]
    assert order[0] == (0, 1)
    assert sorted(order[1:]) == [(1, 400), (1, 400), (2, 400), (2, 400), (3, 400), (3, 400)]


def test_requests_are_taken_as_there_is_room_and_no_sooner(engine):
    taken = []

    def source():
        for place, request in enumerate(models.requests(12, group_size=4)):
            taken.append(place)
            yield request

    done = 0
    for _ in engine.generate(source()):
        done += 1
        assert 4 * len(taken) <= done + 12 + 3  # rows, and the rest of a group that is partly in
    assert (done, len(taken)) == (48, 12)


def test_the_engine_describes_itself(engine, local):
    list(engine.generate(models.requests(1)))
    told = engine.describe()
    assert dataclasses.replace(told, memory_bytes=0, tokens_per_second=None) == dataclasses.replace(
        local.describe(), memory_bytes=0, tokens_per_second=None
    )
    assert told.memory_bytes > 0
    assert told.tokens_per_second > 0
    assert engine.engine_class == "torch/f32"


# Stopping and breaking off


def test_a_generation_can_be_stopped_and_the_engine_used_again(engine, local):
    stopped = []
    with pytest.raises(EngineStoppedError):
        take_all(engine.generate(mixed(), stop=lambda: bool(stopped)), lambda: stopped.append(True))
    assert len(stopped) == 1
    assert engine.loaded == HEAD
    requests = models.requests(4)
    assert flat(generate_groups(engine, requests)) == flat(generate_groups(local, requests))


def test_a_generation_that_is_dropped_leaves_a_clean_pipe(engine, local):
    pid = engine.pid
    requests = models.requests(4)
    expected = flat(generate_groups(local, requests))
    for taken in range(3):
        running = engine.generate(mixed())
        for _ in range(taken):
            next(running)
        running.close()
        assert flat(generate_groups(engine, requests)) == expected
    assert engine.pid == pid


def test_whatever_the_source_of_requests_raises_passes_through(engine, local):
    def source():
        yield from models.requests(3)
        raise LookupError("no more prompts")

    with pytest.raises(LookupError, match="no more prompts"):
        list(engine.generate(source()))
    requests = models.requests(2)
    assert flat(generate_groups(engine, requests)) == flat(generate_groups(local, requests))


def test_a_second_call_at_the_same_time_is_refused(engine):
    running = engine.generate(mixed())
    next(running)
    with pytest.raises(EngineError, match="scoring while another call runs"):
        engine.score(np.array([1]), np.array([1]), LIMITS)
    running.close()


async def test_a_call_in_a_thread_of_trio_ends_with_its_task(engine):
    import trio

    began = trio.Event()

    def work(stop):
        for _ in engine.generate(mixed(), stop=stop):
            trio.from_thread.run_sync(began.set)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_stoppable, work)
        await began.wait()
        nursery.cancel_scope.cancel()
    assert engine.describe().rows == 12


# Bad input


def test_a_bad_request_is_refused_before_any_work_and_the_process_lives(engine, local):
    pid = engine.pid
    good = models.requests(2)
    bad = dataclasses.replace(good[1], prompt=np.array([99]))
    for requests in ([good[0], bad], iter([bad])):
        with pytest.raises(EngineError, match="holds id 99"):
            next(engine.generate(requests))
    with pytest.raises(EngineError, match="request 1"):
        next(engine.generate([good[0], dataclasses.replace(good[1], group_size=0)]))
    with pytest.raises(EngineError, match="no row of token ids"):
        next(engine.generate([dataclasses.replace(good[1], prompt=np.array([0.5]))]))
    with pytest.raises(EngineError, match="temperature"):
        engine.score(np.array([1]), np.array([1]), dataclasses.replace(LIMITS, temperature=0.0))
    assert engine.pid == pid
    assert flat(generate_groups(engine, good)) == flat(generate_groups(local, good))


def test_weights_that_do_not_fit_are_refused_and_the_process_lives(engine, weights):
    pid, (first, *_) = engine.pid, weights
    cut = {**weights, first: dataclasses.replace(weights[first], data=weights[first].data[:-2])}
    with pytest.raises(EngineError, match="bytes long"):
        engine.load(NEW, cut)
    with pytest.raises(EngineError, match="does not have"):
        engine.load(NEW, {**weights, "more": weights[first]})
    assert (engine.pid, engine.loaded) == (pid, HEAD)


def test_weights_that_break_off_name_no_head(engine, weights):
    class Torn(dict):
        reads = 0

        def __getitem__(self, name):
            Torn.reads += 1
            if Torn.reads == 5:
                raise OSError("the disk is gone")
            return super().__getitem__(name)

    pid = engine.pid
    with pytest.raises(OSError, match="the disk is gone"):
        engine.load(NEW, Torn(weights))
    assert engine.pid == pid
    engine.load(NEW, weights)
    assert engine.loaded == NEW


def test_an_engine_without_weights_says_so(folder):
    with (
        WorkerEngine(spec_of(folder, LIGHT)) as engine,
        pytest.raises(EngineError, match="the engine has no weights"),
    ):
        next(engine.generate(models.requests(1)))


def test_a_model_that_cannot_be_built_is_one_clear_error_and_no_process(tmp_path):
    (tmp_path / "config.json").write_text("{")
    before = psutil.Process().children()
    engine = WorkerEngine(spec_of(tmp_path, LIGHT))
    with pytest.raises(EngineError, match=tmp_path.name):
        engine.start()
    assert engine.pid is None
    assert psutil.Process().children() == before
    engine.close()


def test_a_class_that_nobody_knows_is_refused_at_once(folder):
    with pytest.raises(ConfigError, match="no engines of the class 'abacus/f8'"):
        WorkerEngine(spec_of(folder, "abacus/f8"))


# New weights


def test_a_patch_leads_to_the_draws_of_a_load(engine, folder, other_weights):
    fresh = make_engine(spec_of(folder))
    fresh.load(NEW, other_weights)
    opened = []
    engine.patch(update_to(other_weights, opened))
    assert (engine.loaded, opened) == (NEW, ["open", "closed"])
    requests = models.requests(4)
    assert flat(generate_groups(engine, requests)) == flat(generate_groups(fresh, requests))
    with pytest.raises(EngineError, match="other weights than those that are in"):
        engine.patch(update_to(other_weights, since=HEAD))
    assert engine.loaded == NEW


def test_a_patch_in_flight_loses_nothing_and_marks_every_token(engine, local, folder, other_weights):
    asked, opened = [], []

    def news():
        asked.append(None)
        return update_to(other_weights, opened) if len(asked) == 2 else None

    requests = mixed()
    groups: dict[tuple[int, int], object] = {}
    for finished in engine.generate(requests, news=news):
        groups[finished.request, finished.completion] = finished.draw
    assert (engine.loaded, opened) == (NEW, ["open", "closed"])
    assert len(groups) == 7
    fresh = make_engine(spec_of(folder))
    fresh.load(NEW, other_weights)
    switched = 0
    for (request, completion), draw in groups.items():
        u = sampling.uniforms(requests[request].slot_key, completion, draw.ids.size)
        ends = [*(span.start for span in draw.spans[1:]), draw.ids.size]
        switched += len(draw.spans) == 2
        for span, end in zip(draw.spans, ends, strict=True):
            judge = local if span.head_id == HEAD else fresh
            scores = judge.score(requests[request].prompt, draw.ids, requests[request].limits)
            assert scores.replay(u).d[span.start : end].max(initial=0) < 1e-4
    assert switched == 6


def test_a_patch_that_breaks_off_in_flight_ends_the_generation_and_names_no_head(engine, weights):
    @contextmanager
    def changes(_granule):
        def torn():
            yield Change(next(iter(weights)), np.arange(2), np.zeros(2, np.uint16))
            raise OSError("the disk is gone")

        yield torn()

    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.generate(mixed(), news=lambda: Update(HEAD, NEW, changes)))
    assert engine.loaded is None
    with pytest.raises(EngineError, match="no weights"):
        next(engine.generate(models.requests(1)))


# Deaths


def check_death(engine, folder, weights, death):
    """Kill it in the middle of a batch, and do the work again."""
    requests = mixed(seed=8)
    engine.load(HEAD, weights)
    undisturbed = flat(generate_groups(engine, requests))
    first = engine.pid
    with pytest.raises(EngineError) as caught:
        take_all(engine.generate(requests), lambda: os.kill(first, death))
    assert f"the engine {engine.engine_class} of {folder.name} died while generating" in caught.value.what
    assert f"killed by {death.name}" in caught.value.what
    if death == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in caught.value.what
    assert "load the weights" in caught.value.advice
    assert engine.loaded is None
    assert_gone(first)
    assert engine.backoff.failures == 1
    engine.load(HEAD, weights)
    assert engine.backoff.failures == 1  # loading is not yet a success
    assert flat(generate_groups(engine, requests)) == undisturbed
    assert engine.backoff.failures == 0
    assert engine.pid != first


def test_a_process_that_is_killed_in_a_batch_is_an_error_and_the_work_can_be_done_again(
    engine, folder, weights
):
    check_death(engine, folder, weights, signal.SIGKILL)


def test_what_a_process_that_died_had_drawn_is_not_drawn_again(folder, weights, monkeypatch):
    """It is killed a while into long completions; the next process goes on where it was."""
    ends = dataclasses.replace(LIMITS, max_tokens=4_000, end_tokens=frozenset())
    requests = models.requests(2, group_size=2, limits=ends, lengths=(3, 8), seed=2)
    sent = []
    pack = rpc_generate.pack_request
    monkeypatch.setattr(rpc_generate, "pack_request", lambda request: sent.append(request) or pack(request))
    with WorkerEngine(spec_of(folder, LIGHT), backoff=dataclasses.replace(QUICK)) as engine:
        engine.load(HEAD, weights)

        def kill():
            if engine._partial._tokens >= 600 and engine.pid is not None:
                os.kill(engine.pid, signal.SIGKILL)
            return False

        with pytest.raises(EngineError, match="died while generating"):
            list(engine.generate(requests, stop=kill))
        engine.load(HEAD, weights)
        groups = generate_groups(engine, requests)
        resumed = [prefix for request in sent[2:] for prefix in request.drawn]
        assert sum(prefix.ids.size for prefix in resumed) >= 600
        for request, group in zip(sent[2:], groups, strict=True):
            for prefix in request.drawn:
                draw = group[prefix.completion]
                assert draw.ids[: prefix.ids.size].tolist() == prefix.ids.tolist()
            assert [draw.ids.size for draw in group] == [4_000, 4_000]
        assert engine._partial._tokens == 0, "and nothing is kept when all is done"


def test_what_was_drawn_under_other_weights_is_drawn_again():
    kept = PartialDraws()
    kept.begin(HEAD)
    (request,) = models.requests(1, group_size=2, limits=LONG)
    assert kept.resumed(request) is request
    kept.add(0, Prefix(1, np.arange(3), np.zeros(3)))
    kept.begin(HEAD)
    assert [each.ids.tolist() for each in kept.resumed(request).drawn] == [[0, 1, 2]]
    kept.begin(NEW)
    assert kept.resumed(request).drawn == ()


def test_tokens_that_are_kept_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(partial_draws, "MOST_TOKENS", 10)
    kept = PartialDraws()
    kept.begin(HEAD)
    (request,) = models.requests(1, group_size=3, limits=LONG)
    kept.resumed(request)
    for completion in (0, 1, 2, 0, 1, 2):
        kept.add(0, Prefix(completion, np.arange(3), np.zeros(3)))
        assert kept._tokens <= 10
    kept.begin(HEAD)
    for prefix in kept.resumed(request).drawn:
        assert prefix.ids.tolist() in ([0, 1, 2], [0, 1, 2, 0, 1, 2]), "and none has a gap"


@pytest.mark.slow
def test_a_process_of_torch_that_crashes_in_a_batch_is_an_error_too(engine, folder, weights):
    check_death(engine, folder, weights, signal.SIGSEGV)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_every_death_in_a_batch_is_named_and_leaves_nothing_behind(folder, weights, death):
    with WorkerEngine(spec_of(folder, LIGHT), backoff=dataclasses.replace(QUICK)) as engine:
        check_death(engine, folder, weights, death)
        pid = engine.pid
    assert_gone(pid)


def test_a_process_without_memory_is_an_error_and_the_work_can_be_done_again(tmp_path):
    folder = models.folder(tmp_path, max_position_embeddings=8192, intermediate_size=2**15)
    weights = models.weights(folder)
    ceiling = 800 * 2**20
    at_once = dataclasses.replace(
        LIMITS, max_tokens=8000, end_tokens=frozenset(range(32))
    )  # room for long rows
    first, second = models.requests(2, group_size=1, limits=dataclasses.replace(LONG, max_tokens=100))
    first = dataclasses.replace(first, limits=at_once)
    huge = dataclasses.replace(second, prompt=np.ones(8000, np.int64), limits=SHORT)
    spec = spec_of(folder, rows=2)
    with WorkerEngine(spec, memory_bytes=ceiling, backoff=dataclasses.replace(QUICK)) as engine:
        engine.load(HEAD, weights)
        undisturbed = flat(generate_groups(engine, [first, second]))
        pid, got = engine.pid, []
        with pytest.raises(EngineError) as caught:
            got.extend(each.request for each in engine.generate([first, second, huge]))
        assert got == [0]  # it was in the middle of the second
        assert "died while generating: out of memory" in caught.value.what
        assert engine.engine_class in caught.value.what
        assert engine.loaded is None
        assert_gone(pid)
        engine.load(HEAD, weights)
        assert flat(generate_groups(engine, [first, second])) == undisturbed


def test_a_process_that_hangs_is_found_and_killed(folder, weights):
    with WorkerEngine(spec_of(folder, LIGHT), silent_seconds=3) as engine:
        engine.load(HEAD, weights)
        pid = engine.pid
        with pytest.raises(EngineError, match=r"it has been silent for 3 seconds, and it was killed"):
            take_all(engine.generate(mixed()), lambda: os.kill(pid, signal.SIGSTOP))
        assert_gone(pid)
        assert (engine.pid, engine.loaded) == (None, None)


def test_a_process_that_takes_long_to_say_its_first_word_is_waited_for(folder, monkeypatch):
    """As on a machine whose other work comes first."""

    def slowly(environment):
        process = EngineProcess(environment)
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(4, os.kill, (process.pid, signal.SIGCONT)).start()
        return process

    monkeypatch.setattr("echo_node.engine.worker.client.EngineProcess", slowly)
    with WorkerEngine(spec_of(folder, LIGHT), silent_seconds=3) as engine:
        engine.start()
        assert engine.describe().engine_class == LIGHT


def test_a_process_that_went_while_nobody_called_is_replaced(folder, weights):
    with WorkerEngine(spec_of(folder, LIGHT), backoff=dataclasses.replace(QUICK)) as engine:
        engine.load(HEAD, weights)
        pid = engine.pid
        os.kill(pid, signal.SIGKILL)
        wait_for_the_end_of(pid)
        with pytest.raises(EngineError, match="no weights"):
            next(engine.generate(models.requests(1)))
        assert engine.loaded is None
        assert engine.pid not in {None, pid}


def test_closing_ends_a_call_in_another_thread(folder, weights):
    engine = WorkerEngine(spec_of(folder, LIGHT))
    engine.load(HEAD, weights)
    pid, began, errors = engine.pid, threading.Event(), []

    def work():
        try:
            for _ in engine.generate(mixed()):
                began.set()
        except EngineError as error:
            errors.append(error.what)

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(60)
    engine.close()
    thread.join(60)
    assert errors == [f"the engine {LIGHT} of {folder.name} was closed while generating"]
    assert_gone(pid)
    engine.close()
    with pytest.raises(EngineError, match="an engine that is closed"):
        engine.describe()


# The node dies


def stranger(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.strangers", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_the_end_of(pid):
    with suppress(ProcessLookupError):  # it has ended
        watch = os.pidfd_open(pid)
        try:
            assert select.select([watch], [], [], 30)[0], f"process {pid} goes on"
        finally:
            os.close(watch)


@pytest.mark.parametrize("what", ["leaving", "generating"])
def test_a_node_that_is_killed_leaves_no_engine_behind(folder, what):
    with stranger(what, LIGHT, folder) as node:
        pid = int(node.stdout.readline())
        assert psutil.pid_exists(pid)
        node.kill()
        wait_for_the_end_of(pid)


def test_a_node_that_ends_without_closing_leaves_no_engine_behind():
    with stranger("leaving") as node:
        pid = int(node.stdout.readline())
        assert psutil.pid_exists(pid)
        node.communicate("\n")
        assert node.returncode == 0
        wait_for_the_end_of(pid)


def test_an_interrupt_from_the_keyboard_is_for_the_node_alone(engine):
    running = engine.generate(mixed())
    next(running)
    os.kill(engine.pid, signal.SIGINT)
    assert len(list(running)) == 6


# Strangers on the pipe


@pytest.fixture
def instead(monkeypatch):
    """Another program where the engine should be."""

    def take(what, seed=0):
        monkeypatch.setattr(processes, "_PROGRAM", "tests.engine.strangers")
        monkeypatch.setenv("STRANGER", what)
        monkeypatch.setenv("SEED", str(seed))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    return take


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_babbles_is_killed(folder, instead, seed):
    instead("babbling", seed)
    before = psutil.Process().children()
    engine = WorkerEngine(spec_of(folder))
    with pytest.raises(EngineError, match=r"died while starting: a message .*, and it was killed"):
        engine.start()
    assert engine.pid is None
    assert psutil.Process().children() == before
    engine.close()


def test_every_crash_lengthens_the_wait(folder, instead):
    instead("crashing")
    engine = WorkerEngine(spec_of(folder), backoff=dataclasses.replace(QUICK))
    for failures in (1, 2, 3):
        with pytest.raises(
            EngineError, match=r"died while starting: it ended with exit code 9.*a pipe burst"
        ):
            engine.start()
        assert engine.backoff.failures == failures
    engine.close()


def test_the_wait_grows_with_jitter_up_to_a_cap():
    assert Backoff().seconds(1.0) == 0
    waits = [[Backoff(failures=count).seconds(luck) for luck in (0.0, 0.5, 1.0)] for count in range(1, 2000)]
    assert all(low < middle < high for low, middle, high in waits)
    highest = [high for *_, high in waits]
    assert highest[:4] == [0.5, 1.0, 2.0, 4.0]
    assert highest == sorted(highest)
    assert highest[-1] == Backoff().most_seconds


def test_a_process_that_grows_past_its_ceiling_ends_itself(instead):
    instead("growing")
    process = EngineProcess(dict(os.environ))
    assert process.wait(60)
    assert process.cause().startswith("out of memory: ")
    assert process.cause().endswith("200 MiB allowed")
    process.end()


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_told_nonsense_ends_with_one_clear_line(seed):
    process = EngineProcess(dict(os.environ))
    process.pipe._end.sendall(np.random.default_rng(seed).bytes(5_000))
    assert process.wait(60)
    assert process.cause() == "it ended with exit code 1"
    assert "the pipe from the node is broken: a message of" in process.last_lines()
    assert "Traceback" not in process.last_lines()
    process.end()
