// The text editor: CodeMirror in a shadow root, where its styles are not inline ones, which the page's policy forbids.

import { completions } from "./completion.js";
import { EDITOR_STYLE } from "./style.js";
import {
  acceptCompletion,
  autocompletion,
  bracketMatching,
  closeBrackets,
  closeBracketsKeymap,
  defaultKeymap,
  drawSelection,
  EditorState,
  EditorView,
  highlightActiveLine,
  history,
  historyKeymap,
  hoverTooltip,
  keymap,
  lineNumbers,
  lintGutter,
  lintKeymap,
  placeholder,
  Prec,
  setDiagnostics,
  yaml,
} from "./vendor.js";
import { h } from "../dom.js";

/**
 * The editor. `changed` is called when its text is another one, `submit` when Ctrl or Cmd and Enter are pressed; `help` has
 * the `schema`, the `places` of the fields and the `named` values.
 */
export function textEditor({ text, readOnly, changed, submit, help }) {
  const element = h("div", { class: "editor" });
  const root = element.attachShadow({ mode: "open" });
  const view = new EditorView({
    parent: root,
    root,
    state: EditorState.create({
      doc: text,
      extensions: [
        Prec.highest(keymap.of([{ key: "Mod-Enter", run: () => (submit(), true) }])),
        Prec.high(
          keymap.of([
            { key: "Tab", run: acceptCompletion }, // without a list, Tab leaves the editor
            { key: "Enter", run: beginSection },
          ]),
        ),
        keymap.of([...closeBracketsKeymap, ...defaultKeymap, ...historyKeymap, ...lintKeymap]),
        autocompletion({ override: [completions(help.schema, help.named)], icons: false }),
        hoverTooltip((_, at) => explanation(help, at)),
        [lineNumbers(), lintGutter(), history(), drawSelection(), highlightActiveLine()],
        [bracketMatching(), closeBrackets(), yaml(), EditorView.lineWrapping, EDITOR_STYLE],
        placeholder("name: my-job"),
        EditorState.tabSize.of(2),
        EditorState.readOnly.of(readOnly),
        EditorView.editable.of(!readOnly),
        EditorView.contentAttributes.of({ "aria-label": "Job file", "aria-readonly": String(readOnly) }),
        EditorView.updateListener.of((update) => update.docChanged && changed()),
      ],
    }),
  });

  return {
    element,
    text: () => view.state.doc.toString(),
    /** Put another text in place of all; it can be undone. */
    replace(other) {
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: other } });
    },
    /** Mark problems, given as {from, to, message} in their order. */
    mark(problems) {
      const within = (at) => Math.min(at, view.state.doc.length);
      const marks = problems.map(({ from, to, message }) => ({
        from: within(from),
        to: within(to),
        severity: "error",
        message,
      }));
      view.dispatch(setDiagnostics(view.state, marks));
    },
    /** The number of the line of a character, from 1. */
    line: (at) => view.state.doc.lineAt(Math.min(at, view.state.doc.length)).number,
    focus(at = null) {
      if (at !== null)
        view.dispatch({ selection: { anchor: Math.min(at, view.state.doc.length) }, scrollIntoView: true });
      view.focus();
    },
    stop: () => view.destroy(),
  };
}

/** On a new line below a section's name, its fields are indented. */
function beginSection(view) {
  const { head, empty } = view.state.selection.main;
  const line = view.state.doc.lineAt(head);
  const [, lead] = /^(\s*(?:- +)*)[^#]*:\s*$/.exec(line.text.slice(0, head - line.from)) ?? [];
  if (lead === undefined || !empty || head !== line.to) return false;
  const insert = `\n${" ".repeat(lead.length + 2)}`;
  view.dispatch({
    changes: { from: head, insert },
    selection: { anchor: head + insert.length },
    scrollIntoView: true,
    userEvent: "input",
  });
  return true;
}

function explanation({ schema, places }, at) {
  const place = places().find(({ from, to }) => from <= at && at <= to);
  const about = place && schema.about(place.path);
  if (!about) return null;
  const said = [h("b", {}, place.field), h("i", {}, about.type), h("p", {}, about.description)];
  return { pos: place.from, end: place.to, create: () => ({ dom: h("div", { class: "explained" }, said) }) };
}
