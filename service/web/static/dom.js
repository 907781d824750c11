// Elements built in code. What comes from the API goes in as text or as an attribute, never as markup.

import { exactMoment } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element. `on` holds listeners by event, `style` CSS properties; null, undefined and false are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Change an element's text only where it differs, so that screen readers do not hear it again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Change an element's class only where it differs. */
export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

/** A point in time, short, with the full one on hover. */
export function time(iso, text) {
  return h("time", { datetime: iso, title: exactMoment(iso) }, text);
}

/** A link within the page. */
export function link(href, attributes, ...children) {
  return h("a", { href, "data-route": true, ...attributes }, ...children);
}

/** A part of the page with a heading and, beside it, controls. */
export function card(title, { id, controls = [] } = {}, ...children) {
  const heading = h("h2", { id: `${id}-title` }, title);
  const head = h("div", { class: "card-head" }, heading, h("div", { class: "controls" }, controls));
  return h("section", { class: "card", id, "aria-labelledby": `${id}-title` }, head, children);
}

/** What a CSS custom property comes to now, in light or dark. */
export function themed(property) {
  return getComputedStyle(document.documentElement).getPropertyValue(property).trim();
}

/** Have `draw` called again when the page turns light or dark; returns what ends that. */
export function onTheme(draw) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", draw);
  return () => query.removeEventListener("change", draw);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}
