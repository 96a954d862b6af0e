// The links from a report to the same report of another machine keep the reader's place: the section at the top of the window.
document$.subscribe(() => {
  const headings = () => [...document.querySelectorAll("article :is(h2, h3)[id]")].filter((h) => h.checkVisibility());
  const header = () => document.querySelector(".md-header").offsetHeight + 80;
  const key = "sections above";
  for (const link of document.querySelectorAll(".machine-switch a:not([aria-current])")) {
    link.addEventListener("click", () => {
      const above = headings().filter((heading) => heading.getBoundingClientRect().top < header()).map(({ id }) => id).reverse();
      if (above.length) link.hash = above[0];
      sessionStorage.setItem(key, JSON.stringify(above));
    });
  }
  // A section that only the other machine has: the nearest one above it.
  const sections = JSON.parse(sessionStorage.getItem(key) ?? "[]");
  sessionStorage.removeItem(key);
  if (sections[0] && location.hash === `#${sections[0]}` && !document.getElementById(sections[0])) {
    const found = sections.find((id) => document.getElementById(id));
    if (found) location.replace(`#${found}`);
  }
});
