"""A report's tables as files: the links contain the data, so the report stays one file without network access.

>>> offered("Recipes", comparison.recipes)
'<p class="quiet files">Recipes as <a href="data:text/csv;base64,…" download="recipes.csv">CSV</a> or …</p>'
"""

import base64

import pandas as pd

from amp_core.text.csv_safe import as_csv, as_parquet, file_name
from amp_core.text.html import Html, tag

_KINDS = (("CSV", "text/csv", as_csv), ("Parquet", "application/vnd.apache.parquet", as_parquet))


def offered(name: str, frame: pd.DataFrame) -> Html:
    """One line with a link per file format. Numbers are those of the frame, not rounded as in the table."""
    links = [
        tag(
            "a",
            kind,
            href=f"data:{media};base64,{base64.b64encode(make(frame)).decode('ascii')}",
            download=f"{file_name(name)}.{kind.lower()}",
        )
        for kind, media, make in _KINDS
    ]
    return tag("p", f"{name} as ", links[0], " or ", links[1], class_="quiet files")
