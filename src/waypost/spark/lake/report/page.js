// Filters and sorts the table of queues. A row and what it opens stay together; without this script it is all there.
"use strict";
(() => {
  const tools = document.querySelector(".tools");
  if (!tools) return;
  const body = document.querySelector(".queues tbody");
  const queues = [...body.querySelectorAll(".queue")].map((row, place) => ({
    row, place, detail: row.nextElementSibling, name: row.querySelector("a").textContent,
  }));
  const columns = ["published", "done", "dead", "redelivered", "backlog", "wait", "run"];
  const [filter, order, shown] = ["filter", "order", "shown"].map((id) => document.getElementById(id));

  function compare(one, other) {
    if (order.value === "order") return one.place - other.place;
    if (order.value === "name") return one.name.localeCompare(other.name);
    const column = columns.indexOf(order.value);
    const value = (queue) => {
      const cell = queue.row.cells[column + 2];
      return Number(cell.dataset.ms ?? cell.textContent.replaceAll(",", ""));
    };
    return value(other) - value(one) || one.place - other.place;
  }

  function apply() {
    const wanted = filter.value.trim().toLowerCase();
    let count = 0;
    for (const queue of [...queues].sort(compare)) {
      const fits = queue.name.toLowerCase().includes(wanted);
      queue.row.hidden = queue.detail.hidden = !fits;
      count += fits;
      body.append(queue.row, queue.detail);
    }
    shown.textContent = wanted ? `${count} of ${queues.length} queues` : "";
  }

  tools.hidden = false;
  tools.addEventListener("submit", (event) => event.preventDefault());
  filter.addEventListener("input", apply);
  order.addEventListener("change", apply);
  // A second click on an open queue closes it.
  body.addEventListener("click", (event) => {
    const link = event.target.closest(".queue a");
    if (link && link.hash === location.hash) {
      event.preventDefault();
      location.hash = "queues";
    }
  });
})();
