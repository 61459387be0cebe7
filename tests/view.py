#!/usr/bin/env python3
"""view.py COMMAND [--events N] [--shots FOLDER]: the page of `cualloc view` in a headless Chromium.

COMMAND is the built `cualloc`. A made-up trace of so many events (10,000 without the option) is shown, and what the
page holds and draws is compared with sums over the trace made here. Exit code 77: there is no Chromium. --shots writes
two pictures of the page.
"""
import base64
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH = 1200
IMAGE = "<img src=x onerror=\"document.title='run'\">"
HOSTILE = "</script><script>document.title='run'</script>" + IMAGE


class Browser:
    """A Chromium with one tab, spoken to through a pair of pipes."""

    def __init__(self, program, folder):
        to_read, self.out = os.pipe()
        self.inp, to_write = os.pipe()

        def pipes():
            # Chromium reads its orders from 3 and answers on 4; the pipes may have these numbers themselves.
            high_read, high_write = os.dup(to_read), os.dup(to_write)
            os.dup2(high_read, 3)
            os.dup2(high_write, 4)

        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                    "--remote-debugging-pipe", f"--user-data-dir={folder}", f"--window-size={WIDTH},1000", "about:blank"]
        self.process = subprocess.Popen([program, *switches], close_fds=False, preexec_fn=pipes,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.rest, self.number, self.session, self.events = b"", 0, None, []
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def message(self):
        while b"\0" not in self.rest:
            some = os.read(self.inp, 1 << 20)
            if not some:
                raise RuntimeError("Chromium went away")
            self.rest += some
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def call(self, method, **parameters):
        self.number += 1
        order = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            order["sessionId"] = self.session
        os.write(self.out, json.dumps(order).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.value("""new Promise((done, not) => {
            const look = () => window.__view ? done(1) : document.getElementById('error')?.hidden === false
                && !document.getElementById('meta') ? not('no page') : setTimeout(look, 20);
            look();
        })""")

    def value(self, script):
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 and kind == "keyDown" else "")

    def wheel(self, x, y, by):
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self):
        """Errors of the console, refused requests, and requests for anything but the page."""
        bad = []
        for event in self.events:
            method, of = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or method == "Log.entryAdded" and of["entry"]["level"] == "error":
                bad.append(of)
            if method == "Network.requestWillBeSent" and not of["request"]["url"].startswith("file:"):
                bad.append(of["request"]["url"])
        return bad

    def shot(self, path, height):
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        taken = self.call("Page.captureScreenshot", format="webp", quality=70)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait()


def rows(events):
    """Rows of a trace, and the requested bytes after each."""
    chance, live, made, lines, sums, total = random.Random(5), {}, 0, [], [], 0
    sizes = [300, 4096, 70_000, 1 << 20, 3 << 20, 24 << 20]
    while len(lines) < events:
        if live and (len(live) > 250 or chance.random() < 0.45):
            block = chance.choice(list(live))
            size, stream = live.pop(block)
            lines.append(f"f,{block},0,{stream}")
            total -= size
        else:
            size, stream = chance.choice(sizes) + chance.randrange(1000), chance.choice([0, 0, 0, 3, 8])
            live[made] = (size, stream)
            lines.append(f"a,{made},{size},{stream}")
            made, total = made + 1, total + size
        sums.append(total)
    return lines, sums


def same(what, found, expected):
    if found != expected:
        raise AssertionError(f"{what}: the page has {found}, it should be {expected}")


def view(command, trace, page, *options):
    subprocess.run([command, "view", "-q", trace, "-o", page, *options], check=True)


def totals(browser, sums):
    """Totals of any range at any zoom are those of the trace, and few rectangles are drawn."""
    chance, events = random.Random(6), len(sums)
    same("the requested bytes", browser.value("Array.from(__view.curves.requested)"), sums)
    ranges = [(0, events)]
    for _ in range(40):
        begin = chance.randrange(events)
        ranges.append((begin, min(events, begin + 1 + int(events ** chance.random()))))
    for mode in ("stacked", "address"):
        for begin, end in ranges:
            asked = f"(() => {{ __view.state.mode = '{mode}'; __view.view({begin}, {end});" \
                f" return [__view.extent('requested', {begin}, {end}), __view.extent('allocated', {begin}, {end})," \
                f" __view.extent('reserved', {begin}, {end}), __view.drawn, innerWidth," \
                f" __view.stacks(innerWidth).map(c => [c.first, c.last, c.total, c.rest," \
                f" c.blocks.reduce((sum, b) => sum + __view.data.asked[b], 0)])] }})()"
            requested, allocated, reserved, drawn, width, stacks = browser.value(asked)
            same("the least and most of a range", requested, [min(sums[begin:end]), max(sums[begin:end])])
            if not requested[1] <= allocated[1] <= reserved[1]:
                raise AssertionError(f"{requested} {allocated} {reserved}")
            if not 0 < sum(drawn.values()) <= 4 * width:
                raise AssertionError(f"{drawn} at a width of {width}")
            for first, last, total, rest, blocks in stacks:
                same("the height of a stack", total, max(sums[first:last]))
                same("its parts", rest + blocks, total)


def by_hand(browser):
    """Keys, wheel and pointer do what the page says."""
    browser.value("__view.view(0, 1e9)")
    span = lambda: browser.value("__view.state.to - __view.state.from")
    whole, box = span(), browser.value("(b => [b.left, b.top])(document.getElementById('bands').getBoundingClientRect())")
    browser.key("+")
    same("half of the rows after +", span(), whole / 2)
    browser.key("0")
    same("all rows after 0", span(), whole)
    browser.wheel(box[0] + 300, box[1] + 50, -100)
    browser.value(f"new Promise(done => {{ const look = () => __view.state.to - __view.state.from < {whole} ? done()"
                  " : setTimeout(look, 10); look(); })")
    browser.key("0")
    browser.click(box[0] + 400, box[1] + 50)
    row = browser.value("__view.state.row")
    if abs(row / whole - 400 / (WIDTH - 30)) > 0.05:
        raise AssertionError(f"a click selects row {row} of {whole}")
    browser.key("m")
    same("the marked row", browser.value("__view.state.marked"), row)
    browser.key("End")
    same("the last row", browser.value("__view.state.row"), whole - 1)


def pace(browser):
    """Milliseconds of 60 steps of zoom, the slowest of 19 in 20, drawn without a GPU; nobody judges them."""
    times = browser.value("""(() => { const times = []; __view.view(0, 1e9);
        for (let n = 0; n < 60; n++) { const begin = performance.now(); __view.zoom(n < 30 ? 0.8 : 1.25, __view.state.row);
            document.getElementById('bands').getContext('2d').getImageData(0, 0, 1, 1); times.push(performance.now() - begin); }
        return times.sort((a, b) => a - b); })()""")
    return times[len(times) * 19 // 20]


def tables(browser, sums):
    """Tables say what the pictures show."""
    browser.value("__view.select(__view.curves.requested.length - 1)")
    found = browser.value("document.getElementById('figures').textContent")
    if f"After row {len(sums)}: requested " not in found:
        raise AssertionError(found)
    live = browser.value("""(() => { let sum = 0; for (const b of __view.largest(__view.state.row, Infinity).found)
        sum += __view.data.asked[b]; return sum; })()""")
    same("the sum of the live blocks", live, sums[-1])
    for at in range(browser.value("__view.maps.length")):
        held, row = browser.value(f"""(m => [m.pieces.filter(p => !p.segment.view).reduce((s, p) => s + p.size, 0), m.row])
            (__view.maps[{at}])""")
        same("the bytes of a map", held, browser.value(f"__view.curves.reserved[{row}]"))
    if browser.value("document.querySelectorAll('#live tbody tr').length") == 0:
        raise AssertionError("no live block in the table")


def main():
    arguments = sys.argv[1:]
    option = lambda name, usual: arguments[arguments.index(name) + 1] if name in arguments else usual
    command, events, shots = Path(arguments[0]).resolve(), int(option("--events", "10000")), option("--shots", None)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        print("there is no Chromium")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        lines, sums = rows(events)
        trace, page = folder / "made up.csv", folder / "page.html"
        trace.write_text("op,id,bytes,stream\n" + "\n".join(lines) + "\n")
        view(command, trace, page)
        page_bytes = page.stat().st_size
        if page_bytes > 64_000 + 16 * events:
            raise AssertionError(f"{page_bytes} bytes for {events} events")
        hostile, end = folder / "hostile.html", folder / "end.html"
        named = folder / f"{IMAGE}.csv"
        shutil.copy(trace, named)
        view(command, named, folder / "named.html")
        view(command, trace, end, "--limit", "0.6x", "--sim-memory", "8GiB")
        browser = Browser(program, folder / "profile")
        try:
            begin = time.monotonic()
            browser.open(page)
            loaded = time.monotonic() - begin
            paced = pace(browser)
            totals(browser, sums)
            by_hand(browser)
            tables(browser, sums)
            same("complaints", browser.complaints(), [])
            if shots:
                browser.value("document.getElementById('mode').value = 'stacked'; __view.state.mode = 'stacked';"
                              "__view.view(0, 1e9); __view.select(__view.curves.requested.indexOf(Math.max(...__view.curves.requested)))")
                browser.shot(Path(shots) / "view.webp", 1150)
            browser.open(end)
            same("the picture of the end", browser.value("document.getElementById('oom').hidden"), False)
            if shots:
                browser.shot(Path(shots) / "view-oom.webp", 420)
            browser.open(folder / "named.html")
            same("the name", browser.value("document.getElementById('name').textContent"), IMAGE)
            same("images", browser.value("document.images.length"), 0)
            same("complaints", browser.complaints(), [])
            # A file's name has no slash, so here is the same page with a hostile name in its data, in the very form in which the command writes names.
            text = page.read_text()
            name = json.dumps(HOSTILE).replace("<", "\\u003c").replace(">", "\\u003e")
            hostile.write_text(text.replace('"name":"made up"', '"name":' + name))
            browser.open(hostile)
            same("the name", browser.value("document.getElementById('name').textContent"), HOSTILE)
            same("scripts", browser.value("document.scripts.length"), 2)
            same("complaints", browser.complaints(), [])
        finally:
            browser.close()
    print(f"the page of {events} events is right: {page_bytes} bytes, shown after {loaded:.1f} s, a step of zoom {paced:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
