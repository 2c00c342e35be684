"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // theme: the system's, until the reader chooses
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const remember = (value) => { try { localStorage.setItem("theme", value); } catch { /* file:// may refuse */ } };
  try { const kept = localStorage.getItem("theme"); if (kept) root.dataset.theme = kept; } catch { /* as above */ }
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    remember(root.dataset.theme = now === "dark" ? "light" : "dark");
  });

  // sorting: numbers best first, names by the alphabet; rows keep their details
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  for (const table of all("table.main")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => head.firstElementChild.addEventListener("click", () => {
      const first = i ? "descending" : "ascending", other = i ? "ascending" : "descending";
      const order = head.ariaSort === first ? other : first;
      heads.forEach((h) => { h.ariaSort = h === head ? order : "none"; });
      const sign = order === "ascending" ? 1 : -1;
      const value = (body) => body.rows[0].cells[i].dataset.v;
      table.append(...[...table.tBodies].sort((a, b) => sign * compare(value(a), value(b))));
    }));
  }

  // details of a row
  for (const row of all("tr.row")) {
    const button = row.querySelector("button");
    row.addEventListener("click", (event) => {
      if (event.target.closest("a")) return;
      const open = button.ariaExpanded !== "true";
      button.ariaExpanded = String(open);
      row.nextElementSibling.hidden = !open;
    });
  }

  // warnings: a link to them opens them
  for (const link of all("a.warn")) {
    link.addEventListener("click", () => { document.querySelector(link.hash).open = true; });
  }

  // filter: every word must occur
  document.getElementById("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hit = (element) => words.every((word) => element.dataset.name.toLowerCase().includes(word));
    for (const element of all("tbody[data-name], .panels figure")) element.hidden = !hit(element);
    for (const line of all("g.line")) line.style.display = hit(line) ? "" : "none";
    for (const key of all(".key")) key.parentElement.hidden = !hit(key);
    for (const section of all("section[id^=table]")) section.hidden = !section.querySelector("tbody[data-name]:not([hidden])");
  });

  // plots: show one line or several
  for (const plot of all(".plot")) {
    const keys = all(".key", plot), lines = all("g.line", plot);
    const show = (passing) => {
      const chosen = new Set(keys.filter((key) => key.ariaPressed === "true").map((key) => key.dataset.name));
      if (passing) chosen.add(passing);
      plot.classList.toggle("picked", chosen.size > 0);
      for (const line of lines) line.classList.toggle("picked", chosen.has(line.dataset.name));
    };
    for (const key of keys) {
      key.addEventListener("click", () => { key.ariaPressed = String(key.ariaPressed !== "true"); show(); });
      key.addEventListener("mouseenter", () => show(key.dataset.name));
      key.addEventListener("mouseleave", () => show());
    }
  }
})();
