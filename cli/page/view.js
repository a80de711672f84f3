"use strict";
/* The page: what is drawn when, and what pointer and keys do. */

const MANY = 64; // workers from which on equal pipelines begin as one
const MIN_BAR = 6, MAX_BAR = 60;

class Timeline extends Words {
  constructor(data) {
    super();
    this.names = data.names;
    this.panels = data.panels.map((panel, number) => new Panel(panel, number));
    this.painter = new Painter(element("base"), element("overlay"), data.colours);
    this.group = "pipeline";
    this.colour = "kind";
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
      this.painter.origins = this.colour === "origin";
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
    on("colour", "change", (event) => this.setColour(event.target.value));
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

  /** Colour ops by their kind or by the pipeline whose micro-batch they are of. */
  setColour(value) {
    this.painter.origins = value === "origin";
    this.set("colour", value);
    this.legend();
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
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
      return void this.pan(event.deltaX / (this.view.width - GUTTER));
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
    const old = this.hover;
    const same = ref && old && ref.panel === old.panel && ref.seat === old.seat && ref.index === old.index;
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
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5),
      "-": () => this.zoom(1.5), "_": () => this.zoom(1.5),
      "0": () => this.whole(), "[": () => this.taller(-2), "]": () => this.taller(2),
      "Enter": () => this.cursor && this.choose(this.cursor),
      "g": () => this.set("group", turn(["pipeline", "stage"], this.group)),
      "b": () => this.panels.length > 1 && this.set("beside", turn(["stacked", "paired"], this.beside)),
      "o": () => this.setColour(turn(["kind", "origin"], this.colour)),
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

/** The page's state, for whoever wants to look on: `timeline.times`, `timeline.chosen`, `timeline.drawn`. */
const timeline = new Timeline(JSON.parse(element("data").textContent));
