// The request of an image as code. Takes the service's address from the page's own.

export const LANGUAGES = ["curl", "Python", "OpenAI client"];
export const ANSWERS = { vector: "one vector", tokens: "all tokens", deepstack: "tokens with deepstack" };
export const FORMATS = ["json", "safetensors", "npy"];

// What `one` asks for: {language, name, type, answer, format, model, needsKey}.
export function snippet(one) {
  const base = new URL(".", location.href).href;
  if (one.language === "curl") return curl(one, base);
  return one.language === "Python" ? python(one, base) : openai(one, base);
}

function query({ answer, format }) {
  const options = [];
  if (answer !== "vector") options.push(["pooling", "none"]);
  if (answer === "deepstack") options.push(["deepstack", "true"]);
  if (format !== "json") options.push(["format", format]);
  return options;
}

function curl(one, base) {
  const options = query(one).map((pair) => pair.join("=")).join("&");
  const lines = [`curl --data-binary @${shell(one.name)}`, `-H ${shell(`Content-Type: ${one.type}`)}`];
  if (one.needsKey) lines.push('-H "Authorization: Bearer $API_KEY"');
  if (one.format !== "json") lines.push(`-o embeddings.${one.format}`);
  lines.push(shell(`${base}embed${options && `?${options}`}`));
  return lines.join(" \\\n    ");
}

const READERS = {
  json: ["", 'answer.json()["data"][0]["embedding"]'],
  safetensors: ["from safetensors.numpy import load\n", 'load(answer.content)["embeddings"]'],
  npy: ["import numpy as np\n", "np.load(BytesIO(answer.content))"],
};

function python(one, base) {
  const [importing, embedding] = READERS[one.format];
  const params = query(one).map(([name, value]) => `"${name}": "${value}"`).join(", ");
  const key = one.needsKey ? ', "Authorization": f"Bearer {os.environ[\'API_KEY\']}"' : "";
  return `${one.needsKey ? "import os\n" : ""}${one.format === "npy" ? "from io import BytesIO\n" : ""}from pathlib import Path

import httpx
${importing}
answer = httpx.post(
    ${quoted(`${base}embed`)},
    params={${params}},
    content=Path(${quoted(one.name)}).read_bytes(),
    headers={"Content-Type": ${quoted(one.type)}${key}},
    timeout=60,
)
answer.raise_for_status()
print(${embedding})`;
}

function openai(one, base) {
  const note = one.answer === "vector" && one.format === "json" ? "" : "# OpenAI's API has one vector for each image, and no other format.\n";
  return `${note}import base64
${one.needsKey ? "import os\n" : ""}from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url=${quoted(`${base}v1`)}, api_key=${one.needsKey ? 'os.environ["API_KEY"]' : '"none"'})
image = base64.b64encode(Path(${quoted(one.name)}).read_bytes()).decode()
answer = client.embeddings.create(model=${quoted(one.model)}, input=[image])
print(answer.data[0].embedding)`;
}

const quoted = (text) => JSON.stringify(text);
const shell = (text) => (/^[\w./:-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
