// The version in the header. Where several versions lie side by side (scripts/versions.py), a choice that leads to the
// same page of another one, or to its first page where it has no such page. Nothing is fetched.
(() => {
  const root = new URL("..", document.currentScript.src);
  const [own, ...others] = window.sordinoVersions || [];
  if (!own) return;
  const here = location.href.split(/[?#]/)[0].slice(root.href.length) || "index.html";
  const place = (version) => new URL(`../${version.version}/${version.pages.includes(here) ? here : "index.html"}`, root);
  document.addEventListener("DOMContentLoaded", () => {
    const shown = document.createElement(others.length ? "select" : "span");
    shown.className = "sordino-version";
    if (others.length) {
      shown.setAttribute("aria-label", "Version of the documentation");
      const all = [own, ...others].sort((a, b) => b.version.localeCompare(a.version, "en", { numeric: true }));
      for (const each of all) shown.add(new Option(each.version, place(each).href, each === own, each === own));
      shown.addEventListener("change", () => location.assign(shown.value));
    } else {
      shown.textContent = own.version;
    }
    document.querySelector(".md-header__title").after(shown);
  });
})();
