"""The page in a real browser, while its node runs; `make setup` installs the browser."""

import re
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect, sync_playwright

from echo_node.telemetry.snapshot import Snapshot
from tests.dashboard.page_thread import shown
from tests.dashboard.sample_node import ME, Story, a_long_story

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<img src=x onerror='window.hacked=1'><b>bold</b>\x1b[31m\u202e"
SHOWN = r"<img src=x onerror='window.hacked=1'><b>bold</b>\x1b[31m\u202e"
SESAME = "open-1234"
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM, "a chromium is missing: `make setup` installs it, or says how"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        yield started
        started.close()


@contextmanager
def looking(browser, page, *, quietly=True, **more):
    """A tab on the page; every test checks that it requests nothing else and logs no error."""
    context = browser.new_context(**more)
    tab = context.new_page()
    tab.set_default_timeout(10_000)
    asked, complaints = [], []
    context.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda line: complaints.append(f"{line.type}: {line.text}"))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(page.url)
    expect(tab.locator("#phase")).not_to_have_text("connecting")
    yield tab
    context.close()
    assert asked
    assert [url for url in asked if not url.startswith(page.url)] == []
    if quietly:
        assert complaints == []


def tile(tab, name):
    return (
        tab.locator(".tile")
        .filter(has=tab.locator("dt", has_text=re.compile(f"^{name}$")))
        .locator(".tile-value")
    )


def test_news_appear_without_a_reload(browser):
    story = a_long_story("trainer", 40)
    with shown(story.board) as page, looking(browser, page) as tab:
        tab.evaluate("window.same = 'yes'")
        expect(tab.locator("h1")).to_have_text("You train “reverse-digits”.")
        expect(tile(tab, "Version")).to_have_text("40")
        curve = tab.locator("#reward path.curve").get_attribute("d")
        page.tell(story.turn)
        expect(tile(tab, "Version")).to_have_text("41")
        expect(tab.locator("#versions tbody tr").first).to_contain_text("v41")
        assert tab.locator("#reward path.curve").get_attribute("d") != curve
        expect(tab.locator("#phase")).to_have_text("working")
        page.tell(lambda: story.board.record("paused", "it was asked to pause", {}))
        expect(tab.locator("#phase")).to_have_text("paused")
        expect(tab.locator("#log li").first).to_contain_text("it was asked to pause")
        assert tab.evaluate("window.same") == "yes"


def test_held_out_rewards_are_a_curve_of_dots_that_grows(browser):
    story = a_long_story("trainer", 40)
    with shown(story.board) as page, looking(browser, page) as tab:
        expect(tab.locator("#reward path.curve")).to_be_attached()
        expect(tab.locator("#reward circle.mark")).to_have_count(0)

        def measured(*curve):
            found = {"reward": curve[-1][1], "best_reward": 0.76, "best_version": 20, "curve": list(curve)}
            told = {**story.board.snapshot()["progress"], "evaluation": found}
            page.tell(lambda: story.board.record("progress", "", told))

        measured([0, 0.25], [20, 0.76])
        expect(tab.locator("#reward circle.mark")).to_have_count(2)
        expect(tile(tab, "Held out")).to_have_text("0.76")
        expect(tab.locator("#reward-foot")).to_contain_text("Dots are held-out rewards.")
        drawn = tab.locator("#reward path.marks").get_attribute("d")
        measured([0, 0.25], [20, 0.76], [40, 0.7])
        expect(tab.locator("#reward circle.mark")).to_have_count(3)
        longer = tab.locator("#reward path.marks").get_attribute("d")
        assert longer.startswith(drawn)
        assert longer != drawn


def test_a_clock_that_is_wrong_is_said_first(browser):
    story = a_long_story("sampler", 4)
    with shown(story.board) as page, looking(browser, page) as tab:
        told = {
            **story.board.snapshot()["progress"],
            "clock": "this machine's clock is 2.0 hours behind the leader's",
        }
        page.tell(lambda: story.board.record("progress", "", told))
        expect(tab.locator("#hero-more")).to_contain_text("clock is 2.0 hours behind")


def test_a_sampler_sees_its_credit_grow_and_what_a_verifier_attests_after_a_reinstall(browser):
    story = a_long_story("sampler", 4)
    with shown(story.board) as page, looking(browser, page) as tab:

        def credit(**own):
            told = {**story.board.snapshot()["progress"], "credit": own}
            page.tell(lambda: story.board.record("progress", "", told))

        note = tab.locator(".tile").filter(has_text="Credit").locator(".tile-note")
        credit(tokens=0, groups=0, admitted=3)
        expect(tile(tab, "Credit")).to_have_text("0")
        expect(note).to_have_text("verified tokens in 0 groups")
        credit(tokens=48, groups=1, admitted=3)
        expect(tile(tab, "Credit")).to_have_text("48")
        expect(note).to_have_text("verified tokens in 1 group")
        credit(tokens=48, groups=1, admitted=3, attested={"tokens": 960, "groups": 20})
        expect(tile(tab, "Credit")).to_have_text("960")
        expect(note).to_have_text("verified tokens in 20 groups, as a verifier attests")


@pytest.mark.parametrize("role", ["trainer", "sampler", "verifier"])
def test_each_role_has_its_figures_and_fits_a_phone(browser, role):
    story = a_long_story(role, 40)
    words = {
        "trainer": ["Reward", "Staleness", "Bytes", "Versions", "Refused, and why", "Who has what"],
        "sampler": ["Does it count?", "Throughput", "Refused, and why", "Verdicts", "Who has what"],
        "verifier": ["Does it count?", "Verdicts", "Who has what"],
    }[role]
    with shown(story.board) as page, looking(browser, page, viewport=PHONE) as tab:
        expect(tab.locator("#peers tbody tr")).to_have_count(len(story.board.snapshot()["peers"]))
        seen = tab.locator("h2:visible").all_inner_texts()
        assert set(words) <= set(seen)
        assert ("Reward" in seen) == (role == "trainer")
        assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        small = "[...document.querySelectorAll('button, select, input')].filter(e => e.offsetParent && e.offsetHeight < 32).length"
        assert tab.evaluate(small) == 0, "what is touched is large enough for a finger"
        assert tab.locator("text=/NaN|undefined|null|\\[object/").count() == 0


def test_a_node_that_has_said_nothing_yet_is_a_page_too(browser):
    with shown(Snapshot()) as page, looking(browser, page) as tab:
        expect(tab.locator("#phase")).to_have_text("starting")
        expect(tab.locator("h1")).to_have_text("This node starts.")
        assert tab.locator("text=/NaN|undefined|null|\\[object/").count() == 0


def test_the_log_is_filtered_by_kind_and_by_text(browser):
    story = Story("sampler")
    for number in range(5):
        story.board.record("note", f"checkpoint {number}", {})
    with shown(story.board) as page, looking(browser, page) as tab:
        lines = tab.locator("#log li")
        expect(lines).to_have_count(8)
        tab.locator("#log-kind").select_option("note")
        expect(lines).to_have_count(5)
        tab.locator("#log-text").fill("POINT 3")
        expect(lines).to_have_count(1)
        expect(lines).to_contain_text("checkpoint 3")
        page.tell(lambda: story.board.record("note", "checkpoint 33", {}))
        page.tell(lambda: story.board.record("note", "something else", {}))
        expect(lines).to_have_count(2)
        tab.locator("#log-text").fill("")
        tab.locator("#log-kind").select_option("")
        expect(lines).to_have_count(10)
        expect(tab.locator("#log-foot")).to_have_text("10 lines")


def test_light_and_dark_follow_the_system_until_somebody_chooses(browser):
    story = a_long_story("trainer", 20)
    shade = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    )
    with shown(story.board) as page, looking(browser, page, color_scheme="dark") as tab:
        assert tab.evaluate(shade) < 120
        tab.emulate_media(color_scheme="light")
        tab.wait_for_function(f"() => {shade} > 600")
        tab.locator("#theme").focus()
        tab.keyboard.press("Enter")
        assert tab.evaluate(shade) < 120
        tab.reload()
        assert tab.evaluate(shade) < 120, "what was chosen is kept"
        expect(tab.locator("#phase")).to_have_text("working")


def test_text_of_strangers_is_shown_as_text(browser):
    story = Story("trainer", name=HOSTILE, contract=HOSTILE)
    story.turn()
    story.counts["dropped"][HOSTILE] = 7
    story.turn()
    story.swarm(engine=HOSTILE, muted=HOSTILE)
    story.board.record(HOSTILE, HOSTILE, {})
    with shown(story.board) as page, looking(browser, page) as tab:
        for place in ("h1", "#run-name", "#refused", "#verdicts", "#peers", "#facts", "#log", "#log-kind"):
            expect(tab.locator(place)).to_contain_text(SHOWN)
        assert tab.locator("main img, main b, h1 *").count() == 0
        assert tab.evaluate("window.hacked") is None
        assert "\x1b" not in tab.content()
        assert tab.title().startswith("<img")
        tab.set_viewport_size(PHONE)
        assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_the_swarm_moves_unless_somebody_wants_it_still(browser):
    story = a_long_story("trainer", 20)
    picture = "document.getElementById('swarm').toDataURL()"
    with shown(story.board) as page:
        with looking(browser, page) as tab:
            first = tab.evaluate(picture)
            tab.wait_for_function(f"before => {picture} !== before", arg=first)
            tip = tab.locator("#swarm-tip")
            for turn in range(50):  # the page is still being laid out, and a hand moves too
                box = tab.locator("#swarm").bounding_box()
                tab.mouse.move(box["x"] + box["width"] / 2 + turn % 2, box["y"] + box["height"] / 2 - 6)
                if "you" in (tip.text_content() or ""):
                    break
                tab.wait_for_timeout(100)
            expect(tip).to_contain_text("you · trainer")
        with looking(browser, page, reduced_motion="reduce") as tab:
            tab.wait_for_function("() => performance.now() > 500")
            first = tab.evaluate(picture)
            tab.evaluate(
                "new Promise(done => { let left = 30; const turn = () => left-- ? requestAnimationFrame(turn) : done(); turn(); })"
            )
            assert tab.evaluate(picture) == first


def test_with_the_token_a_person_pauses_the_node_and_without_it_sees_no_button(browser):
    story = a_long_story("sampler", 5)

    class Hand:
        def pause(self):
            story.board.record("paused", "paused by its person", {})

        def resume(self):
            story.board.record("resumed", "it goes on", {})

    with shown(story.board, token=SESAME, control=Hand()) as page, looking(browser, page) as tab:
        expect(tab.locator("#phase")).to_have_text("working")
        expect(tab.locator("#pause")).to_be_hidden()
        tab.goto("about:blank")
        tab.goto(f"{page.url}#token={SESAME}")
        button = tab.locator("#pause")
        expect(button).to_have_text("Pause")
        assert SESAME not in tab.url
        button.click()
        expect(button).to_have_text("Resume")
        expect(tab.locator("h1")).to_contain_text("Paused.")
        button.click()
        expect(tab.locator("#phase")).to_have_text("working")


def test_a_node_that_ends_is_noticed_and_one_that_is_back_is_found(browser):
    story = a_long_story("sampler", 5)
    with shown(story.board) as page:
        port = int(page.url.rstrip("/").rpartition(":")[2])
        visit = looking(browser, page, quietly=False)
        tab = visit.__enter__()
        expect(tab.locator("#notice")).to_be_hidden()
    expect(tab.locator("#notice")).to_contain_text("does not answer")
    expect(tab.locator("#phase")).to_have_text("lost")
    story.turn()
    with shown(story.board, port=port):
        expect(tab.locator("#phase")).to_have_text("working")
        expect(tab.locator("#notice")).to_be_hidden()
        expect(tile(tab, "Version")).to_have_text("6")
        visit.__exit__(None, None, None)


def test_everything_can_be_reached_by_keyboard_and_has_a_name(browser):
    with shown(a_long_story("trainer", 20).board) as page, looking(browser, page) as tab:
        expect(tab.locator("#peers tbody tr").first).to_contain_text(ME[-7:])
        reached = []
        for _ in range(14):
            tab.keyboard.press("Tab")
            reached.append(tab.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert {"theme", "versions", "peers", "log-kind", "log-text", "log"} <= set(reached)
        nameless = (
            "[...document.querySelectorAll('button, select, input, canvas, section, svg[role=img]')].filter(e =>"
            " !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.closest('label') || e.textContent.trim())).length"
        )
        assert tab.evaluate(nameless) == 0
