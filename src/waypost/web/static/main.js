// Pages work without scripts; these keep them up to date and add keys, local times and copying.
import { startCopying } from "./copy.js";
import { startCounting } from "./counted.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { showTimes, startTimes } from "./times.js";

for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
startTimes();
startKeys();
startCopying();
startCounting();
startLive(() => {
  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  showTimes();
});
