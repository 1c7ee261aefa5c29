// Holds the tokens of all images, and compares one token with all others, off the page's own thread.

import { unitRows } from "./tensors.js";

const images = new Map(); // id → {rows, numTokens, units by level}
let width = 0;
let hidden = 0;

function unitsOf(image, level) {
  image.units[level] ??= unitRows(image.rows, image.numTokens, width, hidden, level);
  return image.units[level];
}

function compare({ id, token, level }) {
  const chosen = images.get(id);
  if (!chosen) return [];
  const target = unitsOf(chosen, level).subarray(token * hidden, (token + 1) * hidden);
  return [...images].map(([other, image]) => {
    const units = unitsOf(image, level);
    const similarities = new Float32Array(image.numTokens);
    for (let row = 0; row < image.numTokens; row++) {
      let sum = 0;
      const from = row * hidden;
      for (let i = 0; i < hidden; i++) sum += units[from + i] * target[i];
      similarities[row] = sum;
    }
    return [other, similarities];
  });
}

onmessage = ({ data }) => {
  if (data.sizes) [width, hidden] = data.sizes;
  if (data.add) images.set(data.add.id, { ...data.add, units: [] });
  if (data.remove !== undefined) images.delete(data.remove);
  if (data.compare) postMessage({ asked: data.compare, found: compare(data.compare) });
};
