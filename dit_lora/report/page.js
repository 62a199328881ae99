'use strict';
(() => {
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const known = new Map(all('section[id]').map((section) => [section.id, section.outerHTML]));
document.documentElement.classList.add('js');

// Numbers as the page's own text has them.
const words = (value, digits = 4) => {
  if (value === null || typeof value === 'string') return value ?? 'no value';
  const size = Math.abs(value);
  const plain = size === 0 || (size >= 1e-3 && size < 1e6);
  if (plain) return value.toLocaleString('en', { maximumSignificantDigits: digits });
  return value.toExponential(digits - 1).replace(/\.?0*e\+?/, 'e');
};
const make = (name, className, text = '') => {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
};

// Curves: uPlot draws them. Smoothing and zoom are the same for all, and outlive a served page's new data.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const read = (element) => JSON.parse(element.querySelector('script').textContent);
const value = (id) => document.getElementById(id)?.value;
let plots = [];
let zoomed = null;
const zoom = (range) => {
  zoomed = range;
  for (const plot of plots) plot.setScale('x', { min: 0, max: 1 }); // its own range is what counts
};
const smooth = (values, count) => values.map((value, index) => {
  if (value == null || count <= 1) return value;
  let sum = 0;
  let seen = 0;
  for (let at = Math.max(0, index + 1 - count); at <= index; at += 1) {
    if (values[at] != null) { sum += values[at]; seen += 1; }
  }
  return sum / seen;
});
// Columns of uPlot for a curve: single values, or the extremes of many, faint behind their means.
const columnsOf = (curve, count) => {
  const shown = curve.smooth ? smooth(curve.y, count) : curve.y;
  const single = curve.faint && count > 1 ? { 'each step': curve.y } : {};
  return [
    ...Object.entries(curve.range ?? single).map(([label, y]) => ({ curve, label, y, faint: true })),
    // To uPlot null is a gap, and undefined is nothing at all.
    { curve, label: curve.name, y: curve.sparse ? shown.map((y) => y ?? undefined) : shown, faint: false },
  ];
};
// The position of a step on the chosen axis: between two recorded steps in proportion.
const positionOn = ({ x }, { steps }) => (step) => {
  if (!x || !steps.length) return step;
  const index = steps.findIndex((recorded) => recorded >= step);
  if (index < 0) return x.at(-1);
  const [step0, x0] = index ? [steps[index - 1], x[index - 1]] : [0, 0];
  return x0 + (x[index] - x0) * (step - step0) / (steps[index] - step0 || 1);
};
const seriesOf = (axis) => ({ curve, label, y, faint }) => {
  const alone = y.filter((value) => value != null).length === 1; // no line would show it
  const stroke = () => color(`--c${curve.color}`) + (faint ? '4d' : '');
  return {
    label,
    faint,
    class: faint ? 'faint' : undefined,
    stroke,
    paint: `color-mix(in srgb, var(--c${curve.color}) ${faint ? 40 : 100}%, transparent)`,
    width: faint || curve.steps ? 1.25 : 2,
    dash: curve.steps ? [3, 4] : [],
    points: { ...(faint ? { show: false } : curve.steps || alone ? { show: true } : {}), size: curve.steps ? 8 : 4, fill: stroke },
    value: (plot, _, index, at) => {
      const row = at ?? plot.data[index].findLastIndex((y) => y != null); // the last ones, with no pointer there
      const apart = at !== null && row !== plot.cursor.idx;
      return words(plot.data[index][row] ?? null) + (apart ? ` at ${axis.name} ${words(plot.data[0][row], axis.x ? 4 : 9)}` : '');
    },
  };
};
// The range of what is in view; not every spike of a faint line, which would press the others flat.
const heightOf = (chart, plot, [from, to]) => {
  const ends = plot.series.slice(1).flatMap(({ faint }, index) => {
    const seen = plot.data[index + 1].filter((y, at) => y != null && (y > 0 || !chart.log)
      && plot.data[0][at] >= from && plot.data[0][at] <= to).sort((a, b) => a - b);
    const cut = faint ? Math.floor(0.03 * seen.length) : 0;
    return seen.length ? [seen[cut], seen.at(-1 - cut)] : [];
  });
  if (!ends.length) return [1, 2];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  if (!chart.log) return uPlot.rangeNum(chart.fromZero ? Math.min(0, low) : low, high, 0.1, chart.fromZero);
  const room = Math.max(1.1, (high / low) ** 0.06);
  return [Math.max(low, high / 1e6) / room, high * room];
};
const logTicks = (plot, axis, low, high) => {
  const decades = Math.log10(high / low);
  const digits = decades > 3 ? [1] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.ceil(decades / 8)) {
    ticks.push(...digits.map((digit) => Number(`${digit}e${power}`)));
  }
  return ticks.filter((value) => value >= low && value <= high);
};
const drawVerticalLines = (plot, positions, name, dash) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color(name);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
  ctx.beginPath();
  for (const position of new Set(positions)) {
    const x = plot.valToPos(position, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
};
// Guard events near the pointer.
const showEvents = (plot, run, positionOf, tip) => {
  const { left } = plot.cursor;
  const near = run.marks.filter(([step]) => left >= 0 && Math.abs(plot.valToPos(positionOf(step), 'x') - left) < 6);
  tip.replaceChildren(...near.slice(0, 3).map(([step, message]) => make('div', '', `step ${words(step, 9)}: ${message}`)));
  tip.hidden = !near.length;
  tip.classList.toggle('left', left > plot.over.clientWidth / 2);
};
const drawCurves = (figure, run, axis, count) => {
  const chart = read(figure);
  const box = figure.querySelector('.plot');
  const positionOf = positionOn(axis, run);
  const digits = axis.x ? 4 : 9;
  const view = () => zoomed ?? [0, axis.x ? positionOf(run.end) : Math.max(1, run.end)];
  const columns = chart.curves.flatMap((curve) => columnsOf(curve, count));
  const tables = columns.map(({ curve, y }) => [curve.steps?.map(positionOf) ?? axis.x ?? run.steps, y]);
  const gaps = columns.flatMap(({ y }, index) => tables[index][0].filter((_, at) => y[at] === null));
  figure.querySelector('.not-finite').hidden = !gaps.length;
  const tip = make('output', 'tip');
  const paint = (plot, index) => plot.series[index].paint;
  const line = { width: 1, size: 5, stroke: () => color('--line') };
  const none = { show: false };
  const font = '12px system-ui, sans-serif';
  const scale = { stroke: () => color('--soft'), font, labelFont: font, labelSize: 18, labelGap: 0 };
  const plot = new uPlot({
    width: box.clientWidth,
    height: Number(getComputedStyle(box).getPropertyValue('--height')),
    padding: [10, 22, 0, 0],
    scales: { x: { time: false, range: view }, y: { distr: chart.log ? 3 : 1, range: (self) => heightOf(chart, self, view()) } },
    axes: [
      { ...scale, label: axis.name, size: 28, gap: 2, grid: none, ticks: line,
        values: (_, ticks) => ticks.map((tick) => (!axis.x && tick % 1 ? '' : words(tick, digits))) },
      { ...scale, label: chart.unit, size: 52, grid: line, ticks: none, values: (_, ticks) => ticks.map((value) => words(value, 6)),
        ...(chart.log ? { splits: logTicks, filter: (_, ticks) => ticks } : {}) },
    ],
    series: [{ label: axis.name, value: (self, x) => words(x ?? self.data[0].at(-1), digits) }, ...columns.map(seriesOf(axis))],
    legend: { markers: { width: 0, fill: paint } },
    cursor: { y: false, drag: { setScale: false }, bind: { dblclick: () => () => zoom(null) }, points: { size: 7, fill: paint } },
    hooks: {
      drawAxes: [(self) => {
        drawVerticalLines(self, gaps, '--bad', [4, 3]);
        drawVerticalLines(self, run.marks.map(([step]) => positionOf(step)), '--mark', [2, 3]);
      }],
      setCursor: [(self) => showEvents(self, run, positionOf, tip)],
      setSelect: [(self) => {
        const { left, width } = self.select;
        if (width > 5) zoom([self.posToVal(left, 'x'), self.posToVal(left + width, 'x')]);
        self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  }, uPlot.join(tables), box);
  plot.over.append(tip);
  plot.root.querySelector('.u-legend').setAttribute('aria-live', 'polite');
  const follow = (event) => {
    if (event.pointerType === 'mouse') return; // uPlot follows it by itself
    const over = plot.over.getBoundingClientRect();
    plot.setCursor({ left: event.clientX - over.left, top: event.clientY - over.top });
  };
  plot.over.addEventListener('pointerdown', follow);
  plot.over.addEventListener('pointermove', follow);
  box.addEventListener('keydown', (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === 'Escape') plot.setCursor({ left: -10, top: -10 });
    if (!by) return;
    const [first, last] = plot.series[0].idxs; // in view
    const at = Math.max(first, Math.min(last, (plot.cursor.idx ?? first - 1) + by * (event.shiftKey ? 10 : 1)));
    plot.setCursor({ left: plot.valToPos(plot.data[0][at], 'x'), top: 0 });
    event.preventDefault();
  });
  return plot;
};
const resized = new ResizeObserver(() => {
  for (const plot of plots) {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
  }
});
const curves = () => {
  for (const plot of plots) plot.destroy();
  resized.disconnect();
  const run = document.getElementById('curve-data');
  const slider = document.getElementById('smoothing');
  const count = slider ? JSON.parse(slider.dataset.windows)[slider.value] : 1;
  if (slider) document.getElementById('smoothing-is').textContent = count > 1 ? `mean of ${count.toLocaleString('en')} steps` : 'none';
  plots = [];
  if (!run) return;
  const data = JSON.parse(run.textContent);
  const axis = data.axes[value('axis') ?? 0];
  const points = Math.max(1, Math.round(count / data.stepsPerPoint));
  plots = all('figure.curves').map((figure) => drawCurves(figure, data, axis, points));
  for (const plot of plots) resized.observe(plot.root.parentElement);
};
for (const query of ['(prefers-color-scheme: dark)', 'print']) {
  matchMedia(query).addEventListener('change', () => { for (const plot of plots) plot.redraw(); });
}

// Heat maps: a pixel a cell on a logarithmic scale, which the style enlarges, and the value that is pointed at.
const heats = new Map();
const ramp = () => {
  const canvas = new OffscreenCanvas(256, 1);
  const pen = canvas.getContext('2d');
  const gradient = pen.createLinearGradient(0, 0, 256, 0);
  color('--ramp').split(',').forEach((stop, index, stops) => gradient.addColorStop(index / (stops.length - 1), stop.trim()));
  pen.fillStyle = gradient;
  pen.fillRect(0, 0, 256, 1);
  return canvas;
};
const drawHeat = (figure, colors) => {
  const map = read(figure);
  heats.set(figure.querySelector('.heat'), map);
  const cells = map.values.flat();
  const positive = cells.filter((value) => value > 0);
  const high = positive.reduce((a, b) => Math.max(a, b), 0) || 1;
  const low = Math.max(positive.reduce((a, b) => Math.min(a, b), high), high * 1e-9);
  const pen = figure.querySelector('canvas').getContext('2d');
  map.values.forEach((row, y) => row.forEach((value, x) => {
    const part = high > low ? Math.max(0, Math.log(value / low)) / Math.log(high / low) : 0.5;
    pen.fillStyle = value === 0 ? color('--zero') : color('--not-finite');
    if (value > 0) pen.drawImage(colors, Math.round(255 * part), 0, 1, 1, x, y, 1, 1);
    else if (value !== null) pen.fillRect(x, y, 1, 1);
  }));
  const named = new Set([map.steps[0], map.steps[map.steps.length >> 1], map.steps.at(-1)]);
  const scale = [low, Math.sqrt(low * high), high];
  figure.querySelector('.heat-steps').replaceChildren(...[...named].map((step) => make('span', '', words(step, 9))));
  figure.querySelector('.scale-ends').replaceChildren(...scale.map((value) => make('span', '', words(value, 2))));
  figure.querySelector('.nowrap.not-finite').hidden = !cells.includes('not finite');
};
const drawHeats = () => {
  heats.clear();
  const colors = ramp();
  for (const figure of all('.heat-map')) drawHeat(figure, colors);
};
const showCell = (heat, column, row) => {
  const map = heats.get(heat);
  column = Math.max(0, Math.min(map.steps.length - 1, column));
  row = Math.max(0, Math.min(map.rows.length - 1, row));
  heat.dataset.column = column;
  heat.dataset.row = row;
  const cell = heat.querySelector('.cell');
  const canvas = heat.querySelector('canvas');
  cell.hidden = false;
  Object.assign(cell.style, {
    left: `${100 * column / map.steps.length}%`,
    width: `${100 / map.steps.length}%`,
    top: `${canvas.clientHeight * row / map.rows.length}px`,
    height: `${canvas.clientHeight / map.rows.length}px`,
  });
  const figure = heat.closest('figure');
  figure.querySelector('output').textContent =
    `${map.rows[row]}, step ${words(map.steps[column], 9)}: ${words(map.values[row][column])}`;
};
const overHeat = (heat, event) => {
  const map = heats.get(heat);
  const box = heat.querySelector('canvas').getBoundingClientRect();
  showCell(
    heat,
    Math.floor((event.clientX - box.left) / box.width * map.steps.length),
    Math.floor((event.clientY - box.top) / box.height * map.rows.length),
  );
};
const chooseHeat = () => {
  const [grouping, statistic] = ['heat-grouping', 'heat-statistic'].map((id) => document.getElementById(id)?.value);
  for (const map of all('.heat-map')) {
    map.hidden = map.dataset.grouping !== grouping || map.dataset.statistic !== statistic;
  }
};

// Samples: all steps as a filmstrip, or two of them beside each other, played together.
const isFilm = () => (value('mode') ?? 'film') === 'film';
const inView = new Set();
const watched = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    inView[isIntersecting ? 'add' : 'delete'](target);
    if (!isIntersecting) target.pause();
  }
  if (playing()) play();
});
// A page can have thousands of clips: only those in view are played.
const shownVideos = () => [...inView].filter((video) => video.isConnected && !video.closest('figure').hidden);
const chooseSamples = () => {
  const film = isFilm();
  const slider = value('mode') === 'slider';
  const steps = [value('left'), value('right')];
  for (const label of all('.tools .chosen')) label.hidden = film;
  for (const pair of all('.pair')) {
    const figures = all('figure', pair);
    for (const figure of figures) figure.hidden = !film && !steps.includes(figure.dataset.step);
    const two = figures.filter((figure) => !figure.hidden).length === 2;
    pair.classList.toggle('slider', slider && two);
    // A row for each prompt, so that the steps are columns.
    pair.closest('.samples').classList.toggle('film', film);
    const cut = pair.closest('.sample').querySelector('.cut');
    cut.hidden = !(slider && two);
    pair.style.setProperty('--cut', `${cut.value}%`);
  }
  if (playing()) play();
};
// The rows of a grid are scrolled together.
document.addEventListener('scroll', ({ target }) => {
  if (!target.matches?.('.film .pair')) return;
  for (const other of all('.film .pair')) if (other.scrollLeft !== target.scrollLeft) other.scrollLeft = target.scrollLeft;
}, true);

// Taking a step: the line to type.
const number = () => value('take').padStart(6, '0');
const showExportLine = () => {
  const line = document.getElementById('take-line');
  const { name, form } = line.closest('.take').dataset;
  const { file } = document.getElementById('take').selectedOptions[0].dataset;
  line.textContent = `dit-lora export ${name}/checkpoints/step_${number()}/${file} --to ${form} --out ${name}/exports/step_${number()}`;
};
const playing = () => document.getElementById('play')?.getAttribute('aria-pressed') === 'true';
const setPlaying = (on) => {
  const button = document.getElementById('play');
  if (!button) return;
  button.setAttribute('aria-pressed', String(on));
  button.textContent = on ? 'Pause' : 'Play';
};
const play = () => {
  setPlaying(true);
  const videos = shownVideos();
  for (const video of videos) {
    if (video.paused) video.currentTime = videos[0].currentTime;
    video.play().catch(() => {});
  }
};
const pause = () => {
  setPlaying(false);
  for (const video of all('.sample video')) video.pause();
};
const seek = (part) => {
  for (const video of shownVideos()) if (video.duration) video.currentTime = part * video.duration;
};
document.addEventListener('timeupdate', (event) => {
  const [first, ...others] = shownVideos();
  if (event.target !== first || !first.duration) return;
  const bar = document.getElementById('seek');
  if (bar && document.activeElement !== bar) bar.value = 1000 * first.currentTime / first.duration;
  for (const video of others) {
    if (Math.abs(video.currentTime - first.currentTime) > 0.15) video.currentTime = first.currentTime;
  }
}, true);

const point = (event) => {
  const heat = event.target.closest?.('.heat');
  if (heat && event.target.closest('canvas, .cell')) overHeat(heat, event);
};
document.addEventListener('pointermove', point);
document.addEventListener('pointerdown', point);
document.addEventListener('keydown', (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const heat = event.target;
  if (!step || !heat.matches('.heat')) return;
  showCell(heat, Number(heat.dataset.column ?? -1) + step[0], Number(heat.dataset.row ?? 0) + step[1]);
  event.preventDefault();
});
document.addEventListener('input', (event) => {
  const { id } = event.target;
  if (id === 'axis') zoomed = null;
  if (['axis', 'smoothing'].includes(id)) curves();
  if (id.startsWith('heat-')) chooseHeat();
  if (['left', 'right', 'mode'].includes(id) || event.target.matches('.cut')) chooseSamples();
  if (id === 'take') showExportLine();
  if (id === 'seek') { pause(); seek(event.target.value / 1000); }
  if (id === 'loop') for (const video of all('.sample video')) video.loop = event.target.checked;
});
document.addEventListener('click', (event) => {
  if (event.target.id === 'play') (playing() ? pause : play)();
});
addEventListener('beforeprint', () => all('details').forEach((one) => { one.open = true; }));

// A link to a folded section opens it.
const unfold = (id) => document.getElementById(id)?.querySelector(':scope > details.fold')?.setAttribute('open', '');
document.addEventListener('click', (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (link) unfold(link.hash.slice(1));
});
unfold(location.hash.slice(1));

const begin = () => {
  curves();
  drawHeats();
  chooseHeat();
  chooseSamples();
  inView.clear();
  watched.disconnect();
  for (const video of all('.sample video')) watched.observe(video);
};
if (document.querySelector('.sample video') && !matchMedia('(prefers-reduced-motion: reduce)').matches) setPlaying(true);
begin();

// A served page: sections that changed are put in place of the old ones, with what was chosen in them.
const live = document.querySelector('main').dataset.live;
if (live === undefined) return;
let fingerprint = live;
const renew = (fresh) => {
  let changed = false;
  for (const section of all('section[id]', fresh)) {
    const text = section.outerHTML;
    if (known.get(section.id) === text) continue;
    known.set(section.id, text);
    const old = document.getElementById(section.id);
    const kept = all('input[id], select[id]', old).map((one) => [one.id, one.value, one.checked]);
    const open = all('details[open]', old).map((one) => one.id);
    old.replaceWith(document.adoptNode(section));
    changed = true;
    for (const [id, was, checked] of kept) {
      const one = document.getElementById(id);
      if (!one || id === 'right') continue; // it stays with the last sample
      one.value = was;
      one.checked = checked;
    }
    for (const id of open) if (id) document.getElementById(id)?.setAttribute('open', '');
  }
  if (changed) begin();
};
const look = async () => {
  const sign = document.getElementById('live');
  try {
    const { fingerprint: now } = await (await fetch('state')).json();
    if (now !== fingerprint) {
      const page = new DOMParser().parseFromString(await (await fetch('./')).text(), 'text/html');
      fingerprint = page.querySelector('main').dataset.live;
      renew(page);
    }
    sign.textContent = 'live';
  } catch {
    sign.textContent = 'not live: the server has stopped';
  }
  setTimeout(look, document.hidden ? 10000 : 2000);
};
setTimeout(look, 1000);
})();
