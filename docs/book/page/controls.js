// Sliders and fields, the same on all pages that can be played with.

function sliderOf(label, values, start, oninput = () => {}) {  // element.value() is the value chosen
  const range = make("input", { type: "range", min: 0, max: values.length - 1, value: values.indexOf(start) });
  range.setAttribute("aria-label", label);
  const output = make("output");
  const element = make("label", { className: "slider" }, make("span", {}, label), range, output);
  element.value = () => values[range.valueAsNumber];
  const say = () => {
    output.textContent = element.value().toLocaleString("en");
    range.setAttribute("aria-valuetext", output.textContent);
  };
  range.oninput = () => { say(); oninput(); };
  element.move = by => { range.value = range.valueAsNumber + by; range.oninput(); };  // it stays between its ends
  say();
  return element;
}

function choice(label, options, start, onchange = () => {}) {  // options are [value, words] or words
  const select = make("select", { "aria-label": label, onchange });
  for (const option of options) {
    const [value, words] = Array.isArray(option) ? option : [option, option];
    select.append(make("option", { value, selected: value === start }, words));
  }
  return select;
}

function button(words, onclick) {
  return make("button", { onclick }, words);
}

function picture(title, rows, columns, colourOf) {  // a field of colour, one pixel an entry: [red, green, blue, share]
  const canvas = make("canvas", { width: columns, height: rows, role: "img", "aria-label": title });
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  for (let at = 0; at < rows * columns; at++) {
    const [red, green, blue, share] = colourOf(Math.floor(at / columns), at % columns);
    image.data.set([red, green, blue, 255 * Math.min(1, share)], 4 * at);
  }
  pen.putImageData(image, 0, 0);
  return make("figure", { className: "field" }, canvas, make("figcaption", {}, title));
}

function colourNamed(name) {  // of the page's colours that are three numbers
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/).map(Number);
}

const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function editor(label, text) {  // code to be changed: Enter keeps the indent; Tab leaves it, as everywhere
  const area = make("textarea", { value: text, spellcheck: false, rows: Math.min(30, text.split("\n").length + 1) });
  area.setAttribute("aria-label", label);
  area.onkeydown = event => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    const line = area.value.slice(0, area.selectionStart).split("\n").at(-1);
    const deeper = line.trimEnd().endsWith(":") ? "    " : "";
    area.setRangeText(`\n${line.match(/^ */)[0]}${deeper}`, area.selectionStart, area.selectionEnd, "end");
  };
  return area;
}
