// Charts over the steps of a run share zoom and crosshair. Streamlit gives each chart to plotly.js, whose functions
// are in window.Plotly; a chart's own are on its element. Runs once per page load.
(() => {
  if (window.ampscopeSync) return;
  window.ampscopeSync = true;
  // Plotly draws a chart again when any font of the page arrives. That of code is mostly the last: load it before charts.
  document.fonts.load("1rem 'Source Code Pro'");
  const overSteps = (chart) => chart._fullLayout?.xaxis?.title?.text === "step";
  const others = (chart) =>
    [...document.querySelectorAll(".js-plotly-plot")].filter((other) => other !== chart && overSteps(other));
  let zooming = false;

  const zoom = (chart, change) => {
    if (zooming) return;
    const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const update = change["xaxis.autorange"] ? { "xaxis.autorange": true } : { "xaxis.range": range };
    if (!change["xaxis.autorange"] && range.some((end) => end === undefined)) return;
    zooming = true;
    Promise.all(others(chart).map((other) => window.Plotly.relayout(other, update))).finally(() => (zooming = false));
  };

  const hide = () => document.querySelectorAll(".ampscope-crosshair").forEach((line) => line.remove());
  const mark = (chart, step) => {
    const { xaxis, _size } = chart._fullLayout;
    const x = xaxis.l2p(step);
    if (!(x >= 0 && x <= _size.w)) return;
    const line = document.createElement("div");
    line.className = "ampscope-crosshair";
    line.style.cssText =
      `position:absolute;pointer-events:none;left:${_size.l + x}px;top:${_size.t}px;height:${_size.h}px;` +
      "border-left:1px dashed currentColor;opacity:0.5";
    chart.style.position = "relative";
    chart.append(line);
  };
  const cross = (chart, event) => {
    hide();
    const { xaxis, _size } = chart._fullLayout;
    const x = event.clientX - chart.getBoundingClientRect().left - _size.l;
    if (x < 0 || x > _size.w) return;
    for (const one of [chart, ...others(chart)]) mark(one, xaxis.p2l(x));
  };

  // Wide charts scroll sideways on a phone (style.py): by keyboard too, once the region can have the focus.
  const focusable = () =>
    document.querySelectorAll("[class*='st-key-wide-']:not([tabindex])").forEach((one) => (one.tabIndex = 0));

  // On a narrow page legends and labels take more than was reserved (amp_core/figures/margins.py), and Plotly takes it
  // from the plot. The chart becomes higher instead. Its legend is placed by a share of the height, so that changes too.
  const grow = (chart) => {
    if (!chart._fullLayout?._size || !chart.layout?.margin) return;
    const { _size, height, legend } = chart._fullLayout;
    const { margin } = chart.layout;
    const reserved = parseFloat(getComputedStyle(chart.parentElement).containIntrinsicHeight);
    if (!(reserved > 0)) return; // full screen
    const above = legend ? (1 - legend.y) * height : 0;
    chart.ampscopeAbove ??= above;
    const more = Math.max(0, Math.round(_size.t + _size.b - margin.t - margin.b - (above - chart.ampscopeAbove)));
    const basis = more ? `${reserved + more}px` : "";
    const box = chart.closest(".stElementContainer");
    if (box.style.flexBasis !== basis) box.style.flexBasis = basis;
    const y = 1 - chart.ampscopeAbove / (reserved + more);
    if (legend && Math.abs(legend.y - y) > 0.005) window.Plotly.relayout(chart, { "legend.y": y });
  };
  if (window.matchMedia("(max-width: 900px)").matches) {
    let due = false;
    const narrow = () => {
      due = false;
      focusable();
      document.querySelectorAll(".stPlotlyChart > .js-plotly-plot").forEach(grow);
    };
    const soon = () => due || ((due = true), requestAnimationFrame(narrow));
    new MutationObserver(soon).observe(document.body, { subtree: true, childList: true });
  }

  document.addEventListener("pointerover", (event) => {
    const chart = event.target.closest?.(".js-plotly-plot");
    if (!chart?.on || chart.ampscopeSync || !overSteps(chart)) return;
    chart.ampscopeSync = true;
    chart.on("plotly_relayout", (change) => zoom(chart, change));
    chart.addEventListener("pointermove", (move) => cross(chart, move));
    chart.addEventListener("pointerleave", hide);
  });
})();
