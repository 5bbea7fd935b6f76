// What the tests of pages that Python plays on share: a page in a frame, and what a reader does there. test_live.py puts it
// into the page around the frame, with a call of one of the functions below in the place of CHECK.

const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
const errors = [];

async function opened(page, width) {  // the frame of a page, whose errors are kept
  document.querySelector("iframe")?.remove();
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  frame.src = `${page}.html`;
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; });
  const inside = frame.contentWindow;
  inside.onerror = message => { errors.push(message); };
  inside.onunhandledrejection = ({ reason }) => { errors.push(`${reason}`); };
  inside.localStorage.clear();
  inside.console.error = (...words) => { errors.push(words.join(" ")); };
  inside.document.addEventListener("securitypolicyviolation", event => errors.push(`policy: ${event.blockedURI}`));
  return inside;
}

async function until(what, condition, seconds = 120) {  // waits; what() failing in time is an error that says so
  const end = performance.now() + 1000 * seconds;
  for (;;) {
    const found = condition();
    if (found) return found;
    if (performance.now() > end) throw new Error(`not in ${seconds} s: ${what}`);
    await wait(25);
  }
}

function told(inside, code) {  // the value of an expression in the frame, which sees what its scripts define
  const script = inside.document.createElement("script");
  script.textContent = `window.told = ${code};`;
  inside.document.body.append(script);
  return inside.told;
}

const named = (inside, label) => inside.document.querySelector(`[aria-label="${label}"]`);
const buttonOf = (inside, words) => [...inside.document.querySelectorAll("button")].find(each => each.textContent === words);

function set(element, value) {  // as a reader does
  element.value = value;
  for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, { bubbles: true }));
}

// What a reader does

async function tryOne(width, length, distractors) {  // types facts and reads filler before and after
  const begun = performance.now();
  const inside = await opened("try_one", width);
  await until("Python is there", () => inside.document.body.innerText.includes("Python is there"));
  const started = (performance.now() - begun) / 1000;
  set(named(inside, "fact 1: value"), "3");
  set(named(inside, "fact 2: told again with"), "4");
  told(inside, "Math.random = () => 0.5");  // so that a rounding grows as much each time
  set(named(inside, "tokens before the facts"), length);
  set(named(inside, "tokens after the facts"), length);
  set(named(inside, "signs of facts in the filler"), distractors);
  told(inside, "tryOne.draws = 0, [...tryOne.sides].map(side => { side.draw = () => { tryOne.draws += 1; Side.prototype.draw.call(side); }; }).length");
  const reading = performance.now();
  buttonOf(inside, "Read").click();
  await until("the answers", () => told(inside, "tryOne.sides.every(side => side.isDone) && !tryOne.isReading && tryOne.made"));
  const seconds = (performance.now() - reading) / 1000;
  const sides = told(inside, "tryOne.sides.map(({ weights, found, tokens }) => ({ file: weights.value, found, tokens }))");
  const rows = inside.document.querySelectorAll(".sides tr").length;
  buttonOf(inside, "Show the gradient").click();
  await until("the gradients", () => inside.document.querySelectorAll(".behind figure").length === 2);
  const controls = [...inside.document.querySelectorAll(".live :is(input, select, button, textarea)")];
  const mute = controls.filter(each => each.tabIndex < 0 || !(each.ariaLabel || each.textContent || each.labels?.length));
  return { started, seconds, sides, rows, made: told(inside, "tryOne.made"), draws: told(inside, "tryOne.draws"),
    backward: inside.document.querySelector(".behind").innerText, mute: mute.map(each => each.outerHTML),
    scrollWidth: inside.document.documentElement.scrollWidth };
}

async function manyQuestions(files, documents) {  // the answers of each memory to documents that are made as `made` says
  const inside = await opened("try_one", 1440);
  await until("Python is there", () => inside.document.body.innerText.includes("Python is there"));
  const answers = [];
  for (const file of files) {
    for (const made of documents) {
      await inside.ask("docs.book.try_one", "begin", { side: 0, files: [file], ...made });
      answers.push((await inside.ask("docs.book.try_one", "read", { side: 0, seconds: 1000 })).answers);
    }
  }
  return { answers };
}

async function edit(chapter, name, old, changed) {  // a function's text is changed, run, and reset
  const inside = await opened(chapter, 1440);
  const button = await until("the button edit", () => named(inside, "Change this function and run it"));
  told(inside, `show(${JSON.stringify(name)})`);
  button.click();
  const area = await until("the editor", () => inside.document.querySelector(".edit textarea"));
  const verdicts = [];
  const run = async () => {
    buttonOf(inside, "Run").click();
    await wait(50);
    const said = () => inside.document.querySelector(".edit [role=status] p")?.textContent;
    verdicts.push(await until("the verdict", said));
  };
  if (!area.value.includes(old)) throw new Error(`no ${old} in ${area.value}`);
  set(area, area.value.replace(old, changed));
  await run();
  const heats = inside.document.querySelectorAll(".edit canvas").length;
  buttonOf(inside, "Reset to the paper's").click();
  await run();
  return { verdicts, heats };
}

async function practise(task, answers) {  // judges one answer after another; the times are in seconds
  const inside = await opened("practice", 1440);
  const opens = await until("the offer", () => buttonOf(inside, "Write it here"));
  opens.click();
  const tasks = await until("the tasks", () => named(inside, "task"));
  set(tasks, [...tasks.options].findIndex(({ textContent }) => textContent === task));
  const said = [];
  for (const answer of answers) {
    set(named(inside, `answer to ${task}`), answer);
    const begun = performance.now();
    buttonOf(inside, "Judge").click();
    await until("the verdict", () => !buttonOf(inside, "Judge").disabled);
    said.push([inside.document.querySelector(".practice pre").textContent, (performance.now() - begun) / 1000]);
  }
  return { said, kept: JSON.parse(inside.localStorage.practice) };
}

async function toys(places, width) {  // [chapter, id of its toy]: what each shows at first, and after a slider moves
  const found = [];
  for (const [chapter, id] of places) {
    const inside = await opened(chapter, width);
    const room = inside.document.getElementById(`book-live-${id}`);
    const cells = [...room.querySelectorAll("tr")].map(row => [...row.cells].map(cell => cell.textContent));
    const bars = room.querySelector("[role=img]")?.ariaLabel;
    const before = room.innerText;
    set(room.querySelector("input"), 0);
    const { scrollWidth } = inside.document.documentElement;
    found.push({ cells, bars, moved: before !== room.innerText, scrollWidth });
  }
  return { found };
}

async function withoutPython(page) {  // a line says how to get it, and the run that was recorded is shown
  const inside = await opened(page, 1440);
  await until("the line", () => inside.document.body.innerText.includes("python -m docs.book fetches"));
  const sides = told(inside, "tryOne.sides.map(({ weights, found, tokens }) => ({ file: weights.value, found, tokens }))");
  return { sides, open: inside.document.querySelectorAll(".live :is(input, select, button):not(:disabled)").length };
}

(async () => {
  let found;
  try {
    found = await CHECK;
  } catch (error) {
    const text = document.querySelector("iframe")?.contentDocument.body.innerText.slice(0, 3000);
    found = { failed: `${error.message}`, text };
  }
  await fetch("/", { method: "POST", body: JSON.stringify({ errors, ...found }) });
})();
