"""The examples run as they stand."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from echo_node.contract.code_folder import code_hash
from echo_node.runs.spec import read_manifest, read_run_file
from protocol import Identity

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_one_process_learns_in_about_forty_lines():
    path = EXAMPLES / "one_process.py"
    code = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(code) <= 40
    done = subprocess.run(
        [sys.executable, str(path), "12"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    first, last = map(
        float, re.search(r"reward ([\d.]+) at first, ([\d.]+) after 12 steps", done.stdout).groups()
    )
    assert 0.1 < first < 0.6
    assert 0.1 < last < 0.9


@pytest.fixture(scope="module")
def python_with_own_contract(tmp_path_factory):
    """Make a Python with this one's packages and the example's, where contracts are found."""
    home = tmp_path_factory.mktemp("own")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output(ask, text=True).strip())
    (site / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    package = shutil.copytree(EXAMPLES / "own_contract", home / "package")  # building leaves files there
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target")
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, site, package], check=True, timeout=100)
    return python


def test_a_contract_of_ones_own_stands_its_trial_and_is_learnt(python_with_own_contract):
    python, folder = python_with_own_contract, EXAMPLES / "own_contract"
    for words in (
        ("-m", "echo_node", "contract", "test", "digits-sorted"),
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", folder),
        (folder / "learn.py", "2"),
    ):
        done = subprocess.run(
            [python, *words], capture_output=True, text=True, timeout=100, check=False, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"reward 0\.\d\d at first, 0\.\d\d after 2 steps", done.stdout)


def test_a_run_of_ones_own_contract_is_made_from_its_file(python_with_own_contract, tmp_path):
    author = Identity.generate()
    text = (EXAMPLES / "own_contract" / "digits_sorted.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("12D3KooW…", author.peer_id))
    command = [python_with_own_contract, "-m", "echo_node", "run", "new", "mine.toml", "--state", "state"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pinned = read_manifest(tmp_path / "mine").message.contract
    assert pinned.name == "digits-sorted"
    assert pinned.wheel is not None
    assert [wheel.name for wheel in pinned.wheel] == ["echo-contract-digits-sorted"]
    join = [
        python_with_own_contract,
        "-m",
        "echo_node",
        "join",
        "--role",
        "sampler",
        "mine",
        "--state",
        "other",
        "--allow-code",
        code_hash(pinned.wheel).hex(),
    ]
    [wheel] = (tmp_path / "mine" / "wheels").iterdir()
    wheel.write_bytes(wheel.read_bytes() + b"\n# another release\n")
    done = subprocess.run(join, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "is not the wheel that the manifest names" in done.stderr
    assert "join by the run's link" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_real_model_takes_steps_on_a_real_task_and_only_deltas_go_out():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "smollm2.py"), "2"],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == 2
    assert told["real_delta_ratio"] > 50
    assert 0 <= told["reward"] <= 1


def test_the_run_file_of_smollm2_is_one_that_run_new_reads():
    trainer = Identity.generate().peer_id
    spec = read_run_file(EXAMPLES / "smollm2.toml", [f'trainers=["{trainer}"]'])
    assert (spec.contract, spec.params, spec.sampling.stop) == ("few-shot@1", {"task": "larger"}, ["\n"])
    assert spec.trainers == [trainer]
