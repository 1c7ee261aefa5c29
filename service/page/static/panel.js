// A few figures of the server, read from its metrics every two seconds while the page is seen.

import { getMetrics } from "./api.js";

const PERIOD_MS = 2000;
const MAX_SAMPLES = 31; // a minute

export async function startPanel(list) {
  const samples = [];
  for (;;) {
    if (!document.hidden) {
      try {
        samples.push({ at: performance.now() / 1000, ...(await getMetrics()) });
        if (samples.length > MAX_SAMPLES) samples.shift();
        show(list, figures(samples), rates(samples));
      } catch (error) {
        samples.length = 0;
        show(list, { server: [error.message, ""] }, []);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

function rates(samples) {
  return samples.slice(1).map((now, i) => (now.images_total - samples[i].images_total) / (now.at - samples[i].at));
}

// Name → [figure, explanation]. Counters are since the server's start.
function figures(samples) {
  const now = samples.at(-1);
  const computed = now.image_tokens_total + now.encoder_padding_tokens_total;
  const padding = now.encoder_cudagraph_hits_total ? `${((100 * now.encoder_padding_tokens_total) / computed).toFixed(1)} %` : "–";
  return {
    "images a second": [(rates(samples).at(-1) ?? 0).toFixed(1), `${number(now.images_total)} in all`],
    "queue": [`${number(now.queue_images)} images`, `${number(now.queue_tokens)} of ${number(now.queue_limit_tokens)} tokens`],
    "padding": [padding, "of the tokens computed"],
    "graph hits and misses": [
      `${number(now.encoder_cudagraph_hits_total)} / ${number(now.encoder_cudagraph_misses_total)}`, "images by replay / eagerly"],
    "cache hits and misses": [`${number(now.cache_hits_total)} / ${number(now.cache_misses_total)}`, "images found / encoded"],
  };
}

function number(value) {
  return value.toLocaleString("en");
}

function show(list, entries, line) {
  list.replaceChildren(
    ...Object.entries(entries).map(([name, [figure, text]], i) => {
      const group = document.createElement("div");
      group.append(element("dt", name), element("dd", figure), element("dd", text));
      if (i === 0 && line.length > 1) group.append(sparkline(line));
      return group;
    }),
  );
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function sparkline(values) {
  const high = Math.max(...values, 1);
  const points = values.map((value, i) => `${(100 * i) / (values.length - 1)},${20 - (19 * value) / high}`);
  const [svg, line] = ["svg", "polyline"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  svg.setAttribute("viewBox", "0 0 100 21");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}
