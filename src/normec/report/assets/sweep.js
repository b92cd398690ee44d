"use strict";
// A heat map over two settings of a sweep, the same as a table, and the curves of the cells that are ticked.
(() => {
  const sweep = Page.data.sweep;
  const byId = (name) => document.getElementById(name);
  const name = (value) => {
    if (value === null || value === undefined) return "default";
    return typeof value === "number" && Math.abs(value) >= 1e6 ? value.toExponential() : String(value);
  };
  const metric = () => sweep.metrics.find((one) => one.column === byId("map-metric").value);

  const text = (value, percent) => {
    if (percent) return (100 * value).toFixed(1);
    return Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  };

  const better = (a, b) => (metric().better === "max" ? a > b : a < b);

  // The cells that lie under a place of the map; where several do, the sweep's best or else the best shown stands for them.
  function chosen(x, y, xValue, yValue) {
    const fixed = [...byId("map-rest").querySelectorAll("select")].filter((one) => one.value !== "");
    const under = sweep.cells.filter((cell) =>
      name(cell.settings[x]) === name(xValue)
      && (y === null || name(cell.settings[y]) === name(yValue))
      && fixed.every((one) => name(cell.settings[one.dataset.setting]) === one.value));
    const won = under.find((cell) => cell.best);
    if (won) return won;
    const known = under.filter((cell) => cell.values[metric().column]);
    const score = (cell) => cell.values[metric().column][0];
    if (known.length) return known.reduce((a, b) => (better(score(b), score(a)) ? b : a));
    return under[0] ?? null;
  }

  function grid() {
    const x = byId("map-x").value;
    const y = byId("map-y") ? byId("map-y").value : null;
    const values = (setting) => (setting === null ? [null] : sweep.settings.find((one) => one.name === setting).values);
    const rows = values(y).map((yValue) => values(x).map((xValue) => chosen(x, y, xValue, yValue)));
    return { x, y, xs: values(x).map(name), ys: y === null ? [""] : values(y).map(name), rows };
  }

  function inCell(cell, withSpread) {
    if (!cell) return "";
    const held = cell.values[metric().column];
    if (!held) return cell.status === "finished" ? "" : cell.status;
    if (metric().column === "epsilon") return cell.shown_epsilon; // rounded up, unlike other numbers
    const spread = withSpread && held[1] !== null ? ` ± ${text(held[1], metric().percent)}` : "";
    return text(held[0], metric().percent) + spread;
  }

  function drawMap() {
    const { x, y, xs, ys, rows } = grid();
    const chart = { key: "map", label: y ?? "", scale: "linear" };
    const log = metric().scale === "log";
    const value = (cell) => {
      const held = cell?.values[metric().column];
      if (!held || (log && held[0] <= 0)) return null;
      return log ? Math.log10(held[0]) : held[0] * (metric().percent ? 100 : 1);
    };
    const z = rows.map((row) => row.map(value));
    const flat = z.flat().filter((one) => one !== null);
    const [low, high] = [Math.min(...flat), Math.max(...flat)];
    const trace = {
      type: "heatmap", x: xs, y: ys, z, xgap: 3, ygap: 3, colorscale: "Cividis",
      zmin: low, zmax: high > low ? high : low + 1e-9,
      hovertext: rows.map((row) => row.map((cell) => (cell ? `${cell.label}<br>${metric().label}: ${inCell(cell, true) || "–"}` : ""))),
      hovertemplate: "%{hovertext}<extra></extra>",
      colorbar: { title: { text: metric().label, side: "right" }, outlinewidth: 0, thickness: 12 },
    };
    if (log) {
      const ticks = [...new Set([low, (low + high) / 2, high])];
      Object.assign(trace.colorbar, { tickvals: ticks, ticktext: ticks.map((one) => text(10 ** one, false)) });
    }
    const [annotations, shapes] = [[], []];
    rows.forEach((row, i) => row.forEach((cell, j) => {
      if (!cell) return;
      const bare = z[i][j] === null; // no value, no colour; its word stands there all the same
      const winner = cell.best; // by the criterion of the sweep, whatever is shown
      const ink = bare ? Charts.variable("--quiet") : (z[i][j] - low) / (high - low || 1) > 0.48 ? "#000000" : "#ffffff";
      const shown = inCell(cell, false) || "–";
      annotations.push({ x: j, y: i, text: winner ? `<b>${shown}</b>` : shown, font: { color: ink, size: 13 }, showarrow: false });
      if (winner) {
        shapes.push({
          type: "rect", x0: j - 0.48, x1: j + 0.48, y0: i - 0.46, y1: i + 0.46, line: { color: "#D55E00", width: 3 },
        });
      }
    }));
    const layout = Charts.layout(chart);
    trace.showscale = byId("heat-map").clientWidth > 500; // on a phone the numbers in the cells have to do
    Object.assign(layout, { hovermode: "closest", dragmode: false, annotations, shapes, uirevision: undefined });
    Object.assign(layout.xaxis, { title: { text: x }, type: "category", showline: false, rangemode: "normal", fixedrange: true });
    Object.assign(layout.yaxis, { title: { text: y ?? "" }, type: "category", showgrid: false, autorange: "reversed", fixedrange: true, showticklabels: y !== null });
    layout.height = Math.max(280, 130 + 46 * ys.length);
    const plot = byId("heat-map");
    Plotly.react(plot, [trace], layout, { responsive: true, displaylogo: false, displayModeBar: false });
    plot.removeAllListeners?.("plotly_click");
    plot.on("plotly_click", (event) => {
      const [i, j] = event.points[0].pointIndex;
      if (rows[i][j]) location.href = rows[i][j].href;
    });
    plot.setAttribute("aria-label", `Heat map of ${metric().label} over ${x}${y ? ` and ${y}` : ""}; the table below has the same cells as links`);
    drawTable(x, y, xs, ys, rows);
  }

  function drawTable(x, y, xs, ys, rows) {
    const cell = (tag, ...children) => {
      const made = document.createElement(tag);
      made.append(...children);
      return made;
    };
    const table = cell("table");
    table.className = "heat";
    const head = cell("tr", cell("th", y ? `${y} \\ ${x}` : x), ...xs.map((value) => cell("th", value)));
    head.querySelectorAll("th").forEach((one) => { one.scope = "col"; });
    const body = rows.map((row, i) => {
      const first = cell("th", ys[i]);
      first.scope = "row";
      return cell("tr", first, ...row.map((held) => {
        if (!held) return cell("td");
        const link = cell("a", inCell(held, true) || "–");
        link.href = held.href;
        link.setAttribute("aria-label", `${held.label}: ${link.textContent}`);
        return cell("td", link);
      }));
    });
    table.append(cell("thead", head), cell("tbody", ...body));
    const box = cell("div", table);
    box.className = "scroll";
    byId("heat-table").replaceChildren(box);
  }

  // Settings that are on neither axis: one value of each, or the best of all.
  function drawRest() {
    const used = [byId("map-x").value, byId("map-y")?.value];
    const rest = sweep.settings.filter((one) => !used.includes(one.name));
    byId("map-rest").replaceChildren(...rest.map((setting) => {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.dataset.setting = setting.name;
      for (const value of ["", ...setting.values.map(name)]) {
        const option = document.createElement("option");
        option.value = value;
        option.textContent = value === "" ? "best of all" : value;
        select.append(option);
      }
      select.addEventListener("change", drawMap);
      label.append(`${setting.name} `, select);
      return label;
    }));
  }

  function startMap() {
    byId("map-metric").value = sweep.metric;
    const [x, y] = [byId("map-x"), byId("map-y")];
    // The settings with the most values make the most of a map.
    const ranked = [...sweep.settings].sort((a, b) => b.values.length - a.values.length);
    x.value = ranked[0].name;
    if (y) y.value = ranked[1].name;
    byId("map-metric").addEventListener("change", drawMap);
    for (const [one, other] of [[x, y], [y, x]]) {
      one?.addEventListener("change", () => {
        if (other && other.value === one.value) other.value = ranked.find((held) => held.name !== one.value).name;
        drawRest();
        drawMap();
      });
    }
    drawRest();
    drawMap();
    document.addEventListener("themechange", drawMap);
  }

  function drawCurves() {
    const ticked = [...document.querySelectorAll("input.draw:checked")].map((box) => Number(box.value));
    Charts.update(ticked.sort((a, b) => a - b).map((index, position) =>
      ({ name: sweep.cells[index].label, columns: sweep.cells[index].columns, slot: position })), true);
  }

  Page.ready.then(() => {
    byId("all-numbers")?.addEventListener("change", (event) => {
      document.querySelector("table.cells").classList.toggle("all", event.target.checked);
    });
    for (const box of document.querySelectorAll("input.draw")) {
      box.checked = sweep.drawn.includes(Number(box.value));
      box.addEventListener("change", drawCurves);
    }
    drawCurves();
    if (byId("heat-map")) startMap();
  });
})();
