"""Audit: a vulnerability fails with its fix, and so does a service that cannot be asked."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ADVISORY = {
    "id": "GHSA-xxxx",
    "aliases": ["CVE-1"],
    "summary": "a hole in trio",
    "affected": [
        {
            "package": {"name": "trio", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}],
        }
    ],
}
CLEAN_NPM = """#!/bin/sh
echo '{"vulnerabilities": {}}'
"""
BAD_NPM = """#!/bin/sh
echo '{"vulnerabilities": {"left-pad": {"range": "<2", "via": [{"title": "pads too far", "url": "https://x.example/1"}],
"fixAvailable": {"name": "left-pad", "version": "2.0.0"}}}}'
exit 1
"""
SILENT_NPM = """#!/bin/sh
echo '{"message": "405 Method Not Allowed - POST https://x.example/audit"}'
exit 1
"""


@contextmanager
def service(advisories, *, tells=True):
    """OSV, as far as it is asked: packages by name, and advisories by id, if it tells."""

    class Osv(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            self.say(
                {
                    "results": [
                        {"vulns": [{"id": each["id"]} for each in advisories]}
                        if one["package"]["name"] == "trio"
                        else {}
                        for one in asked
                    ]
                }
            )

        def do_GET(self):
            if tells:
                self.say(next(each for each in advisories if self.path.endswith(each["id"])))
            else:
                self.send_error(503)

        def say(self, told):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Osv)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def npm(tmp_path):
    def written(text):
        path = tmp_path / "npm"
        path.write_text(text)
        path.chmod(0o700)
        return str(path)

    return written


def audit(osv, npm, *words):
    command = [sys.executable, ROOT / "tools" / "audit.py", "--osv", osv, "--npm", npm, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_vulnerable_package_fails_with_its_advisory_and_its_mend_once(npm):
    again = {**ADVISORY, "id": "CVE-1", "aliases": ["GHSA-xxxx"]}
    with service([ADVISORY, again]) as osv:
        done = audit(osv, npm(CLEAN_NPM))
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "GHSA-xxxx" in line or "CVE-1" in line]
    assert line.startswith("audit: trio ")
    assert "a hole in trio (take 99.1)" in line


def test_a_vulnerability_of_which_only_the_id_can_be_had_fails_all_the_same(npm):
    with service([ADVISORY], tells=False) as osv:
        done = audit(osv, npm(CLEAN_NPM))
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "GHSA-xxxx" in line]
    assert line.startswith("audit: trio ")
    assert "Service Unavailable" in line
    assert "nothing is known" not in done.stdout


def test_where_nothing_is_known_to_be_wrong_it_passes(npm):
    with service([]) as osv:
        done = audit(osv, npm(CLEAN_NPM))
    assert (done.returncode, done.stderr) == (0, "")
    assert "unreachable" not in done.stdout


def test_a_vulnerable_package_of_the_interoperation_tests_fails_too(npm):
    with service([]) as osv:
        done = audit(osv, npm(BAD_NPM))
    assert done.returncode == 1
    assert "left-pad <2: https://x.example/1: pads too far (take left-pad 2.0.0)" in done.stdout


@pytest.mark.parametrize(("words", "code"), [((), 2), (("--allow-unreachable",), 0)])
def test_services_that_cannot_be_asked_are_a_line_each_and_fail_unless_told_otherwise(npm, words, code):
    done = audit("http://127.0.0.1:1", npm(SILENT_NPM), *words)
    assert (done.returncode, done.stderr) == (code, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("is unreachable" in line and "unchecked" in line for line in lines)
    assert "405 Method Not Allowed" in lines[1]


def test_an_npm_that_talks_nonsense_is_one_that_cannot_be_asked(npm):
    with service([]) as osv:
        done = audit(osv, npm("#!/bin/sh\necho nonsense\n"))
    assert done.returncode == 2
    assert done.stdout.count("is unreachable") == 2


def test_what_is_allowed_to_be_unreachable_hides_no_finding(npm):
    done = audit("http://127.0.0.1:1", npm(BAD_NPM), "--allow-unreachable")
    assert done.returncode == 1
