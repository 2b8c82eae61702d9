"""Table 2 as one HTML file that needs no network: tables, figures, and links to the records."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from macformer.harness import record as records
from macformer.harness.progress import duration, mebibytes
from macformer.harness.record import Record
from macformer.report import table as texts
from macformer.report.cells import Table
from macformer.report.figures import Drawn

MARKDOWN = re.compile(r"`(.+?)`|\*\*(.+?)\*\*|\*(.+?)\*")
TAGS = ("code", "strong", "em")


def render(
    tables: Sequence[Table],
    figures: Sequence[Sequence[Drawn]],
    lengths: Drawn | None,
    found: Sequence[Record],
    problems: Sequence[str],
) -> str:
    """`figures`: those of each table. The page stands beside runs/ and figures/. Texts from records are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"marked": _marked, "uri": _uri, "duration": duration, "mebibytes": mebibytes}
    used = {run.run_id: number for number, table in enumerate(tables, 1) for c in table.columns for run in c.runs}
    ordered = sorted(found, key=lambda run: (run.task, run.model, run.run_id))
    return environment.get_template("page.html").render(
        texts=texts,
        tables=list(zip(map(_heading, tables), tables, figures, strict=True)),
        lengths=lengths,
        records=[(run, records.path("", run.config, run.run_id).as_posix(), used.get(run.run_id)) for run in ordered],
        problems=problems,
    )


def _heading(table: Table) -> str:
    """The title without the conditions, which are a list of their own."""
    return texts.title(table).removesuffix(f": {'; '.join(table.conditions)}")


def _marked(text: str) -> Markup:
    """The little Markdown that the table's texts have."""

    def tagged(match: re.Match[str]) -> str:
        tag = TAGS[(match.lastindex or 1) - 1]
        return f"<{tag}>{match[match.lastindex or 1]}</{tag}>"

    return Markup(MARKDOWN.sub(tagged, str(escape(text))))


def _uri(svg: bytes) -> str:
    """In an <img>, so that the ids of several SVGs do not meet in one document."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
