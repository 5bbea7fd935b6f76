// The search box: titles, headings, functions and terms, ranked by where the words stand. The index is loaded when the
// box is first used; / goes there, the arrows choose, Enter opens, Escape leaves.

const MOST = 12;  // results that are shown
const box = at("search");
const results = at("found");

function loadIndex() {
  if (loadIndex.begun) return;
  loadIndex.begun = true;
  const script = make("script", { src: "search-index.js" });
  script.onload = showFound;
  script.onerror = () => results.replaceChildren(make("p", { className: "quiet" }, "The index search-index.js is not here."));
  document.head.append(script);
}

function rank(words, [name, where]) {  // the smaller the better; Infinity is not found
  const text = name.toLowerCase();
  let sum = text.length / 1000;
  for (const word of words) {
    const place = text.indexOf(word);
    if (place === 0) continue;
    if (place > 0) sum += /[\s_.(-]/.test(text[place - 1]) ? 1 : 2;
    else if (where.toLowerCase().includes(word)) sum += 4;
    else return Infinity;
  }
  return sum;
}

function showFound() {
  loadIndex();
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  results.hidden = !words.length;
  if (!words.length || !window.searchEntries) return;
  const ranked = [];
  for (const entry of window.searchEntries) {
    const its = rank(words, entry);
    if (its < Infinity) ranked.push([its, entry]);
  }
  ranked.sort(([one], [two]) => one - two);
  const links = ranked.slice(0, MOST).map(([, [name, where, address]]) =>
    make("a", { href: address }, name, make("small", {}, where)));
  const none = make("p", { className: "quiet" }, "Nothing has these words.");
  results.replaceChildren(...(links.length ? links : [none]));
}

function move(step) {  // the focus, from the box through the results
  const stops = [box, ...results.querySelectorAll("a")];
  const here = stops.indexOf(document.activeElement);
  stops[Math.max(0, Math.min(stops.length - 1, here + step))].focus();
}

function searchByKey(event) {
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
  const isInside = document.activeElement === box || results.contains(document.activeElement);
  if (event.key === "/" && !isTyping) box.focus();
  else if (!isInside) return;
  else if (event.key === "ArrowDown") move(1);
  else if (event.key === "ArrowUp") move(-1);
  else if (event.key === "Enter" && document.activeElement === box) results.querySelector("a")?.click();
  else if (event.key === "Escape") leaveSearch();
  else return;
  event.preventDefault();
}

function leaveSearch() {
  box.value = "";
  results.hidden = true;
  document.activeElement.blur();
}

box.addEventListener("focus", loadIndex);
box.addEventListener("input", showFound);
document.addEventListener("keydown", searchByKey);
document.addEventListener("click", ({ target }) => {
  if (target.closest("#book-found a")) leaveSearch();
  else if (target !== box) results.hidden = true;
});
