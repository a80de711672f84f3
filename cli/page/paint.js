"use strict";
/* Drawing. The base canvas holds the chart, the overlay what changes with the pointer. Cost follows the pixels, not
   the ops: a run of ops narrower than BLOCK pixels is drawn as one bar, its kinds stacked by their share of the time,
   as high as the worker is busy. Workers that run the same are drawn once a frame and copied. */

const GUTTER = 116, AXIS = 26, BLOCK = 4, LETTER = 6.7;
const HATCHED = 18; // pixels beside a text from which on a re-routed op is hatched
const FONT = "11px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
const UI_FONT = "12px system-ui, 'DejaVu Sans', sans-serif";

/** Colours of pipelines, in turn: those of Okabe & Ito on which black text reads. */
const ORIGINS = Object.fromEntries(["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#b8b8b8",
  "#8fb8ff"].map((colour, number) => [`p${number}`, colour]));
const originOf = (pipeline) => `p${pipeline % Object.keys(ORIGINS).length}`;

const LINK = 4; // height of what goes on beside the ops of a row

/** Rectangles by what they are filled with, so that the canvas changes its style a few times a frame only. */
class Batch {
  constructor() { this.lists = new Map(); this.texts = []; this.frames = []; }
  add(fill, x, y, w, h) {
    let list = this.lists.get(fill);
    if (!list) this.lists.set(fill, (list = []));
    list.push(x, y, w, h);
  }
  flush(ctx, theme) {
    for (const fill of [...theme.order, ...this.lists.keys()]) {
      const list = this.lists.get(fill);
      if (!list) continue;
      this.lists.delete(fill);
      ctx.fillStyle = theme.fills[fill];
      for (let i = 0; i < list.length; i += 4) ctx.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
    }
    ctx.strokeStyle = theme.ink;
    ctx.lineWidth = 2;
    for (const [x, y, w, h, dashed] of this.frames) {
      ctx.setLineDash(dashed ? [4, 3] : []);
      ctx.strokeRect(x + 1, y + 1, w - 2, h - 2);
    }
    ctx.setLineDash([]);
    ctx.font = FONT;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (const [text, x, y, plate, inside] of this.texts) {
      if (plate) {
        const width = Math.min(inside, text.length * LETTER + 6);
        ctx.fillStyle = theme.fills[plate];
        ctx.fillRect(x - width / 2, y - 6, width, 12);
      }
      ctx.fillStyle = "#000";
      ctx.fillText(text, x, y + 0.5);
    }
    this.texts = [];
    this.frames = [];
  }
}

/** Colours of the page in the mode it is in, and patterns made of them. */
function readTheme(colours) {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  const theme = { back: css("--back"), text: css("--text"), faint: css("--faint"), line: css("--line"),
    ink: css("--ink"), idle: css("--idle"), veil: css("--veil"), down: css("--down"), path: css("--path"), follow: css("--follow"),
    head: css("--head") };
  theme.fills = { ...colours, ...ORIGINS, link: colours.A, idle: theme.idle, mark: "rgba(0, 0, 0, .55)", edge: "#000",
    light: "rgba(255, 255, 255, .4)", held: css("--held"), over: theme.down, room: theme.line,
    hatch: hatch("rgba(0, 0, 0, .5)", 6, 1.6), down: hatch(theme.down, 8, 2.4) };
  theme.order = ["idle", ...KINDS, ...Object.keys(ORIGINS), "light", "hatch", "mark", "edge", "link", "held", "over", "room", "down"];
  return theme;
}

/** A pattern of diagonal lines. */
function hatch(colour, size, width) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const ctx = tile.getContext("2d");
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  for (const shift of [-size, 0, size]) {
    ctx.beginPath();
    ctx.moveTo(shift - 1, size + 1);
    ctx.lineTo(shift + size + 1, -1);
    ctx.stroke();
  }
  return ctx.createPattern(tile, "repeat");
}

class Painter {
  constructor(base, overlay, colours) {
    this.base = base;
    this.overlay = overlay;
    this.colours = colours;
    this.strip = document.createElement("canvas");
    this.batch = new Batch();
    this.retheme();
  }

  retheme() { this.theme = readTheme(this.colours); }

  /** `view`: width, height, t0 and t1 in seconds, scroll in pixels; fits the canvases to it. */
  fit(view) {
    this.view = view;
    this.scale = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.overlay]) {
      const [width, height] = [Math.round(view.width * this.scale), Math.round(view.height * this.scale)];
      if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
      canvas.style.width = `${view.width}px`;
      canvas.style.height = `${view.height}px`;
    }
    this.pixels = (view.width - GUTTER) / (view.t1 - view.t0); // a second
  }

  x(seconds) { return GUTTER + (seconds - this.view.t0) * this.pixels; }
  seconds(x) { return this.view.t0 + (x - GUTTER) / this.pixels; }

  context(canvas) {
    const ctx = canvas.getContext("2d");
    ctx.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    return ctx;
  }

  // --- The chart -----------------------------------------------------------------------------------------------------

  paintBase(rows) {
    const { view, theme } = this, ctx = this.context(this.base);
    ctx.fillStyle = theme.back;
    ctx.fillRect(0, 0, view.width, view.height);
    this.paintGrid(ctx);
    const groups = new Map(); // rows that look the same
    for (const row of rows) {
      if (row.head) continue;
      if (!row.seat) this.paintDown(row);
      else {
        const own = this.origins ? row.seat.rolePipeline : "", key = `${row.panel.number} ${row.seat.number} ${own} ` +
          `${row.seat.room}`;
        if (groups.has(key)) groups.get(key).push(row); else groups.set(key, [row]);
      }
    }
    for (const group of groups.values()) if (group.length === 1) this.paintStrip(group[0], group[0].y);
    this.batch.flush(ctx, theme);
    for (const group of groups.values()) if (group.length > 1) this.paintCopies(ctx, group);
    this.paintLabels(ctx, rows);
    this.paintAxis(ctx);
  }

  paintCopies(ctx, group) {
    const { strip, view } = this, height = group[0].height;
    const [width, high] = [Math.round(view.width * this.scale), Math.ceil(height * this.scale)];
    if (strip.width !== width || strip.height < high) [strip.width, strip.height] = [width, high];
    const stripped = this.context(strip);
    stripped.clearRect(0, 0, view.width, height);
    this.paintStrip(group[0], 0);
    this.batch.flush(stripped, this.theme);
    for (const row of group) {
      ctx.setTransform(1, 0, 0, 1, 0, 0);
      ctx.drawImage(strip, 0, 0, width, high, 0, Math.round(row.y * this.scale), width, high);
    }
    ctx.setTransform(this.scale, 0, 0, this.scale, 0, 0);
  }

  /** One worker's ops, and the memory it holds, with its upper edge at `y`. */
  paintStrip(row, y) {
    const { track } = row.seat, second = row.panel.second;
    const [from, to] = [this.x(track.first * second), this.x(track.last * second)];
    const left = Math.max(GUTTER, Math.round(from)), right = Math.min(this.view.width, Math.round(to));
    if (right > left) this.batch.add("idle", left, y, right - left, row.bar);
    let size = 1;
    this.own = row.seat.rolePipeline;
    while (size < track.count) size *= 2;
    if (track.count) this.descend(row, track, second, y, 0, size);
    for (const [begin, end] of track.links) {
      const [at, until] = [Math.max(GUTTER, this.x(begin * second)), Math.min(this.view.width, this.x(end * second))];
      if (until > at) this.batch.add("link", at, y + row.bar - LINK, until - at, LINK);
    }
    if (row.memory) this.paintMemory(row, y + row.bar + 2, row.memory);
  }

  descend(row, track, second, y, low, size) {
    const high = Math.min(low + size, track.count);
    const from = this.x(track.starts[low] * second), to = this.x(track.ends[high - 1] * second);
    if (to < GUTTER || from > this.view.width) return;
    if (high - low === 1) this.paintOp(track, low, from, to, y, row.bar);
    else if (to - from < BLOCK) this.paintBlock(track, low, high, from, to, y, row.bar);
    else {
      const half = size / 2;
      this.descend(row, track, second, y, low, half);
      if (low + half < high) this.descend(row, track, second, y, low + half, half);
    }
  }

  paintOp(track, index, from, to, y, height) {
    if (track.ends[index] === track.starts[index]) return;
    const kind = track.kinds[index], batch = this.batch;
    const left = Math.max(Math.round(from), GUTTER - 8), right = Math.min(Math.round(to), this.view.width + 8);
    const whole = Math.max(1, right - left), width = whole > 3 ? whole - 1 : whole;
    const pipeline = track.pipelines[index] < 0 ? this.own : track.pipelines[index];
    batch.add(this.origins && kind < A ? originOf(pipeline) : KINDS[kind], left, y, width, height);
    if (track.chunks[index]) batch.add("light", left, y, width, height);
    const foreign = track.pipelines[index] >= 0, shed = track.shed[index] > 0;
    const text = width >= LETTER + 2 && height >= 11 ? this.textOf(track, index, left, right) : "";
    if (foreign && width >= 6) { // no lines through a text that fills its op: the frame and small letters say it
      if (!shed && (!text || width - text.length * LETTER >= HATCHED)) batch.add("hatch", left, y, width, height);
      else if (height >= 8) this.mark(kind, left, y, width, height);
      batch.frames.push([left, y, width, height, shed]);
    } else if (foreign) {
      batch.add("edge", left, y, width, 3);
      batch.add("edge", left, y + height - 3, width, 3);
    } else if (height >= 8) this.mark(kind, left, y, width, height);
    if (text) {
      const plate = foreign && !shed ? this.origins ? originOf(pipeline) : KINDS[kind] : null;
      batch.texts.push([text, (left + right - 1) / 2, y + height / 2, plate, width - 4]);
    }
  }

  /** Kinds differ by more than their colour: a stripe on top, at the bottom, both, or through the middle. */
  mark(kind, x, y, width, height) {
    if (kind === I || kind === B) this.batch.add("mark", x, y, width, 2);
    if (kind === W || kind === B) this.batch.add("mark", x, y + height - 2, width, 2);
    if (kind === A) for (let at = x + 1; at < x + width; at += 4) this.batch.add("mark", at, y, 1, height);
  }

  /** The longest text about an op for which there is room; empty if there is none. */
  textOf(track, index, left, right) {
    const room = Math.floor((right - left - 2) / LETTER), kind = KINDS[track.kinds[index]], small = kind.toLowerCase();
    const number = track.microbatches[index], full = `${number}${"′".repeat(track.chunks[index])}`;
    const pipeline = track.pipelines[index], rerouted = pipeline >= 0 && !track.shed[index];
    const texts = number < 0 ? [kind] : rerouted ?
      [`${small}${pipeline}.${full}`, `${small}${full}`, `${small}${number}`, small] : pipeline >= 0 ?
      [`${kind}${pipeline}.${full}`, `${kind}.${full}`, `${kind}.`, kind] : [`${kind}${full}`, `${kind}${number}`, kind];
    const part = number < 0 ? "" : track.parts[track.slices[index]];
    return [...(part ? [`${texts[0]}:${part}`] : []), ...texts].find((one) => one.length <= room) ?? "";
  }

  paintBlock(track, low, high, from, to, y, height) {
    const left = Math.round(from), width = Math.max(1, Math.round(to) - left);
    const span = track.ends[high - 1] - track.starts[low];
    let bottom = y + height;
    for (const [fill, sums] of this.origins ? this.originsOf(track) : track.busy.map((sums, kind) => [KINDS[kind], sums])) {
      const share = (sums[high] - sums[low]) / span;
      if (!share) continue;
      this.batch.add(fill, left, bottom - share * height, width, share * height);
      bottom -= share * height;
    }
    if (track.foreign[high] > track.foreign[low]) {
      this.batch.add("edge", left, y, width, 2);
      this.batch.add("edge", left, y + height - 2, width, 2);
    }
  }

  /** The time that each pipeline's ops take, by its fill. */
  originsOf(track) {
    return [...track.busyOf].map(([pipeline, sums]) => [originOf(pipeline < 0 ? this.own : pipeline), sums]);
  }

  /** What a worker holds: steps up to its capacity, or to the most that anybody holds where there is no limit. */
  paintMemory(row, y, height) {
    const { times, levels } = row.panel.memoryOf(row.seat);
    const capacity = row.seat.room;
    const full = Math.max(1e-9, capacity ?? row.panel.mostHeld);
    const second = row.panel.second, { batch, view } = this;
    this.batch.add("room", GUTTER, y + height - 1, view.width - GUTTER, 1);
    const first = Math.max(0, search(times, view.t0 / second) - 1), end = search(times, view.t1 / second);
    let level = 0;
    while ((end - first) >> level > (view.width - GUTTER) / 2) level++;
    const held = levels[level];
    for (let i = first >> level; i <= Math.min(held.length - 1, end >> level); i++) {
      const until = Math.min((i + 1) << level, times.length - 1);
      const left = Math.max(GUTTER, Math.round(this.x(times[i << level] * second)));
      const right = Math.min(view.width, Math.max(left + 1, Math.round(this.x(times[until] * second))));
      const tall = Math.min(1, held[i] / full) * height;
      if (tall > 0 && right > left)
        batch.add(held[i] > full ? "over" : "held", left, y + height - tall, right - left, tall);
    }
  }

  paintDown(row) {
    const left = Math.max(GUTTER, Math.round(this.x(0)));
    const right = Math.min(this.view.width, Math.round(this.x(row.panel.length)));
    if (right > left) this.batch.add("down", left, row.y + 2, right - left, row.bar - 4);
  }

  paintLabels(ctx, rows) {
    const { theme, view } = this;
    ctx.fillStyle = theme.back;
    ctx.fillRect(0, 0, GUTTER - 1, view.height);
    ctx.textBaseline = "middle";
    for (const row of rows) {
      ctx.textAlign = "left";
      if (row.head) {
        ctx.fillStyle = theme.head;
        if (row.top) ctx.fillRect(0, row.y, view.width, row.height - 2);
        ctx.font = `600 ${row.top ? 13 : 12}px system-ui, 'DejaVu Sans', sans-serif`;
        ctx.fillStyle = theme.text;
        ctx.fillText(row.head, 10, row.y + row.height / 2);
        continue;
      }
      ctx.font = row.seat ? FONT : `bold ${FONT}`;
      ctx.fillStyle = row.seat ? theme.text : theme.down;
      ctx.textAlign = "right";
      ctx.fillText(row.seat ? row.label : `${row.label} ✕ down`, GUTTER - 10, row.y + row.bar / 2 + 0.5, GUTTER - 14);
      if (!row.seat && row.bar >= 12) this.plate(ctx, "✕ DOWN", Math.max(GUTTER, this.x(0)) + 12, row.y + row.bar / 2);
      else if (row.memory >= 9) {
        ctx.fillStyle = theme.faint;
        ctx.font = "9px ui-monospace, 'DejaVu Sans Mono', monospace";
        ctx.fillText(row.peak, GUTTER - 10, row.y + row.bar + 2 + row.memory / 2, GUTTER - 14);
      }
    }
    ctx.fillStyle = theme.line;
    ctx.fillRect(GUTTER - 1, AXIS, 1, view.height);
  }

  plate(ctx, text, x, y) {
    ctx.font = `bold ${FONT}`;
    ctx.textAlign = "left";
    ctx.fillStyle = this.theme.back;
    ctx.fillRect(x - 4, y - 7, ctx.measureText(text).width + 8, 14);
    ctx.fillStyle = this.theme.down;
    ctx.fillText(text, x, y + 0.5);
  }

  /** Round times at least 90 pixels apart. */
  ticks() {
    const least = 90 / this.pixels, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= least * (1 - 1e-9));
    const first = Math.max(0, Math.ceil(this.view.t0 / step)), found = [];
    for (let i = first; i * step <= this.view.t1; i++) found.push(i * step);
    return { step, found };
  }

  paintGrid(ctx) {
    ctx.fillStyle = this.theme.line;
    for (const time of this.ticks().found) ctx.fillRect(Math.round(this.x(time)), AXIS, 1, this.view.height);
  }

  paintAxis(ctx) {
    const { theme, view } = this, { step, found } = this.ticks();
    const [unit, name] = step * 2 >= 1 ? [1, "s"] : step * 2 >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    ctx.fillStyle = theme.back;
    ctx.fillRect(0, 0, view.width, AXIS);
    ctx.fillStyle = theme.line;
    ctx.fillRect(0, AXIS - 1, view.width, 1);
    ctx.font = UI_FONT;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillStyle = theme.faint;
    for (const time of found) {
      const x = Math.round(this.x(time));
      if (x < GUTTER - 1) continue;
      ctx.fillRect(x, AXIS - 7, 1, 7);
      ctx.fillText(`${(time / unit).toFixed(digits)} ${name}`, x + 4, AXIS / 2);
    }
  }

  // --- What lies over it ---------------------------------------------------------------------------------------------

  paintOverlay(marks, rowOf) {
    const { view, theme } = this, ctx = this.context(this.overlay);
    ctx.clearRect(0, 0, view.width, view.height);
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, AXIS, view.width - GUTTER, view.height - AXIS);
    ctx.clip();
    if (marks.followed.length) {
      ctx.fillStyle = theme.veil;
      ctx.fillRect(GUTTER, AXIS, view.width - GUTTER, view.height - AXIS);
      for (const { path, weights } of marks.followed) this.paintFollowed(ctx, path, weights, rowOf);
    }
    if (marks.path.length) this.paintPath(ctx, marks.path, rowOf, marks.followed.length > 0);
    if (marks.hover) this.outline(ctx, marks.hover, rowOf, theme.ink, 2, 1);
    if (marks.cursor) this.outline(ctx, marks.cursor, rowOf, theme.follow, 3, 3);
    ctx.restore();
  }

  /** Where an op lies on the screen, or null while its row is not laid out. */
  box(ref, rowOf) {
    const row = rowOf(ref);
    if (!row) return null;
    const track = ref.panel.seats[ref.seat].track, second = ref.panel.second;
    const left = this.x(track.starts[ref.index] * second), right = this.x(track.ends[ref.index] * second);
    return { left, right, width: Math.max(2, right - left), top: row.y, height: row.bar, middle: row.y + row.bar / 2,
      visible: right >= GUTTER && left <= this.view.width && row.y + row.bar > AXIS && row.y < this.view.height };
  }

  outline(ctx, ref, rowOf, colour, line, outside) {
    const box = this.box(ref, rowOf);
    if (!box?.visible) return;
    ctx.strokeStyle = colour;
    ctx.lineWidth = line;
    ctx.strokeRect(box.left - outside, box.top - outside, box.width - 1 + 2 * outside, box.height + 2 * outside);
  }

  paintFollowed(ctx, path, weights, rowOf) {
    const { theme, batch } = this;
    for (const ref of [...path, ...weights]) this.paintAgain(ref, this.box(ref, rowOf));
    batch.flush(ctx, theme);
    ctx.strokeStyle = theme.follow;
    ctx.lineWidth = 1.6;
    for (let i = 1; i < path.length; i++) this.arrow(ctx, path[i - 1], path[i], rowOf);
    for (const ref of [...path, ...weights]) this.outline(ctx, ref, rowOf, theme.follow, 1.6, 0);
  }

  /** An op over the veil, at least 4 pixels wide. */
  paintAgain(ref, box) {
    if (!box?.visible) return;
    const { track, rolePipeline } = ref.panel.seats[ref.seat];
    this.own = rolePipeline;
    this.paintOp(track, ref.index, box.left, Math.max(box.right, box.left + 4), box.top, box.height);
  }

  /** From the end of one op to the start of the next, where that is on another worker. */
  arrow(ctx, from, to, rowOf) {
    const [a, b] = [this.box(from, rowOf), this.box(to, rowOf)];
    if (!a || !b || a.top === b.top) return;
    if (Math.max(a.right, b.left) < GUTTER || Math.min(a.right, b.left) > this.view.width) return;
    const down = b.top > a.top, y0 = down ? a.top + a.height : a.top, y1 = down ? b.top : b.top + b.height;
    ctx.beginPath();
    ctx.moveTo(a.right, y0);
    ctx.lineTo(b.left, y1);
    ctx.lineTo(b.left - 3, y1 + (down ? -5 : 5));
    ctx.moveTo(b.left, y1);
    ctx.lineTo(b.left + 3, y1 + (down ? -5 : 5));
    ctx.stroke();
  }

  /** A chain of ops, framed and linked. Neighbours that end on one pixel are drawn once. */
  paintPath(ctx, path, rowOf, veiled) {
    const { theme, batch } = this, boxes = this.boxesOf(path, rowOf);
    if (veiled) {
      for (const { ref, box } of boxes) this.paintAgain(ref, box);
      batch.flush(ctx, theme);
    }
    for (const [colour, width] of [[theme.back, 5], [theme.path, 3]]) {
      ctx.strokeStyle = colour;
      ctx.lineWidth = width;
      ctx.beginPath();
      boxes.forEach(({ box, linked }, i) => {
        ctx.rect(box.left + 1, box.top, Math.max(1, box.width - 3), box.height);
        if (!linked || boxes[i - 1].box.top === box.top) return;
        ctx.moveTo(boxes[i - 1].box.right - 1, boxes[i - 1].box.middle);
        ctx.lineTo(box.left + 1, box.middle);
      });
      ctx.stroke();
    }
  }

  /** Where the ops of a chain lie, as far as they are in the times shown. */
  boxesOf(path, rowOf) {
    const { view } = this, found = [];
    let before = null;
    for (const { ref } of path) {
      const track = ref.panel.seats[ref.seat].track, second = ref.panel.second;
      if (track.ends[ref.index] * second < view.t0 || track.starts[ref.index] * second > view.t1) continue;
      const box = this.box(ref, rowOf), linked = before !== null && before.ref.panel === ref.panel;
      if (!box || (linked && before.box.top === box.top && box.right < before.box.right + 1)) continue;
      found.push((before = { ref, box, linked }));
    }
    return found;
  }
}

/** How many of the ascending values are at or below one. */
function search(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}
