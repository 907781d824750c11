// Files made in the browser: drawings, and tables as CSV.

import { h } from "../dom.js";

/** Have the browser save a file. */
export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Save rows as CSV. */
export function saveCsv(name, rows) {
  save(name, new Blob([csv(rows)], { type: "text/csv" }));
}

/** Rows as CSV (RFC 4180). A text that a spreadsheet would calculate gets an apostrophe before it. */
export function csv(rows) {
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  let text = typeof value === "string" ? value : JSON.stringify(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
