"""Which updates of the weights does rounding take away?"""

from amp_core.analysis import average_losses, update_losses, update_summary
from amp_core.views import UPDATES
from pages.parts import address, charts, clicks, empty, head, loaders
from pages.parts.numbers import tensor, updates

head.title("Updates")
run = head.run()
summary = loaders.analysed(update_summary, [run]).iloc[0]
averages = loaders.analysed(average_losses, run)
if not summary["tensors"] and averages.empty:
    empty.nothing(updates.why_none(run), run=run, tables=("updates", "averages"))

head.headline(updates.headline(summary, averages))
updates.cards(summary, averages)
if summary["tensors"]:
    frame = UPDATES.frame(run, loaders.analysed)
    known = [column for column in updates.COLUMNS if frame[column].notna().any()]
    column = address.choose("share", "Share", known, known[0], "updates.share", format_func=updates.COLUMNS.get)
    options = {} if column == known[0] else {"column": column, "title": updates.TITLES[column]}
    figure = UPDATES.figure(frame, charts.dark(), **options)
    for point in clicks.points(charts.show(figure, "updates.heatmap", clicks=True), "updates.heatmap")[:1]:
        tensor.jump("weight_grad", str(point["y"]))
    updates.against_baseline(run, column)
    updates.table(loaders.analysed(update_losses, run))
updates.averages_table(averages)
if summary["still"]:
    updates.cures()
