// Asks for an API key when the service wants one. The key is kept by `api.js`, in memory only.

import { setKey } from "./api.js";

export class KeyForm {
  isNeeded = false; // whether the service has ever asked
  #form;

  // `onKey` is called once there is a new key.
  constructor(form, onKey) {
    this.#form = form;
    form.onsubmit = (event) => {
      event.preventDefault();
      const { value } = form.querySelector("input");
      form.hidden = true;
      setKey(value.trim());
      onKey();
    };
  }

  get isOpen() {
    return !this.#form.hidden;
  }

  // `message`: why, in the service's words.
  ask(message) {
    this.isNeeded = true;
    this.#form.hidden = false;
    this.#form.querySelector("[role=alert]").textContent = message;
    const input = this.#form.querySelector("input");
    input.value = "";
    input.focus();
  }
}
