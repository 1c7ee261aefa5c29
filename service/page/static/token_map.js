// A picture with its grid of tokens over it. Turns the pointer and the keys into tokens.

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const PICTURE_SIZE = 19; // of the longer side of a large picture, in rem

export class TokenMap {
  #rows = 0;
  #columns = 0;
  #token = 0; // where the keys are
  #on;

  // `on`: point(token, isSaid), keep(token), letGo(). A place that is pointed at by keys is said, too.
  constructor(name, url, on) {
    this.#on = on;
    this.name = name;
    this.element = document.createElement("div");
    this.element.className = "map";
    this.picture = document.createElement("img");
    this.canvas = document.createElement("canvas");
    this.marks = [document.createElement("span"), document.createElement("span")]; // the place, and the most alike
    this.marks[0].className = "mark chosen";
    this.marks[1].className = "mark best";
    this.picture.src = url;
    this.picture.alt = name;
    this.picture.draggable = false;
    this.element.append(this.picture, this.canvas, ...this.marks);
    this.setDrawn(false);
  }

  // The shape of the element, which the tokens share: the service resizes the whole image to its grid.
  fit(width, height) {
    this.element.style.aspectRatio = `${width} / ${height}`;
    this.element.style.width = `min(100%, ${PICTURE_SIZE * Math.min(1, width / height)}rem)`;
  }

  hidePicture() {
    this.picture.hidden = true;
    this.fit(this.#columns || 1, this.#rows || 1);
  }

  setGrid(rows, columns) {
    [this.#rows, this.#columns] = [rows, columns];
    this.#token = Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    if (this.picture.hidden) this.fit(columns, rows);
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "application");
    this.element.setAttribute("aria-label", `Map of ${this.name}, ${rows} rows and ${columns} columns of tokens`);
    this.element.setAttribute("aria-describedby", "map-help");
    this.element.onpointermove = (event) => this.#on.point((this.#token = this.#at(event)), false);
    this.element.onpointerleave = () => this.#on.point(-1, false);
    this.element.onclick = (event) => this.#on.keep((this.#token = this.#at(event)));
    this.element.onkeydown = (event) => this.#onKey(event);
    this.element.onblur = () => this.#on.point(-1, false);
  }

  #at({ clientX, clientY }) {
    const box = this.element.getBoundingClientRect();
    const row = Math.floor(((clientY - box.top) / box.height) * this.#rows);
    const column = Math.floor(((clientX - box.left) / box.width) * this.#columns);
    return this.#clamped(row, column);
  }

  #clamped(row, column) {
    const within = (value, size) => Math.min(Math.max(value, 0), size - 1);
    return within(row, this.#rows) * this.#columns + within(column, this.#columns);
  }

  #onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = STEPS[event.key];
    if (step) this.#token = this.#clamped(Math.floor(this.#token / this.#columns) + step[0], (this.#token % this.#columns) + step[1]);
    if (step) this.#on.point(this.#token, true);
    else if (event.key === "Enter" || event.key === " ") this.#on.keep(this.#token);
    else if (event.key === "Escape") this.#on.letGo();
    else return;
    event.preventDefault();
  }

  setDrawn(isDrawn) {
    this.canvas.hidden = !isDrawn;
    if (!isDrawn) for (const which of [0, 1]) this.mark(which, -1);
  }

  // Outlines a token, or none with -1. `which`: 0 is the place, 1 the most alike.
  mark(which, token) {
    const mark = this.marks[which];
    mark.hidden = token < 0;
    if (mark.hidden) return;
    mark.style.left = `${(100 * (token % this.#columns)) / this.#columns}%`;
    mark.style.top = `${(100 * Math.floor(token / this.#columns)) / this.#rows}%`;
    mark.style.width = `${100 / this.#columns}%`;
    mark.style.height = `${100 / this.#rows}%`;
  }

  // The place of a token in words.
  place(token) {
    return `${this.name}, row ${Math.floor(token / this.#columns) + 1}, column ${(token % this.#columns) + 1}`;
  }
}
