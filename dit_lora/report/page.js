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

// Charts: other smoothing, and the values below the pointer.
const parsed = new WeakMap();
const read = (element, text) => {
  if (!parsed.has(element)) parsed.set(element, JSON.parse(text));
  return parsed.get(element);
};
const bins = (series) => {
  const slider = document.getElementById('smoothing');
  if (!slider || series.window <= 1) return Math.max(1, Math.round(series.window / series.each));
  const windows = JSON.parse(slider.dataset.windows);
  const factor = windows[slider.value] / Number(slider.dataset.first);
  return Math.max(1, Math.round(series.window * factor / series.each));
};
const smooth = (values, count) => values.map((value, index) => {
  if (value === null) return null;
  const last = values.slice(Math.max(0, index + 1 - count), index + 1).filter((one) => one !== null);
  return last.reduce((sum, one) => sum + one, 0) / last.length;
});
const height = (chart, value) => {
  const [, , low, high] = chart.range;
  if (value === null || (chart.log && value <= 0)) return null;
  const at = chart.log
    ? Math.log(value / low) / Math.log(high / low)
    : (value - low) / (high - low);
  return Math.max(-1, Math.min(2, at));
};
const across = (chart, x) => (x - chart.range[0]) / (chart.range[1] - chart.range[0]);
const redraw = (plot) => {
  const chart = read(plot, plot.dataset.chart);
  for (const path of all('path[data-series]', plot)) {
    const series = chart.series[path.dataset.series];
    if (series.window <= 1) continue;
    let pen = 'M';
    path.setAttribute('d', smooth(series.y, bins(series)).map((value, index) => {
      const y = height(chart, value);
      if (y === null) { pen = 'M'; return ''; }
      const point = `${pen}${(1000 * across(chart, chart.x[series.x][index])).toFixed(1)} ${(1000 * (1 - y)).toFixed(1)}`;
      pen = 'L';
      return point;
    }).join(''));
  }
};
const nearest = (places, x) => {
  let low = 0;
  let high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < x) low = middle; else high = middle;
  }
  return x - places[low] <= places[high] - x ? low : high;
};
const tipOf = (element) => {
  let tip = element.querySelector(':scope > .tip');
  if (!tip) {
    tip = make('div', 'tip');
    tip.setAttribute('role', 'status');
    element.append(make('i', 'cross'), tip);
  }
  return tip;
};
const place = (element, part) => {
  const tip = tipOf(element);
  tip.hidden = false;
  element.querySelector(':scope > .cross').hidden = false;
  element.style.setProperty('--at', `${100 * part}%`);
  tip.classList.toggle('left', part > 0.5);
};
const hide = (element) => {
  for (const one of all(':scope > .tip, :scope > .cross, .cell', element)) one.hidden = true;
};
const showValues = (plot, part) => {
  const chart = read(plot, plot.dataset.chart);
  const longest = chart.x.reduce((a, b) => (b.length > a.length ? b : a), []);
  if (!longest.length) return;
  const asked = chart.range[0] + Math.max(0, Math.min(1, part)) * (chart.range[1] - chart.range[0]);
  const index = nearest(longest, asked);
  plot.dataset.index = index;
  const x = longest[index];
  const reach = 0.012 * (chart.range[1] - chart.range[0]);
  const tip = tipOf(plot);
  tip.replaceChildren(make('b', '', `step ${x.toLocaleString('en')}`));
  for (const series of chart.series) {
    const places = chart.x[series.x];
    const at = nearest(places, x);
    if (Math.abs(places[at] - x) > Math.max(reach, series.each) && places !== longest) continue;
    const count = bins(series);
    const value = smooth(series.y.slice(Math.max(0, at + 1 - count), at + 1), count).pop();
    const raw = count > 1 && series.y[at] !== null ? ` (${words(series.y[at])})` : '';
    const row = make('div', `c${series.color % 6}`);
    const other = places[at] === x || series.window > 1 ? '' : ` at step ${places[at].toLocaleString('en')}`;
    row.append(make('i', 'dot'), make('span', '', `${series.name} ${words(value)}${raw}${other}`));
    tip.append(row);
  }
  const marks = chart.marks.filter(([step]) => Math.abs(step - x) <= reach).slice(0, 3);
  for (const [step, text] of marks) tip.append(make('div', 'guard', `step ${step}: ${text}`));
  place(plot, across(chart, x));
};

// Heat maps: the value of a cell.
const showCell = (heat, column, row) => {
  const map = read(heat, heat.dataset.heat);
  column = Math.max(0, Math.min(map.steps.length - 1, column));
  row = Math.max(0, Math.min(map.rows.length - 1, row));
  heat.dataset.column = column;
  heat.dataset.row = row;
  const cell = heat.querySelector('.cell');
  const image = heat.querySelector('img');
  cell.hidden = false;
  Object.assign(cell.style, {
    left: `${100 * column / map.steps.length}%`,
    width: `${100 / map.steps.length}%`,
    top: `${image.clientHeight * row / map.rows.length}px`,
    height: `${image.clientHeight / map.rows.length}px`,
  });
  const figure = heat.closest('figure');
  figure.querySelector('output').textContent =
    `${map.rows[row]}, step ${map.steps[column].toLocaleString('en')}: ${words(map.values[row][column])}`;
};
const overHeat = (heat, event) => {
  const map = read(heat, heat.dataset.heat);
  const box = heat.querySelector('img').getBoundingClientRect();
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
  const plot = event.target.closest?.('.plot[data-chart]');
  const heat = event.target.closest?.('.heat');
  for (const other of all('.plot[data-chart], .heat')) if (other !== plot && other !== heat) hide(other);
  if (plot) {
    const box = plot.getBoundingClientRect();
    showValues(plot, (event.clientX - box.left) / box.width);
  }
  if (heat && event.target.closest('img, .cell')) overHeat(heat, event);
};
document.addEventListener('pointermove', point);
document.addEventListener('pointerdown', point);
document.addEventListener('focusout', (event) => { if (event.target.matches('.plot, .heat')) hide(event.target); });
document.addEventListener('keydown', (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const target = event.target;
  if (event.key === 'Escape') for (const one of all('.plot, .heat')) hide(one);
  if (!step || !target.matches('.plot[data-chart], .heat')) return;
  if (target.matches('.heat')) {
    showCell(target, Number(target.dataset.column ?? -1) + step[0], Number(target.dataset.row ?? 0) + step[1]);
  } else if (step[0]) {
    const chart = read(target, target.dataset.chart);
    const longest = chart.x.reduce((a, b) => (b.length > a.length ? b : a), []);
    const index = Number(target.dataset.index ?? -1) + step[0] * (event.shiftKey ? 10 : 1);
    showValues(target, across(chart, longest[Math.max(0, Math.min(longest.length - 1, index))]));
  } else return;
  event.preventDefault();
});
const smoothing = () => {
  const slider = document.getElementById('smoothing');
  if (!slider) return;
  const count = JSON.parse(slider.dataset.windows)[slider.value];
  document.getElementById('smoothing-is').textContent = count > 1 ? `mean of ${count.toLocaleString('en')} steps` : 'none';
  if (count !== Number(slider.dataset.first) || slider.dataset.moved) all('.plot[data-chart]').forEach(redraw);
};
document.addEventListener('input', (event) => {
  const { id } = event.target;
  if (id === 'smoothing') { event.target.dataset.moved = 'yes'; smoothing(); }
  if (id.startsWith('heat-')) chooseHeat();
  if (['left', 'right', 'mode'].includes(id) || event.target.matches('.cut')) chooseSamples();
  if (id === 'seek') { pause(); seek(event.target.value / 1000); }
  if (id === 'loop') for (const video of all('.sample video')) video.loop = event.target.checked;
});
document.addEventListener('click', (event) => {
  if (event.target.id === 'play') (playing() ? pause : play)();
});
addEventListener('beforeprint', () => all('details').forEach((one) => { one.open = true; }));

const begin = () => { smoothing(); chooseHeat(); chooseSamples(); };
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
    const kept = all('input[id], select[id]', old).map((one) => [one.id, one.value, one.checked, one.dataset.moved]);
    const open = all('details[open]', old).map((one) => one.id);
    old.replaceWith(document.adoptNode(section));
    changed = true;
    for (const [id, was, checked, moved] of kept) {
      const one = document.getElementById(id);
      if (!one || (one.matches('#right') && !one.dataset.moved)) continue;
      one.value = was;
      one.checked = checked;
      if (moved) one.dataset.moved = moved;
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
