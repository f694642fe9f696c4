"use strict";
// The curves: small multiples over one axis of steps, one cursor and one selected step.
(() => {
  const { make, num, int } = Report;
  const AXIS = () => (innerWidth < 640 ? 46 : 58);
  const state = { plots: [], range: [1, 2], last: 1, selected: null, busy: false };
  Report.state = state;
  let colours = null;
  const css = (name) => {
    colours = colours || getComputedStyle(document.documentElement);
    return colours.getPropertyValue(name).trim();
  };
  Report.css = css;
  Report.recoloured = () => {
    colours = null;
    for (const plot of state.plots) {
      if (plot.repaint) plot.repaint();
      plot.u.redraw(false, true);
    }
  };
  const source = (index) => css(`--c${index % 8}`);
  Report.sourceColour = source;

  // Ticks at round numbers, for linear and logarithmic axes alike.
  const ticks = (low, high, count) => {
    if (!(high > low)) return [low];
    const raw = (high - low) / count;
    const size = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 2.5, 5, 10].map((k) => k * size).find((k) => k >= raw);
    const all = [];
    for (let at = Math.ceil(low / unit) * unit; at <= high + unit * 1e-9; at += unit) all.push(Math.abs(at) < unit * 1e-9 ? 0 : at);
    return all;
  };
  const logTicks = (low, high, count) => {
    if (high / low < 8) return ticks(low, high, count);
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const k of high / low < 200 ? [1, 2, 5] : [1]) if (k * 10 ** power >= low && k * 10 ** power <= high) all.push(k * 10 ** power);
    }
    const every = Math.ceil(all.length / 5);
    return all.filter((_, at) => at % every === 0);
  };

  // What of a column lies in view: least and most, the first steps of a long run left out, whose fall would flatten the rest.
  const extent = (columns, xs, whole) => {
    let [low, high] = [Infinity, -Infinity];
    const begin = whole ? xs.findIndex((x) => x > state.last * 0.02) : 0;
    for (const values of columns) {
      for (let i = Math.max(0, begin); i < xs.length; i++) {
        const v = values[i];
        if (v === null || v === undefined || xs[i] < state.range[0] || xs[i] > state.range[1]) continue;
        if (v < low) low = v;
        if (v > high) high = v;
      }
    }
    return [low, high];
  };

  // The points between two gaps, which no line shows.
  const alone = (u, series) => {
    const values = u.data[series];
    const [first, last] = u.series[0].idxs;
    const found = [];
    const none = (at) => values[at] === null || values[at] === undefined;
    for (let at = first; at <= last; at++) if (!none(at) && none(at - 1) && none(at + 1)) found.push(at);
    return found.length ? found : null;
  };

  // One plot; `spec` has title, height, xs, columns (arrays over xs), series (colour, width, name), and what is special to it.
  const plot = (spec) => {
    const readout = make("span", { class: "readout" });
    const tail = make("span", { class: "tail" });
    const holder = make("div", { class: "canvas" });
    const node = make("section", { class: `plot ${spec.class || ""}`, id: spec.id }, make("header", {}, make("h2", { text: spec.title }), readout, tail), holder);
    document.getElementById("plots").append(node);
    const self = { spec, node, tail, readout, log: !!spec.log, u: null, repaint: spec.repaint };
    const yRange = (u, low, high) => {
      if (spec.y) return spec.y(u, low, high);
      const whole = spec.skipStart && !self.log && state.range[0] <= 1 && state.last > 200;
      [low, high] = extent(spec.columns, spec.xs, whole);
      if (!(high >= low)) return self.log ? [1, 10] : [0, 1];
      if (self.log) {
        low = Math.max(low, high * 1e-9, 1e-30);
        return [low / 1.08, Math.max(high, low * 1.01) * 1.08];
      }
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [spec.zero ? 0 : low - room, high + room];
    };
    const options = () => ({
      width: Math.max(200, holder.clientWidth),
      height: spec.height,
      padding: [6, 20, spec.axis ? 0 : 6, 0],
      legend: { show: false },
      cursor: {
        y: false, points: { show: false }, sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false, setScale: false, dist: 6 },
        bind: { dblclick: () => () => { Report.zoom(1, state.last); return null; } },
      },
      scales: { x: { time: false, range: () => state.range }, y: { range: yRange, distr: self.log ? 3 : 1 } },
      axes: [
        {
          size: spec.axis ? 26 : 0, stroke: () => css("--soft"), font: "11px system-ui, sans-serif", ticks: { show: false },
          grid: { show: !spec.bare, stroke: () => css("--grid"), width: 1 }, splits: (u, axis, low, high) => ticks(low, high, Math.max(2, u.width / 110)).filter((x) => x >= 1 && Number.isInteger(x)),
          values: (u, splits) => (spec.axis ? splits.map(int) : splits.map(() => "")),
        },
        {
          size: AXIS, stroke: () => css("--soft"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 6,
          grid: { show: !spec.bare, stroke: () => css("--grid"), width: 1 },
          splits: (u, axis, low, high) => (spec.rows ? spec.rows(low, high) : (self.log ? logTicks : ticks)(low, high, Math.max(2, spec.height / 34))),
          filter: (u, splits) => splits,
          values: (u, splits) => splits.map((v) => (spec.label ? spec.label(v) : num(v, 3))),
        },
      ],
      series: [{}, ...spec.series.map((one) => ({
        stroke: () => css(one.colour) || one.colour, width: one.width || 1.25, points: { show: !!one.points, size: 4, fill: () => css(one.colour), filter: one.points ? null : alone },
        fill: one.fill ? () => css(one.fill) : undefined, dash: one.dash, paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      }))],
      hooks: {
        drawClear: spec.under ? [spec.under] : [],
        draw: spec.over ? [spec.over] : [],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 3) Report.zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [() => self.read()],
      },
    });
    const data = () => [spec.xs, ...spec.columns];
    self.read = () => {
      const u = self.u;
      if (!u) return;
      const at = u.cursor.left >= 0 && u.cursor.idx !== null ? spec.xs[u.cursor.idx] : state.selected;
      readout.replaceChildren(...spec.read(at, u).filter(Boolean));
    };
    self.mark = make("div", { class: "mark", hidden: true });
    self.place = () => {
      const step = state.selected;
      const inside = step !== null && step >= state.range[0] && step <= state.range[1];
      self.mark.hidden = !inside;
      if (inside) self.mark.style.transform = `translateX(${Math.round(self.u.valToPos(step, "x"))}px)`;
    };
    // Shows the range that all plots show.
    self.follow = () => {
      self.late = false;
      self.u.setScale("x", { min: state.range[0], max: state.range[1] });
      self.place();
    };
    self.build = () => {
      if (self.u) self.u.destroy();
      self.u = new uPlot(options(), data(), holder);
      self.u.over.append(self.mark);
      let down = null;
      self.u.over.addEventListener("mousedown", (event) => { down = event.clientX; });
      self.u.over.addEventListener("click", (event) => {
        if (down !== null && Math.abs(event.clientX - down) > 4) return;
        Report.choose(self.stepAt(event.clientX - self.u.over.getBoundingClientRect().left), true);
      });
      self.place();
      self.read();
    };
    // The step under a pixel; an odd one nearby attracts.
    self.stepAt = (pixel) => {
      const u = self.u;
      const step = Math.min(state.last, Math.max(1, Math.round(u.posToVal(pixel, "x"))));
      let [best, far] = [step, 7];
      for (const odd of Report.run.odd) {
        const off = Math.abs(u.valToPos(odd.step, "x") - pixel);
        if (off < far) [best, far] = [odd.step, off];
      }
      return best;
    };
    self.update = () => { Object.assign(spec, spec.refresh ? spec.refresh() : {}); self.u.setData(data(), false); self.follow(); self.read(); };
    if (spec.log !== undefined) {
      const button = make("button", { type: "button", text: "log", "aria-pressed": String(self.log), title: "Logarithmic axis", on: { click: () => {
        self.log = !self.log;
        button.setAttribute("aria-pressed", String(self.log));
        self.build();
      } } });
      tail.append(button);
    }
    if (spec.tail) tail.append(...spec.tail(self));
    state.plots.push(self);
    self.build();
    self.seen = true;
    sight.observe(node);
    return self;
  };
  Report.plot = plot;

  // Takes a plot off the page.
  Report.unplot = (self) => {
    state.plots.splice(state.plots.indexOf(self), 1);
    sight.unobserve(self.node);
    self.u.destroy();
    self.node.remove();
  };

  // Plots out of sight are drawn when they come into it: a zoom costs what is seen of it.
  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const self = state.plots.find((one) => one.node === entry.target);
      if (!self) continue;
      self.seen = entry.isIntersecting;
      if (self.seen && self.late) self.follow();
    }
  }, { rootMargin: "150px" });

  // Shows the steps from `from` to `to` on every plot.
  Report.zoom = (from, to) => {
    const width = Math.max(Math.min(4, state.last - 1 || 1), to - from);
    const begin = Math.min(Math.max(1, from), Math.max(1, state.last - width));
    state.range = [begin, Math.max(begin + 1, Math.min(state.last, begin + width))];
    for (const one of state.plots) {
      if (one.seen) one.follow();
      else one.late = true;
    }
    const whole = document.getElementById("whole");
    if (whole) whole.disabled = state.range[0] <= 1 && state.range[1] >= state.last;
  };

  // A picture of bins by rows, painted once and stretched to what is in view. `value` gives 0 to 1, or null.
  Report.heat = ({ bins, rows, width, value, colour }) => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [Math.max(1, bins), Math.max(1, rows)];
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    for (let bin = 0; bin < bins; bin++) {
      for (let row = 0; row < rows; row++) {
        const at = 4 * ((rows - 1 - row) * canvas.width + bin);
        const v = value(bin, row);
        if (v !== null) image.data.set(colour(v), at);
      }
    }
    context.putImageData(image, 0, 0);
    return (u) => {
      const { left, top, width: wide, height } = u.bbox;
      const from = u.valToPos(0.5, "x", true);
      const to = u.valToPos(0.5 + bins * width, "x", true);
      u.ctx.save();
      u.ctx.beginPath();
      u.ctx.rect(left, top, wide, height);
      u.ctx.clip();
      u.ctx.imageSmoothingEnabled = bins > wide;
      u.ctx.drawImage(canvas, from, top, to - from, height);
      u.ctx.restore();
    };
  };
  const rgb = (text) => {
    const hex = text.replace("#", "");
    return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  };
  // From one colour over a second to a third.
  Report.ramp = (names) => {
    const stops = names.map((name) => rgb(css(name)));
    return (v) => {
      const t = Math.max(0, Math.min(1, v)) * (stops.length - 1);
      const at = Math.min(stops.length - 2, Math.floor(t));
      return [...stops[at].map((c, i) => Math.round(c + (stops[at + 1][i] - c) * (t - at))), 255];
    };
  };
  Report.ticks = ticks;
})();
