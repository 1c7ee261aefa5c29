// One image: its picture with the map over it, and its facts. Knows no requests and no other images.

import { paint } from "./colours.js";
import { TokenMap } from "./token_map.js";

export class Card {
  state = "waiting"; // then "running", "done" or "failed"
  hasDeepstack = false;
  canBeShown = true; // a browser cannot show every format that the service reads
  #facts = {};

  // `on` has `point`, `keep` and `letGo` for the map, and `remove` and `retry`.
  constructor(id, file, on) {
    this.id = id;
    this.file = file;
    this.name = file.name || "pasted image";
    this.url = URL.createObjectURL(file);
    this.map = new TokenMap(this.name, this.url, {
      point: (token, isSaid) => on.point(this, token, isSaid),
      keep: (token) => on.keep(this, token),
      letGo: () => on.letGo(),
    });
    this.element = document.createElement("li");
    this.#build(this.element, on);
    this.wait();
    this.map.picture.onload = ({ target }) => {
      this.size = [target.naturalWidth, target.naturalHeight]; // as seen, after the EXIF orientation
      this.map.fit(...this.size);
      this.#showSize();
    };
    this.map.picture.onerror = () => {
      this.canBeShown = false;
      this.map.hidePicture();
      this.#showSize();
    };
  }

  #build(item, on) {
    const title = add(item, "div", "title");
    add(title, "h3").textContent = title.title = this.name;
    const remove = add(title, "button", "quiet");
    remove.type = "button";
    remove.textContent = "Remove";
    remove.setAttribute("aria-label", `Remove ${this.name}`);
    remove.onclick = () => on.remove(this);
    item.append(this.map.element);
    for (const name of ["size", "bar", "stages", "how", "error"]) this.#facts[name] = add(item, "p", name);
    this.#facts.bar.setAttribute("aria-hidden", "true");
    this.#facts.error.setAttribute("role", "alert");
    this.#facts.retry = add(item, "button", "quiet");
    this.#facts.retry.type = "button";
    this.#facts.retry.textContent = "Try again";
    this.#facts.retry.onclick = () => on.retry(this);
  }

  #enter(state, how = "", error = "") {
    this.state = state;
    this.element.setAttribute("aria-busy", state === "waiting" || state === "running");
    this.#facts.how.textContent = how;
    this.#facts.error.textContent = error;
    this.#facts.retry.hidden = state !== "failed";
    this.#showSize();
  }

  wait() {
    this.#enter("waiting", "waits for its turn");
  }

  run() {
    this.#enter("running", "is being embedded …");
  }

  // `message` is the service's own.
  fail(message) {
    this.#enter("failed", "", message);
  }

  // `grid`: [rows, columns] of tokens. `how`: whether it ran by replay or eagerly.
  done({ stages, grid, how, hasDeepstack }) {
    this.grid = grid;
    this.hasDeepstack = hasDeepstack;
    this.map.setGrid(...grid);
    this.#showStages(stages);
    this.#enter("done", how);
  }

  #showSize() {
    const isUnseen = !this.canBeShown && this.grid;
    this.map.element.hidden = !this.canBeShown && !this.grid;
    const pixels = isUnseen ? "this browser cannot show the picture" : this.size?.join(" × ");
    const tokens = this.grid && `${this.grid[0] * this.grid[1]} tokens (${this.grid[1]} × ${this.grid[0]})`;
    this.#facts.size.textContent = [pixels, bytes(this.file.size), tokens].filter(Boolean).join(" · ");
  }

  #showStages({ total, ...stages }) {
    const { bar, stages: text } = this.#facts;
    bar.replaceChildren();
    text.replaceChildren();
    for (const [name, ms] of Object.entries(stages)) {
      add(bar, "span", name).style.flexGrow = ms;
      add(text, "span", name).textContent = `${name} ${ms.toFixed(1)}`;
    }
    add(text, "span", "total").textContent = `total ${total.toFixed(1)} ms`;
  }

  // Draws the similarities, or nothing without them.
  draw(similarities, range) {
    this.map.setDrawn(Boolean(similarities));
    if (similarities) paint(this.map.canvas, this.grid[1], this.grid[0], similarities, range);
  }

  destroy() {
    this.element.remove();
    URL.revokeObjectURL(this.url);
  }
}

function add(parent, tag, className = "") {
  const made = document.createElement(tag);
  made.className = className;
  parent.append(made);
  return made;
}

function bytes(number) {
  return number < 1e6 ? `${Math.ceil(number / 1e3)} KB` : `${(number / 1e6).toFixed(1)} MB`;
}
