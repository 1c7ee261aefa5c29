// The section with the request of an image as code: its choices and its copy button.

import { ANSWERS, FORMATS, LANGUAGES, snippet } from "./snippets.js";

const $ = (id) => document.getElementById(id);

export class RequestSection {
  #cards = [];
  #language = LANGUAGES[0];
  #model = "";
  #needsKey = false;

  constructor() {
    $("request-answer").append(...Object.entries(ANSWERS).map(([value, text]) => new Option(text, value)));
    $("request-format").append(...FORMATS.map((format) => new Option(format)));
    for (const id of ["request-image", "request-answer", "request-format"]) $(id).onchange = () => this.#show();
    $("languages").append(...LANGUAGES.map((language) => this.#button(language)));
    $("copy").onclick = () => copy($("snippet"), $("copied"));
  }

  setServer(model, needsKey, hasDeepstack) {
    this.#model = model;
    this.#needsKey = needsKey;
    $("request-answer").querySelector("[value=deepstack]").disabled = !hasDeepstack;
  }

  // Keeps the choice if its image is still there, and else chooses the newest.
  setCards(cards) {
    const chosen = $("request-image").value;
    this.#cards = cards;
    $("request-image").replaceChildren(...cards.map((card) => new Option(card.name, card.id)));
    const kept = cards.find((card) => String(card.id) === chosen) ?? cards.at(-1);
    $("request-section").hidden = !kept;
    if (!kept) return;
    $("request-image").value = kept.id;
    this.#show();
  }

  #button(language) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = language;
    button.onclick = () => {
      this.#language = language;
      this.#show();
    };
    return button;
  }

  #show() {
    for (const button of $("languages").children) button.setAttribute("aria-pressed", button.textContent === this.#language);
    const { name, file } = this.#cards.find((card) => String(card.id) === $("request-image").value);
    $("copied").textContent = "";
    $("snippet").textContent = snippet({
      name,
      type: file.type.startsWith("image/") ? file.type : "application/octet-stream",
      language: this.#language,
      answer: $("request-answer").value,
      format: $("request-format").value,
      model: this.#model,
      needsKey: this.#needsKey,
    });
  }
}

// Pages of plain HTTP have no clipboard, except those of this machine. There the text is selected.
async function copy(element, said) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    said.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(element);
    said.textContent = "Selected: copy it with the keyboard or the menu.";
  }
}
