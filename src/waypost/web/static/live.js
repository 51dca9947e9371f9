// Keeps a page up to date. The server notifies of queues that changed; the page reads itself again and takes over its
// parts that are marked with data-live. All tabs of a browser share one stream: browsers allow six connections to a
// server, and a seventh tab would hang. The tab that holds the lock has the stream and passes its notifications on; a
// hidden tab gives the lock back. Without locks (no TLS), or when the stream fails, a page polls.
const POLL_MS = 5000;
const AT_LEAST_MS = 15000; // ages grow also when nothing happens
const AT_MOST_MS = 1000;
const BACKOFF_MS = 5000;

let afterUpdate = () => {};
let timer = 0;
let lastRead = Date.now();
let isReading = false;
let isStreaming = false;
let release = null;

function concerns(change) {
  const queue = document.body.dataset.queue;
  return !queue || change.queues.length === 0 || change.queues.includes(queue);
}

function schedule(wait) {
  clearTimeout(timer);
  timer = setTimeout(read, Math.max(0, wait));
}

function plan() {
  if (document.hidden) clearTimeout(timer);
  else schedule((isStreaming ? AT_LEAST_MS : POLL_MS) - (Date.now() - lastRead));
}

function onChange(change) {
  isStreaming = true;
  if (concerns(change)) schedule(AT_MOST_MS - (Date.now() - lastRead));
}

function say(text) {
  const line = document.getElementById("connection");
  line.hidden = text === "";
  line.textContent = text;
}

function isBusy(element) {
  const active = document.activeElement;
  const selection = document.getSelection();
  return (
    (active && element.contains(active) && active.matches("input, textarea, select")) ||
    (selection && !selection.isCollapsed && element.contains(selection.anchorNode))
  );
}

// What a link, a button or a summary is, whenever its part of the page was drawn.
function nameOf(element) {
  if (element.matches("a[href]")) return `link ${element.getAttribute("href")}`;
  if (element.matches("summary")) return `summary ${element.parentElement.dataset.key}`;
  const fields = [...(element.form?.elements ?? [])].filter((field) => !["once", "csrf_token"].includes(field.name));
  return `button ${element.textContent} ${element.form?.action} ${fields.map((field) => field.value).join(" ")}`;
}

function takeOver(element, fresh) {
  // Each drawing has keys of its own that make a form run once: they are no news.
  const html = fresh.innerHTML.replace(/name="once" value="[^"]*"/g, "");
  if (isBusy(element) || element.dataset.html === html) return;
  const open = new Set([...element.querySelectorAll("details[open]")].map((one) => one.dataset.key));
  const focused = document.activeElement?.closest("a[href], button, summary");
  const name = focused && element.contains(focused) ? nameOf(focused) : null;
  element.dataset.html = html;
  element.className = fresh.className;
  element.replaceChildren(...fresh.childNodes);
  for (const details of element.querySelectorAll("details")) if (open.has(details.dataset.key)) details.open = true;
  if (name) [...element.querySelectorAll("a[href], button, summary")].find((one) => nameOf(one) === name)?.focus();
}

async function read() {
  if (isReading || document.hidden) return;
  isReading = true;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, credentials: "same-origin" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (answer.redirected && new URL(answer.url).pathname.endsWith("/sign-in")) {
      say("You are signed out: load the page again.");
    } else if (answer.ok) {
      say("");
      for (const element of document.querySelectorAll("[data-live]")) {
        const fresh = page.getElementById(element.id);
        if (fresh) takeOver(element, fresh);
      }
      afterUpdate();
    } else {
      say(page.querySelector("main p")?.textContent ?? `The server answered ${answer.status}.`);
    }
  } catch {
    say("The server does not answer. This page tries again.");
  } finally {
    isReading = false;
    lastRead = Date.now();
    plan();
  }
}

function openStream(channel) {
  return new Promise((resolve) => {
    const source = new EventSource(document.body.dataset.events);
    release = () => {
      source.close();
      release = null;
      resolve();
    };
    source.onmessage = (event) => {
      const change = JSON.parse(event.data);
      channel.postMessage(change);
      onChange(change);
    };
    source.onerror = () => {
      isStreaming = false;
      plan();
      if (source.readyState === EventSource.CLOSED) setTimeout(() => release?.(), BACKOFF_MS);
    };
  });
}

async function follow(channel, name) {
  while (!document.hidden) {
    const waiting = new AbortController();
    document.addEventListener("visibilitychange", () => document.hidden && waiting.abort(), { signal: waiting.signal });
    try {
      await navigator.locks.request(name, { signal: waiting.signal }, () => {
        if (!document.hidden) return openStream(channel);
      });
    } catch {
      return; // hidden before its turn came
    }
  }
}

export function startLive(update) {
  afterUpdate = update;
  const events = document.body.dataset.events;
  if (!events || !document.querySelector("[data-live]")) return;
  plan();
  let isFollowing = false;
  const channel = "BroadcastChannel" in window ? new BroadcastChannel(`waypost ${events}`) : null;
  if (channel) channel.onmessage = (event) => onChange(event.data);
  const start = async () => {
    if (isFollowing || !channel || !navigator.locks) return;
    isFollowing = true;
    await follow(channel, `waypost ${events}`);
    isFollowing = false;
    if (!document.hidden) start();
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      release?.();
      isStreaming = false;
      clearTimeout(timer);
    } else {
      read();
      start();
    }
  });
  addEventListener("pagehide", () => release?.());
  start();
}
