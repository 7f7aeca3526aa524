"""Wheels of a contract's code: made from installed files, read by rules, run in the jail alone."""

from __future__ import annotations

import csv
import io
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from echo_node.contract import Prompt, Score
from echo_node.contract.code_folder import CodeFolder, code_hash, open_code, read_tree
from echo_node.contract.requirements import contract_wheels, provided_modules
from echo_node.contract.sandbox import Sandbox, load_jailed
from echo_node.contract.wheel_reader import WheelContent, file_of, read_wheel, record_entry
from echo_node.errors import ConfigError, ContractError
from protocol import blob_id, limits
from protocol.manifest import Wheel

CODE = """
from pathlib import Path
from echo_node.contract import Contract, Prompt, Score
class Even(Contract):
    name, version = "even", "1"
    def prompt(self, key): return Prompt(Path(__file__).with_name("data.txt").read_text())
    def score(self, prompt, completion): return Score(1.0, "")
"""
FACTS = "even_contract-1.0.dist-info"


def install(
    folder: Path, entry: str = "even_contract.task:Even", name: str = "even", requires: tuple[str, ...] = ()
) -> Path:
    """Lay a package out as `pip install --target` leaves it."""
    facts = folder / f"{name}_contract-1.0.dist-info"
    facts.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-contract\nVersion: 1.0\n{needs}")
    (facts / "entry_points.txt").write_text(f"[echo_node.contracts]\neven@1 = {entry}\n")
    package = folder / "even_contract"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "task.py").write_text(CODE)
    (package / "data.txt").write_text("Is it even?")
    return folder


def library(
    folder: Path, name: str, version: str = "1.0", requires: tuple[str, ...] = (), file: str = ""
) -> None:
    """Lay out a package of one module, or of one module and one other file."""
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    files = [f"{name}.py", *([file] if file else [])]
    for each in files:
        (folder / each).write_text("VALUE = 7\n")
    (facts / "RECORD").write_text("".join(f"{each},,\n" for each in files))


@pytest.fixture
def package(tmp_path):
    return install(tmp_path / "here")


@pytest.fixture
def wheels(monkeypatch):
    """The wheels of the contract `even` that is installed in a folder."""

    def of(folder):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            return contract_wheels("even", "1")

    return of


@pytest.fixture
def opened(wheels, tmp_path):
    """The unpacked code of the contract that is installed in a folder."""

    def of(folder) -> CodeFolder:
        made = wheels(folder)
        place = tmp_path / "run" / "wheels"
        place.mkdir(parents=True, exist_ok=True)
        for wheel, data in made:
            (place / file_of(wheel)).write_bytes(data)
        return open_code(tuple(wheel for wheel, _ in made), place)

    return of


# Made from installed files


def test_the_same_files_give_the_same_wheel_wherever_they_lie(package, wheels, tmp_path):
    other = shutil.copytree(package, tmp_path / "elsewhere")
    (other / "even_contract" / "__pycache__").mkdir()
    (other / "even_contract" / "__pycache__" / "task.cpython-311.pyc").write_bytes(b"x")
    assert wheels(other) == wheels(package)
    assert "even_contract" not in sys.modules  # its code has never been here


@pytest.mark.parametrize("file", ["task.py", "data.txt", "__init__.py", "new.py", "sub/new.txt"])
def test_every_file_counts(package, wheels, file):
    before = wheels(package)
    path = package / "even_contract" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert wheels(package) != before


def test_a_file_under_another_name_is_another_package(package, wheels):
    before = wheels(package)
    (package / "even_contract" / "data.txt").rename(package / "even_contract" / "other.txt")
    assert wheels(package) != before


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("fast.so", b"", "fast.so' is native code"),
        ("fast.cpython-311-x86_64-linux-gnu.so", b"", "is native code"),
        ("large.bin", bytes(limits.CODE_BYTES), "more than 10,000 files or"),
        ("link.txt", None, "link.txt is a symbolic link"),
        ("start.pth", b"import os", "would change where modules are found"),
    ],
)
def test_what_cannot_be_the_same_on_every_machine_is_refused(package, wheels, file, content, why):
    path = package / "even_contract" / file
    if content is None:
        path.symlink_to("/etc/hostname")
    else:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=why):
        wheels(package)


@pytest.mark.parametrize("entry", ["json:Even", "os.path:Even", "echo_node.evil:Even", "protocol:Even"])
def test_an_entry_that_points_at_the_library_is_refused(tmp_path, wheels, entry):
    with pytest.raises(ContractError, match="would shadow one of Python or of this program"):
        wheels(install(tmp_path, entry))


def test_two_packages_of_one_contract_are_refused(package, wheels):
    install(package, name="odd")
    with pytest.raises(ContractError, match="declared more than once: even-contract, odd-contract"):
        wheels(package)


def test_a_contract_that_is_not_here_says_what_to_install():
    with pytest.raises(ContractError, match=r"has no contract nobody 1.*pip install"):
        contract_wheels("nobody", "1")


# What it needs


def test_all_that_a_contract_needs_travels_with_it_in_loops_too(tmp_path, wheels):
    install(
        tmp_path,
        requires=("first>=1", "echo-node", "numpy", "absent; sys_platform == 'win32'", "more; extra == 'x'"),
    )
    library(tmp_path, "first", requires=("second[extra]",))
    library(tmp_path, "second", requires=("first", "third; extra == 'extra'"))
    library(tmp_path, "third")
    assert [wheel.name for wheel, _ in wheels(tmp_path)] == ["even-contract", "first", "second", "third"]


@pytest.mark.parametrize(
    ("requires", "file", "why"),
    [
        (("absent>=2",), "", r"even-contract needs absent, which is not installed here .*absent>=2"),
        (("first>=2",), "", "even-contract needs first>=2, and here it is 1.0"),
        (("first",), "fast.so", "needs first, which has native code and cannot travel with a run"),
        (("first @ https://example.org/first.whl",), "", "needs first from an address"),
        (("numpy<1",), "", "needs numpy<1, and here it is"),
    ],
)
def test_a_need_that_cannot_be_met_is_named(tmp_path, wheels, requires, file, why):
    install(tmp_path, requires=requires)
    library(tmp_path, "first", file=file)
    with pytest.raises(ContractError, match=why):
        wheels(tmp_path)


@pytest.mark.parametrize(
    ("requires", "python", "why"),
    [
        (("absent",), "", "neither travels with the run nor is part of this program"),
        (("tensorboard>=9999",), "", r"tensorboard, which is not installed|tensorboard>=9999, and here"),
        (("not a requirement!",), "", "a requirement that is none"),
        ((), ">=4", "needs Python >=4"),
        ((), "nonsense", "needs Python nonsense"),
    ],
)
def test_whoever_joins_is_told_what_is_missing(requires, python, why):
    with pytest.raises(ContractError, match=why):
        provided_modules([WheelContent("some", "1", {}, requires, python)])


# Run in the jail


def test_code_that_is_as_the_run_names_it_runs(package, opened):
    with Sandbox("even", "1", code=opened(package)) as sandbox:
        assert sandbox.prompts([bytes(32)]) == [Prompt("Is it even?")]
        assert sandbox.scores([(Prompt(""), "")]) == [Score(1.0, "")]


def test_a_package_that_was_changed_is_refused_before_a_line_of_it_runs(package, opened):
    code = opened(package)
    (code.path / "even_contract" / "__init__.py").write_text("import os\nos._exit(77)\n")
    with pytest.raises(ContractError, match="is not the code that the run names"):
        load_jailed("even", "1", code=code)
    assert opened_again(code, opened, package) == code, "it is unpacked anew"
    (package / "even_contract" / "__init__.py").write_text("import os\nos._exit(77)\n")
    with pytest.raises(ContractError, match="exit code 77"):
        load_jailed("even", "1", code=opened(package))


def opened_again(code, opened, package):
    again = opened(package)
    assert "even_contract/__init__.py" in read_tree(code.path)
    assert read_tree(code.path)["even_contract/__init__.py"] == b""
    return again


def test_a_contract_of_wheels_is_never_replaced_by_a_built_in_one(package, opened):
    with pytest.raises(ContractError, match="declare the contract digits-reverse 1 0 times"):
        load_jailed("digits-reverse", "1", code=opened(package))


def test_a_contract_imports_nothing_that_does_not_travel_with_it(package, opened):
    task = package / "even_contract" / "task.py"
    task.write_text("import numpy, json\n" + CODE)  # which every node has
    with Sandbox("even", "1", code=opened(package)) as sandbox:
        assert sandbox.prompts([bytes(32)]) == [Prompt("Is it even?")]
    task.write_text("import pytest\n" + CODE)  # which is here, and elsewhere is not
    with pytest.raises(ContractError, match="No module named 'pytest'"):
        load_jailed("even", "1", code=opened(package))


def test_a_wheel_is_used_though_another_release_is_installed(tmp_path, opened):
    install(tmp_path / "here", requires=("packaging", "iniconfig"))
    library(tmp_path / "here", "iniconfig", "99.0")  # pytest brings a real one
    text = "import iniconfig\n" + CODE.replace(
        'Path(__file__).with_name("data.txt").read_text()', "str(iniconfig.VALUE)"
    )
    (tmp_path / "here" / "even_contract" / "task.py").write_text(text)
    with Sandbox("even", "1", code=opened(tmp_path / "here")) as sandbox:
        assert sandbox.prompts([bytes(32)]) == [Prompt("7")]


def test_nothing_in_a_folder_of_packages_runs_before_the_jail_is_closed(package, tmp_path):
    mark = tmp_path / "mark"
    evil = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("sitecustomize", "usercustomize", "json", "socket", "msgpack", "signal", "gc", "platform"):
        (package / f"{name}.py").write_text(evil)
    (package / "evil.pth").write_text(f"import os; {evil}")
    with Sandbox("even", "1", folders=[package]) as sandbox:
        assert sandbox.prompts([bytes(32)]) == [Prompt("Is it even?")]
    assert not mark.exists()


def test_a_contract_reads_no_file_of_the_run_but_its_code(package, opened, tmp_path):
    (tmp_path / "secret").write_text("a key")
    text = CODE.replace(
        'Path(__file__).with_name("data.txt").read_text()', f"open({str(tmp_path / 'secret')!r}).read()"
    )
    (package / "even_contract" / "task.py").write_text(text)
    with (
        Sandbox("even", "1", code=opened(package)) as sandbox,
        pytest.raises(ContractError, match=r"denied|No such"),
    ):
        sandbox.prompts([bytes(32)])


# Read by rules


def files_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(
    files: dict[str, bytes], *, record: bool = True, method: int = zipfile.ZIP_STORED, attributes: int = 0
) -> bytes:
    """A wheel of these files, with a RECORD that is right."""
    files = dict(files)
    if record:
        rows = io.StringIO()
        table = csv.writer(rows)
        for path, data in files.items():
            if path != f"{FACTS}/RECORD":
                table.writerow([path, *record_entry(data)])
        table.writerow([f"{FACTS}/RECORD", "", ""])
        files[f"{FACTS}/RECORD"] = rows.getvalue().encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)
            entry.compress_type = method
            entry.external_attr = attributes if path.endswith("data.txt") else 0
            archive.writestr(entry, data)
    return packed.getvalue()


def read(data: bytes, **facts):
    named = {"name": "even-contract", "version": "1.0"} | facts
    return read_wheel(data, Wheel(blob=blob_id(data), size=len(data), **named))


def test_a_wheel_of_a_packager_is_read_too(package, wheels):
    [(_, data)] = wheels(package)
    files = files_of(data)
    assert read(pack(files, method=zipfile.ZIP_DEFLATED)).files == read(pack(files)).files


ADDED = {
    "../out.py": "no plain path",
    "/etc/passwd": "no plain path",
    "even_contract//x.py": "no plain path",
    "even_contract/./x.py": "no plain path",
    "even_contract/x.py ": "no plain path",
    "even_contract/\x1b[2J.py": "no plain path",
    "even_contract/C:x.py": "no plain path",
    "even_contract/é.py": "no plain path",
    "/".join(["even_contract"] * 17): "no plain path",
    "even_contract/" + "x" * 300: "no plain path",
    "even_contract/TASK.py": "are one file on some machines",
    "even_contract/task.py/x": "is a file and a folder",
    "evil.pth": "would change where modules are found",
    "even_contract/evil.pth": "would change where modules are found",
    "even_contract/fast.so": "is native code",
    "even_contract/__pycache__/task.pyc": "is bytecode",
    "even_contract-1.0.data/scripts/run": "is of another folder than",
    "other-1.0.dist-info/METADATA": "is of another folder than",
    "json.py": "module json would shadow",
    "os/__init__.py": "module os would shadow",
    "echo_node/evil.py": "module echo_node would shadow",
    "protocol.py": "module protocol would shadow",
    "sitecustomize.py": "module sitecustomize would shadow",
    "__main__.py": "module __main__ would shadow",
    "README.txt": "no part of a Python package",
    "bin/a.b/run": None,
}


@pytest.mark.parametrize("path", ADDED)
def test_a_wheel_that_is_not_plain_is_refused(package, wheels, path):
    [(_, data)] = wheels(package)
    made = pack(files_of(data) | {path: b"x"})
    if ADDED[path] is None:
        assert path in read(made).files
        return
    with pytest.raises(ContractError, match=ADDED[path]) as caught:
        read(made)
    assert "the wheel even-contract 1.0" in str(caught.value)


CHANGED = {
    "no WHEEL": (lambda files: files.pop(f"{FACTS}/WHEEL"), "has no even_contract-1.0.dist-info/WHEEL"),
    "not pure": (
        lambda files: files.update({f"{FACTS}/WHEEL": b"Root-Is-Purelib: false\nTag: py3-none-any\n"}),
        "no pure Python",
    ),
    "native tag": (
        lambda files: files.update({f"{FACTS}/WHEEL": b"Root-Is-Purelib: true\nTag: cp311-cp311-linux\n"}),
        "no pure Python: its tags are cp311-cp311-linux",
    ),
    "another's metadata": (
        lambda files: files.update({f"{FACTS}/METADATA": b"Name: other\nVersion: 1.0\n"}),
        "its METADATA is that of other 1.0",
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_metadata_that_does_not_fit_is_refused(package, wheels, how):
    [(_, data)] = wheels(package)
    files = files_of(data)
    change, why = CHANGED[how]
    change(files)
    with pytest.raises(ContractError, match=why):
        read(pack(files))


def test_a_record_that_lies_is_refused(package, wheels):
    [(_, data)] = wheels(package)
    files = files_of(data)
    with pytest.raises(ContractError, match=r"does not list its files: 'even_contract/more.py'"):
        read(pack(files | {"even_contract/more.py": b""}, record=False))
    with pytest.raises(ContractError, match=r"task.py' is not the file that its RECORD names"):
        read(pack(files | {"even_contract/task.py": b""}, record=False))


def test_links_bombs_and_odd_archives_are_refused(package, wheels):
    [(_, data)] = wheels(package)
    files = files_of(data)
    link = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(ContractError, match="no regular file"):
        read(pack(files, attributes=link))
    bomb = files | {"even_contract/zeros.bin": bytes(2**25)}
    with pytest.raises(ContractError, match="unpacks to more than 200 times its size"):
        read(pack(bomb, method=zipfile.ZIP_DEFLATED))
    with pytest.raises(ContractError, match="more than 67,108,864 bytes"):
        read(pack(files | {"even_contract/zeros.bin": bytes(limits.CODE_BYTES)}, method=zipfile.ZIP_DEFLATED))
    with pytest.raises(ContractError, match="compressed in another way"):
        read(pack(files, method=zipfile.ZIP_BZIP2))
    for odd in (b"", b"PK", data + b"x", data[:-1], b"x" + data, bytes(100)):
        with pytest.raises(ContractError, match="no plain ZIP archive"):
            read(odd)
    many = files | {f"even_contract/f{n}.txt": b"" for n in range(10_001)}
    with pytest.raises(ContractError, match="more than 10,000 files"):
        read(pack(many))


def test_a_wheel_of_another_hash_is_refused_and_nothing_of_it_is_unpacked(package, wheels, tmp_path):
    [(wheel, data)] = wheels(package)
    place = tmp_path / "run" / "wheels"
    place.mkdir(parents=True)
    for other in (data[:-1], data[:-1] + b"x", None):
        if other is not None:
            (place / file_of(wheel)).write_bytes(other)
        else:
            (place / file_of(wheel)).unlink()
        with pytest.raises(ConfigError, match="is not the wheel that the manifest names"):
            open_code((wheel,), place)
    assert not (tmp_path / "run" / "code").exists()


def test_one_file_in_two_wheels_is_refused(tmp_path, wheels):
    install(tmp_path, requires=("first",))
    library(tmp_path, "first", file="even_contract/task.py")
    (tmp_path / "even_contract" / "task.py").write_text(CODE)
    made = wheels(tmp_path)
    place = tmp_path / "run" / "wheels"
    place.mkdir(parents=True)
    for wheel, data in made:
        (place / file_of(wheel)).write_bytes(data)
    with pytest.raises(ContractError, match=r"even_contract/task.py stands in two wheels"):
        open_code(tuple(wheel for wheel, _ in made), place)


def test_the_hash_names_every_wheel(package, wheels):
    [(wheel, _)] = wheels(package)
    other = Wheel(blob=bytes(32), name="other", size=1, version="1")
    assert code_hash([wheel]) != code_hash([wheel, other])
    assert code_hash([wheel]) != code_hash([Wheel(wheel.blob, wheel.name, wheel.size, "1.1")])
