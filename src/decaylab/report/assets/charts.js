// Curves drawn by uPlot from a panel: {title, x_label, y_label, log_x, log_y, y_min, lines}.
// A line: {label, name, colour, x, y, low?, high?, dashed?}; lines of one label share a switch.
"use strict";

function logTicks(low, high) {  // 1 to 9 of every decade between the two
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (let digit = 1; digit < 10; digit++) ticks.push(+`${digit}e${power}`);
  return ticks.filter(tick => tick >= low && tick <= high);
}

function drawChart(host, panel) {
  const hidden = new Set(), title = document.createElement("h4"), keys = document.createElement("div");
  const area = document.createElement("div"), readout = document.createElement("output");
  title.textContent = panel.title;
  keys.className = "keys";
  readout.className = "readout soft";
  host.replaceChildren(title, area, keys, readout);
  let plot = null, lines = [];

  function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function short(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
    return String(+value.toPrecision(4));
  }
  function values(numbers) {  // a logarithmic axis has no room for zero
    return numbers.map(v => v === null || (panel.log_y && v <= 0) ? null : v);
  }
  function labelled(value, splits) {  // on a logarithmic axis: 1, 2, 5, or powers of ten alone
    const first = +(value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toPrecision(2);
    return first === 1 || (splits[splits.length - 1] < 100 * splits[0] && (first === 2 || first === 5));
  }
  function build() {
    const tables = [], series = [{}], bands = [];
    lines = [null];
    for (const line of panel.lines) {
      const table = [line.x, values(line.y)], first = lines.length;
      const dots = line.y.length < 40 && !line.dashed;
      const look = {stroke: line.colour, width: 1.6, spanGaps: true, show: !hidden.has(line.label),
                    dash: line.dashed ? [6, 4] : undefined, points: {show: dots, size: 5}};
      series.push(look);
      lines.push(line);
      if (line.low) {
        for (const bound of [line.high, line.low]) {
          table.push(values(bound));
          series.push({stroke: "transparent", width: 0, spanGaps: true, show: look.show, points: {show: false}});
          lines.push({...line, bound: true});
        }
        bands.push({series: [first + 1, first + 2], fill: line.colour + "30"});
      }
      tables.push(table);
    }
    const data = tables.length ? uPlot.join(tables) : [[], []];
    const axis = {stroke: ink("--soft"), grid: {stroke: ink("--line"), width: 1}, ticks: {stroke: ink("--line")},
                  font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif"};
    const marks = (_, splits) => splits.map(short);
    const logarithmic = {splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits,
                         values: (_, splits) => splits.map(v => labelled(v, splits) ? short(v) : "")};
    const ticks = log => log ? logarithmic : {values: marks};
    const bottom = panel.log_y ? {range: (_, low, high) => [low / 1.15, high * 1.15]}
      : panel.y_min === null || panel.y_min === undefined ? {} : {range: (_, low, high) => [Math.max(low, panel.y_min), high + 0.05 * (high - panel.y_min)]};
    if (plot) plot.destroy();
    plot = new uPlot({
      width: Math.max(area.clientWidth, 200), height: 260, legend: {show: false}, series, bands,
      focus: {alpha: 0.35}, cursor: {focus: {prox: 24}, points: {size: 7}},
      scales: {x: {time: false, distr: panel.log_x ? 3 : 1}, y: {distr: panel.log_y ? 3 : 1, ...bottom}},
      axes: [{...axis, label: panel.x_label, labelSize: 20, size: 34, ...ticks(panel.log_x)},
             {...axis, label: panel.y_label, labelSize: 20, size: 62, ...ticks(panel.log_y)}],
      hooks: {setSeries: [(_, i) => say(i)], setCursor: [u => { if (u.cursor.idx === null) readout.textContent = ""; }]},
    }, data, area);
    host.dataset.points = String(data[0].length);
  }
  function say(place) {
    if (!plot || place === null || place === undefined || !lines[place]) return;
    const at = plot.cursor.idxs ? plot.cursor.idxs[place] ?? plot.cursor.idx : plot.cursor.idx;
    if (at === null || at === undefined) return;
    const line = lines[place], y = plot.data[place][at];
    if (y === null || y === undefined) return;
    const name = line.name ? `${line.label}, ${line.name}` : line.label;
    readout.textContent = `${name}: ${panel.y_label} ${short(y)} at ${panel.x_label} ${short(plot.data[0][at])}`;
  }
  function writeKeys() {
    const known = new Map(panel.lines.map(line => [line.label, line]));
    keys.replaceChildren(...[...known].map(([label, line]) => {
      const key = document.createElement("button");
      key.type = "button";
      key.textContent = label;
      key.style.setProperty("--ink", line.colour);
      key.className = line.dashed ? "key dashed" : "key";
      key.setAttribute("aria-pressed", String(!hidden.has(label)));
      key.onclick = () => {
        hidden.has(label) ? hidden.delete(label) : hidden.add(label);
        key.setAttribute("aria-pressed", String(!hidden.has(label)));
        build();
      };
      return key;
    }));
  }
  writeKeys();
  build();
  let width = area.clientWidth;
  new ResizeObserver(() => {
    if (area.clientWidth !== width && area.clientWidth > 0) { width = area.clientWidth; build(); }
  }).observe(area);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  return {update(next) { panel = next; title.textContent = panel.title; writeKeys(); build(); }, hidden};
}

function drawWhenSeen(hosts) {
  // Thousands of points cost time: a chart is drawn when it comes into view, or is to be printed.
  const waiting = new Set(hosts);
  const draw = host => {
    if (waiting.delete(host)) drawChart(host, JSON.parse(host.querySelector("script").textContent));
  };
  const seen = new IntersectionObserver(entries => entries.forEach(entry => {
    if (entry.isIntersecting) draw(entry.target);
  }), {rootMargin: "300px"});
  hosts.forEach(host => seen.observe(host));
  addEventListener("beforeprint", () => waiting.forEach(draw));
}
