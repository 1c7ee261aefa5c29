// The page's side of the worker: each call returns a promise of the worker's result.

export class Comparer {
  #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  #waiting = new Map(); // number → {resolve, reject}
  #number = 0;
  #wanted = null; // the newest comparison, while the worker is busy with another one
  #isComparing = false;

  constructor() {
    this.#worker.onmessage = ({ data: { number, result, error } }) => {
      const { resolve, reject } = this.#waiting.get(number);
      this.#waiting.delete(number);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
  }

  #call(name, values, transferred = []) {
    const number = this.#number++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(number, { resolve, reject });
      this.#worker.postMessage({ number, name, values }, transferred);
    });
  }

  add(id, buffer, hiddenSize) {
    return this.#call("add", { id, buffer, hiddenSize }, [buffer]);
  }

  remove(id) {
    return this.#call("remove", { id });
  }

  matrix(ids) {
    return this.#call("matrix", { ids });
  }

  // Calls `show(result)` with the newest comparison. Those that a newer one overtakes are never made.
  async compare(values, show) {
    this.#wanted = { values, show };
    if (this.#isComparing) return;
    this.#isComparing = true;
    while (this.#wanted) {
      const wanted = this.#wanted;
      this.#wanted = null;
      wanted.show(await this.#call("compare", wanted.values));
    }
    this.#isComparing = false;
  }
}
