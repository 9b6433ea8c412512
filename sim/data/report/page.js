"use strict";
// Draws the figures, shows the traces that the reader's choices select, and follows the system's colours.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const swaps = Object.entries(read("dark"));
  const system = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const chosen = {};

  // Selectors of one key stand in several sections and move together.
  const pickers = [...document.querySelectorAll(".pick")].map((group) => {
    const menu = group.querySelector("select");
    const buttons = [...group.querySelectorAll("button")];
    const key = menu ? menu.dataset.key : group.dataset.key;
    const first = menu ? menu.value : buttons.find((b) => b.getAttribute("aria-pressed") === "true").dataset.value;
    return {key, first, menu, buttons};
  });
  const pick = (key, value) => {
    chosen[key] = value;
    for (const {key: own, menu, buttons} of pickers) {
      if (own !== key) continue;
      if (menu) menu.value = value;
      for (const b of buttons) b.setAttribute("aria-pressed", String(b.dataset.value === value));
    }
  };
  for (const {key, first, menu, buttons} of pickers) {
    pick(key, first);
    if (menu) menu.addEventListener("change", () => { pick(key, menu.value); drawAll(); });
    for (const b of buttons) b.addEventListener("click", () => { pick(key, b.dataset.value); drawAll(); });
  }
  for (const button of document.querySelectorAll(".legend button")) button.addEventListener("click", () => {
    const name = button.dataset.policy;
    if (!hidden.delete(name)) hidden.add(name);
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    drawAll();
  });

  function shown(trace) {
    const meta = trace.meta || {};
    if (hidden.has(meta.policy)) return false;
    return Object.keys(chosen).every((key) => meta[key] === undefined || meta[key] === chosen[key]);
  }

  // Log ticks at round values only: 1-2-5 steps over a short range, decades over a long one.
  function logTicks(low, high, most) {
    for (const steps of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let decade = Math.floor(low); decade <= Math.ceil(high); decade++)
        for (const step of steps) {
          const place = Math.log10(step) + decade;
          if (place >= low && place <= high) ticks.push(step * 10 ** decade);
        }
      if (ticks.length <= most) return ticks;
    }
    const every = Math.ceil((high - low) / most);
    const ticks = [];
    for (let decade = Math.ceil(low); decade <= high; decade += every) ticks.push(10 ** decade);
    return ticks;
  }

  function fitLog(axis, values, limits, labelled) {
    const known = values.filter((v) => v > 0);
    if (!known.length) return;
    let low = Math.log10(Math.min(...known));
    let high = Math.log10(Math.max(...known));
    for (const limit of limits) {  // a limit far away would squeeze the curves
      const place = Math.log10(limit);
      if (place < high + 0.8 && place > low - 0.8) { low = Math.min(low, place); high = Math.max(high, place); }
    }
    const room = Math.max(0.06, 0.08 * (high - low));
    low -= room; high += labelled ? 3 * room : room;  // values are written right of the last dot
    axis.range = [low, high];
    axis.autorange = false;
    axis.tickvals = logTicks(low, high, labelled ? 5 : 6);
    axis.ticktext = axis.tickvals.map((v) => Number(v.toPrecision(3)).toLocaleString("en-US", {maximumFractionDigits: 6}));
  }

  function draw(div) {
    let text = JSON.stringify(figures[div.dataset.figure]);
    if (system.matches) for (const [light, dark] of swaps) text = text.replaceAll(light, dark);
    const {data, layout} = JSON.parse(text);
    const visible = data.filter(shown);
    layout.font.family = getComputedStyle(document.body).fontFamily;
    for (const way of ["x", "y"]) {
      const axis = layout[way + "axis"];
      if (axis.type !== "log" || axis.tickvals) continue;
      const limits = layout.shapes.filter((s) => s[way + "ref"] === way).map((s) => s[way + "0"]);
      fitLog(axis, visible.flatMap((t) => t[way]), limits,
        way === "x" && visible.some((t) => (t.mode || "").includes("text")));
    }
    for (const note of layout.annotations) {  // the label of a line that lies outside
      for (const way of ["x", "y"]) {
        const range = layout[way + "axis"].range;
        if (note[way + "ref"] !== way || !range) continue;
        const at = (note[way] - range[0]) / (range[1] - range[0]);
        if (at < 0 || at > 1) note.visible = false;
        if (way === "x") note.xanchor = at > 0.75 ? "right" : at < 0.2 ? "left" : "center";
      }
    }
    layout.shapes = layout.shapes.filter((s) => ["x", "y"].every((way) => {
      const axis = layout[way + "axis"];
      if (s[way + "ref"] !== way || !axis.range) return true;
      const place = axis.type === "log" ? Math.log10(s[way + "0"]) : s[way + "0"];
      return place >= axis.range[0] && place <= axis.range[1];
    }));
    Plotly.react(div, visible, layout, {responsive: true, displayModeBar: false});
  }

  function drawAll() {
    for (const div of document.querySelectorAll(".plot")) draw(div);
  }
  system.addEventListener("change", drawAll);
  drawAll();
})();
