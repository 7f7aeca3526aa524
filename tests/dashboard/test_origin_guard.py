"""Who gets in to the page, and what may be done there."""

import re
from importlib.resources import files

import pytest

from echo_node.dashboard.origin_guard import MOST_BODY
from tests.dashboard.page_client import served

SESAME = "open-1234"
HOSTILE_HOSTS = [
    "evil.example:{port}",
    "127.0.0.1",
    "127.0.0.1:1",
    "localhost.evil.example:{port}",
    "0.0.0.0:{port}",
    "",
]
HOSTILE_ORIGINS = [
    "https://evil.example",
    "null",
    "http://127.0.0.1:1",
    "http://localhost",
    "https://127.0.0.1:{port}",
]


class Hand:
    """What pauses, in a test."""

    def __init__(self):
        self.did = []

    def pause(self):
        self.did.append("pause")

    def resume(self):
        self.did.append("resume")


async def test_every_file_of_the_page_is_served_and_carries_the_headers_that_lock_it_in():
    async with served() as page:
        first = await page.ask("/")
        named = re.findall(r'(?:href|src)="([\w.]+)"', first.text)
        assert {"page.js", "page.css", "theme.js", "favicon.svg", "metrics"} <= set(named)
        for path in ["/", *(f"/{name}" for name in named), "/api/snapshot", "/nowhere"]:
            answer = await page.ask(path)
            assert answer.status == (404 if path == "/nowhere" else 200), path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_page_needs_nothing_from_outside_and_nothing_inline():
    for file in files("echo_node.dashboard").joinpath("static").iterdir():
        text = file.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b",
            text.replace("no innerHTML", ""),
        )
        if file.name.endswith(".html"):
            assert not re.findall(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=", text)


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LocalHost:{port}", "[::1]:{port}"])
async def test_names_of_this_machine_are_answered(host):
    async with served() as page:
        assert (await page.ask("/", headers={"Host": host.format(port=page.port)})).status == 200


@pytest.mark.parametrize("host", HOSTILE_HOSTS)
async def test_a_name_that_somebody_pointed_at_this_machine_is_refused_in_words(host):
    async with served() as page:
        for path in ("/", "/api/snapshot", "/api/events", "/metrics"):
            answer = await page.ask(path, headers={"Host": host.format(port=page.port)})
            assert answer.status == 403
            assert f"served as http://127.0.0.1:{page.port}" in answer.text


@pytest.mark.parametrize("origin", HOSTILE_ORIGINS)
async def test_another_page_gets_nothing(origin):
    hand = Hand()
    async with served(token=SESAME, control=hand) as page:
        foreign = {"Origin": origin.format(port=page.port), "X-Echo-Token": SESAME}
        for path in ("/", "/api/snapshot", "/api/events", "/metrics"):
            assert (await page.ask(path, headers=foreign)).status == 403
        answer = await page.ask("/api/pause", method="POST", headers=foreign)
        assert answer.status == 403
        assert "other web pages" in answer.text
    assert hand.did == []


async def test_a_picture_in_a_foreign_page_takes_no_listeners_place_but_a_link_works():
    async with served() as page:
        foreign = {"Sec-Fetch-Site": "cross-site"}
        assert (await page.ask("/api/events", headers=foreign)).status == 403
        assert (await page.ask("/api/snapshot", headers={"Sec-Fetch-Site": "same-site"})).status == 403
        assert (await page.ask("/", headers=foreign)).status == 200
        own = {"Sec-Fetch-Site": "same-origin", "Origin": f"http://localhost:{page.port}"}
        assert (await page.ask("/api/snapshot", headers=own)).status == 200


@pytest.mark.parametrize("shown", [{}, {"X-Echo-Token": SESAME}, {"Authorization": f"Bearer {SESAME}"}])
async def test_without_a_token_the_page_can_only_be_looked_at(shown):
    hand = Hand()
    async with served(control=hand) as page:
        for path in ("/api/pause", "/api/resume"):
            answer = await page.ask(path, method="POST", headers=shown)
            assert answer.status == 403
            assert "is read-only" in answer.text
        assert (await page.ask("/api/snapshot")).json()["may_control"] is False
    assert hand.did == []


async def test_who_has_the_token_pauses_and_resumes_and_nobody_else():
    hand = Hand()
    async with served(token=SESAME, control=hand) as page:
        assert (await page.ask("/api/snapshot")).json()["may_control"] is True
        for wrong in (
            {},
            {"X-Echo-Token": ""},
            {"X-Echo-Token": SESAME[:-1]},
            {"Authorization": f"Basic {SESAME}"},
            {"Authorization": SESAME},
        ):
            assert (await page.ask("/api/pause", method="POST", headers=wrong)).status == 403
        assert (await page.ask("/api/pause", headers={"X-Echo-Token": SESAME})).status == 405
        assert hand.did == []
        assert (await page.ask("/api/pause", method="POST", headers={"X-Echo-Token": SESAME})).status == 202
        assert (
            await page.ask("/api/resume", method="POST", headers={"Authorization": f"Bearer {SESAME}"})
        ).status == 202
    assert hand.did == ["pause", "resume"]


async def test_a_node_that_cannot_be_paused_says_so():
    async with served(token=SESAME) as page:
        answer = await page.ask("/api/pause", method="POST", headers={"X-Echo-Token": SESAME})
        assert answer.status == 409
        assert "cannot be paused" in answer.text


@pytest.mark.parametrize("length", ["99999999999999999999", "1e3", "-1"])
async def test_nobody_sends_a_large_body(length):
    async with served(token=SESAME, control=Hand()) as page:
        fitting = await page.ask(
            "/api/pause", method="POST", body=b"x" * MOST_BODY, headers={"X-Echo-Token": SESAME}
        )
        assert fitting.status == 202
        large = await page.ask(
            "/api/pause", method="POST", body=b"x" * (MOST_BODY + 1), headers={"X-Echo-Token": SESAME}
        )
        assert large.status == 413
        chunked = {"X-Echo-Token": SESAME, "Transfer-Encoding": "chunked"}
        assert (await page.ask("/api/pause", method="POST", body=b"0\r\n\r\n", headers=chunked)).status == 413
        odd = await page.ask(
            "/api/pause", method="POST", headers={"X-Echo-Token": SESAME, "Content-Length": length}
        )
        assert odd.status in {400, 413}


async def test_there_is_no_websocket():
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eA==",
    }
    async with served() as page:
        assert (await page.ask("/api/events", headers=upgrade)).status in {400, 403}


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/static/page.js", "/%2e%2e/app.py", "/index.html/../app.py", "//etc/passwd"],
)
async def test_no_path_reaches_the_disk(path):
    async with served() as page:
        assert (await page.ask(path)).status == 404
