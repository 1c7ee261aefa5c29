// Holds the tokens of all images and compares them, off the page's own thread. `Comparer` calls it.

import { dot, parseSafetensors, pooled, rangeOf, unitRows } from "./tensors.js";

const images = new Map(); // id → {numTokens, vector: [hidden], levels: [numTokens, hidden] each, of unit rows}
let hidden = 0; // columns of a level

const calls = {
  // Takes the answer of the service. Returns {grid: [t, h, w] in patches, numTokens}.
  add({ id, buffer, hiddenSize }) {
    hidden = hiddenSize;
    const { embeddings, grid_thw: grid } = parseSafetensors(buffer);
    const [numTokens, width] = embeddings.shape;
    const tokens = { rows: embeddings.data, numTokens, width };
    const levels = Array.from({ length: width / hidden }, (_, level) => unitRows(tokens, hidden, level));
    images.set(id, { numTokens, vector: pooled(tokens, hidden), levels });
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
    const rows = images.get(id)?.levels[level];
    if (!rows) return null;
    const target = rows.subarray(token * hidden, (token + 1) * hidden);
    const found = new Map();
    for (const [other, { levels, numTokens }] of images) {
      if (levels[level]) found.set(other, similarities(levels[level], numTokens, target));
    }
    return { found, range: rangeOf([...found.values()]) };
  },
};

function similarities(rows, numTokens, target) {
  const found = new Float32Array(numTokens);
  for (let token = 0; token < numTokens; token++) found[token] = dot(rows, token * hidden, target);
  return found;
}

onmessage = ({ data: { number, name, values } }) => {
  try {
    postMessage({ number, result: calls[name](values) });
  } catch (error) {
    postMessage({ number, error: error.message });
  }
};
