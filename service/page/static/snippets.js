// The request of an image as code. Knows the service's address from the page's own.

import { embedQuery } from "./api.js";

export const LANGUAGES = ["curl", "Python", "OpenAI client"];

const quoted = (text) => JSON.stringify(text);
const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function snippet(language, name, info, needsKey) {
  const base = new URL(".", location.href).href;
  if (language === "curl") {
    const key = needsKey ? " -H \"Authorization: Bearer $API_KEY\"" : "";
    return `curl${key} -H 'Content-Type: application/octet-stream' --data-binary @${shell(name)} \\
    -o tokens.safetensors ${shell(`${base}embed?${embedQuery(info)}`)}`;
  }
  if (language === "Python") {
    const key = needsKey ? ', headers={"Authorization": f"Bearer {api_key}"}' : "";
    return `import httpx
from safetensors.torch import load

with open(${quoted(name)}, "rb") as file:
    answer = httpx.post(${quoted(`${base}embed?${embedQuery(info)}`)}, content=file.read()${key}, timeout=60)
answer.raise_for_status()
print(load(answer.content)["embeddings"].shape)  # ${info.width} columns, ${info.hidden_size} of the main level`;
  }
  return `import base64
from openai import OpenAI

client = OpenAI(base_url=${quoted(`${base}v1`)}, api_key=${needsKey ? "api_key" : '"none"'})
with open(${quoted(name)}, "rb") as file:
    image = base64.b64encode(file.read()).decode()
answer = client.embeddings.create(model=${quoted(info.model)}, input=[image])
print(len(answer.data[0].embedding))  # the pooled vector`;
}
