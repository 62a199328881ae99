'use strict';
(() => {
document.documentElement.classList.add('js');
const button = document.getElementById('play');
if (!button) return;
const videos = [...document.querySelectorAll('.cells video')];
button.addEventListener('click', () => {
  const playing = button.getAttribute('aria-pressed') !== 'true';
  button.setAttribute('aria-pressed', playing);
  button.textContent = playing ? 'Pause all' : 'Play all';
  // From one moment on, so that they can be compared.
  for (const video of videos) {
    if (playing) { video.currentTime = 0; video.play(); } else { video.pause(); }
  }
});
})();
