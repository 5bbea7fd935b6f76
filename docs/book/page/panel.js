// The panel beside a chapter: the code of the function that the text speaks of, and what its variables held in one call.

const view = {
  name: "forward",  // the function that is shown
  read: "",  // the function that the text spoke of when it was last asked
  call: undefined,
  place: -1,  // the variable that was pointed at
  parts: [],  // the way into its parts
  layer: null,
};
const calls = page.calls;
for (const call of calls) Object.assign(call, { up: calls[call.up], forward: calls[call.forward] });
const slider = at("slider");
const narrow = matchMedia("(max-width: 70rem)");
const nameIn = address => decodeURIComponent(address.hash.slice(1));
const short = name => name.replace(/_(forward|backward)$/, "");

function pathOf({ layer, up }) {  // "layer 0: called by attend in layer in forward"
  const names = [];
  for (; up; up = up.up) names.push(short(up.function));
  const by = names.length ? `called by ${names.slice(0, 3).join(" in ")}` : "called first";
  return layer === null ? by : `layer ${layer}: ${by}`;
}

// Which function the text speaks of

const mentions = [...article.querySelectorAll("[data-panel], a.f")].filter(mention => !mention.closest("pre"));
const functionOf = mention => mention.dataset.panel ?? nameIn(mention);

function spokenOf() {  // the last section or visible link above the reading line; of links in a line, the first
  const above = mentions.filter(isAboveLine);
  const last = above.at(-1);
  if (!last) return mentions.length && mentions[0].dataset.panel || "forward";
  if (last.dataset.panel) return last.dataset.panel;
  const top = Math.round(last.getBoundingClientRect().top);
  const inLine = above.filter(each => !each.dataset.panel && Math.round(each.getBoundingClientRect().top) === top);
  return functionOf(inLine[0]);
}

function follow() {
  if (!at("follow").checked || narrow.matches) return;
  const read = spokenOf();
  if (read === view.read) return;
  view.read = read;
  show(read);
}

// The address says which function is shown, or at which section the page is open

function openAddress() {
  const name = nameIn(location);
  const isCode = Boolean(page.functions[name]);
  document.body.classList.toggle("code", isCode && narrow.matches);
  at("turn").textContent = isCode ? "Text" : "Code";
  const section = isCode ? null : document.getElementById(name);
  view.read = spokenOf();
  if (isCode) show(name);
  else if (!narrow.matches) show(section?.dataset.panel ?? view.read);
}

let cameFromText = false;

function openCode(name) {  // from code to code replaces the address, so that Back leads to the text
  if (document.body.classList.contains("code")) location.replace(`#${name}`);
  else {
    cameFromText = true;
    location.hash = name;
  }
}

at("turn").onclick = () => {
  if (!document.body.classList.contains("code")) {
    const read = spokenOf();
    const isNew = read !== view.read;
    view.read = read;
    openCode(isNew || !view.call ? read : view.name);
  } else if (cameFromText) history.back();
  else {
    history.replaceState(null, "", location.pathname);
    openAddress();
  }
};

// The panel

function show(name, call = view.call) {  // a function in a call of it: this one, or the nearest to the last one
  const all = calls.filter(each => each.function === name);
  const here = all.filter(each => each.segment === slider.valueAsNumber);
  const listed = here.length ? here : all.filter(each => each.segment === all[0].segment);
  if (!listed.includes(call)) {
    const old = view.call && pathOf(view.call);
    const byPath = listed.find(each => pathOf(each) === old);
    const byLayer = listed.find(each => each.layer === view.layer);
    call = byPath ?? byLayer ?? listed[0];
  }
  const isOther = view.name !== name;
  if (isOther) Object.assign(view, { place: -1, parts: [] });
  Object.assign(view, { name, call, layer: call?.layer ?? view.layer });
  if (!at("tool").checkVisibility()) return;
  drawTool(listed);
  if (isOther) at("code").scrollTop = 0;
}

function chips(parent, lit) {  // the calls of a forward pass in their order; layers and stacks show what they call
  const isOperation = name => /_(forward|task)$/.test(name) && name !== "with_task";
  const inside = calls.filter(call => call.up === parent && isOperation(call.function));
  return inside.map(call => {
    const { function: name, layer } = call;
    const onclick = () => show(name, call);
    const button = make("button", { className: lit.has(call) ? "lit" : "", onclick }, short(name));
    if (!/(^|_)(layers?|stack|encoder|decoder|prediction)_(forward|task)$/.test(name)) return button;
    return make("span", {}, button, layer ?? "", ...chips(call, lit));
  });
}

function drawStrip() {
  const lit = new Set();
  for (let up = view.call; up; up = up.up) lit.add(up.forward ?? up);
  const segment = slider.valueAsNumber;
  const first = calls.find(each => each.function === "forward" && each.segment === segment);
  at("strip").replaceChildren(...chips(first, lit));
}

function drawStates() {
  const segment = slider.valueAsNumber;
  const lanes = page.starts[segment].flatMap((starts, lane) => starts ? [lane] : []);
  const starting = lanes.length ? `; a document starts in lane ${lanes}` : "";
  at("place").textContent = `segment ${segment} (0 to ${slider.max})${starting}`;
  const ids = page.states[segment];
  const count = Object.keys(page.values[ids[0]].parts).length;
  const room = at("states").clientWidth / 2 / Math.min(count, 2) - 16;
  const sides = ["before", "after"].map((when, which) => {
    const fields = Object.entries(page.values[ids[which]].parts);
    const heats = fields.map(([field, id]) => heat(page.values[id], field, room, true));
    const title = make("span", { className: "quiet" }, `the state ${when}`);
    return make("div", {}, title, make("div", { className: "heats" }, ...heats));
  });
  at("states").replaceChildren(...sides);
}

function drawChoices(listed) {  // which function, which call of it, forward or backward
  const { name, call } = view;
  at("function").value = name;
  at("call").replaceChildren(...listed.map(each => make("option", { selected: each === call }, pathOf(each))));
  at("call").onchange = event => show(name, listed[event.target.selectedIndex]);
  at("call").hidden = listed.length < 2;
  const where = call && call.segment !== slider.valueAsNumber ? `, segment ${call.segment}` : "";
  const source = call ? call.source + where : "no run of this page calls it";
  const { file, line } = page.functions[name];
  at("source").textContent = `reference/${file}:${line}; ${source}`;
  const other = name.replace(/(for|back)ward$/, way => way === "forward" ? "backward" : "forward");
  const twin = call?.forward ?? calls.find(each => each.function === other && each.forward === call);
  for (const side of ["forward", "backward"]) {
    const isSelected = name.endsWith(side);
    const onclick = isSelected ? null : () => show(other, twin);
    Object.assign(at(side), { hidden: other === name || !page.functions[other], onclick });
    at(side).setAttribute("aria-selected", isSelected);
  }
}

function drawCode() {
  at("code").innerHTML = page.functions[view.name].code;
  for (const span of at("code").querySelectorAll("[data-place]")) {
    span.tabIndex = -1;
    span.classList.toggle("has", view.call?.held[span.dataset.place] >= 0);
  }
  at("code").querySelector(".has")?.setAttribute("tabindex", 0);
  for (const link of article.querySelectorAll("a.f")) {
    link.classList.toggle("lit", short(nameIn(link)) === short(view.name));
  }
}

function drawTool(listed) {
  drawStrip();
  drawStates();
  drawChoices(listed);
  drawCode();
  drawValue();
}

function drawValue() {
  const panel = at("value");
  const { name, call, place, parts } = view;
  at("code").querySelector(".chosen")?.classList.remove("chosen");
  const isHeld = call?.held[place] >= 0;
  if (isHeld) panel.classList.add("held");
  if (!isHeld) {
    const hint = "Point at a variable, touch it, or tab into the code and use the arrow keys: it shows what it held.";
    return panel.replaceChildren(make("p", { className: "quiet" }, hint));
  }
  at("code").querySelector(`[data-place="${place}"]`).classList.add("chosen");
  const variable = page.functions[name].places[place];
  const path = [variable, ...parts].join(".");
  const id = parts.reduce((id, part) => page.values[id].parts?.[part] ?? id, call.held[place]);
  const value = page.values[id];
  const last = path.split(".").at(-1);
  const meaning = page.glossary[last] ? `  ${page.glossary[last]}` : "";
  const back = parts.length ? valueButton("back", () => parts.pop()) : "";
  panel.replaceChildren(make("h3", {}, back, " ", path, make("span", { className: "quiet" }, meaning)));
  if (value.text) panel.append(make("p", {}, value.text));
  if (value.parts) panel.append(...partsOf(value));
  if (value.shape) panel.append(heat(value, last, at("value").clientWidth - 30));
}

function valueButton(label, change) {
  return make("button", { onclick: () => { change(); drawValue(); } }, label);
}

function partsOf(value) {  // what a value holds, as buttons that lead there
  const inside = Object.entries(value.parts).map(([part, of]) => {
    const { text, shape } = page.values[of];
    const size = shape ? `(${shape.join(", ")})` : "…";
    return valueButton(`${part} ${text ?? size}`, () => view.parts.push(part));
  });
  return [make("p", { className: "quiet" }, value.kind), make("div", { className: "row" }, ...inside)];
}

function choose(event) {
  const span = event.target.closest(".has");
  if (!span) return;
  Object.assign(view, { place: Number(span.dataset.place), parts: [] });
  drawValue();
}

function moveSegment(by) {
  slider.value = slider.valueAsNumber + by;  // the slider keeps it between its ends
  show(view.name);
}

function moveByKey(event) {  // arrow keys: from variable to variable in the code, from segment to segment elsewhere
  if (event.key === "Escape") {
    view.place = -1;
    drawValue();
  }
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const isModified = event.altKey || event.ctrlKey || event.metaKey;
  const isElsewhere = ["INPUT", "SELECT", "CANVAS"].includes(event.target.tagName);
  if (!step || isModified || isElsewhere) return;
  event.preventDefault();
  const spans = [...at("code").querySelectorAll(".has")];
  const here = spans.indexOf(event.target);
  if (here < 0) moveSegment(step);
  else spans[Math.max(0, here + step)]?.focus();
}

function followLink(event) {
  const link = event.target.closest("a.f");
  if (!link || !page.functions[nameIn(link)]) return;
  event.preventDefault();
  if (nameIn(link) === nameIn(location)) show(nameIn(link));
  else openCode(nameIn(link));
}

slider.max = page.starts.length - 1;
slider.oninput = () => show(view.name);
at("back").onclick = () => moveSegment(-1);
at("on").onclick = () => moveSegment(1);
at("function").append(...Object.keys(page.functions).map(name => make("option", {}, name)));
at("function").onchange = event => show(event.target.value);
for (const kind of ["pointerover", "focusin", "click"]) at("code").addEventListener(kind, choose);
document.addEventListener("keydown", moveByKey);
document.addEventListener("click", followLink);
document.addEventListener("scroll", follow, { passive: true });
window.addEventListener("hashchange", openAddress);
narrow.addEventListener("change", openAddress);
drawAlso(() => show(view.name));
openAddress();
