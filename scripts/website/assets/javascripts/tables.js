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
  };
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => label(entry.target)));
  // Material puts its tables into their boxes when it mounts the page, which is after this.
  requestAnimationFrame(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => observer.observe(box)));
});
