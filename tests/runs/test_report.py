"""What events say about a run, and what report.json and report.html make of it."""

import json
import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.model import Event, InstalledReport
from paceline.runs.queries import engines_at_end, view_of
from paceline.runs.report import RunFacts, cell_of, render_html, report_of, spans_of, summary_of

FACTS = RunFacts(
    run_id="job-1",
    name="job",
    outcome="succeeded",
    reason="trainer-0 is done",
    started_at="2026-01-01T00:00:00Z",
    wall_s=12.5,
    cost_usd=0.0,
    engines=(),
)


def event(name: str, fields: dict[str, object], worker: str = "trainer") -> Event:
    return Event(worker_id=worker, name=name, at_unix_ms=0, fields=fields)


def published(sequence: int, **more: object) -> Event:
    fields: dict[str, object] = {
        "version_id": f"v{sequence}",
        "sequence": sequence,
        "step": sequence,
        "root_digest": f"root-{sequence}",
        "payload_format": "XOR_DELTA" if sequence else "FULL_TENSOR",
        "payload_bytes": 5 if sequence else 100,
        "full_bytes": 100,
        "changed_elements": 1,
        "total_elements": 50,
        "publish_ms": 1.5,
    }
    return event("version.published", fields | more)


def installed(worker: str, sequence: int, **more: object) -> Event:
    fields: dict[str, object] = {
        "version_id": f"v{sequence}",
        "sequence": sequence,
        "root_digest": f"root-{sequence}",
        "fetched_bytes": 5,
        "refit_ms": 20.0,
        "pause_ms": 1.0,
    }
    return event("version.installed", fields | more, worker)


def step(number: int, reward: float) -> Event:
    fields: dict[str, object] = {
        "step": number,
        "reward": reward,
        "loss": 0.1,
        "staleness": 1,
        "step_s": 2.0,
    }
    return event("train.step", fields)


def test_totals_of_a_run() -> None:
    """Rewards are means of the edges, deltas are counted against full weights, anchors apart."""
    events = [step(i, i / 10) for i in range(10)] + [published(i) for i in range(4)]
    summary = summary_of(view_of(events), FACTS)
    assert (summary["reward_first5"], summary["reward_last5"]) == (0.2, 0.7)
    assert (summary["delta_bytes"], summary["full_bytes"]) == (15, 300)
    assert summary["anchor_bytes"] == 100
    assert summary["versions_published"] == 4
    assert summary["trainer"] == {"version_id": "v3", "root_digest": "root-3"}


def test_an_engine_may_skip_versions() -> None:
    """The latest wins: what an engine passed over is skipped, not a mismatch."""
    events = [published(i) for i in range(4)] + [installed("e", 0), installed("e", 2)]
    view = view_of(events)
    span = spans_of(view)["e"]
    assert view.mismatches == 0
    words = [cell_of(state, "e", span) for state in view.states]
    assert words == ["equal", "skipped", "equal", "absent"]


def test_a_different_digest_is_a_mismatch_even_when_a_later_report_is_right() -> None:
    """An engine that ever served something else under a version's name is not forgiven."""
    wrong = installed("e", 1, root_digest="other")
    events = [published(1), wrong, installed("e", 1), installed("f", 1)]
    view = view_of(events)
    assert view.mismatches == 1
    assert cell_of(view.states[0], "e", (1, 1)) == "different"
    assert cell_of(view.states[0], "f", (1, 1)) == "equal"
    assert "other" in render_html(view, FACTS)


def test_a_version_that_nobody_published_is_a_mismatch() -> None:
    """Weights of unknown origin cannot be equal to anything."""
    view = view_of([published(0), installed("e", 7)])
    assert view.mismatches == 1
    assert "nobody published" in render_html(view, FACTS)


def test_an_anchor_is_the_same_state() -> None:
    """A full version beside a delta is one state, counted once, and must have its digest."""
    anchor = published(1, version_id="a1", payload_format="FULL_TENSOR", payload_bytes=100)
    view = view_of([published(0), published(1), anchor, installed("e", 1, version_id="a1")])
    assert (len(view.states), view.mismatches, view.anchor_bytes) == (2, 0, 200)
    other = view_of([published(1), published(1, version_id="a1", root_digest="other")])
    assert other.mismatches == 1


def test_reports_of_live_engines_say_what_they_end_on() -> None:
    """The engines' own reports count; without any, the last install on record."""
    view = view_of([published(0), published(1), installed("e", 0), installed("e", 1)])
    assert [end.version_id for end in engines_at_end(view, ())] == ["v1"]
    report = InstalledReport(
        worker_id="f",
        model_name="m",
        endpoint="",
        version_id="v0",
        sequence=0,
        root_digest="root-0",
        state="ready",
        installed_at_unix_ms=0,
        fetched_bytes=0,
        refit_ms=0.0,
        pause_ms=0.0,
    )
    assert [end.worker_id for end in engines_at_end(view, [report])] == ["f"]


def test_an_empty_run_has_a_report() -> None:
    """A run that failed before its first step is reported like any other."""
    view = view_of(())
    assert summary_of(view, FACTS)["reward_first5"] is None
    assert "nothing was recorded" in render_html(view, FACTS)


class Page(HTMLParser):
    """Counts what a page opens and closes, and keeps what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Leave ``open`` as it is: ``<line/>`` closes itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = [
    "step",
    "reward",
    "sequence",
    "version_id",
    "root_digest",
    "payload_bytes",
    "full_bytes",
    "refit_ms",
    "total_elements",
    "changed_elements",
    "payload_format",
]
VALUES: st.SearchStrategy[object] = NUMBERS | st.lists(NUMBERS, max_size=2)
HOSTILE = st.builds(
    event,
    st.sampled_from(["train.step", "version.published", "version.installed", "other"]),
    st.dictionaries(st.sampled_from(KEYS), VALUES),
    st.text(max_size=6),
)
SANE = st.one_of(
    st.builds(published, st.integers(0, 6)),
    st.builds(installed, st.sampled_from(["e", "<b>"]), st.integers(0, 6)),
    st.builds(step, st.integers(0, 9), st.floats(-1e6, 1e6)),
)


@given(st.lists(HOSTILE | SANE, max_size=15))
def test_no_event_breaks_the_report(events: list[Event]) -> None:
    """Whatever workers send, both reports are whole: valid JSON, balanced HTML, no load, no NaN."""
    view = view_of(events)
    text = json.dumps(report_of(view, FACTS), allow_nan=False)
    assert json.loads(text)["run_id"] == "job-1"
    page = Page()
    page.feed(render_html(view, FACTS))
    assert page.open == []
    assert page.loads == []
    assert "<b>=" not in render_html(view, FACTS)


@given(st.lists(SANE, max_size=30))
def test_order_and_repetition_do_not_change_what_is_equal(events: list[Event]) -> None:
    """Each state counts once per engine: telling everything twice changes no total."""
    once, twice = view_of(events), view_of([*events, *events])
    assert summary_of(once, FACTS)["mismatches"] == summary_of(twice, FACTS)["mismatches"]
    assert once.delta_bytes == twice.delta_bytes
    assert len(once.states) == len({v.sequence for v in once.versions})


def test_the_page_is_self_contained() -> None:
    """Nothing is fetched: no script, no link, no url, no import."""
    page = render_html(view_of([published(0), step(0, 1.0)]), FACTS)
    assert not re.search(r"<script|<link|url\(|@import|https?://", page)


def test_every_transfer_has_a_line() -> None:
    """Over what, from whom, how fast, in which stages, what went wrong; no foreign HTML."""
    told: list[object] = [
        {
            "over": "nixl",
            "source": "job-1-trainer",
            "bytes": 3_000_000,
            "ms": 1500.0,
            "stages_ms": {"move": 1250.0, "prove": 250.0},
            "retries": 4,
            "problem": "<b>cut</b>",
        },
        {"over": "http", "source": 7, "bytes": -1, "ms": "soon", "stages_ms": {"move": None}},
        "no transfer",
    ]
    view = view_of([published(0), installed("g0", 0, transfers=told)])
    html = render_html(view, FACTS)
    section = html.partition("<h2>Transfers</h2>")[2].partition("</section>")[0]
    first, second = section.partition("<tbody>")[2].split("</tr>")[:2]
    for text in ("nixl", "trainer", "1.50 s", "move 1.25 s, prove 0.25 s", "<td>4</td>"):
        assert text in first
    assert "&lt;b&gt;cut&lt;/b&gt;" in first
    assert "<td>http</td><td></td>" in second
    report: Any = report_of(view, FACTS)
    found = report["versions"][0]["installs"][0]["transfers"]
    assert [each["bytes_per_s"] for each in found] == [2_000_000.0, 0.0]
    assert "Transfers" not in render_html(view_of([published(0), installed("g0", 0)]), FACTS)
