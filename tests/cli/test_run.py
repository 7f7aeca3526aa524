"""`echo-node run` and `echo-node keys` as an operator meets them."""

from __future__ import annotations

import json

import pytest
import trio
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.control.server import serve_control
from echo_node.errors import ConfigError, StoreError
from echo_node.models import embedded
from echo_node.runs.run import read_model
from echo_node.runs.spec import open_run, read_manifest
from echo_node.storage.state_dir import prepared
from echo_node.telemetry.snapshot import Snapshot
from echo_node.weights.publisher import WHOLE, Cadence, Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import Identity, Link, Roster, limits

SEED = f"/ip4/192.0.2.7/tcp/4001/p2p/{Identity(b's' * 32).peer_id}"


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def me(state):
    done = invoke("keys", "show", "--state", state, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["peer_id"]


@pytest.fixture
def write(tmp_path, me):
    def write(text="", name='name = "reverse five digits"'):
        file = tmp_path / "digits.toml"
        file.write_text(f'{name}\ntrainers = ["{me}"]\n{text}')
        return file

    return write


def test_a_node_is_the_same_one_at_every_start(state, me):
    again = invoke("keys", "show", "--state", state)
    assert again.stdout.strip() == me
    assert "keep a copy" in again.stderr
    assert (state / "key").stat().st_mode & 0o777 == 0o600


def test_without_a_folder_the_state_is_where_xdg_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert invoke("keys", "show").exit_code == 0
    assert (tmp_path / "echo-node" / "key").is_file()
    monkeypatch.setenv("XDG_STATE_HOME", "relative/and/so/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert invoke("keys", "show").exit_code == 0
    assert (tmp_path / ".local" / "state" / "echo-node" / "key").is_file()


def test_the_shortest_file_makes_a_run_of_the_embedded_model(tmp_path, state, me, write):
    done = invoke("run", "new", write(), "--state", state, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    shown = json.loads(invoke("run", "show", tmp_path / "digits", "--json").stdout)
    assert shown["run"] == told["run"]
    assert (shown["name"], shown["author"], shown["trainers"]) == ("reverse five digits", me, [me])
    assert (shown["contract"], shown["mode"], shown["staleness"]) == ("digits-reverse 1", "async", 4)
    assert shown["claims"] == "rewards", "the contract passed the purity test"
    run = open_run(tmp_path / "digits")
    try:
        assert run.folder == embedded.folder()
    finally:
        run.close()


@pytest.mark.parametrize(
    ("table", "rule", "says"),
    [
        ("", {"policy": "self", "quorum": 1, "share": 0.1}, "looks at the first 16 groups"),
        ('[verification]\npolicy = "self"', {"policy": "self", "quorum": 1, "share": 0.1}, "10% or more"),
        ("[verification]\nshare = 0.0", {"policy": "self", "quorum": 1, "share": 0.0}, "none: nobody looks"),
    ],
)
def test_the_default_run_verifies_and_run_new_says_what_that_means(tmp_path, state, write, table, rule, says):
    done = invoke("run", "new", write(table), "--state", state)
    assert done.exit_code == 0, done.output
    assert f"verification: {'the trainer itself ' if rule['share'] else ''}" in done.output
    assert says in " ".join(done.output.split())
    assert json.loads(invoke("run", "show", tmp_path / "digits", "--json").stdout)["verification"] == rule


def test_samplers_claim_no_rewards_where_the_contract_fails_the_purity_test(
    tmp_path, state, write, monkeypatch
):
    monkeypatch.setattr(
        "echo_node.contract.adversarial_test.find_impurity", lambda _subject: "the clock: it reads time.time"
    )
    done = invoke("run", "new", write(), "--state", state)
    assert done.exit_code == 0, done.output
    assert "claim no rewards" in done.stdout
    assert "it reads time.time" in done.stdout
    assert json.loads(invoke("run", "show", tmp_path / "digits", "--json").stdout)["claims"] == "none"


def test_everything_that_the_file_says_is_in_the_manifest(tmp_path, state, me, write):
    verifier = Identity(b"v" * 32).peer_id
    text = f"""
verifiers = ["{verifier}"]
seeds = ["{SEED}"]
engines = ["torch/f32"]
[sampling]
group_size = 4
temperature = 0.9
[sync]
mode = "sequential"
[algorithm]
batch_groups = 16
learning_rate = 1e-4
"""
    done = invoke(
        "run",
        "new",
        write(text),
        "--state",
        state,
        "--out",
        tmp_path / "out",
        "--set",
        "sampling.group_size=6",
    )
    assert done.exit_code == 0, done.output
    assert "next: echo-node join --role trainer" in done.stdout
    told = read_manifest(tmp_path / "out" / "manifest").message
    assert (told.sync.async_from, told.sync.staleness) == (None, 0)
    assert (told.sampling.group_size, told.sampling.temperature) == (6, 0.9)
    assert told.algorithm.params == {"batch_groups": 16, "learning_rate": 1e-4}
    assert [tolerance.engine for tolerance in told.engines] == ["torch/f32"]
    assert told.seeds == (SEED,)
    shown = invoke("run", "show", tmp_path / "out").stdout
    for word in (verifier, me, "sequential", "batch_groups 16", SEED):
        assert word in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing = 1", "nothing"),
        ("[sync]\nmode = 'sideways'", "sync.mode"),
        ("[sync]\nstaleness = 99", "sync.staleness"),
        ("[sampling]\ngroup_size = 1", "sampling.group_size"),
        ("[sampling]\nmax_tokens = 100000", "context"),
        ("verifiers = ['12D3KooWnobody']", "verifiers"),
        ("[terms]\nelectors = ['12D3KooWnobody']", "terms.electors"),
        (f"[terms]\nelectors = ['{Identity(b'x' * 32).peer_id}']", "neither trainer nor verifier"),
        ("seeds = ['somewhere']", "somewhere"),
        ("engines = ['abacus/f32']", "abacus/f32"),
        ("contract = 'no-such-thing@1'", "no-such-thing"),
        ("model = '/no/such/folder'", "/no/such/folder"),
        ("= nonsense", "digits.toml"),
    ],
)
def test_what_cannot_be_is_one_clear_error_and_leaves_nothing(tmp_path, state, write, text, says):
    done = invoke("run", "new", write(text), "--state", state)
    assert isinstance(done.exception, ConfigError | StoreError) or "no-such-thing" in str(done.exception)
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "digits").exists()


HEIR, OTHER = (Identity(letter * 32).peer_id for letter in (b"h", b"o"))


@pytest.mark.parametrize(
    ("trainers", "verifiers", "named", "voting", "says"),
    [
        (["me"], [], [], ["me"], "none: there is no second trainer"),
        (["me", HEIR], [], [], ["me", HEIR], "--promote, of whichever of the two does not lead"),
        (["me", HEIR], [OTHER], [], ["me", HEIR, OTHER], "by itself, while 2 of the 3 electors are alive"),
        (
            ["me", HEIR],
            [OTHER],
            ["me", HEIR],
            ["me", HEIR],
            "--promote, of whichever of the two does not lead",
        ),
        (["me", HEIR, OTHER], [], [HEIR], [HEIR], "by hand, with join --role trainer --promote"),
        (["me", HEIR, OTHER], [], [HEIR], [HEIR], "nobody can follow trainer 2: name another elector"),
        (["me", HEIR, OTHER], [], ["me", HEIR], ["me", HEIR], "nobody can follow trainer 1 or 2"),
    ],
)
def test_who_votes_is_named_or_follows_and_run_show_says_what_comes_of_it(
    tmp_path, state, me, trainers, verifiers, named, voting, says
):
    def keys(names):
        return [me if name == "me" else name for name in names]

    file = tmp_path / "digits.toml"
    file.write_text(
        f'name = "d"\ntrainers = {keys(trainers)}\nverifiers = {verifiers}\n[terms]\nelectors = {keys(named)}\n'
    )
    made = invoke("run", "new", file, "--state", state)
    assert made.exit_code == 0
    assert says in made.stdout or len(trainers) == 1, "before anybody depends on it"
    shown = json.loads(invoke("run", "show", tmp_path / "digits", "--json").stdout)
    assert sorted(shown["electors"]) == sorted(keys(voting))
    assert says in shown["failover"]
    assert says in invoke("run", "show", tmp_path / "digits").stdout


def test_stop_texts_of_a_run_file_end_completions_and_one_that_is_no_token_is_refused(tmp_path, state, write):
    done = invoke("run", "new", write('[sampling]\nstop = ["="]\n'), "--state", state)
    assert done.exit_code == 0, done.output
    manifest = read_manifest(tmp_path / "digits").message
    assert set(manifest.model.end_tokens) > {11}
    refused = invoke(
        "run", "new", write('[sampling]\nstop = ["12"]\n'), "--state", state, "--out", tmp_path / "other"
    )
    assert isinstance(refused.exception, ConfigError)
    assert "the stop text '12' is no single token of this model" in str(refused.exception)
    assert not (tmp_path / "other" / "manifest").exists()


def test_a_run_is_not_overwritten(tmp_path, state, write):
    assert invoke("run", "new", write(), "--state", state).exit_code == 0
    before = (tmp_path / "digits" / "manifest").read_bytes()
    assert "holds a run already" in str(invoke("run", "new", write(), "--state", state).exception)
    assert (tmp_path / "digits" / "manifest").read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x00" * 200_000])
def test_what_is_no_manifest_is_said_to_be_none(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    failed = invoke("run", "show", tmp_path / "file").exception
    assert isinstance(failed, ConfigError)
    assert "manifest" in str(failed)
    assert isinstance(invoke("run", "show", tmp_path / "nowhere").exception, ConfigError)


def published(folder, state, versions, cadence=WHOLE):
    """The run, and so many heads of it, as its trainer has made them."""
    run = open_run(folder)
    weights = read_model(embedded.folder())
    with WeightsStore.open(prepared(state).run(run.id) / "weights", run.rules, layout_of(weights)) as store:
        publisher = Publisher(store, prepared(state).identity(), luck=lambda: bytes(32), cadence=cadence)
        heads = [
            publisher.publish(weights, step=n, roster=Roster(()), groups=()).head for n in range(versions)
        ]
    run.close()
    return run, heads


@pytest.mark.parametrize(("cadence", "named"), [(WHOLE, 1), (Cadence(), 0)])
def test_a_link_names_the_newest_head_whose_weights_can_be_had_whole(tmp_path, state, write, cadence, named):
    """A newcomer accepts nothing older, so it could not reach a head with only a delta."""
    assert invoke("run", "new", write(), "--state", state).exit_code == 0
    early = invoke("run", "link", tmp_path / "digits", "--state", state).exception
    assert isinstance(early, ConfigError)
    assert "knows none" in str(early)
    run, heads = published(tmp_path / "digits", state, 2, cadence)
    done = invoke("run", "link", tmp_path / "digits", "--state", state, "--seed", SEED)
    assert done.exit_code == 0, done.output
    link = Link.parse(done.stdout)
    assert (link.run, link.head, link.version, link.addresses) == (run.id, heads[named].id, named, (SEED,))


async def test_a_link_that_is_made_while_the_node_runs_leads_to_that_node(tmp_path, state, write, nursery):
    assert invoke("run", "new", write(), "--state", state).exit_code == 0
    published(tmp_path / "digits", state, 1)
    board, mine = Snapshot(), [SEED.replace("4001", str(4001 + n)) for n in range(20)]
    board.record("listening", "", {"addresses": mine})
    await nursery.start(serve_control, state, board, object())
    done = await trio.to_thread.run_sync(
        invoke, "run", "link", tmp_path / "digits", "--state", state, abandon_on_cancel=True
    )
    nursery.cancel_scope.cancel()
    assert done.exit_code == 0, done.output
    assert Link.parse(done.stdout).addresses == tuple(mine[: limits.ADDRESSES])
