// What every page does: its menu, its contents, formulas that fit, symbols that explain themselves, light and dark.

const at = id => document.getElementById(`book-${id}`);  // a part of every page; a section has no such id
const page = JSON.parse(at("data").textContent);
const article = at("text");
const READING_LINE = 0.28;  // of the screen's height: what the text says there is what the page speaks of

function isAboveLine(element) {
  return element.checkVisibility() && element.getBoundingClientRect().top < innerHeight * READING_LINE;
}

// Formulas: a wide one gets its reasons below its rows, then rows that wrap, then smaller signs

function isCut(formula) {
  return formula.scrollWidth > formula.clientWidth + 1;
}

function fitFormula(formula) {
  formula.style.fontSize = "";
  delete formula.dataset.fit;
  for (const way of ["under", "stacked"]) {
    if (!isCut(formula)) return;
    formula.dataset.fit = way;
  }
  for (let size = 0.95; isCut(formula) && size > 0.5; size -= 0.05) formula.style.fontSize = `${size}em`;
}

function watchWidths() {  // a formula in a folded answer gets its width when it is opened
  const widths = new Map();
  const watch = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const width = target.clientWidth;
      if (widths.get(target) === width) continue;
      widths.set(target, width);
      fit(target);
    }
  });
  for (const element of article.querySelectorAll(".formula, .wide")) {
    fit(element);
    widths.set(element, element.clientWidth);
    watch.observe(element);
  }
}

function fit(element) {
  if (element.matches(".formula")) fitFormula(element);
  else element.classList.toggle("more", isCut(element));
}

// Contents: the section at the reading line is marked

const headings = [...article.querySelectorAll("h2, h3")];

function markSection() {
  const heading = headings.findLast(isAboveLine);
  for (const list of document.querySelectorAll(".contents")) {
    let group = null;
    let groupOfHere = null;
    for (const link of list.children) {
      if (link.className.includes("h2")) group = link;
      const isHere = heading !== undefined && link.hash === `#${heading.id}`;
      if (isHere) {
        link.setAttribute("aria-current", "location");
        groupOfHere = group;
        if (list.id) link.scrollIntoView({ block: "nearest" });
      } else {
        link.removeAttribute("aria-current");
      }
    }
    openGroup(list, groupOfHere);
  }
}

function openGroup(list, groupOfHere) {  // subsections show under their section alone
  let group = null;
  for (const link of list.children) {
    if (link.className.includes("h2")) group = link;
    else link.classList.toggle("open", group !== null && group === groupOfHere);
  }
}

let isMarking = false;
document.addEventListener("scroll", () => {
  if (isMarking) return;
  isMarking = true;
  requestAnimationFrame(() => {
    isMarking = false;
    markSection();
  });
}, { passive: true });

function closeMenus(event) {  // by Escape, by a click elsewhere, and by a link in it
  for (const menu of document.querySelectorAll("header details[open]")) {
    const isInside = menu.contains(event.target) && !event.target.closest("a");
    if (event.key === "Escape" || (event.type === "click" && !isInside)) menu.open = false;
  }
}
document.addEventListener("click", closeMenus);
document.addEventListener("keydown", closeMenus);

// Symbols: where the pointer or the focus rests on one, its row of the table Symbols is shown. Tab stops where a symbol
// first stands, not at each place; Escape hides what is shown

function stopAtSymbols() {
  const first = new Map();  // {row: where the symbol first stands, in no folded part if it can be}
  for (const symbol of article.querySelectorAll("[data-s]")) {
    if (symbol.closest("table.symbols")) continue;
    const before = first.get(symbol.dataset.s);
    const isFolded = before?.closest("details") && !symbol.closest("details");
    if (!before || isFolded) first.set(symbol.dataset.s, symbol);
  }
  for (const symbol of first.values()) {
    symbol.setAttribute("tabindex", 0);
    symbol.setAttribute("aria-describedby", "book-meaning");
  }
}

function explain({ target }) {
  if (at("meaning").contains(target)) return;  // it stays while the pointer reads it
  const symbol = target.closest?.("[data-s]") ?? document.activeElement?.closest("[data-s]");
  const row = symbol && document.querySelectorAll("table.symbols tbody tr")[symbol.dataset.s];
  at("meaning").hidden = !row;
  if (!row) return;
  const titles = [...row.closest("table").querySelectorAll("th")].map(cell => cell.textContent);
  const shown = ["meaning", "shape"].map(title => row.cells[titles.indexOf(title)]);
  const cells = [row.cells[0], ...shown].filter(cell => cell?.textContent.trim());
  at("meaning").replaceChildren(...cells.map(cell => make("span", { innerHTML: cell.innerHTML })));
  const place = symbol.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = at("meaning");
  const top = place.top > height + 60 ? place.top - height : place.bottom;  // no gap on the pointer's way to it
  at("meaning").style.top = `${top + scrollY}px`;
  at("meaning").style.left = `${Math.max(8, Math.min(place.left, innerWidth - width - 8))}px`;
}

function hideMeaning({ key }) {
  if (key === "Escape") at("meaning").hidden = true;
}
document.addEventListener("pointerover", explain);
document.addEventListener("focusin", explain);
document.addEventListener("focusout", () => { at("meaning").hidden = true; });
document.addEventListener("keydown", hideMeaning);

// Light and dark

const dark = document.getElementById("dark-colours");
let redraw = () => {};  // what is drawn in the colours of the page; panel.js and replay.js add to it

function drawAlso(draw) {
  const before = redraw;
  redraw = () => { before(); draw(); };
}

try { dark.media = localStorage.dark || dark.media; } catch { /* a reader may forbid it */ }
at("theme").onclick = () => {
  dark.media = matchMedia(dark.media).matches ? "not all" : "all";
  try { localStorage.dark = dark.media; } catch { /* as above */ }
  redraw();
};
window.onbeforeprint = () => {
  for (const details of article.querySelectorAll("details")) details.open = true;
};

stopAtSymbols();
watchWidths();
markSection();
