// A job file's text, read as the service reads job files: YAML 1.2's core schema, no field twice, nothing endless.

import { isAlias, isMap, isScalar, isSeq, parseDocument } from "./vendor.js";

const MOST_BYTES = 2 ** 20; // the service takes no larger body
const DEEPEST = 100; // levels; no field goes nearly that deep
const MOST_ALIASES = 100;
const MOST_PROBLEMS = 50; // that are told of
const WORDS = {
  MULTIPLE_DOCS: "there are several documents; leave one",
  RESOURCE_EXHAUSTION: "it is nested too deeply",
  TAG_RESOLVE_FAILED: "a tag that begins with ! is not taken; leave it out",
};
const LONGEST_FIELD = 200; // characters of a field's path that the service tells

/**
 * What a text says.
 *
 * `content` is its data, or null if it has none that could be sent; `problems` are {from, to, message} by characters;
 * `places` are {field, path, from, to}: where each field's name stands, with its value if that is a plain one.
 */
export function read(text) {
  if (new Blob([text]).size > MOST_BYTES) return unread("is larger than 1 MiB, which is more than the service takes");
  const document = parseDocument(text, { schema: "core", merge: true, uniqueKeys: false, prettyErrors: false });
  const faults = [...document.errors, ...document.warnings];
  const walk = new Walk(text.length);
  if (!faults.length) walk.into(document.contents, []);
  const problems = [...faults.map(inWords), ...walk.problems].slice(0, MOST_PROBLEMS);
  const { places } = walk;
  if (problems.length || document.contents === null) return { content: null, problems, places };
  if (!isMap(document.contents))
    return { content: null, problems: [{ ...walk.whole, message: "must be a mapping, such as name: my-job" }], places };
  try {
    const content = document.toJS({ maxAliasCount: MOST_ALIASES });
    return { content: JSON.parse(JSON.stringify(content)), problems, places }; // fails on what is within itself
  } catch (problem) {
    return unread(
      problem instanceof TypeError ? "has a part that is within itself" : `cannot be read: ${problem.message}`,
    );
  }
}

/** The path of a field as the service writes it: data.source.paths[0]. */
export function dotted(path) {
  const parts = path.map((part) => (typeof part === "number" ? `[${part}]` : `.${part || '""'}`));
  return parts.join("").replace(/^\./, "").slice(0, LONGEST_FIELD);
}

/** Where a field stands, or what of it there is: the place of a missing one is its section. */
export function placeOf(places, field) {
  const above = (place) => field === place.field || [".", "["].includes(field.slice(place.field.length)[0]);
  const found = places.filter((place) => place.field && field.startsWith(place.field) && above(place));
  return found.sort((one, other) => other.field.length - one.field.length)[0];
}

function inWords({ pos, code, message }) {
  return { from: pos[0], to: pos[1], message: WORDS[code] ?? message };
}

function unread(message) {
  return { content: null, problems: [{ from: 0, to: 0, message: `The text ${message}.` }], places: [] };
}

class Walk {
  constructor(length) {
    this.whole = { from: 0, to: length };
    this.problems = [];
    this.places = [];
    this.aliases = 0;
  }

  /** Note all fields of a node, and what YAML allows and job files do not. */
  into(node, path) {
    if (path.length > DEEPEST) this.refuse(node, "is nested too deeply");
    else if (isMap(node)) this.fields(node, path);
    else if (isSeq(node)) node.items.forEach((item, index) => this.entry(item, [...path, index], item));
    else if (isAlias(node) && ++this.aliases > MOST_ALIASES) this.refuse(node, "there are too many aliases");
    else if (isScalar(node) && typeof node.value === "number" && !Number.isFinite(node.value))
      this.refuse(node, `${node.source} is not a number that JSON has; use a finite value`);
  }

  fields(map, path) {
    const written = new Set();
    for (const { key, value } of map.items) {
      const name = String(key?.value ?? "");
      if (!isScalar(key)) this.refuse(key ?? map, "a field's name must be plain text");
      else if (written.has(name)) this.refuse(key, `duplicate field ${JSON.stringify(name.slice(0, 100))}; remove one`);
      else this.entry(value, [...path, name], key);
      written.add(name);
    }
  }

  entry(value, path, key) {
    const [from, end] = key?.range ?? [0, 0];
    this.places.push({ field: dotted(path), path, from, to: isScalar(value) ? value.range[1] : end });
    this.into(value, path);
  }

  refuse(node, message) {
    const [from, to] = node?.range ?? [0, 0];
    this.problems.push({ from, to, message });
  }
}
