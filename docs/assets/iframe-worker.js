// Search from file://: browsers refuse to start a Worker from a file, so that its script runs in a hidden frame instead.
// Pages that are served from an address keep the browser's own Worker.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.ready = false;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, location.href).href;
          script.addEventListener("load", resolve);
          script.addEventListener("error", reject);
          inside.document.documentElement.append(script);
        });
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      this.inside = inside;
      load(url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.deliver(data));
      });
    }

    deliver(data) {
      const event = new this.inside.MessageEvent("message", { data });
      if (this.inside.onmessage) this.inside.onmessage(event);
      this.inside.dispatchEvent(event);
    }

    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
