"use strict";
// What the page's controls do to its plots: which units are shown, in which colours, and how far
// one is zoomed. Plots and their parts are found by the names that the report gave them.
(() => {
  const named = (name) => {
    for (const page of Bokeh.documents) {
      const model = page.get_model_by_name(name);
      if (model !== null) return model;
    }
    return null;
  };
  const select = (key, act) => {
    const control = document.getElementById(key);
    if (control !== null) control.addEventListener("change", () => act(control.value));
  };

  const timelines = ["before", "after"];
  // Names of the units whose boxes have room for them.
  const label = (plot) => {
    const {x_range: x, y_range: y, inner_width, inner_height} = named(plot);
    const {data_source: {data}, view} = named(`${plot} units`);
    const wide = inner_width / (x.end - x.start), high = inner_height / Math.abs(y.end - y.start);
    const {filter} = named(`${plot} labels`).view;
    const fit = view.filter.indices.filter((i) =>
      data.begin[i] < x.end && data.end[i] > x.start && data.height[i] * high >= 10 &&
      (data.end[i] - data.begin[i]) * wide >= 7 * data.label[i].length + 3);
    if (fit.length > 0 || filter.indices.length > 0) filter.indices = fit;
  };

  select("colour", (title) => {
    for (const plot of timelines) {
      const bar = named(`${plot} colours`);
      const [, field, mapper, inks, ticker, names] = bar.tags.find((way) => way[0] === title);
      named(`${plot} units`).glyph.fill_color = {field, transform: mapper};
      named(`${plot} labels`).glyph.text_color = {field, transform: inks};
      const labels = new Map(names.map((name, at) => [at, name]));
      bar.setv({title, color_mapper: mapper, ticker, major_label_overrides: labels});
    }
  });

  select("pipeline", (rows) => {
    const [first, last] = rows.split(" ").map(Number);
    for (const plot of timelines) {
      const range = named(plot).y_range;
      [range.start, range.end] = [last + 0.5, first - 0.5];
      label(plot);
    }
  });

  const legendOf = (plot) => plot.above.find((part) => "items" in part)?.items ?? [];
  // Of a chart's groups one is shown, and named above it.
  for (const control of document.querySelectorAll("select[id$='-group']")) {
    control.addEventListener("change", () => {
      const plot = named(control.id.slice(0, -"-group".length)), shown = new Map();
      for (const {data_source: {data}, name, view} of plot.renderers) {
        if (name === `${plot.name} labels`) continue;  // those that fit
        const group = Array.from(data.group, String);
        view.filter.indices = [...group.keys()].filter((i) => group[i] === control.value);
        for (const i of view.filter.indices) shown.set(data.name?.[i], i);
      }
      if (timelines.includes(plot.name)) label(plot.name);
      for (const item of legendOf(plot)) {  // too many names have no legend
        if (!("name" in item.renderers[0].data_source.data)) continue;  // of all groups
        const index = shown.get(item.label.value);  // the mark whose look the name has
        item.setv(index === undefined ? {visible: false} : {visible: true, index});
      }
    });
  }

  // Zoom and move, by buttons and keys.
  const wholes = new Map();
  const move = (plot, how) => {
    const range = plot.x_range;
    if (!wholes.has(range)) wholes.set(range, [range.start, range.end]);
    const [low, high] = wholes.get(range), width = range.end - range.start;
    const middle = (range.start + range.end) / 2;
    const to = {
      left: [range.start - width / 4, range.end - width / 4],
      right: [range.start + width / 4, range.end + width / 4],
      in: [middle - width / 4, middle + width / 4],
      out: [middle - width, middle + width],
      whole: [low, high],
    }[how];
    const length = Math.min(to[1] - to[0], high - low);
    const start = Math.min(Math.max(to[0], low), high - length);
    range.setv({start, end: start + length});
  };
  const keys = {ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "whole"};
  for (const button of document.querySelectorAll("[data-move]")) {
    const {moves} = button.parentElement.dataset;
    button.addEventListener("click", () => move(named(moves), button.dataset.move));
  }
  for (const frame of document.querySelectorAll(".plot")) {
    frame.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      move(named(frame.dataset.plot), keys[event.key]);
    });
  }

  // Plots are drawn on canvases, which no style sheet reaches.
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const dress = () => {
    const style = getComputedStyle(document.documentElement);
    const [ink, muted, line, back] = ["ink", "muted", "line", "back"].map(
      (name) => style.getPropertyValue(`--${name}`).trim(),
    );
    const text = {
      axis_label_text_color: muted, major_label_text_color: muted, axis_line_color: line,
      major_tick_line_color: line, grid_line_color: line,
      label_text_color: ink, title_text_color: muted,
    };
    for (const page of Bokeh.documents) {
      for (const plot of page.roots()) {
        plot.setv({background_fill_color: back, border_fill_color: back, outline_line_color: line});
        for (const part of [plot.left, plot.right, plot.above, plot.below, plot.center].flat()) {
          const own = Object.fromEntries(Object.entries(text).filter(([name]) => name in part));
          if ("background_fill_color" in part) own.background_fill_color = back;
          part.setv(own);
        }
      }
    }
  };
  // Names that do not fit beside each other stand below each other.
  const fold = () => {
    for (const page of Bokeh.documents) {
      for (const part of page.roots().flatMap((plot) => plot.above)) {
        const narrow = innerWidth < 600;
        if ("items" in part) {
          part.setv({orientation: narrow ? "vertical" : "horizontal", spacing: narrow ? 0 : 12});
        }
      }
    }
  };
  const whenDrawn = () => {
    if (Bokeh.documents.length === 0 || !Bokeh.documents.every((page) => page.is_idle)) {
      requestAnimationFrame(whenDrawn);
      return;
    }
    if (innerWidth < 600) fold();
    for (const plot of timelines.filter((name) => named(name) !== null)) {
      const soon = () => requestAnimationFrame(() => label(plot));  // not in the midst of drawing
      named(plot).x_range.change.connect(soon);
      named(plot).properties.inner_width.change.connect(soon);
      label(plot);
    }
    addEventListener("resize", fold);
    if (dark.matches) dress();  // plots are made for a light page: drawing them twice takes time
    dark.addEventListener("change", dress);
    document.documentElement.dataset.ready = performance.now();
  };
  whenDrawn();
})();
