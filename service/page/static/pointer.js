// The place that is compared with all others: the one under the pointer, else the one that is kept.

const $ = (id) => document.getElementById(id);

export class Pointer {
  #comparer;
  #cards;
  #level;
  #pointed = null; // {card, token}
  #kept = null;

  // `cards` and `level` return those of the moment.
  constructor(comparer, cards, level) {
    this.#comparer = comparer;
    this.#cards = cards;
    this.#level = level;
  }

  // Token -1: the pointer left. `isSaid`: a screen reader says the result.
  point(card, token, isSaid = false) {
    const pointed = token < 0 ? null : { card, token };
    if (pointed && this.#pointed?.card === card && this.#pointed.token === token) return;
    this.#pointed = pointed;
    this.show(isSaid);
  }

  keep(card, token) {
    const isKept = this.#kept?.card === card && this.#kept.token === token;
    this.#kept = isKept ? null : { card, token };
    this.show(true);
  }

  letGo() {
    this.#pointed = this.#kept = null;
    this.show(true);
  }

  forget(card) {
    if (this.#pointed?.card === card) this.#pointed = null;
    if (this.#kept?.card === card) this.#kept = null;
  }

  show(isSaid = false) {
    const place = this.#pointed ?? this.#kept;
    if (!place) return this.#draw(null, null, isSaid);
    const values = { id: place.card.id, token: place.token, level: this.#level() };
    this.#comparer.compare(values, (result) => {
      const isNow = (this.#pointed ?? this.#kept) !== null && this.#cards().includes(place.card);
      this.#draw(isNow ? result : null, place, isSaid);
    });
  }

  #draw(result, place, isSaid) {
    const best = [];
    for (const card of this.#cards()) {
      const similarities = result?.found.get(card.id);
      card.draw(similarities, result?.range);
      if (!similarities) continue;
      const token = indexOfMax(similarities, card === place.card ? place.token : -1);
      card.map.mark(0, card === place.card ? place.token : -1);
      card.map.mark(1, token);
      if (token >= 0) best.push(`${card.map.place(token)}: ${similarities[token].toFixed(3)}`);
    }
    $("low").textContent = result ? result.range[0].toFixed(2) : "";
    $("high").textContent = result ? result.range[1].toFixed(2) : "";
    $("pointed").textContent = result ? `${place.card.map.place(place.token)}. Most alike: ${best.join("; ") || "nothing"}.` : "";
    $("pointed").dataset.self = result ? result.found.get(place.card.id)[place.token].toFixed(4) : "";
    if (isSaid) $("said").textContent = result ? $("pointed").textContent : "No place is kept.";
  }
}

// The index of the largest value, but not `except`; -1 if there is no other.
function indexOfMax(values, except) {
  let best = -1;
  for (let i = 0; i < values.length; i++) if (i !== except && (best < 0 || values[i] > values[best])) best = i;
  return best;
}
