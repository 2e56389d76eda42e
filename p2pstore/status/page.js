"use strict";
// Asks for status.json every two seconds, while the page is visible, and shows the answer.
// All text goes into the page as text: names and keys may have any content.

const POLL_MS = 2000;
const PATIENCE_MS = 5000;
const FEW_MEMBERS = 12; // shown before the reader of the page asks for more
const STATES = {
  alive: ["ok", "alive"], suspect: ["warning", "silent"], leaving: ["warning", "leaving"], dead: ["broken", "dead"],
};
const ICONS = {
  ok: "M4 12.5l5.5 5.5L20 6.5",
  warning: "M12 3L22 20.5H2Z M12 10v4.5 M12 17.5v.01",
  broken: "M6 6l12 12M18 6L6 18",
};
const COLORS = { ok: "%231a7f37", warning: "%23d29922", broken: "%23cf222e" };

let current = null; // the last document
let before = null; // the one before it
let answeredAt = null; // when it came, by this machine's clock
let heardAt = null; // the same, without answers from before the page was visible again
let silentSince = null;
let asking = false;
let timer = 0;
let showsAllMembers = false;

const place = (id) => document.getElementById(id);

// --- making elements, and putting them where older ones are ---------------------------------------------------

function element(space, tag, attributes, children) {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

const make = (tag, attributes, ...children) => element(null, tag, attributes, children);
const draw = (tag, attributes, ...children) => element("http://www.w3.org/2000/svg", tag, attributes, children);
const named = (text) => make("bdi", null, text);

// Unchanged elements stay, and with them the selection and the focus.
function become(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const theirs = old.nodeName === "DETAILS" ? "open" : ""; // the reader opened or closed it
  for (const { name } of [...old.attributes]) if (name !== theirs && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (name !== theirs && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  fill(old, [...fresh.childNodes]);
}

function fill(parent, children) {
  const nodes = children.flat(9).filter(Boolean);
  nodes.forEach((fresh, index) => {
    const old = parent.childNodes[index];
    if (old) become(old, fresh);
    else parent.append(fresh);
  });
  while (parent.childNodes.length > nodes.length) parent.lastChild.remove();
}

function icon(state) {
  return draw("svg", { class: `icon ${state}`, viewBox: "0 0 24 24", "aria-hidden": "true" }, draw("path", { d: ICONS[state] }));
}

function meter(share, state) {
  const width = Math.max(0, Math.min(100, 100 * share));
  const attributes = { class: `meter ${state || ""}`, viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" };
  return draw("svg", attributes, draw("rect", { width: width.toFixed(1), height: 4 }));
}

function spark(values, state) {
  const top = Math.max(1e-9, ...values);
  const points = values.map((value, index) => `${index},${(30 - (28 * value) / top).toFixed(1)}`).join(" ");
  const last = Math.max(1, values.length - 1);
  const attributes = { class: `spark ${state || ""}`, viewBox: `0 0 ${last} 31`, preserveAspectRatio: "none", "aria-hidden": "true" };
  if (values.length < 2) return draw("svg", attributes);
  return draw("svg", attributes,
    draw("polygon", { class: "area", points: `0,31 ${points} ${last},31` }),
    draw("polyline", { class: "line", points }));
}

// --- numbers as people read them ------------------------------------------------------------------------------

const count = (number) => Math.round(number).toLocaleString("en-US");
const several = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}\u00a0%`;

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let place = 0;
  while (number >= 1024 && place < units.length - 1) {
    number /= 1024;
    place += 1;
  }
  return `${place && number < 100 ? number.toFixed(1) : Math.round(number)}\u00a0${units[place]}`;
}

function duration(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.round(seconds / length)}\u00a0${unit}`;
  }
  return `${Math.max(0, Math.round(seconds))}\u00a0s`;
}

const perSecond = (number) => (number >= 10 || number === 0 ? count(number) : number.toFixed(1));
const clock = (date) => date.toLocaleTimeString("en-GB");

function inUnits(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 1 : 0)}\u00a0s`;
  if (seconds < 0.0001) return `${Math.round(1e6 * seconds)}\u00a0\u00b5s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)}\u00a0ms`;
}

// --- what is shown --------------------------------------------------------------------------------------------

function worst(status) {
  if (status.problems.some((each) => each.status === "broken")) return "broken";
  return status.problems.length || status.peer.state !== "ready" ? "warning" : "ok";
}

function headline(status) {
  const found = status.problems.length + status.problems_left_out;
  if (found === 1) return status.problems[0].what;
  if (found) return `${count(found)} things need attention`;
  if (status.peer.state === "joining") return "Looking for the others";
  return "All is well";
}

function showState(status) {
  const state = worst(status);
  fill(place("state"), [icon(state), make("span", null, headline(status))]);
  const color = COLORS[state];
  const picture = `data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'><circle cx='4' cy='4' r='4' fill='${color}'/></svg>`;
  if (place("icon").getAttribute("href") !== picture) place("icon").setAttribute("href", picture);
  document.title = `${{ ok: "", warning: "\u25b2 ", broken: "\u2715 " }[state]}${status.peer.name} \u2013 ${headline(status)}`;
  fill(place("name"), [named(status.peer.name)]);
  const about = ["cluster ", named(status.cluster.name), ` \u00b7 up ${duration(status.peer.uptime_seconds)}`];
  fill(place("about"), about.map((each) => (each instanceof Node ? each : document.createTextNode(each))));
}

// Commands stand between backticks.
const prose = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", null, part) : part));

function problemCard(problem, index, alone) {
  const why = make("p", null, "Why: ", prose(problem.cause), ".");
  const cure = make("p", null, "What to do: ", prose(problem.cure), ".");
  if (alone) return make("article", { class: `problem ${problem.status}` }, why, cure); // the headline says what
  const open = index === 0 || innerWidth >= 700 ? "" : null;
  return make("details", { class: `problem ${problem.status}`, open }, make("summary", null, problem.what), why, cure);
}

function showProblems(status) {
  const { problems, problems_left_out: left } = status;
  const cards = problems.map((each, index) => problemCard(each, index, problems.length === 1 && !left));
  if (left) cards.push(make("p", { class: "note" }, `and ${count(left)} more`));
  fill(place("problems"), cards);
}

function tile(title, value, state, small, ...more) {
  return make("div", { class: "card" }, make("h2", null, title), make("div", { class: `big ${state}` }, value), more,
    make("p", { class: "muted" }, small));
}

function showVitals(status) {
  const { cluster, lately, totals } = status;
  const wrong = ["dead", "suspect", "leaving"].filter((state) => cluster.counts[state]);
  const worse = wrong[0];
  const who = wrong.map((state) => `${count(cluster.counts[state])} ${STATES[state][1]}`).join(", ");
  const full = cluster.memory_capacity_bytes ? cluster.memory_used_bytes / cluster.memory_capacity_bytes : 0;
  const asked = lately.gets + lately.misses;
  const time = duration(lately.seconds);
  const { grown, seconds } = status.recent;
  const hits = seconds.map((_, index) => [grown.gets[index], grown.gets[index] + grown.misses[index]]).filter((each) => each[1]);
  fill(place("vitals"), [
    tile("Members", count(cluster.live), worse ? STATES[worse][0] : "", who || (cluster.live === 1 ? "alone in the cluster" : "all alive")),
    tile("Memory of all", percent(full), "", `of ${bytes(cluster.memory_capacity_bytes)}, ${several(cluster.copies, "copy", "copies")}`, meter(full)),
    tile("Last copies lost", count(lately.last_copies_dropped), status.problems.some((each) => each.name === "data lost") ? "warning" : "",
      `here, in the last ${time}; ${count(totals.last_copies_dropped)} since the start`),
    tile("Hit rate", asked ? percent(lately.gets / asked, lately.misses ? 1 : 0) : "\u2013", "",
      asked ? `of ${several(asked, "get", "gets")} in the last ${time}` : `no gets in the last ${time}`,
      hits.length > 2 ? spark(hits.map(([found, all]) => found / all)) : null),
  ]);
}

const cell = (className, ...children) => make("td", { class: className }, ...children);
const heading = (className, text) => make("th", { class: className, scope: "col" }, text);

function shareCell(used, capacity, className) {
  if (!capacity) return cell(className, make("span", { class: "muted" }, "none"));
  const share = used / capacity;
  return cell(className, meter(share), make("span", { class: "muted" }, `${percent(share)} of ${bytes(capacity)}`));
}

function memberRow(member) {
  const [level, word] = STATES[member.state] || ["warning", "unknown"];
  const gone = member.state === "dead";
  const since = gone && member.state_seconds !== null ? ` for ${duration(member.state_seconds)}` : "";
  const status = () => make("span", { class: `status ${level === "ok" ? "" : level}` }, make("span", { class: `dot ${level}` }), word + since);
  const nothing = () => make("span", { class: "muted" }, "\u2013");
  return make("tr", null,
    cell("", named(member.name), " ", member.me ? make("span", { class: "me" }, "this peer") : null, make("div", { class: "thin" }, status())),
    cell("narrow wide", status()),
    gone ? cell("", nothing()) : shareCell(member.memory_used_bytes, member.memory_capacity_bytes, ""),
    gone ? cell("wide", nothing()) : shareCell(member.ssd_used_bytes, member.ssd_capacity_bytes, "wide"),
    cell("number wide", gone ? nothing() : count(member.objects)),
    cell("number wide", gone ? nothing() : percent(member.load_permille / 1000)),
    cell("number wide", gone || !member.round_trip_seconds ? nothing() : inUnits(member.round_trip_seconds)));
}

function showMembers(status) {
  const wrong = status.members.filter((member) => member.state !== "alive").length;
  const few = Math.max(FEW_MEMBERS, Math.min(wrong, 2 * FEW_MEMBERS));
  const members = showsAllMembers || status.members.length <= few + 4 ? status.members : status.members.slice(0, few);
  const folded = status.members.length - members.length;
  const left = status.cluster.members_left_out;
  const notes = [];
  if (folded) {
    notes.push(make("button", { type: "button", id: "more-members" }, `show ${count(folded)} more`));
    if (left) notes.push(` of ${count(folded + left)}`);
  } else if (left) {
    notes.push(`and ${count(left)} more that are not shown`);
  }
  fill(place("members"), [
    make("h2", null, "Members"),
    make("table", null,
      make("thead", null, make("tr", null, heading("", "Name"), heading("narrow wide", "State"), heading("", "Memory"), heading("wide", "SSD"),
        heading("number wide", "Objects"), heading("number wide", "Load"), heading("number wide", "Ping"))),
      make("tbody", null, members.map(memberRow))),
    notes.length ? make("p", { class: "note" }, notes) : null,
  ]);
}

// What happened per second between the last two answers; just after the page was opened, in the last interval.
function rateOf(status, name) {
  if (before && before.peer.incarnation === status.peer.incarnation && status.unix > before.unix) {
    return Math.max(0, status.totals[name] - before.totals[name]) / (status.unix - before.unix);
  }
  const { grown, seconds } = status.recent;
  return seconds.length ? grown[name].at(-1) / Math.max(1, seconds.at(-1)) : 0;
}

function showActivity(status) {
  const { grown, seconds } = status.recent;
  const row = (label, name, written, state) => {
    const values = seconds.map((length, index) => grown[name][index] / Math.max(1, length));
    return make("div", { class: "row" }, make("span", { class: "muted" }, label), spark(values, state),
      make("span", { class: "number" }, written(rateOf(status, name))));
  };
  fill(place("activity"), [
    make("h2", null, "Clients of this peer"),
    row("gets", "gets", (rate) => `${perSecond(rate)}/s`),
    row("misses", "misses", (rate) => `${perSecond(rate)}/s`, "warning"),
    row("puts", "puts", (rate) => `${perSecond(rate)}/s`),
    row("bytes in", "in_bytes", (rate) => `${bytes(rate)}/s`),
    row("bytes out", "out_bytes", (rate) => `${bytes(rate)}/s`),
    make("p", { class: "note" }, seconds.length > 1 ? `curves: the last ${duration(seconds.reduce((a, b) => a + b, 0))}` : "curves come with time"),
  ]);
}

function fact(term, ...value) {
  return [make("dt", null, term), make("dd", null, ...value)];
}

function showPeer(status) {
  const { memory, ssd, repair } = status;
  const share = memory.capacity_bytes ? memory.used_bytes / memory.capacity_bytes : 0;
  const facts = [
    fact("memory", memory.capacity_bytes ? [`${percent(share)} of ${bytes(memory.capacity_bytes)}`, meter(share)] : "offers none"),
    fact("objects", `${count(memory.objects)}, ${memory.leased_bytes ? bytes(memory.leased_bytes) : "nothing"} in use`),
    memory.quotas.map((quota) => fact("quota", named(quota.namespace), `: ${bytes(quota.kept_bytes)} of ${bytes(quota.quota_bytes)}`)),
  ];
  if (ssd) {
    const full = ssd.capacity_bytes ? ssd.live_bytes / ssd.capacity_bytes : 0;
    const state = { ok: "", read_only: "warning", off: "broken" }[ssd.state];
    facts.push(fact("SSD", ssd.state === "ok" ? null : make("b", { class: state }, `${ssd.state.replace("_", " ")}: `),
      `${percent(full)} of ${bytes(ssd.capacity_bytes)}, ${several(ssd.objects, "object", "objects")}`, meter(full, state)));
    facts.push(fact("SSD reads", ssd.hit_rate === null ? "none asked for" : `${percent(ssd.hit_rate)} found`,
      ssd.read_latency.p50_ms ? `, ${ssd.read_latency.p50_ms.toFixed(1)}\u00a0ms, 99\u00a0% in ${ssd.read_latency.p99_ms.toFixed(1)}\u00a0ms` : ""));
    facts.push(fact("SSD errors", ssd.errors ? make("b", { class: "broken" }, count(ssd.errors)) : "none",
      ssd.damaged ? `, ${several(ssd.damaged, "object", "objects")} damaged` : ""));
  } else {
    facts.push(fact("SSD", make("span", { class: "muted" }, "none")));
  }
  facts.push(fact("copies", repair.lacking
    ? make("b", { class: "warning" }, `${several(repair.lacking, "object lacks", "objects lack")} some`)
    : "as many as wanted", repair.copies ? `; ${count(repair.copies)} made again after losses` : ""));
  fill(place("peer"), [make("h2", null, "This peer"), make("dl", { class: "facts" }, facts)]);
}

function showCheckpoints(status) {
  if (!status.checkpoints.length) {
    fill(place("checkpoints"), []);
    return;
  }
  const shown = status.checkpoints.map((each) => {
    const parts = [`${several(each.complete, "member has", "members have")} all of it`];
    if (each.fetching) parts.push(`${count(each.fetching)} fetching, the slowest at ${percent(each.slowest_permille / 1000)}`);
    if (each.followers) parts.push(`${count(each.switched)} of ${several(each.followers, "follower uses", "followers use")} it`);
    const all = each.complete + each.fetching + each.failed;
    const done = all ? (each.complete + (each.fetching * (each.done_permille || 0)) / 1000) / all : 0;
    return make("div", { class: "checkpoint" },
      make("p", null, make("b", null, named(each.name)), " ", make("code", { class: "muted" }, each.version),
        make("span", { class: "muted" }, ` ${bytes(each.total_bytes)}, by `, named(each.publisher), `, ${duration(status.unix - each.published_unix)} ago`)),
      meter(done, each.failed ? "broken" : ""),
      make("p", { class: "muted" }, parts.join("; "), each.failed ? ["; ", make("b", { class: "broken" }, `failed on ${count(each.failed)}`)] : null));
  });
  const left = status.checkpoints_left_out;
  fill(place("checkpoints"), [make("h2", null, "Checkpoints"), shown, left ? make("p", { class: "note" }, `and ${count(left)} more`) : null].flat());
}

function showTransfers(status) {
  const names = [...new Set([status.received, status.served, status.reads].flatMap(Object.keys))].sort();
  const unknown = "\u2013"; // reads by shared memory or RDMA send no request
  const rows = names.map((name) => {
    const came = status.received[name];
    const went = status.served[name];
    const took = status.reads[name] || { count: 0 };
    const time = (length_ms) => (took.count ? inUnits(length_ms / 1000) : unknown);
    const failed = came && came.failures ? make("b", { class: "warning" }, count(came.failures)) : "0";
    return make("tr", null, cell("narrow", name), cell("number", came ? bytes(came.bytes) : unknown), cell("number", came ? failed : unknown),
      cell("number wide", time(took.p50_ms)), cell("number", time(took.p99_ms)), cell("number", went ? bytes(went.bytes) : unknown));
  });
  const head = [heading("", ""), heading("number", "In"), heading("number", "Failed"), heading("number wide", "Half in"),
    heading("number", "99\u00a0% in"), heading("number", "Out")];
  const busy = Object.values(status.served).reduce((sum, each) => sum + each.busy, 0);
  fill(place("transfers"), [
    make("h2", null, "Reads by transport"),
    make("table", { class: "dense" }, make("thead", null, make("tr", null, head)), make("tbody", null, rows)),
    make("p", { class: "note" }, `Since the start. ${several(busy, "reader was", "readers were")} sent on to other holders; `,
      `${several(status.totals.transport_fallbacks, "time", "times")} a transport gave way to another.`),
  ]);
}

function slowRow(operation, now) {
  const parts = operation.stages.map((stage) => [
    `${stage.what} ${inUnits(stage.seconds)}`, stage.peer ? [" from ", named(stage.peer)] : "", stage.transport ? ` by ${stage.transport}` : ""]);
  if (operation.waiting_seconds >= 0.001) parts.push([`waiting ${inUnits(operation.waiting_seconds)}`]);
  const where = parts.flatMap((part, index) => (index ? [", ", part] : [part]));
  return make("tr", null,
    cell("", operation.what, operation.keys > 1 ? ` of ${count(operation.keys)} keys` : "", operation.key ? [" ", make("code", null, named(operation.key))] : "",
      operation.failed ? make("b", { class: "warning" }, " failed") : "", make("span", { class: "muted" }, ` ${duration(now - operation.unix)} ago`),
      make("div", { class: "muted" }, where)),
    cell("number", inUnits(operation.seconds)));
}

function showSlow(status) {
  const { latest, threshold_seconds: threshold } = status.slow;
  if (!latest.length) {
    fill(place("slow"), []);
    return;
  }
  fill(place("slow"), [
    make("h2", null, "Slow of late"),
    make("table", null, make("tbody", null, latest.map((each) => slowRow(each, status.unix)))),
    make("p", { class: "note" }, `${several(status.lately.slow, "operation", "operations")} of this peer's clients took over ${inUnits(threshold)} `,
      `in the last ${duration(status.lately.seconds)}. On its machine: `, make("code", null, "mooncake-p2p stats --slow"), "."),
  ]);
}

function showHottest(status) {
  const rows = status.hottest.map((each, index) =>
    make("tr", null, cell("narrow muted", String(index + 1)),
      cell("", make("span", { class: each.key === null ? "" : "muted" }, named(each.namespace)), each.key === null ? null : [" ", make("code", null, named(each.key))]),
      cell("number", bytes(each.bytes)), cell("number", `${perSecond(60 * each.reads_per_second)}/min`)));
  const hidden = status.with_keys ? null
    : make("p", { class: "note" }, "Keys are not shown here. On the peer's machine: ", make("code", null, "mooncake-p2p stats --json"), ".");
  fill(place("hottest"), [
    make("h2", null, "Read most here"),
    rows.length ? make("table", null, make("tbody", null, rows)) : make("p", { class: "muted" }, "Nothing was read of late."),
    rows.length ? hidden : null,
  ]);
}

function show(status) {
  showState(status);
  showProblems(status);
  showVitals(status);
  showMembers(status);
  showActivity(status);
  showPeer(status);
  showCheckpoints(status);
  showTransfers(status);
  showSlow(status);
  showHottest(status);
  fill(place("footer"), [document.createTextNode(`p2pstore ${status.peer.software} \u00b7 peer ${status.peer.id}`)]);
  document.querySelector("main").hidden = false;
}

// --- asking ---------------------------------------------------------------------------------------------------

function showWhetherItAnswers() {
  const lost = silentSince !== null;
  document.body.classList.toggle("stale", lost);
  place("pulse").className = lost ? "off" : answeredAt ? "on" : "";
  place("lost").hidden = !lost;
  if (lost) {
    const since = `${clock(silentSince)} (for ${duration((Date.now() - silentSince) / 1000)})`;
    const text = current ? `The peer has not answered since ${since}. The figures below are from then.` : `The peer has not answered since ${since}.`;
    fill(place("lost"), [document.createTextNode(text)]);
    place("live-text").textContent = "no answer";
    document.title = `\u2715 no answer${current ? ` \u2013 ${current.peer.name}` : ""}`;
  } else if (answeredAt) {
    place("live-text").textContent = clock(answeredAt);
  }
}

async function ask() {
  const control = new AbortController();
  const late = setTimeout(() => control.abort(), PATIENCE_MS);
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: control.signal });
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    return await answer.json();
  } catch {
    return null; // it ended, is cut off or hangs: the page says so
  } finally {
    clearTimeout(late);
  }
}

async function poll() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  const began = new Date();
  try {
    const status = await ask();
    if (status === null) {
      if (!document.hidden) silentSince = silentSince || heardAt || began;
    } else {
      answeredAt = heardAt = new Date();
      silentSince = null;
      if (current && current.unix !== status.unix) before = current; // else it is the same document once more
      current = status;
      show(status);
    }
  } finally {
    asking = false;
    showWhetherItAnswers();
    if (!document.hidden) timer = setTimeout(poll, POLL_MS);
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  heardAt = silentSince = null; // no requests in between
  poll();
});
place("members").addEventListener("click", (event) => {
  if (event.target.id !== "more-members") return;
  showsAllMembers = true;
  showMembers(current);
});
setInterval(() => silentSince !== null && showWhetherItAnswers(), 1000);
poll();
