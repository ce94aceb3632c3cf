"""Finding cards and the Findings guide: one cause, its evidence, its fix; muted findings stay hidden."""

from collections import Counter

from amp_core import diagnose, load_run
from amp_core.findings import FAMILIES, GUIDE
from amp_core.library.mutes import mute, muted
from tests.pages.conftest import words
from tests.synthetic import live, write

GUIDE_PAGE = "pages/findings_guide.py"


def test_a_card_has_the_fix_for_frameworks_too(home, open_app):
    write(home.runs / "a", "underflowing")
    app = open_app(run="run/a")
    (finding,) = [f for f in diagnose(load_run(home.runs / "a")) if f.code == "fp16-without-scaler"]
    assert "1 error found" in words(app)
    assert {finding.snippet, *finding.frameworks.values()} <= {c.value for c in app.code}
    assert [t.label for t in app.tabs] == ["PyTorch", "Accelerate", "Transformers Trainer", "Lightning"]


def test_consequences_of_a_cause_have_no_separate_card(home, open_app):
    write(home.runs / "a", "collapsing")
    page_text = words(open_app(run="run/a"))
    assert (
        "1 error found, and 1 that follow" in page_text
        and "Follows from it: 70 steps in a row were skipped" in page_text
    )


def test_the_evidence_of_a_cause_without_a_page_is_the_affected_tensor(home, open_app):
    write(home.runs / "a", "collapsing")
    links = [link.proto for link in open_app(run="run/a").get("page_link") if link.proto.label.startswith("Open ")]
    assert [(link.label, link.page) for link in links] == [("Open embed\\.weight", "layer-detail")]
    assert "kind=weight_grad&layer=embed.weight" in links[0].query_string


def test_a_muted_finding_is_hidden_until_it_is_unmuted(home, open_app):
    write(home.runs / "a", "underflowing")
    before = {p: p.read_bytes() for p in (home.runs / "a").rglob("*") if p.is_file()}
    app = open_app(run="run/a")
    next(b for b in app.button if b.label == "Mute").click().run()
    assert not app.exception and "Nothing wrong was found" in words(app)
    assert "Muted for this run: fp16-without-scaler" in words(app)
    assert muted(home.runs / "a") == {"fp16-without-scaler"}
    assert {p: p.read_bytes() for p in (home.runs / "a").rglob("*") if p.is_file()} == before
    next(b for b in app.button if b.label.startswith("Show ")).click().run()
    assert "1 error found" in words(app) and muted(home.runs / "a") == frozenset()


def test_a_file_with_other_content_mutes_nothing(tmp_path):
    (tmp_path / ".a.muted.json").write_text("{oops")
    assert muted(tmp_path / "a") == frozenset()
    mute(tmp_path / "a", "watch-overhead")
    assert muted(tmp_path / "a") == {"watch-overhead"}


def test_a_live_run_shows_problems_as_they_occur(home, open_app):
    with live(home.runs / "a", "underflowing") as run:
        run.advance(20)
        app = open_app(run="run/a")
        assert "Training in float16 without loss scaling" in words(app)


def test_the_guide_explains_every_code_and_can_be_searched(open_app):
    app = open_app(GUIDE_PAGE)
    severities = Counter(entry.severity for entry in GUIDE.values())
    assert not app.exception and f"{severities['error'] + severities['warning']} faults" in words(app)
    assert f"{severities['info']} notes" in words(app)
    assert {e.label.split("**")[1] for e in app.expander} == set(GUIDE)
    app.text_input(key="guide.search").input("BatchNorm").run()
    assert "batchnorm-poisoned" in "".join(e.label for e in app.expander) and len(app.expander) < 5
    app.text_input(key="guide.search").input("zebra").run()
    assert "all of these words" in words(app)


def test_the_guide_shows_what_was_found_in_the_users_own_runs(home, open_app):
    write(home.runs / "mine", "underflowing")
    write(home.samples / "other", "overflowing")
    app = open_app(GUIDE_PAGE, found="yes")
    own = {finding.code for finding in diagnose(load_run(home.runs / "mine"))}
    assert not app.exception and {e.label.split("**")[1] for e in app.expander} == own
    links = [link.proto.query_string for link in app.get("page_link")]
    assert links and all("run%2Fmine" in query for query in links)
    next(t for t in app.toggle if t.key == "guide.found").set_value(False).run()
    assert {e.label.split("**")[1] for e in app.expander} == set(GUIDE) and "found" not in app.query_params


def test_the_guide_has_a_tab_per_family_until_one_searches(open_app):
    app = open_app(GUIDE_PAGE)
    assert [tab.label for tab in app.tabs] == [f"{name} ({len(entries)})" for name, entries in FAMILIES.items()]
    app.text_input(key="guide.search").input("BatchNorm").run()
    assert not app.tabs and app.expander
