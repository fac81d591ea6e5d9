// The explorer: noise for a budget, by closed-form bounds, in the reader's browser and without a network.
//
// Rényi divergence of a Poisson-sampled Gaussian at whole orders a (Mironov, Talwar & Zhang 2019, Sec. 3.3):
//     (a - 1) * D_a = ln sum_k binom(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 s^2))
// T steps add up, and epsilon = T D_a + ln((a - 1) / a) - (ln delta + ln a) / (a - 1) at the best order
// (Canonne, Kamath & Steinke 2020, Prop. 12). An upper bound: Sordino's own accountant, PLD, needs a little less noise.
// tests/test_explorer.py holds every function here against Python.
"use strict";

const sordinoExplorer = (() => {
  const ORDERS = [];
  for (let a = 2; a <= 64; a += 1) ORDERS.push(a);
  for (let a = 72; a <= 512; a += 8) ORDERS.push(a);

  const logFactorials = [0];
  for (let n = 1; n <= 512; n += 1) logFactorials.push(logFactorials[n - 1] + Math.log(n));
  const logBinomial = (n, k) => logFactorials[n] - logFactorials[k] - logFactorials[n - k];

  const logSum = (values) => {
    const most = Math.max(...values);
    if (!Number.isFinite(most)) return most;
    return most + Math.log(values.reduce((sum, value) => sum + Math.exp(value - most), 0));
  };

  // D_a of one step: every record joins with probability q, noise is s times the clipping bound.
  const divergence = (q, s, a) => {
    if (q === 0) return 0;
    if (q === 1) return a / (2 * s * s);
    const terms = [];
    for (let k = 0; k <= a; k += 1) {
      terms.push(logBinomial(a, k) + (a - k) * Math.log1p(-q) + k * Math.log(q) + (k * (k - 1)) / (2 * s * s));
    }
    return Math.max(0, logSum(terms)) / (a - 1);
  };

  const epsilon = (q, s, steps, delta) => {
    let best = Infinity;
    for (const a of ORDERS) {
      const found = steps * divergence(q, s, a) + Math.log((a - 1) / a) - (Math.log(delta) + Math.log(a)) / (a - 1);
      if (found < best) best = found;
    }
    return Math.max(0, best);
  };

  // The least noise, to one part in a million and never below it, whose price is at most `budget`.
  const noise = (budget, delta, q, steps) => {
    let low = 1e-2;
    let high = 1;
    while (epsilon(q, high, steps, delta) > budget) {
      low = high;
      high *= 2;
      if (high > 1e7) return Infinity;
    }
    while (high / low > 1 + 1e-6) {
      const middle = Math.sqrt(low * high);
      if (epsilon(q, middle, steps, delta) > budget) low = middle;
      else high = middle;
    }
    return high;
  };

  // A power of ten, at most a tenth of one over the records: what `sordino train` takes.
  const chooseDelta = (records) => Math.min(1e-5, 10 ** Math.floor(Math.log10(0.1 / records) + 1e-9));

  // Everything that the page shows. `length` is the expected length of the noise in the mean gradient, for C = 1.
  const plan = ({ budget, records, batch, epochs, parameters }) => {
    const size = Math.min(batch, records);
    const q = size / records;
    const steps = Math.max(1, Math.round(epochs / q));
    const delta = chooseDelta(records);
    const sigma = noise(budget, delta, q, steps);
    return { q, steps, delta, sigma, perRecord: sigma / size, length: (sigma / size) * Math.sqrt(parameters) };
  };

  return { ORDERS, divergence, epsilon, noise, chooseDelta, plan };
})();

if (typeof module !== "undefined") module.exports = sordinoExplorer;

// -- the page ---------------------------------------------------------------------------------------------------------
if (typeof document !== "undefined") {
  const start = () => {
    const root = document.querySelector("#explorer");
    if (!root || root.dataset.ready) return;
    root.dataset.ready = "yes";
    const field = (name) => root.querySelector(`[name=${name}]`);
    const show = (name, text) => {
      root.querySelector(`[data-show=${name}]`).textContent = text;
    };
    const whole = (value) => Math.round(value).toLocaleString("en");
    const digits = (value) => (Number.isFinite(value) ? value.toPrecision(3) : "none is enough");
    const read = () => ({
      budget: 10 ** Number(field("budget").value),
      records: Math.round(10 ** Number(field("records").value)),
      batch: Math.round(2 ** Number(field("batch").value)),
      epochs: Number(field("epochs").value),
      parameters: Math.round(10 ** Number(field("parameters").value)),
    });

    const draw = (asked) => {
      const sizes = [];
      for (let power = 4; power <= 16; power += 1) if (2 ** power <= asked.records) sizes.push(2 ** power);
      const points = sizes.map((batch) => [batch, sordinoExplorer.plan({ ...asked, batch }).perRecord]);
      const [width, height, left, bottom] = [560, 220, 62, 34];
      const logs = points.map(([x, y]) => [Math.log2(x), Math.log10(y)]);
      const lows = Math.min(...logs.map((p) => p[1]));
      const highs = Math.max(...logs.map((p) => p[1]), lows + 0.1);
      const at = (x, y) => [
        left + ((x - 4) / 12) * (width - left - 16),
        12 + ((highs - y) / (highs - lows)) * (height - bottom - 24),
      ];
      const path = logs.map((p, i) => `${i ? "L" : "M"}${at(...p).map((v) => v.toFixed(1)).join(" ")}`).join("");
      const here = at(Math.log2(Math.min(asked.batch, asked.records)), Math.log10(sordinoExplorer.plan(asked).perRecord));
      const ticks = [4, 8, 12, 16]
        .map((power) => {
          const anchor = power === 16 ? "end" : "middle"; // the last number would stick out at the right
          const x = at(power, lows)[0] + (power === 16 ? 14 : 0);
          return `<text x="${x}" y="${height - 12}" text-anchor="${anchor}">${whole(2 ** power)}</text>`;
        })
        .join("");
      const sides = [lows, highs]
        .map((y) => `<text x="${left - 8}" y="${at(4, y)[1] + 4}" text-anchor="end">${(10 ** y).toPrecision(2)}</text>`)
        .join("");
      root.querySelector("svg").innerHTML =
        `<title>Noise per record against the batch size</title><path class="line" d="${path}"/>` +
        `<circle class="dot" cx="${here[0]}" cy="${here[1]}" r="6"/>${ticks}${sides}`;
    };

    const update = () => {
      const asked = read();
      const found = sordinoExplorer.plan(asked);
      show("budget", asked.budget.toPrecision(2));
      show("records", whole(asked.records));
      show("batch", whole(Math.min(asked.batch, asked.records)));
      show("epochs", String(asked.epochs));
      show("parameters", whole(asked.parameters));
      show("sigma", digits(found.sigma));
      show("perRecord", digits(found.perRecord));
      show("length", digits(found.length));
      show("steps", whole(found.steps));
      show("delta", found.delta.toExponential(0));
      draw(asked);
    };
    root.addEventListener("input", update);
    update();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
