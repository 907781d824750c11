// Numbers, durations and the like as people read them. What is not known is a dash.

export const UNKNOWN = "–";

const STEPS = new Intl.NumberFormat("en");
const LOCAL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" });
const EXACT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });

/** A finite number, or null: JSON lacks NaN and infinity, which come as null or as text. */
export function finite(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** A whole number with separators. */
export function whole(value) {
  return finite(value) === null ? UNKNOWN : STEPS.format(Math.round(value));
}

/** A number in about three figures: 12.3k. */
export function short(value) {
  if (finite(value) === null) return UNKNOWN;
  const prefixes = [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ];
  const [unit, prefix] = prefixes.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return figures(value / unit) + prefix;
}

/** A number at an axis, in as few figures as tell it apart. */
export function tick(value) {
  return Math.abs(value) >= 1000 ? short(value) : small(Number(value.toPrecision(4)));
}

/** A small number, such as a learning rate. */
export function small(value) {
  if (finite(value) === null) return UNKNOWN;
  return value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(1) : figures(value);
}

/** A loss in nats a token. */
export function loss(value) {
  return finite(value) === null ? (typeof value === "string" ? value : UNKNOWN) : value.toFixed(value < 10 ? 3 : 2);
}

/** The perplexity of a loss in nats a token. */
export function perplexity(value) {
  return finite(value) === null ? UNKNOWN : short(Math.exp(value));
}

/** A part of a whole. */
export function percent(part) {
  if (finite(part) === null) return UNKNOWN;
  return part > 0 && part < 0.001
    ? "<0.1%"
    : `${(100 * part).toFixed(part < 0.0995 || part > 0.9995 ? 1 : 0).replace(".0", "")}%`;
}

/** Bytes in powers of 1024. */
export function bytes(value) {
  if (finite(value) === null) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) [value, power] = [value / 1024, power + 1];
  return `${figures(value)} ${units[power]}`;
}

/** How long something takes, in its two largest units. */
export function duration(seconds) {
  if (finite(seconds) === null || seconds < 0) return UNKNOWN;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1).replace(".0", "")} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60)
    return seconds < 600 ? two(Math.floor(seconds / 60), "min", Math.floor(seconds % 60), "s") : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return two(hours, "h", minutes % 60, "min");
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

/** How long something takes, in its largest unit alone. */
export function about(seconds) {
  return duration(seconds).split(" ").slice(0, 2).join(" ");
}

/** Seconds between two points in time; the second is now if left out. */
export function seconds(from, to) {
  return ((to ? Date.parse(to) : Date.now()) - Date.parse(from)) / 1000;
}

/** How long ago something was. */
export function ago(iso) {
  const passed = seconds(iso);
  return passed < 5 ? "just now" : `${duration(passed)} ago`;
}

/** A point in time, in the reader's zone and language. */
export function moment(iso) {
  return iso ? LOCAL.format(new Date(iso)) : UNKNOWN;
}

/** A point in time to the second. */
export function exactMoment(iso) {
  return iso ? EXACT.format(new Date(iso)) : UNKNOWN;
}

/** The text form of a layout. */
export function layout(sizes) {
  if (!sizes) return UNKNOWN;
  const context = sizes.context_parallel_size > 1 ? ` × cp ${sizes.context_parallel_size}` : "";
  return `tp ${sizes.tensor_parallel_size} × pp ${sizes.pipeline_parallel_size}${context} × dp ${sizes.data_parallel_size}`;
}

/** A node by its id, of which the beginning tells enough. */
export function node(id) {
  return id.length > 20 ? id.slice(0, 12) : id;
}

/** A constant's name as words: GANG_LOST, gang lost. */
export function words(name) {
  return String(name).toLowerCase().replaceAll("_", " ");
}

function figures(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

function two(large, largeUnit, rest, restUnit) {
  return rest ? `${large} ${largeUnit} ${rest} ${restUnit}` : `${large} ${largeUnit}`;
}
