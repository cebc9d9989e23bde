// One chart of uPlot: curves of several runs, a cursor that keys move as well, and a click that leads to a step.
import { h } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 200;
const WHOLE = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));  // between ticks of x

// The numbers at an axis, with as many digits as it takes to tell them apart.
function apart(values) {
  const texts = [4, 5, 6, 7].map((digits) => values.map((v) => number(v, digits)));
  return texts.find((found) => new Set(found).size === found.length) ?? texts.at(-1);
}

// The range of y: numbers that are all equal stand in the middle, and zeros at the bottom.
function rangeOf(least, most) {
  if (least === null || least === undefined) return [0, 1];
  if (least !== most) return uPlot.rangeNum(least, most, 0.08, true);
  return least === 0 ? [0, 1] : [least - Math.abs(least) * 0.2, least + Math.abs(least) * 0.2];
}

// The colour that a variable of the style sheet has now: a canvas does not know light-dark().
const probe = document.createElement("span");
probe.hidden = true;

function variable(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

export function colourOf(place) {
  return variable(`--series-${place % 8}`);
}

// Exponential moving average that begins without a pull towards 0.
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

// curves: [{ label, colour, dash, x: [], y: [], steps: [], run }], x ascending
export class Chart {
  constructor({ label, xLabel, onStep }) {
    this.label = label;
    this.xLabel = xLabel;
    this.onStep = onStep;
    this.readout = h("p", { class: "readout", "aria-live": "off" });
    this.place = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": label });
    this.node = h("div", { class: "chart" }, this.place, this.readout);
    this.plot = null;
    this.curves = [];
    this.at = null;
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.place.addEventListener("blur", () => { if (this.plot !== null) this.cursor(null); });
  }

  draw(curves, weight) {
    this.curves = curves;
    const tables = curves.map((curve) => [curve.x, curve.y]);
    const shown = [];
    const data = curves.length === 0 ? [[]] : uPlot.join(tables);
    const series = [{}];
    curves.forEach((curve, place) => {
      const raw = data[place + 1];
      const common = { spanGaps: true, points: { show: curve.y.filter((y) => y !== null && y !== undefined).length < 40, size: 5 } };
      if (weight > 0) {
        series.push({ ...common, label: curve.label, stroke: curve.colour, width: 1, alpha: 0.28, dash: curve.dash });
        shown.push(raw);
        series.push({ ...common, points: { show: false }, label: curve.label, stroke: curve.colour, width: 2, dash: curve.dash });
        shown.push(smoothed(raw, weight));
      } else {
        series.push({ ...common, label: curve.label, stroke: curve.colour, width: 2, dash: curve.dash });
        shown.push(raw);
      }
    });
    this.data = [data[0], ...shown];
    this.stride = weight > 0 ? 2 : 1;
    if (this.plot !== null && this.plot.series.length === series.length && this.weight === weight && this.look === this.lookNow(curves)) {
      this.plot.setData(this.data);
      this.say();
      return;
    }
    this.weight = weight;
    this.look = this.lookNow(curves);
    this.make(series);
    this.say();
  }

  lookNow(curves) {
    return `${curves.map((curve) => curve.run + curve.label + curve.colour).join()} ${variable("--ink")} ${this.xLabel}`;
  }

  make(series) {
    if (this.plot !== null) this.plot.destroy();
    const axis = { stroke: variable("--muted"), grid: { stroke: variable("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: Math.max(this.place.clientWidth, 120), height: HEIGHT,
      scales: { x: { time: false }, y: { range: (_, least, most) => rangeOf(least, most) } },
      axes: [
        { ...axis, size: 26, space: 60, incrs: WHOLE, values: (_, values) => values.map((v) => (v === null ? "" : number(v, 3))) },
        { ...axis, size: (_, texts) => Math.max(52, ...(texts ?? []).map((text) => 7 * text.length + 10)), values: (_, values) => apart(values) },
      ],
      series, legend: { show: false },
      cursor: { focus: { prox: 24 }, drag: { x: true, y: false, setScale: true }, points: { size: 8 } },
      hooks: { setCursor: [() => this.say()], ready: [(plot) => this.clicks(plot)] },
    }, this.data, this.place);
  }

  clicks(plot) {
    let down = null;
    plot.over.addEventListener("mousedown", (event) => { down = [event.clientX, event.clientY]; });
    plot.over.addEventListener("click", (event) => {
      if (down !== null && Math.hypot(event.clientX - down[0], event.clientY - down[1]) > 4) return;  // a zoom
      this.open(plot.cursor.idx, plot.cursor.top);
    });
  }

  // The curve that is nearest to a height at a place of the x axis.
  nearest(index, top) {
    let best = null, least = Infinity;
    this.curves.forEach((curve, place) => {
      const value = this.data[1 + place * this.stride][index];
      if (value === null || value === undefined) return;
      const distance = top === null || top === undefined ? place : Math.abs(this.plot.valToPos(value, "y") - top);
      if (distance < least) { least = distance; best = { curve, value }; }
    });
    return best;
  }

  open(index, top) {
    if (index === null || index === undefined) return;
    const found = this.nearest(index, top);
    if (found === null) return;
    const place = found.curve.x.indexOf(this.data[0][index]);
    if (place >= 0) this.onStep(found.curve.run, found.curve.steps[place]);
  }

  cursor(index) {
    this.at = index;
    if (index === null) { this.plot.setCursor({ left: -10, top: -10 }); return; }
    const found = this.nearest(index, null);
    const left = this.plot.valToPos(this.data[0][index], "x");
    this.plot.setCursor({ left, top: found === null ? 0 : this.plot.valToPos(found.value, "y") });
  }

  key(event) {
    if (this.plot === null || this.data[0].length === 0) return;
    const last = this.data[0].length - 1;
    const now = this.at === null ? last : this.at;
    const moves = { ArrowLeft: Math.max(now - 1, 0), ArrowRight: this.at === null ? last : Math.min(now + 1, last), Home: 0, End: last };
    if (event.key in moves) {
      event.preventDefault();
      this.readout.setAttribute("aria-live", "polite");
      this.cursor(moves[event.key]);
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.open(now, null);
    } else if (event.key === "Escape" && this.at !== null) {
      this.cursor(null);
    }
  }

  // The numbers below the chart: those at the cursor or, without one, the newest.
  say() {
    const index = this.plot === null ? null : this.plot.cursor.idx;
    const parts = [];
    const newest = index === null || index === undefined;
    this.curves.forEach((curve, place) => {
      const column = this.data[1 + place * this.stride];
      let found = newest ? column.length - 1 : index;
      if (newest) while (found > 0 && (column[found] === null || column[found] === undefined)) found -= 1;
      const value = column[found];
      const mark = h("span", { class: `swatch ${curve.dash ? "dashed" : ""}` });
      mark.style.setProperty("--swatch", curve.colour);
      parts.push(h("span", { class: "value" }, mark, h("span", { class: "of" }, curve.label), " ", h("b", {}, number(value))));
    });
    const x = newest ? "newest" : `${this.xLabel} ${number(this.data[0][index], 6)}`;
    this.readout.replaceChildren(h("span", { class: "x" }, x), ...parts);
  }

  resize() {
    if (this.plot !== null && this.place.clientWidth > 0 && this.plot.width !== this.place.clientWidth) {
      this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
    }
  }

  reset() {
    if (this.plot === null || this.data[0].length === 0) return;
    this.plot.setScale("x", { min: this.data[0][0], max: this.data[0][this.data[0].length - 1] });
  }

  destroy() {
    if (this.plot !== null) this.plot.destroy();
    this.plot = null;
  }
}
