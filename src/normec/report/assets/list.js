"use strict";
// The list of runs: asks every two seconds what has changed, and changes only those lines.
(() => {
  const byId = (name) => document.getElementById(name);
  const entries = new Map(); // path → entry
  const lines = new Map(); // path → row of the table
  const opened = new Map(); // path of a sweep or comparison → shown open, if the reader said so
  const picked = new Set();
  const FEW = 8;
  let token = "";

  const make = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const href = (path) => `/run/${entries.get(path).address}`;
  const digits = (value, count) => (value === null || value === undefined ? "" : String(Number(value.toPrecision(count))));

  // The sweep or comparison that a run belongs to.
  function home(path) {
    for (let at = path.lastIndexOf("/"); at > 0; at = path.lastIndexOf("/", at - 1)) {
      const above = path.slice(0, at);
      if (entries.has(above)) return above;
    }
    return path !== "." && entries.has(".") ? "." : null;
  }

  function spark(held) {
    const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    box.setAttribute("viewBox", "0 0 100 28");
    box.setAttribute("class", "spark");
    box.setAttribute("preserveAspectRatio", "none");
    box.setAttribute("role", "img");
    const [low, high] = [Math.min(...held.y), Math.max(...held.y)];
    const [first, end] = [held.x[0], held.x[held.x.length - 1]];
    const points = held.y.map((y, k) => {
      const x = (100 * (held.x[k] - first)) / (end - first || 1);
      return `${x.toFixed(1)},${(26 - (24 * (y - low)) / (high - low || 1)).toFixed(1)}`;
    });
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", points.join(" "));
    box.setAttribute("aria-label", `${held.column} from ${digits(held.y[0], 3)} to ${digits(held.y[held.y.length - 1], 3)}`);
    box.append(line);
    return box;
  }

  function progress(entry) {
    const cell = make("td", undefined, "progress");
    if (entry.rounds) {
      const bar = make("progress");
      [bar.max, bar.value] = [entry.rounds, entry.round];
      bar.setAttribute("aria-label", "rounds done");
      cell.append(bar);
    }
    cell.append(make("span", entry.rounds ? `${entry.round} / ${entry.rounds}` : String(entry.round)));
    return cell;
  }

  function named(entry) {
    const cell = make("td", undefined, "name");
    const link = make("a", entry.path === "." ? entry.name : entry.path);
    const parent = home(entry.path);
    if (parent !== null && parent !== ".") link.textContent = entry.path.slice(parent.length + 1);
    link.href = href(entry.path);
    cell.append(link);
    const word = entry.kind === "run" ? [entry.method, entry.data].filter(Boolean).join(", ") : entry.kind;
    cell.append(make("small", entry.error ?? word));
    return cell;
  }

  function fill(line, entry) {
    const box = make("input");
    Object.assign(box, { type: "checkbox", checked: picked.has(entry.path) });
    box.setAttribute("aria-label", `Choose ${entry.path}`);
    box.addEventListener("change", () => {
      if (box.checked) picked.add(entry.path); else picked.delete(entry.path);
      byId("together").disabled = picked.size < 2;
    });
    const first = make("td", undefined, "pick");
    if (entry.kind !== "run") {
      line.className = "group";
      const rest = make("td");
      rest.colSpan = 6;
      rest.append(make("button", "", "small fold"));
      line.replaceChildren(first, named(entry), rest);
      return;
    }
    first.append(box);
    const status = make("td");
    status.append(make("span", entry.status, `pill ${entry.status}`));
    if (entry.simulation) {
      const mark = make("span", "simulation", "pill simulation");
      mark.title = "Simulation: seeded noise protects nobody";
      status.append(" ", mark);
    }
    const curve = make("td", undefined, "curve");
    if (entry.spark) curve.append(spark(entry.spark));
    line.className = home(entry.path) === null ? "" : "member";
    line.replaceChildren(
      first, named(entry), status, progress(entry),
      make("td", entry.private ? digits(entry.epsilon, 3) : "∞", "number epsilon"),
      make("td", entry.accuracy === null || entry.accuracy === undefined ? "" : `${(100 * entry.accuracy).toFixed(1)} %`, "number accuracy"),
      make("td", digits(entry.loss, 3), "number loss"), curve,
    );
  }

  function fold(path, members) {
    const training = members.filter((one) => one.status === "training").length;
    const open = opened.get(path) ?? members.length <= FEW;
    const button = lines.get(path).querySelector("button.fold");
    button.textContent = `${members.length} runs${training ? `, ${training} training` : ""}: ${open ? "hide" : "show"}`;
    button.setAttribute("aria-expanded", String(open));
    button.hidden = members.length === 0;
    button.onclick = () => {
      opened.set(path, !open);
      show();
    };
    return open;
  }

  function show() {
    const wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = (entry) => wanted.every((word) => `${entry.path} ${entry.method} ${entry.data} ${entry.status}`.toLowerCase().includes(word));
    const paths = [...entries.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const open = new Map();
    for (const path of paths) {
      if (entries.get(path).kind === "run") continue;
      open.set(path, fold(path, paths.filter((one) => entries.get(one).kind === "run" && home(one) === path).map((one) => entries.get(one))));
    }
    const order = [];
    for (const path of paths.filter((one) => home(one) === null)) {
      order.push(path, ...paths.filter((one) => home(one) === path));
    }
    order.push(...paths.filter((one) => !order.includes(one)));
    order.forEach((path, position) => {
      const line = lines.get(path);
      const parent = home(path);
      line.hidden = wanted.length ? !found(entries.get(path)) : parent !== null && open.get(parent) === false;
      if (byId("runs").children[position] !== line) byId("runs").insertBefore(line, byId("runs").children[position] ?? null);
    });
    const all = [...entries.values()].filter((entry) => entry.kind === "run");
    const training = all.filter((entry) => entry.status === "training").length;
    byId("empty").hidden = entries.size > 0;
    byId("list").hidden = entries.size === 0;
    byId("state").textContent = all.length ? `${all.length} runs, ${training} training` : "";
  }

  function take(news) {
    if (news.whole) for (const path of [...entries.keys()]) if (!news.changed.some((one) => one.path === path)) news.gone.push(path);
    for (const path of news.gone) {
      lines.get(path)?.remove();
      [entries, lines, picked].forEach((held) => held.delete(path));
    }
    for (const entry of news.changed) {
      entries.set(entry.path, entry);
      if (!lines.has(entry.path)) lines.set(entry.path, make("tr"));
    }
    for (const entry of news.changed) {
      const line = lines.get(entry.path);
      const focused = line.contains(document.activeElement) ? document.activeElement.tagName : null;
      fill(line, entry);
      if (focused) line.querySelector(focused)?.focus();
    }
    if (news.gone.length || news.changed.length) show();
  }

  async function follow() {
    try {
      const answer = await fetch(`/api/runs?since=${encodeURIComponent(token)}`);
      if (!answer.ok) throw new Error(await answer.text());
      const news = await answer.json();
      token = news.token;
      take(news);
      document.documentElement.dataset.followed = "yes";
      if (byId("state").dataset.away) show();
      delete byId("state").dataset.away;
    } catch {
      byId("state").dataset.away = "yes";
      byId("state").textContent = "The server does not answer; these are its last words.";
    }
    setTimeout(follow, document.hidden ? 6000 : 2000);
  }

  byId("find").addEventListener("input", show);
  byId("together").addEventListener("click", () => {
    location.href = `/together?${[...picked].map((path) => `run=${entries.get(path).address}`).join("&")}`;
  });
  follow();
})();
