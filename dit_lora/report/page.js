'use strict';
(() => {
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const known = new Map(all('section[id]').map((section) => [section.id, section.outerHTML]));
document.documentElement.classList.add('js');

// Numbers as the page's own text has them.
const words = (value) => {
  if (value === null) return 'no value';
  if (typeof value === 'string') return value;
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(3).replace(/\.?0+e/, 'e').replace('e+', 'e');
  return size >= 1000 ? Math.round(value).toLocaleString('en') : value.toPrecision(4);
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
let plots = [];
let zoomed = null;
const zoom = (range) => {
  zoomed = range;
  for (const plot of plots) plot.setScale('x', { min: 0, max: 1 }); // its own range is what counts
};
const smoothingSteps = () => {
  const slider = document.getElementById('smoothing');
  return slider ? JSON.parse(slider.dataset.windows)[slider.value] : 1;
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
const tick = (value) => {
  const size = Math.abs(value ?? 0);
  if (value === null || size === 0) return value === null ? '' : '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e/, 'e').replace('e+', 'e');
  return value.toLocaleString('en', { maximumSignificantDigits: 6 });
};
// A column of uPlot for each line that is drawn: first what is behind, then what the legend names.
const columnsOf = (curve, count) => {
  const shown = curve.smooth ? smooth(curve.y, count) : curve.y;
  // To uPlot null is a gap, and undefined is nothing at all.
  const values = curve.sparse ? shown.map((value) => value ?? undefined) : shown;
  const behind = curve.faint && count > 1 ? [curve.y] : [];
  return [
    ...(curve.range ?? behind).map((y) => ({ curve, y, faint: true })),
    { curve, y: values, faint: false },
  ];
};
const seriesOf = ({ curve, faint }, raw) => {
  const stroke = () => color(`--c${curve.color}`) + (faint ? '4d' : '');
  if (faint) return { curve, faint, stroke, width: 1, class: 'faint', points: { show: false } };
  return {
    curve,
    label: curve.name,
    stroke,
    width: curve.steps ? 1.25 : 2,
    dash: curve.steps ? [3, 4] : undefined,
    points: curve.steps ? { show: true, size: 8, fill: stroke } : { size: 4, fill: stroke },
    value: (plot, _, index, at) => {
      const steps = plot.data[0];
      const place = at ?? plot.data[index].findLastIndex((value) => value != null);
      const value = plot.data[index][place];
      const single = raw.get(steps[place]);
      const own = at != null && single != null && words(single) !== words(value) ? ` (${words(single)})` : '';
      const other = at != null && place !== plot.cursor.idx ? ` at step ${steps[place].toLocaleString('en')}` : '';
      return words(value ?? null) + own + other;
    },
  };
};
// The range of what is in view; not every spike of a faint line, which would press the others flat.
const heightOf = (chart, plot, [from, to]) => {
  const reach = plot.series.slice(1).flatMap(({ faint }, index) => {
    const values = plot.data[index + 1].filter((value, at) => value != null && (value > 0 || !chart.log)
      && plot.data[0][at] >= from && plot.data[0][at] <= to).sort((a, b) => a - b);
    const cut = faint ? Math.floor(0.03 * values.length) : 0;
    return values.length ? [values[cut], values[values.length - 1 - cut]] : [];
  });
  if (!reach.length) return chart.log ? [0.1, 1] : [0, 1];
  const low = Math.min(...reach);
  const high = Math.max(...reach);
  if (chart.log) {
    const least = Math.max(low, high / 1e6);
    const room = Math.max(1.1, (high / least) ** 0.06);
    return [least / room, high * room];
  }
  return uPlot.rangeNum(chart.fromZero ? Math.min(0, low) : low, high, 0.1, chart.fromZero);
};
const logTicks = (plot, axis, low, high) => {
  const decades = Math.log10(high / low);
  const digits = decades > 3 ? [1] : decades > 0.7 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.ceil(decades / 8)) {
    ticks.push(...digits.map((digit) => Number(`${digit}e${power}`)).filter((value) => value >= low && value <= high));
  }
  return ticks;
};
const wholeSteps = [1, 1e3, 1e6, 1e9].flatMap((size) => [1, 2, 5, 10, 20, 50, 100, 200, 500].map((digit) => digit * size));
const uprights = (plot, steps, name, dash) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color(name);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
  ctx.beginPath();
  for (const step of new Set(steps)) {
    const x = plot.valToPos(step, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
};
// What the guard said near the pointer.
const tell = (plot, run, tip) => {
  const { left } = plot.cursor;
  const near = run.marks.filter(([step]) => left >= 0 && Math.abs(plot.valToPos(step, 'x') - left) < 6);
  tip.replaceChildren(...near.slice(0, 3).map(([step, said]) => make('div', '', `step ${step.toLocaleString('en')}: ${said}`)));
  tip.hidden = !near.length;
  tip.classList.toggle('left', left > plot.over.clientWidth / 2);
};
const drawCurves = (figure, run, count) => {
  const chart = read(figure);
  const box = figure.querySelector('.plot');
  const whole = () => zoomed ?? [0, Math.max(1, run.end)];
  const columns = chart.curves.flatMap((curve) => columnsOf(curve, count));
  const steps = ({ curve }) => curve.steps ?? run.steps;
  const raw = ({ curve }) => new Map(curve.smooth ? curve.y.map((value, at) => [run.steps[at], value]) : []);
  const tip = make('output', 'tip');
  const axis = { stroke: () => color('--soft'), font: '12px system-ui, sans-serif', values: (_, splits) => splits.map(tick) };
  const line = { width: 1, stroke: () => color('--line') };
  const plot = new uPlot({
    width: box.clientWidth,
    height: Number(getComputedStyle(box).getPropertyValue('--height')),
    padding: [10, 22, 0, 0],
    scales: { x: { time: false, range: whole }, y: { distr: chart.log ? 3 : 1, range: (self) => heightOf(chart, self, whole()) } },
    axes: [
      { ...axis, size: 30, gap: 2, grid: { show: false }, ticks: { ...line, size: 5 }, incrs: wholeSteps },
      { ...axis, size: 52, gap: 4, ...(chart.log ? { splits: logTicks, filter: (_, ticks) => ticks } : {}), grid: line, ticks: { show: false } },
    ],
    series: [{ label: 'step', value: (self, step) => (step ?? self.data[0].at(-1) ?? 0).toLocaleString('en') },
      ...columns.map((column) => seriesOf(column, raw(column)))],
    legend: { markers: { width: 0, fill: (self, index) => `var(--c${self.series[index].curve.color})` } },
    cursor: {
      y: false,
      drag: { setScale: false },
      bind: { dblclick: () => () => zoom(null) },
      points: { size: (self, index) => (self.series[index].faint ? 0 : 8), fill: (self, index) => `var(--c${self.series[index].curve.color})` },
    },
    hooks: {
      drawAxes: [(self) => {
        uprights(self, chart.notFinite, '--bad', [4, 3]);
        uprights(self, run.marks.map(([step]) => step), '--mark', [2, 3]);
      }],
      setCursor: [(self) => tell(self, run, tip)],
      setSelect: [(self) => {
        const { left, width } = self.select;
        if (width > 5) zoom([self.posToVal(left, 'x'), self.posToVal(left + width, 'x')]);
        self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  }, uPlot.join(columns.map((column) => [steps(column), column.y])), box);
  plot.over.append(tip);
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
    const at = (plot.cursor.idx ?? -1) + by * (event.shiftKey ? 10 : 1);
    plot.setCursor({ left: plot.valToPos(plot.data[0].at(Math.max(0, Math.min(at, plot.data[0].length - 1))), 'x'), top: 0 });
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
  const count = smoothingSteps();
  const sign = document.getElementById('smoothing-is');
  if (sign) sign.textContent = count > 1 ? `mean of ${count.toLocaleString('en')} steps` : 'none';
  plots = [];
  if (!run) return;
  const data = JSON.parse(run.textContent);
  const points = Math.max(1, Math.round(count / data.stepsPerPoint));
  plots = all('figure.curves').map((figure) => drawCurves(figure, data, points));
  for (const plot of plots) resized.observe(plot.root.parentElement);
};
for (const query of ['(prefers-color-scheme: dark)', 'print']) {
  matchMedia(query).addEventListener('change', () => { for (const plot of plots) plot.redraw(); });
}

// Heat maps: a pixel a cell, which the style enlarges, and the value of the cell that is pointed at.
const heats = new Map();
const ramp = () => {
  const pen = new OffscreenCanvas(256, 1).getContext('2d');
  const gradient = pen.createLinearGradient(0, 0, 256, 0);
  color('--ramp').split(',').forEach((stop, index, stops) => gradient.addColorStop(index / (stops.length - 1), stop.trim()));
  pen.fillStyle = gradient;
  pen.fillRect(0, 0, 256, 1);
  const { data } = pen.getImageData(0, 0, 256, 1);
  return (part) => `rgb(${data.slice(4 * Math.round(255 * part)).slice(0, 3).join(' ')})`;
};
const drawHeats = () => {
  heats.clear();
  const shade = ramp();
  for (const figure of all('.heat-map')) {
    const map = read(figure);
    const heat = figure.querySelector('.heat');
    heats.set(heat, map);
    const pen = heat.querySelector('canvas').getContext('2d');
    map.values.forEach((row, y) => row.forEach((value, x) => {
      if (value === null) return;
      const part = map.high > map.low ? Math.log(Math.max(value, map.low) / map.low) / Math.log(map.high / map.low) : 0.5;
      pen.fillStyle = value === 'not finite' ? color('--not-finite') : value <= 0 ? color('--zero') : shade(part);
      pen.fillRect(x, y, 1, 1);
    }));
  }
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
    `${map.rows[row]}, step ${map.steps[column].toLocaleString('en')}: ${words(map.values[row][column])}`;
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

// Samples: two steps beside each other, played together.
const value = (id) => document.getElementById(id)?.value;
const shownVideos = () => all('.sample figure:not([hidden]) video');
const chooseSamples = () => {
  const mode = value('mode');
  const steps = [value('left'), value('right')];
  for (const pair of all('.pair')) {
    const figures = all('figure', pair);
    for (const figure of figures) {
      figure.hidden = mode !== 'all' && !steps.includes(figure.dataset.step);
      if (figure.hidden) figure.querySelector('video')?.pause();
    }
    const two = figures.filter((one) => !one.hidden).length === 2;
    pair.classList.toggle('slider', mode === 'slider' && two);
    pair.classList.toggle('strip', mode === 'all');
    const cut = pair.parentElement.querySelector('.cut');
    cut.hidden = !(mode === 'slider' && two);
    pair.style.setProperty('--cut', `${cut.value}%`);
  }
  if (playing()) play();
};
const playing = () => document.getElementById('play')?.getAttribute('aria-pressed') === 'true';
const said = (on) => {
  const button = document.getElementById('play');
  if (!button) return;
  button.setAttribute('aria-pressed', String(on));
  button.textContent = on ? 'Pause' : 'Play';
};
const play = () => {
  said(true);
  const [first, ...others] = shownVideos();
  for (const video of others) video.currentTime = first.currentTime;
  for (const video of shownVideos()) video.play().catch(() => {});
};
const pause = () => {
  said(false);
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
  if (id === 'smoothing') curves();
  if (id.startsWith('heat-')) chooseHeat();
  if (['left', 'right', 'mode'].includes(id) || event.target.matches('.cut')) chooseSamples();
  if (id === 'seek') { pause(); seek(event.target.value / 1000); }
  if (id === 'loop') for (const video of all('.sample video')) video.loop = event.target.checked;
});
document.addEventListener('click', (event) => {
  if (event.target.id === 'play') (playing() ? pause : play)();
});
addEventListener('beforeprint', () => all('details').forEach((one) => { one.open = true; }));

const begin = () => { curves(); drawHeats(); chooseHeat(); chooseSamples(); };
begin();
if (shownVideos().length && !matchMedia('(prefers-reduced-motion: reduce)').matches) play();

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
    sign.textContent = 'the server has ended: this is the last that it said';
  }
  setTimeout(look, document.hidden ? 10000 : 2000);
};
setTimeout(look, 1000);
})();
