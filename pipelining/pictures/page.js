// Draws the timelines of the page's data on canvases that share one view of time.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 84, RIGHT = 8, AXIS = 22, ROW = 22, BAR = 19, CAPTION = 26, CURVE = 26;
const view = { from: 0, to: 1 }; // what is seen, as shares of the page's length of time
const panels = data.timelines.map(makePanel);
let hovered = null; // { panel, task }
let drag = null;

function makePanel(timeline) {
  const section = element("section", document.querySelector("main"));
  element("h2", section).textContent = timeline.title;
  element("p", section).textContent = timeline.summary;
  const canvas = element("canvas", section);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${timeline.title}: ${timeline.summary}`);
  canvas.style.height = `${AXIS + timeline.ranks * (ROW + CURVE) + CAPTION}px`;
  const rows = Array.from({ length: timeline.ranks }, () => []);
  const tasks = timeline.tasks.map(([rank, stage, kind, microbatch, start, end]) =>
    ({ rank, stage, kind, microbatch, start, end, name: `${stage}${kind}${microbatch}`, reads: [], sends: [] }));
  const outer = timeline.outer.map(([rank, label, start, end]) => ({ rank, start, end, name: label }));
  for (const [from, to, bytes, posted, arrived] of timeline.links) {
    const link = { source: tasks[from], to: tasks[to], bytes, posted, arrived };
    tasks[from].sends.push(link);
    tasks[to].reads.push(link);
  }
  for (const task of [...tasks, ...outer]) rows[task.rank].push(task);
  const peak = Math.max(1, ...timeline.curves.flat().map(([, value]) => value)) / timeline.share;
  const digits = `${Math.max(0, ...tasks.map(task => task.microbatch))}`.length;
  return { timeline, canvas, rows, tasks, peak, digits };
}

function element(name, parent) {
  return parent.appendChild(document.createElement(name));
}

// ---- time and place

function plotWidth(panel) {
  return panel.canvas.clientWidth - LEFT - RIGHT;
}

function xOf(panel, time) {
  return LEFT + (time / panel.timeline.length - view.from) / (view.to - view.from) * plotWidth(panel);
}

function timeAt(panel, x) {
  return (view.from + (x - LEFT) / plotWidth(panel) * (view.to - view.from)) * panel.timeline.length;
}

function curvesTop(panel) {
  return AXIS + panel.timeline.ranks * ROW + CAPTION;
}

function numberText(timeline, time) {
  return `${+(time * timeline.factor).toPrecision(6)}`;
}

function timeText(timeline, time) {
  const number = numberText(timeline, time);
  return `${number} ${timeline.unit || (number === "1" ? "time unit" : "time units")}`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes > 0 ? Math.min(4, Math.floor(Math.log2(bytes) / 10)) : 0;
  return `${+(bytes / 1024 ** power).toPrecision(3)} ${units[power]}`;
}

function tickStep(length, most) {
  const least = length / most;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(digit => digit * power).find(step => step >= least * 0.999999);
}

// ---- drawing

function drawAll() {
  const style = getComputedStyle(document.documentElement);
  const ink = name => style.getPropertyValue(`--${name}`);
  const inks = Object.fromEntries(
    ["page", "text", "soft", "row", "grid", "curve", "strong"].map(name => [name, ink(name)]));
  let drawn = 0;
  for (const panel of panels) drawn += drawPanel(panel, inks);
  document.documentElement.dataset.drawn = drawn;
}

function drawPanel(panel, inks) {
  const { canvas, timeline } = panel;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawNames(panel, pen, inks);
  pen.beginPath();
  pen.rect(LEFT, 0, plotWidth(panel), height);
  pen.clip();
  drawRows(panel, pen, inks);
  drawAxis(panel, pen, inks);
  const drawn = drawTasks(panel, pen, inks);
  drawCurves(panel, pen, inks);
  if (hovered && hovered.panel === panel) drawWay(panel, pen, inks);
  return drawn;
}

function drawNames(panel, pen, inks) {
  const { timeline } = panel;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    pen.fillStyle = inks.text;
    pen.fillText(`rank ${rank}`, 0, AXIS + rank * ROW + ROW / 2);
    const y = curvesTop(panel) + rank * CURVE + CURVE / 2;
    const peak = Math.max(0, ...timeline.curves[rank].map(([, value]) => value));
    pen.fillText(`${rank}`, 0, y);
    pen.fillStyle = inks.soft;
    pen.fillText(timeline.bytes ? bytesText(peak) : `${peak}`, 20, y);
  }
  pen.fillStyle = inks.soft;
  const stage = timeline.share === 1 ? "its stage" : `one of its ${+timeline.share.toFixed(2)} stages`;
  const what = timeline.bytes ? "Live bytes of each rank" : `Activations that each rank holds: micro-batches over ${stage}`;
  pen.fillText(`${what} (left: the most)`, 0, curvesTop(panel) - 9);
}

function drawRows(panel, pen, inks) {
  const left = xOf(panel, 0), width = xOf(panel, lastInstant(panel)) - left;
  pen.fillStyle = inks.row;
  for (let rank = 0; rank < panel.timeline.ranks; rank++)
    pen.fillRect(left, AXIS + rank * ROW + (ROW - BAR) / 2, width, BAR);
}

function lastInstant(panel) {
  panel.last ??= Math.max(0, ...panel.rows.flat().map(task => task.end));
  return panel.last;
}

function drawAxis(panel, pen, inks) {
  const { timeline } = panel;
  const from = timeAt(panel, LEFT), to = timeAt(panel, LEFT + plotWidth(panel));
  const step = tickStep((to - from) * timeline.factor, Math.max(1, Math.floor(plotWidth(panel) / 90))) / timeline.factor;
  pen.lineWidth = 1;
  for (let tick = Math.ceil(from / step - 1e-9); tick * step <= to; tick++) {
    const x = xOf(panel, tick * step);
    pen.strokeStyle = inks.grid;
    line(pen, x, AXIS - 5, x, AXIS + timeline.ranks * ROW);
    line(pen, x, curvesTop(panel), x, curvesTop(panel) + timeline.ranks * CURVE);
    pen.fillStyle = inks.soft;
    const text = `${numberText(timeline, tick * step)}${timeline.unit && " " + timeline.unit}`;
    if (x + pen.measureText(text).width < panel.canvas.clientWidth) pen.fillText(text, x + 1, AXIS / 2 - 3);
  }
}

function line(pen, ...points) {
  pen.beginPath();
  for (let at = 0; at < points.length; at += 2) pen.lineTo(points[at], points[at + 1]);
  pen.stroke();
}

function drawTasks(panel, pen, inks) {
  let drawn = 0;
  pen.textAlign = "center";
  pen.font = "11px system-ui, sans-serif";
  const digit = pen.measureText("F8").width / 2;
  for (const task of panel.rows.flat()) {
    const x = xOf(panel, task.start), width = xOf(panel, task.end) - x;
    if (x > panel.canvas.clientWidth || x + width < LEFT) continue;
    const y = AXIS + task.rank * ROW + (ROW - BAR) / 2;
    const faded = hovered && hovered.task && hovered.task.microbatch !== task.microbatch;
    pen.globalAlpha = faded ? 0.45 : 1;
    pen.fillStyle = colorOf(panel, task);
    pen.fillRect(x, y, Math.max(0.5, width < 4 ? width : width - 1), BAR);
    pen.fillStyle = "#111111";
    const label = labelOf(panel, task, Math.floor((width - 2) / digit));
    if (label) pen.fillText(label, x + width / 2, y + BAR / 2 + 1);
    drawn++;
  }
  pen.globalAlpha = 1;
  pen.textAlign = "left";
  return drawn;
}

function colorOf(panel, task) {
  if (!task.kind) return data.outer;
  const { colors } = data.kinds[task.kind];
  return colors[panel.timeline.turns[task.stage] % colors.length];
}

// Tasks of one length have the same kind of label, whether their numbers are short or long.
function labelOf(panel, task, letters) {
  if (!task.kind) return task.name.length <= letters ? task.name : "";
  if (panel.digits > letters) return "";
  return `${panel.digits < letters ? task.kind : ""}${task.microbatch}`;
}

function drawCurves(panel, pen, inks) {
  const bytes = panel.timeline.bytes;
  const top = Math.max(...panels.filter(other => other.timeline.bytes === bytes).map(other => other.peak));
  panel.timeline.curves.forEach((curve, rank) => {
    const bottom = curvesTop(panel) + (rank + 1) * CURVE - 3;
    let y = bottom;
    pen.beginPath();
    pen.moveTo(xOf(panel, 0), bottom);
    for (const [time, value] of curve) {
      const x = xOf(panel, time);
      pen.lineTo(x, y);
      y = bottom - value / panel.timeline.share / top * (CURVE - 5);
      pen.lineTo(x, y);
    }
    pen.lineTo(xOf(panel, lastInstant(panel)), y);
    pen.lineTo(xOf(panel, lastInstant(panel)), bottom);
    pen.fillStyle = inks.curve;
    pen.fill();
    pen.strokeStyle = inks.grid;
    line(pen, xOf(panel, 0), bottom + 0.5, xOf(panel, lastInstant(panel)), bottom + 0.5);
  });
}

// The hovered task's micro-batch: lines from task to task over the ranks, and a frame.
function drawWay(panel, pen, inks) {
  const { task } = hovered;
  if (!task) return;
  const middle = rank => AXIS + rank * ROW + ROW / 2;
  pen.strokeStyle = inks.strong;
  pen.lineWidth = 1.2;
  for (const other of panel.tasks.filter(other => other.microbatch === task.microbatch))
    for (const { source, posted, arrived } of other.reads)
      line(pen, xOf(panel, posted ?? source.end), middle(source.rank), xOf(panel, arrived ?? other.start), middle(other.rank));
  pen.lineWidth = 2;
  const x = xOf(panel, task.start);
  pen.strokeRect(x, middle(task.rank) - BAR / 2, xOf(panel, task.end) - x, BAR);
}

// ---- what the pointer is over

function taskAt(panel, x, y) {
  const rank = Math.floor((y - AXIS) / ROW);
  const time = timeAt(panel, x);
  return x < LEFT ? undefined : panel.rows[rank]?.find(task => task.start <= time && time < task.end);
}

function describe(panel, task) {
  const { timeline } = panel;
  const lines = [`${task.name} ${task.kind ? data.kinds[task.kind].word : "(outside the loop)"}`];
  if (task.kind) lines.push(`stage ${task.stage}, micro-batch ${task.microbatch}, rank ${task.rank}`);
  lines.push(`${numberText(timeline, task.start)} to ${numberText(timeline, task.end)}: ${timeText(timeline, task.end - task.start)}`);
  for (const link of task.reads ?? []) lines.push(`reads ${link.source.name} from rank ${link.source.rank}${wayText(timeline, link)}`);
  for (const link of task.sends ?? []) lines.push(`sends to rank ${link.to.rank} for ${link.to.name}${wayText(timeline, link)}`);
  lines.push(`${holdText(panel, task.rank, task.start)} from its start`);
  return lines.join("\n");
}

function wayText(timeline, link) {
  if (link.arrived === undefined) return "";
  return `: ${bytesText(link.bytes)}, ${timeText(timeline, link.arrived - link.posted)} on the way`;
}

function holdText(panel, rank, time) {
  const { curves, bytes } = panel.timeline;
  const value = curves[rank].filter(([instant]) => instant <= time).at(-1)?.[1] ?? 0;
  return `rank ${rank} holds ${bytes ? bytesText(value) : `${value} activation${value === 1 ? "" : "s"}`}`;
}

function describePlace(panel, x, y) {
  const time = timeAt(panel, x);
  const rank = Math.floor((y - curvesTop(panel)) / CURVE);
  if (x < LEFT || rank < 0 || rank >= panel.timeline.ranks || time < 0 || time > lastInstant(panel)) return "";
  return `${holdText(panel, rank, time)}\nat ${timeText(panel.timeline, time)}`;
}

function hover(panel, event) {
  const { offsetX: x, offsetY: y } = event;
  const task = taskAt(panel, x, y);
  const text = task ? describe(panel, task) : describePlace(panel, x, y);
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${beside(event.clientX, tip.offsetWidth, innerWidth)}px`;
  tip.style.top = `${beside(event.clientY, tip.offsetHeight, innerHeight)}px`;
  if (hovered?.task !== task) {
    hovered = task ? { panel, task } : null;
    requestAnimationFrame(drawAll);
  }
}

// Where a tip begins: after the pointer, or before it where there is no room after it.
function beside(pointer, size, room) {
  return pointer + 16 + size < room ? pointer + 16 : Math.max(0, pointer - 16 - size);
}

// ---- moving the view

function look(from, length) {
  length = Math.min(1, Math.max(1e-4, length));
  from = Math.min(1 - length, Math.max(0, from));
  const changed = from !== view.from || from + length !== view.to;
  [view.from, view.to] = [from, from + length];
  if (changed) requestAnimationFrame(drawAll);
  return changed;
}

function zoom(factor, share) {
  const length = view.to - view.from;
  const kept = Math.min(1, length * factor);
  return look(view.from + share * (length - kept), kept);
}

function listen(panel) {
  const { canvas } = panel;
  canvas.addEventListener("wheel", event => {
    const share = Math.min(1, Math.max(0, (event.offsetX - LEFT) / plotWidth(panel)));
    const moved = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)
      ? look(view.from + (event.deltaX || event.deltaY) / 1000 * (view.to - view.from), view.to - view.from)
      : zoom(Math.exp(event.deltaY / 400), share);
    if (moved) event.preventDefault(); // zoomed out already: the page scrolls
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    drag = { panel, x: event.offsetX, from: view.from };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointermove", event => {
    const length = view.to - view.from;
    if (drag?.panel === panel) look(drag.from - (event.offsetX - drag.x) / plotWidth(panel) * length, length);
    hover(panel, event);
  });
  canvas.addEventListener("pointerleave", () => {
    document.getElementById("tip").hidden = true;
    hovered = null;
    requestAnimationFrame(drawAll);
  });
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const length = view.to - view.from;
  const moves = {
    ArrowLeft: () => look(view.from - length / 5, length),
    ArrowRight: () => look(view.from + length / 5, length),
    "+": () => zoom(1 / 1.4, 0.5),
    "=": () => zoom(1 / 1.4, 0.5),
    "-": () => zoom(1.4, 0.5),
    "0": () => look(0, 1),
  };
  if (moves[event.key]) {
    moves[event.key]();
    event.preventDefault();
  }
}

function fillLegend() {
  const legend = document.getElementById("legend");
  const tasks = panels.flatMap(panel => panel.tasks);
  const turn = Math.max(0, ...panels.flatMap(panel => panel.timeline.turns));
  for (const [kind, { word, colors }] of Object.entries(data.kinds))
    if (tasks.some(task => task.kind === kind)) item(colors.slice(0, turn + 1), `${kind} ${word}`);
  if (panels.some(panel => panel.timeline.outer.length)) item([data.outer], "outside the loop");
  item(["var(--row)"], "idle");
  if (turn) item([], "paler: a rank's later stages");
  function item(colors, word) {
    const span = element("span", legend);
    for (const color of colors) element("i", span).style.background = color;
    span.append(` ${word}`);
  }
}

const layout = document.getElementById("layout");
layout.hidden = panels.length < 2;
layout.addEventListener("click", () => {
  const beside = document.querySelector("main").classList.toggle("beside");
  layout.textContent = beside ? "above one another" : "side by side";
});
fillLegend();
panels.forEach(listen);
document.addEventListener("keydown", press);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
const resized = new ResizeObserver(drawAll);
panels.forEach(panel => resized.observe(panel.canvas));
drawAll();
