// Light or dark: the system's wish, unless the person at this page has chosen. It runs before anything is drawn.
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const read = () => {
    try {
      return localStorage.getItem("echo-theme");
    } catch {
      return null; // a browser that keeps nothing
    }
  };
  const show = () => {
    root.dataset.theme = read() || (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("themechange"));
  };
  show();
  system.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const next = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("echo-theme", next);
      } catch {
        // then it lasts as long as the page
      }
      root.dataset.theme = next;
      document.dispatchEvent(new Event("themechange"));
    });
  });
})();
