"""The package of a plug-in: pinned by its files, checked before a line of it runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from echo_node.contract import Prompt, Score
from echo_node.contract.package_digest import MAX_BYTES, package_digest
from echo_node.contract.sandbox import Sandbox, load_jailed
from echo_node.errors import ContractError

CODE = """
from pathlib import Path
from echo_node.contract import Contract, Prompt, Score
class Even(Contract):
    name, version = "even", "1"
    def prompt(self, key): return Prompt(Path(__file__).with_name("data.txt").read_text())
    def score(self, prompt, completion): return Score(1.0, "")
"""


def install(folder: Path, entry: str = "even_contract.task:Even", name: str = "even") -> Path:
    """Lay a package out as `pip install --target` leaves it."""
    facts = folder / f"{name}_contract-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-contract\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[echo_node.contracts]\neven@1 = {entry}\n")
    package = folder / "even_contract"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "task.py").write_text(CODE)
    (package / "data.txt").write_text("Is it even?")
    return folder


@pytest.fixture
def package(tmp_path):
    return install(tmp_path / "here")


@pytest.fixture
def digest(monkeypatch):
    def of(folder):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            return package_digest("even", "1")

    return of


def test_a_built_in_contract_has_none():
    assert package_digest("digits-reverse", "1") is None


def test_the_same_files_have_the_same_digest_wherever_they_lie(package, digest, tmp_path):
    other = shutil.copytree(package, tmp_path / "elsewhere")
    (other / "even_contract" / "__pycache__").mkdir()
    (other / "even_contract" / "__pycache__" / "task.cpython-311.pyc").write_bytes(b"x")
    assert digest(other) == digest(package)
    assert "even_contract" not in sys.modules  # its code has never been here


@pytest.mark.parametrize("file", ["task.py", "data.txt", "__init__.py", "new.py", "sub/new.txt"])
def test_every_file_counts(package, digest, file):
    before = digest(package)
    path = package / "even_contract" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert digest(package) != before


def test_a_file_under_another_name_is_another_package(package, digest):
    before = digest(package)
    (package / "even_contract" / "data.txt").rename(package / "even_contract" / "other.txt")
    assert digest(package) != before


def test_a_package_that_is_as_it_was_pinned_runs(package, digest):
    with Sandbox("even", "1", folders=[package], wheel=digest(package)) as sandbox:
        assert sandbox.prompts([bytes(32)]) == [Prompt("Is it even?")]
        assert sandbox.scores([(Prompt(""), "")]) == [Score(1.0, "")]


def test_a_package_that_was_changed_is_refused_before_a_line_of_it_runs(package, digest):
    pinned = digest(package)
    (package / "even_contract" / "__init__.py").write_text("import os\nos._exit(77)\n")
    with pytest.raises(ContractError, match="is not the one that the run names: here it has the hash"):
        load_jailed("even", "1", folders=[package], wheel=pinned)
    with pytest.raises(ContractError, match="exit code 77"):
        load_jailed("even", "1", folders=[package])


def test_a_pinned_package_is_not_replaced_by_a_built_in_contract():
    with pytest.raises(ContractError, match="it is built in here"):
        load_jailed("digits-reverse", "1", wheel=bytes(32))


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("fast.so", b"", "fast.so is native code"),
        ("fast.cpython-311-x86_64-linux-gnu.so", b"", "is native code"),
        ("large.bin", bytes(MAX_BYTES), "more than 10000 files or"),
        ("link.txt", None, "link.txt is a symbolic link"),
    ],
)
def test_what_cannot_be_the_same_on_every_machine_is_refused(package, digest, file, content, why):
    path = package / "even_contract" / file
    if content is None:
        path.symlink_to("/etc/hostname")
    else:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=why):
        digest(package)


@pytest.mark.parametrize("entry", ["json:Even", "os.path:Even", "echo_node.evil:Even", "protocol:Even"])
def test_an_entry_that_points_at_the_library_is_refused(tmp_path, digest, entry):
    with pytest.raises(ContractError, match="would shadow one of Python or of this program"):
        digest(install(tmp_path, entry))


def test_two_packages_of_one_contract_are_refused(package, digest):
    install(package, name="odd")
    with pytest.raises(ContractError, match="declared more than once: even-contract, odd-contract"):
        digest(package)


def test_a_contract_that_is_not_here_says_what_to_install():
    with pytest.raises(ContractError, match=r"has no contract nobody 1.*pip install"):
        package_digest("nobody", "1")


def test_nothing_in_a_folder_of_packages_runs_before_the_jail_is_closed(package, tmp_path):
    mark = tmp_path / "mark"
    evil = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("sitecustomize", "usercustomize", "json", "socket", "msgpack", "signal", "gc", "platform"):
        (package / f"{name}.py").write_text(evil)
    (package / "evil.pth").write_text(f"import os; {evil}")
    with Sandbox("even", "1", folders=[package]) as sandbox:
        assert sandbox.prompts([bytes(32)]) == [Prompt("Is it even?")]
    assert not mark.exists()
