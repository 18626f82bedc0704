"""The chat page in headless Chromium: streaming, stop, regenerate, folds, code, dark mode, a phone, keys, no markup."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, serving, wait_for

from bloomery.launcher.http.app import PAGE_HEADERS

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1000,800"
)
PAGE = Path(__file__).resolve().parent.parent / "launcher" / "http" / "page.html"
EVIL = (
    "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script> [a](javascript:alert(1)) "
    "**bold** and `<b>code</b>`\n\n```html\n<script>document.title='pwned'</script>\n" + "wide " * 60 + "\n```\n"
    "1. one\n2. two\n\n- <svg onload=\"document.title='pwned'\">\n\n" + "y" * 400
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--demo", "tiny", "--threads", "1", "-np", "1", "-c", "2048", "--temp", "0") as running:
        yield running


@pytest.fixture(scope="module")
def written() -> Iterator[str]:
    """The page in front of a model that answers with whatever could hurt a page. (No real model can be made to.)"""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _send(self, kind: str, data: bytes) -> None:
            self.send_response(200)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **PAGE_HEADERS}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/":
                self._send("text/html; charset=utf-8", PAGE.read_bytes())
            else:
                self._send("application/json", json.dumps({"data": [{"id": "<i>model</i>"}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            deltas = [{"reasoning_content": "First <b>I</b> think.\nThen more."}]
            deltas += [{"content": EVIL[start : start + 7]} for start in range(0, len(EVIL), 7)]
            chunks = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
            self._send("text/event-stream", "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode())

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    running.execute_cdp_cmd("Network.enable", {})
    yield running
    running.quit()


class Page:
    """The page as a person has it before them."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        browser.get(url)
        self.run("localStorage.clear()")
        browser.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(f"return {script}", *arguments)

    def find(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def click(self, text: str) -> None:
        (button,) = [button for button in self.find("button") if button.text == text and button.is_displayed()][-1:]
        button.click()

    def type(self, text: str) -> None:
        self.find("#input")[0].send_keys(text)

    def answer(self) -> str:
        return str(self.run("[...document.querySelectorAll('.assistant .text')].at(-1)?.textContent ?? ''"))

    def done(self) -> bool:
        return not self.find("#stop")[0].is_displayed() and bool(self.answer())

    def requests(self) -> list[str]:
        entries = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]


STOP_WHEN_IT_HAS_GROWN = """(() => {
    const seen = new Set();
    const timer = setInterval(() => {
        const stop = document.getElementById("stop");
        const text = [...document.querySelectorAll(".assistant .text")].at(-1)?.textContent ?? "";
        seen.add(text.length);
        if (stop.offsetParent && text.length > 20 && seen.size > 2) { clearInterval(timer); stop.click(); }
    }, 2);
})()"""


def test_an_answer_streams_stops_and_comes_again(browser: Any, server: Serving) -> None:
    page = Page(browser, server.url)
    browser.get_log("performance")
    page.run(STOP_WHEN_IT_HAS_GROWN)  # by the page's own clock: the model may be done before a driver's click arrives
    page.type("package main\n")  # the enter key sends
    wait_for(page.done)
    assert "stopped" in page.find(".assistant .tools")[-1].text
    assert wait_for(lambda: not server.get("/slots").json[0]["is_processing"])
    stopped = page.answer()
    page.run("document.getElementById('max_tokens').value = 12")
    page.click("Regenerate")
    wait_for(page.done, 20)
    again = page.answer()
    assert len(page.find(".turn")) == 2 and again and stopped.startswith(again[:20])
    assert "cut at the limit" in page.find(".assistant .tools")[-1].text
    assert "tokens" in page.find("#meter")[0].text
    page.type("func")
    browser.switch_to.active_element.send_keys("\ue008\ue007\ue000", "more")  # shift and enter: a new line
    assert page.find("#input")[0].get_property("value") == "func\nmore"
    browser.switch_to.active_element.send_keys("\ue007")
    wait_for(lambda: len(page.find(".turn")) == 4 and page.done(), 20)
    assert " cached" in page.find("#meter")[0].text and not page.find("#meter")[0].text.endswith(" 0 cached")
    assert all(url.startswith((server.url, "data:")) for url in page.requests()), "no outside resources"
    browser.refresh()
    assert len(page.find(".turn")) == 4, "a conversation survives a reload"
    page.click("New")
    assert not page.find(".turn") and page.find("#welcome")


def test_what_a_model_writes_is_text(browser: Any, written: str) -> None:
    page = Page(browser, written)
    browser.get_log("browser")
    page.type("hello\n")
    wait_for(page.done)
    assert page.run("document.title") == page.find("#model")[0].text == "<i>model</i>"
    assert not page.find("main img, main script, main svg, main a, main b")
    assert page.find("main strong")[0].text == "bold" and page.find("main p code")[0].text == "<b>code</b>"
    assert page.find("pre code")[0].text.startswith("<script>") and page.find(".codehead span")[0].text == "html"
    assert len(page.find("ol li")) == 2 and len(page.find("ul li")) == 1
    fold = page.find("details")[0]
    assert fold.get_property("open") is False
    page.find("summary")[0].send_keys("\ue007")  # by the keyboard
    assert fold.get_property("open") is True and "First <b>I</b> think." in fold.text
    assert not [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]


def test_a_phone_needs_no_sideways_scrolling(browser: Any, written: str) -> None:
    page = Page(browser, written)
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.type("hello " * 30)
        page.click("Send")
        wait_for(page.done)
        assert page.run("document.documentElement.scrollWidth") == 390
        log = "document.getElementById('log')"
        assert page.run(f"{log}.scrollWidth <= {log}.clientWidth")
        assert page.run("document.querySelector('pre').scrollWidth > document.querySelector('pre').clientWidth")
        for button in page.find("header button, #send"):
            assert button.rect["x"] >= 0 and button.rect["x"] + button.rect["width"] <= 390
            assert button.rect["height"] >= 30
        page.click("Settings")
        box = page.find("dialog")[0].rect
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        page.click("Done")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_dark_and_light_follow_the_system_and_can_be_read(browser: Any, written: str) -> None:
    page = Page(browser, written)
    seen = {}
    for scheme in ("light", "dark"):
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
        style = "getComputedStyle(document.body)"
        colours = [page.run(f"{style}.{name}.match(/[\\d.]+/g).map(Number)") for name in ("color", "backgroundColor")]
        seen[scheme] = [luminance(colour) for colour in colours]
        darker, lighter = sorted(seen[scheme])
        assert (lighter + 0.05) / (darker + 0.05) > 7
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen["light"][1] > 0.8 > 0.1 > seen["dark"][1]


def luminance(colour: list[float]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2)."""
    linear = [c / 12.92 if (c := part / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
