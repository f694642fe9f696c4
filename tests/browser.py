"""A page of `ztrain report` in a real browser: headless Chromium, spoken to over its debugging pipe, nothing but Python needed.

    python3 tests/browser.py check PAGE.html      exit 0 it holds, 1 it does not, 77 no browser; numbers as one JSON line
    python3 tests/browser.py grow URL             tells the plots of a live page, waits for the validation's to appear, checks them
    python3 tests/browser.py shoot PAGE.html DIR  pictures of it: light, dark, narrow
    python3 tests/browser.py --install            installs Chromium where that is possible (Debian, root); 77 where not
"""

import base64
import json
import os
import pathlib
import select
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

NAMES = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome"]
NO_PROGRAM = 77


def found():
    return os.environ.get("ZTRAIN_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


def install(name, found, packages):
    """Installs packages of Debian for a test, where that is possible."""
    if found():
        print(f"{name} is there:", found())
        return 0
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"{name} is not there, and only root installs it, with apt-get")
        return NO_PROGRAM
    # Bounded, so that a machine without a network or with a busy package manager is not waited for.
    get = ["timeout", "240", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=30", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=10"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    wanted = get + ["install", "-y", "--no-install-recommends", *packages]
    if subprocess.call(wanted, **quiet) != 0:
        subprocess.call(get + ["update"], **quiet)
        subprocess.call(wanted, **quiet)
    print(f"installed {name}" if found() else f"apt-get does not install {name}")
    return 0 if found() else NO_PROGRAM


class Browser:
    """One tab of a headless browser; messages are JSON, each ended by a zero byte, on the descriptors 3 and 4."""

    def __init__(self, program):
        # A browser may crash as it starts (an own process, an own home each time): that says nothing of a page.
        for attempt in range(3):
            try:
                return self.start(program)
            except (EOFError, OSError, TimeoutError) as error:
                failed = f"{error}; exit code {self.close()}; its errors end with:\n{self.errors[-4000:]}"
        raise EOFError(failed)

    def start(self, program):
        self.home = tempfile.mkdtemp(prefix="ztrain-browser-")
        read, self.write = os.pipe()
        self.read, write = os.pipe()

        def descriptors():
            os.dup2(read, 13)
            os.dup2(write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", f"--user-data-dir={self.home}"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        quiet = subprocess.DEVNULL
        with open(os.path.join(self.home, "errors"), "wb") as errors:
            self.process = subprocess.Popen([program, *flags], preexec_fn=descriptors, close_fds=False, stdin=quiet, stdout=quiet, stderr=errors)
        os.close(read)
        os.close(write)
        self.rest, self.number, self.events = b"", 0, []
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.send(f"{domain}.enable")

    def message(self, deadline):
        while b"\0" not in self.rest:
            if time.monotonic() > deadline:
                raise TimeoutError("the browser does not answer")
            if select.select([self.read], [], [], 0.2)[0]:
                got = os.read(self.read, 1 << 20)
                if not got:
                    raise EOFError("the browser ended")
                self.rest += got
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def send(self, method, **params):
        self.number += 1
        asked = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.write, json.dumps(asked).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            told = self.message(deadline)
            if told.get("id") == self.number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self.events.append(told)

    def js(self, text):
        told = self.send("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{text}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def size(self, width, height, mobile=False, scale=1):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        time.sleep(0.35)

    def prefers(self, **features):
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)
        time.sleep(0.2)

    def open(self, url):
        self.events.clear()
        self.send("Page.navigate", url=url)
        for _ in range(600):
            if self.js("document.documentElement?.dataset.ready") == "yes":
                return
            time.sleep(0.05)
        raise TimeoutError(f"the page is not ready: {self.troubles()}")

    def mouse(self, kind, x, y, **more):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x, y):
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"]:
            self.mouse(kind, x, y, **({} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}))
        time.sleep(0.05)

    def key(self, name, shift=False):
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9}
        code = codes.get(name, ord(name[0].upper()))
        text = {"text": "\r"} if name == "Enter" else {"text": name} if len(name) == 1 else {}
        for kind in ["keyDown", "keyUp"]:
            self.send("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, modifiers=8 if shift else 0, **(text if kind == "keyDown" else {}))
        time.sleep(0.03)

    def picture(self, path):
        """A PNG of the page with a palette of 256 colours: a third of the bytes, and nobody sees it."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        told = self.js(PALETTE.replace("DATA", data))
        rows = base64.b64decode(told["rows"])
        width, height = told["width"], told["height"]
        lines = b"".join(b"\0" + rows[at : at + width] for at in range(0, width * height, width))

        def part(name, body):
            return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

        parts = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)) + part(b"PLTE", bytes(told["palette"]))
        parts += part(b"IDAT", zlib.compress(lines, 9)) + part(b"IEND", b"")
        pathlib.Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + parts)

    def troubles(self):
        """What the console complained of, and every request but those for the page itself."""
        said, asked = [], []
        for told in self.events:
            method, params = told.get("method"), told.get("params", {})
            if method == "Runtime.exceptionThrown":
                said.append(params["exceptionDetails"].get("exception", {}).get("description") or params["exceptionDetails"]["text"])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                said.append(json.dumps(params["args"]))
            elif method == "Network.requestWillBeSent":
                asked.append(params["request"]["url"])
        return said, asked

    def close(self):
        """Ends the browser; its exit code. `errors` is what it wrote to its standard error."""
        for end in [self.read, self.write]:
            os.close(end)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors = pathlib.Path(self.home, "errors").read_text(errors="replace")
        shutil.rmtree(self.home, ignore_errors=True)
        return self.process.returncode


# How many colours a plot's canvas has, of a grid of its pixels.
COLOURS = """(() => Report.state.plots.map((one) => {
  const canvas = one.u.ctx.canvas;
  const pixels = one.u.ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let at = 0; at < pixels.length; at += 4) seen.add((pixels[at] << 24) ^ (pixels[at + 1] << 16) ^ (pixels[at + 2] << 8) ^ pixels[at + 3]);
  return [one.spec.id, seen.size];
}))()"""

# Of each curve by plot: how many points it has, the least and the most.
CURVES = """(() => {
  const told = {};
  for (const one of Report.state.plots) {
    told[one.spec.id] = one.u.data.slice(1).map((values, at) => {
      const known = values.filter((v) => v !== null && v !== undefined);
      const bridged = one.u.series[at + 1].spanGaps;
      return { points: known.length, least: known.reduce((a, b) => Math.min(a, b), Infinity), most: known.reduce((a, b) => Math.max(a, b), -Infinity), bridged };
    });
  }
  // How far the smooth losses of two runs lie from each other, at most, over the first half of the shorter.
  const loss = Report.state.plots.find((one) => one.spec.id === "loss").u.data.slice(-2);
  const half = Math.min(...loss.map((values) => values.filter((v) => v !== null && v !== undefined).length)) >> 1;
  told.apart = Math.max(...loss[0].slice(0, half).map((v, at) => Math.abs(v - loss[1][at])));
  return told;
})()"""

# Milliseconds from an act to the end of the frame that shows it.
TIMES = """(async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => { const channel = new MessageChannel(); channel.port1.onmessage = done; channel.port2.postMessage(0); }));
  const timed = async (count, act) => {
    const times = [];
    for (let nr = 0; nr < count; nr++) {
      await frame();
      const begin = performance.now();
      act(nr);
      await frame();
      times.push(performance.now() - begin);
    }
    return times;
  };
  const key = (name) => document.getElementById("plots").dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const over = Report.state.plots[1].u.over;
  const box = over.getBoundingClientRect();
  const at = (share) => ({ clientX: box.left + share * box.width, clientY: box.top + box.height / 2, bubbles: true, view: window });
  over.dispatchEvent(new MouseEvent("mouseenter", at(0.1)));
  const pointer = await timed(30, (nr) => over.dispatchEvent(new MouseEvent("mousemove", at((nr + 1) / 32))));
  Report.choose(Math.round(Report.state.last / 2), true);
  const keys = await timed(30, () => key("ArrowRight"));
  const open = await timed(15, (nr) => Report.choose(1 + Math.floor(((nr + 1) * Report.state.last) / 17), true));
  const zoom = await timed(15, (nr) => (nr % 5 === 4 ? key("0") : key("+")));
  Report.zoom(1, Report.state.last);
  return { pointer, keys, open, zoom };
})()"""


# A picture's pixels as places in a palette of 256 of its colours, the others by the nearest of them.
PALETTE = """(async () => {
  const image = new Image();
  image.src = "data:image/png;base64,DATA";
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, image.width, image.height).data;
  const counts = new Map();
  const at = (i) => (pixels[4 * i] << 16) | (pixels[4 * i + 1] << 8) | pixels[4 * i + 2];
  const size = image.width * image.height;
  for (let i = 0; i < size; i++) counts.set(at(i), (counts.get(at(i)) || 0) + 1);
  // Small marks of a strong colour count as much as large grey areas.
  const strong = (c) => 1 + Math.max(c >> 16, (c >> 8) & 255, c & 255) - Math.min(c >> 16, (c >> 8) & 255, c & 255);
  const palette = [...counts].sort((a, b) => b[1] * strong(b[0]) - a[1] * strong(a[0])).slice(0, 256).map((one) => one[0]);
  const places = new Map(palette.map((colour, place) => [colour, place]));
  const far = (a, b) => ((a >> 16) - (b >> 16)) ** 2 + (((a >> 8) & 255) - ((b >> 8) & 255)) ** 2 + ((a & 255) - (b & 255)) ** 2;
  for (const colour of counts.keys()) {
    if (!places.has(colour)) places.set(colour, palette.reduce((best, one, place) => (far(one, colour) < far(palette[best], colour) ? place : best), 0));
  }
  let text = "";
  for (let i = 0; i < size; i++) text += String.fromCharCode(places.get(at(i)));
  return { width: image.width, height: image.height, rows: btoa(text), palette: palette.flatMap((one) => [one >> 16, (one >> 8) & 255, one & 255]) };
})()"""


class Checks:
    def __init__(self):
        self.failed = []

    def hold(self, what, truth, told=""):
        if not truth:
            self.failed.append(f"{what}: {told}" if told != "" else what)


def place(browser, step):
    """Where a step is on the plot of the loss."""
    return browser.js(f"""(() => {{ const u = Report.state.plots[1].u; u.over.scrollIntoView({{block: "center"}}); const box = u.over.getBoundingClientRect();
      return [box.left + u.valToPos({step}, "x"), box.top + box.height / 2]; }})()""")


def heading(browser):
    return browser.js("document.getElementById('panel').hidden ? '' : document.querySelector('#panel h2').textContent.replaceAll(',', '')")


def walk(browser, checks):
    """The way of a person: look, click an odd step, read, copy, go on with the keyboard, zoom."""
    odd = browser.js("Report.run.odd.length ? Report.run.odd[Report.run.odd.length >> 1].step : Math.round(Report.run.steps / 2)")
    browser.click(*place(browser, odd))
    checks.hold("a click opens the step", heading(browser) == f"Step {odd}", heading(browser))
    told = browser.js("document.getElementById('panel').innerText")
    checks.hold("the command that explains it is there", f"--step {odd}" in told, told)
    checks.hold("the ledger's line is there in words", f"Step {odd:,} of phase" in told, told)
    browser.js("document.querySelector('#panel .command button').click()")
    time.sleep(0.1)
    checks.hold("its button copies", browser.js("document.querySelector('#panel .command button').textContent") == "Copied")
    browser.key("ArrowRight")
    checks.hold("an arrow key goes to the next step", heading(browser) == f"Step {odd + 1}", heading(browser))
    browser.key("ArrowLeft")
    browser.key("ArrowLeft")
    checks.hold("and back", heading(browser) == f"Step {odd - 1}", heading(browser))
    browser.key("Escape")
    checks.hold("Escape closes", heading(browser) == "")
    browser.key("Enter")
    checks.hold("Enter opens", heading(browser) == f"Step {odd - 1}", heading(browser))
    browser.key("Escape")
    for _ in range(4):
        browser.key("Tab")
    outline = browser.js("document.activeElement === document.body ? 'none' : getComputedStyle(document.activeElement).outlineStyle")
    checks.hold("the focus is seen", outline not in ("none", ""), outline)
    last = browser.js("Report.state.last")
    if last > 100:
        (x, y), (to, _) = place(browser, last // 4), place(browser, last // 2)
        browser.mouse("mouseMoved", x, y)
        browser.mouse("mousePressed", x, y, button="left", clickCount=1)
        for part in range(1, 6):
            browser.mouse("mouseMoved", x + (to - x) * part / 5, y, button="left")
        browser.mouse("mouseReleased", to, y, button="left", clickCount=1)
        time.sleep(0.1)
        low, high = browser.js("Report.state.range")
        checks.hold("a drag zooms", abs(low - last / 4) < last / 50 and abs(high - last / 2) < last / 50, [low, high])
        browser.key("0")
        checks.hold("0 shows the whole run", browser.js("Report.state.range[1] - Report.state.range[0]") == last - 1)


def narrow(browser, checks):
    for width in [360, 768, 1280]:
        browser.size(width, 800, mobile=width < 700)
        wide = browser.js("document.documentElement.scrollWidth")
        checks.hold(f"no sideways scrolling at {width} px", wide <= width, wide)
        if width == 360:
            browser.click(*place(browser, browser.js("Math.round(Report.run.steps / 3)")))
            checks.hold("a tap opens the step on a narrow screen", heading(browser).startswith("Step "), heading(browser))
            box = browser.js("(() => { const box = document.getElementById('panel').getBoundingClientRect(); return [box.left, box.right, box.bottom]; })()")
            checks.hold("the step lies within a narrow screen", box[0] >= 0 and box[1] <= 360 and box[2] <= 801, box)
            browser.key("Escape")


def check(page):
    program = found()
    if not program:
        print("no browser is there (apt-get install chromium)")
        return NO_PROGRAM
    browser, checks = Browser(program), Checks()
    try:
        browser.size(1280, 900)
        url = pathlib.Path(page).resolve().as_uri() if "://" not in page else page
        begin = time.monotonic()
        browser.open(url)
        ready = time.monotonic() - begin
        for name, colours in browser.js(COLOURS):
            checks.hold(f"the plot of {name} is drawn", colours > 8, colours)
        curves = browser.js(CURVES)
        walk(browser, checks)
        light = browser.js("getComputedStyle(document.body).backgroundColor")
        browser.prefers(prefers_color_scheme="dark")
        checks.hold("a dark page for who prefers it", browser.js("document.documentElement.dataset.theme") == "dark" and browser.js("getComputedStyle(document.body).backgroundColor") != light)
        browser.js("document.getElementById('theme').click()")
        checks.hold("and a button for the other one", browser.js("getComputedStyle(document.body).backgroundColor") == light)
        browser.prefers(prefers_reduced_motion="reduce")
        checks.hold("nothing moves for who wants that", browser.js("getComputedStyle(document.getElementById('panel')).animationName") == "none")
        times = browser.js(TIMES)
        narrow(browser, checks)
        checks.hold("no text of the run became markup", browser.js("window.hit === undefined && document.querySelectorAll('body script').length === 4"))
        said, asked = browser.troubles()
        checks.hold("nothing is complained of", not said, said)
        if "://" not in page:
            others = [one for one in asked if one != url and not one.startswith("data:")]
            checks.hold("no request is made", not others, others)
        medians = {name: round(statistics.median(all), 1) for name, all in times.items()}
        for name, median in medians.items():
            # Far above what is wanted (100 ms): a test machine may be busy.
            checks.hold(f"{name} is answered soon", median < 1000, median)
        steps = browser.js("Report.run.steps")
        print(json.dumps({"steps": steps, "curves": curves, "ready_seconds": round(ready, 2), "median_ms": medians, "worst_ms": {name: round(max(all), 1) for name, all in times.items()}}))
    finally:
        browser.close()
    for one in checks.failed:
        print(f"does not hold: {one}")
    return 1 if checks.failed else 0


IDS = "[...document.querySelectorAll('#plots > .plot')].map((one) => one.id)"


def grow(url):
    """What appears while a page is open is what a page has that is opened then."""
    program = found()
    if not program:
        print("no browser is there (apt-get install chromium)")
        return NO_PROGRAM
    browser, checks = Browser(program), Checks()
    try:
        browser.size(1280, 900)
        browser.open(url)
        before = browser.js(IDS)
        print(json.dumps(before), flush=True)
        deadline = time.monotonic() + 60
        while "validation" not in browser.js(IDS) and time.monotonic() < deadline:
            time.sleep(0.2)
        grown = browser.js(f"({{ ids: {IDS}, order: Report.state.plots.map((one) => one.spec.id), series: Report.state.plots.map((one) => one.u.series.length) }})")
        for name, colours in browser.js(COLOURS):
            checks.hold(f"the plot of {name} is drawn", colours > 8, colours)
        said, _ = browser.troubles()
        checks.hold("nothing is complained of", not said, said)
        browser.open(url)
        fresh = browser.js(f"({{ ids: {IDS}, order: Report.state.plots.map((one) => one.spec.id), series: Report.state.plots.map((one) => one.u.series.length) }})")
        checks.hold("a page that grew is one that is opened", grown == fresh, [grown, fresh])
        checks.hold("it grew", set(before) < set(grown["ids"]), [before, grown["ids"]])
    finally:
        browser.close()
    for one in checks.failed:
        print(f"does not hold: {one}")
    return 1 if checks.failed else 0


def shoot(page, folder):
    program = found()
    if not program:
        print("no browser is there (apt-get install chromium)")
        return NO_PROGRAM
    browser = Browser(program)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for theme in ["light", "dark"]:
            browser.size(1280, 1000)
            browser.prefers(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
            browser.open(pathlib.Path(page).resolve().as_uri())
            # The finding with most to say, an explained one if there is any.
            step = browser.js("+(Object.keys(Report.run.explained)[0] || [...Report.run.odd].sort((a, b) => b.reasons.length - a.reasons.length)[0]?.step || 1)")
            browser.js(f"Report.choose({step}, true)")
            time.sleep(0.3)
            browser.picture(folder / f"report-{theme}.png")
        browser.js("Report.choose(1); document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        browser.size(1280, 2600)
        browser.picture(folder / "report-whole.png")
        browser.prefers(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        browser.size(360, 740, mobile=True, scale=2)
        browser.open(pathlib.Path(page).resolve().as_uri())
        browser.picture(folder / "report-narrow.png")
        browser.js(f"Report.choose({step}, true)")
        time.sleep(0.3)
        browser.picture(folder / "report-narrow-step.png")
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    command = sys.argv[1:]
    if command == ["--install"]:
        sys.exit(install("Chromium", found, ["chromium", "fonts-dejavu-core"]))
    if len(command) == 2 and command[0] == "check":
        sys.exit(check(command[1]))
    if len(command) == 2 and command[0] == "grow":
        sys.exit(grow(command[1]))
    if len(command) == 3 and command[0] == "shoot":
        sys.exit(shoot(command[1], command[2]))
    print(__doc__)
    sys.exit(2)
