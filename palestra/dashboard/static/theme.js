// Sets the chosen theme before anything is drawn. A script of its own, so that the page needs none inline.
(() => {
  let chosen = "auto";
  try { chosen = localStorage.getItem("palestra-theme") || "auto"; } catch { /* storage is switched off */ }
  document.documentElement.dataset.theme = chosen;
})();
