// Shows times in UTC, as the server writes them, or in the time zone of the browser, and keeps ages up to date.
const KEY = "waypost-times";
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const NOW_SECONDS = 3;
const UNITS = [[1, 100, "s"], [60, 100, "min"], [3600, 48, "h"], [86400, Infinity, "d"]];
const AGES_MS = 5000;

function isLocal() {
  try {
    return localStorage.getItem(KEY) === "local";
  } catch {
    return false;
  }
}

function two(number) {
  return String(number).padStart(2, "0");
}

function formatLocal(at, element) {
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}`;
  const year = at.getFullYear() === new Date().getFullYear() ? "" : ` ${at.getFullYear()}`;
  const rest = /\.\d{3}$/.test(element.dataset.utc) ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : "";
  return `${at.getDate()} ${MONTHS[at.getMonth()]}${year} ${clock}:${two(at.getSeconds())}${rest}`;
}

function formatWhole(at) {
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())} local time`;
}

// The same rule as `relative` in templates/__init__.py.
function formatAge(at) {
  const seconds = (Date.now() - at.getTime()) / 1000;
  const distance = Math.abs(seconds);
  if (distance < NOW_SECONDS) return "now";
  const [size, , unit] = UNITS.find(([one, most]) => distance / one < most);
  const text = `${Math.round(distance / size).toLocaleString("en")} ${unit}`;
  return seconds > 0 ? `${text} ago` : `in ${text}`;
}

export function showTimes() {
  const local = isLocal();
  for (const element of document.querySelectorAll("time[datetime]")) {
    const at = new Date(element.getAttribute("datetime"));
    if (Number.isNaN(at.getTime())) continue;
    element.dataset.utc ??= element.textContent;
    element.dataset.title ??= element.title;
    element.title = local ? formatWhole(at) : element.dataset.title;
    if ("relative" in element.dataset) element.textContent = formatAge(at);
    else element.textContent = local ? formatLocal(at, element) : element.dataset.utc;
  }
  for (const element of document.querySelectorAll("svg text[data-at]")) {
    const at = new Date(element.dataset.at);
    element.dataset.utc ??= element.textContent;
    element.textContent = local ? `${two(at.getHours())}:${two(at.getMinutes())}` : element.dataset.utc;
  }
  const button = document.getElementById("time-zone");
  if (button) {
    button.textContent = local ? "Local time" : "UTC";
    button.setAttribute("aria-pressed", String(local));
  }
  const note = document.getElementById("time-note");
  if (note) note.textContent = local ? "times in your time zone" : "times in UTC";
}

function showAges() {
  for (const element of document.querySelectorAll("time[data-relative]")) {
    const at = new Date(element.getAttribute("datetime"));
    if (!Number.isNaN(at.getTime())) element.textContent = formatAge(at);
  }
}

export function startTimes() {
  document.getElementById("time-zone")?.addEventListener("click", () => {
    try {
      localStorage.setItem(KEY, isLocal() ? "utc" : "local");
    } catch {
      return; // a browser that keeps nothing shows UTC
    }
    showTimes();
  });
  showTimes();
  setInterval(() => document.hidden || showAges(), AGES_MS);
}
