'use strict';
(() => {
// A live list: rows that changed are put in place of the old ones, so that the others keep their videos.
const list = document.querySelector('[data-live]');
if (!list) return;
const sign = document.getElementById('live');
const rowsOf = (root) => [...root.querySelectorAll('[data-key]')].map((row) => [row.dataset.key, row]);
let texts = new Map(rowsOf(list).map(([key, row]) => [key, row.outerHTML]));
const renew = (fresh) => {
  const old = new Map(rowsOf(list));
  const rows = rowsOf(fresh);
  const now = new Map(rows.map(([key, row]) => [key, row.outerHTML]));
  const kept = rows.map(([key, row]) => (texts.get(key) === now.get(key) && old.get(key)) || document.adoptNode(row));
  const chosen = new Set([...list.querySelectorAll(':checked')].map((box) => box.value));
  for (const row of kept) for (const box of row.querySelectorAll('[type=checkbox]')) box.checked = chosen.has(box.value);
  // Rows in their places are not touched: a moved video starts again.
  for (const row of [...list.children]) if (!kept.includes(row)) row.remove();
  kept.forEach((row, index) => { if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null); });
  texts = now;
};
// Counts and findings outside of the list. Their elements stay, with what is chosen in them.
const renewParts = (page) => {
  for (const fresh of page.querySelectorAll('[data-part]')) {
    const part = document.getElementById(fresh.id);
    if (!part || part.innerHTML === fresh.innerHTML) continue;
    const { value } = part;
    part.replaceChildren(...fresh.childNodes);
    if (part.matches('select')) part.value = value;
  }
};
const look = async () => {
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
    renew(page.getElementById('rows'));
    renewParts(page);
    sign.textContent = 'live';
    if (!page.querySelector('[data-live]')) {
      sign.textContent = list.dataset.ended ?? '';
      return;
    }
  } catch (error) {
    sign.textContent = `not live: ${error instanceof TypeError ? 'the studio has stopped; start it again' : error.message}`;
  }
  setTimeout(look, document.hidden ? 15000 : 3000);
};
setTimeout(look, 1500);
})();
