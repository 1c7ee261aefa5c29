// A few figures of the server, read from its metrics every two seconds while the page is seen.

import { getMetrics } from "./api.js";

const PERIOD_MS = 2000;

export function startPanel(list) {
  let before = null;
  const look = async () => {
    if (!document.hidden) {
      try {
        const now = { at: performance.now(), ...(await getMetrics()) };
        show(list, figures(before ?? now, now));
        before = now;
      } catch {
        show(list, { state: "cannot be reached" });
        before = null;
      }
    }
    setTimeout(look, PERIOD_MS);
  };
  look();
}

function figures(before, now) {
  const seconds = (now.at - before.at) / 1000;
  const grown = (name) => (now[name] ?? 0) - (before[name] ?? 0);
  const tokens = grown("image_tokens_total");
  const padding = grown("encoder_padding_tokens_total");
  return {
    "images a second": seconds ? (grown("images_total") / seconds).toFixed(1) : "0.0",
    "images that wait": now.queue_images ?? 0,
    "tokens that wait": `${now.queue_tokens ?? 0} of ${now.queue_limit_tokens ?? 0}`,
    "padding": tokens + padding ? `${((100 * padding) / (tokens + padding)).toFixed(1)} %` : "–",
    "run by replay": now.encoder_cudagraph_hits_total ?? 0,
    "run eagerly": now.encoder_cudagraph_misses_total ?? 0,
    "from a cache": now.cache_hits_total ?? 0,
  };
}

function show(list, entries) {
  list.replaceChildren(
    ...Object.entries(entries).map(([name, value]) => {
      const group = document.createElement("div");
      const term = document.createElement("dt");
      const text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      group.append(term, text);
      return group;
    }),
  );
}
