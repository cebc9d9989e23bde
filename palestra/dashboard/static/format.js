// Numbers, times and names as people read them.

export const ENDLESS = 1e9;  // steps of a job that ends only when it is stopped

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 && size < 1e12) {
    const [scale, unit] = size >= 1e9 ? [1e9, "G"] : [1e6, "M"];
    return `${(value / scale).toLocaleString("en-US", { maximumFractionDigits: 2 }).replace("-", "−")} ${unit}`;
  }
  if (size >= 1e12 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(places, 6) }).replace("-", "−");
}

export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function signed(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${number(value, 3)}` : number(value, 3);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

export function clock(at) {
  const date = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function words(name) {
  return name.replaceAll("_", " ");
}

// The parts of a metric's name: where several policies are trained, each has metrics under its own name.
const GROUPS = ["train", "rollout", "time", "validation"];
function parts(name) {
  const [first, second] = name.split("/", 2);
  const policy = second === "version" || (GROUPS.includes(second) && name.split("/").length > 2) ? first : "";
  return { policy, plain: policy === "" ? name : name.slice(policy.length + 1) };
}

// The short name of a metric: what stands behind its group.
export function metric(name) {
  const { policy, plain } = parts(name);
  return `${policy} ${words(plain.slice(plain.indexOf("/") + 1))}`.trim();
}

// The names under which a metric is known: its own, or one for each policy that is trained.
export function namesOf(known, name) {
  return [...known].filter((whole) => whole === name || parts(whole).plain === name);
}

// A metric of a step by policy; of the only one that is trained by "".
export function ofPolicies(row, name) {
  const present = Object.keys(row).filter((whole) => row[whole] !== null && row[whole] !== undefined);
  return Object.fromEntries(namesOf(present, name).map((whole) => [parts(whole).policy, row[whole]]));
}

// Numbers by policy as text; of the only one without a name.
export function byPolicy(values, digits = 4) {
  const found = Object.entries(values).map(([policy, value]) => `${policy} ${number(value, digits)}`.trim());
  return found.length === 0 ? "–" : found.join(", ");
}

export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

export function json(value, indent = 0) {
  return JSON.stringify(value, null, indent);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];
export function bytes(count) {
  const power = count < 1024 ? 0 : Math.min(Math.floor(Math.log2(count) / 10), SIZES.length - 1);
  return `${number(count / 1024 ** power, 3)} ${SIZES[power]}`;
}

// JSON on one line where it is short, and not more of it than a browser can lay out.
export function pretty(value) {
  const line = json(value);
  return line.length <= 90 ? line : json(value, 2).slice(0, 20000);
}

// What a graphics card does, as far as its driver says it.
export function gpu(card) {
  const memory = card.memory_bytes === null ? null : `${card.memory_used_bytes === null ? "?" : bytes(card.memory_used_bytes)} of ${bytes(card.memory_bytes)}`;
  const parts = [card.utilisation === null ? null : `${percent(card.utilisation)} busy`, memory, card.power_watts === null ? null : `${whole(card.power_watts)} W`, card.temperature_celsius === null ? null : `${whole(card.temperature_celsius)} °C`];
  return `GPU ${card.index}: ${card.problem || parts.filter((part) => part !== null).join(", ") || "no figures"}`;
}
