// Keys: / search, j and k rows, g and a letter for a section, ? for the list.
const SECTIONS = { q: 0, s: 1, t: 2, w: 3, c: 4, a: 5 };
let afterG = 0;

function isTyping(target) {
  return target.closest("input, textarea, select, [contenteditable]") !== null;
}

function moveRow(step) {
  const links = [...document.querySelectorAll("[data-row]")].map((row) => row.querySelector("a")).filter(Boolean);
  if (links.length === 0) return;
  const row = document.activeElement?.closest("[data-row]");
  const at = links.findIndex((link) => row?.contains(link));
  const next = links[Math.min(links.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

function toggleHelp() {
  const dialog = document.getElementById("keys");
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

export function startKeys() {
  document.getElementById("show-keys")?.addEventListener("click", toggleHelp);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const section = SECTIONS[event.key];
    if (afterG > Date.now() - 1500 && section !== undefined) {
      afterG = 0;
      document.querySelectorAll(".sections a")[section]?.click();
    } else if (event.key === "/") {
      document.getElementById("search")?.focus();
    } else if (event.key === "j" || event.key === "k") {
      moveRow(event.key === "j" ? 1 : -1);
    } else if (event.key === "?") {
      toggleHelp();
    } else if (event.key === "g") {
      afterG = Date.now();
      return;
    } else {
      return;
    }
    event.preventDefault();
  });
}
