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
import re
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

    def open(self, path, query=""):
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri() + query)
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

    def drag(self, x, y, by, modifiers=0):
        for kind, at in (("mousePressed", x), ("mouseMoved", x + by / 2), ("mouseMoved", x + by), ("mouseReleased", x + by)):
            self.call("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1, clickCount=1,
                      modifiers=modifiers)

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

    def picture(self, name):
        """An element as it is shown, as the bytes of a PNG."""
        box = self.value(f"(b => [b.left + scrollX, b.top + scrollY, b.width, b.height])"
                         f"(document.getElementById('{name}').getBoundingClientRect())")
        clip = dict(zip(("x", "y", "width", "height"), box), scale=1)
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        taken = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

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
    traces = trace if isinstance(trace, list) else [trace]
    subprocess.run([command, "view", "-q", *traces, "-o", page, *options], check=True)


def stack(size):
    """The stack in which a block of this size is allocated, as the page names it."""
    return f"train.py:1:<main>;model.py:{size % 7}:layer{size % 3}"


def snapshot(lines, path, grown=0):
    """A snapshot of PyTorch's as JSON of these rows, blocks larger by so much; and its live blocks at the peak."""
    sizes, entries, live, total, most, peak = {}, [], {}, 0, -1, {}
    for line in lines:
        op, block, size, stream = line.split(",")
        if op == "a":
            size = int(size) + grown
            sizes[block] = size
            frames = [dict(zip(("filename", "line", "name"), (f"/m/{file}", int(number), name)))
                      for file, number, name in (part.split(":") for part in reversed(stack(size).split(";")))]
            entries.append({"action": "alloc", "addr": 512 * int(block), "size": size, "stream": int(stream), "frames": frames})
            live[block], total = size, total + size
            if total > most:
                most, peak = total, dict(live)
        else:
            size = sizes[block]
            total -= live.pop(block)
            for action in ("free_requested", "free_completed"):
                entries.append({"action": action, "addr": 512 * int(block), "size": size, "stream": int(stream)})
    path.write_text(json.dumps({"segments": [], "device_traces": [entries]}))
    return peak


def by_stack(blocks):
    groups = {}
    for size in blocks.values():
        count, amount = groups.get(stack(size), (0, 0))
        groups[stack(size)] = (count + 1, amount + size)
    return groups


def two_files(browser, before, after):
    """What the page says of two files is what their blocks add up to, and contexts are those of the blocks."""
    groups = browser.value("JSON.parse(document.getElementById('meta').textContent).difference.groups")
    expected = {}
    for side, blocks in enumerate((before, after)):
        for name, sums in by_stack(blocks).items():
            expected.setdefault(name, [0, 0, 0, 0])[2 * side:2 * side + 2] = sums
    found = {name: sums for name, *sums in groups["peak"]["context"]}
    same("bytes by context in both files", found, expected)
    change = sum(after.values()) - sum(before.values())
    for group, lines in groups["peak"].items():
        same(f"the change by {group}", sum(line[4] - line[2] for line in lines), change)
        changes = [abs(line[4] - line[2]) for line in lines]
        same(f"the order by {group}", changes, sorted(changes, reverse=True))
    for group in ("context", "size", "stream"):
        browser.value(f"(s => {{ s.value = '{group}'; s.onchange({{ target: s }}); }})(document.getElementById('files-group'))")
        same("rows of the table", browser.value("document.querySelectorAll('#files-table tbody tr').length"), len(groups["peak"][group]))
    colours = browser.value("""(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)
        (document.getElementById('files-canvas'))""")
    if colours < 3:
        raise AssertionError("nothing is drawn of the difference")
    # At the peak, which is selected.
    sums = browser.value("""[...__view.sums(b => __view.data.born[b] <= __view.state.row && __view.data.freed[b] > __view.state.row)
        .context].map(([index, of]) => [JSON.parse(document.getElementById('meta').textContent).contexts[index - 1], of.count, of.bytes])""")
    same("live bytes by context", {name: tuple(sums) for name, *sums in sums}, by_stack(after))
    shown = browser.value("document.getElementById('live-sums').textContent")
    for name in by_stack(after):
        if name not in shown:
            raise AssertionError(f"{name} is in no table")
    picture = lambda: browser.value(CHECKSUM + "('bands')")
    browser.value("(s => { s.value = 'stream'; s.onchange({ target: s }); })(document.getElementById('colour'))")
    plain = picture()
    browser.value("(s => { s.value = 'context'; s.onchange({ target: s }); })(document.getElementById('colour'))")
    coloured = picture()
    browser.value("(i => { i.value = 'layer1'; i.oninput({ target: i }); })(document.getElementById('find'))")
    if len({plain, coloured, picture()}) != 3:
        raise AssertionError("colours by context or what is looked for are not seen")


CHECKSUM = """(id => { const canvas = document.getElementById(id), pen = canvas.getContext('2d');
    const words = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer); let sum = 0, some = 0;
    for (const word of words) { sum = (Math.imul(sum, 31) + word) | 0; some |= word; }
    return some ? sum : 'empty'; })"""


def cannot_serve(browser):
    """After the last row of a replay that found no memory no free piece could have served it, and each has a reason."""
    asked = browser.value("JSON.parse(document.getElementById('meta').textContent).out_of_memory.requested")
    same("the request", browser.value("__view.state.wanted"), asked)
    reasons = browser.value("""(() => { const map = __view.maps[__view.maps.length - 1], why = {};
        for (const piece of __view.contents(map).pieces) if (!piece.segment.view && piece.state) {
            const word = __view.reason(piece) || 'could serve'; why[word] = (why[word] || 0) + piece.size; }
        return why; })()""")
    if not reasons or "could serve" in reasons:
        raise AssertionError(f"of what is free: {reasons}")
    holes = browser.value("JSON.parse(document.getElementById('meta').textContent).out_of_memory.holes.map(h => h.bytes)")
    same("rows of holes", browser.value("document.querySelector('#oom-holes tbody').children.length"), len(holes))
    colours = browser.value("""(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)
        (document.getElementById('oom-canvas'))""")
    if colours < 3:
        raise AssertionError("the picture of the end is empty")
    texts = browser.value("__view.labels['oom-canvas'].map(label => label[4])")
    if texts[0] != "requested" or len(texts) % 2 or len(texts) < 2 * len(holes):
        raise AssertionError(f"the picture of the end has {texts}")


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


def size_of(text):
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def summarized(browser, sums, limit, *words):
    """The first line has the peaks, their ratio and the limit, and then these words."""
    line = browser.value("document.getElementById('summary').textContent")
    found = re.fullmatch(r"Peak ([0-9.]+ \w+) requested, ([0-9.]+ \w+) reserved, ratio ([0-9.]+), limit ([^.]+|[0-9.]+ \w+)\.(.*)", line)
    if not found:
        raise AssertionError(line)
    requested, reserved = map(size_of, found.groups()[:2])
    if sums and abs(requested / max(sums) - 1) > 0.01 or abs(reserved / requested - float(found[3])) > 0.01:
        raise AssertionError(line)
    if (found[4] == "none") != (limit is None) or not all(word in found[5] for word in words):
        raise AssertionError(line)
    first = "document.querySelector('header').children[1].id"
    same("what comes first after the name", browser.value(first), "summary")


def shown(browser):
    """Pictures are not empty, also in dark colours; their axes have ticks, and no text lies on another one."""
    for scale in ("linear", "log"):
        browser.value(f"(of => {{ of.value = '{scale}'; of.dispatchEvent(new Event('change')); }})(document.getElementById('scale'))")
        for span in (1, 0.5, 0.1, 0.003):
            browser.value(f"__view.view({0.4 - span / 2} * __view.data.born.length, {0.4 + span / 2} * __view.data.born.length)")
            boxes = browser.value("Object.entries(__view.labels)")
            for name, texts in boxes:
                for n, (left, top, right, bottom, text) in enumerate(texts):
                    for other in texts[:n]:
                        if left < other[2] and right > other[0] and top < other[3] and bottom > other[1]:
                            raise AssertionError(f"in {name} {text!r} lies on {other[4]!r}")
            axes = [text for *_, text in dict(boxes)["curves"]]
            rows = [text for text in axes if text.startswith("row ")]
            if len(rows) < 2 or len([text for text in axes if text.endswith("B")]) < 2:
                raise AssertionError(f"the axes have {axes}")
    browser.value("(of => { of.value = 'linear'; of.dispatchEvent(new Event('change')); })(document.getElementById('scale'))")
    browser.value("__view.view(0, 1e9)")
    taken = {}
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for name in ("summary", "curves", "bands"):
            taken[scheme, name] = picture = browser.picture(name)
            # A rectangle of one colour has less.
            if len(picture) < 2500:
                raise AssertionError(f"{name} has {len(picture)} bytes in {scheme} colours")
    for name in ("summary", "curves"):
        if taken["light", name] == taken["dark", name]:
            raise AssertionError(f"{name} has the same colours on a dark ground")
    browser.call("Emulation.setEmulatedMedia", features=[])


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
    shift = 8
    browser.key("0")
    browser.drag(box[0] + 400, box[1] + 50, 200, shift)
    begin, end = (browser.value(f"__view.state.{which}") / whole * (WIDTH - 30) for which in ("from", "to"))
    if abs(begin - 400) > 25 or abs(end - 600) > 25:
        raise AssertionError(f"the pixels 400 to 600 are chosen, {begin} to {end} are shown")
    browser.key("0")
    browser.drag(box[0] + 400, box[1] + 50, 200)
    same("rows after a drag of all", span(), whole)
    choose = "((of, to) => { of.value = to; of.dispatchEvent(new Event('change')); })(document.getElementById('scale'), '%s')"
    browser.value(choose % "log")
    heights = browser.value("[0, 1 << 10, 1 << 20, 1 << 30].map(amount => __view.share(amount, 2 ** 30))")
    if heights != sorted(heights) or heights[0] != 0 or heights[3] != 1 or abs(heights[2] - 2 / 3) > 0.01:
        raise AssertionError(f"a logarithmic scale has {heights}")
    browser.value(choose % "linear")
    same("half of a linear scale", browser.value("__view.share(5, 10)"), 0.5)
    sorting(browser)


def sorting(browser):
    """Heads of tables sort, and what is copied is what stands there."""
    click = "document.querySelectorAll('#live th')[%d].querySelector('button').click()"
    cells = "[...document.querySelectorAll('#live tbody tr')].map(row => Number(row.children[%d].textContent))"
    as_it_was = browser.value(cells % 0)
    browser.value(click % 0)
    same("the largest first", browser.value(cells % 0), sorted(as_it_was, reverse=True))
    same("what is said of it", browser.value("document.querySelectorAll('#live th')[0].ariaSort"), "descending")
    browser.value("__view.select(__view.state.row)")
    same("the order after another row", browser.value(cells % 0), sorted(as_it_was, reverse=True))
    browser.value(click % 0)
    same("the smallest first", browser.value(cells % 0), sorted(as_it_was))
    browser.value(click % 0)
    same("the order before", browser.value(cells % 0), as_it_was)
    browser.value(click % 1)
    words = browser.value("[...document.querySelectorAll('#live tbody tr')].map(row => row.children[1].textContent.split(' '))")
    amounts = [float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit) for number, unit in words]
    same("the order by bytes", amounts, sorted(amounts, reverse=True))
    browser.value(click % 1)
    browser.value(click % 1)
    lines = browser.value("""__view.csv(['a', 'b,c'], [[1, '2.00 KiB'], ['=1+1', 'say "x"'], ['-', '−3.00 B']])""")
    same("comma-separated values", lines, 'a,"b,c"\n1,2.00 KiB\n\'=1+1,"say ""x"""\n-,−3.00 B\n')


def pace(browser):
    """Milliseconds of 60 steps of zoom, the slowest of 19 in 20, drawn without a GPU; they are not checked."""
    times = browser.value("""(() => { const times = []; __view.view(0, 1e9);
        for (let n = 0; n < 60; n++) { const begin = performance.now(); __view.zoom(n < 30 ? 0.8 : 1.25, __view.state.row);
            document.getElementById('bands').getContext('2d').getImageData(0, 0, 1, 1);
            times.push(performance.now() - begin); }
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
        held, row = browser.value(f"""(m => [__view.contents(m).pieces.filter(p => !p.segment.view).reduce((s, p) => s + p.size, 0), m.row])
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
        print("SKIPPED: the page in a browser: there is no Chromium")
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
        before, after, both = folder / "before.json", folder / "after.json", folder / "both.html"
        few = lines[:min(events, 20000)]
        peaks = snapshot(few[:len(few) * 2 // 3], before), snapshot(few, after, 77)
        view(command, [before, after], both)
        browser = Browser(program, folder / "profile")
        try:
            begin = time.monotonic()
            browser.open(page)
            loaded = time.monotonic() - begin
            paced = pace(browser)
            totals(browser, sums)
            by_hand(browser)
            shown(browser)
            tables(browser, sums)
            summarized(browser, sums, None)
            same("the colours", browser.value("__view.state.colour"), "stream")
            same("complaints", browser.complaints(), [])
            if shots:
                browser.value("document.getElementById('mode').value = 'stacked'; __view.state.mode = 'stacked';"
                              "__view.view(0, 1e9); __view.select(__view.curves.requested.indexOf(Math.max(...__view.curves.requested)))")
                browser.shot(Path(shots) / "view.webp", 1150)
            browser.open(end)
            same("the picture of the end", browser.value("document.getElementById('oom').hidden"), False)
            cannot_serve(browser)
            summarized(browser, None, "0.6x", "Out of memory at row ", ", cause: ")
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
            # With the times of a recording, of which the rows between are estimated.
            named = folder / "timed.html"
            named.write_text(text.replace('"times":[]', f'"times":[[0,0],[{events - 1},{(events - 1) * 500}]]'))
            browser.open(named)
            browser.value("__view.select(4000)")
            figures = browser.value("document.getElementById('figures').textContent")
            same("the time of a row", figures.split(":")[0], "After row 4001, at 2 s")
            ticks = browser.value("__view.labels.curves.map(label => label[4]).filter(text => text.startsWith('row '))")
            if not ticks or not all(re.fullmatch(r"row \d+, [0-9.]+ (µs|ms|s)", text) for text in ticks):
                raise AssertionError(ticks)
            browser.open(both)
            same("the colours", browser.value("[__view.state.colour, document.getElementById('colour').value]"), ["context"] * 2)
            summarized(browser, None, None, "Most of it at the peak: train.py:1:<main>;model.py:")
            two_files(browser, *peaks)
            same("complaints", browser.complaints(), [])
            if shots:
                browser.value("(s => { s.value = 'context'; s.onchange({ target: s }); })(document.getElementById('files-group'))")
                browser.shot(Path(shots) / "view-files.webp", 700)
        finally:
            browser.close()
    print(f"the page of {events} events is right: {page_bytes} bytes, shown after {loaded:.1f} s, a step of zoom {paced:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
