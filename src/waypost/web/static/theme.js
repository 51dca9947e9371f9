// Light, dark, or as the browser prefers. It is no module: a module would run after the first drawing.
(() => {
  const KEY = "waypost-theme";
  const MEDIA = { auto: "(prefers-color-scheme: dark)", light: "not all", dark: "all" };
  const CHOICES = Object.keys(MEDIA);

  function read() {
    try {
      const kept = localStorage.getItem(KEY);
      return CHOICES.includes(kept) ? kept : "auto";
    } catch {
      return "auto"; // a browser that keeps nothing
    }
  }

  function apply() {
    const choice = read();
    for (const link of document.querySelectorAll(".dark-colors")) link.media = MEDIA[choice];
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${choice}`;
  }

  apply();
  document.addEventListener("DOMContentLoaded", apply);
  addEventListener("storage", apply); // another tab has changed it
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme")) return;
    try {
      localStorage.setItem(KEY, CHOICES[(CHOICES.indexOf(read()) + 1) % CHOICES.length]);
    } catch {
      return;
    }
    apply();
  });
})();
