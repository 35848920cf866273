"""A report's page in a real Chromium: opened, resized, and asked what went wrong."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WIDTHS_PX = (1280, 390)


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
