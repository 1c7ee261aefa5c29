// The page: takes images, sends each in one request, and shows what comes back.

import { ServiceError, embed, getInfo, setKey } from "./api.js";
import { ImageMap, drawScale } from "./map.js";
import { drawMatrix } from "./matrix.js";
import { startPanel } from "./panel.js";
import { LANGUAGES, snippet } from "./snippets.js";
import { pooled } from "./tensors.js";

const $ = (id) => document.getElementById(id);
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const images = []; // {id, name, url, vector, numTokens, gridWidth, gridHeight, map, …}
let info = null;
let needsKey = false;
let nextId = 0;
let waiting = []; // files that wait for a key
let language = LANGUAGES[0];
let held = null; // {id, token} that was clicked
let wanted = null; // the newest comparison, while the worker is busy
let isComparing = false;

async function start() {
  drawScale($("scale"));
  try {
    info = await getInfo();
  } catch (error) {
    return handle(error, start);
  }
  const device = [...new Set(info.devices)].join(", ");
  $("model").textContent = `${info.model} · ${info.dtype} on ${device} · ${info.hidden_size} numbers a vector`;
  $("demo").hidden = !info.demo;
  $("level").replaceChildren(
    ...Array.from({ length: info.num_deepstack + 1 }, (_, level) =>
      new Option(level ? `deepstack level ${level}` : "the main level", level)),
  );
  worker.postMessage({ sizes: [info.width, info.hidden_size] });
  const files = waiting;
  waiting = [];
  await takeAll(files);
}

// Shows an error as the service words it. Without a key it asks for one, and then goes on with `again`.
function handle(error, again) {
  if (!(error instanceof ServiceError)) throw error;
  if (error.status === 401) {
    needsKey = true;
    $("key").hidden = false;
    $("key-text").focus();
    $("key").onsubmit = (event) => {
      event.preventDefault();
      setKey($("key-text").value);
      $("key").hidden = true;
      again();
    };
  }
  return complain(error.message);
}

function complain(text) {
  const item = document.createElement("li");
  item.textContent = text;
  $("errors").append(item);
}

async function takeAll(files) {
  $("errors").replaceChildren();
  for (const file of files) await take(file);
  $("status").textContent = images.length === 1 ? "1 image" : images.length ? `${images.length} images` : "";
}

async function take(file) {
  if (!info) return void waiting.push(file);
  $("status").textContent = `${file.name} is being embedded …`;
  let found;
  try {
    found = await embed(file, info);
  } catch (error) {
    if (error.status === 401) waiting.push(file);
    return handle(Object.assign(error, { message: `${file.name}: ${error.message}` }), start);
  }
  const { rows, ...facts } = found;
  const image = { id: nextId++, name: file.name || "pasted image", url: URL.createObjectURL(file), size: file.size, ...facts };
  image.vector = pooled(rows, image.numTokens, info.width, info.hidden_size);
  worker.postMessage({ add: { id: image.id, rows, numTokens: image.numTokens } }, [rows.buffer]);
  image.map = new ImageMap(image, (token, isHeld) => point(image.id, token, isHeld));
  images.push(image);
  $("images").append(card(image));
  $("maps").append(image.map.element);
  refresh();
}

function card(image) {
  const item = document.createElement("li");
  const picture = document.createElement("img");
  picture.src = image.url;
  picture.alt = "";
  const text = document.createElement("div");
  const name = document.createElement("strong");
  name.textContent = name.title = image.name;
  const size = document.createElement("span");
  picture.addEventListener("load", () => {
    size.textContent = `${picture.naturalWidth} × ${picture.naturalHeight}, ${Math.ceil(image.size / 1024)} KB · ${image.numTokens} tokens (${image.gridWidth} × ${image.gridHeight})`;
  });
  const times = document.createElement("p");
  times.textContent = Object.entries(image.stages).map(([stage, ms]) => `${stage} ${ms.toFixed(1)}`).join(" · ") + " ms";
  const how = document.createElement("p");
  how.textContent = howItRan(image);
  const remove = document.createElement("button");
  remove.type = "button";
  remove.textContent = "Remove";
  remove.setAttribute("aria-label", `Remove ${image.name}`);
  remove.onclick = () => removeImage(image, item);
  text.append(name, size, times, how, remove);
  item.append(picture, text);
  return item;
}

// The service does not say it of a single request. It follows from the captured budgets.
function howItRan(image) {
  if (image.isKept) return "from the cache";
  const { enabled, token_budgets: budgets } = info.encoder_cudagraph;
  const fits = enabled && Math.max(0, ...budgets) >= image.numTokens;
  return fits ? "run by graph replay" : enabled ? "run eagerly: larger than every graph" : "run eagerly: no graphs";
}

function removeImage(image, item) {
  images.splice(images.indexOf(image), 1);
  item.remove();
  image.map.element.remove();
  URL.revokeObjectURL(image.url);
  worker.postMessage({ remove: image.id });
  if (held?.id === image.id) held = null;
  refresh();
  $("status").textContent = `${image.name} was removed`;
}

function refresh() {
  for (const id of ["map-section", "matrix-section", "snippets-section"]) $(id).hidden = !images.length;
  if (!images.length) return;
  drawMatrix($("matrix"), images);
  showSnippet();
  const shown = held ?? { id: images[0].id, token: images[0].map.token };
  compare(shown.id, shown.token);
}

function point(id, token, isHeld) {
  if (isHeld) held = held && held.id === id && held.token === token ? null : { id, token };
  if (isHeld || !held) compare(id, token);
}

// The worker has one comparison at a time; only the newest waits.
function compare(id, token) {
  wanted = { id, token, level: Number($("level").value) };
  if (!isComparing) ask();
}

function ask() {
  isComparing = Boolean(wanted);
  if (wanted) worker.postMessage({ compare: wanted });
  wanted = null;
}

worker.onmessage = ({ data: { asked, found } }) => {
  const opacity = $("opacity").value / 100;
  for (const [id, similarities] of found) {
    const image = images.find((each) => each.id === id);
    image?.map.draw(similarities, opacity, id === asked.id ? asked.token : -1);
  }
  const chosen = images.find((each) => each.id === asked.id);
  if (chosen) {
    const [column, row] = [asked.token % chosen.gridWidth, Math.floor(asked.token / chosen.gridWidth)];
    $("pointed").textContent = `${chosen.name}, column ${column + 1}, row ${row + 1}`;
    $("pointed").dataset.similarity = found.find(([id]) => id === asked.id)[1][asked.token].toFixed(4);
  }
  ask();
};

function showSnippet() {
  $("snippet-tabs").replaceChildren(
    ...LANGUAGES.map((each) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = each;
      button.setAttribute("aria-pressed", each === language);
      button.onclick = () => ((language = each), showSnippet());
      return button;
    }),
  );
  $("snippet").textContent = snippet(language, images.at(-1).name, info, needsKey);
}

$("files").onchange = ({ target }) => {
  takeAll([...target.files]);
  target.value = "";
};
$("copy").onclick = async () => {
  await navigator.clipboard.writeText($("snippet").textContent);
  $("status").textContent = "Copied";
};
for (const id of ["opacity", "level"]) $(id).oninput = () => images.length && refresh();
const drop = $("drop");
document.addEventListener("dragover", (event) => (event.preventDefault(), drop.classList.add("over")));
document.addEventListener("dragleave", () => drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  takeAll([...event.dataTransfer.files]);
});
document.addEventListener("paste", ({ clipboardData }) => clipboardData.files.length && takeAll([...clipboardData.files]));

startPanel($("panel"));
start();
