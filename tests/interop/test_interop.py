"""The wire as another language has it, written from SPEC.md alone, agrees with every vector."""

import json
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
VECTORS = HERE.parents[1] / "protocol" / "vectors"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", "check.js"], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


def test_javascript_agrees_with_every_vector():
    done = check(HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, failed = map(
        int, re.fullmatch(r"(\d+) passed, (\d+) failed", done.stdout.splitlines()[-1]).groups()
    )
    cases = sum(
        len(rows) for path in VECTORS.glob("*.json") for rows in json.loads(path.read_text()).values()
    )
    assert failed == 0
    assert passed > 1_000
    assert cases > 1_000, "the vectors themselves are there"


def test_javascript_notices_a_changed_vector_in_every_file(tmp_path):
    """One digit of one case of each file, changed: else the agreement above would say nothing."""
    root = HERE.parents[1]
    for part in ("tests/interop", "protocol/vectors"):
        shutil.copytree(root / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "swarm"))
    shutil.copy(root / "SPEC.md", tmp_path)
    for path in (tmp_path / "protocol/vectors").glob("*.json"):
        text = path.read_text()
        if path.stem == "major1":  # whatever follows the number of the version is not looked at
            path.write_text(text.replace('"sealed": "9601', '"sealed": "9602', 1))
            continue
        found = re.search(r'"[0-9a-f]{8,}"', text) or re.search(r'"echo:[\w-]+"', text)
        at = found.end() - 2
        path.write_text(text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :])
    done = check(tmp_path / "tests/interop")
    assert done.returncode == 1, done.stderr
    noticed = set(re.findall(r"^FAILED (\w+)", done.stdout, re.MULTILINE))
    assert noticed >= {path.stem for path in VECTORS.glob("*.json")}
