// Arrays as pictures: a tile for the last two axes, blue above zero and orange below.

function number(x, kind) {
  if (kind === "b") return String(Boolean(x));
  if (kind !== "f" || x === 0) return String(x);
  if (!isFinite(x)) return x < 0 ? "−∞" : "∞";
  const isUsual = Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5;
  return isUsual ? x.toPrecision(4) : x.toExponential(3);
}

function numbersOf(array) {
  const bytes = Uint8Array.from(atob(array.data), sign => sign.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function indexOf(shape, flat) {
  return shape.map((size, axis) => {
    const inside = shape.slice(axis + 1).reduce((a, b) => a * b, 1);
    return Math.floor(flat / inside) % size;
  });
}

const GAP = 5;  // between tiles, in pixels

// Where the entries of an array are drawn, `room` pixels wide. A small picture has no written numbers, and as many tiles
// in a row as there is room for; a large one has the third-last axis in a row.
function layoutOf(shape, room, isSmall) {
  const columns = shape.at(-1);
  const rows = shape.at(-2) || 1;
  const tiles = shape.slice(0, -2).reduce((a, b) => a * b, 1);
  let across = shape.at(-3) || 1;
  let width = Math.floor((room - (across - 1) * GAP) / (across * columns));
  let height = 17;
  if (isSmall) {
    width = Math.max(3, Math.min(9, Math.floor(room / columns)));
    height = Math.min(width, 7);
    across = Math.max(1, Math.min(tiles, Math.floor((room + GAP) / (columns * width + GAP))));
    across = Math.ceil(tiles / Math.ceil(tiles / across));  // rows of equal length
  } else {
    width = Math.max(3, Math.min(46, width));
    if (width <= 33) height = Math.min(width, 13);
  }
  const cornerOf = flat => {
    const tile = Math.floor(flat / (columns * rows));
    const row = Math.floor(flat / columns) % rows;
    const left = (tile % across) * (columns * width + GAP) + (flat % columns) * width;
    const top = Math.floor(tile / across) * (rows * height + GAP) + row * height;
    return [left, top];
  };
  const down = Math.ceil(tiles / across);
  const right = Math.min(across, tiles) * (columns * width + GAP) - GAP;
  const bottom = down * (rows * height + GAP) - GAP;
  return { width, height, cornerOf, size: [right, bottom], isWritten: !isSmall && width > 33 };
}

// A figure of an array. A pointer or the arrow keys show a number.
function heat(array, title, room, isSmall = false) {
  const { shape, kind } = array;
  const data = numbersOf(array);
  const { width, height, cornerOf, size, isWritten } = layoutOf(shape, room, isSmall);
  const ratio = window.devicePixelRatio || 1;
  const label = `${title}, shape ${shape.join(" by ")}`;
  const canvas = make("canvas", { tabIndex: 0, "aria-label": label });
  [canvas.width, canvas.height] = size.map(length => length * ratio);
  canvas.style = `width: ${size[0]}px; height: ${size[1]}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "10px ui-monospace, monospace";
  const sizes = [...data].filter(isFinite).map(Math.abs);
  const most = Math.max(0, ...sizes) || 1;
  const power = most < 0.1 ? Math.floor(Math.log10(most)) : 0;  // small numbers are written as multiples of 10^power
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name);
  const output = make("output");
  let chosen = -1;

  function fill(flat, colour, inside) {
    const [left, top] = cornerOf(flat);
    pen.fillStyle = colour;
    pen.fillRect(left + inside, top + inside, width - 1 - 2 * inside, height - 1 - 2 * inside);
  }

  function paintEntry(x, flat) {
    const [left, top] = cornerOf(flat);
    fill(flat, colour("--line"), 0);
    if (isFinite(x)) {
      const hue = colour(x < 0 ? "--hurts" : "--helps");
      fill(flat, colour("--paper"), 0.5);
      fill(flat, `rgb(${hue} / ${0.85 * Math.abs(x) / most})`, 0);
    }
    pen.fillStyle = colour("--ink");
    pen.strokeStyle = colour("--ink");
    if (isWritten) {
      const scaled = (x / 10 ** power).toFixed(Math.abs(x) < 10 ? 2 : 0);
      pen.fillText(kind === "f" ? scaled : number(x, kind), left + 3, top + 12);
    }
    if (flat === chosen) {
      pen.lineWidth = 2;
      pen.strokeRect(left, top, width - 1, height - 1);
    }
  }

  function paint() {
    pen.clearRect(0, 0, ...size);
    data.forEach(paintEntry);
    const scale = isWritten && power ? `, shown times 1e${-power}` : "";
    const all = `largest ${number(most, "f")}${scale}`;
    output.textContent = chosen < 0 ? all : `[${indexOf(shape, chosen).join(", ")}] = ${number(data[chosen], kind)}`;
  }

  canvas.onpointermove = ({ offsetX, offsetY }) => {
    const over = data.findIndex((_, flat) => {
      const [left, top] = cornerOf(flat);
      const isInColumn = left <= offsetX && offsetX < left + width;
      return isInColumn && top <= offsetY && offsetY < top + height;
    });
    if (over < 0) return;
    chosen = over;
    paint();
  };
  canvas.onkeydown = event => {
    const columns = shape.at(-1);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(data.length - 1, chosen + step));
    paint();
  };
  paint();
  return make("figure", {}, make("figcaption", {}, make("b", {}, title), ` (${shape.join(", ")})`), canvas, output);
}
