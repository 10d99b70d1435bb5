// Theme and palette, before anything is drawn; chosen once, remembered by the browser.
(() => {
  const root = document.documentElement;
  const known = { theme: ["auto", "light", "dark"], palette: ["okabe", "tol", "grey"] };
  const remembered = (name) => {
    try {
      const value = localStorage.getItem(`esper.${name}`);
      return known[name].includes(value) ? value : known[name][0];
    } catch {
      return known[name][0];
    }
  };
  for (const name of Object.keys(known)) root.dataset[name] = remembered(name);
  addEventListener("DOMContentLoaded", () => {
    for (const name of Object.keys(known)) {
      const select = document.getElementById(name);
      select.value = root.dataset[name];
      select.addEventListener("change", () => {
        root.dataset[name] = select.value;
        try {
          localStorage.setItem(`esper.${name}`, select.value);
        } catch {
          // A browser that remembers nothing shows it all the same.
        }
        dispatchEvent(new Event("esper:colours"));
      });
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    dispatchEvent(new Event("esper:colours")),
  );
})();
