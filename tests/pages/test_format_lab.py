"""Format lab: a number in every format, the effect of a loss scale, sums that round away, myths."""

import numpy as np
import pytest

from amp_core import load_run
from amp_core.analysis import step_cost
from amp_core.analysis.format_lab.myths import format_myths
from amp_core.analysis.format_lab.rounding import element_formats
from amp_core.analysis.numerics.myths_in_run import MYTHS, gradients_in_band
from amp_core.formats import FORMATS
from amp_core.quantization import RECIPES as QUANTIZATION
from amp_core.text.csv_safe import as_csv, as_parquet
from pages.parts.words import percent
from tests.pages.conftest import titles, words
from tests.synthetic import write
from tests.test_added_format import FP12

LAB = "pages/format_lab.py"
SUMS, BLOCKS, CLAIMS, TRAINING = (
    {"section": name}
    for name in ("Sums and products", "Blocks of 8 and 4 bits", "Myths about formats", "Myths about mixed precision")
)


def field(app, name):
    return next(
        e for kind in ("text_input", "number_input", "selectbox") for e in app.get(kind) if e.key == f"lab.{name}"
    )


def pills(app, name):
    return next(e for e in app.get("button_group") if e.key == f"lab.{name}")


def row(app, label):
    table = app.dataframe[0].value.set_index("Format")
    return table.loc[label]


def test_a_number_is_shown_in_every_format(open_app):
    app = open_app(LAB)
    assert (
        "0.1 is not exactly representable in any of these formats. FP16 stores it with a relative error of 0.0244 %."
        in words(app)
    )
    assert list(app.dataframe[0].value["Format"]) == [f.label for f in element_formats()]
    assert row(app, "FP16")["Stored value"] == repr(float(np.float16(0.1)))
    assert row(app, "FP32")["Next above"] == repr(float(np.nextafter(np.float32(0.1), np.float32(1))))
    bits = app.code[0].value.splitlines()
    assert len(bits) == 1 + len(element_formats())
    assert next(b for b in bits if b.startswith("FP16")).split() == ["FP16", "0", "01011", "1001100110"]


def test_bits_of_all_formats_are_aligned(open_app):
    lines = open_app(LAB, number="1").code[0].value.splitlines()
    start = lines[0].index("mantissa")
    assert all(line[start] == "0" and line[start - 2 : start] == "  " for line in lines[1:])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1e-8", "becomes 0 in FP16, FP8 E4M3, FP8 E5M2"),
        ("2^-24", "subnormal in FP16"),
        ("70000", "too large for FP16, FP8 E4M3, FP8 E5M2"),
        ("65504", "is exactly representable in FP64, FP32, TF32, FP16"),
        ("inf", "inf is representable in FP64, FP32, TF32, FP16, BF16, FP8 E5M2; FP8 E4M3 has no infinity"),
        ("nan", "nan is representable in FP64"),
        ("0", "0 is exactly representable in FP64"),
    ],
)
def test_the_headline_names_the_formats_that_lose_the_number(open_app, typed, expected):
    app = open_app(LAB)
    field(app, "number").set_value(typed).run()
    assert not app.exception and expected in words(app)
    assert app.query_params["number"] == typed


def test_a_link_contains_the_number(open_app):
    assert "2^-25 is exactly representable in FP64" in words(open_app(LAB, number="2^-25"))


def test_an_example_fills_the_field(open_app):
    app = open_app(LAB)
    pills(app, "example").set_value("6e-5").run()
    assert field(app, "number").value == "6e-5" and row(app, "FP16")["Class"] == "subnormal"


def test_text_that_is_not_a_number_has_a_sentence(open_app):
    app = open_app(LAB, number="2^")
    assert not app.exception and len(app.error) == 1
    assert "is not a number; give one such as" in app.error[0].value.replace("\\", "")
    field(app, "number").set_value("1").run()
    assert not app.error and app.dataframe


def stations(app):
    return [tuple(r) for r in app.table[0].value.itertuples(index=False)]


def test_a_loss_scale_saves_or_ruins_it(open_app):
    app = open_app(LAB, number="1e-8")
    assert "The scale helps" in words(app).replace("*", "")
    back = float(np.float16(1e-8 * 65536)) / 65536
    assert stations(app)[0] == ("Unscaled, in FP16", "0", "underflow: becomes 0, error 100 %")
    assert stations(app)[3] == (
        "Divided by 2¹⁶ in FP32",
        f"{back * 1e9:.4f} × 10⁻⁹",
        f"error {abs(back - 1e-8) / 1e-8:.4%}".replace("%", " %"),
    )
    app.select_slider[0].set_value(40).run()
    assert stations(app)[2][:2] == ("Rounded to FP16", "10,992")  # 1e-8 × 2^40, to a multiple of 8
    field(app, "number").set_value("1").run()
    assert "it overflows" in words(app).replace("*", "") and stations(app)[3][1:] == ("∞", "lost")
    app.select_slider[0].set_value(0).run()
    assert "It needs no scale" in words(app)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("2048 + 1 in FP16", "2048 + 1 = 2049; FP16 keeps 2048: the second number rounds away"),
        ("256 + 1 in BF16", "256 + 1 = 257; BF16 keeps 256: the second number rounds away"),
        ("2⁻¹³ × 2⁻¹³ in FP16", "2⁻¹³ × 2⁻¹³ = 2⁻²⁶; FP16 keeps 0: underflow"),
        ("300 × 300 in FP16", "300 × 300 = 90000; FP16 keeps ∞: overflow"),
    ],
)
def test_sums_and_products(open_app, example, expected):
    app = open_app(LAB, **SUMS)
    assert "1 + 2⁻¹¹ = 1.00048828125; FP16 keeps 1: the second number rounds away" in words(app).replace("*", "")
    pills(app, "sum").set_value(example).run()
    assert not app.exception and expected in words(app).replace("*", "")


def test_a_running_sum_is_drawn(open_app):
    app = open_app(LAB, **SUMS)
    field(app, "a").set_value("0")
    field(app, "b").set_value("1").run()
    assert titles(app) == ["1 added to 0 again and again"]
    assert "2048 in FP16, exactly 3000" in app.get("plotly_chart")[0].proto.alt


def test_all_myths_are_listed_with_their_ratings(open_app):
    table = open_app(LAB, **CLAIMS).table[0].value
    assert len(table) == len(format_myths())
    assert table["Verdict"].str.contains("false").sum() >= 3
    assert "2⁻¹⁴" in "".join(table["Precisely"])


def test_myths_are_shown_with_evidence_from_the_chosen_run(home, open_app):
    write(home.runs / "a", "profiled")
    page_text = words(open_app(LAB, run="run/a", **TRAINING))
    assert all(myth.correction in page_text for myth in MYTHS)
    band = gradients_in_band(load_run(home.runs / "a"))
    assert f"{percent(band.elements_frac)} of its output gradients lie between 2⁻²⁷ and 2⁻²⁴" in page_text
    cost = step_cost(load_run(home.runs / "a"))
    idle = percent(cost.us("data", "gaps") / cost.step_us)  # the card of Step cost
    assert f"its GPU was idle for {idle} of a step" in page_text and "FP16 needed at least" in page_text


def test_myths_need_no_run(home, open_app):
    app = open_app(LAB, **TRAINING)
    assert MYTHS[0].correction in words(app) and not app.exception


def test_its_tables_are_offered_as_files(open_app):
    number, claims = (open_app(LAB, **tab).session_state["tables.shown"] for tab in ({}, CLAIMS))
    assert "What a loss scale does to the number in FP16." in number and set(claims) == {"Myths about formats."}
    for frame in (*number.values(), *claims.values()):
        assert len(as_csv(frame)) > 50 and as_parquet(frame)[:4] == b"PAR1"


def test_only_the_open_tab_is_computed_and_fields_of_the_others_keep_their_values(open_app):
    app = open_app(LAB, **SUMS)
    field(app, "a").set_value("0.25").run()
    assert not app.dataframe and titles(app) == ["2⁻¹¹ added to 0.25 again and again"]
    app.query_params["section"] = "Number"
    app.run()
    assert titles(app) == ["Ranges of the formats"]
    assert app.session_state["lab.a"] == "0.25"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1e999", "any of these formats; it is too large for FP64, FP32, TF32, FP16, BF16, FP8 E4M3, FP8 E5M2."),
        ("-1e999", "any of these formats; it is too large for FP64"),
        ("2^1024", "any of these formats; it is too large for FP64"),
        ("1e308*10", "any of these formats; it is too large for FP64"),
        ("1e4000", "any of these formats; it is too large for FP64"),
        ("1e-330", "any of these formats; it becomes 0 in FP64, FP32, TF32, FP16, BF16, FP8 E4M3, FP8 E5M2."),
        ("-1e-400", "any of these formats; it becomes 0 in FP64"),
        ("1 + 2^-1100", "not exactly representable in any of these formats."),
        ("-inf", "-inf is representable in FP64"),
    ],
)
def test_formats_hold_numbers_beyond_the_range_of_a_float(open_app, typed, expected):
    app = open_app(LAB, number=typed)
    assert not app.exception and expected in words(app)
    app = open_app(LAB, **SUMS)
    for name in ("a", "b"):
        field(app, name).set_value(typed).run()
        assert not app.exception
    field(app, "format").set_value("fp64")
    next(e for e in app.get("button_group") if e.key == "lab.operation").set_value("×").run()
    assert not app.exception


@pytest.mark.parametrize("typed", ["9" * 400, "1e999999999", "999999^5000"])
def test_numbers_that_would_take_long_are_refused_at_once(open_app, typed):
    app = open_app(LAB, number=typed)
    assert not app.exception and len(app.error) == 1 and "; give " in app.error[0].value


def test_numbers_beyond_the_range_of_a_float_are_written_as_powers(open_app):
    product = open_app(LAB, sum="fp64,1e308,×,-1e300")
    assert "= −1.0000 × 10⁶⁰⁸; FP64 keeps −∞: overflow" in words(product).replace("*", "")
    app = open_app(LAB, number="1e999")
    assert stations(app)[1] == ("Times 2¹⁶", "6.5536 × 10¹⁰⁰³", "exact")
    field(app, "number").set_value("1e-400").run()
    assert stations(app)[1] == ("Times 2¹⁶", "6.5536 × 10⁻³⁹⁶", "exact")
    assert row(app, "FP64")["Absolute error"] == "nearly 0" and row(app, "FP64")["Relative error"] == "100 %"


def test_a_format_added_to_the_table_is_offered(home, open_app, monkeypatch):
    monkeypatch.setitem(FORMATS, FP12.name, FP12)
    write(home.runs / "a", "healthy")
    app = open_app("pages/number_ranges.py", run="run/a", kind="output_grad", format=FP12.name)
    limits = next(e for e in app.get("button_group") if e.key == "ranges.formats")
    assert limits.options[-1] == "FP12" and limits.value == [FP12.name]
    lab = open_app(LAB)
    assert lab.dataframe[0].value["Format"].tolist()[-1] == "FP12"
    assert field(open_app(LAB, **SUMS), "format").options[-1] == "FP12"


def test_one_block_of_ones_own_tensor_is_shown_value_by_value_in_each_recipe(open_app):
    app = open_app(LAB, **BLOCKS)
    values = next(e for e in app.text_area if e.key == "lab.values")
    values.set_value(", ".join(["0.01"] * 5 + ["10000"] + ["0.01"] * 58)).run()
    assert not app.exception
    assert "In MXFP8 E4M3 the largest of 32 values, 10,000, sets the scale to 32" in words(app)
    assert "**31 of 32** values that are not 0 become 0" in words(app)
    frames = [frame.value for frame in app.dataframe]
    each = next(f for f in frames if "What happens" in f)
    assert each["Before"].tolist()[4:6] == ["0.01", "10000"] and each["After"].iloc[0] == "0"
    effects = next(f for f in frames if "other_lost" in f).set_index("recipe")
    assert list(effects.index) == [r.label for r in QUANTIZATION.values()]
    assert effects.loc["MXFP8 E4M3", ["lost", "other_lost"]].tolist() == ["31 of 32", "0 of 32"]
    assert effects.loc["FP8 tensorwise", ["lost", "other_lost"]].tolist() == ["63 of 64", "–"]
    next(e for e in app.number_input if e.key == "lab.block").set_value(2).run()
    assert "**0 of 32** values that are not 0 become 0" in words(app)
    next(e for e in app.selectbox if e.key == "lab.recipe").set_value("nvfp4").run()
    assert app.query_params["recipe"] == "nvfp4" and "In NVFP4 the largest of 16 values" in words(app)


def test_values_that_are_no_numbers_are_refused_beside_their_field(open_app):
    app = open_app(LAB, **BLOCKS)
    next(e for e in app.text_area if e.key == "lab.values").set_value("1, two").run()
    assert not app.exception and "is no finite FP32 number" in words(app) and app.tabs


@pytest.mark.parametrize(
    ("address", "tab"),
    [
        ({}, "Number"),
        ({"sum": "bf16,256,+,1"}, "Sums and products"),
        ({"recipe": "nvfp4"}, "Blocks of 8 and 4 bits"),
        ({"section": "Glossary"}, "Glossary"),
    ],
)
def test_each_subject_is_a_tab_and_a_link_opens_its_own(open_app, address, tab):
    app = open_app(LAB, **address)
    assert app.tabs[0].label == "Number" and len(app.tabs) == 6
    assert app.session_state["section"] == tab
