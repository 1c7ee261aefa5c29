// The requests to the service. Knows HTTP and the shape of its errors; knows nothing of the page.

import { parseSafetensors } from "./tensors.js";

let key = "";

export function setKey(text) {
  key = text;
}

export class ServiceError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(path, options = {}) {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...options.headers };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch {
    throw new ServiceError(0, "The server cannot be reached.", "");
  }
  if (!response.ok) {
    const { message, code } = await response.json().then((body) => body.error, () => ({}));
    throw new ServiceError(response.status, message ?? `The server answered ${response.status}.`, code ?? "");
  }
  return response;
}

export async function getInfo() {
  return (await ask("info")).json();
}

// The tokens of an image: {rows: Float32Array, numTokens, width, height, gridWidth, gridHeight, stages, isKept}.
export async function embed(file, info) {
  const response = await ask(`embed?${embedQuery(info)}`, {
    method: "POST",
    body: file,
    headers: { "content-type": "application/octet-stream" },
  });
  const tensors = parseSafetensors(await response.arrayBuffer());
  const merge = info.preprocessing.merge_size;
  const [, height, width] = tensors.grid_thw.data;
  const timing = response.headers.get("server-timing") ?? "";
  return {
    rows: tensors.embeddings.data,
    numTokens: tensors.embeddings.shape[0],
    gridWidth: width / merge,
    gridHeight: height / merge,
    stages: stagesOf(timing),
    isKept: timing.includes("cache;desc=hit"),
  };
}

// bfloat16 has all bits that a model of 16 bits has to give.
export function embedQuery(info) {
  const dtype = info.dtype === "float32" ? "float32" : "bfloat16";
  return `pooling=none&deepstack=true&dtype=${dtype}&format=safetensors`;
}

function stagesOf(timing) {
  const stages = {};
  for (const [, name, milliseconds] of timing.matchAll(/(\w+);dur=([\d.]+)/g)) {
    stages[name] = Number(milliseconds);
  }
  return stages;
}

// The sum of each metric over its labels, by name without the prefix.
export async function getMetrics() {
  const text = await (await ask("metrics")).text();
  const sums = {};
  for (const [, name, value] of text.matchAll(/^vision_sidecar_(\w+)(?:\{[^}]*\})? (\S+)$/gm)) {
    sums[name] = (sums[name] ?? 0) + Number(value);
  }
  return sums;
}
