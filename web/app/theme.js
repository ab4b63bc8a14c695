// Before anything is drawn: the theme that was chosen here, if one was; else the system's.
try {
  const chosen = localStorage.getItem("memfold-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; then it is the system's.
}
