// Follow what happens: ask for the page again now and then, and show what changed.
(() => {
  const pause = 3000;
  const fresh = async () => {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) return;
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const main = document.querySelector("main");
    if (next === null || next.innerHTML === before || main.contains(document.activeElement)) return;
    before = next.innerHTML;
    const open = [...main.querySelectorAll("details")].map((details) => details.open);
    main.replaceChildren(...document.importNode(next, true).childNodes);
    window.drawn(main);
    main.querySelectorAll("details").forEach((details, k) => { details.open = open[k] ?? false; });
  };
  let before = document.querySelector("main").innerHTML;
  const status = document.querySelector(".status");
  const tick = () => {
    if (document.hidden) return setTimeout(tick, pause);
    fresh().then(() => { status.hidden = true; }, () => { status.hidden = false; }).finally(() => setTimeout(tick, pause));
  };
  setTimeout(tick, pause);
})();
