"""The dashboard in a real browser, over a real scheduler and gateway with 200 agents and 100 000
jobs: every page, tokens, orders, search, keyboard, a phone, and the gateway's end and return."""

import json
import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bench.operations_world import Asking, Busy, busy
from scheduler.gateway.access import HttpRole, create_token, revoke_token

AGENTS, JOBS = 200, 100_000
PAGES = ("overview", "agents", "policies", "weights", "jobs", "events", "explain/agent-0000")
PAINT_MS, DRAW_MS = 3000.0, 100.0
"""The first is a second on a machine of one's own; ``bench.operations`` has the figures."""
WAIT_MS = 15_000.0
PHONE = {"width": 390, "height": 844}
MARKUP = '<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>'
REFUSED = "Failed to load resource"
"""What Chromium says of every answer from 400 on."""

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Busy]:
    if CHROMIUM is None:
        if os.environ.get("FARFLOW_TESTS_NEED_CHROMIUM") == "1":
            pytest.fail("chromium is not on the path: apt-get install chromium")
        pytest.skip("chromium is not on the path: apt-get install chromium")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARFLOW_HTTP__ENABLED", "true")  # tests have no gateway unless they say so
        with busy(AGENTS, JOBS) as made:
            yield made


@pytest.fixture(scope="module")
def browser(deployment: Busy) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT_MS)
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


def token(deployment: Busy, name: str, role: str) -> str:
    """A new one that the gateway knows."""
    secret = create_token(deployment.keys, name, HttpRole(role))
    known(deployment, secret)
    return secret


def known(deployment: Busy, secret: str) -> None:
    """Returns once the gateway takes a token."""
    asking = Asking(deployment._replace(token=secret))
    for _ in range(100):
        try:
            asking.timed("/v1/about")
            return
        except AssertionError:
            time.sleep(0.1)
        finally:
            asking.close()
    raise AssertionError("the gateway did not look at its tokens")


@contextmanager
def opened(
    browser: Browser, deployment: Busy, place: str = "", *, refusals: bool = False, **look: object
) -> Iterator[Page]:
    """A page at ``place`` of the dashboard; nothing is wrong on it at the end, but answers that
    are refused where ``refusals`` are meant."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **look})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{deployment.address}/{place}")
    yield page
    assert [text for text in wrong if not (refusals and text.startswith(REFUSED))] == []
    context.close()


def in_(deployment: Busy) -> str:
    return f"#token={deployment.token}"


def go(page: Page, name: str) -> None:
    page.evaluate("name => { location.hash = `#/${name}`; }", name)


def drawn(page: Page, more: int) -> list[float]:
    """Milliseconds of the next ``more`` updates."""
    had = page.evaluate("performance.getEntriesByName('farflow:draw').length")
    found = "performance.getEntriesByName('farflow:draw').slice(had).map(e => e.duration)"
    page.wait_for_function(f"([had, more]) => {found}.length >= more", arg=[had, more])
    return list(page.evaluate(f"had => {found}", had))


def cells(page: Page, column: int) -> list[str]:
    return page.locator(f"tbody tr > :nth-child({column})").all_text_contents()


def test_every_page_is_drawn_soon_and_without_an_error(browser, deployment):
    with opened(browser, deployment, in_(deployment)) as page:
        expect(page.locator(".tile b").first).to_have_text(f"{AGENTS} / {AGENTS}")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        assert page.evaluate(paint) < PAINT_MS
        assert page.evaluate("location.hash + sessionStorage.length") == "1"
        expect(page.locator("svg circle")).to_have_count(7)
        for name in PAGES:
            go(page, name)
            expect(page.locator("main .card:not([hidden])").first).to_be_visible()
            assert statistics.median(drawn(page, 3)) < DRAW_MS, name
        expect(page.locator("main")).to_contain_text("agent agent-0000")
        go(page, "agents")
        expect(page.locator("tbody tr")).to_have_count(AGENTS)
        page.get_by_role("searchbox", name="Find agents").fill("eu-west-3")
        expect(page.locator("tbody tr")).to_have_count(len(range(0, AGENTS, 6)))
        go(page, "events")
        expect(page.locator("ul.log li")).not_to_have_count(0)
        now = page.evaluate("Date.now() / 1000")
        said = page.locator("ul.log li").first.text_content() or ""
        told = time.strptime(said.split()[0], "%H:%M:%S")
        here = time.localtime(now)
        ago_s = (here.tm_hour - told.tm_hour) * 3600 + (here.tm_min - told.tm_min) * 60
        assert (ago_s + here.tm_sec - told.tm_sec) % 86400 < 120


def test_rows_out_of_sight_change_when_they_come_in_sight_or_by_turns(browser, deployment):
    with opened(browser, deployment) as page:
        page.evaluate("""async () => {
          const { Table } = await import(new URL("assets/dom.js", document.baseURI));
          const columns = [{ title: "Name", text: (row) => row.name },
            { title: "Value", text: (row) => String(row.value) }];
          const table = new Table(columns, (row) => row.name);
          document.body.replaceChildren(table.element);
          window.update = (value) => table.show(
            Array.from({ length: 300 }, (_, at) => ({ name: `row-${at}`, value })));
          window.update(0);
        }""")
        expect(page.locator("tbody tr")).to_have_count(300)
        assert set(cells(page, 2)) == {"0"}
        page.evaluate("new Promise(requestAnimationFrame)")
        page.evaluate("window.update(1)")
        values = cells(page, 2)
        assert values[:20] == ["1"] * 20
        late = next(at for at in range(299, 0, -1) if values[at] == "0")
        assert 150 < values.count("0") < 280
        page.locator("tbody tr").nth(late).scroll_into_view_if_needed()
        expect(page.locator("tbody tr").nth(late).locator("td")).to_have_text("1")
        page.evaluate("scrollTo(0, 0)")
        page.evaluate("for (let value = 2; value < 8; value++) window.update(value)")
        assert "1" not in cells(page, 2)


def test_runs_come_before_the_map_which_is_there_only_with_a_site(browser, deployment):
    """A deployment without labels had an empty world on its first screen."""
    with opened(browser, deployment, in_(deployment)) as page:
        expect(page.locator(".tile b").first).to_have_text(f"{AGENTS} / {AGENTS}")
        titles = page.locator("main .card:visible h2").all_text_contents()
        assert titles.index("Runs") < titles.index("Sites")
        shown = """async ([labels]) => {
          const { Overview } = await import(new URL("assets/overview.js", document.baseURI));
          const agent = { name: "a", state: "ready", slots: 1, rtt_s: null, labels };
          const view = new Overview({ about: {}, tokens: () => 0,
            status: { agents: [agent], runs: [], demand: [], uptime_s: 1 } });
          view.show();
          return !view.sites.hidden;
        }"""
        assert not page.evaluate(shown, [{}])
        assert page.evaluate(shown, [{"latitude": "48.1", "longitude": "11.6"}])


def test_an_address_that_leads_nowhere_harms_nothing(browser, deployment):
    with opened(browser, deployment, in_(deployment), refusals=True) as page:
        for name in ("explain/%", "explain/nobody"):
            go(page, name)
            expect(page.locator("main .bad")).to_be_visible()
        go(page, "nothing")
        expect(page.locator(".tiles")).to_be_visible()


def test_a_token_is_asked_for_until_one_counts_and_again_when_it_is_revoked(browser, deployment):
    secret = token(deployment, "passing", "viewer")
    with opened(browser, deployment, refusals=True) as page:
        dialog = page.get_by_role("dialog", name="Access token")
        expect(dialog).to_be_visible()
        expect(page.locator("#access-problem")).to_be_empty()
        page.get_by_label("Token", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#access-problem")).to_contain_text("not (or no longer) valid")
        page.get_by_label("Token", exact=True).fill(secret)
        dialog.get_by_role("button").click()
        expect(page.locator(".tiles")).to_be_visible()
        expect(dialog).not_to_be_visible()
        page.reload()
        expect(page.locator(".tiles")).to_be_visible()
        revoke_token(deployment.keys, "passing")
        expect(dialog).to_be_visible()
        expect(page.locator("#access-problem")).to_contain_text("not (or no longer) valid")
        page.evaluate("hash => { location.hash = hash; }", in_(deployment))
        expect(dialog).not_to_be_visible()
        expect(page.locator(".tiles")).to_be_visible()


def order(page: Page, agent: str, name: str, reason: str, answer: str) -> None:
    page.get_by_role("row", name=agent).get_by_role("button", name=name, exact=True).click()
    dialog = page.get_by_role("dialog", name=f"{name.lower()} {agent}?")
    dialog.get_by_label("Reason").fill(reason)
    dialog.get_by_role("button", name=answer).click()


def test_an_order_is_asked_back_given_and_recorded(browser, deployment):
    with opened(browser, deployment, in_(deployment)) as page:
        go(page, "agents")
        page.get_by_role("searchbox").fill("agent-0007")
        state = page.get_by_role("row", name="agent-0007").locator("td").first
        order(page, "agent-0007", "Cordon", "", "No")
        expect(page.locator("#notice")).to_be_empty()
        expect(state).to_have_text("ready")
        order(page, "agent-0007", "Cordon", "a new fan", "Yes")
        expect(page.locator("#notice")).to_have_text("cordon agent-0007: done")
        expect(state).to_have_text("cordoned")
        drawn(page, 2)
        expect(page.locator("#notice")).to_have_text("cordon agent-0007: done")
        order(page, "agent-0007", "Uncordon", "", "Yes")
        expect(state).to_have_text("ready")
    record = Path(deployment.world.config.scheduler.folder) / "http-audit.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    asked = [line["path"].rpartition("/")[2] for line in lines if "agent-0007" in line["path"]]
    assert "cordon" in asked
    assert asked.count("cordon") == asked.count("uncordon")


def test_a_viewer_is_told_why_an_order_was_refused(browser, deployment):
    place = f"#token={token(deployment, 'watching', 'viewer')}"
    with opened(browser, deployment, place, refusals=True) as page:
        go(page, "agents")
        page.get_by_role("searchbox").fill("agent-0008")
        order(page, "agent-0008", "Drain", "", "Yes")
        expect(page.locator("#notice")).to_contain_text("watching has role viewer")
        expect(page.get_by_role("row", name="agent-0008").locator("td").first).to_have_text("ready")


def test_jobs_are_found_turned_over_and_explained(browser, deployment):
    with opened(browser, deployment, in_(deployment)) as page:
        go(page, "jobs")
        note = page.locator("main [role=status]")
        expect(note).to_have_text("100 shown, there are more")
        assert set(cells(page, 4)) == {"in flight"}
        page.get_by_label("State").select_option("queued")
        page.get_by_label("Run", exact=True).select_option("bench")
        page.get_by_label("Find jobs").fill("bench/x-load-2.")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr td").nth(2)).to_have_text("queued")
        found = cells(page, 1)
        assert len(found) == 100
        assert all(name.startswith("bench/x-load-2.") for name in found)
        page.get_by_role("button", name="More").click()
        expect(note).to_have_text("200 shown, there are more")
        assert cells(page, 1)[:100] == found
        assert len(set(cells(page, 1))) == 200
        page.get_by_label("Find jobs").fill("bench/nothing")
        page.get_by_role("button", name="Find").click()
        expect(note).to_have_text("None found.")
        page.get_by_label("Explain").fill(found[0])
        page.keyboard.press("Enter")
        expect(page.locator("main h2").first).to_have_text(f"job {found[0]}")
        expect(page.locator("main .mark")).to_be_visible()
        page.go_back()
        expect(note).to_have_text("None found.")


def test_everything_is_reached_by_keyboard(browser, deployment):
    with opened(browser, deployment, in_(deployment)) as page:
        go(page, "agents")
        expect(page.locator("tbody tr")).to_have_count(AGENTS)
        focused = "document.activeElement.textContent"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Skip to content"
        expect(page.get_by_text("Skip to content")).to_be_in_viewport()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        expect(page.get_by_role("row", name="agent-0000")).to_be_visible()
        while page.evaluate(focused) != "Leases":
            page.keyboard.press("Tab")
        head = page.get_by_role("columnheader", name="Leases")
        for direction in ("descending", "ascending"):
            page.keyboard.press("Enter")
            expect(head).to_have_attribute("aria-sort", direction)
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        slots = page.get_by_role("columnheader", name="Slots")
        expect(slots).to_have_attribute("aria-sort", "descending")
        expect(head).to_have_attribute("aria-sort", "none")
        drawn(page, 2)
        assert page.evaluate(focused) == "Slots", "an update takes no focus away"
        page.reload()
        expect(page.locator("tbody tr")).to_have_count(AGENTS)
        names = []
        for _ in range(8):
            page.keyboard.press("Tab")
            names.append(page.evaluate(focused))
        assert names[1:7] == ["Overview", "Agents", "Policies", "Weights", "Jobs", "Events"]
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="Events")).to_have_attribute("aria-current", "page")
        expect(page).to_have_title(re.compile("^Events"))


def test_light_dark_and_what_was_chosen(browser, deployment):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(246, 247, 249)", "rgb(13, 17, 23)"
    for scheme, meant in (("light", light), ("dark", dark)):
        with opened(browser, deployment, in_(deployment), color_scheme=scheme) as page:
            expect(page.locator(".tiles")).to_be_visible()
            assert page.evaluate(ground) == meant
            for name, chosen in (("light", light), ("dark", dark)):
                page.get_by_role("button", name="Theme").click()
                expect(page.get_by_role("button", name="Theme")).to_have_text(f"Theme: {name}")
                assert page.evaluate(ground) == chosen
            page.reload()
            assert page.evaluate(ground) == dark


def test_a_phone_scrolls_tables_and_never_the_page(browser, deployment):
    look = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    with opened(browser, deployment, in_(deployment), **look) as page:
        expect(page.locator(".tiles")).to_be_visible()
        for name in PAGES:
            go(page, name)
            drawn(page, 2)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
            assert page.evaluate("innerWidth") == PHONE["width"], name


def test_markup_in_a_reason_is_text(browser, deployment):
    where = in_(deployment)
    with closing(Asking(deployment)) as asking, opened(browser, deployment, where) as page:
        expect(page.locator(".tiles")).to_be_visible()
        asking.timed("/v1/agents/agent-0009/quarantine", "POST", json.dumps({"reason": MARKUP}))
        expect(page.locator("#alerts")).to_contain_text(MARKUP)
        for name in ("agents", "events", "explain/agent-0009", f"explain/{MARKUP}"):
            go(page, name)
            if name == "events":
                page.get_by_label("Filter events").fill("window.harmed")
            expect(page.locator("main")).to_contain_text(MARKUP)
            drawn(page, 2)
            assert page.locator("img, main script, #alerts script").count() == 0
        assert page.evaluate("window.harmed") is None
        asking.timed("/v1/agents/agent-0009/release", "POST", "{}")
        expect(page.locator("#alerts")).not_to_contain_text(MARKUP)


def test_the_gateway_may_end_and_the_page_goes_on(browser, deployment):
    with opened(browser, deployment, in_(deployment), refusals=True) as page:
        go(page, "events")
        expect(page.locator("ul.log li")).not_to_have_count(0)
        os.kill(deployment.gateway_pid(), signal.SIGKILL)
        expect(page.locator("#connection")).to_have_class("off")
        last = int(page.locator("ul.log li").first.get_attribute("data-number") or 0)
        expect(page.locator("#connection")).to_be_empty()
        page.wait_for_function(
            "last => Number(document.querySelector('ul.log li').dataset.number) > last", arg=last
        )
        numbers = "[...document.querySelectorAll('ul.log li')].map(e => Number(e.dataset.number))"
        found = page.evaluate(numbers)
        assert found == list(range(found[0], found[0] - len(found), -1)), "none is missing"
        go(page, "overview")
        expect(page.locator(".tile b").first).to_have_text(f"{AGENTS} / {AGENTS}")


def test_a_scheduler_that_does_not_answer_is_told_of_and_what_is_shown_not_taken_for_now(
    browser, deployment
):
    scheduler = deployment.started.process.pid
    with opened(browser, deployment, in_(deployment), refusals=True) as page:
        expect(page.locator(".tile b").first).to_have_text(f"{AGENTS} / {AGENTS}")
        expect(page.locator("#connection")).to_be_empty()
        os.kill(scheduler, signal.SIGSTOP)
        try:
            expect(page.locator("#connection")).to_contain_text("scheduler does not answer")
        finally:
            os.kill(scheduler, signal.SIGCONT)
        expect(page.locator("#connection")).to_be_empty()
