// Reads safetensors, and computes with rows of tokens. Knows numbers only.

// {name: {shape, data}}: a Float32Array, or an array of numbers for integers.
export function parseSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  delete header.__metadata__;
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    tensors[name] = { shape, data: numbers(buffer.slice(8 + length + begin, 8 + length + end), dtype) };
  }
  return tensors;
}

function numbers(bytes, dtype) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "I64") return Array.from(new BigInt64Array(bytes), Number);
  if (dtype !== "BF16") throw new Error(`numbers of type ${dtype} cannot be read`);
  const halves = new Uint16Array(bytes); // each is the upper half of a float32
  const bits = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}

// The columns of one level, each row divided by its length: [numTokens, hidden].
export function unitRows({ rows, numTokens, width }, hidden, level) {
  const found = new Float32Array(numTokens * hidden);
  for (let token = 0; token < numTokens; token++) {
    const from = token * width + level * hidden;
    found.set(unit(rows.subarray(from, from + hidden)), token * hidden);
  }
  return found;
}

// The mean of all tokens of the main level, divided by its length, as the service pools: [hidden].
export function pooled({ rows, numTokens, width }, hidden) {
  const sum = new Float32Array(hidden);
  for (let from = 0; from < numTokens * width; from += width) {
    for (let i = 0; i < hidden; i++) sum[i] += rows[from + i];
  }
  return unit(sum);
}

function unit(vector) {
  const length = Math.sqrt(dot(vector, 0, vector)) || 1;
  return vector.map((value) => value / length);
}

// The dot product of `vector` and as many numbers of `rows`, from `start` on.
export function dot(rows, start, vector) {
  let sum = 0;
  for (let i = 0; i < vector.length; i++) sum += rows[start + i] * vector[i];
  return sum;
}

// The range that colours show: without the few most extreme values, which would take the contrast from the rest.
export function rangeOf(arrays) {
  const sorted = new Float32Array(arrays.reduce((sum, array) => sum + array.length, 0));
  let end = 0;
  for (const array of arrays) sorted.set(array, (end += array.length) - array.length);
  sorted.sort();
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [at(0.02), at(0.99)];
  return high - low < 0.01 ? [high - 0.01, high] : [low, high];
}
