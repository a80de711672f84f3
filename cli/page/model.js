"use strict";
/* What the page knows: panels (a planned or measured iteration each), their workers, and what each op waits for.
   Times are in the panel's own integer unit; `panel.second` is how many seconds one is. */

const KINDS = ["F", "I", "W", "B", "A", "O"];
const [F, I, W, B, A, O] = KINDS.keys();

/** The ops of one program at one speed, in order of start; shared by every worker that runs it. */
class Track {
  /** `rank`: of each stage, the how-manyth of its worker it is; `parts`: of each slice that is no stage, its layers. */
  constructor(stored, rank = [], parts = []) {
    const count = stored.kinds.length;
    this.count = count;
    this.kinds = Uint8Array.from(stored.kinds, (letter) => KINDS.indexOf(letter));
    this.slices = Int32Array.from(stored.slices);
    this.microbatches = Int32Array.from(stored.microbatches);
    this.chunks = Uint8Array.from(stored.slices, (slice, i) => (stored.microbatches[i] < 0 ? 0 : rank[slice] ?? 0));
    this.parts = parts;
    this.pipelines = new Int32Array(count).fill(-1); // -1: that of the role which runs it
    this.shed = new Uint8Array(count); // of another pipeline whose own worker is alive; the others are re-routed
    for (const [index, pipeline, shed] of stored.foreign) {
      this.pipelines[index] = pipeline;
      this.shed[index] = shed;
    }
    this.starts = new Float64Array(count);
    this.ends = new Float64Array(count);
    let start = 0;
    for (let i = 0; i < count; i++) {
      start += stored.steps[i];
      this.starts[i] = start;
      this.ends[i] = start + stored.lengths[i];
    }
    this.busy = KINDS.map(() => new Float64Array(count + 1)); // per kind: time run before op i
    this.foreign = new Int32Array(count + 1); // ops of other pipelines before op i
    for (let i = 0; i < count; i++) {
      for (const sums of this.busy) sums[i + 1] = sums[i];
      this.busy[this.kinds[i]][i + 1] += stored.lengths[i];
      this.foreign[i + 1] = this.foreign[i] + (this.pipelines[i] >= 0 ? 1 : 0);
    }
    this.links = stored.links ?? []; // from when to when reductions go on beside the ops
    this.first = count ? this.starts[0] : 0;
    this.last = this.ends.reduce((a, b) => Math.max(a, b), 0);
  }

  /** The number of ops that start at or before a time. */
  upTo(time) {
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  /** The op that runs at a time, or the nearest one not farther than `slack`; -1 where there is none. */
  at(time, slack) {
    const next = this.upTo(time);
    let best = -1, distance = Infinity;
    for (let i = Math.max(0, next - 8); i < Math.min(this.count, next + 8); i++) {
      if (this.ends[i] === this.starts[i]) continue;
      const away = Math.max(this.starts[i] - time, time - this.ends[i], 0);
      if (away < distance || (away === distance && time >= this.starts[i])) [best, distance] = [i, away];
    }
    return distance <= slack ? best : -1;
  }

  /** Index of an op by what it computes; `pipeline` -1 for the role's own. -1 where it is not here. */
  find(kind, slice, pipeline, microbatch) {
    if (!this.index) {
      this.index = new Map();
      for (let i = 0; i < this.count; i++)
        this.index.set(`${this.kinds[i]} ${this.slices[i]} ${this.pipelines[i]} ${this.microbatches[i]}`, i);
    }
    return this.index.get(`${kind} ${slice} ${pipeline} ${microbatch}`) ?? -1;
  }

  /** The time that ops of each pipeline run before op i, by pipeline; -1 for that of the role. */
  get busyOf() {
    if (!this._busyOf) {
      this._busyOf = new Map([...new Set(this.pipelines)].map((pipeline) => [pipeline, new Float64Array(this.count + 1)]));
      for (let i = 0; i < this.count; i++) {
        for (const sums of this._busyOf.values()) sums[i + 1] = sums[i];
        this._busyOf.get(this.pipelines[i])[i + 1] += this.ends[i] - this.starts[i];
      }
    }
    return this._busyOf;
  }

  /** Per slice, the index of the backward that ends last. */
  get lastBackwards() {
    if (!this._lastBackwards) {
      this._lastBackwards = new Map();
      for (let i = 0; i < this.count; i++) {
        if (this.kinds[i] === F || this.kinds[i] >= A) continue;
        const known = this._lastBackwards.get(this.slices[i]);
        if (known === undefined || this.ends[i] > this.ends[known]) this._lastBackwards.set(this.slices[i], i);
      }
    }
    return this._lastBackwards;
  }

  /** What is held over time: from `times[i]` on `held[i]`, and the most over runs of 2^k steps. `changes` has for a kind
      of op whether its `starts` or its `ends` change what is held, and by how much for each slice. */
  memory(changes) {
    if (this._memory) return this._memory;
    const change = new Map();
    const add = (time, amount) => change.set(time, (change.get(time) ?? 0) + amount);
    for (let i = 0; i < this.count; i++) {
      if (this.kinds[i] >= A) continue;
      const [when, amounts] = changes[KINDS[this.kinds[i]]];
      add(this[when][i], amounts[this.slices[i]]);
    }
    const times = Float64Array.from(change.keys()).sort();
    let now = 0;
    const levels = [Float64Array.from(times, (time) => (now += change.get(time)))];
    while (levels.at(-1).length > 1) {
      const fine = levels.at(-1);
      levels.push(Float64Array.from({ length: (fine.length + 1) >> 1 },
        (_, i) => Math.max(fine[2 * i], fine[2 * i + 1] ?? 0)));
    }
    this._memory = { times, levels, peak: levels.at(-1)[0] ?? 0 };
    return this._memory;
  }
}

/** One iteration of all workers. An op is named by `{panel, seat, index}`: a live worker and a place in its track. */
class Panel {
  constructor(stored, number) {
    Object.assign(this, stored);
    this.number = number;
    const held = new Array(stored.columns).fill(0), rank = stored.stages.map((column) => held[column]++);
    const parts = stored.ranges.map((layers, slice) => (slice < stored.stages.length ? "" : short([layers])));
    this.tracks = stored.tracks.map((track) => new Track(track, rank, parts));
    this.seats = stored.seats.map(([pipeline, column, rolePipeline, roleColumn, track, holds, room]) =>
      ({ pipeline, column, rolePipeline, roleColumn, number: track, track: this.tracks[track], holds, room }));
    this.wholeStages = stored.ranges.length === stored.stages.length && stored.chains === 1;
    this.seatAt = new Map(this.seats.map((seat, i) => [this.workerNumber(seat.pipeline, seat.column), i]));
    this.playerOf = new Map(this.seats.map((seat, i) => [this.workerNumber(seat.rolePipeline, seat.roleColumn), i]));
    this.down = new Set(stored.failed.map(([pipeline, column]) => this.workerNumber(pipeline, column)));
    this.length = this.tracks.reduce((most, track) => Math.max(most, track.last), 0) * this.second;
  }

  /** The number of a worker in the grid: a key of `seatAt`, `playerOf` and `down`. */
  workerNumber(pipeline, column) { return pipeline * this.columns + column; }

  /** What a pipeline's workers run, as a text that is the same for pipelines that do the same. */
  behaviour(pipeline) {
    if (pipeline >= this.pipelines) return "";
    return Array.from({ length: this.columns }, (_, column) => {
      const seat = this.seats[this.seatAt.get(this.workerNumber(pipeline, column))];
      if (!seat) return "down";
      const moved = seat.rolePipeline !== pipeline || seat.roleColumn !== column;
      return (moved ? `${seat.number} as ${seat.rolePipeline}.${seat.roleColumn}` : seat.number) +
        (seat.holds ? ` holds ${seat.holds}` : "");
    }).join() + ` ${this.microbatches[pipeline]}`;
  }

  /** An op as an object with everything that can be said about it. */
  op(ref) {
    const seat = this.seats[ref.seat], track = seat.track, i = ref.index;
    const foreign = track.pipelines[i];
    return {
      kind: track.kinds[i], slice: track.slices[i], microbatch: track.microbatches[i],
      pipeline: foreign < 0 ? seat.rolePipeline : foreign, seat,
      rerouted: foreign >= 0 && !track.shed[i], shed: track.shed[i] > 0,
      worker: `${seat.pipeline}.${seat.column}`, start: track.starts[i], end: track.ends[i],
    };
  }

  title(ref) {
    const op = this.op(ref), letter = KINDS[op.kind];
    if (op.kind === O) return `O on ${op.worker}`;
    if (op.kind === A) return `A(${this.sliceText(op.slice)}) on ${op.worker}`;
    return `${letter}(micro-batch ${op.pipeline}.${op.microbatch}, ${this.sliceText(op.slice)}) on ${op.worker}`;
  }

  /** `stage 3` or, for a slice that is no stage, `layers 4 to 6`. */
  sliceText(slice) { return slice < this.stages.length ? `stage ${slice}` : layersText(this.ranges[slice]); }

  /** Where an op is computed, or null. */
  find(kind, slice, pipeline, microbatch) {
    const own = this.playerOf.get(this.workerNumber(pipeline, this.stages[slice]));
    if (own !== undefined) {
      const index = this.seats[own].track.find(kind, slice, -1, microbatch);
      if (index >= 0) return { panel: this, seat: own, index };
    }
    return this.moved.get(`${kind} ${slice} ${pipeline} ${microbatch}`) ?? null;
  }

  /** All ops on another worker than the one whose column has their stage, by what they compute. */
  get moved() {
    if (!this._moved) {
      this._moved = new Map();
      this.seats.forEach((seat, number) => {
        const { track, rolePipeline, roleColumn } = seat;
        if (this.wholeStages && !track.foreign[track.count] && !seat.holds) return;
        for (let i = 0; i < track.count; i++)
          if (track.pipelines[i] >= 0 || this.stages[track.slices[i]] !== roleColumn) {
            const pipeline = track.pipelines[i] < 0 ? rolePipeline : track.pipelines[i];
            this._moved.set(`${track.kinds[i]} ${track.slices[i]} ${pipeline} ${track.microbatches[i]}`,
              { panel: this, seat: number, index: i });
          }
      });
    }
    return this._moved;
  }

  /** The slices that a micro-batch passes, in order. */
  route(pipeline, microbatch) {
    if (this.wholeStages) return this._stages ??= [...this.stages.keys()];
    if (!this._routes) {
      this._routes = new Map();
      for (const { track, rolePipeline } of this.seats)
        for (let i = 0; i < track.count; i++) {
          if (track.kinds[i] !== F) continue;
          const key = `${track.pipelines[i] < 0 ? rolePipeline : track.pipelines[i]} ${track.microbatches[i]}`;
          if (!this._routes.has(key)) this._routes.set(key, []);
          this._routes.get(key).push(track.slices[i]);
        }
      for (const route of this._routes.values()) route.sort((a, b) => this.ranges[a][0] - this.ranges[b][0] || a - b);
    }
    return this._routes.get(`${pipeline} ${microbatch}`) ?? [];
  }

  /** The backward that ends last: of any of these layers, or of all (undefined). */
  lastBackward(layers) {
    this._last ??= new Map();
    const key = String(layers);
    if (!this._last.has(key)) {
      let found = null, end = -1;
      this.seats.forEach((seat, number) => {
        for (const [slice, index] of seat.track.lastBackwards)
          if ((layers === undefined || overlap(layers, this.ranges[slice])) && seat.track.ends[index] > end)
            [found, end] = [{ panel: this, seat: number, index }, seat.track.ends[index]];
      });
      this._last.set(key, found);
    }
    return this._last.get(key);
  }

  /** The workers of a micro-batch's own pipeline that would run these layers, by their column: [pipeline, column]. */
  ownWorkers(pipeline, microbatch, slice) {
    const first = (microbatch % this.chains) * this.depth;
    return Array.from({ length: this.depth }, (_, i) => first + i)
      .filter((stage) => overlap(this.ranges[stage], this.ranges[slice]))
      .map((stage) => [pipeline, this.stages[stage]]);
  }

  /** The ops of its micro-batch that an op waits for: `{ref, tensor}`, by the rules that came with the schedule. */
  producers(op) {
    const route = this.route(op.pipeline, op.microbatch), at = route.indexOf(op.slice), last = route.length - 1;
    const holds = (rule) => KINDS[op.kind] === rule.kind && at + rule.step >= 0 && at + rule.step <= last &&
      (rule.position === "any" || at === (rule.position === "first" ? 0 : last));
    return at < 0 ? [] : this.rules.filter(holds).map((rule) => ({ tensor: rule.tensor,
      ref: this.find(KINDS.indexOf(rule.awaited), route[at + rule.step], op.pipeline, op.microbatch) }));
  }

  /** Everything an op waits for, the last to be ready first, the worker's own op first among equals. `why` is "input",
      "gradients" (of its layers), "all backwards" or "worker"; `ready` counts the transfer, `hop`. */
  waits(ref) {
    const op = this.op(ref), found = [];
    const add = (other, why, tensor = false) => {
      if (!other || (other.seat === ref.seat && other.index === ref.index)) return;
      const before = this.op(other), hop = tensor && other.seat !== ref.seat ? this.transfer : 0;
      found.push({ ref: other, why, hop, ready: before.end + hop });
    };
    if (op.kind === A) add(this.lastBackward(this.ranges[op.slice]), "gradients");
    else if (op.kind === O && this.optimizer === "synchronous") add(this.lastBackward(undefined), "all backwards");
    else if (op.kind < A) for (const producer of this.producers(op)) add(producer.ref, "input", producer.tensor);
    if (ref.index > 0) {
      const previous = { panel: this, seat: ref.seat, index: ref.index - 1 };
      if (!found.some((wait) => wait.ref.seat === previous.seat && wait.ref.index === previous.index))
        add(previous, "worker");
    }
    return found.sort((a, b) => b.ready - a.ready || (b.ref.seat === ref.seat) - (a.ref.seat === ref.seat));
  }

  /** The chain of ops that each waited for the one before, ending in `ref`; `late` is time that none of them asked for.
      It begins where nothing is waited for, or with the first op of `until`, a live worker. */
  chain(ref, until = -1) {
    const links = [];
    for (let now = ref; now && links.length < 1e6;) {
      const begins = now.seat === until && now.index === 0;
      const last = begins ? null : this.waits(now)[0] ?? null, { start, end } = this.op(now);
      links.push({ ref: now, wait: last, late: last ? start - last.ready : begins ? 0 : start });
      now = last && last.ready <= end ? last.ref : null;
    }
    return links.reverse();
  }

  /** The op that ends the iteration where it takes longest. */
  get closing() {
    let best = null, most = -1;
    const first = this.optimizer === "synchronous" && !this.measured ? () => 0 : (track) => track.first;
    this.seats.forEach((seat, number) => {
      const track = seat.track;
      if (track.count && track.last - first(track) > most)
        [best, most] = [{ panel: this, seat: number, index: track.count - 1 }, track.last - first(track)];
    });
    return best;
  }

  /** What the period consists of: the chain up to its end. With a staggered optimizer it counts from the first op of
      the worker that takes longest, however late that begins. */
  get critical() {
    const last = this.closing;
    this._critical ??= last ? this.chain(last, this.optimizer === "staggered" ? last.seat : -1) : [];
    return this._critical;
  }

  /** All ops of a micro-batch: forwards along its route, backwards back again, and the Ws. */
  follow(pipeline, microbatch) {
    const route = this.route(pipeline, microbatch);
    const find = (kind) => (slice) => this.find(kind, slice, pipeline, microbatch);
    const backward = (slice) => find(I)(slice) ?? find(B)(slice);
    return {
      path: [...route.map(find(F)), ...[...route].reverse().map(backward)].filter(Boolean),
      weights: [...route].reverse().map(find(W)).filter(Boolean),
    };
  }

  /** The most that any worker ever holds. */
  get mostHeld() {
    this._mostHeld ??= Math.max(0, ...new Set(this.seats.map((seat) => this.memoryOf(seat).peak)));
    return this._mostHeld;
  }

  memoryOf(seat) { return seat.track.memory(this.changes); }
}

/** Whether two ranges of layers, [first, end), share one. */
function overlap(one, other) { return one[0] < other[1] && other[0] < one[1]; }

/** `layer 3` or `layers 4 to 6`. */
function layersText([first, end]) {
  return end === first + 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`;
}

/** `0–2,5` for ranges of layers: the last layer of each is included. */
function short(ranges) {
  return ranges.map(([first, end]) => (end === first + 1 ? `${first}` : `${first}–${end - 1}`)).join();
}

/** `30 s`, `29.7 ms`, `850 us`: four digits. */
function duration(seconds) {
  if (!seconds) return "0 s";
  const size = Math.abs(seconds);
  const [unit, name] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
  return `${Number((seconds / unit).toPrecision(4))} ${name}`;
}
