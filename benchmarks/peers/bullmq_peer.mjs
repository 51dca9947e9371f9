// bullmq: 100 at once in one process; what is done is removed.

import { load, main, say } from "./protocol.mjs";

const { Queue, Worker } = await load("bullmq");

const AT_ONCE = 100;
const PUBLISH = 1000;
const OPTIONS = { removeOnComplete: true, removeOnFail: true };

let queue;

const connection = (url) => {
  const { hostname, port, password } = new URL(url);
  return { host: hostname, port: Number(port), password, maxRetriesPerRequest: null };
};

await main({
  async open(url) {
    queue = new Queue("bench", { connection: connection(url) });
    await queue.waitUntilReady();
  },
  close: () => queue.close(),
  send: (message) => queue.add("handle", message, OPTIONS),
  async publish(messages) {
    for (let start = 0; start < messages.length; start += PUBLISH) {
      const part = messages.slice(start, start + PUBLISH);
      await queue.addBulk(part.map((data) => ({ name: "handle", data, opts: OPTIONS })));
    }
  },
  sendTimer: (message, due) =>
    queue.add("handle", message, { ...OPTIONS, delay: Math.max(0, due - Date.now()) }),
  async work(url, started) {
    const worker = new Worker("bench", async (message) => started(message.data.number), {
      connection: connection(url),
      concurrency: AT_ONCE,
      ...OPTIONS,
    });
    await worker.waitUntilReady();
    say({ ready: true });
  },
});
