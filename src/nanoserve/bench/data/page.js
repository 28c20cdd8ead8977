// Draws every panel of the page, in the theme that holds, and links panels that share an axis.
"use strict";

const root = document.documentElement;
const THEMES = ["system", "light", "dark"];
const KEY = "nanoserve-theme";
const systemIsDark = window.matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem(KEY) || "system";
  } catch (refused) {
    return "system"; // some browsers keep nothing for pages that are files
  }
}

function store(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch (refused) {
    console.info("the theme is not kept: " + refused.message);
  }
}

function isDark() {
  const theme = root.dataset.theme;
  return theme === "dark" || (theme !== "light" && systemIsDark.matches);
}

// Drawings are made for white paper. On a dark page greys change sides, and colours that would be
// too dark to be seen are made lighter, in steps, until they stand out.
function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => {
    const share = v / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function forDark(rgb) {
  const spread = Math.max(...rgb) - Math.min(...rgb);
  if (spread < 16) return rgb.map((v) => Math.round(255 - v * 0.88));
  let lighter = rgb;
  while (luminance(lighter) < 0.25) lighter = lighter.map((v) => Math.round(v + (255 - v) * 0.12));
  return lighter;
}

function adapted(colour) {
  const hex = /^#([0-9a-f]{6})$/i.exec(colour);
  if (hex) {
    const rgb = [0, 2, 4].map((i) => parseInt(hex[1].slice(i, i + 2), 16));
    return `rgb(${forDark(rgb).join(",")})`;
  }
  const rgba = /^rgba\((\d+),(\d+),(\d+),([\d.]+)\)$/.exec(colour);
  if (rgba) return `rgba(${forDark(rgba.slice(1, 4).map(Number)).join(",")},${rgba[4]})`;
  return colour;
}

function themed(value, key) {
  if (typeof value === "string") return adapted(value);
  if (key === "colorscale") return value; // a scale of colours has its meaning in itself
  if (Array.isArray(value)) return value.map((item) => themed(item, key));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, name)]));
  }
  return value;
}

function css(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// On a narrow page long titles are broken and words in the drawing are smaller; those at its right
// edge need room beyond the axes.
const narrow = window.matchMedia("(max-width: 30rem)");

function broken(title) {
  if (title.length < 36) return title;
  const place = title.lastIndexOf(" ", title.length / 2 + 4);
  return place < 0 ? title : title.slice(0, place) + "<br>" + title.slice(place + 1);
}

function narrowed(layout) {
  layout.xaxis.title.text = broken(layout.xaxis.title.text);
  const ticks = layout.xaxis.ticktext;
  if (ticks) layout.xaxis.ticktext = ticks.map((text) => text.split("<br>")[0]);
  for (const note of layout.annotations) note.font.size *= 0.8;
  return layout;
}

function layoutFor(data) {
  let layout = isDark() ? themed(data.layout) : structuredClone(data.layout);
  if (narrow.matches) layout = narrowed(layout);
  const axis = { gridcolor: css("--line"), zeroline: false, linecolor: css("--quiet"), automargin: true };
  return {
    ...layout,
    xaxis: { ...axis, showgrid: false, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { namelength: -1 },
    margin: { l: 44, r: narrow.matches ? 56 : 12, t: 16, b: 44 },
    dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
const panels = [...document.querySelectorAll(".plot")].map((place) => ({
  place,
  data: JSON.parse(place.nextElementSibling.textContent),
}));

function draw() {
  return Promise.all(
    panels.map(({ place, data }) => {
      const traces = isDark() ? data.traces.map((trace) => themed(trace)) : structuredClone(data.traces);
      return Plotly.react(place, traces, layoutFor(data), CONFIG);
    })
  );
}

function link(place) {
  const siblings = panels.map((p) => p.place).filter((other) => other !== place && other.dataset.linked === place.dataset.linked);
  place.on("plotly_relayout", (change) => {
    const changed = Object.fromEntries(Object.entries(change).filter(([key]) => key.startsWith("xaxis.")));
    if (!Object.keys(changed).length || place.isFollowing) return;
    for (const other of siblings) {
      other.isFollowing = true;
      Plotly.relayout(other, changed).then(() => { other.isFollowing = false; });
    }
  });
}

const button = document.getElementById("theme");
function setTheme(theme) {
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  button.textContent = "Theme: " + { system: "as the system", light: "light", dark: "dark" }[theme];
  button.value = theme;
}

setTheme(THEMES.includes(stored()) ? stored() : "system");
draw().then(() => {
  panels.filter(({ place }) => place.dataset.linked).forEach(({ place }) => link(place));
  root.dataset.drawn = String(panels.length);
});
button.addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(button.value) + 1) % THEMES.length];
  store(theme);
  setTheme(theme);
  draw();
});
systemIsDark.addEventListener("change", draw);
narrow.addEventListener("change", draw);
