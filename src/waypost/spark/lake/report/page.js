// Draws the charts of one queue, or of all, from the data in the page; again when the queue or the colours change.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const chooser = document.getElementById("queue");
  const coarse = window.matchMedia("(pointer: coarse)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const measures = { wait: "waiting", run: "running", late: "late timers" };
  const ticks = [1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4, 6e4, 1.8e5, 6e5, 1.8e6, 3.6e6, 1.08e7, 3.6e7, 8.64e7, 8.64e8];
  const tickNames = ["1 ms", "3 ms", "10 ms", "30 ms", "100 ms", "300 ms", "1 s", "3 s", "10 s", "30 s", "1 min", "3 min", "10 min",
    "30 min", "1 h", "3 h", "10 h", "1 d", "10 d"];

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }
  // The chart library reads some markup in texts. Reasons are whatever a program said: they stay texts.
  function plain(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }
  function duration(ms) {
    if (ms === null || ms === undefined) { return "–"; }
    if (ms < 1) { return "< 1 ms"; }
    if (ms < 1000) { return ms.toPrecision(ms < 100 ? 2 : 3) + " ms"; }
    if (ms < 120000) { return (ms / 1000).toPrecision(3) + " s"; }
    if (ms < 7200000) { return (ms / 60000).toPrecision(3) + " min"; }
    return (ms / 3600000).toPrecision(3) + " h";
  }
  // Nothing below a millisecond is measured: on a logarithmic axis it stands just under it.
  function floor(values) {
    return values.map(function (value) { return value === null ? null : Math.max(value, 0.7); });
  }
  function layout(more) {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
    return {
      font: { family: "system-ui, sans-serif", size: 12, color: colour("quiet") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 8, t: 8, b: 8 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
      legend: { orientation: "h", traceorder: "normal", y: -0.18, yanchor: "top", x: 0 },
      showlegend: true,
      dragmode: coarse.matches ? false : "zoom",
      xaxis: Object.assign({}, axis, more.xaxis),
      yaxis: Object.assign({}, axis, { rangemode: "tozero" }, more.yaxis),
      barmode: "stack", bargap: 0.15,
    };
  }
  const overTime = { type: "date", nticks: 5, tickangle: 0 };
  // Every tick that has a name where the values lie close together, every other one where they do not.
  function inDurations(values) {
    const known = values.filter(function (value) { return value !== null; });
    const decades = known.length ? Math.log10(Math.max.apply(null, known) / Math.min.apply(null, known)) : 0;
    function chosen(list) { return list.filter(function (_, index) { return decades < 3 || index % 2 === 0; }); }
    return { type: "log", tickvals: chosen(ticks), ticktext: chosen(tickNames), rangemode: "normal", tickangle: 0 };
  }

  function line(name, values, index, more) {
    return Object.assign({
      type: "scatter", mode: data.times.length > 60 ? "lines" : "lines+markers", name: plain(name),
      x: data.times, y: values, line: { width: 2, color: colour("c" + index) }, marker: { size: 5 },
    }, more);
  }
  function stacks(view) {
    return Object.keys(view).map(function (name, index) {
      return { type: "bar", name: plain(name), x: data.times, y: view[name], marker: { color: colour("c" + (index % 9 + 1)) },
               xperiod: data.step_ms, xperiodalignment: "middle" };
    });
  }
  // A few things are counted one by one; there is no half of a dead letter.
  function whole(view) {
    const sums = data.times.map(function (_, index) {
      return Object.keys(view).reduce(function (sum, name) { return sum + view[name][index]; }, 0);
    });
    return Math.max.apply(null, [0].concat(sums)) < 6 ? { dtick: 1 } : {};
  }
  function draw(id, traces, more) {
    const place = document.getElementById(id);
    const something = traces.some(function (trace) { return trace.y.some(function (value) { return value !== null && value !== 0; }); });
    if (!something) {
      window.Plotly.purge(place);
      place.className = "chart empty";
      place.textContent = "nothing to show";
      return Promise.resolve(0);
    }
    if (place.className !== "chart") { place.className = "chart"; place.textContent = ""; }
    return window.Plotly.react(place, traces, layout(more), { displayModeBar: false, responsive: true, displaylogo: false })
      .then(function () { return 1; });
  }
  function percentiles(id, view) {
    const lines = view || { p50: [], p95: [], p99: [] };
    const marks = { p50: 2, p95: 3, p99: 4 };
    return draw(id, Object.keys(marks).map(function (mark) {
      const values = lines[mark] || [];
      return line(mark, floor(values), marks[mark], { text: values.map(duration), hovertemplate: "%{text}" });
    }), { xaxis: overTime, yaxis: inDurations([].concat(floor(lines.p50), floor(lines.p99))) });
  }
  function distribution(view) {
    const colours = { wait: 1, run: 2, late: 3 };
    const traces = Object.keys(colours).filter(function (name) { return view[name]; }).map(function (name) {
      const bars = view[name];
      return {
        type: "scatter", mode: "lines", name: measures[name], fill: "tozeroy", line: { shape: "hv", width: 2, color: colour("c" + colours[name]) },
        x: floor(bars.from), y: bars.share, text: bars.from.map(function (from) { return from < 1 ? "< 1 ms" : "from " + duration(from); }),
        hovertemplate: "%{text}: %{y:.1%}",
      };
    });
    return draw("distribution", traces, { xaxis: inDurations([1, 1e6]), yaxis: { tickformat: ".0%" } });
  }
  function show() {
    const view = data.views[chooser.selectedIndex];
    Object.keys(view.tiles).forEach(function (name) { document.getElementById("tile-" + name).textContent = view.tiles[name]; });
    const rates = Object.keys(view.rates).map(function (name, index) {
      // What is published is the ground that the others stand before: done mostly lies upon it.
      return line(name, view.rates[name], index + 1, Object.assign({ hovertemplate: "%{y:.3~s}/s" },
        name === "published" ? { fill: "tozeroy", fillcolor: colour("c1") + "2e", line: { width: 1, color: colour("c1") } } : {}));
    });
    Promise.all([
      draw("rates", rates, { xaxis: overTime, yaxis: { ticksuffix: "/s", tickformat: "~s" } }),
      percentiles("wait", view.percentiles.wait),
      percentiles("run", view.percentiles.run),
      percentiles("late", view.percentiles.late),
      distribution(view.distribution),
      draw("redeliveries", stacks(view.redeliveries), { xaxis: overTime, yaxis: whole(view.redeliveries) }),
      draw("dead", stacks(view.dead_letters), { xaxis: overTime, yaxis: whole(view.dead_letters) }),
    ]).then(function (drawn) {
      document.documentElement.dataset.drawn = String(drawn.reduce(function (sum, one) { return sum + one; }, 0));
    });
  }
  chooser.addEventListener("change", show);
  dark.addEventListener("change", show);
  show();
})();
