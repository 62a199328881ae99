'use strict';
// Pictures at full size: a tile opens it, and the arrow keys go through the tiles of its row.
(() => {
const element = (name, className, text = '') => Object.assign(document.createElement(name), { className, textContent: text });
const viewer = element('dialog', 'viewer');
const title = element('p', 'title');
const stage = element('div', 'stage');
const keys = element('div', 'keys');
const buttons = ['Previous', 'Next', 'Close'].map((name) => Object.assign(element('button', '', name), { type: 'button' }));
keys.append(...buttons);
buttons[2].autofocus = true;
viewer.append(title, stage, keys);
document.body.append(viewer);
let tile = null;

const neighbours = () => [...tile.closest('[data-row]').querySelectorAll('.tile')].filter((other) => other.offsetParent);
const show = (chosen) => {
  tile = chosen;
  const small = tile.querySelector('img, video');
  const large = small.cloneNode();
  large.removeAttribute('loading');
  const words = small.alt ?? small.getAttribute('aria-label');
  title.textContent = words;
  viewer.setAttribute('aria-label', words);
  if (large.matches('video')) Object.assign(large, { controls: true, muted: !('sound' in tile.dataset), preload: 'auto' });
  stage.replaceChildren(large);
  const tiles = neighbours();
  buttons[0].disabled = tile === tiles[0];
  buttons[1].disabled = tile === tiles.at(-1);
  if (!viewer.open) viewer.showModal();
  if (large.matches('video')) large.play().catch(() => {});
};
const move = (by) => {
  const tiles = neighbours();
  const next = tiles[tiles.indexOf(tile) + by];
  if (next) show(next);
};
document.addEventListener('click', (event) => {
  const clicked = event.target.closest('.tile');
  if (!clicked || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault(); // a link without scripts
  show(clicked);
});
viewer.addEventListener('click', ({ target }) => {
  if (target === viewer || target === buttons[2]) viewer.close();
  else if (target === buttons[0]) move(-1);
  else if (target === buttons[1]) move(1);
});
viewer.addEventListener('keydown', (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  move(by);
  event.preventDefault();
}, true); // before the video's own keys
viewer.addEventListener('close', () => { stage.replaceChildren(); tile.focus(); });
})();
