"use strict";
// The page: its head, its plots, the list of odd steps, keys, and news where it is live.
(() => {
  const { make, num, int, percent, short, css, state } = Report;
  const by = (id) => document.getElementById(id);
  let [runs, live, open] = [[], false, false];

  const swatch = (colour, name, value) => {
    const mark = make("i");
    mark.style.background = colour;
    return make("span", {}, mark, name, " ", make("b", { text: value }));
  };
  const reading = (name, value) => make("span", {}, name ? `${name} ` : "", make("b", { text: value }));
  const step = (at) => (at === null || at === undefined ? state.last : Math.round(at));

  const tile = (name, value, small) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }, small ? make("small", { text: ` ${small}` }) : null));
  const head = () => {
    const run = Report.run;
    by("name").textContent = runs.length > 1 ? runs.map((one) => one.name).join(" and ") : run.name;
    const from = (one) => (one.origin ? `, forked from ${one.origin.of} after step ${int(one.origin.step)}` : "");
    by("place").textContent = runs.map((one) => one.place + from(one)).join(" \u00b7 ");
    const ended = run.steps >= run.planned;
    const fault = run.happenings.length && run.happenings.at(-1).kind === "fault";
    by("state").textContent = fault ? "stopped" : ended ? "complete" : live && run.running ? "running" : `at step ${int(run.steps)}`;
    by("state").className = `pill${fault ? " bad" : live && run.running ? " live" : ""}`;
    const starts = run.happenings.filter((one) => one.kind === "start").length;
    const kills = run.happenings.filter((one) => one.kind === "killed").length;
    const recent = run.speed.slice(-256);
    const validation = run.validation.all.at(-1);
    by("tiles").replaceChildren(...[
      tile("Steps", int(run.steps), `of ${int(run.planned)}`),
      tile("Loss", num(Report.median(run.loss.slice(-64))), "median of 64"),
      validation !== undefined ? tile("Validation", num(validation), `step ${int(run.validation.steps.at(-1))}`) : null,
      tile("Tokens", short(Report.tokens(run))),
      Report.median(recent) ? tile("Speed", short(Report.median(recent)), "tokens/s") : null,
      tile("Starts", int(starts), kills ? `${kills} killed` : ""),
      tile("Odd steps", int(run.odd_count)),
      run.skipped.length ? tile("Skipped", int(run.skipped.length)) : null,
      tile("Levels", run.head.levels.join(" ")),
    ].filter(Boolean));
  };

  const oddList = () => {
    const run = Report.run;
    const shown = run.odd.slice(0, 200);
    by("oddnote").textContent = run.odd_count ? (run.odd_count > shown.length ? `The first ${shown.length} of ${int(run.odd_count)}.` : "Found by themselves; click one to open it.") : "None: every loss and norm lies where the steps before it do.";
    by("oddlist").replaceChildren(...shown.map((odd) => make("li", {}, make("button", { type: "button", "data-step": odd.step, on: { click: () => Report.choose(odd.farthest, true, true) } },
      make("strong", { text: int(odd.step) }), odd.last > odd.step ? ` to ${int(odd.last)}` : null, make("em", { text: odd.reasons[0].words + (odd.reasons.length > 1 ? `, and ${odd.reasons.length - 1} more` : "") })))));
  };

  const origin = () => {
    const run = Report.run;
    const table = (pairs) => make("table", {}, ...pairs.map(([name, value]) => make("tr", {}, make("td", { text: name }), make("td", { text: value }))));
    const flat = (value, path) => (typeof value === "object" && value !== null ? Object.entries(value).flatMap(([key, one]) => flat(one, path ? `${path}.${key}` : key)) : [[path, String(value)]]);
    const amended = run.curricula.slice(1).flatMap((one) => one.changes.map((text) => [`step ${int(one.step)}`, text]));
    by("originbody").replaceChildren(make("div", { class: "grid" },
      make("div", {}, make("h3", { text: "Data" }), table([...run.head.stores.map((digest) => ["store", digest]), ["tokenizer", run.head.tokenizer], ["levels", run.head.levels.join(", ")], ["parameters", `${int(run.head.parameters)} tensors`]]),
        ...(amended.length ? [make("h3", { text: "Amendments" }), table(amended)] : []),
        make("h3", { text: "Kernel table" }), table(flat(run.head.kernel_table, "").filter(([, value]) => value !== ""))),
      make("div", {}, make("h3", { text: "Curriculum in force" }), make("pre", { text: run.curricula.at(-1).text }))));
  };

  // The axis of all plots, with phases and what happened.
  const glyphs = { killed: "--odd", fault: "--odd", damaged: "--odd", loss: "--odd", start: "--good", edit: "--other", checkpoint: "--soft" };
  const strip = () => {
    const zoomBy = (factor) => () => {
      const middle = state.selected !== null && state.selected >= state.range[0] && state.selected <= state.range[1] ? state.selected : (state.range[0] + state.range[1]) / 2;
      const half = ((state.range[1] - state.range[0]) * factor) / 2;
      Report.zoom(middle - half, middle + half);
    };
    Report.zoomBy = zoomBy;
    const over = (u) => {
      const run = Report.run;
      const { ctx } = u;
      const ratio = devicePixelRatio;
      const { left, top, width, height } = u.bbox;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top - 2 * ratio, width, height + 4 * ratio);
      ctx.clip();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      run.phases.forEach(([first, name], at) => {
        const from = u.valToPos(first, "x", true);
        const to = at + 1 < run.phases.length ? u.valToPos(run.phases[at + 1][0], "x", true) : left + width;
        ctx.fillStyle = css(at % 2 ? "--grid" : "--heat0");
        ctx.fillRect(from, top, to - from - ratio, height * 0.5);
        ctx.fillStyle = css("--soft");
        const begin = Math.max(from, left) + 6 * ratio;
        if (begin + ctx.measureText(name).width < to) ctx.fillText(name, begin, top + height * 0.25);
      });
      for (const one of run.happenings) {
        const colour = glyphs[one.kind];
        if (!colour) continue;
        const x = u.valToPos(one.kind === "start" ? one.step + 0.5 : one.step, "x", true);
        const y = top + height * 0.78;
        ctx.fillStyle = ctx.strokeStyle = css(colour);
        ctx.lineWidth = 1.5 * ratio;
        ctx.beginPath();
        const s = 3.5 * ratio;
        if (one.kind === "checkpoint") ctx.fillRect(x - 0.5 * ratio, y - s * 0.8, ratio, s * 1.6);
        else if (one.kind === "start") { ctx.moveTo(x - s, y - s); ctx.lineTo(x + s, y); ctx.lineTo(x - s, y + s); ctx.fill(); }
        else if (one.kind === "edit") { ctx.moveTo(x, y - s - ratio); ctx.lineTo(x + s + ratio, y); ctx.lineTo(x, y + s + ratio); ctx.lineTo(x - s - ratio, y); ctx.fill(); }
        else { ctx.moveTo(x - s, y - s); ctx.lineTo(x + s, y + s); ctx.moveTo(x + s, y - s); ctx.lineTo(x - s, y + s); ctx.stroke(); }
      }
      ctx.restore();
    };
    const near = (at) => Report.run.happenings.filter((one) => one.kind !== "checkpoint" && Math.abs(one.step - at) <= (state.range[1] - state.range[0]) / 160).slice(0, 2);
    return Report.plot({
      id: "strip", class: "strip", title: "Step", height: 70, axis: true, bare: true, xs: Report.xs, columns: [Report.xs.map(() => null)], series: [{ colour: "--soft" }],
      y: () => [0, 1], rows: () => [], over, refresh: () => ({ xs: Report.xs, columns: [Report.xs.map(() => null)] }),
      read: (at) => [reading("", int(step(at))), reading("phase", Report.phase(Report.run, step(at))), ...(at === null ? [] : near(at).map((one) => make("span", { text: one.words, title: one.words })))],
      tail: () => [make("button", { type: "button", text: "\u2212", "aria-label": "Zoom out", on: { click: zoomBy(2) } }), make("button", { type: "button", text: "+", "aria-label": "Zoom in", on: { click: zoomBy(0.5) } }),
        make("button", { type: "button", id: "whole", text: "Whole run", disabled: true, on: { click: () => Report.zoom(1, state.last) } })],
    });
  };

  const odds = (key) => (u) => {
    const run = Report.run;
    const ratio = devicePixelRatio;
    const { ctx } = u;
    const { top, left, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top - 6 * ratio, width, height + 6 * ratio);
    ctx.clip();
    for (const odd of run.odd) {
      const reason = odd.reasons.find((one) => one.kind === key) || (key === "loss" ? odd.reasons[0] : null);
      if (!reason || odd.step < state.range[0] || odd.step > state.range[1]) continue;
      const value = run[key][(reason.kind === key ? reason.step : odd.step) - 1];
      const x = u.valToPos(reason.kind === key ? reason.step : odd.step, "x", true);
      const y = value === null || value === undefined ? top + height / 2 : Math.max(top, Math.min(top + height, u.valToPos(value, "y", true)));
      ctx.beginPath();
      ctx.arc(x, y, 3.6 * ratio, 0, 2 * Math.PI);
      ctx.lineWidth = 1.6 * ratio;
      ctx.strokeStyle = css("--odd");
      ctx.fillStyle = css("--card");
      ctx.fill();
      ctx.stroke();
    }
    ctx.restore();
  };

  // A column over the steps, the other runs beside it.
  const padded = (values) => (values.length < Report.xs.length ? values.concat(new Array(Report.xs.length - values.length).fill(null)) : values);
  const beside = () => runs.slice(1).map((_, at) => ({ colour: at % 2 ? "--c1" : "--other", width: 1.25 }));
  const column = ({ id, title, key, height, log, format, smooth, skipStart, zero, label }) => {
    const columns = () => {
      const own = padded(Report.run[key]);
      const calm = smooth && Report.run.smooth[key];
      return [own, ...(calm ? [padded(calm)] : []), ...runs.slice(1).map((one) => padded((smooth && one.smooth[key]) || one[key]))];
    };
    const calm = smooth && Report.run.smooth[key];
    const several = runs.length > 1;
    return Report.plot({
      id, title, height, log, skipStart, zero, label, xs: Report.xs, columns: columns(),
      series: [{ colour: calm ? "--faint" : "--accent", width: calm ? 1 : 1.4 }, ...(calm ? [{ colour: "--accent", width: 1.6 }] : []), ...beside()],
      over: odds(key), refresh: () => ({ xs: Report.xs, columns: columns() }),
      read: (at) => (several ? runs.map((one, nr) => swatch(css(nr ? (nr % 2 ? "--other" : "--c1") : "--accent"), one.name, format(one[key][step(at) - 1]))) : [reading("", format(Report.run[key][step(at) - 1]))]),
    });
  };

  const binned = (width, count) => Array.from({ length: count }, (_, bin) => Math.min(state.last, bin * width + (width + 1) / 2));
  const bySource = () => {
    const run = () => Report.run.sources;
    const xs = () => binned(run().width, run().loss[0].length);
    const names = run().names;
    const calm = () => run().loss.map((values) => Report.smoothed(values, values.length) || values);
    return Report.plot({
      id: "sources", title: "Loss by source", height: 150, log: false, skipStart: true, xs: xs(), columns: calm(), series: names.map((_, one) => ({ colour: `--c${one % 8}`, width: 1.3 })),
      refresh: () => ({ xs: xs(), columns: calm() }),
      read: (at) => names.map((name, one) => swatch(css(`--c${one % 8}`), name, num(run().loss[one][Math.min(run().loss[one].length - 1, Math.floor((step(at) - 1) / run().width))], 4))),
    });
  };

  // What is computed between two steps: a line for each name, and one for `all` where there is one.
  const between = (id, title, run, whole, of) => {
    const names = run().names;
    const columns = () => [...(whole ? [run().all] : []), ...of()];
    return Report.plot({
      id, title, height: 130, log: false, skipStart: true, xs: run().steps, columns: columns(),
      series: [...(whole ? [{ colour: "--ink", width: 1.8, points: true }] : []), ...names.map((name) => ({ colour: colourOf(name), width: 1.2, points: true }))],
      refresh: () => ({ xs: run().steps, columns: columns() }),
      read: (at) => {
        const index = run().steps.findLastIndex((one) => one <= step(at));
        if (index < 0) return [reading("", "none yet")];
        const header = `step ${int(run().steps[index])}`;
        const listed = names.map((name, one) => swatch(css(colourOf(name)), name, num(of()[one][index])));
        return whole ? [reading(`${header}: all sources`, num(run().all[index])), ...(names.length > 1 ? listed : [])] : [reading("", header), ...listed];
      },
    });
  };
  const validation = () => between("validation", "Validation", () => Report.run.validation, true, () => Report.run.validation.sources);
  const evaluation = () => between("evaluation", "Accuracy", () => Report.run.evaluation, false, () => Report.run.evaluation.accuracy);
  const colourOf = (name) => {
    const all = [...(Report.run.sources ? Report.run.sources.names : Report.run.validation.names), ...Report.run.evaluation.names];
    return `--c${Math.max(0, all.indexOf(name)) % 8}`;
  };

  // What the step saw as an area, what was planned as dashed lines between.
  const mixture = () => {
    const sources = () => Report.run.sources;
    const count = () => sources().share[0].length;
    const xs = () => binned(sources().width, count());
    let paint = null;
    const repaint = () => {
      const ROWS = 120;
      const names = sources().names;
      const colours = names.map((_, one) => Report.ramp([`--c${one % 8}`, `--c${one % 8}`])(0));
      const tops = Array.from({ length: count() }, (_, bin) => {
        let sum = 0;
        return names.map((_, one) => (sum += sources().share[one][bin] || 0));
      });
      paint = Report.heat({
        bins: count(), rows: ROWS, width: sources().width,
        value: (bin, row) => {
          // Shares are rounded: what is missing to the whole belongs to the last source that was there.
          const whole = tops[bin].at(-1);
          return whole > 0 ? tops[bin].findIndex((top) => ((row + 0.5) / ROWS) * whole <= top) : null;
        },
        colour: (one) => [...colours[one].slice(0, 3), 150],
      });
    };
    repaint();
    // The name by which a part of the plan mixes a source: its own, or that of the source whose bucket it is.
    const key = (part, one) => (sources().names[one] in part.mix ? sources().names[one] : sources().wholes[one]);
    const planned = (u) => {
      const { ctx } = u;
      const { left, top, width, height } = u.bbox;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top, width, height);
      ctx.clip();
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.lineWidth = 1.2 * devicePixelRatio;
      ctx.strokeStyle = css("--ink");
      for (const part of Report.run.plan) {
        const from = u.valToPos(part.first - 0.5, "x", true);
        const to = u.valToPos(part.first + part.steps - 0.5, "x", true);
        let sum = 0;
        const keys = sources().names.map((_, one) => key(part, one));
        // A line above the last bucket of a source that the mix names as a whole.
        for (const name of keys.filter((name, one) => one + 1 < keys.length && name !== keys[one + 1])) {
          sum += part.mix[name] || 0;
          const y = u.valToPos(sum, "y", true);
          ctx.beginPath();
          ctx.moveTo(from, y);
          ctx.lineTo(to, y);
          ctx.stroke();
        }
      }
      ctx.restore();
    };
    return Report.plot({
      id: "mixture", title: "Mixture", height: 96, bare: true, xs: xs(), columns: [xs().map(() => null)], series: [{ colour: "--soft" }], y: () => [0, 1], rows: () => [0, 0.5, 1], label: percent,
      under: (u) => paint(u), over: planned, repaint, refresh: () => { repaint(); return { xs: xs(), columns: [xs().map(() => null)] }; },
      read: (at) => {
        const bin = Math.min(count() - 1, Math.floor((step(at) - 1) / sources().width));
        const part = Report.segment(Report.run, step(at));
        const share = (name, of) => `planned ${percent(part.mix[of] || 0)}${of === name ? "" : ` for all of ${of}`}`;
        return sources().names.map((name, one) => swatch(css(`--c${one % 8}`), name, `${percent(sources().share[one][bin] || 0)} (${share(name, key(part, one))})`));
      },
    });
  };

  const router = () => {
    const run = () => Report.run.router;
    let chosen = -1;
    let paint = null;
    const layers = run().classes.length;
    const offset = (layer) => run().classes.slice(0, layer).reduce((a, b) => a + b, 0);
    const total = run().classes.reduce((a, b) => a + b, 0);
    const view = () => {
      if (chosen < 0) return { width: run().uneven_width, rows: layers, bins: run().uneven.length / layers, value: (bin, row) => run().uneven[bin * layers + row] / 255 };
      const experts = run().classes[chosen] - 1;
      const begin = offset(chosen);
      return { width: run().width, rows: experts, bins: run().shares.length / total, value: (bin, row) => run().shares[bin * total + begin + row] / 255 };
    };
    const repaint = () => {
      const now = view();
      const scale = chosen < 0 ? (v) => v / 0.6 : (v) => (v * now.rows) / 4;
      const ramp = chosen < 0 ? Report.ramp(["--heat0", "--high"]) : Report.ramp(["--heat0", "--heat1", "--heat2"]);
      paint = Report.heat({ ...now, colour: (v) => ramp(scale(v)) });
    };
    repaint();
    const xs = () => binned(view().width, view().bins);
    const height = Math.max(72, Math.min(200, 16 * Math.max(layers, ...run().classes) + 12));
    return Report.plot({
      id: "router", title: "Router load", height, bare: true, xs: xs(), columns: [xs().map(() => null)], series: [{ colour: "--soft" }],
      y: () => [-0.5, view().rows - 0.5], rows: (low, high) => Report.ticks(low, high, height / 32).filter(Number.isInteger), label: int,
      under: (u) => paint(u), repaint, refresh: () => { repaint(); return { xs: xs(), columns: [xs().map(() => null)] }; },
      read: (at, u) => {
        const now = view();
        const bin = Math.min(now.bins - 1, Math.floor((step(at) - 1) / now.width));
        const rowAt = u.cursor.left >= 0 && u.cursor.top >= 0 ? Math.round(u.posToVal(u.cursor.top, "y")) : null;
        const row = rowAt === null ? null : Math.max(0, Math.min(now.rows - 1, rowAt));
        if (chosen >= 0) return row === null ? [make("span", { text: `expert by step; dark: four times its even share` })] : [reading(`expert ${row}`, percent(now.value(bin, row)))];
        if (row !== null && !run().classes[row]) return [make("span", { text: `layer ${row} has no router` })];
        return row === null ? [make("span", { text: "layer by step; orange: uneven" })] : [reading(`layer ${row}: evenness`, num(1 - now.value(bin, row), 3))];
      },
      tail: (self) => {
        const select = make("select", { "aria-label": "Which layer's experts", on: { change: () => {
          chosen = Number(select.value);
          repaint();
          self.update();
        } } }, make("option", { value: "-1", text: "all layers" }), ...run().classes.flatMap((classes, layer) => (classes ? [make("option", { value: String(layer), text: `layer ${layer}` })] : [])));
        return [select];
      },
    });
  };

  // Norms by layer, each against the layer's own median.
  const layerNorms = () => {
    const run = () => Report.run.layers;
    const names = run().names;
    let key = "gradients";
    let paint = null;
    let usual = [];
    const bins = () => run()[key].length / names.length;
    const repaint = () => {
      usual = names.map((_, layer) => Report.median(Array.from({ length: bins() }, (_, bin) => run()[key][bin * names.length + layer])) || 1e-30);
      const ramp = Report.ramp(["--low", "--mid", "--high"]);
      paint = Report.heat({
        bins: bins(), rows: names.length, width: run().width,
        value: (bin, row) => Math.log2(Math.max(1e-30, run()[key][bin * names.length + row]) / usual[row]), colour: (v) => ramp(0.5 + v / 6),
      });
    };
    repaint();
    const xs = () => binned(run().width, bins());
    const height = Math.max(72, Math.min(200, 14 * names.length + 12));
    return Report.plot({
      id: "layers", title: "Norm by layer", height, bare: true, xs: xs(), columns: [xs().map(() => null)], series: [{ colour: "--soft" }], y: () => [-0.5, names.length - 0.5],
      rows: (low, high) => Report.ticks(low, high, height / 32).filter(Number.isInteger), label: int, under: (u) => paint(u), repaint,
      refresh: () => { repaint(); return { xs: xs(), columns: [xs().map(() => null)] }; },
      read: (at, u) => {
        const row = u.cursor.left >= 0 && u.cursor.top >= 0 ? Math.max(0, Math.min(names.length - 1, Math.round(u.posToVal(u.cursor.top, "y")))) : null;
        const bin = Math.min(bins() - 1, Math.floor((step(at) - 1) / run().width));
        if (row === null) return [make("span", { text: "orange: eight times the layer's median; blue: an eighth" })];
        const value = run()[key][bin * names.length + row];
        return [reading(names[row], num(value)), make("span", { text: `${num(value / usual[row], 3)} times its median` })];
      },
      tail: (self) => {
        const select = make("select", { "aria-label": "Which norm", on: { change: () => { key = select.value; repaint(); self.update(); } } }, make("option", { value: "gradients", text: "gradient" }), make("option", { value: "updates", text: "update" }));
        return [select];
      },
    });
  };

  const memory = () => {
    const run = () => Report.run.memory;
    const xs = () => binned(run().width, run().bytes.length);
    return Report.plot({
      id: "memory", title: "Memory of rank 0", height: 90, xs: xs(), columns: [run().bytes], series: [{ colour: "--accent", width: 1.4 }], label: Report.gib, zero: true, rows: (low, high) => Report.ticks(low / 2 ** 20, high / 2 ** 20, 2).map((v) => v * 2 ** 20),
      refresh: () => ({ xs: xs(), columns: [run().bytes] }),
      read: (at) => {
        const bytes = run().bytes[Math.floor((step(at) - 1) / run().width)];
        return [reading("", bytes ? Report.gib(bytes) : "\u2013")];
      },
    });
  };

  // The plots from top to bottom. `of` tells what a plot is made for: it is made when that is first there, and anew when it is another.
  const mixed = (names) => (names && names.length > 1 ? names.join("\n") : null);
  const smoothed = (key) => `${key}${!!Report.run.smooth[key]}`;
  const PANELS = [
    { of: () => "strip", make: strip },
    { of: () => smoothed("loss"), make: () => column({ id: "loss", title: "Loss", key: "loss", height: 220, log: false, smooth: true, skipStart: true, format: (v) => num(v, 5) }) },
    { of: () => mixed(Report.run.sources?.names), make: bySource },
    { of: () => (Report.run.validation.steps.length ? Report.run.validation.names.join("\n") : null), make: validation },
    { of: () => (Report.run.evaluation.steps.length ? Report.run.evaluation.names.join("\n") : null), make: evaluation },
    { of: () => smoothed("norm"), make: () => column({ id: "norm", title: "Gradient norm", key: "norm", height: 130, log: true, smooth: true, format: (v) => num(v) }) },
    { of: () => "lr", make: () => column({ id: "lr", title: "Learning rate", key: "lr", height: 90, zero: true, format: (v) => num(v, 3) }) },
    { of: () => mixed(Report.run.sources?.names), make: mixture },
    { of: () => Report.run.router?.classes.join(" "), make: router },
    { of: () => Report.run.layers?.names.join("\n"), make: layerNorms },
    { of: () => (Report.run.speed.some((v) => v) ? smoothed("speed") : null), make: () => column({ id: "speed", title: "Tokens per second", key: "speed", height: 110, zero: true, skipStart: true, smooth: true, format: (v) => num(v) }) },
    { of: () => (Report.run.stall.some((v) => v > 0.01) ? "stall" : null), make: () => column({ id: "stall", title: "Waiting for data", key: "stall", height: 80, zero: true, label: percent, format: (v) => (v === undefined || v === null ? "\u2013" : percent(v)) }) },
    { of: () => (Report.run.memory ? "memory" : null), make: memory },
  ];
  const panels = () => {
    for (const [at, panel] of PANELS.entries()) {
      const of = panel.of() ?? null;
      if (panel.plot && panel.made === of) panel.plot.update();
      else {
        if (panel.plot) Report.unplot(panel.plot);
        panel.plot = of === null ? null : panel.make();
        panel.made = of;
        const after = PANELS.slice(at + 1).find((one) => one.plot);
        if (panel.plot && after) by("plots").insertBefore(panel.plot.node, after.plot.node);
      }
    }
    state.plots.sort((one, other) => PANELS.findIndex((panel) => panel.plot === one) - PANELS.findIndex((panel) => panel.plot === other));
  };

  // Selects a step; `show` opens it, `reveal` brings it into view.
  Report.choose = (wanted, show, reveal) => {
    const chosen = Math.max(1, Math.min(state.last, Math.round(wanted)));
    state.selected = chosen;
    if (chosen < state.range[0] || chosen > state.range[1]) {
      const half = (state.range[1] - state.range[0]) / 2;
      Report.zoom(chosen - half, chosen + half);
    }
    for (const one of state.plots) {
      one.place();
      one.read();
    }
    if (show) opened(true, reveal);
    else if (open) opened(true);
    if (chosen <= Report.run.steps) by("said").textContent = Report.sentence(Report.run, chosen);
  };
  const opened = (value, focus) => {
    open = value && state.selected !== null && state.selected <= Report.run.steps;
    by("oddbox").hidden = open && innerWidth > 960;
    by("panel").hidden = !open;
    if (!open) return;
    const go = (by) => () => Report.choose(state.selected + by, true);
    Report.showStep(Report.run, state.selected, { back: go(-1), on: go(1), close: () => { opened(false); by("plots").focus({ preventScroll: true }); } });
    if (focus) by("panel").focus({ preventScroll: true });
  };

  const nextOdd = (direction) => {
    const from = state.selected === null ? (direction > 0 ? 0 : state.last + 1) : state.selected;
    const odd = Report.run.odd;
    return direction > 0 ? odd.find((one) => one.step > from) : odd.findLast((one) => one.step < from);
  };
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const now = state.selected === null ? Math.min(Report.run.steps, Math.round(state.range[1])) : state.selected;
    const by_ = event.shiftKey ? Math.max(1, Math.round((state.range[1] - state.range[0]) / 10)) : 1;
    const act = {
      ArrowLeft: () => Report.choose(now - by_), ArrowRight: () => Report.choose(now + by_), Home: () => Report.choose(1), End: () => Report.choose(Report.run.steps),
      Enter: () => { if (event.target.tagName === "BUTTON" || event.target.tagName === "SUMMARY") return false; Report.choose(now, true, true); return true; },
      Escape: () => { opened(false); by("plots").focus({ preventScroll: true }); },
      n: () => { const odd = nextOdd(1); if (odd) Report.choose(odd.step); }, p: () => { const odd = nextOdd(-1); if (odd) Report.choose(odd.step); },
      "+": () => Report.zoomBy(0.5)(), "=": () => Report.zoomBy(0.5)(), "-": () => Report.zoomBy(2)(), 0: () => Report.zoom(1, state.last),
    }[event.key];
    if (act && act() !== false) event.preventDefault();
  };

  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    by("theme").textContent = name === "dark" ? "Light" : "Dark";
    Report.recoloured();
  };

  const measure = () => {
    state.last = Math.max(2, ...runs.map((one) => one.steps));
    Report.smooth(runs);
    Report.xs = Array.from({ length: Math.max(1, ...runs.map((one) => one.steps)) }, (_, at) => at + 1);
  };

  // The run is gone or damaged, says the server.
  Report.Unreadable = class extends Error {};

  // News: the columns of new steps, everything else anew.
  const poll = async () => {
    try {
      const answer = await fetch(`data?known=${Report.run.steps}&version=${Report.run.version ?? ""}`, { cache: "no-store" });
      if (answer.status === 205) return location.reload();
      if (answer.status >= 400) throw new Report.Unreadable(await answer.text());
      if (answer.status === 200) {
        const told = await answer.json();
        const follows = state.range[1] >= state.last - 0.5;
        const width = state.range[1] - state.range[0];
        const whole = state.range[0] <= 1 && follows;
        runs[0] = Report.run = Report.unpack(told, Report.run);
        measure();
        if (follows) state.range = whole ? [1, state.last] : [state.last - width, state.last];
        head();
        oddList();
        panels();
      }
    } catch (error) {
      const told = error instanceof Report.Unreadable;
      by("state").textContent = told ? "unreadable" : "no answer";
      by("state").title = told ? error.message : "";
      by("state").className = "pill bad";
    }
    setTimeout(poll, 1500);
  };

  Report.start = () => {
    const told = JSON.parse(by("data").textContent);
    live = told.live;
    runs = told.runs.map((run) => Report.unpack(run));
    Report.run = runs[0];
    measure();
    state.range = [1, state.last];
    const dark = matchMedia("(prefers-color-scheme: dark)");
    theme(dark.matches ? "dark" : "light");
    dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
    by("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
    by("keys").addEventListener("click", () => {
      by("keylist").hidden = !by("keylist").hidden;
      by("keys").setAttribute("aria-expanded", String(!by("keylist").hidden));
    });
    head();
    oddList();
    origin();
    panels();
    document.addEventListener("keydown", keys);
    let timer = 0;
    new ResizeObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        for (const one of state.plots) one.u.setSize({ width: Math.max(200, one.u.root.parentNode.clientWidth), height: one.spec.height });
        for (const one of state.plots) one.place();
        if (open) opened(true);
      }, 60);
    }).observe(by("plots"));
    document.documentElement.dataset.ready = "yes";
    if (live) setTimeout(poll, 1500);
  };
})();
