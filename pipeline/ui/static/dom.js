// Elements, numbers and colours. Text of a run goes into text nodes only, never into markup.

export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(value * 1e3).toFixed(size < 0.01 ? 2 : 0)} ms`;
  if (size < 60) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  if (size < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function offset(value) {
  const whole = Math.floor(value);
  const parts = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const text = parts.map((part) => String(part).padStart(2, "0")).join(":");
  return `${text}.${String(Math.floor((value - whole) * 1000)).padStart(3, "0")}`;
}

export function count(value) {
  return value === null || value === undefined ? "" : Number(value).toLocaleString("en");
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toFixed(size < 1 ? 4 : size < 100 ? 3 : 1)));
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

export function debounced(work, wait) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), wait);
  };
}

export function family(kind) {
  return kind.split(".")[0];
}
