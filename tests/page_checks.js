// What every page must keep; each function returns what is wrong, in words.
const checks = (() => {
  const texts = () =>
    [...document.querySelectorAll("body *")].filter((node) => {
      const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      const silent = ["SCRIPT", "STYLE", "title", "desc"].includes(node.tagName) || node.closest(".skip");
      return own && !silent && node.getClientRects().length;
    });
  const start = (node) => node.textContent.trim().slice(0, 40);

  const overflow = () => {
    const root = document.documentElement;
    const wrong = root.scrollWidth > root.clientWidth ? [`scrolls sideways: ${root.scrollWidth}`] : [];
    for (const node of texts().filter((node) => !node.closest(".sideways, .scroll"))) {
      const box = node.getBoundingClientRect();
      if (box.left < -0.5 || box.right > root.clientWidth + 0.5) wrong.push(`outside: ${start(node)}`);
    }
    return wrong;
  };

  // A drawing may be scaled down, and its text with it.
  const size = (node) =>
    parseFloat(getComputedStyle(node).fontSize) * (node.ownerSVGElement ? Math.abs(node.getScreenCTM().a) : 1);
  const small = (least) => texts().filter((node) => size(node) < least - 0.01).map((node) => `${size(node)}px: ${start(node)}`);

  // WCAG 2: relative luminance and contrast.
  const channel = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const numbers = (colour) => (colour.match(/[\d.]+/g) ?? []).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const paper = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const faint = (least) =>
    texts().flatMap((node) => {
      const style = getComputedStyle(node);
      const ink = luminance(numbers(node.ownerSVGElement ? style.fill : style.color));
      const back = luminance(paper(node));
      const contrast = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
      return contrast < least ? [`${contrast.toFixed(2)}: ${start(node)}`] : [];
    });

  const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const charts = () => {
    const wrong = [];
    for (const figure of document.querySelectorAll("figure.chart")) {
      const say = (words) => wrong.push(`${figure.id}: ${words}`);
      const lines = [...figure.querySelectorAll(".line")];
      const seen = (line) => line.getTotalLength() > 0 || line.closest(".series")?.querySelector(".dot");
      if (!lines.length || !lines.every(seen)) say("draws nothing");
      if (lines.some((line) => getComputedStyle(line).stroke === "none")) say("has no ink");
      const canvas = figure.querySelector(".canvas").getBoundingClientRect();
      if (canvas.width < 150 || canvas.height < 80) say(`is too small: ${canvas.width} x ${canvas.height}`);
      for (const name of ["title", "desc"]) if (!figure.querySelector(`svg > ${name}`).textContent) say(`has no ${name}`);
      for (const anchor of ["middle", "end"]) {
        const ticks = [...figure.querySelectorAll(`.tick[text-anchor=${anchor}]`)].map((tick) => tick.getBoundingClientRect());
        if (ticks.some((a, k) => ticks.slice(k + 1).some((b) => over(a, b)))) say("has ticks on top of each other");
      }
    }
    return wrong;
  };
  // Leaves of text whose lines lie on those of another leaf, by more than the air around letters.
  const overlaps = () => {
    const lines = texts().flatMap((node) => {
      const range = document.createRange();
      return [...node.childNodes].filter((child) => child.nodeType === 3 && child.textContent.trim()).flatMap((child) => {
        range.selectNodeContents(child);
        return [...range.getClientRects()].filter((box) => box.width > 1).map((box) => ({ node, box }));
      });
    });
    lines.sort((a, b) => a.box.top - b.box.top);
    const wrong = [];
    lines.forEach((a, k) => {
      for (let i = k + 1; i < lines.length && lines[i].box.top < a.box.bottom - 4; i += 1) {
        const b = lines[i];
        if (a.node === b.node || a.node.contains(b.node) || b.node.contains(a.node)) continue;
        if (a.box.left < b.box.right - 2 && b.box.left < a.box.right - 2) wrong.push(`${start(a.node)} on ${start(b.node)}`);
      }
    });
    return wrong;
  };
  return { overflow, small, faint, charts, overlaps };
})();
