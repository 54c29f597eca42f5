"""Pages in a real browser: every view is opened and used, nothing is asked of anybody, nothing goes wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import chromium
import gaff
from gaff.record.log import EVENT, LogReader, LogWriter
from made_records import HOSTILE, make

pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.executable() is None, reason="no Chromium on this machine, and none from npm"),
    pytest.mark.filterwarnings("ignore"),
]
VIEWS = {"training": ["verdict", "tree", "depth", "map", "site", "gradients", "origin", "optimizer", "last", "changes",
                      "coverage", "runs"],
         "trace": ["calls", "graph", "cost", "pictures", "parameters", "call"], "diff": ["diff"]}  # fmt: skip
AXE = chromium.PAGE / "node_modules/axe-core/axe.min.js"


@pytest.fixture(scope="module")
def browser():
    with chromium.opened() as opened:
        yield opened


class Tab:
    """A page that notes what it asks for and what goes wrong."""

    def __init__(self, browser, url, size=(1400, 900), theme="light", **more):
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme, **more)
        self.page = context.new_page()
        self.wrong, self.asked = [], []
        self.page.on("console", lambda one: one.type in ("error", "warning") and self.wrong.append(one.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda one: self.asked.append(one.url))
        self.page.goto(url)
        self.page.wait_for_selector("main *")

    def until(self, holds, arg=None):
        """Wait until a function of JavaScript says yes (the page forbids that text is evaluated as it waits)."""
        assert "=>" in holds
        self.page.wait_for_function(holds, arg=arg, timeout=30000)

    def go(self, hash):
        self.page.evaluate("hash => { location.hash = hash }", hash)
        self.drawn(hash.partition("?")[0])

    def drawn(self, within, without=None):
        """Wait until a page is drawn whose address has this in it, and that not."""
        self.until(
            """([within, without]) => document.getElementById('page').dataset.shown === location.hash
               && location.hash.includes(within) && !(without && location.hash.includes(without))""",
            [within, without],
        )
        self.page.wait_for_timeout(30)  # sizes are observed after it

    def text(self, selector="main"):
        return self.page.inner_text(selector)

    def check(self, allowed=()):
        assert self.wrong == []
        assert [one for one in self.asked if not one.startswith(("data:", "blob:", *allowed))] == []
        assert "cannot be drawn" not in self.text()
        self.page.context.close()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.act(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def runs(folder):
    found = []
    for name, bad in (("healthy", None), ("broken", 25)):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        clipping = gaff.clip_gradients(optimizer, norm=0.1, nonfinite="skip")
        with gaff.watch(model, optimizer, out=folder / name, every=1):
            for step in range(30):
                x = torch.randn(8, 1, 6, 6)
                if step == bad:
                    x[2] = float("nan")
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        clipping.remove()
        found.append(folder / name)
    return found


@pytest.fixture(scope="module")
def pages(folder, runs):
    """One page of each kind."""
    assert gaff_command("report", *map(str, runs), "--html", str(folder / "training.html")) == 0
    net = Net()
    trace = gaff.trace(net, torch.rand(1, 1, 12, 12), backward=lambda y: y[0, 0], pictures=True, ops=True)
    trace.save(folder / "trace.html")
    with torch.no_grad():
        net.fc.bias += 1
    gaff.diff(trace, gaff.trace(net, torch.rand(1, 1, 12, 12))).save(folder / "diff.html")
    return {name: f"file://{folder / name}.html" for name in VIEWS}


def gaff_command(*arguments):
    return subprocess.run([sys.executable, "-m", "gaff", *arguments], check=False, capture_output=True).returncode


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1400, 900), (400, 800)], ids=["wide", "narrow"])
@pytest.mark.parametrize("kind", VIEWS)
def test_every_view_draws_and_nothing_is_asked_of_anybody(browser, pages, kind, size, theme):
    tab = Tab(browser, pages[kind], size, theme)
    for run in (0, 1) if kind == "training" else (0,):
        for view in VIEWS[kind]:
            tab.go(f"#/{view}?run={run}")
            assert tab.text().strip(), view
            assert "cannot be drawn" not in tab.text(), view
            wide = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 1, f"{view} is cut off at the side"
    tab.check(allowed=("file://",))


def test_the_views_of_a_training_say_what_the_record_holds(browser, pages, runs):
    tab = Tab(browser, pages["training"])
    record = gaff.load(runs[1])
    tab.go("#/verdict?run=1")
    finding = next(one for one in record.findings if one.rule == "nonfinite")
    assert finding.message in tab.text()
    tab.go("#/origin?run=1")
    assert finding.cause in tab.text()
    tab.go("#/gradients?run=0")
    assert "conv.weight" in tab.text()
    tab.go("#/last?run=1")
    assert "NaN or inf" in tab.text()
    tab.go("#/changes?run=0")
    assert "clip_gradients" in tab.text()
    tab.go("#/coverage?run=0")
    assert f"looks\t{len(record.looks) and 30} of 30 steps" in tab.text()
    tab.go("#/site?run=0&site=conv%3Agrad_output")
    assert 'record.series("conv:grad_output", "rms")' in tab.text()
    tab.check(allowed=("file://",))


def test_filters_choices_clicks_and_links(browser, pages):
    tab = Tab(browser, pages["training"])
    tab.go("#/map")
    tab.page.select_option("select[aria-label=number]", "max")
    tab.drawn("stat=max")
    tab.page.fill("input.filter", "conv")
    tab.drawn("filter=conv")
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "filter sites"  # typing goes on
    tab.page.click("canvas.map", position={"x": 200, "y": 5})
    tab.drawn("#/site?site=conv")
    tab.page.go_back()
    tab.drawn("#/map")
    tab.page.reload()
    tab.page.wait_for_selector("canvas.map")
    assert tab.page.input_value("input.filter") == "conv"
    box = tab.page.locator("canvas.map").first.bounding_box()
    tab.page.mouse.move(box["x"] + 100, box["y"] + 5)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 500, box["y"] + 5)
    tab.page.mouse.up()
    tab.drawn("from=")
    tab.page.click("header button[title='show all steps']")
    tab.drawn("#/map", without="from=")
    tab.check(allowed=("file://",))


def test_keys(browser, pages):
    tab = Tab(browser, pages["training"])
    press = tab.page.keyboard.press
    press("5")
    tab.drawn("#/map")
    press("j")
    tab.drawn("#/site?")
    first = tab.page.url
    press("j")
    tab.until("first => location.href !== first", first)
    press("k")
    tab.until("first => location.href === first", first)
    press("]")
    tab.drawn("run=1")
    press("[")
    tab.drawn("#/", without="run=1")
    ground = "getComputedStyle(document.documentElement).getPropertyValue('--ground')"
    before = tab.page.evaluate(ground)
    press("t")
    tab.until(f"before => {ground} !== before", before)
    press("?")
    tab.until("() => document.getElementById('help')")
    press("Escape")
    tab.until("() => !document.getElementById('help')")
    press("3")
    tab.drawn("#/tree")
    press("/")
    tab.until("() => document.activeElement.tagName === 'INPUT'")
    tab.page.keyboard.type("3")
    tab.until("() => document.activeElement.value === '3'")
    tab.drawn("#/tree")  # typed, not gone to
    tab.check(allowed=("file://",))


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: make page")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", VIEWS)
def test_nothing_keeps_anybody_out(browser, pages, kind, theme):
    """axe-core, the rules of WCAG 2 A and AA: nothing serious in any view."""
    tab = Tab(browser, pages[kind], theme=theme, bypass_csp=True)
    tab.page.add_script_tag(path=str(AXE))
    for view in VIEWS[kind]:
        tab.go(f"#/{view}")
        tab.page.wait_for_timeout(150)
        found = tab.page.evaluate("async () => (await axe.run({runOnly: ['wcag2a', 'wcag2aa']})).violations")
        wrong = [(one["id"], [node["html"][:150] for node in one["nodes"][:3]]) for one in found
                 if one["impact"] in ("serious", "critical")]  # fmt: skip
        assert wrong == [], view
    tab.page.context.close()


def test_the_loss_and_what_happened_to_it_stand_first(browser, pages, runs):
    tab = Tab(browser, pages["training"])
    tab.go("#/verdict?run=1")
    assert "state\nwrong" in tab.text(".summary")
    assert "steps\n30" in tab.text(".summary")
    tab.page.click("summary:has-text('marked')")
    assert "nonfinite" in tab.text(".events")
    chart = tab.page.locator("figure[aria-label=loss] .plot")
    chart.focus()
    tab.page.keyboard.press("Home")
    tab.until("() => /step 0/.test(document.querySelector('figure[aria-label=loss] .legend').innerText)")
    tab.page.keyboard.press("ArrowRight")
    tab.until("() => /step 1/.test(document.querySelector('figure[aria-label=loss] .legend').innerText)")
    tab.page.select_option("select[aria-label=smoothing]", "0.9")
    tab.drawn("smooth=0.9")
    tab.page.click("figure[aria-label=loss] summary")
    tab.until("() => document.querySelectorAll('figure[aria-label=loss] tbody tr').length >= 25")  # the numbers
    box = tab.page.locator("figure[aria-label=loss] .u-over").bounding_box()
    tab.page.mouse.move(box["x"] + 100, box["y"] + 50)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 400, box["y"] + 50)
    tab.page.mouse.up()
    tab.drawn("from=")
    assert "steps" in tab.text("header")
    tab.go("#/optimizer?run=1" + tab.page.url[tab.page.url.index("&from") :].partition("&smooth")[0])
    assert "steps" in tab.text("header")  # the range is that of the whole page
    tab.check(allowed=("file://",))


def test_several_runs_are_compared_in_verdict_loss_and_settings(browser, pages):
    tab = Tab(browser, pages["training"])
    tab.go("#/runs")
    text = tab.text()
    assert "healthy" in text
    assert "broken" in text
    assert "settings are equal in all runs" in text
    tab.check(allowed=("file://",))


def test_tables_sort_by_a_click_and_keep_their_head(browser, pages):
    tab = Tab(browser, pages["trace"])
    tab.go("#/calls")
    tab.page.click("th button:has-text('own time')")
    tab.drawn("sort=-own")
    assert tab.page.get_attribute("th:has(button:has-text('own time'))", "aria-sort") == "descending"
    first = tab.page.inner_text("tbody tr:first-child td:first-child")
    tab.page.click("th button:has-text('own time')")
    tab.drawn("sort=own")
    assert tab.page.inner_text("tbody tr:last-child td:first-child") == first
    tab.check(allowed=("file://",))


def test_the_graph_folds_moves_and_tells_of_a_call(browser, pages):
    tab = Tab(browser, pages["trace"])
    tab.go("#/graph?level=0")
    assert tab.page.locator(".graph .node").count() == 1
    tab.page.locator(".graph .turn").first.click()
    tab.drawn("turned=0")
    assert tab.page.locator(".graph .node").count() > 3
    before = tab.page.get_attribute("svg.graph", "viewBox")
    tab.page.locator("svg.graph").focus()
    tab.page.keyboard.press("+")
    assert tab.page.get_attribute("svg.graph", "viewBox") != before
    moved = tab.page.get_attribute("svg.graph", "viewBox")
    tab.page.locator(".graph .node").nth(1).press("Enter")
    tab.drawn("at=")
    assert "gaff.capture(model" in tab.text("aside")
    tab.page.wait_for_timeout(50)
    zoom = [abs(float(one) - float(other)) for one, other in
            zip(moved.split(), tab.page.get_attribute("svg.graph", "viewBox").split(), strict=True)]  # fmt: skip
    assert max(zoom[0], zoom[2]) < 1  # it stays where it was, beside the panel
    tab.check(allowed=("file://",))


def test_costs_are_as_wide_as_their_share_and_a_click_looks_into_one(browser, pages):
    tab = Tab(browser, pages["trace"])
    tab.go("#/cost?of=parameters")
    wide = tab.page.locator(".flame rect").first.get_attribute("width")
    assert float(wide) > 1190
    tab.go("#/cost?of=memory")
    assert "By class" in tab.text()
    tab.page.locator(".flame a").nth(1).click()
    tab.drawn("at=")
    tab.check(allowed=("file://",))


def test_a_picture_is_made_large_and_tells_its_values(browser, pages):
    tab = Tab(browser, pages["trace"])
    tab.go("#/pictures?kind=feature%20maps")
    tab.page.locator("figure button").first.click()
    tab.page.locator("dialog canvas").focus()
    tab.page.keyboard.press("ArrowRight")
    tab.until("() => /channel 0, row 0, column 1: /.test(document.querySelector('dialog .told').innerText)")
    tab.page.keyboard.press("Escape")
    tab.until("() => !document.querySelector('dialog')")
    tab.check(allowed=("file://",))


def test_pictures_are_drawn(browser, pages):
    tab = Tab(browser, pages["trace"])
    tab.go("#/pictures?kind=feature%20maps")
    tab.until(  # of copies: Chromium warns of a page's own pictures that are read again and again
        """() => { const drawn = [...document.querySelectorAll('[open] canvas.picture')].slice(0, 3).map((canvas) => {
             const copy = document.createElement('canvas');
             [copy.width, copy.height] = [canvas.width, canvas.height];
             const context = copy.getContext('2d', {willReadFrequently: true});
             context.drawImage(canvas, 0, 0);
             return new Set(context.getImageData(0, 0, copy.width, copy.height).data).size > 8; });
           return drawn.length > 0 && drawn.every(Boolean); }"""
    )
    tab.check(allowed=("file://",))


def test_paper_shows_the_charts_that_nobody_scrolled_to(browser, pages):
    tab = Tab(browser, pages["training"], size=(1000, 300))
    tab.go("#/site?site=conv")
    waiting = "() => [...document.querySelectorAll('figure.chart .plot')].filter((one) => !one.firstChild).length"
    assert tab.page.evaluate(waiting) > 0
    tab.page.emulate_media(media="print")
    tab.page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    tab.until(f"() => ({waiting})() === 0")
    tab.check(allowed=("file://",))


def test_a_notebook_shows_the_page_in_a_frame(browser, folder):
    trace = gaff.trace(Net(), torch.rand(1, 1, 6, 6), pictures=True)
    (folder / "book.html").write_text(f"<!doctype html><p>cell</p>{trace.page()}")
    page = browser.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"file://{folder / 'book.html'}")
    frame = page.frame_locator("iframe")
    frame.locator("nav a", has_text="Pictures").click()
    frame.locator("canvas.picture").first.wait_for()
    assert wrong == []
    page.close()


ODD = [None, [], {}, "x", -1, 1e308, [[]], {"a": [1]}, [1, "a", None], "<img src=x onerror=alert(1)>"]


def test_hostile_records_are_shown_and_nothing_of_them_runs(browser, folder):
    names = [*HOSTILE, "<img src=x onerror=alert(1)>", "javascript:alert(1)", "__proto__", "constructor", "%", "a%20b"]
    make(folder / "hostile", sites=names)
    log = folder / "hostile" / "rank0.gaff"
    more = LogWriter(folder / "more.gaff")
    for at, odd in enumerate(ODD):
        for kind in ("model", "look", "progress", "changes", "flight", "begin"):
            fields = ("modules", "weights", "memory", "lines", "rows", "phase", "every", "what", "class", "compiled")
            more.write_json(EVENT, {"kind": kind, **dict.fromkeys(fields, odd)}, at)
    more.close()
    log.write_bytes(log.read_bytes() + (folder / "more.gaff").read_bytes()[8:])
    assert gaff_command("report", str(folder / "hostile"), "--html", str(folder / "hostile.html")) == 0
    tab = Tab(browser, f"file://{folder / 'hostile.html'}")
    dialogs = []
    tab.page.on("dialog", lambda one: dialogs.append(one.message))
    for view in VIEWS["training"]:
        tab.go(f"#/{view}")
        assert "cannot be drawn" not in tab.text(), view
    for name in names:
        tab.page.evaluate("site => { location.hash = '#/site?' + new URLSearchParams({ site }) }", name)
        tab.drawn("#/site")
    tab.go("#/%E0%A4%A?run=-1&x=%")
    assert dialogs == []
    tab.check(allowed=("file://",))


def test_a_page_that_was_cut_off_says_so(browser, pages, folder):
    whole = (folder / "training.html").read_text()
    at = whole.index('id="chunk-3"')
    (folder / "cut.html").write_text(whole[:at] + "></script>" + whole[whole.rindex("<script>") :])
    tab = Tab(browser, f"file://{folder / 'cut.html'}")
    tab.go("#/map")
    assert "was the file cut off?" in tab.text()


LONG = """
import pathlib, sys, time, torch
enough = pathlib.Path(__file__).with_name("enough")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(100_000):
    if step >= 400 and enough.exists():  # whoever looks on has seen it
        break
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
print(step, "steps done", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "long.py"
    path.write_text(LONG)
    return path


def start(script, out, *options):
    command = [sys.executable, "-m", "gaff", "watch", "--out", str(out), *options, "--", sys.executable, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment, start_new_session=True)  # fmt: skip


def serve(*runs):
    command = [sys.executable, "-m", "gaff", "report", *map(str, runs), "--live", "--idle", "1000"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    return server, server.stderr.readline().split()[-1]


def test_a_live_page_follows_the_run_to_its_end_and_connects_again(browser, script, tmp_path):
    watched = start(script, tmp_path / "run")
    server, url = serve(tmp_path / "run")
    try:
        tab = Tab(browser, url)
        tab.until(
            "() => /[1-9][0-9]*/.test(document.querySelector('.summary dl').innerText) && document.querySelector('.plot canvas')"
        )
        first = tab.text()
        tab.page.evaluate("document.querySelector('figure.chart').ours = true")
        tab.page.evaluate("location.hash = '#/verdict?from=5&to=20'")
        tab.drawn("from=5")
        tab.until("text => document.querySelector('main').innerText !== text", first)
        assert tab.text("#live") == "live"
        (tmp_path / "enough").touch()
        out, _ = watched.communicate(timeout=60)
        assert out.endswith(" steps done\n")
        tab.until("() => document.getElementById('live').innerText === 'ended'")
        assert f"steps\n{out.split()[0]}\n" in tab.text(".summary")
        assert tab.page.evaluate("document.querySelector('figure.chart').ours")  # the same chart, with other numbers
        assert "from=5&to=20" in tab.page.url
        tab.go("#/map?from=100&to=300")
        assert "steps 100 to 300" in tab.text("header")
        tab.check(allowed=(url.partition("?")[0],))
    finally:
        (tmp_path / "enough").touch()
        server.kill()
        server.wait()
        server.stderr.close()


def test_gaff_watch_live_serves_beside_the_command(browser, script, tmp_path):
    watched = start(script, tmp_path / "run", "--live", "--quiet")
    url = watched.stderr.readline().split()[-1]
    tab = Tab(browser, url)
    tab.until("() => /steps\\s+[1-9]/.test(document.querySelector('main').innerText)")
    (tmp_path / "enough").touch()
    out = watched.stdout.read()
    assert watched.wait(timeout=60) == 0
    watched.stderr.close()
    watched.stdout.close()
    assert out.endswith(" steps done\n")
    tab.until("() => document.getElementById('live').innerText === 'ended'")
    tab.check(allowed=(url.partition("?")[0],))
    port = url.split(":")[2].split("/")[0]
    for process in Path("/proc").glob("[0-9]*/cmdline"):  # it would wait ten minutes for somebody to look
        try:
            if b"--live" in process.read_bytes() and str(tmp_path).encode() in process.read_bytes():
                os.kill(int(process.parent.name), signal.SIGTERM)
        except (OSError, ValueError):
            continue
    assert port.isdigit()


def test_a_hundred_kills_lose_nothing_that_was_written_while_a_page_looks_on(browser, tmp_path):
    """Of a writer that says what it has written: the record opens and has all of it, and so has the page."""
    program = tmp_path / "writes.py"
    program.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "from pathlib import Path\n"
        "from made_records import MadeRun\n"
        "run = MadeRun(Path(sys.argv[1]), int(sys.argv[2]))\n"
        "for step in range(100000):\n"
        "    run.look(step)\n"
        "    run.steps(step, [float(step)])\n"
        "    print(step, flush=True)\n"
    )
    chance = random.Random(0)
    (tmp_path / "run").mkdir()
    server, url = serve(tmp_path / "run")
    lost = []
    try:
        for kill in range(100):
            folder = tmp_path / f"run{kill}"
            folder.mkdir()
            writer = subprocess.Popen(
                [sys.executable, str(program), str(folder), "0"], stdout=subprocess.PIPE, text=True
            )
            writer.stdout.readline()
            time.sleep(chance.random() * 0.02)
            writer.kill()
            told = [0, *(int(line) for line in writer.stdout.read().split())]
            writer.wait()
            writer.stdout.close()
            if kill == 0:
                (folder / "rank0.gaff").rename(tmp_path / "run" / "rank0.gaff")
                tab = Tab(browser, url)
                folder = tmp_path / "run"
            record = gaff.load(folder)
            if record.steps < told[-1] + 1 or len(record.series("fc1", "mean")) < told[-1] + 1:
                lost.append((kill, told[-1], record.steps))
        tab.until("() => /steps\\s+[1-9]/.test(document.querySelector('main').innerText)")
        tab.check(allowed=(url.partition("?")[0],))
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
    assert lost == []


def test_a_log_is_read_on_while_it_is_written(tmp_path):
    log = LogWriter(tmp_path / "rank0.gaff")
    reader = LogReader(tmp_path / "rank0.gaff")
    seen = []
    for step in range(50):
        log.write_json(EVENT, {"kind": "x", "step": step}, step)
        seen += [json.loads(frame.payload)["step"] for frame in reader.frames()]
    log.close()
    assert seen == list(range(50))
