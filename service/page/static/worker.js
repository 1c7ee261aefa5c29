// Holds the tokens of all images and compares them, off the page's own thread. `Comparer` calls it.

import { dot, parseSafetensors, pooled, rangeOf, unitRows } from "./tensors.js";

const images = new Map(); // id → {rows, numTokens, width, vector, units: Float32Array by level}
let hidden = 0; // columns of a level

const calls = {
  // Takes the answer of the service. Returns {grid: [t, h, w] in patches, numTokens}.
  add({ id, buffer, hiddenSize }) {
    hidden = hiddenSize;
    const { embeddings, grid_thw: grid } = parseSafetensors(buffer);
    const [numTokens, width] = embeddings.shape;
    const image = { rows: embeddings.data, numTokens, width, units: [] };
    images.set(id, { ...image, vector: pooled(image, hidden) });
    return { grid: grid.data, numTokens };
  },

  remove({ id }) {
    images.delete(id);
  },

  // The cosine similarity of each image's vector with each other's, in the order of `ids`.
  matrix({ ids }) {
    const vectors = ids.map((id) => images.get(id).vector);
    return vectors.map((one) => vectors.map((other) => dot(one, 0, other)));
  },

  // The cosine similarity of each token of each image to one token, and the range to show. Null if a level is not here.
  compare({ id, token, level }) {
    const chosen = images.get(id);
    if (!chosen || !hasLevel(chosen, level)) return null;
    const target = unitsOf(chosen, level).subarray(token * hidden, (token + 1) * hidden);
    const found = new Map();
    for (const [other, image] of images) {
      if (hasLevel(image, level)) found.set(other, similarities(image, level, target));
    }
    return { found, range: rangeOf([...found.values()]) };
  },
};

function hasLevel(image, level) {
  return (level + 1) * hidden <= image.width;
}

function unitsOf(image, level) {
  image.units[level] ??= unitRows(image, hidden, level);
  return image.units[level];
}

function similarities(image, level, target) {
  const units = unitsOf(image, level);
  const found = new Float32Array(image.numTokens);
  for (let token = 0; token < found.length; token++) found[token] = dot(units, token * hidden, target);
  return found;
}

onmessage = ({ data: { number, name, values } }) => {
  try {
    postMessage({ number, result: calls[name](values) });
  } catch (error) {
    postMessage({ number, error: error.message });
  }
};
