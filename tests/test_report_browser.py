"""The report page in a real browser. Screenshots go to the test's temporary folder."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from foredraft.acceptance.html import render
from tests.browser import browser_paths, open_browser
from tests.made_up_report import QUICKSTART, made_up_report, many_candidates

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser_paths() is None, reason="no chromium and chromedriver on this machine"),
]
PHONE, DESK = 360, 1280
LONG_NAME = "a-candidate-" + "whose-name-goes-on-" * 6 + "x" * 80

WIDER_THAN_PAGE = """
    const page = document.documentElement;
    return [...document.querySelectorAll("body *")].filter(node =>
        !node.closest(".box") && node.getClientRects().length &&
        node.getBoundingClientRect().right > page.clientWidth + 1
    ).map(node => node.outerHTML.slice(0, 90));
"""
INVISIBLE = """
    return [...document.querySelectorAll("section")].filter(section =>
        !section.checkVisibility() || section.getBoundingClientRect().height < 60
    ).map(section => section.id);
"""
SMALLEST_TEXT = """
    const shown = [...document.querySelectorAll("svg text")].filter(text => text.getClientRects().length);
    return Math.min(...shown.map(text =>
        parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a));
"""


TALLEST_LEADERBOARD = """
    return Math.max(...[...document.querySelectorAll(".leaderboard")].map(table => table.closest(".box").clientHeight));
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    with open_browser() as driver:
        yield driver


def show(driver: webdriver.Chrome, page: Path, width: int, scheme: str) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE},
    )
    driver.get(page.as_uri())


def take_screenshot(driver: webdriver.Chrome, path: Path) -> None:
    image = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
    path.write_bytes(base64.b64decode(image))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "report.html"
    page.write_text(render(made_up_report([(LONG_NAME, *QUICKSTART[2][1:]), *QUICKSTART])), "utf-8")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_page_fits_the_width_and_shows_every_section(
    driver: webdriver.Chrome, page: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    show(driver, page, width, scheme)
    take_screenshot(driver, tmp_path / f"report-{width}-{scheme}.png")
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script(WIDER_THAN_PAGE) == []
    assert driver.execute_script(INVISIBLE) == []
    assert len(driver.find_elements("tag name", "section")) == 9
    assert driver.execute_script(SMALLEST_TEXT) >= 10
    paper = driver.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert (int(paper.removeprefix("rgb(").split(",")[0]) < 128) == (scheme == "dark")


@pytest.mark.slow
def test_many_drafters_scroll_inside_their_boxes(driver: webdriver.Chrome, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report = made_up_report(many_candidates(30))
    for drafter in (drafter for law in report["laws"] for drafter in law["drafters"]):
        del drafter["domains"]
    page.write_text(render(report | {"curves": {}}), "utf-8")
    show(driver, page, PHONE, "light")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE
    heights = driver.execute_script(
        "return [...document.querySelectorAll('.leaderboard')].map(t => t.closest('.box').clientHeight)"
    )
    assert max(heights) <= 0.8 * 800
    assert driver.execute_script("return document.querySelectorAll('#leaderboard tbody tr').length") == 60


def test_a_hostile_name_runs_nothing(driver: webdriver.Chrome, tmp_path: Path) -> None:
    name = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
    page = tmp_path / "report.html"
    page.write_text(render(made_up_report([(name, *QUICKSTART[0][1:])])), "utf-8")
    show(driver, page, DESK, "light")
    assert driver.title != "ran"
    assert driver.get_log("browser") == []
    assert name in driver.find_element("css selector", "h1").text
