// Reads safetensors, and computes with rows of tokens. Knows numbers only.

export function parseSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [begin, end] = entry.data_offsets;
    const bytes = buffer.slice(8 + length + begin, 8 + length + end);
    tensors[name] = { shape: entry.shape, data: numbers(bytes, entry.dtype) };
  }
  return tensors;
}

function numbers(bytes, dtype) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "I64") return Array.from(new BigInt64Array(bytes), Number);
  if (dtype === "BF16") {
    // The upper half of a float32.
    const halves = new Uint16Array(bytes);
    const bits = new Uint32Array(halves.length);
    for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
    return new Float32Array(bits.buffer);
  }
  throw new Error(`the type ${dtype} is not read`);
}

// The columns of one level of all tokens, each token divided by its length: Float32Array [numTokens, hidden].
export function unitRows(rows, numTokens, width, hidden, level) {
  const found = new Float32Array(numTokens * hidden);
  for (let token = 0; token < numTokens; token++) {
    const from = token * width + level * hidden;
    let square = 0;
    for (let i = 0; i < hidden; i++) square += rows[from + i] ** 2;
    const scale = square ? 1 / Math.sqrt(square) : 0;
    for (let i = 0; i < hidden; i++) found[token * hidden + i] = rows[from + i] * scale;
  }
  return found;
}

// The mean of all tokens of the main level, divided by its length, as the service pools.
export function pooled(rows, numTokens, width, hidden) {
  const mean = new Float32Array(hidden);
  for (let token = 0; token < numTokens; token++) {
    for (let i = 0; i < hidden; i++) mean[i] += rows[token * width + i];
  }
  const length = Math.hypot(...mean) || 1;
  return mean.map((value) => value / length);
}

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}
