// graphile-worker: 24 at once, a local queue of 500, completions in batches.

import { load, main, say } from "./protocol.mjs";

const { Logger, makeWorkerUtils, run } = await load("graphile-worker");

const AT_ONCE = 24;
const LOCAL_QUEUE = 500;
const PUBLISH = 1000;

const silent = new Logger(() => () => {});
let utils;

await main({
  async open(url) {
    utils = await makeWorkerUtils({ connectionString: url, logger: silent });
    await utils.migrate();
  },
  close: () => utils.release(),
  send: (message) => utils.addJob("handle", message),
  async publish(messages) {
    for (let start = 0; start < messages.length; start += PUBLISH) {
      const part = messages.slice(start, start + PUBLISH);
      await utils.addJobs(part.map((payload) => ({ identifier: "handle", payload })));
    }
  },
  sendTimer: (message, due) => utils.addJob("handle", message, { runAt: new Date(due) }),
  async work(url, started) {
    await run({
      preset: {
        worker: {
          connectionString: url,
          concurrentJobs: AT_ONCE,
          localQueue: { size: LOCAL_QUEUE },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
          logger: silent,
        },
      },
      noHandleSignals: true,
      taskList: { handle: async (message) => started(message.number) },
    });
    say({ ready: true });
  },
});
