"""A report's page in a real Chromium: how long it takes to open.

    python -m benchmarks.report.browser runs/quickstart/report/index.html

Prints size, time to open (median of five, without the start of the browser), errors, and what a
network was asked for.
Needs selenium, chromium and chromedriver. `tests/report/test_page_in_browser.py` drives a page.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WIDTHS_PX = (1280, 390)
_OPENINGS = 5


@contextmanager
def started_browser() -> Iterator[Any]:
    """A headless Chromium that logs what pages say and ask for."""
    os.environ["SE_OFFLINE"] = "true"  # the driver is there: nothing is looked for
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as driver:
        yield driver


def show_as(driver: Any, width_px: int, *, dark: bool = False) -> None:
    """Let pages be so wide from now on, and light or dark."""
    metrics = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def open_page(driver: Any, page: Path) -> float:
    """Open a page; seconds from the start until all of its views are drawn."""
    driver.get(page.resolve().as_uri())
    ready = "return document.documentElement.dataset.ready"
    WebDriverWait(driver, 60, poll_frequency=0.05).until(lambda _: driver.execute_script(ready))
    return float(driver.execute_script(ready)) / 1e3


def troubles(driver: Any) -> tuple[list[str], list[str]]:
    """Errors and warnings since the last look, and addresses asked for that are no page's own."""
    bad = [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    return bad, [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


@click.command()
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(page: Path) -> None:
    """Open PAGE some times."""
    with started_browser() as driver:
        show_as(driver, WIDTHS_PX[0])
        times_s = [open_page(driver, page) for _ in range(_OPENINGS)]
        bad, asked = troubles(driver)
    click.echo(f"{page}: {page.stat().st_size / 1e6:.1f} MB")
    listed = ", ".join(f"{time_s:.2f}" for time_s in sorted(times_s))
    click.echo(f"open after {statistics.median(times_s):.2f} s ({listed})")
    click.echo(f"{len(bad)} errors or warnings, {len(asked)} requests")


if __name__ == "__main__":
    main()
