// A drawing on the page: a canvas, drawn anew when its size or the theme changes, and one over it for the pointer.

import { h, onTheme } from "../dom.js";
import { SvgPen, drawBackground } from "./plot.js";
import { save } from "./save.js";

/**
 * A drawing. `draw(pen, width, height)` draws it, also for a file; `over(pen, width, height)` draws what the pointer or
 * the keys point at. Both are called at most once for each frame of the screen.
 */
export class Picture {
  #canvas = h("canvas");
  #above = h("canvas", { class: "above" });
  #due = { all: false, over: false };
  #frame = null;

  constructor({ label, height, draw, over = () => {} }) {
    Object.assign(this, { draw, over, height });
    this.element = h(
      "div",
      { class: "picture", role: "img", tabindex: 0, "aria-label": label },
      this.#canvas,
      this.#above,
    );
    this.element.style.setProperty("height", `${height}px`);
    this.#resized = new ResizeObserver(([{ contentRect }]) => {
      this.width = contentRect.width;
      this.redraw();
    });
    this.#resized.observe(this.element);
    this.#unthemed = onTheme(() => this.redraw());
  }

  width = 0;
  #resized;
  #unthemed;

  redraw() {
    this.#ask("all");
  }

  redrawOver() {
    this.#ask("over");
  }

  stop() {
    this.#resized.disconnect();
    this.#unthemed();
    cancelAnimationFrame(this.#frame);
  }

  /** Buttons that save it as a file; `name` says under which name. */
  saving(name) {
    const png = () => this.#canvas.toBlob((blob) => save(`${name()}.png`, blob));
    const svg = () => {
      const pen = new SvgPen(this.width, this.height);
      drawBackground(pen, this.width, this.height);
      this.draw(pen, this.width, this.height);
      save(`${name()}.svg`, new Blob([pen.text], { type: "image/svg+xml" }));
    };
    return [
      ["PNG", png],
      ["SVG", svg],
    ].map(([label, click]) =>
      h("button", { type: "button", class: "small", title: `Save as ${label}`, on: { click } }, label),
    );
  }

  #ask(what) {
    this.#due[what] = true;
    this.#frame ??= requestAnimationFrame(() => this.#turn());
  }

  #turn() {
    const { all } = this.#due;
    this.#frame = null;
    this.#due = { all: false, over: false };
    if (!this.width) return;
    if (all) {
      const pen = this.#cleared(this.#canvas);
      drawBackground(pen, this.width, this.height);
      this.draw(pen, this.width, this.height);
    }
    this.over(this.#cleared(this.#above), this.width, this.height);
  }

  #cleared(canvas) {
    const density = devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * density), Math.round(this.height * density)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.scale(density, density);
    return pen;
  }
}
