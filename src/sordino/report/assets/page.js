"use strict";
// Read-outs, legends and the choice of colours. The page is complete without any of it.
(() => {
  const names = ["", "light", "dark"];
  const words = { "": "as the system has them", light: "light", dark: "dark" };
  const theme = document.querySelector(".theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
    root.dataset.theme = next;
    theme.textContent = next ? next[0].toUpperCase() + next.slice(1) : "Auto";
    theme.setAttribute("aria-label", `Colours: ${words[next]}`);
  });

  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const row = (name, cells) => {
    const line = document.createElement("tr");
    line.append(...cells.map((cell) => element(name, cell ?? "–")));
    return line;
  };

  const chart = (figure) => {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const canvas = plot.querySelector(".canvas");
    const cursor = plot.querySelector(".cursor");
    const readout = plot.querySelector(".readout");
    const hidden = new Set();
    let current = null;

    const clear = () => {
      current = null;
      readout.hidden = true;
      cursor.setAttribute("visibility", "hidden");
    };
    const near = (values, k) => {
      // Series need not share every x: take the nearest one that would be under the same finger.
      const known = data.at.map((x, i) => [Math.abs(x - data.at[k]), i]).filter(([gap, i]) => gap < 0.015 && values[i] !== null);
      return known.length ? values[known.sort((a, b) => a[0] - b[0])[0][1]] : null;
    };
    const show = (k) => {
      const read = data.names.map((name, s) => [name, hidden.has(s) ? null : near(data.values[s], k)]);
      const lines = read.filter(([, value]) => value !== null).map(([name, value]) => `${name}: ${value}`);
      if (!lines.length) return clear();
      current = k;
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * data.at[k]}%`);
      cursor.setAttribute("visibility", "visible");
      readout.textContent = [`${data.x}: ${data.words[k]}`, ...lines].join("\n");
      readout.hidden = false;
      const box = canvas.getBoundingClientRect();
      const x = box.left - plot.getBoundingClientRect().left + data.at[k] * box.width;
      const right = x + 12 + readout.offsetWidth <= plot.clientWidth;
      readout.style.left = `${Math.max(0, right ? x + 12 : x - 12 - readout.offsetWidth)}px`;
    };

    plot.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width;
      show(data.at.reduce((best, at, k) => (Math.abs(at - x) < Math.abs(data.at[best] - x) ? k : best), 0));
    });
    plot.addEventListener("pointerleave", clear);
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return clear();
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const last = data.at.length - 1;
      show(Math.max(0, Math.min((current ?? (step > 0 ? -1 : last + 1)) + step, last)));
    });
    const numbers = figure.querySelector(".numbers");
    numbers.hidden = false;
    numbers.addEventListener("toggle", () => {
      const table = document.createElement("table");
      table.append(row("th", [data.x, ...data.names]));
      table.append(...data.at.map((_, k) => row("td", [data.words[k], ...data.values.map((values) => values[k])])));
      numbers.querySelector(".scroll").replaceChildren(table);
    });
    for (const button of figure.querySelectorAll("[data-toggles]")) {
      button.addEventListener("click", () => {
        const k = Number(button.dataset.toggles);
        const on = hidden.delete(k) || !hidden.add(k);
        button.setAttribute("aria-pressed", String(on));
        figure.querySelector(`[data-series="${k}"]`).setAttribute("visibility", on ? "visible" : "hidden");
        clear();
      });
    }
  };
  window.drawn = (root) => root.querySelectorAll("figure.chart").forEach(chart);
  window.drawn(document);
})();
