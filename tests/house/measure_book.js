// Measures a page of the book at one width. tests/house/test_book.py puts it into the page's frame, where it sees what
// the page's own scripts define. It answers with a message to the frame around it.

const frames = async count => {
  for (let k = 0; k < count; k++) await new Promise(requestAnimationFrame);
};
const textOf = element => (element.getAttribute("aria-label") ?? element.textContent).slice(0, 60);
const isWide = element => element.scrollWidth > element.clientWidth + 1;

function cutFormulas() {
  const { right } = article.getBoundingClientRect();
  const alone = [...article.querySelectorAll(".formula")].filter(isWide);
  const isCut = formula => !formula.closest(".wide, .formula") && formula.getBoundingClientRect().right > right + 1;
  return [...alone, ...[...article.querySelectorAll("math")].filter(isCut)].map(textOf);
}

function cutCode() {  // blocks of the text, and all functions in the panel
  const cut = [...article.querySelectorAll("pre")].filter(isWide).map(textOf);
  if (!page.functions) return cut;
  document.body.classList.toggle("code", narrow.matches);
  for (const [name, { code }] of Object.entries(page.functions)) {
    at("code").innerHTML = code;
    if (isWide(at("code"))) cut.push(name);
  }
  return cut;
}

function hiddenParts() {  // what else does not fit
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page is wider than the screen");
  for (const table of article.querySelectorAll(".wide")) {
    if (isWide(table) && !table.classList.contains("more")) found.push(`a wide table without a hint: ${textOf(table)}`);
  }
  if (!page.functions || narrow.matches) return found;
  const { top, bottom } = at("tool").getBoundingClientRect();
  if (Math.abs(bottom - innerHeight) > 2 || top > 60) found.push(`the panel is from ${top} to ${bottom}`);
  for (const lanes of at("states").querySelectorAll("canvas")) {
    if (lanes.getBoundingClientRect().right > innerWidth) found.push("a state's lanes");
  }
  if (isWide(at("states")) || at("states").scrollHeight > at("states").clientHeight + 1) found.push("a state's lanes");
  if (at("code").clientHeight < 150) found.push(`the code's height is ${at("code").clientHeight}`);
  return found;
}

async function wrongAnchors() {
  const wrong = [];
  for (const heading of article.querySelectorAll("h2, h3")) {
    if (!heading.checkVisibility()) continue;
    location.hash = heading.id;
    await frames(2);
    const { top } = heading.getBoundingClientRect();
    const isAtEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
    if (top < 40 || (top > 130 && !isAtEnd)) wrong.push(`${heading.id} is at ${top}`);
    const shown = heading.dataset.panel;
    if (shown && page.functions && !narrow.matches && view.name !== shown) wrong.push(`${heading.id} shows ${view.name}`);
  }
  history.replaceState(null, "", location.pathname);
  return wrong;
}

// Scrolls through the chapter. In each section the panel shows the section's function, or one that a visible link of the
// section names above the reading line.
async function sectionsShown() {
  const sections = [];
  for (const element of article.querySelectorAll("[data-panel], a.f")) {
    if (element.dataset.panel) sections.push({ heading: element, names: [element.dataset.panel], links: [] });
    else sections.at(-1)?.links.push(element);
  }
  const wrong = new Set();
  let compared = 0;
  for (let y = 0; y < document.documentElement.scrollHeight - innerHeight; y += 150) {
    scrollTo(0, y);
    await frames(2);
    const section = sections.findLast(({ heading }) => isAboveLine(heading));
    if (!section) continue;
    compared += 1;
    const links = section.links.filter(isAboveLine).map(link => link.hash.slice(1));
    if (![...section.names, ...links].includes(view.name)) wrong.add(`${section.heading.id} shows ${view.name}`);
  }
  return { wrong: [...wrong], compared, sections: sections.length };
}

async function turnedPage() {  // on a phone: to the code and back, and both keep their places
  const wrong = [];
  scrollTo(0, 3000);
  await frames(2);
  const y = scrollY;
  at("turn").click();
  await frames(6);
  if (!at("code").checkVisibility()) wrong.push("the code is not shown");
  at("tool").scrollTop = 150;
  const place = at("tool").scrollTop;
  const shown = view.name;
  history.back();
  await new Promise(done => setTimeout(done, 300));
  if (at("code").checkVisibility()) wrong.push("Back leads not to the text");
  if (Math.abs(scrollY - y) > 2) wrong.push(`the text was at ${y} and is at ${scrollY}`);
  at("turn").click();
  await frames(6);
  if (view.name !== shown || at("tool").scrollTop !== place) wrong.push("the code's place is lost");
  at("turn").click();
  await new Promise(done => setTimeout(done, 300));
  if (at("code").checkVisibility()) wrong.push("the button leads not to the text");
  return wrong;
}

function symbolsByKeys() {  // the focus shows what a symbol means, and Escape hides it
  const wrong = [];
  if (!page.functions) return wrong;
  const symbols = [...article.querySelectorAll("[data-s][tabindex]")];
  const rows = new Set(symbols.map(symbol => symbol.dataset.s));
  if (rows.size !== symbols.length || rows.size < 5) wrong.push(`Tab stops at ${symbols.length} symbols`);
  for (const symbol of symbols.filter(each => each.checkVisibility())) {
    symbol.focus();
    if (document.activeElement !== symbol) wrong.push(`${textOf(symbol)} takes no focus`);
    if (at("meaning").hidden || !at("meaning").textContent) wrong.push(`${textOf(symbol)} is not explained`);
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    if (!at("meaning").hidden) wrong.push("Escape does not hide it");
  }
  document.activeElement.blur();
  return [...new Set(wrong)];
}

function unreachedLinks() {  // of the menu: after it is scrolled to, a click at its middle must meet it
  const menu = at("menu");
  menu.open = true;
  const missed = [];
  for (const link of menu.querySelectorAll("a")) {
    link.scrollIntoView({ block: "nearest" });
    const { left, top, width, height } = link.getBoundingClientRect();
    const met = document.elementFromPoint(left + Math.min(width, 20) / 2, top + height / 2);
    if (met !== link) missed.push(textOf(link));
  }
  menu.open = false;
  return missed;
}

async function wrongSearch() {  // a function's name is found, first and in time
  const wrong = [];
  const type = words => {
    box.value = words;
    box.dispatchEvent(new Event("input"));
  };
  type("slot");
  for (let k = 0; k < 200 && !window.searchEntries; k++) await new Promise(done => setTimeout(done, 20));
  const begin = performance.now();
  type("slot_attention_backward");
  const time = performance.now() - begin;
  if (time > 50) wrong.push(`a search takes ${time} ms`);
  const first = results.querySelector("a");
  if (first?.getAttribute("href") !== "memformer.html#slot_attention_backward") wrong.push(`found first: ${first?.outerHTML}`);
  const { left, right } = results.getBoundingClientRect();
  if (left < 0 || right > innerWidth) wrong.push("what was found is wider than the page");
  leaveSearch();
  return wrong;
}

async function measure() {
  await frames(3);
  const found = { anchors: await wrongAnchors(), turned: [], scrolled: { wrong: [], compared: 0, sections: 0 } };
  if (page.functions && !narrow.matches) found.scrolled = await sectionsShown();
  if (page.functions && narrow.matches) found.turned = await turnedPage();
  for (const details of article.querySelectorAll("details")) details.open = true;
  await frames(3);
  found.symbols = symbolsByKeys();
  found.formulas = article.querySelectorAll(".formula, .math").length;
  found.small = [...article.querySelectorAll(".formula")].filter(each => parseFloat(each.style.fontSize) < 0.8).length;
  found.cut_formulas = cutFormulas();
  found.hidden = hiddenParts();
  found.menu = unreachedLinks();
  found.search = await wrongSearch();
  found.lines = article.querySelectorAll(".line").length;
  const outputs = [...document.querySelectorAll("#book-states > :first-child output")];
  found.largest = outputs.map(({ textContent }) => Number(textContent.match(/largest (\S+)/)?.[1]));
  found.cut_code = cutCode();
  parent.postMessage(found, "*");
}

measure().catch(error => parent.postMessage({ error: `${error.stack}` }, "*"));
