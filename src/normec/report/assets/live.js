"use strict";
// Follows a run while it trains: new rows into the curves, new numbers into the cards.
(() => {
  const columns = {};
  let [have, last, seen] = [-1, -1, null];

  function take(rows, anew) {
    if (anew) for (const name of Object.keys(columns)) delete columns[name];
    for (const row of rows) {
      const length = (columns.round ?? []).length;
      for (const name of new Set([...Object.keys(row), ...Object.keys(columns)])) {
        columns[name] ??= new Array(length).fill(null);
        columns[name].push(row[name] ?? null);
      }
    }
  }

  function card([name, value, word]) {
    const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const box = make("div", "");
    box.className = "card";
    const shown = make("dd", value);
    if (word) shown.append(make("small", word));
    box.append(make("dt", name), shown);
    return box;
  }

  async function ask() {
    const answer = await fetch(`${Page.data.live}?have=${have}&last=${last}`);
    if (!answer.ok) throw new Error(await answer.text());
    const news = await answer.json();
    if (seen !== null && seen !== news.status) return location.reload(); // another status has other sections
    seen = news.status;
    [have, last] = [news.have, news.last];
    if (news.rows.length || news.anew) {
      // A first row brings charts that the page does not have yet.
      const missing = Page.data.charts.length === 0 && news.rows.length;
      if (missing) return location.reload();
      take(news.rows, news.anew);
      Charts.update([{ name: Page.data.series[0].name, columns }], false);
    }
    document.getElementById("headline").textContent = news.headline;
    document.querySelector(".lead .cards").replaceChildren(...news.cards.map(card));
    return undefined;
  }

  async function follow() {
    try {
      if (!document.hidden) await ask();
      document.documentElement.dataset.followed = "yes";
    } catch {
      // The server does not answer, or the folder cannot be read; the next request may succeed.
    }
    setTimeout(follow, seen === "training" ? 2000 : 5000);
  }

  Page.ready.then(follow);
})();
