"""Consent to code that travels with a run: once for each hash, and never by `--yes`."""

from __future__ import annotations

import dataclasses

import pytest

from echo_node.cli import code_consent
from echo_node.cli.code_consent import check_code_consent
from echo_node.contract.code_folder import code_hash
from echo_node.errors import ConfigError
from echo_node.storage.state_dir import prepared
from protocol import Identity, open_manifest, seal
from protocol.digest import ZERO
from tests.protocol.examples import MANIFEST, MANIFEST_WITH_CODE

AUTHOR = Identity(b"a" * 32)
RUN = open_manifest(seal(MANIFEST_WITH_CODE, AUTHOR, ZERO))
HASH = code_hash(MANIFEST_WITH_CODE.contract.wheel).hex()


@pytest.fixture
def place(tmp_path):
    return prepared(tmp_path / "state")


def at_a_terminal(monkeypatch, answer):
    monkeypatch.setattr(code_consent.sys.stdin, "isatty", lambda: True, raising=False)
    asked = []
    monkeypatch.setattr(
        code_consent, "confirm", lambda question, *, default: asked.append((question, default)) or answer
    )
    return asked


def test_yes_never_consents_to_code(place, capsys):
    with pytest.raises(ConfigError, match=rf"--yes does not \(pass --allow-code {HASH}\)"):
        check_code_consent(place, RUN, ())
    shown = capsys.readouterr().err
    assert AUTHOR.peer_id in shown
    assert "echo-contract-digits 2.0, 4,321 bytes" in shown
    assert "numerals 1.4.post1, 98,765 bytes" in shown
    assert HASH in shown
    assert not place.allowed_code


def test_consent_by_the_hash_is_remembered_for_that_hash_alone(place):
    check_code_consent(place, RUN, (HASH,))
    check_code_consent(place, RUN, ())
    pin = MANIFEST_WITH_CODE.contract
    other = dataclasses.replace(pin, wheel=pin.wheel[:1])
    changed = open_manifest(seal(dataclasses.replace(MANIFEST_WITH_CODE, contract=other), AUTHOR, ZERO))
    with pytest.raises(ConfigError, match="nobody has consented"):
        check_code_consent(place, changed, (HASH,))


def test_a_person_is_asked_and_no_is_the_default(place, monkeypatch):
    asked = at_a_terminal(monkeypatch, answer=False)
    with pytest.raises(ConfigError, match="none of it was fetched or run"):
        check_code_consent(place, RUN, ())
    assert [default for _, default in asked] == [False]
    at_a_terminal(monkeypatch, answer=True)
    check_code_consent(place, RUN, ())
    assert place.allowed_code == {HASH}


def test_a_hash_that_is_none_is_refused(place):
    with pytest.raises(ConfigError, match="takes a hash of 64 digits"):
        check_code_consent(place, RUN, ("yes",))


def test_code_of_a_run_never_runs_without_its_jail(place):
    with pytest.raises(ConfigError, match="--unsafe-no-jail is not for code"):
        check_code_consent(place, RUN, (HASH,), unsafe=True)


def test_built_in_contracts_and_ones_own_runs_need_none(place):
    check_code_consent(place, open_manifest(seal(MANIFEST, AUTHOR, ZERO)), (), unsafe=True)
    check_code_consent(place, open_manifest(seal(MANIFEST_WITH_CODE, place.identity(), ZERO)), ())
