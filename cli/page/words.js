"use strict";
/* What the page says: cards, legend, the words beside the pointer and about the chosen op. */

const element = (id) => document.getElementById(id);

/** A new element with a class, text and children; text is never read as markup. */
function make(name, { className = "", text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A gap to a bound, as commands print it; one that is not 0 is never shown as 0. */
function gapText(gap) {
  return gap === null ? "not known" : `${(100 * (gap > 0 ? Math.max(gap, 1e-4) : 0)).toFixed(2)} %`;
}

/** The part of `Timeline` that puts things into words. */
class Words extends Rows {
  at(panel, units) { return duration(units * panel.second); }

  sentence(ref) {
    const { panel } = ref, op = panel.op(ref);
    return `${panel.name}: ${panel.title(ref)}${op.rerouted ? ", re-routed" : op.shed ? ", shed" : ""}, ` +
      `from ${this.at(panel, op.start)} to ` +
      `${this.at(panel, op.end)}`;
  }

  facts(ref) {
    const { panel } = ref, op = panel.op(ref), rows = [];
    rows.push(["op", `${KINDS[op.kind]}, ${this.names[KINDS[op.kind]]}`]);
    if (op.microbatch >= 0) rows.push(["micro-batch", `${op.pipeline}.${op.microbatch}`]);
    if (op.slice >= panel.stages.length) rows.push(["slice", layersText(panel.ranges[op.slice])]);
    else if (op.slice >= 0)
      rows.push(["stage", `${op.slice}${panel.named ? `, ${layersText(panel.ranges[op.slice])}` : ""}`]);
    const { seat } = op, moved = seat.pipeline !== seat.rolePipeline || seat.column !== seat.roleColumn;
    rows.push(["host", `worker ${op.worker}${moved ? `, as ${seat.rolePipeline}.${seat.roleColumn}` : ""}`]);
    if (seat.holds) rows.push(["holds", seat.holds.map(layersText).join(", ") || "no layers"]);
    if (op.rerouted || op.shed) {
      const own = panel.ownWorkers(op.pipeline, op.microbatch, op.slice)
        .filter(([pipeline, column]) => op.shed || !panel.playerOf.has(panel.workerNumber(pipeline, column)))
        .map((worker) => worker.join("."));
      const many = own.length > 1, names = `its own worker${many ? "s" : ""} ${own.join(" and ")} ${many ? "are" : "is"}`;
      rows.push(op.shed ? ["shed", `${names} alive`] : ["re-routed", `${names} down`]);
    }
    rows.push(["start", this.at(panel, op.start)], ["end", this.at(panel, op.end)],
      ["takes", this.at(panel, op.end - op.start)]);
    return make("dl", { className: "facts" }, ...rows.flatMap(([name, value]) =>
      [make("dt", { text: name }), make("dd", { text: value })]));
  }

  /** What it waits for, in words: the last to come first. */
  waits(ref) {
    const { panel } = ref;
    return panel.waits(ref).map((wait, number) => {
      const words = { input: "its input", worker: "the worker", gradients: "the last gradients of its layers" };
      const why = words[wait.why] ?? wait.why;
      const hop = wait.hop ? ` + ${this.at(panel, wait.hop)} transfer` : "";
      return { ref: wait.ref, text: `${number ? "" : "▸ "}${why}: ${panel.title(wait.ref)}, until ` +
        `${this.at(panel, wait.ready - wait.hop)}${hop}` };
    });
  }

  tip(ref, x, y) {
    const tip = element("tip");
    tip.hidden = !ref;
    if (!ref) return;
    const waits = this.waits(ref), lines = waits.length ? waits.map(({ text }) => make("div", { text })) :
      [make("div", { text: "nothing in this iteration" })];
    tip.replaceChildren(make("b", { text: ref.panel.title(ref) }), this.facts(ref),
      make("p", {}, make("b", { text: "waits for" })), ...lines);
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - box.width - 12 : x + 16)}px`;
    tip.style.top = `${Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18)}px`;
  }

  tell(ref) {
    element("details").hidden = !ref;
    if (!ref) return void this.dirt();
    const { panel } = ref;
    const waits = this.waits(ref).map((wait) => {
      const button = make("button", { type: "button", text: wait.text });
      button.addEventListener("click", () => { this.choose(wait.ref); this.reveal(wait.ref); this.chart.focus(); });
      return make("li", {}, button);
    });
    const path = this.path === "op" ? this.chainOf(ref) : panel.critical;
    element("facts").replaceChildren(
      make("h2", { text: panel.title(ref) }), this.facts(ref),
      make("h3", { text: "Waits for (▸ the last to be ready)" }),
      waits.length ? make("ul", {}, ...waits) : make("p", { text: "Nothing in this iteration." }),
      make("h3", { text: this.path === "op" ? "Chain up to it" : "Critical path of the iteration" }),
      this.pathFacts(panel, path));
    element("said").textContent = this.sentence(ref);
    this.dirt();
  }

  pathFacts(panel, path) {
    const sum = (value) => path.reduce((total, link) => total + value(link), 0);
    const hops = path.filter((link) => link.wait?.hop);
    const rows = [["ops", path.length], ["computing", this.at(panel, sum(({ ref }) => {
      const op = panel.op(ref); return op.end - op.start; }))],
    ["transfers", `${hops.length}, ${this.at(panel, sum((link) => link.wait?.hop ?? 0))}`],
    ["waiting", this.at(panel, sum((link) => Math.max(0, link.late)))]];
    return make("dl", { className: "facts" }, ...rows.flatMap(([name, value]) =>
      [make("dt", { text: name }), make("dd", { text: value })]));
  }

  cards() {
    const percent = (share) => `${Number((share * 100).toPrecision(3))} %`;
    for (const panel of this.panels) {
      const { numbers } = panel, rows = [["period", duration(numbers.period)]];
      if (panel.measured) rows.push(["planned", duration(numbers.planned)]);
      else rows.push(["bound", duration(numbers.lower_bound)],
        ["gap", numbers.status === "optimal" ? "0, proven optimal" : gapText(numbers.gap)]);
      rows.push(["bubbles", percent(numbers.bubble_share)]);
      if (!panel.measured) rows.push(["workers", `${panel.seats.length}`]);
      if (panel.failed.length && !panel.measured) rows.push(["down", panel.failed.length > 6 ? panel.failed.length :
        panel.failed.map((worker) => worker.join(".")).join(", ")], ["re-routed", numbers.rerouted]);
      if (numbers.shed && !panel.measured) rows.push(["shed", numbers.shed]);
      if (numbers.moves.length && !panel.measured) rows.push(["moved", numbers.moves.length]);
      if (numbers.peak_memory !== null) rows.push(["peak memory, in the job file's unit", Number(numbers.peak_memory.toPrecision(4))]);
      if (!panel.measured) rows.push(["made by", `${numbers.method}, ${numbers.backward}, ${numbers.optimizer}`]);
      const several = this.panels.length > 1, box = make("input", { type: "checkbox", "data-panel": panel.number });
      box.checked = panel.shown;
      box.addEventListener("change", () => this.toggle(panel, box));
      const title = make("label", {}, ...(several ? [box, make("span", { className: "tag", text: this.tag(panel) })] : []),
        make("span", { text: panel.name }),
        make("span", { text: panel.name === panel.job || panel.measured ? "" : ` · ${panel.job}` }));
      const card = make("div", { className: `card${panel.shown ? "" : " off"}` }, title,
        make("dl", {}, ...rows.map(([name, value]) =>
          make("div", {}, make("dt", { text: name }), make("dd", { text: value })))));
      if (panel.violation) card.append(make("div", { className: "bad", text: `breaks a rule: ${panel.violation}` }));
      element("cards").append(card);
    }
    element("besides").hidden = this.panels.length < 2;
  }

  toggle(panel, box) {
    panel.shown = box.checked || this.shown.length === 1;
    box.checked = panel.shown;
    box.closest(".card").classList.toggle("off", !panel.shown);
    if (!panel.shown && this.chosen?.panel === panel) this.choose(null);
    this.cursor = this.hover = null;
    this.layOut();
    this.whole();
  }

  legend() {
    const used = new Set(this.panels.flatMap((panel) => panel.tracks.flatMap((track) =>
      KINDS.filter((_, kind) => track.busy[kind][track.count] > 0))));
    const numbers = this.panels.map((panel) => panel.numbers);
    const stored = (kind, foreign, slice = 0) => new Track({ kinds: kind, slices: [slice],
      microbatches: [kind === "A" || kind === "O" ? -1 : 3], foreign, steps: [0], lengths: [1] }, [0, 1], ["", "", "4–6"]);
    const entries = KINDS.filter((kind) => used.has(kind)).map((kind) => [stored(kind, []), `${kind} ${this.names[kind]}`]);
    if (this.colour === "origin") {
      const most = Math.max(...this.panels.map((panel) => panel.pipelines)), colours = Object.keys(ORIGINS).length;
      entries.splice(0, entries.length, ...Array.from({ length: Math.min(most, colours) }, (_, number) =>
        [stored("F", []), `pipeline ${number}${most > number + colours ? `, ${number + colours}, …` : ""}`, number]));
    }
    if (this.panels.some((panel) => panel.stages.length > panel.columns))
      entries.push([stored("F", [], 1), "the worker's second stage"]);
    if (numbers.some((one) => one.rerouted))
      entries.push([stored("F", [[0, 1, 0]]), "re-routed: f1.3 is F of micro-batch 3 of pipeline 1"]);
    if (numbers.some((one) => one.shed))
      entries.push([stored("F", [[0, 1, 1]]), "shed: the same, though its own worker is alive"]);
    if (this.panels.some((panel) => panel.ranges.length > panel.stages.length))
      entries.push([stored("F", [], 2), "layers 4 to 6, no whole stage"]);
    const legend = element("legend");
    legend.replaceChildren(...entries.map(([track, text, pipeline]) =>
      make("span", {}, this.swatch(track, pipeline), make("span", { text }))));
    if (this.panels.some((panel) => panel.failed.length)) {
      const canvas = make("canvas", { width: 40, height: 16, "aria-hidden": "true" }), ctx = canvas.getContext("2d");
      ctx.fillStyle = this.painter.theme.fills.down;
      ctx.fillRect(0, 0, 40, 16);
      legend.append(make("span", {}, canvas, make("span", { text: "worker down" })));
    }
    if (this.panels.some((panel) => panel.tracks.some((track) => track.links.length))) {
      const canvas = make("canvas", { width: 40, height: 16, "aria-hidden": "true" }), ctx = canvas.getContext("2d");
      ctx.fillStyle = this.painter.theme.fills.link;
      ctx.fillRect(0, 12, 40, 4);
      legend.append(make("span", {}, canvas, make("span", { text: "all-reduce, beside other ops" })));
    }
    const held = this.panels.some((panel) => panel.memory) ? "memory" : "activations";
    legend.append(make("span", { text: `strip under a row: ${held} held` }));
  }

  /** An op as it is drawn, of a role of this pipeline. */
  swatch(track, pipeline = 0) {
    const canvas = make("canvas", { "aria-hidden": "true" }), scale = window.devicePixelRatio || 1, width = 46;
    [canvas.width, canvas.height] = [width * scale, 16 * scale];
    canvas.style.cssText = `width:${width}px;height:16px`;
    const painter = this.painter, ctx = canvas.getContext("2d"), view = painter.view;
    ctx.setTransform(scale, 0, 0, scale, -GUTTER * scale, 0);
    painter.view = { width: GUTTER + width };
    painter.own = pipeline;
    painter.paintOp(track, 0, GUTTER, GUTTER + width, 0, 16);
    painter.batch.flush(ctx, painter.theme);
    painter.view = view;
    return canvas;
  }
}
