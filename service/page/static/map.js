// The images with their tokens laid over them, coloured by similarity to the token that is pointed at.

const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis

// The colour of a similarity from -1 to 1. The lower half is seldom needed, so it has the first quarter.
export function colour(value) {
  const place = value < 0 ? Math.max(value, -1) * 0.25 + 0.25 : 0.25 + Math.min(value, 1) * 0.75;
  const at = place * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[low].map((part, i) => Math.round(part + (STOPS[low + 1][i] - part) * (at - low)));
}

export function isDark(red, green, blue) {
  return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
}

export function drawScale(canvas) {
  paint(canvas, canvas.width, 1, (i) => (i / (canvas.width - 1)) * 2 - 1, 1);
}

function paint(canvas, width, height, valueAt, opacity, marked = -1) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    const [red, green, blue] = i === marked ? [255, 0, 64] : colour(valueAt(i));
    pixels.data.set([red, green, blue, i === marked ? 255 : Math.round(opacity * 255)], i * 4);
  }
  context.putImageData(pixels, 0, 0);
}

// One image of the map. Calls `onPoint(token, isHeld)` when a place is pointed at.
export class ImageMap {
  constructor(image, onPoint) {
    this.image = image;
    this.token = Math.floor(image.numTokens / 2);
    this.element = document.createElement("div");
    this.element.className = "map";
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "application");
    this.element.setAttribute("aria-label", `${image.name}: ${image.gridWidth} by ${image.gridHeight} tokens`);
    const picture = document.createElement("img");
    picture.src = image.url;
    picture.alt = image.name;
    picture.draggable = false;
    this.canvas = document.createElement("canvas");
    this.element.append(picture, this.canvas);
    this.element.addEventListener("pointermove", (event) => onPoint(this.#at(event), false));
    this.element.addEventListener("pointerdown", (event) => onPoint(this.#at(event), true));
    this.element.addEventListener("keydown", (event) => this.#move(event, onPoint));
  }

  #at(event) {
    const box = this.element.getBoundingClientRect();
    const { gridWidth, gridHeight } = this.image;
    const column = clamp(Math.floor(((event.clientX - box.left) / box.width) * gridWidth), gridWidth);
    const row = clamp(Math.floor(((event.clientY - box.top) / box.height) * gridHeight), gridHeight);
    return (this.token = row * gridWidth + column);
  }

  #move(event, onPoint) {
    const { gridWidth, gridHeight } = this.image;
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Enter: [0, 0] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const column = clamp((this.token % gridWidth) + step[0], gridWidth);
    const row = clamp(Math.floor(this.token / gridWidth) + step[1], gridHeight);
    this.token = row * gridWidth + column;
    onPoint(this.token, true);
  }

  draw(similarities, opacity, marked) {
    this.similarities = similarities;
    paint(this.canvas, this.image.gridWidth, this.image.gridHeight, (i) => similarities[i], opacity, marked);
  }
}

function clamp(value, size) {
  return Math.min(Math.max(value, 0), size - 1);
}
