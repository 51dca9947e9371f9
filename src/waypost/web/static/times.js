// Shows times in UTC, as the server writes them, or in the time zone of the browser.
const KEY = "waypost-times";

function isLocal() {
  try {
    return localStorage.getItem(KEY) === "local";
  } catch {
    return false;
  }
}

function formatLocal(at) {
  const two = (number) => String(number).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function showTimes() {
  const local = isLocal();
  for (const element of document.querySelectorAll("time[datetime]")) {
    element.dataset.utc ??= element.textContent;
    const at = new Date(element.getAttribute("datetime"));
    element.textContent = local && !Number.isNaN(at.getTime()) ? formatLocal(at) : element.dataset.utc;
  }
  const button = document.getElementById("time-zone");
  if (button) {
    button.textContent = local ? "Local time" : "UTC";
    button.setAttribute("aria-pressed", String(local));
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
}
