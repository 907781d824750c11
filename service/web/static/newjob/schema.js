// The job spec's JSON Schema, as the service's OpenAPI document has it: what may stand where, and what is wrong.

import { dotted } from "./text.js";
import { Validator } from "./vendor.js";

const ROOT = "#/components/schemas/JobSpec";
const TYPES = {
  integer: "a whole number",
  number: "a number",
  string: "text",
  boolean: "true or false",
  array: "a list",
  object: "a section of fields",
  null: "null",
};
const LIMITS = [
  ["minimum", "≥"],
  ["exclusiveMinimum", ">"],
  ["maximum", "≤"],
  ["exclusiveMaximum", "<"],
];
// What only says that something inside is wrong.
const OUTER = new Set([
  "$ref",
  "properties",
  "additionalProperties",
  "items",
  "prefixItems",
  "anyOf",
  "allOf",
  "oneOf",
]);
const LONGEST_LIST = 12;
// Fields that have another default beside some values of a field of their section, which the schema cannot say.
const DECIDED_BY = {
  "model.gate_activation": "preset",
  "optimizer.learning_rate": "kind",
  "optimizer.weight_decay": "kind",
  "optimizer.clip_norm": "kind",
};

export class Schema {
  #schemas;
  #validator;

  constructor({ components }) {
    this.#schemas = components.schemas;
    this.#validator = new Validator({ $ref: ROOT, components: { schemas: components.schemas } }, "2020-12", false);
  }

  /** The fields of the section at a path, each as {name, required, schemas}. */
  fields(path) {
    const found = new Map();
    for (const { properties = {}, required = [] } of this.#at(path))
      for (const [name, schema] of Object.entries(properties))
        if (!found.has(name))
          found.set(name, { name, required: required.includes(name), schemas: this.#variants(schema) });
    return [...found.values()];
  }

  /** The values that the field at a path may have, if they can be listed. */
  choices(path) {
    const schemas = this.#at(path);
    const listed = schemas.flatMap((schema) => schema.enum ?? ("const" in schema ? [schema.const] : []));
    const truths = schemas.some((schema) => schema.type === "boolean") ? [true, false] : [];
    return [...new Set([...listed, ...truths])].filter((value) => value !== null);
  }

  /** The field at a path in words: {type, description}; null if there is no such field. */
  about(path) {
    const schemas = this.#at(path);
    return schemas.length ? { type: inShort(schemas), description: described(schemas) } : null;
  }

  /** What is wrong with a job, as {field, message}: one for each field at fault. */
  errors(content) {
    const found = new Map();
    const { errors } = this.#validator.validate(content);
    const faults = errors.filter(
      // A model has a preset or sizes: which of the two it lacks, the service says better.
      (error) => !OUTER.has(error.keyword) && !/anyOf\/\d+\/required$/.test(error.keywordLocation),
    );
    for (const { instanceLocation: location, keyword, error } of faults) {
      const deeper = faults.some((other) => other.instanceLocation.startsWith(`${location}/`));
      const known = found.get(location);
      if (keyword === "type" && (deeper || known)) continue; // each type of several that it might have is told of
      const path = pathOf(location, content);
      found.set(location, { field: dotted(path), message: this.#inWords(keyword, path, error) });
    }
    return [...found.values()];
  }

  /** A job without what would be so anyway. */
  withoutDefaults(content, path = []) {
    const fields = new Map(this.fields(path).map((field) => [field.name, field]));
    if (!fields.size) return content;
    const decided = (name) => {
      const other = DECIDED_BY[dotted([...path, name])];
      return other && !isDefault(content[other], fields.get(other));
    };
    return Object.fromEntries(
      Object.entries(content)
        .map(([name, value]) => [name, isSection(value) ? this.withoutDefaults(value, [...path, name]) : value])
        .filter(([name, value]) => decided(name) || !isDefault(value, fields.get(name))),
    );
  }

  #inWords(keyword, path, error) {
    if (keyword === "type") return `must be ${inShort(this.#at(path))}`;
    if (keyword === "enum") return `must be one of ${this.choices(path).slice(0, LONGEST_LIST).join(", ")}`;
    if (keyword === "required") return `${/"(.*)"/.exec(error)?.[1]} is missing`;
    if (keyword === "false") return "there is no such field";
    return keyword === "pattern" ? "is not spelled as it may be" : error;
  }

  #at(path) {
    return path.reduce(
      (schemas, part) => schemas.flatMap((schema) => this.#inside(schema, part)),
      this.#variants({ $ref: ROOT }),
    );
  }

  #inside({ properties, prefixItems, items, additionalProperties }, part) {
    if (typeof part === "number") return this.#variants(prefixItems?.[part] ?? items);
    return this.#variants(properties && Object.hasOwn(properties, part) ? properties[part] : additionalProperties);
  }

  /** A schema with all that it refers to, itself first: each may say a part of what holds. */
  #variants(schema) {
    if (typeof schema !== "object") return [];
    const { $ref, anyOf = [], allOf = [], oneOf = [] } = schema;
    const referred = $ref ? [this.#schemas[$ref.split("/").at(-1)]] : [];
    return [schema, ...[...referred, ...anyOf, ...allOf, ...oneOf].flatMap((each) => this.#variants(each))];
  }
}

/** Which types a field may have, in words. */
export function inShort(schemas) {
  const types = new Set(schemas.flatMap((schema) => schema.type ?? []).map((type) => TYPES[type] ?? type));
  return [...types].join(" or ");
}

/** Whether a field is a section, a list, or a plain value. */
export function kindOf(schemas) {
  const has = (type) => schemas.some((schema) => schema.type === type);
  return has("object") ? "section" : has("array") ? "list" : "value";
}

function described(schemas) {
  const [text = ""] = schemas.map((schema) => schema.description).filter(Boolean);
  const limits = LIMITS.flatMap(([name, sign]) => {
    const schema = schemas.find((each) => name in each);
    return schema ? [`${sign} ${schema[name]}`] : [];
  });
  const preset = schemas.find((schema) => "default" in schema && !isSection(schema.default));
  const facts = [limits.join(", "), preset && `Default: ${JSON.stringify(preset.default)}.`];
  return [text.replaceAll("``", "`"), ...facts].filter(Boolean).join("\n");
}

function isSection(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isDefault(value, field) {
  if (!field || field.required) return false;
  const preset = field.schemas.find((schema) => "default" in schema && !isSection(schema.default))?.default ?? null;
  const nullable = field.schemas.some((schema) => schema.type === "null"); // then an empty section is not its default
  const empty = isSection(value) && !Object.keys(value).length && !nullable;
  return empty || JSON.stringify(value) === JSON.stringify(preset);
}

/** The path that a JSON pointer means in some content, where lists are told from sections. */
function pathOf(pointer, content) {
  let inside = content;
  return pointer
    .split("/")
    .slice(1)
    .map((part) => {
      const name = decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~");
      const step = Array.isArray(inside) ? Number(name) : name;
      inside = inside?.[step];
      return step;
    });
}
