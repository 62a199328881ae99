'use strict';
// The contact sheet's filters: severity, finding and a part of the name.
(() => {
document.documentElement.classList.add('js');
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach((details) => { details.open = true; }));
const cards = [...document.querySelectorAll('#samples .sample')];
if (!cards.length) return;
const filter = (id) => document.getElementById(id)?.value ?? '';
const choose = () => {
  const part = filter('name').toLowerCase();
  for (const card of cards) {
    const { level, codes, name } = card.dataset;
    card.hidden = !['', level].includes(filter('level'))
      || !['', ...codes.split(' ')].includes(filter('code'))
      || !name.toLowerCase().includes(part);
  }
  const shown = cards.filter((card) => !card.hidden).length;
  document.getElementById('count').textContent = `${shown} of ${cards.length} shown`;
};
document.getElementById('samples').addEventListener('input', choose);
// A code in the table above shows its samples.
document.addEventListener('click', (event) => {
  const link = event.target.closest?.('a[data-code]');
  if (!link) return;
  for (const id of ['level', 'name']) document.getElementById(id).value = '';
  document.getElementById('code').value = link.dataset.code;
  choose();
});
choose();
})();
