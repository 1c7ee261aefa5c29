// The table of similarities of the images' pooled vectors.

import { dot } from "./tensors.js";
import { colour, isDark } from "./map.js";

export function drawMatrix(table, images) {
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  head.append(document.createElement("td"), ...images.map((image) => heading(image.name, "col")));
  const body = table.createTBody();
  for (const one of images) {
    const row = body.insertRow();
    row.append(heading(one.name, "row"));
    for (const other of images) {
      const value = dot(one.vector, other.vector);
      const cell = row.insertCell();
      cell.textContent = value.toFixed(3);
      const [red, green, blue] = colour(value);
      cell.style.background = `rgb(${red} ${green} ${blue})`;
      cell.style.color = isDark(red, green, blue) ? "#fff" : "#000";
    }
  }
}

function heading(text, scope) {
  const cell = document.createElement("th");
  cell.scope = scope;
  cell.textContent = cell.title = text;
  return cell;
}
