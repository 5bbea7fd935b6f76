// The page "Try one": a document that the visitor makes, read by two memories side by side.

const LENGTHS = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32000];
const HORIZONS = [1, 4, 16];
const tryOne = { sides: [], isReading: false, isStopped: false };
const asks = (name, given) => ask("docs.book.try_one", name, given);

function factFields(alphabet, facts) {  // up to four; no sign is a key and a value
  const signs = [["", "–"], ...alphabet];
  return facts.map(([key, value, later], number) => {
    const fact = `fact ${number + 1}`;
    const fields = [choice(`${fact}: key`, signs, key), choice(`${fact}: value`, signs, value)];
    fields.push(choice(`${fact}: told again with`, signs, later));
    const row = make("div", { className: "row" }, "key", fields[0], "value", fields[1], "later", fields[2]);
    row.fact = () => fields.map(field => field.value);
    return row;
  });
}

function factsOf(rows) {  // those that are told, or an Error that says what is wrong
  const facts = rows.map(row => row.fact()).filter(([key, value]) => key && value);
  const keys = facts.map(([key]) => key);
  const values = facts.flatMap(([, value, later]) => [value, later]).filter(Boolean);
  const both = keys.find(key => values.includes(key));
  if (!facts.length) throw new Error("choose a key and a value");
  if (new Set(keys).size < keys.length) throw new Error("two facts have the same key");
  if (both) throw new Error(`${both} is a key and a value; in a document of the training no sign was both`);
  return facts;
}

class Side {  // one memory: what it shows
  constructor(number, weights, { file, begun, read }) {
    this.number = number;
    this.weights = choice(`memory ${number + 1}`, weights.map(({ file, row, stage }) => [file, `${row} (${stage})`]),
      file);
    this.fields = make("div", { className: "fields" });
    this.answers = make("table", {});
    this.behind = make("div", { className: "behind" });
    this.progress = make("progress", { value: 0, "aria-label": `how much memory ${number + 1} has read` });
    this.where = make("output", {});
    this.element = make("section", {}, this.weights, make("div", { className: "row" }, this.progress, this.where),
      this.answers, this.fields, this.behind);
    this.answers.setAttribute("aria-live", "polite");
    this.takeBegun(begun);
    this.takeRead(read);
  }

  async begin(made) {
    this.takeBegun(await asks("begin", { side: this.number, files: [this.weights.value], ...made }));
    this.behind.replaceChildren();
    this.draw();
  }

  takeBegun(begun) {
    Object.assign(this, { moved: [], seen: [], found: [], read: 0 }, begun, { memory: numbersOf(begun.memory) });
  }

  get isDone() { return this.read >= this.segments; }

  async readOn() {
    this.takeRead(await asks("read", { side: this.number, seconds: 0.15 }));
    if (!isStill() || this.isDone) this.draw();
    this.drawProgress();
  }

  takeRead({ read, memory, moved, seen, answers }) {
    const flat = numbersOf(moved);
    const [rows, slots] = moved.shape;
    for (let row = 0; row < rows; row++) this.moved.push(flat.subarray(row * slots, (row + 1) * slots));
    for (const each of seen) this.seen.push({ ...each, slots: numbersOf(each.slots) });
    this.found.push(...answers);
    Object.assign(this, { read, memory: numbersOf(memory) });
  }

  drawProgress() {
    Object.assign(this.progress, { max: this.segments, value: this.read });
    const count = n => (n * this.segment).toLocaleString("en");
    this.where.textContent = `${count(this.read)} of ${count(this.segments)} tokens`;
  }

  draw() {
    const [slots, width] = this.shape;
    const [above, below] = [colourNamed("--helps"), colourNamed("--hurts")];
    const most = Math.max(...this.memory.map(Math.abs)) || 1;
    const field = picture("the memory now: a row for each slot", slots, width, (slot, column) => {
      const x = this.memory[slot * width + column];
      return [...(x < 0 ? below : above), Math.abs(x) / most];
    });
    const largest = this.moved.map(row => Math.max(...row)).sort((a, b) => a - b).at(-1) || 1;
    const columns = Math.max(1, this.moved.length);
    const strip = picture("how much each segment changed a slot, the first segment on the left", slots, columns,
      (slot, segment) => [...below, (this.moved[segment]?.[slot] ?? 0) / largest]);
    this.fields.replaceChildren(strip, field, this.drawSeen(slots));
    this.drawAnswers();
    this.drawProgress();
  }

  drawSeen(slots) {  // for each fact and question, the slots that it is written to or reads
    const columns = this.seen.map(({ what, slots }) => ({ what, slots, most: Math.max(...slots) || 1 }));
    const colours = { written: colourNamed("--hurts"), read: colourNamed("--helps") };
    const title = "slots that a fact was written to (orange), that a question reads (blue)";
    return picture(title, slots, Math.max(1, columns.length), (slot, column) => {
      const { what, slots, most } = columns[column] ?? { what: "read", slots: [0], most: 1 };
      return [...colours[what], (slots[slot] ?? 0) / most];
    });
  }

  drawAnswers() {
    const titles = ["asked", "answer", "probability", ""];
    const rows = this.found.map(({ key, answer, probability, right }) => {
      const verdict = answer === right ? "✓ right" : `✗ not ${right}`;
      return [`?${key}`, answer, probability.toFixed(3), verdict];
    });
    const all = rows.length ? [titles, ...rows] : [];
    this.answers.replaceChildren(...all.map(row => make("tr", {}, ...row.map(text => make("td", {}, text)))));
  }

  async drawBehind(question, horizon) {  // the gradient by the memory, from the question's segment back
    if (question >= this.questions.length) return;
    const { first, fact, gradients } = await asks("back", { side: this.number, question });
    const flat = numbersOf(gradients);
    const [segments, slots] = gradients.shape;
    const most = Math.max(...flat) || 1;
    const colour = colourNamed("--hurts");
    const strip = picture(`|d loss / d memory| of ?${this.questions[question][0]}, its segment on the right`, slots, 16,
      (slot, column) => {
        const back = 15 - column;
        const isThere = back < Math.min(horizon, segments);
        return [...colour, isThere ? flat[back * slots + slot] / most : 0];
      });
    const apart = first - fact;
    const reaches = apart < horizon ? "reaches the fact" : "stops before the fact: nothing would teach this memory to keep it";
    const words = `The fact stands ${apart} segments before its question; a horizon of ${horizon} ${reaches}.`;
    this.behind.replaceChildren(strip, make("p", {}, words));
  }
}

async function startTryOne(room) {  // shows a run that was recorded, and reads others where Python is there
  const { weights, run } = page;
  const isThere = await pythonIsThere();
  const files = run.sides.map(({ file }) => file);
  const isReady = isThere && asks("ready", { files });  // Python starts while the page is drawn
  const rows = factFields(weights[0].alphabet, run.made.facts);
  const lengths = ["tokens before the facts", "tokens between two facts", "tokens after the facts"]
    .map((label, which) => sliderOf(label, LENGTHS, run.made.lengths[which]));
  const distractors = choice("signs of facts in the filler", [["0", "none"], ["0.2", "one in five"]], "0");
  const says = make("p", { role: "status" });
  const reads = button("Read", () => readAll());
  const stops = button("Stop", () => { tryOne.isStopped = true; });
  const text = make("pre", { id: "book-document" });
  tryOne.sides = run.sides.map((recorded, number) => new Side(number, weights, recorded));

  const goesBack = button("Show the gradient", () => {
    goesBack.setAttribute("aria-pressed", goesBack.getAttribute("aria-pressed") !== "true");
    drawBack();
  });
  const question = choice("question", [0, 1, 2, 3].map(k => [k, `question ${k + 1}`]), 0, () => drawBack());
  const horizon = choice("horizon", HORIZONS.map(h => [h, `horizon ${h}`]), 16, () => drawBack());

  async function drawBack() {
    for (const side of tryOne.sides) {
      if (goesBack.getAttribute("aria-pressed") !== "true") side.behind.replaceChildren();
      else if (side.isDone) await side.drawBehind(Number(question.value), Number(horizon.value));
    }
  }

  async function readAll() {
    if (tryOne.isReading) return;
    Object.assign(tryOne, { isReading: true, isStopped: false });
    reads.disabled = true;
    try {
      const made = { facts: factsOf(rows), lengths: lengths.map(each => each.value()),
        distractors: Number(distractors.value), seed: Math.floor(1e6 * Math.random()) };
      tryOne.made = made;
      says.textContent = "Reading…";
      for (const side of tryOne.sides) await side.begin(made);
      drawText();
      while (!tryOne.isStopped && tryOne.sides.some(side => !side.isDone)) {
        for (const side of tryOne.sides) if (!side.isDone) await side.readOn();
      }
      says.textContent = tryOne.isStopped ? "Stopped before the end." : verdict();
      behind.disabled = false;
      await drawBack();
    } catch (error) {
      says.textContent = lastLine(error).replace(/^ValueError: /, "");
    }
    tryOne.isReading = false;
    reads.disabled = false;
  }

  function drawText() {  // facts and questions stand out in the filler
    const parts = shortened(tryOne.sides[0].tokens).split(/(@\d\d|\?\d)/);
    text.replaceChildren(...parts.map((part, number) => number % 2 ? make("b", {}, part) : part));
  }

  function verdict() {
    const known = tryOne.sides.map(({ weights, found }) => {
      const right = found.filter(({ answer, right }) => answer === right).length;
      return `${weights.selectedOptions[0].textContent}: ${right} of ${found.length} answers are right.`;
    });
    return known.join(" ");
  }

  const controls = make("fieldset", { disabled: true }, ...rows, ...lengths,
    make("div", { className: "row" }, make("label", {}, "filler that looks like facts: ", distractors), reads, stops));
  const behind = make("fieldset", { disabled: true, className: "row" }, goesBack, question, horizon);
  room.append(controls, says, text, make("div", { className: "sides" }, ...tryOne.sides.map(side => side.element)), behind);
  drawText();
  const draw = () => { for (const side of tryOne.sides) side.draw(); };
  drawAlso(draw);
  draw();
  for (const { weights } of tryOne.sides) weights.disabled = true;

  says.textContent = `${verdict()} ${NO_PYTHON}`;
  if (!isThere) return;
  says.textContent = `${verdict()} This run was recorded; Python starts in your browser, to read what you choose…`;
  try {
    await isReady;
    says.textContent = `${verdict()} This run was recorded. Python is there: change what you like, and press Read.`;
  } catch (error) {
    says.textContent = lastLine(error);
    return;
  }
  for (const element of [controls, ...tryOne.sides.map(side => side.weights)]) element.disabled = false;
}

function shortened(text) {  // its facts and questions, and filler where it is not too long
  return text.replace(/[^@?\d]{60,}/g, run => `${run.slice(0, 20)} … ${run.length - 40} more … ${run.slice(-20)}`);
}

startTryOne(document.getElementById("book-live-try_one"));
