// The protocol of `protocol.py` for peers in Node: same commands, same slot files, same clocks.
//
// Node cannot map a file into memory: times are kept in an array and written every few milliseconds and at the end.
// process.hrtime is CLOCK_MONOTONIC, as Python's time.monotonic_ns is.

import { closeSync, fstatSync, openSync, readFileSync, readdirSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const FLUSH_MILLISECONDS = 20;
const TIMERS_AT_ONCE = 50;
const TASKS = 100;
const LEAD_TOO_SHORT = 3;

/** A module of the peer's own environment. */
export const load = (name) =>
  import(pathToFileURL(createRequire(`${process.env.BENCH_MODULES}/`).resolve(name)));

/** A message of about 100 bytes as JSON. */
export const body = (number) => ({
  number,
  customer: "c-0042",
  lines: [{ sku: "A-1", count: 2 }],
  total: 1999,
});

export const say = (told) => process.stdout.write(`${JSON.stringify(told)}\n`);

/** The wall clock with more than milliseconds, as handlers that start early or late by less must be seen. */
const wallNow = () => BigInt(Math.round((performance.timeOrigin + performance.now()) * 1e6));

class Slots {
  constructor(path) {
    this.file = openSync(path, "r+");
    this.times = new BigInt64Array(fstatSync(this.file).size / 8);
    this.bytes = new Uint8Array(this.times.buffer);
    this.changed = false;
  }

  set(number, time) {
    this.times[number] = time;
    this.changed = true;
  }

  flush() {
    if (this.changed) {
      this.changed = false;
      writeSync(this.file, this.bytes, 0, this.bytes.length, 0);
    }
  }

  close() {
    this.flush();
    closeSync(this.file);
  }
}

function recorder(path, clock) {
  const slots = new Slots(path);
  const now = clock === "monotonic" ? process.hrtime.bigint : wallNow;
  setInterval(() => slots.flush(), FLUSH_MILLISECONDS);
  return (number) => {
    if (slots.times[number] === 0n) slots.set(number, now());
  };
}

async function sendSteadily(program, path, rate) {
  const slots = new Slots(path);
  const begin = performance.now();
  for (let number = 0; number < slots.times.length; number++) {
    const message = body(number);
    const pause = begin + (number * 1000) / rate - performance.now();
    if (pause > 0) await sleep(pause);
    slots.set(number, process.hrtime.bigint());
    await program.send(message);
  }
  slots.close();
}

async function sendTimers(program, path, span, lead) {
  const slots = new Slots(path);
  const count = slots.times.length;
  const first = Math.ceil(Date.now() / 1000 + lead) * 1000;
  const dues = Array.from({ length: count }, (_, number) => Math.round(first + (span * 1000 * number) / count));
  dues.forEach((due, number) => slots.set(number, BigInt(due) * 1000000n));
  slots.close();
  let next = 0;
  const one = async () => {
    while (next < count) {
      const number = next++;
      await program.sendTimer(body(number), dues[number]);
    }
  };
  await Promise.all(Array.from({ length: TIMERS_AT_ONCE }, one));
  return Date.now() > first ? LEAD_TOO_SHORT : 0;
}

/** The processor time of a server and of the processes that it has started, in seconds. */
function serverSeconds(pid) {
  let spent = 0;
  for (const name of pid ? readdirSync("/proc") : []) {
    if (!/^\d+$/.test(name)) continue;
    try {
      const parent = readFileSync(`/proc/${name}/stat`, "utf8").split(") ").pop().split(" ")[1];
      if (name !== pid && parent !== pid) continue;
      for (const thread of readdirSync(`/proc/${name}/task`)) {
        spent += Number(readFileSync(`/proc/${name}/task/${thread}/schedstat`, "utf8").split(" ")[0]);
      }
    } catch {
      continue; // it has ended
    }
  }
  return spent / 1e9;
}

/** Publish one message each in many calls at the same time; print how long that took, and the processor time. */
async function publishTogether(program, count, server) {
  const waves = async (number) => {
    for (let wave = 0; wave < number; wave++) {
      await Promise.all(Array.from({ length: TASKS }, (_, place) => program.send(body(wave * TASKS + place))));
    }
  };
  await waves(2);
  const served = serverSeconds(server);
  const began = performance.now();
  const spent = process.cpuUsage();
  await waves(Math.floor(count / TASKS));
  const seconds = (performance.now() - began) / 1000;
  const { user, system } = process.cpuUsage(spent);
  say({ seconds, cpu: (user + system) / 1e6, server: serverSeconds(server) - served });
}

/** Do what the command line asks of this peer. A program has open, close, send, publish, sendTimer and work. */
export async function main(program) {
  const options = Object.fromEntries(
    ["url", "slots", "count", "rate", "span", "lead", "clock", "variant", "kind", "server"].map((name) => [name, { type: "string" }]),
  );
  const { values, positionals } = parseArgs({ options, allowPositionals: true });
  const command = positionals[0];
  if (command === "work") {
    await program.work(values.url, recorder(values.slots, values.clock ?? "monotonic"));
    return;
  }
  let code = 0;
  await program.open(values.url);
  if (command === "publish") {
    await program.publish(Array.from({ length: Number(values.count) }, (_, number) => body(number)));
  } else if (command === "send") {
    await sendSteadily(program, values.slots, Number(values.rate ?? 200));
  } else if (command === "timers") {
    code = await sendTimers(program, values.slots, Number(values.span), Number(values.lead));
  } else if (command === "together") {
    await publishTogether(program, Number(values.count), values.server);
  } else {
    throw new Error(`unknown command ${command}`);
  }
  await program.close();
  process.exit(code);
}
