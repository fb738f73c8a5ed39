"""The end of a run as one JSON object and one self-contained page. Pure: values in, text out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from paceline.rental.budget import Budget
from paceline.runs.charts import Series, bar_chart, bytes_text, line_chart
from paceline.runs.live import slot_json
from paceline.runs.plan import SlotView
from paceline.runs.queries import EngineEnd, Installed, RunView, Transfer, WeightState, short_name

SCHEMA = "paceline.report.v1"
SMOOTH_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the operator's side knows of a run that the events do not say."""

    run_id: str
    name: str
    outcome: str
    reason: str
    started_at: str
    """ISO 8601, UTC."""
    wall_s: float
    cost_usd: float
    engines: tuple[EngineEnd, ...]
    slots: tuple[SlotView, ...] = ()
    budget: Budget | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """The newest checkpoint that was kept of each slot while the run lasted."""


def summary_of(view: RunView, facts: RunFacts) -> dict[str, object]:
    """Return the object that ``--json`` prints and that ``report.json`` starts with."""
    last = view.states[-1].version if view.states else None
    return {
        "run_id": facts.run_id,
        "name": facts.name,
        "outcome": facts.outcome,
        "reason": facts.reason,
        "versions_published": len(view.states),
        "trainer": {
            "version_id": last.version_id if last else None,
            "root_digest": last.root_digest if last else None,
        },
        "engines": [
            {"worker_id": e.worker_id, "version_id": e.version_id, "root_digest": e.root_digest}
            for e in facts.engines
        ],
        "reward_first5": view.reward_first(),
        "reward_last5": view.reward_last(),
        "delta_bytes": view.delta_bytes,
        "full_bytes": view.full_bytes,
        "anchor_bytes": view.anchor_bytes,
        "wall_s": round(facts.wall_s, 3),
        "cost_usd": round(facts.cost_usd, 6),
        "mismatches": view.mismatches,
        "malformed_events": view.malformed,
        "refused": view.refused,
        "budget_usd": None
        if facts.budget is None
        else {"soft": facts.budget.soft_usd, "hard": facts.budget.hard_usd},
        "roles": [slot_json(slot, facts.checkpoints) for slot in facts.slots],
    }


def report_of(view: RunView, facts: RunFacts) -> dict[str, object]:
    """Return all of ``report.json``: the summary, every step and every version."""
    return {
        "schema": SCHEMA,
        **summary_of(view, facts),
        "started_at": facts.started_at,
        "steps": [
            {
                "step": s.step,
                "reward": s.reward,
                "loss": s.loss,
                "staleness": s.staleness,
                "step_s": s.step_s,
            }
            for s in view.steps
        ],
        "versions": [_state_json(state, view.engines) for state in view.states],
        "unknown_installs": [_install_json(install) for install in view.unknown],
    }


def cell_of(state: WeightState, engine: str, span: tuple[int, int] | None) -> str:
    """Say what one engine did with one state: equal, different, skipped, or absent.

    Args:
        state: the row.
        engine: the column.
        span: the first and last sequence that the engine installed; outside it was not there.
    """
    install = state.installs.get(engine)
    if install is not None:
        return "equal" if install.is_equal else "different"
    here = span is not None and span[0] < state.version.sequence < span[1]
    return "skipped" if here else "absent"


def spans_of(view: RunView) -> dict[str, tuple[int, int]]:
    """Return for each engine the first and last sequence that it installed."""
    found: dict[str, list[int]] = {}
    for state in view.states:
        for engine in state.installs:
            found.setdefault(engine, []).append(state.version.sequence)
    return {engine: (sequences[0], sequences[-1]) for engine, sequences in found.items()}


def render_html(view: RunView, facts: RunFacts) -> str:
    """Return the report as a page that loads nothing."""
    sections = [
        _section("Reward", _reward_chart(view)),
        _section("Bytes per version, against full weights", _bytes_chart(view)),
        _section("Refit time per engine", _refit_chart(view, facts.run_id)),
        _section(
            "Root digest of every version, at the trainer and at each engine",
            _table(view, facts.run_id),
        ),
        *_transfers(view, facts.run_id),
        *([_section("Roles", _roles_table(facts))] if facts.slots else []),
    ]
    title = escape(facts.run_id)
    reason = escape(facts.reason)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_CSS}</style></head><body><main><header><h1>{title}</h1>"
        f'<p><b class="badge {escape(facts.outcome)}">{escape(facts.outcome)}</b> {reason}; '
        f"job {escape(facts.name)}, started {escape(facts.started_at)}</p></header>"
        f"{_tiles(view, facts)}{''.join(sections)}</main></body></html>\n"
    )


def _state_json(state: WeightState, engines: Sequence[str]) -> dict[str, object]:
    version = state.version
    return {
        "sequence": version.sequence,
        "version_id": version.version_id,
        "step": version.step,
        "root_digest": version.root_digest,
        "payload_format": version.payload_format,
        "payload_bytes": version.payload_bytes,
        "full_bytes": version.full_bytes,
        "changed_elements": version.changed_elements,
        "total_elements": version.total_elements,
        "publish_ms": version.publish_ms,
        "anchors": [anchor.version_id for anchor in state.anchors],
        "is_consistent": state.is_consistent,
        "installs": [_install_json(state.installs[e]) for e in engines if e in state.installs],
    }


def _install_json(install: Installed) -> dict[str, object]:
    return {
        "worker_id": install.worker_id,
        "version_id": install.version_id,
        "sequence": install.sequence,
        "root_digest": install.root_digest,
        "is_equal": install.is_equal,
        "fetched_bytes": install.fetched_bytes,
        "fetched_over": install.fetched_over,
        "fetch_ms": install.fetch_ms,
        "fetch_retries": install.fetch_retries,
        "refit_ms": install.refit_ms,
        "pause_ms": install.pause_ms,
        "transfers": [
            {
                "over": each.over,
                "source": each.source,
                "bytes": each.num_bytes,
                "ms": each.ms,
                "stages_ms": dict(each.stages_ms),
                "bytes_per_s": each.bytes_per_s,
                "retries": each.retries,
                "problem": each.problem,
            }
            for each in install.transfers
        ],
    }


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _tiles(view: RunView, facts: RunFacts) -> str:
    share = f" ({view.delta_bytes / view.full_bytes:.2%} of full)" if view.full_bytes else ""
    rewards = (view.reward_first(), view.reward_last())
    reward = " → ".join("-" if mean is None else f"{mean:.3f}" for mean in rewards)
    tiles = {
        "versions published": str(len(view.states)),
        "digest mismatches": str(view.mismatches),
        "mean reward, first 5 → last 5 steps": reward,
        "moved as deltas" + share: bytes_text(view.delta_bytes),
        "wall time": f"{facts.wall_s:.1f} s",
        "cost": _cost(facts),
        "restarts": str(sum(slot.restarts for slot in facts.slots)),
        "machines lost": str(sum(slot.num_lost for slot in facts.slots)),
    }
    return (
        '<div class="tiles">'
        + "".join(
            f"<div{' class=bad' if name == 'digest mismatches' and view.mismatches else ''}>"
            f"<b>{escape(value)}</b><span>{escape(name)}</span></div>"
            for name, value in tiles.items()
        )
        + "</div>"
    )


def _cost(facts: RunFacts) -> str:
    of = "" if facts.budget is None else f" of ${facts.budget.hard_usd:.2f}"
    return f"${facts.cost_usd:.2f}{of}"


def _roles_table(facts: RunFacts) -> str:
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape('-' if v is None else str(v))}</td>" for v in row) + "</tr>"
        for row in (
            (
                f"{found['role']}-{found['index']}",
                found["phase"],
                found["restarts"],
                found["machines_lost"],
                found["last_cause"],
                found["checkpoint"],
            )
            for found in (slot_json(slot, facts.checkpoints) for slot in facts.slots)
        )
    )
    return (
        '<div class="scroll"><table><thead><tr><th>role</th><th>at the end</th><th>restarts</th>'
        "<th>machines lost</th><th>the last one</th><th>newest checkpoint</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _reward_chart(view: RunView) -> str:
    points = [(float(s.step), s.reward) for s in view.steps if s.reward is not None]
    smooth = []
    for index, (step, _) in enumerate(points):
        window = [reward for _, reward in points[max(0, index - SMOOTH_STEPS + 1) : index + 1]]
        smooth.append((step, sum(window) / len(window)))
    lines = [
        Series(name="mean reward of the step", points=tuple(points), colour=0, is_faint=True),
        Series(name=f"mean of the last {SMOOTH_STEPS} steps", points=tuple(smooth), colour=0),
    ]
    return line_chart(lines, label="Reward", x_label="step")


def _bytes_chart(view: RunView) -> str:
    versions = [state.version for state in view.states]
    bars = [(float(v.sequence), float(v.payload_bytes)) for v in versions]
    full = tuple((float(v.sequence), float(v.full_bytes)) for v in versions)
    reference = Series(name="full weights", points=full, colour=1)
    return bar_chart(
        bars, reference, label="bytes of the version", x_label="version (sequence)", unit="B"
    )


def _refit_chart(view: RunView, run_id: str) -> str:
    lines = [
        Series(
            name=short_name(engine, run_id),
            points=tuple(
                (float(state.version.sequence), state.installs[engine].refit_ms)
                for state in view.states
                if engine in state.installs
            ),
            colour=number,
        )
        for number, engine in enumerate(view.engines)
    ]
    drawn = [line for line in lines if line.points]
    return line_chart(drawn, label="Refit time", x_label="version (sequence)", unit="ms")


def _transfers(view: RunView, run_id: str) -> Sequence[str]:
    """Return the section with a line per transfer: how bytes came; nothing if nobody said."""
    rows = [
        _transfer_row(each, item, run_id)
        for state in view.states
        for item in state.installs.values()
        for each in item.transfers
    ]
    if not rows:
        return ()
    table = (
        '<div class="scroll"><table><thead><tr><th>#</th><th>engine</th><th>over</th>'
        "<th>source</th><th>bytes</th><th>in</th><th>rate</th><th>stages</th><th>retries</th>"
        f"<th>problem</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    return (_section("Transfers", table),)


def _transfer_row(transfer: Transfer, install: Installed, run_id: str) -> str:
    stages = ", ".join(f"{name} {ms / 1000:.2f} s" for name, ms in transfer.stages_ms.items())
    cells = (
        str(install.sequence),
        short_name(install.worker_id, run_id),
        transfer.over,
        short_name(transfer.source, run_id),
        bytes_text(transfer.num_bytes),
        f"{transfer.ms / 1000:.2f} s",
        f"{bytes_text(int(transfer.bytes_per_s))}/s",
        stages or "-",
        str(transfer.retries),
        transfer.problem or "-",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _table(view: RunView, run_id: str) -> str:
    if not view.states:
        return '<p class="empty">No version was published.</p>'
    spans = spans_of(view)
    head = "".join(
        f'<th title="{escape(engine)}">{escape(short_name(engine, run_id))}</th>'
        for engine in view.engines
    )
    rows = "".join(_row(state, view.engines, spans) for state in view.states)
    unknown = "".join(
        f'<p class="different">{escape(i.worker_id)} installed {escape(i.version_id)} '
        f"(sequence {i.sequence}), which nobody published.</p>"
        for i in view.unknown
    )
    return (
        '<div class="scroll"><table><thead><tr><th>#</th><th>step</th><th>payload</th>'
        f"<th>bytes</th><th>of full</th><th>changed</th><th>trainer</th>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{unknown}"
    )


def _row(state: WeightState, engines: Sequence[str], spans: Mapping[str, tuple[int, int]]) -> str:
    version = state.version
    root = escape(version.root_digest)
    differs = "" if state.is_consistent else ' class="different"'
    cells = "".join(_cell(state, engine, spans.get(engine)) for engine in engines)
    return (
        f"<tr><td>{version.sequence}</td><td>{version.step}</td>"
        f"<td>{escape(version.payload_format)}{' + anchor' * bool(state.anchors)}</td>"
        f"<td>{bytes_text(version.payload_bytes)}</td>"
        f"<td>{_share(version.payload_bytes, version.full_bytes)}</td>"
        f"<td>{_share(version.changed_elements, version.total_elements)}</td>"
        f'<td{differs}><code title="{root}">{root[:12]}</code></td>{cells}</tr>'
    )


def _cell(state: WeightState, engine: str, span: tuple[int, int] | None) -> str:
    word = cell_of(state, engine, span)
    if word in {"skipped", "absent"}:
        return f'<td class="{word}">{"skipped" if word == "skipped" else ""}</td>'
    root = escape(state.installs[engine].root_digest)
    mark = "=" if word == "equal" else "≠"
    return f'<td class="{word}">{mark} <code title="{root}">{root[:12]}</code></td>'


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


_CSS = """
:root{--bg:#fbfbfa;--fg:#1d1f23;--dim:#6a6f78;--card:#fff;--edge:#e3e4e6;--ok:#1a7f4b;--bad:#c0362c;
--s0:#2f6fde;--s1:#d97b1c;--s2:#1a9a6c;--s3:#a24bc4;--s4:#b8425f;--s5:#5d7285}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e7e8ea;--dim:#9aa0a8;--card:#1d2024;
--edge:#33373d;--ok:#4cc38a;--bad:#ff7a6e;--s0:#74a5ff;--s1:#f3a857;--s2:#4cc9a0;--s3:#cf8cec;
--s4:#f08aa4;--s5:#9fb3c4}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}main{max-width:980px;margin:0 auto;padding:28px 16px}
h1{font-size:22px;margin:0}h2{font-size:15px;margin:0 0 12px}
header p{color:var(--dim);margin:6px 0 20px}
section,.tiles div{background:var(--card);border:1px solid var(--edge);border-radius:10px}
section{padding:16px;margin:16px 0}.tiles{display:grid;gap:12px;
grid-template-columns:repeat(auto-fit,minmax(140px,1fr))}.tiles div{padding:12px 14px}
.tiles b{display:block;font-size:16px;
white-space:nowrap}.tiles span{color:var(--dim);font-size:12px}
.tiles .bad b{color:var(--bad)}.badge{color:var(--bad)}.badge.succeeded{color:var(--ok)}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:11px}
.grid{stroke:var(--edge)}polyline{fill:none;stroke-width:2;stroke:var(--c)}
circle,rect{fill:var(--c)}.faint{opacity:.4}.bar{opacity:.85}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}
.s5{--c:var(--s5)}.legend{margin:8px 0 0;color:var(--dim);font-size:12px}
.legend span{margin-right:16px}.legend i{display:inline-block;width:14px;height:3px;
background:var(--c);margin-right:6px;vertical-align:middle}.empty{color:var(--dim)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px;
font-variant-numeric:tabular-nums}th,td{text-align:left;padding:4px 10px 4px 0;white-space:nowrap;
border-bottom:1px solid var(--edge)}th{color:var(--dim);font-weight:500}
.equal{color:var(--ok)}.different{color:var(--bad);font-weight:600}.skipped{color:var(--dim)}
"""
