"use strict";
// The list of runs: asks every two seconds what has changed, and changes only those lines.
(() => {
  const byId = (name) => document.getElementById(name);
  const entries = new Map(); // path → entry
  const lines = new Map(); // path → row of the table
  const opened = new Map(); // path of a sweep or comparison → shown open, if the reader said so
  const picked = new Set();
  const FEW = 8; // runs of a sweep that are shown without being asked for
  const USUAL = 5; // columns of settings that are shown without being asked for
  const FIRST = ["lr", "alpha", "beta", "decay", "tau", "momentum"]; // the order of settings; others follow
  const SYMBOLS = { alpha: "α", beta: "β", tau: "τ", eta: "η" };
  const KEPT = `normec-columns ${document.querySelector("h1").textContent}`;
  let token = "";
  let sort = { key: "", down: false }; // an empty key keeps runs in their folders
  let asked = null; // the settings that the reader wants as columns; null: the usual ones
  let columns = []; // the settings that are columns now

  const make = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const known = (value) => value !== null && value !== undefined;
  const href = (path) => `/run/${entries.get(path).address}`;
  const digits = (value, count) => {
    if (!known(value)) return "";
    const rounded = Number(value.toPrecision(count));
    return Math.abs(rounded) >= 1e6 ? rounded.toExponential().replace("+", "") : String(rounded);
  };
  const title = (name) => SYMBOLS[name] ?? name.replaceAll("_", " ");
  const runs = () => [...entries.values()].filter((entry) => entry.kind === "run");

  // What the columns that every list has show and are sorted by.
  const FIXED = {
    run: { title: "run", value: (entry) => entry.path },
    started: { title: "started", value: (entry) => entry.started },
    status: { title: "status", value: (entry) => entry.status },
    progress: { title: "progress", value: (entry) => entry.round },
    epsilon: { title: "ε", value: (entry) => (entry.private ? entry.epsilon : Infinity), number: true },
    accuracy: { title: "accuracy", value: (entry) => entry.accuracy, number: true },
    loss: { title: "loss", value: (entry) => entry.loss, number: true },
    test_loss: { title: "test loss", value: (entry) => entry.test_loss, number: true },
  };
  const worth = (entry, key) => (FIXED[key] ? FIXED[key].value(entry) : entry.settings?.[key.slice(1)]);

  // The sweep or comparison that a run belongs to.
  function home(path) {
    for (let at = path.lastIndexOf("/"); at > 0; at = path.lastIndexOf("/", at - 1)) {
      const above = path.slice(0, at);
      if (entries.has(above)) return above;
    }
    return path !== "." && entries.has(".") ? "." : null;
  }

  function setting(value) {
    if (!known(value)) return "";
    if (typeof value === "boolean") return value ? "yes" : "no";
    return typeof value === "number" ? digits(value, 4) : String(value);
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

  function tag(word) {
    const button = make("button", word, "tag");
    button.type = "button";
    button.title = `Show the runs with the tag ${word}`;
    button.addEventListener("click", () => {
      byId("find").value = `tag:${word}`;
      show();
    });
    return button;
  }

  function named(entry) {
    const cell = make("td", undefined, "name");
    const link = make("a", entry.path === "." ? entry.name : entry.path);
    const parent = home(entry.path);
    if (!sort.key && parent !== null && parent !== ".") link.textContent = entry.path.slice(parent.length + 1);
    link.href = href(entry.path);
    cell.append(link);
    for (const word of entry.tags ?? []) cell.append(" ", tag(word));
    const word = entry.kind === "run" ? [entry.method, entry.data].filter(Boolean).join(", ") : entry.kind;
    cell.append(make("small", entry.error ?? word));
    const used = columns.filter((name) => known(entry.settings?.[name]));
    if (used.length) cell.append(make("small", used.map((name) => `${title(name)} ${setting(entry.settings[name])}`).join(" · "), "short"));
    return cell;
  }

  function fill(line, entry) {
    const first = make("td", undefined, "pick");
    if (entry.kind !== "run") {
      line.className = "group";
      const rest = make("td");
      rest.colSpan = 7 + columns.length;
      rest.append(make("button", "", "small fold"));
      line.replaceChildren(first, named(entry), rest);
      return;
    }
    const box = make("input");
    Object.assign(box, { type: "checkbox", checked: picked.has(entry.path) });
    box.setAttribute("aria-label", `Choose ${entry.path}`);
    box.addEventListener("change", () => {
      if (box.checked) picked.add(entry.path); else picked.delete(entry.path);
      showChoice();
    });
    first.append(box);
    const status = make("td", undefined, "status");
    status.append(make("span", entry.status, `pill ${entry.status}`));
    if (entry.simulation) {
      const mark = make("span", "simulation", "pill simulation");
      mark.title = "Simulation: seeded noise protects nobody";
      status.append(" ", mark);
    }
    const curve = make("td", undefined, "curve");
    if (entry.spark) curve.append(spark(entry.spark));
    line.className = home(entry.path) === null || sort.key ? "" : "member";
    const own = columns.map((name) => make("td", setting(entry.settings?.[name]), "setting number"));
    line.replaceChildren(
      first, named(entry), status, progress(entry),
      make("td", entry.shown_epsilon ?? "", "number epsilon"),
      make("td", known(entry.accuracy) ? `${(100 * entry.accuracy).toFixed(1)} %` : "", "number accuracy"),
      make("td", digits(entry.loss, 3), "number loss"), make("td", digits(entry.test_loss, 3), "number test-loss"), curve, ...own,
    );
  }

  // Settings in the order in which they are offered: those of methods and the step size, then those that differ, then all.
  function offered() {
    const all = runs();
    const used = new Set(["lr", ...all.flatMap((entry) => entry.own ?? [])]);
    const own = [...FIRST.filter((name) => used.has(name)), ...[...used].filter((name) => !FIRST.includes(name))];
    const names = [...new Set([...own, ...all.flatMap((entry) => Object.keys(entry.settings ?? {}))])];
    const values = (name) => new Set(all.map((entry) => JSON.stringify(entry.settings?.[name] ?? null)));
    const varied = new Set(names.filter((name) => values(name).size > 1));
    const rank = (name) => (own.includes(name) ? 0 : 2) + (varied.has(name) ? 0 : 1);
    return { names: names.sort((a, b) => rank(a) - rank(b)), usual: own.filter((name) => name === "lr" || varied.has(name)) };
  }

  // The columns that are wanted now; true if they are others than before.
  function chooseColumns() {
    const { names, usual } = offered();
    const wanted = asked === null ? usual.filter((name) => names.includes(name)).slice(0, USUAL) : names.filter((name) => asked.includes(name));
    const boxes = byId("columns");
    if (boxes.dataset.names !== names.join()) {
      boxes.dataset.names = names.join();
      boxes.replaceChildren(...names.map((name) => {
        const [label, box] = [make("label", undefined, "tick"), make("input")];
        Object.assign(box, { type: "checkbox", value: name });
        box.addEventListener("change", () => {
          asked = [...boxes.querySelectorAll("input:checked")].map((one) => one.value);
          try {
            localStorage.setItem(KEPT, JSON.stringify(asked));
          } catch {
            // storage is blocked: the choice lasts as long as the page
          }
          show();
        });
        label.append(box, ` ${name}`);
        return label;
      }));
    }
    for (const box of boxes.querySelectorAll("input")) box.checked = wanted.includes(box.value);
    if (wanted.join() === columns.join() && byId("heads").childElementCount) return false;
    columns = wanted;
    if (sort.key.startsWith(":") && !columns.includes(sort.key.slice(1))) sort = { key: "", down: false };
    return true;
  }

  function head(key, text, number) {
    const cell = make("th", undefined, number ? "number" : undefined);
    cell.scope = "col";
    if (sort.key === key) cell.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    const button = make("button", text);
    button.type = "button";
    button.addEventListener("click", () => {
      // Up, down, and back to the folders.
      sort = sort.key !== key ? { key, down: false } : sort.down ? { key: "", down: false } : { key, down: true };
      redraw();
    });
    cell.append(button);
    return cell;
  }

  function drawHeads() {
    const own = columns.map((name) => head(`:${name}`, title(name), true));
    const fixed = (key) => head(key, FIXED[key].title, FIXED[key].number);
    const bare = (text) => Object.assign(make("th", text), { scope: "col" });
    byId("heads").replaceChildren(
      bare(""), fixed("run"), fixed("status"), fixed("progress"), fixed("epsilon"), fixed("accuracy"), fixed("loss"), fixed("test_loss"),
      bare("curve"), ...own,
    );
    const options = [["", "by folder"], ["started down", "newest first"], ["run", "run"]];
    for (const key of [...columns.map((name) => `:${name}`), "epsilon", "accuracy", "loss", "test_loss"]) {
      const text = FIXED[key]?.title ?? title(key.slice(1));
      options.push([key, `${text}, smallest first`], [`${key} down`, `${text}, largest first`]);
    }
    const here = sort.key + (sort.down ? " down" : "");
    if (!options.some(([value]) => value === here)) options.push([here, `${FIXED[sort.key].title} ${sort.down ? "↓" : "↑"}`]);
    byId("sort").replaceChildren(...options.map(([value, text]) => Object.assign(make("option", text), { value })));
    byId("sort").value = here;
  }

  function redraw() {
    drawHeads();
    for (const [path, line] of lines) fill(line, entries.get(path));
    show();
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

  // One word of a search: tag:NAME, SETTING=VALUE, or a part of what the line says.
  function matches(entry, word) {
    if (word.startsWith("tag:")) return (entry.tags ?? []).some((one) => one.toLowerCase() === word.slice(4));
    const [, name, value] = word.match(/^([a-z_]+)=(.*)$/) ?? [];
    if (name) {
      const held = entry.settings?.[name];
      return known(held) && (String(held).toLowerCase() === value || (typeof held === "number" && value !== "" && held === Number(value)));
    }
    return [entry.path, entry.method, entry.data, entry.status, ...(entry.tags ?? [])].join(" ").toLowerCase().includes(word);
  }

  function compare(a, b) {
    const [left, right] = [worth(a, sort.key), worth(b, sort.key)];
    if (!known(left) || !known(right)) return Number(known(right)) - Number(known(left)); // gaps come last in both orders
    const order = typeof left === "number" && typeof right === "number"
      ? (left === right ? 0 : left - right) : String(left).localeCompare(String(right), "en", { numeric: true });
    return sort.down ? -order : order;
  }

  // The paths in the order of the lines: by folder, or all runs by a column and the rest after them.
  function ordered(paths) {
    if (sort.key) {
      const flat = paths.filter((path) => entries.get(path).kind === "run");
      flat.sort((a, b) => compare(entries.get(a), entries.get(b)));
      return [...flat, ...paths.filter((path) => entries.get(path).kind !== "run")];
    }
    const order = [];
    for (const path of paths.filter((one) => home(one) === null)) {
      order.push(path, ...paths.filter((one) => home(one) === path));
    }
    const placed = new Set(order);
    return [...order, ...paths.filter((one) => !placed.has(one))];
  }

  function show() {
    if (chooseColumns()) {
      redraw();
      return;
    }
    const wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const paths = [...entries.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const open = new Map();
    for (const path of paths) {
      if (entries.get(path).kind === "run") continue;
      open.set(path, fold(path, paths.filter((one) => entries.get(one).kind === "run" && home(one) === path).map((one) => entries.get(one))));
    }
    ordered(paths).forEach((path, position) => {
      const [line, entry, parent] = [lines.get(path), entries.get(path), home(path)];
      if (sort.key && entry.kind !== "run") line.hidden = true;
      else if (wanted.length) line.hidden = !wanted.every((word) => matches(entry, word));
      else if (sort.key) line.hidden = false;
      else line.hidden = parent !== null && open.get(parent) === false;
      if (byId("runs").children[position] !== line) byId("runs").insertBefore(line, byId("runs").children[position] ?? null);
    });
    byId("empty").hidden = entries.size > 0;
    byId("list").hidden = entries.size === 0;
    showState();
    showChoice();
  }

  function showState() {
    const all = runs();
    const training = all.filter((entry) => entry.status === "training").length;
    byId("state").textContent = all.length ? `${all.length} runs, ${training} training` : "";
  }

  const shown = () => runs().map((entry) => entry.path).filter((path) => !lines.get(path).hidden);

  function showChoice() {
    byId("together").disabled = picked.size < 2;
    byId("together").textContent = picked.size ? `Compare ${picked.size} ${picked.size === 1 ? "run" : "runs"}` : "Compare";
    byId("all").textContent = picked.size ? "Choose none" : "Choose all";
    byId("all").disabled = entries.size === 0;
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
    if (news.gone.length || news.changed.length || news.whole) show();
  }

  async function follow() {
    try {
      const answer = await fetch(`/api/runs?since=${encodeURIComponent(token)}`);
      if (!answer.ok) throw new Error(await answer.text());
      const news = await answer.json();
      token = news.token;
      take(news);
      document.documentElement.dataset.followed = "yes";
      if (byId("state").dataset.away) showState();
      delete byId("state").dataset.away;
    } catch {
      byId("state").dataset.away = "yes";
      byId("state").textContent = "The server does not answer. The list is as of its last answer.";
    }
    setTimeout(follow, document.hidden ? 6000 : 2000);
  }

  try {
    asked = JSON.parse(localStorage.getItem(KEPT));
  } catch {
    // storage is blocked, or holds something else: the usual columns
  }
  if (!Array.isArray(asked)) asked = null;
  byId("find").addEventListener("input", show);
  byId("sort").addEventListener("change", () => {
    const [key, down] = byId("sort").value.split(" ");
    sort = { key, down: down === "down" };
    redraw();
  });
  byId("all").addEventListener("click", () => {
    const wanted = picked.size ? [] : shown();
    picked.clear();
    wanted.forEach((path) => picked.add(path));
    for (const [path, line] of lines) {
      const box = line.querySelector("input");
      if (box) box.checked = picked.has(path);
    }
    showChoice();
  });
  byId("together").addEventListener("click", () => {
    location.href = `/together?${[...picked].map((path) => `run=${entries.get(path).address}`).join("&")}`;
  });
  follow();
})();
