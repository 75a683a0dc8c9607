// The page over the runs. Everything from the server is inserted as text, never as markup.
"use strict";

const main = document.getElementById("main");
const where = document.getElementById("where");
const POLL_MILLISECONDS = 2000;
const SLOW_POLL_MILLISECONDS = 10000;

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties || {});
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

function formatCount(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function link(path, text) {
  return make("a", { href: path }, text);
}

function runPath(name) {
  return `/run/${encodeURIComponent(name)}`;
}

function classOf(line) {
  if (line.num_failed || line.phase === "damaged") return "failed";
  return line.phase === "running" || line.phase === "complete" ? line.phase : "";
}

function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

function table(headers, rows) {
  const head = make("tr", {}, ...headers.map(([title, kind]) => make("th", { scope: "col", className: kind }, title)));
  return make("div", { className: "box" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

// The list of runs.

function showList() {
  const chosen = new Set();
  const search = make("input", { type: "search", placeholder: "Search runs, studies, workloads, states" });
  search.setAttribute("aria-label", "Search");
  search.value = new URLSearchParams(location.search).get("q") || "";
  const compare = make("button", { disabled: true }, "Compare two");
  const count = make("p", { className: "quiet" });
  const place = make("div");
  const more = make("button", { hidden: true }, "More");
  place.className = "runs";
  let shown = [];
  let number = 0;

  function choose(name, isChosen) {
    if (isChosen) chosen.add(name);
    else chosen.delete(name);
    compare.disabled = chosen.size !== 2;
    compare.textContent = chosen.size === 2 ? "Compare these two" : `Compare two (${chosen.size} chosen)`;
  }

  function makeRow(run) {
    const box = make("input", { type: "checkbox", checked: chosen.has(run.name) });
    box.setAttribute("aria-label", `Choose ${run.name}`);
    box.addEventListener("change", () => choose(run.name, box.checked));
    return make(
      "tr", {},
      make("td", {}, box),
      make("td", {}, link(runPath(run.name), run.name)),
      make("td", {}, run.study),
      make("td", {}, run.workload),
      make("td", { className: "number" }, `${run.num_done}/${run.num_trials}`),
      make("td", { className: classOf(run) }, run.state),
    );
  }

  async function load(isMore) {
    const mine = ++number;
    const words = search.value.trim();
    const answer = await ask(`/api/runs?q=${encodeURIComponent(words)}&from=${isMore ? shown.length : 0}`);
    if (mine !== number) return;
    shown = isMore ? shown.concat(answer.runs) : answer.runs;
    const headers = [["", ""], ["run", ""], ["study", ""], ["workload", ""], ["trials", "number"], ["state", ""]];
    place.replaceChildren(table(headers, shown.map(makeRow)));
    more.hidden = shown.length >= answer.num_runs;
    count.textContent = `${formatCount(answer.num_runs, "run")}, ${formatCount(answer.num_trials, "trial")}`;
  }

  const complain = (error) => { count.textContent = error.message; };
  search.addEventListener("input", () => load(false).catch(complain));
  more.addEventListener("click", () => load(true).catch(complain));
  compare.addEventListener("click", () => {
    const [b, a] = [...chosen];
    location.href = `/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`;
  });
  main.replaceChildren(make("div", { className: "bar" }, search, compare), count, place, more);
  load(false).catch(complain);
  // Refresh the list only while the user is not working in it.
  setInterval(() => { if (!document.hidden && !chosen.size && shown.length <= 200) load(false).catch(complain); }, 5000);
}

// One run.

function showRun(name) {
  where.textContent = name;
  document.title = `${name} · scalelab`;
  const head = make("div");
  const frame = make("iframe", { title: `Report of ${name}` });
  const trials = make("details", {}, make("summary", {}, "Trials"));
  trials.addEventListener("toggle", () => { if (trials.open) showTrials(name, trials).catch((error) => trials.append(error.message)); });
  main.replaceChildren(head, trials, frame);
  let reported = -1;

  async function look() {
    const watch = await ask(`/api/run/${encodeURIComponent(name)}`);
    const line = watch.line;
    const done = make("div");
    done.style.setProperty("width", `${(100 * line.num_done) / Math.max(1, line.num_trials)}%`);
    const isRunning = line.phase === "running";
    const words = [`${line.num_done} of ${line.num_trials} trials`, line.state];
    if (isRunning) {
      words.push(`now ${watch.current || "–"}`, `${formatDuration(watch.elapsed_seconds)} so far`,
        `about ${formatDuration(watch.seconds_left)} left`);
    }
    const meter = make("div", { className: "meter" }, done);
    meter.setAttribute("role", "progressbar");
    meter.setAttribute("aria-label", "Trials done");
    meter.setAttribute("aria-valuenow", String(line.num_done));
    meter.setAttribute("aria-valuemax", String(line.num_trials));
    head.replaceChildren(
      make("h1", {}, watch.title || name),
      make("p", { className: "quiet" }, watch.question || ""),
      meter,
      make("p", { className: classOf(line), id: "progress" }, words.join(" · ")),
      ...watch.findings.map((finding, index) => make("p", { className: index ? "" : "finding" }, finding)),
      ...(isRunning ? [] : watch.cautions.slice(0, 3)).map((caution) => make("p", { className: "caution" }, caution)),
      ...(watch.problem ? [make("p", { className: "caution" }, watch.problem)] : []),
      make("p", {}, link(`/report/${encodeURIComponent(name)}`, "Open the report")),
    );
    if (line.num_done !== reported && !watch.problem && watch.is_newest) {
      reported = line.num_done;
      if (!isRunning || !frame.getAttribute("src")) frame.src = `/report/${encodeURIComponent(name)}`;
    }
    if (isRunning || !watch.is_newest) again(POLL_MILLISECONDS);
    else if (line.phase !== "complete" && line.phase !== "damaged") again(SLOW_POLL_MILLISECONDS); // it may be resumed, or be waiting
    if (!isRunning && frame.dataset.live === "yes") { frame.dataset.live = ""; frame.src = `/report/${encodeURIComponent(name)}`; }
    if (isRunning) frame.dataset.live = "yes";
    frame.hidden = Boolean(watch.problem);
  }

  const trouble = make("p", { className: "caution" });
  const again = (milliseconds) => setTimeout(() => look().catch(complain), milliseconds);
  function complain(error) {
    trouble.textContent = error.message;
    head.append(trouble);
    again(SLOW_POLL_MILLISECONDS);
  }
  look().catch(complain);
}

async function showTrials(name, place, from = 0) {
  const answer = await ask(`/api/trials/${encodeURIComponent(name)}?from=${from}`);
  const rows = answer.trials.map((trial) => makeTrialRow(name, trial));
  const rest = answer.num_trials - from - answer.trials.length;
  const more = make("button", { hidden: rest <= 0 }, `${rest} more`);
  more.addEventListener("click", () => {
    more.remove();
    showTrials(name, place, from + answer.trials.length).catch((error) => place.append(error.message));
  });
  if (from === 0) {
    place.replaceChildren(
      make("summary", {}, `Trials (${answer.num_trials})`),
      table([["trial", ""], ["status", ""], ["files", ""]], rows),
    );
  } else {
    place.querySelector("tbody").append(...rows);
  }
  place.append(more);
}

function makeTrialRow(name, trial) {
  const files = make("td");
  const look = make("button", {}, "Files");
  look.setAttribute("aria-label", `Files of ${trial.name}`);
  look.addEventListener("click", async () => {
    const found = await ask(`/api/files/${encodeURIComponent(name)}/${encodeURIComponent(trial.name)}`);
    const start = `/files/${encodeURIComponent(name)}/trials/${encodeURIComponent(trial.name)}/`;
    const links = found.files.flatMap((file) => [link(start + encodeURIComponent(file), file), " "]);
    files.replaceChildren(...(links.length ? links : ["–"]));
  });
  files.append(look);
  const kind = trial.status === "completed" ? "completed" : ["running", "waiting"].includes(trial.status) ? "" : "failed";
  return make("tr", {}, make("td", {}, trial.name), make("td", { className: kind }, trial.status), files);
}

// Two runs.

function showTwo(a, b) {
  where.textContent = `${a} and ${b}`;
  document.title = `${a} and ${b} · scalelab`;
  const query = `a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`;
  const both = make("iframe", { title: "Comparison", src: `/report?${query}` });
  const columns = [a, b].map((name) => make(
    "div", {}, make("p", {}, link(runPath(name), name)),
    make("iframe", { title: `Report of ${name}`, src: `/report/${encodeURIComponent(name)}` }),
  ));
  main.replaceChildren(make("h1", {}, "Side by side"), both, make("div", { className: "two" }, ...columns));
}

const parts = location.pathname.split("/").filter(Boolean).map(decodeURIComponent);
const asked = new URLSearchParams(location.search);
if (parts[0] === "run" && parts[1]) showRun(parts[1]);
else if (parts[0] === "compare" && asked.get("a") && asked.get("b")) showTwo(asked.get("a"), asked.get("b"));
else showList();
