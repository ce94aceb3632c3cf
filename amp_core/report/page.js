"use strict";
// Unpacks plotly.js and the figures out of this file and draws them; again when the theme changes, and for paper.
// A browser that cannot unpack (no DecompressionStream) shows each chart's description in words instead.
(() => {
  const root = document.documentElement;
  const wished = matchMedia("(prefers-color-scheme: dark)");
  const boxes = [...document.querySelectorAll("[data-chart]")];
  const paper = 680; // CSS pixels: the width of A4 between its margins
  let charts = null;

  const theme = () => root.dataset.theme || (wished.matches ? "dark" : "light");

  const unpacked = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  // On a phone a legend takes more lines than its margin has, and plotly takes them from the plot; it draws nothing at
  // all if none is left. So a chart is drawn with room to spare, and then as high as its labels and its plot are. Its
  // legend is placed by a share of the height, so that changes too.
  const phone = 480;
  const spare = 240;
  const heightened = (layout, more) => {
    const height = layout.height + more;
    return { height, "legend.y": 1 - ((1 - layout.legend.y) * layout.height) / height };
  };
  const fit = (box, layout) => {
    const { t, b } = box._fullLayout._size;
    const more = Math.max(0, Math.round(t + b - layout.margin.t - layout.margin.b));
    return Plotly.relayout(box, { ...heightened(layout, more), "legend.maxheight": 1 });
  };

  const draw = (printed) => {
    if (!charts) return;
    for (const box of boxes) {
      const { data, layout } = charts[box.dataset.chart][printed ? "light" : theme()];
      const beside = box.closest(".row") ? box.closest(".row").children.length : 1;
      const sized = printed ? { ...layout, width: Math.floor(paper / beside) - 8 } : { ...layout, width: undefined };
      const options = { responsive: !printed, displaylogo: false, displayModeBar: printed ? false : "hover" };
      const narrow = !printed && layout.legend && box.clientWidth < phone;
      if (narrow) {
        const { height, "legend.y": y } = heightened(layout, spare);
        Object.assign(sized, { height, legend: { ...layout.legend, y } });
      }
      const drawn = Plotly.react(box, structuredClone(data), structuredClone(sized), options);
      if (narrow) drawn.then(() => fit(box, layout));
    }
  };

  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    draw(false);
  });
  wished.addEventListener("change", () => draw(false));
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    draw(true);
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    draw(false);
  });

  const start = async () => {
    if (!window.DecompressionStream) return;
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    charts = JSON.parse(await unpacked("charts"));
    draw(false);
    for (const box of boxes) box.closest("figure").classList.add("drawn");
    root.dataset.drawn = "yes";
  };
  start();
})();
