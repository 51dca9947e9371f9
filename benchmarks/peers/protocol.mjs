// The protocol of `protocol.py` for peers in Node: same commands, same slot files, same clocks.
//
// Node cannot map a file into memory: times are kept in an array and written every few milliseconds and at the end.
// process.hrtime is CLOCK_MONOTONIC, as Python's time.monotonic_ns is.

import { closeSync, fstatSync, openSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const FLUSH_MILLISECONDS = 20;
const TIMERS_AT_ONCE = 50;
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

/** Do what the command line asks of this peer. A program has open, close, send, publish, sendTimer and work. */
export async function main(program) {
  const options = Object.fromEntries(
    ["url", "slots", "count", "rate", "span", "lead", "clock", "variant"].map((name) => [name, { type: "string" }]),
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
  } else {
    throw new Error(`unknown command ${command}`);
  }
  await program.close();
  process.exit(code);
}
