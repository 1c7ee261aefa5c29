// The colours of similarities: viridis, which grows in lightness and which colour-blind people can read.

const STOPS = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [110, 206, 88],
  [181, 222, 43], [253, 231, 37],
];

// [red, green, blue] of a value in the range [low, high]; values outside have the colour of the end.
export function colour(value, [low, high]) {
  const share = Math.min(Math.max((value - low) / (high - low), 0), 1);
  const at = share * (STOPS.length - 1);
  const index = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[index].map((part, i) => Math.round(part + (STOPS[index + 1][i] - part) * (at - index)));
}

// Black or white, whichever is read more easily on the colour.
export function inkOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140 ? "#fff" : "#000";
}

// One pixel for each value, row by row.
export function paint(canvas, width, height, values, range) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) pixels.data.set([...colour(values[i], range), 255], i * 4);
  context.putImageData(pixels, 0, 0);
}
