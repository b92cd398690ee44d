"use strict";
// What every page can do: change its colours, copy, sort, and draw once the library is there.
const Page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  function theme() {
    const button = document.getElementById("theme");
    const root = document.documentElement;
    const show = () => {
      const dark = root.dataset.theme === "dark";
      button.setAttribute("aria-pressed", String(dark));
      button.textContent = dark ? "Light" : "Dark";
      button.setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
    };
    button.addEventListener("click", () => {
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("normec-theme", root.dataset.theme);
      } catch {
        // storage is blocked: the choice lasts as long as the page
      }
      show();
      document.dispatchEvent(new Event("themechange"));
    });
    show();
  }

  function copying() {
    for (const button of document.querySelectorAll("button.copy")) {
      button.addEventListener("click", async () => {
        const code = button.parentElement.querySelector("code");
        try {
          await navigator.clipboard.writeText(code.textContent);
        } catch {
          const range = document.createRange();
          range.selectNodeContents(code);
          getSelection().removeAllRanges();
          getSelection().addRange(range);
          document.execCommand("copy");
        }
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
    }
  }

  const worth = (cell) => {
    const text = (cell.dataset.value ?? cell.textContent).trim();
    const value = parseFloat(text.replaceAll(",", ""));
    return Number.isNaN(value) ? text : value;
  };

  function compare(a, b) {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1; // numbers first, words and gaps after them
  }

  function sorting(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.dataset.fixed !== undefined) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => compare(worth(a.cells[column]), worth(b.cells[column])) * (down ? -1 : 1));
        table.tBodies[0].append(...rows);
      });
    });
  }

  // The library is in the page, compressed; a server gives it as a file of its own.
  async function library() {
    if (window.Plotly) return;
    const held = document.getElementById("plotly").textContent;
    const text = atob(held);
    const bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at); // a call for each letter takes 0.1 s
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  theme();
  copying();
  document.querySelectorAll("table.sortable").forEach(sorting);
  const ready = !data.charts ? Promise.resolve() : library().then(() => {
    Charts.start(data);
    document.documentElement.dataset.drawn = "yes";
  }).catch((error) => {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "This browser cannot draw the curves.";
    throw error;
  });

  return { data, ready };
})();
