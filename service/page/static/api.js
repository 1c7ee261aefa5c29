// The requests to the service. Knows HTTP and the shape of its errors; knows nothing of the page.

let key = ""; // in memory only

export function setKey(text) {
  key = text;
}

// An answer that is not 2xx, with the service's own words; status 0: there was no answer.
export class ServiceError extends Error {
  constructor(status, message, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

// Addresses are relative to the page, so that it works behind a proxy that strips a prefix.
async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  let response;
  try {
    if (key) headers.set("authorization", `Bearer ${key}`);
  } catch {
    throw new ServiceError(401, "A key has visible ASCII characters only.");
  }
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new ServiceError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const message = await response.json().then((body) => body.error.message, () => `The server answered ${response.status}.`);
  throw new ServiceError(response.status, message, Number(response.headers.get("retry-after")));
}

// Reads a body whose headers have arrived. The connection may still break.
async function read(reading) {
  try {
    return await reading;
  } catch {
    throw new ServiceError(0, "The answer broke off.");
  }
}

export async function getInfo() {
  return read((await ask("info")).json());
}

// The tokens of an image in one request: {buffer: the safetensors file, stages: {name: ms}, isKept}.
export async function embed(file, query) {
  const headers = { "content-type": file.type.startsWith("image/") ? file.type : "application/octet-stream" };
  const response = await ask(`embed?${query}`, { method: "POST", body: file, headers });
  const timing = response.headers.get("server-timing") ?? "";
  const buffer = await read(response.arrayBuffer());
  return { buffer, stages: stagesOf(timing), isKept: timing.includes("cache;desc=hit") };
}

function stagesOf(timing) {
  const found = [...timing.matchAll(/(\w+);dur=([\d.]+)/g)];
  return Object.fromEntries(found.map(([, name, ms]) => [name, Number(ms)]));
}

// The sum of each metric over its labels, by its name without the prefix.
export async function getMetrics() {
  const text = await read((await ask("metrics")).text());
  const sums = {};
  for (const [, name, value] of text.matchAll(/^vision_sidecar_(\w+)(?:\{.*\})? (\S+)$/gm)) {
    sums[name] = (sums[name] ?? 0) + Number(value);
  }
  return sums;
}
