"""The page in Chromium: chat, the map while a request runs, what is escaped, keys, breaks, widths, light and dark."""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import fields

import pytest

pytest.importorskip("playwright", reason="needs the package playwright")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium, which is not on this machine: apt-get install chromium"
)

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright  # noqa: E402

from holdfast.memory.report import MemoryReport, MemoryRow  # noqa: E402
from server.page_world import World, make_world_app, serve  # noqa: E402
from server.served import said  # noqa: E402
from server.served import served as served_engine  # noqa: E402

WAIT_MS = 20_000
"""For what a busy machine may be slow to show."""
CONTRAST = """
(pairs) => pairs.map(([inner, outer]) => {
  const numbers = (value) => value.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (value) => {
    const [r, g, b] = numbers(value).map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const one = light(getComputedStyle(document.querySelector(inner)).color);
  const other = light(getComputedStyle(document.querySelector(outer)).backgroundColor);
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
})
"""
OUTSIDE = """
() => [...document.querySelectorAll('body *')].filter((node) => {
  const box = node.getBoundingClientRect();
  if (!box.width || !box.height || node.closest('.skip, .hidden, .table-room, pre, svg, .block')) return false;
  return box.right > innerWidth + 1 || box.left < -1;
}).map((node) => node.tagName + '.' + node.className)
"""
NAMELESS = """
() => [...document.querySelectorAll('button, input, textarea, summary, a')].filter((node) => {
  const label = node.labels?.[0]?.textContent ?? '';
  return !(node.getAttribute('aria-label') || node.textContent.trim() || label.trim());
}).map((node) => node.outerHTML)
"""
RING = """
() => {
  const node = document.activeElement;
  const room = node.closest('.composer');
  const hasRing = getComputedStyle(node).outlineStyle !== 'none' || (room && getComputedStyle(room).borderColor);
  return [node.id || node.className, node === document.body || Boolean(hasRing)];  // behind the last is the browser's own bar
}
"""
OUTLINE = """
async (text) => {
  const { show } = await import('/page/markdown.js');
  const box = document.createElement('div');
  for (let end = 0; end <= text.length; end++) show(box, text.slice(0, end));  // as a stream brings it
  const whole = document.createElement('div');
  show(whole, text);
  return [box.innerHTML, whole.innerHTML];
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[World, str]]:
    world = World()
    with serve(make_world_app(world)) as url:
        yield world, url


@pytest.fixture
def world(served: tuple[World, str]) -> Iterator[World]:
    """As new for every test; requests of the one before are over."""
    world, fresh = served[0], World()
    for name in (field.name for field in fields(World)):
        setattr(world, name, getattr(fresh, name))
    yield world
    world.key = None


def open_page(browser: Browser, url: str, width: int = 1600, scheme: str = "light") -> tuple[Page, list[str]]:
    """A page in a context of its own, and what went wrong on it: errors, and requests to anywhere else."""
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(WAIT_MS)
    page, faults = context.new_page(), []

    def heard(message: ConsoleMessage) -> None:
        # A browser reports every status above 399 by itself; those that a test means to cause are not faults.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            faults.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url) else faults.append(request.url))
    page.goto(url)
    return page, faults


@pytest.fixture
def opened(browser: Browser, served: tuple[World, str], world: World) -> Iterator[tuple[Page, World]]:
    page, faults = open_page(browser, served[1])
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    yield page, world
    page.context.close()
    assert faults == []


def say(page: Page, words: str) -> None:
    page.fill("#prompt", words)
    page.press("#prompt", "Enter")


def finished(page: Page) -> None:
    page.wait_for_selector("body:not(.running)")


def test_page_chat_sends_settings_and_shows_the_answer(opened: tuple[Page, World]) -> None:
    page, world = opened
    expect(page.locator("#model")).to_have_text("tiny-model")
    page.click("#settings summary")
    page.fill("#system", "Be brief.")
    page.fill("#seed", "7")
    page.fill("#max_tokens", "500")
    page.locator("#temperature").fill("0.5")
    page.fill("#prompt", "What is")
    page.press("#prompt", "Shift+Enter")
    page.locator("#prompt").press_sequentially("a page?")
    page.press("#prompt", "Enter")
    finished(page)
    (body,) = world.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\na page?"},
    ]
    assert {name: body[name] for name in ("model", "seed", "max_tokens", "temperature", "stream")} == {
        "model": "tiny-model",
        "seed": 7,
        "max_tokens": 500,
        "temperature": 0.5,
        "stream": True,
    }
    assert "top_p" not in body
    answer = page.locator("article.assistant .text")
    expect(answer.locator("strong")).to_have_text("keys and values")
    expect(answer.locator("ol > li")).to_have_count(2)
    expect(answer.locator("ol ul > li")).to_have_count(2)
    expect(answer.locator("pre code")).to_contain_text("return -(-tokens // 16)")
    expect(answer).to_contain_text("<b>no markup</b>")
    expect(page.locator(".cost")).to_contain_text("tok/s")
    for name in ("prompt-rate", "output-rate"):
        assert float(page.inner_text(f"#{name}").replace(",", "")) > 0
    used = re.fullmatch(r"([\d,]+) / 8,192", page.inner_text("#context-words"))
    assert used, page.inner_text("#context-words")
    assert int(used[1]) > 10
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("#system")).to_have_value("Be brief.")
    say(page, "And then?")
    finished(page)
    assert [message["role"] for message in world.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.slow
def test_page_map_grows_while_a_request_runs(opened: tuple[Page, World]) -> None:
    page, world = opened
    squares = page.locator("#pages i")
    expect(squares).to_have_count(728)
    expect(page.locator("#pages i.used")).to_have_count(0)
    expect(page.locator("#requests")).to_contain_text("No request runs")
    world.seconds_per_token = 0.05
    say(page, "x" * 320)
    expect(page.locator("#pages i.r0")).not_to_have_count(0)
    first = page.locator("#pages i.r0").count()
    row = page.locator("#requests tr").first
    expect(row).to_contain_text("this chat")
    expect(row).to_contain_text("decode")
    # 320 tokens of prompt are 20 pages, 10 squares; 64 tokens of answer four pages more.
    page.wait_for_function("(first) => document.querySelectorAll('#pages i.r0').length > first", arg=first)
    assert first >= 10
    assert float(page.inner_text("#rate-output")) > 0
    world.preemptions += 1
    finished(page)
    expect(page.locator("#pages i.used")).to_have_count(0)
    expect(page.locator("#pages i.cached")).not_to_have_count(0)
    expect(row).to_contain_text("finished")
    expect(page.locator("#events")).to_contain_text("1 request was preempted")
    assert (
        page.get_attribute("#pages", "aria-label")
        == f"KV pages: 0 in use, {world.cached} cached, {1456 - world.cached:,} free"
    )


@pytest.mark.slow
def test_page_map_marks_only_pages_of_this_chat(opened: tuple[Page, World]) -> None:
    page, world = opened
    expect(page.locator(".note")).to_contain_text("a prompt that begins alike starts there")
    other = world.begin(480)
    expect(page.locator("#pages i.r0")).to_have_count(15)
    expect(page.locator("#pages i.mine")).to_have_count(0)
    world.seconds_per_token = 0.05
    say(page, "x" * 320)
    expect(page.locator("#pages i.r1.mine")).not_to_have_count(0)
    expect(page.locator("#pages i.r0.mine")).to_have_count(0)
    expect(page.locator("#legend")).to_contain_text("of this chat")
    expect(page.locator("#requests tr.mine")).to_have_count(1)
    expect(page.locator("#requests tr:not(.mine)")).to_contain_text("chatcmpl-")
    assert page.locator("#pages i.r1:not(.mine)").count() == 0
    page.keyboard.press("Escape")
    finished(page)
    expect(page.locator("#pages i.mine")).to_have_count(0)
    world.end(other)


@pytest.mark.slow
def test_page_memory_owners_are_drawn_to_scale(opened: tuple[Page, World]) -> None:
    page, world = opened
    expect(page.locator(".block")).to_have_count(8)
    areas = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('.block')].map((node) =>"
        " [node.title.split(':')[0], node.offsetWidth * node.offsetHeight]))"
    )
    rows = {row["owner"]: row["held_bytes"] for row in world.memory()["rows"]}
    assert areas["kv pages"] / areas["weights"] == pytest.approx(rows["kv pages"] / rows["weights"], rel=0.05)
    assert areas["weights"] / areas["python and torch"] == pytest.approx(
        rows["weights"] / rows["python and torch"], rel=0.05
    )
    expect(page.locator("#accounts")).to_contain_text("1.90 GiB")
    expect(page.locator("#accounts")).to_contain_text("−38.1 MiB")
    page.click("#fold summary")
    expect(page.locator("#owners tr").filter(has_text="staging")).to_contain_text("freed")
    expect(page.locator("#owners tr").filter(has_text="sampling")).to_contain_text("a bound")


@pytest.mark.slow
def test_page_esc_stops_and_keeps_the_text(opened: tuple[Page, World]) -> None:
    page, world = opened
    world.seconds_per_token = 0.1
    say(page, "Go on")
    expect(page.locator("article.assistant .text")).to_contain_text("Paged")
    page.keyboard.press("Escape")
    finished(page)
    expect(page.locator(".cost")).to_contain_text("stopped")
    expect(page.locator("#pages i.used")).to_have_count(0)
    assert world.aborted == 1
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.slow
def test_page_regenerate_edit_clear_and_undo(opened: tuple[Page, World]) -> None:
    page, world = opened
    world.answer = "one"
    say(page, "First")
    finished(page)
    world.answer = "two"
    page.click("text=Regenerate")
    expect(page.locator("article.assistant .text")).to_have_text("two")
    finished(page)
    page.press("#prompt", "ArrowUp")
    page.fill(".edit textarea", "Second")
    page.press(".edit textarea", "Enter")
    finished(page)
    assert [body["messages"][-1]["content"] for body in world.bodies] == ["First", "First", "Second"]
    assert len(world.bodies[-1]["messages"]) == 1
    page.click("#clear")
    expect(page.locator("article")).to_have_count(0)
    page.click("#toast-undo")
    expect(page.locator("article")).to_have_count(2)


def test_page_broken_stream_shows_an_error_in_its_message(opened: tuple[Page, World]) -> None:
    page, world = opened
    world.break_after = 3
    say(page, "Hello")
    finished(page)
    expect(page.locator("article .fault")).to_have_text("the engine has stopped")
    expect(page.locator("article.assistant .text")).to_contain_text("Paged attention keeps")


@pytest.mark.slow
def test_reasoning_is_folded(opened: tuple[Page, World]) -> None:
    page, world = opened
    world.reasoning, world.answer = "First I think.", "Then I say."
    say(page, "Hello")
    finished(page)
    expect(page.locator(".thoughts .text")).to_be_hidden()
    page.click(".thoughts summary")
    expect(page.locator(".thoughts .text")).to_contain_text("First I think.")
    expect(page.locator("article.assistant > .text")).to_have_text("Then I say.")


def test_page_escapes_markup_in_all_text(opened: tuple[Page, World]) -> None:
    page, world = opened
    bad = "<img src=x onerror=alert(1)><script>alert(2)</script> [go](javascript:alert(3)) **<svg onload=alert(4)>**"
    world.answer = f"{bad}\n\n```html\n{bad}\n```\n\n| a | b |\n|---|---|\n| {bad} | x |\n\n- {bad}"
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    say(page, bad)
    finished(page)
    assert page.locator("#log").locator("img, script, svg, a").count() == 0
    expect(page.locator("#log pre code")).to_have_text(bad)
    expect(page.locator(".said")).to_have_text(bad)


MARKDOWN = [
    ("a *b* **c** `d*e*`", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code></p>"),
    ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
    ("# Title\ntext", "<h3>Title</h3><p>text</p>"),
    ("- a\n- b\n  - c\n\ntext", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>text</p>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("&lt; <b> &amp;", "<p>&amp;lt; &lt;b&gt; &amp;amp;</p>"),
    ("**never closed", "<p>**never closed</p>"),
    (
        "see https://example.org/a.",
        '<p>see <a href="https://example.org/a" rel="noopener noreferrer nofollow" target="_blank">https://example.org/a</a>.</p>',
    ),
]


@pytest.mark.slow
def test_page_markdown_streamed_equals_markdown_at_once(opened: tuple[Page, World]) -> None:
    page, _ = opened
    for text, markup in MARKDOWN:
        streamed, whole = page.evaluate(OUTLINE, text)
        assert whole == markup
        assert streamed == markup
    bomb = "*a_" * 20_000 + "[" * 20_000 + "`" * 2_001 + "| - " * 5_000
    seconds = page.evaluate(
        "async (text) => { const { show } = await import('/page/markdown.js'); const begin = performance.now();"
        " show(document.createElement('div'), text); return (performance.now() - begin) / 1000; }",
        bomb,
    )
    assert seconds < 5


@pytest.mark.slow
def test_page_without_a_key_opens_the_dialog_and_keeps_the_key(
    browser: Browser, served: tuple[World, str], world: World
) -> None:
    world.key = "secret"
    page, faults = open_page(browser, served[1])
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key-field", "wrong")
    page.press("#key-field", "Enter")
    expect(page.locator("#key-fault")).to_have_text("The server does not know this key.")
    page.fill("#key-field", "secret")
    page.press("#key-field", "Enter")
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    say(page, "Hello")
    finished(page)
    expect(page.locator("article.assistant .text strong")).to_have_count(1)
    assert page.evaluate(
        "[sessionStorage.getItem('holdfast.key'), JSON.stringify(localStorage).includes('secret')]"
    ) == [
        "secret",
        False,
    ]
    page.reload()
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    page.context.close()
    assert faults == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1600])
def test_page_layout_at_each_width_light_and_dark(
    browser: Browser, served: tuple[World, str], world: World, width: int
) -> None:
    page, faults = open_page(browser, served[1], width)
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    page.click("#settings summary")
    say(page, "A question with a_very_long_word_" + "x" * 200)
    finished(page)
    pairs = [
        (".card h2", ".card"),
        (".card header p", ".card"),
        ("#legend", ".card"),
        (".said", ".said"),
        (".cost", "body"),
    ]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for view in ("chat", "memory"):
            if width == 400:
                page.click(f"[data-show={view}]")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{scheme} {view}"
            assert page.evaluate(OUTSIDE) == [], f"{scheme} {view}"
        for pair, contrast in zip(pairs, page.evaluate(CONTRAST, pairs), strict=True):
            assert contrast >= 4.5, f"{scheme} {pair}: {contrast:.1f}"
    assert page.evaluate(NAMELESS) == []
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.click("#theme")
    chosen = page.evaluate(background)
    assert chosen != before
    page.reload()
    assert page.evaluate(background) == chosen, "the choice is kept"
    page.context.close()
    assert faults == []


@pytest.mark.slow
def test_page_controls_are_reachable_by_keyboard(opened: tuple[Page, World]) -> None:
    page, _ = opened
    page.click("#settings summary")
    page.evaluate("document.activeElement.blur(); document.body.focus()")
    reached, ringless = [], []
    for _step in range(30):
        page.keyboard.press("Tab")
        name, has_ring = page.evaluate(RING)
        reached.append(name)
        if not has_ring:
            ringless.append(name)
    wanted = {"theme", "system", "temperature", "top_p", "top_k", "max_tokens", "seed", "reset", "prompt", "send"}
    assert wanted <= set(reached)
    assert ringless == []
    assert page.get_attribute("#log", "aria-live") == "polite"


@pytest.mark.slow
def test_page_reconnects_after_the_server_restarts(browser: Browser) -> None:
    world = World()
    with serve(make_world_app(world)) as url:
        page, _ = open_page(browser, url)
        expect(page.locator("#link")).to_have_attribute("data-state", "live")
    expect(page.locator("#link")).to_have_attribute("data-state", "lost")
    say(page, "Anybody there?")
    expect(page.locator("article .fault")).to_have_text("The server does not answer. Is it still running?")
    with serve(make_world_app(world), port=int(url.rpartition(":")[2])):
        expect(page.locator("#link")).to_have_attribute("data-state", "live")
        expect(page.locator("#events")).to_contain_text("The connection is back.")
        page.context.close()


REPORT = MemoryReport(
    (
        MemoryRow("kv pages", 1024 * 2**12, 1024 * 2**12, "1024 pages of 16 tokens"),
        MemoryRow("weights", 2**21, 2**21, "all of them"),
    ),
    budget_bytes=2**24,
    budget_reason="what a test has",
    kv_bytes_per_token=2**8,
    kv_tokens=1024 * 16,
    max_model_len=1024,
)


@pytest.mark.slow
def test_page_works_with_the_whole_server(browser: Browser) -> None:
    """The application as it is served, over an engine whose steps take a moment."""
    with served_engine(memory=REPORT, clock=time.monotonic) as running:
        running.engine.runner.on_step = lambda step: time.sleep(0.01)  # type: ignore[attr-defined]
        page, faults = open_page(browser, running.url)
        expect(page.locator("#link")).to_have_attribute("data-state", "live")
        expect(page.locator("#model")).to_have_text("fake")
        expect(page.locator("#pages i")).to_have_count(1024)
        expect(page.locator(".block")).to_have_count(2)
        say(page, said("There **it** is. " * 12))
        expect(page.locator("#pages i.r0")).not_to_have_count(0)
        first = page.locator("#pages i.r0").count()
        page.wait_for_function("(first) => document.querySelectorAll('#pages i.r0').length > first", arg=first)
        expect(page.locator("#requests tr").first).to_contain_text("decode")
        finished(page)
        expect(page.locator("article.assistant .text strong")).to_have_count(12)
        expect(page.locator(".cost")).to_contain_text("tokens")
        expect(page.locator("#pages i.used")).to_have_count(0)
        expect(page.locator("#pages i.cached")).not_to_have_count(0)
        say(page, said("on and on " * 25))
        expect(page.locator("article.assistant").nth(1).locator(".text")).to_contain_text("on and on")
        page.keyboard.press("Escape")
        expect(page.locator("#pages i.used")).to_have_count(0)
        page.context.close()
        assert faults == []
