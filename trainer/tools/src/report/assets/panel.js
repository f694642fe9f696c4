"use strict";
// A step in words: what the ledger says of it, why it is odd, the commands that look closer, and its documents where it was
// explained.
(() => {
  const { make, num, int, percent } = Report;

  const command = (label, text) => {
    const button = make("button", { type: "button", text: "Copy", "aria-label": `Copy the command: ${label}` });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        // A page opened from a file may not have a clipboard: the selection still is.
        const range = document.createRange();
        range.selectNodeContents(button.previousSibling);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    return make("div", {}, make("p", { class: "note", text: label }), make("div", { class: "command" }, make("code", { text }), button));
  };

  const facts = (pairs) => {
    const list = make("dl", { class: "facts" });
    for (const [name, value] of pairs) if (value !== null && value !== undefined) list.append(make("dt", { text: name }), make("dd", { text: value }));
    return list;
  };

  // The ledger's line as sentences.
  Report.sentence = (run, step) => {
    const at = step - 1;
    const before = Report.median(run.loss.slice(Math.max(0, at - 64), at));
    const norm = Report.median(run.norm.slice(Math.max(0, at - 64), at));
    const against = (value, usual) => (usual === null || value === null ? "" : `, against a usual ${num(usual)}`);
    const skipped = run.skipped.find((one) => one[0] === step);
    return `Step ${int(step)} of phase ${Report.phase(run, step)} had ${int(Report.labels(run, step))} labels and a mean loss of ${num(run.loss[at], 5)}${against(run.loss[at], before)}. `
      + `Its gradient norm was ${num(run.norm[at])}${against(run.norm[at], norm)}, the learning rate ${num(run.lr[at], 3)}.`
      + (skipped ? ` It was ${skipped[1]}: nothing moved.` : "");
  };

  const sources = (run, step) => {
    const line = run.lines[step];
    if (line && Object.keys(line.sources).length) {
      return [make("h3", { text: "Sources: loss and labels" }), facts(Object.entries(line.sources).map(([name, one]) => [name, `${num(one.loss, 5)}  (${int(one.labels)})`]))];
    }
    if (!run.sources) return [];
    const { names, width, loss, share } = run.sources;
    const bin = Math.floor((step - 1) / width);
    const title = width > 1 ? `Sources: mean of steps ${int(bin * width + 1)} to ${int(Math.min(run.steps, (bin + 1) * width))}` : "Sources: loss and share of the labels";
    return [make("h3", { text: title }), facts(names.map((name, one) => [name, share[one][bin] ? `${num(loss[one][bin], 5)}  (${percent(share[one][bin])})` : null]))];
  };

  const evenness = (run, step) => {
    if (!run.router) return null;
    const layers = run.router.classes.length;
    const bin = Math.floor((step - 1) / run.router.uneven_width);
    let [worst, most] = [0, -1];
    for (let layer = 0; layer < layers; layer++) {
      // A layer without a router has no classes.
      const v = run.router.classes[layer] ? run.router.uneven[bin * layers + layer] / 255 : -1;
      if (v > most) [worst, most] = [layer, v];
    }
    return `${num(1 - most, 3)} (layer ${worst})`;
  };

  // A document of an explanation, what the step is without it, and its worst tokens in their text.
  const signed = (value) => (value > 0 ? "+" : "") + num(value, 3);
  const worst = (token) => {
    const [before, own, after] = token.text;
    const mark = make("mark", { text: own, title: `${token.token === null ? "a token of fill-in-the-middle" : `token ${token.token}`}: ${num(token.loss, 3)} nats` });
    mark.style.setProperty("--heat", String(Math.min(60, 12 + 4 * token.loss)));
    return make("pre", {}, before, mark, after);
  };
  const documentNode = (run, value, doc, nr) => {
    const without = (value.removals || []).find((one) => one.documents.length === 1 && one.documents[0] === doc.id);
    const place = `${doc.file}${doc.group === null || doc.group === undefined ? ":" : `, row group ${doc.group}, row `}${doc.row}${doc.bytes ? `, bytes ${doc.bytes[0]}..${doc.bytes[1]}` : ""}`;
    return make("article", { class: "doc" },
      make("header", {}, make("b", { text: String(doc.id) }), make("span", { class: "note", text: String(doc.source) })),
      facts([
        ["Labels", int(doc.labels)],
        ["Mean loss", num(doc.mean)],
        ["Above its source", `${signed(doc.excess)} nats`],
        ["Gradient norm", num(doc.gradient_norm)],
        ["Alignment with the step", num(doc.alignment, 3)],
        without ? ["Without it: loss", `${num(without.loss)} (${signed(without.loss - value.loss)})`] : ["", null],
        without && without.norm !== null ? ["Without it: norm", `${num(without.norm)} (${signed(without.norm - value.norm)})`] : ["", null],
        without && without.next_loss !== null && value.next_loss !== null ? ["Without it: next loss", `${num(without.next_loss)} (${signed(without.next_loss - value.next_loss)})`] : ["", null],
      ]),
      ...((value.tokens || [])[nr] || []).map(worst),
      command("Where it is from", place));
  };
  const explained = (run, value) => {
    const { sentence, findings = [], documents = [], advice, top = 8, ...rest } = value;
    const more = Object.fromEntries(["unexplained", "layers", "routers", "temperatures", "changes"].filter((key) => rest[key] !== undefined).map((key) => [key, rest[key]]));
    return [
      make("h3", { text: "Explained" }),
      sentence ? make("p", {}, make("strong", { text: String(sentence) })) : null,
      ...findings.filter((one) => !String(sentence).includes(one.words)).map((one) => make("p", { class: "note", text: String(one.words) })),
      advice ? make("p", { class: "note", text: String(advice) }) : null,
      documents.length ? make("h3", { text: `Documents, worst first: ${Math.min(top, documents.length)} of ${documents.length}` }) : null,
      ...documents.slice(0, top).map((doc, nr) => documentNode(run, value, doc, nr)),
      Object.keys(more).length ? make("details", {}, make("summary", { class: "note", text: "Layers, routers, what changed" }), make("pre", { class: "mono", text: JSON.stringify(more, null, 1) })) : null,
    ];
  };

  Report.showStep = (run, step, actions) => {
    const panel = document.getElementById("panel");
    const button = (text, name, act) => make("button", { type: "button", text, "aria-label": name, on: { click: act } });
    const odd = run.odd.find((one) => step >= one.step && step <= one.last);
    const why = odd ? make("div", { class: "why" }, ...odd.reasons.map((one) => make("p", { text: one.words + (one.step !== step ? ` (step ${int(one.step)})` : "") })), ...odd.context.map((text) => make("p", { class: "note", text }))) : null;
    const at = step - 1;
    const kept = run.happenings.filter((one) => one.kind === "checkpoint" && one.step < step).reduce((most, one) => Math.max(most, one.step), 0);
    const line = run.lines[step];
    const here = run.happenings.filter((one) => one.step === step || (one.kind === "start" && one.step + 1 === step));
    const changes = run.curricula.filter((one) => one.step === step && step > 1).flatMap((one) => one.changes);
    panel.replaceChildren(
      make("div", { class: "bar" }, make("h2", { text: `Step ${int(step)}` }), button("\u2039", "The step before", actions.back), button("\u203a", "The step after", actions.on), button("Close", "Close the step", actions.close)),
      ...[why, make("p", { text: Report.sentence(run, step) }),
        ...(run.explained[step] ? explained(run, run.explained[step]) : []),
        run.explained[step] ? make("h3", { text: "The step" }) : null,
        facts([
          ["Speed", run.speed[at] ? `${int(run.speed[at])} tokens/s` : null],
          ["Waited for data", run.stall[at] ? percent(run.stall[at]) : null],
          ["Least even router", evenness(run, step)],
          ["Kept state before it", kept ? `step ${int(kept)}` : "the start"],
          ["Batch digest", line ? line.data.slice(0, 16) : null],
          ["State digest", line ? line.state.slice(0, 16) : null],
        ]),
        ...sources(run, step),
        here.length || changes.length ? make("h3", { text: "What happened here" }) : null,
        ...here.map((one) => make("p", { class: "note", text: one.words })),
        ...changes.map((text) => make("p", { class: "note", text: `The curriculum changed: ${text}` })),
        make("h3", { text: "Look closer" }),
        ...run.commands.map(([label, text]) => command(label, text.replace("{}", String(step))))].filter(Boolean),
    );
    panel.hidden = false;
  };
  Report.facts = facts;
})();
