// Practice beside the text: where a page says which tasks to write, they can be written and are judged, in the browser.

const JUDGE = ["attrs-23.2.0-py3", "sortedcontainers-2.4.0-py2.py3", "hypothesis-6.130.0-py3"]
  .map(name => `${name}-none-any.whl`);
const SECONDS = 5;  // that one example may take
const asksJudge = (name, given) => askWithin(SECONDS, "docs.book.practice", name, given, JUDGE);

const standing = {  // {file.task: {text, status}}, kept in the browser
  read() {
    try { return JSON.parse(localStorage.practice ?? "{}"); } catch { return {}; }
  },
  write(name, kept) {
    try { localStorage.practice = JSON.stringify({ ...this.read(), [name]: kept }); } catch { /* a reader may forbid it */ }
  },
};

function taskRoom({ file, task, text }) {  // a task: its editor, and what the judge says
  const name = `${file}.${task}`;
  const kept = standing.read()[name];
  const says = make("pre", { role: "status" }, kept?.status ?? "not begun");
  const code = editor(`answer to ${task}`, kept?.text ?? text);

  async function judge() {
    judges.disabled = true;
    says.textContent = "Python starts…";
    try {
      await ask("docs.book.practice", "tasks", { names: [name] }, JUDGE);
      says.textContent = "judging…";
      const all = Object.entries(standing.read()).filter(([other]) => other.startsWith(`${file}.`));
      const texts = Object.fromEntries(all.map(([other, { text }]) => [other.slice(file.length + 1), text]));
      const { status, lines } = await asksJudge("judged", { file, task, texts: { ...texts, [task]: code.value } });
      says.textContent = [status === "done" ? "✓ done" : status, ...lines].join("\n");
    } catch (error) {
      says.textContent = `wrong\n${lastLine(error)}`;
    }
    standing.write(name, { text: code.value, status: says.textContent.split("\n")[0] });
    judges.disabled = false;
  }

  const judges = button("Judge", judge);
  const begins = button("Begin again", () => { code.value = text; });
  return make("section", {}, code, make("div", { className: "row" }, judges, begins), says);
}

function offerPractice(block, names) {  // under a block of commands: write its tasks here
  const room = make("div", { className: "live practice" });
  const opens = button("Write it here", async () => {
    opens.disabled = true;
    opens.textContent = "Python starts…";
    const found = await ask("docs.book.practice", "tasks", { names }, JUDGE);
    opens.remove();
    const tasks = choice("task", found.map(({ task }, number) => [number, task]), 0, () => open());
    const open = () => room.replaceChildren(...(found.length > 1 ? [tasks] : []), taskRoom(found[Number(tasks.value)]));
    open();
  });
  room.append(opens);
  block.after(room);
}

async function startPractice() {
  const names = /docs\.practice --in mine ([a-z_ ]*[a-z_])/;
  const offered = [...article.querySelectorAll("pre")].filter(block => names.test(block.textContent));
  if (!offered.length || !await pythonIsThere()) return;
  for (const block of offered) offerPractice(block, block.textContent.match(names)[1].split(" "));
}

startPractice();
