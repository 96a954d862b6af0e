// A table that is wider than its box scrolls inside of it: the keyboard has to reach the box, in every browser.
document$.subscribe(() => {
  const label = (box) => {
    const scrolls = box.scrollWidth > box.clientWidth;
    if (scrolls) {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", "Table, scrolls sideways");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    }
    const hint = box.previousElementSibling?.matches(".table-scrolls") ? box.previousElementSibling : null;
    if (scrolls && !hint) {
      const line = document.createElement("span");
      line.className = "table-scrolls";
      line.textContent = "The table scrolls sideways →";
      box.before(line);
    } else if (!scrolls) hint?.remove();
  };
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => label(entry.target)));
  // Material puts its tables into their boxes when it mounts the page, which is after this.
  requestAnimationFrame(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => observer.observe(box)));
});

// Beside numbers, which do not wrap, a browser makes a column of text as narrow as its longest word. Each cell gets
// room for a third of its letters in a line, 40 at most; the first, which stays in sight, for all of them up to 26; a
// heading for up to 12.
document$.subscribe(() => {
  for (const cell of document.querySelectorAll("article table:not([class]) td:not(:first-child, :has(img, svg))"))
    cell.style.minWidth = `min(${Math.min(Math.ceil(cell.textContent.length / 3), 40)}ch, 50vw)`;
  for (const cell of document.querySelectorAll("article table:not([class]) td:first-child:not(:has(img, svg))"))
    cell.style.minWidth = `min(${Math.min(cell.textContent.length + 1, 26)}ch, 32vw)`;
  for (const cell of document.querySelectorAll("article table:not([class]) th:not(:first-child)"))
    cell.style.minWidth = `${Math.min(cell.textContent.trim().length, 12)}ch`;
});

// A click on a column's heading sorts by it, a second one the other way round. Cells begin with a number in a unit, or with text.
document$.subscribe(() => {
  const units = { ns: 1e-9, "µs": 1e-6, ms: 1e-3, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
  const number = (text) => {
    const found = /^([+−-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?: ([nµm]s\b|[KMGT]iB|[kMGT](?=B|FLOP)))?/.exec(text);
    return found ? Number(found[1].replaceAll(",", "").replace("−", "-")) * (units[found[2]] ?? 1) : NaN;
  };
  const sort = (table, column, way) => {
    const keyed = [...table.tBodies[0].rows].map((row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, value: number(text) };
    });
    keyed.sort((a, b) => {
      const [known, other] = [!isNaN(a.value), !isNaN(b.value)];
      if (known !== other) return known ? -1 : 1; // what was not measured stays below
      return way * (known ? a.value - b.value : a.text.localeCompare(b.text));
    });
    table.tBodies[0].append(...keyed.map(({ row }) => row));
  };
  for (const table of document.querySelectorAll("article table:not([class])")) {
    if (table.tBodies[0].rows.length < 3 || table.querySelector("td :is(img, svg)")) continue; // the index is prose and figures
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      if (!cell.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => {
        const way = cell.ariaSort === "ascending" ? "descending" : "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.ariaSort = way;
        sort(table, column, way === "ascending" ? 1 : -1);
      });
    });
  }
});
