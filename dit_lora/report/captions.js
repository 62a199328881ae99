'use strict';
(() => {
const { token, save: address } = document.querySelector('.sheet').dataset;
const unsaved = new Set();

// What the audit says of the caption as it is now.
const show = (list, findings) => {
  list.replaceChildren(...findings.map(({ verdict, code, words }) => {
    const item = document.createElement('li');
    item.className = verdict;
    const name = document.createElement('span');
    name.className = 'code';
    name.textContent = code;
    const text = document.createElement('p');
    text.textContent = words;
    item.append(name, text);
    return item;
  }));
};

for (const card of document.querySelectorAll('.sample')) {
  const area = card.querySelector('textarea');
  const button = card.querySelector('.save');
  const status = card.querySelector('.said');
  const now = card.querySelector('.now');
  const count = card.querySelector('.row .count');
  let { version } = card.dataset;
  area.value = JSON.parse(card.dataset.caption);
  // A text area has its own line ends: what it shows of the caption is what an edit is compared with.
  let written = area.value;
  let counted = area.value;
  const asShown = (text) => text.replace(/\r\n?/g, '\n');
  const changed = () => {
    button.disabled = area.value === written;
    // Tokens are counted when the page is loaded, and after a save.
    count.hidden = area.value !== counted;
    unsaved[button.disabled ? 'delete' : 'add'](card);
    if (!button.disabled) status.textContent = '';
  };
  const save = async () => {
    if (button.disabled) return;
    const caption = area.value;
    button.disabled = true;
    status.className = 'said';
    status.textContent = 'saving …';
    try {
      const answer = await fetch(address, {
        method: 'POST',
        headers: { 'Content-Type': 'application/json' },
        body: JSON.stringify({ token, file: card.dataset.file, caption, version }),
      });
      if (answer.status === 409) {
        const current = await answer.json();
        version = current.version;
        written = asShown(current.caption);
        now.querySelector('pre').textContent = current.caption;
        now.hidden = false;
        throw new Error('this caption was changed elsewhere. Your text is still here; Save replaces what is in the file.');
      }
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const saved = await answer.json();
      version = saved.version;
      written = caption;
      counted = caption;
      count.textContent = count.textContent.replace(/^\d+/, saved.num_tokens);
      count.classList.toggle('warn', saved.num_tokens > Number(/^\d+ of (\d+)/.exec(count.textContent)?.[1]));
      now.hidden = true;
      show(card.querySelector('.findings'), saved.findings);
      status.textContent = 'saved';
    } catch (error) {
      status.className = 'said wrong';
      status.textContent = `not saved: ${error.message}`;
      button.disabled = false;
      return;
    }
    const word = status.textContent;
    changed();
    if (area.value === written) status.textContent = word;
  };
  area.addEventListener('input', changed);
  area.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) save();
  });
  button.addEventListener('click', save);
}
// A thumbnail that is refused while others are being made is asked for again.
for (const picture of document.querySelectorAll('.sheet img')) {
  let tries = 0;
  const again = async () => {
    const answer = await fetch(picture.src);
    if (answer.status !== 503 || (tries += 1) > 30) return;
    setTimeout(() => { picture.src = picture.src; }, 1000);
  };
  picture.addEventListener('error', again);
  if (picture.complete && !picture.naturalWidth) again();
}
addEventListener('beforeunload', (event) => { if (unsaved.size) event.preventDefault(); });
})();
