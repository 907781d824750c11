// What the web page uses of other people's packages. `make editor` bundles it.

export { Validator } from "@cfworker/json-schema";
export {
  acceptCompletion,
  autocompletion,
  closeBrackets,
  closeBracketsKeymap,
  startCompletion,
} from "@codemirror/autocomplete";
export { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
export { yaml } from "@codemirror/lang-yaml";
export { bracketMatching, HighlightStyle, syntaxHighlighting } from "@codemirror/language";
export { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
export { EditorState, Prec } from "@codemirror/state";
export {
  drawSelection,
  EditorView,
  highlightActiveLine,
  hoverTooltip,
  keymap,
  lineNumbers,
  placeholder,
} from "@codemirror/view";
export { tags } from "@lezer/highlight";
export { isAlias, isMap, isPair, isScalar, isSeq, parseDocument, stringify } from "yaml";
