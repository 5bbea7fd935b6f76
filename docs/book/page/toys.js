// Four toys, one in each chapter: its numbers by hand, with sliders. Each shows where the gradient stops.

const rounded = x => Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(4)));
const steps = (first, last, by) => {
  return Array.from({ length: Math.round((last - first) / by) + 1 }, (_, k) => Number((first + k * by).toFixed(4)));
};
const counted = (count, what) => `${rounded(count)} ${what}${count === 1 ? "" : "s"}`;
const said = text => make("p", {}, text);

function tableOf(titles, rows) {
  const cells = row => make("tr", {}, ...row.map(cell => make("td", {}, cell)));
  return make("div", { className: "wide", tabIndex: 0 }, make("table", {}, ...[titles, ...rows].map(cells)));
}

function barsOfShares(title, shares, reached) {  // a bar for each; those that no gradient reaches are pale
  const most = Math.max(...shares) || 1;
  const bars = shares.map((share, k) => {
    const bar = make("i", { className: k < reached ? "now" : "later", title: `${k}: ${rounded(share)}` });
    bar.style.height = `${100 * share / most}%`;
    return bar;
  });
  const list = shares.map((share, k) => `${k}: ${rounded(share)}`).join(", ");
  return make("figure", { role: "img", "aria-label": `${title}: ${list}` }, make("div", { className: "bars" }, ...bars),
    make("figcaption", {}, title));
}

function toy(id, sliders, draw) {  // sliders are {name: [label, values, start]}; draw({name: value}) gives elements
  const room = document.getElementById(`book-live-${id}`);
  if (!room) return;
  const out = make("div", { className: "toy" });
  const update = () => {
    const values = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value()]));
    out.replaceChildren(...draw(values));
    for (const table of out.querySelectorAll(".wide")) fit(table);
  };
  const fields = Object.fromEntries(Object.entries(sliders).map(([name, given]) => [name, sliderOf(...given, update)]));
  room.append(...Object.values(fields), out);
  update();
}

function queueRows({ c, memory, compressed }, segments) {  // the text's table, for rows of one number and a mean of c
  const n = Math.max(2, c);
  let held = Array(memory).fill(0);
  let old = Array(compressed).fill(0);
  return Array.from({ length: segments }, (_, segment) => {
    const h = Array.from({ length: n }, (_, k) => 2 * (segment * n + k) + 1);
    const queue = [...held, ...h];
    const evicted = queue.slice(0, n);
    held = queue.slice(n);
    const made = Array.from({ length: Math.floor(n / c) }, (_, k) => {
      return evicted.slice(k * c, (k + 1) * c).reduce((a, b) => a + b, 0) / c;
    });
    old = [...old, ...made].slice(made.length);
    return [segment, evicted, made, old, held];
  });
}

toy("toy_queue", {
  c: ["c, rows that become one", [1, 2, 3, 4], 2],
  memory: ["M, rows of memory", steps(0, 6, 1), 2],
  compressed: ["C, compressed rows", steps(0, 6, 1), 2],
}, given => {
  const inWords = cell => Array.isArray(cell) ? cell.map(rounded).join(", ") || "none" : cell;
  const rows = queueRows(given, 6).map(row => row.map(inWords));
  const reach = given.memory + given.c * given.compressed;
  return [
    tableOf(["after segment", "evicted", "new", "next compressed memory", "next memory"], rows),
    said(`A layer sees ${given.memory} rows as they were and ${given.c * given.compressed} more as ` +
      `${given.compressed} means: ${reach} rows back, at the cost of ${given.memory + given.compressed} keys.`),
    said("The gradient stops at every row of this table: memory, what is evicted and compressed memory are data. " +
      "The loss of the model trains no row; the compression has a loss of its own, from evicted to new."),
  ];
});

toy("toy_gate", {
  g: ["g, the share that is kept", steps(0, 1, 0.05), 0.5],
  blocks: ["blocks in a segment", [1, 2, 3, 4, 8, 16], 4],
}, ({ g, blocks }) => {
  const states = [8];
  const rows = [4, 0, 2].map((z, block) => {
    states.push(g * states[block] + (1 - g) * z);
    const sum = `${rounded(g * states[block])} + ${rounded((1 - g) * z)} = ${rounded(states[block + 1])}`;
    return [block, rounded(states[block]), z, sum];
  });
  const left = steps(0, 15, 1).map(n => (1 - g) * g ** n);
  const half = g > 0 && g < 1 ? `Half is left after ${counted(Math.log(0.5) / Math.log(g), "block")}.` : "";
  return [
    tableOf(["block", "c", "z", "next c"], rows),
    barsOfShares("what is left of what was written 0, 1, ... 15 blocks ago: (1 − g) gⁿ", left, blocks),
    said(`${half} The gradient comes back by the same gⁿ and stops at the segment's start, ` +
      `${counted(blocks, "block")} back. Pale bars are remembered, and nothing teaches the model to write them.`),
  ];
});

toy("toy_share", {
  own: ["a slot's weight of itself", steps(0, 1, 0.05), 0.5],
  segments: ["K, segments", steps(1, 32, 1), 8],
  horizon: ["horizon", [1, 2, 4, 8, 16, 32], 4],
}, ({ own, segments, horizon }) => {
  const left = steps(0, segments, 1).map(k => own ** k);
  return [
    barsOfShares(`left of a slot after 0 to ${segments} segments, and of its gradient on the way back`, left, horizon),
    said(`After ${counted(segments, "segment")} ${rounded(own ** segments)} of the slot is left: each segment multiplies it ` +
      "by the weight that the slot gives to itself. The gradient that comes back through the slots is the same product."),
    said(`With a horizon of ${horizon} it stops ${counted(horizon, "segment")} back, at the pale bars: what was written ` +
      "before is read, but nobody learns to write it."),
  ];
});

toy("toy_pooled", {
  network: ["what the network makes of 1", steps(0, 2, 0.25), 0.5],
  horizon: ["horizon, windows", [1, 2, 3, 4, 8, 20], 3],
}, ({ network, horizon }) => {
  const factor = network / 2;
  const x = [8, 4, 1];
  const y = [];
  for (const [t, own] of x.entries()) y.push(t ? own + (network * y[t - 1] + own) / 2 : 2 * own);
  const g = [0, 0, 0];
  for (const t of [1, 0]) g[t] = t + 1 < horizon ? factor * (y[t + 1] + g[t + 1]) : 0;
  const inserted = t => t ? rounded(network * y[t - 1]) : "none";
  const rows = x.map((_, t) => [t, inserted(t), rounded(y[t]), rounded(y[t] + g[t]), rounded(g[t])]);
  const left = steps(0, 7, 1).map(k => factor ** k);
  return [
    tableOf(["window", "inserted", "y = z", "dy of all losses", "g, from later windows"], rows),
    barsOfShares("what a window has of z, and gives back, 0 to 7 windows on", left, horizon),
    said(`The gradient passes ${counted(horizon, "window")} and stops there: here it ${factor > 1 ? "grows" : "shrinks"} ` +
      `by ${rounded(factor)} from window to window.`),
  ];
});
