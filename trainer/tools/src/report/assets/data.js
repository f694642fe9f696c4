"use strict";
// What the page knows of its runs: columns unpacked from the JSON, and the words and numbers made of them.
const Report = {};

Report.bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
Report.f32 = (text) => new Float32Array(Report.bytes(text).buffer);
// uPlot knows a gap by null.
Report.gaps = (values) => Array.from(values, (v) => (Number.isFinite(v) ? v : null));
Report.shares = (text) => Array.from(Report.bytes(text), (v) => v / 255);

// Puts what is new of a run behind what is known of it.
Report.unpack = (told, before) => {
  const run = told;
  const c = told.columns;
  const fresh = {
    loss: Report.gaps(Report.f32(c.loss)), norm: Report.gaps(Report.f32(c.norm)), lr: Report.gaps(Report.f32(c.lr)),
    speed: Report.gaps(Report.f32(c.speed)),
  };
  // Whoever measured the one measured the other.
  fresh.stall = Report.shares(c.stall).map((v, at) => (fresh.speed[at] === null ? null : v));
  if (before) {
    for (const key of Object.keys(fresh)) fresh[key] = before[key].slice(0, told.first - 1).concat(fresh[key]);
  }
  Object.assign(run, fresh);
  run.columns = null;
  for (const one of run.sources ? run.sources.loss.keys() : []) {
    if (typeof run.sources.loss[one] === "string") {
      run.sources.loss[one] = Report.gaps(Report.f32(run.sources.loss[one]));
      run.sources.share[one] = Report.shares(run.sources.share[one]);
    }
  }
  if (run.memory) run.memory.bytes = Report.gaps(Report.f32(run.memory.bytes));
  if (run.router) {
    run.router.shares = Report.bytes(run.router.shares);
    run.router.uneven = Report.bytes(run.router.uneven);
  }
  if (run.layers) {
    run.layers.gradients = Report.f32(run.layers.gradients);
    run.layers.updates = Report.f32(run.layers.updates);
  }
  run.oddAt = new Map(run.odd.flatMap((odd) => [[odd.step, odd], [odd.farthest, odd]]));
  return run;
};

// All runs of a page are smoothed alike, whatever their length: what two of them share is one curve.
Report.smooth = (runs) => {
  const steps = Math.max(...runs.map((run) => run.steps));
  for (const run of runs) run.smooth = Object.fromEntries(["loss", "norm", "speed"].map((key) => [key, Report.smoothed(run[key], steps)]));
};

// A mean that forgets, both ways so that it does not lag; as wide as a five-hundredth of `steps`. It has a value where `values`
// have one: what was not measured is a gap here too.
Report.smoothed = (values, steps) => {
  const n = values.length;
  if (steps < 300) return null;
  const keep = Math.exp(-1 / Math.max(3, steps / 500));
  const pass = (from, to, by) => {
    const out = new Array(n);
    let [sum, weight] = [0, 0];
    for (let i = from; i !== to; i += by) {
      sum *= keep;
      weight *= keep;
      if (values[i] !== null) [sum, weight] = [sum + values[i], weight + 1];
      out[i] = [sum, weight];
    }
    return out;
  };
  const [ahead, back] = [pass(0, n, 1), pass(n - 1, -1, -1)];
  return values.map((v, i) => (v === null ? null : (ahead[i][0] + back[i][0] - v) / (ahead[i][1] + back[i][1] - 1)));
};

Report.median = (values) => {
  const known = values.filter((v) => v !== null && Number.isFinite(v)).sort((a, b) => a - b);
  if (!known.length) return null;
  const half = known.length >> 1;
  return known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
};

// The part of the plan that a step lies in.
Report.segment = (run, step) => run.plan.findLast((part) => part.first <= step) || run.plan[0];
Report.phase = (run, step) => (run.phases.findLast((phase) => phase[0] <= step) || ["", "?"])[1];
Report.labels = (run, step) => (run.labels.findLast((part) => part[0] <= step) || [0, 0])[1];
Report.tokens = (run) => run.plan.reduce((sum, part) => sum + Math.max(0, Math.min(run.steps, part.first + part.steps - 1) - part.first + 1) * part.tokens, 0);

// Numbers as people read them.
Report.int = (n) => Math.round(n).toLocaleString("en-US");
Report.num = (v, digits = 4) => {
  if (v === null || v === undefined || !Number.isFinite(v)) return "\u2013";
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return v.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Report.int(v);
  return v.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1)))).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
};
Report.short = (v) => {
  if (v >= 1e12) return `${(v / 1e12).toPrecision(3)}T`;
  if (v >= 1e9) return `${(v / 1e9).toPrecision(3)}B`;
  if (v >= 1e6) return `${(v / 1e6).toPrecision(3)}M`;
  return v >= 1e4 ? `${(v / 1e3).toPrecision(3)}k` : Report.int(v);
};
Report.gib = (v) => (v >= 2 ** 30 ? `${(v / 2 ** 30).toFixed(2)} GiB` : `${(v / 2 ** 20).toFixed(0)} MiB`);
Report.percent = (v) => `${(100 * v).toFixed(v < 0.0995 ? 1 : 0)} %`;

// An element with its text and children: everything on the page is made here, and texts stay texts.
Report.make = (tag, options = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") node.textContent = value;
    else if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (key === "class") node.className = value;
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
