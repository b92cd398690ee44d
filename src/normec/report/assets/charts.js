"use strict";
// Curves from columns. A chart names its columns; a series is a run, or a group of seeds with a band around its mean.
const Charts = (() => {
  // Okabe and Ito's colours, told apart under every common colour blindness; lighter on dark. Dashes tell them apart in grey.
  const COLOURS = {
    light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#1a1a1a"],
    dark: ["#4FA8E8", "#F08A4B", "#2EC4A0", "#E6A3CB", "#9BD7F7", "#F5C04A", "#F2F2F2"],
  };
  const DASHES = ["solid", "dash", "dashdot", "dot", "longdash", "longdashdot"];
  const AXES = {
    round: "round",
    bytes: "bytes sent by a client",
    messages: "messages of all clients",
    epsilon: "ε spent",
  };
  let data = { charts: [], series: [] };
  let axis = "round";
  const hidden = new Set();
  const scales = new Map();

  const together = () => document.getElementById("legend") !== null; // several runs share one legend
  const theme = () => document.documentElement.dataset.theme;
  const touch = () => matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (slot) => COLOURS[theme()][slot % 7];
  const dash = (slot) => DASHES[(slot + Math.floor(slot / 7)) % DASHES.length];
  const faint = (hex) => hex + "26";
  const slotOf = (series, index) => (series.slot === undefined ? index : series.slot);
  const short = (value) => (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) && value !== 0
    ? value.toExponential(2) : String(Number(value.toPrecision(4)));

  function layout(chart) {
    const line = variable("--line");
    const side = {
      gridcolor: line, zeroline: false, linecolor: line, automargin: true, fixedrange: false, exponentformat: "power",
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: variable("--font"), size: 12, color: variable("--quiet") },
      margin: { l: 8, r: 14, t: 18, b: 8 },
      showlegend: false,
      hovermode: "x unified",
      hoverlabel: { bgcolor: variable("--card"), bordercolor: line, font: { color: variable("--ink"), size: 12 } },
      dragmode: touch() ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--quiet"), activecolor: variable("--ink") },
      uirevision: axis + (scales.get(chart.key) ?? chart.scale),
      xaxis: { ...side, title: { text: AXES[axis], standoff: 8 }, showgrid: false, showline: true, rangemode: "tozero" },
      yaxis: {
        ...side,
        title: { text: chart.label, standoff: 8 },
        type: (scales.get(chart.key) ?? chart.scale) === "log" ? "log" : "linear",
      },
    };
  }

  // Pairs where both are known; on a logarithmic axis only what is above zero.
  function points(columns, name, factor, log) {
    const found = { x: [], y: [] };
    const xs = columns[axis] ?? [];
    (columns[name] ?? []).forEach((y, k) => {
      if (y === null || y === undefined || xs[k] === null || xs[k] === undefined || (log && y <= 0)) return;
      found.x.push(xs[k]);
      found.y.push(y * factor);
    });
    return found;
  }

  function lines(chart) {
    const log = (scales.get(chart.key) ?? chart.scale) === "log";
    const factor = chart.percent ? 100 : 1;
    const many = together();
    const found = [];
    data.series.forEach((series, index) => {
      const known = Object.keys(chart.columns).filter((name) => series.columns[name]?.some((v) => v !== null));
      (many ? known.slice(0, 1) : known).forEach((name, position) => {
        found.push({
          key: many ? `series ${index}` : `${chart.key} ${name}`,
          label: many ? series.name : chart.columns[name],
          slot: many ? slotOf(series, index) : position,
          name, series, log, factor,
        });
      });
    });
    return found;
  }

  function traces(chart) {
    const found = [];
    for (const line of lines(chart)) {
      if (hidden.has(line.key)) continue;
      const hue = colour(line.slot);
      const low = points(line.series.columns, `${line.name}.low`, line.factor, line.log);
      const high = points(line.series.columns, `${line.name}.high`, line.factor, line.log);
      if (low.x.length && high.x.length) {
        const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
        found.push({ ...low, ...edge }, { ...high, ...edge, fill: "tonexty", fillcolor: faint(hue) });
      }
      const middle = points(line.series.columns, line.name, line.factor, line.log);
      found.push({
        ...middle,
        name: line.label,
        mode: middle.x.length > 30 ? "lines" : "lines+markers",
        line: { color: hue, width: 2.2, dash: dash(line.slot) },
        marker: { size: middle.x.length > 1 ? 5 : 9, color: hue },
        hovertemplate: `%{y:.4~g}${chart.percent ? " %" : ""}`,
      });
    }
    return found;
  }

  // Labels at 1, 2 and 5 where few decades are in sight, and a start that does not squeeze the rest into the top.
  function frame(chart, drawn, found) {
    const seen = found.filter((trace) => trace.name !== undefined);
    const ys = seen.flatMap((trace) => trace.y);
    if (!ys.length) return;
    if (drawn.yaxis.type === "log") {
      const [low, high] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
      const decades = Math.log10(high / low);
      if (decades > 0.7 && decades < 3) Object.assign(drawn.yaxis, { dtick: "D2", minorloglabels: "complete" });
      if (decades < 3 && low > 1e-4 && high < 1e5) drawn.yaxis.exponentformat = "none";
      if (decades >= 3) Object.assign(drawn.yaxis, { minorloglabels: "none", nticks: 7 });
    } else if (chart.percent && together()) {
      const end = seen.flatMap((trace) => trace.x).reduce((a, b) => Math.max(a, b));
      const settled = seen.flatMap((trace) => trace.y.filter((_, k) => trace.x[k] >= end / 10));
      const [low, high] = [settled.reduce((a, b) => Math.min(a, b), 100), ys.reduce((a, b) => Math.max(a, b))];
      drawn.yaxis.range = [Math.max(0, low - 3), Math.min(101, high + 2)];
    }
  }

  function references(chart, drawn) {
    const width = { x0: 0, x1: 1, xref: "paper", type: "line" };
    const log = drawn.yaxis.type === "log";
    drawn.shapes = chart.references.filter((one) => !log || one.value > 0).map((one) => ({
      ...width, y0: one.value, y1: one.value, line: { color: variable("--quiet"), width: 1.2, dash: "dot" },
      // The ε of a run ends at its budget, so the label stands where the curve begins.
      label: {
        text: `${one.name} ${short(one.value)}`, textposition: chart.key === "epsilon" ? "start" : "end", yanchor: "bottom",
        font: { size: 11 },
      },
    }));
    if (drawn.shapes.length) {
      const top = Math.max(...chart.references.map((one) => one.value)) * (log ? 1.8 : 1.15);
      drawn.yaxis.autorangeoptions = { include: log ? top : [0, top] };
    }
    if (axis === "round") {
      for (const event of data.events ?? []) {
        drawn.shapes.push({
          type: "line", yref: "paper", y0: 0, y1: 1, x0: event.round, x1: event.round,
          line: { color: variable("--bad"), width: 1.5, dash: "dash" },
          label: { text: event.name, textposition: "end", textangle: 0, xanchor: "right", font: { size: 11, color: variable("--bad") } },
        });
      }
    }
  }

  function describe(chart) {
    const parts = lines(chart).map((line) => {
      const { y } = points(line.series.columns, line.name, line.factor, line.log);
      const unit = chart.percent ? " %" : "";
      return y.length ? `${line.label} from ${short(y[0])} to ${short(y[y.length - 1])}${unit}` : "";
    });
    return `${chart.title} over ${AXES[axis]}: ${parts.filter(Boolean).join("; ")}`;
  }

  function draw(chart) {
    const plot = document.querySelector(`#chart-${CSS.escape(chart.key)} .plot`);
    if (!plot) return;
    const drawn = layout(chart);
    const found = traces(chart);
    frame(chart, drawn, found);
    references(chart, drawn);
    plot.querySelector("noscript")?.remove();
    plot.setAttribute("aria-label", describe(chart));
    Plotly.react(plot, found, drawn, {
      responsive: true, displaylogo: false, displayModeBar: touch() ? false : "hover",
      modeBarButtonsToRemove: ["zoom2d", "pan2d", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
    });
  }

  const redraw = () => data.charts.forEach(draw);

  // A button of a legend: a stroke in the curve's colour and dashes, its name, pressed while it is drawn.
  function entry(isShown, label, slot, toggle) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "key";
    button.setAttribute("aria-pressed", String(isShown()));
    const ns = "http://www.w3.org/2000/svg";
    const mark = document.createElementNS(ns, "svg");
    const stroke = document.createElementNS(ns, "line");
    mark.setAttribute("viewBox", "0 0 26 6");
    mark.setAttribute("aria-hidden", "true");
    for (const [name, value] of Object.entries({ x1: 1, y1: 3, x2: 25, y2: 3 })) stroke.setAttribute(name, value);
    stroke.dataset.slot = slot;
    mark.append(stroke);
    button.append(mark, label);
    button.addEventListener("click", () => {
      toggle();
      button.setAttribute("aria-pressed", String(isShown()));
    });
    return button;
  }

  function keyOf(key, label, slot, after) {
    return entry(() => !hidden.has(key), label, slot, () => {
      if (hidden.has(key)) hidden.delete(key); else hidden.add(key);
      after();
    });
  }

  function paintKeys() {
    const pattern = { solid: "none", dash: "6 3", dashdot: "6 2 2 2", dot: "2 2", longdash: "9 3", longdashdot: "9 2 2 2" };
    for (const stroke of document.querySelectorAll(".key line")) {
      const slot = Number(stroke.dataset.slot);
      stroke.style.stroke = colour(slot);
      stroke.style.strokeDasharray = pattern[dash(slot)];
    }
  }

  function legends() {
    if (together()) {
      document.getElementById("legend").replaceChildren(...data.series.map((series, index) =>
        keyOf(`series ${index}`, series.name, slotOf(series, index), redraw)));
    }
    for (const chart of data.charts) {
      const place = document.querySelector(`#chart-${CSS.escape(chart.key)} .legend`);
      const own = lines(chart);
      if (!place || together() || own.length < 2) continue;
      place.replaceChildren(...own.map((line) => keyOf(line.key, line.label, line.slot, () => draw(chart))));
    }
    paintKeys();
  }

  function start(given) {
    data = given;
    for (const chart of data.charts) {
      const button = document.querySelector(`#chart-${CSS.escape(chart.key)} .scale`);
      button?.addEventListener("click", () => {
        const log = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(log));
        scales.set(chart.key, log ? "log" : "linear");
        draw(chart);
      });
    }
    document.getElementById("axis")?.addEventListener("change", (event) => {
      axis = event.target.value;
      redraw();
    });
    document.addEventListener("themechange", () => {
      paintKeys();
      redraw();
    });
    legends();
    redraw();
  }

  // Other series (a sweep's choice), or the same ones with more rows (a live run).
  function update(series, anew) {
    data.series = series;
    if (anew) {
      hidden.clear();
      legends();
    }
    redraw();
  }

  return { start, update, layout, variable, colour, entry, paintKeys };
})();
