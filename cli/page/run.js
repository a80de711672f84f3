"use strict";
/* The page of a run: zooms its charts, goes from event to event, and opens the timelines of schedules. */

const element = (id) => document.getElementById(id);
const CLOSEST = 1e-5; // of the run that a view shows at least

/** Run seconds for a reader, as `clock` of cli/shared/summaries.py; finer where the view is. */
function clock(seconds, span = Infinity) {
  if (seconds < 100 || span < 20) return `${seconds.toFixed(span < 1 ? 3 : span < 20 ? 2 : 1)} s`;
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** The last of `rows`, in order of their first entries, that begins at or before `at`; -1: none. */
function lastBefore(rows, at) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= at) low = middle + 1; else high = middle;
  }
  return low - 1;
}

class RunPage {
  constructor(data) {
    Object.assign(this, data);
    this.total = Math.max(data.total, 1e-3);
    this.chart = element("chart");
    this.marks = [...document.querySelectorAll(".mark")];
    this.pictures = [...document.querySelectorAll(".chart svg")];
    this.plot = document.querySelector(".chart.throughput");
    this.chosen = -1; // an event's number
    element("tools").hidden = false;
    this.listen();
    this.look(0, this.total);
  }

  // --- The view --------------------------------------------------------------------------------------------------------

  /** Show [t0, t1) run seconds, as far as there are such. */
  look(t0, t1) {
    const span = Math.max(this.total * CLOSEST, Math.min(t1 - t0, this.total));
    this.t0 = Math.max(0, Math.min((t0 + t1) / 2 - span / 2, this.total - span));
    this.t1 = this.t0 + span;
    for (const svg of this.pictures) svg.setAttribute("viewBox", `${this.t0} 0 ${span} 100`);
    this.marks.forEach((mark, number) => {
      const at = this.events[number][0];
      mark.hidden = at < this.t0 || at > this.t1;
      mark.style.left = `${100 * this.place(at)}%`;
    });
    this.axis();
    this.cross(this.chosen < 0 ? null : this.events[this.chosen][0], true);
  }

  place(at) { return (at - this.t0) / (this.t1 - this.t0); }

  zoom(factor, at = (this.t0 + this.t1) / 2) {
    const share = this.place(at), span = Math.max(this.total * CLOSEST, Math.min((this.t1 - this.t0) * factor, this.total));
    this.look(at - share * span, at + (1 - share) * span);
  }

  pan(share) {
    const span = this.t1 - this.t0, from = Math.max(0, Math.min(this.t0 + share * span, this.total - span));
    this.look(from, from + span);
  }

  axis() {
    const span = this.t1 - this.t0, step = this.steps.find((one) => one >= span / 8) ?? span;
    const inside = document.querySelector("#ticks .inside");
    inside.replaceChildren();
    for (let number = Math.ceil(this.t0 / step - 1e-9); number * step <= this.t1; number++) {
      const label = document.createElement("span");
      label.textContent = clock(number * step, span);
      label.style.left = `${100 * this.place(number * step)}%`;
      inside.append(label);
    }
  }

  /** A vertical line at a time; null: none. */
  cross(at, chosen = false) {
    const line = element("cross"), seen = at !== null && at >= this.t0 && at <= this.t1;
    line.hidden = !seen;
    line.classList.toggle("chosen", chosen);
    if (seen) line.style.left = `${this.plot.offsetLeft + this.place(at) * this.plot.clientWidth}px`;
  }

  // --- Events and points -----------------------------------------------------------------------------------------------

  choose(number) {
    this.chosen = number;
    document.querySelectorAll(".chosen").forEach((one) => one.classList.remove("chosen"));
    element("tip").hidden = true;
    if (number < 0) {
      this.cross(null);
      element("said").textContent = "";
      return;
    }
    const [at, , text] = this.events[number], row = element(`event-${number}`);
    if (at < this.t0 || at > this.t1) this.look(at - (this.t1 - this.t0) / 2, at + (this.t1 - this.t0) / 2);
    this.marks[number].classList.add("chosen");
    row.classList.add("chosen");
    const box = row.closest(".scroll"); // scrollIntoView would move the whole page
    box.scrollTop += row.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
    this.cross(at, true);
    this.tell(at, `${clock(at)}: ${text}`);
    element("said").textContent = `${clock(at)}: ${text}`;
  }

  /** To the event before or after the chosen one, or the first in the view. */
  step(by) {
    if (!this.events.length) return;
    const from = this.chosen >= 0 ? this.chosen + by : by > 0 ? lastBefore(this.events, this.t0 - 1e-9) + 1 :
      lastBefore(this.events, this.t1);
    this.choose(Math.max(0, Math.min(this.events.length - 1, from)));
  }

  closer() {
    if (this.chosen < 0) return;
    const at = this.events[this.chosen][0], span = Math.min(this.total / 20, (this.t1 - this.t0) / 4);
    this.look(at - span / 2, at + span / 2);
  }

  /** What is known of a time, as lines. */
  known(at) {
    const lines = [clock(at, this.t1 - this.t0)];
    const generation = this.generations[lastBefore(this.generations, at)];
    if (generation && at <= generation[1]) lines.push(generation[2]);
    const point = this.points[lastBefore(this.points, at)];
    if (point && at <= point[1]) {
      const [, , first, count, rate, slowest, fastest, loss] = point;
      lines.push(count > 1 ? `iterations ${first} to ${first + count - 1}` : `iteration ${first}`);
      lines.push(`${rate.toPrecision(4)} samples/s` + (count > 1 ?
        `, from ${slowest.toPrecision(3)} to ${fastest.toPrecision(3)}` : ""));
      if (loss !== null) lines.push(`loss ${loss.toPrecision(5)}`);
    }
    return lines.join("\n");
  }

  tell(at, text) {
    const tip = element("tip"), left = this.plot.offsetLeft + this.place(at) * this.plot.clientWidth;
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${left + tip.offsetWidth + 20 > this.chart.clientWidth ? left - tip.offsetWidth - 10 : left + 10}px`;
  }

  // --- Schedules -------------------------------------------------------------------------------------------------------

  /** The timeline page of a schedule, as text. Rejects where the page does not have it. */
  async timeline(digest) {
    const packed = Uint8Array.from(atob(this.schedules[digest]), (one) => one.charCodeAt(0));
    const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    return this.shell.replace("{{DATA}}", () => data)
      .replace("<title>TITLE", () => `<title>${JSON.parse(data).panels[0].name}`);
  }

  async open(digest) {
    const address = URL.createObjectURL(new Blob([await this.timeline(digest)], { type: "text/html" }));
    window.open(address);
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  }

  // --- Pointer and keys ------------------------------------------------------------------------------------------------

  time(event) {
    const box = this.plot.getBoundingClientRect();
    return this.t0 + Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)) * (this.t1 - this.t0);
  }

  setTheme(value) {
    element("theme").value = value;
    if (value) document.documentElement.dataset.theme = value; else delete document.documentElement.dataset.theme;
  }

  listen() {
    const on = (id, work) => element(id).addEventListener("click", work);
    on("in", () => this.zoom(1 / 1.5));
    on("out", () => this.zoom(1.5));
    on("whole", () => this.look(0, this.total));
    on("previous", () => this.step(-1));
    on("next", () => this.step(1));
    on("ask", () => element("help").showModal());
    element("theme").addEventListener("change", (event) => this.setTheme(event.target.value));
    document.addEventListener("click", (event) => this.follow(event));
    this.drag();
    this.chart.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      this.zoom(1.0015 ** event.deltaY, this.time(event));
    }, { passive: false });
    document.addEventListener("keydown", (event) => this.press(event));
    addEventListener("resize", () => this.look(this.t0, this.t1));
  }

  drag() {
    let from = null;
    this.chart.addEventListener("pointerdown", (event) => {
      if (event.button || event.target.closest("a")) return;
      from = { x: event.clientX, t0: this.t0, t1: this.t1 };
    });
    addEventListener("pointerup", () => { from = null; this.chart.classList.remove("dragging"); });
    this.chart.addEventListener("pointermove", (event) => {
      if (from && event.buttons) {
        this.chart.classList.add("dragging");
        const by = (from.x - event.clientX) / this.plot.clientWidth * (from.t1 - from.t0);
        const t0 = Math.max(0, Math.min(from.t0 + by, this.total - (from.t1 - from.t0)));
        this.look(t0, t0 + from.t1 - from.t0);
      }
      if (event.target.closest("a")) return;
      const at = this.time(event);
      this.cross(at);
      this.tell(at, this.known(at));
    });
    this.chart.addEventListener("pointerleave", () => {
      element("tip").hidden = true;
      this.cross(this.chosen < 0 ? null : this.events[this.chosen][0], true);
    });
  }

  /** Links do more here than without this script. */
  follow(event) {
    const link = event.target.closest("a");
    if (!link) return;
    const { event: number, schedule, from, to } = link.dataset;
    if (schedule !== undefined) {
      if (!(schedule in this.schedules)) return;
      event.preventDefault();
      this.open(schedule);
      return;
    }
    event.preventDefault();
    if (number !== undefined) this.choose(Number(number));
    else this.look(Number(from), Number(to));
    if (!this.chart.contains(link)) this.chart.scrollIntoView({ block: "nearest" });
  }

  press(event) {
    if (event.target.closest("select, input, dialog, button") || event.ctrlKey || event.altKey || event.metaKey) return;
    const span = this.t1 - this.t0, themes = ["", "light", "dark"];
    const keys = {
      "ArrowLeft": () => (event.shiftKey ? this.step(-1) : this.pan(-0.12)),
      "ArrowRight": () => (event.shiftKey ? this.step(1) : this.pan(0.12)),
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), "_": () => this.zoom(1.5),
      "0": () => this.look(0, this.total),
      "Home": () => this.look(0, span), "End": () => this.look(this.total - span, this.total),
      "Enter": () => (event.target.closest("a") ? null : this.closer()),
      "t": () => this.setTheme(themes[(themes.indexOf(element("theme").value) + 1) % themes.length]),
      "?": () => element("help").showModal(), "Escape": () => this.choose(-1),
    };
    if (!keys[event.key]) return;
    if (event.key !== "Enter") event.preventDefault();
    keys[event.key]();
  }
}

/** The page's state, for whoever wants to look on: `page.t0`, `page.chosen`. */
const page = new RunPage(JSON.parse(element("data").textContent));
