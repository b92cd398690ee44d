"use strict";
// Before the first paint: the reader's choice, or the system's.
(() => {
  let saved = null;
  try {
    saved = localStorage.getItem("normec-theme");
  } catch {
    // storage is blocked: the system decides
  }
  const dark = saved ? saved === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
