"""AMPscope in the browser: page config and navigation. Start it with `streamlit run app.py`.

The server imports this file once and finds `app` in it; each pass of a session runs it as its script.

Each page's address differs from its file's name: Streamlit takes `pages/` for its old multipage scheme until
`st.navigation` has run once, and an address equal to a file's name would then be served without this frame.
"""

from pathlib import Path

import streamlit as st

if __name__ == "__main__":
    from pages.parts import frame, spellings

    icon = Path(__file__).parent / "pages" / "parts" / "icon.svg"
    pages = {  # no icons: the browser would fetch each from fonts.gstatic.com as the tab's icon
        "This run": [
            st.Page("pages/run_overview.py", title="Overview", url_path="", default=True),
            st.Page("pages/loss_scale.py", title="Loss scale", url_path="loss-scale"),
            st.Page("pages/number_ranges.py", title="Number ranges", url_path="number-ranges"),
            st.Page("pages/layer_detail.py", title="Layer detail", url_path="layer-detail"),
            st.Page("pages/low_precision.py", title="8 and 4 bits", url_path="low-bits"),
            st.Page("pages/update_losses.py", title="Updates", url_path="updates"),
            st.Page("pages/memory_use.py", title="Memory", url_path="memory"),
            st.Page("pages/tensor_cores.py", title="Tensor cores", url_path="tensor-cores"),
            st.Page("pages/step_cost.py", title="Step cost", url_path="step-cost"),
            st.Page("pages/precision_map.py", title="Precision map", url_path="precision-map"),
            st.Page("pages/gpu_forecast.py", title="Forecast", url_path="forecast"),
        ],
        "All runs": [
            st.Page("pages/compare_runs.py", title="Compare", url_path="compare"),
            st.Page("pages/run_library.py", title="Library", url_path="library"),
        ],
        "Train": [
            st.Page("pages/start_run.py", title="Start a run", url_path="start"),
            st.Page("pages/tune_recipe.py", title="Tune", url_path="tune"),
        ],
        "Learn": [
            st.Page("pages/format_lab.py", title="Format lab", url_path="format-lab"),
            st.Page("pages/findings_guide.py", title="Findings guide", url_path="guide"),
        ],
    }
    st.set_page_config(page_icon=icon, layout="wide", initial_sidebar_state=256)  # pixels; known before the sidebar is
    page = st.navigation(spellings.added(pages), expanded=True)  # drawn; a folded list would hide the last pages
    st.set_page_config(f"{page.title} · AMPscope")
    frame.show(page)
else:
    from pages.parts import server

    app = st.App("app.py", lifespan=server.ready)
