// Code that can be changed beside the text: the function of the panel in an editor, run in the browser.

const edits = { room: null };  // of the function that is open

function closeEditor() {
  edits.room?.remove();
  edits.room = null;
  at("tool").classList.remove("editing");
  at("code").hidden = false;
}

async function openEditor(function_, text) {
  closeEditor();
  const paper = page.name;
  const says = make("p", { role: "status" }, "Python starts…");
  edits.room = make("section", { className: "edit" }, says);
  at("tool").classList.add("editing");
  at("code").hidden = true;
  at("code").after(edits.room);
  const opened = await ask("docs.book.edit", "opened", { paper, function: function_ }).catch(error => {
    says.textContent = lastLine(error);
  });
  if (!opened) return;
  const code = editor(`code of ${function_}`, text ?? opened.text);
  const found = make("div", { role: "status" });
  const offered = opened.suggestions.map(([name, sentence], number) => [number, `${name}: ${sentence}`]);
  const tries = [["", "try this…"], ...offered];
  const suggestions = choice("something to try", tries, "", event => {
    const [name, , changed] = opened.suggestions[event.target.value];
    show(name);
    openEditor(name, changed);
  });

  async function run() {
    found.replaceChildren("running…");
    try {
      const outcome = await askWithin(60, "docs.book.edit", "run", { paper, function: function_, text: code.value });
      found.replaceChildren(...outcomeOf(outcome));
    } catch (error) {
      found.replaceChildren(make("p", {}, lastLine(error)));
    }
  }

  const reset = () => { code.value = opened.text; found.replaceChildren(); };
  const row = make("div", { className: "row" }, button("Run", run), button("Reset to the paper's", reset),
    button("Close", closeEditor), suggestions);
  edits.room.replaceChildren(row, code, found);
  code.focus();
}

function outcomeOf({ values, outputs, check }) {  // the verdict on the gradients, outputs, and variables that changed
  const verdict = make("p", { className: check.startsWith("WRONG") ? "wrong" : "" }, check);
  const changed = outputs.filter(([, , , apart]) => apart !== 0);
  const lines = changed.map(([name, before, after, apart]) => name === "objective"
    ? `The loss was ${before.toFixed(6)} and is ${after.toFixed(6)}.`
    : `Logits of segment ${name.split("/")[0]} change by up to ${number(apart, "f")}.`);
  if (!changed.length) lines.push("The logits and the loss are the paper's.");
  const room = at("tool").clientWidth / 2 - 30;
  const heats = values.flatMap(([name, before, after]) => [
    before ? heat(before, `${name}, the paper's`, room, true) : "",
    heat(after, `${name}, yours`, room, true),
  ]);
  return [verdict, ...lines.map(line => make("p", {}, line)), make("div", { className: "heats" }, ...heats)];
}

async function startEdit() {
  if (!await pythonIsThere()) return;
  const edit = button("edit", () => edits.room ? closeEditor() : openEditor(view.name));
  edit.setAttribute("aria-label", "Change this function and run it");
  at("call").parentElement.append(edit);
  at("function").addEventListener("change", closeEditor);
  window.addEventListener("hashchange", closeEditor);
}

startEdit();
