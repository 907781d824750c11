// How the editor looks: in the page's colours, light or dark, which reach into its shadow root as custom properties.

import { EditorView, HighlightStyle, syntaxHighlighting, tags } from "./vendor.js";

const MONOSPACE = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';

const theme = EditorView.theme({
  "&": { color: "var(--text)", backgroundColor: "var(--card)", fontSize: "0.875rem", height: "100%" },
  "&.cm-focused": { outline: "none" }, // the card has one
  ".cm-scroller": { fontFamily: MONOSPACE, lineHeight: "1.55" },
  ".cm-content": { caretColor: "var(--text)", padding: "0.6rem 0" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-placeholder": { color: "var(--muted)" },
  ".cm-gutters": { backgroundColor: "var(--soft)", color: "var(--muted)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--accent) 6%, transparent)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": {
    background: "color-mix(in srgb, var(--accent) 28%, transparent)",
  },
  "&.cm-focused .cm-matchingBracket": { backgroundColor: "var(--band)", outline: "1px solid var(--line)" },
  ".cm-lintRange-error": {
    backgroundImage: "none",
    textDecoration: "underline wavy var(--danger) 1px",
    textUnderlineOffset: "3px",
  },
  ".cm-tooltip": {
    backgroundColor: "var(--raised)",
    color: "var(--text)",
    border: "1px solid var(--line)",
    borderRadius: "8px",
    boxShadow: "0 6px 24px rgb(0 0 0 / 18%)",
    maxWidth: "min(32rem, 90vw)",
  },
  ".cm-tooltip.cm-tooltip-autocomplete > ul": { fontFamily: MONOSPACE, maxHeight: "16rem" },
  ".cm-tooltip.cm-tooltip-autocomplete > ul > li": { padding: "0.15rem 0.6rem" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { backgroundColor: "var(--accent)", color: "var(--accent-text)" },
  ".cm-completionDetail": { fontStyle: "normal", opacity: 0.75 },
  ".cm-tooltip.cm-completionInfo": { padding: "0.5rem 0.75rem", whiteSpace: "pre-line", fontSize: "0.8125rem" },
  ".cm-tooltip-section:not(:first-child)": { borderTop: "1px solid var(--line)" },
  ".cm-diagnostic": { padding: "0.4rem 0.7rem" },
  ".cm-diagnostic-error": { borderLeft: "4px solid var(--danger)" },
  ".cm-lint-marker-error": {
    content: '""',
    width: "0.6em",
    height: "0.6em",
    margin: "0.3em 0.2em",
    borderRadius: "50%",
    backgroundColor: "var(--danger)",
  },
  ".explained": { padding: "0.5rem 0.75rem", fontSize: "0.8125rem" },
  ".explained i": { color: "var(--muted)", marginLeft: "0.6rem" },
  ".explained p": { margin: "0.25rem 0 0", whiteSpace: "pre-line" },
});

const highlighting = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: [tags.string, tags.content], color: "var(--text)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--second)" },
  { tag: [tags.comment, tags.lineComment], color: "var(--muted)", fontStyle: "italic" },
  { tag: [tags.punctuation, tags.separator, tags.meta], color: "var(--muted)" },
]);

export const EDITOR_STYLE = [theme, syntaxHighlighting(highlighting)];
