"""Retake the pictures of the web page in docs/images/, with Chromium and `holdfast serve` with the default model.

    python scripts/page_screenshots.py [--url http://127.0.0.1:8000] [--out docs/images]

Without --url the script starts a server. Several requests run meanwhile, so that the map is not empty. Two earlier requests
leave cached pages. The page uses the installed fonts; the committed pictures are from a machine with only DejaVu.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
QUESTION = "Write a Python function that adds two numbers."
OTHERS = (
    "Tell a long story about a lighthouse keeper and a whale.",
    "Write a letter from a grandmother to her grandson who is far away." + " She misses him." * 60,
    "Explain what a computer is to a person from 1850." + " Be patient and thorough." * 40,
)
EARLIER = ("Name three seas." * 12, "What is a page of memory?" * 14)
"""Earlier chats, whose cached pages the pictures show."""
START_SECONDS = 180.0
SIZES = {"wide": (1600, 1100), "narrow": (400, 860)}


@contextmanager
def own_server() -> Iterator[str]:
    """Run a server with the default model on a free port during the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "serve", "--port", str(port), "--kv-cache-memory", "256MiB"]
    )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=2):
                yield url
                return
            time.sleep(0.5)
        sys.exit("the server did not become ready")
    finally:
        process.terminate()
        process.wait()


def asking(url: str, model: str, prompt: str, max_tokens: int) -> urllib.request.Request:
    """Return a request for a stream."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


def ask(url: str, model: str, prompt: str, end: threading.Event) -> None:
    """Read one stream until the pictures are taken, then disconnect, which ends it."""
    while not end.is_set():
        with urllib.request.urlopen(asking(url, model, prompt, 900)) as answer:
            for _line in answer:
                if end.is_set():
                    return


def take(page: Page, folder: Path, name: str) -> None:
    path = folder / f"page-{name}.png"
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take_all(browser: Browser, url: str, folder: Path) -> None:
    """Take each size in light and dark; the narrow one has two views."""
    for scheme in ("light", "dark"):
        for size, (width, height) in SIZES.items():
            viewport = {"width": width, "height": height}
            context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
            context.set_default_timeout(120_000)  # the model and the browser share the machine
            page = context.new_page()
            page.goto(url)
            page.wait_for_selector("#link[data-state=live]")
            page.click("#settings summary")
            page.fill("#temperature", "0")
            page.click("#settings summary")
            page.fill("#prompt", QUESTION)
            page.press("#prompt", "Enter")
            page.wait_for_function("() => document.querySelector('article.assistant .text').textContent.length > 280")
            take(page, folder, f"{size}-{scheme}")
            if size == "narrow":
                page.click("[data-show=memory]")
                page.wait_for_timeout(700)
                take(page, folder, f"{size}-memory-{scheme}")
            context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("Chromium was looked for; it is not on this machine; apt-get install chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    with own_server() if options.url is None else nullcontext(options.url.rstrip("/")) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        for prompt in EARLIER:
            with urllib.request.urlopen(asking(url, model, prompt, 8)) as answer:
                answer.read()
        end = threading.Event()
        threads = [threading.Thread(target=ask, args=(url, model, prompt, end)) for prompt in OTHERS]
        try:
            for thread in threads:
                thread.start()
                time.sleep(1.5)
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=chromium)
                take_all(browser, url, options.out)
                browser.close()
        finally:
            end.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
