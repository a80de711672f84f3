"use strict";
/* The page: rows, pointer, keys, and the words beside the chart. */

const element = (id) => document.getElementById(id);
const MANY = 64; // workers from which on equal pipelines begin as one
const GROUP_HEAD = 22, PANEL_HEAD = 28, MIN_BAR = 6, MAX_BAR = 60;

/** A new element with a class, text and children; text is never read as markup. */
function make(name, { className = "", text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

class Timeline {
  constructor(data) {
    this.names = data.names;
    this.panels = data.panels.map((panel, number) => new Panel(panel, number));
    this.painter = new Painter(element("base"), element("overlay"), data.colours);
    this.group = "pipeline";
    this.beside = "stacked";
    this.path = "none";
    this.memory = true;
    this.equal = this.panels.some((panel) => panel.seats.length > MANY);
    element("equal").checked = this.equal;
    this.hover = this.cursor = this.chosen = null;
    this.followed = null; // {pipeline, microbatch}
    this.drawn = []; // milliseconds of the last frames
    this.chart = element("chart");
    this.cards();
    this.legend();
    this.whole();
    this.layOut();
    this.listen();
    this.dirty = { base: true, overlay: true };
    this.redraw();
  }

  get shown() { return this.panels.filter((panel) => panel.shown); }
  get total() { return Math.max(...this.shown.map((panel) => panel.length), 1e-12); }

  // --- Rows ----------------------------------------------------------------------------------------------------------

  /** Rebuilds the rows: heads and workers, each at its height; keeps what is on top there. */
  layOut() {
    const rows = this.ordered(), several = this.shown.length > 1;
    const workers = rows.filter((row) => !row.head).length;
    const heads = rows.length - workers;
    const room = this.chart.clientHeight - AXIS - heads * GROUP_HEAD;
    this.bar ??= Math.max(14, Math.min(24, Math.floor(room / Math.max(1, workers) * (this.memory ? 0.6 : 0.9))));
    const memory = this.memory ? Math.max(4, Math.round(this.bar * 0.45)) : 0;
    let at = 0;
    for (const row of rows) {
      row.at = at;
      row.bar = this.bar;
      row.memory = row.seat ? memory : 0;
      row.height = row.top ? PANEL_HEAD : row.head ? GROUP_HEAD : this.bar + (row.memory ? row.memory + 2 : 0);
      at += row.height + (row.head ? 0 : 4);
      if (row.seat) this.describe(row, several);
    }
    this.rows = rows;
    this.rowAt = new Map(rows.filter((row) => row.seat).map((row) => [`${row.panel.number} ${row.number}`, row]));
    element("spacer").style.height = `${at + AXIS + 8}px`;
    this.dirt();
  }

  ordered() {
    const rows = [];
    if (this.beside === "paired" && this.shown.length > 1) {
      const most = (key) => Math.max(...this.shown.map((panel) => panel[key]));
      this.grouped(rows, most("pipelines"), most("columns"), this.shown);
      return rows;
    }
    for (const panel of this.shown) {
      if (this.shown.length > 1) rows.push({ head: `${this.tag(panel)}  ${panel.name}`, top: true });
      this.grouped(rows, panel.pipelines, panel.columns, [panel]);
    }
    return rows;
  }

  grouped(rows, pipelines, columns, panels) {
    const sets = this.sets(pipelines, panels);
    const add = (pipeline, column, more) => {
      for (const panel of panels) {
        if (pipeline >= panel.pipelines || column >= panel.columns) continue;
        const number = panel.seatAt.get(panel.place(pipeline, column));
        const seat = number === undefined ? null : panel.seats[number];
        const label = `${pipeline}.${column}${more}${panels.length > 1 ? ` ${this.tag(panel)}` : ""}`;
        rows.push({ panel, number, seat, pipeline, column, label });
      }
    };
    if (this.group === "pipeline") {
      for (const set of sets) {
        rows.push({ head: set.length > 1 ? `Pipelines ${ranges(set)}: the same programs` : `Pipeline ${set[0]}` });
        for (let column = 0; column < columns; column++) add(set[0], column, "");
      }
      return;
    }
    for (let column = 0; column < columns; column++) {
      rows.push({ head: this.columnName(panels[0], column) });
      for (const set of sets) add(set[0], column, set.length > 1 ? ` ×${set.length}` : "");
    }
  }

  /** The pipelines, those that do the same in one set, if such are to be shown once. */
  sets(pipelines, panels) {
    const found = new Map();
    for (let pipeline = 0; pipeline < pipelines; pipeline++) {
      const key = this.equal ? panels.map((panel) => panel.behaviour(pipeline)).join(";") : pipeline;
      if (found.has(key)) found.get(key).push(pipeline); else found.set(key, [pipeline]);
    }
    return [...found.values()];
  }

  columnName(panel, column) {
    const stages = panel.stages.flatMap((one, stage) => (one === column ? [stage] : []));
    const layers = panel.layers[stages[0]];
    const held = layers ? `, layers ${stages.map((stage) => `${panel.layers[stage][0]}–${panel.layers[stage][1] - 1}`).join(" and ")}` : "";
    return stages.length === 1 && stages[0] === column ? `Stage ${column}${held}` :
      `Column ${column}: stages ${stages.join(", ")}${held}`;
  }

  describe(row, several) {
    const { seat, panel } = row, memory = panel.memoryOf(seat);
    if (seat.rolePipeline !== seat.pipeline || seat.roleColumn !== seat.column)
      row.label = `${seat.pipeline}.${seat.column} as ${seat.rolePipeline}.${seat.roleColumn}${several && this.beside === "paired" ? ` ${this.tag(panel)}` : ""}`;
    const slow = panel.slow[`${seat.pipeline}.${seat.column}`];
    if (slow) row.label += ` ×${slow / 1000}`;
    const unit = panel.holds.unit, capacity = panel.holds.capacity?.[seat.roleColumn];
    const number = (value) => Number((value * unit).toPrecision(4));
    row.peak = capacity === undefined ? `most ${number(memory.peak)}` : `${number(memory.peak)} of ${number(capacity)}`;
  }

  tag(panel) { return String.fromCharCode(65 + panel.number % 26); }

  /** The rows on the screen, with `y` where they are. */
  visible() {
    const scroll = this.chart.scrollTop, found = [];
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].at + this.rows[middle].height < scroll) low = middle + 1; else high = middle;
    }
    for (let i = low; i < this.rows.length && this.rows[i].at < scroll + this.view.height; i++) {
      this.rows[i].y = Math.round(this.rows[i].at - scroll) + AXIS;
      found.push(this.rows[i]);
    }
    return found;
  }

  rowOf = (ref) => {
    const row = this.rowAt.get(`${ref.panel.number} ${ref.seat}`);
    if (row) row.y = Math.round(row.at - this.chart.scrollTop) + AXIS;
    return row ?? null;
  };

  // --- Drawing -------------------------------------------------------------------------------------------------------

  dirt(base = true) {
    if (!this.dirty) return;
    this.dirty.base ||= base;
    this.dirty.overlay = true;
    this.redraw();
  }

  redraw() {
    this.wanted ??= requestAnimationFrame(() => {
      this.wanted = null;
      const began = performance.now();
      const { clientWidth: width, clientHeight: height } = this.chart;
      this.view = { ...this.times, width, height };
      this.painter.fit(this.view);
      if (this.dirty.base) this.painter.paintBase(this.visible());
      this.painter.paintOverlay(this.marks(), this.rowOf);
      this.dirty = { base: false, overlay: false };
      this.drawn.push(performance.now() - began);
      if (this.drawn.length > 600) this.drawn.shift();
    });
  }

  marks() {
    const followed = !this.followed ? [] : this.shown.map((panel) =>
      panel.follow(this.followed.pipeline, this.followed.microbatch));
    const path = this.path === "iteration" ? this.shown.flatMap((panel) => panel.critical) :
      this.path === "op" && this.chosen ? this.chainOf(this.chosen) : [];
    return { followed: followed.filter((one) => one.path.length), path, hover: this.hover, cursor: this.cursor };
  }

  chainOf(ref) {
    if (this.chained?.ref !== ref) this.chained = { ref, links: ref.panel.chain(ref) };
    return this.chained.links;
  }

  // --- Moving --------------------------------------------------------------------------------------------------------

  whole() { this.look(-0.01 * this.total, 1.02 * this.total); }

  /** Show [t0, t1) seconds, as far as that makes sense. */
  look(t0, t1) {
    const span = Math.max(this.total * 1e-7, Math.min(t1 - t0, this.total * 1.06));
    const middle = (t0 + t1) / 2;
    const from = Math.max(-0.03 * this.total, Math.min(middle - span / 2, 1.03 * this.total - span));
    this.times = { t0: from, t1: from + span };
    this.dirt();
  }

  /** Show `factor` as much time, with the one at `x` where it is. */
  zoom(factor, x = (GUTTER + this.view.width) / 2) {
    const at = this.painter.seconds(Math.max(GUTTER, x)), { t0, t1 } = this.times;
    const span = Math.max(this.total * 1e-7, Math.min((t1 - t0) * factor, this.total * 1.06));
    const from = at - (at - t0) * (span / (t1 - t0));
    this.look(from, from + span);
  }

  pan(share) {
    const by = share * (this.times.t1 - this.times.t0);
    this.look(this.times.t0 + by, this.times.t1 + by);
  }

  /** Bring an op into view. */
  reveal(ref) {
    const { panel } = ref, op = panel.op(ref), row = this.rowOf(ref);
    const [start, end] = [op.start * panel.second, op.end * panel.second], { t0, t1 } = this.times, span = t1 - t0;
    if (start < t0 || end > t1) this.look((start + end) / 2 - span / 2, (start + end) / 2 + span / 2);
    if (!row) {
      if (this.equal) this.set("equal", false); // it is one of those that are not shown
      return;
    }
    if (row.at < this.chart.scrollTop) this.chart.scrollTop = Math.max(0, row.at - GROUP_HEAD);
    else if (row.at + row.height + AXIS > this.chart.scrollTop + this.chart.clientHeight)
      this.chart.scrollTop = row.at + row.height + AXIS + 8 - this.chart.clientHeight;
  }

  // --- Choosing ------------------------------------------------------------------------------------------------------

  /** The op at a place of the chart, or null. */
  opAt(x, y) {
    if (x < GUTTER || y < AXIS) return null;
    const row = this.visible().find((one) => one.seat && y >= one.y && y < one.y + one.bar);
    if (!row) return null;
    const second = row.panel.second, track = row.seat.track;
    const index = track.at(this.painter.seconds(x) / second, 2 / this.painter.pixels / second);
    return index < 0 ? null : { panel: row.panel, seat: row.number, index };
  }

  choose(ref) {
    this.chosen = this.cursor = ref;
    if (!ref) {
      this.followed = null;
      this.setPath("none");
    } else {
      const op = ref.panel.op(ref);
      this.followed = op.microbatch < 0 ? null : { pipeline: op.pipeline, microbatch: op.microbatch };
      if (this.path === "none") this.setPath("iteration");
    }
    this.tell(ref);
    this.dirt(false);
  }

  setPath(value) {
    this.path = element("path").value = value;
    if (this.chosen) this.tell(this.chosen);
    this.dirt(false);
  }

  /** Follow a micro-batch given as `pipeline.number`; false where there is none. */
  find(text) {
    const match = /^\s*(\d+)\.(\d+)\s*$/.exec(text);
    if (!match) return false;
    for (const panel of this.shown) {
      const [first] = panel.follow(Number(match[1]), Number(match[2])).path;
      if (!first) continue;
      this.choose(first);
      this.reveal(first);
      return true;
    }
    return false;
  }

  /** From the op under the cursor to another one: along its row, or to the row below or above. */
  step(along, across) {
    const current = this.cursor ?? this.chosen;
    if (!current) {
      const row = this.visible().find((one) => one.seat?.track.count && one.y >= AXIS);
      if (!row) return;
      const index = Math.min(row.seat.track.count - 1, row.seat.track.upTo(this.times.t0 / row.panel.second));
      this.setCursor({ panel: row.panel, seat: row.number, index });
      return;
    }
    if (along) {
      const track = current.panel.seats[current.seat].track;
      let index = current.index + along;
      while (index > 0 && index < track.count - 1 && track.ends[index] === track.starts[index]) index += along;
      if (index >= 0 && index < track.count) this.setCursor({ ...current, index });
      return;
    }
    const here = this.rows.indexOf(this.rowOf(current)), op = current.panel.op(current);
    const middle = (op.start + op.end) / 2 * current.panel.second;
    for (let i = here + across; i >= 0 && i < this.rows.length; i += across) {
      const row = this.rows[i];
      if (!row.seat?.track.count) continue;
      const index = row.seat.track.at(middle / row.panel.second, Infinity);
      if (index >= 0) this.setCursor({ panel: row.panel, seat: row.number, index });
      return;
    }
  }

  setCursor(ref) {
    this.cursor = ref;
    this.reveal(ref);
    element("said").textContent = this.sentence(ref);
    if (!element("details").hidden || this.chosen) this.tell(ref);
    this.dirt(false);
  }

  // --- Words ---------------------------------------------------------------------------------------------------------

  at(panel, units) { return duration(units * panel.second); }

  sentence(ref) {
    const { panel } = ref, op = panel.op(ref);
    return `${panel.name}: ${panel.title(ref)}${op.rerouted ? ", re-routed" : ""}, from ${this.at(panel, op.start)} to ` +
      `${this.at(panel, op.end)}`;
  }

  facts(ref) {
    const { panel } = ref, op = panel.op(ref), rows = [];
    rows.push(["op", `${KINDS[op.kind]}, ${this.names[KINDS[op.kind]]}`]);
    if (op.microbatch >= 0) rows.push(["micro-batch", `${op.pipeline}.${op.microbatch}`]);
    if (op.stage >= 0) {
      const layers = panel.layers[op.stage];
      rows.push(["stage", `${op.stage}${layers ? `, layers ${layers[0]} to ${layers[1] - 1}` : ""}`]);
    }
    const { seat } = op, moved = seat.pipeline !== seat.rolePipeline || seat.column !== seat.roleColumn;
    rows.push(["host", `worker ${op.worker}${moved ? `, as ${seat.rolePipeline}.${seat.roleColumn}` : ""}`]);
    if (op.rerouted) rows.push(["re-routed", `its own worker ${op.pipeline}.${panel.stages[op.stage]} is down`]);
    rows.push(["start", this.at(panel, op.start)], ["end", this.at(panel, op.end)],
      ["takes", this.at(panel, op.end - op.start)]);
    return make("dl", { className: "facts" }, ...rows.flatMap(([name, value]) =>
      [make("dt", { text: name }), make("dd", { text: value })]));
  }

  /** What it waits for, in words: the last to come first. */
  waits(ref) {
    const { panel } = ref;
    return panel.waits(ref).map((wait, number) => {
      const why = { input: "its input", worker: "the worker", gradients: "the stage's last gradients" }[wait.why] ?? wait.why;
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
    if (!ref) return this.layOutSoon();
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
    return this.layOutSoon();
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

  layOutSoon() { this.dirt(); }

  cards() {
    const percent = (share) => `${Number((share * 100).toPrecision(3))} %`;
    for (const panel of this.panels) {
      const { numbers } = panel, rows = [["period", duration(numbers.period)]];
      if (panel.measured) rows.push(["planned", duration(numbers.planned)]);
      else rows.push(["bound", duration(numbers.lower_bound)],
        ["gap", numbers.status === "optimal" ? "0, proven optimal" : percent(numbers.gap)]);
      rows.push(["bubbles", percent(numbers.bubble_share)]);
      if (!panel.measured) rows.push(["workers", `${panel.seats.length}`]);
      if (panel.failed.length && !panel.measured) rows.push(["down", panel.failed.length > 6 ? panel.failed.length :
        panel.failed.map((worker) => worker.join(".")).join(", ")], ["re-routed", numbers.rerouted]);
      if (numbers.moves.length && !panel.measured) rows.push(["moved", numbers.moves.length]);
      if (numbers.peak_memory !== null) rows.push(["peak memory", Number(numbers.peak_memory.toPrecision(4))]);
      if (!panel.measured) rows.push(["made by", `${numbers.method}, ${numbers.backward}, ${numbers.optimizer}`]);
      const several = this.panels.length > 1, box = make("input", { type: "checkbox", "data-panel": panel.number });
      box.checked = panel.shown;
      box.addEventListener("change", () => this.toggle(panel, box));
      const title = make("label", {}, ...(several ? [box, make("span", { className: "tag", text: this.tag(panel) })] : []),
        make("span", { text: panel.name }), make("span", { text: panel.name === panel.job || panel.measured ? "" : ` · ${panel.job}` }));
      const card = make("div", { className: `card${panel.shown ? "" : " off"}` }, title,
        make("dl", {}, ...rows.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value })))));
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
    const used = new Set(this.panels.flatMap((panel) => panel.tracks.flatMap((track) => KINDS.filter((_, kind) => track.busy[kind][track.count] > 0))));
    const rerouted = this.panels.some((panel) => panel.tracks.some((track) => track.foreign[track.count]));
    const stored = (kind, pipelines, stage = 0) => new Track({ kinds: kind, stages: [stage],
      microbatches: [kind === "A" || kind === "O" ? -1 : 3], rerouted: pipelines, steps: [0], lengths: [1] }, [0, 1]);
    const entries = KINDS.filter((kind) => used.has(kind)).map((kind) => [stored(kind, []), `${kind} ${this.names[kind]}`]);
    if (this.panels.some((panel) => panel.stages.length > panel.columns))
      entries.push([stored("F", [], 1), "the worker's second stage"]);
    if (rerouted) entries.push([stored("F", [[0, 1]]), "re-routed: f1.3 is F of micro-batch 3 of pipeline 1"]);
    const legend = element("legend");
    legend.replaceChildren(...entries.map(([track, text]) => make("span", {}, this.swatch(track), make("span", { text }))));
    if (this.panels.some((panel) => panel.failed.length)) {
      const canvas = make("canvas", { width: 40, height: 16, "aria-hidden": "true" }), ctx = canvas.getContext("2d");
      ctx.fillStyle = this.painter.theme.fills.down;
      ctx.fillRect(0, 0, 40, 16);
      legend.append(make("span", {}, canvas, make("span", { text: "worker down" })));
    }
    legend.append(make("span", { text: `strip under a row: ${this.panels.some((panel) => panel.memory) ? "memory held" : "activations held"}` }));
  }

  swatch(track) {
    const canvas = make("canvas", { "aria-hidden": "true" }), scale = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [40 * scale, 16 * scale];
    canvas.style.cssText = "width:40px;height:16px";
    const painter = this.painter, ctx = canvas.getContext("2d"), view = painter.view;
    ctx.setTransform(scale, 0, 0, scale, -GUTTER * scale, 0);
    painter.view = { width: GUTTER + 40 };
    painter.paintOp(track, 0, GUTTER, GUTTER + 40, 0, 16);
    painter.batch.flush(ctx, painter.theme);
    painter.view = view;
    return canvas;
  }

  // --- Pointer and keys ----------------------------------------------------------------------------------------------

  listen() {
    const { chart } = this;
    chart.addEventListener("scroll", () => this.dirt());
    new ResizeObserver(() => this.dirt()).observe(chart);
    chart.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    chart.addEventListener("pointerdown", (event) => this.press(event));
    chart.addEventListener("pointermove", (event) => this.drag(event));
    chart.addEventListener("pointerup", (event) => this.release(event));
    chart.addEventListener("pointercancel", () => this.letGo());
    chart.addEventListener("pointerleave", () => this.point(null));
    document.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    const on = (id, event, act) => element(id).addEventListener(event, act);
    on("group", "change", (event) => this.set("group", event.target.value));
    on("beside", "change", (event) => this.set("beside", event.target.value));
    on("memory", "change", (event) => this.set("memory", event.target.checked));
    on("equal", "change", (event) => this.set("equal", event.target.checked));
    on("path", "change", (event) => this.setPath(event.target.value));
    on("theme", "change", (event) => this.setTheme(event.target.value));
    on("in", "click", () => this.zoom(1 / 1.5));
    on("out", "click", () => this.zoom(1.5));
    on("whole", "click", () => this.whole());
    on("ask", "click", () => element("help").showModal());
    on("close", "click", () => { this.choose(null); this.chart.focus(); });
    on("find", "keydown", (event) => { if (event.key === "Enter") this.search(event.target); });
    on("find", "input", (event) => event.target.removeAttribute("aria-invalid"));
  }

  search(box) {
    if (this.find(box.value)) return void this.chart.focus();
    box.setAttribute("aria-invalid", "true");
    element("said").textContent = `There is no micro-batch ${box.value}; write PIPELINE.NUMBER, for example 0.3`;
  }

  set(what, value) {
    this[what] = value;
    element(what)[typeof value === "boolean" ? "checked" : "value"] = value;
    const keep = this.cursor ?? this.chosen;
    this.layOut();
    if (keep) this.reveal(keep);
  }

  setTheme(value) {
    element("theme").value = value;
    if (value) document.documentElement.dataset.theme = value; else delete document.documentElement.dataset.theme;
    this.retheme();
  }

  retheme() {
    this.painter.retheme();
    this.legend();
    this.dirt();
  }

  place(event) {
    const box = this.chart.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  wheel(event) {
    const { x } = this.place(event);
    if (event.shiftKey || (x < GUTTER && !event.ctrlKey)) return; // the browser scrolls
    event.preventDefault();
    this.point(null);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return void this.pan(event.deltaX / (this.view.width - GUTTER));
    const pixels = event.deltaMode ? event.deltaY * 16 : event.deltaY;
    this.zoom(Math.exp(Math.max(-200, Math.min(200, pixels)) * 0.0022), x);
  }

  press(event) {
    const at = this.place(event);
    if (event.button || at.x >= this.chart.clientWidth) return; // the scroll bar
    this.pressed = { ...at, t0: this.times.t0, t1: this.times.t1, scroll: this.chart.scrollTop, moved: false };
    this.chart.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const at = this.place(event), pressed = this.pressed;
    if (!pressed) return void this.point(this.opAt(at.x, at.y), event);
    if (!pressed.moved && Math.hypot(at.x - pressed.x, at.y - pressed.y) < 4) return;
    pressed.moved = true;
    this.chart.classList.add("dragging");
    this.point(null);
    const by = (pressed.x - at.x) / this.painter.pixels;
    this.look(pressed.t0 + by, pressed.t1 + by);
    this.chart.scrollTop = pressed.scroll + pressed.y - at.y;
  }

  release(event) {
    const pressed = this.pressed;
    this.letGo();
    if (!pressed || pressed.moved) return;
    const { x, y } = this.place(event);
    this.choose(this.opAt(x, y));
  }

  letGo() {
    this.pressed = null;
    this.chart.classList.remove("dragging");
  }

  point(ref, event) {
    const same = ref && this.hover && ref.panel === this.hover.panel && ref.seat === this.hover.seat && ref.index === this.hover.index;
    if (!same && (ref || this.hover)) {
      this.hover = ref;
      this.dirt(false);
    }
    this.tip(ref, event?.clientX, event?.clientY);
  }

  key(event) {
    if (element("help").open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return void this.escape();
    if (event.target.closest?.("input:not([type=checkbox]), select")) return;
    if (event.target.closest?.("button, input") && [" ", "Enter"].includes(event.key)) return;
    const act = this.keys()[(event.shiftKey && event.key.startsWith("Arrow") ? "Shift " : "") + event.key];
    if (!act) return;
    event.preventDefault();
    this.point(null);
    act();
  }

  keys() {
    const turn = (values, value) => values[(values.indexOf(value) + 1) % values.length];
    const scroll = (by) => () => { this.chart.scrollTop += by; };
    const page = this.chart.clientHeight - 80;
    return {
      "ArrowLeft": () => this.pan(-0.12), "ArrowRight": () => this.pan(0.12),
      "ArrowUp": scroll(-60), "ArrowDown": scroll(60), "PageUp": scroll(-page), "PageDown": scroll(page),
      "Shift ArrowLeft": () => this.step(-1, 0), "Shift ArrowRight": () => this.step(1, 0),
      "Shift ArrowUp": () => this.step(0, -1), "Shift ArrowDown": () => this.step(0, 1),
      "Home": () => this.look(-0.01 * this.total, -0.01 * this.total + this.times.t1 - this.times.t0),
      "End": () => this.look(1.02 * this.total - this.times.t1 + this.times.t0, 1.02 * this.total),
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), "_": () => this.zoom(1.5),
      "0": () => this.whole(), "[": () => this.taller(-2), "]": () => this.taller(2),
      "Enter": () => this.cursor && this.choose(this.cursor),
      "g": () => this.set("group", turn(["pipeline", "stage"], this.group)),
      "b": () => this.panels.length > 1 && this.set("beside", turn(["stacked", "paired"], this.beside)),
      "m": () => this.set("memory", !this.memory),
      "e": () => this.set("equal", !this.equal), "d": () => this.nextDown(),
      "c": () => this.setPath(turn(["none", "iteration", "op"], this.path)),
      "t": () => this.setTheme(turn(["", "light", "dark"], element("theme").value)),
      "/": () => element("find").select(), "?": () => element("help").showModal(),
    };
  }

  /** Scroll to the next worker that is down, from the top again after the last. */
  nextDown() {
    const down = this.rows.filter((row) => !row.head && !row.seat);
    const next = down.find((row) => row.at > this.chart.scrollTop + 3 * GROUP_HEAD) ?? down[0];
    if (next) this.chart.scrollTop = Math.max(0, next.at - 2 * GROUP_HEAD);
    element("said").textContent = next ? `Worker ${next.pipeline}.${next.column} is down` : "No worker is down";
  }

  taller(by) {
    this.bar = Math.max(MIN_BAR, Math.min(MAX_BAR, this.bar + by));
    this.layOut();
  }

  escape() {
    this.point(null);
    this.choose(null);
    this.chart.focus();
  }
}

/** `0, 2–7` for ascending numbers; the first few runs of many. */
function ranges(numbers) {
  const runs = [];
  for (const number of numbers)
    if (runs.length && number === runs.at(-1)[1] + 1) runs.at(-1)[1] = number; else runs.push([number, number]);
  const texts = runs.slice(0, 6).map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return texts.join(", ") + (runs.length > 6 ? " …" : "") + (runs.length > 1 ? ` (${numbers.length})` : "");
}

/** The page's state, for whoever wants to look on: `timeline.times`, `timeline.chosen`, `timeline.drawn`. */
const timeline = new Timeline(JSON.parse(element("data").textContent));
