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
  const head = make("tr", {}, ...headers.map(([title, kind]) => title ? make("th", { scope: "col", className: kind }, title) : make("td", {})));
  return make("div", { className: "box" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

// The list of runs. Its address holds what is asked for, so that a link shows the same to others.

const FILTERS = ["study", "workload", "host", "tag", "since", "until"];

function compareLink(names) {
  return `/compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
}

function labelled(text, control) {
  return make("label", {}, make("span", {}, text), control);
}

function makeFilter(name, value) {
  const isDate = name === "since" || name === "until";
  const control = isDate ? make("input", { type: "date", value }) : make("select", {}, make("option", { value: "" }, "any"));
  control.name = name;
  if (!isDate && value) control.append(make("option", { value, selected: true }, value));
  return control;
}

function fillChoices(control, names) {
  const chosen = control.value;
  const wanted = ["", ...new Set(chosen ? [...names, chosen] : names)];
  if ([...control.options].map((option) => option.value).join("\n") === wanted.join("\n")) return;
  control.replaceChildren(...wanted.map((name) => make("option", { value: name, selected: name === chosen }, name || "any")));
}

function shareButton() {
  const button = make("button", { type: "button" }, "Copy link");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      button.textContent = location.href;
    }
  });
  return button;
}

function showList() {
  const chosen = new Set();
  const given = new URLSearchParams(location.search);
  const search = make("input", { type: "search", placeholder: "Search runs, studies, workloads, states, tags" });
  search.setAttribute("aria-label", "Search");
  search.setAttribute("aria-keyshortcuts", "/");
  search.value = given.get("q") || "";
  const filters = Object.fromEntries(FILTERS.map((name) => [name, makeFilter(name, given.get(name) || "")]));
  const compare = make("button", { type: "button", disabled: true }, "Compare");
  const trend = make("button", { type: "button", disabled: true }, "Trend");
  const count = make("p", { className: "quiet" });
  count.setAttribute("role", "status");
  const place = make("div");
  const more = make("button", { type: "button", hidden: true }, "More");
  place.className = "runs";
  let shown = [];
  let number = 0;

  function query() {
    const asked = new URLSearchParams();
    if (search.value.trim()) asked.set("q", search.value.trim());
    for (const name of FILTERS) if (filters[name].value) asked.set(name, filters[name].value);
    return asked;
  }

  function choose(name, isChosen) {
    if (isChosen) chosen.add(name);
    else chosen.delete(name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size} chosen` : "Compare";
    trend.disabled = chosen.size !== 1;
  }

  function makeRow(run) {
    const box = make("input", { type: "checkbox", checked: chosen.has(run.name) });
    box.setAttribute("aria-label", `Choose ${run.name}`);
    box.addEventListener("change", () => choose(run.name, box.checked));
    const tags = run.tags.map((tag) => make("span", { className: "tag" }, tag));
    return make(
      "tr", {},
      make("td", {}, box),
      make("td", {}, link(runPath(run.name), run.name), ...tags),
      make("td", {}, run.study),
      make("td", {}, run.workload),
      make("td", {}, run.host || "–"),
      make("td", { className: "number" }, `${run.num_done}/${run.num_trials}`),
      make("td", { className: classOf(run) }, run.state),
    );
  }

  async function load(isMore) {
    const mine = ++number;
    const asked = query();
    const address = asked.toString() ? `/?${asked}` : "/";
    if (address !== location.pathname + location.search) history.replaceState(null, "", address);
    asked.set("from", isMore ? shown.length : 0);
    const answer = await ask(`/api/runs?${asked}`);
    if (mine !== number) return;
    shown = isMore ? shown.concat(answer.runs) : answer.runs;
    for (const name of ["study", "workload", "host", "tag"]) fillChoices(filters[name], answer.choices[name]);
    const headers = [
      ["", ""], ["run", ""], ["study", ""], ["workload", ""], ["host", ""], ["trials", "number"], ["state", ""],
    ];
    place.replaceChildren(table(headers, shown.map(makeRow)));
    more.hidden = shown.length >= answer.num_runs;
    const counted = `${formatCount(answer.num_runs, "run")}, ${formatCount(answer.num_trials, "trial")}`;
    if (count.textContent !== counted) count.textContent = counted;
  }

  const complain = (error) => { count.textContent = error.message; };
  const reload = () => load(false).catch(complain);
  search.addEventListener("input", reload);
  for (const control of Object.values(filters)) control.addEventListener("change", reload);
  more.addEventListener("click", () => load(true).catch(complain));
  compare.addEventListener("click", () => { location.href = compareLink([...chosen].reverse()); });
  trend.addEventListener("click", () => {
    const asked = new URLSearchParams([...query()].filter(([name]) => name !== "q"));
    location.href = `/trend/${encodeURIComponent([...chosen][0])}${asked.toString() ? `?${asked}` : ""}`;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(input|select)$/i.test(event.target.tagName)) return;
    event.preventDefault();
    search.focus();
  });
  const form = make("form", { className: "bar" }, ...FILTERS.map((name) => labelled(name, filters[name])));
  form.setAttribute("aria-label", "Filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  const title = make("h1", { className: "unseen" }, "Runs");
  main.replaceChildren(
    title, make("div", { className: "bar" }, search, compare, trend, shareButton()), form, count, place, more,
  );
  reload();
  // Refresh the list only while the user is not working in it.
  setInterval(() => { if (!document.hidden && !chosen.size && shown.length <= 200) reload(); }, 5000);
}

// One run.

function showRun(name) {
  where.textContent = name;
  document.title = `${name} · scalelab`;
  const head = make("div");
  const frame = make("iframe", { title: `Report of ${name}` });
  const trials = make("details", {}, make("summary", {}, "Trials"));
  trials.addEventListener("toggle", () => { if (trials.open) showTrials(name, trials).catch((error) => trials.append(error.message)); });
  const tags = make("form", { className: "bar tags" });
  main.replaceChildren(head, tags, trials, frame);
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
      make(
        "p", {}, link(`/report/${encodeURIComponent(name)}`, "Open the report"), " · ",
        link(`/trend/${encodeURIComponent(name)}`, "Trend of this configuration"),
      ),
    );
    if (!tags.childElementCount) fillTags(name, tags, line.tags);
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

function fillTags(name, form, known) {
  const words = make("input", { type: "text", value: known.join(", "), placeholder: "none" });
  const save = make("button", { type: "submit" }, "Save tags");
  const said = make("span", { className: "quiet" });
  said.setAttribute("role", "status");
  form.replaceChildren(labelled("tags, separated by commas", words), save, said);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = await fetch(`/api/tags/${encodeURIComponent(name)}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(words.value.split(",")),
    });
    if (!answer.ok) { said.textContent = (await answer.text()).trim(); return; }
    words.value = (await answer.json()).tags.join(", ");
    said.textContent = "Saved";
  });
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

// Several runs, and one configuration over time.

function showSeveral(names) {
  where.textContent = formatCount(names.length, "run");
  document.title = `${names.length} runs · scalelab`;
  const query = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
  const all = make("iframe", { title: "Comparison", src: `/report?${query}` });
  const columns = names.map((name) => make(
    "div", {}, make("p", {}, link(runPath(name), name)),
    make("iframe", { title: `Report of ${name}`, src: `/report/${encodeURIComponent(name)}`, loading: "lazy" }),
  ));
  const bar = make("div", { className: "bar" }, make("h1", {}, "Side by side"), shareButton());
  main.replaceChildren(bar, all, make("div", { className: "two" }, ...columns));
}

function showTrend(name) {
  where.textContent = name;
  document.title = `Trend of ${name} · scalelab`;
  const bar = make(
    "div", { className: "bar" }, make("h1", {}, "The same configuration over time"), link(runPath(name), name), shareButton(),
  );
  const frame = make("iframe", { title: "Trend", src: `/report-trend/${encodeURIComponent(name)}${location.search}` });
  main.replaceChildren(bar, frame);
}

const parts = location.pathname.split("/").filter(Boolean).map(decodeURIComponent);
const asked = new URLSearchParams(location.search);
const several = asked.getAll("run").length ? asked.getAll("run") : [asked.get("a"), asked.get("b")].filter(Boolean);
if (parts[0] === "run" && parts[1]) showRun(parts[1]);
else if (parts[0] === "trend" && parts[1]) showTrend(parts[1]);
else if (parts[0] === "compare" && several.length > 1) showSeveral(several);
else showList();
