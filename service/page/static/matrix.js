// The table of similarities of the images' pooled vectors.

import { colour, inkOn } from "./colours.js";

// `cards` have a name and a picture; `values` is [images, images].
export function drawMatrix(table, cards, values) {
  const others = values.flatMap((row, i) => row.filter((_, j) => j !== i));
  const range = [Math.min(...others, 0.99), 1];
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  head.append(document.createElement("td"), ...cards.map((card) => heading(card, "col")));
  const body = table.createTBody();
  for (const [i, card] of cards.entries()) {
    const row = body.insertRow();
    row.append(heading(card, "row"));
    for (const value of values[i]) {
      const cell = row.insertCell();
      const background = colour(value, range);
      cell.textContent = value.toFixed(3);
      cell.style.background = `rgb(${background.join(" ")})`;
      cell.style.color = inkOn(background);
    }
  }
}

function heading(card, scope) {
  const cell = document.createElement("th");
  const name = document.createElement("span");
  cell.scope = scope;
  name.textContent = cell.title = card.name;
  if (card.canBeShown) {
    const picture = document.createElement("img");
    picture.src = card.url;
    picture.alt = "";
    cell.append(picture);
  }
  cell.append(name);
  return cell;
}
