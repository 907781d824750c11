// What may be typed at a place of a job file: fields with what they are, and values that can be listed.

import { inShort, kindOf } from "./schema.js";
import { isMap, isPair, isScalar, isSeq, parseDocument, startCompletion } from "./vendor.js";

const HERE = "completed_here";
const DEEPEST = 20; // levels; no field goes nearly that deep

/** What completes a text; `named` gives the values that the service lists by the path of their field. */
export function completions(schema, named) {
  return (context) => {
    const line = context.state.doc.lineAt(context.pos);
    const before = line.text.slice(0, context.pos - line.from);
    const rest = line.text.slice(before.length);
    const [word, tail] = [/[\w.-]*$/.exec(before)[0], /^[\w.-]*/.exec(rest)[0]];
    if ((!context.explicit && !word && !/: $/.test(before)) || /(^|\s)#/.test(before)) return null;
    const [from, to] = [context.pos - word.length, context.pos + tail.length];
    const lead = before.slice(0, before.length - word.length);
    const found = whereIs(context.state.doc.toString(), from, to, /^\s*(- +)*$/.test(lead));
    if (!found) return null;
    const options = found.isKey
      ? fields(schema, found, " ".repeat(lead.length), /^\s*:/.test(rest.slice(tail.length)))
      : [...schema.choices(found.path), ...(named[found.path.join(".")]?.() ?? [])].map(value);
    return options.length ? { from, to, options, validFor: /^[\w.-]*$/ } : null;
  };
}

/** Which field is being typed: its path, or that of the section of which it is to be a field and what that has already. */
function whereIs(text, from, to, beginsLine) {
  const ahead = text.slice(0, from);
  if (beginsLine) {
    const found = search(`${ahead}${HERE}: ${text.slice(to).replace(/^[ \t]*:/, "")}`);
    if (found) return found;
  }
  return search(`${ahead}${HERE}${text.slice(to)}`);
}

function search(text) {
  const document = parseDocument(text, { schema: "core", uniqueKeys: false, prettyErrors: false });
  const is = (node) => isScalar(node) && node.value === HERE;
  function inside(node, path) {
    if (is(node)) return { path, isKey: false };
    if (isSeq(node)) return first(node.items.map((item, index) => [item, [...path, index]]));
    if (!isMap(node)) return null;
    if (node.items.some((pair) => is(pair.key)))
      return { path, isKey: true, present: new Set(node.items.map((pair) => pair.key?.value)) };
    return first(node.items.filter(isPair).map((pair) => [pair.value, [...path, String(pair.key?.value)]]));
  }
  function first(nodes) {
    for (const [node, path] of nodes) {
      const found = path.length < DEEPEST && inside(node, path);
      if (found) return found;
    }
    return null;
  }
  return inside(document.contents, []);
}

function fields(schema, { path, present }, indent, named) {
  return schema
    .fields(path)
    .filter((field) => !present.has(field.name))
    .map(({ name, required, schemas }, index) => ({
      label: name,
      type: "property",
      detail: required ? "required" : inShort(schemas),
      info: schema.about([...path, name]).description,
      boost: (required ? 50 : 0) - index, // else they would be in the alphabet's order
      apply: named ? name : (view, _, from, to) => insert(view, name, kindOf(schemas), indent, from, to),
    }));
}

function insert(view, name, kind, indent, from, to) {
  const below = { section: `\n${indent}  `, list: `\n${indent}  - `, value: " " }[kind];
  const text = `${name}:${below}`;
  view.dispatch({
    changes: { from, to, insert: text },
    selection: { anchor: from + text.length },
    userEvent: "input.complete",
  });
  if (kind === "value") startCompletion(view);
}

function value(choice, index) {
  return { label: String(choice), type: "constant", boost: -index };
}
