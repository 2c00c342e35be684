"""The page in a real browser. Needs Debian's chromium and the package playwright.

``SCREENSHOTS=docs/images pytest -m slow tests/report/test_browser.py -k "light or phone"`` takes
the pictures of the documentation.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.report.records import published
from twoshift.bench.table import load_table
from twoshift.report.compare import compare
from twoshift.report.page import Facts, render

pytestmark = pytest.mark.slow
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
)
DESKTOP, PHONE = {"width": 1180, "height": 980}, {"width": 390, "height": 844}
FIRST = "#table-1 table.main"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=FLAGS.split())
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    tables = [load_table(name) for name in ("table1-cifar10", "table6-prior")]
    # pictures for the documentation show nothing that was made up
    records = published(as_measured="SCREENSHOTS" in os.environ)
    facts, results = Facts(), {r.key: r for r in records}
    text = render(compare(tables, facts.over(iter(results.values()))), facts, results.get)
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(text)
    return file


@pytest.fixture
def visit(browser, path):
    """Open the page; at the end nothing was said, thrown or asked for."""
    heard, contexts = [], []

    def open_page(viewport=DESKTOP, scheme="light"):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url))
        page.goto(path.as_uri())
        assert set(heard) == {path.as_uri()}
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert set(heard) == {path.as_uri()}


@pytest.fixture
def screenshots(tmp_path) -> Path:
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(exist_ok=True)
    return folder


def names(page) -> list[str]:
    return page.eval_on_selector_all(
        f"{FIRST} > tbody", "bodies => bodies.filter(b => !b.hidden).map(b => b.dataset.name)"
    )


def fits(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_headers_sort_by_click_and_keyboard(visit):
    page = visit()
    before = names(page)
    head = page.locator(f"{FIRST} > thead th", has_text="B50")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert names(page)[0] == "IABN+Ours (oracle)"
    assert names(page)[-1] == "TENT+Ours"
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert names(page)[0] == "TENT+Ours"
    method = page.locator(f"{FIRST} > thead th", has_text="Method")
    method.locator("button").press("Space")
    assert names(page) == sorted(before, key=str.lower)
    assert head.get_attribute("aria-sort") == "none"


def test_a_row_opens_and_moves_with_its_details(visit):
    page = visit()
    body = page.locator(f'{FIRST} > tbody[data-name="TENT"]')
    button, detail = body.locator("th button"), body.locator(".detail")
    assert not detail.is_visible()
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert "defocus blur" in detail.inner_text()
    page.locator(f"{FIRST} > thead button").first.click()
    assert detail.is_visible()
    body.locator(".row td").first.click()
    assert not detail.is_visible()


def test_the_filter_hides_rows_lines_and_panels(visit):
    page = visit()
    page.fill("#filter", "tent ours")
    assert names(page) == ["TENT+Ours", "TENT+Ours (oracle)"]
    assert page.locator("#table-1 g.line:visible").count() == 2
    assert page.locator("#table-1 .panels figure:visible").count() == 2
    assert not page.locator("#table-2").is_visible()
    page.fill("#filter", "")
    assert page.locator("#table-2").is_visible()


def test_warnings_open_from_the_number(visit):
    page = visit()
    details = page.locator("#alarms-1")
    assert details.get_attribute("open") is None
    page.locator(f"{FIRST} a.warn").first.click()
    assert details.get_attribute("open") is not None
    assert details.locator("li").first.is_visible()


def test_a_key_picks_its_line(visit):
    page = visit()
    page.locator("#table-1 .key", has_text="TENT+identity").click()
    picked = page.locator("#table-1 g.line.picked")
    assert picked.count() == 1
    assert picked.get_attribute("data-name") == "TENT+identity adapter"


def test_dark_and_light(visit, screenshots):
    page = visit()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    shoot(page, screenshots / "report-light.png")
    page.click("#theme")
    dark = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == dark  # remembered
    page.locator(f'{FIRST} > tbody[data-name="IABN+Ours"] th button').click()
    page.evaluate("document.querySelector('#table-1 .plot').scrollIntoView({block: 'center'})")
    shoot(page, screenshots / "report-dark.png")
    assert visit(scheme="dark").evaluate(ground) == dark


def test_a_phone_scrolls_tables_not_the_page(visit, screenshots):
    page = visit(PHONE)
    assert fits(page)
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)"
    )
    page.locator(f'{FIRST} > tbody[data-name="TENT"] th button').click()
    assert fits(page)
    page.locator("#table-1 h2").evaluate("e => window.scrollTo(0, e.offsetTop + 150)")
    shoot(page, screenshots / "report-phone.png")


def shoot(page, path: Path) -> None:
    page.screenshot(path=path)
    assert 20_000 < path.stat().st_size < 300_000
