// The page: takes images, sends each in one request, and shows what comes back.

import { ServiceError, embed, getInfo, getMetrics } from "./api.js";
import { Card } from "./card.js";
import { paint } from "./colours.js";
import { Comparer } from "./comparer.js";
import { KeyForm } from "./key_form.js";
import { drawMatrix } from "./matrix.js";
import { startPanel } from "./panel.js";
import { Pointer } from "./pointer.js";
import { RequestSection } from "./request.js";

const $ = (id) => document.getElementById(id);
const comparer = new Comparer();
const request = new RequestSection();
const keyForm = new KeyForm($("key"), () => (info ? runAll() : start()));
const pointer = new Pointer(comparer, () => cards, () => Number($("level").value));
const cards = [];
let info = null; // of the service, once it is there
let isRunning = false;
let nextId = 0;

async function start() {
  try {
    info = await getInfo();
  } catch (error) {
    $("model").textContent = error.message;
    if (error.status === 401) return keyForm.ask(error.message);
    // It loads its model, or it is not there. It may be soon.
    return void setTimeout(start, 1000 * (error.retryAfterS || 2));
  }
  const devices = [...new Set(info.devices)].join(", ");
  $("model").textContent = `${info.model} · ${info.dtype} on ${devices} · vectors of ${info.hidden_size} numbers`;
  $("demo").hidden = !info.demo;
  $("level").append(new Option("last layer", 0));
  for (let level = 1; level <= info.num_deepstack; level++) $("level").append(new Option(`deepstack ${level - 1}`, level));
  request.setServer(info.model, keyForm.isNeeded, info.num_deepstack > 0);
  await runAll();
}

const onCard = {
  point: (card, token, isSaid) => pointer.point(card, token, isSaid),
  keep: (card, token) => pointer.keep(card, token),
  letGo: () => pointer.letGo(),
  remove(card) {
    cards.splice(cards.indexOf(card), 1);
    card.destroy();
    comparer.remove(card.id);
    pointer.forget(card);
    $("status").textContent = `${card.name} was removed.`;
    refresh();
  },
  retry(card) {
    card.wait();
    runAll();
  },
};

function take(files) {
  for (const file of files) {
    const card = new Card(nextId++, file, onCard);
    cards.push(card);
    $("images").append(card.element);
  }
  refresh();
  runAll();
}

// Runs all waiting images, one after the other.
async function runAll() {
  if (!info || isRunning) return;
  isRunning = true;
  for (let card; !keyForm.isOpen && (card = cards.find((each) => each.state === "waiting")); ) await run(card);
  isRunning = false;
  const failed = cards.filter((card) => card.state === "failed").length;
  if (cards.length) $("status").textContent = `${cards.length - failed} embedded${failed ? `, ${failed} not` : ""}.`;
}

async function run(card) {
  card.run();
  $("status").textContent = `${card.name} is being embedded …`;
  const hasDeepstack = Number($("level").value) > 0;
  try {
    const before = await countRuns();
    const { buffer, stages, isKept } = await embed(card.file, queryOf(hasDeepstack));
    const how = isKept ? "from the cache" : howItRan(before, await countRuns());
    if (!cards.includes(card)) return; // it was removed meanwhile
    const { grid } = await comparer.add(card.id, buffer, info.hidden_size);
    if (!cards.includes(card)) return void comparer.remove(card.id);
    const merge = info.preprocessing.merge_size;
    card.done({ stages, grid: [grid[1] / merge, grid[2] / merge], how, hasDeepstack });
  } catch (error) {
    if (error.status === 401) {
      card.wait();
      return keyForm.ask(error.message);
    }
    card.fail(error instanceof ServiceError ? error.message : `The answer cannot be read: ${error.message}`);
  }
  await refresh();
}

// bfloat16 has all bits that a model of 16 bits has to give. Deepstack columns are many, so they come once they are wanted.
function queryOf(hasDeepstack) {
  const dtype = info.dtype === "float32" ? "float32" : "bfloat16";
  return `pooling=none&format=safetensors&dtype=${dtype}${hasDeepstack ? "&deepstack=true" : ""}`;
}

// Images that ran by replay and eagerly so far, of all requests. An answer does not say how it ran.
async function countRuns() {
  if (!info.encoder_cudagraph.enabled) return {};
  // A proxy may hide the metrics. That is no reason to fail.
  const sums = await getMetrics().catch(() => ({}));
  return { hits: sums.encoder_cudagraph_hits_total, misses: sums.encoder_cudagraph_misses_total };
}

function howItRan(before, after) {
  if (!info.encoder_cudagraph.enabled) return "ran eagerly: this server has no CUDA graphs";
  const [hits, misses] = [after.hits > before.hits, after.misses > before.misses];
  if (hits === misses) return "ran by replay or eagerly: the server's counters do not tell";
  return hits ? "ran by replay of a CUDA graph" : "ran eagerly: no CUDA graph took it";
}

async function refresh() {
  const done = cards.filter((card) => card.grid);
  document.body.classList.toggle("has-images", cards.length > 0);
  $("map-controls").hidden = $("matrix-section").hidden = !done.length;
  request.setCards(done);
  pointer.show();
  if (done.length) drawMatrix($("matrix"), done, await comparer.matrix(done.map((card) => card.id)));
}

$("level").onchange = () => {
  const isDeep = Number($("level").value) > 0;
  for (const card of cards) if (card.state === "done" && isDeep && !card.hasDeepstack) card.wait();
  pointer.show();
  runAll();
};
function showOpacity() {
  document.documentElement.style.setProperty("--opacity", $("opacity").value / 100);
}

$("opacity").oninput = showOpacity;
$("files").onchange = ({ target }) => {
  take([...target.files]);
  target.value = "";
};
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").classList.add("over");
});
document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  take([...event.dataTransfer.files]);
});
document.addEventListener("paste", ({ clipboardData }) => take([...clipboardData.files]));

paint($("scale"), 128, 1, Float32Array.from({ length: 128 }, (_, i) => i), [0, 127]);
showOpacity();
startPanel($("panel"));
start();
