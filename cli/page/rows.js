"use strict";
/* Which rows there are, and where. */

const GROUP_HEAD = 22, PANEL_HEAD = 28;

/** The part of `Timeline` that lays out heads and workers; the others are in words.js and view.js. */
class Rows {
  get shown() { return this.panels.filter((panel) => panel.shown); }
  get total() { return Math.max(...this.shown.map((panel) => panel.length), 1e-12); }

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
        const number = panel.seatAt.get(panel.workerNumber(pipeline, column));
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
    const range = (stage) => `${panel.ranges[stage][0]}–${panel.ranges[stage][1] - 1}`;
    const held = panel.named ? `, layers ${stages.map(range).join(" and ")}` : "";
    return stages.length === 1 && stages[0] === column ? `Stage ${column}${held}` :
      `Column ${column}: stages ${stages.join(", ")}${held}`;
  }

  describe(row, several) {
    const { seat, panel } = row, memory = panel.memoryOf(seat);
    if (seat.rolePipeline !== seat.pipeline || seat.roleColumn !== seat.column)
      row.label = `${seat.pipeline}.${seat.column} as ${seat.rolePipeline}.${seat.roleColumn}` +
        (several && this.beside === "paired" ? ` ${this.tag(panel)}` : "");
    if (seat.holds) row.label += ` [${short(seat.holds)}]`;
    const slow = panel.slow[`${seat.pipeline}.${seat.column}`];
    if (slow) row.label += ` ×${slow / 1000}`;
    const unit = panel.memory?.unit ?? 1, capacity = seat.room;
    const number = (value) => Number((value * unit).toPrecision(4));
    row.peak = capacity === null ? `most ${number(memory.peak)}` : `${number(memory.peak)} of ${number(capacity)}`;
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
}

/** `0, 2–7` for ascending numbers; the first few runs of many. */
function ranges(numbers) {
  const runs = [];
  for (const number of numbers)
    if (runs.length && number === runs.at(-1)[1] + 1) runs.at(-1)[1] = number; else runs.push([number, number]);
  const texts = runs.slice(0, 6).map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return texts.join(", ") + (runs.length > 6 ? " …" : "") + (runs.length > 1 ? ` (${numbers.length})` : "");
}
