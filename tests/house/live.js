// What the tests of pages that Python plays on share: a page in a frame, and what a reader does there. test_live.py puts it
// into the page around the frame, with `check`, which does one test's steps and returns what it found.

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

(async () => {
  let found;
  try {
    found = await check();
  } catch (error) {
    found = { failed: `${error.message}`, text: document.querySelector("iframe")?.contentDocument.body.innerText.slice(0, 3000) };
  }
  await fetch("/", { method: "POST", body: JSON.stringify({ errors, ...found }) });
})();
