// The replay: full back-propagation and memory replay side by side, a step at a time.

function kibibytes(bytes, digits) {
  return `${(bytes / 1024).toFixed(digits)} KiB`;
}

function boxesOf({ segment, states, caches }, isDone) {  // a box for each segment, with what is held of it
  const boxes = Array.from({ length: page.replay.segments }, (_, k) => {
    const box = make("div", { className: k === segment && !isDone ? "now" : "" }, make("span", {}, k));
    if (k in states) box.append(make("b", { className: "state" }, `state\n${states[k]} B`));
    if (k in caches) box.append(make("b", { className: "cache" }, `cache\n${kibibytes(caches[k], 0)}`));
    return box;
  });
  return make("div", { className: "boxes", ariaLabel: "Segments", role: "group" }, ...boxes);
}

function barsOf(steps, now) {  // what is held after each step
  const all = page.replay.methods.flatMap(method => method.steps.map(step => step.bytes));
  const most = Math.max(...all);
  const bars = steps.map(({ bytes }, k) => {
    const later = k > now ? "later" : "";
    return make("i", { className: k === now ? "now" : later, style: `height: ${bytes / most * 100}%` });
  });
  return make("div", { className: "bars" }, ...bars);
}

function gradientOf(past) {  // the last gradient that a segment handed to the one before
  const last = past.findLast(({ gradient }) => gradient >= 0);
  if (!last) return [make("p", { className: "quiet" }, "no gradient of the memory yet")];
  const to = last.segment > 0 ? last.segment - 1 : "0's initial state";
  const picture = heat(page.replay.values[last.gradient], "dstate.memory", 260, true);
  return [make("p", {}, `gradient of the memory handed to segment ${to}`), picture];
}

function codeOf(method, line) {  // the method's code, with the line that runs now
  const code = make("pre", { innerHTML: method.code, tabIndex: 0, ariaLabel: method.title });
  code.querySelectorAll(".line")[line - method.line]?.classList.add("lit");
  return make("figure", {}, make("figcaption", { className: "quiet" }, method.title), code);
}

function drawMethod(method, which, step) {
  const { steps, title } = method;
  const isDone = step >= steps.length;
  const now = Math.min(step, steps.length - 1);
  const { what, segment, line, bytes } = steps[now];
  const past = steps.slice(0, now + 1);
  const again = what === "forward" && which ? " again" : "";
  const peak = of => kibibytes(Math.max(...of.map(({ bytes }) => bytes)), 1);
  const held = `held ${kibibytes(bytes, 1)}; peak so far ${peak(past)}, of the whole ${peak(steps)}`;
  const does = isDone ? "finished" : `${what}${again}, segment ${segment}`;
  return make("section", {}, make("h4", {}, title), make("p", {}, does), boxesOf(steps[now], isDone),
    make("p", {}, held), barsOf(steps, now),
    make("div", { className: "gradient" }, ...gradientOf(past)), codeOf(method, isDone ? -1 : line));
}

function startReplay() {
  const { methods } = page.replay;
  const most = Math.max(...methods.map(({ steps }) => steps.length));
  const pair = make("div", { className: "pair" });
  const numbers = Array.from({ length: most }, (_, k) => k + 1);
  const step = sliderOf(`Step of ${most}`, numbers, 1, () => draw());
  function draw() {
    pair.replaceChildren(...methods.map((method, which) => drawMethod(method, which, step.value() - 1)));
    for (const line of pair.querySelectorAll("pre .lit")) {
      const code = line.closest("pre");
      code.scrollTop = line.offsetTop - code.clientHeight / 2;
    }
  }
  const [before, next] = [["‹", "Step before", -1], ["›", "Next step", 1]].map(([sign, label, by]) => {
    const moves = button(sign, () => step.move(by));
    moves.setAttribute("aria-label", label);
    return moves;
  });
  const row = make("div", { className: "row" }, before, step, next);
  at("live-replay").append(row, pair);
  drawAlso(draw);
  draw();
}

startReplay();
