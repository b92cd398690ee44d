"use strict";
// Every bound over what was measured, on logarithmic axes, with the line where they are equal.
(() => {
  const series = Page.data.bounds;
  const hidden = new Set();

  function draw() {
    const layout = Charts.layout({ key: "bounds", label: "bound", scale: "log" });
    const known = series.flatMap((one) => [...one.measured, ...one.bound]).filter((value) => value > 0);
    const ends = [Math.min(...known) / 2, Math.max(...known) * 2];
    const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
    const points = series.map((one, slot) => ({
      x: one.measured, y: one.bound, text: one.text, name: one.name, mode: "markers", visible: !hidden.has(slot),
      marker: { size: 9, symbol: symbols[slot % symbols.length], color: Charts.colour(slot), opacity: 0.85 },
      hovertemplate: `${one.name}<br>%{text}<br>measured %{x:.3~g}, bound %{y:.3~g}<extra></extra>`,
    }));
    const equal = {
      x: ends, y: ends, mode: "lines", hoverinfo: "skip", line: { color: Charts.variable("--quiet"), width: 1, dash: "dot" },
    };
    Object.assign(layout, { hovermode: "closest", height: 460 });
    Object.assign(layout.xaxis, { title: { text: "measured" }, type: "log", rangemode: "normal", showgrid: true, minorloglabels: "none" });
    Object.assign(layout.yaxis, { minorloglabels: "none" });
    Plotly.react(document.getElementById("bounds"), [equal, ...points], layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  Page.ready.then(() => {
    document.getElementById("bounds-legend").replaceChildren(...series.map((one, slot) => Charts.entry(
      () => !hidden.has(slot),
      one.name, slot,
      () => { if (hidden.has(slot)) hidden.delete(slot); else hidden.add(slot); draw(); },
    )));
    Charts.paintKeys();
    document.addEventListener("themechange", draw);
    draw();
  });
})();
