// Search from the disk. Browsers refuse a Worker to pages that they read from file:, so there a hidden frame runs the
// worker's script: it has a page's timing, which an index of this size can do with. The site's search asks for a class
// of this name, and for importScripts that is a promise.
window.IFrameWorker = class extends EventTarget {
  #frame = document.createElement("iframe");
  #ready;

  constructor(url) {
    super();
    this.#frame.hidden = true;
    document.body.append(this.#frame);
    const inside = this.#frame.contentWindow;
    inside.postMessage = (data) => this.#tell("message", new MessageEvent("message", { data: structuredClone(data) }));
    inside.importScripts = async (...urls) => {
      for (const each of urls) await this.#load(each);
    };
    inside.onerror = (message, filename, lineno, colno, error) =>
      this.#tell("error", new ErrorEvent("error", { message, filename, lineno, colno, error }));
    this.#ready = this.#load(url);
  }

  // Gives the worker's script a message, once it is there.
  postMessage(data) {
    const event = new MessageEvent("message", { data: structuredClone(data) });
    this.#ready.then(() => this.#frame.contentWindow.dispatchEvent(event));
  }

  terminate() {
    this.#frame.remove();
  }

  #tell(kind, event) {
    this.dispatchEvent(event);
    this["on" + kind]?.(event);
  }

  #load(url) {
    return new Promise((done, failed) => {
      const script = this.#frame.contentDocument.createElement("script");
      script.src = new URL(url, document.baseURI);
      script.onload = done;
      script.onerror = () => failed(new Error(`${url} cannot be read`));
      this.#frame.contentDocument.body.append(script);
    });
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
